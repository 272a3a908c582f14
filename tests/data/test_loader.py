"""The loader: the same microbatches with any number of workers and ranks, and what goes wrong in a
worker."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.attention import AttentionContext, cumulative_lengths
from meshtrain.data import IGNORE, Batch, EvalBatches, Samples, loader, train_batches
from meshtrain.data.order import batch_samples, items, microbatches
from meshtrain.errors import InputError
from tests.data.conftest import Opener
from tests.data.files import write_lines
from tests.properties import given, st


class Numbers(Samples):
    """Sample i is the number i, its target the epoch times 1000 plus i."""

    name = "numbers"

    def __init__(self, n: int, failing: int | None = None, error: Exception | None = None) -> None:
        self.n, self.failing, self.error = n, failing, error

    def __len__(self) -> int:
        return self.n

    def item(self, index: int, epoch: int):
        if index == self.failing:
            raise self.error
        return (torch.tensor([index]), None), torch.tensor(1000 * epoch + index)


def values(batches: Sequence[Batch]) -> list[int]:
    """The targets that count."""
    return [value for batch in batches for value in batch.targets.tolist() if value != IGNORE]


def batches_of(samples: Samples, **keys: Any) -> Iterator[list[Batch]]:
    default = {
        "seed": 0,
        "first_step": 0,
        "steps": 2,
        "global_size": 4,
        "micro_size": 2,
        "rank": 0,
        "ranks": 1,
    }
    return train_batches(samples, **(default | keys))


def flat(steps: Iterator[list[Batch]]) -> list[Batch]:
    return [batch for batches in steps for batch in batches]


def assert_same(batches: Sequence[Batch], others: Sequence[Batch]) -> None:
    for one, other in zip(batches, others, strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        for a, b in zip((*one.inputs, one.targets), (*other.inputs, other.targets), strict=True):
            assert torch.equal(a, b)


@given(
    st.integers(1, 30), st.integers(1, 20), st.integers(1, 6), st.integers(1, 7), st.integers(0, 9)
)
def test_the_ranks_together_have_the_global_batch(
    n: int, size: int, micro: int, ranks: int, first_step: int
) -> None:
    keys = {
        "seed": 5,
        "first_step": first_step,
        "steps": first_step + 3,
        "global_size": size,
        "micro_size": micro,
    }
    shares = [list(batches_of(Numbers(n), **keys, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert {len(share) for share in shares} == {3}
    for number in range(3):
        positions = range((first_step + number) * size, (first_step + number + 1) * size)
        expected = [1000 * epoch + sample for epoch, sample in items(5, positions, n)]
        assert [value for share in shares for value in values(share[number])] == expected
        assert {len(share[number]) for share in shares} == {microbatches(size, micro, ranks)}
    for batch in flat(step for share in shares for step in share):
        assert batch.targets.shape == (micro,)
        assert batch.inputs[0].shape == (micro, 1)
        assert batch.inputs[1] is None
        fillers = batch.inputs[0][batch.targets == IGNORE]
        assert ((fillers >= 0) & (fillers < n)).all()


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 7))
def test_evaluation_sees_each_sample_once(n: int, micro: int, ranks: int) -> None:
    loaders = [
        EvalBatches(Numbers(n), micro_size=micro, rank=rank, ranks=ranks) for rank in range(ranks)
    ]
    shares = [list(loader) for loader in loaders]
    assert [value for share in shares for value in values(share)] == list(range(n))
    assert (
        {len(loader) for loader in loaders} == {len(share) for share in shares} == {len(shares[0])}
    )


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 7))
def test_an_evaluation_in_steps_has_the_same_samples_together_on_any_ranks(
    n: int, together: int, ranks: int
) -> None:
    """Each step is one microbatch, of which every rank knows how many samples it has."""
    micro = -(-together // ranks)
    loaders = [
        EvalBatches(Numbers(n), micro_size=micro, rank=rank, ranks=ranks, together=together)
        for rank in range(ranks)
    ]
    expected = [list(range(n))[start : start + together] for start in range(0, n, together)]
    steps = list(zip(*loaders, strict=True))
    assert [values(batches) for batches in steps] == expected
    for batches, samples in zip(steps, expected, strict=True):
        assert {batch.together for batch in batches} == {len(samples)}


def test_a_microbatch_that_is_a_whole_step_knows_its_samples_on_all_ranks() -> None:
    keys = {"global_size": [[0, 3], [1, 7]], "micro_size": 2, "ranks": 2, "rank": 1}
    found = [[batch.together for batch in step] for step in batches_of(Numbers(20), **keys)]
    assert found == [[3], [None, None]]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(opened: Opener, tmp_path: Path, workers: int) -> None:
    path = write_lines(
        tmp_path / "x.jsonl", [{"prompt": "question ", "completion": "answer"}] * 200
    )
    data = opened(source="jsonl", path=path, seq_len=16, mask_documents=True, validation=0.2)
    keys = {"seed": 1, "steps": 6, "global_size": 10, "micro_size": 4, "rank": 1, "ranks": 3}
    alone, helped = (list(batches_of(data.train, **keys, workers=count)) for count in (0, workers))
    assert len(alone) == len(helped) == 6
    assert_same(flat(alone), flat(helped))
    assert any(IGNORE in batch.targets for batch in alone[0])
    loader = EvalBatches(data.validation, micro_size=4, rank=0, ranks=1, workers=workers)
    expected = torch.stack([data.validation.item(i, 0)[0][0] for i in range(len(data.validation))])
    for _ in range(2):
        assert torch.equal(
            torch.cat([batch.inputs[0] for batch in loader])[: len(expected)], expected
        )


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize(
    ("workers", "prefetch", "ahead"), [(2, 1, 8), (2, 2, 8), (3, 1, 9), (2, 6, 12), (1, 2, 8)]
)
def test_a_whole_step_is_read_ahead(monkeypatch, workers: int, prefetch: int, ahead: int) -> None:
    """And no more than that, or than what was asked for: what is asked of the workers has to fit
    into memory."""
    asked = []
    filled = loader._fill
    monkeypatch.setattr(
        loader, "_fill", lambda *slots: (asked.append(slot) or slot for slot in filled(*slots))
    )
    monkeypatch.setattr(loader, "PREFETCH", prefetch)
    batches = batches_of(Numbers(99), steps=9, global_size=16, workers=workers)
    for step in (1, 2, 3):
        assert len(next(batches)) == 8
        assert len(asked) == 8 * step + ahead
    batches.close()


def test_evaluation_keeps_its_workers_and_may_be_left_early() -> None:
    class Pids(Numbers):
        def item(self, index: int, epoch: int):
            return (torch.tensor([os.getpid()]),), torch.tensor(index)

    loader = EvalBatches(Pids(20), micro_size=2, rank=0, ranks=1, workers=1)
    first = next(iter(loader)).inputs[0][0].item()
    rounds = [list(loader) for _ in range(2)]
    assert {
        pid for batches in rounds for batch in batches for pid in batch.inputs[0].flatten().tolist()
    } == {first}
    assert first != os.getpid()
    assert [values(batches) for batches in rounds] == [list(range(20))] * 2


def test_reading_ahead_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    for workers in (0, 1):
        list(batches_of(Numbers(9), workers=workers))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "seen", "message"),
    [
        (
            OSError("the disk is gone"),
            RuntimeError,
            r"sample 7 \(epoch 0\) of numbers .* OSError: the disk is gone",
        ),
        (
            InputError("sample 7 is not what it should be"),
            InputError,
            "^sample 7 is not what it should be$",
        ),
    ],
)
def test_a_sample_that_cannot_be_read_is_named(
    workers: int, error: Exception, seen: Any, message: str
) -> None:
    samples = Numbers(20, failing=7, error=error)
    with pytest.raises(seen, match=message) as caught:
        list(batches_of(samples, steps=9, global_size=8, workers=workers))
    assert caught.tb is not None  # it holds the frames; the workers must not wait until it goes
    assert not multiprocessing.active_children(), "the workers were not told to end"


SCRIPT = """
import os, signal, sys, time
import torch
from meshtrain.data import Samples, train_batches

