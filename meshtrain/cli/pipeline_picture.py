"""Timelines as a picture, like those in a terminal, drawn with matplotlib (installed by the extra
meshtrain[plot])."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshtrain.cli import pipeline_terminal as terminal
from meshtrain.pipeline.timeline_io import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUIET = "#7a8194"  # of text that explains
GROUND = "#eef0f5"  # of a lane

# Lengths are inches, and y runs down.
LEFT = 0.85  # margins
RIGHT = 0.3
TOP = 0.2
TITLE = 0.36  # heights
LANE = 0.25
GAP = 0.16
AXIS = 0.4
LEGEND = 0.35
NARROWEST = 8.0  # widths of the picture
WIDEST = 30.0
TICKS = 0.8  # the least distance of two ticks

# Sizes of text are points.
TEXT = 12.0
SMALL = 10.0
SMALLEST_LABEL = 5.0  # the labels of boxes are as large as the shortest boxes allow
LARGEST_LABEL = 9.0
DIGIT = 0.64 / 72  # width of a digit in text of one point


def picture(records: Sequence[Record]) -> "Figure":
    """The timelines stacked on one time scale, with a legend of the colours below."""
    # The object interface, not pyplot, which keeps every figure in a global and needs a display.
    from matplotlib.figure import Figure

    lanes = sum(record.timeline.ranks for record in records)
    width = _width(records)
    height = TOP + len(records) * (TITLE + GAP) + lanes * LANE + AXIS + LEGEND
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()

    longest = max(record.timeline.makespan for record in records)
    scale = (width - LEFT - RIGHT) / longest
    short, _ = terminal.short_time(records)
    # A text of n digits is n * DIGIT * size wide: it fills 90 % of a short box at
    fitting = 0.9 * (short * scale) / (_digits(records) * DIGIT)
    label_size = min(max(fitting, SMALLEST_LABEL), LARGEST_LABEL)
    drawing = _Drawing(axes, records, scale, label_size)

    y = TOP
    for record in records:
        middle = y + TITLE / 2
        drawing.write(LEFT, middle, record.title, terminal.INK, TEXT, weight="bold")
        drawing.write(width - RIGHT, middle, _summary(record, records), ha="right")
        y += TITLE
        drawing.lanes(record, y)
        y += record.timeline.ranks * LANE + GAP
    drawing.axis(y - GAP / 2 + AXIS / 2)
    drawing.legend(height - LEGEND / 2 - 0.05)
    return figure


def _width(records: Sequence[Record]) -> float:
    """The width with which short actions have room for their numbers, and titles fit."""
    longest = max(record.timeline.makespan for record in records)
    short, _ = terminal.short_time(records)
    short_box = _digits(records) * LARGEST_LABEL * DIGIT + 0.08
    widths = [longest / short * short_box]
    for record in records:
        title = _length(record.title, TEXT, "bold")
        summary = _length(_summary(record, records), SMALL)
        widths.append(title + 0.4 + summary)
    width = LEFT + max(widths) + RIGHT
    return min(max(width, NARROWEST), WIDEST)


def _digits(records: Sequence[Record]) -> int:
    """Digits of the largest number of a microbatch."""
    return max(len(str(record.microbatches - 1)) for record in records)


def _summary(record: Record, records: Sequence[Record]) -> str:
    timeline = record.timeline
    factor, unit = terminal.unit_of(records)
    makespan = f"{terminal.number(timeline.makespan * factor)} {unit}".rstrip()
    idle = f"{100 * timeline.idle_share:.1f} %"
    peaks = timeline.peak_activations
    if len(peaks) <= 8:
        peak = " ".join(str(of_rank) for of_rank in peaks)
    else:
        peak = f"at most {max(peaks)}"
    return f"makespan {makespan},  idle {idle},  peak activations {peak}"


@dataclass(frozen=True)
class _Drawing:
    """The parts of the picture."""

    axes: "Axes"
    records: Sequence[Record]
    scale: float  # inches per unit of time
    label_size: float  # points

    def lanes(self, record: Record, top: float) -> None:
        """A lane for each rank, with a box for each action, and lines through the ticks."""
        start = record.timeline.start
        for rank, row in enumerate(record.timeline.events):
            y = top + rank * LANE
            middle = y + LANE / 2
            lane = (y + 0.01, LANE - 0.02)  # where it begins, and its height
            whole = (LEFT, record.timeline.makespan * self.scale)
            self.write(LEFT - 0.1, middle, f"rank {rank}", ha="right")
            self.axes.broken_barh([whole], lane, color=GROUND, linewidth=0, zorder=1)

            # All boxes of a colour are one object, since a timeline may have many thousands.
            boxes: dict[str, list[tuple[float, float]]] = defaultdict(list)
            stages = record.stages_of(rank)
            for event in row:
                chunk = stages.index(event.action.stage)
                colour, ink = terminal.shade(event.action.kind, chunk, len(stages))
                x = LEFT + (event.start - start) * self.scale
                length = event.duration * self.scale
                boxes[colour].append((x, length))
                label = str(event.action.microbatch)
                has_room = len(label) * self.label_size * DIGIT < length
                if has_room:
                    centre = x + length / 2
                    self.write(centre, middle, label, ink, self.label_size, ha="center")
            for colour, spans in boxes.items():
                self.axes.broken_barh(
                    spans, lane, facecolor=colour, edgecolor="white", linewidth=0.8, zorder=3
                )
        bottom = top + record.timeline.ranks * LANE
        for x in self.ticks():
            self.axes.plot([x, x], [top, bottom], color="white", linewidth=0.9, zorder=2)

    def axis(self, y: float) -> None:
        """The time at each tick."""
        for x, text in self.ticks().items():
            self.write(x, y, text, ha="center")
        _, unit = terminal.unit_of(self.records)
        self.write(LEFT - 0.1, y, unit or "time", ha="right")

    def ticks(self) -> dict[float, str]:
        """x -> the time there, at round numbers."""
        # printed time = time of the records * factor = inches / scale * factor
        factor, _ = terminal.unit_of(self.records)
        step = terminal.round_step(TICKS / self.scale * factor)
        longest = max(record.timeline.makespan for record in self.records) * factor
        count = math.floor(longest / step + 1e-9) + 1
        ticks = {}
        for tick in range(count):
            printed = tick * step
            x = LEFT + printed / factor * self.scale
            ticks[x] = f"{printed:.6g}"
        return ticks

    def legend(self, y: float) -> None:
        """The colours of each kind of action, one for each of a rank's stages."""
        chunks = terminal.chunks_of(self.records)
        side = 0.17
        x = LEFT
        for kind in terminal.kinds_of(self.records):
            for chunk in range(chunks):
                colour, _ = terminal.shade(kind, chunk, chunks)
                square = (y - side / 2, side)
                self.axes.broken_barh([(x, side)], square, color=colour, linewidth=0)
                x += side
            word = terminal.WORDS[kind]
            x += 0.08
            self.write(x, y, word, terminal.INK)
            x += _length(word, SMALL) + 0.25
        remark = "numbers: microbatches"
        if chunks > 1:
            remark += "; lighter: later stages of a rank"
        self.write(x, y, remark)

    def write(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = QUIET,
        size: float = SMALL,
        **style: Any,
    ) -> None:
        style = {"va": "center_baseline", "zorder": 4, **style}
        self.axes.text(x, y, text, color=colour, fontsize=size, **style)


def _length(text: str, size: float, weight: str = "normal") -> float:
    """The width of a text in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    path = TextPath((0, 0), text, size=size, prop=FontProperties(weight=weight))
    return float(path.get_extents().width) / 72
