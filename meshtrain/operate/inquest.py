"""Which rank a job was lost by, decided from what was found out about every rank.

torchrun names the process that ended first, and a time-out is reported by those who waited: both are often victims.
Whoever is asked here is asked about itself, and who does not answer has answered as well.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

STACKS = 6  # different ones that are shown; ranks in the same place share one
NAMED = 4  # ranks that are named with host and coordinate; of more, the numbers are given

# What errors of collectives and of the store say: another process has gone before, or did not come.
BROKEN = re.compile(
    r"another rank has failed|Connection (?:closed|reset|refused)|Broken pipe|closed by peer|Timed out waiting"
    r"|DistNetworkError|DistStoreError|DistBackendError|NCCL|gloo|Socket Timeout|recvValue|sendBytes",
    re.IGNORECASE,
)


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


@dataclass(frozen=True)
class Verdict:
    """What a job was lost by.

    Attributes:
        what: "gone", "stopped", "unreachable", "silent", "failed", "ended" (by a signal), "absent" or "deadlock".
        ranks: to whom it happened.
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


def decide(seen: Sequence[Seen], *, hangs: bool) -> Verdict | None:
    """The verdict; None if nothing is wrong.

    Args:
        seen: all ranks, in their order.
        hangs: whether something takes too long. If not, a rank that others wait for is only slow.
    """
    if any(one.statement is not None and one.statement.debugged for one in seen):
        return None
    if (verdict := _missing(seen, ("gone", "stopped"))) is not None:
        return verdict
    failed = [one for one in seen if one.statement is not None and one.statement.failure is not None]
    own = [one for one in failed if _said(one).kind == "error" and not BROKEN.search(_said(one).failure or "")]
    if own:
        return _failed(_first(own))
    if (verdict := _missing(seen, ("unreachable", "silent"))) is not None:
        return verdict
    if hangs and (verdict := _absent(seen)) is not None:
        return verdict
    broken = [one for one in failed if _said(one).kind == "error"]
    if broken:
        return _failed(_first(broken))
    if failed:
        first = _first(failed)
        return Verdict("ended", (first.rank,), f"{first.who} was {_said(first).failure}")
    return None


def _said(one: Seen) -> Statement:
    assert one.statement is not None  # it was asked for only of those who answered
    return one.statement


def _ranks(some: Iterable[Seen]) -> tuple[int, ...]:
    return tuple(one.rank for one in some)


def _first(failed: Sequence[Seen]) -> Seen:
    return max(failed, key=lambda one: (_said(one).failed_s, -one.rank))


def _failed(one: Seen) -> Verdict:
    return Verdict("failed", (one.rank,), f"{one.who} failed: {_said(one).failure}")


def _also(one: Seen) -> list[str]:
    """A failure of another rank that does not look like a consequence."""
    if one.statement is None or one.statement.kind != "error" or BROKEN.search(one.statement.failure or ""):
        return [f"{one.who} is {one.reach} too"] if one.reach not in ("answers", "gone") and not one.stopped else []
    return [f"besides, {one.who} failed: {one.statement.failure}"]


# Ranks that do not answer -------------------------------------------------------------------------------------------


def _missing(seen: Sequence[Seen], kinds: Sequence[str]) -> Verdict | None:
    """Those who do not answer in the first of these ways that there is."""
    for what in kinds:
        lost = [one for one in seen if (one.stopped if what == "stopped" else one.reach == what and not one.stopped)]
        if lost:
            more = [line for one in seen if one not in lost for line in _also(one)]
            stacks = () if what == "gone" else _stacks(seen)
            details = (*more, *_waits(seen, {one.rank for one in lost}), *stacks)
            return Verdict(what, _ranks(lost), _lost(what, lost, seen), details)
    return None


def _lost(what: str, lost: Sequence[Seen], seen: Sequence[Seen]) -> str:
    hosts = sorted({one.host for one in lost}, key=[one.host for one in lost].index)
    whole = [host for host in hosts if all(one in lost for one in seen if one.host == host)]
    many = len(lost) > 1
    if what == "unreachable":
        some = "; ".join(f"host {host}: {_named([one for one in lost if one.host == host])}" for host in hosts)
        word = "hosts" if len(hosts) > 1 else "host"
        return (
            f"{word} {', '.join(hosts)} cannot be reached: {'they are' if len(hosts) > 1 else 'it is'} down, or the "
            f"network between is cut ({some})"
        )
    if what == "gone":
        all_of_host = f" (all ranks of host {', '.join(whole)})" if whole and many else ""
        processes = f"processes {', '.join(str(one.pid) for one in lost[:NAMED])}" if many else f"process {lost[0].pid}"
        return (
            f"{_named(lost)} {'are' if many else 'is'} gone{all_of_host}: {processes} {'were' if many else 'was'} "
            "killed (by somebody, or because memory was full) or crashed; its output or the kernel's log may say why"
        )
    if what == "stopped":
        state = f"process {lost[0].pid} lives" if not many else "the processes live"
        return f"{_named(lost)} {'are' if many else 'is'} stopped (SIGSTOP, or a debugger): {state}, and does not run"
    return (
        f"{_named(lost)} {'do' if many else 'does'} not answer: process {lost[0].pid} is there, and is stopped, "
        "starved or in a call that lets none of its other threads run"
    )


