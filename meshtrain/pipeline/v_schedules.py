"""V-shaped schedules (zbv, v-half, v-min, dualpipev): with 2p stages on p ranks, rank r holds
stages r and 2p - 1 - r.

A microbatch goes down through the ranks and back up, so that the first and the last stage are on
rank 0. Its gradients take the same path: down through the `up` stages, then up through the `down`
stages.

    rank 0   0         7      forward:  0 1 2 3 | 4 5 6 7    down, then up
    rank 1     1     6        backward: 7 6 5 4 | 3 2 1 0    down, then up
    rank 2       2 5
    rank 3       3 4

The turn in the middle needs no transfer, and all ranks hold about the same amount of activations:
each rank combines a stage with long-lived activations (forward early, gradient late) and one with
short-lived activations.

`zbv`, `v-half` and `v-min` come from one *building block*: the times at which one microbatch passes
each rank, with every action taking one unit of time (Qi et al., controllable memory, arXiv
2405.15362). A rank has six actions per microbatch, two of each kind. So if its times differ modulo
6, the block can be repeated every 6 units, and no rank ever waits. The slope of the V determines
how long a microbatch is in flight, and so the number in flight: the memory. At both ends of a step
the pattern has holes, which are squeezed out.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshtrain.pipeline.actions import Action, Kind, Pair, Schedule

# actions per rank and microbatch: forward, input gradient and weight gradient of two stages
PERIOD = 6


@dataclass(frozen=True)
class VShape:
    """A building block for any number of ranks, and how far ranks may deviate from its order."""

    down: int  # units of time from one rank to the next, on the way down
    up: int  # the same on the way up
    # Units of time for the three turns: at the last rank, at the loss on rank 0, at the last rank
    # again. V-half and V-min have two triples, because which one avoids collisions of a rank's
    # actions depends on the number of ranks.
    turns: tuple[tuple[int, int, int], ...]
    room: Callable[[int], int]  # ranks -> how many forwards a rank may hold in memory
    # (ranks, rank) -> how many `down` forwards a rank may run before their turn
    ahead: Callable[[int, int], int]


ZBV = VShape(
    down=3,
    up=3,
    turns=((1, 1, 1),),
    room=lambda ranks: 2 * ranks,
    ahead=lambda ranks, rank: 2 * (ranks - rank) - 1,
)
V_HALF = VShape(
    down=2,
    up=1,
    turns=((1, 4, 2), (4, 1, 2)),
    room=lambda ranks: ranks + 2,
    ahead=lambda ranks, rank: ranks - rank,
)
V_MIN = VShape(
    down=1,
    up=1,
    turns=((1, 1, 1), (1, 3, 1)),
    room=lambda ranks: 2 * math.ceil((ranks - 1) / 3) + 2,
    ahead=lambda ranks, rank: 0,
)


def zbv(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Zero bubble in the memory of 1f1b (Qi et al., ZB-V, arXiv 2401.10241, and V-ZB, arXiv
    2405.15362). From 2 * ranks - 1 microbatches on, no rank waits between its first and last
    action."""
    return _squeeze("zbv", ZBV, ranks, microbatches)


