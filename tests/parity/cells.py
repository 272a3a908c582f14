"""Trains cells of the parity table and compares them."""

import json
from collections.abc import Mapping
from pathlib import Path

from meshtrain.parallel.fsdp import MIN_UNIT_SIZE
from meshtrain.verify.compare import compare_rows
from tests.launching import forked, torchrun
from tests.parity.experiments import Experiment


def train(
    folder: Path,
    world: int,
    runs: list[tuple[Experiment, str, str, tuple[str, ...]]],
    env: Mapping[str, str] | None = None,
) -> None:
    """Trains (experiment, folder, layout, more overrides) one after another in one job of `world`
    processes."""
    cells = [
        [
            e.config,
            [*e.overrides, *more, f"layout={layout}", f"train.output={folder / where}"],
            small(e),
        ]
        for e, where, layout, more in runs
    ]
    file = folder / f"cells_{world}_{len(cells)}.json"
    file.write_text(json.dumps(cells))
    command = ("-m", "tests.parity.runs", str(file))
    if env is None:
        forked(world, *command, timeout=1500).check()
    else:  # on GPUs, since a process must not initialize CUDA before it forks
        torchrun(world, *command, timeout=1500, env=env).check()


def small(experiment: Experiment) -> int:
    """FSDP's minimum unit size: the default for the experiment in float32; 0 for others, to gather
    each block alone."""
    return MIN_UNIT_SIZE if experiment.name == "float32" else 0


def assert_same(rows: list[dict], reference: list[dict], tolerance: float) -> None:
    """Asserts the same samples in every step, and numbers that differ by rounding only."""
    differences = compare_rows(rows, reference, tolerance)
    assert not differences, "; ".join(map(str, differences))
