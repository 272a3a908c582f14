"""Draws docs/images/plan.png: what `meshtrain plan --gpu h100` says of five layouts of a model on 8
GPUs, the memory of a rank and the seconds of a step.

    python tools/pictures/plan.py docs/images/plan.png
"""

import io
import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from meshtrain.cli import main as cli
from meshtrain.foresight.hardware import load

INK, QUIET, GRID = "#1f2430", "#7a8194", "#e6e8ee"
# README.md shows the same file.
CONFIG = """\
model: {name: llama, preset: llama-3.1-8b}
data: {source: tokens, path: data/tokens, seq_len: 8192}
batch: {global_size: 128, micro_size: 1}
train: {steps: 1000, precision: bfloat16}
"""
LAYOUTS = (
    "{dp_replicate: 8}",
    "{dp_shard: 8}",
    "{dp_shard: 4, cp: 2}",
    "{dp_shard: 4, tp: 2}",
    "{tp: 8}",
)
MEMORY = {  # part of a plan -> colour; all other parts are shown as "other"
    "weights": "#3b6fe0",
    "gradients": "#d9a21b",
    "optimizer state": "#2a9d8f",
    "activations": "#e2603b",
    "other": "#9a6fb0",
}
STEP = {  # the same, of a step: what is left are messages that computing does not hide
    "forward": "#a9b4c8",
    "backward": "#65738f",
    "update": "#1f2430",
    "waiting for messages": "#c2306b",
}


def plans() -> list[dict[str, Any]]:
    """What `meshtrain plan --json` prints of each layout, without a GPU."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "8b.yaml"
        file.write_text(CONFIG)
        for layout in LAYOUTS:
            words = [str(file), "--hosts", "8", "--gpu", "h100", "--json", f"layout={layout}"]
            printed = io.StringIO()
            with redirect_stdout(printed):
                status = cli.main(["plan", *words])
            assert status == 0, layout
            found.append(json.loads(printed.getvalue())["foresight"])
    return found


def in_parts(values: dict[str, float], parts: dict[str, str]) -> list[float]:
    """One number for each part: the last one is the sum of what the others do not name."""
    *named, _ = parts
    rest = sum(value for name, value in values.items() if name not in named)
    return [*(values.get(name, 0.0) for name in named), rest]


def draw_bars(
    axes: Axes, rows: list[list[float]], parts: dict[str, str], labels: list[str]
) -> None:
    """A bar for each layout, from the top down, with its parts and a label behind it."""
    for place, (row, label) in enumerate(zip(rows, labels, strict=True)):
        begin = 0.0
        for size, colour in zip(row, parts.values(), strict=True):
            axes.barh(place, size, left=begin, color=colour, height=0.62)
            begin += size
        text = axes.annotate(
            label,
            (begin, place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=11,
        )
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    axes.tick_params(axis="x", colors=QUIET)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in parts.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        ncols=3,
        frameon=False,
        fontsize=10,
        handlelength=1.1,
        columnspacing=1.2,
    )


def main(path: str) -> None:
    found = plans()
    figure = Figure(figsize=(11, 3.9), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.set_ylim(len(LAYOUTS) - 0.5, -1)  # the first layout at the top

    memory = [plan["memory"] for plan in found]
    draw_bars(
        left,
        [[size / 2**30 for size in in_parts(of["parts"], MEMORY)] for of in memory],
        MEMORY,
        [f"{of['total'] / 2**30:.0f} GiB" for of in memory],
    )
    room = load("h100").device.room / 2**30
    left.axvline(room, color=INK, linewidth=1, linestyle="--")
    left.text(room, -0.4, f" {room:.0f}: room on an H100", color=INK, fontsize=10, va="bottom")
    left.set_title("memory of a GPU, GiB", loc="left", color=INK, fontsize=12)
    left.set_xlim(0, 1.15 * max(of["total"] for of in memory) / 2**30)
    left.set_yticks(range(len(LAYOUTS)), LAYOUTS, family="monospace", fontsize=11, color=INK)

    rows, labels = [], []
    for plan in found:
        if plan["memory"]["verdict"] == "does not fit":
            rows.append([0.0] * len(STEP))
            labels.append("does not fit")
        else:
            rows.append(in_parts(plan["step"]["parts"], STEP))
            labels.append(f"{plan['step']['seconds']:.1f} s")
    draw_bars(right, rows, STEP, labels)
    error = 100 * found[0]["hardware"]["error"]
    right.set_title(f"a step, seconds ± {error:.0f} %", loc="left", color=INK, fontsize=12)
    right.set_xlim(0, 1.2 * max(map(sum, rows)))
    right.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    figure.savefig(path)


if __name__ == "__main__":
    main(sys.argv[1])
