"""Timelines for people and programs: in a terminal, as a picture, as JSON and as a trace."""

import importlib.util
import io
import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.style import Style
from rich.text import Text

from meshtrain.cli.pipeline_terminal import (
    numbers,
    print_timelines,
    round_step,
    shade,
    timeline_lines,
)
from meshtrain.errors import InputError
from meshtrain.metrics.picture import write_picture
from meshtrain.pipeline.actions import Action, Kind
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.pipeline.simulate import Event, Timeline, simulate
from meshtrain.pipeline.timeline_io import Record, read_timeline, timeline_json, trace_json
from tests.pipeline.formulas import table

ACTION = re.compile(r"([FIWBfiwb])(\d+)")


def drawn(*rows: str, title: str = "a schedule", unit: str = "", each: float = 1) -> Record:
    """Rows of actions, `..` for idle time; a whole backward takes twice as long as the others."""
    ranks = []
    for rank, row in enumerate(rows):
        events, now = [], 0.0
        for cell in row.split():
            duration = each * (2 if "B" in cell else 1)
            if cell != "..":
                events.append(Event(rank, Action.parse(cell), now, now + duration))
            now += duration
        ranks.append(tuple(events))
    return Record(title, Timeline(tuple(ranks)), unit)


# 1f1b, 2 ranks x 3 microbatches
ONE = drawn("0F0 0F1 .. .. 0B0 0F2 0B1 .. 0B2", ".. 1F0 1B0 1F1 1B1 1F2 1B2")
V = drawn("0F0 .. .. 3F0 3I0 3W0 .. .. 0I0 0W0", ".. 1F0 2F0 .. .. 2I0 1I0 2W0 1W0")


def records(forward: float, input_grad: float, weight_grad: float) -> list[Record]:
    """Of every schedule, with these costs."""
    schedules = [
        build(name, ranks=2, microbatches=microbatches)
        for name in NAMES
        for microbatches in (2, 11)
    ]
    return [
        Record("any", simulate(each, forward, input_grad, weight_grad, transfer=2), "s")
        for each in schedules
    ]


# In a terminal ------------------------------------------------------------------------------------


def text_of(*timelines: Record, width: int = 80) -> str:
    return "\n".join(
        line.plain.rstrip() for line in timeline_lines(timelines, width, coloured=False)
    )


def drawing_of(timeline: Record, width: int, coloured: bool = False) -> list[Text]:
    """The lines of the timeline itself, without legend and table."""
    lines = timeline_lines([timeline], width, coloured)
    return lines[1 : next(i for i, line in enumerate(lines) if line.plain.endswith("idle"))]


def rows_of(timeline: Record, width: int) -> list[str]:
    """What stands behind `rank 0`, ..., the bands of each put together."""
    drawing = [line.plain for line in drawing_of(timeline, width)]
    names = [f"rank {rank}" for rank in range(timeline.timeline.ranks)]
    margin = len(names[-1]) + 2
    return [
        "".join(line[margin:] for line in drawing if line.startswith(name.ljust(margin)))
        for name in names
    ]


def test_later_stages_of_a_rank_are_told_from_its_first() -> None:
    assert rows_of(V, 38) == ["F0 ······f0 i0 w0 ······I0 W0 ", "···F0 f0 ······i0 I0 w0 W0 ···"]
    row = drawing_of(V, 38, coloured=True)[0]
    styles = Counter(str(span.style) for span in row.spans)
    first, second = (shade(Kind.FORWARD, chunk, 2) for chunk in range(2))
    assert first != second
    assert styles[f"{first[1]} on {first[0]}"] == styles[f"{second[1]} on {second[0]}"] > 0


@pytest.mark.parametrize("width", [47, 60, 80, 133, 200])
def test_a_row_is_the_timeline(width: int) -> None:
    """Each action stands there once and in order, and is as wide as it is long; folded or not."""
    for record in records(1, 2, 1):
        rows = rows_of(record, width)
        timeline = record.timeline
        assert len({len(row) for row in rows}) == 1
        per_time = len(rows[0]) / timeline.makespan
        for row, events, idle in zip(rows, timeline.events, timeline.idle, strict=True):
            assert row.count("·") == pytest.approx(idle * per_time, abs=1e-6)
            cells = [(kind.upper(), int(microbatch)) for kind, microbatch in ACTION.findall(row)]
            assert cells == [(str(event.action.kind), event.action.microbatch) for event in events]


