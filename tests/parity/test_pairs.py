"""The promise, for every pair of settings: cells of up to four ranks have the loss curve of one
process."""

from pathlib import Path
from typing import Any

import pytest

from meshtrain.config import Config
from meshtrain.config.errors import ConfigErrors
from meshtrain.job.process import Job
from meshtrain.verify.covering import Cell, all_pairs, covering, pairs
from tests import ranks
from tests.parity.covering import FACTORS, PLAIN, ranks_of, why_not
from tests.parity.experiments import experiment_of, layout_of
from tests.parity.runs import assert_parity

CELLS, IMPOSSIBLE = covering(FACTORS, why_not, cost=ranks_of)
# Reasons that are the tests' own: the product trains these.
NOT_REFUSED = (
    "a cell has at most 4 ranks",
    "a schedule is of stages on several ranks",
    "rounding may change a choice",
    "Muon makes the small directions of a gradient large, and with them its rounding",
)


def parameter(cell: Cell) -> Any:
    name = " ".join(f"{factor}={value}" for factor, value in cell.items() if value != PLAIN[factor])
    return ranks.row(ranks_of(cell), cell, name=name)


@pytest.mark.parametrize(
    ("job", "cell"), [parameter(cell) for cell in CELLS if ranks_of(cell) > 1], indirect=["job"]
)
def test_same_curve_as_one_process(
    job: Job, cell: Cell, shared_path: Path, session_path: Path
) -> None:
    assert_parity(
        job, experiment_of(cell, session_path), layout_of(cell), shared_path, session_path
    )


def test_every_pair_is_in_a_cell() -> None:
    covered = {pair for cell in CELLS for pair in pairs(cell)}
    assert all(set(cell) == set(FACTORS) and why_not(cell) is None for cell in CELLS)
    assert covered.isdisjoint(IMPOSSIBLE)
    assert covered | set(IMPOSSIBLE) == set(all_pairs(FACTORS))
    assert len(IMPOSSIBLE) < len(covered) / 10


@pytest.mark.parametrize("pair", IMPOSSIBLE, ids=str)
def test_pairs_that_are_left_out_are_refused(pair: tuple, tmp_path: Path) -> None:
    cell = PLAIN | dict(pair)
    if "pp" not in dict(pair) and cell["schedule"] != PLAIN["schedule"]:
        cell["pp"] = "2"
    reason = why_not(cell)
    assert reason is not None
    if reason not in NOT_REFUSED:
        experiment = experiment_of(cell, tmp_path)
        keys = [*experiment.overrides, *layout_of(cell)]
        with pytest.raises(ConfigErrors):
            Config.load(experiment.config, keys, world_size=ranks_of(cell), for_training=True)
