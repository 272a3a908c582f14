"""Predicted memory and step time for people: a table, bars and a picture."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshtrain.errors import bytes_text
from meshtrain.run.rank_table import columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from meshtrain.foresight.prediction import Prediction
    from meshtrain.foresight.steptime import StepTime

HOW_EXTENDED = (
    "from traces with fewer blocks, microbatches and pipeline ranks, along straight lines"
)
WIDTH = 32  # characters of the longest bar
COLOURS = (
    "#2f5fb3",
    "#e08a2c",
    "#3a9a62",
    "#b8433e",
    "#7d5ba6",
    "#8a6d4b",
    "#cf78ad",
    "#6f7685",
    "#aab03c",
    "#3aa5b8",
)
INK, QUIET = "#1c2333", "#7a8194"


def memory_lines(
    resident: Mapping[str, float], parts: Mapping[str, float], title: str
) -> list[str]:
    """A row for each part of memory: bytes kept between steps, and bytes at the peak."""
    rows = [
        [
            f"  {name}",
            *(bytes_text(sizes[name]) if sizes.get(name) else "" for sizes in (resident, parts)),
        ]
        for name in dict.fromkeys((*resident, *parts))
    ]
    return columns([[title, "kept", "at the peak"], *rows])


def memory_of_ranks(prediction: "Prediction") -> list[str]:
    """The fullest rank: parts of its memory, its peak, whether it fits, other ranks, and settings
    that save memory."""
    memory, room = prediction.memory, prediction.hardware and prediction.hardware.device.room
    of = (
        "memory of a rank"
        if len(prediction.ranks) == 1
        else f"memory of a rank, largest on pp {memory.pp}"
    )
    lines = memory_lines(memory.resident, memory.parts, of)
    verdict = f"; {bytes_text(room)} available to tensors: {memory.verdict(room)}" if room else ""
    lines.append(f"  peak {bytes_text(memory.total)} in the {memory.moment}{verdict}")
    others = [
        f"pp {rank.pp} {bytes_text(rank.total)}" for rank in prediction.ranks if rank is not memory
    ]
    lines += [f"  other ranks: {', '.join(others)}"] * bool(others)
    savings = [
        f"{knob} {bytes_text(less)}" + (f" ({longer:+.3g} s)" if longer is not None else "")
        for knob, (less, longer) in (prediction.saves if room else {}).items()
    ]
    lines += [f"  would save: {'; '.join(savings)}"] * bool(savings)
    exact = "every operator of its step was counted" if memory.source == "traced" else HOW_EXTENDED
    return [
        *lines,
        f"  {memory.source}: {exact}; blocks are {'' if memory.compiled else 'not '}compiled",
    ]


def step_lines(step: "StepTime", unit: str = "tokens") -> list[str]:
    """A bar for each part of a step. `unit`: of its throughput."""
    mfu = f", {100 * step.mfu:.0f} % MFU" if step.mfu else ""
    longest = max(step.parts.values())
    rows = [
        [f"  {name}", "#" * max(1, round(WIDTH * seconds / longest)), f"{seconds:.3g} s"]
        for name, seconds in step.parts.items()
        if seconds
    ]
    head = f"step {step.seconds:.3g} s: {step.tokens_per_s:,.0f} {unit}/s{mfu}"
    return [head, *columns(rows), f"  limit: {step.limit}"]


def picture(
    title: str, memory: Mapping[str, float], room: float | None, step: "StepTime | None"
) -> "Figure":
    """A bar of a rank's peak memory and one of a step, by part. `room`: bytes available to a
    rank."""
    # not pyplot, which keeps every figure and asks for a display
    from matplotlib.figure import (
        Figure,
    )

    figure = Figure(
        figsize=(9, 1.2 + 2.0 * (1 + (step is not None))),
        dpi=160,
        facecolor="white",
        layout="constrained",
    )
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontweight="bold", fontsize=12)
    rows = figure.subplots(1 + (step is not None), 1, squeeze=False)[:, 0]
    if room is not None:
        rows[0].axvline(room / 2**30, color=INK, linewidth=1.5, label=f"device {room / 2**30:.3g}")
    gib = {name: nbytes / 2**30 for name, nbytes in memory.items()}
    _bar(rows[0], gib, f"memory of a rank at its peak, {bytes_text(sum(memory.values()))}", "GiB")
    if step is not None:
        _bar(rows[1], step.parts, f"step, {step.seconds:.3g} s; limit: {step.limit}", "s")
    return figure


def _bar(axes: "Axes", parts: Mapping[str, float], title: str, unit: str) -> None:
    start = 0.0
    for i, (name, size) in enumerate(parts.items()):
        axes.barh(
            0,
            size,
            0.8,
            start,
            color=COLOURS[i % len(COLOURS)],
            label=f"{name} {size:.3g}",
            edgecolor="white",
        )
        start += size
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.set_xlabel(unit, color=QUIET)
    axes.set_yticks([])
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=4, fontsize=8, frameon=False)