@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("costs", [(1, 2, 1), (0.37, 1.3, 0.01)])
def test_no_line_is_too_wide(costs: tuple[float, ...], coloured: bool) -> None:
    """Of any times, also with actions that are no whole number of columns wide."""
    for record, width in product(records(*costs), (30, 47, 80, 133, 200)):
        assert max(len(line.plain) for line in drawing_of(record, width, coloured)) <= width


def test_what_is_too_long_for_numbers_is_drawn_without() -> None:
    rows = [" ".join(f"{stage}F{i}" for i in range(250)) for stage in range(30)]
    drawing = text_of(drawn(*rows), width=100)
    assert f"rank 0   {'F' * 84}" in drawing.splitlines()
    assert "numbers" not in drawing
    assert drawing.count("rank 0 ") == 3 + 1  # bands, and the table


def test_what_is_longer_still_has_several_actions_in_a_column() -> None:
    half = " ".join(f"0F{i}" for i in range(200)) + " .." * 400
    mixed = " ".join(f"1F{i} 1W{i} 1W{i + 200}" for i in range(200))
    timeline = drawn(half, mixed, *[".. 0F0"] * 40)
    assert rows_of(timeline, 109)[:2] == ["#" * 33 + "·" * 67, "#" * 100]
    assert "# busy   · idle\na column has several actions" in text_of(timeline, width=109)
    blue, green = (
        bytes.fromhex(shade(kind, 0, 1)[0][1:]) for kind in (Kind.FORWARD, Kind.WEIGHT_GRAD)
    )
    for row, share in zip(drawing_of(timeline, 109, coloured=True), (0, 2 / 3)):  # noqa: B905
        colour = Style.parse(str(row.spans[20].style)).bgcolor.triplet
        expected = [b + share * (g - b) for b, g in zip(blue, green, strict=True)]
        assert list(colour) == pytest.approx(expected, abs=1.5)


@pytest.mark.parametrize("colours", ["truecolor", None])
def test_colours_are_left_out_where_nobody_sees_them(colours: Any) -> None:
    printed = io.StringIO()
    print_timelines(
        [ONE], Console(file=printed, width=80, force_terminal=bool(colours), color_system=colours)
    )
    assert ("\x1b[" in printed.getvalue()) == bool(colours)
    assert ("F0--- F1--- ···" in printed.getvalue()) == (not colours)


def test_two_timelines_share_one_scale() -> None:
    """The second takes twice as long for everything, and is twice as wide."""
    row = "0F0 0F1 0B0 0B1"
    drawing = text_of(drawn(row, title="plan"), drawn(row, title="run", each=2), width=60)
    assert drawing.splitlines()[:7] == [
        "plan",
        "rank 0  F0- F1- B0----- B1-----" + " " + "·" * 24,
        "",
        "run",
        "rank 0  F0----- F1----- B0------------- B1-------------",
        "        0       2       4       6       8       10",
        "",
    ]
    assert "plan: makespan 6, 0.0 % of it idle" in drawing
    assert "run: makespan 12, 0.0 % of it idle" in drawing


def test_seconds_are_told_in_a_unit_that_fits() -> None:
    short, long = (drawn("0F0 0B0", each=each, unit="s") for each in (0.01, 10))
    assert "makespan 30 ms" in text_of(short)
    assert re.search(r"^ms      0  .* 20$", text_of(short), re.M)
    assert "makespan 30 s" in text_of(long)
    assert "makespan 0.03," in text_of(Record("plan", short.timeline))  # costs have no unit


def test_ticks_are_round() -> None:
    assert [round_step(least) for least in (0.06, 0.9, 1, 1.1, 3, 70)] == [0.1, 1, 1, 2, 5, 100]


