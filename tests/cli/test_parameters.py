"""What becomes of each parameter: the plan's numbers against torch's own, and against what the
ranks of a job hold."""

import json
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

import meshtrain
from meshtrain.cli import main as cli
from meshtrain.cli.memory import table
from meshtrain.config import Config
from meshtrain.config.model_spec import model_spec
from meshtrain.config.schema import OptimizerSection
from meshtrain.foresight.parameters import expert_cuts, fsdp_cuts, held_by_ranks, parameter_specs
from meshtrain.job.locate import model_file
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.modeling.build import build_model
from meshtrain.parallel.sharding import Cut, ParameterSpec, local_part
from meshtrain.pipeline.engine import Pipeline
from tests.launching import ROOT
from tests.properties import given, settings, st

EXPECTED = yaml.safe_load(Path(__file__).with_name("parameters.yaml").read_text())

MODEL = """
from dataclasses import dataclass
from torch import nn

@dataclass(frozen=True)
class Config:
    width: int = 6
    depth: int = 1
    tied: bool = False

class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up = nn.Linear(d, 2 * d + 1)
        self.down = nn.Linear(2 * d + 1, d)
        self.norm = nn.LayerNorm(d)

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.words = nn.Embedding(5, config.width)
        self.parts = nn.ModuleList(nn.ModuleList(Block(config.width) for _ in range(2)) for _ in range(config.depth))
        self.head = nn.Linear(config.width, 5)
        if config.tied:
            self.head.weight = self.words.weight

    def blocks(self):
        return [self.words, *(block for part in self.parts for block in part), self.head]

tp_plan = {"words": "embedding_rowwise_sequence", "*.up": "colwise", "*.down": "rowwise", "head": "colwise_logits"}
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(MODEL)
    return str(tmp_path / "own.py")


def test_names_are_shown_to_who_mends_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.py"
    file.write_text(MODEL.replace('"*.up"', '"*.upp"'))
    words = ["plan", "quickstart", f"model={{name: {file}}}", "parallel.verify=false"]
    words += ["layout={tp: 2}", "--parameters"]
    assert cli.main(words) == 2
    output, error = capsys.readouterr()
    for name in ("words.weight", ".up.weight", ".down.bias", "head.weight"):
        assert f"{name} " in output
    assert "'*.upp' matches no layer" in error
    assert cli.main([*words, "data.seq_length=4"]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert "did you mean seq_len?" in error


def test_parameters_of_a_model_without_its_memory(model: str) -> None:
    specs = parameter_specs(model_spec(model, {"width": 10**6}), Layout({}))
    assert len(specs) == 1 + 2 * 6 + 2
    assert specs[1].shape == (2 * 10**6 + 1, 10**6)  # 8 TB if it were real


def spec_on(
    layout: Layout, shape: tuple[int, ...], dim: int | None = None, **more: object
) -> ParameterSpec:
    """A parameter that `tp` cuts along `dim`."""
    tp = [] if dim is None or layout.size("tp") == 1 else [Cut("tp", dim, layout.size("tp"))]
    return ParameterSpec("", shape, (*tp, *fsdp_cuts(layout)), **more)


@st.composite
def folded(draw: st.DrawFn) -> Layout:
    axes = draw(st.permutations(["dp_replicate", "dp_shard", "cp", "tp"]))
    layout = Layout({axis: draw(st.integers(1, 3)) for axis in axes})
    return layout.with_experts(draw(st.sampled_from(layout.expert_sizes())))


@settings(max_examples=100)
@given(st.data(), folded())
def test_the_fewest_and_the_most_of_a_rank(data: st.DataObject, layout: Layout) -> None:
    """The rank with the most experts need not be that with the most of the rest."""
    sizes = st.integers(1, 9)
    dense = [
        spec_on(
            layout, (data.draw(sizes), data.draw(sizes)), data.draw(st.sampled_from([None, 0, 1]))
        )
        for _ in range(data.draw(st.integers(0, 3)))
    ]
    shapes = [(data.draw(sizes), data.draw(st.sampled_from([2, 4, 6])), 5) for _ in range(2)]
    specs = dense + [
        ParameterSpec("", shape, tuple(expert_cuts(shape, layout))) for shape in shapes
    ]
    counts = []
    shapes_on_ranks: list[set[tuple[int, ...]]] = [set() for _ in specs]
    for rank in layout.group(0, *(axis for axis in layout.axes if axis != "pp")):
        parts = [
            spec.part(layout.coordinate(rank, *(cut.axis for cut in spec.cuts))) for spec in specs
        ]
        sizes_of_parts = [tuple(span.stop - span.start for span in part) for part in parts]
        for on_ranks, size in zip(shapes_on_ranks, sizes_of_parts, strict=True):
            on_ranks.add(size)
        counts.append(sum(map(math.prod, sizes_of_parts)))
    assert [spec.shapes() for spec in specs] == shapes_on_ranks
    held = held_by_ranks(specs, layout, "float32", OptimizerSection())
    assert (held.fewest, held.most) == (min(counts), max(counts))
    assert held.total == sum(math.prod(spec.shape) for spec in specs)


def test_experts_of_131072_ranks_are_counted_at_once() -> None:
    layout = Layout({"dp_replicate": 4, "dp_shard": 2048, "cp": 2, "tp": 8}).with_experts(64)
    specs = [
        spec_on(layout, (1000, 8), 0),
        ParameterSpec("", (1000, 512), tuple(expert_cuts((1000, 512), layout))),
    ]
    held = held_by_ranks(specs, layout, "float32", OptimizerSection())
    # 16 experts on a rank of ep, or 8 or none; a row of each over efsdp
    assert (held.fewest, held.most) == (
        0,
        8 + 16,
    )


def test_bytes_of_a_rank() -> None:
    layout = Layout({"dp_shard": 4})
    # rows 2, 2, 2, 0
    held = held_by_ranks([spec_on(layout, (6, 10))], layout, "bfloat16", OptimizerSection())
    assert (held.fewest, held.most) == (0, 20)
    assert (held.weight_bytes, held.gradient_bytes, held.optimizer_bytes) == (80, 80, 160)
    assert (
        held_by_ranks(
            [spec_on(layout, (6, 10))], layout, "float64", OptimizerSection()
        ).optimizer_bytes
        == 320
    )
    frozen = spec_on(layout, (6, 10), trainable=False)
    assert held_by_ranks([frozen], layout, "float32", OptimizerSection()).optimizer_bytes == 0
    copies = Layout({"dp_replicate": 4})
    assert (
        held_by_ranks([spec_on(copies, (6, 10))], copies, "float32", OptimizerSection()).fewest
        == 60
    )


# The table ----------------------------------------------------------------------------------------


def test_equal_layers_are_one_row(model: str) -> None:
    layout = Layout({"dp_shard": 2, "tp": 2})
    rows = table(parameter_specs(model_spec(model, {"depth": 3, "tied": True}), layout), layout)
    assert rows == EXPECTED["equal layers"]


def layers(
    count: int, width: Callable[[int], int], stage: Callable[[int], int]
) -> list[ParameterSpec]:
    return [
        ParameterSpec(f"layers.{i}.up.weight", (width(i), 4), layer="Linear", stages=(stage(i),))
        for i in range(count)
    ]


def test_rows_are_of_one_stage_and_of_one_size() -> None:
    tied = ParameterSpec("words", (4,), layer="Norm", tied=("head",), stages=(0, 1))
    rows = table([tied, *layers(4, lambda i: 4, lambda i: i // 2)], Layout({"pp": 2}))
    assert rows == EXPECTED["stages"]
    shared = ParameterSpec("shared.0", (4,), layer="Norm", tied=("shared.1", "shared.2"))
    rows = table(
        [*layers(6, lambda i: 8 if i % 3 == 2 else 4, lambda i: 0), shared],
        Layout({"dp_replicate": 2}),
    )
    assert rows == EXPECTED["other layers"]


def test_the_table_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "tensor-parallel.md").read_text()
    shown = re.search(
        r"```bash\nmeshtrain (plan [^\n]* --parameters)\n```\n\n[^\n]*:\n\n```\n(.*?)\n```",
        text,
        re.DOTALL,
    )
    assert shown is not None
    assert cli.main(shlex.split(shown[1])) == 0
    assert set(shown[2].splitlines()) <= set(capsys.readouterr().out.splitlines())


def test_a_large_model_is_a_screen() -> None:
    llama = model_file("llama")
    layout = Layout({"dp_shard": 64, "tp": 8})
    specs = parameter_specs(model_spec("llama", llama.presets["llama-3.1-405b"]), layout)
    assert len(specs) == 126 * 9 + 3
    assert len(table(specs, layout)) == 9 + 3 + 1


# Against a job ------------------------------------------------------------------------------------


def held_by_this_rank(config: Config) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Of each parameter the layer and the shape of its parts: two stages of a rank may both hold a
    tied parameter."""
    assert config.resolved is not None
    mesh = meshtrain.build_mesh(config.resolved)
    model = build_model(config, mesh, torch.device("cpu"))
    stages = [model]
    if isinstance(model, Pipeline):
        stages = [model.stage(number) for number in model.schedule.stages_of(mesh.index("pp"))]
    held = defaultdict(list)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            local, part = local_part(parameter)
            assert [span.stop - span.start for span in part] == list(local.shape)
            layer = type(stage.get_submodule(name.rpartition(".")[0])).__name__.removeprefix("FSDP")
            held[name].append((layer, tuple(local.shape)))
    return held


