"""Draws the witness: both losses, and by how much they differ."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, GRID = "#1f2430", "#7a8194", "#e6e8ee"
UNDISTURBED, KEEPS, CHANGES = "#bcc2cf", "#3b6fe0", "#e2603b"
DECADES_BELOW = 1.5  # of the smallest difference, where equal bits are drawn


class Step(NamedTuple):
    """What both runs have in a step, and their relative differences; a list in JSON."""

    step: int
    undisturbed: float  # its loss
    disturbed: float
    loss_apart: float
    norm_apart: float

    @property
    def largest(self) -> float:
        return max(self.loss_apart, self.norm_apart)


def draw(result: Mapping[str, Any]) -> "Figure":
    """`result`: that of `tools.witness`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.6), dpi=150, facecolor="white", layout="constrained")
    top, bottom, words = figure.subplots(3, 1, height_ratios=(3, 2, 1.5))
    bottom.sharex(top)
    rows = [Step(*row) for row in result["rows"]]
    steps = [row.step for row in rows]

    undisturbed = [row.undisturbed for row in rows]
    top.plot(steps, undisturbed, color=UNDISTURBED, lw=4, label="undisturbed")
    for colour, label in ((KEEPS, "disturbed, one process"), (CHANGES, "disturbed, other layouts")):
        losses = [row.disturbed if colour_of(row, result) == colour else math.nan for row in rows]
        top.plot(steps, losses, color=colour, lw=1, label=label)
    top.set(ylabel="loss")
    top.legend(frameon=False, labelcolor=INK)
    tokens = f"{result['tokens_per_step']:,}"
    top.set_title(
        f"{result['steps']:,} steps of {tokens} tokens in {result['precision']}, "
        f"{len(result['legs']) - 1} disturbances",
        loc="left",
        color=INK,
        fontweight="bold",
    )

    losses, norms = [row.loss_apart for row in rows], [row.norm_apart for row in rows]
    floor = floor_of([*losses, *norms])
    until = result["bit_equal_until"]
    for values, colour, label in ((norms, QUIET, "gradient norm"), (losses, CHANGES, "loss")):
        shown = [max(value, floor) for value in values]
        bottom.semilogy(steps[until:], shown[until:], ".", color=colour, ms=2.5, label=label)
    bottom.semilogy(steps[:until], [floor] * until, color=KEEPS, lw=2.5)
    bottom.text(steps[0], floor * 1.6, "the same bits", color=KEEPS, va="bottom")
    bottom.set(ylabel="relative difference", xlabel="step")
    bottom.legend(frameon=False, labelcolor=INK, loc="upper left", markerscale=3)

    ends = [leg for leg in result["legs"] if leg["end"] is not None]
    for axes in (top, bottom):
        clean(axes)
        for leg in ends:
            axes.axvline(leg["reached"], color=GRID, lw=1, zorder=0)
    for leg in ends:
        number = str(leg["number"] + 1)
        top.annotate(
            number,
            (leg["reached"], 1),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="top",
            color=QUIET,
            fontsize=9,
        )
    list_them(words, ends)
    return figure


def colour_of(row: Step, result: Mapping[str, Any]) -> str:
    """By whether a step was computed before the first change of the layout."""
    return KEEPS if row.step <= result["changed_after"] else CHANGES


def floor_of(differences: Sequence[float]) -> float:
    """Where a difference of 0, which a logarithm does not have, is drawn."""
    smallest = min((difference for difference in differences if difference > 0), default=1e-15)
    return float(smallest / 10**DECADES_BELOW)


def clean(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=QUIET)
    axes.grid(axis="y", color=GRID, lw=0.6)


def list_them(axes: "Axes", ends: Sequence[Mapping[str, Any]]) -> None:
    """The disturbances in two columns."""
    axes.set_axis_off()
    half = -(-len(ends) // 2)
    for i, leg in enumerate(ends):
        column, line = divmod(i, half)
        axes.text(
            0.5 * column,
            1 - line / half,
            f"{leg['number'] + 1:>2}  step {leg['reached']:,}: {leg['end']['text']}",
            transform=axes.transAxes,
            va="top",
            color=INK,
            fontsize=9,
        )
