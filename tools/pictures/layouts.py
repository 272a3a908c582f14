"""Draws docs/images/layouts.png: the loss of one YAML under several layouts, and how far they are from one process.

    python -m meshtrain.train configs/quickstart.yaml train.steps=100 train.output=runs/one
    torchrun --standalone --nproc-per-node=4 -m meshtrain.train configs/quickstart.yaml train.steps=100 \
        layout='{dp_replicate: 4}' train.output=runs/ddp
    python tools/pictures/layouts.py docs/images/layouts.png runs/one runs/ddp ...

The first run is the one that the others are compared with.
"""

import math
import sys
from pathlib import Path
from typing import Any

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshtrain import metrics

INK, QUIET, GRID = "#1f2430", "#7a8194", "#e6e8ee"
COLOURS = ("#c9d3ea", "#e2603b", "#2a9d8f", "#3b6fe0", "#9a6fb0", "#c9962b")
DASH = 4  # its length, in widths of the line
KINDS = {(False, False): "", (True, False): "DDP", (False, True): "FSDP", (True, True): "HSDP"}


def main(output: str, folders: list[str]) -> None:
    """Reads the runs' folders and writes the picture."""
    runs = [(label(Path(folder)), losses(Path(folder))) for folder in folders]
    figure = Figure(figsize=(9.2, 5.6), dpi=160, layout="constrained", facecolor="white")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    for i, (name, loss) in enumerate(runs):
        # A broad pale band, and on it dashes of the others in turn: all can be seen where they lie on one another.
        dashes: dict[str, Any] = {"linewidth": 2.6, "linestyle": (DASH * (i - 1), (DASH, DASH * (len(runs) - 2)))}
        style = dashes if i > 0 else {"linewidth": 9, "solid_capstyle": "round"}
        top.plot(range(1, len(loss) + 1), loss, color=COLOURS[i], label=name, **style)
    draw_differences(bottom, runs)
    top.set_ylabel("loss (nats per byte)")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        decorate(axes)
    top.legend(frameon=False, labelcolor=INK, fontsize=10)
    figure.savefig(output)


def draw_differences(axes: Axes, runs: list[tuple[str, list[float]]]) -> None:
    """How far each run's loss is from the first's, as a share of it; equal numbers have no point on a log scale."""
    (_, reference), *others = runs
    for i, (_, loss) in enumerate(others, start=1):
        shares = [abs(a - b) / b if a != b else math.nan for a, b in zip(loss, reference, strict=True)]
        axes.plot(range(1, len(shares) + 1), shares, ".", color=COLOURS[i], markersize=4)
    axes.set_yscale("log")
    axes.set_ylim(1e-9, 1e-4)
    axes.set_ylabel("relative difference\nto one process")


def decorate(axes: Axes) -> None:
    """No frame, a quiet grid."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(colors=QUIET, length=0)
    axes.yaxis.label.set_color(INK)
    axes.xaxis.label.set_color(INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def losses(folder: Path) -> list[float]:
    """The loss of every step of a run."""
    return [row["loss"] for row in metrics.read(folder / metrics.FILE)]


def label(folder: Path) -> str:
    """What a run's layout is, for people: `4 processes: dp_shard 4 (FSDP)`."""
    layout = yaml.safe_load((folder / "config.yaml").read_text())["layout"]
    sizes = {axis: size for axis, size in layout.items() if size > 1}
    if not sizes:
        return "one process"
    kind = KINDS["dp_replicate" in sizes, "dp_shard" in sizes]
    axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    return f"{math.prod(sizes.values())} processes: {axes} ({kind})"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
