"""Timelines in a terminal: a row per rank, a coloured cell per action with its microbatch, dots
where a rank idles.

    rank 0  0 1 2 3 · · · · · · 0   1 ...

Several timelines are stacked on one time scale. Timelines wider than the terminal are folded into
bands.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.style import Style
from rich.text import Text

from meshtrain.pipeline.actions import Kind
from meshtrain.pipeline.simulate import Event
from meshtrain.pipeline.timeline_io import Record

# Colours of backwards are warm if another stage waits for the result, and green if none does.
COLOURS = {
    Kind.FORWARD: "#3b6fe0",
    Kind.BACKWARD: "#e2603b",
    Kind.INPUT_GRAD: "#f0a030",
    Kind.WEIGHT_GRAD: "#2a9d8f",
}
WORDS = {kind: kind.name.lower().replace("_grad", " gradient") for kind in COLOURS}
INK, PAPER = "#1f2430", "#ffffff"
_LIGHTEST = 0.45  # intensity of a rank's last stage; its first has the full colour
_MOST_LINES = 100  # of bands; timelines that need more are drawn smaller
_WIDEST = 6  # columns of a cell: more would only stretch it
_GAP = "▉"  # the last column of a cell: seven eighths of it, so that cells of one colour stay apart

Cell = tuple[str, Style]
_IDLE: Cell = ("·", Style(dim=True))
_BUSY: Cell = ("#", Style())  # without colours, if there is no room for letters


def print_timelines(records: Sequence[Record], console: Console) -> None:
    """Prints the timelines on one scale, a legend of the colours, and the numbers of each
    timeline."""
    coloured = console.color_system is not None and not console.no_color
    console.print(Text("\n").join(timeline_lines(records, console.width, coloured)), soft_wrap=True)


def timeline_lines(records: Sequence[Record], width: int, coloured: bool) -> list[Text]:
    """The lines that `print_timelines` prints, each at most `width` wide."""
    margin = max(len(f"rank {record.timeline.ranks - 1}") for record in records) + 2
    grid = _grid(records, max(width - margin, 12), coloured)
    row = _mixed_row if grid.mixed else _row
    lines: list[Text] = []
    for first in range(0, grid.columns, grid.band):
        band = range(first, min(first + grid.band, grid.columns))
        for i, record in enumerate(records):
            lines += [Text()] * (i > 0)
            if first == 0 or len(records) > 1:
                lines.append(Text(record.title, "bold"))
            lines += [
                Text.assemble((f"rank {rank}".ljust(margin), "dim"), *row(record, rank, band, grid))
                for rank in range(record.timeline.ranks)
            ]
        lines += [_axis(band, margin, unit_of(records), grid), Text()]
    lines += _legend(records, grid)
    for record in records:
        lines += [Text(), *_numbers(record, unit_of(records), titled=len(records) > 1)]
    return lines


def shade(kind: Kind, chunk: int, chunks: int) -> tuple[str, str]:
    """The colour of an action of a rank's `chunk`-th stage of `chunks`, and that of the text on
    it."""
    light = _LIGHTEST + (1 - _LIGHTEST) * (1 - chunk / max(chunks - 1, 1))
    red, green, blue = (round(255 - light * (255 - part)) for part in _rgb(COLOURS[kind]))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 150
    return f"#{red:02x}{green:02x}{blue:02x}", PAPER if dark else INK


def _rgb(colour: str) -> bytes:
    return bytes.fromhex(colour[1:])


def unit_of(records: Sequence[Record]) -> tuple[float, str]:
    """The factor by which to multiply times for display, and their unit."""
    longest = max(record.timeline.makespan for record in records)
    if all(record.unit == "s" for record in records):
        return (1e3, "ms") if longest < 2 else (1.0, "s")
    return 1.0, ""


def number(value: float) -> str:
    """Four significant digits, or an integer for whole or large numbers."""
    return str(round(value)) if abs(value) >= 1000 or _whole(value) else f"{value:.4g}"


def numbers(values: Sequence[float]) -> list[str]:
    """The same for a column of numbers: all have as many decimals as the largest."""
    if all(map(_whole, values)):
        return [str(round(value)) for value in values]
    digits = max(0, 3 - math.floor(math.log10(max(map(abs, values)))))
    return [f"{value:.{digits}f}" for value in values]


def _whole(value: float) -> bool:
    return math.isclose(value, round(value), abs_tol=1e-9)


@dataclass(frozen=True)
class _Grid:
    per_column: float  # time per column
    columns: int  # of the longest timeline
    band: int  # columns of one band
    coloured: bool
    labelled: bool  # whether cells have room for the number of the microbatch
    mixed: bool  # whether a column is longer than an action


def _grid(records: Sequence[Record], width: int, coloured: bool) -> _Grid:
    """The grid, with cells as wide as the terminal allows; folded into bands if labels had no room
    otherwise."""
    short, even = short_time(records)
    length = max(record.timeline.makespan for record in records) / short
    label = max(len(str(record.microbatches - 1)) for record in records) + (1 if coloured else 2)
    lines = sum(record.timeline.ranks + 2 for record in records) + 1  # of a band

    def columns(cell: float) -> int:
        return math.ceil(length * cell - 1e-6)

    def step(cell: float) -> int:
        """The columns by which a band's length grows, so that bands end where cells do."""
        return int(cell) if even and cell >= 1 else 1

    def bands(cell: float) -> int:
        return math.ceil(columns(cell) / (width // step(cell) * step(cell)))

    def largest(count: int) -> float:
        """The widest cell with which there are at most `count` bands."""
        whole = [cell for cell in range(1, _WIDEST + 1) if even and bands(cell) <= count]
        return max(whole, default=min(count * width / length, _WIDEST))

    allowed = range(1, max(_MOST_LINES // lines, 1) + 1)
    cell = largest(next((bands(least) for least in (label, 1) if bands(least) in allowed), 1))
    band = math.ceil(columns(cell) / bands(cell) / step(cell)) * step(cell)
    return _Grid(
        short / cell, columns(cell), min(band, columns(cell)), coloured, cell >= label, cell < 1
    )


def short_time(records: Sequence[Record]) -> tuple[float, bool]:
    """The time of a short action, and whether all actions take a whole multiple of it. It need not
    be the shortest: measured times vary, and a few very short actions need no label."""
    durations = sorted(event.duration for event in _events(records) if event.duration > 0) or [1.0]
    shortest, middle = durations[0], durations[len(durations) // 2]
    ratios = [duration / shortest for duration in durations]
    if middle <= 8 * shortest and all(
        math.isclose(ratio, round(ratio), abs_tol=1e-6) for ratio in ratios
    ):
        return shortest, True
    return durations[len(durations) // 10], False


def _row(record: Record, rank: int, band: range, grid: _Grid) -> list[Cell]:
    """One rank in one band. An action that extends beyond the band has its number in the larger
    part."""
    cells: list[Cell] = [_IDLE] * len(band)
    stages, start = record.stages_of(rank), record.timeline.start
    draw = _coloured if grid.coloured else _plain
    for event in record.timeline.events[rank]:
        # Halves are rounded up, not to even numbers, so that equal times are equally wide.
        first, end = (
            math.floor((time - start) / grid.per_column + 0.5) for time in (event.start, event.end)
        )
        part = range(max(first, band.start), min(end, band.stop))
        if part:
            labelled = len(part) > (end - first) / 2 or (
                len(part) == (end - first) / 2 and part.start == first
            )
            label = str(event.action.microbatch) if labelled and grid.labelled else ""
            gap = grid.labelled and part.stop == end
            drawn = draw(
                event.action.kind,
                label,
                len(part),
                gap,
                stages.index(event.action.stage),
                len(stages),
            )
            cells[part.start - band.start : part.stop - band.start] = drawn
    return cells


def _coloured(kind: Kind, label: str, width: int, gap: bool, chunk: int, chunks: int) -> list[Cell]:
    colour, ink = shade(kind, chunk, chunks)
    room = width - gap
    label = label if len(label) <= room else ""
    indent = min((width - len(label)) // 2, room - len(label))
    inside = (" " * indent + label).ljust(room)
    return [(character, Style(bgcolor=colour, color=ink)) for character in inside] + [
        (_GAP, Style(color=colour))
    ] * gap


def _plain(kind: Kind, label: str, width: int, gap: bool, chunk: int, chunks: int) -> list[Cell]:
    letter = str(kind) if chunk == 0 else str(kind).lower()
    if not gap and not label:
        return [(letter, Style())] * width
    room = max(width - gap, 1)
    return [
        (character, Style())
        for character in f"{letter}{label}"[:room].ljust(room, "-").ljust(width)
    ]


def _mixed_row(record: Record, rank: int, band: range, grid: _Grid) -> list[Cell]:
    """One rank, if a column has several actions: their colours are mixed, weighted by time."""
    # of each column: colour -> columns
    shares: list[dict[str, float]] = [defaultdict(float) for _ in band]
    stages, start = record.stages_of(rank), record.timeline.start
    for event in record.timeline.events[rank]:
        first, end = (
            (time - start) / grid.per_column - band.start for time in (event.start, event.end)
        )
        colour, _ = shade(event.action.kind, stages.index(event.action.stage), len(stages))
        for column in range(max(math.floor(first), 0), min(math.ceil(end), len(band))):
            shares[column][colour] += min(end, column + 1) - max(first, column)
    return [
        _mixed(share, grid.coloured) if sum(share.values()) >= 0.5 else _IDLE for share in shares
    ]


def _mixed(shares: Mapping[str, float], coloured: bool) -> Cell:
    if not coloured:
        return _BUSY
    total = sum(shares.values())
    parts = [
        round(sum(part * _rgb(colour)[i] for colour, part in shares.items()) / total)
        for i in range(3)
    ]
    return " ", Style(bgcolor="#{:02x}{:02x}{:02x}".format(*parts))


def _axis(band: range, margin: int, unit: tuple[float, str], grid: _Grid) -> Text:
    factor, name = unit
    per_column = grid.per_column * factor
    step = round_step(8 * per_column)
    line = name.ljust(margin)
    for tick in range(
        math.ceil(band.start * per_column / step - 1e-9), math.ceil(band.stop * per_column / step)
    ):
        column = margin + round(tick * step / per_column) - band.start
        line = line.ljust(column) + f"{tick * step:.6g}"
    return Text(line[: margin + len(band)], "dim")


def round_step(least: float) -> float:
    """The smallest of ..., 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, ... that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def kinds_of(records: Sequence[Record]) -> list[Kind]:
    kinds = {event.action.kind for event in _events(records)}
    return [kind for kind in COLOURS if kind in kinds]


def chunks_of(records: Sequence[Record]) -> int:
    return max(
        len(record.stages_of(rank)) for record in records for rank in range(record.timeline.ranks)
    )


def _legend(records: Sequence[Record], grid: _Grid) -> list[Text]:
    chunks, idle = chunks_of(records), f"{_IDLE[0]} idle"
    several = "a column has several actions: a wider terminal or --png shows each"
    if grid.mixed and not grid.coloured:
        return [Text(f"{_BUSY[0]} busy   {idle}"), Text(several, "dim")]
    line = Text()
    for kind in kinds_of(records):
        if grid.coloured:
            line.append_text(
                Text.assemble(*(("██", shade(kind, chunk, chunks)[0]) for chunk in range(chunks)))
            )
        else:
            line.append(kind)
        line.append(f" {WORDS[kind]}   ")
    remarks = ["numbers are microbatches"] * grid.labelled
    remarks += [f"{'lighter' if grid.coloured else 'small letters'}: later stages of a rank"] * (
        chunks > 1
    )
    remarks += [f"mixed colours: {several}"] * grid.mixed
    return [line.append(idle), *(Text(remark, "dim") for remark in remarks)]


def _numbers(record: Record, unit: tuple[float, str], titled: bool) -> list[Text]:
    """Makespan and idle share, and a table of each rank's idle time and peak activations."""
    timeline, (factor, name) = record.timeline, unit
    ranks = range(timeline.ranks)
    columns = [
        ["", *(f"rank {rank}" for rank in ranks)],
        ["stages", *(", ".join(map(str, record.stages_of(rank))) for rank in ranks)],
        ["idle", *numbers([idle * factor for idle in timeline.idle])],
        ["", *(f"{100 * idle / timeline.makespan:.0f} %" for idle in timeline.idle)],
        ["idle in span", *numbers([idle * factor for idle in timeline.idle_in_span])],
        ["peak activations", *map(str, timeline.peak_activations)],
    ]
    widths = [max(map(len, column)) for column in columns]
    rows = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in zip(*columns, strict=True)
    ]
    head = Text(f"{record.title}: " if titled else "", "bold")
    makespan = f"{number(timeline.makespan * factor)} {name}".rstrip()
    head.append(f"makespan {makespan}, {100 * timeline.idle_share:.1f} % of it idle", "not bold")
    return [head, Text(rows[0], "dim"), *map(Text, rows[1:])]


def _events(records: Sequence[Record]) -> Iterator[Event]:
    return (event for record in records for row in record.timeline.events for event in row)
