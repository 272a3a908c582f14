"""Tensor-parallel layers as a user calls them, and what they send."""

import json
from pathlib import Path

import pytest

from tests.launching import torchrun

SCRIPT = Path(__file__).parent / "tensor_parallel_cases.py"


@pytest.mark.parametrize("world", [2, 4])
def test_layers_and_bytes(world: int) -> None:
    done = torchrun(world, str(SCRIPT), timeout=200).check()
    found = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert len(found) == world
    for row in found:
        assert row["failures"] == []
        assert row["checked"] >= 40
