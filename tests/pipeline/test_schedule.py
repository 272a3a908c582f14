"""Schedules: the table of times and memory, formulas at other sizes, what holds for all of them, and CSV files."""

import itertools
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from meshtrain.pipeline.actions import Action, Kind, Pair, Schedule, ScheduleError, Transfer
from meshtrain.pipeline.schedule import NAMES, build, check, parse_csv, read_csv
from meshtrain.pipeline.simulate import DeadlockError, simulate
from tests.pipeline.formulas import csv_text, default_stages, peak_bound
from tests.properties import given, settings, st

MORE_STAGES = ("interleaved-1f1b", "looped-bfs", "interleaved-zb")  # any number of stages per rank from 2 on
V_SHAPES = ("zbv", "v-half", "v-min", "dualpipev")


@st.composite
def schedules(draw: st.DrawFn, ranks: int = 16, microbatches: int = 64) -> tuple[str, int, int, int]:
    name = draw(st.sampled_from(NAMES))
    stages = draw(st.integers(2, 4)) if name in MORE_STAGES else default_stages(name)
    return name, draw(st.integers(1, ranks)), draw(st.integers(1, microbatches)), stages


SMALL = [
    (name, ranks, microbatches, stages)
    for name in NAMES
    for ranks in range(1, 7)
    for microbatches in range(1, 3 * ranks + 2)
    for stages in ((2, 3) if name in MORE_STAGES else (default_stages(name),))
]


def made(name: str, ranks: int, microbatches: int, stages: int) -> Schedule:
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages)


# What a schedule costs ----------------------------------------------------------------------------------------------


# 4 ranks x 8 microbatches, every action takes 1. Two rows are better than what the papers' own numbers ask for: zb-h2
# may hold 8, and dualpipev may take 54 with 6 5 4 3 idle in span.
TABLE = {
    "gpipe": (33, 9, (9, 6, 3, 0), (8, 8, 8, 8)),
    "1f1b": (33, 9, (9, 6, 3, 0), (4, 3, 2, 1)),
    "interleaved-1f1b": (57, 9, (9, 6, 3, 0), (11, 9, 7, 5)),
    "looped-bfs": (57, 9, (9, 6, 3, 0), (16, 16, 16, 16)),
    "zb-h1": (27, 3, (3, 2, 1, 0), (4, 4, 4, 4)),
    "zb-h2": (27, 3, (0, 0, 0, 0), (7, 7, 7, 7)),
    "interleaved-zb": (51, 3, (3, 2, 1, 0), (8, 8, 8, 8)),
    "zbv": (51, 3, (0, 0, 0, 0), (8, 8, 8, 8)),
    "v-half": (53, 5, (5, 3, 3, 2), (6, 6, 6, 6)),
    "v-min": (59, 11, (11, 9, 7, 6), (4, 4, 4, 4)),
    "dualpipev": (51, 3, (3, 2, 1, 0), (9, 9, 9, 9)),
}


@pytest.mark.parametrize("name", NAMES)
def test_times_and_memory_of_4_ranks_and_8_microbatches(name: str) -> None:
    makespan, idle, idle_in_span, peak = TABLE[name]
    timeline = simulate(build(name, ranks=4, microbatches=8))
    assert timeline.makespan == makespan
    assert timeline.idle == (idle,) * 4
    assert timeline.idle_in_span == idle_in_span
    assert timeline.peak_activations == peak


def v_half_bubble(ranks: int) -> int:
    return max(3 * ranks - 7, ranks - 1) if ranks % 2 == 0 else max(3 * ranks - 5, 0)


# Of p ranks: idle time of a rank when every action takes 1, and the microbatches from which on that holds.
BUBBLES = {
    "gpipe": (lambda p: 3 * (p - 1), lambda p: 1),
    "1f1b": (lambda p: 3 * (p - 1), lambda p: 1),
    "interleaved-1f1b": (lambda p: 3 * (p - 1), lambda p: p),
    "looped-bfs": (lambda p: 3 * (p - 1), lambda p: p),
    "zb-h1": (lambda p: p - 1, lambda p: p),
    "zb-h2": (lambda p: p - 1, lambda p: 2 * p - 2),
    "interleaved-zb": (lambda p: p - 1, lambda p: p),
    "zbv": (lambda p: p - 1, lambda p: p),
    "v-half": (v_half_bubble, lambda p: p),
    "v-min": (lambda p: max(4 * p - 5, 0), lambda p: 1),
    "dualpipev": (lambda p: p - 1, lambda p: p),
}


