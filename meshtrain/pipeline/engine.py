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

from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import MeasuredWait
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
from meshtrain.pipeline.actions import Action, Kind, Schedule
from meshtrain.pipeline.forms import (
    Activation,
    filled,
    form_of,
    has_gradient,
    tensors_of,
)
from meshtrain.pipeline.loop_schedules import forwards_alone
from meshtrain.pipeline.p2p import AXIS, Transfers, sends_confirmed_by, transfer_order
from meshtrain.pipeline.simulate import Event
from meshtrain.pipeline.stage import call_stage
from meshtrain.pipeline.tied import TiedGradients

Number = TypeVar("Number", int, float)
# Where a backward starts: at a tensor (the loss), or at the edge of a graph whose tensor is gone.
Start = Tensor | GradientEdge


class MicrobatchSource(Protocol):
    """The microbatches of a step, and their loss."""

    def shapes(self, microbatch: int) -> tuple[tuple[int, ...] | None, ...]:
        """The shapes of `inputs`, which need not be on the device yet."""

    def inputs(self, microbatch: int) -> tuple[Any, ...]:
        """The inputs of the model's forward, on the device."""

    def loss(self, microbatch: int, output: Tensor) -> Tensor:
        """The scalar to run backward from, computed from the model's output."""

    def around(self, stage: nn.Module, action: Action) -> AbstractContextManager[Any]:
        """Encloses every action: sets what a forward depends on, and measures time."""


# A stage's forward of a microbatch: (stage, microbatch, what it has received or None on the first
# stage, whether the stage is the last) -> output.
StageForward = Callable[[nn.Module, Any, Activation | None, bool], Any]


class _SavedGraph(NamedTuple):
    """What a stage's forward of a microbatch leaves for its backward.

    Attributes:
        entry: where the backward ends: it takes up the gradients for the previous stage. None: on
            the first stage.
        starts: where the backward starts: at the loss, or, before the last stage, at each tensor
            of real or complex numbers that was handed on; None: this one needs no gradient, as
            where all that it depends on is frozen.
    """

    entry: "_Entry | None"
    starts: Sequence[Start | None]


class _Entry:
    """Where a stage's graph begins: at the received tensors, as if they were computed here. The
    model may change them in place, and hooks on them see the gradient that travels back.

    Attributes:
        gradients: after the backward, those of the received tensors that have one.
    """

    def __init__(self, activation: Activation) -> None:
        tensors = list(tensors_of(activation.value))
        # Token indices and masks travel too, and have no gradient.
        places = [i for i, x in enumerate(tensors) if has_gradient(x)]
        differentiable = [tensors[i] for i in places]
        self._likes = [(x.shape, x.dtype, x.device) for x in differentiable]
        self.gradients: tuple[Tensor | None, ...] = (None,) * len(differentiable)
        if differentiable:
            # As leaves that require a gradient, the model could not change them in place. They have
            # to be results of a function, and one of its inputs has to require a gradient: that is
            # all that `begin` is for.
            begin = torch.empty(0, requires_grad=True)
            entered = _Enter.apply(begin, self, differentiable)
            for i, tensor in zip(places, entered, strict=True):
                tensors[i] = tensor
        value = filled(form_of(activation.value), tensors)
        self.activation = Activation(value, activation.earlier)

    def input_grads(self) -> list[Tensor]:
        """The gradients; zeros for a tensor that does not take part, as where a block stops them by
        `detach` or `torch.no_grad`."""
        grads = []
        for gradient, (shape, dtype, device) in zip(self.gradients, self._likes, strict=True):
            if gradient is None:
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            grads.append(gradient)
        return grads


