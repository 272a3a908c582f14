"""Packed documents with variable-length attention, as on GPUs: runs have the same losses as with a
mask."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain import attention
from meshtrain.attention import AttentionContext
from meshtrain.job.process import Job
from tests.parity.cells import assert_same
from tests.parity.experiments import QUICKSTART, SMALL, Experiment
from tests.parity.runs import train_alone, train_here
from tests.ranks import made_once


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variable-length attention on CPUs, in all dtypes. Documents that are moved lose their values,
    so that building a mask from them fails."""
    from tests.varlen_on_cpu import KERNEL  # registers its operators

    plain_to = AttentionContext.to

    def to(self: AttentionContext, *args: Any, **kwargs: Any) -> Any:
        moved = plain_to(self, *args, **kwargs)
        if moved.kernel is None:
            return moved
        return AttentionContext(moved.documents.to("meta"), moved.lengths, moved.kernel)

    monkeypatch.setattr(AttentionContext, "to", to)
    monkeypatch.setattr(attention, "VARLEN_TYPES", (*attention.VARLEN_TYPES, torch.float64))
    monkeypatch.setattr(attention, "varlen_kernel", lambda *_: KERNEL)


def write_texts(folder: Path) -> None:
    # each sample of 48 tokens has a few texts, or part of one
    texts = [f"{i} " * (1 + i * i % 17) for i in range(400)]
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )


def packed(session_path: Path, masked: bool) -> Experiment:
    data = made_once(session_path / "packed", write_texts)
    keys = (
        "data.source=jsonl",
        f"data.path={data}/texts.jsonl",
        f"data.mask_documents={str(masked).lower()}",
    )
    keys += (
        f"data.cache={session_path / 'cache'}",
        "train.precision=float64",
        "train.steps=3",
        "train.eval_every=3",
    )
    return Experiment("packed", QUICKSTART, (*SMALL, *keys), 1e-9)


@pytest.mark.ranks(2)
def test_documents_show(job: Job, session_path: Path) -> None:
    masked, whole = (
        train_alone(job, packed(session_path, value), session_path).rows for value in (True, False)
    )
    assert abs(whole[-1]["loss"] / masked[-1]["loss"] - 1) > 1e-4


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "keys",
    [
        ("layout={dp_shard: 2}", "parallel.recompute=selective"),
        ("layout={tp: 2}", "parallel.recompute=full"),
        ("layout={pp: 2}",),
    ],
    ids=" ".join,
)
def test_runs_with_lengths_have_the_losses_of_runs_with_masks(
    job: Job,
    keys: tuple[str, ...],
    shared_path: Path,
    session_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    experiment = packed(session_path, masked=True)
    reference = train_alone(job, experiment, session_path).rows
    request.getfixturevalue("varlen")  # from here on: one process has masks
    assert_same(
        train_here(job, experiment, keys, shared_path).rows, reference, experiment.tolerance
    )
