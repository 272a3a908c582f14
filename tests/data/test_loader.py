"""The loader: the same microbatches with any number of workers and ranks, and what goes wrong in a worker."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from meshtrain.attention import AttentionContext, cumulative_lengths
from meshtrain.data import IGNORE, Batch, EvalBatches, OpenData, Samples, loader, train_batches
from meshtrain.data.order import batch_samples, items, microbatches
from meshtrain.errors import InputError
from tests.properties import given, st

Opener = Callable[..., OpenData]


class Numbers(Samples):
    """Sample i is the number i, its target the epoch times 1000 plus i."""

    name = "numbers"

    def __init__(self, n: int, failing: int | None = None, refused: int | None = None) -> None:
        self.n, self.failing, self.refused = n, failing, refused

    def __len__(self) -> int:
        return self.n

    def item(self, index: int, epoch: int):
        if index == self.failing:
            raise OSError("the disk is gone")
        if index == self.refused:
            raise InputError(f"sample {index} is not what it should be")
        return (torch.tensor([index]), None), torch.tensor(1000 * epoch + index)


def values(batches: Sequence[Batch]) -> list[int]:
    """The targets that count."""
    return [value for batch in batches for value in batch.targets.tolist() if value != IGNORE]


def flat(steps: Sequence[list[Batch]]) -> list[Batch]:
    return [batch for batches in steps for batch in batches]


@given(st.integers(1, 30), st.integers(1, 20), st.integers(1, 6), st.integers(1, 7), st.integers(0, 9))
def test_the_ranks_together_have_the_global_batch(n: int, size: int, micro: int, ranks: int, first_step: int) -> None:
    keys = {"seed": 5, "first_step": first_step, "steps": first_step + 3, "global_size": size, "micro_size": micro}
    shares = [list(train_batches(Numbers(n), **keys, rank=rank, ranks=ranks)) for rank in range(ranks)]
    for number in range(3):
        positions = range((first_step + number) * size, (first_step + number + 1) * size)
        expected = [1000 * epoch + sample for epoch, sample in items(5, positions, n)]
        assert [value for share in shares for value in values(share[number])] == expected
        for share in shares:
            assert len(share[number]) == microbatches(size, micro, ranks)
            for batch in share[number]:
                assert batch.targets.shape == (micro,)
                assert batch.inputs[0].shape == (micro, 1)
                assert batch.inputs[1] is None
                fillers = batch.inputs[0][batch.targets == IGNORE]
                assert all(0 <= filler < n for filler in fillers.flatten().tolist())
    for share in shares:
        assert len(share) == 3


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 7))
def test_evaluation_sees_each_sample_once(n: int, micro: int, ranks: int) -> None:
    loaders = [EvalBatches(Numbers(n), micro_size=micro, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [value for loader in loaders for value in values(list(loader))] == list(range(n))
    assert {len(loader) for loader in loaders} == {len(list(loaders[0]))}
    assert len({len(list(loader)) for loader in loaders}) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(opened: Opener, tmp_path: Path, workers: int) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "question ", "completion": "answer"}\n' * 200)
    data = opened(source="jsonl", path=str(path), seq_len=16, mask_documents=True, validation=0.2)
    keys = {"seed": 1, "first_step": 0, "steps": 6, "global_size": 10, "micro_size": 4, "rank": 1, "ranks": 3}
    alone = list(train_batches(data.train, **keys))
    helped = list(train_batches(data.train, **keys, workers=workers))
    assert len(alone) == len(helped) == 6
    for one, other in zip(flat(alone), flat(helped), strict=True):
        assert torch.equal(one.targets, other.targets)
        assert all(torch.equal(a, b) for a, b in zip(one.inputs, other.inputs, strict=True))
    assert any(IGNORE in batch.targets for batch in alone[0])
    loader = EvalBatches(data.validation, micro_size=4, rank=0, ranks=1, workers=workers)
    for _ in range(2):
        seen = torch.cat([batch.inputs[0] for batch in loader])[: len(data.validation)]
        assert torch.equal(seen, torch.stack([data.validation.item(i, 0)[0][0] for i in range(len(data.validation))]))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize(("workers", "prefetch", "ahead"), [(2, 1, 8), (2, 2, 8), (3, 1, 9), (2, 6, 12), (1, 2, 8)])
def test_a_whole_step_is_read_ahead(monkeypatch, workers: int, prefetch: int, ahead: int) -> None:
    """And no more than that, or than what was asked for: what is asked of the workers has to fit into memory."""
    asked = []
    filled = loader._fill
    monkeypatch.setattr(loader, "_fill", lambda *given: (asked.append(slots) or slots for slots in filled(*given)))
    keys = {"seed": 0, "first_step": 0, "steps": 9, "global_size": 16, "micro_size": 2, "rank": 0, "ranks": 1}
    batches = train_batches(Numbers(99), **keys, workers=workers, prefetch=prefetch)
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
    assert {pid for batches in rounds for batch in batches for pid in batch.inputs[0].flatten().tolist()} == {first}
    assert first != os.getpid()
    assert [values(batches) for batches in rounds] == [list(range(20))] * 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        EvalBatches(Numbers(20), micro_size=2, rank=0, ranks=1, worker=1)


def test_reading_ahead_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    keys = {"seed": 1, "first_step": 0, "steps": 2, "global_size": 4, "micro_size": 2, "rank": 0, "ranks": 1}
    list(train_batches(Numbers(9), **keys, workers=1))
    list(train_batches(Numbers(9), **keys))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(workers: int) -> None:
    keys = {"seed": 0, "first_step": 0, "steps": 9, "global_size": 8, "micro_size": 2, "rank": 0, "ranks": 1}
    with pytest.raises(RuntimeError, match=r"sample 7 \(epoch 0\) of numbers .* OSError: the disk is gone"):
        list(train_batches(Numbers(20, failing=7), **keys, workers=workers))
    with pytest.raises(InputError, match=r"^sample 7 is not what it should be$") as caught:
        list(train_batches(Numbers(20, refused=7), **keys, workers=workers))
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
def test_workers_survive_a_signal_to_the_whole_group_and_end_with_their_parent(number: signal.Signals) -> None:
    code = textwrap.dedent(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "-c", code, "leave"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, b"finished\n", b"")
    assert len(workers) == 2
    assert not any(alive(pid) for pid in workers)


def test_workers_end_when_their_parent_is_killed() -> None:
    code = textwrap.dedent(SCRIPT)
    with subprocess.Popen([sys.executable, "-c", code, "linger"], stdout=subprocess.PIPE) as process:
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


OWN = """
    import torch

    class Squares:
        def __init__(self, first, n): self.first, self.n = first, n
        def __len__(self): return self.n
        def __getitem__(self, index): return torch.tensor([float(index)]), (self.first + index) % 5

    class Text(Squares):
        def item(self, index, epoch):
            ids = torch.arange(9) + index + epoch
            return ids[:-1], ids[1:]
        __getitem__ = None

    def dataset(config, split):
        if config.path == "text":
            return Text(0, 4)
        if config.path == "wrong":
            return [1, 2, 3]
        if config.path == "lengths":
            return [(torch.arange(n), torch.arange(n)) for n in (8, 8, 9)]
        if config.path == "measured":
            return [(torch.zeros(1), 1.7)]
        if config.path == "list":
            return [([1, 2, 3], [2, 3, 4])]
        if config.path == "nothing":
            return 3
        if config.path == "absent":
            open("no/such/file")
        if config.path == "disk":
            raise OSError(5, "Input/output error", "somewhere")
        if split == "validation":
            return Squares(0, 3) if config.path == "both" else None
        return Squares(0, 50)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(OWN))
    return str(path)


