"""Trains cells of the parity table and compares them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from meshtrain.parallel.fsdp import MIN_UNIT_SIZE
from tests.launching import forked, torchrun
from tests.parity.experiments import Experiment

COMPARED = (
    *("loss", "grad_norm", "eval_loss", "expert_load_max", "experts_idle"),
    # of the losses in tools/examples/losses
    *("absolute_error", "eval_absolute_error", "right", "eval_right"),
    *("found", "eval_found", "divergence", "eval_divergence"),
    *("margin", "eval_margin", "preferred", "eval_preferred"),
)


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
    """Asserts the same samples in every step, and losses and norms that differ by rounding only."""
    assert [row["step"] for row in rows] == [row["step"] for row in reference]
    for row, expected in zip(rows, reference, strict=True):
        for same in ("samples_digest", "samples", "tokens", "epoch", "lr"):
            assert row[same] == expected[same], f"step {row['step']}: {same}"
        for name in (*COMPARED, *(name for name in expected if "/" in name)):
            assert (name in row) == (name in expected)
            if name in row:
                assert row[name] == pytest.approx(expected[name], rel=tolerance, abs=0), (
                    f"step {row['step']}: {name}"
                )
