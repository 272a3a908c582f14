"""The timeline of a real step: recorded by the ranks of a pipeline, written into the run's folder
by rank 0."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from meshtrain.job.process import Job
from meshtrain.job.storage import optional, write_whole
from meshtrain.layout import Layout
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.engine import Pipeline
from meshtrain.pipeline.simulate import Event, Timeline
from meshtrain.pipeline.timeline_io import timeline_json

if TYPE_CHECKING:
    from meshtrain.config import Config

FILE = "timeline.json"


@contextmanager
def record_timeline(
    config: "Config",
    model: nn.Module,
    step: int,
    *,
    job: Job,
    layout: Layout,
    folder: Path,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Wraps a step's forwards and backwards, on all ranks: records them if it is the step that the
    config names. Ranks of the same stage run in lockstep: those at the first coordinate of all axes
    but `pp` stand for all of them."""
    if step != config.metrics.timeline or not isinstance(model, Pipeline):
        yield
        return
    model.recorded = []
    yield
    events, model.recorded = model.recorded, None
    first = not any(place for axis, place in layout.coordinate(job.rank).items() if axis != "pp")
    times = [(event.start, event.end) for event in events] if first else None
    # in the order of pp
    rows = [row for row in job.gather("gathering the timeline", times) if row is not None]
    if job.rank == 0:
        title = f"{model.schedule.title}, step {step} of {config.name}"
        path = folder / FILE
        with optional("there is no timeline"):
            write_whole(
                path, json.dumps(timeline_json(measured(model.schedule, rows), title, "s")) + "\n"
            )
            say(
                f"timeline of step {step} in {path}; this draws it below the plan: "
                f"{_command(config, path)}"
            )


def measured(schedule: Schedule, rows: Sequence[Sequence[tuple[float, float]]]) -> Timeline:
    """A timeline from the start and end of each rank's actions, in the order of its list; times
    then begin at 0."""
    begin = min(start for row in rows for start, _ in row)
    events = (
        Event(rank, action, start - begin, end - begin)
        for rank, row in enumerate(rows)
        for action, (start, end) in zip(schedule.actions_of(rank), row, strict=True)
    )
    return Timeline.measured(events, schedule.ranks)


def _command(config: "Config", path: Path) -> str:
    section = config.pipeline
    stages = (
        "" if section.stages_per_rank is None else f" --stages-per-rank {section.stages_per_rank}"
    )
    stages = "" if section.schedule.endswith(".csv") else stages
    return f"meshtrain pipeline {section.schedule}{stages} --beside {path}"
