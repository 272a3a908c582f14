"""tools/mutate.py chooses changes that are one place each and still Python, the same ones each
time."""

import sys
from pathlib import Path

import pytest

from tests.launching import run

REPO = Path(__file__).resolve().parent.parent
TOOL = REPO / "tools" / "mutate.py"
ROOMS = ("layout", "loss", "parallel", "pipeline", "optim", "data", "checkpoint")


@pytest.mark.slow
def test_mutations_are_spread_over_rooms_and_kinds() -> None:
    listed = run([sys.executable, str(TOOL), "--list", "--count", "42"]).check().out
    lines = listed.splitlines()
    assert len({line.split()[0] for line in lines}) == 42, "each in a line of its own"
    for room in ROOMS:
        assert (
            sum(line.startswith((f"meshtrain/{room}/", f"meshtrain/{room}.py")) for line in lines)
            == 6
        )
    kinds = [line.split()[1].rstrip(":") for line in lines]
    assert set(kinds) == {"operator", "collective", "index", "branch"}
    again = run([sys.executable, str(TOOL), "--list", "--count", "42"]).check().out
    assert again == listed
    other = run([sys.executable, str(TOOL), "--list", "--count", "42", "--seed", "1"]).check().out
    assert other != listed
