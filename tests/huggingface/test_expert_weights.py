"""Weights of models with experts, against transformers itself: read in both of Hugging Face's
formats, and written as published."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from meshtrain.checkpoint import load_weights as load_checkpoint
from meshtrain.cli import export as checkpoint_export
from meshtrain.cli import main as cli
from meshtrain.huggingface.load import named_tensors
from meshtrain.huggingface.safetensors import SINGLE
from meshtrain.job.locate import model_file
from meshtrain.modeling.build import build_model
from meshtrain.run.results import write_export
from tests.checkpoint.by_hand import write_checkpoint
from tests.huggingface.models import JOB, MESH, run_config, stored, transformers_model, write


def own_model(folder: Path) -> nn.Module:
    torch.use_deterministic_algorithms(True)  # memory without values holds NaN
    try:
        return build_model(run_config(folder), MESH, torch.device("cpu")).eval()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GLM as transformers saves it: layers 1 and 2 have 8 experts."""
    path = tmp_path_factory.mktemp("glm") / "in"
    transformers_model("glm").save_pretrained(path)
    return path


def test_each_tensor_may_have_either_format(folder: Path, tmp_path: Path) -> None:
    tensors, experts = stored(folder), "model.layers.1.mlp.experts"
    rows = [
        torch.cat([tensors.pop(f"{experts}.{i}.{kind}_proj.weight") for kind in ("gate", "up")])
        for i in range(8)
    ]
    shutil.copytree(folder, tmp_path / "mixed")
    save_file(tensors | {f"{experts}.gate_up_proj": torch.stack(rows)}, tmp_path / "mixed" / SINGLE)
    expected = own_model(folder).state_dict()
    for name, value in own_model(tmp_path / "mixed").state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_the_bias_that_corrects_the_router_is_not_rounded(folder: Path, tmp_path: Path) -> None:
    model = own_model(folder)
    write(model, tmp_path / "out", run_config(folder), torch.bfloat16)
    for name, value in stored(tmp_path / "out").items():
        bias = name.endswith("e_score_correction_bias")
        assert value.dtype == (torch.float32 if bias else torch.bfloat16)
        assert not bias or torch.equal(value, model.state_dict()[name])


def test_a_checkpoint_keeps_fused_tensors_and_becomes_the_same_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever layout wrote it; a tensor is read in blocks of a few rows, also inside of an
    expert."""
    monkeypatch.setattr(checkpoint_export, "BLOCK", 4000)
    config = run_config(folder, "train.precision=bfloat16")
    model = own_model(folder)
    checkpoint = write_checkpoint(
        tmp_path / "checkpoints",
        {f"model.{names[0]}": tensor.detach() for names, tensor in named_tensors(model).items()},
        sizes={"dp_shard": 3, "tp": 2},
        cuts=lambda name, tensor: (("tp", tensor.dim() - 1), ("dp_shard", 0)),
        config=config.plain(),
    )
    assert cli.main(["export", str(checkpoint), str(tmp_path / "ours")]) == 0
    write_export(config, JOB, MESH, model, str(tmp_path / "run"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()} == files
    assert any("experts.7.up_proj" in name for name in stored(tmp_path / "ours"))

    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.gate.balance.loads").fill_(3)
    other = model_file("glm4_moe").Model(model.config)
    load_checkpoint(checkpoint, other)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value) != (
            name == "model.layers.1.mlp.gate.balance.loads"
        ), name
