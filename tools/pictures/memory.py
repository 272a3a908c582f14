"""Draws docs/images/memory.png: a rank's memory after every operator of a step, with and without
recomputation.

    python tools/pictures/memory.py docs/images/memory.png

Uses the trace of `meshtrain plan`, a step on PyTorch's meta device, so it needs no GPU.
"""

import sys
from typing import Any

from matplotlib.figure import Figure

from meshtrain.config import Config
from meshtrain.data.batch import Batch
from meshtrain.foresight.trace import META, TracedStep, fake_world
from meshtrain.layout import Layout

INK, QUIET, GRID = "#1f2430", "#7a8194", "#e6e8ee"
PARTS = {  # part of the trace -> colour; all other parts are shown as "activations", too
    "weights": "#3b6fe0",
    "optimizer state": "#2a9d8f",
    "gradients": "#d9a21b",
    "gathered weights": "#9a6fb0",
    "activations": "#e2603b",
}
MODEL = (
    "model.hidden_size=256 model.intermediate_size=768 model.num_attention_heads=8 "
    "model.num_key_value_heads=4"
)
BATCH = "batch.global_size=8 batch.micro_size=2 data.seq_len=128 parallel.compile=false"
STEPS = 3  # of a trace; in the last one, everything that persists between steps is allocated


def step_memory(layout: Layout, recompute: str) -> tuple[list[str], dict[str, list[float]]]:
    """On rank 0: the phase of each operator of a step, and part -> MiB after each operator."""
    config = Config.load(
        "configs/quickstart.yaml",
        [*MODEL.split(), *BATCH.split(), f"parallel.recompute={recompute}"],
    )
    phases: list[str] = []
    rows: list[dict[str, int]] = []
    begun = 0

    def look(*_: Any) -> None:
        if begun == STEPS:
            phases.append(step.live.phase)
            rows.append(step.live.parts(step.owners()))

    with fake_world(layout, 0, "cuda") as mesh:
        step = TracedStep(config, mesh, META)
        step.live.watch, forward_backward = look, step.trainer.forward_backward

        def begin(number: int, microbatches: list[Batch]) -> None:
            nonlocal begun
            begun += 1
            forward_backward(number, microbatches)

        step.trainer.forward_backward = begin  # type: ignore[assignment, method-assign]
        step.trace()
    assert rows, f"a trace has no step {STEPS}"
    *named, rest = PARTS
    values = {part: [row.get(part, 0) / 2**20 for row in rows] for part in named}
    values[rest] = [
        sum(size for part, size in row.items() if part not in named) / 2**20 for row in rows
    ]
    return phases, values


def main(path: str) -> None:
    layout = Layout({"dp_shard": 4})
    figure = Figure(figsize=(11, 6.4), dpi=130, layout="constrained")
    plots = figure.subplots(2, 1, sharey=True)
    for axes, recompute in zip(plots, ("none", "full"), strict=True):
        phases, values = step_memory(layout, recompute)
        axes.stackplot(
            range(len(phases)), *values.values(), colors=PARTS.values(), labels=PARTS, linewidth=0
        )
        total = [sum(parts) for parts in zip(*values.values(), strict=True)]
        axes.set_title(
            f"{{dp_shard: 4}}, parallel.recompute: {recompute}; most: {max(total):.1f} MiB",
            loc="left",
            color=INK,
        )
        for name in ("forward", "backward", "optimizer"):
            at = phases.index(name)
            axes.axvline(at, color=INK, linewidth=0.8, linestyle=":")
            axes.text(at, max(total) * 1.02, f" {name}", color=INK, fontsize=9, va="bottom")
        axes.set_xlim(0, len(phases) - 1)
        axes.set_ylabel("MiB", color=QUIET)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=GRID)
        axes.set_axisbelow(True)
    plots[1].set_xlabel("operators of a step, one after the other", color=QUIET)
    plots[0].set_ylim(0, plots[0].get_ylim()[1] * 1.12)
    figure.legend(
        *plots[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(PARTS),
        frameon=False,
    )
    figure.savefig(path)


if __name__ == "__main__":
    main(sys.argv[1])
