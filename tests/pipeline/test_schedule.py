"""Schedules: times and memory by the docs' formulas, what holds for all of them, refusals, and CSV
files."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from meshtrain.pipeline.actions import Action, Kind, Pair, Schedule, ScheduleError
from meshtrain.pipeline.schedule import NAMES, build, check, parse_csv, read_csv
from meshtrain.pipeline.simulate import simulate
from tests.pipeline.formulas import csv_text, documented, schedule_of, small_schedules, table, value

TABLES = table("schedules")


# What a schedule costs ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_times_and_memory_of_4_ranks_and_8_microbatches(name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    timeline = simulate(schedule)
    assert TABLES["times"][name] == {
        "makespan": timeline.makespan,
        "idle": timeline.idle[0],
        "idle_in_span": list(timeline.idle_in_span),
        "peak": list(timeline.peak_activations),
        "ends": [schedule.placement[0], schedule.placement[-1]],
    }
    _, _, small, large, _, held = documented()[name]
    larger = simulate(build(name, ranks=8, microbatches=32))
    assert (small, large) == tuple(f"{100 * each.idle_share:.1f} %" for each in (timeline, larger))
    assert float(held) == max(timeline.peak_activations) / schedule.stages_per_rank


# Of p ranks: from how many microbatches on the formula of the idle time holds; of the others, from
# p on.
ENOUGH = {
    "gpipe": lambda p: 1,
    "1f1b": lambda p: 1,
    "v-min": lambda p: 1,
    "zb-h2": lambda p: max(1, 2 * p - 2),
}


@pytest.mark.parametrize("name", NAMES)
def test_idle_time_and_memory_follow_the_formulas(name: str) -> None:
    per_rank, idle, _, _, peak, _ = documented()[name]
    stages, more = int(per_rank[0]), "more" in per_rank
    for ranks in (*range(1, 10), 13, 16):
        enough = ENOUGH.get(name, lambda p: p)(ranks)
        for microbatches in (enough, enough + 1, enough + 2, enough + ranks, 3 * ranks + 1):
            for stages_per_rank in range(stages, stages + 1 + more):
                schedule = build(
                    name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
                )
                timeline = simulate(schedule)
                assert set(timeline.idle) == {max(value(idle, schedule), ranks - 1)}, schedule.title
                if name in ("zb-h2", "zbv") and microbatches >= 2 * ranks - 1:
                    assert set(timeline.idle_in_span) == {0}, schedule.title
        assert max(timeline.peak_activations) == min(
            stages_per_rank * microbatches, value(peak, schedule)
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_complete_and_within_its_memory(name: str) -> None:
    peak = documented()[name][4]
    for schedule in small_schedules(name):
        check(schedule)
        assert_in_order_of_the_microbatches(schedule)
        bound = min(schedule.stages_per_rank * schedule.microbatches, value(peak, schedule))
        assert max(simulate(schedule).peak_activations) <= bound, schedule.title


def assert_in_order_of_the_microbatches(schedule: Schedule) -> None:
    for stage in range(schedule.stages):
        own = [
            action
            for action in schedule.actions_of(schedule.rank_of(stage))
            if action.stage == stage
        ]
        for part in (
            Kind.FORWARD.__eq__,
            lambda kind: kind.gives_input_grad,
            lambda kind: kind.gives_weight_grad,
        ):
            passing = [action.microbatch for action in own if part(action.kind)]
            assert passing == list(range(schedule.microbatches)), schedule.title


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 3), (2, 4), (3, 5), (4, 8), (4, 3), (5, 17), (8, 16)]
)
def test_pairs_may_start_both_parts_at_once(ranks: int, microbatches: int) -> None:
    """No part needs the other or what comes after it, also where both have to be able to start
    before either does."""
    schedule = build("dualpipev", ranks=ranks, microbatches=microbatches)
    assert ranks > microbatches or any(
        isinstance(action, Pair) for row in schedule.actions for action in row
    )
    rows = [list(row) for row in schedule.actions]
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row and done.issuperset(
                need for part in row[0].parts for need in schedule.needs(part)
            ):
                done.update(row.pop(0).parts)
                moved = True
    assert not any(rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_made_in_time_of_its_actions(name: str) -> None:
    """Counted in calls of functions: a time would be that of a busy machine."""
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        schedule = build(name, ranks=16, microbatches=64)
    finally:
        sys.setprofile(None)
    assert calls["call"] < 30 * sum(len(schedule.actions_of(rank)) for rank in range(16))


# What does not work -------------------------------------------------------------------------------


def test_numbers_that_do_not_work_are_told_with_those_that_do() -> None:
    for case in TABLES["wrong_numbers"]:
        message = case.pop("message")
        with pytest.raises(ScheduleError, match=re.escape(message)):
            build(**{"ranks": 2, "microbatches": 2, **case})


def test_a_schedule_that_leaves_something_out_or_does_it_twice_is_refused() -> None:
    for case in TABLES["wrong_actions"]:
        schedule = schedule_of(
            *case["rows"], placement=case.get("placement"), microbatches=case.get("microbatches", 2)
        )
        with pytest.raises(ScheduleError, match=re.escape(case["message"])):
            check(schedule)


# CSV ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_comes_back_from_its_csv(name: str) -> None:
    schedule = build(name, ranks=5, microbatches=7)
    assert parse_csv(csv_text(schedule), name) == schedule


def test_csv_is_the_one_of_torch() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for row in build("dualpipev", ranks=2, microbatches=4).actions:
        for action in row:
            theirs = schedules._Action.from_str(str(action))
            assert str(theirs) == str(action)
            for own, other in zip(action.parts, theirs.sub_actions or (theirs,), strict=True):
                expected = (other.stage_index, other.computation_type.value, other.microbatch_index)
                assert (own.stage, own.kind, own.microbatch) == expected


def test_a_csv_file_with_idle_cells_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,,,0B0\r\n, 1F0 ,1I0,1W0,\r\n")
    assert read_csv(path, ranks=2, microbatches=1) == schedule_of("0F0 0B0", "1F0 1I0 1W0")
    with pytest.raises(ScheduleError, match=r"mine\.csv is for 2 ranks; this is for 4"):
        read_csv(path, ranks=4)
    with pytest.raises(ScheduleError, match=r"mine\.csv is for 1 microbatches; this is for 8"):
        read_csv(path, microbatches=8)


def test_a_csv_that_is_wrong_is_told_with_its_place() -> None:
    for case in TABLES["wrong_csv"]:
        with pytest.raises(ScheduleError, match=re.escape(case["message"])):
            parse_csv(case["text"], "mine")
