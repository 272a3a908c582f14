"""Mixtures of sources and growing batches: the same curve on every layout, and the same bits after
a resume."""

from pathlib import Path

import numpy as np
import pytest

from meshtrain.data import Document, write
from meshtrain.job.process import Job
from tests import ranks
from tests.parity.cells import assert_same
from tests.parity.experiments import QUICKSTART, SMALL, Experiment, write_ragged
from tests.parity.runs import train_alone, train_here
from tests.ranks import made_once

RAMP = "batch.global_size=[[0, 5], [2, 14], [5, 3]]"
LENGTH = "data.seq_len_warmup=[[0, 8], [2, 26], [4, 48]]"
SIX = ("train.precision=float64", "train.steps=6", "optimizer.warmup_steps=2", "batch.micro_size=2")
SHARDED = "layout={dp_shard: 2}"  # where runs are resumed
ONE_F_ONE_B, ZBV = "pipeline.schedule=1f1b", ("pipeline.schedule=zbv", "model.num_hidden_layers=2")
INTERLEAVED = ("pipeline.schedule=interleaved-1f1b", "batch.micro_size=1")
# (ranks, experiment, layout, more overrides)
CELLS = (
    (2, "ramp", "{dp_replicate: 2}", ()),
    (2, "mixture", "{cp: 2}", ()),
    (2, "length", "{tp: 2}", ()),
    (2, "both", "{pp: 2}", ZBV),
    (4, "both", "{dp_shard: 4}", ()),
)
SLOW_CELLS = (
    (2, "mixture", "{dp_replicate: 2}", ()),
    (2, "mixture", "{tp: 2}", ("parallel.sequence_parallel=false",)),
    (2, "length", "{pp: 2}", (ONE_F_ONE_B,)),
    (2, "length", "{cp: 2}", ()),
    (4, "mixture", "{dp_shard: 2, tp: 2}", ()),
    (4, "both", "{pp: 2, dp_replicate: 2}", INTERLEAVED),
)


def write_sources(folder: Path) -> None:
    rng = np.random.default_rng(0)
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten. " * 60)
    ids = (Document(rng.integers(1, 200, 50)) for _ in range(40))
    # two bytes per token
    write(folder / "tokens", ids, vocab_size=300, tokenizer="bytes", source="random")
    write_ragged(folder / "ragged.jsonl")


def experiment_of(name: str, session_path: Path) -> Experiment:
    data = made_once(session_path / "sources", write_sources)
    sources = (
        f"{{name: ragged, source: jsonl, path: {data}/ragged.jsonl, epochs: 2, weight: [[0, 0.5], "
        f"[3, 0.05]]}}",
        f"{{name: text, source: text, path: {data}/text.txt, weight: [[0, 0.3], [3, 0.95]]}}",
        f"{{name: tokens, source: tokens, path: {data}/tokens, weight: [[0, 0.2], [3, 0]]}}",
    )
    mixture = (
        f"data.sources=[{', '.join(sources)}]",
        "data.validation=0.1",
        "train.eval_every=6",
        "train.eval_samples=9",
    )
    keys = {
        "mixture": (*mixture, "batch.global_size=7"),
        "ramp": (RAMP,),
        "both": (*mixture, RAMP),
        "length": (LENGTH,),
    }
    common = (*SMALL, f"data.cache={session_path / 'cache'}", *SIX, "data.mask_documents=true")
    return Experiment(name, QUICKSTART, (*common, *keys[name]), 1e-9)


ROWS = [
    ranks.row(*cell, name=" ".join((*cell[1:3], *cell[3])).strip(), slow=cell in SLOW_CELLS)
    for cell in (*CELLS, *SLOW_CELLS)
]


@pytest.mark.parametrize(("job", "name", "layout", "more"), ROWS, indirect=["job"])
def test_same_curve_as_one_process(
    job: Job, name: str, layout: str, more: tuple[str, ...], shared_path: Path, session_path: Path
) -> None:
    experiment = experiment_of(name, session_path)
    # More layers are another experiment.
    of_one_process = tuple(key for key in more if key.startswith("model."))
    plain = Experiment(
        name, QUICKSTART, (*experiment.overrides, *of_one_process), experiment.tolerance
    )
    run = train_here(job, experiment, [*more, f"layout={layout}"], shared_path)
    assert_same(run.rows, train_alone(job, plain, session_path).rows, experiment.tolerance)


def same_bits(rows: list[dict], expected: list[dict]) -> None:
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "epoch", "samples_digest")
    for row, other in zip(rows, expected, strict=True):
        for key in (*keys, *(key for key in other if "/" in key)):
            assert row[key] == other[key], key


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["mixture", "ramp", "length"])
def test_a_resumed_run_goes_on_bit_for_bit(
    job: Job, name: str, shared_path: Path, session_path: Path
) -> None:
    experiment = experiment_of(name, session_path)
    whole = train_here(job, experiment, [SHARDED, "checkpoint.every=3"], shared_path / "whole").rows
    resume = f"checkpoint.resume={shared_path}/whole/checkpoints/step_0000003"
    same_bits(
        train_here(job, experiment, [SHARDED, resume], shared_path / "resumed").rows, whole[3:]
    )


@pytest.mark.ranks(2)
def test_a_decay_branch_is_the_run_that_had_its_keys_from_the_beginning(
    job: Job, shared_path: Path, session_path: Path
) -> None:
    experiment = experiment_of("ramp", session_path)
    decay = [SHARDED, "optimizer.schedule=wsd", "train.steps=6", "optimizer.decay_steps=2"]
    trunk = [
        SHARDED,
        "optimizer.schedule=wsd",
        "train.steps=7",
        "optimizer.decay_steps=1",
        "checkpoint.every=4",
    ]
    decayed = train_here(job, experiment, decay, shared_path / "decayed").rows
    train_here(job, experiment, trunk, shared_path / "trunk")
    resume = f"checkpoint.resume={shared_path}/trunk/checkpoints/step_0000004"
    branch = train_here(job, experiment, [*decay, resume], shared_path / "branch").rows
    same_bits(branch, decayed[4:])
    assert branch[0]["lr"] > branch[1]["lr"]


@pytest.mark.ranks(2)
def test_rows_have_the_samples_of_the_order(job: Job, session_path: Path) -> None:
    """The losses of the sources, too, must be consistent with that of the step."""
    ramp, length, both = (
        train_alone(job, experiment_of(name, session_path), session_path).rows
        for name in ("ramp", "length", "both")
    )
    assert [row["samples"] for row in ramp] == [5, 10, 24, 38, 52, 55]
    assert np.diff([0, *(row["tokens"] for row in length)]).tolist() == [
        14 * n for n in (8, 8, 26, 26, 48, 48)
    ]
    losses = [{key: row[key] for key in row if key.startswith("source_loss/")} for row in both]
    assert set().union(*losses[:3]) == {
        "source_loss/ragged",
        "source_loss/text",
        "source_loss/tokens",
    }
    with_tokens = ["source_loss/tokens" in of_step for of_step in losses[2:]]
    assert with_tokens == [True, False, False, False], "its weight is 0 from then"
    assert set(losses[-1]) == {"source_loss/text"}  # 3 samples, of which 1/20 would be ragged
    assert losses[-1]["source_loss/text"] == pytest.approx(both[-1]["loss"], rel=1e-12)
    for row, of_step in zip(both, losses, strict=True):
        assert min(of_step.values()) <= row["loss"] <= max(of_step.values()) or len(of_step) == 1
