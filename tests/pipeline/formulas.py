"""What the tests of pipelines share: the table of schedules in the docs, schedules from text, and
tables in YAML."""

import re
from pathlib import Path
from typing import Any

import yaml

from meshtrain.pipeline.actions import Action, Schedule
from meshtrain.pipeline.schedule import build

HERE = Path(__file__).resolve().parent
PAGE = (HERE.parents[1] / "docs" / "pipeline.md").read_text()


def table(name: str) -> Any:
    return yaml.safe_load((HERE / f"{name}.yaml").read_text())


def documented() -> dict[str, list[str]]:
    """Name -> stages of a rank, idle time, its share for 4 x 8 and for 8 x 32, peak, peak for 4 x 8
    in 1f1b's stages.

    The formulas are those of the papers, for p ranks, m microbatches, v stages of a rank, and g
    microbatches that go through one stage of a rank before any goes through its next stage.
    """
    rows = (
        re.findall(r"[^|]+", line)
        for line in PAGE.splitlines()
        if re.match(r"\| `[\w-]+` \| [12]", line)
    )
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows}


def value(formula: str, schedule: Schedule) -> int:
    """`2⌈(p - 1)/3⌉ + 2`, `(v - 1)g + p`, `v·m`, ... with a schedule's numbers put in."""
    p, m, v = schedule.ranks, schedule.microbatches, schedule.stages_per_rank
    groups = max(1, m // p)
    formula = (
        re.sub(r"⌈(.*)/(\d)⌉", r"(-(-\1 // \2))", formula).replace("·", "*").replace(" mod ", " % ")
    )
    formula = re.sub(r"(?<=[\d)])(?=[a-z(])", "*", formula)
    return eval(formula, {"p": p, "m": m, "v": v, "g": -(-m // groups)})  # of a document of ours


def small_schedules(name: str) -> list[Schedule]:
    """Of all small sizes and some larger ones, and with one stage more where a schedule allows
    it."""
    stages, more = int(documented()[name][0][0]), "more" in documented()[name][0]
    sizes = [
        (ranks, microbatches) for ranks in range(1, 7) for microbatches in range(1, 3 * ranks + 2)
    ]
    return [
        build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
        for ranks, microbatches in [*sizes, (11, 5), (13, 40), (16, 64)]
        for per_rank in range(stages, stages + 1 + more)
    ]


def schedule_of(
    *rows: str, placement: list[int] | None = None, microbatches: int | None = None
) -> Schedule:
    """A schedule from rows such as `0F0 1B0`, without any check."""
    actions = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)
    most = 1 + max((action.microbatch for row in actions for action in row), default=-1)
    places = range(len(rows)) if placement is None else placement
    return Schedule("mine", most if microbatches is None else microbatches, tuple(places), actions)


def csv_text(schedule: Schedule) -> str:
    """A schedule in the CSV format of torch.distributed.pipelining, "compute_only"."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)
