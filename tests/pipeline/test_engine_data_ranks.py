"""Pipelines whose stages are replicated or sharded: gradients are reduced once a step, at the right
time, and copies stay equal to the bit."""

from collections import Counter
from itertools import chain
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.parallel import fsdp
from meshtrain.parallel.sharding import local_part
from meshtrain.pipeline.actions import Kind
from tests.pipeline.steps import TIED, Step, compare_gradients, pipeline, train

FLOAT64 = 8  # bytes
pytestmark = [pytest.mark.ranks(4), pytest.mark.usefixtures("small_units")]


def parts(stage: Any) -> int:
    """Into how many reductions the gradients of a stage are cut."""
    if not isinstance(stage, FSDPModule):
        return len(stage.gradient_syncs[0]._buckets)
    states = {
        module._get_fsdp_state() for module in stage.modules() if isinstance(module, FSDPModule)
    }
    return sum(state._fsdp_param_group is not None for state in states)


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
@pytest.mark.parametrize("schedule", ["1f1b", "looped-bfs", "zbv"])
def test_reductions(job: Job, axis: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a stage start within its last backward, or right after its last weight gradients.
    Nothing waits for them before the end of the last action. FSDP gathers a stage once."""
    mesh = build_mesh(Layout({"pp": 2, axis: 2}))
    model, replicated = pipeline(mesh, schedule, 6), axis == "dp_replicate"
    model.run(Step(6))
    model.zero_grad()
    step, reduce = Step(6), dist.all_reduce

    def all_reduce(tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        work = reduce(tensor, group=group, async_op=async_op)
        if group is not mesh.group(axis):
            return work
        step.add("start")
        return Mock(wait=step.adding("wait", work.wait))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: step.add("gradient"))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(fsdp, "reduce_scatter", step.adding("start", fsdp.reduce_scatter))
    mesh.comm_bytes.restart()
    model.run(step)
    size = sum(p.numel() for p in model.parameters()) * FLOAT64
    sharded = {"all_gather": size // 2, "reduce_scatter": size // 2}
    assert mesh.comm_bytes.by_kind(axis) == ({"all_reduce": size} if replicated else sharded)

    actions = model.schedule.actions_of(mesh.index("pp"))
    last = {action.stage: action for action in actions}
    starts = [event for event in step.events if event.kind == "start"]
    assert Counter(start.action for start in starts) == {
        last[stage]: parts(model.stage(stage)) for stage in last
    }
    assert all(start.running == (start.action.kind is not Kind.WEIGHT_GRAD) for start in starts)
    for action in last.values():
        kinds = step.kinds(action)
        if replicated and "start" in kinds:
            assert "gradient" in kinds[kinds.index("start") :]
    waits = [(event.action, event.running) for event in step.events if event.kind == "wait"]
    assert waits == [(actions[-1], False)] * (len(starts) if replicated else 0)
    compare_gradients(model, step, data_ranks=2)


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_copies_of_a_tied_weight_stay_equal(job: Job, axis: str, schedule: str) -> None:
    mesh = build_mesh(Layout({"pp": 2, axis: 2}))
    model, _ = train(mesh, schedule, 3, TIED)
    weights = [p for name, p in model.named_parameters() if name == "model.embed_tokens.weight"]
    copies: list[Any] = [None, None]
    dist.all_gather_object(
        copies, [local_part(weight)[0].detach() for weight in weights], mesh.group("pp")
    )
    first, second = chain(*copies)
    assert torch.equal(first, second)


SPLITTING = ("zb-h1", "zb-h2", "interleaved-zb", "zbv", "v-half", "v-min", "dualpipev")


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=[] if name == "zbv" else pytest.mark.slow) for name in SPLITTING],
)
@pytest.mark.parametrize(("precision", "microbatches"), [("float16", 2), ("bfloat16", 5)])
def test_sharded_stages_have_the_bits_of_copies_in_16_bits(
    job: Job, schedule: str, precision: str, microbatches: int
) -> None:
    """FSDP adds up in float32, too, what weight gradients that were put off bring: with 2
    microbatches after the last input gradient of their stage, with 5 several in a row between two
    of them."""
    keys = (f"train.precision={precision}", "model.num_hidden_layers=3", "optimizer.clip_norm=null")
    meshes = [build_mesh(Layout({"pp": 2, axis: 2})) for axis in ("dp_replicate", "dp_shard")]
    seed = meshes[0].index("dp_replicate")
    (whole, expected), (sharded, numbers) = (
        train(mesh, schedule, microbatches, *keys, seed=seed) for mesh in meshes
    )
    assert [loss for loss, _ in numbers] == [loss for loss, _ in expected]
    for (name, parameter), copy in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        gradient, where = local_part(parameter.grad)
        assert torch.equal(gradient, copy.grad[where]), name
