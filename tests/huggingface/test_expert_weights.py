"""Weights of models with experts, in both of Hugging Face's formats, against transformers itself."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from meshtrain.checkpoint import load_weights as load_checkpoint
from meshtrain.cli import export as checkpoint_export
from meshtrain.cli import main as cli
from meshtrain.config.locate import model_file
from meshtrain.errors import InputError
from meshtrain.huggingface import safetensors as weights
from meshtrain.huggingface.load import load_weights, named_tensors, open_folder
from meshtrain.job.environment import read_environment
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.modeling.build import build_model, check_start
from meshtrain.run.results import write_export
from meshtrain.run.weights_export import export
from tests.checkpoint.by_hand import write_checkpoint
from tests.huggingface.test_moe_models import logits, run_config, transformers_model

MESH = build_mesh(Layout({}), "cpu")  # of a world of one
JOB = Job(read_environment({}), torch.device("cpu"), None)
FORMATS = ("original", "fused")


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def own_model(folder: Path, name: str) -> nn.Module:
    torch.use_deterministic_algorithms(True)  # memory without values holds NaN
    try:
        return build_model(run_config(folder, name), MESH, torch.device("cpu")).eval()
    finally:
        torch.use_deterministic_algorithms(False)


def write(model: nn.Module, folder: Path, **options: Any) -> None:
    described = model_file(options.pop("name")).to_hugging_face(model.config)
    export(model, folder, JOB, MESH, config=described, **{"dtype": torch.float32, **options})


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "glm"])
def test_what_transformers_saves_is_read_and_what_is_exported_it_loads(
    name: str, file_format: str, tmp_path: Path
) -> None:
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path / "there", save_original_format=file_format == "original", max_shard_size="40KB")
    model = own_model(tmp_path / "there", name)
    assert (logits(model) - logits(theirs)).abs().max() <= 1e-5
    assert all(torch.all(value == 0) for key, value in model.state_dict().items() if key.endswith(".loads"))

    kind = run_config(tmp_path / "there", name).model.name
    write(model, tmp_path / "out", name=kind, file_format=file_format, file_bytes=40_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    ours, wanted = stored(tmp_path / "out"), stored(tmp_path / "there")
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[key]) for key, value in ours.items())
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(again.eval()), logits(theirs))


# Files of our own making ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GLM as transformers saves it: layers 1 and 2 have 8 experts."""
    path = tmp_path_factory.mktemp("glm")
    transformers_model("glm").save_pretrained(path)
    return path


def changed(folder: Path, out: Path, take: str = "^$", **tensors: Tensor) -> Path:
    """The weights without those that match, and with others."""
    out.mkdir()
    (out / weights.CONFIG).write_bytes((folder / weights.CONFIG).read_bytes())
    rest = {name: value for name, value in stored(folder).items() if not re.search(take, name)}
    save_file({**rest, **tensors}, out / weights.SINGLE)
    return out


def refusal(folder: Path) -> str:
    config = run_config(folder, "glm")
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
    mixed = changed(folder, tmp_path / "mixed", r"layers\.1\..*\.\d+\.(gate|up)_proj", **fused(folder))
    expected = own_model(folder, "glm").state_dict()
    for name, value in own_model(mixed, "glm").state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_what_is_wrong_with_experts_is_named_once_for_all(folder: Path, tmp_path: Path) -> None:
    says = refusal(changed(folder, tmp_path / "missing", r"experts\.(5|7)\.up_proj"))
    assert "missing model.layers.{1-2}.mlp.experts.{5,7}.up_proj.weight" in says
    assert says.count("experts") == 1
    assert (
        "missing model.layers.1.mlp.experts.{0-7}.gate_proj.weight, model.layers.1.mlp.experts.{0-7}.up_pr"
        in refusal(changed(folder, tmp_path / "layer", r"layers\.1\..*experts\.\d+\.(gate|up)"))
    )
    wider = {f"model.layers.{n}.mlp.experts.{i}.down_proj.weight": torch.ones(48, 21) for n in (1, 2) for i in (0, 3)}
    assert (
        "other shapes: model.layers.{1-2}.mlp.experts.{0,3}.down_proj.weight (there [48, 21], the model's [48, 20])"
    ) in refusal(changed(folder, tmp_path / "wider", **wider))
    more = {f"model.layers.{n}.mlp.experts.8.up_proj.weight": torch.ones(20, 48) for n in (1, 2)}
    assert "the model has no model.layers.{1-2}.mlp.experts.8.up_proj.weight" in refusal(
        changed(folder, tmp_path / "more", **more)
    )
    # Which of both would count?
    twice = refusal(changed(folder, tmp_path / "twice", **fused(folder)))
    assert "the model has no model.layers.1.mlp.experts.{0-7}.gate_proj.weight, model.layers.1.mlp.exp" in twice
    # A layer that the model ignores may be there, and is no excuse for others.
    extra = {"model.layers.46.mlp.gate.weight": torch.ones(8, 48), "model.layers.47.mlp.gate.weight": torch.ones(8, 48)}
    assert "the model has no model.layers.47.mlp.gate.weight" in refusal(changed(folder, tmp_path / "late", **extra))


def test_ignored_layers_are_passed_over_with_a_line(folder: Path, tmp_path: Path) -> None:
    extra = {f"model.layers.46.{name}": torch.ones(3) for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")}
    more, said = changed(folder, tmp_path / "more", **extra), list[str]()
    check_start(run_config(more, "glm"), say=said.append)
    assert said == [f"{more}: 2 tensors of model.layers.46.* not read: the model has none of it"]
    check_start(run_config(folder, "glm"), say=said.append)
    assert len(said) == 1


def test_the_bias_that_corrects_the_router_is_not_rounded(folder: Path, tmp_path: Path) -> None:
    model = own_model(folder, "glm")
    write(model, tmp_path / "out", name="glm4_moe", dtype=torch.bfloat16)
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
    config = run_config(folder, "glm", f"train.export_format={file_format}", "train.precision=bfloat16")
    model = own_model(folder, "glm")
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
