"""Pipeline schedules as data: for every rank, the ordered list of actions that it runs.

A *stage* is a part of the model, and a rank holds one or more stages. A *microbatch* runs the
forward of every stage, and then the backward of every stage. The backward of a stage is two
computations that may run at different times: its input gradient, for which the previous stage
waits, and its weight gradients, which are needed only at the step's end.

A `Schedule` is a plain value, as in DeepSpeed: the engine runs it, `simulate` computes its times,
and it can be drawn.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or run. The message says what would work."""


class Kind(StrEnum):
    """The kind of computation. The letters are those of torch.distributed.pipelining's CSV
    format."""

    FORWARD = "F"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    BACKWARD = "B"  # I and W at once

    @property
    def tensor(self) -> str:
        """The kind of tensor that such an action takes from one neighbouring stage and produces for
        the other."""
        return "activation" if self is Kind.FORWARD else "gradient"

    @property
    def direction(self) -> int:
        """Offset from the stage of an action to the stage that takes its output."""
        return 1 if self is Kind.FORWARD else -1

    @property
    def gives_input_grad(self) -> bool:
        return self in (Kind.INPUT_GRAD, Kind.BACKWARD)

    @property
    def gives_weight_grad(self) -> bool:
        """After such an action, saved tensors of the stage's forward are freed."""
        return self in (Kind.WEIGHT_GRAD, Kind.BACKWARD)


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One computation of one stage for one microbatch. As a string `2F7`: stage 2, forward,
    microbatch 7."""

    kind: Kind
    stage: int
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> "Action | None":
        """The inverse of `str`; None if the text is not an action."""
        match = re.fullmatch(r"(\d+)([FIWB])(\d+)", text)
        return cls(Kind(match[2]), int(match[1]), int(match[3])) if match else None

    @property
    def parts(self) -> "tuple[Action, ...]":
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward of the same rank that may run concurrently, if the engine supports
    that. They are of different microbatches and independent of each other, so running them one
    after the other is also correct."""

    forward: Action
    backward: Action

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


@dataclass(frozen=True, order=True, slots=True)
class Transfer:
    """A tensor sent from one rank to another, between two neighbouring stages."""

    # "activation": input of a stage's forward; "gradient": output gradient for its backward
    kind: str
    stage: int  # the stage that receives it
    microbatch: int
    source: int  # rank
    target: int  # rank


@dataclass(frozen=True)
class Schedule:
    """The placement of stages on ranks, and the ordered actions of every rank. All numbers count
    from 0."""

    name: str
    microbatches: int
    placement: tuple[int, ...]  # stage -> rank
    # per rank, in execution order
    actions: tuple[tuple[Action | Pair, ...], ...] = field(repr=False)

    @property
    def title(self) -> str:
        """`zbv, 4 ranks x 8 microbatches, 2 stages each`."""
        stages = f", {self.stages_per_rank} stages each" if self.stages_per_rank > 1 else ""
        return f"{self.name}, {self.ranks} ranks x {self.microbatches} microbatches{stages}"

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def stages_per_rank(self) -> int:
        """The most stages that a rank holds; in the named schedules all ranks hold the same
        number."""
        return max(len(self.stages_of(rank)) for rank in range(self.ranks))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any rank computes weight gradients in separate actions."""
        every = (action for rank in range(self.ranks) for action in self.actions_of(rank))
        return any(action.kind is Kind.WEIGHT_GRAD for action in every)

    def rank_of(self, stage: int) -> int:
        return self.placement[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in model order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def actions_of(self, rank: int) -> tuple[Action, ...]:
        """The actions of a rank, with every pair split into its two parts."""
        return tuple(part for action in self.actions[rank] for part in action.parts)

    @cached_property
    def _input_grads(self) -> dict[tuple[int, int], Action]:
        """(stage, microbatch) -> the action that computes the gradient of that stage's input."""
        every = (action for rank in range(self.ranks) for action in self.actions_of(rank))
        return {
            (action.stage, action.microbatch): action
            for action in every
            if action.kind.gives_input_grad
        }

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions, on any rank, that have to be done before this one can start. If no action
        computes the gradient of the next stage, the missing action is listed with this action's own
        kind."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return (Action(Kind.FORWARD, stage - 1, microbatch),) if stage > 0 else ()
        if action.kind is Kind.WEIGHT_GRAD:
            return (
                self._input_grads.get(
                    (stage, microbatch), Action(Kind.INPUT_GRAD, stage, microbatch)
                ),
            )
        forward = Action(Kind.FORWARD, stage, microbatch)
        if stage == self.stages - 1:
            return (forward,)
        following = self._input_grads.get(
            (stage + 1, microbatch), Action(action.kind, stage + 1, microbatch)
        )
        return (forward, following)

    def sends(self, action: Action | Pair) -> tuple[Transfer, ...]:
        """The transfers from this action's rank when it is done. Stages of the same rank need no
        transfer."""
        return self._between_ranks(
            (part, part.stage, part.stage + part.kind.direction) for part in action.parts
        )

    def receives(self, action: Action | Pair) -> tuple[Transfer, ...]:
        """The transfers from other ranks that must have arrived before this action can start."""
        return self._between_ranks(
            (part, part.stage - part.kind.direction, part.stage) for part in action.parts
        )

    def _between_ranks(self, edges: Iterable[tuple[Action, int, int]]) -> tuple[Transfer, ...]:
        """The transfers for (action, producing stage, consuming stage). Weight gradients need
        none."""
        transfers = []
        for action, source, target in edges:
            if (
                action.kind is not Kind.WEIGHT_GRAD
                and 0 <= source < self.stages
                and 0 <= target < self.stages
            ):
                ranks = self.rank_of(source), self.rank_of(target)
                if ranks[0] != ranks[1]:
                    transfers.append(
                        Transfer(action.kind.tensor, target, action.microbatch, *ranks)
                    )
        return tuple(transfers)
