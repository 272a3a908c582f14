"""The table errors.yaml: errors of others, and the plays of their compositions."""

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.parity.experiments import (
    QUICKSTART,
    TABLE,
    Experiment,
    experiments,
    overrides_of,
    write_ragged,
)

FILE = Path(__file__).with_name("errors.yaml")
ROWS: dict[str, Any] = yaml.safe_load(FILE.read_text())
# Of a cell with a mistake in it. The check before the first step may notice it, too.
SHORT = ("train.steps=2", "train.eval_every=2", "train.eval_samples=9", "parallel.verify=false")


@dataclass(frozen=True)
class Play:
    """A composition that is compared with one process.

    Attributes:
        more: overrides that one process does not have.
        test: the test that compares.
        cell: of the tests of parity: its file and its experiment; None: it is played here.
        resumed_from: the layout of the first two steps; None: the run is not interrupted.
        refused: a part of the sentence with which it is refused; None: it is equal.
    """

    name: str
    ranks: int
    layout: str
    experiment: str
    more: tuple[str, ...]
    test: str
    cell: str | None = None
    config: str = QUICKSTART
    resumed_from: str | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Error:
    """An error of others. `threads`: OWNER/REPOSITORY/KIND/NUMBER; `ours`: where we had it too."""

    name: str
    threads: Sequence[str]
    happened: str
    composition: str
    play: str
    ours: str | None = None


def play_of(name: str) -> Play:
    row: dict[str, Any] = dict(ROWS["plays"][name])
    if "cell" in row:
        file, cell = row["cell"].split(": ", 1)
        return _of_cell(name, file, cell)
    ranks = row.pop("ranks")
    test = f"tests/known_errors/test_known_errors.py::test_play[{ranks}-ranks-{name}]"
    return Play(name, ranks, more=tuple(row.pop("more", "").split()), test=test, **row)


@cache
def parity_cells(file: str) -> dict[str, Any]:
    """The parameters of a test of parity, by their name."""
    module = importlib.import_module(f"tests.parity.{file}")
    rows = module.parameters() if file == "test_parity" else module.cells()
    return {row.id: row for row in rows}


def _of_cell(name: str, file: str, cell: str) -> Play:
    """Raises KeyError: there is no such cell."""
    ranks, layout, *values = parity_cells(file)[cell].values
    # In each file the experiment is the first text, and the overrides are all that is no text.
    experiment, *_ = [value for value in values if isinstance(value, str)]
    [more] = [value for value in values if not isinstance(value, str)]
    test = f"tests/parity/{file}.py::test_same_curve_as_one_process[{cell}]"
    return Play(name, ranks, layout, experiment, more, test, cell=file)


PLAYS = {name: play_of(name) for name in ROWS["plays"]}
ERRORS = [Error(name, **row) for name, row in ROWS["errors"].items()]


def experiment_of(play: Play, folder: Path) -> Experiment:
    """What a play trains in one process; writes its data into `folder`."""
    if play.cell is None:
        write_ragged(folder / "ragged.jsonl")
        write_packed(folder / "packed.jsonl")
        keys = tuple(key.replace("DIR", str(folder)) for key in _overrides(play.experiment))
        return Experiment(f"known errors, {play.experiment}", play.config, keys, 1e-9, falls_to=9.0)
    if play.cell == "test_parity":
        return experiments(folder)[play.experiment]
    module: Any = importlib.import_module(f"tests.parity.{play.cell}")
    return module.EXPERIMENTS.get(play.experiment) or module.experts(folder)


def write_packed(path: Path) -> None:
    """Texts so short that each sample has several."""
    lines = [json.dumps({"text": f"{i * i} is the square of {i}."}) + "\n" for i in range(400)]
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text("".join(lines))
    unfinished.rename(path)  # several ranks may write the same at once


def shortened(play: Play, experiment: Experiment) -> Experiment:
    """The experiment of a cell in few steps, in which a mistake shows."""
    if play.cell is None:
        return experiment
    return replace(experiment, overrides=(*experiment.overrides, *SHORT), falls_to=9.0)


def _overrides(name: str) -> list[str]:
    if name not in ROWS["experiments"]:
        return list(overrides_of(name, "parts" if name in TABLE["parts"] else "on text"))
    overrides: list[str] = []
    for entry in ROWS["experiments"][name]:
        overrides += [entry] if "=" in entry else _overrides(entry)
    return overrides
