"""Simulation of a schedule: start and end of every action, idle time, memory held, or why it cannot
finish.

As in the engine, a rank runs its list in order, one action at a time, and an action starts as soon
as its inputs have arrived: after the neighbours' actions, plus the transfer time from another rank.
Sends do not wait.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from meshtrain.pipeline.actions import Action, Kind, Schedule, ScheduleError

Cost = float | Sequence[float]  # per action, the same for all stages or one for each stage


@dataclass(frozen=True, slots=True)
class Event:
    """An executed action, with its rank, start and end. The unit of time is that of the costs."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The events of every rank, simulated or measured in a real run. Values per rank are in rank
    order."""

    events: tuple[tuple[Event, ...], ...] = field(repr=False)  # per rank, in order of their start

    @classmethod
    def measured(cls, events: Iterable[Event], ranks: int) -> "Timeline":
        """A timeline from the recorded events of a real run of `ranks` ranks, in any order, on one
        clock."""
        rows: list[list[Event]] = [[] for _ in range(ranks)]
        for event in events:
            rows[event.rank].append(event)
        for row in rows:
            row.sort(key=lambda event: (event.start, event.end))
        return cls(tuple(map(tuple, rows)))

    @property
    def ranks(self) -> int:
        return len(self.events)

    @cached_property
    def start(self) -> float:
        """The first start on any rank."""
        return min((row[0].start for row in self.events if row), default=0)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        last_end = max((event.end for row in self.events for event in row), default=0)
        return last_end - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time in which a rank runs actions; if two measured actions overlap it counts once."""
        return tuple(_busy_time(row) for row in self.events)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Makespan minus busy time."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def idle_in_span(self) -> tuple[float, ...]:
        """Idle time between a rank's own first start and last end."""
        return tuple(_span(row) - busy for row, busy in zip(self.events, self.busy, strict=True))

    @property
    def idle_share(self) -> float:
        """Idle time of all ranks as a fraction of their time: the bubble, 0 to 1."""
        if not self.makespan:
            return 0.0
        return sum(self.idle) / (self.ranks * self.makespan)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """The most forwards held in memory at once, each from its forward until its weight gradient
        is done."""
        return tuple(_peak(row) for row in self.events)


@dataclass(frozen=True, slots=True)
class BlockedRank:
    """Why a rank cannot continue: its next action needs one that is not done."""

    rank: int
    action: Action  # the next action of this rank
    position: int  # its index in the rank's list, from 0
    missing: Action
    holder: int | None  # the rank whose list still has the missing action; None: no rank's
    missing_position: int | None  # its index in that list


class DeadlockError(ScheduleError):
    """A schedule that cannot finish. `waits`: one for every action that a blocked rank waits for.
    `cycle`: ranks of which each waits for the next, and the last for the first; empty if a missing
    action is in no rank's list."""

    def __init__(self, schedule: Schedule, waits: Sequence[BlockedRank]) -> None:
        self.waits = tuple(waits)
        self.cycle = _cycle(waits)
        super().__init__(_deadlock_message(schedule, waits, self.cycle))


