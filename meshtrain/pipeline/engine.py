"""Pipeline engine: a small interpreter that runs any schedule on the stages of this rank.

It runs the schedule's list of this rank action by action. It waits for a tensor from another rank
only when an action needs it; sends and posted receives overlap with the actions. The autograd graph
of a forward, and with a split backward the inputs of the weight gradients, are held until the last
action that needs them.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshtrain.job.pending import waiting
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import Waiting
from meshtrain.parallel.grad_sync import (
    accumulate_gradients,
    defer_waits,
    finish_reduce,
    set_is_last_backward,
    start_reduce,
)
from meshtrain.parallel.linear.weight_grad import (
    DeferredWeightGrad,
    WeightGradQueue,
    run_weight_grads,
)
from meshtrain.parallel.torch_private import to_local
from meshtrain.pipeline.actions import Action, Kind, Schedule
from meshtrain.pipeline.loop_schedules import forwards_alone
from meshtrain.pipeline.p2p import (
    AXIS,
    TensorMeta,
    Transfers,
    sends_confirmed_by,
    transfer_order,
)
from meshtrain.pipeline.simulate import Event

Number = TypeVar("Number", int, float)


class MicrobatchSource(Protocol):
    """The microbatches of a step, and their loss."""

    def shapes(self, microbatch: int) -> tuple[tuple[int, ...] | None, ...]:
        """The shapes of `inputs`, which need not be on the device yet."""

    def inputs(self, microbatch: int) -> tuple[Any, ...]:
        """The inputs of the model's forward, on the device; the first only on the first stage, as
        others receive it."""

    def loss(self, microbatch: int, output: Tensor) -> Tensor:
        """The scalar to run backward from, computed from the model's output."""

    def around(self, stage: nn.Module, action: Action) -> AbstractContextManager[Any]:
        """Encloses every action: sets what a forward depends on, and measures time."""


# A stage's forward of a microbatch: (stage, microbatch, received tensor or None on the first stage,
# whether the stage is the last) -> output.
StageForward = Callable[[nn.Module, Any, Tensor | None, bool], Any]


class _SavedGraph(NamedTuple):
    """The saved state of a stage's forward of a microbatch, for its backward."""

    received: Tensor | None  # from the previous stage; its `.grad` is sent back there
    # where the backward starts: the loss, or the graph of the stage's output
    output: Tensor | GradientEdge | None


