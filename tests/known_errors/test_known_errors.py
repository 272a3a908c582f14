"""Compositions in which others had silent numeric errors are what one process computes, or are
refused; and each of these errors, planted here, is noticed."""

import re
from pathlib import Path

import pytest

import meshtrain.checkpoint.commit
from meshtrain.errors import InputError
from meshtrain.job.process import Job
from tests import ranks
from tests.known_errors.mistakes import MISTAKES
from tests.known_errors.page import FIRST, PAGE, table
from tests.known_errors.rows import (
    ERRORS,
    PLAYS,
    Play,
    experiment_of,
    parity_cells,
    shortened,
)
from tests.parity.experiments import Experiment
from tests.parity.runs import assert_parity, train_alone, train_here

OWN = [ranks.row(play.ranks, play, name=name) for name, play in PLAYS.items() if not play.cell]
PLANTED = [
    ranks.row(PLAYS[error.play].ranks, error.name, PLAYS[error.play], name=error.name)
    for error in ERRORS
]


def assert_equal(
    job: Job, play: Play, experiment: Experiment, shared_path: Path, session_path: Path
) -> None:
    """Asserts that a play is what it is in one process."""
    overrides = [*play.more, f"layout={play.layout}"]
    if play.resumed_from is not None:
        first = ["checkpoint.every=2", f"layout={play.resumed_from}"]
        train_here(job, experiment, first, shared_path)
        overrides.append(f"checkpoint.resume={shared_path}/checkpoints/step_0000002")
    assert_parity(job, experiment, overrides, shared_path, session_path)


@pytest.mark.parametrize(("job", "play"), OWN, indirect=["job"])
def test_play(job: Job, play: Play, shared_path: Path, session_path: Path) -> None:
    experiment = experiment_of(play, session_path)
    if play.refused is None:
        assert_equal(job, play, experiment, shared_path, session_path)
        return
    with pytest.raises(InputError, match=re.escape(play.refused)):
        train_here(job, experiment, [*play.more, f"layout={play.layout}"], shared_path)


@pytest.mark.slow
@pytest.mark.parametrize(("job", "name", "play"), PLANTED, indirect=["job"])
def test_mistake_is_noticed(
    job: Job,
    name: str,
    play: Play,
    shared_path: Path,
    session_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = shortened(play, experiment_of(play, session_path))
    train_alone(job, experiment, session_path)  # without the mistake
    # A checkpoint is refused where replicas differ: here the curve has to tell.
    monkeypatch.setattr(meshtrain.checkpoint.commit, "find_divergence", lambda *_: [])
    MISTAKES[name](monkeypatch)
    with pytest.raises(AssertionError, match="step "):
        assert_equal(job, play, experiment, shared_path, session_path)


def test_each_error_has_its_mistake_and_its_test() -> None:
    assert {error.name for error in ERRORS} == set(MISTAKES)
    assert {error.play for error in ERRORS} == set(PLAYS)
    for play in PLAYS.values():
        if play.cell is not None:
            [cell] = re.findall(r"\[(.*)\]$", play.test)
            assert not parity_cells(play.cell)[cell].marks, (
                f"{play.test}: `make test` leaves it out"
            )


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert FIRST in text
    assert table() in text, "run python -m tests.known_errors.page"
