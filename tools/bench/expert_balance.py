"""Compares methods of balancing the loads of experts: trains configs/moe.yaml with each, and a
dense model.

    python tools/bench/expert_balance.py runs/expert-balance [--ranks 2] [--steps 500] [--seeds 2]
    [--picture FILE]

Every run is a run of `meshtrain.train` in a folder of its own, so a second call resumes where the
first ended, or only reads the results if it finished. The dense model has as many active parameters
per token. Takes about half an hour on 2 cores.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from meshtrain.metrics.logger import read
from meshtrain.metrics.plot import smooth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "moe.yaml"
DENSE = "dense"
BALANCES: Mapping[str, tuple[str, ...]] = {
    **{
        kind: ("parallel.expert_parallel=2", f"model.router_balance={kind}")
        for kind in ("batch", "sequence", "none")
    },
    DENSE: (
        "model={name: qwen3, hidden_size: 128, intermediate_size: 288, num_hidden_layers: 4, "
        "num_attention_heads: 4, "
        "num_key_value_heads: 2, vocab_size: 256}",
    ),
}
COLOURS = {"batch": "#3b6fe0", "sequence": "#2a9d8f", "none": "#e2603b", DENSE: "#7a8194"}
LAST = 100  # steps over which loads are averaged
Rows = Sequence[Mapping[str, Any]]


def train(folder: Path, name: str, seed: int, ranks: int, steps: int) -> Rows:
    """The metrics of one run, which is first trained to its end if it was not yet."""
    output = folder / f"{name}-{seed}"
    overrides = (
        *BALANCES[name],
        f"train.seed={seed}",
        f"train.steps={steps}",
        f"train.output={output}",
    )
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    command = (
        sys.executable,
        *launcher,
        "-m",
        "meshtrain.train",
        str(CONFIG),
        *overrides,
        "train.sample_tokens=0",
    )
    subprocess.run(command, check=True)
    return read(output / "metrics.jsonl")


def table(runs: Mapping[str, Sequence[Rows]]) -> str:
    """A Markdown table with a line per method: held-out loss of each seed, and how even the loads
    are at the end."""
    lines = [
        "| balance | held-out loss | largest load / mean | experts without a token |",
        "| --- | --- | --- | --- |",
    ]
    for name, seeds in runs.items():
        losses = ", ".join(
            f"{[row['eval_loss'] for row in rows if 'eval_loss' in row][-1]:.4f}" for rows in seeds
        )
        if name == DENSE:
            lines.append(f"| {name} | {losses} | | |")
            continue
        loads, idle = (
            ", ".join(f"{fmean(row[field] for row in rows[-LAST:]):.2f}" for rows in seeds)
            for field in ("expert_load_max", "experts_idle")
        )
        lines.append(f"| {name} | {losses} | {loads} | {idle} |")
    return "\n".join(lines)


def draw(runs: Mapping[str, Sequence[Rows]]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    loss, load = figure.subplots(1, 2)
    for name, seeds in runs.items():
        for rows in seeds:
            label = name if rows is seeds[0] else None
            for axes, field, reach in ((loss, "loss", 20), (load, "expert_load_max", 5)):
                if field in rows[0]:
                    # means of few steps at the ends jump
                    inside = slice(reach, max(reach + 1, len(rows) - reach))
                    values = smooth([row[field] for row in rows], reach)[inside]
                    axes.plot(
                        range(reach + 1, reach + 1 + len(values)),
                        values,
                        color=COLOURS[name],
                        lw=1.2,
                        label=label,
                    )
    loss.set(title="training loss", xlabel="step", ylim=(None, min(2.6, loss.get_ylim()[1])))
    load.set(title="largest load of an expert / mean of its layer", xlabel="step", ylim=(0, None))
    load.axhline(1, color="#bcc2cf", lw=0.8)
    for axes in (loss, load):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Which way of balancing the loads of experts does best."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--picture", type=Path, help="where to draw loss and loads")
    options = parser.parse_args()
    runs = {
        name: [
            train(options.folder, name, seed, options.ranks, options.steps)
            for seed in range(options.seeds)
        ]
        for name in BALANCES
    }
    print(table(runs))
    if options.picture:
        draw(runs).savefig(options.picture)


if __name__ == "__main__":
    main()
