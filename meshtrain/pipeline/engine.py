"""Runs a schedule on the stages of this rank: one small interpreter for every schedule.

It does what the schedule's lists say, action by action. A tensor from another rank is waited for when an action needs
it; everything else (sends, the posting of receives) goes on beside the actions. What an action leaves is held until
the schedule's last action on it: a forward's graph until its backward, and with a split backward what the weight
gradients need until those are computed.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from meshtrain.mesh import Mesh
from meshtrain.parallel.data import accumulate_gradients, last_microbatch, reduce_gradients
from meshtrain.parallel.later import Due, Later, compute
from meshtrain.parallel.waiting import Waiting
from meshtrain.pipeline.actions import Action, Kind, Schedule, Transfer
from meshtrain.pipeline.simulate import Event
from meshtrain.pipeline.transfers import AXIS, Transfers, acknowledged, in_order


class Work(Protocol):
    """A step's microbatches, and what is computed of them."""

    def shapes(self, microbatch: int) -> tuple[tuple[int, ...] | None, ...]:
        """Those of `inputs`, of which nothing need be on the device yet."""

    def inputs(self, microbatch: int) -> tuple[Tensor | None, ...]:
        """What the model's forward takes, on the device."""

    def loss(self, microbatch: int, output: Tensor) -> Tensor:
        """From the model's output to the scalar whose backward is run."""

    def around(self, stage: nn.Module, action: Action) -> AbstractContextManager[Any]:
        """Entered around every action: sets what a forward depends on, measures."""


