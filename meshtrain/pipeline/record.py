"""A timeline on disk: as JSON, which meshtrain reads again, and as a trace for Perfetto or chrome://tracing.

A simulated timeline and one that a real run has measured have the same form, so everything that draws the one draws
the other.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.errors import InputError
from meshtrain.pipeline.actions import Action, Kind
from meshtrain.pipeline.simulate import Event, Timeline

FORMAT = "meshtrain timeline 1"
_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")


@dataclass(frozen=True)
class Record:
    """A timeline and what people need to read it.

    Attributes:
        title: what ran: `1f1b, 4 ranks x 8 microbatches`.
        unit: of its times: "s", or "" where they are the costs that a simulation was given.
    """

    title: str
    timeline: Timeline
    unit: str = ""

    @property
    def microbatches(self) -> int:
        return 1 + max((event.action.microbatch for row in self.timeline.events for event in row), default=-1)

    @property
    def stages(self) -> int:
        return 1 + max((event.action.stage for row in self.timeline.events for event in row), default=-1)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in the order of the model."""
        return sorted({event.action.stage for event in self.timeline.events[rank]})


def timeline_json(timeline: Timeline, title: str = "", unit: str = "") -> dict[str, Any]:
    """The whole timeline for a program; `read_timeline` makes a Record of it again.

    Times are written as they are, in `unit`; everything but the events follows from them.
    """
    return {
        "format": FORMAT,
        "title": title,
        "unit": unit,
        "ranks": timeline.ranks,
        "makespan": timeline.makespan,
        "idle_share": timeline.idle_share,
        "idle": list(timeline.idle),
        "idle_in_span": list(timeline.idle_in_span),
        "peak_activations": list(timeline.peak_activations),
        "events": [
            [{"action": str(event.action), "start": event.start, "end": event.end} for event in row]
            for row in timeline.events
        ],
    }


def read_timeline(path: str | Path) -> Record:
    """What `timeline_json` has written.

    Raises:
        InputError: the file is not there, or is none of them.
    """
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        why = f"cannot read {path} ({error.strerror})"
        raise InputError(f"{why}: give a timeline that `--json` or a run has written") from None
    except ValueError as error:  # of json, and of text that is none
        raise InputError(f"{path} is no JSON ({error}): give a timeline that `--json` or a run has written") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InputError(f'{path} is no timeline: it wants an object with "format": "{FORMAT}", as `--json` prints')
    try:
        rows = [[_event(rank, event) for event in row] for rank, row in enumerate(found["events"])]
        record = Record(
            str(found["title"]), Timeline.measured((e for row in rows for e in row), len(rows)), found["unit"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is a damaged timeline ({error!r}): write it again") from None
    if not record.stages:
        raise InputError(f"{path} is a timeline without events: there is nothing to draw")
    return record


def _event(rank: int, found: dict[str, Any]) -> Event:
    start, end = float(found["start"]), float(found["end"])
    if not start <= end:
        raise ValueError(f"{found} ends before it starts")
    parts = _ACTION.fullmatch(found["action"])
    if parts is None:
        raise ValueError(f"{found['action']!r} is no action such as 2F7")
    return Event(rank, Action(Kind(parts[2]), int(parts[1]), int(parts[3])), start, end)


# For chrome://tracing and https://ui.perfetto.dev -------------------------------------------------------------------


def trace_json(records: Sequence[Record]) -> dict[str, Any]:
    """Chrome's trace format: a process for each record, a thread for each rank, arrows for what ranks hand over.

    Times are microseconds; a time without a unit is taken as milliseconds.
    """
    events: list[dict[str, Any]] = []
    for process, record in enumerate(records):
        here: dict[str, Any] = {"pid": process, "ph": "M"}
        events.append({**here, "name": "process_name", "args": {"name": record.title}})
        for rank, row in enumerate(record.timeline.events):
            events.append({**here, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
            events.append({**here, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}})
            events += [_slice(process, event, _microseconds(record)) for event in row]
        events += _arrows(process, record)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _microseconds(record: Record) -> float:
    """In one unit of the record's times."""
    return 1e6 if record.unit == "s" else 1e3


def _slice(process: int, event: Event, scale: float) -> dict[str, Any]:
    action = event.action
    return {
        "ph": "X",
        "name": f"{action.kind} stage {action.stage} microbatch {action.microbatch}",
        "cat": action.kind.name.lower(),
        "pid": process,
        "tid": event.rank,
        "ts": event.start * scale,
        "dur": event.duration * scale,
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }


def _arrows(process: int, record: Record) -> list[dict[str, Any]]:
    """From the action that makes a tensor to the one on another rank that takes it."""
    made: dict[tuple[str, int, int], Event] = {}
    taken: dict[tuple[str, int, int], Event] = {}
    for event in (event for row in record.timeline.events for event in row):
        action = event.action
        if action.kind is Kind.FORWARD:
            made["activation", action.stage + 1, action.microbatch] = event
            taken["activation", action.stage, action.microbatch] = event
        elif action.kind.gives_input_grad:
            made["gradient", action.stage - 1, action.microbatch] = event
            taken["gradient", action.stage, action.microbatch] = event
    arrows: list[dict[str, Any]] = []
    scale = _microseconds(record)
    for (kind, stage, microbatch), event in made.items():
        target = taken.get((kind, stage, microbatch))
        if target is None or target.rank == event.rank:
            continue
        end = event.end - min(event.duration / 2, 0.01 / scale)  # inside of its slice: that is how arrows find it
        arrow = {"name": kind, "cat": "transfer", "pid": process, "id": f"{process}.{kind}.{stage}.{microbatch}"}
        arrows.append({**arrow, "ph": "s", "tid": event.rank, "ts": end * scale})
        arrows.append({**arrow, "ph": "f", "bp": "e", "tid": target.rank, "ts": target.start * scale})
    return arrows
