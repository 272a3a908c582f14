"""The timeline of a real step: recorded by the ranks of a pipeline, written into the run's folder by rank 0."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from meshtrain.layout import Layout
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.command import schedule_title
from meshtrain.pipeline.engine import Pipeline
from meshtrain.pipeline.record import timeline_json
from meshtrain.pipeline.simulate import Event, Timeline
from meshtrain.runtime import Job
from meshtrain.side_file import optional

if TYPE_CHECKING:
    from meshtrain.config import Config

FILE = "timeline.json"


@contextmanager
def recording(
    config: "Config", model: nn.Module, step: int, *, job: Job, layout: Layout, folder: Path, say: Callable[[str], None]
) -> Iterator[None]:
    """Around a step's forwards and backwards: records them if it is the step that the YAML names. All ranks enter it.

    Ranks that differ in their samples or in their part of the layers work in step, so those with the first coordinates
    show what all do.
    """
    if step != config.metrics.timeline or not isinstance(model, Pipeline):
        yield
        return
    model.recorded = []
    yield
    events, model.recorded = model.recorded, None
    first = not any(place for axis, place in layout.coordinate(job.rank).items() if axis != "pp")
    times = [(event.start, event.end) for event in events] if first else None
    rows = [row for row in job.gather("gathering the timeline", times) if row is not None]  # in the order of pp
    if job.rank == 0:
        title = f"{schedule_title(model.schedule)}, step {step} of {config.name}"
        path = folder / FILE
        with optional("there is no timeline"):
            path.write_text(json.dumps(timeline_json(measured(model.schedule, rows), title, "s")) + "\n")
            say(f"timeline of step {step} in {path}; this draws it below the plan: {_command(config, path)}")


def measured(schedule: Schedule, rows: Sequence[Sequence[tuple[float, float]]]) -> Timeline:
    """From the start and the end of every rank's actions, in the order of its list; the clock then begins at 0."""
    begin = min(start for row in rows for start, _ in row)
    events = (
        Event(rank, action, start - begin, end - begin)
        for rank, row in enumerate(rows)
        for action, (start, end) in zip(schedule.flat(rank), row, strict=True)
    )
    return Timeline.measured(events, schedule.ranks)


def _command(config: "Config", path: Path) -> str:
    section = config.pipeline
    each = "" if section.stages_per_rank is None else f" --stages-per-rank {section.stages_per_rank}"
    each = "" if section.schedule.endswith(".csv") else each
    return f"meshtrain pipeline {section.schedule}{each} --beside {path}"