@pytest.mark.ranks(4)
@pytest.mark.parametrize("section", EXPECTED["jobs"], ids=str)
def test_the_plan_is_what_the_ranks_of_a_job_hold(
    job: Job, section: list[Any], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, layout, *more = section
    files = {"OWN": model, "MOE": f"{ROOT}/tests/models/moe.py"}
    config = {
        "model": keys | {"name": files.get(keys["name"], keys["name"])},
        "layout": layout,
        "batch": {"global_size": 8, "micro_size": 2},
        "train": {"steps": 1},
        "pipeline": more[0] if more else {},
        "parallel": {"expert_parallel": more[1]} if len(more) > 1 else {},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    ranks: list[Any] = [None] * 4
    dist.all_gather_object(
        ranks, held_by_this_rank(Config.load(str(path), world_size=4, for_training=True))
    )
    assert cli.main(["plan", str(path), "parallel.compile=false", "--json"]) == 0
    compare(json.loads(capsys.readouterr().out)["parameters"], ranks)


def compare(plan: dict, ranks: list[dict]) -> None:
    """The plan's parameters and what each rank holds."""
    counts = [
        sum(math.prod(shape) for parts in held.values() for _, shape in parts) for held in ranks
    ]
    assert (plan["fewest"], plan["most"]) == (min(counts), max(counts))
    for held in ranks:
        assert set(held) <= {row["name"] for row in plan["each"]}
    for row in plan["each"]:
        layers, shapes = zip(
            *(part for held in ranks for part in held.get(row["name"], ())), strict=True
        )
        # which holds another stage's tied weight
        assert {*layers} - {"OtherStageBlock"} == {row["layer"]}
        sizes = list(zip(*shapes, strict=True))
        assert row["on_a_rank"] == {
            "largest": [*map(max, sizes)],
            "smallest": [*map(min, sizes)],
        }, row["name"]
