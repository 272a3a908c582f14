"""What is timed: what all ranks' numbers come to, and what is said of a rank that does not
arrive."""

import sys
from typing import Any

import pytest

from meshtrain.doctor.bandwidth import (
    Spec,
    merge,
    numbers_of_hosts,
    run_workers,
    timed_groups,
)
from meshtrain.doctor.records import Link
from meshtrain.layout import Layout
from tests.launching import free_port

LAYOUT = Layout({"dp_shard": 2, "tp": 2}).on_hosts([2, 2])
ROW = {
    "axes": "tp",
    "what": "all-gather",
    "latency": 0.1,
    "size": 8,
    "seconds": 1.0,
    "fixed": 0.2,
    "spread": 2.0,
}
RESULT: dict[str, Any] = {
    "backend": "gloo",
    "compute": 1.0,
    "links": [],
    "timings": [ROW],
    "left_out": [],
    "transport": ["via P2P"],
}


def test_of_each_collective_the_slowest_rank_counts() -> None:
    slow = RESULT | {"compute": 4.0, "timings": [ROW | {"seconds": 4.0, "latency": 0.4}]}
    with_link = RESULT | {"links": [{"source": 0, "target": 2, "bandwidth": 5.0}]}
    timings = merge(LAYOUT, {0: with_link, 1: slow, 2: RESULT, 3: RESULT})
    (row,) = timings.timings
    assert (row.axes, row.what, row.ranks, row.crosses) == ("tp", "all-gather", 2, False)
    assert (row.seconds, row.latency, row.bandwidth) == (4.0, 0.4, 1.0)
    assert timings.links == (Link(0, 2, 5.0),)
    assert timings.compute == {"0": 1.0, "1": 4.0, "2": 1.0, "3": 1.0}
    assert timings.stuck == {}
    assert timings.transport == ("via P2P",)


def test_groups_that_cross_hosts_are_told_from_those_inside() -> None:
    crosses = {"dp_shard": True, "tp": False, "world": True}
    result = RESULT | {"timings": [ROW | {"axes": axes} for axes in crosses]}
    timings = merge(LAYOUT, dict.fromkeys(range(4), result))
    assert {row.axes: row.crosses for row in timings.timings} == crosses
    assert list(timed_groups(LAYOUT)) == list(crosses)
    assert list(timed_groups(Layout({"dp_shard": 4, "tp": 1}))) == ["dp_shard"]


def test_groups_of_whole_hosts_are_timed() -> None:
    """Whatever the layout, so that links are known by the number of hosts."""
    layout = Layout({"dp_shard": 8, "tp": 2}).on_hosts([2] * 8)
    names = ["dp_shard", "tp", "world", "2 hosts", "4 hosts"]
    assert list(timed_groups(layout)) == names
    result = RESULT | {"timings": [ROW | {"axes": name} for name in names]}
    timings = merge(layout, dict.fromkeys(range(16), result)).timings
    assert [(row.ranks, row.hosts) for row in timings] == [(8, 8), (2, 1), (16, 8), (4, 2), (8, 4)]
    assert numbers_of_hosts(1) == numbers_of_hosts(3) == numbers_of_hosts(7) == []
    assert numbers_of_hosts(12) == [2, 4]
    assert numbers_of_hosts(48) == [2, 4, 8, 16]
    uneven = Layout({"dp_shard": 6}).on_hosts([1, 1, 2, 2])
    assert list(timed_groups(uneven)) == ["dp_shard"]


def test_ranks_that_did_not_arrive_are_named() -> None:
    for nonsense in ({}, RESULT | {"links": [{"source": "x"}]}, RESULT | {"timings": [1]}):
        stuck = merge(LAYOUT, {0: RESULT, 1: {"stuck": "not done with meeting"}, 2: nonsense}).stuck
        assert stuck is not None
        assert stuck["1"] == "not done with meeting"
        assert stuck["2"].startswith("its numbers make no sense")
        assert stuck["3"] == "nothing came of it"


def run_two(seconds: float, ranks: int = 2, started: int = 2) -> list[str]:
    """What became of the ranks that are started of a job that needs so many."""
    spec = Spec({"dp_shard": ranks}, ("0 a", "1 b"), free_port(), seconds)
    results = run_workers(spec, list(range(started)), "127.0.0.1", serves=True)
    return [result["stuck"] for result in results.values()]


@pytest.mark.slow
def test_a_worker_that_cannot_measure_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = run_two(60.0, ranks=3)
    assert any("layout {dp_shard: 3} needs 3" in reason for reason in reasons), reasons
    assert all(
        "needs 3" in reason or reason.endswith("another rank was refused") for reason in reasons
    ), reasons
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        assert run_two(60.0) == ["failed at starting: it printed nothing"] * 2
    monkeypatch.setattr("meshtrain.doctor.bandwidth.START_S", 4.0)
    (stuck,) = run_two(4.0, started=1)
    assert "meeting" in stuck or "starting" in stuck, "its partner does not come"
