"""Which rank is named, by what was found out about all of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.job.watchdog.diagnose import (
    STACKS,
    diagnose,
    nobody_moved,
    numbers,
    unexplained,
    waited_for_line,
)
from meshtrain.job.watchdog.records import Diagnosis, RankReport
from tests.job.fakes import WORLD, rank, waits

HERE = Path(__file__).parent


def failed(text: str, ago: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"failure": text, "kind": "error", "failed_s": ago} | more


CLOSED = failed(
    "RuntimeError: [../gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.2]:47",
    broken=True,
)
TOKEN = failed("ValueError: no such token", ago=0.5)
ENDED = failed("ended by SIGTERM", kind="signal")
UPDATE = {"stack": ("step.py:9 update",)}
WAITS = {"wait": waits()}
WORDS: dict[str, dict[str, Any]] = {
    "trains": {},
    "debugged": {"debugged": True},
    "waits": WAITS,
    "waits in three": {"wait": waits(ranks=(0, 1, 2))},
    "late": WAITS | {"late": True},
    "closed": CLOSED,
    "closed while waiting": CLOSED | WAITS,
    "own error": TOKEN,
    "earlier error": failed("KeyError: 3", ago=2.0),
    "broken reader": failed("ConnectionResetError: [Errno 104] Connection reset by peer"),
    "ended": ENDED,
    "saves": {"phase": "saving", "seconds": 200.0, "patient": True},
    "saves too long": {"phase": "saving", "patient": True, "late": True},
    "evaluates": {"phase": "evaluation", "seconds": 200.0},
}


def job(*words: str) -> list[RankReport]:
    """A job of ranks that each do what a word says, or are out of reach in this way."""
    reports = []
    for number, word in enumerate(words):
        reach, _, host = word.partition(" on ")
        reports.append(rank(number, host or "a", **WORDS.get(word, {"reach": reach})))
    return reports


def verdict_of(*reports: RankReport) -> Diagnosis:
    return diagnose(reports, hangs=True)


def test_who_is_to_blame() -> None:
    wrong = []
    for case in yaml.safe_load((HERE / "diagnoses.yaml").read_text()):
        verdict = diagnose(job(*case["ranks"]), hangs=case["hangs"])
        blamed = (None, ()) if verdict is None else (verdict.kind, verdict.ranks)
        if blamed != (case["kind"], tuple(case.get("blamed", ()))):
            wrong.append((case, blamed))
    assert wrong == []


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (
            ["SIGKILL"],
            "process 1001 was killed (by somebody, or because memory was full) with SIGKILL",
        ),
        (
            ["SIGSEGV"],
            "process 1001 was ended by SIGSEGV, a crash in native code; its output says where",
        ),
        (["SIGBUS"], "process 1001 was ended by SIGBUS: a file that it read was cut off"),
        (["status 3"], "process 1001 was ended by an exit with status 3"),
        (["SIGSEGV", "SIGSEGV"], "processes 1001, 1002 were ended by SIGSEGV"),
        (
            ["SIGSEGV", None],
            "processes 1001, 1002 were killed (by somebody, or because memory was full) or crashed",
        ),
    ],
)
def test_a_rank_that_is_gone_was_seen_to_end_by_its_neighbours(
    ends: list[str | None], said: str
) -> None:
    gone = [
        replace(rank(number, reach="gone"), end=end) for number, end in enumerate(ends, start=1)
    ]
    assert said in verdict_of(rank(0), *gone).headline


# 0 waits for 1 over tp, 1 waits for 3 over dp_shard, and 3 does something else.
CHAIN = [
    rank(0, wait=waits(over="tp", ranks=(0, 1), number=9), begun={"0,1": 9}),
    rank(1, wait=waits(ranks=(1, 3), number=4), begun={"0,1": 8, "1,3": 4}),
    rank(2),
    rank(3, begun={"1,3": 3}),
]
CIRCLE = [
    rank(0, wait=waits(ranks=(0, 1), number=9), begun={"0,1": 9, "0,1,2": 3}),
    rank(1, wait=waits(ranks=(0, 1, 2), number=4), begun={"0,1": 8, "0,1,2": 4}),
]
MEETING = [
    rank(number, wait=waits("the meeting 'round 4' at the store", "", (), missing=(missing,)))
    for number, missing in ((0, 2), (1, 0))
]


@pytest.mark.parametrize(
    ("reports", "kind", "ranks"),
    [(CHAIN, "absent", (3,)), (CIRCLE, "deadlock", (0, 1)), ([*MEETING, rank(2)], "absent", (2,))],
)
def test_the_chain_of_those_who_wait_is_followed_to_its_end(
    reports: list[RankReport], kind: str, ranks: tuple[int, ...]
) -> None:
    verdict = verdict_of(*reports)
    assert (verdict.kind, verdict.ranks) == (kind, ranks)


def test_headlines() -> None:
    for case in yaml.safe_load((HERE / "headlines.yaml").read_text()):
        verdict = verdict_of(*job(*case["ranks"]))
        assert verdict.headline.startswith(case["headline"])
        assert "detail" not in case or case["detail"] in verdict.details


def test_who_does_not_arrive_is_named_with_the_group_that_waits() -> None:
    at = ("meshtrain/train.py:170 train", "data/loader.py:80 next")
    arrived = [rank(i, wait=waits(number=7), begun={"0,1,2,3": 7}) for i in WORLD]
    verdict = verdict_of(*arrived[:2], rank(2, step=4, stack=at, begun={"0,1,2,3": 6}), arrived[3])
    assert verdict.headline == (
        "rank 2 on host a (dp_shard 2) did not arrive at all_reduce 7 over dp_shard (ranks 0-3), "
        "where ranks 0-1, 3 "
        "waited for 20 s: rank 2 is in step 4; it is at data/loader.py:80 next"
    )
    assert (
        verdict.details[0]
        == "all_reduce 7 over dp_shard (ranks 0-3): ranks 0-1, 3 wait, not arrived: 2"
    )
    assert "over dp_shard (ranks 1, 3)" in verdict_of(*CHAIN).headline


def test_the_block_stays_short() -> None:
    silent = rank(63, reach="silent")
    reports = [
        rank(i, wait=waits(ranks=tuple(range(64))), stack=(f"file.py:{i} f",)) for i in range(63)
    ]
    details = verdict_of(*reports, silent).details
    assert len(details) == 1 + 2 * STACKS + 1
    assert details[-1] == f"and {63 - STACKS} other stacks"
    alike = [replace(report, status=reports[0].status) for report in reports]
    assert "ranks 0-62, in step 5:" in verdict_of(*alike, silent).details
    assert numbers([5, 0, 1, 2, 3, 8, 9]) == "0-3, 5, 8-9"


def test_a_device_is_stuck_where_all_wait_and_nobody_is_behind() -> None:
    all_reduce = waits("all_reduce 17", number=17)
    reports = [rank(i, wait=all_reduce, begun={"0,1,2,3": 17 + i % 2}, **UPDATE) for i in WORLD]
    assert diagnose(reports, hangs=False) is None
    verdict = verdict_of(*reports)
    assert (
        verdict.headline
        == "all ranks wait in all_reduce 17 over dp_shard: a device or a link is stuck"
    )
    assert verdict.details == (
        "all_reduce 17 over dp_shard (ranks 0-3): ranks 0-3 wait",
        "ranks 0-3, in step 5:",
        "    step.py:9 update",
    )
    one_runs = [*reports[:3], rank(3, begun={"0,1,2,3": 17})]
    assert diagnose(one_runs, hangs=True) is None, "it has come, and does something"
    later = [replace(report, status=replace(report.answer, seconds=25.0)) for report in reports]
    assert nobody_moved(reports, later)
    assert not nobody_moved(
        reports, [*reports[:3], rank(3, wait=all_reduce, begun={"0,1,2,3": 19}, **UPDATE)]
    )


def test_what_is_said_of_ranks_that_are_not_to_blame() -> None:
    reports = [rank(i, seconds=300.0 + i, **UPDATE) for i in WORLD]
    assert diagnose(reports, hangs=True) is None
    text = unexplained(reports)
    assert text.splitlines()[1:] == ["  ranks 0-3, in step 5:", "      step.py:9 update"]
    assert "303 s in step 5" in text
    assert unexplained([*reports[:3], rank(3, wait=waits())]) is None
    assert unexplained([*reports[:3], rank(3, reach="silent")]) is None
    assert waited_for_line(job("late", "late", "saves", "late")) == (
        "waiting for rank 2 on host a (dp_shard 2): saving (step 5), for 200 s now"
    )


def test_thousands_of_ranks_are_judged_in_seconds() -> None:
    """Each rank brings a list of its own, as it does when it has come as JSON. A quadratic way
    takes minutes."""
    n = 4096
    key = ",".join(map(str, range(n)))
    reports = [
        rank(i, f"host{i // 8}", wait=waits(ranks=tuple(range(n)), number=7), begun={key: 7})
        for i in range(n)
    ]
    one_away = [*reports[:77], rank(77, "host9", begun={key: 6}), *reports[78:]]
    half_gone = [
        rank(i, f"host{i // 8}", "gone") if i % 2 else report for i, report in enumerate(reports)
    ]
    assert [verdict_of(*case).kind for case in (reports, one_away, half_gone)] == [
        "stuck",
        "absent",
        "gone",
    ]
