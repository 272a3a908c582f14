"""Mixtures of sources and growing batches: the same curve on every layout, and the same bits after a resume."""

from pathlib import Path

import numpy as np
import pytest

from meshtrain.data import Document, write
from meshtrain.metrics.logger import read
from tests.parity.cells import assert_same, train
from tests.parity.experiments import QUICKSTART, SMALL, Experiment, write_ragged

RAMP = "batch.global_size=[[0, 5], [2, 14], [5, 3]]"
LENGTH = "data.seq_len_warmup=[[0, 8], [2, 26], [4, 48]]"
SIX = ("train.precision=float64", "train.steps=6", "optimizer.warmup_steps=2", "batch.micro_size=2")
ZBV = ("pipeline.schedule=zbv", "model.num_hidden_layers=2")
# World size -> (experiment, layout, more overrides)
CELLS: dict[int, list[tuple[str, str, tuple[str, ...]]]] = {
    2: [
        ("mixture", "{dp_replicate: 2}", ()),
        ("ramp", "{dp_replicate: 2}", ()),
        ("mixture", "{tp: 2}", ()),
        ("mixture", "{tp: 2}", ("parallel.sequence_parallel=false",)),
        ("mixture", "{cp: 2}", ()),
        ("both", "{pp: 2}", ("pipeline.schedule=1f1b",)),
        ("length", "{pp: 2}", ("pipeline.schedule=1f1b",)),
        ("length", "{tp: 2}", ()),
        ("length", "{cp: 2}", ()),
        ("both", "{pp: 2}", ZBV),
    ],
    4: [
        ("both", "{dp_shard: 4}", ()),
        ("mixture", "{dp_shard: 2, tp: 2}", ()),
        ("both", "{pp: 2, dp_replicate: 2}", ("pipeline.schedule=interleaved-1f1b", "batch.micro_size=1")),
    ],
}
SHARDED = "{dp_shard: 2}"  # where runs are resumed, too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedules")


@pytest.fixture(scope="module")
def known(folder: Path) -> dict[str, Experiment]:
    rng = np.random.default_rng(0)
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten. " * 60)
    ids = (Document(rng.integers(1, 200, 50)) for _ in range(40))
    write(folder / "tokens", ids, vocab_size=300, tokenizer="bytes", source="random")  # two bytes per token
    ragged = write_ragged(folder / "ragged.jsonl")
    sources = (
        f"data.sources=[{{name: ragged, source: jsonl, path: {ragged}, weight: [[0, 0.5], [3, 0.05]], epochs: 2}}, "
        f"{{name: text, source: text, path: {folder / 'text.txt'}, weight: [[0, 0.3], [3, 0.95]]}}, "
        f"{{name: tokens, source: tokens, path: {folder / 'tokens'}, weight: [[0, 0.2], [3, 0]]}}]"
    )
    mixture = (sources, "data.validation=0.1", "train.eval_every=6", "train.eval_samples=9")
    common = (*SMALL, f"data.cache={folder / 'cache'}", *SIX, "data.mask_documents=true")
    names = {
        "mixture": (*mixture, "batch.global_size=7"),
        "ramp": (RAMP,),
        "both": (*mixture, RAMP),
        "length": (LENGTH,),
    }
    return {name: Experiment(name, QUICKSTART, (*common, *keys), 1e-9) for name, keys in names.items()}


@pytest.fixture(scope="module")
def alone(folder: Path, known: dict[str, Experiment]) -> dict[str, list[dict]]:
    train(folder, 1, [(e, f"one/{e.name}", "{dp_shard: -1}", ()) for e in known.values()])
    return {name: read(folder / f"one/{name}/metrics.jsonl") for name in known}