@pytest.mark.parametrize("name", NAMES)
def test_makespans_follow_formulas(name: str) -> None:
    bubble, enough = BUBBLES[name]
    for ranks in (*range(1, 10), 13, 16):
        for more in (0, 1, 2, ranks, 3 * ranks + 1):
            microbatches = max(1, enough(ranks)) + more
            for stages in (2, 3) if name in MORE_STAGES else (default_stages(name),):
                timeline = simulate(made(name, ranks, microbatches, stages))
                assert timeline.makespan == 3 * stages * microbatches + bubble(ranks), (ranks, microbatches, stages)
                assert set(timeline.idle) == {bubble(ranks)}


@pytest.mark.parametrize("name", ["zb-h2", "zbv"])
def test_no_rank_of_a_zero_bubble_schedule_waits_once_it_has_begun(name: str) -> None:
    for ranks in range(1, 17):
        for more in (0, 1, ranks, 2 * ranks + 1):
            timeline = simulate(build(name, ranks=ranks, microbatches=2 * ranks - 1 + more))
            assert set(timeline.idle_in_span) == {0}, (ranks, more)


@pytest.mark.parametrize("name", NAMES)
def test_memory_stays_within_the_formula_in_small_schedules(name: str) -> None:
    for case in (case for case in SMALL if case[0] == name):
        assert max(simulate(made(*case)).peak_activations) <= peak_bound(*case), case


@pytest.mark.parametrize("name", NAMES)
def test_the_formula_of_the_memory_is_no_larger_than_it_must_be(name: str) -> None:
    for ranks in range(1, 17):
        timeline = simulate(build(name, ranks=ranks, microbatches=3 * ranks + 1))
        assert max(timeline.peak_activations) == peak_bound(name, ranks, 3 * ranks + 1)


def test_formulas_of_the_memory() -> None:
    assert {name: peak_bound(name, 8, 32) for name in NAMES} == {
        "gpipe": 32,
        "1f1b": 8,
        "interleaved-1f1b": 8 + 2 * 8 - 1,
        "looped-bfs": 64,
        "zb-h1": 8,
        "zb-h2": 15,
        "interleaved-zb": 16,
        "zbv": 16,
        "v-half": 10,
        "v-min": 8,
        "dualpipev": 17,
    }
    assert peak_bound("interleaved-1f1b", 8, 32, 4) == 3 * 8 + 2 * 8 - 1
    assert peak_bound("interleaved-zb", 8, 15, 2) == 15 + 8  # one group of 15: two of 8 are not there
    assert {peak_bound(name, 8, 1) for name in NAMES if default_stages(name) == 1} == {1}
    assert {peak_bound(name, 8, 1) for name in NAMES if default_stages(name) == 2} == {2}


def test_v_shapes_hold_a_half_and_a_third_of_1f1b() -> None:
    """In parts of the model: a stage of theirs is half a stage of 1f1b's."""
    for ranks in (16, 64, 256):
        whole = 2 * peak_bound("1f1b", ranks, 4 * ranks)
        assert peak_bound("zbv", ranks, 4 * ranks) == whole
        assert peak_bound("v-half", ranks, 4 * ranks) == pytest.approx(whole / 2, abs=2)
        assert peak_bound("v-min", ranks, 4 * ranks) == pytest.approx(whole / 3, abs=2)


# What every schedule keeps to ---------------------------------------------------------------------------------------


