"""What several tests of jobs need."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import meshtrain.run.results
import meshtrain.run.step_logger
from meshtrain.job import signals
from meshtrain.job.watchdog import deadlines, diagnose
from tests.checkpoint.going_on import Case, alone, small_run
from tests.job.fakes import FakeTime


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    """A rank that is told a verdict ignores signals, and so would the jobs that are started after
    it."""
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The clock of deadlines, of limits, and of the rank that decides, which looks a second time at
    once."""
    time = FakeTime()
    for module in (deadlines, diagnose, signals):
        monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(diagnose, "MOVES_S", 0.0)
    return time


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_run(tmp_path_factory.mktemp("small")))


@pytest.fixture
def go(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Trains in this process, and leaves out what takes long."""
    monkeypatch.setattr(
        meshtrain.run.step_logger, "sample_flops", lambda *_: (None, "FLOPs are not counted")
    )
    monkeypatch.setattr(
        meshtrain.run.step_logger, "peak_flops", lambda *_: (1.0, "a peak of 1 FLOP/s")
    )
    monkeypatch.setattr(meshtrain.run.results, "plot_loss", lambda *_: "no picture is drawn")
    monkeypatch.setattr(signals, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(signals, "ANSWERS_S", 60.0)

    def go(*overrides: str, **case: Any) -> dict[str, Any]:
        return alone(
            Case(small, (f"train.output={tmp_path}/run", "data.workers=0", *overrides), **case)
        )

    return go
