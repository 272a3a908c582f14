"""Weights of models with experts, in both of Hugging Face's formats, against transformers itself."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from meshtrain.checkpoint import load_weights as load_checkpoint
from meshtrain.cli import export as checkpoint_export
from meshtrain.cli import main as cli
from meshtrain.config.locate import model_file
from meshtrain.errors import InputError
from meshtrain.huggingface import safetensors as weights
from meshtrain.huggingface.load import load_weights, named_tensors, open_folder
from meshtrain.modeling.build import build_model, check_start
from meshtrain.run.results import write_export
from tests.checkpoint.by_hand import write_checkpoint
from tests.huggingface.models import JOB, MESH, run_config, stored, transformers_model, write

FORMATS = ("original", "fused")


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


def with_tensors(folder: Path, out: Path, take: str = "^$", **tensors: Tensor) -> Path:
    """The weights without those that match, and with others."""
    out.mkdir()
    (out / weights.CONFIG).write_bytes((folder / weights.CONFIG).read_bytes())
    rest = {name: value for name, value in stored(folder).items() if not re.search(take, name)}
    save_file({**rest, **tensors}, out / weights.SINGLE)
    return out


def refusal(folder: Path) -> str:
    """Why its weights are refused; no value of the model has changed."""
    config = run_config(folder)
    model = model_file("glm4_moe").Model(model_file("glm4_moe").Config(**config.model.keys))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError) as caught, open_folder(folder) as source:
        load_weights(model, source)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(caught.value)


EXPERTS = "model.layers.1.mlp.experts"


def fused(folder: Path) -> dict[str, Tensor]:
    tensors = stored(folder)
    rows = [torch.cat([tensors[f"{EXPERTS}.{i}.{kind}_proj.weight"] for kind in ("gate", "up")]) for i in range(8)]
    return {f"{EXPERTS}.gate_up_proj": torch.stack(rows)}


def test_each_tensor_may_have_either_format(folder: Path, tmp_path: Path) -> None:
    mixed = with_tensors(folder, tmp_path / "mixed", r"layers\.1\..*\.\d+\.(gate|up)_proj", **fused(folder))
    expected = own_model(folder).state_dict()
    for name, value in own_model(mixed).state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("take", "add", "says"),
    [
        (r"experts\.(5|7)\.up_proj", {}, "missing model.layers.{1-2}.mlp.experts.{5,7}.up_proj.weight"),
        (
            r"layers\.1\..*experts\.\d+\.(gate|up)",
            {},
            "missing model.layers.1.mlp.experts.{0-7}.gate_proj.weight, model.layers.1.mlp.experts.{0-7}.up_pr",
        ),
        (
            "^$",
            {f"layers.{n}.mlp.experts.{i}.down_proj": (48, 21) for n in (1, 2) for i in (0, 3)},
            "other shapes: model.layers.{1-2}.mlp.experts.{0,3}.down_proj.weight (there [48, 21], the model's [48, 20]",
        ),
        (
            "^$",
            {f"layers.{n}.mlp.experts.8.up_proj": (20, 48) for n in (1, 2)},
            "the model has no model.layers.{1-2}.mlp.experts.8.up_proj.weight",
        ),
        # A layer that the model ignores may be there, and is no excuse for others.
        (
            "^$",
            {f"layers.{n}.mlp.gate": (8, 48) for n in (46, 47)},
            "the model has no model.layers.47.mlp.gate.weight",
        ),
    ],
)
def test_what_is_wrong_with_experts_is_named_once_for_all(
    take: str, add: dict[str, tuple[int, ...]], says: str, folder: Path, tmp_path: Path
) -> None:
    tensors = {f"model.{name}.weight": torch.ones(shape) for name, shape in add.items()}
    assert says in refusal(with_tensors(folder, tmp_path / "changed", take, **tensors))


def test_an_expert_in_both_formats_is_refused(folder: Path, tmp_path: Path) -> None:
    """Which of them would count?"""
    message = refusal(with_tensors(folder, tmp_path / "twice", **fused(folder)))
    assert "the model has no model.layers.1.mlp.experts.{0-7}.gate_proj.weight, model.layers.1.mlp.exp" in message


def test_ignored_layers_are_passed_over_with_a_line(folder: Path, tmp_path: Path) -> None:
    extra = {f"model.layers.46.{name}": torch.ones(3) for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")}
    more, messages = with_tensors(folder, tmp_path / "more", **extra), list[str]()
    check_start(run_config(more), say=messages.append)
    assert messages == [f"{more}: 2 tensors of model.layers.46.* not read: the model has none of it"]
    check_start(run_config(folder), say=messages.append)
    assert len(messages) == 1


def test_the_bias_that_corrects_the_router_is_not_rounded(folder: Path, tmp_path: Path) -> None:
    model = own_model(folder)
    write(model, tmp_path / "out", run_config(folder), torch.bfloat16)
    for name, value in stored(tmp_path / "out").items():
        bias = name.endswith("e_score_correction_bias")
        assert value.dtype == (torch.float32 if bias else torch.bfloat16)
        assert not bias or torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_checkpoint_keeps_fused_tensors_and_becomes_the_same_files(
    file_format: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever layout wrote it; a tensor is read in blocks of a few rows, also inside of an expert."""
    monkeypatch.setattr(checkpoint_export, "BLOCK", 4000)
    config = run_config(folder, f"train.export_format={file_format}", "train.precision=bfloat16")
    model = own_model(folder)
    checkpoint = write_checkpoint(
        tmp_path / "checkpoints",
        {f"model.{names[0]}": tensor.detach() for names, tensor in named_tensors(model).items()},
        sizes={"dp_shard": 3, "tp": 2},
        cuts=lambda name, tensor: (("tp", tensor.dim() - 1), ("dp_shard", 0)),
        config={"model": {"name": "glm4_moe", **config.model.keys}, "train": {"precision": "bfloat16"}},
    )
    assert cli.main(["export", str(checkpoint), str(tmp_path / "ours"), "--format", file_format]) == 0
    write_export(config, JOB, MESH, model, str(tmp_path / "run"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()} == files
    assert any("experts.7.up_proj" in name for name in stored(tmp_path / "ours")) == (file_format == "original")

    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.gate.balance.loads").fill_(3)
    other = model_file("glm4_moe").Model(model.config)
    load_checkpoint(checkpoint, other)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value) != (name == "model.layers.1.mlp.gate.balance.loads"), name
