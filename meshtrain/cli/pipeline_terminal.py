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
INK = "#1f2430"
PAPER = "#ffffff"
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
    lines = timeline_lines(records, console.width, coloured)
    console.print(Text("\n").join(lines), soft_wrap=True)


def timeline_lines(records: Sequence[Record], width: int, coloured: bool) -> list[Text]:
    """The lines that `print_timelines` prints, each at most `width` wide."""
    margin = max(len(f"rank {record.timeline.ranks - 1}") for record in records) + 2
    grid = _grid(records, max(width - margin, 12), coloured)
    unit = unit_of(records)
    several = len(records) > 1
    lines: list[Text] = []
    for first in range(0, grid.columns, grid.band):
        end = min(first + grid.band, grid.columns)
        band = range(first, end)
        for i, record in enumerate(records):
            if i > 0:
                lines.append(Text())
            if first == 0 or several:
                lines.append(Text(record.title, "bold"))
            for rank in range(record.timeline.ranks):
                name = (f"rank {rank}".ljust(margin), "dim")
                cells = _row(record, rank, band, grid)
                lines.append(Text.assemble(name, *cells))
        lines.append(_axis(band, margin, unit, grid))
        lines.append(Text())
    lines += _legend(records, grid)
    for record in records:
        lines.append(Text())
        lines += _numbers(record, unit, titled=several)
    return lines


def shade(kind: Kind, chunk: int, chunks: int) -> tuple[str, str]:
    """The colour of an action of a rank's `chunk`-th stage of `chunks`, and that of the text on
    it."""
    # Towards white in equal steps, from the full colour to the lightest.
    step = (1 - _LIGHTEST) / max(chunks - 1, 1)
    intensity = 1 - step * chunk
    red, green, blue = (round(255 - intensity * (255 - part)) for part in _rgb(COLOURS[kind]))

    luma = 0.299 * red + 0.587 * green + 0.114 * blue  # as the eye weighs the three (ITU-R BT.601)
    ink = PAPER if luma < 150 else INK
    return _hex(red, green, blue), ink


def _rgb(colour: str) -> bytes:
    return bytes.fromhex(colour[1:])


def _hex(red: int, green: int, blue: int) -> str:
    return f"#{red:02x}{green:02x}{blue:02x}"


def unit_of(records: Sequence[Record]) -> tuple[float, str]:
    """The factor by which to multiply times for display, and their unit."""
    longest = max(record.timeline.makespan for record in records)
    if any(record.unit != "s" for record in records):
        return 1.0, ""
    return (1e3, "ms") if longest < 2 else (1.0, "s")


def number(value: float) -> str:
    """Four significant digits, or an integer for whole or large numbers."""
    if abs(value) >= 1000 or _whole(value):
        return str(round(value))
    return f"{value:.4g}"


def numbers(values: Sequence[float]) -> list[str]:
    """The same for a column of numbers: all have as many decimals as the largest."""
    if all(map(_whole, values)):
        return [str(round(value)) for value in values]
    largest = max(abs(value) for value in values)
    decimals = max(0, 3 - math.floor(math.log10(largest)))
    return [f"{value:.{decimals}f}" for value in values]


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

    def column(self, time: float, record: Record) -> float:
        """Where a time of a record is drawn, in columns from its start."""
        return (time - record.timeline.start) / self.per_column


