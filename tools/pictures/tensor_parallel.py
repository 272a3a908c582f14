"""Draws docs/images/tensor-parallel.png: what two tensor ranks hold in a Llama block, and what they
send.

    python tools/pictures/tensor_parallel.py docs/images/tensor-parallel.png

A tensor is a box: the sequence runs down, features run to the right, and parts that a rank does not
hold are outlined. The amounts are those of docs/tensor-parallel.md, with t ranks and n = b·s
tokens.
"""

import io
import sys
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import ArrowStyle, FancyArrowPatch, FancyBboxPatch, Rectangle
from PIL import Image

# as in layouts.png, and lighter ones
INK, QUIET, PANEL, OUTLINE = (
    "#1f2430",
    "#7a8194",
    "#f4f5f9",
    "#bcc2cf",
)
RANKS = ("#3b6fe0", "#e2603b")
CALLS = {"all-gather": "#2a9d8f", "reduce-scatter": "#9a6fb0"}
OPPOSITE = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}

# Lengths are inches, and y runs down.
WIDTH, HEIGHT, DPI = 10.0, 11.75, 160
LEFT, LANES, LANE, BILL, RIGHT = 0.25, (2.3, 4.75), 1.9, 7.25, 9.8
TENSOR, STEP, CALL = 0.48, 0.4, 0.76  # heights of a tensor, of a computation, and of a collective
LINE, TEXT, SMALL = 0.23, 11.5, 10.5


