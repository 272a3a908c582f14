"""Draws docs/images/experts.png: where four ranks send their rows in a layer of experts, and who
holds which experts.

    python tools/pictures/experts.py docs/images/experts.png

A cell is a row, which is a token routed to one of its experts, in the colour of the rank that has
the token; its number is that of the expert. `layout.py` and the sharding of DTensors say which rank
holds which expert.
"""

import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import ArrowStyle, FancyArrowPatch, FancyBboxPatch, Rectangle
from PIL import Image

from meshtrain.layout import EXPERT_AXES, Layout
from meshtrain.parallel.sharding import chunk_lengths, chunk_range

# as in context-parallel.png
INK, QUIET, PANEL, OUTLINE = (
    "#1f2430",
    "#7a8194",
    "#f4f5f9",
    "#bcc2cf",
)
RANKS = ("#3b6fe0", "#e2603b", "#2a9d8f", "#d9a21b")
P, EXPERTS, TOKENS = len(RANKS), 8, 3
# The experts chosen by each rank's tokens, the best first. No token chooses expert 4; many choose
# expert 2.
CHOSEN = (
    ((2, 5), (0, 2), (7, 3)),
    ((6, 2), (1, 0), (2, 7)),
    ((3, 2), (5, 7), (2, 0)),
    ((6, 1), (7, 2), (0, 5)),
)
OWNER = [rank for rank, length in enumerate(chunk_lengths(EXPERTS, P)) for _ in range(length)]
FOLDS: Sequence[tuple[Mapping[str, int], int, str]] = (
    ({"dp_shard": P}, 1, "gathered for a block"),
    ({"dp_shard": P}, 2, "half gathered for a layer"),
    ({"dp_shard": P}, 4, "nothing to gather"),
    ({"dp_replicate": P}, 2, "two copies of each"),
)

# Lengths are inches, and y runs down.
WIDTH, HEIGHT, DPI = 11.2, 7.85, 160
LEFT, LANES, CELL, BILL, RIGHT = 0.35, (2.2, 3.95, 5.7, 7.45), 0.19, 9.3, 10.9
BOX, GAP, LINE = 0.3, 0.75, 0.21
LANE = CELL * EXPERTS
Row = tuple[int, int]  # the rank that has the token, and the expert


