"""Each config of the repository opens its kind of data, and its model takes a batch of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from meshtrain.config import Config
from meshtrain.data import Document, open_data, train_batches, write
from meshtrain.modeling.build import outputs, plain_model
from tests.data.test_images import write_folder, write_mnist
from tests.data.test_megatron import write_pair

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def make_nothing(folder: Path) -> list[str]:
    return []


def make_text(folder: Path) -> list[str]:
    (folder / "a.txt").write_text("some text " * 300)
    return [f"data.path={folder / 'a.txt'}"]


def make_jsonl(folder: Path) -> list[str]:
    rows = [{"prompt": f"{i} + {i} = ", "completion": str(2 * i)} for i in range(2000)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"data.path={folder / 'a.jsonl'}"]


def make_tokens(folder: Path) -> list[str]:
    documents = [Document(np.arange(1500) % 32000) for _ in range(4)]
    write(folder / "tokens", documents, vocab_size=32000, tokenizer="mine", source="mine")
    return [f"data.path={folder / 'tokens'}"]


def make_megatron(folder: Path) -> list[str]:
    return [f"data.path={write_pair(folder / 'corpus', [list(range(1500))] * 4)}"]


def make_mnist(folder: Path) -> list[str]:
    write_mnist(folder, 64, size=28)
    write_mnist(folder, 16, stem="t10k", size=28)
    return [f"data.path={folder}", f"data.validation={folder}"]


def make_images(folder: Path) -> list[str]:
    return [f"data.path={write_folder(folder / 'images', {'cat': 8, 'dog': 8})}"]


def make_digits(folder: Path) -> list[str]:
    pytest.importorskip("sklearn")
    return []


MAKERS = {
    "quickstart": make_nothing,
    "text": make_text,
    "jsonl": make_jsonl,
    "tokens": make_tokens,
    "megatron": make_megatron,
    "digits": make_digits,
    "mnist": make_mnist,
    "images": make_images,
    "own-dataset": make_nothing,
    "long-context": make_nothing,
    "moe": make_nothing,
}


def test_every_config_is_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(MAKERS)


@pytest.mark.parametrize("name", MAKERS)
def test_a_config_opens_its_data_and_its_model_takes_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    path = CONFIGS / f"{name}.yaml"
    assert path.read_text().startswith("# ")  # when to use it
    given = [*MAKERS[name](tmp_path), f"data.cache={tmp_path / 'cache'}"]
    if name in ("tokens", "megatron"):  # a smaller model of the same kind
        given += ["model.hidden_size=96", "model.num_hidden_layers=1", "model.intermediate_size=64"]
    config = Config.load(path, given, world_size=1, for_training=True)
    data = open_data(config.data, n_outputs=outputs(config), seed=0, say=print)
    assert data.validation is not None
    keys = {"seed": 0, "first_step": 0, "steps": 1, "global_size": 2, "micro_size": 2, "rank": 0, "ranks": 1}
    [[batch]] = train_batches(data.train, **keys)
    with torch.no_grad():
        logits = plain_model(config).to_empty(device="cpu")(*batch.inputs)
    assert logits.shape == (*batch.targets.shape, outputs(config))
