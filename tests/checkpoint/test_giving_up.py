"""A save that takes too long, or for which the machine has no thread or memory, fails; the run goes on."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshtrain.checkpoint import commit, save
from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint.commit import CheckpointWrite
from meshtrain.checkpoint.save import Saver
from meshtrain.checkpoint.shard_file import write_shard
from meshtrain.job.environment import Environment
from meshtrain.job.process import Job
from meshtrain.job.watchdog.deadlines import DeadlineClock
from meshtrain.job.watchdog.diagnose import diagnose
from meshtrain.job.watchdog.records import PendingCollective, RankReport, RankStatus, Reach
from tests.checkpoint.going_on import small_run
from tests.checkpoint.known import ABOUT, alone, fill, on
from tests.launching import Finished, forked, side_by_side


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Callable[..., Saver]]:
    made: list[Saver] = []
    state = on(alone(), {})
    fill(state)

    def make(**how: Any) -> Saver:
        said: list[str] = []
        made.append(Saver(state, tmp_path, alone(), say=said.append, **how))
        made[-1].said = said  # type: ignore[attr-defined]
        return made[-1]

    yield make
    for each in made:
        each.close()


class Hanging:
    """In place of write_shard: waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        monkeypatch.setattr(commit, "write_shard", self)

    def __call__(self, *arguments: Any) -> Any:
        assert self.go.wait(60)
        return write_shard(*arguments)


