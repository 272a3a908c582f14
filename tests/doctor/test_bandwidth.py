"""What is timed: what all ranks' numbers come to, and what is said of a rank that does not arrive."""

import sys
from typing import Any

import pytest

from meshtrain.doctor.bandwidth import Spec, axes_to_time, merge, run_workers
from meshtrain.doctor.records import Link
from meshtrain.layout import Layout
from tests.launching import free_port

LAYOUT = Layout({"dp_shard": 2, "tp": 2}).on_hosts([2, 2])


def result(seconds: float, *links: dict[str, Any]) -> dict[str, Any]:
    row = {"axes": "tp", "what": "all-gather", "latency": seconds / 10, "size": 8, "seconds": seconds, "spread": 2.0}
    return {
        "backend": "gloo",
        "compute": seconds,
        "links": list(links),
        "timings": [row],
        "left_out": [],
        "transport": ["via P2P"],
    }


def test_of_each_collective_the_slowest_rank_counts() -> None:
    link = {"source": 0, "target": 2, "bandwidth": 5.0}
    found = merge(LAYOUT, {0: result(1.0, link), 1: result(4.0), 2: result(2.0), 3: result(2.0)})
    (row,) = found.timings
    assert (row.axes, row.what, row.ranks, row.crosses) == ("tp", "all-gather", 2, False)
    assert (row.seconds, row.latency, row.bandwidth) == (4.0, 0.4, 1.0)
    assert found.links == (Link(0, 2, 5.0),)
    assert found.compute == {"0": 1.0, "1": 4.0, "2": 2.0, "3": 2.0}
    assert found.stuck == {}
    assert found.transport == ("via P2P",)


def test_groups_that_cross_hosts_are_told_from_those_inside() -> None:
    rows = {"dp_shard": True, "tp": False, "world": True}
    timings = [{**result(1.0)["timings"][0], "axes": axes} for axes in rows]
    found = merge(LAYOUT, {rank: {**result(1.0), "timings": timings} for rank in range(4)})
    assert {one.axes: one.crosses for one in found.timings} == rows
    assert axes_to_time(LAYOUT) == list(rows)
    assert axes_to_time(Layout({"dp_shard": 4, "tp": 1})) == ["dp_shard"]


@pytest.mark.parametrize("nonsense", [{}, {**result(1.0), "links": [{"source": "x"}]}, {**result(1.0), "timings": [1]}])
def test_ranks_that_did_not_arrive_are_named(nonsense: dict[str, Any]) -> None:
    found = merge(LAYOUT, {0: result(1.0), 1: {"stuck": "not done with meeting"}, 2: nonsense})
    assert found.stuck is not None
    assert found.stuck["1"] == "not done with meeting"
    assert found.stuck["2"].startswith("its numbers make no sense")
    assert found.stuck["3"] == "nothing came of it"


def test_a_worker_whose_partner_does_not_come_says_where_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtrain.doctor.bandwidth.START_S", 4.0)
    spec = Spec({"dp_shard": 2}, ("0 a", "1 b"), free_port(), 4.0)
    found = run_workers(spec, [0], "127.0.0.1", serves=True)
    assert "meeting" in found[0]["stuck"] or "starting" in found[0]["stuck"]


def test_a_worker_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    spec = Spec({"dp_shard": 2}, ("0 a", "1 b"), free_port(), 8.0)
    found = run_workers(spec, [0, 1], "127.0.0.1", serves=True)
    assert {one["stuck"] for one in found.values()} == {"failed at starting: it printed nothing"}


def test_a_worker_that_fails_says_how() -> None:
    spec = Spec({"dp_shard": 3}, ("0 a", "1 b"), free_port(), 20.0)  # three ranks, and two are there
    found = run_workers(spec, [0, 1], "127.0.0.1", serves=True)
    assert all("layout {dp_shard: 3} needs 3" in one["stuck"] for one in found.values()), found
