"""Timelines for people and programs: in a terminal, as a picture, as JSON and as a trace."""

import importlib.util
import io
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.style import Style
from rich.text import Text

from meshtrain.cli.pipeline_terminal import numbers, print_timelines, round_step, shade, timeline_lines
from meshtrain.errors import InputError
from meshtrain.metrics.picture import write_picture
from meshtrain.pipeline.actions import Action, Kind
from meshtrain.pipeline.simulate import Event, Timeline
from meshtrain.pipeline.timeline_io import FORMAT, Record, read_timeline, timeline_json, trace_json
from tests.properties import given, st

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs the extra meshtrain[plot]"
)
ACTION = re.compile(r"([FIWBfiwb])(\d+)")


def record(*rows: str, title: str = "a schedule", unit: str = "", each: float = 1) -> Record:
    """Rows of actions, `..` for idle time; a whole backward takes twice as long as the others."""
    ranks = []
    for rank, row in enumerate(rows):
        events, now = [], 0.0
        for cell in row.split():
            took = each * (2 if "B" in cell else 1)
            if cell != "..":
                stage, kind, microbatch = re.fullmatch(r"(\d+)([FIWB])(\d+)", cell).groups()
                events.append(Event(rank, Action(Kind(kind), int(stage), int(microbatch)), now, now + took))
            now += took
        ranks.append(tuple(events))
    return Record(title, Timeline(tuple(ranks)), unit)


ONE = record("0F0 0F1 .. .. 0B0 0F2 0B1 .. 0B2", ".. 1F0 1B0 1F1 1B1 1F2 1B2")  # 1f1b, 2 ranks x 3 microbatches
V = record("0F0 .. .. 3F0 3I0 3W0 .. .. 0I0 0W0", ".. 1F0 2F0 .. .. 2I0 1I0 2W0 1W0")


WHOLE = st.sampled_from([1, 2, 3])


@st.composite
def records(draw: st.DrawFn, durations: Any = WHOLE) -> Record:
    """Any timeline: some ranks, each with some actions one after the other, and idle time between them.

    The first action takes 1, so that all times are a whole number of the shortest if `durations` are whole.
    """
    rows = []
    for rank in range(draw(st.integers(1, 5))):
        events, now = [], draw(st.sampled_from([0, 0, 1, 4]))
        for microbatch in range(draw(st.integers(1, 14))):
            kind, stage = draw(st.sampled_from(list(Kind))), rank + 5 * draw(st.integers(0, 2))
            end = now + (draw(durations) if microbatch else 1)
            events.append(Event(rank, Action(kind, stage, microbatch), now, end))
            now = end + draw(st.sampled_from([0, 0, 0, 1]))
        rows.append(tuple(events))
    return Record("any", Timeline(tuple(rows)))


# In a terminal ------------------------------------------------------------------------------------------------------


def text_of(*shown: Record, width: int = 80, coloured: bool = False) -> str:
    return "\n".join(line.plain.rstrip() for line in timeline_lines(shown, width, coloured))


def drawing_of(shown: Record, width: int, coloured: bool = False) -> list[Text]:
    """The lines of the timeline itself, without legend and table."""
    lines = timeline_lines([shown], width, coloured)
    return lines[1 : next(i for i, line in enumerate(lines) if line.plain.endswith("idle"))]


def rows_of(shown: Record, width: int) -> list[str]:
    """What stands behind `rank 0`, ..., the bands of each put together."""
    drawing = [line.plain for line in drawing_of(shown, width)]
    names = [f"rank {rank}" for rank in range(shown.timeline.ranks)]
    margin = len(names[-1]) + 2
    return ["".join(line[margin:] for line in drawing if line.startswith(name.ljust(margin))) for name in names]


def test_how_it_looks() -> None:
    assert (
        text_of(ONE, width=50)
        == """\
a schedule
rank 0  F0 F1 ······B0--- F2 B1--- ···B2---
rank 1  ···F0 B0--- F1 B1--- F2 B2--- ······
        0              5              10

F forward   B backward   · idle
numbers are microbatches

makespan 12, 25.0 % of it idle
        stages  idle        idle in span  peak activations
rank 0       0     3  25 %             3                 2
rank 1       1     3  25 %             0                 1"""
    )


def test_later_stages_of_a_rank_are_told_from_its_first() -> None:
    assert rows_of(V, 38) == ["F0 ······f0 i0 w0 ······I0 W0 ", "···F0 f0 ······i0 I0 w0 W0 ···"]
    first, second = (shade(Kind.FORWARD, chunk, 2) for chunk in range(2))
    assert first != second
    row = drawing_of(V, 38, coloured=True)[0]
    styles = Counter(str(span.style) for span in row.spans)
    assert styles[f"{first[1]} on {first[0]}"] == styles[f"{second[1]} on {second[0]}"] > 0


@given(records(), st.integers(30, 200), st.booleans())
def test_no_line_is_too_wide(shown: Record, width: int, coloured: bool) -> None:
    assert all(len(line.plain) <= width for line in drawing_of(shown, width, coloured))


