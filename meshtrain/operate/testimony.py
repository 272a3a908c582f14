"""What ranks say of themselves, what was found out about them, and what it comes to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wait:
    """Where a rank waits for others.

    Attributes:
        what: `all_reduce 204`, for people.
        over: the group, for people: `dp_shard`.
        ranks: of the group.
        number: how many collectives of this group the rank has begun with this one, where that is known.
        missing: who has not come, where the rank knows it itself.
    """

    what: str
    over: str
    ranks: tuple[int, ...]
    number: int | None = None
    missing: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.what} over {self.over}" if self.over else self.what


@dataclass(frozen=True)
class Statement:
    """What a living rank says of itself.

    Attributes:
        phase: what it is doing: start, step, evaluation, saving, end, or a loop of the user's own.
        step: the step that it is in, or was in last.
        seconds: since it last got on.
        failure: what it failed with, if it did. kind: "error", or "signal" if a signal has ended it.
        failed_s: seconds since then.
        broken: whether it failed because its connections to other ranks broke, or they did not come.
        late: whether it has missed its own deadline.
        patient: whether it does what may take long: it reads or writes files.
        wait: where it waits for others, if it does.
        begun: ranks of a group ("0,2") -> collectives of it that the rank has begun.
        stack: where its main thread is, innermost last.
        debugged: whether a debugger holds it.
    """

    phase: str
    step: int
    seconds: float
    failure: str | None = None
    kind: str | None = None
    failed_s: float = 0.0
    broken: bool = False
    late: bool = False
    patient: bool = False
    wait: Wait | None = None
    begun: Mapping[str, int] = field(default_factory=dict)
    stack: tuple[str, ...] = ()
    debugged: bool = False


@dataclass(frozen=True)
class Seen:
    """What was found out about a rank.

    Attributes:
        who: rank, host and coordinate, for people.
        pid: of its process.
        reach: "answers"; "gone": its host says that nobody listens there any more; "silent": the connection was taken
            and not answered; "unreachable": nothing came back from its host.
        stopped: whether its process is, as another rank of its host has seen.
    """

    rank: int
    host: str
    who: str
    pid: int
    reach: str
    statement: Statement | None = None
    stopped: bool = False

    @property
    def said(self) -> Statement:
        """Of a rank that answers."""
        assert self.statement is not None
        return self.statement


def ranks_of(some: Iterable[Seen]) -> tuple[int, ...]:
    return tuple(one.rank for one in some)


@dataclass(frozen=True)
class Verdict:
    """What a job was lost by.

    Attributes:
        what: "gone", "stopped", "unreachable", "silent", "failed", "ended" (by a signal), "absent", "deadlock" or
            "stuck" (all are where they should be, and what they wait for does not end).
        ranks: to whom it happened; none where it was nobody in particular.
        headline: in a sentence, as it follows "rank 0 on host a stops, because".
        details: lines to go below it.
    """

    what: str
    ranks: tuple[int, ...]
    headline: str
    details: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "\n".join([self.headline, *(f"  {line}" for line in self.details)])
