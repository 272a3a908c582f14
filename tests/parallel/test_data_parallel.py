"""DDP's buckets and FSDP's units, beyond what the parity table sees."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.errors import AgreedError
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.metrics.logger import read
from meshtrain.parallel import ddp, fsdp
from meshtrain.parallel.ddp import _group_into_buckets
from meshtrain.parallel.fsdp import _group_into_units, _ReduceScatter
from meshtrain.parallel.options import ParallelOptions
from meshtrain.parallel.parallelize import parallelize
from meshtrain.parallel.torch_private import fsdp_collectives
from meshtrain.parallel.verify import Moment, Subject, check_model
from tests.launching import forked
from tests.parity.experiments import QUICKSTART, SMALL


def test_buckets_are_full_and_of_one_type() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (10, 20, 30)] + [
        nn.Parameter(torch.zeros(5).double())
    ]
    assert [len(bucket) for bucket in _group_into_buckets(parameters)] == [3, 1]
    large = nn.Parameter(torch.zeros(ddp.BUCKET_BYTES // 4))
    assert [
        len(bucket) for bucket in _group_into_buckets([parameters[0], large, parameters[1]])
    ] == [1, 1, 1]


def test_units_gather_together(monkeypatch) -> None:
    """Small blocks join the next one, large ones stand alone, what is shared or left over stays
    with the model."""
    monkeypatch.setattr(fsdp, "MIN_UNIT_SIZE", 100)
    blocks = [nn.Linear(n, 1, bias=False) for n in (60, 60, 200, 30, 80, 10)]
    model = nn.Sequential(*blocks)
    assert _group_into_units(model, blocks) == [
        [blocks[0], blocks[1]],
        [blocks[2]],
        [blocks[3], blocks[4]],
    ]
    blocks[2].weight = nn.Parameter(torch.zeros(1, 60))
    blocks[0].weight = blocks[2].weight
    assert _group_into_units(model, blocks) == [[blocks[1], blocks[3], blocks[4]]]
    assert _group_into_units(model, [model]) == []
    # 2 is no block
    assert _group_into_units(model, [*blocks[:2], *blocks[3:]]) == [
        [blocks[1], blocks[3], blocks[4]]
    ]


def test_the_result_of_a_reduction_has_the_type_of_its_message() -> None:
    """FSDP allocates the input and the output of a reduction by the same call, in turn; a backward
    that fails after the first one does not turn them round."""
    mesh: Any = SimpleNamespace(size=lambda axis: 4)
    memory = fsdp_collectives.DefaultAllocMixin()
    reduce = _ReduceScatter(mesh, "fsdp", nullcontext, memory, torch.bfloat16)

    def allocate(numel: int) -> torch.dtype:
        device = torch.device("cpu")
        return reduce.allocate((numel,), dtype=torch.float32, device=device).dtype

    for _ in range(2):
        assert allocate(8) == torch.float32
        assert allocate(2) == torch.bfloat16
    assert allocate(8) == torch.float32, "interrupted after this one"
    assert allocate(8) == torch.float32
    assert allocate(2) == torch.bfloat16


def test_ranks_that_gather_other_blocks_are_told(tmp_path: Path) -> None:
    """Each rank gathers as many blocks of the same size, so that no message is missing and every
    loss is finite."""
    keys = (
        *SMALL,
        "model.name=tests/models/chosen.py",
        "layout={dp_shard: 2}",
        "batch.global_size=2",
    )
    keys = (
        *keys,
        "batch.micro_size=1",
        "parallel.verify=false",
        "checkpoint.every=1",
        f"data.cache={tmp_path}",
    )
    done = forked(2, "-m", "meshtrain.train", QUICKSTART, *keys, f"train.output={tmp_path / 'run'}")
    assert done.status == 2
    assert done.err.count("the model's forward ran its blocks in another order on some ranks") == 1
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert f"step {len(rows) + 1}: the model's forward" in done.err, "what came before is kept"


def hooked(register: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    register(parameter, lambda grad: None)
    return parameter


@pytest.mark.parametrize(
    ("layout", "name", "part", "message"),
    [
        (
            {"dp_shard": 2},
            "norm",
            nn.BatchNorm1d(3),
            r"norm is a BatchNorm1d, which computes with the samples that a "
            r"rank.*parallel\.sync_batch_norm: true",
        ),
        (
            {"dp_replicate": 2},
            "words",
            nn.Embedding(4, 2, max_norm=1.0),
            "words is an embedding with max_norm, which",
        ),
        (
            {"dp_replicate": 2},
            "gain",
            hooked(Tensor.register_post_accumulate_grad_hook),
            "the parameter gain has a hook behind the accumulation of its gradient",
        ),
        (
            {"dp_shard": 2},
            "gain",
            nn.Parameter(torch.ones(())),
            "the parameter gain has no dim that dp_shard or cp could",
        ),
        (
            {"cp": 2},
            "gain",
            nn.Parameter(torch.ones(0, 4)),
            r"gain of shape \(0, 4\) has no elements that dp_shard or cp",
        ),
        (
            {"tp": 2},
            "gain",
            hooked(Tensor.register_hook),
            "the parameter gain has a hook on its gradient, which its parts on several ranks would "
            "not",
        ),
    ],
)
def test_what_several_ranks_would_change_is_refused(
    layout: dict[str, int], name: str, part: Any, message: str
) -> None:
    model = nn.Module()
    setattr(model, name, part)
    mesh = Mesh(Layout(layout), 0, "cpu", None, {})
    subject = Subject(
        model=model, layout=mesh.layout, mesh=mesh, options=ParallelOptions(verify=False)
    )
    with pytest.raises(AgreedError, match=message):
        check_model(Moment.PLAIN, subject)


def test_one_data_rank_has_all_of_the_batch() -> None:
    parallelize(nn.BatchNorm1d(3), build_mesh(Layout({"dp_shard": 1})))
