"""What the plan and the start say of context parallelism, by numbers computed by hand, and the tables in the docs."""

import json
import re
from pathlib import Path

import pytest

from meshtrain.cli import main as cli
from meshtrain.cli.plan import Plan, make_plan
from meshtrain.config.locate import model_file
from meshtrain.config.model_spec import model_spec
from meshtrain.modeling.context import attention_shapes, kv_heads_of_rank
from tests.launching import forked

MI, GI = 2**20, 2**30
PAGE = Path(__file__).parents[2] / "docs" / "context-parallel.md"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A config of Llama 3.1 8B with one sample of 131,072 tokens."""
    path = tmp_path_factory.mktemp("llama") / "llama.yaml"
    path.write_text(
        "model: {name: llama, preset: llama-3.1-8b, max_position_embeddings: 1048576}\n"
        "data: {seq_len: 131072}\nbatch: {global_size: 64, micro_size: 1}\n"
        "train: {steps: 1, precision: bfloat16}\nlayout: {cp: 8}\n"
    )
    return str(path)


def line_of(config: str, *overrides: str) -> str:
    costs = make_plan(config, overrides).context
    assert costs is not None
    return costs.describe()


# What attention sends -------------------------------------------------------------------------------------------------


def test_the_line_of_a_long_sequence(llama: str) -> None:
    # A head of 16,384 tokens is 4 MiB. Of 8 key/value heads the last rank sends both chunks of keys and values to all
    # 7 others: 8 · 4 · 14 = 448 MiB; 3 · 7 · 8 · 4 = 672. A swap: (2 · 32/8 + 2 · 8/8) · 4 · 7 = 280.
    assert line_of(llama) == (
        "sequence 131072 over cp 8: 16384 a rank in 2 chunks of 8192, 0 % padding; attention sends at most 448 + 672 "
        "MiB a layer and microbatch (gather; ring: as much; context_heads 8: 280 + 280 MiB)"
    )
    # Forward's again: 448 + 672 and 280 + 280.
    assert "at most 0.4 + 1.1 GiB a layer" in line_of(llama, "parallel.recompute=full")
    assert "context_heads 8: 280 + 560 MiB" in line_of(llama, "parallel.recompute=full")


def test_the_way_of_the_config_comes_first(llama: str) -> None:
    assert "280 + 280 MiB a layer and microbatch (context_heads 8; gather: at most 448 + 672 MiB; ring: " in line_of(
        llama, "parallel.context_heads=8"
    )
    # Two swap: (2 · 16 + 2 · 4) · 4 · 1 = 160; 4 heads of 32,768 tokens to 3 ranks: 4 · 8 · 6 = 192, 4 · 8 · 9.
    both = line_of(llama, "parallel.context=ring", "parallel.context_heads=2")
    assert "at most 352 + 448 MiB a layer and microbatch (ring, context_heads 2; gather: " in both


def test_what_tp_and_padding_change(llama: str) -> None:
    # 1001 tokens: a multiple of 4 · lcm(2, 2) with tp's part of the sequence, and of 3 · 2.
    assert "sequence 1001 over cp 4: 252 a rank in 2 chunks of 126, 0.69 % padding" in line_of(
        llama, "layout={cp: 4, tp: 2}", "data.seq_len=1001", "parallel.sequence_parallel=false"
    )
    shared = line_of(llama, "layout={cp: 2, tp: 4}", "data.seq_len=1004", "parallel.context_heads=2")
    assert "sequence 1004 over cp 2: 504 a rank in 2 chunks of 252, 0.4 % padding" in shared
    # (2 · 8/2 + 2 · 2/2) heads of 504 tokens in 256 bytes each, to one rank: 1.23 MiB.
    assert "sends 1.2 + 1.2 MiB" in shared
    assert "context_heads" not in line_of(llama, "layout={cp: 3}")  # 32 heads do not divide over 3


def test_as_json(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", llama, "parallel.compile=false", "--json"]) == 0
    context = json.loads(capsys.readouterr().out)["context"]
    assert context["line"] == line_of(llama)
    assert context["sent"] == {
        "gather": [448 * MI, 672 * MI], "ring": [448 * MI, 672 * MI], "context_heads 8": [280 * MI, 280 * MI]
    }  # fmt: skip
    assert cli.main(["plan", llama, "parallel.compile=false", "layout={tp: 8}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] is None


def test_groups_of_the_derived_axes(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout = "layout={dp_shard: 2, cp: 4}"
    assert (
        cli.main(["plan", llama, "parallel.compile=false", layout, "parallel.context_heads=2", "--hosts", "2x4"]) == 0
    )
    text = capsys.readouterr().out
    for lines in (
        "cp: 2 groups of 4 ranks, none crosses hosts\n  [0, 1, 2, 3]  host 0\n",
        "cp_ring: 4 groups of 2 ranks, none crosses hosts\n  [0, 2]  host 0\n",
        "cp_heads: 4 groups of 2 ranks, none crosses hosts\n  [0, 1]  host 0\n",
        "fsdp: 1 group of 8 ranks, each crosses hosts\n",
    ):
        assert lines in text
    for heads in (1, 4):  # the group of all is that of cp
        assert (
            cli.main(["plan", llama, "parallel.compile=false", "layout={cp: 4}", f"parallel.context_heads={heads}"])
            == 0
        )
        text = capsys.readouterr().out
        assert "cp: 1 group of 4 ranks" in text
        assert "cp_" not in text
        assert "fsdp" not in text


# What attention has in memory -----------------------------------------------------------------------------------------


def test_memory_of_long_sequences(llama: str) -> None:
    plan = make_plan(llama)
    assert plan.context is not None
    # q, k, v and the output of 16,384 tokens in 2 bytes, and a float32 number for each of 32 queries.
    assert plan.context.saved == 16384 * ((2 * 32 + 2 * 8) * 128 * 2 + 32 * 4)
    assert plan.memory == make_plan(llama, ["layout={dp_shard: 8}"]).memory
    assert plan.memory == make_plan(llama, ["layout={dp_shard: 2, cp: 4}"]).memory
    million = make_plan(llama, ["data.seq_len=1048576", "layout={cp: 16, tp: 8}"])
    assert million.context is not None
    assert million.context.saved == 65536 * ((2 * 4 + 2 * 1) * 128 * 2 + 4 * 4)


def test_heads_of_a_model_are_those_of_its_calls() -> None:
    file = model_file("llama")
    shapes = attention_shapes(model_spec("llama", file.presets["llama-3.2-3b"]).meta)
    assert shapes == {(24, 8, 128, 128)}


def test_a_model_that_asks_for_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(
        "from models.llama import *\n"
        "class Model(Model):\n"
        "    def forward(self, tokens, positions=None, documents=None):\n"
        "        assert int(tokens.max()) >= 0\n"
        "        return super().forward(tokens, positions, documents)\n"
    )
    assert cli.main(["plan", "quickstart", f"model.name={tmp_path / 'own.py'}", "layout={cp: 2}"]) == 0
    text = capsys.readouterr().out
    assert "0 % padding; what attention sends is not known: the model does not run on the meta device\n" in text
    assert "attention keeps" not in text


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "expected"),
    [(32, 8, 4, 2), (32, 8, 16, 1), (12, 3, 2, 6), (12, 6, 4, 3), (8, 1, 8, 1), (16, 6, 4, 4)],
)
def test_key_value_heads_on_a_rank_of_tp(heads: int, kv_heads: int, tp: int, expected: int) -> None:
    assert kv_heads_of_rank(heads, kv_heads, tp) == expected


# The start of a run ---------------------------------------------------------------------------------------------------


def test_a_run_says_it_at_its_start(tmp_path: Path) -> None:
    keys = ["layout={cp: 2}", "data.seq_len=47", "batch.global_size=4", "batch.micro_size=2", "train.steps=2"]
    keys += ["model.hidden_size=32", "model.intermediate_size=48", "model.num_attention_heads=4"]
    keys += ["model.num_key_value_heads=2", "train.eval_every=0", "train.sample_tokens=0", "data.workers=0"]
    keys += ["optimizer.warmup_steps=0", f"train.output={tmp_path / 'run'}", "parallel.context=ring"]
    job = forked(2, "-m", "meshtrain.train", "configs/quickstart.yaml", *keys).check()
    # A head of 2 x 24 tokens is 48 · 8 · 4 = 1,536 bytes: 2 · 1,536 · 2 by the second rank, 3 · 2 · 1,536 back.
    assert (
        "sequence 47 over cp 2: 24 a rank in 2 chunks of 12, 2.1 % padding; attention sends at most 6.0 + 9.0 KiB a "
        "layer and microbatch (ring; gather: as much; context_heads 2: 9.0 + 9.0 KiB)\n"
    ) in job.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # 4 layers, 2 microbatches, and the first rank sends one of its two chunks of keys and values.
    assert {row["sent_bytes_cp"] for row in rows} == {4 * 2 * (2 * 1536 + 3 * 2 * 1536)}


# The tables in the docs -----------------------------------------------------------------------------------------------


def table_of(name: str) -> str:
    """What stands between a table's two marks."""
    match = re.search(rf"<!-- {name}: .*? -->\n(.*?)<!-- end of {name} -->", PAGE.read_text(), re.DOTALL)
    assert match is not None
    return match[1]


