"""The clock: examples worked out by hand, what is true of every timeline, and schedules that cannot finish."""

import pytest

from meshtrain.pipeline.actions import Action, Kind, Pair, Schedule, ScheduleError
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.pipeline.simulate import DeadlockError, Event, Timeline, simulate
from tests.properties import given, settings, st

F, I, W, B = Kind  # noqa: E741


def of(*rows: str, placement: tuple[int, ...] | None = None) -> Schedule:
    """A schedule from rows such as `0F0 1B0`, without any check."""
    lists = tuple(tuple(Action(Kind(c[1]), int(c[0]), int(c[2])) for c in row.split()) for row in rows)
    microbatches = 1 + max(action.microbatch for row in lists for action in row)
    return Schedule("mine", microbatches, placement or tuple(range(len(rows))), lists)


def times(timeline: Timeline) -> list[list[tuple[str, float, float]]]:
    return [[(str(event.action), event.start, event.end) for event in row] for row in timeline.events]


# By hand ------------------------------------------------------------------------------------------------------------


def test_two_ranks_and_two_microbatches_with_costs_per_stage_and_transfers() -> None:
    timeline = simulate(
        build("1f1b", ranks=2, microbatches=2), forward=(2, 4), input_grad=(3, 5), weight_grad=(1, 2), transfer=3
    )
    assert times(timeline) == [
        [("0F0", 0, 2), ("0F1", 2, 4), ("0B0", 19, 23), ("0B1", 30, 34)],
        [("1F0", 5, 9), ("1B0", 9, 16), ("1F1", 16, 20), ("1B1", 20, 27)],
    ]
    assert timeline.makespan == 34
    assert timeline.busy == (12, 22)
    assert timeline.idle == (22, 12)
    assert timeline.idle_in_span == (22, 0)
    assert timeline.idle_share == pytest.approx(34 / 68)
    assert timeline.peak_activations == (2, 1)


