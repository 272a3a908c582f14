"""A run that is killed at any moment ends with the bits of one that is not; .ci/run kills
torchrun's jobs 50 times."""

from pathlib import Path

import pytest

from tests.checkpoint import kill


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_some_kills_leave_no_trace(tmp_path: Path) -> None:
    found = kill.go(tmp_path, kills=6, seed=7, forked=True)
    assert len(found) == 6
    assert {one.moment for one in found} == set(kill.MOMENTS)
    assert "all" in {one.whom for one in found}
    assert sum(one.local for one in found) == 3
    assert any(one.whom != "all" for one in found)