def _grid(records: Sequence[Record], width: int, coloured: bool) -> _Grid:
    """The grid, with cells as wide as the terminal allows; folded into bands if labels had no room
    otherwise. A *cell* is the columns of a short action."""
    short, even = short_time(records)
    longest = max(record.timeline.makespan for record in records)
    cells = longest / short
    digits = max(len(str(record.microbatches - 1)) for record in records)
    label = digits + 1  # with the gap
    if not coloured:
        label += 1  # the letter in place of the colour
    lines = sum(record.timeline.ranks + 2 for record in records) + 1  # of a band

    def columns(cell: float) -> int:
        return math.ceil(cells * cell - 1e-6)

    def step(cell: float) -> int:
        """The columns by which a band's length grows, so that bands end where cells do."""
        return int(cell) if even and cell >= 1 else 1

    def bands(cell: float) -> int:
        longest_band = width // step(cell) * step(cell)
        return math.ceil(columns(cell) / longest_band)

    # As many bands as cells with room for their labels need, or else cells of one column; but no
    # more than a reader takes in.
    most_bands = max(_MOST_LINES // lines, 1)
    count = 1
    for least_cell in (label, 1):
        if 1 <= bands(least_cell) <= most_bands:
            count = bands(least_cell)
            break

    # The widest cell with which there are no more: a whole one, if actions are multiples of it.
    cell: float = min(count * width / cells, _WIDEST)
    if even:
        whole_cells = [whole for whole in range(1, _WIDEST + 1) if bands(whole) <= count]
        cell = max(whole_cells, default=cell)

    # Bands of equal length.
    band = math.ceil(columns(cell) / bands(cell) / step(cell)) * step(cell)
    return _Grid(
        per_column=short / cell,
        columns=columns(cell),
        band=min(band, columns(cell)),
        coloured=coloured,
        labelled=cell >= label,
        mixed=cell < 1,
    )


def short_time(records: Sequence[Record]) -> tuple[float, bool]:
    """The time of a short action, and whether all actions take a whole multiple of it. It need not
    be the shortest: measured times vary, and a few very short actions need no label."""
    durations = sorted(event.duration for event in _events(records) if event.duration > 0)
    if not durations:
        return 1.0, True
    shortest = durations[0]
    middle = durations[len(durations) // 2]
    ratios = [duration / shortest for duration in durations]
    are_multiples = all(math.isclose(ratio, round(ratio), abs_tol=1e-6) for ratio in ratios)
    if are_multiples and middle <= 8 * shortest:
        return shortest, True
    tenth = durations[len(durations) // 10]
    return tenth, False


def _row(record: Record, rank: int, band: range, grid: _Grid) -> list[Cell]:
    """One rank in one band."""
    if grid.mixed:
        return _mixed_row(record, rank, band, grid)

    cells: list[Cell] = [_IDLE] * len(band)
    stages = record.stages_of(rank)
    for event in record.timeline.events[rank]:
        # Halves are rounded up, not to even numbers, so that equal times are equally wide.
        first = math.floor(grid.column(event.start, record) + 0.5)
        end = math.floor(grid.column(event.end, record) + 0.5)
        part = range(max(first, band.start), min(end, band.stop))
        if not part:
            continue
        has_label = grid.labelled and _is_larger_part(part, first, end)
        box = _Box(
            kind=event.action.kind,
            label=str(event.action.microbatch) if has_label else "",
            width=len(part),
            has_gap=grid.labelled and part.stop == end,
            chunk=stages.index(event.action.stage),
            chunks=len(stages),
        )
        drawn = _coloured(box) if grid.coloured else _plain(box)
        cells[part.start - band.start : part.stop - band.start] = drawn
    return cells


def _is_larger_part(part: range, first: int, end: int) -> bool:
    """Whether this part of the columns of an action has its number: the larger one if it extends
    beyond the band, the first of two halves."""
    half = (end - first) / 2
    return len(part) > half or (len(part) == half and part.start == first)


@dataclass(frozen=True)
class _Box:
    """An action, or the part of it that is in a band."""

    kind: Kind
    label: str  # the number of its microbatch, or nothing
    width: int  # columns
    has_gap: bool  # whether its last column keeps it apart from the next one
    chunk: int  # which of the rank's stages, ...
    chunks: int  # ... of how many


def _coloured(box: _Box) -> list[Cell]:
    """A box in its colour, with its number in the middle."""
    colour, ink = shade(box.kind, box.chunk, box.chunks)
    room = box.width
    if box.has_gap:
        room -= 1
    label = box.label
    if len(label) > room:
        label = ""

    middle = (box.width - len(label)) // 2
    indent = min(middle, room - len(label))
    text = " " * indent + label
    style = Style(bgcolor=colour, color=ink)
    cells: list[Cell] = [(character, style) for character in text.ljust(room)]
    if box.has_gap:
        cells.append((_GAP, Style(color=colour)))
    return cells


def _plain(box: _Box) -> list[Cell]:
    """A box in letters: `F3--`; a small letter for a later stage of the rank."""
    letter = str(box.kind)
    if box.chunk > 0:
        letter = letter.lower()
    if not box.has_gap and not box.label:
        return [(letter, Style())] * box.width

    room = box.width
    if box.has_gap:
        room = max(box.width - 1, 1)
    text = f"{letter}{box.label}"[:room].ljust(room, "-")
    return [(character, Style()) for character in text.ljust(box.width)]


def _mixed_row(record: Record, rank: int, band: range, grid: _Grid) -> list[Cell]:
    """One rank, if a column has several actions: their colours are mixed, weighted by time."""
    # Of each column: colour -> the share of the column that it takes.
    shares: list[dict[str, float]] = [defaultdict(float) for _ in band]
    stages = record.stages_of(rank)
    for event in record.timeline.events[rank]:
        chunk = stages.index(event.action.stage)
        colour, _ = shade(event.action.kind, chunk, len(stages))
        # In columns of the band; it may begin before the band, and end behind it.
        start = grid.column(event.start, record) - band.start
        end = grid.column(event.end, record) - band.start
        first_column = max(math.floor(start), 0)
        end_column = min(math.ceil(end), len(band))
        for column in range(first_column, end_column):
            begin_in_column = max(start, column)
            end_in_column = min(end, column + 1)
            shares[column][colour] += end_in_column - begin_in_column
    return [_mixed(share, grid.coloured) for share in shares]


def _mixed(shares: Mapping[str, float], coloured: bool) -> Cell:
    """A column in the mean of its colours; idle if it is so for more than half of its time."""
    busy = sum(shares.values())
    if busy < 0.5:
        return _IDLE
    if not coloured:
        return _BUSY
    mean = [0.0, 0.0, 0.0]  # red, green, blue
    for colour, share in shares.items():
        weight = share / busy
        for i, part in enumerate(_rgb(colour)):
            mean[i] += weight * part
    red, green, blue = (round(part) for part in mean)
    return " ", Style(bgcolor=_hex(red, green, blue))


def _axis(band: range, margin: int, unit: tuple[float, str], grid: _Grid) -> Text:
    """Times below the columns, at round numbers."""
    factor, name = unit
    per_column = grid.per_column * factor
    step = round_step(8 * per_column)  # room for a number and a space
    first = math.ceil(band.start * per_column / step - 1e-9)
    end = math.ceil(band.stop * per_column / step)
    line = name.ljust(margin)
    for tick in range(first, end):
        time = tick * step
        column = margin + round(time / per_column) - band.start
        line = line.ljust(column) + f"{time:.6g}"
    width = margin + len(band)
    return Text(line[:width], "dim")


def round_step(least: float) -> float:
    """The smallest of ..., 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, ... that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    for digit in (1, 2, 5):
        if digit * power >= least * (1 - 1e-9):
            return digit * power
    return 10 * power


def kinds_of(records: Sequence[Record]) -> list[Kind]:
    kinds = {event.action.kind for event in _events(records)}
    return [kind for kind in COLOURS if kind in kinds]


def chunks_of(records: Sequence[Record]) -> int:
    """The most stages of a rank."""
    most = 0
    for record in records:
        for rank in range(record.timeline.ranks):
            most = max(most, len(record.stages_of(rank)))
    return most


def _legend(records: Sequence[Record], grid: _Grid) -> list[Text]:
    character, _ = _IDLE
    idle = f"{character} idle"
    several = "a column has several actions: a wider terminal or --png shows each"
    if grid.mixed and not grid.coloured:
        busy, _ = _BUSY
        return [Text(f"{busy} busy   {idle}"), Text(several, "dim")]

    chunks = chunks_of(records)
    line = Text()
    for kind in kinds_of(records):
        if grid.coloured:
            for chunk in range(chunks):
                colour, _ = shade(kind, chunk, chunks)
                line.append("██", colour)
        else:
            line.append(kind)
        line.append(f" {WORDS[kind]}   ")
    line.append(idle)

    remarks = []
    if grid.labelled:
        remarks.append("numbers are microbatches")
    if chunks > 1:
        shape = "lighter" if grid.coloured else "small letters"
        remarks.append(f"{shape}: later stages of a rank")
    if grid.mixed:
        remarks.append(f"mixed colours: {several}")
    return [line, *(Text(remark, "dim") for remark in remarks)]


def _numbers(record: Record, unit: tuple[float, str], titled: bool) -> list[Text]:
    """Makespan and idle share, and a table of each rank's idle time and peak activations."""
    timeline = record.timeline
    factor, name = unit
    ranks = range(timeline.ranks)
    names = [f"rank {rank}" for rank in ranks]
    stages = [", ".join(map(str, record.stages_of(rank))) for rank in ranks]
    idle = numbers([time * factor for time in timeline.idle])
    shares = [f"{100 * time / timeline.makespan:.0f} %" for time in timeline.idle]
    idle_in_span = numbers([time * factor for time in timeline.idle_in_span])
    peaks = [str(peak) for peak in timeline.peak_activations]
    columns = [
        _aligned_left(["", *names]),
        _aligned_right(["stages", *stages]),
        _aligned_right(["idle", *idle]),
        _aligned_right(["", *shares]),
        _aligned_right(["idle in span", *idle_in_span]),
        _aligned_right(["peak activations", *peaks]),
    ]
    titles, *rows = ["  ".join(row) for row in zip(*columns, strict=True)]

    head = Text(f"{record.title}: " if titled else "", "bold")
    makespan = f"{number(timeline.makespan * factor)} {name}".rstrip()
    head.append(f"makespan {makespan}, {100 * timeline.idle_share:.1f} % of it idle", "not bold")
    return [head, Text(titles, "dim"), *(Text(row) for row in rows)]


def _aligned_left(column: Sequence[str]) -> list[str]:
    width = max(len(cell) for cell in column)
    return [cell.ljust(width) for cell in column]


def _aligned_right(column: Sequence[str]) -> list[str]:
    width = max(len(cell) for cell in column)
    return [cell.rjust(width) for cell in column]


def _events(records: Sequence[Record]) -> Iterator[Event]:
    for record in records:
        yield from record.events
