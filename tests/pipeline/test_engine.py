"""The engine computes what one process computes, and what it holds and sends meanwhile, over which
groups and when."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import meshtrain.mesh
from meshtrain.data.batch import Batch
from meshtrain.evaluate import evaluate
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.pipeline import engine
from meshtrain.pipeline.actions import Action, Kind, Schedule
from meshtrain.pipeline.engine import Pipeline
from meshtrain.pipeline.simulate import simulate
from tests.comparing import ALONE, CPU, Created, Sent, same
from tests.pipeline.steps import (
    TIED,
    B,
    D,
    Event,
    S,
    Step,
    V,
    compare_gradients,
    each_schedule,
    pipeline,
    plain,
    schedules,
)

# Samples of a microbatch, lengths of the microbatches in turn.
STEPS = [(B, [S]), (3, [7]), (B, [S]), (B, [12, 7, 5]), (B, [7, 12, 9])]


@each_schedule
def test_steps_of_changing_shapes(pp: Mesh, schedule: str) -> None:
    """Also within a step; then forwards alone."""
    count = pp.size("pp") + 1
    model = pipeline(pp, schedule, count)
    for b, lengths in STEPS:
        step = Step(count, b, lengths, seed=b + sum(lengths))
        model.zero_grad()
        model.run(step)
        compare_gradients(model, step)
        assert len(step.losses) == (count if model.ends[1] else 0)
    for b, lengths in STEPS[:2]:
        inputs = Step(1, b, lengths).inputs(0)
        with torch.no_grad():
            logits = model(*inputs)
        assert (logits is not None) == model.ends[1]
        if logits is not None:
            same(logits, plain()(*inputs))


@schedules({2: ["1f1b", "zbv"], 4: ["interleaved-1f1b"]})
def test_an_evaluation_fills_the_pipeline(
    pp: Mesh, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batches of two lengths: the last stage begins only after the first has had three
    batches. Targets are copied only to where they are used."""
    p = pp.size("pp")
    model, batches = pipeline(pp, schedule, p), Step(4 * p + 3, lengths=[12, 7]).batches()
    store, to = dist.distributed_c10d._get_default_store(), Batch.to
    key = f"evaluated {schedule}"
    counts = [0, 0]  # of batches in the first and in the last stage
    copied = set()

    def leave_first(*unused: Any) -> None:
        counts[0] += 1
        if counts[0] == 3:
            store.set(key, "three")

    def enter_last(*unused: Any) -> None:
        counts[1] += 1
        store.wait([key], timedelta(seconds=120))

    def copy(batch: Batch, *place: Any, with_targets: bool) -> Batch:
        copied.add(with_targets)
        return to(batch, *place, with_targets=with_targets)

    if model.ends[0]:
        model.stage(0).register_forward_hook(leave_first)
    if model.ends[1]:
        model.stage(model.schedule.stages - 1).register_forward_pre_hook(enter_last)
    monkeypatch.setattr(Batch, "to", copy)
    result = evaluate(model, batches, pp, CPU, torch.float64)
    assert copied == {model.ends[1]}
    expected = evaluate(plain(), batches, ALONE, CPU, torch.float64)
    same(torch.tensor(result.loss), torch.tensor(expected.loss))
    assert result.targets == expected.targets
    assert counts == [len(batches) * end for end in model.ends]


# What it holds and sends --------------------------------------------------------------------------


FLOAT64 = 8  # bytes