def test_the_plan_in_the_docs(llama: str) -> None:
    costs = make_plan(llama).context
    assert costs is not None
    assert f"```\n{costs.describe()}\n{costs.describe_memory()}\n```\n" in PAGE.read_text()


def test_the_table_of_what_is_sent(llama: str) -> None:
    rows = ["| `cp` | `gather`, `ring` | `context_heads` = `cp` | `context_heads: 8` |", "| --- | --- | --- | --- |"]
    for ranks in (2, 4, 8, 16, 32):
        overrides = [f"layout={{cp: {ranks}}}", f"parallel.context_heads={8 if ranks >= 8 else 1}"]
        costs = make_plan(llama, overrides).context
        assert costs is not None
        amounts = {way: " + ".join(f"{n / MI:,.0f}" for n in sent) for way, sent in costs.sent.items()}
        mixed = amounts["gather, context_heads 8"] if ranks > 8 else "-" if ranks < 8 else "the same"
        rows.append(f"| {ranks} | {amounts['gather']} | {amounts[f'context_heads {ranks}']} | {mixed} |")
    assert table_of("sent") == "\n".join(rows) + "\n"


LAYOUTS = [
    ("131,072", "{cp: 8}"), ("131,072", "{cp: 4, tp: 2}"), ("131,072", "{dp_shard: 4, cp: 8}"),
    ("1,048,576", "{cp: 64}"), ("1,048,576", "{cp: 32, tp: 8}"), ("1,048,576", "{cp: 8, tp: 8}"),
]  # fmt: skip