class Pipeline(nn.Module):
    """The stages of this rank, as one module whose parameters have the names of the whole model.

    `run` takes the microbatches of a step through the schedule and ends with summed gradients. Called as a model it
    computes a forward only: logits on the ranks of the last stage, None on others.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        mesh: Mesh,
        device: torch.device,
        *,
        holding: Mapping[str, tuple[int, ...]],
        later: Later | None = None,
        waiting: Waiting = nullcontext,
        about: str = "",
    ) -> None:
        """
        Args:
            stages: of this rank, by their number; each parallelized.
            schedule: for as many ranks as the mesh's `pp` has.
            holding: parameter -> the stages that hold it; of a tied one several.
            later: where the stages leave weight gradients; needed if the schedule splits backwards.
            waiting: entered while this rank waits for others.
            about: a line for people about the stages.
        """
        super().__init__()
        self.about = about
        self.schedule, self.holding = schedule, holding
        self.recorded: list[Event] | None = None  # of the actions of the next runs, if it is a list
        self._stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        self._mesh, self._device, self._later = mesh, device, later
        self._rank = mesh.index(AXIS)
        self._transfers = Transfers(mesh, device, waiting)
        self._order, self._learnt = in_order(schedule), acknowledged(schedule, self._rank)
        self._forwards = tuple(
            Transfer("activation", stage, 0, schedule.rank_of(stage - 1), schedule.rank_of(stage))
            for stage in range(1, schedule.stages)
            if schedule.rank_of(stage - 1) != schedule.rank_of(stage)
        )
        self._actions = schedule.flat(self._rank)
        self._received = {action: transfer for action in self._actions for transfer in schedule.receives(action)}
        self._sent = {action: transfer for action in self._actions for transfer in schedule.sends(action)}
        self._last = {action.stage: i for i, action in enumerate(self._actions)}
        self._here: dict[tuple[str, int, int], Tensor] = {}  # handed on between stages of this rank
        self._held: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge | None]] = {}
        self._due: dict[tuple[int, int], list[Due]] = {}

    def stage(self, number: int) -> nn.Module:
        return self._stages[str(number)]

    def stages(self) -> list[nn.Module]:
        """Those of this rank."""
        return list(self._stages.values())

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, and so the loss."""
        return self.schedule.rank_of(self.schedule.stages - 1) == self._rank

    def copies(self, name: str) -> int:
        """How many stages hold a parameter."""
        return len(self.holding[name])

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Under the names of the whole model. A tied parameter of two stages of this rank comes twice."""
        for stage in self._stages.values():
            yield from stage.named_parameters(*args, **named)

    def run(self, work: Work) -> None:
        """Forwards and backwards of all microbatches of a step; the gradients are then whole."""
        for stage in self._stages.values():
            last_microbatch(stage, False)  # sums are made where the schedule ends with a stage
        keys = [work.shapes(i) for i in range(self.schedule.microbatches)]
        self._transfers.begin(self._order, keys, self._learnt)
        for i, action in enumerate(self._actions):
            self._act(action, work)
            if self._last[action.stage] == i:
                reduce_gradients(self.stage(action.stage))
        self._transfers.end()
        self._sum_tied()

    def _act(self, action: Action, work: Work) -> None:
        stage = self.stage(action.stage)
        taken = self._take(action)  # to wait for it is no part of the action
        with self._recording(action), work.around(stage, action):
            if action.kind is Kind.FORWARD:
                self._forward(action, stage, work, taken)
            elif action.kind is Kind.WEIGHT_GRAD:
                compute(self._due.pop((action.stage, action.microbatch)))
                accumulate_gradients(stage)
            else:
                self._backward(action, taken)

    def _forward(self, action: Action, stage: nn.Module, work: Work, received: Tensor | None) -> None:
        inputs = work.inputs(action.microbatch)
        if received is not None:
            inputs = (received.requires_grad_(), *inputs[1:])
        output = stage(*inputs)
        if action.stage == self.schedule.stages - 1:
            loss = work.loss(action.microbatch, output)
            self._held[action.stage, action.microbatch] = received, loss
            return
        # The graph is held, and not the output: its memory is free when it has been sent.
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._held[action.stage, action.microbatch] = received, edge
        self._give(action, output.detach())

    def _backward(self, action: Action, grad: Tensor | None) -> None:
        received, output = self._held.pop((action.stage, action.microbatch))
        if action.kind is Kind.INPUT_GRAD:
            assert self._later is not None  # the schedule splits backwards
            with self._later.collected() as due:
                _run_backward(output, grad)
            self._due[action.stage, action.microbatch] = due
        else:
            _run_backward(output, grad)
        if received is not None:
            assert received.grad is not None
            self._give(action, received.grad)

    def _take(self, action: Action) -> Tensor | None:
        """What the neighbouring stage has made for this action, once it is there.

        None at the two ends of the model, and for weight gradients: what these need was left by their input gradient.
        """
        transfer = self._received.get(action)
        if transfer is not None:
            return self._transfers.receive(transfer)
        return self._here.pop(("activation" if action.kind is Kind.FORWARD else "gradient", *_place(action)), None)

    def _give(self, action: Action, tensor: Tensor) -> None:
        transfer = self._sent.get(action)
        if transfer is not None:
            self._transfers.send(transfer, tensor)
            return
        forward = action.kind is Kind.FORWARD
        target = action.stage + 1 if forward else action.stage - 1
        self._here["activation" if forward else "gradient", target, action.microbatch] = tensor

    def forward(self, *inputs: Tensor | None) -> Tensor | None:
        """The model's output on the ranks that have the last stage; None on all others. All ranks call it together."""
        self._transfers.begin(self._forwards, [shapes_of(inputs)])
        output = None
        for number in self.schedule.stages_of(self._rank):
            action = Action(Kind.FORWARD, number, 0)
            received = self._take(action)
            output = self.stage(number)(*(inputs if received is None else (received, *inputs[1:])))
            if number < self.schedule.stages - 1:
                self._give(action, output)
        self._transfers.end()
        return output if self.has_last else None

    def from_last(self, number: int) -> int:
        """A number that the ranks of the last stage have, on all ranks."""
        told = torch.tensor(number, device=self._device)
        last = self.schedule.rank_of(self.schedule.stages - 1)
        dist.broadcast(told, group_src=last, group=self._mesh.group(AXIS))
        return int(told)

    def state_dict(self, *args: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        """Of all stages of this rank, under the names of the whole model."""
        return {name: value for stage in self._stages.values() for name, value in stage.state_dict(**named).items()}

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
        return time.time()  # of the host, which other ranks share or have set their own by

    def _sum_tied(self) -> None:
        """A weight that several stages hold has one gradient: the sum over them, in their order, on each of them."""
        for name, stages in self.holding.items():
            ranks = [self.schedule.rank_of(stage) for stage in stages]
            if len(stages) == 1 or self._rank not in ranks:
                continue
            if self._parameter(stages[ranks.index(self._rank)], name).requires_grad:  # else it is frozen in all stages
                self._sum_over_stages(name, stages, ranks)

    def _sum_over_stages(self, name: str, stages: tuple[int, ...], ranks: list[int]) -> None:
        own = {
            stage: self._gradient(stage, name) for stage, rank in zip(stages, ranks, strict=True) if rank == self._rank
        }
        group, any_own = self._mesh.group(AXIS), next(iter(own.values()))
        works, addends = [], []
        for stage, rank in zip(stages, ranks, strict=True):
            addends.append(own[stage].clone() if stage in own else torch.empty_like(any_own))
            if stage not in own:
                works.append(dist.irecv(addends[-1], group=group, group_src=rank))
            else:
                others = sorted(set(ranks) - {self._rank})
                works += [dist.isend(addends[-1], group=group, group_dst=other) for other in others]
                self._mesh.traffic.add(AXIS, "send", addends[-1].nbytes * len(others))
        for work in works:
            assert work is not None  # this rank is in the group
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
        return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


def _run_backward(output: Tensor | GradientEdge | None, grad: Tensor | None) -> None:
    if output is not None:
        torch.autograd.backward(output, grad)


def _place(action: Action) -> tuple[int, int]:
    return action.stage, action.microbatch


def shapes_of(inputs: tuple[Tensor | None, ...]) -> tuple[tuple[int, ...] | None, ...]:
    """What the forms of a microbatch's activations depend on."""
    return tuple(None if x is None else tuple(x.shape) for x in inputs)