@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_is_given_up_and_none_begun_until_it_ends(
    saver: Callable[..., Saver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    hanging = Hanging(monkeypatch)
    one = saver(limit_s=0.3, in_background=in_background)
    one.save(1, ABOUT)
    one.wait()
    problem = "it took longer than 0.3 s (checkpoint.timeout_s): rank 0 on host here has not finished it"
    assert (one.saved, one.problem, one.wants_stop) == (None, problem, None)
    one.save(2, ABOUT)
    assert one.problem == "rank 0 still waits for the disk with that of step 1, which was given up"
    assert one.said[-1].endswith("training goes on, and the checkpoints before it are there")
    hanging.go.set()
    one._thread.join(60)
    assert [path.name for path in tmp_path.iterdir()] == [], "nothing is left of it"
    one._limit_s = 60.0  # a busy machine is slow
    one.save(3, ABOUT, wait=True)
    assert (one.saved, one.problem) == (3, None)


def test_a_save_that_is_given_up_is_a_failed_one(saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(monkeypatch)
    monkeypatch.setattr(save, "CLOSING_S", 0.1)
    one = saver(limit_s=0.1, on_failure="stop")
    one.save(1, ABOUT, wait=True)
    assert "there is no checkpoint of step 1: it took longer" in str(one.wants_stop)
    one.close()  # does not wait for the disk
    assert one._thread.is_alive()
    hanging.go.set()


def test_a_slow_save_is_said_once(saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch) -> None:
    one = saver()
    one.save(1, ABOUT, wait=True)
    one.last_save_s = 0.05
    monkeypatch.setattr(save, "SLOW_LEAST_S", 0.1)
    hanging = Hanging(monkeypatch)
    one.save(2, ABOUT)
    one.poll()
    slow = [line for line in one.said if "the file system is slow, or hangs" in line]
    assert not slow
    time.sleep(0.2)
    one.poll()
    one.poll()
    (slow,) = [line for line in one.said if "the file system is slow, or hangs" in line]
    assert slow.startswith("warning: the checkpoint of step 2 has been written for 0 s now, and the last one took 0 s")
    hanging.go.set()
    one.wait()
    assert one.saved == 2


def no_memory(*arguments: Any, **fields: Any) -> Any:
    raise MemoryError


def test_too_little_memory_is_a_failed_save(saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch) -> None:
    one = saver()
    with monkeypatch.context() as patch:
        patch.setattr(commit, "write_shard", no_memory)
        one.save(1, ABOUT, wait=True)
    assert one.problem == "rank 0 on host here: MemoryError"
    with monkeypatch.context() as patch:
        patch.setattr(commit, "Manifest", no_memory)
        one.save(2, ABOUT, wait=True)
    assert one.problem == "rank 0 on host here: MemoryError"
    one.save(3, ABOUT, wait=True)
    assert (one.saved, one.problem) == (3, None)


def of_two(rank: int, store: dist.Store | None) -> Job:
    return Job(Environment("none", rank, 2, rank, "here", None), torch.device("cpu"), store)


def attempt_of(job: Job, place: Path, **how: Any) -> CheckpointWrite:
    state: Any = SimpleNamespace(placements={}, layout=None)
    sums: Any = SimpleNamespace(digests=lambda: {}, inconsistent_ties=lambda: ["w"], of_kind=lambda _: {})
    return CheckpointWrite(state, place, job, 1, ABOUT, SimpleNamespace(wait=lambda: 0.0), sums, **how)  # type: ignore[arg-type]


def test_a_rank_that_is_stuck_when_ranks_have_diverged_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run ends for it: what it holds is not what it should hold."""
    monkeypatch.setattr(commit, "find_divergence", lambda *_: [])
    store = dist.HashStore()
    first, stuck = (attempt_of(of_two(rank, store), tmp_path, limit_s=0.0) for rank in (0, 1))
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


def test_a_run_that_has_diverged_ends_when_its_save_is_given_up(saver: Callable[..., Saver]) -> None:
    one, given_up = saver(), dict.fromkeys(("given_up", "diverged"), True)
    one._conclude(SimpleNamespace(step=1, problem="it took longer", taken=False, error=None, **given_up))
    assert one.diverged
    assert one.wants_stop == "there is no checkpoint of step 1: it took longer"


def test_a_save_is_given_up_before_its_word_is_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that hears it must know what to leave; and it may end its wait while the main thread looks."""
    one = attempt_of(of_two(0, dist.HashStore()), tmp_path, limit_s=0.0)
    known: list[bool] = []
    monkeypatch.setattr(one._commit_round, "broadcast", lambda _: known.append(one.given_up))
    seen = iter([one._prepare_round, None])
    monkeypatch.setattr(CheckpointWrite, "_gathering", property(lambda _: next(seen)), raising=False)
    assert one.poll()
    assert known == [True]
    assert str(one.problem).endswith("rank 0, 1 has not begun to write")


def test_who_has_no_thread_gives_a_save_up_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    state = on(alone(), {})
    fill(state)
    one = Saver(state, tmp_path, of_two(0, dist.HashStore()), limit_s=0.3, say=lambda _: None)
    give_up = threading.Timer(30, lambda: one._current and one._current.cancel())
    give_up.daemon = True
    give_up.start()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        one.save(1, ABOUT, wait=True)
    give_up.cancel()
    assert str(one.problem).startswith("it took longer than 0.3 s")
    assert str(one.problem).endswith("rank 1 has not begun to write")
    one.close()


@pytest.mark.parametrize("of", ["checkpoint", "crc32"])
def test_where_no_thread_can_be_started(saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    """The thread of the save itself is done without; that of the checksums makes it a failed one."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(of):
            raise RuntimeError("can't start new thread")
        start(thread)

    one = saver()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        one.save(1, ABOUT, wait=True)
    if of == "checkpoint":
        assert (one.saved, one.problem) == (1, None)
        assert one.said[0] == "warning: training waited for the checkpoint of step 1: can't start new thread"
    else:
        assert re.match(r"rank 0 on host here: .*rank_00000\.safetensors: can't start new thread$", str(one.problem))
    one.save(2, ABOUT, wait=True)
    assert (one.saved, one.problem) == (2, None)


def test_who_writes_is_late_when_the_save_was_not_given_up_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline itself is the usual one: by then a rank that is stopped, gone or out of reach is noticed."""
    now = [0.0]
    monkeypatch.setattr("meshtrain.job.watchdog.deadlines.time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = DeadlineClock()
    clock.deadlines.save_s, clock.deadlines.save_limit_s = 1.0, 1800.0
    clock.enter_phase("saving")
    seen = []
    for now[0] in (299.0, 301.0, 3800.0, 3901.0):
        seen.append((clock.missed(), clock.late()))
    assert seen == [(False, False), (True, False), (True, False), (False, True)]
    assert clock.deadlines.hangs("saving", 1)


def ranks_in_a_save(**two: Any) -> list[RankReport]:
    """Ranks 0 and 1 wait for the file of rank 2."""
    meeting = PendingCollective("the meeting 'round 31' at the store", "", (0, 1, 2), None, (2,))
    said = [RankStatus("saving", 4, 400.0, patient=True, wait=meeting if rank < 2 else None) for rank in range(3)]
    seen = [RankReport(rank, "a", f"rank {rank} on host a", 7, Reach.ANSWERS, one) for rank, one in enumerate(said)]
    return [*seen[:2], replace(seen[2], **two)]


def test_a_rank_that_waits_for_its_disk_is_not_lost_and_one_that_is_gone_is() -> None:
    assert diagnose(ranks_in_a_save(), hangs=True) is None
    for reach in ("gone", "unreachable", "silent"):
        found = diagnose(ranks_in_a_save(reach=Reach(reach), status=None), hangs=True)
        assert found is not None
        assert (found.kind, found.ranks) == (reach, (2,))


def test_a_slow_disk_ends_no_job(tmp_path: Path) -> None:
    """Rank 1 takes several deadlines for its second file: in the background, and while all wait, in jobs side by side,
    which sleep for most of their time."""
    slow = "train.chaos=[{fault: slow, rank: 1, step: 4, during: save, seconds: 9}]"
    options = (
        "train.steps=8",
        "train.step_timeout_s=2",
        "checkpoint.every=2",
        "data.workers=0",
        "layout={dp_shard: 2}",
    )
    folders = [tmp_path / name for name in ("true", "false")]

    def train(one: Path) -> Finished:
        one.mkdir()
        keys = (*options, f"checkpoint.in_background={one.name}", slow)
        return forked(2, "-m", "meshtrain.train", small_run(one), *keys)

    for one, job in zip(folders, side_by_side(*(partial(train, one) for one in folders)), strict=True):
        job.check()
        assert folder.complete_steps(one / "run/checkpoints") == [4, 6, 8]
        assert "waiting for rank 1 on host" in job.err, "a deadline has passed, and who is waited for was said"
