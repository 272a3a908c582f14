"""What `meshtrain search` says on stderr while it looks."""

from types import SimpleNamespace
from typing import Any

import pytest

from meshtrain.cli.search import FEWEST, FIRST_TABLE_S, LATE_S, PROGRESS_S, Progress
from meshtrain.foresight.estimate import Estimate
from meshtrain.foresight.space import Candidate
from meshtrain.layout import Layout

EVERY_S = PROGRESS_S[1]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def candidate(layout: dict[str, int]) -> Candidate:
    return Candidate(
        Layout(layout), {"batch.micro_size": 2}, estimate=Estimate(12.34, 2**30, 2**31)
    )


def search(looked_at: int, fitting: int, **state: Any) -> Any:
    """A search that has estimated so many candidates, of which so many may fit."""
    first_results = [candidate({"pp": 4, "tp": 2}), candidate({"dp_shard": 8})]
    unranked = {"is_ranked": False, "looked": 0, "predicted": 0, "places": {}, "best": 0.0}
    return SimpleNamespace(
        firsts=[None] * looked_at,
        heap=[None] * fitting,
        first_results=lambda: first_results,
        **unranked | state,
    )


def said(progress: Progress, clock: Clock, at: float, state: Any, capsys: Any) -> list[str]:
    """The lines on stderr when a search in this state calls at this time, in seconds."""
    clock.now = at
    progress(state)
    lines: list[str] = capsys.readouterr().err.splitlines()
    return lines


def test_a_quick_search_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = Progress(0.0, clock)
    assert said(progress, clock, 1.0, search(100, 50), capsys) == []
    ranked = search(200, 100, is_ranked=True)
    assert said(progress, clock, FIRST_TABLE_S, ranked, capsys) == []
    # What it would have shown then is old when there are predictions.
    assert said(progress, clock, FIRST_TABLE_S + 1, ranked, capsys) == []


def test_a_late_search_shows_its_estimates_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the first candidates, as soon as enough of them may fit, and those of all."""
    clock = Clock()
    progress = Progress(0.0, clock)
    assert said(progress, clock, LATE_S, search(100, FEWEST), capsys) == []
    late = LATE_S + 0.5
    assert said(progress, clock, late, search(100, FEWEST - 1), capsys) == []
    title, heading, *rows = said(progress, clock, late, search(1100, FEWEST), capsys)
    assert title == f"a first look at the first 1,100 candidates, by estimates ({late} s)"
    assert heading.split() == ["layout", "micro", "step", "memory"]
    # A pipeline without a schedule takes no less than this with any.
    assert [row.strip() for row in rows] == [
        "pp 4, tp 2  2      from 12.3 s  from 1.0 GiB",
        "dp_shard 8  2      ~ 12.3 s     from 1.0 GiB",
    ]
    assert said(progress, clock, late + 1, search(1200, FEWEST), capsys) == []
    ranked = search(1300, FEWEST, is_ranked=True)
    title, *_ = said(progress, clock, late + 1, ranked, capsys)
    assert title == f"a first look at 1,300 candidates, by estimates ({late + 1} s)"
    assert said(progress, clock, late + 1, ranked, capsys) == []


def test_a_search_between_shows_all_of_its_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = Progress(0.0, clock)
    ranked = search(30, 0, is_ranked=True)
    assert len(said(progress, clock, FIRST_TABLE_S + 0.5, ranked, capsys)) == 4


def test_lines_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = Progress(0.0, clock)
    progress.tabled = 5000  # no tables here
    assert said(progress, clock, EVERY_S, search(1, 1), capsys) == ["1 candidate (10 s)"]
    assert said(progress, clock, 1.9 * EVERY_S, search(2, 1), capsys) == []
    ranked = search(5000, 1, is_ranked=True, looked=7)
    [line] = said(progress, clock, 2 * EVERY_S, ranked, capsys)
    assert line == "7 of 5,000 candidates looked at, 0 predicted (20 s)"
    found = search(5000, 1, is_ranked=True, looked=7, predicted=3, places={"layout": 1}, best=0.5)
    [line] = said(progress, clock, 3.2 * EVERY_S, found, capsys)
    assert line == "7 of 5,000 candidates looked at, 3 predicted, the best so far 0.5 s (32 s)"
