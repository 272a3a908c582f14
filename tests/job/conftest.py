"""What several tests of jobs need."""

import pytest

from meshtrain.job.watchdog import deadlines, diagnose
from tests.checkpoint.going_on import small_run
from tests.job.fakes import FakeTime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The clock of deadlines and of the rank that decides, which looks a second time at once."""
    time = FakeTime()
    for module in (deadlines, diagnose):
        monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(diagnose, "MOVES_S", 0.0)
    return time


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_run(tmp_path_factory.mktemp("small")))