def simulate(
    schedule: Schedule,
    forward: Cost = 1,
    input_grad: Cost = 1,
    weight_grad: Cost = 1,
    transfer: float = 0,
) -> Timeline:
    """The timeline with every action as early as possible, computed in time linear in the number of
    actions.

    Costs are per action: a number, or one per stage. A whole backward costs `input_grad` +
    `weight_grad`, a pair the sum of its parts. `transfer`: time from the end of an action until
    another rank has its output.

    Raises:
        DeadlockError: the schedule cannot finish; the message says which ranks wait for what.
        ScheduleError: costs are negative, or not one for each stage.
    """
    if transfer < 0:
        raise ScheduleError(f"a transfer takes a time of at least 0; found {transfer}")
    costs = _costs(schedule, forward, input_grad, weight_grad)

    lists = [schedule.actions_of(rank) for rank in range(schedule.ranks)]
    rows: list[list[Event]] = [[] for _ in lists]
    done: dict[Action, Event] = {}
    waiting: dict[Action, list[int]] = defaultdict(list)  # action that is not done -> blocked ranks
    able = list(range(schedule.ranks))  # ranks that may be able to continue
    while able:
        rank = able.pop()
        actions, row = lists[rank], rows[rank]
        while len(row) < len(actions):
            action = actions[len(row)]
            needed = schedule.needs(action)
            missing = next((need for need in needed if need not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break

            # As soon as the rank is free and what the action needs has arrived.
            start: float = row[-1].end if row else 0
            for need in needed:
                event = done[need]
                arrival = event.end if event.rank == rank else event.end + transfer
                start = max(start, arrival)
            event = Event(rank, action, start, start + costs[action.kind][action.stage])
            done[action] = event
            row.append(event)
            able += waiting.pop(action, ())

    reached = [len(row) for row in rows]
    if any(position < len(actions) for position, actions in zip(reached, lists, strict=True)):
        raise _deadlock(schedule, lists, reached, done.keys())
    return Timeline(tuple(map(tuple, rows)))


def _costs(
    schedule: Schedule, forward: Cost, input_grad: Cost, weight_grad: Cost
) -> dict[Kind, tuple[float, ...]]:
    """The cost of each kind of action, for each stage."""
    costs = {
        Kind.FORWARD: _per_stage("forward", forward, schedule.stages),
        Kind.INPUT_GRAD: _per_stage("input_grad", input_grad, schedule.stages),
        Kind.WEIGHT_GRAD: _per_stage("weight_grad", weight_grad, schedule.stages),
    }
    halves = zip(costs[Kind.INPUT_GRAD], costs[Kind.WEIGHT_GRAD], strict=True)
    costs[Kind.BACKWARD] = tuple(of_input + of_weights for of_input, of_weights in halves)
    return costs


def _per_stage(name: str, cost: Cost, stages: int) -> tuple[float, ...]:
    costs = (cost,) * stages if isinstance(cost, int | float) else tuple(cost)
    if len(costs) != stages:
        raise ScheduleError(
            f"{name}: a number, or one for each of the {stages} stages; found {len(costs)} numbers"
        )
    if min(costs) < 0:
        raise ScheduleError(f"{name}: an action takes a time of at least 0; found {min(costs)}")
    return costs


def _span(row: Sequence[Event]) -> float:
    """The time from the first start to the last end."""
    if not row:
        return 0
    return max(event.end for event in row) - row[0].start


def _busy_time(row: Sequence[Event]) -> float:
    """The total time that the events, sorted by start, cover."""
    total: float = 0
    reach = row[0].start if row else 0
    for event in row:
        total += max(0, event.end - max(event.start, reach))
        reach = max(reach, event.end)
    return total


def _peak(row: Sequence[Event]) -> int:
    """The most forwards whose weight gradient is not done."""
    held = peak = 0
    for event in row:
        kind = event.action.kind
        if kind is Kind.FORWARD:
            held += 1
            peak = max(peak, held)
        elif kind.gives_weight_grad:
            held -= 1
    return peak


def _deadlock(
    schedule: Schedule, lists: Sequence[Sequence[Action]], reached: Sequence[int], done: Set[Action]
) -> DeadlockError:
    """`reached`: per rank, the index of its next action in its list."""
    ahead: dict[Action, tuple[int, int]] = {}  # action that is not done -> (rank, its index)
    for rank, actions in enumerate(lists):
        for position in range(reached[rank], len(actions)):
            ahead[actions[position]] = rank, position

    waits = []
    for rank, actions in enumerate(lists):
        position = reached[rank]
        if position == len(actions):
            continue
        action = actions[position]
        for missing in schedule.needs(action):
            if missing not in done:
                holder, its_position = ahead.get(missing, (None, None))
                waits.append(BlockedRank(rank, action, position, missing, holder, its_position))
    return DeadlockError(schedule, waits)


def _cycle(waits: Sequence[BlockedRank]) -> tuple[int, ...]:
    """Ranks that wait for each other in a cycle, starting with the lowest; empty if there is none.

    Every blocked rank waits for a blocked rank, or for an action that is in no list. So a walk from
    rank to rank ends in a cycle, unless it reaches a rank that waits only for actions in no list,
    which is then the cause.
    """
    next_rank: dict[int, int | None] = {}
    for wait in waits:
        if next_rank.get(wait.rank) is None:
            next_rank[wait.rank] = wait.holder
    for rank in sorted(next_rank):
        walked: list[int] = []
        at: int | None = rank
        while at is not None and at not in walked:
            walked.append(at)
            at = next_rank[at]
        if at is not None:
            circle = walked[walked.index(at) :]
            lowest = circle.index(min(circle))
            return tuple(circle[lowest:] + circle[:lowest])
    return ()


def _deadlock_message(
    schedule: Schedule, waits: Sequence[BlockedRank], cycle: Sequence[int]
) -> str:
    lines = [f"schedule {schedule.name} cannot finish:"]
    for wait in waits:
        if wait.missing_position is None:
            reason = "which is in no rank's list"
        elif wait.holder == wait.rank:
            reason = f"which comes later in its own list, as number {wait.missing_position + 1}"
        else:
            reason = (
                f"number {wait.missing_position + 1} of rank {wait.holder}, which has not come to "
                "it"
            )
        lines.append(
            f"  rank {wait.rank} stands before {wait.action}, number {wait.position + 1} of its "
            f"actions, and waits for {wait.missing}, {reason}"
        )
    if len(cycle) > 1:
        lines.append("  they wait in a circle: rank " + " -> ".join(map(str, (*cycle, cycle[0]))))
    return "\n".join(lines)
