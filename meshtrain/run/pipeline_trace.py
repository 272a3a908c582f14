"""The timeline of a real step: recorded by the ranks of a pipeline, written into the run's folder
by rank 0."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class TimelineRecorder:
    """Records the step that `metrics.timeline` names, if the model is a pipeline. Rank 0 writes it
    into the folder, and tells `say` how to draw it."""

    config: "Config"
    model: nn.Module
    job: Job
    layout: Layout
    folder: Path
    say: Callable[[str], None]

    @contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Wraps the forwards and backwards of a step, on all ranks."""
        model = self.model
        if step != self.config.metrics.timeline or not isinstance(model, Pipeline):
            yield
            return
        model.recorded = []
        yield
        times = [(event.start, event.end) for event in model.recorded]
        model.recorded = None

        # Ranks of the same stage run in lockstep: those at the first coordinate of all other axes
        # stand for all of them. They come in the order of pp.
        coordinate = self.layout.coordinate(self.job.rank)
        is_first = not any(place for axis, place in coordinate.items() if axis != "pp")
        gathered = self.job.gather("gathering the timeline", times if is_first else None)
        rows = [row for row in gathered if row is not None]
        if self.job.rank == 0:
            with optional("there is no timeline"):
                self._write(step, measured(model.schedule, rows), model.schedule.title)

    def _write(self, step: int, timeline: Timeline, schedule: str) -> None:
        path = self.folder / FILE
        title = f"{schedule}, step {step} of {self.config.name}"
        write_whole(path, json.dumps(timeline_json(timeline, title, "s")) + "\n")
        command = _command(self.config, path)
        self.say(f"timeline of step {step} in {path}; this draws it below the plan: {command}")


def measured(schedule: Schedule, rows: Sequence[Sequence[tuple[float, float]]]) -> Timeline:
    """A timeline from the start and end of each rank's actions, in the order of its list; times
    then begin at 0."""
    begin = min(start for row in rows for start, _ in row)
    events = []
    for rank, row in enumerate(rows):
        for action, (start, end) in zip(schedule.actions_of(rank), row, strict=True):
            events.append(Event(rank, action, start - begin, end - begin))
    return Timeline.measured(events, schedule.ranks)


def _command(config: "Config", path: Path) -> str:
    section = config.pipeline
    stages = ""
    if section.stages_per_rank is not None and not section.schedule.endswith(".csv"):
        stages = f" --stages-per-rank {section.stages_per_rank}"
    return f"meshtrain pipeline {section.schedule}{stages} --beside {path}"