@pytest.fixture(scope="module")
def two(folder: Path, known: dict[str, Experiment]) -> Path:
    """All runs of two processes, including resumed ones."""
    runs = [(known[name], f"2/{i}", layout, more) for i, (name, layout, more) in enumerate(CELLS[2])]
    for name in ("mixture", "ramp", "length"):
        resume = f"checkpoint.resume={folder / name / 'checkpoints/step_0000003'}"
        runs.append((known[name], name, SHARDED, ("checkpoint.every=3",)))
        runs.append((known[name], f"{name}_resumed", SHARDED, (resume,)))
    decay = ("optimizer.schedule=wsd", "train.steps=6", "optimizer.decay_steps=2")
    trunk = ("optimizer.schedule=wsd", "train.steps=7", "optimizer.decay_steps=1", "checkpoint.every=4")
    resume = f"checkpoint.resume={folder / 'trunk/checkpoints/step_0000004'}"
    runs += [(known["ramp"], "decayed", SHARDED, decay), (known["ramp"], "trunk", SHARDED, trunk)]
    runs.append((known["ramp"], "branch", SHARDED, (*decay, resume)))
    train(folder, 2, runs)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", CELLS[2], ids=str)
def test_two_processes(cell: tuple, two: Path, alone: dict[str, list[dict]]) -> None:
    assert_same(read(two / f"2/{CELLS[2].index(cell)}/metrics.jsonl"), alone[cell[0]], 1e-9)


@pytest.mark.timeout(600)
def test_four_processes(folder: Path, known: dict[str, Experiment], alone: dict[str, list[dict]]) -> None:
    train(folder, 4, [(known[name], f"4/{i}", layout, more) for i, (name, layout, more) in enumerate(CELLS[4])])
    for i, (name, _, _) in enumerate(CELLS[4]):
        assert_same(read(folder / f"4/{i}/metrics.jsonl"), alone[name], 1e-9)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["mixture", "ramp", "length"])
def test_a_resumed_run_goes_on_bit_for_bit(name: str, two: Path, alone: dict[str, list[dict]]) -> None:
    whole, resumed = read(two / name / "metrics.jsonl"), read(two / f"{name}_resumed/metrics.jsonl")
    assert [row["step"] for row in resumed] == [4, 5, 6]
    for row, expected in zip(resumed, whole[3:], strict=True):
        same = ["loss", "grad_norm", "lr", "tokens", "samples", "epoch", "samples_digest"]
        for key in (*same, *(key for key in expected if "/" in key)):
            assert row[key] == expected[key], key
    assert_same(whole, alone[name], 1e-9)


@pytest.mark.timeout(600)
def test_a_decay_branch_is_the_run_that_had_its_keys_from_the_beginning(two: Path) -> None:
    branch, whole = read(two / "branch/metrics.jsonl"), read(two / "decayed/metrics.jsonl")
    assert [row["step"] for row in branch] == [5, 6]
    assert branch[0]["lr"] > branch[1]["lr"]
    for row, expected in zip(branch, whole[4:], strict=True):
        for key in ("loss", "grad_norm", "lr", "tokens", "samples", "samples_digest"):
            assert row[key] == expected[key], key


def test_rows_have_the_samples_of_the_order(alone: dict[str, list[dict]]) -> None:
    """The losses of the sources, too, must be consistent with that of the step."""
    rows = alone["ramp"]
    assert [row["samples"] for row in rows] == [5, 10, 24, 38, 52, 55]
    assert np.diff([0, *(row["tokens"] for row in alone["length"])]).tolist() == [
        14 * n for n in (8, 8, 26, 26, 48, 48)
    ]
    losses = [{key: row[key] for key in row if key.startswith("source_loss/")} for row in alone["both"]]
    assert set().union(*losses[:3]) == {"source_loss/ragged", "source_loss/text", "source_loss/tokens"}
    assert ["source_loss/tokens" in of for of in losses[2:]] == [True, False, False, False]  # the weight is 0 from then
    assert set(losses[-1]) == {"source_loss/text"}  # 3 samples, of which 1/20 would be ragged
    assert losses[-1]["source_loss/text"] == pytest.approx(alone["both"][-1]["loss"], rel=1e-12)
    for row, of in zip(alone["both"], losses, strict=True):
        assert min(of.values()) <= row["loss"] <= max(of.values()) or len(of) == 1