def assert_sound(schedule: Schedule) -> None:
    """Runs the lists action by action, with rules of its own: every microbatch passes every stage once each way."""
    last = schedule.stages - 1
    lists = [list(schedule.actions_of(rank)) for rank in range(schedule.ranks)]
    at = [0] * schedule.ranks
    forwards: set[tuple[int, int]] = set()
    gradients: set[tuple[int, int]] = set()
    weights: set[tuple[int, int]] = set()

    def run(action: Action, rank: int) -> bool:
        stage, microbatch = action.stage, action.microbatch
        assert schedule.placement[stage] == rank
        if action.kind is Kind.FORWARD:
            able = stage == 0 or (stage - 1, microbatch) in forwards
            into = [forwards]
        elif action.kind is Kind.WEIGHT_GRAD:
            able, into = (stage, microbatch) in gradients, [weights]
        else:
            able = (stage, microbatch) in forwards and (stage == last or (stage + 1, microbatch) in gradients)
            into = [gradients, weights] if action.kind is Kind.BACKWARD else [gradients]
        for passed in into if able else ():
            assert (stage, microbatch) not in passed, f"{action} a second time"
            passed.add((stage, microbatch))
        return able

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions) and run(actions[at[rank]], rank):
                at[rank] += 1
                moved = True
    assert at == [len(actions) for actions in lists]
    every = set(itertools.product(range(schedule.stages), range(schedule.microbatches)))
    assert forwards == gradients == weights == every


def assert_in_order_of_the_microbatches(schedule: Schedule) -> None:
    for rank in range(schedule.ranks):
        for stage in schedule.stages_of(rank):
            own = [action for action in schedule.actions_of(rank) if action.stage == stage]
            for part in (Kind.FORWARD.__eq__, lambda kind: kind.gives_input_grad, lambda kind: kind.gives_weight_grad):
                passing = [action.microbatch for action in own if part(action.kind)]
                assert passing == list(range(schedule.microbatches))


@pytest.mark.parametrize("name", NAMES)
def test_every_microbatch_passes_every_stage_once_each_way_in_small_schedules(name: str) -> None:
    for case in (case for case in SMALL if case[0] == name):
        assert_sound(made(*case))


@settings(max_examples=150)
@given(schedules())
def test_every_microbatch_passes_every_stage_once_each_way(case: tuple[str, int, int, int]) -> None:
    name, ranks, microbatches, stages = case
    schedule = made(*case)
    assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, ranks, microbatches)
    assert (schedule.stages, schedule.stages_per_rank) == (ranks * stages, stages)
    assert all(len(schedule.stages_of(rank)) == stages for rank in range(ranks))
    check(schedule)
    assert_sound(schedule)
    assert_in_order_of_the_microbatches(schedule)
    assert max(simulate(schedule).peak_activations) <= peak_bound(*case)
    assert made(*case) == schedule


@settings(max_examples=40)
@given(schedules())
def test_what_one_rank_sends_another_receives(case: tuple[str, int, int, int]) -> None:
    schedule = made(*case)
    sent: Counter[Transfer] = Counter()
    received: Counter[Transfer] = Counter()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            assert all(transfer.source == rank for transfer in schedule.sends(action))
            assert all(transfer.target == rank for transfer in schedule.receives(action))
            sent.update(schedule.sends(action))
            received.update(schedule.receives(action))
    assert sent == received
    assert set(sent.values()) <= {1}
    across = sum(a != b for a, b in itertools.pairwise(schedule.placement))
    assert len(sent) == 2 * across * schedule.microbatches


