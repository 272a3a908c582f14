"""Draws docs/images/mesh.png: each rank's position in a layout, and its part of the model and of a
batch.

    python tools/pictures/mesh.py docs/images/mesh.png

All numbers come from `Layout`.
"""

import sys

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from meshtrain.layout import Layout

INK, QUIET, PANEL, OUTLINE = "#1f2430", "#7a8194", "#f4f5f9", "#bcc2cf"
STAGES = ("#3b6fe0", "#e2603b")
BLOCKS = 4
LAYOUTS: tuple[tuple[str, dict[str, int], list[int]], ...] = (
    ("one process", {}, [1]),
    ("DDP", {"dp_replicate": 8}, [8]),
    ("FSDP", {"dp_shard": 8}, [8]),
    ("HSDP on two hosts", {"dp_replicate": 2, "dp_shard": 4}, [4, 4]),
    ("FSDP and tensor parallel", {"dp_shard": 4, "tp": 2}, [8]),
    ("all three on two hosts", {"pp": 2, "dp_shard": 2, "tp": 2}, [4, 4]),
)
BOX, MODEL = 1.55, 0.62  # widths in inches: a rank's box, and the model in it


def rank_box(axes: Axes, layout: Layout, rank: int, x: float, y: float) -> None:
    """A rank's box. The model is a square with blocks from top to bottom; the part that the rank
    keeps is filled."""
    at = layout.coordinate(rank)
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            BOX - 0.12,
            1.08,
            boxstyle="round,pad=0,rounding_size=0.05",
            fc="white",
            ec=OUTLINE,
        )
    )
    axes.text(x + 0.08, y + 0.19, f"rank {rank}", weight="bold", color=INK, fontsize=9, va="center")
    axes.add_patch(
        Rectangle((x + 0.08, y + 0.36), MODEL, MODEL, fc=PANEL, ec=OUTLINE, linewidth=0.8)
    )
    stages, shards, parts = (layout.size(axis) for axis in ("pp", "dp_shard", "tp"))
    stage, shard, part = (at.get(axis, 0) for axis in ("pp", "dp_shard", "tp"))
    # each block is sharded by itself
    for block in range(stage * BLOCKS // stages, (stage + 1) * BLOCKS // stages):
        high = MODEL / BLOCKS / shards
        top = y + 0.36 + block * MODEL / BLOCKS + shard * high
        left, wide = x + 0.08 + part * MODEL / parts, MODEL / parts
        axes.add_patch(Rectangle((left, top), wide, high, fc=STAGES[stage], linewidth=0))
    lines = [f"{axis} {index}" for axis, index in at.items()] or ["the model"]
    data = layout.index(rank, "dp_replicate", "dp_shard")
    lines.append(f"samples {data + 1}/{layout.size('dp_replicate', 'dp_shard')}")
    for i, line in enumerate(lines):
        axes.text(x + 0.78, y + 0.42 + 0.155 * i, line, color=QUIET, fontsize=6.2, va="center")


def main(path: str) -> None:
    row, width = 1.78, 8 * BOX + 1.0
    figure = Figure(figsize=(width, row * len(LAYOUTS) + 0.1), dpi=110)
    axes = figure.add_axes((0, 0, 1, 1))
    for i, (title, sizes, hosts) in enumerate(LAYOUTS):
        layout = Layout(sizes).on_hosts(hosts)
        y, x = i * row + 0.05, 0.1
        words = ", ".join(f"{axis}: {size}" for axis, size in sizes.items())
        axes.text(
            0.1,
            y + 0.17,
            f"{title}   {{{words}}}",
            weight="bold",
            color=INK,
            fontsize=10.5,
            va="center",
        )
        for host, count in enumerate(hosts):
            wide = count * BOX + 0.12
            corner = (x, y + 0.32)
            axes.add_patch(
                FancyBboxPatch(
                    corner,
                    wide,
                    1.32,
                    boxstyle="round,pad=0,rounding_size=0.07",
                    fc=PANEL,
                    ec="none",
                )
            )
            first = sum(hosts[:host])
            for n in range(count):
                rank_box(axes, layout, first + n, x + 0.12 + n * BOX, y + 0.44)
            x += wide + 0.25
    axes.set(xlim=(0, width), ylim=(row * len(LAYOUTS) + 0.1, 0))
    axes.axis("off")
    figure.savefig(path)


if __name__ == "__main__":
    main(sys.argv[1])
