"""Draws docs/images/context-parallel.png: which chunks of a sequence each rank of `cp` has, and
what is sent to whom.

    python tools/pictures/context_parallel.py docs/images/context-parallel.png

A tensor is a box: the sequence runs to the right, heads run down. `data/sequence.py` says which
rank has which chunks.
"""

import io
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import ArrowStyle, FancyArrowPatch, FancyBboxPatch, Rectangle
from PIL import Image

from meshtrain.data.sequence import chunks_of, sees_chunk

INK, QUIET, PANEL, OUTLINE = "#1f2430", "#7a8194", "#f4f5f9", "#bcc2cf"  # as in tensor-parallel.png
RANKS = ("#3b6fe0", "#e2603b", "#2a9d8f", "#d9a21b")
CP, LENGTH = len(RANKS), 64
CHUNK = LENGTH // (2 * CP)
CHUNKS = [
    [chunk.start * 2 * CP // LENGTH for chunk in chunks_of(LENGTH, CP, rank)] for rank in range(CP)
]
OWNER = {chunk: rank for rank, chunks in enumerate(CHUNKS) for chunk in chunks}

# Lengths are inches, and y runs down.
WIDTH, HEIGHT, DPI = 11.2, 11.4, 160
LEFT, LANES, CELL, BILL, RIGHT = 0.35, (2.25, 3.95, 5.65, 7.35), 0.175, 9.1, 10.9
BOX, GAP, SQUARE, LINE = 0.42, 0.42, 0.25, 0.21
WIDE = CELL * 2 * CP
Point = tuple[float, float]


class Page:
    """The page, drawn from top to bottom; `y` is the current position."""

    def __init__(self, axes: Axes) -> None:
        self.axes, self.y = axes, 0.0

    def mask(self, start: Point, title: str, documents: list[int], text: str) -> None:
        """The attention mask: queries run down, keys to the right; a row has the colour of the rank
        that owns it."""
        x, y = start
        size, one = 2 * CP * SQUARE, 2 * CP * SQUARE / LENGTH
        self.box(x, y, size, size, facecolor="white", edgecolor=OUTLINE)
        for row in range(LENGTH):
            begin = max(at for at in documents if at <= row)
            colour = tint(RANKS[OWNER[row * 2 * CP // LENGTH]], 0.75)
            self.box(
                x + begin * one,
                y + row * one,
                (row + 1 - begin) * one,
                one,
                facecolor=colour,
                linewidth=0,
            )
        for i in range(1, 2 * CP):
            for xs, ys in (
                ([x, x + size], [y + i * SQUARE] * 2),
                ([x + i * SQUARE] * 2, [y, y + size]),
            ):
                self.axes.plot(xs, ys, color="white", linewidth=1, zorder=4)
        for i in range(2 * CP):
            self.write(
                x - 0.12,
                y + (i + 0.5) * SQUARE,
                str(i),
                RANKS[OWNER[i]],
                9,
                ha="center",
                weight="bold",
            )
            self.write(
                x + (i + 0.5) * SQUARE,
                y - 0.12,
                str(i),
                RANKS[OWNER[i]],
                9,
                ha="center",
                weight="bold",
            )
        self.write(x, y - 0.38, title, weight="bold")
        needed = needed_chunks(
            [max(p for p in (0, *documents) if p <= y) for y in range(0, LENGTH, CHUNK)]
        )
        text = text.format(sum(map(len, needed)), 2 * CP * (CP - 1))
        for i, line in enumerate(text.split("\n")):
            self.write(x + size + 0.2, y + (i + 0.5) * LINE, line, QUIET, 10)

    def boxes(self, text: str, cells: dict[int, dict[int, range]]) -> None:
        """A tensor on each rank; `cells`: rank -> chunk -> heads."""
        for i, line in enumerate(text.split("\n")):
            self.write(
                LEFT,
                self.y + BOX / 2 + LINE * (i - text.count("\n") / 2),
                line,
                INK if i == 0 else QUIET,
            )
        for rank, lane in enumerate(LANES):
            self.box(
                lane,
                self.y,
                WIDE,
                BOX,
                facecolor="white",
                edgecolor=OUTLINE,
                linestyle=(0, (3, 3)),
                linewidth=1,
            )
            for chunk, heads in cells[rank].items():
                colour, x, y = (
                    RANKS[OWNER[chunk]],
                    lane + chunk * CELL,
                    self.y + heads.start * BOX / CP,
                )
                height = len(heads) * BOX / CP
                self.box(
                    x,
                    y,
                    CELL,
                    height,
                    linewidth=1,
                    zorder=4,
                    facecolor=tint(colour, 0.3),
                    edgecolor=colour,
                )
                if len(heads) > 1:
                    self.write(x + CELL / 2, y + height / 2, str(chunk), INK, 8, ha="center")
        self.y += BOX

    def call(self, name: str, groups: Sequence[Sequence[int]]) -> None:
        """A collective: every rank of a group sends to every other one."""
        for group in groups:
            for i, j in ((i, j) for i in group for j in group):
                self.arrow(i, j)
            self.pill((LANES[group[0]] + LANES[group[-1]] + WIDE) / 2, self.y + GAP / 2, name)
        self.y += GAP

    def panel(self, start: float, name: str, bill: list[str]) -> None:
        """The background of a method, its name, and what a rank sends."""
        x, y, width, height = LEFT - 0.15, start - 0.12, RIGHT - LEFT + 0.3, self.y - start + 0.24
        self.rounded(x, y, width, height, facecolor=PANEL, edgecolor="none", zorder=0)
        for i, line in enumerate([name, *bill]):
            look = {"weight": "bold"} if i == 0 else {}
            middle = (start + self.y) / 2 + LINE * (i - len(bill) / 2)
            self.write(BILL, middle, line, INK, 11 if i == 0 else 10, **look)
        self.y += 0.42

    def pill(self, x: float, y: float, text: str) -> None:
        width = 0.09 * len(text) + 0.2
        self.rounded(
            x - width / 2, y - 0.125, width, 0.25, facecolor=INK, edgecolor=PANEL, zorder=6
        )
        self.write(x, y, text, "white", 9.5, weight="bold", ha="center")

    def arrow(self, i: int, j: int) -> None:
        head = ArrowStyle("-|>", head_length=4, head_width=2)
        ends = [(LANES[i] + WIDE / 2, self.y), (LANES[j] + WIDE / 2, self.y + GAP)]
        look: dict[str, Any] = {"color": tint(RANKS[i], 0.35 if i == j else 1), "linewidth": 1.2}
        look |= {"shrinkA": 1, "shrinkB": 1, "zorder": 2 if i == j else 3}
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


def needed_chunks(first: Sequence[int]) -> list[list[int]]:
    """For each rank, the chunks of other ranks that its queries see; queries of chunk y see from
    `first[y]` on."""
    return [
        [x for x in OWNER if OWNER[x] != i and sees_chunk(first, CHUNK, i, x)] for i in range(CP)
    ]


def tint(colour: str, strength: float) -> tuple[float, ...]:
    """A colour blended with white."""
    return tuple(1 - strength * (1 - part) for part in to_rgb(colour))


def draw(output: str) -> None:
    """The chunked sequence and the masks on top, then the methods of bringing queries and keys
    together."""
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.set_axis_off()
    page = Page(axes)
    causal = (
        "Queries run down, keys to the\nright. A row has the colour of the\nrank that has it.\n\n"
    )
    causal += f"Each rank computes as much:\n{2 * CP} squares."
    page.mask((0.65, 0.8), "a causal mask", [0], causal)
    documents = "Only chunks that are looked at\nare sent: {} of {} travel.\n\n"
    documents += "Every rank knows the documents,\nso nobody has to ask."
    page.mask((5.95, 0.8), "with three documents", [0, 20, 44], documents)
    page.y = 3.35
    for rank, lane in enumerate(LANES):
        page.write(
            lane + WIDE / 2, page.y, f"rank {rank}", RANKS[rank], 12, weight="bold", ha="center"
        )
    page.write(BILL, page.y, "↓ forward   ↑ backward", QUIET, 10)
    page.y += 0.4
    ways(page)
    with io.BytesIO() as pixels:
        figure.savefig(pixels)
        # less than half the bytes
        Image.open(pixels).convert("RGB").quantize(128).save(output, optimize=True)


def ways(page: Page) -> None:
    """What each rank has before and after communication, for one document: it needs all chunks up
    to its last one."""
    ranks, heads, u = range(CP), range(CP), 2
    own = {rank: dict.fromkeys(CHUNKS[rank], heads) for rank in ranks}

    def needed(rank: int, sources: Iterable[int], heads: range) -> dict[int, range]:
        """The chunks of these ranks that a rank needs."""
        return {x: heads for x in needed_chunks([0] * 2 * CP)[rank] if OWNER[x] in sources}

    start = page.y
    page.boxes("k, v\nown chunks, all heads", own)
    page.call("to all", [ranks])
    page.boxes("k, v\nall that it needs", {r: own[r] | needed(r, ranks, heads) for r in ranks})
    page.panel(start, "gather", ["↓ (c−1 + i) K·B", "↑ 3 (c−1) K·B"])

    start = page.y
    for step in range(1, CP):
        page.boxes(
            f"k, v\nof rank i − {step}", {r: needed(r, [(r - step) % CP], heads) for r in ranks}
        )
        page.y += 0.1 * (step < CP - 1)
    page.panel(start, "ring", ["one after the other,", "as much as gather"])

    start = page.y
    page.boxes("q, k, v\nown chunks, all heads", own)
    page.call("all-to-all", [ranks])
    page.boxes(
        "q, k, v\nall chunks, own heads", {r: dict.fromkeys(OWNER, range(r, r + 1)) for r in ranks}
    )
    page.panel(start, f"context_heads: {CP}", ["↓ (2 H/c + 2 κ) B (c−1)", "↑ the same"])

    start = page.y
    neighbours = [ranks[at : at + u] for at in range(0, CP, u)]
    half = {r: range(r % u * CP // u, (r % u + 1) * CP // u) for r in ranks}
    both = {r: [chunk for i in neighbours[r // u] for chunk in CHUNKS[i]] for r in ranks}
    page.boxes("q, k, v\nown chunks, all heads", own)
    page.call("all-to-all", neighbours)
    page.boxes(
        "q, k, v\nof 2 ranks, own heads", {r: dict.fromkeys(both[r], half[r]) for r in ranks}
    )
    page.call("to all", [ranks[i::u] for i in range(u)])
    visible = {
        r: dict.fromkeys((chunk for chunk in OWNER if chunk <= max(both[r])), half[r])
        for r in ranks
    }
    page.boxes("k, v\nall that it needs", visible)
    page.panel(start, f"context_heads: {u}", ["with gather, or ring", "(the table has the sums)"])


if __name__ == "__main__":
    draw(sys.argv[1])
