"""The judge of stragglers: a slow rank is named, whatever the noise, and noise names nobody."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import yaml

from meshtrain.metrics import pace
from meshtrain.metrics.pace import (
    LOOKS,
    Quartiles,
    RankPace,
    Straggler,
    StragglerTest,
    slow,
)
from tests.properties import given, st

CASES = yaml.safe_load(Path(__file__).with_name("paces.yaml").read_text())


def steady(own: float, *, step: float = 0.5, host: str = "a", queued: float = 0.0) -> RankPace:
    times = {
        "time_own_s": own + queued,
        "time_queued_s": queued,
        "step_time_s": step,
        "time_data_s": 0.0,
    }
    return RankPace.of([times, times], host, 1.0, 8)


def measured(own: list[float], queued: list[float] | None = None, host: str = "a") -> RankPace:
    """A look at steps in which a rank took `own` seconds, `queued` of them without a core; another
    took 0.1 more."""
    waits = queued or [0.0] * len(own)
    steps = [
        {
            "time_own_s": time,
            "time_queued_s": wait,
            "step_time_s": max(own) + 0.1,
            "time_data_s": 0.01,
        }
        for time, wait in zip(own, waits, strict=True)
    ]
    return RankPace.of(steps, host, 1.0, 8)


def test_a_look_is_made_of_quartiles() -> None:
    pace = measured([0.3, 0.1, 0.2, 9.0, 0.4], [0.0, 0.05, 0.1, 8.0, 0.0], "b")
    assert pace.total == Quartiles(0.2, 0.3, 0.4)
    assert (pace.own.low, pace.own.middle, pace.own.high) == pytest.approx((0.1, 0.3, 0.4))
    assert (pace.limit, pace.data, pace.host) == (pytest.approx(0.91), 0.01, "b")
    assert measured([0.3, 0.3], [0.1, 0.1]).queued == pytest.approx(0.1)
    assert measured([0.1, 0.1], [0.3, 0.3]).own.low == 0.0, (
        "two counters of the kernel do not agree to the last bit"
    )


# One look -----------------------------------------------------------------------------------------


def test_every_set_of_fewer_than_half_is_found_and_nothing_else() -> None:
    for ranks in (2, 3, 4, 5):
        for n in range((ranks + 1) // 2):
            for chosen in itertools.combinations(range(ranks), n):
                paces = [steady(0.4 if rank in chosen else 0.2) for rank in range(ranks)]
                assert slow(paces, [range(ranks)]) == set(chosen)


def test_who_is_slow() -> None:
    for case in CASES["looks"]:
        ranks = range(len(case["own"]))
        queued, hosts = (
            case.get("queued", [0.0 for _ in ranks]),
            case.get("hosts", ["a" for _ in ranks]),
        )
        step = case.get("step", 0.5)
        paces = [steady(case["own"][i], step=step, host=hosts[i], queued=queued[i]) for i in ranks]
        assert slow(paces, case["groups"]) == set(case["slow"]), case


@given(st.lists(st.floats(0, 9), min_size=2, max_size=9), st.data())
def test_the_median_of_the_others(values: list[float], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(values) - 1))
    others = values[:index] + values[index + 1 :]
    assert pace._median_without(sorted(values), values[index]) == median(others)


def test_overlapping_times_are_noise() -> None:
    """One is slower than the other on average by half, and still not in each step."""
    paces = [measured([0.10, 0.12, 0.14, 0.16, 0.30]), measured([0.11, 0.17, 0.20, 0.24, 0.28])]
    assert paces[1].own.middle > 1.4 * paces[0].own.middle
    assert slow(paces, [[0, 1]]) == set()


# Look after look ----------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(2, 8))
def test_the_same_noise_on_all_ranks_names_nobody(seed: int, ranks: int) -> None:
    """Each step of each rank takes between one and five times as long, by chance; nobody stays slow
    for long."""
    chance = random.Random(seed)
    looks = StragglerTest([range(ranks)])
    for _ in range(2 * LOOKS):
        new, _ = looks.update(
            [measured([0.1 * chance.uniform(1, 5) for _ in range(20)]) for _ in range(ranks)]
        )
        assert new == []


@given(st.integers(0, 10**6), st.integers(2, 8), st.data())
def test_a_slow_rank_is_found_in_noise(seed: int, ranks: int, data: st.DataObject) -> None:
    chance, culprit = random.Random(seed), data.draw(st.integers(0, ranks - 1))
    looks, named = StragglerTest([range(ranks)]), []
    for _ in range(LOOKS):
        own = [
            [0.1 * chance.uniform(1, 3) + 0.5 * (rank == culprit) for _ in range(20)]
            for rank in range(ranks)
        ]
        named += looks.update(list(map(measured, own)))[0]
    assert [straggler.rank for straggler in named] == [culprit]


def test_who_is_named_and_who_recovers() -> None:
    for case in CASES["sequences"]:
        test, events = StragglerTest([range(5)]), {}
        for number, ranks in enumerate(case["looks"]):
            new, recovered = test.update(
                [steady(0.4 if rank in ranks else 0.2) for rank in range(5)]
            )
            assert test.suspects == set(ranks)
            changes = [f"{straggler.rank} is slow" for straggler in new] + [
                f"{rank} recovers" for rank in recovered
            ]
            if changes:
                (events[number],) = changes
        assert events == case["events"]


def named(looks: StragglerTest, paces: Sequence[RankPace]) -> list[Straggler]:
    """Who is named once these paces have lasted."""
    return [looks.update(paces)[0] for _ in range(LOOKS)][-1]


def test_stages_without_peers_are_compared_with_their_own_first_look() -> None:
    """Two stages of one rank each take unequal times: that is the split's, until one of them
    changes."""
    looks = StragglerTest([[0], [1]])
    for _ in range(3 * LOOKS):
        assert looks.update([steady(0.1), steady(0.3)]) == ([], [])
    for _ in range(2 * LOOKS):
        assert looks.update([steady(0.15), steady(0.45)]) == ([], []), (
            "all became slower: longer sequences, perhaps"
        )
    stragglers = named(looks, [steady(0.25), steady(0.3)])
    assert [(one.rank, one.peers, one.own, one.others) for one in stragglers] == [(0, 0, 0.25, 0.1)]


def test_what_is_said_of_a_straggler_is_measured_against_the_others() -> None:
    paces = [
        replace(steady(own), load=float(rank)) for rank, own in enumerate((0.2, 0.9, 0.22, 0.5))
    ]
    stragglers = named(StragglerTest([range(4)]), paces)
    assert [(one.rank, one.own, one.peers, one.load) for one in stragglers] == [
        (1, 0.9, 3, 1.0),
        (3, 0.5, 3, 1.0),
    ]
    assert [one.others for one in stragglers] == pytest.approx([0.21, 0.21]), (
        "of those that are not slow themselves"
    )
    starved = [steady(0.1), steady(0.1, host="b"), steady(0.1, host="c", queued=0.3)]
    (one,) = named(StragglerTest([range(3)]), starved)
    assert (one.rank, one.own, one.others, one.excess) == (2, 0.4, 0.1, pytest.approx(0.3)), (
        "all of its time"
    )
