"""DDP's buckets and FSDP's units, beyond what the parity table sees."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshtrain.errors import AgreedError
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.metrics.logger import read
from meshtrain.parallel import ddp, fsdp
from meshtrain.parallel.ddp import _group_into_buckets
from meshtrain.parallel.fsdp import _group_into_units
from meshtrain.parallel.parallelize import ParallelOptions, apply_tensor_parallel, parallelize
from tests.launching import forked
from tests.parity.experiments import QUICKSTART, SMALL


def test_buckets_are_full_and_of_one_type() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (10, 20, 30)] + [nn.Parameter(torch.zeros(5).double())]
    assert [len(bucket) for bucket in _group_into_buckets(parameters)] == [3, 1]
    large = nn.Parameter(torch.zeros(ddp.BUCKET_BYTES // 4))
    assert [len(bucket) for bucket in _group_into_buckets([parameters[0], large, parameters[1]])] == [1, 1, 1]


def test_units_gather_together(monkeypatch) -> None:
    """Small blocks join the next one, large ones stand alone, what is shared or left over stays with the model."""
    monkeypatch.setattr(fsdp, "MIN_UNIT_SIZE", 100)
    blocks = [nn.Linear(n, 1, bias=False) for n in (60, 60, 200, 30, 80, 10)]
    model = nn.Sequential(*blocks)
    assert _group_into_units(model, blocks) == [[blocks[0], blocks[1]], [blocks[2]], [blocks[3], blocks[4]]]
    blocks[2].weight = nn.Parameter(torch.zeros(1, 60))
    blocks[0].weight = blocks[2].weight
    assert _group_into_units(model, blocks) == [[blocks[1], blocks[3], blocks[4]]]
    assert _group_into_units(model, [model]) == []
    assert _group_into_units(model, [*blocks[:2], *blocks[3:]]) == [[blocks[1], blocks[3], blocks[4]]]  # 2 is no block


def test_ranks_that_gather_other_blocks_are_told(tmp_path: Path) -> None:
    """Each rank gathers as many blocks of the same size, so that no message is missing and every loss is finite."""
    keys = (*SMALL, "model.name=tests/models/chosen.py", "layout={dp_shard: 2}", "batch.global_size=2")
    keys = (*keys, "batch.micro_size=1", "parallel.verify=false", "checkpoint.every=1", f"data.cache={tmp_path}")
    done = forked(2, "-m", "meshtrain.train", QUICKSTART, *keys, f"train.output={tmp_path / 'run'}")
    assert done.status == 2
    assert done.err.count("the model's forward ran its blocks in another order on some ranks") == 1
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert f"step {len(rows) + 1}: the model's forward" in done.err, "what came before is kept"


def test_batch_norm_is_refused_on_several_data_ranks(tmp_path: Path) -> None:
    keys = ("model.name=tests/models/batch_norm.py", "layout={dp_shard: 2}", f"train.output={tmp_path / 'run'}")
    done = forked(2, "-m", "meshtrain.train", "configs/digits.yaml", *keys)
    assert done.status == 2
    assert done.err.count("norm is a BatchNorm2d, which computes with the samples that a rank happens to have") == 1
    mesh = build_mesh(Layout({"dp_shard": 1}))
    parallelize(nn.BatchNorm1d(3), mesh)  # one data rank has all of the batch


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"dp_replicate": 2}, "table is an embedding with max_norm, which goes by the tokens that a rank happens to"),
        ({"dp_replicate": 3}, "the parameter gain has a hook behind the accumulation of its gradient"),
        ({"dp_shard": 2}, "the parameter gain has no dim that dp_shard or cp could cut"),
        ({"cp": 2}, r"the parameter gain of shape \(0, 4\) has no elements that dp_shard or cp could cut"),
        (
            {"tp": 2},
            "the parameter layer.weight has a hook on its gradient, which its parts on several ranks would not",
        ),
    ],
)
def test_parameters_that_copies_or_parts_would_change_are_refused(layout: dict[str, int], said: str) -> None:
    model: Any = nn.Module()
    model.gain, model.layer = nn.Parameter(torch.ones((0, 4) if "cp" in layout else ())), nn.Linear(2, 2)
    model.table = nn.Embedding(4, 2, max_norm=1.0 if layout == {"dp_replicate": 2} else None)
    if layout == {"dp_replicate": 3}:
        model.gain.register_post_accumulate_grad_hook(lambda parameter: None)
    if "tp" in layout:
        model.layer.weight.register_hook(lambda grad: grad / 2)
    mesh = Mesh(Layout(layout), 0, "cpu", None, {})
    with pytest.raises(AgreedError, match=said):
        apply_tensor_parallel(model, mesh, ParallelOptions())