def test_the_table_of_memory(llama: str) -> None:
    titles = [
        "tokens",
        "layout",
        "state",
        "blocks' inputs",
        "attention, `gather`",
        "`ring`",
        "`context_heads`",
        "loss",
    ]
    rows = [titles, ["---"] * len(titles)]
    for tokens, layout in LAYOUTS:
        plans = [
            make_plan(llama, [f"data.seq_len={tokens.replace(',', '')}", f"layout={layout}", *more])
            for more in ([], ["parallel.context=ring"], [f"parallel.context_heads={heads_of(layout)}"])
        ]
        rows.append([tokens, f"`{layout}`", *columns_of(plans)])
    assert table_of("memory") == "".join(f"| {' | '.join(row)} |\n" for row in rows)


def heads_of(layout: str) -> int:
    """As many neighbours as can swap heads, and 8 at most: a host has 8."""
    sizes = {axis: int(size) for axis, size in re.findall(r"(\w+): (\d+)", layout)}
    return min(8, sizes["cp"], 32 // sizes.get("tp", 1))


def columns_of(plans: list[Plan]) -> list[str]:
    first, tp = plans[0], plans[0].layout.size("tp")
    assert first.context is not None
    tokens, memory = first.context.padded // first.context.ranks, first.memory
    state = memory.weight_bytes + memory.gradient_bytes + memory.optimizer_bytes
    inputs, loss = 32 * tokens * 4096 * 2 // tp, (2 * 2048 * 2 + 4096 * 4) * 128256 // tp
    attention = [plan.context.saved + plan.context.transient for plan in plans if plan.context is not None]
    return [f"{size / GI:.1f}" for size in (state, inputs, *attention, loss)]
