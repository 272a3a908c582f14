"""Which rank a job was lost by, decided from what was found out about every rank.

torchrun names the process that ended first, and a time-out is reported by those who waited: both are often victims.
Whoever is asked here is asked about itself, and who does not answer has answered as well.
"""

from collections.abc import Mapping, Sequence

from meshtrain.operate.testimony import Seen, Statement, Verdict, Wait, ranks_of
from meshtrain.operate.wording import NAMED, doing, lost_to, named, numbers, stacks, waiting, where


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
    errors = [one for one in failed if one.said.kind == "error"]
    own = [one for one in errors if not one.said.broken]
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
        return Verdict("ended", (first.rank,), f"{first.who} was {first.said.failure}")
    return _stuck(seen) if hangs else None


def _first(failed: Sequence[Seen]) -> Seen:
    return max(failed, key=lambda one: (one.said.failed_s, -one.rank))


def _failed(one: Seen) -> Verdict:
    return Verdict("failed", (one.rank,), f"{one.who} failed: {one.said.failure}")


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
            details = (*more, *waiting(seen, ranks), *(() if what == "gone" else stacks(seen)))
            return Verdict(what, ranks_of(lost), lost_to(what, lost, seen), details)
    return None


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
            f"{named(circle)} wait for each other: they have not called the same collectives in the same order, or a "
            "message was lost"
        )
        return Verdict("deadlock", ranks_of(circle), headline, (*waiting(seen, set(behind)), *stacks(seen)))
    if spare and (ends := [rank for rank in ends if not _patient(by_rank[rank])]) == []:
        return None
    culprits = [by_rank[rank] for rank in ends]
    one = culprits[0]
    victims = sorted(rank for rank, others in behind.items() if one.rank in others)
    waits = [wait for rank in victims if (wait := by_rank[rank].said.wait) is not None]
    wait = next((one for one in waits if one.number is not None), waits[0])
    seconds = max(by_rank[rank].said.seconds for rank in victims)
    headline = (
        f"{named(culprits)} did not arrive at {wait} (ranks {numbers(wait.ranks)}), where "
        f"{'ranks' if len(victims) > 1 else 'rank'} {numbers(victims)} waited for {seconds:.0f} s: {doing(one)}"
    )
    failed = [f"{one.who} failed: {said.failure}" for one in culprits if (said := one.statement) and said.failure]
    return Verdict("absent", tuple(ends), headline, (*failed, *waiting(seen, set(ends)), *stacks(seen)))


def _union(behind: Mapping[int, frozenset[int]]) -> set[int]:
    """Ranks of a group share one set: each is added once."""
    return set().union(*{id(others): others for others in behind.values()}.values())


def _patient(one: Seen) -> bool:
    return one.statement is not None and one.statement.patient and not one.statement.late


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
    different = list(dict.fromkeys(map(str, known)))
    places = ", ".join(different[:NAMED]) + ", ..." * (len(different) > NAMED)
    message = "" if all(wait.number is not None for wait in known) else ", or a message was not sent"
    headline = f"all ranks wait in {places}: a device or a link is stuck{message}"
    return Verdict("stuck", (), headline, (*waiting(seen, set(ranks_of(seen))), *stacks(seen)))


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
    head = f"this takes long ({seconds:.0f} s in {where(max(said, key=lambda one: one.seconds))}), and no rank waits"
    return "\n".join([f"{head} for another one, as far as can be seen. They are:", *(f"  {x}" for x in stacks(seen))])


def waited_for(seen: Sequence[Seen]) -> str:
    """For people, where somebody is busy for long and may be: who, with what."""
    said = {one.rank: one.statement for one in seen if one.statement is not None}
    behind = _behind(seen)
    ends = _union(behind) - set(behind)
    some = [one for one in seen if one.rank in (ends or {rank for rank in said if said[rank].late})]
    silent = [one for one in seen if one.statement is None]
    if not some:
        return f"waiting for {named(silent or seen)}"
    longest = max(some, key=lambda one: one.said.seconds)
    words = f"{named(some)}: {where(longest.said)}, for {longest.said.seconds:.0f} s now"
    return f"waiting for {words}" + (f"; no answer from {named(silent)}" if silent else "")
