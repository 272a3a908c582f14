"""Which rank a job was lost by, decided from what was found out about every rank.

torchrun names the process that ended first, and a time-out is reported by those who waited: both are often victims.
Whoever is asked here is asked about itself, and who does not answer has answered as well.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

STACKS = 6  # different ones that are shown; ranks in the same place share one
NAMED = 4  # ranks that are named with host and coordinate; of more, the numbers are given

# What errors of collectives and of the store say: another process has gone before, or did not come. What reads from
# the network says the like of itself: see witness.of_connections.
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
    errors = [one for one in failed if _said(one).kind == "error"]
    own = [one for one in errors if not _said(one).broken]
    if own:
        return _failed(_first(own))
    # Who does not answer may be busy, or behind a firewall: that alone is no reason to end a job that gets on.
    if (hangs or errors) and (verdict := _missing(seen, ("unreachable", "silent"))) is not None:
        return verdict
    if hangs and (verdict := _absent(seen, spare=not errors)) is not None:
        return verdict
    if errors:
        return _failed(_first(errors))
    if failed:
        first = _first(failed)
        return Verdict("ended", (first.rank,), f"{first.who} was {_said(first).failure}")
    return _stuck(seen) if hangs else None


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
    if one.statement is None or one.statement.kind != "error" or one.statement.broken:
        return [f"{one.who} is {one.reach} too"] if one.reach not in ("answers", "gone") and not one.stopped else []
    return [f"besides, {one.who} failed: {one.statement.failure}"]


# Ranks that do not answer -------------------------------------------------------------------------------------------


def _missing(seen: Sequence[Seen], kinds: Sequence[str]) -> Verdict | None:
    """Those who do not answer in the first of these ways that there is."""
    for what in kinds:
        lost = [one for one in seen if (one.stopped if what == "stopped" else one.reach == what and not one.stopped)]
        if lost:
            ranks = {one.rank for one in lost}
            more = [line for one in seen if one.rank not in ranks for line in _also(one)]
            stacks = () if what == "gone" else _stacks(seen)
            details = (*more, *_waits(seen, ranks), *stacks)
            return Verdict(what, _ranks(lost), _lost(what, lost, seen), details)
    return None


def _lost(what: str, lost: Sequence[Seen], seen: Sequence[Seen]) -> str:
    ranks = {one.rank for one in lost}
    hosts = list(dict.fromkeys(one.host for one in lost))
    alive = {one.host for one in seen if one.rank not in ranks}
    whole = [host for host in hosts if host not in alive]
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
    hosts = list(dict.fromkeys(one.host for one in some))
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


def _absent(seen: Sequence[Seen], *, spare: bool) -> Verdict | None:
    """Who did not arrive, where everybody answers: whoever is waited for and waits for nobody.

    Args:
        spare: whether who may be busy for long, and has not been for longer than that, is waited for.
    """
    behind = _behind(seen)
    wanted = _union(behind)
    if not wanted:
        return None
    by_rank = {one.rank: one for one in seen}
    ends = sorted(wanted - set(behind))
    if not ends:
        circle = [by_rank[rank] for rank in sorted(behind)]
        headline = (
            f"{_named(circle)} wait for each other: they have not called the same collectives in the same order, or a "
            "message was lost"
        )
        return Verdict("deadlock", _ranks(circle), headline, (*_waits(seen, set(behind)), *_stacks(seen)))
    if spare and (ends := [rank for rank in ends if not _patient(by_rank[rank])]) == []:
        return None
    culprits = [by_rank[rank] for rank in ends]
    one = culprits[0]
    victims = sorted(rank for rank, others in behind.items() if one.rank in others)
    waits = [wait for rank in victims if (wait := _said(by_rank[rank]).wait) is not None]
    wait = next((one for one in waits if one.number is not None), waits[0])
    seconds = max(_said(by_rank[rank]).seconds for rank in victims)
    headline = (
        f"{_named(culprits)} did not arrive at {wait} (ranks {numbers(wait.ranks)}), where "
        f"{'ranks' if len(victims) > 1 else 'rank'} {numbers(victims)} waited for {seconds:.0f} s: {_doing(one)}"
    )
    failed = [f"{one.who} failed: {said.failure}" for one in culprits if (said := one.statement) and said.failure]
    return Verdict("absent", tuple(ends), headline, (*failed, *_waits(seen, set(ends)), *_stacks(seen)))


def _union(behind: Mapping[int, frozenset[int]]) -> set[int]:
    """Ranks of a group share one set: each is added once."""
    return set().union(*{id(others): others for others in behind.values()}.values())


def _patient(one: Seen) -> bool:
    return one.statement is not None and one.statement.patient and not one.statement.late


def _doing(one: Seen) -> str:
    said = _said(one)
    if said.failure is not None:
        return f"rank {one.rank} failed in {_where(said)}: {said.failure.splitlines()[0]}"
    where = f"; it is at {said.stack[-1]}" if said.stack else ""
    return f"rank {one.rank} is in {_where(said)}{where}"


def _behind(seen: Sequence[Seen]) -> dict[int, frozenset[int]]:
    """For each rank that waits for somebody: who has not come there. Found once for each place, not for each rank."""
    said = {one.rank: one.statement for one in seen if one.statement is not None}
    at: dict[tuple[tuple[int, ...], int | None, tuple[int, ...] | None], frozenset[int]] = {}
    behind = {}
    for rank, statement in said.items():
        wait = statement.wait
        if wait is None:
            continue
        place = (wait.ranks, wait.number, wait.missing)
        if place not in at:
            at[place] = _not_come(wait, said)
        others = at[place] - {rank} if rank in at[place] else at[place]
        if others:
            behind[rank] = others
    return behind


def _not_come(wait: Wait, said: Mapping[int, Statement]) -> frozenset[int]:
    """Who of a group has not come to where a rank of it waits, as far as they answer."""
    if wait.missing is not None:
        return frozenset(wait.missing)
    key = ",".join(map(str, wait.ranks))

    def come(other: Statement) -> bool:
        if wait.number is not None and key in other.begun:
            return other.begun[key] >= wait.number
        return other.wait is not None and other.wait.ranks == wait.ranks

    return frozenset(rank for rank in wait.ranks if rank in said and not come(said[rank]))


def _stuck(seen: Sequence[Seen]) -> Verdict | None:
    """All wait and nobody is behind: what they have begun together does not end."""
    waits = [one.statement.wait if one.statement is not None else None for one in seen]
    known = [wait for wait in waits if wait is not None]
    if not known or len(known) < len(seen) or _behind(seen):
        return None
    where = list(dict.fromkeys(map(str, known)))
    places = ", ".join(where[:NAMED]) + ", ..." * (len(where) > NAMED)
    message = "" if all(wait.number is not None for wait in known) else ", or a message was not sent"
    headline = f"all ranks wait in {places}: a device or a link is stuck{message}"
    return Verdict("stuck", (), headline, (*_waits(seen, set(_ranks(seen))), *_stacks(seen)))


def same(before: Sequence[Seen], now: Sequence[Seen]) -> bool:
    """Whether nobody has moved between two looks."""

    def still(one: Seen) -> object:
        said = one.statement
        return None if said is None else (said.phase, said.step, said.wait, dict(said.begun), said.stack)

    return [still(one) for one in before] == [still(one) for one in now]


def unexplained(seen: Sequence[Seen]) -> str | None:
    """For people: where all are, if something takes too long and nobody waits for anybody, as far as can be seen."""
    said = [one.statement for one in seen if one.statement is not None]
    if len(said) < len(seen) or any(one.wait or one.failure or one.debugged for one in said):
        return None
    seconds = max(one.seconds for one in said)
    head = f"this takes long ({seconds:.0f} s in {_where(max(said, key=lambda one: one.seconds))}), and no rank waits"
    return "\n".join([f"{head} for another one, as far as can be seen. They are:", *(f"  {x}" for x in _stacks(seen))])


def waited_for(seen: Sequence[Seen]) -> str:
    """For people, where somebody is busy for long and may be: who, with what."""
    said = {one.rank: one.statement for one in seen if one.statement is not None}
    behind = _behind(seen)
    ends = _union(behind) - set(behind)
    some = [one for one in seen if one.rank in (ends or {rank for rank in said if said[rank].late})]
    silent = [one for one in seen if one.statement is None]
    if not some:
        return f"waiting for {_named(silent or seen)}"
    longest = max(some, key=lambda one: _said(one).seconds)
    words = f"{_named(some)}: {_where(_said(longest))}, for {_said(longest).seconds:.0f} s now"
    return f"waiting for {words}" + (f"; no answer from {_named(silent)}" if silent else "")


def _where(said: Statement) -> str:
    if said.phase == "step":
        return f"step {said.step}"
    return f"{said.phase} (step {said.step})" if said.step else said.phase


def _waits(seen: Sequence[Seen], culprits: set[int]) -> list[str]:
    """Which groups wait for them, and who waits there."""
    by_wait: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for one in seen:
        wait = one.statement.wait if one.statement is not None else None
        if wait is not None:
            by_wait.setdefault((str(wait), wait.ranks, wait.missing or ()), []).append(one.rank)
    joined: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for (what, ranks, missing), who in by_wait.items():
        if not culprits.isdisjoint(ranks) or not culprits.isdisjoint(missing):
            joined.setdefault((what, ranks), []).extend(who)
    lines = []
    for (what, ranks), who in list(joined.items())[:STACKS]:
        group = f" (ranks {numbers(ranks)})" if ranks else ""
        absent = (set(ranks) & culprits or culprits) - set(who)
        lines.append(f"{what}{group}: {_verb(sorted(who))}" + f", not arrived: {numbers(absent)}" * bool(absent))
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