def test_numbers_have_four_digits() -> None:
    columns = {
        (9, 0): "9 0",
        (9.0, 12.0): "9 12",
        (0.123456, 12.3456): "0.12 12.35",
        (1234.5,): "1234",
    }
    columns[(0.00123456,)] = "0.001235"
    assert {values: " ".join(numbers(values)) for values in columns} == columns


# In files -----------------------------------------------------------------------------------------


def test_what_follows_from_the_events_is_written_too() -> None:
    content = timeline_json(ONE.timeline)
    assert content["events"][1][0] == {"action": "1F0", "start": 1, "end": 2}
    assert (content["ranks"], content["makespan"], content["idle_share"]) == (2, 12, 0.25)
    assert (content["idle"], content["idle_in_span"], content["peak_activations"]) == (
        [3, 3],
        [3, 0],
        [2, 1],
    )


@pytest.mark.parametrize("case", table("wrong_timelines"), ids=lambda case: case["message"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, case: dict) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(case["text"])
    with pytest.raises(InputError, match=re.escape(case["message"])):
        read_timeline(path)


def test_a_trace_has_a_thread_per_rank_and_arrows_between_them() -> None:
    events = trace_json([V, Record("run", V.timeline, "s")])["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "a schedule",
        "run",
    ]
    threads = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert threads == [(0, 0), (0, 1), (1, 0), (1, 1)]
    slices = [event for event in events if event["ph"] == "X"]
    assert slices[1] == {
        "ph": "X",
        "name": "F stage 3 microbatch 0",
        "cat": "forward",
        "pid": 0,
        "tid": 0,
        "ts": 3000,
        "dur": 1000,
        "args": {"stage": 3, "microbatch": 0},
    }
    assert [event["ts"] for event in slices if event["pid"] == 1][1] == 3_000_000
    arrows = [event for event in events if event["ph"] in "sf"]
    # Forward 0 -> 1 and 2 -> 3, backward 3 -> 2 and 1 -> 0; 1 -> 2 and back stay on their rank.
    edges = ("activation.1", "activation.3", "gradient.2", "gradient.0")
    expected = [
        (f"{process}.{edge}.0", end) for process in range(2) for edge in edges for end in "sf"
    ]
    assert sorted((arrow["id"], arrow["ph"]) for arrow in arrows) == sorted(expected)
    for arrow in arrows:
        own = [
            each for each in slices if (each["pid"], each["tid"]) == (arrow["pid"], arrow["tid"])
        ]
        assert any(each["ts"] <= arrow["ts"] < each["ts"] + each["dur"] for each in own), (
            "it begins and ends in a slice"
        )


def test_a_picture_has_a_box_per_action(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra meshtrain[plot]")
    from matplotlib.colors import to_hex

    from meshtrain.cli.pipeline_picture import GROUND, picture

    figure = picture([ONE, drawn("0F0 0B0", title="another", each=3)])
    axes = figure.axes[0]
    widths: Counter[str] = Counter()
    for collection in axes.collections:
        (colour,) = {to_hex(each) for each in collection.get_facecolor()}
        widths[colour] += sum(path.get_extents().width for path in collection.get_paths())
    legend = 0.17
    forward, backward = (
        widths[shade(kind, 0, 1)[0]] - legend for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    assert backward == pytest.approx(2 * forward)  # a backward is twice a forward
    assert widths[GROUND] == pytest.approx(forward / (6 + 3) * (2 * 12 + 9))
    texts = Counter(text.get_text() for text in axes.texts)
    assert texts["makespan 12,  idle 25.0 %,  peak activations 2 1"] == 1
    assert texts["makespan 9,  idle 0.0 %,  peak activations 1"] == 1
    assert texts["rank 0"] == 2
    assert texts["a schedule"] == texts["another"] == 1
    with pytest.raises(
        InputError, match=r"cannot write a picture to .*: give a name such as schedule.png"
    ):
        write_picture(tmp_path / "picture.docx", lambda: figure, "schedule.png")


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'meshtrain\[plot\]'"):
        write_picture(tmp_path / "picture.png", lambda: pytest.fail("it is drawn"), "schedule.png")
