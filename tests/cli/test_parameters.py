"""What becomes of each parameter: the plan's numbers against torch's own, and against what the ranks of a job hold."""

import json
import math
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.cli import main as cli
from meshtrain.cli.memory import _expert_cuts, fsdp_cut, held_by_ranks, parameters_of, table
from meshtrain.config import Optimizer
from meshtrain.config.locate import model_file
from meshtrain.config.model_spec import model_spec
from meshtrain.layout import Layout
from meshtrain.parallel.sharding import Cut, ParameterSpec
from tests.launching import forked
from tests.parity.experiments import SMALL
from tests.properties import given, settings, st

SCRIPT = Path(__file__).parent / "parameters_cases.py"

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

tp_plan = {"words": "embedding_rowwise", "*.up": "colwise", "*.down": "rowwise", "head": "colwise_gather_output"}
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(MODEL)
    return str(tmp_path / "own.py")


ALONE = Layout({})


def test_parameters_of_a_model_without_its_memory(model: str) -> None:
    specs = {each.name: each for each in parameters_of(model_spec(model, {"width": 6}), ALONE)}
    assert specs["parts.0.1.up.weight"] == ParameterSpec("parts.0.1.up.weight", (13, 6), layer="Linear")
    assert len(specs) == 1 + 2 * 6 + 2
    tied = parameters_of(model_spec(model, {"tied": True}), ALONE)
    assert tied[0] == ParameterSpec("words.weight", (5, 6), layer="Embedding", tied=("head.weight",))
    assert [each.name for each in tied] == [name for name in specs if name != "head.weight"]
    large = parameters_of(model_spec(model, {"width": 10**6}), ALONE)
    assert large[1].shape == (2 * 10**6 + 1, 10**6)  # 8 TB if it were real


def test_what_tp_and_fsdp_make_of_them(model: str) -> None:
    specs = parameters_of(model_spec(model, {}), Layout({"dp_shard": 3, "tp": 2}))
    assert all(each.cuts[-1] == Cut("dp_shard", 0, 3) for each in specs)
    seen = {each.name.removeprefix("parts.0.0."): (each.layer, each.cuts[:-1]) for each in specs}
    rows, columns = (Cut("tp", 0, 2),), (Cut("tp", 1, 2),)
    assert (
        seen.items()
        >= {
            "words.weight": ("VocabParallelEmbedding", rows),
            "up.weight": ("ColumnParallelLinear", rows),
            "up.bias": ("ColumnParallelLinear", rows),
            "down.weight": ("RowParallelLinear", columns),
            "down.bias": ("RowParallelLinear", ()),
            "norm.weight": ("LayerNorm", ()),
            "head.weight": ("ColumnParallelLinear", rows),
        }.items()
    )


def test_fsdp_takes_cp_too() -> None:
    assert fsdp_cut(Layout({"dp_shard": 3, "cp": 2})) == [Cut("fsdp", 0, 6)]
    assert fsdp_cut(Layout({"cp": 4})) == [Cut("fsdp", 0, 4)]
    assert fsdp_cut(Layout({"tp": 4, "dp_replicate": 2})) == []


def spec_on(layout: Layout, shape: tuple[int, ...], dim: int | None = None, **more: object) -> ParameterSpec:
    """A parameter that `tp` cuts along `dim`."""
    tp = [] if dim is None or layout.size("tp") == 1 else [Cut("tp", dim, layout.size("tp"))]
    return ParameterSpec("", shape, (*tp, *fsdp_cut(layout)), **more)


@st.composite
def folded(draw: st.DrawFn) -> Layout:
    axes = draw(st.permutations(["dp_replicate", "dp_shard", "cp", "tp"]))
    layout = Layout({axis: draw(st.integers(1, 3)) for axis in axes})
    return layout.with_experts(draw(st.sampled_from(layout.expert_sizes())))