def test_a_users_own_data(opened: Opener, own: str) -> None:
    found = opened(source=own, path="both", n_outputs=5)
    assert (found.task, len(found.train), len(found.validation)) == ("classification", 50, 3)
    held = opened(source=own, validation=0.2)
    assert len(held.train) + len(held.validation) == 50
    keys = {"seed": 0, "first_step": 0, "steps": 2, "global_size": 4, "micro_size": 4, "rank": 0, "ranks": 1}
    batches = list(train_batches(found.train, **keys, workers=1))
    samples = batch_samples(0, 1, 4, 50)
    assert batches[1][0].inputs[0].flatten().tolist() == samples
    assert batches[1][0].targets.tolist() == [sample % 5 for sample in samples]


def test_a_users_own_text_gets_positions_and_may_change_with_the_epoch(opened: Opener, own: str) -> None:
    found = opened(source=own, path="text", validation=0)
    assert found.task == "language"
    assert found.tokenizer is not None
    (tokens, positions, documents), targets = found.train.item(2, 1)
    assert tokens.tolist() == list(range(3, 11))
    assert targets.tolist() == list(range(4, 12))
    assert positions.tolist() == list(range(8))
    assert documents is None


def test_a_users_own_data_that_is_wrong(opened: Opener, own: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"item 0 is int, expected a pair"):
        opened(source=own, path="wrong", validation=0)
    with pytest.raises(InputError, match=r"item 0: its target holds 1\.7\d*: expected whole numbers"):
        opened(source=own, path="measured", validation=0)
    with pytest.raises(InputError, match=r"item 0: its inputs are 3 numbers: expected a tensor of tokens"):
        opened(source=own, path="list", validation=0)
    data = opened(source=own, path="lengths", validation=0)
    data.train.read([(0, 0), (0, 1)], 2)
    with pytest.raises(InputError, match=r"sample 1 have the shapes \[\(8,\), .* and of sample 2 \[\(9,\), "):
        data.train.read([(0, 1), (0, 2)], 2)
    with pytest.raises(InputError, match=r"gave int; expected an object with len"):
        opened(source=own, path="nothing")
    absent = rf"own.py: dataset\(config, 'train'\) cannot be used: it raises FileNotFoundError: .* \({own}:\d+\)$"
    with pytest.raises(InputError, match=absent):
        opened(source=own, path="absent")
    with pytest.raises(OSError, match="Input/output error"):
        opened(source=own, path="disk")  # that is not for the user to mend
    data = opened(source=own, path="both", n_outputs=4)
    with pytest.raises(InputError, match=r"the target 4 of sample 4 .* outside of the model's 4 outputs"):
        data.train.read([(0, 3), (0, 4)], 2)
    data = opened(source=own, path="text", validation=0, vocab_size=12)  # sample i of epoch e begins with i + e
    with pytest.raises(InputError, match=r"sample 3 holds the token id 12, but model\.vocab_size is 12: set it to at"):
        data.train.read([(1, 3), (2, 3)], 2)
    with pytest.raises(InputError, match=r"sample 3 holds the token id -1: expected ids from 0 on"):
        data.train.read([(1, 3), (-4, 3)], 2)
    (tmp_path / "empty.py").touch()
    with pytest.raises(InputError, match=r"exports no function `dataset"):
        opened(source=str(tmp_path / "empty.py"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_pinned_where_there_is_a_gpu(opened: Opener, workers: int) -> None:
    data = opened(seq_len=32, mask_documents=True)
    torch.zeros(1, device="cuda")
    keys = {"seed": 0, "first_step": 0, "steps": 3, "global_size": 4, "micro_size": 2, "rank": 0, "ranks": 1}
    plain = list(train_batches(data.train, **keys))
    pinned = list(train_batches(data.train, **keys, workers=workers, pin_memory=True))
    for one, other in zip(flat(plain), flat(pinned), strict=True):
        for a, b in zip((*one.inputs, one.targets), (*other.inputs, other.targets), strict=True):
            assert b.is_pinned()
            assert torch.equal(a, b)


def test_a_model_with_a_cp_plan_gets_the_record_in_the_place_of_documents(opened: Opener) -> None:
    keys = {"seed": 0, "first_step": 0, "steps": 2, "global_size": 4, "micro_size": 2, "rank": 0, "ranks": 1}
    for masked in (True, False):
        data = opened(seq_len=32, mask_documents=masked)
        plain = flat(train_batches(data.train, **keys))
        records = flat(train_batches(data.train, **keys, prepare=Batch.with_context))
        for one, other in zip(plain, records, strict=True):
            tokens, positions, documents = one.inputs
            context = other.inputs[2]
            assert isinstance(context, AttentionContext)
            assert torch.equal(other.inputs[0], tokens)
            assert torch.equal(other.inputs[1], positions)
            assert torch.equal(other.targets, one.targets)
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
    batch = Batch.of((tokens, torch.arange(6).expand(2, 6), None, torch.zeros(2, 3)), tokens)
    assert list(batch.tensors) == ["tokens", "positions", "documents", "input_3"]
    assert batch.inputs[0] is tokens
    halves = batch.along_sequence(lambda x, dim: x.narrow(dim, 0, 3))
    assert [None if x is None else tuple(x.shape) for x in halves.inputs] == [(2, 3), (2, 3), None, (2, 3)]
    assert halves.targets.tolist() == tokens[:, :3].tolist()
    images = Batch.of((torch.zeros(2, 1, 8, 8), torch.zeros(2, 2)), torch.zeros(2, dtype=torch.int64))
    assert list(images.tensors) == ["images", "input_1"]
    assert images.along_sequence(lambda x, dim: x.narrow(dim, 0, 1)).inputs[1].shape == (2, 2)
    assert images.with_context() is images
    inputs, targets = images.to(torch.device("meta"), torch.bfloat16)
    assert (inputs[0].dtype, targets.dtype) == (torch.bfloat16, torch.int64)


def test_a_further_text_input_lies_along_the_sequence() -> None:
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    cut = Batch.of((tokens, tokens, None, tokens), tokens).along_sequence(lambda x, dim: x.narrow(dim, 0, 8))
    assert [None if x is None else tuple(x.shape) for x in (*cut.inputs, cut.targets)] == [
        (2, 8), (2, 8), None, (2, 8), (2, 8)
    ]  # fmt: skip
