"""Which rank is named, by what was found out about all of them."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from meshtrain.job.watchdog.deadlines import DeadlineClock
from meshtrain.job.watchdog.diagnose import (
    STACKS,
    Coordinator,
    diagnose,
    nobody_moved,
    numbers,
    unexplained,
    waited_for_line,
)
from meshtrain.job.watchdog.records import PendingCollective, RankReport, RankStatus, Reach

WORLD = (0, 1, 2, 3)


def rank(number: int, host: str = "a", reach: str = "answers", **said: Any) -> RankReport:
    """A rank that trains, step 5, unless it says something else."""
    who = f"rank {number} on host {host} (dp_shard {number})"
    status = RankStatus(**{"phase": "step", "step": 5, "seconds": 20.0} | said) if reach == "answers" else None
    return RankReport(number, host, who, 1000 + number, Reach(reach), status)


def waits(
    what: str = "all_reduce 7", over: str = "dp_shard", ranks: tuple[int, ...] = WORLD, **more: Any
) -> PendingCollective:
    return PendingCollective(what, over, ranks, **more)


def failed(words: str, ago: float = 1.0, kind: str = "error") -> dict[str, Any]:
    return {"failure": words, "kind": kind, "failed_s": ago}


CLOSED = failed("RuntimeError: [../gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.2]:4711")
CLOSED |= {"broken": True}


def test_nothing_is_wrong_where_all_are_well() -> None:
    assert diagnose([rank(0), rank(1)], hangs=True) is None
    assert diagnose([rank(0, wait=waits(ranks=(0, 1))), rank(1)], hangs=False) is None, "it is only slow"


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_a_killed_rank_is_named_whoever_complains(lost: int) -> None:
    seen = [rank(i, reach="gone") if i == lost else rank(i, **CLOSED) for i in WORLD]
    verdict = diagnose(seen, hangs=True)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("gone", (lost,))
    assert verdict.headline.startswith(f"rank {lost} on host a (dp_shard {lost}) is gone: process {1000 + lost} was")


def test_a_lost_host_is_named_and_its_ranks() -> None:
    seen = [rank(0), rank(1), rank(2, "b", "unreachable"), rank(3, "b", "unreachable")]
    verdict = diagnose(seen, hangs=True)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("unreachable", (2, 3))
    assert verdict.headline.startswith("host b cannot be reached: it is down, or the network between is cut (host b: ")
    assert "rank 2 on host b (dp_shard 2), rank 3 on host b (dp_shard 3)" in verdict.headline
    many = diagnose([rank(0), *(rank(i, "b", "gone") for i in range(1, 9))], hangs=False)
    assert many is not None
    assert many.headline.startswith("ranks 1-8 on host b are gone (all ranks of host b): processes 1001, 1002, ")


def test_a_stopped_rank_is_told_from_a_silent_one() -> None:
    for reach in ("stopped", "silent"):
        verdict = diagnose([rank(0, wait=waits()), rank(1, reach=reach)], hangs=True)
        assert verdict is not None
        assert (verdict.kind, verdict.ranks) == (reach, (1,))
        assert "all_reduce 7 over dp_shard (ranks 0-3): rank 0 waits, not arrived: 1" in verdict.details


def test_an_error_of_its_own_is_the_story_and_broken_connections_are_not() -> None:
    own = failed("ValueError: no such token", ago=0.5)
    verdict = diagnose([rank(0, **CLOSED), rank(1, **own), rank(2, wait=waits())], hangs=True)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("failed", (1,))
    assert verdict.headline == "rank 1 on host a (dp_shard 1) failed: ValueError: no such token"
    first = diagnose([rank(0, **own), rank(1, **failed("KeyError: 3", ago=2.0))], hangs=True)
    assert first is not None
    assert first.ranks == (1,), "it was first"
    besides = diagnose([rank(0, **own), rank(1, reach="gone")], hangs=True)
    assert besides is not None
    assert besides.ranks == (1,)
    assert besides.details == ("besides, rank 0 on host a (dp_shard 0) failed: ValueError: no such token",)


def test_a_connection_that_broke_between_living_ranks_is_told_by_the_first() -> None:
    verdict = diagnose([rank(0), rank(1, **CLOSED)], hangs=True)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("failed", (1,))


def test_a_rank_that_a_signal_has_ended() -> None:
    verdict = diagnose([rank(0), rank(1, **failed("ended by SIGTERM", kind="signal"))], hangs=False)
    assert verdict is not None
    assert verdict.headline == "rank 1 on host a (dp_shard 1) was ended by SIGTERM"


def test_who_does_not_arrive_is_named_with_the_group_that_waits() -> None:
    at = ("meshtrain/train.py:170 train", "data/loader.py:80 next")
    seen = [rank(i, wait=waits(number=7), begun={"0,1,2,3": 7}) for i in WORLD]
    seen[2] = rank(2, step=4, stack=at, begun={"0,1,2,3": 6})
    verdict = diagnose(seen, hangs=True)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("absent", (2,))
    assert verdict.headline == (
        "rank 2 on host a (dp_shard 2) did not arrive at all_reduce 7 over dp_shard (ranks 0-3), where ranks 0-1, 3 "
        "waited for 20 s: rank 2 is in step 4; it is at data/loader.py:80 next"
    )
    assert verdict.details[0] == "all_reduce 7 over dp_shard (ranks 0-3): ranks 0-1, 3 wait, not arrived: 2"


def test_the_chain_of_those_who_wait_is_followed_to_its_end() -> None:
    """0 waits for 1 over tp, 1 waits for 3 over dp_shard, and 3 does something else."""
    tp, dp = {"over": "tp", "ranks": (0, 1)}, {"over": "dp_shard", "ranks": (1, 3)}
    seen = [
        rank(0, wait=waits(number=9, **tp), begun={"0,1": 9}),
        rank(1, wait=waits(number=4, **dp), begun={"0,1": 8, "1,3": 4}),
        rank(2),
        rank(3, begun={"1,3": 3}),
    ]
    verdict = diagnose(seen, hangs=True)
    assert verdict is not None
    assert verdict.ranks == (3,)
    assert "over dp_shard (ranks 1, 3)" in verdict.headline


def test_ranks_that_wait_for_each_other_are_both_named() -> None:
    seen = [
        rank(0, wait=waits(over="tp", ranks=(0, 1), number=9), begun={"0,1": 9}),
        rank(1, wait=waits(over="world", ranks=(0, 1, 2), number=4), begun={"0,1": 8, "0,1,2": 4}),
    ]
    seen[0] = replace(seen[0], status=replace(seen[0].status, begun={"0,1": 9, "0,1,2": 3}))  # type: ignore[type-var]
    verdict = diagnose(seen, hangs=True)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("deadlock", (0, 1))


def test_without_numbers_a_rank_has_arrived_where_it_waits_in_the_same_group() -> None:
    both = [rank(i, wait=waits("wait (sends and receives)", ranks=(0, 1, 2))) for i in (0, 1)]
    verdict = diagnose([*both, rank(2)], hangs=True)
    assert verdict is not None
    assert verdict.ranks == (2,)


def test_who_waits_at_the_store_knows_for_whom() -> None:
    meeting = waits("the meeting 'round 4' at the store", "", (), missing=(2,))
    answer = replace(meeting, missing=(0,))
    verdict = diagnose([rank(0, wait=meeting), rank(1, wait=answer), rank(2)], hangs=True)
    assert verdict is not None
    assert verdict.ranks == (2,)


def test_nobody_is_to_blame_where_a_debugger_is() -> None:
    assert diagnose([rank(0, debugged=True), rank(1, reach="silent")], hangs=True) is None


def test_the_block_stays_short() -> None:
    seen = [rank(i, wait=waits(ranks=tuple(range(64))), stack=(f"file.py:{i} f",)) for i in range(63)]
    verdict = diagnose([*seen, rank(63, reach="silent")], hangs=True)
    assert verdict is not None
    assert len(verdict.details) == 1 + 2 * STACKS + 1
    assert verdict.details[-1] == f"and {63 - STACKS} other stacks"
    alike = diagnose([*(replace(one, status=seen[0].status) for one in seen), rank(63, reach="silent")], hangs=True)
    assert alike is not None
    assert "ranks 0-62, in step 5:" in alike.details


def test_numbers_of_ranks() -> None:
    assert numbers([5, 0, 1, 2, 3, 8, 9]) == "0-3, 5, 8-9"


def test_an_error_that_reads_like_a_broken_connection_is_the_story_where_it_is_none() -> None:
    reader = failed("ConnectionResetError: [Errno 104] Connection reset by peer")
    seen = [rank(0, wait=waits()), rank(1, **CLOSED, wait=waits()), rank(2, **reader), rank(3, wait=waits())]
    verdict = diagnose(seen, hangs=True)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("failed", (2,))


def test_who_failed_and_did_not_arrive_is_told_with_its_failure() -> None:
    seen = [rank(0, wait=waits()), rank(1, wait=waits()), rank(2, **CLOSED), rank(3, wait=waits())]
    verdict = diagnose(seen, hangs=True)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("absent", (2,))
    assert ": rank 2 failed in step 5: RuntimeError: [../gloo/" in verdict.headline
    assert verdict.details[0].startswith("rank 2 on host a (dp_shard 2) failed: RuntimeError: ")


@pytest.mark.parametrize("reach", ["unreachable", "silent"])
def test_a_rank_that_does_not_answer_ends_no_job_that_gets_on(reach: str) -> None:
    """A signal has come, nobody has failed and nobody is late: it may be behind a firewall, or busy."""
    assert diagnose([rank(0, wait=waits()), rank(1, reach=reach)], hangs=False) is None
    ended = failed("ended by SIGTERM", kind="signal")
    verdict = diagnose([rank(0, **ended), rank(1, reach=reach)], hangs=False)
    assert verdict is not None
    assert verdict.kind == "ended"
    for seen, hangs in ([rank(0, **CLOSED)], False), ([rank(0)], True):
        verdict = diagnose([*seen, rank(1, reach=reach)], hangs=hangs)
        assert verdict is not None
        assert (verdict.kind, verdict.ranks) == (reach, (1,))


def test_a_device_is_stuck_where_all_wait_and_nobody_is_behind() -> None:
    all_reduce = waits("all_reduce 17", number=17)
    seen = [rank(i, wait=all_reduce, begun={"0,1,2,3": 17 + i % 2}, stack=("step.py:9 update",)) for i in WORLD]
    assert diagnose(seen, hangs=False) is None
    verdict = diagnose(seen, hangs=True)
    assert verdict is not None
    assert verdict.headline == "all ranks wait in all_reduce 17 over dp_shard: a device or a link is stuck"
    assert verdict.details == (
        "all_reduce 17 over dp_shard (ranks 0-3): ranks 0-3 wait",
        "ranks 0-3, in step 5:",
        "    step.py:9 update",
    )
    one_runs = [*seen[:3], rank(3, begun={"0,1,2,3": 17})]
    assert diagnose(one_runs, hangs=True) is None, "it has come, and does something"
    assert nobody_moved(seen, seen)
    assert nobody_moved(seen, [replace(one, status=replace(one.status, seconds=25.0)) for one in seen])  # type: ignore[type-var]
    assert not nobody_moved(
        seen, [*seen[:3], rank(3, wait=all_reduce, begun={"0,1,2,3": 19}, stack=("step.py:9 update",))]
    )


def test_where_nobody_waits_all_stacks_are_told_and_nobody_is_to_blame() -> None:
    seen = [rank(i, seconds=300.0 + i, stack=("step.py:9 update",)) for i in WORLD]
    assert diagnose(seen, hangs=True) is None
    told = unexplained(seen)
    assert told is not None
    assert told.splitlines()[1:] == ["  ranks 0-3, in step 5:", "      step.py:9 update"]
    assert "303 s in step 5" in told
    assert unexplained([*seen[:3], rank(3, wait=waits())]) is None
    assert unexplained([*seen[:3], rank(3, reach="silent")]) is None


def test_who_is_busy_within_its_time_is_not_to_blame_and_is_named() -> None:
    waiting = [rank(i, wait=waits(), late=True) for i in (0, 1, 3)]
    saving = rank(2, phase="saving", seconds=200.0, patient=True)
    assert diagnose([*waiting[:2], saving, waiting[2]], hangs=True) is None
    assert waited_for_line([*waiting[:2], saving, waiting[2]]) == (
        "waiting for rank 2 on host a (dp_shard 2): saving (step 5), for 200 s now"
    )
    for late in rank(2, phase="saving", patient=True, late=True), rank(2, phase="evaluation", seconds=200.0):
        verdict = diagnose([*waiting[:2], late, waiting[2]], hangs=True)
        assert verdict is not None
        assert (verdict.kind, verdict.ranks) == ("absent", (2,))
    lost = diagnose([rank(0, **CLOSED, wait=waits()), waiting[1], saving, waiting[2]], hangs=True)
    assert lost is not None
    assert lost.ranks == (2,), "the job is lost anyway, and it says why"


def test_thousands_of_ranks_are_judged_in_seconds() -> None:
    """Each rank brings a list of its own, as it does when it has come as JSON."""
    n = 4096
    key = ",".join(map(str, range(n)))

    def come(i: int) -> RankReport:
        return rank(
            i, f"host{i // 8}", wait=waits("all_reduce 7", "all ranks", tuple(range(n)), number=7), begun={key: 7}
        )

    seen = [come(i) for i in range(n)]
    one_away = [rank(i, f"host{i // 8}", begun={key: 6}) if i == 77 else one for i, one in enumerate(seen)]
    half_gone = [rank(i, f"host{i // 8}", "gone") if i % 2 else one for i, one in enumerate(seen)]
    for case, what in (seen, "stuck"), (one_away, "absent"), (half_gone, "gone"):
        begun = time.process_time()
        verdict = diagnose(case, hangs=True)
        assert verdict is not None
        assert verdict.kind == what
        assert time.process_time() - begun < 10


class Asked:
    """In place of the ranks: what they answer, look by look."""

    def __init__(self, *looks: list[RankReport]) -> None:
        self._looks = list(looks)

    def examine(self) -> list[RankReport]:
        return self._looks.pop(0)


def test_ranks_that_wait_for_each_other_for_a_moment_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, which gathers, has not looked since rank 1 came: both wait, and a moment later they get on."""
    monkeypatch.setattr("meshtrain.job.watchdog.diagnose.MOVES_S", 0.01)
    meeting = [waits("the meeting 'round 31'", "", (0, 1), missing=missing) for missing in ((1,), (0,))]
    circle = [rank(i, wait=meeting[i], phase="saving", patient=True) for i in (0, 1)]
    later = [
        rank(i, wait=waits("the meeting 'round 36'", "", (0, 1), missing=(1 - i,)), phase="saving") for i in (0, 1)
    ]
    clock, closed = DeadlineClock(), threading.Event()
    for again, kind in ((circle, "deadlock"), (later, None), ([rank(0), rank(1)], None)):
        verdict = Coordinator(Asked(circle, again), clock, closed).diagnose(hangs=True, failed=False, late=False)  # type: ignore[arg-type]
        assert (None if verdict is None else verdict.kind) == kind
