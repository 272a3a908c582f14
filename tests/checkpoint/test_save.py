"""Saving: whole or not at all, beside the training, and told aloud when it goes wrong (more faults: test_faults.py)."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from meshtrain.checkpoint import commit, save
from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint.commit import CheckpointWrite, checkpoint_bytes
from meshtrain.checkpoint.placement import Placement
from meshtrain.checkpoint.replica_check import Sums, bit_sum, describe_divergence, find_divergence
from meshtrain.checkpoint.save import Saver
from meshtrain.checkpoint.shard_file import write_shard
from meshtrain.checkpoint.state import State
from meshtrain.checkpoint.verify import verify
from meshtrain.errors import bytes_text
from meshtrain.job.environment import Environment
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from tests.checkpoint.faults import SHARD
from tests.checkpoint.going_on import small_run
from tests.checkpoint.known import ABOUT, CPU, alone, clear, fill, on, whole
from tests.launching import Finished, forked, side_by_side
from tests.parallel.test_tensor_parallel import assert_none_failed


@pytest.fixture(scope="module")
def filled() -> State:
    return on(alone(), {})


@pytest.fixture
def state(filled: State) -> State:
    fill(filled)
    return filled


@pytest.fixture
def printed() -> list[str]:
    return []


@pytest.fixture
def saver(state: State, tmp_path: Path, printed: list[str]) -> Iterator[Callable[..., Saver]]:
    """Makes one that writes to the test's folder."""
    savers: list[Saver] = []

    def make(job: Job | None = None, **options: Any) -> Saver:
        savers.append(Saver(state, tmp_path, job or alone(), say=printed.append, **options))
        return savers[-1]

    yield make
    for each in savers:
        each.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A disk on which writing begins, and goes on when it is let go; `at_begin` is called in between."""
    disk = SimpleNamespace(begun=threading.Event(), go=threading.Event(), at_begin=lambda: None)

    def write(*arguments: Any) -> Any:
        disk.begun.set()
        disk.at_begin()
        assert disk.go.wait(60)
        return write_shard(*arguments)

    monkeypatch.setattr(commit, "write_shard", write)
    yield disk
    disk.go.set()


def time_is_over(one: Saver) -> None:
    assert one._current is not None
    one._current.limit_s = 0.0


def test_training_goes_on_while_its_state_is_written(
    saver: Callable[..., Saver], state: State, tmp_path: Path, printed: list[str], slow: SimpleNamespace
) -> None:
    """The checkpoint has the state of its step, and other programs can read it."""
    one = saver()
    one.save(1, ABOUT)
    assert slow.begun.wait(60)
    one.poll()
    assert (one.saved, printed) == (None, [])
    clear(state)  # the training goes on
    slow.go.set()
    one.wait()
    assert (one.saved, one.problem, one.wants_stop) == (1, None, None)
    checkpoint = tmp_path / "step_0000001"
    assert sorted(os.listdir(checkpoint)) == ["COMPLETE", "manifest.json", SHARD]
    assert not verify(checkpoint)
    tensors = load_file(checkpoint / SHARD)
    assert tensors.keys() == state.placements.keys()
    for name, placement in state.placements.items():
        assert torch.equal(tensors[name], whole(name, placement)), name
    written = (checkpoint / SHARD).stat().st_size
    (line,) = printed
    assert line.startswith(f"checkpoint step_0000001: {bytes_text(written)} in ")
    assert "training waited" in line
    assert written <= checkpoint_bytes(state.placements, 1) <= 1.2 * written


@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_is_given_up_and_none_begun_until_it_ends(
    saver: Callable[..., Saver], tmp_path: Path, printed: list[str], slow: SimpleNamespace, in_background: bool
) -> None:
    one = saver(in_background=in_background)
    slow.at_begin = lambda: time_is_over(one)
    one.save(1, ABOUT, wait=True)
    problem = "it took longer than 0 s (checkpoint.timeout_s): rank 0 on host here has not finished it"
    assert (one.saved, one.problem, one.wants_stop) == (None, problem, None)
    one.save(2, ABOUT)
    assert one.problem == "rank 0 still waits for the disk with that of step 1, which was given up"
    assert printed[-1].endswith("training goes on, and the checkpoints before it are there")
    slow.go.set()
    one._thread.join(60)
    assert os.listdir(tmp_path) == [], "nothing is left of it"
    slow.at_begin = lambda: None
    one.save(3, ABOUT, wait=True)
    assert (one.saved, one.problem) == (3, None)


@pytest.mark.parametrize("given_up", [True, False])
def test_a_run_that_ends_does_not_wait_for_the_disk(
    saver: Callable[..., Saver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: SimpleNamespace, given_up: bool
) -> None:
    monkeypatch.setattr(save, "CLOSING_S", 0.1)
    one = saver(on_failure="stop")
    if given_up:
        slow.at_begin = lambda: time_is_over(one)
    one.save(1, ABOUT, wait=given_up)
    assert slow.begun.wait(60)
    one.close()
    assert one._thread.is_alive()
    assert os.listdir(tmp_path) == [".step_0000001.tmp"]
    if given_up:
        assert str(one.wants_stop).startswith("there is no checkpoint of step 1: it took longer")


def test_a_slow_save_is_said_once(
    saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch, printed: list[str], slow: SimpleNamespace
) -> None:
    one = saver()
    one.last_save_s = 1e-9
    one.save(1, ABOUT)
    one.poll()
    assert not printed
    monkeypatch.setattr(save, "SLOW_LEAST_S", 0.0)
    one.poll()
    one.poll()
    (line,) = printed
    assert line.startswith("warning: the checkpoint of step 1 has been written for ")
    assert line.endswith("and the last one took 0 s: the file system is slow, or hangs")


# Two ranks, one of which is not there -------------------------------------------------------------------------------


def of_two(rank: int, store: dist.Store | None) -> Job:
    return Job(Environment("none", rank, 2, rank, "here", None), CPU, store)


def write_of(job: Job, place: Path) -> CheckpointWrite:
    """A save whose time is over when it begins."""
    state: Any = SimpleNamespace(placements={}, layout=None)
    sums: Any = SimpleNamespace(digests=lambda: {}, inconsistent_ties=lambda: ["w"], of_kind=lambda _: {})
    snapshot: Any = SimpleNamespace(wait=lambda: 0.0)
    return CheckpointWrite(state, place, job, 1, ABOUT, snapshot, sums, limit_s=0.0)


def test_a_rank_that_is_stuck_when_ranks_have_diverged_is_given_up(
    saver: Callable[..., Saver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run ends for it: what it holds is not what it should hold."""
    monkeypatch.setattr(commit, "find_divergence", lambda *_: [])
    store = dist.HashStore()
    first, stuck = (write_of(of_two(rank, store), tmp_path) for rank in (0, 1))
    thread = threading.Thread(target=first.run, args=[None], daemon=True)
    thread.start()
    stuck._prepare_round.put([{}, []])
    assert stuck._prepare_round.receive()["apart"] == [[0, ["w"]]]
    deadline = time.monotonic() + 60
    while first._gathering is not first._divergence_round and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.poll()
    assert stuck.poll()
    thread.join(60)
    assert first.done.is_set()
    assert stuck.problem == first.problem
    assert str(first.problem).endswith("rank 1 has not said what it holds; what must be equal on several ranks is not")
    assert [(one.given_up, one.diverged) for one in (first, stuck)] == [(True, True)] * 2
    one = saver()
    one._conclude(first)
    assert one.diverged
    assert one.wants_stop == f"there is no checkpoint of step 1: {first.problem}"