@given(records(), st.integers(30, 200))
def test_a_row_is_the_timeline(shown: Record, width: int) -> None:
    """Each action stands there once and in order, and is as wide as it is long; folded or not."""
    rows = rows_of(shown, width)
    columns = {len(row) for row in rows}
    assert len(columns) == 1
    per_time = columns.pop() / shown.timeline.makespan
    for row, events, idle in zip(rows, shown.timeline.events, shown.timeline.idle, strict=True):
        assert row.count("·") == pytest.approx(idle * per_time, abs=1e-6)
        found = [(kind.upper(), int(microbatch)) for kind, microbatch in ACTION.findall(row)]
        assert found == [(str(event.action.kind), event.action.microbatch) for event in events]


@given(records(st.floats(0.01, 5)), st.integers(30, 200), st.booleans())
def test_measured_times_can_be_drawn(shown: Record, width: int, coloured: bool) -> None:
    """Any times, with actions that are no whole number of columns wide."""
    lines = drawing_of(Record("run", shown.timeline, "s"), width, coloured)
    assert all(len(line.plain) <= width for line in lines)


def test_what_is_too_long_for_numbers_is_drawn_without() -> None:
    rows = [" ".join(f"{stage}F{i}" for i in range(250)) for stage in range(30)]
    drawing = text_of(record(*rows), width=100)
    assert f"rank 0   {'F' * 84}" in drawing.splitlines()
    assert "numbers" not in drawing
    assert drawing.count("rank 0 ") == 3 + 1  # bands, and the table


def test_what_is_longer_still_has_several_actions_in_a_column() -> None:
    half = " ".join(f"0F{i}" for i in range(200)) + " .." * 400
    mixed = " ".join(f"1F{i} 1W{i} 1W{i + 200}" for i in range(200))
    shown = record(half, mixed, *[".. 0F0"] * 40)
    assert rows_of(shown, 109)[:2] == ["#" * 33 + "·" * 67, "#" * 100]
    assert "# busy   · idle\na column has several actions" in text_of(shown, width=109)
    rows = drawing_of(shown, 109, coloured=True)
    blue, green = ([int(shade(kind, 0, 1)[0][i : i + 2], 16) for i in (1, 3, 5)] for kind in ("F", "W"))
    for row, share in ((rows[0], 0), (rows[1], 2 / 3)):
        wanted = [round(b + share * (g - b)) for b, g in zip(blue, green, strict=True)]
        found = Style.parse(str(row.spans[20].style)).bgcolor.triplet
        assert list(found) == pytest.approx(wanted, abs=1)


def test_colours_are_left_out_where_nobody_sees_them() -> None:
    plain, coloured = (
        Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system="truecolor" if terminal else None)
        for terminal in (False, True)
    )
    for console in (plain, coloured):
        print_timelines([ONE], console)
    plain_text, coloured_text = plain.file.getvalue(), coloured.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in plain_text
    assert "F0--- F1--- ···" in plain_text
    assert "\x1b[" in coloured_text
    assert "F0" not in coloured_text


def test_two_timelines_share_one_scale() -> None:
    """The second takes twice as long for everything, and is twice as wide."""
    rows = ["0F0 0F1 0B0 0B1"]
    drawing = text_of(record(*rows, title="plan"), record(*rows, title="run", each=2), width=60)
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
    short, long = (Record("run", record("0F0 0B0", each=each).timeline, "s") for each in (0.01, 10))
    assert "makespan 30 ms" in text_of(short)
    assert re.search(r"^ms      0  .* 20$", text_of(short), re.M)
    assert "makespan 30 s" in text_of(long)
    assert "makespan 0.03," in text_of(Record("plan", short.timeline))  # costs have no unit


@given(st.floats(1e-9, 1e9))
def test_ticks_are_round(least: float) -> None:
    step = round_step(least)
    assert least * (1 - 1e-6) <= step < 2.5 * least * (1 + 1e-6)
    assert f"{step:.0e}"[0] in "125"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([9, 0], ["9", "0"]),
        ([9.0, 12.0], ["9", "12"]),
        ([0.123456, 12.3456], ["0.12", "12.35"]),
        ([1234.5], ["1234"]),
        ([0.00123456], ["0.001235"]),
    ],
)
def test_numbers_have_four_digits(values: list[float], said: list[str]) -> None:
    assert numbers(values) == said


# As JSON ------------------------------------------------------------------------------------------------------------


@given(records(st.floats(0.01, 5)))
def test_a_timeline_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, shown: Record) -> None:
    path = tmp_path_factory.mktemp("timeline") / "timeline.json"
    path.write_text(json.dumps(timeline_json(shown.timeline, "a run", "s")))
    assert read_timeline(path) == Record("a run", shown.timeline, "s")


