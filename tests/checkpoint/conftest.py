"""For all checkpoint tests: missing files are reported at once, without retries over time."""

import pytest

from meshtrain.job import storage


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES_S", (0.0, 0.0))
