"""Timelines on disk: as JSON, which meshtrain can read back, and as a trace for Perfetto or
chrome://tracing."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from meshtrain.errors import InputError
from meshtrain.job.parsing import parse_json
from meshtrain.pipeline.actions import Action, Kind
from meshtrain.pipeline.simulate import Cost, Event, Timeline

FORMAT = "meshtrain timeline 1"
MOST_BYTES = 1 << 30  # of a timeline: one of many ranks and microbatches is long
_COSTS = {"forward": Kind.FORWARD, "input_grad": Kind.INPUT_GRAD, "weight_grad": Kind.WEIGHT_GRAD}


@dataclass(frozen=True)
class Record:
    """A timeline with its title and unit of time."""

    title: str  # what ran: `1f1b, 4 ranks x 8 microbatches`
    timeline: Timeline
    unit: str = ""  # of times: "s", or "" for the unit of a simulation's costs

    @property
    def events(self) -> Iterator[Event]:
        """The events of all ranks, rank by rank."""
        for row in self.timeline.events:
            yield from row

    @property
    def microbatches(self) -> int:
        return 1 + max((event.action.microbatch for event in self.events), default=-1)

    @property
    def stages(self) -> int:
        return 1 + max((event.action.stage for event in self.events), default=-1)

    def stages_of(self, rank: int) -> list[int]:
        return sorted({event.action.stage for event in self.timeline.events[rank]})


def timeline_json(timeline: Timeline, title: str = "", unit: str = "") -> dict[str, Any]:
    """The whole timeline, times in `unit`, for `read_timeline`; all other fields follow from the
    events."""
    rows = [list(map(_event_json, row)) for row in timeline.events]
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
        "events": rows,
    }


def _event_json(event: Event) -> dict[str, Any]:
    return {"action": str(event.action), "start": event.start, "end": event.end}


def read_timeline(path: str | Path) -> Record:
    """Reads the output of `timeline_json`. Raises InputError: the file cannot be read, or is not a
    timeline."""
    advice = "give a timeline that `--json` or a run has written"
    try:
        content = parse_json(Path(path).read_bytes(), most=MOST_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): {advice}") from None
    except ValueError as error:  # invalid JSON, or not text
        raise InputError(f"{path} is no JSON ({error}): {advice}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(
            f'{path} is no timeline: it wants an object with "format": "{FORMAT}", '
            "as `--json` prints"
        )
    try:
        events: list[Event] = []
        for rank, row in enumerate(content["events"]):
            events += [_event(rank, fields) for fields in row]
        timeline = Timeline.measured(events, ranks=len(content["events"]))
        record = Record(str(content["title"]), timeline, content["unit"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is a damaged timeline ({error!r}): write it again") from None
    if not record.stages:
        raise InputError(f"{path} is a timeline without events: there is nothing to draw")
    return record


def _event(rank: int, fields: dict[str, Any]) -> Event:
    start, end = float(fields["start"]), float(fields["end"])
    if not start <= end:
        raise ValueError(f"{fields} ends before it starts")
    action = Action.parse(fields["action"])
    if action is None:
        raise ValueError(f"{fields['action']!r} is no action such as 2F7")
    return Event(rank, action, start, end)


def measured_costs(record: Record) -> dict[str, Cost]:
    """Mean times of each stage's actions, as `simulate` takes them. A whole backward counts half as
    input gradient and half as weight gradient. Raises InputError: a stage has no forward, or no
    backward."""
    durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for event in record.events:
        durations[event.action.kind, event.action.stage].append(event.duration)

    costs: dict[str, Cost] = {}
    for name, kind in _COSTS.items():
        of_stages = []
        for stage in range(record.stages):
            own, whole = durations[kind, stage], durations[Kind.BACKWARD, stage]
            if own:
                of_stages.append(fmean(own))
            elif whole and kind is not Kind.FORWARD:
                of_stages.append(fmean(whole) / 2)
            else:
                raise InputError(
                    f"{record.title}: stage {stage} has no {kind.name.lower()}: give the costs "
                    "yourself"
                )
        costs[name] = of_stages
    return costs


def trace_json(records: Sequence[Record]) -> dict[str, Any]:
    """Chrome's trace format: a process for each record, a thread for each rank, arrows for
    transfers between ranks. Times are in microseconds; a time without a unit is taken as
    milliseconds."""
    events: list[dict[str, Any]] = []
    for process, record in enumerate(records):
        scale = 1e6 if record.unit == "s" else 1e3
        events.append(_metadata("process_name", {"name": record.title}, pid=process))
        for rank, row in enumerate(record.timeline.events):
            thread = {"pid": process, "tid": rank}
            events.append(_metadata("thread_name", {"name": f"rank {rank}"}, **thread))
            events.append(_metadata("thread_sort_index", {"sort_index": rank}, **thread))
            events += [_slice(process, event, scale) for event in row]
        events += _arrows(process, record, scale)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _metadata(name: str, arguments: dict[str, Any], **of: int) -> dict[str, Any]:
    return {**of, "ph": "M", "name": name, "args": arguments}


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


def _arrows(process: int, record: Record, scale: float) -> list[dict[str, Any]]:
    """Arrows from the action that produces a tensor to the action on another rank that consumes
    it."""
    # (kind of tensor, consuming stage, microbatch) -> the action
    producers: dict[tuple[str, int, int], Event] = {}
    consumers: dict[tuple[str, int, int], Event] = {}
    for event in record.events:
        action, kind = event.action, event.action.kind
        if kind is Kind.WEIGHT_GRAD:
            continue
        consumers[kind.tensor, action.stage, action.microbatch] = event
        producers[kind.tensor, action.stage + kind.direction, action.microbatch] = event

    arrows: list[dict[str, Any]] = []
    for key, source in producers.items():
        target = consumers.get(key)
        if target is None or target.rank == source.rank:
            continue
        tensor, stage, microbatch = key
        arrow = {
            "name": tensor,
            "cat": "transfer",
            "pid": process,
            "id": f"{process}.{tensor}.{stage}.{microbatch}",
        }
        # Inside its slice, so that the arrow attaches to it.
        end = source.end - min(source.duration / 2, 0.01 / scale)
        arrows.append({**arrow, "ph": "s", "tid": source.rank, "ts": end * scale})
        start = target.start * scale
        arrows.append({**arrow, "ph": "f", "bp": "e", "tid": target.rank, "ts": start})
    return arrows