class Pipeline(nn.Module):
    """The stages of this rank, as one module whose parameters have the names of the whole model.
    `run` executes a step: forwards, backwards and gradient sums. Called as a model, it only
    computes a forward."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        mesh: Mesh,
        device: torch.device,
        *,
        parameter_stages: Mapping[str, tuple[int, ...]],
        weight_grads: WeightGradQueue | None = None,
        waiting: Waiting = nullcontext,
        about: str = "",
        schedule_of: Callable[[int], Schedule] | None = None,
    ) -> None:
        """
        Args:
            stages: stage number -> parallelized stage of this rank.
            parameter_stages: parameter name -> the stages that hold it; several for a tied
                parameter.
            weight_grads: the queue where stages leave weight gradients; required if the schedule
                splits backwards. With it, the last backward of each stage sends its input gradient,
                for which the previous stages wait, before it computes weight gradients.
            about: a line of text about the stages.
            schedule_of: number of microbatches -> schedule with the same stages on the same ranks,
                if that number changes during the run.
        """
        super().__init__()
        self.about = about
        self.parameter_stages, self._schedule_of = parameter_stages, schedule_of
        self.recorded: list[Event] | None = None  # collects the events of runs, if it is a list
        self._stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        for stage in stages.values():
            defer_waits(stage)
        self._mesh, self._device, self._queue = mesh, device, weight_grads
        self._rank, self._last_rank = mesh.index(AXIS), schedule.rank_of(schedule.stages - 1)
        self.ends = schedule.rank_of(0) == self._rank, self._last_rank == self._rank
        self._transfers = Transfers(mesh, device, waiting)
        self._follow(schedule)
        # (kind of tensor, consuming stage, microbatch) -> tensor between two stages of this rank.
        self._local_handoff: dict[tuple[str, int, int], Tensor] = {}
        self._saved_graphs: dict[tuple[int, int], _SavedGraph] = {}
        self._weight_grads: dict[tuple[int, int], list[DeferredWeightGrad]] = {}
        self._tied: dict[
            str, Tensor
        ] = {}  # tied weight -> meta tensor like this rank's part of its gradient
        self._addends: dict[
            tuple[str, int], tuple[dist.Work, Tensor]
        ] = {}  # (weight, stage) -> its receive

    def _follow(self, schedule: Schedule) -> None:
        """Sets the schedule that is run from the next step on."""
        self.schedule = schedule
        self._order, self._confirmed = (
            transfer_order(schedule),
            sends_confirmed_by(schedule, self._rank),
        )
        self._actions = schedule.actions_of(self._rank)
        self._last = {action.stage: i for i, action in enumerate(self._actions)}
        last = (self._actions[i] for i in self._last.values() if self._queue is not None)
        hands_on_first = {
            action for action in last if action.kind is Kind.BACKWARD and schedule.sends(action)
        }
        self._split = hands_on_first | {
            action for action in self._actions if action.kind is Kind.INPUT_GRAD
        }
        self._split_passes = {_key(action) for action in self._split}

    def stage(self, number: int) -> nn.Module:
        return self._stages[str(number)]

    def stages(self) -> list[nn.Module]:
        return list(self._stages.values())

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """With the names of the whole model. A parameter tied across two stages of this rank occurs
        twice."""
        for stage in self._stages.values():
            yield from stage.named_parameters(*args, **named)

    def run(self, source: MicrobatchSource, microbatches: int | None = None) -> None:
        """Runs forwards and backwards of all microbatches of a step, after which gradients are
        complete. `microbatches`: their number, if it can differ from the schedule's."""
        if microbatches not in (None, self.schedule.microbatches) and self._schedule_of is not None:
            self._follow(self._schedule_of(microbatches))
        for stage in self._stages.values():
            set_is_last_backward(stage, False)
        keys = [source.shapes(i) for i in range(self.schedule.microbatches)]
        self._transfers.begin(self._order, keys, self._confirmed)
        for i, action in enumerate(self._actions):
            stage, last = self.stage(action.stage), self._last[action.stage] == i
            # else some gradients come later
            if last and action.kind is Kind.BACKWARD and action not in self._split:
                set_is_last_backward(stage, True)
            self._act(action, source)
            if last:
                start_reduce(stage)
            self._receive_tied()
        self._transfers.end()
        for stage in self._stages.values():  # in the same order on all ranks of a data group
            finish_reduce(stage)
        self._sum_tied()

    def _act(self, action: Action, source: MicrobatchSource) -> None:
        stage = self.stage(action.stage)
        received = self._take(action)  # the wait is not part of the action
        if self._queue is not None:
            self._queue.used = _key(action) in self._split_passes
        with self._recording(action), source.around(stage, action):
            if action.kind is Kind.FORWARD:
                self._forward(action, stage, source, received)
            elif action.kind is Kind.WEIGHT_GRAD:
                self._run_weight_grads(action, stage)
            else:
                self._backward(action, stage, received)

    def _forward(
        self, action: Action, stage: nn.Module, source: MicrobatchSource, received: Tensor | None
    ) -> None:
        received = None if received is None else received.requires_grad_()
        output = call_stage(stage, source.inputs(action.microbatch), received)
        if action.stage == self.schedule.stages - 1:
            loss = source.loss(action.microbatch, output)
            self._saved_graphs[_key(action)] = _SavedGraph(received, loss)
            return
        # Only the graph is held, not the output, whose memory is freed once it has been sent.
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._saved_graphs[_key(action)] = _SavedGraph(received, edge)
        self._hand_on(action, output.detach())

    def _backward(self, action: Action, stage: nn.Module, grad: Tensor | None) -> None:
        received, output = self._saved_graphs.pop(_key(action))
        if action in self._split:
            assert self._queue is not None  # the schedule splits backwards
            with self._queue.record() as weight_grads:
                _run_backward(output, grad)
            self._weight_grads[_key(action)] = weight_grads
        else:
            _run_backward(output, grad)
        # it has no gradient if a block stops it, by `detach` or `torch.no_grad`
        if received is not None:
            self._hand_on(
                action, torch.zeros_like(received) if received.grad is None else received.grad
            )
        if action.kind is Kind.BACKWARD and action in self._split:
            self._run_weight_grads(action, stage)

    def _run_weight_grads(self, action: Action, stage: nn.Module) -> None:
        run_weight_grads(self._weight_grads.pop(_key(action)))
        accumulate_gradients(stage)

    def _take(self, action: Action) -> Tensor | None:
        """Waits for the neighbouring stage's tensor for this action. None at the two ends of the
        model, and for weight gradients, whose inputs were saved by the input gradient action."""
        for transfer in self.schedule.receives(action):
            return self._transfers.receive(transfer)
        return self._local_handoff.pop((action.kind.tensor, *_key(action)), None)

    def tell_shape(self, key: Hashable, stage: int, meta: TensorMeta) -> None:
        """See `Transfers.tell_shape`."""
        self._transfers.tell_shape(key, stage, meta)

    def _hand_on(self, action: Action, tensor: Tensor) -> None:
        for transfer in self.schedule.sends(action):
            return self._transfers.send(transfer, tensor)
        self._local_handoff[
            action.kind.tensor, action.stage + action.kind.direction, action.microbatch
        ] = tensor

    @torch.no_grad()
    def run_forwards(
        self, microbatches: Sequence[Any], keys: Sequence[Hashable], run: StageForward
    ) -> list[Any]:
        """Runs only forwards, each as soon as a stage is free; all ranks call it together. Returns
        the results of `run` for the last stage, on the ranks that have it. `keys`: see
        `Transfers.begin`."""
        actions, order, confirmed = _forwards(self.schedule.placement, len(keys), self._rank)
        self._transfers.begin(order, keys, confirmed)
        results = []
        for action in actions:
            last = action.stage == self.schedule.stages - 1
            result = run(
                self.stage(action.stage), microbatches[action.microbatch], self._take(action), last
            )
            results.append(result) if last else self._hand_on(action, result)
        self._transfers.end()
        return results

    def forward(self, *inputs: Any) -> Tensor | None:
        """The model's output on the ranks that have the last stage; None on all others. All ranks
        call it together."""
        outputs = self.run_forwards([inputs], [shapes_of(inputs)], lambda *of: call_stage(*of[:3]))
        return outputs[0] if outputs else None

    def from_last(self, numbers: list[Number]) -> list[Number]:
        """Broadcasts numbers from the ranks of the last stage; the others pass as many numbers of
        the same type."""
        dtype = torch.float64 if isinstance(numbers[0], float) else torch.int64
        values = torch.tensor(numbers, dtype=dtype, device=self._device)
        dist.broadcast(values, group_src=self._last_rank, group=self._mesh.group(AXIS))
        return values.tolist()

    def state_dict(self, *args: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        return {
            name: value
            for stage in self._stages.values()
            for name, value in stage.state_dict(**named).items()
        }

    @contextmanager
    def _recording(self, action: Action) -> Iterator[None]:
        if self.recorded is None:
            yield
            return
        start = self._now()
        yield
        self.recorded.append(Event(self._rank, action, start, self._now()))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.time()  # the host's clock, which ranks share or synchronize to

    def _receive_tied(self) -> None:
        """Posts the receives of other ranks' gradients of tied weights after all transfers, so that
        they overlap with computation; from the second step on, when their shapes are known."""
        for name in self._tied:
            for stage in self.parameter_stages[name]:
                rank = self.schedule.rank_of(stage)
                if (
                    (name, stage) not in self._addends
                    and rank != self._rank
                    and self._transfers.can_receive_ahead(rank)
                ):
                    self._receive(name, stage, rank)

    def _receive(self, name: str, stage: int, rank: int) -> None:
        memory = torch.empty_like(self._tied[name], device=self._device)
        self._addends[name, stage] = self._transfers.start_receive(memory, rank), memory

    def _sum_tied(self) -> None:
        """Sums the gradient of a weight that several stages hold over these stages, in stage order,
        on each of them."""
        for name, stages in self.parameter_stages.items():
            ranks = [self.schedule.rank_of(stage) for stage in stages]
            if len(stages) == 1 or self._rank not in ranks:
                continue
            if self._parameter(
                stages[ranks.index(self._rank)], name
            ).requires_grad:  # else it is frozen in all stages
                self._sum_over_stages(name, stages, ranks)

    def _sum_over_stages(self, name: str, stages: tuple[int, ...], ranks: list[int]) -> None:
        own_stages = [
            stage for stage, rank in zip(stages, ranks, strict=True) if rank == self._rank
        ]
        own = {stage: self._gradient(stage, name) for stage in own_stages}
        self._tied[name] = torch.empty_like(own[own_stages[0]], device="meta")
        works, addends = [], []
        for stage, rank in zip(stages, ranks, strict=True):
            if stage in own:
                addends.append(own[stage].clone())
                others = sorted(set(ranks) - {self._rank})
                works += [self._transfers.start_send(addends[-1], other) for other in others]
                self._mesh.comm_bytes.add(AXIS, "send", addends[-1].nbytes * len(others))
            else:
                if (name, stage) not in self._addends:
                    self._receive(name, stage, rank)
                work, addend = self._addends.pop((name, stage))
                works.append(work)
                addends.append(addend)
        with waiting("gradients of a tied weight", self._mesh.group(AXIS)):
            for work in works:
                work.wait()
        for gradient in own.values():
            gradient.copy_(addends[0])
            for addend in addends[1:]:
                gradient.add_(addend)

    def _parameter(self, stage: int, name: str) -> nn.Parameter:
        return dict(self.stage(stage).named_parameters())[name]

    def _gradient(self, stage: int, name: str) -> Tensor:
        """This rank's part of a gradient; zeros if no microbatch has used the weight."""
        parameter = self._parameter(stage, name)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return to_local(parameter.grad)


def call_stage(stage: nn.Module, inputs: tuple[Any, ...], received: Tensor | None) -> Tensor:
    """Every stage except the first takes the received tensor in place of the first input."""
    return stage(*inputs if received is None else (received, *inputs[1:]))


@cache
def _forwards(placement: tuple[int, ...], microbatches: int, rank: int) -> tuple[Any, ...]:
    plan = forwards_alone(placement, microbatches)
    return plan.actions_of(rank), transfer_order(plan), sends_confirmed_by(plan, rank)


def _run_backward(output: Tensor | GradientEdge | None, grad: Tensor | None) -> None:
    if output is not None:
        torch.autograd.backward(output, grad)


def _key(action: Action) -> tuple[int, int]:
    return action.stage, action.microbatch


def ends_of(model: nn.Module) -> tuple[bool, bool]:
    """Whether this rank has a model's first stage, which uses the first input, and its last, which
    has the loss."""
    return model.ends if isinstance(model, Pipeline) else (True, True)


def shapes_of(inputs: tuple[Any, ...]) -> tuple[tuple[int, ...] | None, ...]:
    """The shapes of a microbatch's inputs (tensors, or records of tensors), on which those of
    activations depend."""
    return tuple(None if x is None else tuple(x.shape) for x in inputs)