def test_input_gradients_travel_and_weight_gradients_hold_the_activations() -> None:
    schedule = of("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    timeline = simulate(schedule, forward=(2, 4), input_grad=(3, 5), weight_grad=(1, 2), transfer=1)
    assert times(timeline) == [
        [("0F0", 0, 2), ("0F1", 2, 4), ("0I0", 13, 16), ("0W0", 16, 17), ("0I1", 22, 25), ("0W1", 25, 26)],
        [("1F0", 3, 7), ("1I0", 7, 12), ("1F1", 12, 16), ("1I1", 16, 21), ("1W0", 21, 23), ("1W1", 23, 25)],
    ]
    assert timeline.idle == (14, 4)
    assert timeline.idle_in_span == (14, 0)
    assert timeline.peak_activations == (2, 2)


def test_stages_of_one_rank_hand_over_without_a_transfer() -> None:
    schedule = of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", placement=(0, 1, 1, 0))
    timeline = simulate(schedule, transfer=10)
    assert times(timeline) == [
        [("0F0", 0, 1), ("3F0", 23, 24), ("3B0", 24, 26), ("0B0", 50, 52)],
        [("1F0", 11, 12), ("2F0", 12, 13), ("2B0", 36, 38), ("1B0", 38, 40)],
    ]


def test_a_pair_runs_one_part_after_the_other() -> None:
    pair = Pair(Action(F, 0, 1), Action(B, 0, 0))
    timeline = simulate(Schedule("mine", 2, (0,), ((Action(F, 0, 0), pair, Action(B, 0, 1)),)), forward=2, input_grad=3)
    assert times(timeline) == [[("0F0", 0, 2), ("0F1", 2, 4), ("0B0", 4, 8), ("0B1", 8, 12)]]
    assert timeline.peak_activations == (2,)


def test_a_cost_may_be_nothing() -> None:
    timeline = simulate(build("zb-h1", ranks=2, microbatches=3), weight_grad=0)
    assert timeline.makespan == 2 * 3 + 2
    assert timeline.peak_activations == (2, 2)
    nothing = simulate(build("1f1b", ranks=2, microbatches=2), forward=0, input_grad=0, weight_grad=0)
    assert (nothing.makespan, nothing.idle, nothing.idle_share) == (0, (0, 0), 0)


@pytest.mark.parametrize(
    ("costs", "told"),
    [
        ({"forward": (1, 2, 3)}, "forward: a number, or one for each of the 2 stages; found 3"),
        ({"weight_grad": -1}, "weight_grad: an action takes a time of at least 0; found -1"),
        ({"input_grad": (1, -2)}, "input_grad: an action takes a time of at least 0; found -2"),
        ({"transfer": -1}, "a transfer takes a time of at least 0; found -1"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs: dict, told: str) -> None:
    with pytest.raises(ScheduleError, match=told):
        simulate(build("1f1b", ranks=2, microbatches=2), **costs)


# Of every timeline --------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 12), st.data())
def test_every_action_starts_when_the_last_of_what_it_needs_is_there(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    per_stage = st.lists(st.integers(0, 9), min_size=schedule.stages, max_size=schedule.stages)
    forward, input_grad, weight_grad = data.draw(per_stage), data.draw(per_stage), data.draw(per_stage)
    transfer = data.draw(st.integers(0, 5))
    timeline = simulate(schedule, forward, input_grad, weight_grad, transfer)
    cost = {F: forward, I: input_grad, W: weight_grad, B: [i + w for i, w in zip(input_grad, weight_grad, strict=True)]}
    done = {event.action: event for row in timeline.events for event in row}
    for rank, row in enumerate(timeline.events):
        assert tuple(event.action for event in row) == schedule.actions_of(rank)
        before = 0
        for event in row:
            assert event.duration == cost[event.action.kind][event.action.stage]
            arrivals = [done[need].end + transfer * (done[need].rank != rank) for need in schedule.needs(event.action)]
            assert event.start == max(before, *arrivals, 0)
            before = event.end
        assert timeline.busy[rank] == sum(event.duration for event in row)
        assert timeline.idle[rank] == timeline.makespan - timeline.busy[rank]
        assert timeline.idle_in_span[rank] == row[-1].end - row[0].start - timeline.busy[rank]
        assert timeline.peak_activations[rank] == most_held(row)
    assert timeline.makespan == max(event.end for event in done.values())


def most_held(row: tuple[Event, ...]) -> int:
    """Counted anew at every forward: those before it, less those whose weight gradient came before it."""
    kinds = [event.action.kind for event in row]
    until = [kinds[: i + 1] for i, kind in enumerate(kinds) if kind is F]
    return max(part.count(F) - part.count(W) - part.count(B) for part in until)


def test_what_an_action_needs() -> None:
    schedule = of("0F0 0I0 0W0", "1F0 1B0", "2F0 2I0 2W0")
    assert schedule.needs(Action(F, 0, 0)) == ()
    assert schedule.needs(Action(F, 2, 0)) == (Action(F, 1, 0),)
    assert schedule.needs(Action(I, 2, 0)) == (Action(F, 2, 0),)
    assert schedule.needs(Action(B, 1, 0)) == (Action(F, 1, 0), Action(I, 2, 0))
    assert schedule.needs(Action(I, 0, 0)) == (Action(F, 0, 0), Action(B, 1, 0))
    assert schedule.needs(Action(W, 2, 0)) == (Action(I, 2, 0),)


# Measured -----------------------------------------------------------------------------------------------------------


def test_a_timeline_of_measured_events() -> None:
    events = [
        Event(1, Action(F, 1, 0), 102.0, 104.0),
        Event(0, Action(B, 0, 0), 106.0, 109.0),  # overlaps the forward of the next microbatch for 1
        Event(0, Action(F, 0, 0), 100.0, 101.0),
        Event(0, Action(F, 0, 1), 105.0, 107.0),
        Event(1, Action(B, 1, 0), 104.0, 105.0),
    ]
    timeline = Timeline.measured(events, ranks=3)
    assert [str(event.action) for event in timeline.events[0]] == ["0F0", "0F1", "0B0"]
    assert timeline.start == 100
    assert timeline.makespan == 9
    assert timeline.busy == (5, 3, 0)
    assert timeline.idle == (4, 6, 9)
    assert timeline.idle_in_span == (4, 0, 0)
    assert timeline.peak_activations == (2, 1, 0)
    assert timeline.idle_share == pytest.approx(19 / 27)


def test_a_measured_action_within_another_counts_once() -> None:
    events = [
        Event(0, Action(F, 0, 0), 0, 8),
        Event(0, Action(F, 0, 1), 1, 3),
        Event(0, Action(B, 0, 0), 5, 10),
        Event(0, Action(B, 0, 1), 11, 12),
        Event(1, Action(F, 1, 0), 0, 12),
    ]
    timeline = Timeline.measured(events, ranks=2)
    assert timeline.busy == (11, 12)
    assert timeline.idle_in_span == (1, 0)


# Stuck --------------------------------------------------------------------------------------------------------------


def stuck(schedule: Schedule) -> DeadlockError:
    with pytest.raises(DeadlockError) as caught:
        simulate(schedule)
    return caught.value


def test_two_ranks_that_wait_for_each_other() -> None:
    error = stuck(of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert [(w.rank, str(w.action), w.position, str(w.missing), w.holder, w.missing_position) for w in error.waits] == [
        (0, "0B0", 1, "1B0", 1, 2),
        (1, "1F1", 1, "0F1", 0, 2),
    ]
    assert error.cycle == (0, 1)
    assert str(error).splitlines() == [
        "schedule mine cannot finish:",
        "  rank 0 stands before 0B0, number 2 of its actions, and waits for 1B0, number 3 of rank 1, which has not "
        "come to it",
        "  rank 1 stands before 1F1, number 2 of its actions, and waits for 0F1, number 3 of rank 0, which has not "
        "come to it",
        "  they wait in a circle: rank 0 -> 1 -> 0",
    ]


def test_an_action_before_the_one_that_it_needs_on_the_same_rank() -> None:
    error = stuck(of("0B0 0F0"))
    assert error.cycle == (0,)
    assert "waits for 0F0, which comes later in its own list, as number 2" in str(error)
    assert "circle" not in str(error)
    weight_first = stuck(of("0F0 0W0 0I0"))
    assert [(str(wait.action), str(wait.missing)) for wait in weight_first.waits] == [("0W0", "0I0")]


def test_an_action_that_is_nowhere() -> None:
    error = stuck(of("0F0 0B0 0F1", "1F0 1F1"))
    missing, behind = error.waits
    assert (missing.rank, str(missing.missing), missing.holder, missing.missing_position) == (0, "1B0", None, None)
    assert (behind.rank, str(behind.missing), behind.holder) == (1, "0F1", 0)
    assert error.cycle == ()  # rank 1 waits for rank 0, and rank 0 for nobody
    assert "rank 0 stands before 0B0, number 2 of its actions, and waits for 1B0, which is in no rank's list" in str(
        error
    )


def test_a_rank_may_wait_for_itself_and_for_nobody() -> None:
    for rows in (("0B0 0F0", "1F0"), ("0F0 0B0", "1B0 1F0", "2F0")):
        error = stuck(of(*rows))
        assert None in {wait.holder for wait in error.waits}
        assert error.cycle == (len(rows) - 2,)


def test_all_who_wait_are_named_and_the_circle_is_of_those_who_are_the_reason() -> None:
    error = stuck(of("0F0 0B0 0B1 0F1", "1F0 1B0 1F1 1B1", "2F0 2B0 2B1 2F1"))
    assert [(wait.rank, str(wait.action), str(wait.missing)) for wait in error.waits] == [
        (0, "0B1", "0F1"),
        (0, "0B1", "1B1"),
        (1, "1F1", "0F1"),
        (2, "2B1", "2F1"),
    ]
    assert error.cycle == (0,)
    assert "circle" not in str(error)


def test_a_circle_of_three_ranks() -> None:
    """Stages 0 and 3 are on rank 0, which wants to go back before the microbatch has been at the last stage."""
    error = stuck(of("0F0 0B0 3F0 3B0", "1F0 1B0", "2F0 2B0", placement=(0, 1, 2, 0)))
    assert error.cycle == (0, 1, 2)
    assert "rank 0 -> 1 -> 2 -> 0" in str(error)


def test_a_circle_begins_at_its_lowest_rank() -> None:
    """Rank 0 waits for rank 2, and is in no circle itself."""
    error = stuck(of("0F0 0B0", "2F0 2B0", "1F0 1B0 3F0 3B0", placement=(0, 2, 1, 2)))
    assert [(wait.rank, wait.holder) for wait in error.waits] == [(0, 2), (1, 2), (2, 1)]
    assert error.cycle == (1, 2)


def test_one_action_out_of_order_is_found_in_a_large_schedule() -> None:
    schedule = build("zbv", ranks=8, microbatches=32)
    rows = [list(row) for row in schedule.actions]
    first_back = next(i for i, action in enumerate(rows[5]) if action.kind is I)
    rows[5].insert(0, rows[5].pop(first_back))
    error = stuck(Schedule("zbv", 32, schedule.placement, tuple(map(tuple, rows))))
    assert (5, rows[5][0], 0) in {(wait.rank, wait.action, wait.position) for wait in error.waits}
    assert {wait.rank for wait in error.waits} == set(range(8))
