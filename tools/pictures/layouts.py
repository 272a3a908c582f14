"""Draws docs/images/layouts.png: the loss of one YAML under several layouts, and its difference to
that of one process.

    SMALL="train.steps=100 optimizer.lr=1e-3 data.seq_len=64"
    SMALL="$SMALL model.hidden_size=96 model.intermediate_size=256"
    TRAIN="-m meshtrain.train configs/quickstart.yaml $SMALL"
    python $TRAIN layout='{}' train.output=runs/one
    torchrun --nproc-per-node=4 $TRAIN layout='{pp: 2, tp: 2}' train.output=runs/pp-tp
    python tools/pictures/layouts.py docs/images/layouts.png runs/one runs/pp-tp ...

For each precision, one run must be of one process; the others of that precision are compared with
it. The curves are those of float32; the differences in float64 (train.precision=float64) show that
only rounding differs.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshtrain.metrics import logger as metrics

INK, QUIET, GRID, BAND = "#1f2430", "#7a8194", "#e6e8ee", "#c9d3ea"
COLOURS = ("#e2603b", "#2a9d8f", "#3b6fe0", "#9a6fb0", "#d9a21b", "#5b6472")
DATA = {(True, False): "DDP", (False, True): "FSDP", (True, True): "HSDP", (False, False): ""}
KINDS = {"pp": "pipeline", "cp": "context parallel", "tp": "tensor parallel"}
DASH = 3  # length of a dash, in line widths


@dataclass(frozen=True)
class Run:
    """A finished run: the sizes of its layout's axes above 1, its precision, and the loss of every
    step."""

    sizes: dict[str, int]
    precision: str
    losses: list[float]

    def label(self) -> str:
        """The layout in words: `4 processes, FSDP + tensor parallel: dp_shard 2 x tp 2`."""
        if not self.sizes:
            return "one process"
        axes = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        data = DATA["dp_replicate" in self.sizes, "dp_shard" in self.sizes]
        kinds = [
            *([data] if data else []),
            *(kind for axis, kind in KINDS.items() if axis in self.sizes),
        ]
        return f"{math.prod(self.sizes.values())} processes, {' + '.join(kinds)}: {axes}"


def read(folder: Path) -> Run:
    """Reads a run's folder. Raises ValueError: its layout has a size of -1."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    if -1 in config["layout"].values():
        raise ValueError(
            f"{folder}: give the layout with its sizes, for instance layout='{{dp_shard: 4}}'"
        )
    sizes = {axis: size for axis, size in config["layout"].items() if size > 1}
    losses = [row["loss"] for row in metrics.read(folder / metrics.FILE)]
    return Run(sizes, config["train"]["precision"], losses)


def draw(output: str, runs: list[Run]) -> None:
    """Curves above, differences below."""
    figure = Figure(figsize=(9.2, 6.2), dpi=160, layout="constrained", facecolor="white")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1.9, 1))
    one, *others = sorted(
        (run for run in runs if run.precision == "float32"), key=lambda run: bool(run.sizes)
    )
    colours = {str(run.sizes): COLOURS[i] for i, run in enumerate(others)}
    top.plot(
        steps(one), one.losses, color=BAND, linewidth=9, solid_capstyle="round", label=one.label()
    )
    for i, run in enumerate(others):
        # Interleaved dashes: all curves stay visible where they coincide.
        dashes: dict[str, Any] = {
            "linewidth": 2.6,
            "linestyle": (DASH * i, (DASH, DASH * (len(others) - 1))),
        }
        top.plot(steps(run), run.losses, color=colours[str(run.sizes)], label=run.label(), **dashes)
    top.set_ylabel("loss (nats per byte)")
    legend = top.legend(frameon=False, labelcolor=INK, fontsize=10)
    for line in legend.get_lines()[1:]:
        line.set_linestyle("solid")  # the dash may fall outside the legend's short line
    for precision in sorted({run.precision for run in runs}):
        draw_differences(bottom, [run for run in runs if run.precision == precision], colours)
    bottom.set(ylabel="relative difference\nto one process", xlabel="step", yscale="log")
    bottom.set_yticks([1e-16, 1e-12, 1e-8, 1e-4, 1])
    bottom.set_ylim(3e-17, 3e-1)
    for axes in (top, bottom):
        axes.grid(color=GRID, linewidth=0.8)
        axes.minorticks_off()
        axes.tick_params(colors=QUIET, length=0)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.spines[:].set_visible(False)
        axes.set_xlim(0, len(one.losses) + 1)
    figure.savefig(output)


def draw_differences(axes: Axes, runs: list[Run], colours: dict[str, str]) -> None:
    """The differences of runs of one precision; equal numbers have no point on a log scale."""
    one, *others = sorted(runs, key=lambda run: bool(run.sizes))
    largest = 0.0
    for run in others:
        shares = [
            abs(a - b) / b if a != b else math.nan
            for a, b in zip(run.losses, one.losses, strict=True)
        ]
        axes.plot(steps(run), shares, ".", color=colours[str(run.sizes)], markersize=4.5)
        largest = max(largest, *(share for share in shares if share == share))
    axes.text(3, 4 * largest, one.precision, color=INK, fontsize=10)


def steps(run: Run) -> range:
    """The numbers of a run's steps."""
    return range(1, len(run.losses) + 1)


if __name__ == "__main__":
    draw(sys.argv[1], [read(Path(folder)) for folder in sys.argv[2:]])
