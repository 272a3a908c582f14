"""Pipeline schedules by name and from CSV files, and the checks that a schedule has to pass before
training.

    build("1f1b", ranks=4, microbatches=8)  # a Schedule: for every rank the list of its actions
    read_csv("my_schedule.csv")             # a Schedule, checked

A new schedule is a function from (ranks, microbatches, stages per rank) to a `Schedule`, and a row
of the table.
"""

import csv
import difflib
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshtrain.errors import plural
from meshtrain.pipeline import loop_schedules, v_schedules
from meshtrain.pipeline.actions import Action, Kind, Pair, Schedule, ScheduleError
from meshtrain.pipeline.simulate import simulate


@dataclass(frozen=True)
class _ScheduleSpec:
    make: Callable[[int, int, int], Schedule]  # (ranks, microbatches, stages per rank) -> schedule
    stages: int  # per rank, unless another number is requested and allowed
    # if more stages are allowed: the name of the schedule with one stage per rank
    more_stages: str | None = None


_SPECS = {
    "gpipe": _ScheduleSpec(loop_schedules.gpipe, 1),
    "1f1b": _ScheduleSpec(loop_schedules.one_f_one_b, 1),
    "interleaved-1f1b": _ScheduleSpec(loop_schedules.interleaved_1f1b, 2, "1f1b"),
    "looped-bfs": _ScheduleSpec(loop_schedules.looped_bfs, 2, "gpipe"),
    "zb-h1": _ScheduleSpec(loop_schedules.zb_h1, 1),
    "zb-h2": _ScheduleSpec(loop_schedules.zb_h2, 1),
    "interleaved-zb": _ScheduleSpec(loop_schedules.interleaved_zb, 2, "zb-h1"),
    "zbv": _ScheduleSpec(v_schedules.zbv, 2),
    "v-half": _ScheduleSpec(v_schedules.v_half, 2),
    "v-min": _ScheduleSpec(v_schedules.v_min, 2),
    "dualpipev": _ScheduleSpec(v_schedules.dualpipev, 2),
}
NAMES = tuple(_SPECS)
MOST_PASSES = 1 << 19  # maximum number of passes of a microbatch through a stage


