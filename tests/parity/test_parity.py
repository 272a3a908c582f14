"""The promise, for what test_pairs.py has no factor for: data, users' models, settings of one kind
of layout, larger meshes. An experiment that has something of its own is trained once by `make
test`, and the whole table by `make test-all`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.config import Config
from meshtrain.data import IGNORE, open_data
from meshtrain.data.order import batch_samples, microbatches, share
from meshtrain.job.process import Job
from meshtrain.metrics.logger import read
from meshtrain.pipeline.schedule import NAMES
from tests import ranks
from tests.launching import torchrun
from tests.parity.cells import assert_same
from tests.parity.experiments import EXPERT_MODELS, QUICKSTART, STEPS, experiments
from tests.parity.runs import assert_parity, train_alone

Row = tuple[int, str, str, tuple[str, ...]]  # ranks, layout, experiment, more overrides


def cells() -> Iterator[Row]:
    """The rows of layouts.yaml, with a cell for each schedule where it says `every`."""
    table = yaml.safe_load(Path(__file__).with_name("layouts.yaml").read_text())
    for world, layouts in table.items():
        for layout, by_experiment in layouts.items():
            for name, rows in by_experiment.items():
                for row in rows if isinstance(rows, list) else [rows or ""]:
                    for schedule in NAMES if "=every" in row else ["every"]:
                        yield world, layout, name, tuple(row.replace("every", schedule).split())


CELLS = list(cells())
# Experiments that other tests of `make test` show but for a few settings: test_pairs.py, and for
# what is compiled tests/parallel/test_compile.py.
SHOWN_ELSEWHERE = {
    *(
        "float64",
        "selective",
        "averaged weights",
        "digits",
        "lora",
        "lora, experts",
        "lora, latent attention",
    ),
    *("muon", "muon, experts", "float8", "attached", "attached, recomputed", "qwen3"),
    "attached, even",
    "predictions, latent",
    *EXPERT_MODELS,
}


def parameters() -> list[Any]:
    """The rows of the table: `slow` but for the first of each experiment that has something of its
    own, and the first of each layout of three ranks, which divide little."""
    rows = []
    trained = set(SHOWN_ELSEWHERE)
    layouts = set()
    for world, layout, name, more in CELLS:
        first_of_three = world == 3 and layout not in layouts
        slow = name in trained and not first_of_three
        trained.add(name)
        layouts.add(layout)
        rows.append(
            ranks.row(
                world,
                layout,
                name,
                more,
                name=f"{layout} {name} {' '.join(more)}".strip(),
                slow=slow,
            )
        )
    return rows


@pytest.mark.parametrize(("job", "layout", "name", "more"), parameters(), indirect=["job"])
def test_same_curve_as_one_process(
    job: Job, layout: str, name: str, more: tuple[str, ...], shared_path: Path, session_path: Path
) -> None:
    experiment = experiments(session_path)[name]
    assert_parity(job, experiment, [*more, f"layout={layout}"], shared_path, session_path)


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_averages_are_what_is_evaluated(job: Job, session_path: Path) -> None:
    known = experiments(session_path)
    averaged, plain = (
        train_alone(job, known[name], session_path).rows[-1]
        for name in ("averaged weights", "ragged")
    )
    assert averaged["loss"] == plain["loss"]
    assert averaged["eval_loss"] > plain["eval_loss"], "of a loss that falls an average lags behind"


@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_has_its_microbatches(world: int, tmp_path: Path) -> None:
    """A number that the ranks do not divide, and on two ranks also twice the number of ranks."""
    staged = experiments(tmp_path)["staged"].overrides
    rows = [
        more
        for ranks, layout, name, more in CELLS
        if (ranks, layout, name) == (world, f"{{pp: {world}}}", "staged")
    ]
    for schedule in NAMES:
        counts = set()
        for more in rows:
            if f"pipeline.schedule={schedule}" in more:
                batch = Config.load(QUICKSTART, [*staged, *more, f"layout={{pp: {world}}}"]).batch
                counts.add(microbatches(batch.global_size, batch.micro_size, 1))
        assert counts >= ({4, 3} if world == 2 else {5}), schedule


def test_ragged_labels_would_tell_an_average_of_averages(tmp_path: Path) -> None:
    """The ragged data is ragged enough: a rank's mean loss differs from the global mean far beyond
    the tolerance."""
    ragged = experiments(tmp_path)["ragged"]
    config = Config.load(ragged.config, [*ragged.overrides, "layout={dp_shard: -1}"])
    data = open_data(config.data, n_outputs=256, seed=0, say=print)
    counts = []
    for step in range(STEPS):
        samples = batch_samples(0, step, 7, len(data.train))
        shares = [
            [data.train.item(samples[i], 0)[1] for i in share(7, 4, rank)] for rank in range(4)
        ]
        counts.append(
            [sum(int((targets != IGNORE).sum()) for targets in share) for share in shares]
        )
    assert any(0 in step for step in counts), "no rank ever has a share without a valid target"
    assert all(max(step) > 1.5 * sum(step) / 4 for step in counts)


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_public_command(job: Job, session_path: Path, tmp_path: Path) -> None:
    """A cell through the command line."""
    experiment = experiments(session_path)["float64"]
    arguments = [
        experiment.config,
        *experiment.overrides,
        "layout={cp: -1}",
        f"train.output={tmp_path}",
    ]
    torchrun(2, "-m", "meshtrain.train", *arguments).check()
    assert_same(
        read(tmp_path / "metrics.jsonl"),
        train_alone(job, experiment, session_path).rows,
        experiment.tolerance,
    )