class Page:
    """The page, drawn from top to bottom; `y` is the current position."""

    def __init__(self, axes: Axes) -> None:
        self.axes, self.y = axes, 0.0

    def tokens(self) -> None:
        """Each rank's tokens, and below them the experts that they chose."""
        self.label("tokens", "of each rank, and the 2", "experts that each chose")
        for rank, lane in enumerate(LANES):
            for i, experts in enumerate(CHOSEN[rank]):
                x = centred(lane, TOKENS * (2 * CELL + 0.1) - 0.1) + i * (2 * CELL + 0.1)
                self.box(
                    x,
                    self.y,
                    2 * CELL,
                    BOX,
                    facecolor=tint(RANKS[rank], 0.6),
                    edgecolor=RANKS[rank],
                )
                self.write(
                    x + CELL,
                    self.y + BOX + 0.13,
                    ", ".join(map(str, experts)),
                    QUIET,
                    9.5,
                    ha="center",
                )
        self.y += BOX + 0.26

    def rows(self, rows: Sequence[Sequence[Row]], *text: str, experts: bool = False) -> None:
        """The rows that each rank has, by expert. `experts`: the rows are at their experts;
        underline those of each."""
        self.label(*text)
        for rank, lane in enumerate(LANES):
            gaps = len({expert for _, expert in rows[rank]}) - 1 if experts else 0
            x = centred(lane, len(rows[rank]) * CELL + gaps * 0.1)
            starts: dict[int, float] = {}
            for i, (source, expert) in enumerate(rows[rank]):
                if experts and i and expert != rows[rank][i - 1][1]:
                    x += 0.1
                starts.setdefault(expert, x)
                self.box(
                    x,
                    self.y,
                    CELL,
                    BOX,
                    facecolor=tint(RANKS[source], 0.3),
                    edgecolor=RANKS[source],
                    linewidth=1,
                )
                self.write(x + CELL / 2, self.y + BOX / 2, str(expert), INK, 8, ha="center")
                x += CELL
                if experts and rows[rank][i + 1 : i + 2] != [(source, expert)]:
                    self.axes.plot(
                        [starts[expert], x], [self.y + BOX + 0.07] * 2, color=INK, linewidth=2.2
                    )
        self.y += BOX + 0.1 * experts

    def call(self, name: str, counts: Sequence[Sequence[int]], *, back: bool = False) -> None:
        """A collective. `counts[i][j]`: the number of rows of rank i whose experts are on rank j,
        shown by the width of an arrow. `back`: the rows return."""
        for i, j in ((i, j) for i in range(P) for j in range(P) if counts[i][j]):
            ends = (j, i) if back else (i, j)
            self.arrow(*ends, RANKS[i], counts[i][j])
        self.pill((LANES[0] + LANES[-1] + LANE) / 2, self.y + GAP / 2, name)
        self.y += GAP

    def fold(self, sizes: Mapping[str, int], experts: int, note: str) -> None:
        """The experts that each rank keeps, and in a lighter colour those that it gathers to
        compute."""
        layout = Layout(sizes).with_experts(experts)
        [(axis, size)] = sizes.items()
        self.label(f"expert_parallel: {experts}", f"layout: {{{axis}: {size}}}")
        for rank, lane in enumerate(LANES):
            computes = part(range(EXPERTS), layout.size("ep"), layout.index(rank, "ep"))
            keeps = part(computes, layout.size("efsdp"), layout.index(rank, "efsdp"))
            for expert in range(EXPERTS):
                x = lane + expert * CELL
                look: dict[str, Any] = {
                    "facecolor": "white",
                    "edgecolor": OUTLINE,
                    "linestyle": (0, (3, 3)),
                }
                if expert in computes:
                    strength = 0.6 if expert in keeps else 0.12
                    look = {
                        "facecolor": tint(RANKS[rank], strength),
                        "edgecolor": RANKS[rank],
                        "zorder": 4,
                    }
                self.box(x, self.y, CELL, BOX, **{"linewidth": 1, **look})
                self.write(
                    x + CELL / 2,
                    self.y + BOX / 2,
                    str(expert),
                    INK if expert in computes else OUTLINE,
                    8,
                    ha="center",
                )
        axes = EXPERT_AXES if experts > 1 else (axis,)
        names = [f"{axis} {layout.size(axis)}" for axis in axes if layout.size(axis) > 1]
        self.write(BILL, self.y + BOX / 2 - LINE / 2, " x ".join(names), INK, 10)
        self.write(BILL, self.y + BOX / 2 + LINE / 2, note, QUIET, 9.5)
        self.y += BOX + 0.28

    def dense(self) -> None:
        """The shard of the other parameters that FSDP leaves each rank."""
        self.label("other parameters", f"layout: {{dp_shard: {P}}}")
        for rank, lane in enumerate(LANES):
            width = LANE / P
            self.box(
                lane, self.y, LANE, BOX, facecolor=tint(RANKS[rank], 0.12), edgecolor=RANKS[rank]
            )
            self.box(
                lane + rank * width,
                self.y,
                width,
                BOX,
                facecolor=tint(RANKS[rank], 0.6),
                edgecolor=RANKS[rank],
            )
        self.write(BILL, self.y + BOX / 2 - LINE / 2, f"dp_shard {P}", INK, 10)
        self.write(BILL, self.y + BOX / 2 + LINE / 2, "gathered for a block", QUIET, 9.5)
        self.y += BOX + 0.28

    def panel(self, start: float, *bill: str) -> None:
        """The background of everything drawn since `start`, and what a rank sends."""
        x, y, width, height = LEFT - 0.15, start - 0.22, RIGHT - LEFT + 0.3, self.y - start + 0.44
        self.rounded(x, y, width, height, facecolor=PANEL, edgecolor="none", zorder=0)
        for i, line in enumerate(bill):
            self.write(BILL, (start + self.y) / 2 + LINE * (i - (len(bill) - 1) / 2), line, INK, 10)
        self.y += 0.7

    def label(self, *lines: str) -> None:
        for i, line in enumerate(lines):
            y = self.y + BOX / 2 + LINE * (i - (len(lines) - 1) / 2)
            self.write(LEFT, y, line, INK if i == 0 else QUIET, 10.5 if i == 0 else 9.5)

    def pill(self, x: float, y: float, text: str) -> None:
        width = 0.09 * len(text) + 0.2
        self.rounded(
            x - width / 2, y - 0.125, width, 0.25, facecolor=INK, edgecolor=PANEL, zorder=6
        )
        self.write(x, y, text, "white", 9.5, weight="bold", ha="center")

    def arrow(self, i: int, j: int, colour: str, rows: int) -> None:
        head = ArrowStyle("-|>", head_length=4, head_width=2)
        ends = [(LANES[i] + LANE / 2, self.y), (LANES[j] + LANE / 2, self.y + GAP)]
        look: dict[str, Any] = {
            "color": tint(colour, 0.35 if i == j else 1),
            "linewidth": 0.8 * rows,
        }
        look |= {"shrinkA": 2, "shrinkB": 2, "zorder": 2 if i == j else 3}
        self.axes.add_patch(FancyArrowPatch(*ends, arrowstyle=head, **look))

    def write(
        self, x: float, y: float, text: str, colour: str = INK, size: float = 10.5, **how: Any
    ) -> None:
        self.axes.text(
            x, y, text, color=colour, fontsize=size, **{"va": "center_baseline", "zorder": 7, **how}
        )

    def box(self, x: float, y: float, width: float, height: float, **look: Any) -> None:
        self.axes.add_patch(
            Rectangle((x, y), width, height, **{"linewidth": 1.2, "zorder": 3, **look})
        )

    def rounded(self, x: float, y: float, width: float, height: float, **look: Any) -> None:
        how = {"boxstyle": "round,pad=0,rounding_size=0.1", "linewidth": 2, **look}
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, **how))