def test_what_follows_from_the_events_is_written_too() -> None:
    found = timeline_json(ONE.timeline)
    assert {key: found[key] for key in ("ranks", "makespan", "idle", "idle_in_span", "peak_activations")} == {
        "ranks": 2, "makespan": 12, "idle": [3, 3], "idle_in_span": [3, 0], "peak_activations": [2, 1],
    }  # fmt: skip
    assert found["idle_share"] == 0.25
    assert found["events"][1][0] == {"action": "1F0", "start": 1, "end": 2}


EVENT = {"action": "0F0", "start": 0, "end": 1}
GOOD: dict[str, Any] = {"format": FORMAT, "title": "", "unit": "", "events": [[EVENT]]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read"),
        ("0F0,0F1\n", "is no JSON"),
        ("[]", "is no timeline"),
        (json.dumps(GOOD | {"format": "meshtrain timeline 9"}), f'wants an object with "format": "{FORMAT}"'),
        (json.dumps({key: GOOD[key] for key in ("format", "title", "unit")}), "damaged timeline (KeyError('events'))"),
        (json.dumps(GOOD | {"events": [[EVENT | {"action": "0X0"}]]}), "'0X0' is no action such as 2F7"),
        (json.dumps(GOOD | {"events": [[EVENT | {"end": -1}]]}), "ends before it starts"),
        (json.dumps(GOOD | {"events": [[EVENT | {"end": math.nan}]]}), "ends before it starts"),
        (json.dumps(GOOD | {"events": [[]]}), "without events"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "timeline.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=re.escape(said)):
        read_timeline(path)


# As a trace ---------------------------------------------------------------------------------------------------------


def test_a_trace_has_a_thread_per_rank_and_arrows_between_them() -> None:
    events = trace_json([V, Record("run", V.timeline, "s")])["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    threads = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert processes == ["a schedule", "run"]
    assert threads == [(0, 0), (0, 1), (1, 0), (1, 1)]
    slices = [event for event in events if event["ph"] == "X"]
    assert slices[1] == {
        "ph": "X", "name": "F stage 3 microbatch 0", "cat": "forward", "pid": 0, "tid": 0, "ts": 3000, "dur": 1000,
        "args": {"stage": 3, "microbatch": 0},
    }  # fmt: skip
    assert [event["ts"] for event in slices if event["pid"] == 1][1] == 3_000_000
    arrows = [event for event in events if event["ph"] in "sf"]
    # Forward 0 -> 1 and 2 -> 3, backward 3 -> 2 and 1 -> 0; 1 -> 2 and back stay on their rank.
    assert Counter((arrow["id"], arrow["ph"]) for arrow in arrows) == {
        (f"{process}.{edge}.0", end): 1
        for process in range(2)
        for edge in ("activation.1", "activation.3", "gradient.2", "gradient.0")
        for end in "sf"
    }
    for arrow in arrows:
        assert any(
            each["pid"] == arrow["pid"] and each["tid"] == arrow["tid"]
            and each["ts"] <= arrow["ts"] < each["ts"] + each["dur"]
            for each in slices
        ), "an arrow begins and ends inside of a slice"  # fmt: skip


# As a picture -------------------------------------------------------------------------------------------------------


@needs_matplotlib
def test_a_picture_has_a_box_per_action(tmp_path: Path) -> None:
    from matplotlib.colors import to_hex

    from meshtrain.cli.pipeline_picture import GROUND, picture

    shown = [ONE, record("0F0 0B0", title="another", each=3)]
    axes = picture(shown).axes[0]
    widths: Counter[str] = Counter()
    for collection in axes.collections:
        (colour,) = {to_hex(each) for each in collection.get_facecolor()}
        widths[colour] += sum(path.get_extents().width for path in collection.get_paths())
    forward, backward = shade(Kind.FORWARD, 0, 1)[0], shade(Kind.BACKWARD, 0, 1)[0]
    legend = 0.17
    assert widths[backward] - legend == pytest.approx(2 * (widths[forward] - legend))  # a backward is twice a forward
    assert widths[GROUND] == pytest.approx((widths[forward] - legend) / (6 + 3) * (2 * 12 + 9))
    texts = Counter(text.get_text() for text in axes.texts)
    assert {text for text in texts if text.startswith("makespan")} == {
        "makespan 12,  idle 25.0 %,  peak activations 2 1",
        "makespan 9,  idle 0.0 %,  peak activations 1",
    }
    assert texts["rank 0"] == 2
    assert texts["a schedule"] == texts["another"] == 1
    write_picture(tmp_path / "picture.png", lambda: picture(shown), "schedule.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@needs_matplotlib
@pytest.mark.parametrize("name", ["picture.docx", "missing/picture.png"])
def test_a_picture_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    from meshtrain.cli.pipeline_picture import picture

    with pytest.raises(InputError, match=r"cannot write a picture to .*: give a name such as schedule.png"):
        write_picture(tmp_path / name, lambda: picture([ONE]), "schedule.png")


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'meshtrain\[plot\]'"):
        write_picture(tmp_path / "picture.png", lambda: pytest.fail("it is drawn"), "schedule.png")
