"""What the plan and the start say of context parallelism, by numbers computed by hand, and the
tables in the docs."""

import json
import re
from pathlib import Path

import pytest

from meshtrain.cli import main as cli
from meshtrain.cli.plan import make_plan
from meshtrain.layout import Layout
from meshtrain.modeling.context import ContextCosts, kv_heads_of_rank
from meshtrain.run.rank_table import layout_text
from tests.launching import forked

MI, GI = 2**20, 2**30
PAGE = (Path(__file__).parents[2] / "docs" / "context-parallel.md").read_text()


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


def costs_of(config: str, *overrides: str) -> ContextCosts:
    costs = make_plan(config, overrides).context
    assert costs is not None
    return costs


# What attention sends -----------------------------------------------------------------------------


def test_the_plan_in_the_docs(llama: str) -> None:
    # A head of 16,384 tokens is 4 MiB. Of 8 key/value heads the last rank sends both chunks of keys
    # and values to all 7 others: 8 · 4 · 14 = 448 MiB; 3 · 7 · 8 · 4 = 672. A swap: (2 · 32/8 + 2 ·
    # 8/8) · 4 · 7 = 280.
    costs = costs_of(llama)
    assert f"```\n{costs.describe()}\n{costs.describe_memory()}\n```\n" in PAGE
    assert (
        "at most 448 + 672 MiB a layer and microbatch (gather; ring: as much; context_heads 8: 280 "
        "+ 280" in PAGE
    )
    # Forward's again: 448 + 672 and 280 + 280.
    recomputed = costs_of(llama, "parallel.recompute=full").describe()
    assert "at most 0.4 + 1.1 GiB a layer" in recomputed
    assert "context_heads 8: 280 + 560 MiB" in recomputed


def test_the_way_of_the_config_comes_first(llama: str) -> None:
    heads = costs_of(llama, "parallel.context_heads=8").describe()
    assert (
        "280 + 280 MiB a layer and microbatch (context_heads 8; gather: at most 448 + 672 MiB; "
        "ring: " in heads
    )
    # Two swap: (2 · 16 + 2 · 4) · 4 · 1 = 160; 4 heads of 32,768 tokens to 3 ranks: 4 · 8 · 6 =
    # 192, 4 · 8 · 9.
    both = costs_of(llama, "parallel.context=ring", "parallel.context_heads=2").describe()
    assert "at most 352 + 448 MiB a layer and microbatch (ring, context_heads 2; gather: " in both


