"""What is said about ranks: who they are, where they wait, and where they are."""

from collections.abc import Iterable, Sequence

from meshtrain.operate.testimony import Seen, Statement, ranks_of

STACKS = 6  # different ones that are shown; ranks in the same place share one
NAMED = 4  # ranks that are named with host and coordinate; of more, the numbers are given


def named(some: Sequence[Seen]) -> str:
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


def where(said: Statement) -> str:
    if said.phase == "step":
        return f"step {said.step}"
    return f"{said.phase} (step {said.step})" if said.step else said.phase


def lost_to(what: str, lost: Sequence[Seen], seen: Sequence[Seen]) -> str:
    ranks = {one.rank for one in lost}
    hosts = list(dict.fromkeys(one.host for one in lost))
    alive = {one.host for one in seen if one.rank not in ranks}
    whole = [host for host in hosts if host not in alive]
    many = len(lost) > 1
    if what == "unreachable":
        some = "; ".join(f"host {host}: {named([one for one in lost if one.host == host])}" for host in hosts)
        word = "hosts" if len(hosts) > 1 else "host"
        return (
            f"{word} {', '.join(hosts)} cannot be reached: {'they are' if len(hosts) > 1 else 'it is'} down, or the "
            f"network between is cut ({some})"
        )
    if what == "gone":
        all_of_host = f" (all ranks of host {', '.join(whole)})" if whole and many else ""
        processes = f"processes {', '.join(str(one.pid) for one in lost[:NAMED])}" if many else f"process {lost[0].pid}"
        return (
            f"{named(lost)} {'are' if many else 'is'} gone{all_of_host}: {processes} {'were' if many else 'was'} "
            "killed (by somebody, or because memory was full) or crashed; its output or the kernel's log may say why"
        )
    if what == "stopped":
        state = f"process {lost[0].pid} lives" if not many else "the processes live"
        return f"{named(lost)} {'are' if many else 'is'} stopped (SIGSTOP, or a debugger): {state}, and does not run"
    return (
        f"{named(lost)} {'do' if many else 'does'} not answer: process {lost[0].pid} is there, and is stopped, "
        "starved or in a call that lets none of its other threads run"
    )


def doing(one: Seen) -> str:
    said = one.said
    if said.failure is not None:
        return f"rank {one.rank} failed in {where(said)}: {said.failure.splitlines()[0]}"
    frame = f"; it is at {said.stack[-1]}" if said.stack else ""
    return f"rank {one.rank} is in {where(said)}{frame}"


def waiting(seen: Sequence[Seen], culprits: set[int]) -> list[str]:
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


def stacks(seen: Sequence[Seen]) -> list[str]:
    """Where every rank is, equal stacks once."""
    alike: dict[tuple[str, tuple[str, ...]], list[Seen]] = {}
    for one in seen:
        if one.statement is not None and one.statement.stack:
            alike.setdefault((where(one.statement), one.statement.stack), []).append(one)
    lines = []
    groups = sorted(alike.items(), key=lambda item: (len(item[1]), item[1][0].rank))  # the odd one out comes first
    for (place, stack), who in groups[:STACKS]:
        lines.append(f"{'ranks' if len(who) > 1 else 'rank'} {numbers(ranks_of(who))}, in {place}:")
        lines += [f"    {frame}" for frame in stack]
    if len(groups) > STACKS:
        lines.append(f"and {len(groups) - STACKS} other stacks")
    return lines