def build(
    name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """The named schedule. Every number of microbatches works, even one that is not a multiple of
    the ranks or smaller. Raises ScheduleError: an unknown name, or invalid numbers; the message
    says which work."""
    if name not in _SPECS:
        near = difflib.get_close_matches(name.lower(), NAMES, n=1)
        hint = f"did you mean {near[0]}? There are" if near else "there are"
        raise ScheduleError(f"there is no schedule {name!r}: {hint} {', '.join(NAMES)}")
    for noun, count in (("ranks", ranks), ("microbatches", microbatches)):
        if count < 1:
            raise ScheduleError(
                f"schedule {name} works with any number of {noun} from 1 on; found {count}"
            )
    per_rank = _stages_per_rank(name, stages_per_rank)
    passes = ranks * per_rank * microbatches
    if passes > MOST_PASSES:
        raise ScheduleError(
            f"{microbatches:,} microbatches through {ranks * per_rank:,} stages are {passes:,} "
            f"passes, and a schedule of at most {MOST_PASSES:,} is made: use fewer microbatches (a "
            "larger batch.micro_size), or fewer ranks"
        )
    return _SPECS[name].make(ranks, microbatches, per_rank)


def load(
    name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """The schedule that a config names: one of NAMES, or a CSV file. Raises ScheduleError: it does
    not fit the run."""
    if not name.endswith(".csv"):
        return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    schedule = read_csv(name, ranks=ranks, microbatches=microbatches)
    if stages_per_rank not in (None, schedule.stages_per_rank):
        raise ScheduleError(
            f"the schedule {name} has {plural(schedule.stages_per_rank, 'stage')} per rank; found "
            f"{stages_per_rank}"
        )
    return schedule


def _stages_per_rank(name: str, requested: int | None) -> int:
    spec = _SPECS[name]
    if requested is None or requested == spec.stages:
        return spec.stages
    if spec.more_stages is None:
        raise ScheduleError(
            f"schedule {name} has {plural(spec.stages, 'stage')} per rank; found {requested}"
        )
    if requested < 2:
        instead = f": one is {spec.more_stages}" if requested == 1 else ""
        raise ScheduleError(
            f"schedule {name} has 2 stages per rank or more; found {requested}{instead}"
        )
    return requested


# The actions of a microbatch in a stage, with a whole and with a split backward.
_WHOLE = {Kind.FORWARD: 1, Kind.BACKWARD: 1}
_HALVES = {Kind.FORWARD: 1, Kind.INPUT_GRAD: 1, Kind.WEIGHT_GRAD: 1}


def check(schedule: Schedule) -> None:
    """Checks a schedule before training. Raises ScheduleError: a microbatch does not pass every
    stage once in each direction, or passes it on the wrong rank. DeadlockError: the schedule cannot
    finish; says which actions wait."""
    if not schedule.placement or schedule.microbatches < 1:
        raise ScheduleError(f"schedule {schedule.name} has no stages or no microbatches")
    for rank in range(schedule.ranks):
        if not schedule.stages_of(rank):
            raise ScheduleError(
                f"schedule {schedule.name}: rank {rank} has no stage; every rank needs one"
            )
    counts: Counter[Action] = Counter()
    for rank in range(schedule.ranks):
        for action in schedule.actions_of(rank):
            _check_place(schedule, rank, action)
            counts[action] += 1
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            _check_passes(schedule, stage, microbatch, counts)
    simulate(schedule)


def _check_place(schedule: Schedule, rank: int, action: Action) -> None:
    text = f"schedule {schedule.name}: rank {rank} has {action}"
    if not 0 <= action.stage < schedule.stages:
        raise ScheduleError(f"{text}, and the stages are 0 to {schedule.stages - 1}")
    if not 0 <= action.microbatch < schedule.microbatches:
        raise ScheduleError(f"{text}, and the microbatches are 0 to {schedule.microbatches - 1}")
    if schedule.rank_of(action.stage) != rank:
        raise ScheduleError(
            f"{text}, and stage {action.stage} is on rank {schedule.rank_of(action.stage)}"
        )


def _check_passes(schedule: Schedule, stage: int, microbatch: int, counts: Counter[Action]) -> None:
    """Checks for one forward, and one backward, whole or split."""
    passes = {kind: counts[Action(kind, stage, microbatch)] for kind in Kind}
    passes = {kind: count for kind, count in passes.items() if count}
    if passes not in (_WHOLE, _HALVES):
        listing = ", ".join(f"{count} of {kind}" for kind, count in passes.items())
        raise ScheduleError(
            f"schedule {schedule.name}: microbatch {microbatch} passes stage {stage} on rank "
            f"{schedule.rank_of(stage)} with {listing or 'nothing'}; expected one F, and one B or "
            "one I and one W"
        )


_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def read_csv(
    path: str | os.PathLike[str], *, ranks: int | None = None, microbatches: int | None = None
) -> Schedule:
    """The checked schedule in a file in torch.distributed.pipelining's format ("compute_only"),
    named after the file.

    A row per rank and an action per cell: `2F7` is stage 2, forward, microbatch 7. B is a whole
    backward, I and W are its input and its weight gradients, `(0F1;3B2)OVERLAP_F_B` is a pair;
    empty cells are ignored.

    Raises ScheduleError: the file cannot be read, is for other `ranks` or `microbatches`, or does
    not pass `check`.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot read the schedule {os.fspath(path)}: {error}") from error
    schedule = parse_csv(text, Path(path).stem)
    for noun, count, expected in (
        ("ranks", schedule.ranks, ranks),
        ("microbatches", schedule.microbatches, microbatches),
    ):
        if expected not in (None, count):
            raise ScheduleError(
                f"the schedule {os.fspath(path)} is for {count} {noun}; this is for {expected}"
            )
    return schedule


def parse_csv(text: str, name: str) -> Schedule:
    """The checked schedule in a file's text. Raises ScheduleError, with the row and cell."""
    rows = [
        _parse_row(cells, f"schedule {name}, row {number}")
        for number, cells in enumerate(csv.reader(io.StringIO(text)), start=1)
    ]
    rank_of: dict[int, int] = {}  # stage -> rank
    microbatches = 0
    for rank, row in enumerate(rows):
        parts = [part for action in row for part in action.parts]
        for part in parts:
            microbatches = max(microbatches, part.microbatch + 1)
            other_rank = rank_of.setdefault(part.stage, rank)
            if other_rank != rank:
                raise ScheduleError(
                    f"schedule {name}: stage {part.stage} is on ranks {other_rank} and {rank}"
                )

    stages = max(rank_of, default=-1) + 1
    for stage in range(stages):
        if stage not in rank_of:
            raise ScheduleError(f"schedule {name} has a stage {stages - 1} and no stage {stage}")
    placement = tuple(rank_of[stage] for stage in range(stages))
    schedule = Schedule(name, microbatches, placement, tuple(rows))
    check(schedule)
    return schedule


def _parse_row(cells: Sequence[str], location: str) -> tuple[Action | Pair, ...]:
    """The actions of a rank; empty cells are ignored."""
    actions = []
    for number, cell in enumerate(cells, start=1):
        text = cell.strip()
        if text:
            actions.append(_parse_cell(text, f"{location}, cell {number}"))
    return tuple(actions)


def _parse_cell(cell: str, location: str) -> Action | Pair:
    pair = _PAIR.fullmatch(cell)
    texts = pair.groups() if pair else (cell,)
    actions = [Action.parse(text.strip()) for text in texts]
    parts = [action for action in actions if action is not None]
    if len(parts) < len(texts):
        hint = ""
        if re.match(r"\d+[A-Z]{2}", cell):
            hint = "; sends, receives and the like are not written, they follow"
        raise ScheduleError(
            f"{location}: expected an action like 2F7, with F, I, W or B; found {cell!r}{hint}"
        )
    if pair is None:
        return parts[0]
    forward, backward = parts
    if forward.kind is not Kind.FORWARD or not backward.kind.gives_input_grad:
        raise ScheduleError(
            f"{location}: a pair is a forward and then a backward, B or I; found {cell!r}"
        )
    return Pair(forward, backward)
