"""Timelines as a picture, like those in a terminal, drawn with matplotlib (installed by the extra
meshtrain[plot])."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshtrain.cli import pipeline_terminal as terminal
from meshtrain.pipeline.timeline_io import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUIET, GROUND, GRID = "#7a8194", "#eef0f5", "#d9dce6"

# Lengths are inches, and y runs down.
LEFT, RIGHT, TOP = 0.85, 0.3, 0.2
TITLE, LANE, GAP, AXIS, LEGEND = 0.36, 0.25, 0.16, 0.4, 0.35
NARROWEST, WIDEST = 8.0, 30.0  # of the picture
TEXT, SMALL = 12.0, 10.0  # points
LABELS = 5.0, 9.0  # points; the labels of boxes are as large as the shortest boxes allow
DIGIT = 0.64 / 72  # width of a digit, per point


def picture(records: Sequence[Record]) -> "Figure":
    """The timelines stacked on one time scale, with a legend of the colours below."""
    # The object interface, not pyplot, which keeps every figure in a global and needs a display.
    from matplotlib.figure import Figure

    lanes = sum(record.timeline.ranks for record in records)
    longest = max(record.timeline.makespan for record in records)
    short, digits = (
        terminal.short_time(records)[0],
        max(len(str(record.microbatches - 1)) for record in records),
    )
    titles = max(
        _length(record.title, TEXT, "bold") + _length(_summary(record, records), SMALL)
        for record in records
    )
    lane = max(longest / short * (digits * LABELS[1] * DIGIT + 0.08), titles + 0.4)
    width = min(max(LEFT + lane + RIGHT, NARROWEST), WIDEST)
    height = TOP + len(records) * (TITLE + GAP) + lanes * LANE + AXIS + LEGEND
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    scale = (width - LEFT - RIGHT) / longest
    size = min(max(0.9 * short * scale / (digits * DIGIT), LABELS[0]), LABELS[1])
    ticks = _ticks(records, scale)
    y = TOP
    for record in records:
        _write(axes, LEFT, y + TITLE / 2, record.title, terminal.INK, TEXT, weight="bold")
        _write(axes, width - RIGHT, y + TITLE / 2, _summary(record, records), ha="right")
        y += TITLE
        _lanes(axes, record, scale, y, size)
        for x in ticks:
            axes.plot(
                [x, x],
                [y, y + record.timeline.ranks * LANE],
                color="white",
                linewidth=0.9,
                zorder=2,
            )
        y += record.timeline.ranks * LANE + GAP
    for x, text in ticks.items():
        _write(axes, x, y + AXIS / 2 - GAP / 2, text, ha="center")
    _write(
        axes, LEFT - 0.1, y + AXIS / 2 - GAP / 2, terminal.unit_of(records)[1] or "time", ha="right"
    )
    _legend(axes, records, height - LEGEND / 2 - 0.05)
    return figure


def _summary(record: Record, records: Sequence[Record]) -> str:
    timeline, (factor, name) = record.timeline, terminal.unit_of(records)
    peaks = timeline.peak_activations
    peak = " ".join(map(str, peaks)) if len(peaks) <= 8 else f"at most {max(peaks)}"
    makespan = f"{terminal.number(timeline.makespan * factor)} {name}".rstrip()
    return f"makespan {makespan},  idle {100 * timeline.idle_share:.1f} %,  peak activations {peak}"


def _lanes(axes: "Axes", record: Record, scale: float, top: float, size: float) -> None:
    for rank, row in enumerate(record.timeline.events):
        y, stages = top + rank * LANE, record.stages_of(rank)
        _write(axes, LEFT - 0.1, y + LANE / 2, f"rank {rank}", ha="right")
        lane = (y + 0.01, LANE - 0.02)
        axes.broken_barh(
            [(LEFT, record.timeline.makespan * scale)], lane, color=GROUND, linewidth=0, zorder=1
        )
        boxes: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for event in row:
            colour, ink = terminal.shade(
                event.action.kind, stages.index(event.action.stage), len(stages)
            )
            x, length = LEFT + (event.start - record.timeline.start) * scale, event.duration * scale
            boxes[colour].append((x, length))
            label = str(event.action.microbatch)
            if len(label) * size * DIGIT < length:
                _write(axes, x + length / 2, y + LANE / 2, label, ink, size, ha="center")
        for colour, spans in boxes.items():
            axes.broken_barh(
                spans, lane, facecolor=colour, edgecolor="white", linewidth=0.8, zorder=3
            )


def _ticks(records: Sequence[Record], scale: float) -> dict[float, str]:
    factor, _ = terminal.unit_of(records)
    step = terminal.round_step(0.8 / scale * factor)
    count = (
        math.floor(max(record.timeline.makespan for record in records) * factor / step + 1e-9) + 1
    )
    return {LEFT + tick * step / factor * scale: f"{tick * step:.6g}" for tick in range(count)}


def _legend(axes: "Axes", records: Sequence[Record], y: float) -> None:
    chunks, x, side = terminal.chunks_of(records), LEFT, 0.17
    for kind in terminal.kinds_of(records):
        for chunk in range(chunks):
            colour, _ = terminal.shade(kind, chunk, chunks)
            axes.broken_barh([(x, side)], (y - side / 2, side), color=colour, linewidth=0)
            x += side
        _write(axes, x + 0.08, y, terminal.WORDS[kind], terminal.INK)
        x += 0.08 + _length(terminal.WORDS[kind], SMALL) + 0.25
    _write(
        axes,
        x,
        y,
        "numbers: microbatches" + ("; lighter: later stages of a rank" if chunks > 1 else ""),
    )


def _write(
    axes: "Axes",
    x: float,
    y: float,
    text: str,
    colour: str = QUIET,
    size: float = SMALL,
    **style: Any,
) -> None:
    axes.text(
        x, y, text, color=colour, fontsize=size, **{"va": "center_baseline", "zorder": 4, **style}
    )


def _length(text: str, size: float, weight: str = "normal") -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    return (
        float(
            TextPath((0, 0), text, size=size, prop=FontProperties(weight=weight))
            .get_extents()
            .width
        )
        / 72
    )