def part(experts: range, ranks: int, index: int) -> range:
    return experts[chunk_range(len(experts), ranks, index)]


def centred(lane: float, width: float) -> float:
    return lane + (LANE - width) / 2


def tint(colour: str, strength: float) -> tuple[float, ...]:
    """A colour blended with white."""
    return tuple(1 - strength * (1 - part) for part in to_rgb(colour))


def draw(output: str) -> None:
    """A layer of experts over four ranks of `ep` on top, then which rank holds which experts."""
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.set_axis_off()
    page = Page(axes)
    page.y = 0.4
    for rank, lane in enumerate(LANES):
        page.write(
            lane + LANE / 2, page.y, f"rank {rank}", RANKS[rank], 12, weight="bold", ha="center"
        )
    page.y += 0.5
    start = page.y
    layer(page)
    page.panel(
        start, "↓ rows out,", "    results back", "↑ gradients of results", "    out, of rows back"
    )
    start = page.y
    page.dense()
    for fold in FOLDS:
        page.fold(*fold)
    page.y -= 0.28
    page.panel(start)
    with io.BytesIO() as pixels:
        figure.savefig(pixels)
        # less than half the bytes
        Image.open(pixels).convert("RGB").quantize(128).save(output, optimize=True)


def layer(page: Page) -> None:
    """From tokens to rows, to experts, and back."""
    sent = [
        sorted((rank, expert) for token in CHOSEN[rank] for expert in token) for rank in range(P)
    ]
    counts = [
        [sum(OWNER[expert] == to for _, expert in sent[rank]) for to in range(P)]
        for rank in range(P)
    ]
    arrived = [
        sorted(
            (row for rows in sent for row in rows if OWNER[row[1]] == rank),
            key=lambda row: (row[1], row[0]),
        )
        for rank in range(P)
    ]
    page.tokens()
    page.y += 0.2
    page.rows(sent, "rows", "one for each choice,", "by expert")
    page.call("all-to-all", counts)
    page.rows(arrived, "products", "of each expert with its", "rows: none is dropped", experts=True)
    page.call("all-to-all", counts, back=True)
    page.rows(sent, "results", "weighted and summed", "for each token")


if __name__ == "__main__":
    draw(sys.argv[1])
