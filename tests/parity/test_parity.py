"""The promise: the same loss curve on every layout. Each cell is compared with one process: 20 steps in float32, and 4
in float64, where rounding hides no error."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshtrain.config import Config
from meshtrain.data import IGNORE, open_data
from meshtrain.data.order import batch_samples, microbatches, share
from meshtrain.metrics.logger import read
from meshtrain.pipeline.schedule import NAMES
from tests.launching import run, side_by_side, torchrun
from tests.parity.cells import assert_same, train
from tests.parity.experiments import (
    EMA,
    LAYOUTS,
    QUICKSTART,
    SLOW,
    SLOW_STEPS,
    STEPS,
    Experiment,
    experiments,
    variants,
)


@dataclass(frozen=True)
class Trained:
    """A run: its metrics, and the line about its model's parameters."""

    rows: list[dict]
    parameters: str


CELLS = [
    (world, layout, name, more)
    for world, layouts in LAYOUTS.items()
    for layout, names in layouts
    for name in names
    for more in variants(world, layout, name)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def known(folder: Path) -> dict[str, Experiment]:
    return experiments(folder)


@pytest.fixture(scope="module")
def alone(folder: Path, known: dict[str, Experiment]) -> dict[str, Trained]:
    """Each experiment in one process."""
    printed = train(folder, 1, [(e, f"one/{i}", "{dp_shard: -1}", ()) for i, e in enumerate(known.values())])
    return {
        e.name: Trained(read(folder / f"one/{i}/metrics.jsonl"), line)
        for i, (e, line) in enumerate(zip(known.values(), printed, strict=True))
    }


@pytest.fixture(scope="module")
def references(alone: dict[str, Trained]) -> dict[str, list[dict]]:
    return {name: one.rows for name, one in alone.items()}


@pytest.fixture(scope="module")
def trained(folder: Path, known: dict[str, Experiment]) -> dict[tuple, Trained]:
    """Every cell of the table, one job per world size; that of 4 processes runs concurrently with the others."""

    def cells_of(*worlds: int) -> dict[tuple, Trained]:
        found = {}
        for world in worlds:
            cells = [cell for cell in CELLS if cell[0] == world]
            runs = [(known[name], f"{world}/{i}", layout, more) for i, (_, layout, name, more) in enumerate(cells)]
            for i, (cell, line) in enumerate(zip(cells, train(folder, world, runs), strict=True)):
                found[cell] = Trained(read(folder / f"{world}/{i}/metrics.jsonl"), line)
        return found

    one, other = side_by_side(lambda: cells_of(4), lambda: cells_of(*(world for world in LAYOUTS if world != 4)))
    return one | other


@pytest.mark.timeout(4000)  # the first cell waits for all the jobs
@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c[0]} {c[1]} {c[2]} {' '.join(c[3])}".strip())
def test_same_curve_as_one_process(
    cell: tuple, trained: dict[tuple, Trained], references: dict[str, list[dict]], known: dict[str, Experiment]
) -> None:
    name = cell[2]
    assert_same(trained[cell].rows, references[name], known[name].tolerance)


@pytest.mark.timeout(4000)
def test_every_layout_prints_the_same_number_of_parameters(
    trained: dict[tuple, Trained], alone: dict[str, Trained]
) -> None:
    """Weights shared by stages are counted once, too."""
    for cell, one in trained.items():
        assert one.parameters == alone[cell[2]].parameters, cell
    assert any("pp" in layout and "tied" in name for _, layout, name, _ in trained)
    tied, untied = (int(re.sub(r"\D", "", alone[name].parameters)) for name in ("staged, tied", "staged"))
    assert untied - tied == 256 * 32, "one of two tables of 256 tokens and 32 features"


@pytest.mark.timeout(4000)
def test_what_cp_sends_has_its_name(trained: dict[tuple, Trained]) -> None:
    """Keys and values are sent over `cp`, parameters over `fsdp`, all ranks that shard them."""
    rows = [one.rows[-1] for (_, layout, _, _), one in trained.items() if "cp" in layout]
    assert rows
    assert all(row["sent_bytes_cp"] > 0 and row["sent_bytes_fsdp"] > 0 for row in rows)
    assert not any("sent_bytes_dp_shard" in row for row in rows)


def test_the_loss_falls(references: dict[str, list[dict]]) -> None:
    """The parity of runs that learn nothing would prove little."""
    expected = {"float32": (20, 0.8), **dict.fromkeys(SLOW, (SLOW_STEPS, 0.95))}
    for name, rows in references.items():
        steps, share = expected.get(name, (STEPS, 0.97))
        if name in ("a frozen tied embedding", "gradients that stop") or name.startswith("lora"):
            share = 0.985  # the head, or everything before the stop, keeps its initial values
        assert len(rows) == steps
        assert rows[-1]["loss"] < share * rows[0]["loss"]


def test_averages_are_what_is_evaluated(references: dict[str, list[dict]]) -> None:
    averaged, plain = references[EMA][-1], references["ragged"][-1]
    assert averaged["loss"] == plain["loss"]
    assert averaged["eval_loss"] > plain["eval_loss"], "of a loss that falls an average lags behind"


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_has_its_microbatches(ranks: int, schedule: str, known: dict[str, Experiment]) -> None:
    """A number that the ranks do not divide, and on two ranks also twice the number of ranks."""
    counts = set()
    for world, layout, name, more in CELLS:
        if (world, layout, name) == (ranks, f"{{pp: {ranks}}}", "staged") and f"pipeline.schedule={schedule}" in more:
            size = Config.load(QUICKSTART, [*known[name].overrides, *more, f"layout={layout}"]).batch
            counts.add(microbatches(size.global_size, size.micro_size, 1))
    assert counts >= ({4, 3} if ranks == 2 else {5})


def test_ragged_labels_would_tell_an_average_of_averages(references: dict[str, list[dict]], folder: Path) -> None:
    """The ragged data is ragged enough: a rank's mean loss differs from the global mean far beyond the tolerance."""
    ragged = experiments(folder)["ragged"]
    config = Config.load(ragged.config, [*ragged.overrides, "layout={dp_shard: -1}"])
    data = open_data(config.data, n_outputs=256, seed=0, say=print)
    counts = []
    for step in range(STEPS):
        samples = batch_samples(0, step, 7, len(data.train))
        counts.append(
            [
                sum(int((data.train.item(samples[i], 0)[1] != IGNORE).sum()) for i in share(7, 4, rank))
                for rank in range(4)
            ]
        )
    assert any(0 in step for step in counts), "no rank ever has a share without a valid target"
    assert all(max(step) > 1.5 * sum(step) / 4 for step in counts)


@pytest.mark.parametrize("world", [1, 2])
def test_public_command(
    world: int, references: dict[str, list[dict]], known: dict[str, Experiment], folder: Path
) -> None:
    """A cell through the command line: torchrun, and plain python as a world of one."""
    e = known["float64"]
    layouts = {1: "{dp_replicate: -1}", 2: "{cp: -1}"}
    layout = f"layout={layouts[world]}"
    arguments = ["-m", "meshtrain.train", e.config, *e.overrides, layout, f"train.output={folder / f'command{world}'}"]
    if world == 1:
        run([sys.executable, *arguments]).check()
    else:
        torchrun(world, *arguments).check()
    assert_same(read(folder / f"command{world}" / "metrics.jsonl"), references["float64"], e.tolerance)
