"""For all tests of checkpoints: what is missing is missing, and not waited for."""

import pytest

from meshtrain.job import storage


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES_S", (0.0, 0.0))