@st.composite
def parameters(draw: st.DrawFn, layout: Layout) -> tuple[ParameterSpec, int | None]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dim = draw(st.sampled_from([None, *range(min(len(shape), 2))]))
    return spec_on(layout, shape, dim), dim


@given(st.data(), st.integers(1, 12), st.integers(1, 5))
def test_parts_are_those_of_torch(data: st.DataObject, shards: int, tp: int) -> None:
    layout = Layout({"dp_replicate": 2, "dp_shard": shards, "tp": tp})
    drawn = data.draw(st.lists(parameters(layout), max_size=6))
    counts = [0] * shards * tp
    for spec, dim in drawn:
        shapes, after_tp = [], set()
        for i in range(tp):
            whole = torch.empty(spec.shape, device="meta")
            left = whole if dim is None else chunks(whole, tp, dim)[i]
            after_tp.add(tuple(left.shape))
            shapes += [tuple(part.shape) for part in chunks(left, shards, 0)]
        assert spec.shapes("tp") == after_tp
        assert spec.shapes() == set(shapes)
        counts = [count + math.prod(shape) for count, shape in zip(counts, shapes, strict=True)]
    held = held_by_ranks([spec for spec, _ in drawn], layout, "float32", Optimizer())
    assert (held.fewest, held.most) == (min(counts), max(counts))
    assert held.total == sum(math.prod(spec.shape) for spec, _ in drawn)


def chunks(whole: torch.Tensor, parts: int, dim: int) -> list[torch.Tensor]:
    """torch's own, and as many empty ones as are missing."""
    if whole.shape[dim] == 0:
        return [whole] * parts
    found = list(whole.chunk(parts, dim))
    return found + [whole.narrow(dim, 0, 0)] * (parts - len(found))


@settings(max_examples=50)
@given(st.data(), folded())
def test_experts_and_the_rest_are_on_the_same_ranks(data: st.DataObject, layout: Layout) -> None:
    """The rank with the most of the one need not be that with the most of the other."""
    dense = [spec_on(layout, (data.draw(st.integers(1, 9)), 3), 0) for _ in range(data.draw(st.integers(0, 2)))]
    shapes = [(data.draw(st.integers(1, 9)), data.draw(st.sampled_from([2, 4, 6])), 5) for _ in range(2)]
    specs = dense + [ParameterSpec("", shape, tuple(_expert_cuts(shape, layout))) for shape in shapes]
    counts = []
    for rank in layout.group(0, *(axis for axis in layout.axes if axis != "pp")):
        parts = [spec.part(layout.coordinate(rank, *(cut.axis for cut in spec.cuts))) for spec in specs]
        counts.append(sum(math.prod(span.stop - span.start for span in part) for part in parts))
    held = held_by_ranks(specs, layout, "float32", Optimizer())
    assert (held.fewest, held.most) == (min(counts), max(counts))


def test_who_has_the_fewest_of_each_may_be_another_rank() -> None:
    layout = Layout({"dp_shard": 3, "tp": 2}).with_experts(2)
    dense = spec_on(layout, (7,), 0)  # 4 rows of the first rank of tp are 2, 2 and 0; 3 of the other are 1, 1 and 1
    experts = ParameterSpec("", (3, 3), tuple(_expert_cuts((3, 3), layout)))  # and of 3 experts it has one
    assert held_by_ranks([dense, experts], layout, "float32", Optimizer()).by_pp == ((2, 4),)


def test_experts_of_131072_ranks_are_counted_at_once() -> None:
    layout = Layout({"dp_replicate": 4, "dp_shard": 2048, "cp": 2, "tp": 8}).with_experts(64)
    specs = [spec_on(layout, (1000, 8), 0), ParameterSpec("", (1000, 512), tuple(_expert_cuts((1000, 512), layout)))]
    start = time.perf_counter()
    held = held_by_ranks(specs, layout, "float32", Optimizer())
    assert (held.fewest, held.most) == (0, 8 + 16)  # 16 experts on a rank of ep, or 8 or none; a row of each over efsdp
    assert time.perf_counter() - start < 20


