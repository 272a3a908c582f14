"""What rank 0 says, word for word, and when."""

import math
import re
from io import StringIO
from typing import Any

import pytest
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

ROW = {
    "step": 40, "loss": 2.34123, "grad_norm": 0.8142, "lr": 3e-4, "tokens_per_s": 12340.4, "mfu": 0.312,
    "step_time_s": 0.8, "time_data_s": 0.008,
}  # fmt: skip


def test_a_step_in_words() -> None:
    assert step_line(ROW, 200, "tokens/s", 130) == (
        "step  40/200  loss 2.3412  grad_norm 0.81  lr 3.0e-04  12,340 tokens/s  mfu 31.2 %  data 1 %  left 2m10s"
    )


def test_steps_of_all_widths_stand_under_each_other() -> None:
    lines = [step_line({"step": step, "loss": 1.0}, 1000, "tokens/s") for step in (1, 10, 100, 1000)]
    assert len({line.index("loss") for line in lines}) == 1


def test_what_a_row_does_not_have_is_left_out() -> None:
    assert (
        step_line({"step": 1, "loss": 1.5, "mfu": None, "mfu_causal": None}, 9, "tokens/s") == "step 1/9  loss 1.5000"
    )
    both = {"step": 1, "loss": 1.5, "mfu": 0.312, "mfu_causal": 0.2681}
    assert step_line(both, 9, "tokens/s") == "step 1/9  loss 1.5000  mfu 31.2 % (causal 26.8 %)"
    assert step_line(both | {"mfu_causal": 0.312}, 9, "tokens/s") == "step 1/9  loss 1.5000  mfu 31.2 %"  # no attention


@pytest.mark.parametrize(
    ("loss", "text"),
    [(None, "none"), (math.nan, "nan"), (math.inf, "inf"), (0.0, "0.0000"), (0.00001234, "1.2340e-05"),
     (12.0, "12.0000"), (3.2e9, "3.2000e+09")],
)  # fmt: skip
def test_odd_losses(loss: float | None, text: str) -> None:
    assert step_line({"step": 1, "loss": loss}, 9, "tokens/s").endswith(f"loss {text}")


def test_evaluations_in_words() -> None:
    assert evaluation_line(50, {"eval_loss": 2.21034, "perplexity": 9.1188, "bits_per_byte": 3.18886}) == (
        "eval at step 50: loss 2.2103, perplexity 9.12, bits per byte 3.1889"
    )
    assert evaluation_line(50, {"eval_loss": 0.25, "accuracy": 0.92338}) == (
        "eval at step 50: loss 0.2500, accuracy 92.34 %"
    )


def test_epochs_in_words() -> None:
    assert epoch_line(1, {"loss": 0.23456, "accuracy": 0.92341}) == "epoch 1  loss 0.2346  accuracy 92.34 %"
    assert epoch_line(1, {"loss": 2.34123}) == "epoch 1  loss 2.3412"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (48, "48s"), (59.6, "1m00s"), (130, "2m10s"), (3599.7, "1h00m"), (11100, "3h05m"), (187200, "2d04h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_pace_forgets_the_first_step() -> None:
    pace = StepTimeAverage()
    assert pace.remaining(10) is None
    pace.add(60.0)  # compiling
    assert pace.remaining(10) == 600
    for _ in range(3):
        pace.add(2.0)
        pace.add(None)
    assert pace.remaining(10) == pytest.approx(20)


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def shown(kind: type, console: Console, **more: Any) -> tuple[Any, Clock]:
    clock = Clock()
    return kind(console, task="language", steps=100, now=clock, **more), clock


def lines_of(console: Console) -> list[str]:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def steps_of(lines: list[str]) -> list[int]:
    return [int(re.search(r"(\d+)/", line)[1]) for line in lines]  # type: ignore[index]


def test_a_log_has_the_first_steps_then_one_line_every_few_seconds_and_the_last() -> None:
    console = Console(file=StringIO())
    progress, clock = shown(PlainLines, console)
    for step in range(1, 101):
        clock.time += 0.5
        progress.row({"step": step, "loss": 1.0})
    assert steps_of(lines_of(console)) == [1, 2, 3, 4, 5, 15, 25, 35, 45, 55, 65, 75, 85, 95, 100]


def test_slow_steps_are_all_shown() -> None:
    console = Console(file=StringIO())
    progress, clock = shown(PlainLines, console)
    for step in range(81, 101):
        clock.time += 6
        progress.row({"step": step, "loss": 1.0, "step_time_s": 6.0})
    assert steps_of(lines_of(console)) == list(range(81, 101))
    assert lines_of(console)[-2].endswith("left 6s")


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
    progress.epoch(1, {"loss": 0.23456, "accuracy": 0.92341})
    assert "12,340 samples/s" in lines_of(console)[0]
    assert lines_of(console)[1] == "epoch 1  loss 0.2346  accuracy 92.34 %"


def terminal(width: int) -> Console:
    return Console(file=StringIO(), force_terminal=True, width=width, color_system=None, _environ={"TERM": "xterm"})


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
        clock.time += 1
        progress.row(ROW | {"step": step})
        frame = console.render_lines(progress._frame(ROW | {"step": step}, None), pad=False)
        assert len(frame) == 1
    progress.say("eval at step 3")
    progress.close()
    progress.close()
    assert isinstance(console.file, StringIO)
    out = console.file.getvalue()
    assert out.count("\n") == 2  # the line that was said, and the end of the live line
    assert "eval at step 3" in out.split("\n")[0]
    if width >= 80:
        assert "12,340 tokens/s  mfu 31.2 %  left" in out.split("\n")[1]


def test_the_live_line_is_drawn_a_few_times_a_second_and_at_the_end() -> None:
    console = terminal(100)
    progress, clock = shown(LiveLine, console)
    for step in range(1, 101):
        clock.time += 0.01
        progress.row(ROW | {"step": step})
    progress.close()
    assert isinstance(console.file, StringIO)
    drawn = [int(step) for step in re.findall(r"(\d+)/100", console.file.getvalue())]
    assert len(set(drawn)) < 10
    assert drawn[-1] == 100
