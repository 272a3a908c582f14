"""Tensor-parallel layers as a user calls them, what they send, and what a block keeps."""

import json
from pathlib import Path

import pytest

from tests.launching import torchrun

SCRIPT = Path(__file__).parent / "tensor_parallel_cases.py"


@pytest.mark.parametrize(("world", "least"), [(1, 12), (2, 60), (4, 60)])
def test_layers_bytes_and_saved_tensors(world: int, least: int) -> None:
    done = torchrun(world, str(SCRIPT), timeout=200).check()
    found = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert len(found) == world
    for row in found:
        assert row["failures"] == []
        assert row["checked"] >= least