def test_bytes_of_a_rank() -> None:
    layout = Layout({"dp_shard": 4})
    held = held_by_ranks([spec_on(layout, (6, 10))], layout, "bfloat16", Optimizer())  # rows 2, 2, 2, 0
    assert (held.fewest, held.most) == (0, 20)
    assert (held.weight_bytes, held.gradient_bytes, held.optimizer_bytes) == (80, 80, 160)
    assert held_by_ranks([spec_on(layout, (6, 10))], layout, "float64", Optimizer()).optimizer_bytes == 320
    frozen = spec_on(layout, (6, 10), trainable=False)
    assert held_by_ranks([frozen], layout, "float32", Optimizer()).optimizer_bytes == 0
    copies = Layout({"dp_replicate": 4})
    assert held_by_ranks([spec_on(copies, (6, 10))], copies, "float32", Optimizer()).fewest == 60


def test_stages_are_counted_where_they_are() -> None:
    layout = Layout({"pp": 2, "dp_shard": 2, "tp": 2})
    words, block = spec_on(layout, (10,), stages=(0, 3)), spec_on(layout, (6, 4), 0, stages=(1,))
    held = held_by_ranks([words, block], layout, "float32", Optimizer(), placement=(0, 1, 1, 0))
    assert held.total == 34
    assert held.by_pp == ((10, 10), (4, 8))  # rank 0 has two copies of the words; 3 rows after tp are 2 and 1
    assert (held.fewest, held.most, held.weight_bytes) == (4, 10, 40)
    held = held_by_ranks([words, block], layout, "float32", Optimizer(), placement=(0, 0, 1, 1))
    assert held.by_pp == ((9, 13), (5, 5))


# The table ----------------------------------------------------------------------------------------------------------


def test_equal_layers_are_one_row(model: str) -> None:
    layout = Layout({"dp_shard": 2, "tp": 2})
    rows = table(parameters_of(model_spec(model, {"depth": 3, "tied": True}), layout), layout)
    assert rows[0] == ["parameter", "", "whole", "layer", "over tp", "after tp", "after dp_shard"]
    assert [row[0] for row in rows[1:]] == [
        "words.weight",
        *(f"parts.{{0-2}}.{{0-1}}.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")),
        *(f"parts.{{0-2}}.{{0-1}}.norm.{name}" for name in ("weight", "bias")),
        "head.bias",
    ]
    assert rows[1][1:] == [
        "", "5 x 6", "VocabParallelEmbedding", "rows / tp", "3 to 2 x 6", "2 to 1 x 6", "also head.weight"
    ]  # fmt: skip
    assert rows[4][1:] == [
        "x6", "6 x 13", "RowParallelLinear", "columns / tp", "6 x 7 to 6", "3 x 7 to 6", ""
    ]  # fmt: skip


