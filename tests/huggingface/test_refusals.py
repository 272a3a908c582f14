"""Weights from which no run starts are refused with the place and the reason: the rows of
refusals.yaml."""

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meshtrain.errors import InputError
from meshtrain.huggingface.load import check_weights, load_weights, open_folder
from meshtrain.huggingface.safetensors import SINGLE
from meshtrain.job.locate import model_file
from tests.huggingface.models import MODELS, changed, run_config, stored, table, transformers_model
from tests.refusing import check_refusals, damage

TABLE: dict[str, list[dict[str, Any]]] = table("refusals")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good")
    for name in ("plain", "glm"):
        transformers_model(name).save_pretrained(path / name)
    return path


def damage_weights(folder: Path, row: dict[str, Any]) -> None:
    file = folder / SINGLE
    damage(changed(folder, **row.get("keys", {})), row)
    if "header" in row:
        header = json.dumps(row["header"]).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(row["data"]))
    if "take" in row or "add" in row:
        tensors = {
            name: value
            for name, value in stored(folder).items()
            if not re.search(row.get("take", "^$"), name)
        }
        dtype = getattr(torch, row.get("type", "float32"))
        save_file(
            tensors
            | {name: torch.ones(shape, dtype=dtype) for name, shape in row.get("add", {}).items()},
            file,
        )


@pytest.mark.parametrize("section", TABLE)
def test_each_row_is_refused_with_its_reason(section: str, good: Path, tmp_path: Path) -> None:
    def read(row: dict[str, Any], above: Path) -> None:
        kind, folder = row.get("model", "plain"), above / "in"
        shutil.copytree(good / kind, folder)
        damage_weights(folder, row)
        overrides = [override.replace("DIR", str(folder)) for override in row.get("run", ())]
        config = run_config(folder, *overrides, model=MODELS[kind]["model_type"], for_training=True)
        module = model_file(config.model.name)
        with open_folder(folder) as source:
            model = module.Model(module.Config(**config.model.keys))
            before = {name: value.clone() for name, value in model.state_dict().items()}
            with pytest.raises(InputError):
                load_weights(model, source)
            assert all(
                torch.equal(value, before[name]) for name, value in model.state_dict().items()
            )
            check_weights(model, source, config.model.keys)

    check_refusals(TABLE[section], tmp_path, read)