def test_transfers_of_a_v() -> None:
    schedule = build("zbv", ranks=2, microbatches=3)
    assert schedule.placement == (0, 1, 1, 0)
    assert schedule.sends(Action(Kind.FORWARD, 0, 2)) == (Transfer("activation", 1, 2, 0, 1),)
    assert schedule.sends(Action(Kind.FORWARD, 1, 2)) == ()  # stage 2 is on the same rank
    assert schedule.receives(Action(Kind.FORWARD, 3, 2)) == (Transfer("activation", 3, 2, 1, 0),)
    assert schedule.receives(Action(Kind.FORWARD, 0, 2)) == ()
    assert schedule.sends(Action(Kind.INPUT_GRAD, 3, 2)) == (Transfer("gradient", 2, 2, 0, 1),)
    assert schedule.sends(Action(Kind.INPUT_GRAD, 0, 2)) == ()
    assert schedule.receives(Action(Kind.INPUT_GRAD, 0, 2)) == (Transfer("gradient", 0, 2, 1, 0),)
    assert schedule.receives(Action(Kind.INPUT_GRAD, 3, 2)) == ()  # it begins at the loss
    assert schedule.sends(Action(Kind.WEIGHT_GRAD, 3, 2)) == schedule.receives(Action(Kind.WEIGHT_GRAD, 3, 2)) == ()
    pair = Pair(Action(Kind.FORWARD, 0, 2), Action(Kind.BACKWARD, 3, 0))
    assert schedule.sends(pair) == (Transfer("activation", 1, 2, 0, 1), Transfer("gradient", 2, 0, 0, 1))
    assert schedule.receives(Pair(Action(Kind.FORWARD, 3, 2), Action(Kind.BACKWARD, 0, 0))) == (
        Transfer("activation", 3, 2, 1, 0),
        Transfer("gradient", 0, 0, 1, 0),
    )


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (3, 5), (4, 8), (4, 3), (5, 17), (8, 16)])
def test_pairs_may_start_both_parts_at_once(ranks: int, microbatches: int) -> None:
    """No part needs the other or what comes after it, also where both have to be able to start before either does."""
    schedule = build("dualpipev", ranks=ranks, microbatches=microbatches)
    assert ranks > microbatches or any(isinstance(action, Pair) for row in schedule.actions for action in row)
    done: set[Action] = set()
    at = [0] * ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while at[rank] < len(row) and done.issuperset(
                need for part in row[at[rank]].parts for need in schedule.needs(part)
            ):
                done.update(row[at[rank]].parts)
                at[rank] += 1
                moved = True
    assert at == [len(row) for row in schedule.actions]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_and_the_last_stage_of_a_v_are_on_rank_0(name: str) -> None:
    placement = build(name, ranks=4, microbatches=4).placement
    assert (placement[0], placement[-1]) == ((0, 0) if name in V_SHAPES else (0, 3))


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_made_in_time_of_its_actions(name: str) -> None:
    """Counted in calls of functions: a time would be that of a busy machine."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        schedule = build(name, ranks=16, microbatches=64)
    finally:
        sys.setprofile(None)
    assert calls < 30 * sum(len(schedule.actions_of(rank)) for rank in range(16))


# What does not work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "counts", "told"),
    [
        ("1f1b", {"ranks": 0, "microbatches": 4}, "any number of ranks from 1 on; found 0"),
        ("zbv", {"ranks": 2, "microbatches": 0}, "any number of microbatches from 1 on; found 0"),
        ("Interleaved1F1B", {"ranks": 2, "microbatches": 2}, "did you mean interleaved-1f1b. There are gpipe, 1f1b,"),
        ("nothing like it", {"ranks": 2, "microbatches": 2}, "no schedule 'nothing like it': there are gpipe, 1f1b,"),
        ("1f1b", {"ranks": 2, "microbatches": 2, "stages_per_rank": 2}, "1f1b has 1 stage per rank; found 2"),
        ("v-min", {"ranks": 2, "microbatches": 2, "stages_per_rank": 3}, "v-min has 2 stages per rank; found 3"),
        (
            "interleaved-zb",
            {"ranks": 2, "microbatches": 2, "stages_per_rank": 1},
            "2 .* or more; found 1: one is zb-h1",
        ),
        ("looped-bfs", {"ranks": 2, "microbatches": 2, "stages_per_rank": 0}, "2 .* or more; found 0$"),
    ],
)
def test_counts_that_do_not_work_are_told_with_those_that_do(name: str, counts: dict[str, int], told: str) -> None:
    with pytest.raises(ScheduleError, match=told):
        build(name, **counts)


ONE_RANK = (Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 0, 0))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ((), "microbatch 1 passes stage 0 on rank 0 with 1 of F; expected"),
        ((Action(Kind.BACKWARD, 0, 1), Action(Kind.BACKWARD, 0, 1)), "with 1 of F, 2 of B"),
        ((Action(Kind.INPUT_GRAD, 0, 1),), "with 1 of F, 1 of I"),
        ((Action(Kind.BACKWARD, 0, 1), Action(Kind.WEIGHT_GRAD, 0, 1)), "with 1 of F, 1 of W, 1 of B"),
        ((Action(Kind.BACKWARD, 0, 1), Action(Kind.FORWARD, 0, 1)), "with 2 of F, 1 of B"),
        ((Action(Kind.BACKWARD, 0, 2),), "rank 0 has 0B2, and the microbatches are 0 to 1"),
        ((Action(Kind.BACKWARD, 1, 1),), "rank 0 has 1B1, and the stages are 0 to 0"),
    ],
)
def test_a_schedule_that_leaves_something_out_or_does_it_twice_is_refused(more: tuple[Action, ...], told: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(told)):
        check(Schedule("mine", 2, (0,), ((*ONE_RANK, *more),)))


def test_a_stage_on_another_rank_is_refused() -> None:
    swapped = Schedule("mine", 1, (1, 0), build("gpipe", ranks=2, microbatches=1).actions)
    with pytest.raises(ScheduleError, match="rank 0 has 0F0, and stage 0 is on rank 1"):
        check(swapped)
    with pytest.raises(ScheduleError, match="rank 1 has no stage"):
        check(Schedule("mine", 1, (0,), ((Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)), ())))
    with pytest.raises(ScheduleError, match="no stages or no microbatches"):
        check(Schedule("mine", 0, (0,), ((),)))


# CSV ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(schedules(ranks=5, microbatches=12))
def test_a_schedule_comes_back_from_its_csv(case: tuple[str, int, int, int]) -> None:
    schedule = made(*case)
    assert parse_csv(csv_text(schedule), schedule.name) == schedule


def test_csv_is_the_one_of_torch() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for row in build("dualpipev", ranks=2, microbatches=4).actions:
        for action in row:
            theirs = schedules._Action.from_str(str(action))
            assert str(theirs) == str(action)
            for own, other in zip(action.parts, theirs.sub_actions or (theirs,), strict=True):
                assert (own.stage, own.kind, own.microbatch) == (
                    other.stage_index,
                    other.computation_type.value,
                    other.microbatch_index,
                )


def test_a_csv_file_with_idle_cells_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,,,0B0\r\n, 1F0 ,1I0,1W0,\r\n")
    schedule = read_csv(path, ranks=2, microbatches=1)
    assert (schedule.name, schedule.placement, schedule.microbatches) == ("mine", (0, 1), 1)
    assert [[str(action) for action in row] for row in schedule.actions] == [["0F0", "0B0"], ["1F0", "1I0", "1W0"]]
    with pytest.raises(ScheduleError, match=r"mine\.csv is for 2 ranks; this is for 4"):
        read_csv(path, ranks=4)
    with pytest.raises(ScheduleError, match=r"mine\.csv is for 1 microbatches; this is for 8"):
        read_csv(path, microbatches=8)
    with pytest.raises(ScheduleError, match=r"cannot read the schedule .*no\.csv"):
        read_csv(tmp_path / "no.csv")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0F0,0X0\n", "schedule mine, row 1, cell 2: expected an action like 2F7"),
        ("0F0,0B0\n1F0,1SEND_F0\n", "row 2, cell 2: .* found '1SEND_F0'; sends, receives and the like"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 is on ranks 0 and 1"),
        ("0F0,0B0\n2F0,2B0\n", "has a stage 2 and no stage 1"),
        ("0F0,0B0\n\n", "rank 1 has no stage"),
        ("", "no stages or no microbatches"),
        ("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n", "a pair is a forward and then a backward"),
        ("0F0,(0F1;0W0)OVERLAP_F_B,0B1\n", "a pair is a forward and then a backward"),
        ("0F0,0F1,0B0\n", "microbatch 1 passes stage 0 on rank 0 with 1 of F"),
    ],
)
def test_a_csv_that_is_wrong_is_told_with_its_place(text: str, told: str) -> None:
    with pytest.raises(ScheduleError, match=told):
        parse_csv(text, "mine")


def test_a_csv_that_cannot_finish_is_refused() -> None:
    with pytest.raises(DeadlockError, match="rank 0 stands before 0B0"):
        parse_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "mine")
