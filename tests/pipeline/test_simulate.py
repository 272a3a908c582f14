"""The clock: what is true of every timeline, and schedules that cannot finish."""

import pytest

from meshtrain.pipeline.actions import Action, Kind, ScheduleError
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.pipeline.simulate import DeadlockError, Event, Timeline, simulate
from tests.pipeline.formulas import schedule_of, table
from tests.properties import given, settings, st

F, I, W, B = Kind  # noqa: E741


@settings(max_examples=100)
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 12), st.data())
def test_every_action_starts_when_the_last_of_what_it_needs_is_there(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    per_stage = st.lists(st.integers(0, 9), min_size=schedule.stages, max_size=schedule.stages)
    forward, input_grad, weight_grad = (
        data.draw(per_stage),
        data.draw(per_stage),
        data.draw(per_stage),
    )
    transfer = data.draw(st.integers(0, 5))
    timeline = simulate(schedule, forward, input_grad, weight_grad, transfer)
    cost = {
        F: forward,
        I: input_grad,
        W: weight_grad,
        B: [i + w for i, w in zip(input_grad, weight_grad, strict=True)],
    }
    done = {event.action: event for row in timeline.events for event in row}
    for rank, row in enumerate(timeline.events):
        assert tuple(event.action for event in row) == schedule.actions_of(rank)
        before = 0
        for event in row:
            assert event.duration == cost[event.action.kind][event.action.stage]
            arrivals = [
                done[need].end + transfer * (done[need].rank != rank)
                for need in schedule.needs(event.action)
            ]
            assert event.start == max(before, *arrivals, 0)
            before = event.end
        busy = sum(event.duration for event in row)
        assert timeline.busy[rank] == busy
        assert timeline.idle[rank] == timeline.makespan - busy
        assert timeline.idle_in_span[rank] == row[-1].end - row[0].start - busy
        assert timeline.peak_activations[rank] == most_held(row)
    assert timeline.makespan == max(event.end for event in done.values())
    assert timeline.idle_share * ranks * timeline.makespan == pytest.approx(sum(timeline.idle))


def test_what_costs_nothing_has_no_idle_time() -> None:
    timeline = simulate(
        build("1f1b", ranks=2, microbatches=2), forward=0, input_grad=0, weight_grad=0
    )
    assert (timeline.makespan, timeline.idle, timeline.idle_share) == (0, (0, 0), 0)


def most_held(row: tuple[Event, ...]) -> int:
    """Counted anew at every forward: those before it, less those whose weight gradient came before
    it."""
    kinds = [event.action.kind for event in row]
    until = [kinds[: i + 1] for i, kind in enumerate(kinds) if kind is F]
    return max(part.count(F) - part.count(W) - part.count(B) for part in until)


def test_what_an_action_needs() -> None:
    schedule = schedule_of("0F0 0I0 0W0", "1F0 1B0", "2F0 2I0 2W0")
    needs = {
        "0F0": [],
        "2F0": ["1F0"],
        "2I0": ["2F0"],
        "1B0": ["1F0", "2I0"],
        "0I0": ["0F0", "1B0"],
        "2W0": ["2I0"],
    }
    assert {
        action: [str(need) for need in schedule.needs(Action.parse(action))] for action in needs
    } == needs


def test_a_timeline_of_measured_events() -> None:
    """Time in which two actions overlap, or one is within another, counts once."""
    times = {
        0: [("0B0", 106, 109), ("0F0", 100, 101), ("0F1", 105, 107)],
        1: [("1F0", 102, 104), ("1B0", 104, 105)],
        2: [("2F0", 100, 108), ("2F1", 101, 103), ("2B0", 105, 110), ("2B1", 111, 112)],
    }
    events = [
        Event(rank, Action.parse(action), start, end)
        for rank in times
        for action, start, end in times[rank]
    ]
    timeline = Timeline.measured(events, ranks=4)
    assert [str(event.action) for event in timeline.events[0]] == ["0F0", "0F1", "0B0"]
    assert timeline.start == 100
    assert timeline.makespan == 12
    assert timeline.busy == (5, 3, 11, 0)
    assert timeline.idle == (7, 9, 1, 12)
    assert timeline.idle_in_span == (4, 0, 1, 0)
    assert timeline.peak_activations == (2, 1, 2, 0)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": (1, 2, 3)}, "forward: a number, or one for each of the 2 stages; found 3"),
        ({"input_grad": (1, -2)}, "input_grad: an action takes a time of at least 0; found -2"),
        ({"transfer": -1}, "a transfer takes a time of at least 0; found -1"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(build("1f1b", ranks=2, microbatches=2), **costs)


@pytest.mark.parametrize("case", table("deadlocks"), ids=lambda case: case["why"])
def test_a_schedule_that_cannot_finish(case: dict) -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate(schedule_of(*case["rows"], placement=case.get("placement")))
    error = caught.value
    waits = [
        [
            wait.rank,
            str(wait.action),
            wait.position,
            str(wait.missing),
            wait.holder,
            wait.missing_position,
        ]
        for wait in error.waits
    ]
    assert waits == case["waits"]
    assert list(error.cycle) == case["cycle"]
    assert case.get("message", "").strip() in str(error)
    assert ("in a circle" in str(error)) == (len(error.cycle) > 1)