class Slow(Samples):
    name = "slow"
    def __len__(self): return 1000
    def item(self, index, epoch):
        time.sleep(0.02)
        return (torch.tensor([os.getpid()]),), torch.tensor(index)

batches = train_batches(Slow(), seed=0, first_step=0, steps=1000, global_size=2, micro_size=1,
                        rank=0, ranks=1, workers=2)
workers = {batch.inputs[0].item() for batch in next(batches)}
asked = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda *_: asked.append(1))
print(*workers, flush=True)
while not asked:
    next(batches)
for _ in range(10):
    next(batches)  # a run that was asked to stop finishes its step
print("finished", flush=True)
while sys.argv[1] == "linger":
    time.sleep(1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_workers_survive_a_signal_to_the_whole_group_and_end_with_their_parent(
    number: signal.Signals,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "leave"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, b"finished\n", b"")
    assert len(workers) == 2
    assert not any(alive(pid) for pid in workers)


def test_workers_end_when_their_parent_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "linger"], stdout=subprocess.PIPE
    ) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# A user's own file


def test_a_users_own_data(opened: Opener, own: str) -> None:
    data = opened(source=own, path="both", n_outputs=5)
    assert (data.task, len(data.train), len(data.validation)) == ("classification", 50, 3)
    split = opened(source=own, validation=0.2)
    assert len(split.train) + len(split.validation) == 50
    batches = list(batches_of(data.train, micro_size=4, workers=1))
    samples = batch_samples(0, 1, 4, 50)
    assert batches[1][0].inputs[0].flatten().tolist() == samples
    assert batches[1][0].targets.tolist() == [sample % 5 for sample in samples]
    with pytest.raises(OSError, match="Input/output error"):
        opened(source=own, path="disk")  # that is not for the user to mend