class Watched(Step):
    """After each action, counts the stage forwards whose graphs are alive, and the live outputs
    that were sent."""

    def __init__(self, microbatches: int, schedule: Schedule) -> None:
        super().__init__(microbatches)
        self.schedule = schedule
        self.graphs: list[StorageWeakRef] = []
        self.outputs: list[StorageWeakRef] = []
        self.counts: list[tuple[Action, int, int]] = []

    @contextmanager
    def around(self, stage: nn.Module, action: Action) -> Iterator[None]:
        with stage.register_forward_hook(self._watch):
            yield
        if action.kind is Kind.FORWARD and not self.schedule.sends(action):
            self.outputs.pop()
        graphs, outputs = (
            sum(not ref.expired() for ref in refs) for refs in (self.graphs, self.outputs)
        )
        self.counts.append((action, graphs, outputs))

    def _watch(self, stage: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Adds an operation that holds a tensor of its own as long as its graph is alive."""
        mark = output.new_ones(1)
        self.graphs.append(StorageWeakRef(mark.untyped_storage()))
        marked = output * mark
        self.outputs.append(StorageWeakRef(marked.untyped_storage()))
        return marked


def bytes_to_send(model: Pipeline, mesh: Mesh) -> int:
    """For each microbatch, an activation and a gradient at every boundary between ranks."""
    plan = model.schedule
    ranks = [plan.rank_of(stage) for stage in range(plan.stages)]
    sides = sum(pair.count(mesh.index("pp")) for pair in pairwise(ranks) if pair[0] != pair[1])
    return plan.microbatches * sides * B * S * D * FLOAT64 // mesh.size("tp")


@each_schedule
def test_what_is_held_and_sent(pp: Mesh, schedule: str) -> None:
    """Graphs are held from a forward to its input gradient, outputs until they are sent, and
    nothing after the step."""
    count = 3 * pp.size("pp")
    model = pipeline(pp, schedule, count)
    model.run(Step(count))  # allocates the gradients, finds the shapes
    step = Watched(count, model.schedule)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    pp.comm_bytes.restart()
    with (
        Created(besides=(*model.parameters(), *gradients, *step.tokens)) as created,
        Sent() as sent,
    ):
        model.run(step)
    assert sent.bytes == pp.comm_bytes.by_kind("pp")["send"] == bytes_to_send(model, pp)
    held = 0
    for action, graphs, outputs in step.counts:
        held += action.kind is Kind.FORWARD
        held -= action.kind.gives_input_grad
        assert graphs == held, action
        assert outputs <= held, action
    peak = max(graphs for _, graphs, _ in step.counts)
    simulated = simulate(model.schedule).peak_activations[pp.index("pp")]
    splits = any(action.kind is Kind.WEIGHT_GRAD for action, _, _ in step.counts)
    assert peak <= simulated if splits else peak == simulated
    step.losses.clear()
    assert created.held() == 0


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("axis", "schedule"), [("tp", "zb-h1"), ("tp", "zbv"), ("dp_shard", "v-half")]
)
def test_bytes_with_another_axis(job: Job, axis: str, schedule: str) -> None:
    mesh = build_mesh(Layout({"pp": 2, axis: 2}))
    model = pipeline(mesh, schedule, 4)
    mesh.comm_bytes.restart()
    model.run(Step(4))
    assert mesh.comm_bytes.by_kind("pp")["send"] == bytes_to_send(model, mesh)


@schedules({2: ["zbv"], 4: ["1f1b", "zbv", "interleaved-1f1b"]})
def test_each_neighbour_and_direction_has_a_group(
    job: Job, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NCCL; all is sent over these groups."""
    p = job.world_size
    monkeypatch.setattr(meshtrain.mesh, "IN_TURN", ("cpu",))
    pp = build_mesh(Layout({"pp": p}))
    model, step = pipeline(pp, schedule, p + 1), Step(p + 1)
    with Sent() as sent:
        model.run(step)
    compare_gradients(model, step)
    near = {(pp.rank + 1) % p, (pp.rank - 1) % p}
    groups = {pp.link(*ends) for other in near for ends in ((pp.rank, other), (other, pp.rank))}
    assert len(groups - {pp.group("pp")}) == 2 * len(near)
    assert all(pp.link(pp.rank, other) == pp.group("pp") for other in set(range(p)) - near)
    assert sent.groups == {target: {pp.link(pp.rank, target)} for target in sent.groups}


@schedules({2: ["1f1b", "looped-bfs"], 4: ["zb-h2"]})
def test_a_tied_weight(job: Job, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage sends its gradient once; from the second step on, it is received while the rank
    computes. On 4 ranks with groups as on NCCL, between ranks that are no neighbours."""
    p, receive = job.world_size, dist.irecv
    monkeypatch.setattr(meshtrain.mesh, "IN_TURN", ("cpu",) if p == 4 else ())
    pp = build_mesh(Layout({"pp": p}))
    model = pipeline(pp, schedule, p + 1, TIED)
    waits = []
    for _ in range(2):
        step = Step(p + 1)
        model.zero_grad()
        pp.comm_bytes.restart()
        monkeypatch.setattr(dist, "irecv", step.adding("receive", receive))
        model.run(step)
        compare_gradients(model, step, TIED)
        waits.append(
            Event("receive", model.schedule.actions_of(pp.index("pp"))[-1], False) in step.events
        )
    if model.ends[0]:  # its last action sends nothing
        assert waits == [True, False]
    own_addend = V * D * FLOAT64 * any(model.ends)
    assert pp.comm_bytes.by_kind("pp").get("send", 0) == bytes_to_send(model, pp) + own_addend


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("schedule", "overrides"),
    [("1f1b", ()), ("interleaved-1f1b", ()), ("1f1b", ("parallel.recompute=full",))],
)
def test_the_last_input_gradient_of_a_stage_is_sent_first(
    pp: Mesh, schedule: str, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it computes weight gradients; other backwards, and those of the first stage, leave
    nothing for later."""
    model, step = pipeline(pp, schedule, 3, *overrides), Step(3)
    run = engine.run_weight_grads
    observed = step.adding("weights", run)
    monkeypatch.setattr(
        engine, "run_weight_grads", lambda deferred: (observed if deferred else run)(deferred)
    )
    monkeypatch.setattr(dist, "isend", step.adding("send", dist.isend))
    model.run(step)
    last = {
        action.stage: action
        for action in model.schedule.actions_of(pp.index("pp"))
        if action.stage > 0
    }
    assert all(step.kinds(action) == ["send", "weights"] for action in last.values())
    assert [event.kind for event in step.events].count("weights") == len(last)
    compare_gradients(model, step, *overrides)
