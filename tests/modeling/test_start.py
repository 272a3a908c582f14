"""The start of models without an `init_plan`: first values, buffers, and the memory that they
take on the host."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from meshtrain.config import Config
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.modeling.build import build_model
from meshtrain.parallel.sharding import local_part, parameters_of
from tests.comparing import ALONE, CPU, Peak
from tests.ranks import row

MODEL = Path(__file__).parents[1] / "models" / "of_transformers.py"
CHANGED = """
from dataclasses import dataclass

import torch
from torch import nn

@dataclass(frozen=True)
class Config:
    vocab_size: int = 256

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, 8)
        self.head = nn.Linear(8, config.vocab_size)
        self.register_buffer("scale", torch.linspace(1, 2, 8))
        {change}

    def forward(self, tokens, positions, documents):
        return self.head(self.words(tokens) * self.scale)

{plan}
"""


def config_of(folder: Path, layout: Layout | None = None, **keys: Any) -> Config:
    """A run of a model of transformers, or of the model file `name`."""
    run = folder / "run.yaml"
    text = ", ".join(f"{key}: {value}" for key, value in {"name": MODEL, **keys}.items())
    axes = dict(layout.sizes) if layout is not None else {}
    run.write_text(
        f"model: {{{text}}}\n"
        f"layout: {axes or '{dp_shard: 1}'}\n"
        "data: {source: python-stdlib, seq_len: 16}\n"
        "batch: {global_size: 4, micro_size: 2}\n"
        "parallel: {sequence_parallel: false, verify: false}\n"
        "train: {steps: 1, seed: 5}\n"
    )
    return Config.load(str(run), [])


def build(config: Config, mesh: Mesh = ALONE) -> nn.Module:
    return build_model(config, mesh, CPU)


def same_values(model: nn.Module, plain: nn.Module) -> None:
    """Asserts that a rank has its parts of the plain model's parameters, and its buffers, to the
    bit."""
    expected = dict(plain.named_parameters(remove_duplicate=False))
    specs = parameters_of(model)
    assert specs
    for spec, parameter in specs:
        local, part = local_part(parameter.detach())
        whole = expected[spec.name].detach().view(spec.dims)
        assert torch.equal(local.view(whole[part].shape), whole[part]), spec.name
    buffers = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        own_name = re.sub(r"^_stages\.\d+\.", "", name)  # of a Pipeline
        assert torch.equal(buffer, buffers[own_name]), name


LAYOUTS = [
    row(2, {"dp_shard": 2}, "llama", name="fsdp"),
    row(2, {"dp_replicate": 2}, "llama", name="ddp"),
    row(2, {"tp": 2}, "llama", name="tp"),
    row(2, {"pp": 2}, "llama", name="pp"),
    row(2, {"dp_shard": 2}, "gpt2", name="gpt2"),
    row(4, {"dp_shard": 2, "tp": 2}, "llama", name="fsdp_tp", slow=True),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("job", "axes", "kind"), LAYOUTS, indirect=["job"])
def test_first_values_are_those_of_one_process(
    job: Job, axes: dict[str, int], kind: str, tied: bool, tmp_path: Path
) -> None:
    """And do not depend on what was drawn before."""
    layout = Layout(axes)
    torch.manual_seed(job.rank)
    model = build(config_of(tmp_path, layout, kind=kind, tied=tied), build_mesh(layout))
    plain = build(config_of(tmp_path, kind=kind, tied=tied))
    same_values(model, plain)
    std = dict(plain.named_parameters())
    if kind == "gpt2":
        assert std["transformer.h.0.mlp.c_proj.weight"].std().item() == pytest.approx(0.01, rel=0.1)
    else:
        assert std["model.layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(
            0.02, rel=0.1
        )


@pytest.mark.parametrize(("job", "axes", "kind"), LAYOUTS[:4], indirect=["job"])
def test_weights_are_those_of_the_files(
    job: Job, axes: dict[str, int], kind: str, tmp_path: Path, shared_path: Path
) -> None:
    layout = Layout(axes)
    mesh = build_mesh(layout)
    draws = torch.Generator().manual_seed(0)
    plain = build(config_of(tmp_path, kind=kind))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(generator=draws)
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(plain.state_dict(), folder / "model.safetensors")
    model = build(config_of(tmp_path, layout, kind=kind, weights=folder), mesh)
    same_values(model, plain)


def held_by(model: nn.Module) -> int:
    """Bytes of a rank's parts of parameters, and of its buffers."""
    parts = [local_part(parameter.detach())[0] for _, parameter in parameters_of(model)]
    return sum(part.nbytes for part in (*parts, *model.buffers()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("from_weights", [False, True])
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}])
def test_a_start_takes_the_memory_of_its_part_and_one_tensor(
    job: Job, axes: dict[str, int], from_weights: bool, tmp_path: Path
) -> None:
    layout = Layout(axes)
    mesh = build_mesh(layout)
    keys: dict[str, Any] = {"layers": 8, "width": 64}
    whole = build(config_of(tmp_path, **keys))
    if from_weights:
        (tmp_path / "weights").mkdir()
        save_file(whole.state_dict(), tmp_path / "weights" / "model.safetensors")
        keys["weights"] = tmp_path / "weights"
    config = config_of(tmp_path, layout, **keys)
    largest = max(parameter.nbytes for parameter in whole.parameters())
    with Peak([]) as peak:
        model = build(config, mesh)
    states = 2**14  # of random generators
    assert peak.bytes <= held_by(model) + largest + states
    assert peak.bytes < held_by(whole)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("self.largest = self.head.weight.max().item()", "values of parameters"),
        ("self.words.weight.register_hook(lambda grad: grad)", "words.weight has a gradient hook"),
    ],
)
def test_a_constructor_that_needs_values_is_said_to_take_memory(
    job: Job, change: str, reason: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "changed.py").write_text(CHANGED.format(change=change, plan=""))
    keys = {"name": tmp_path / "changed.py"}
    layout = Layout({"dp_replicate": 2})
    torch.manual_seed(job.rank)
    model = build(config_of(tmp_path, layout, **keys), build_mesh(layout))
    said = [str(warning.message) for warning in recwarn if "whole model" in str(warning.message)]
    assert len(said) == (job.rank == 0)
    for line in said:
        assert line.startswith("each rank builds the whole model, 17.0 KiB, before it keeps its")
        assert reason in line
    same_values(model, build(config_of(tmp_path, **keys)))


def test_a_plan_decides_beside_buffers(tmp_path: Path) -> None:
    """What a constructor does to parameters counts only if buffers follow from it."""
    plan = 'init_plan = {"*bias": "zeros", "*": "ones"}'
    follows = 'self.register_buffer("start", self.head.weight.detach() * 2)'
    for change, uses_plan in [("", True), (follows, False)]:
        file = tmp_path / f"changed_{uses_plan}.py"
        file.write_text(CHANGED.format(change=change, plan=plan))
        model = build(config_of(tmp_path, name=file))
        weight = model.get_parameter("head.weight")
        assert bool((weight == 1).all()) == uses_plan
        assert torch.equal(model.get_buffer("scale"), torch.linspace(1, 2, 8))
        if not uses_plan:
            assert torch.equal(model.get_buffer("start"), weight.detach() * 2)


def test_adapters_of_a_model_without_a_plan(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    tuned = Config.load(str(tmp_path / "run.yaml"), ["train.lora={rank: 2}"])
    same_values(build(config), build(tuned))
    adapters = {
        name: parameter for name, parameter in build(tuned).named_parameters() if "lora" in name
    }
    assert adapters
    for name, parameter in adapters.items():
        assert parameter.any() == ("lora_A" in name), name
