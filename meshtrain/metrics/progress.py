"""Rank 0's display: one live line on a terminal, plain lines in a log."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Values = dict[str, Any]


def open_progress(console: Console, *, task: str, steps: int) -> "Progress":
    """The display that fits `console`. `task` is `language` or `classification`."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveLine(console, task=task, steps=steps)
    return PlainLines(console, task=task, steps=steps)


class Progress(ABC):
    """Shows the first `first` steps, then at most one step every `every_s` seconds, and always the
    last one."""

    first: int
    every_s: float

    def __init__(
        self, console: Console, *, task: str, steps: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._unit = "tokens/s" if task == "language" else "samples/s"
        self._steps = steps
        self._now = now
        self._average = StepTimeAverage()
        self._shown = 0
        self._shown_at = -math.inf

    def row(self, row: Values) -> None:
        """A step is done."""
        self._average.add(row.get("step_time_s"))
        due = self._shown < self.first or self._now() - self._shown_at >= self.every_s
        if due or row["step"] == self._steps:
            self._shown += 1
            self._shown_at = self._now()
            self._show(row, self._average.remaining(self._steps - row["step"]))

    @abstractmethod
    def _show(self, row: Values, remaining_s: float | None) -> None: ...

    def say(self, text: str) -> None:
        """Prints `text` as it is: no markup, no wrapping."""
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def evaluation(self, step: int, values: Values) -> None:
        self.say(evaluation_line(step, values))

    def epoch(self, epoch: int, values: Values) -> None:
        self.say(epoch_line(epoch, values))

    def close(self) -> None:  # noqa: B027  most displays have nothing to end
        """Ends the display; may be called twice."""


class PlainLines(Progress):
    """Lines of a log for people: the first ones show that the run works, and later ones that it
    progresses."""

    first, every_s = 5, 5.0

    def _show(self, row: Values, remaining_s: float | None) -> None:
        self.say(step_line(row, self._steps, self._unit, remaining_s))


class LiveLine(Progress):
    """One line that is updated in place; other output appears above it."""

    first, every_s = 0, 0.2
    _live: Live | None = None

    def _show(self, row: Values, remaining_s: float | None) -> None:
        if self._live is None:  # only now, so that nothing hides the output of the start-up
            # No refresh thread: it would take time from the steps.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self._frame(row, remaining_s), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _frame(self, row: Values, remaining_s: float | None) -> Table:
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"{row['step']}/{self._steps}", style="bold")
        parts = [
            (f"loss {_fixed(row.get('loss'), 4)}", "green"),
            (_rate(row, self._unit), ""),
            (_mfu(row), ""),
            (_remaining(remaining_s), "dim"),
        ]
        for part, style in parts:
            if part:
                text.append("  ").append(part, style=style)
        frame = Table.grid(padding=(0, 1))
        # A narrow terminal has room for the numbers only: two lines would scroll.
        width = min(40, self._console.width - len(text) - 2)
        if width >= 8:
            bar = ProgressBar(
                self._steps, row["step"], width, complete_style="cyan", finished_style="green"
            )
            frame.add_row(bar, text)
        else:
            frame.add_row(text)
        return frame


class StepTimeAverage:
    """The current time of a step: a moving average that forgets the first, slow step."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._steps = 0

    def add(self, seconds: float | None) -> None:
        if seconds is None:
            return
        self._steps += 1
        # The second step replaces the first, in which kernels are compiled and chosen.
        if self._seconds is None or self._steps == 2:
            self._seconds = seconds
        else:
            self._seconds += 0.1 * (seconds - self._seconds)

    def remaining(self, steps: int) -> float | None:
        return None if self._seconds is None else steps * self._seconds


def step_line(row: Values, steps: int, unit: str, remaining: float | None = None) -> str:
    """One step as a line; fields that the row lacks are left out.

    `step  40/200  loss 2.3412  grad_norm 0.81  lr 3.0e-04  12,340 tokens/s  mfu 31.2 % (causal 28.9
    %)  left 2m10s`
    """
    parts = [f"step {row['step']:>{len(str(steps))}}/{steps}", f"loss {_fixed(row.get('loss'), 4)}"]
    if "grad_norm" in row:
        parts.append(f"grad_norm {_fixed(row['grad_norm'], 2)}")
    if "lr" in row:
        parts.append(f"lr {row['lr']:.1e}")
    parts += [
        _rate(row, unit),
        _mfu(row),
        _percent("goodput", row.get("goodput")),
        _share("data", row),
        _share("communication", row),
        _remaining(remaining),
    ]
    return "  ".join(part for part in parts if part)


def evaluation_line(step: int, values: Values) -> str:
    """`eval at step 50: loss 2.2103, perplexity 9.12, bits per byte 3.1888`, or with `accuracy
    92.34 %`."""
    parts = []
    for name, words, digits in (
        ("eval_loss", "loss", 4),
        ("perplexity", "perplexity", 2),
        ("bits_per_byte", "bits per byte", 4),
    ):
        if name in values:
            parts.append(f"{words} {_fixed(values[name], digits)}")
    if "accuracy" in values:
        parts.append(f"accuracy {100 * values['accuracy']:.2f} %")
    return f"eval at step {step}: " + ", ".join(parts)


def epoch_line(epoch: int, values: Values) -> str:
    """`epoch 1  loss 0.2346  accuracy 92.34 %`, or without the accuracy if there is none."""
    line = f"epoch {epoch}  loss {_fixed(values['loss'], 4)}"
    if values.get("accuracy") is not None:
        line += f"  accuracy {100 * values['accuracy']:.2f} %"
    return line


def duration(seconds: float) -> str:
    """`48s`, `2m10s`, `3h05m`, `2d04h`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{hours}h{m:02d}m"
    if minutes:
        return f"{minutes}m{s:02d}s"
    return f"{s}s"


def _fixed(value: float | None, digits: int) -> str:
    """Fixed point, except for values that it would show as 0 or as a long row of digits."""
    if value is None:
        return "none"
    if math.isfinite(value) and value and not 10**-digits <= abs(value) < 1e6:
        return f"{value:.{digits}e}"
    return f"{value:.{digits}f}"


def _rate(row: Values, unit: str) -> str:
    rate = row.get("tokens_per_s")
    if rate is None:
        return ""
    return f"{rate:,.0f} {unit}" if rate >= 100 else f"{rate:.3g} {unit}"


def _percent(name: str, fraction: float | None) -> str:
    return "" if fraction is None else f"{name} {100 * fraction:.1f} %"


def _mfu(row: Values) -> str:
    """The MFU in both ways of counting, if they differ."""
    full, causal = row.get("mfu"), row.get("mfu_causal")
    text = _percent("mfu", full)
    if causal is not None and causal != full:
        text += f" ({_percent('causal', causal)})"
    return text


def _share(name: str, row: Values) -> str:
    """The share of the step that went into a phase; empty if it was not measured."""
    seconds, whole = row.get(f"time_{name}_s"), row.get("step_time_s")
    if seconds is None or not whole:
        return ""
    return f"{name} {100 * seconds / whole:.0f} %"


def _remaining(seconds: float | None) -> str:
    return f"left {duration(seconds)}" if seconds else ""
