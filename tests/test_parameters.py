"""What becomes of each parameter: the plan's numbers against torch's own, and against what the ranks of a job hold."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshtrain import cli
from meshtrain.layout import Layout
from meshtrain.locate import model_file
from meshtrain.parameters import Parameter, held_by_ranks, parameters_of, table
from tests.launching import forked

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


def test_parameters_of_a_model_without_its_memory(model: str) -> None:
    found = {one.name: one for one in parameters_of(model, {"width": 6})}
    assert found["parts.0.1.up.weight"] == Parameter("parts.0.1.up.weight", (13, 6), "Linear")
    assert len(found) == 1 + 2 * 6 + 2
    tied = parameters_of(model, {"tied": True})
    assert tied[0] == Parameter("words.weight", (5, 6), "Embedding", tied=("head.weight",))
    assert [one.name for one in tied] == [name for name in found if name != "head.weight"]
    assert parameters_of(model, {"width": 10**6})[1].shape == (2 * 10**6 + 1, 10**6)  # 8 TB if it were real


def test_what_tp_makes_of_them(model: str) -> None:
    found = {one.name.removeprefix("parts.0.0."): (one.layer, one.dim) for one in parameters_of(model, {}, tp=2)}
    assert (
        found.items()
        >= {
            "words.weight": ("VocabParallelEmbedding", 0),
            "up.weight": ("ColumnParallelLinear", 0),
            "up.bias": ("ColumnParallelLinear", 0),
            "down.weight": ("RowParallelLinear", 1),
            "down.bias": ("RowParallelLinear", None),
            "norm.weight": ("LayerNorm", None),
            "head.weight": ("ColumnParallelLinear", 0),
        }.items()
    )


@st.composite
def parameters(draw: st.DrawFn) -> Parameter:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    return Parameter("", shape, "", draw(st.sampled_from([None, *range(min(len(shape), 2))])))


@given(st.lists(parameters(), max_size=6), st.integers(1, 12), st.integers(1, 5))
def test_parts_are_those_of_torch(given: list[Parameter], shards: int, tp: int) -> None:
    counts = [0] * shards * tp
    for one in given:
        shapes = []
        for i in range(tp):
            whole = torch.empty(one.shape, device="meta")
            left = whole if one.dim is None else chunks(whole, tp, one.dim)[i]
            shapes += [tuple(part.shape) for part in chunks(left, shards, 0)]
            assert one.after_tp(tp)[i] == tuple(left.shape)
        counts = [count + math.prod(shape) for count, shape in zip(counts, shapes, strict=True)]
        ends = [[op(sizes) for sizes in zip(*shapes, strict=True)] for op in (min, max)]
        found = one.on_ranks(tp, shards)
        assert found <= set(shapes)
        assert [[op(sizes) for sizes in zip(*found, strict=True)] for op in (min, max)] == ends
    held = held_by_ranks(given, Layout({"dp_replicate": 2, "dp_shard": shards, "tp": tp}), "float32")
    assert (held.fewest, held.most) == (min(counts), max(counts))
    assert held.total == sum(math.prod(one.shape) for one in given)


def chunks(whole: torch.Tensor, parts: int, dim: int) -> list[torch.Tensor]:
    """torch's own, and as many empty ones as are missing."""
    if whole.shape[dim] == 0:
        return [whole] * parts
    found = list(whole.chunk(parts, dim))
    return found + [whole.narrow(dim, 0, 0)] * (parts - len(found))


def test_bytes_of_a_rank() -> None:
    layout, one = Layout({"dp_shard": 4}), [Parameter("", (6, 10), "")]
    held = held_by_ranks(one, layout, "bfloat16")  # rows 2, 2, 2, 0
    assert (held.fewest, held.most) == (0, 20)
    assert (held.weight_bytes, held.gradient_bytes, held.optimizer_bytes) == (80, 80, 160)
    assert held_by_ranks(one, layout, "float64").optimizer_bytes == 320
    assert held_by_ranks(one, Layout({"dp_replicate": 4}), "float32").fewest == 60


def test_stages_are_counted_where_they_are() -> None:
    words, block = Parameter("words", (10,), "", stages=(0, 3)), Parameter("block", (6, 4), "", 0, stages=(1,))
    layout = Layout({"pp": 2, "dp_shard": 2, "tp": 2})
    held = held_by_ranks([words, block], layout, "float32", placement=(0, 1, 1, 0))
    assert held.total == 34
    assert held.by_pp == ((10, 10), (4, 8))  # rank 0 has two copies of the words; 3 rows after tp are 2 and 1
    assert (held.fewest, held.most, held.weight_bytes) == (4, 10, 40)
    held = held_by_ranks([words, block], layout, "float32", placement=(0, 0, 1, 1))
    assert held.by_pp == ((9, 13), (5, 5))


# The table ----------------------------------------------------------------------------------------------------------


