"""The judge of stragglers: a slow rank is named, whatever the noise, and noise names nobody."""

import itertools
import random
from dataclasses import replace

import pytest

from meshtrain.metrics.straggler import LEAST_S, LOOKS, SHARE, RankPace, StragglerTest, slow
from tests.properties import given, st


def steady(own: float, *, step: float = 0.5, host: str = "a", queued: float = 0.0) -> RankPace:
    everything = own + queued
    return RankPace(own, own, own, everything, everything, everything, step, 0.0, host, 1.0, 8)


def measured(own: list[float], queued: list[float] | None = None, host: str = "a") -> RankPace:
    """A look at steps in which a rank took `own` seconds, `queued` of them without a core; another took 0.1 more."""
    waits = queued or [0.0] * len(own)
    steps = [
        {"time_own_s": one, "time_queued_s": wait, "step_time_s": max(own) + 0.1, "time_data_s": 0.01}
        for one, wait in zip(own, waits, strict=True)
    ]
    return RankPace.of(steps, host, 1.0, 8)


def test_a_look_is_made_of_quartiles() -> None:
    pace = measured([0.3, 0.1, 0.2, 9.0, 0.4], [0.0, 0.05, 0.1, 8.0, 0.0], "b")
    assert (pace.low_all, pace.middle_all, pace.high_all) == (0.2, 0.3, 0.4)
    assert (pace.low, pace.middle, pace.high) == pytest.approx((0.1, 0.3, 0.4))
    assert (pace.step, pace.data, pace.host) == (9.1, 0.01, "b")
    assert measured([0.3, 0.3], [0.1, 0.1]).queued == pytest.approx(0.1)
    assert measured([0.1, 0.1], [0.3, 0.3]).low == 0.0, "two counters of the kernel do not agree to the last bit"


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_every_set_of_fewer_than_half_is_found_and_nothing_else(ranks: int) -> None:
    for n in range((ranks + 1) // 2):
        for chosen in itertools.combinations(range(ranks), n):
            paces = [steady(0.4 if rank in chosen else 0.2) for rank in range(ranks)]
            assert slow(paces, [range(ranks)]) == set(chosen)


def test_of_two_ranks_the_slower_one_is_slow() -> None:
    assert slow([steady(0.2), steady(0.3)], [[0, 1]]) == {1}


def test_only_ranks_with_the_same_work_are_compared() -> None:
    paces = [steady(0.1), steady(0.4), steady(0.1), steady(0.4)]
    assert slow(paces, [[0, 2], [1, 3]]) == set()
    assert slow(paces, [[0, 1, 2, 3]]) == {1, 3}
    assert slow(paces, [[0], [1], [2], [3]]) == set()


@pytest.mark.parametrize(("step", "least"), [(0.05, LEAST_S), (10.0, 10.0 * SHARE)])
def test_what_hardly_costs_anything_is_not_said(step: float, least: float) -> None:
    for excess, found in ((0.99 * least, set()), (1.01 * least, {1})):
        assert slow([steady(0.02, step=step), steady(0.02 + excess, step=step)], [[0, 1]]) == found


def test_who_waits_for_a_core_on_a_shared_host_is_not_slow() -> None:
    paces = [steady(0.1), steady(0.1, queued=0.2), steady(0.1, queued=0.3)]
    assert slow(paces, [[0, 1, 2]]) == set()


def test_a_host_whose_cores_are_never_free_is_slow() -> None:
    paces = [steady(0.1), steady(0.1, host="b"), steady(0.1, host="c", queued=0.3)]
    assert slow(paces, [[0, 1, 2]]) == {2}


def test_overlapping_times_are_noise() -> None:
    """One is slower than the other on average by half, and still not in each step."""
    first = measured([0.10, 0.12, 0.14, 0.16, 0.30] * 4)
    second = measured([0.11, 0.17, 0.20, 0.24, 0.28] * 4)
    assert second.middle > 1.4 * first.middle
    assert slow([first, second], [[0, 1]]) == set()


@given(st.integers(0, 10**6), st.integers(2, 8))
def test_the_same_noise_on_all_ranks_names_nobody(seed: int, ranks: int) -> None:
    """Each step of each rank takes between one and five times as long, by chance; nobody stays slow for long."""
    chance = random.Random(seed)
    looks = StragglerTest([range(ranks)])
    for _ in range(2 * LOOKS):
        new, _ = looks.update([measured([0.1 * chance.uniform(1, 5) for _ in range(20)]) for _ in range(ranks)])
        assert new == []


@given(st.integers(0, 10**6), st.integers(2, 8), st.data())
def test_a_slow_rank_is_found_in_noise(seed: int, ranks: int, data: st.DataObject) -> None:
    chance, culprit = random.Random(seed), data.draw(st.integers(0, ranks - 1))
    looks, named = StragglerTest([range(ranks)]), []
    for _ in range(LOOKS):
        own = [[0.1 * chance.uniform(1, 3) + 0.5 * (rank == culprit) for _ in range(20)] for rank in range(ranks)]
        named += looks.update(list(map(measured, own)))[0]
    assert [straggler.rank for straggler in named] == [culprit]


def seen(looks: StragglerTest, *slow_ranks: int) -> tuple[list[int], list[int]]:
    paces = [steady(0.4 if rank in slow_ranks else 0.2) for rank in range(5)]
    new, recovered = looks.update(paces)
    return [straggler.rank for straggler in new], recovered


def test_only_who_stays_slow_is_named_and_only_once() -> None:
    looks = StragglerTest([range(5)])
    assert [seen(looks, 3) for _ in range(LOOKS - 1)] == [([], [])] * (LOOKS - 1)
    assert looks.suspects == {3}
    assert seen(looks, 3) == ([3], [])
    assert [seen(looks, 3) for _ in range(10)] == [([], [])] * 10


def test_a_good_look_in_between_starts_the_count_again() -> None:
    looks = StragglerTest([range(5)])
    for _ in range(5):
        assert [seen(looks, 3), seen(looks, 3), seen(looks)] == [([], [])] * 3


def test_who_recovers_is_said_once_and_may_be_named_again() -> None:
    looks = StragglerTest([range(5)])
    said = [seen(looks, *((1,) if i % 10 < 5 else ())) for i in range(20)]
    assert [i for i, (new, _) in enumerate(said) if new] == [LOOKS - 1, 10 + LOOKS - 1]
    assert [i for i, (_, recovered) in enumerate(said) if recovered] == [5 + LOOKS - 1, 15 + LOOKS - 1]


def test_a_single_good_look_is_no_recovery() -> None:
    looks = StragglerTest([range(5)])
    for _ in range(LOOKS):
        seen(looks, 1)
    assert [seen(looks), seen(looks, 1), seen(looks), seen(looks), seen(looks, 1)] == [([], [])] * 5


def test_two_stragglers_at_once() -> None:
    looks = StragglerTest([range(5)])
    said = [seen(looks, 0), seen(looks, 0, 4), seen(looks, 0, 4), seen(looks, 0, 4)]
    assert said == [([], []), ([], []), ([0], []), ([4], [])]


def test_stages_without_peers_are_compared_with_their_own_first_look() -> None:
    """Two stages of one rank each take unequal times: that is the split's, until one of them changes."""
    looks = StragglerTest([[0], [1]])
    for _ in range(3 * LOOKS):
        assert looks.update([steady(0.1), steady(0.3)]) == ([], [])
    for _ in range(2 * LOOKS):
        assert looks.update([steady(0.15), steady(0.45)]) == ([], []), "all became slower: longer sequences, perhaps"
    named = [looks.update([steady(0.25), steady(0.3)])[0] for _ in range(LOOKS)][-1]
    assert [(one.rank, one.peers, one.own, one.others) for one in named] == [(0, 0, 0.25, 0.1)]


def test_what_is_said_of_a_straggler_is_measured_against_the_others() -> None:
    looks = StragglerTest([range(4)])
    paces = [steady(0.2), steady(0.9), steady(0.22), steady(0.5)]
    paces = [replace(pace, load=float(rank)) for rank, pace in enumerate(paces)]
    named = [looks.update(paces)[0] for _ in range(LOOKS)][-1]
    assert [(one.rank, one.own, one.peers, one.load) for one in named] == [(1, 0.9, 3, 1.0), (3, 0.5, 3, 1.0)]
    assert [one.others for one in named] == pytest.approx([0.21, 0.21]), "of those that are not slow themselves"


def test_of_a_starved_host_all_of_its_time_is_told() -> None:
    looks = StragglerTest([range(3)])
    paces = [steady(0.1), steady(0.1, host="b"), steady(0.1, host="c", queued=0.3)]
    named = [looks.update(paces)[0] for _ in range(LOOKS)][-1]
    assert [(one.rank, one.own, one.others, one.excess) for one in named] == [(2, 0.4, 0.1, pytest.approx(0.3))]
