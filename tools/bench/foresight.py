"""Whether a step takes the predicted time, on a CPU that was calibrated on other layouts.

    python tools/bench/foresight.py [--seen LAYOUT ...] [--foreseen LAYOUT ...] [--rounds 3]
    [--json] [key=value ...]

The quickstart trains on processes that communicate over gloo, in the layouts used to calibrate
hardware/cpu.yaml and in those to predict, which the fit does not use. Since a machine's speed
varies from minute to minute, all layouts take turns, and the median of their rounds counts.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from meshtrain.foresight.calibrate import PHASES, MeasuredRun, against, as_yaml, calibrate
from meshtrain.foresight.hardware import load

GOAL = 0.25  # relative error allowed for the predicted step time
SHORT = (
    "train.eval_every=0",
    "train.sample_tokens=0",
    "optimizer.warmup_steps=2",
    "parallel.compile=false",
)


def train(folder: Path, layout: str, processes: int, overrides: Sequence[str]) -> None:
    """Trains one run. Raises CalledProcessError: it failed; its own output says why."""
    launcher = (
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        "-m",
        "meshtrain.train",
    )
    run = (
        sys.executable,
        "-m",
        *launcher,
        "configs/quickstart.yaml",
        f"layout={layout}",
        f"train.output={folder}",
    )
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*run, *overrides], env=alone, check=True, stdout=sys.stderr)


def typical(runs: Sequence[MeasuredRun]) -> MeasuredRun:
    """One run for several of the same layout, with the median time of each phase."""
    return replace(
        runs[0], seconds={name: median(run.seconds[name] for run in runs) for name in PHASES}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="of the quickstart, for all runs"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--seen", nargs="+", default=["{dp_shard: 2}", "{tp: 2}"])
    parser.add_argument(
        "--foreseen", nargs="+", default=["{dp_replicate: 2}", "{cp: 2}", "{pp: 2}"]
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    overrides = (*SHORT, f"train.steps={options.steps}", *options.overrides)
    with tempfile.TemporaryDirectory() as root:
        layouts = [*options.seen, *options.foreseen]
        folders = {
            layout: [Path(root) / f"{i}-{turn}" for turn in range(options.rounds)]
            for i, layout in enumerate(layouts)
        }
        for turn, layout in itertools.product(range(options.rounds), layouts):
            train(folders[layout][turn], layout, options.processes, overrides)
        hardware = calibrate(
            [str(folder) for layout in options.seen for folder in folders[layout]], load("cpu")
        )
        runs = {
            layout: typical([MeasuredRun.load(folder) for folder in folders[layout]])
            for layout in layouts
        }
    rows = {layout: against(run, hardware, None, {})[: len(PHASES)] for layout, run in runs.items()}
    ratios = {
        layout: run.foresee(hardware).seconds / run.seconds["step"] for layout, run in runs.items()
    }
    held = all(abs(ratios[layout] - 1) <= GOAL for layout in options.foreseen)
    if options.json:
        found = {layout: [asdict(row) for row in rows[layout]] for layout in rows}
        print(
            json.dumps(
                {"held": held, "ratios": ratios, "runs": found, "hardware": asdict(hardware)}
            )
        )
        return
    print(as_yaml(hardware))
    for layout in runs:
        print(
            f"{layout}, {'seen' if layout in options.seen else 'foreseen'}: predicted / measured "
            f"{ratios[layout]:.2f}"
        )
        print(*(f"  {row.describe()}" for row in rows[layout]), sep="\n")
    print(f"steps within {GOAL:.0%} of what was foreseen: {'yes' if held else 'no'}")


if __name__ == "__main__":
    main()
