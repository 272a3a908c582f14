"""Trains cells of the parity table and compares them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from meshtrain.parallel.data import SMALL
from tests.launching import torchrun
from tests.parity.experiments import Experiment

COMPARED = ("loss", "grad_norm", "eval_loss")


def train(
    folder: Path,
    world: int,
    runs: list[tuple[Experiment, str, str, tuple[str, ...]]],
    env: Mapping[str, str] | None = None,
) -> None:
    """Trains (experiment, folder, layout, more overrides) one after another in one job of `world` processes."""
    cells = [
        [e.config, [*e.overrides, *more, f"layout={layout}", f"train.output={folder / where}"], small(e)]
        for e, where, layout, more in runs
    ]
    file = folder / f"cells_{world}_{len(cells)}.json"
    file.write_text(json.dumps(cells))
    torchrun(world, str(Path(__file__).parent / "train_cells.py"), str(file), timeout=1500, env=env).check()


def small(experiment: Experiment) -> int:
    """FSDP as it is for models of this size, in float32; in all others every block is gathered by itself."""
    return SMALL if experiment.name == "float32" else 0


def assert_same(rows: list[dict], reference: list[dict], tolerance: float) -> None:
    """The same samples in every step, and losses and norms that differ by rounding only."""
    assert [row["step"] for row in rows] == list(range(1, 21))
    for row, expected in zip(rows, reference, strict=True):
        for same in ("samples_digest", "samples", "tokens", "epoch", "lr"):
            assert row[same] == expected[same], f"step {row['step']}: {same}"
        for name in COMPARED:
            assert (name in row) == (name in expected)
            if name in row:
                assert row[name] == pytest.approx(expected[name], rel=tolerance, abs=0), f"step {row['step']}: {name}"