def test_rows_are_of_one_stage() -> None:
    given = [ParameterSpec(f"layers.{i}.up.weight", (4, 4), layer="Linear", stages=(i // 2,)) for i in range(4)]
    tied = ParameterSpec("words", (4,), layer="Norm", tied=("head",), stages=(0, 1))
    assert table([tied, *given], Layout({"pp": 2})) == [
        ["parameter", "", "stage", "whole", "layer"],
        ["words", "", "0 and 1", "4", "Norm", "also head"],
        ["layers.{0-1}.up.weight", "x2", "0", "4 x 4", "Linear", ""],
        ["layers.{2-3}.up.weight", "x2", "1", "4 x 4", "Linear", ""],
    ]


def test_layers_that_differ_keep_their_rows() -> None:
    widths = [4, 4, 8, 4, 4, 8]
    given = [ParameterSpec(f"layers.{i}.up.weight", (width, 4), layer="Linear") for i, width in enumerate(widths)]
    tied = ParameterSpec("shared.0", (4,), layer="Norm", tied=("shared.1", "shared.2"))
    rows = table([*given, tied], Layout({"dp_replicate": 2}))
    assert rows[1:] == [
        ["layers.{0-1,3-4}.up.weight", "x4", "4 x 4", "Linear", ""],
        ["layers.{2,5}.up.weight", "x2", "8 x 4", "Linear", ""],
        ["shared.0", "", "4", "Norm", "also shared.1 and 1 more"],
    ]


def test_the_table_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tensor-parallel.md").read_text()
    shown = re.search(
        r"```bash\nmeshtrain (plan [^\n]* --parameters)\n```\n\n[^\n]*:\n\n```\n(.*?)\n```", text, re.DOTALL
    )
    assert shown is not None
    assert cli.main(shlex.split(shown[1])) == 0
    assert set(shown[2].splitlines()) <= set(capsys.readouterr().out.splitlines())


def test_a_large_model_is_a_screen() -> None:
    llama = model_file("llama")
    layout = Layout({"dp_shard": 64, "tp": 8})
    specs = parameters_of(model_spec("llama", llama.presets["llama-3.1-405b"]), layout)
    assert len(specs) == 126 * 9 + 3
    assert len(table(specs, layout)) == 9 + 3 + 1


# Against a job ------------------------------------------------------------------------------------------------------

LLAMA = "{name: llama, hidden_size: 24, intermediate_size: 41, num_hidden_layers: 2, num_attention_heads: 4, "
MOE = f"{{name: {Path(__file__).parents[1] / 'models' / 'moe.py'}, num_experts: 6, score: sigmoid, " + LLAMA[14:]
MOE += "num_key_value_heads: 1, vocab_size: 257}"
CASES: list[tuple[Any, ...]] = [
    # 257 words, 41 features and 24 rows are uneven; a head is 6 rows; one key/value head is held by all.
    (LLAMA + "num_key_value_heads: 1, vocab_size: 257}", "{dp_shard: 2, tp: 2}"),
    (LLAMA + "num_key_value_heads: 2, vocab_size: 257, tie_word_embeddings: true}", "{dp_shard: 2, tp: 2}"),
    (LLAMA + "num_key_value_heads: 2, vocab_size: 257, tie_word_embeddings: true}", "{tp: 4}"),
    (LLAMA + "num_key_value_heads: 2, vocab_size: 257}", "{dp_shard: 4}"),
    (LLAMA + "num_key_value_heads: 2, vocab_size: 257}", "{cp: 4}"),  # shares the parameters, as dp_shard does
    (LLAMA + "num_key_value_heads: 1, vocab_size: 257}", "{cp: 2, dp_shard: 2}"),
    (LLAMA + "num_key_value_heads: 1, vocab_size: 257, tie_word_embeddings: true}", "{cp: 2, tp: 2}"),
    (LLAMA + "num_key_value_heads: 1, vocab_size: 257}", "{pp: 2, cp: 2}"),
    ("{name: OWN, depth: 2}", "{tp: 2, dp_shard: 2}"),
    ("{name: OWN, tied: true}", "{dp_replicate: 2, tp: 2}"),
    ("{name: OWN, width: 3}", "{tp: 4}"),
    ("{name: OWN, width: 3}", "{dp_replicate: 2, dp_shard: 2}"),
    ("{name: OWN, width: 3}", "{dp_shard: 4}"),  # 3 rows on 4 ranks: one holds nothing
    (LLAMA + "num_key_value_heads: 1, vocab_size: 257}", "{pp: 4}"),
    (LLAMA + "num_key_value_heads: 1, vocab_size: 257, tie_word_embeddings: true}", "{pp: 2, dp_shard: 2}"),
    (LLAMA + "num_key_value_heads: 1, vocab_size: 257, tie_word_embeddings: true}", "{pp: 2, tp: 2}"),
    ("{name: OWN, width: 3, tied: true}", "{pp: 2, dp_shard: 2}"),
    ("{name: OWN, width: 3}", "{dp_replicate: 2, pp: 2}"),
    (MOE, "{dp_shard: 4}", 1),
    (MOE, "{dp_shard: 4}", 2),  # 3 experts on a rank over 2 shards
    (MOE, "{dp_shard: 4}", 4),  # 2, 2, 2 and none
    (MOE, "{dp_shard: 2, tp: 2}", None),
    (MOE, "{dp_replicate: 2, dp_shard: 2}", 2),
    (MOE, "{cp: 2, dp_replicate: 2}", 4),
    (MOE, "{dp_replicate: 2, pp: 2}", 2),
    (MOE.replace("experts: 6", "experts: 2"), "{cp: 2, dp_shard: 2}", 2),  # rows of an expert over 2 shards
]


def test_the_plan_is_what_the_ranks_of_a_job_hold(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = []
    for i, (section, layout, *experts) in enumerate(CASES):
        path = tmp_path / f"{i}.yaml"
        text = (
            f"model: {section.replace('OWN', model)}\nbatch: {{global_size: 8, micro_size: 2}}\ntrain: {{steps: 1}}\n"
        )
        text += "".join(f"parallel: {{expert_parallel: {'null' if n is None else n}}}\n" for n in experts)
        text += "pipeline: {schedule: zbv}\n" * ("pp: 2, tp" in layout)  # whose first rank has both ends of the model
        path.write_text(text)
        arguments += [str(path), layout]
    done = forked(4, SCRIPT, *arguments).check()
    rows = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    for name, layout in zip(arguments[::2], arguments[1::2], strict=True):
        ranks = [row["held"] for row in rows if row["case"] == f"{name} {layout}"]
        assert len(ranks) == 4
        assert cli.main(["plan", name, f"layout={layout}", "parallel.compile=false", "--json"]) == 0
        compare(json.loads(capsys.readouterr().out)["parameters"], ranks)


def compare(plan: dict, ranks: list[dict]) -> None:
    """The plan's parameters and what each rank holds: of each a list of (layer, local shape, shape of its part)."""
    counts = [sum(math.prod(shape) for several in held.values() for _, shape, _ in several) for held in ranks]
    assert (plan["fewest"], plan["most"]) == (min(counts), max(counts))
    for held in ranks:
        assert set(held) <= {one["name"] for one in plan["each"]}
    for one in plan["each"]:
        found = [each for held in ranks for each in held.get(one["name"], ())]
        layers = {layer for layer, _, _ in found} - {"OtherStageBlock"}  # which holds another stage's tied weight
        assert layers == {one["layer"]}
        assert all(shape == part for _, shape, part in found)
        sizes = list(zip(*(shape for _, shape, _ in found), strict=True))
        assert one["on_a_rank"] == {"largest": [*map(max, sizes)], "smallest": [*map(min, sizes)]}, one["name"]


COUNTED = """
import os
from pathlib import Path
from meshtrain.config.locate import model_file

llama = model_file("llama")
Config, tp_plan, init_plan = llama.Config, llama.tp_plan, llama.init_plan

class Model(llama.Model):
    def __init__(self, config):
        super().__init__(config)
        with open(Path(__file__).with_suffix(f".rank{os.environ['RANK']}"), "a") as file:
            file.write("built\\n")
"""


def test_a_start_builds_the_model_once_to_ask_it(tmp_path: Path) -> None:
    """Config checks, balance of stages, FLOPs and what is printed ask one meta model. The forward that is checked
    without its blocks and the stage that is trained are copies of it."""
    own = tmp_path / "counted.py"
    own.write_text(COUNTED)
    keys = [*SMALL, f"model.name={own}", "layout={pp: 2}", "train.steps=1", f"train.output={tmp_path}/run"]
    forked(2, "-m", "meshtrain.train", "configs/quickstart.yaml", *keys).check()
    for rank in range(2):
        assert own.with_suffix(f".rank{rank}").read_text().split() == ["built"]