def v_half(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """About half of 1f1b's memory, for a little waiting (Qi et al., V-Half, arXiv 2405.15362)."""
    return _squeeze("v-half", V_HALF, ranks, microbatches)


def v_min(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """About a third of 1f1b's memory, for about 1f1b's waiting (Qi et al., V-Min, arXiv
    2405.15362)."""
    return _squeeze("v-min", V_MIN, ranks, microbatches)


def dualpipev(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Forwards and backwards in pairs, so that communication of one overlaps computation of the
    other (DeepSeek-V3, arXiv 2412.19437). DualPipe feeds microbatches from both ends, with two
    copies of the parameters; this is one half.
    """
    rows = tuple(_pairs_of(ranks, rank, microbatches) for rank in range(ranks))
    return Schedule("dualpipev", microbatches, _placement(ranks), rows)


def _placement(ranks: int) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks)))


def _block(shape: VShape, ranks: int) -> list[list[tuple[int, Kind, int]]]:
    """For each rank: (time, kind, stage) of the forwards and input gradients of one microbatch."""
    last = ranks - 1
    for at_last, at_loss, at_last_again in shape.turns:
        # When the microbatch is at the two turns of its way down and up, ...
        loss = shape.down * last + at_last + shape.up * last  # the last stage's forward, on rank 0
        # ... and its gradient at that of the same way back.
        gradient_at_last = loss + at_loss + shape.down * last
        back_up = gradient_at_last + at_last_again
        block = []
        for rank in range(ranks):
            down, up = rank, 2 * ranks - 1 - rank
            block.append(
                [
                    (shape.down * rank, Kind.FORWARD, down),
                    (loss - shape.up * rank, Kind.FORWARD, up),
                    (loss + at_loss + shape.down * rank, Kind.INPUT_GRAD, up),
                    (back_up + shape.up * (last - rank), Kind.INPUT_GRAD, down),
                ]
            )
        # Repeated every PERIOD, no two actions of a rank may be at the same time.
        if all(len({time % PERIOD for time, _, _ in row}) == len(row) for row in block):
            return block
    raise AssertionError(f"no turns of {shape} keep the actions of {ranks} ranks apart")


class _Rank:
    """A rank's remaining actions and held activations while a pattern is squeezed."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        microbatches: int,
        shape: VShape,
        block: list[tuple[int, Kind, int]],
    ) -> None:
        self.row: list[Action] = []
        self._last_stage = 2 * ranks - 1
        self._down = rank
        self._up = self._last_stage - rank
        self._microbatches = microbatches
        pattern = sorted(
            (time + PERIOD * microbatch, Action(kind, stage, microbatch))
            for time, kind, stage in block
            for microbatch in range(microbatches)
        )
        # forwards and input gradients, in the pattern's order
        self._order = deque(action for _, action in pattern)
        self._put_off: deque[Action] = deque()  # weight gradients
        self._next: Counter[tuple[Kind, int]] = Counter()  # (kind, stage) -> the next microbatch
        self._activations = 0
        self._room = shape.room(ranks)
        self._ahead = shape.ahead(ranks, rank)

    def step(self, now: int, ended: dict[Action, int]) -> None:
        """Runs the best action that can run. `ended`: end times of the actions of all ranks;
        updated by this action."""
        for action in self._candidates():
            if self._ready(action, now, ended):
                self._run(action)
                ended[action] = now + 1
                return

    def _candidates(self) -> Iterator[Action]:
        """Actions that there is room for, best first: the one in turn; those that may run early; a
        weight gradient.

        Early actions: while the pipeline fills, forwards of the first stage, which leave room for
        one of the second, as otherwise no gradient would ever arrive; while it drains, input
        gradients of the second, for which others wait.
        """
        has_room = self._activations < self._room
        if self._order:
            in_turn = self._order[0]
            if has_room or in_turn.kind is not Kind.FORWARD:
                yield in_turn

        started = self._next[Kind.FORWARD, self._down]
        returned = self._next[Kind.FORWARD, self._up]
        may_start = started < self._microbatches and started - returned < self._ahead
        if may_start and self._activations < self._room - 1:
            yield Action(Kind.FORWARD, self._down, started)

        gradients = self._next[Kind.INPUT_GRAD, self._up]
        if gradients < self._microbatches and has_room:
            yield Action(Kind.INPUT_GRAD, self._up, gradients)

        if self._put_off:
            yield self._put_off[0]

    def _ready(self, action: Action, now: int, ended: dict[Action, int]) -> bool:
        """Whether the preceding action of the same microbatch has ended."""
        kind, stage = action.kind, action.stage
        if kind is Kind.WEIGHT_GRAD or (kind is Kind.FORWARD and stage == 0):
            return True
        at_loss = kind is Kind.INPUT_GRAD and stage == self._last_stage
        before = (Kind.FORWARD, stage) if at_loss else (kind, stage - kind.direction)
        return ended.get(Action(*before, action.microbatch), now + 1) <= now

    def _run(self, action: Action) -> None:
        self.row.append(action)
        if action.kind is Kind.WEIGHT_GRAD:
            self._put_off.popleft()
            self._activations -= 1
            return
        self._order.remove(action)
        self._next[action.kind, action.stage] += 1
        if action.kind is Kind.FORWARD:
            self._activations += 1
        else:
            self._put_off.append(Action(Kind.WEIGHT_GRAD, action.stage, action.microbatch))


def _squeeze(name: str, shape: VShape, ranks: int, microbatches: int) -> Schedule:
    """Simulates the pattern of the shape: every rank continues as soon as it can, and fills idle
    time with deferred weight gradients, and with actions that may run before their turn."""
    states = [
        _Rank(rank, ranks, microbatches, shape, block)
        for rank, block in enumerate(_block(shape, ranks))
    ]
    ended: dict[Action, int] = {}
    for now in range(PERIOD * (microbatches + ranks)):  # enough for all actions
        for state in states:
            state.step(now, ended)
    return Schedule(
        name, microbatches, _placement(ranks), tuple(tuple(state.row) for state in states)
    )


class _PairRow:
    """The remaining forwards and backwards of a rank, per stage in the order of the microbatches. A
    call appends one to the row, or nothing if the stage has none left."""

    def __init__(self, microbatches: int) -> None:
        self.row: list[Action | Pair] = []
        self._microbatches = microbatches
        self._done: Counter[tuple[Kind, int]] = Counter()  # a split backward counts as a backward
        self.put_off: deque[Action] = deque()  # weight gradients

    def remaining(self, kind: Kind, stage: int) -> int:
        return self._microbatches - self._done[kind, stage]

    def forward(self, stage: int) -> None:
        self.row += self._take(Kind.FORWARD, stage)

    def backward(self, stage: int) -> None:
        self.row += self._take(Kind.BACKWARD, stage)

    def input_grad(self, stage: int) -> None:
        """Appends the input gradient of a backward; its weight gradient is deferred."""
        for whole in self._take(Kind.BACKWARD, stage):
            self.row.append(Action(Kind.INPUT_GRAD, stage, whole.microbatch))
            self.put_off.append(Action(Kind.WEIGHT_GRAD, stage, whole.microbatch))

    def weight_grad(self) -> None:
        if self.put_off:
            self.row.append(self.put_off.popleft())

    def pair(self, forward: int, backward: int) -> None:
        """Appends a pair of a forward and a backward of these stages, or only one if the other has
        none left."""
        parts = (*self._take(Kind.FORWARD, forward), *self._take(Kind.BACKWARD, backward))
        self.row += [Pair(*parts)] if len(parts) == 2 else parts

    def _take(self, kind: Kind, stage: int) -> tuple[Action, ...]:
        if not self.remaining(kind, stage):
            return ()
        self._done[kind, stage] += 1
        return (Action(kind, stage, self._done[kind, stage] - 1),)


def _pairs_of(ranks: int, rank: int, microbatches: int) -> tuple[Action | Pair, ...]:
    """The actions of a rank in DualPipe's V: fill, pairs as long as there are forwards, drain."""
    work = _PairRow(microbatches)
    down, up = rank, 2 * ranks - 1 - rank
    to_end = ranks - 1 - rank  # ranks between this one and the turn

    for _ in range(2 * to_end):  # until the first microbatch returns from the turn
        work.forward(down)
    for _ in range(rank + 1):  # until it reaches the loss, and its gradient this rank
        work.forward(down)
        work.forward(up)
    # until the gradient returns from the turn; later ranks wait for it, so it runs first
    for _ in range(to_end):
        work.input_grad(up)
        work.weight_grad()
        work.forward(up)

    while work.remaining(Kind.FORWARD, down):
        work.pair(down, up)
        work.pair(up, down)
    while work.remaining(Kind.FORWARD, up):
        work.backward(up)
        work.pair(up, down)

    # Of the alternating backwards, the second half is split, so that the last gradients are sent
    # sooner.
    alternate = [up, down] * work.remaining(Kind.BACKWARD, up)
    for stage in alternate[: len(alternate) // 2]:
        work.backward(stage)
    for stage in alternate[len(alternate) // 2 :]:
        work.input_grad(stage)
    while work.remaining(Kind.BACKWARD, down):
        work.weight_grad()
        work.input_grad(down)
    while work.put_off:
        work.weight_grad()
    return tuple(work.row)
