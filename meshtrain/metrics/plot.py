"""The loss plot of a run, from its `metrics.jsonl` alone."""

import importlib.util
import math
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtrain.errors import InputError
from meshtrain.job.storage import write_whole
from meshtrain.metrics import logger as metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE = "loss.png"
_INK, _QUIET, _GRID = "#1f2430", "#7a8194", "#e6e8ee"
_TRAINING, _VALIDATION, _RATE, _NORM = "#3b6fe0", "#e2603b", "#2a9d8f", "#9a6fb0"
_POINTS = 3000  # more than the picture has columns would only cost time

Rows = list[dict[str, Any]]


def plot_loss(folder: str | Path, name: str) -> str:
    """Draws `loss.png` in the run's folder; returns a sentence about it, even if it could not be
    drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no loss plot: matplotlib is not installed (pip install 'meshtrain[plot]')"
    folder = Path(folder)
    path = folder / metrics.FILE
    try:
        rows = metrics.read(path) if path.exists() else []
        if not rows:
            return f"no loss plot: {path} has no steps"
        picture = BytesIO()
        _draw(rows, name).savefig(picture, format="png")
        write_whole(folder / FILE, picture.getvalue())
    except (OSError, InputError) as error:
        return f"no loss plot: {error}"
    return f"loss plot: {folder / FILE}"


def smooth(values: list[float], reach: int) -> list[float]:
    """Mean of each finite value and its finite neighbours, `reach` to each side, fewer near the
    ends; NaN where there are none. Unlike a running average, it does not lag behind a falling
    loss."""
    series = np.asarray(values, float)
    finite = np.isfinite(series)
    # Sums over any window are differences of these: s_i is the sum of the first i values.
    sums = np.append(0.0, np.cumsum(np.where(finite, series, 0.0)))
    counts = np.append(0, np.cumsum(finite))

    # As far to the left as to the right, so that the mean stays in the middle of its window.
    index = np.arange(len(values))
    side = np.minimum(reach, np.minimum(index, index[::-1]))
    low, high = index - side, index + side + 1
    with np.errstate(invalid="ignore"):  # 0 / 0
        means = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return means.tolist()


def _draw(rows: Rows, name: str) -> "Figure":
    # The object interface, not pyplot, which keeps every figure in a global and needs a display.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    spacing = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.1, hspace=0.03)
    figure = Figure(figsize=(9, 6), dpi=150, facecolor="white", layout=spacing)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for axes in (top, bottom):
        _clean(axes)
    _losses(top, rows)
    _rate_and_norm(bottom, rows)

    first, last = rows[0]["step"], rows[-1]["step"]
    if first == last:  # an axis needs a width
        first, last = first - 1, last + 1
    bottom.set_xlim(first, last)
    bottom.set_xlabel("step", color=_QUIET)
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    bottom.xaxis.set_major_formatter("{x:,.0f}")
    bottom.tick_params(axis="x", pad=8)

    top.set_title(name, loc="left", fontsize=15, fontweight="bold", color=_INK, pad=14)
    top.set_title(_summary(rows), loc="right", fontsize=11, color=_QUIET, pad=14)
    return figure


def _losses(axes: "Axes", rows: Rows) -> None:
    steps, losses = _series(rows, "loss")
    _curve(axes, steps, losses, _TRAINING, 2.2, "training loss, smoothed")
    evaluated_at, evaluated = _series(rows, "eval_loss")
    if evaluated_at:
        few = len(evaluated_at) <= 40  # so that their marks do not touch
        axes.plot(
            evaluated_at,
            evaluated,
            color=_VALIDATION,
            linewidth=1.2 if few else 2,
            marker="o" if few else None,
            markersize=6.5,
            markeredgecolor="white",
            markeredgewidth=1.2,
            label="validation loss",
            clip_on=False,
            zorder=5,
        )
    axes.set_ylabel("loss", color=_QUIET)
    axes.legend(frameon=False, labelcolor=_INK, loc="upper right", fontsize=10)


def _rate_and_norm(axes: "Axes", rows: Rows) -> None:
    steps, rates = _series(rows, "lr")
    axes.plot(steps, rates, color=_RATE, linewidth=1.6)
    _value_axis(axes, "learning rate", _RATE)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useMathText=True)
    axes.yaxis.get_offset_text().set_color(_RATE)

    other = axes.twinx()
    _clean(other)
    other.grid(False)  # one grid is enough
    steps, norms = _series(rows, "grad_norm")
    _curve(other, steps, norms, _NORM, 1.6)
    _value_axis(other, "gradient norm", _NORM)


def _value_axis(axes: "Axes", label: str, color: str) -> None:
    axes.set_ylabel(label, color=color)
    axes.tick_params(axis="y", labelcolor=color, pad=7)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", nbins=3)


def _curve(
    axes: "Axes", steps: list[int], values: list[float], color: str, width: float, label: str = ""
) -> None:
    every = max(1, len(steps) // _POINTS)
    shown = steps[::every]
    axes.plot(shown, values[::every], color=color, alpha=0.28, linewidth=1)
    course = smooth(values, len(values) // 50 + 1)
    axes.plot(
        shown,
        course[::every],
        color=color,
        linewidth=width,
        marker="o" if len(steps) == 1 else None,  # a line of one point cannot be seen
        label=label or None,
    )


def _clean(axes: "Axes") -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, labelcolor=_QUIET, labelsize=9.5)
    axes.grid(True, color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)


def _series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have `name`; null, which stands for a non-finite value,
    becomes NaN: a gap."""
    steps = []
    values = []
    for row in rows:
        if name in row:
            steps.append(row["step"])
            values.append(math.nan if row[name] is None else row[name])
    return steps, values


def _summary(rows: Rows) -> str:
    for row in reversed(rows):
        if row.get("eval_loss") is not None:
            text = f"validation loss {row['eval_loss']:.4f}"
            if row.get("accuracy") is not None:
                text += f", accuracy {100 * row['accuracy']:.2f} %"
            return f"{text} at step {row['step']:,}"
    last = rows[-1]
    loss = math.nan if last.get("loss") is None else last["loss"]
    return f"training loss {loss:.4f} at step {last['step']:,}"
