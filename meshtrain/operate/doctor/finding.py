"""PURE: one thing that the doctor has to say, and words that its rules share."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshtrain.operate.doctor.record import Host, Seen

SEVERITIES = ("error", "warning", "note")
MOST_NAMES = 8


@dataclass(frozen=True)
class Finding:
    """What is wrong, where, and what mends it.

    Attributes:
        severity: "error": the job would not start or not be right; "warning": it may be slow or surprising; "note".
        id: for programs; one per kind of trouble.
        what: a sentence or two.
        where: hosts (or ranks, or links) that it concerns; empty for the job as a whole.
        fix: what to do.
    """

    severity: str
    id: str
    what: str
    where: tuple[str, ...] = ()
    fix: str = ""


def error(id_: str, what: str, where: Iterable[str], fix: str) -> Finding:
    return Finding("error", id_, what, tuple(where), fix)


def warning(id_: str, what: str, where: Iterable[str], fix: str) -> Finding:
    return Finding("warning", id_, what, tuple(where), fix)


def note(id_: str, what: str, where: Iterable[str] = (), fix: str = "") -> Finding:
    return Finding("note", id_, what, tuple(where), fix)


def labels(seen: Seen) -> list[str]:
    """The hosts' names; a name that comes twice is told apart by its node's number."""
    counts = Counter(host.host for host in seen.hosts)
    return [host.host if counts[host.host] == 1 else f"{host.host} (node {i})" for i, host in enumerate(seen.hosts)]


def some(names: Sequence[str]) -> str:
    """`a, b, c and 12 more`."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def by_value(names: Sequence[str], values: Sequence[str]) -> dict[str, list[str]]:
    """Value -> who has it, the most frequent first; of equally frequent ones the first host's."""
    found: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        found.setdefault(value, []).append(name)
    return dict(sorted(found.items(), key=lambda one: -len(one[1])))


def told(groups: Mapping[str, Sequence[str]]) -> str:
    """`2 on mth1, mth2; 3 on mth3`."""
    return "; ".join(f"{value or '(none)'} on {some(names)}" for value, names in groups.items())


def odd_ones(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """All who have not the most frequent value."""
    return [name for names in list(groups.values())[1:] for name in names]


def several_machines(seen: Seen) -> bool:
    """Whether the job's hosts are more than one."""
    return len({(host.machine, host.host, own(host)) for host in seen.hosts}) > 1


def own(host: Host) -> tuple[str, ...]:
    """All addresses of a host."""
    return tuple(address for one in host.interfaces for address in one.addresses)


def median_of(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