class _Enter(torch.autograd.Function):
    """Hands tensors on as they are; its backward leaves their gradients in the `_Entry`."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, entry: _Entry, tensors: list[Tensor]) -> Any:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.entry.gradients = gradients
        return None, None, None


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
        measured_wait: MeasuredWait = nullcontext,
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
        self.parameter_stages = parameter_stages
        self.recorded: list[Event] | None = None  # collects the events of runs, if it is a list

        self._stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        for stage in stages.values():
            defer_waits(stage)
        self._mesh = mesh
        self._device = device
        self._queue = weight_grads

        placement = schedule.placement
        self._rank = mesh.index(AXIS)
        self._last_rank = placement[-1]
        self.ends = (placement[0] == self._rank, placement[-1] == self._rank)
        self._transfers = Transfers(mesh, device, measured_wait)
        self._tied = TiedGradients(
            stages, parameter_stages, placement, self._transfers, mesh, device
        )
        self._schedule_of = schedule_of
        self._follow(schedule)

        # What is held between two actions of a microbatch:
        # (kind of transfer, consuming stage, microbatch) -> what goes between two stages of this
        # rank;
        self._local_handoff: dict[tuple[str, int, int], Any] = {}
        # (stage, microbatch) -> what its backward starts from;
        self._saved_graphs: dict[tuple[int, int], _SavedGraph] = {}
        # (stage, microbatch) -> weight gradients that its backward has left for later.
        self._weight_grads: dict[tuple[int, int], list[DeferredWeightGrad]] = {}

    def _follow(self, schedule: Schedule) -> None:
        """Sets the schedule that is run from the next step on."""
        self.schedule = schedule
        self._order = transfer_order(schedule)
        self._confirmed = sends_confirmed_by(schedule, self._rank)
        self._actions = schedule.actions_of(self._rank)
        self._last_position = {action.stage: i for i, action in enumerate(self._actions)}

        # Backwards that compute the input gradient first and leave weight gradients for later.
        self._split: set[Action] = set()
        for i, action in enumerate(self._actions):
            # The schedule says so: another action computes the weight gradients.
            if action.kind is Kind.INPUT_GRAD:
                self._split.add(action)
            # The last backward of a stage, if another rank waits for its result: that is sent
            # first, and the same action then computes the weight gradients.
            is_last = i == self._last_position[action.stage]
            can_split = action.kind is Kind.BACKWARD and self._queue is not None
            if is_last and can_split and schedule.sends(action):
                self._split.add(action)
        # Their (stage, microbatch), by which the forwards that belong to them are known.
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
        if microbatches is not None and microbatches != self.schedule.microbatches:
            if self._schedule_of is None:
                raise ValueError(
                    f"the schedule has {self.schedule.microbatches} microbatches and the step has "
                    f"{microbatches}: give schedule_of, which makes the schedules of other numbers"
                )
            self._follow(self._schedule_of(microbatches))
        # Nothing is summed over the data ranks until a stage's last backward.
        for stage in self.stages():
            set_is_last_backward(stage, False)
        shapes = [source.shapes(i) for i in range(self.schedule.microbatches)]
        self._transfers.begin(self._order, shapes, self._confirmed)

        for position, action in enumerate(self._actions):
            stage = self.stage(action.stage)
            is_last = position == self._last_position[action.stage]

            # A stage's last backward may start the sums over the data ranks as its gradients
            # become complete, unless some of them are computed after it.
            if is_last and action.kind is Kind.BACKWARD and action not in self._split:
                set_is_last_backward(stage, True)

            received = self._take(action)  # the wait is not part of the action
            self._act(action, stage, source, received)

            # The sums of this stage overlap with the actions of others.
            if is_last:
                start_reduce(stage)
            # Receives of the gradients of tied weights, as early as each can be posted: so nobody
            # who sends one has to wait.
            self._tied.receive_ahead()

        self._transfers.end()
        for stage in self.stages():  # in the same order on all ranks of a data group
            finish_reduce(stage)
        self._tied.sum()

    def _act(
        self, action: Action, stage: nn.Module, source: MicrobatchSource, received: Any
    ) -> None:
        if self._queue is not None:
            # Layers ask for it in the forward already: one whose weight gradient comes later has to
            # save what that product needs.
            self._queue.used = _key(action) in self._split_passes
        with self._recording(action), source.around(stage, action):
            if action.kind is Kind.FORWARD:
                self._forward(action, stage, source, received)
            elif action.kind is Kind.WEIGHT_GRAD:
                self._run_weight_grads(action, stage)
            else:
                self._backward(action, stage, received)

    def _forward(
        self,
        action: Action,
        stage: nn.Module,
        source: MicrobatchSource,
        received: Activation | None,
    ) -> None:
        entry = None if received is None else _Entry(received)
        activation = None if entry is None else entry.activation
        output = call_stage(stage, source.inputs(action.microbatch), activation)
        # Drop all references to the received activation but those of the graph, so that its memory
        # is free where no backward needs it.
        activation = received = None
        if entry is not None:
            del entry.activation

        if action.stage == self.schedule.stages - 1:
            loss = source.loss(action.microbatch, output)
            self._saved_graphs[_key(action)] = _SavedGraph(entry, [loss])
            return

        # Edges of the graph are held in the place of the outputs, whose memory is then freed as
        # soon as they have been sent.
        tensors = tensors_of(output.value)
        starts: list[Start | None] = []
        for x in tensors:
            if has_gradient(x):
                starts.append(get_gradient_edge(x) if x.requires_grad else None)
        self._saved_graphs[_key(action)] = _SavedGraph(entry, starts)
        value = filled(form_of(output.value), [x.detach() for x in tensors])
        self._hand_on(action, Activation(value, output.earlier))

    def _backward(self, action: Action, stage: nn.Module, grads: Sequence[Tensor] | None) -> None:
        entry, starts = self._saved_graphs.pop(_key(action))
        is_split = action in self._split
        if is_split:
            assert self._queue is not None  # required of whoever splits backwards
            with self._queue.record() as weight_grads:
                _run_backward(starts, grads)
            self._weight_grads[_key(action)] = weight_grads
        else:
            _run_backward(starts, grads)

        if entry is not None:
            self._hand_on(action, entry.input_grads())

        # A whole backward, split only to send its result before.
        if is_split and action.kind is Kind.BACKWARD:
            self._run_weight_grads(action, stage)

    def _run_weight_grads(self, action: Action, stage: nn.Module) -> None:
        run_weight_grads(self._weight_grads.pop(_key(action)))
        accumulate_gradients(stage)

    def _take(self, action: Action) -> Any:
        """Waits for what this action needs of the neighbouring stage: the activation for a forward,
        a list of gradients for a backward. None at the two ends of the model, and for weight
        gradients, whose inputs were saved by the input gradient action."""
        # An action has one neighbour that it receives from, and one that it sends to, if any.
        transfer = next(iter(self.schedule.receives(action)), None)
        if transfer is not None:
            tensors, about = self._transfers.receive(transfer)
            if transfer.kind == "gradient":
                return tensors
            form, earlier = about
            return Activation(filled(form, tensors), earlier)
        # No other rank sends it: the producer is a stage of this rank, or there is none.
        producer = action.stage - action.kind.direction
        if action.kind is Kind.WEIGHT_GRAD or not 0 <= producer < self.schedule.stages:
            return None
        return self._local_handoff.pop((action.kind.tensor, *_key(action)))

    def describe(self, key: Hashable, stage: int, activation: Activation) -> None:
        """See `Transfers.describe`."""
        self._transfers.describe(key, stage, activation)

    def _hand_on(self, action: Action, result: Activation | list[Tensor]) -> None:
        """Sends the result of an action, an activation or gradients, to the neighbouring stage, or
        keeps it for a stage of this rank."""
        transfer = next(iter(self.schedule.sends(action)), None)
        if transfer is None:
            consumer = action.stage + action.kind.direction
            self._local_handoff[action.kind.tensor, consumer, action.microbatch] = result
        elif isinstance(result, Activation):
            self._transfers.send(transfer, tensors_of(result.value), result.about)
        else:
            self._transfers.send(transfer, result)

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
            stage, received = self.stage(action.stage), self._take(action)
            result = run(stage, microbatches[action.microbatch], received, last)
            if last:
                results.append(result)
            else:
                self._hand_on(action, result)
        self._transfers.end()
        return results

    def forward(self, *inputs: Any) -> Tensor | None:
        """The model's output on the ranks that have the last stage; None on all others. All ranks
        call it together."""

        def run(
            stage: nn.Module, inputs: tuple[Any, ...], received: Activation | None, last: bool
        ) -> Any:
            return call_stage(stage, inputs, received)

        outputs = self.run_forwards([inputs], [shapes_of(inputs)], run)
        return outputs[0] if outputs else None

    def from_last(self, numbers: list[Number]) -> list[Number]:
        """Broadcasts numbers from the ranks of the last stage; the others pass as many numbers of
        the same type."""
        dtype = torch.float64 if isinstance(numbers[0], float) else torch.int64
        values = torch.tensor(numbers, dtype=dtype, device=self._device)
        dist.broadcast(values, group_src=self._last_rank, group=self._mesh.group(AXIS))
        return values.tolist()

    def state_dict(self, *args: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        """With the names of the whole model."""
        states: dict[str, Any] = {}
        for stage in self.stages():
            states |= stage.state_dict(**named)
        return states

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


@cache
def _forwards(placement: tuple[int, ...], microbatches: int, rank: int) -> tuple[Any, ...]:
    """What `run_forwards` executes on a rank: its actions, the order of all transfers, and what
    each receive confirms. Evaluations and generation ask for the same few again and again."""
    plan = forwards_alone(placement, microbatches)
    return plan.actions_of(rank), transfer_order(plan), sends_confirmed_by(plan, rank)


def _run_backward(starts: Sequence[Start | None], grads: Sequence[Tensor] | None) -> None:
    """Runs a backward from the starts of a `_SavedGraph`, except for those that need no gradient,
    which are None.

    `grads`: of the tensors that the stage has handed on, one for each start; None: the start is the
    loss, a scalar, which autograd gives the gradient 1.
    """
    if grads is None:
        of_starts: Sequence[Tensor | None] = [None] * len(starts)
    else:
        of_starts = grads
    needed: list[Any] = []
    needed_grads: list[Any] = []
    for start, grad in zip(starts, of_starts, strict=True):
        if start is not None:
            needed.append(start)
            needed_grads.append(grad)
    if needed:
        torch.autograd.backward(needed, needed_grads)


def _key(action: Action) -> tuple[int, int]:
    return action.stage, action.microbatch


def has_last_stage(model: nn.Module) -> bool:
    """Whether this rank has a model's last stage, and so the loss."""
    return model.ends[1] if isinstance(model, Pipeline) else True


def shapes_of(inputs: tuple[Any, ...]) -> tuple[tuple[int, ...] | None, ...]:
    """The shapes of a microbatch's inputs (tensors, or records of tensors), on which those of
    activations depend."""
    return tuple(None if value is None else tuple(value.shape) for value in inputs)