def test_equal_layers_are_one_row(model: str) -> None:
    rows = table(parameters_of(model, {"depth": 3, "tied": True}, tp=2), Layout({"dp_shard": 2, "tp": 2}))
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
    given = [Parameter(f"layers.{i}.up.weight", (4, 4), "Linear", stages=(i // 2,)) for i in range(4)]
    tied = Parameter("words", (4,), "Norm", tied=("head",), stages=(0, 1))
    assert table([tied, *given], Layout({"pp": 2})) == [
        ["parameter", "", "stage", "whole", "layer"],
        ["words", "", "0 and 1", "4", "Norm", "also head"],
        ["layers.{0-1}.up.weight", "x2", "0", "4 x 4", "Linear", ""],
        ["layers.{2-3}.up.weight", "x2", "1", "4 x 4", "Linear", ""],
    ]


def test_layers_that_differ_keep_their_rows() -> None:
    widths = [4, 4, 8, 4, 4, 8]
    given = [Parameter(f"layers.{i}.up.weight", (width, 4), "Linear") for i, width in enumerate(widths)]
    tied = Parameter("shared.0", (4,), "Norm", tied=("shared.1", "shared.2"))
    rows = table([*given, tied], Layout({"dp_replicate": 2}))
    assert rows[1:] == [
        ["layers.{0-1,3-4}.up.weight", "x4", "4 x 4", "Linear", ""],
        ["layers.{2,5}.up.weight", "x2", "8 x 4", "Linear", ""],
        ["shared.0", "", "4", "Norm", "also shared.1 and 1 more"],
    ]


def test_the_table_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / "docs" / "tensor-parallel.md").read_text()
    shown = re.search(
        r"```bash\nmeshtrain (plan [^\n]* --parameters)\n```\n\n[^\n]*:\n\n```\n(.*?)\n```", text, re.DOTALL
    )
    assert shown is not None
    assert cli.main(shlex.split(shown[1])) == 0
    assert set(shown[2].splitlines()) <= set(capsys.readouterr().out.splitlines())


def test_a_large_model_is_a_screen() -> None:
    llama = model_file("llama")
    found = parameters_of("llama", llama.presets["llama-3.1-405b"], tp=8)
    assert len(found) == 126 * 9 + 3
    assert len(table(found, Layout({"dp_shard": 64, "tp": 8}))) == 9 + 3 + 1


# Against a job ------------------------------------------------------------------------------------------------------

LLAMA = "{name: llama, hidden_size: 24, intermediate_size: 41, num_hidden_layers: 2, num_attention_heads: 4, "
CASES = [
    # 257 words, 41 features and 24 rows are uneven; a head is 6 rows; one key/value head is held by all.
    (LLAMA + "num_key_value_heads: 1, vocab_size: 257}", "{dp_shard: 2, tp: 2}"),
    (LLAMA + "num_key_value_heads: 2, vocab_size: 257, tie_word_embeddings: true}", "{dp_shard: 2, tp: 2}"),
    (LLAMA + "num_key_value_heads: 2, vocab_size: 257, tie_word_embeddings: true}", "{tp: 4}"),
    (LLAMA + "num_key_value_heads: 2, vocab_size: 257}", "{dp_shard: 4}"),
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
]


def test_the_plan_is_what_the_ranks_of_a_job_hold(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = []
    for i, (section, layout) in enumerate(CASES):
        path = tmp_path / f"{i}.yaml"
        text = (
            f"model: {section.replace('OWN', model)}\nbatch: {{global_size: 8, micro_size: 2}}\ntrain: {{steps: 1}}\n"
        )
        text += "pipeline: {schedule: zbv}\n" * ("pp: 2, tp" in layout)  # whose first rank has both ends of the model
        path.write_text(text)
        arguments += [str(path), layout]
    done = forked(4, SCRIPT, *arguments).check()
    rows = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    for name, layout in zip(arguments[::2], arguments[1::2], strict=True):
        ranks = [row["held"] for row in rows if row["case"] == f"{name} {layout}"]
        assert len(ranks) == 4
        assert cli.main(["plan", name, f"layout={layout}", "--json"]) == 0
        compare(json.loads(capsys.readouterr().out)["parameters"], ranks)


def compare(plan: dict, ranks: list[dict]) -> None:
    """The plan's parameters and what each rank holds: of each a list of (layer, local shape, shape of its part)."""
    counts = [sum(math.prod(shape) for several in held.values() for _, shape, _ in several) for held in ranks]
    assert (plan["fewest"], plan["most"]) == (min(counts), max(counts))
    for held in ranks:
        assert set(held) <= {one["name"] for one in plan["each"]}
    for one in plan["each"]:
        found = [each for held in ranks for each in held.get(one["name"], ())]
        assert {layer for layer, _, _ in found} - {"Absent"} == {one["layer"]}  # what holds another stage's tied weight
        assert all(shape == part for _, shape, part in found)
        sizes = list(zip(*(shape for _, shape, _ in found), strict=True))
        assert one["on_a_rank"] == {"largest": [*map(max, sizes)], "smallest": [*map(min, sizes)]}, one["name"]