def test_what_tp_and_padding_change(llama: str) -> None:
    # 1001 tokens: a multiple of 4 · lcm(2, 2) with tp's part of the sequence, and of 3 · 2.
    padded = costs_of(
        llama, "layout={cp: 4, tp: 2}", "data.seq_len=1001", "parallel.sequence_parallel=false"
    )
    assert (
        "sequence 1001 over cp 4: 252 a rank in 2 chunks of 126, 0.69 % padding"
        in padded.describe()
    )
    shared = costs_of(
        llama, "layout={cp: 2, tp: 4}", "data.seq_len=1004", "parallel.context_heads=2"
    ).describe()
    assert "sequence 1004 over cp 2: 504 a rank in 2 chunks of 252, 0.4 % padding" in shared
    # (2 · 8/2 + 2 · 2/2) heads of 504 tokens in 256 bytes each, to one rank: 1.23 MiB.
    assert "sends 1.2 + 1.2 MiB" in shared
    # 32 heads do not divide over 3
    assert "context_heads" not in costs_of(llama, "layout={cp: 3}").describe()


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_as_json(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    context = json.loads(planned(capsys, llama, "parallel.compile=false", "--json"))["context"]
    assert context["line"] == costs_of(llama).describe()
    gathered, swapped = [448 * MI, 672 * MI], [280 * MI, 280 * MI]
    assert context["sent"] == {"gather": gathered, "ring": gathered, "context_heads 8": swapped}
    assert (
        json.loads(planned(capsys, llama, "parallel.compile=false", "layout={tp: 8}", "--json"))[
            "context"
        ]
        is None
    )


@pytest.mark.parametrize("heads", [1, 4])
def test_a_group_of_all_ranks_of_cp_is_that_of_cp(heads: int) -> None:
    text = layout_text(Layout({"cp": 4}).with_context_heads(heads).on_hosts((4,)))
    assert "cp: 1 group of 4 ranks" in text
    assert not {"cp_", "fsdp"} & set(re.findall("cp_|fsdp", text))


def test_a_model_that_asks_for_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(
        "from models.llama import *\n"
        "class Model(Model):\n"
        "    def forward(self, tokens, positions=None, documents=None):\n"
        "        assert int(tokens.max()) >= 0\n"
        "        return super().forward(tokens, positions, documents)\n"
    )
    text = planned(capsys, "quickstart", f"model.name={tmp_path / 'own.py'}", "layout={cp: 2}")
    assert (
        "0 % padding; what attention sends is not known: the model does not run on the meta "
        "device\n" in text
    )
    assert "attention keeps" not in text


def test_key_value_heads_on_a_rank_of_tp() -> None:
    """Of (heads, key/value heads, tp)."""
    expected = {
        (32, 8, 4): 2,
        (32, 8, 16): 1,
        (12, 3, 2): 6,
        (12, 6, 4): 3,
        (8, 1, 8): 1,
        (16, 6, 4): 4,
    }
    assert {sizes: kv_heads_of_rank(*sizes) for sizes in expected} == expected


def test_a_run_says_it_at_its_start(tmp_path: Path) -> None:
    keys = [
        "layout={cp: 2}",
        "data.seq_len=47",
        "batch.global_size=4",
        "batch.micro_size=2",
        "train.steps=2",
    ]
    keys += ["model.hidden_size=32", "model.intermediate_size=48", "model.num_attention_heads=4"]
    keys += [
        "model.num_key_value_heads=2",
        "train.eval_every=0",
        "train.sample_tokens=0",
        "data.workers=0",
    ]
    keys += [
        "optimizer.warmup_steps=0",
        f"train.output={tmp_path / 'run'}",
        "parallel.context=ring",
    ]
    job = forked(2, "-m", "meshtrain.train", "configs/quickstart.yaml", *keys).check()
    # A head of 2 x 24 tokens is 48 · 8 · 4 = 1,536 bytes: 2 · 1,536 · 2 by the second rank, 3 · 2 ·
    # 1,536 back.
    assert (
        "sequence 47 over cp 2: 24 a rank in 2 chunks of 12, 2.1 % padding; attention sends at "
        "most 6.0 + 9.0 KiB a "
        "layer and microbatch (ring; gather: as much; context_heads 2: 9.0 + 9.0 KiB)\n"
    ) in job.out
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    # 4 layers, 2 microbatches, and the first rank sends one of its two chunks of keys and values.
    assert {row["sent_bytes_cp"] for row in rows} == {4 * 2 * (2 * 1536 + 3 * 2 * 1536)}


# Memory, and the tables in the docs ---------------------------------------------------------------


def test_memory_of_long_sequences(llama: str) -> None:
    plan = make_plan(llama)
    # q, k, v and the output of 16,384 tokens in 2 bytes, and a float32 number for each of 32
    # queries.
    assert plan.context.saved == 16384 * ((2 * 32 + 2 * 8) * 128 * 2 + 32 * 4)
    assert plan.memory == make_plan(llama, ["layout={dp_shard: 8}"]).memory
    assert plan.memory == make_plan(llama, ["layout={dp_shard: 2, cp: 4}"]).memory
    million = costs_of(llama, "data.seq_len=1048576", "layout={cp: 16, tp: 8}")
    assert million.saved == 65536 * ((2 * 4 + 2 * 1) * 128 * 2 + 4 * 4)


def table_of(name: str) -> list[list[str]]:
    """The cells of a table between its two marks, without its head."""
    match = re.search(rf"<!-- {name}: .*? -->\n(.*?)<!-- end of {name} -->", PAGE, re.DOTALL)
    return [re.findall(r"(?<=\| ).*?(?= \|)", line) for line in match[1].splitlines()[2:]]


def test_the_table_of_what_is_sent(llama: str) -> None:
    table = table_of("sent")
    assert [row[0] for row in table] == ["2", "4", "8", "16", "32"]
    for ranks, gather, swap, mixed in table:
        heads = 8 if int(ranks) >= 8 else 1
        sent = costs_of(llama, f"layout={{cp: {ranks}}}", f"parallel.context_heads={heads}").sent
        amounts = {way: " + ".join(f"{n / MI:,.0f}" for n in both) for way, both in sent.items()}
        assert (gather, swap) == (amounts["gather"], amounts[f"context_heads {ranks}"])
        others = {"2": "-", "4": "-", "8": "the same"}
        assert mixed == others.get(ranks, amounts.get("gather, context_heads 8"))


def test_the_table_of_memory(llama: str) -> None:
    table = table_of("memory")
    assert len(table) == 6
    for length, layout, *cells in table:
        layout = layout.strip("`")
        sizes = {axis: int(size) for axis, size in re.findall(r"(\w+): (\d+)", layout)}
        tp = sizes.get("tp", 1)
        heads = min(8, sizes["cp"], 32 // tp)  # as many neighbours as can swap heads: a host has 8
        base = [f"data.seq_len={length.replace(',', '')}", f"layout={layout}"]
        ways = ([], ["parallel.context=ring"], [f"parallel.context_heads={heads}"])
        costs = [costs_of(llama, *base, *way) for way in ways]
        memory = make_plan(llama, base).memory
        state = memory.weight_bytes + memory.gradient_bytes + memory.optimizer_bytes
        inputs = 32 * (costs[0].padded // costs[0].ranks) * 4096 * 2 // tp
        loss = (2 * 2048 * 2 + 4096 * 4) * 128256 // tp
        expected = [state, inputs, *(each.saved + each.transient for each in costs), loss]
        assert cells == [f"{size / GI:.1f}" for size in expected], layout