class Block:
    """A block, drawn from top to bottom; `y` is the current position."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.y = 0.8

    def tensor(self, kind: str, shape: str, *lines: str, caption: str = "") -> None:
        """What each rank holds: a part of the sequence or of the features, the whole (gathered), or
        an addend of it."""
        self.lines(self.y + TENSOR / 2, *lines, caption=caption)
        for i, lane in enumerate(LANES):
            x, y, width, height = lane, self.y, LANE, TENSOR
            if kind in ("sequence", "features"):
                self.box(
                    x, y, width, height, facecolor="white", edgecolor=OUTLINE, linestyle=(0, (3, 3))
                )
            if kind == "sequence":
                y, height = y + i * TENSOR / 2, TENSOR / 2
            elif kind == "features":
                x, width = x + i * LANE / 2, LANE / 2
            if kind == "gathered":
                for j, colour in enumerate(RANKS):
                    self.box(
                        x,
                        y + j * height / 2,
                        width,
                        height / 2,
                        facecolor=tint(colour, 0.22),
                        linewidth=0,
                    )
            elif kind == "addend":
                look = {"facecolor": tint(RANKS[i], 0.06), "edgecolor": tint(RANKS[i], 0.25)}
                self.box(x, y, width, height, hatch="////", linewidth=0, **look)
            else:
                self.box(x, y, width, height, facecolor=tint(RANKS[i], 0.22), linewidth=0)
            self.box(x, y, width, height, facecolor="none", edgecolor=RANKS[i])
            self.write(x + width / 2, y + height / 2, shape, INK, SMALL, ha="center")
        self.y += TENSOR

    def step(self, *lines: str, above: str, below: str) -> None:
        """A local computation of each rank."""
        self.lines(self.y + STEP / 2, *lines)
        for i, lane in enumerate(LANES):
            start, end = self.ends(i, i, STEP, above, below)
            self.arrow((lane + LANE / 2, start), (lane + LANE / 2, end), RANKS[i])
        self.y += STEP

    def call(self, forward: str, *notes: str, above: str, below: str) -> None:
        """A collective between the lanes, with its two entries in the list at the right."""
        middle, centre = self.y + CALL / 2, (LANES[0] + LANES[1] + LANE) / 2
        for i, j in ((0, 0), (1, 1), (0, 1), (1, 0)):
            start, end = self.ends(i, j, CALL, above, below)
            # offset from the middle of the lane, away from the other lane
            off = 0.6 if i == j else -0.25
            xs = [LANES[rank] + LANE / 2 + off * (-1, 1)[rank] for rank in (i, j)]
            self.arrow((xs[0], start), (xs[1], end), RANKS[i])
        self.rounded(
            centre - 0.8,
            middle - 0.17,
            1.6,
            0.34,
            facecolor=CALLS[forward],
            edgecolor="white",
            zorder=6,
        )
        self.write(centre, middle, forward, "white", weight="bold", ha="center")
        y = middle - LINE / 2 * (1 + len(notes))
        for direction, name in (("↓", forward), ("↑", OPPOSITE[forward])):
            self.write(BILL, y, direction, CALLS[name], weight="bold")
            self.write(BILL + 0.22, y, name, CALLS[name])
            self.write(RIGHT, y, "n·d (t−1)/t", ha="right")
            y += LINE
        for i, note in enumerate(notes):
            self.write(BILL + 0.22, y + LINE * i, note, QUIET, SMALL)
        self.y += CALL

    def ends(self, i: int, j: int, height: float, above: str, below: str) -> tuple[float, float]:
        """Where an arrow from rank i's tensor above to rank j's below starts and ends: at the parts
        that they hold."""
        start = self.y - (TENSOR / 2 if above == "sequence" and i == 0 else 0)
        return start, self.y + height + (TENSOR / 2 if below == "sequence" and j == 1 else 0)

    def residual(self, start: float) -> None:
        """The residual connection, from the arrow at `start` to the next tensor."""
        for i, (edge, out) in enumerate(((LANES[0], -0.2), (LANES[1] + LANE, 0.2))):
            end = self.y + TENSOR / 4 + i * TENSOR / 2
            xs = [LANES[i] + LANE / 2, edge + out, edge + out, edge]
            self.axes.plot(xs, [start, start, end, end], color=RANKS[i], linewidth=1.7, zorder=2)
            self.axes.plot(
                edge, end, "o", color=RANKS[i], markersize=15, markeredgecolor="white", zorder=5
            )
            self.axes.plot(
                edge, end, "+", color="white", markersize=8, markeredgewidth=1.8, zorder=6
            )

    def panel(self, start: float) -> None:
        """The background of the region between an all-gather and its reduce-scatter."""
        left, right, over = LEFT - 0.12, LANES[1] + LANE + 0.35, 0.1
        height = self.y - start + 2 * over
        self.rounded(left, start - over, right - left, height, facecolor=PANEL, edgecolor="none")

    def lines(self, middle: float, *lines: str, caption: str = "") -> None:
        """The left column: what is computed, and how the tensor next to it is split."""
        shown = [(line, INK) for line in lines] + ([(caption, QUIET)] if caption else [])
        for i, (line, colour) in enumerate(shown):
            self.write(LEFT, middle + LINE * (i - (len(shown) - 1) / 2), line, colour)

    def write(
        self, x: float, y: float, text: str, colour: str = INK, size: float = TEXT, **how: Any
    ) -> None:
        self.axes.text(
            x, y, text, color=colour, fontsize=size, **{"va": "center_baseline", "zorder": 7, **how}
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        head = ArrowStyle("-|>", head_length=5, head_width=2.6)
        arrow = FancyArrowPatch(
            start, end, arrowstyle=head, shrinkA=0, shrinkB=1, color=colour, linewidth=1.7, zorder=4
        )
        self.axes.add_patch(arrow)

    def box(self, x: float, y: float, width: float, height: float, **look: Any) -> None:
        self.axes.add_patch(
            Rectangle((x, y), width, height, **{"linewidth": 1.5, "zorder": 3, **look})
        )

    def rounded(self, x: float, y: float, width: float, height: float, **look: Any) -> None:
        how = {"boxstyle": "round,pad=0,rounding_size=0.12", "linewidth": 2.5, "zorder": 0, **look}
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, **how))


def tint(colour: str, strength: float) -> tuple[float, ...]:
    """A colour blended with white."""
    return tuple(1 - strength * (1 - part) for part in to_rgb(colour))


def draw(output: str) -> None:
    """The block, with column headings above and the total communication below."""
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.set_axis_off()
    block = Block(axes)
    block.write(LEFT, 0.38, "each rank computes", QUIET)
    for i, lane in enumerate(LANES):
        block.write(lane + LANE / 2, 0.38, f"rank {i}", RANKS[i], 13, weight="bold", ha="center")
    block.write(BILL, 0.38, "and sends, in elements:", QUIET)
    block.write(BILL, 0.38 + LINE, "↓ forward   ↑ backward", QUIET)
    block.tensor("sequence", "b, s/t, d", "x", caption="sequence split")
    half(block, ("q, k, v", "attention"), "h·e/t", "heads split", "o_proj", "q, k, v")
    block.tensor("sequence", "b, s/t, d", "x + attention", caption="sequence split")
    half(block, ("gate, up", "silu(gate) · up"), "f/t", "features split", "down", "gate, up")
    foot = block.y + TENSOR / 4
    block.tensor("sequence", "b, s/t, d", "x + feed-forward", caption="sequence split")
    axes.plot([BILL, RIGHT], [foot - 0.2] * 2, color=OUTLINE, linewidth=1.5)
    block.write(RIGHT, foot + 0.05, "8 n·d (t−1)/t", weight="bold", size=14, ha="right")
    block.write(RIGHT, foot + 0.33, "per block and microbatch, n = b·s", QUIET, SMALL, ha="right")
    with io.BytesIO() as pixels:
        figure.savefig(pixels)
        # less than half the bytes
        Image.open(pixels).convert("RGB").quantize(128).save(output, optimize=True)


def half(
    block: Block, computed: tuple[str, str], width: str, split: str, last: str, weights: str
) -> None:
    """The attention or the feed-forward half, up to its residual addition."""
    start = block.y + STEP / 3
    block.step("norm", above="sequence", below="sequence")
    block.tensor("sequence", "b, s/t, d")
    notes = ("while the gradients of the", f"weights {weights} are computed")
    block.call("all-gather", *notes, above="sequence", below="gathered")
    top = block.y
    block.tensor("gathered", "b, s, d", caption="whole sequence")
    block.step(*computed, above="gathered", below="features")
    block.tensor("features", f"b, s, {width}", caption=split)
    block.step(last, above="features", below="addend")
    block.tensor("addend", "b, s, d", caption="addends of a sum")
    block.panel(top)
    block.call("reduce-scatter", above="addend", below="sequence")
    block.residual(start)


if __name__ == "__main__":
    draw(sys.argv[1])
