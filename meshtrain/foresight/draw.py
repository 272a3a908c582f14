"""Predicted memory and step time for people: a table, bars and a picture."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshtrain.errors import bytes_text
from meshtrain.metrics.picture import INK, QUIET, figure_of_panels
from meshtrain.run.rank_table import columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from meshtrain.foresight.prediction import Prediction
    from meshtrain.foresight.steptime import StepTime

HOW = {
    "traced": "every operator of its step was counted",
    "by blocks": "each kind of block was traced, and the step follows from them",
}
WIDTH = 32  # characters of the longest bar
LITTLE = 0.001  # share of a peak that nobody need see
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


def memory_lines(
    resident: Mapping[str, float], parts: Mapping[str, float], title: str
) -> list[str]:
    """A row for each part of memory: bytes kept between steps, and bytes at the peak; without what
    is a thousandth of the peak or less."""
    rows = [[title, "kept", "at the peak"]]
    little = LITTLE * sum(parts.values())
    for name in dict.fromkeys((*resident, *parts)):
        sizes = [of.get(name, 0) for of in (resident, parts)]
        if max(sizes) > little:
            rows.append([f"  {name}", *(bytes_text(n) if n > little else "" for n in sizes)])
    return columns(rows)


def memory_of_ranks(prediction: "Prediction") -> list[str]:
    """The fullest rank: parts of its memory, its peak, whether it fits, other ranks, and settings
    that save memory."""
    memory = prediction.memory
    room = None if prediction.hardware is None else prediction.hardware.device.room
    title = "memory of a rank"
    if len(prediction.ranks) > 1:
        title += f", largest on pp {memory.pp}"
    lines = memory_lines(memory.resident, memory.parts, title)

    peak = f"  peak {bytes_text(memory.total)} in the {memory.moment}"
    if room is not None:
        peak += f"; {bytes_text(room)} available to tensors: {memory.verdict(room)}"
    lines.append(peak)

    if memory.host:
        lines.append(f"  {_of_host(prediction)}")

    others = [
        f"pp {rank.pp} {bytes_text(rank.total)}" for rank in prediction.ranks if rank is not memory
    ]
    if others:
        lines.append(f"  other ranks: {', '.join(others)}")
    savings = [] if room is None else _savings(prediction)
    if savings:
        lines.append(f"  would save: {'; '.join(savings)}")

    blocks = "compiled" if memory.compiled else "not compiled"
    lines.append(f"  {memory.source}: {HOW[memory.source]}; blocks are {blocks}")
    return lines


def _of_host(prediction: "Prediction") -> str:
    """`in the host's memory 9.1 GiB of a rank, at most 72.8 GiB of a host; 900 GiB available:
    fits`"""
    rank, host = bytes_text(prediction.memory.host), bytes_text(prediction.host_memory)
    words = f"in the host's memory {rank} of a rank, at most {host} of a host"
    room = None if prediction.hardware is None else prediction.hardware.host.room
    if room is None:
        return words
    verdict = "fits" if prediction.fits_hosts else "does not fit"
    return f"{words}; {bytes_text(room)} available: {verdict}"


def _savings(prediction: "Prediction") -> list[str]:
    """`parallel.recompute=full 3.2 GiB (+0.021 s)`"""
    words = []
    little = LITTLE * prediction.memory.total
    for change, (fewer_bytes, longer) in prediction.saves.items():
        if fewer_bytes <= little:
            continue
        seconds = "" if longer is None else f" ({longer:+.3g} s)"
        words.append(f"{change} {bytes_text(fewer_bytes)}{seconds}")
    return words


def step_lines(step: "StepTime", unit: str = "tokens", error: str = "") -> list[str]:
    """A bar for each part of a step. `unit`: of its throughput; `error`: of its seconds, and where
    the rates are from."""
    head = f"step {step.seconds:.3g} s{error}: {step.tokens_per_s:,.0f} {unit}/s"
    if step.mfu:
        head += f", {100 * step.mfu:.0f} % MFU"
    longest = max(step.parts.values())
    rows = []
    for name, seconds in step.parts.items():
        if seconds:
            bar = "#" * max(1, round(WIDTH * seconds / longest))
            rows.append([f"  {name}", bar, f"{seconds:.3g} s"])
    return [head, *columns(rows), f"  limit: {step.limit}"]


def picture(
    title: str, memory: Mapping[str, float], room: float | None, step: "StepTime | None"
) -> "Figure":
    """A bar of a rank's peak memory and one of a step, by part. `room`: bytes available to a
    rank."""
    figure, panels = figure_of_panels(title, panels=1 if step is None else 2, panel_height=2.0)
    if room is not None:
        panels[0].axvline(
            room / 2**30, color=INK, linewidth=1.5, label=f"device {room / 2**30:.3g}"
        )
    gib = {name: nbytes / 2**30 for name, nbytes in memory.items()}
    peak = bytes_text(sum(memory.values()))
    _bar(panels[0], gib, f"memory of a rank at its peak, {peak}", "GiB")
    if step is not None:
        _bar(panels[1], step.parts, f"step, {step.seconds:.3g} s; limit: {step.limit}", "s")
    return figure


def _bar(axes: "Axes", parts: Mapping[str, float], title: str, unit: str) -> None:
    """One bar with all parts side by side."""
    start = 0.0
    for i, (name, size) in enumerate(parts.items()):
        axes.barh(
            y=0,
            width=size,
            height=0.8,
            left=start,
            color=COLOURS[i % len(COLOURS)],
            edgecolor="white",
            label=f"{name} {size:.3g}",
        )
        start += size
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.set_xlabel(unit, color=QUIET)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=4, fontsize=8, frameon=False)