def test_a_users_own_text_gets_positions_and_may_change_with_the_epoch(
    opened: Opener, own: str
) -> None:
    data = opened(source=own, path="text", validation=0)
    assert data.task == "language"
    assert data.tokenizer is not None
    (tokens, positions, documents), targets = data.train.item(2, 1)
    assert tokens.tolist() == list(range(3, 11))
    assert targets.tolist() == list(range(4, 12))
    assert positions.tolist() == list(range(8))
    assert documents is None


# Batches


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_pinned_where_there_is_a_gpu(opened: Opener, workers: int) -> None:
    data = opened(seq_len=32, mask_documents=True)
    torch.zeros(1, device="cuda")
    pinned = flat(batches_of(data.train, workers=workers))
    assert_same(flat(batches_of(data.train)), pinned)
    assert all(tensor.is_pinned() for batch in pinned for tensor in (*batch.inputs, batch.targets))


@pytest.mark.parametrize("masked", [True, False])
def test_a_model_with_a_cp_plan_gets_the_record_in_the_place_of_documents(
    opened: Opener, masked: bool
) -> None:
    data = opened(seq_len=32, mask_documents=masked)
    plain = flat(batches_of(data.train))
    records = flat(batches_of(data.train, prepare=Batch.with_context))
    for one, other in zip(plain, records, strict=True):
        documents, context = one.inputs[2], other.inputs[2]
        assert isinstance(context, AttentionContext)
        for a, b in zip(
            (*one.inputs[:2], one.targets), (*other.inputs[:2], other.targets), strict=True
        ):
            assert torch.equal(a, b)
        assert (context.documents is None) is (documents is None) is not masked
        if masked:
            assert torch.equal(context.documents, documents)
            assert torch.equal(context.lengths, cumulative_lengths(documents))
        assert other.to(torch.device("meta"), torch.bfloat16).inputs[2].shape == context.shape
        assert other.with_context() is other
    evaluated = EvalBatches(data.train, micro_size=2, rank=0, ranks=1, prepare=Batch.with_context)
    assert isinstance(next(iter(evaluated)).inputs[2], AttentionContext)


def test_tensors_have_names_and_some_of_them_lie_along_the_sequence() -> None:
    tokens = torch.arange(12).view(2, 6)
    batch = Batch.of((tokens, tokens, None, torch.zeros(2, 3), tokens), tokens)
    assert list(batch.tensors) == ["tokens", "positions", "documents", "input_3", "input_4"]
    halves = batch.along_sequence(lambda x, dim: x.narrow(dim, 0, 3))
    assert [None if x is None else tuple(x.shape) for x in halves.inputs] == [
        (2, 3),
        (2, 3),
        None,
        (2, 3),
        (2, 3),
    ]
    assert torch.equal(halves.inputs[4], tokens[:, :3])
    assert torch.equal(halves.targets, tokens[:, :3])
    images = Batch.of(
        (torch.zeros(2, 1, 8, 8), torch.zeros(2, 2)), torch.zeros(2, dtype=torch.int64)
    )
    assert list(images.tensors) == ["images", "input_1"]
    assert images.along_sequence(lambda x, dim: x.narrow(dim, 0, 1)).inputs[1].shape == (2, 2)
    assert images.with_context() is images
    inputs, targets = images.to(torch.device("meta"), torch.bfloat16)
    assert (inputs[0].dtype, targets.dtype) == (torch.bfloat16, torch.int64)
