"""What rank 0 says, word for word, and when."""

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from meshtrain.metrics.progress import (
    LiveLine,
    PlainLines,
    StepTimeAverage,
    duration,
    epoch_line,
    evaluation_line,
    open_progress,
    step_line,
)
from tests.job.fakes import FakeTime

ROW = {
    "step": 40,
    "loss": 2.34123,
    "grad_norm": 0.8142,
    "lr": 3e-4,
    "tokens_per_s": 12340.4,
    "mfu": 0.312,
    "step_time_s": 0.8,
    "time_data_s": 0.008,
}


WORDS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text())


def test_steps_evaluations_and_epochs_in_words() -> None:
    assert step_line(ROW, 200, "tokens/s", 130) == (
        "step  40/200  loss 2.3412  grad_norm 0.81  lr 3.0e-04  12,340 tokens/s  mfu 31.2 %  data "
        "1 %  left 2m10s"
    )
    lines: dict[str, Callable[[Any], str]] = {
        "steps": lambda values: step_line({"step": 1} | values, 9, "tokens/s"),
        "evaluations": lambda values: evaluation_line(50, values),
        "epochs": lambda values: epoch_line(1, values),
        "durations": duration,
    }
    for kind, line in lines.items():
        for case in WORDS[kind]:
            assert line(case["of"]) == case["text"], case


def test_steps_of_all_widths_stand_under_each_other() -> None:
    lines = [
        step_line({"step": step, "loss": 1.0}, 1000, "tokens/s") for step in (1, 10, 100, 1000)
    ]
    assert len({line.index("loss") for line in lines}) == 1


def test_the_pace_forgets_the_first_step() -> None:
    pace = StepTimeAverage()
    assert pace.remaining(10) is None
    pace.add(60.0)  # compiling
    assert pace.remaining(10) == 600
    for _ in range(3):
        pace.add(2.0)
        pace.add(None)
    assert pace.remaining(10) == pytest.approx(20)


def shown(kind: type, console: Console, **more: Any) -> tuple[Any, FakeTime]:
    clock = FakeTime()
    return kind(console, task="language", steps=100, now=clock.monotonic, **more), clock


def lines_of(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("first", "seconds", "expected", "left"),
    [
        (1, 0.5, [1, 2, 3, 4, 5, 15, 25, 35, 45, 55, 65, 75, 85, 95, 100], "left 2s"),
        (81, 6.0, list(range(81, 101)), "left 6s"),  # slow ones are all shown
    ],
)
def test_a_log_has_the_first_steps_then_one_line_every_few_seconds_and_the_last(
    first: int, seconds: float, expected: list[int], left: str
) -> None:
    console = Console(file=StringIO())
    progress, clock = shown(PlainLines, console)
    for step in range(first, 101):
        clock.now += seconds
        progress.row({"step": step, "loss": 1.0, "step_time_s": seconds})
    lines = lines_of(console)
    assert [int(re.search(r"(\d+)/", line)[1]) for line in lines] == expected
    assert lines[-2].endswith(left)


def test_a_log_line_is_not_wrapped_and_not_interpreted() -> None:
    console = Console(file=StringIO(), width=20)
    progress, _ = shown(PlainLines, console)
    text = "ranks [4, 5] [bold]are[/bold] :smile: at http://host:1 " + 50 * "x "
    progress.say(text)
    progress.row(ROW)
    first, second = lines_of(console)
    assert first == text
    assert second.startswith("step  40/100")
    assert "12,340 tokens/s" in second


def test_images_are_samples() -> None:
    console = Console(file=StringIO(), width=200)
    progress = open_progress(console, task="classification", steps=100)
    progress.row(ROW)
    assert "12,340 samples/s" in lines_of(console)[0]


def terminal(width: int) -> Console:
    return Console(
        file=StringIO(),
        force_terminal=True,
        width=width,
        color_system=None,
        _environ={"TERM": "xterm"},
    )


def test_the_display_fits_the_console() -> None:
    assert isinstance(open_progress(terminal(80), task="language", steps=9), LiveLine)
    assert isinstance(open_progress(Console(file=StringIO()), task="language", steps=9), PlainLines)
    dumb = Console(file=StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(open_progress(dumb, task="language", steps=9), PlainLines)


@pytest.mark.parametrize("width", [10, 40, 60, 80, 200])
def test_the_live_line_stays_one_line(width: int) -> None:
    console = terminal(width)
    progress, clock = shown(LiveLine, console)
    for step in (1, 2, 3):
        clock.now += 1
        progress.row(ROW | {"step": step})
        frame = console.render_lines(progress._frame(ROW | {"step": step}, None), pad=False)
        assert len(frame) == 1
    progress.say("eval at step 3")
    progress.close()
    progress.close()
    out = console.file.getvalue()
    assert out.count("\n") == 2  # the line that was said, and the end of the live line
    assert "eval at step 3" in out.split("\n")[0]
    if width >= 80:
        assert "12,340 tokens/s  mfu 31.2 %  left" in out.split("\n")[1]


def test_the_live_line_is_drawn_a_few_times_a_second_and_at_the_end() -> None:
    console = terminal(100)
    progress, clock = shown(LiveLine, console)
    for step in range(1, 101):
        clock.now += 0.01
        progress.row(ROW | {"step": step})
    progress.close()
    drawn = [int(step) for step in re.findall(r"(\d+)/100", console.file.getvalue())]
    assert len(set(drawn)) < 10
    assert drawn[-1] == 100
