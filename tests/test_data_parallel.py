"""DDP's buckets and FSDP's units, beyond what the parity table sees."""

import json
from pathlib import Path

import torch
from torch import nn

from meshtrain.parallel import data
from meshtrain.parallel.data import _split, _units
from tests.launching import forked

SCRIPT = Path(__file__).parent / "data_parallel_cases.py"


def test_gradients_are_summed_whatever_the_loop_does() -> None:
    """On three ranks: accumulation, a parameter that only one rank uses, zero_grad to None or to zero, other dtypes."""
    done = forked(3, SCRIPT).check()
    found = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert len(found) == 3
    for row in found:
        assert row["failures"] == []
        assert row["checked"] >= 12


def test_buckets_are_full_and_of_one_type() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (10, 20, 30)] + [nn.Parameter(torch.zeros(5).double())]
    assert [len(bucket) for bucket in _split(parameters)] == [3, 1]
    large = nn.Parameter(torch.zeros(data.BUCKET_BYTES // 4))
    assert [len(bucket) for bucket in _split([parameters[0], large, parameters[1]])] == [1, 1, 1]


def test_units_gather_together(monkeypatch) -> None:
    """Small blocks join the next one, large ones stand alone, what is shared or left over stays with the model."""
    monkeypatch.setattr(data, "SMALL", 100)
    blocks = [nn.Linear(n, 1, bias=False) for n in (60, 60, 200, 30, 80, 10)]
    model = nn.Sequential(*blocks)
    assert _units(model, blocks) == [[blocks[0], blocks[1]], [blocks[2]], [blocks[3], blocks[4]]]
    blocks[2].weight = nn.Parameter(torch.zeros(1, 60))
    blocks[0].weight = blocks[2].weight
    assert _units(model, blocks) == [[blocks[1], blocks[3], blocks[4]]]
    assert _units(model, [model]) == []