def _named(some: Sequence[Seen]) -> str:
    if len(some) <= NAMED:
        return ", ".join(one.who for one in some)
    hosts = sorted({one.host for one in some}, key=[one.host for one in some].index)
    return (
        f"ranks {numbers(one.rank for one in some)} on host {', '.join(hosts[:NAMED])}{', ...' * (len(hosts) > NAMED)}"
    )


def numbers(ranks: Iterable[int]) -> str:
    """`0-5, 8, 9` for people."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


# Hangs --------------------------------------------------------------------------------------------------------------


def _absent(seen: Sequence[Seen]) -> Verdict | None:
    """Who did not arrive, where everybody answers: whoever is waited for and waits for nobody."""
    waiting = {one.rank: _said(one).wait for one in seen if one.statement is not None}
    behind = {rank: _behind(wait, rank, seen) for rank, wait in waiting.items() if wait is not None}
    behind = {rank: others for rank, others in behind.items() if others}
    wanted = {other for others in behind.values() for other in others}
    if not wanted:
        return None
    by_rank = {one.rank: one for one in seen}
    ends = sorted(wanted - set(behind))
    if ends:
        culprits = [by_rank[rank] for rank in ends]
        one, said = culprits[0], _said(culprits[0])
        victims = sorted(rank for rank, others in behind.items() if one.rank in others)
        waits = [wait for rank in victims if (wait := waiting[rank]) is not None]
        wait = next((one for one in waits if one.number is not None), waits[0])
        seconds = max(_said(by_rank[rank]).seconds for rank in victims)
        where = f"; it is at {said.stack[-1]}" if said.stack else ""
        headline = (
            f"{_named(culprits)} did not arrive at {wait} (ranks {numbers(wait.ranks)}), where "
            f"{'ranks' if len(victims) > 1 else 'rank'} {numbers(victims)} waited for {seconds:.0f} s: "
            f"rank {one.rank} is in {_where(said)}{where}"
        )
        return Verdict("absent", tuple(ends), headline, (*_waits(seen, set(ends)), *_stacks(seen)))
    circle = [by_rank[rank] for rank in sorted(behind)]
    headline = (
        f"{_named(circle)} wait for each other: they have not called the same collectives in the same order, or a "
        "message was lost"
    )
    return Verdict("deadlock", _ranks(circle), headline, (*_waits(seen, set(behind)), *_stacks(seen)))


def _behind(wait: Wait, rank: int, seen: Sequence[Seen]) -> set[int]:
    """Who of a group has not come to where a rank waits."""
    if wait.missing is not None:
        return {other for other in wait.missing if other != rank}
    key = ",".join(map(str, wait.ranks))
    found = set()
    for one in seen:
        if one.rank == rank or one.rank not in wait.ranks or one.statement is None:
            continue
        said = one.statement
        if wait.number is not None and key in said.begun:
            come = said.begun[key] >= wait.number
        else:
            come = said.wait is not None and said.wait.ranks == wait.ranks
        if not come:
            found.add(one.rank)
    return found


def _where(said: Statement) -> str:
    if said.phase == "step":
        return f"step {said.step}"
    return f"{said.phase} (step {said.step})" if said.step else said.phase


def _waits(seen: Sequence[Seen], culprits: set[int]) -> list[str]:
    """Which groups wait for them, and who waits there."""
    by_wait: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for one in seen:
        wait = one.statement.wait if one.statement is not None else None
        if wait is not None and (set(wait.ranks) | set(wait.missing or ())) & culprits:
            by_wait.setdefault((str(wait), wait.ranks), []).append(one.rank)
    lines = []
    for (what, ranks), who in list(by_wait.items())[:STACKS]:
        group = f" (ranks {numbers(ranks)})" if ranks else ""
        lines.append(f"{what}{group}: {_verb(who)}, not arrived: {numbers(set(ranks) & culprits or culprits)}")
    return lines


def _verb(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {numbers(ranks)} wait"


def _stacks(seen: Sequence[Seen]) -> list[str]:
    """Where every rank is, equal stacks once."""
    alike: dict[tuple[str, tuple[str, ...]], list[Seen]] = {}
    for one in seen:
        if one.statement is not None and one.statement.stack:
            alike.setdefault((_where(one.statement), one.statement.stack), []).append(one)
    lines = []
    groups = sorted(alike.items(), key=lambda item: (len(item[1]), item[1][0].rank))  # the odd one out comes first
    for (where, stack), who in groups[:STACKS]:
        lines.append(f"{'ranks' if len(who) > 1 else 'rank'} {numbers(_ranks(who))}, in {where}:")
        lines += [f"    {frame}" for frame in stack]
    if len(groups) > STACKS:
        lines.append(f"and {len(groups) - STACKS} other stacks")
    return lines