def test_a_save_is_given_up_before_its_word_is_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that hears it must know what to leave; and it may end its wait while the main thread looks."""
    one = write_of(of_two(0, dist.HashStore()), tmp_path)
    known: list[bool] = []
    monkeypatch.setattr(one._commit_round, "broadcast", lambda _: known.append(one.given_up))
    seen = iter([one._prepare_round, None])
    monkeypatch.setattr(CheckpointWrite, "_gathering", property(lambda _: next(seen)), raising=False)
    assert one.poll()
    assert known == [True]
    assert str(one.problem).endswith("rank 0, 1 has not begun to write")


@pytest.mark.timeout(60)
def test_who_has_no_thread_gives_a_save_up_as_well(
    saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = saver(of_two(0, dist.HashStore()), limit_s=0.3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        one.save(1, ABOUT, wait=True)
    assert str(one.problem).startswith("it took longer than 0.3 s")
    assert str(one.problem).endswith("rank 1 has not begun to write")


# Copies that differ -------------------------------------------------------------------------------------------------


def test_one_changed_bit_changes_the_sum() -> None:
    for tensor in (torch.randn(5, 3), torch.randn(7).double(), torch.randn(9).bfloat16(), torch.tensor([True, False])):
        total = bit_sum(tensor)
        for at in range(tensor.nbytes):
            data = tensor.clone().view(-1).view(torch.uint8)
            data[at] ^= 0x40
            assert bit_sum(data.view(tensor.dtype)) != total
    x = torch.arange(12.0)
    assert bit_sum(x[1:]) == bit_sum(x[1:].clone()), "also where memory begins anywhere"
    assert bit_sum(x.view(3, 4).t()) == bit_sum(x.view(3, 4).t().contiguous())


def test_the_majority_is_right_and_few_are_asked() -> None:
    """8 ranks hold all of `a`; of `b` each pair of `tp` holds a half."""
    layout = Layout({"dp_replicate": 8, "tp": 2})
    placements = {"a": Placement((4,), "F32"), "b": Placement((4,), "F32", (("tp", 0),))}
    digests = [{"0": "same", "1": f"half {rank % 2}"} for rank in range(16)]
    assert find_divergence(placements, layout, digests) == []
    for rank in (3, 5, 7, 9, 11, 13):
        digests[rank]["1"] = f"other {rank}"
    (divergence,) = find_divergence(placements, layout, digests)
    odd_ranks = tuple(range(1, 16, 2))
    assert (divergence.kind, divergence.group, divergence.odd) == (1, odd_ranks, odd_ranks)
    assert divergence.reporters == (1, 3, 5, 7), "nobody has a majority"
    digests[3]["1"] = digests[5]["1"] = digests[7]["1"] = "half 1"
    (divergence,) = find_divergence(placements, layout, digests)
    assert (divergence.odd, divergence.reporters) == ((9, 11, 13), (9, 11, 13, 1))
    sums = {rank: {"b": [rank], "c": [5]} for rank in (9, 11, 13, 1)}
    description = describe_divergence(divergence, sums, [f"rank {rank}" for rank in range(16)])
    assert description == "rank 9 and rank 11 and rank 13 differ from the 5 other ranks that hold the same part, in b"


def test_nothing_is_summed_up_where_nobody_else_holds_the_same(state: State) -> None:
    sums = Sums(state)
    assert sums.digests() == {}
    assert sums.inconsistent_ties() == []


# Jobs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_ranks_agree_whatever_happens_to_one(tmp_path: Path) -> None:
    """A slow disk, a folder that vanishes, copies that differ: see ranks.py."""
    job = forked(4, "-m", "tests.checkpoint.ranks", str(tmp_path), "save", timeout=300)
    assert_none_failed(job, 4, 50)


@pytest.mark.timeout(400)
def test_a_rank_that_is_killed_while_it_writes_leaves_no_checkpoint(tmp_path: Path) -> None:
    job = forked(4, "-m", "tests.checkpoint.ranks", str(tmp_path), "killed", timeout=300)
    assert job.status != 0
    place = tmp_path / "killed"
    assert sorted(os.listdir(place)) == [".step_0000002.tmp", "step_0000001"]
    assert folder.complete_steps(place) == [1]
    assert not verify(place / "step_0000001")
    assert folder.clear_unfinished(place) == [place / ".step_0000002.tmp"]
    shutil.rmtree(place)


def test_a_slow_disk_ends_no_job(tmp_path: Path) -> None:
    """Rank 1 takes several deadlines for its second file: in the background, and while all wait, in jobs side by side,
    which sleep for most of their time."""
    options = (
        "train.steps=8",
        "train.step_timeout_s=2",
        "train.chaos=[{fault: slow, rank: 1, step: 4, during: save, seconds: 9}]",
        "checkpoint.every=2",
        "data.workers=0",
        "layout={dp_shard: 2}",
    )
    folders = [tmp_path / name for name in ("true", "false")]

    def train(place: Path) -> Finished:
        place.mkdir()
        in_background = f"checkpoint.in_background={place.name}"
        return forked(2, "-m", "meshtrain.train", small_run(place), *options, in_background)

    for place, job in zip(folders, side_by_side(*(partial(train, place) for place in folders)), strict=True):
        job.check()
        assert folder.complete_steps(place / "run/checkpoints") == [4, 6, 8]
        assert "waiting for rank 1 on host" in job.err, "a deadline has passed, and who is waited for was said"
