"""PURE: what the job reads and writes, on every host."""

from collections.abc import Iterator

from meshtrain.operate.doctor.finding import (
    Finding,
    by_value,
    error,
    labels,
    median_of,
    several_machines,
    some,
    told,
    warning,
)
from meshtrain.operate.doctor.record import PathFacts, Seen

SLOW_MIB_PER_S = 50.0
SLOWER = 4.0  # than the median host


def files(seen: Seen) -> Iterator[Finding]:
    """Paths that cannot be used, that differ, that are not shared, that are slow."""
    found: dict[tuple[str, int], list[tuple[int, PathFacts]]] = {}
    for i, host in enumerate(seen.hosts):
        counts: dict[str, int] = {}
        for one in host.paths:  # a key may stand for two files
            counts[one.key] = counts.get(one.key, 0) + 1
            found.setdefault((one.key, counts[one.key]), []).append((i, one))
    for (key, _), all_ in found.items():
        yield from _problems(seen, key, all_)
        usable = [(i, one) for i, one in all_ if not one.problem]
        if all_[0][1].writes:
            yield from _not_shared(seen, key, usable)
        else:
            yield from _not_the_same(seen, key, usable)
        yield from _slow(seen, key, usable)


def _problems(seen: Seen, key: str, all_: list[tuple[int, PathFacts]]) -> Iterator[Finding]:
    names = labels(seen)
    bad = [(names[i], one) for i, one in all_ if one.problem]
    good = [names[i] for i, one in all_ if not one.problem]
    groups = by_value([name for name, _ in bad], [f"{one.path} {one.problem}" for _, one in bad])
    for text, where in groups.items():
        one = next(one for name, one in bad if name == where[0])
        elsewhere = f" (it is all right on {some(good)})" if good else ""
        above = f"; the nearest folder that is there is {one.seen}" if one.seen else ""
        yield error(
            "path-not-writable" if one.writes else "path-missing",
            f"{key} on {some(where)}: {text}{above}{elsewhere}",
            where,
            "mount the same file system there, or copy the files to the same path"
            if good or not one.writes
            else f"name a folder that this user may write to with {key}=FOLDER",
        )


def _not_the_same(seen: Seen, key: str, usable: list[tuple[int, PathFacts]]) -> Iterator[Finding]:
    names = labels(seen)
    groups = by_value([names[i] for i, _ in usable], [f"{one.size} bytes, digest {one.digest}" for _, one in usable])
    if len(groups) > 1:
        paths = by_value([names[i] for i, _ in usable], [one.path for _, one in usable])
        yield error(
            "data-differs",
            f"{key} is not the same on every host: {told(groups)}" + (f" ({told(paths)})" if len(paths) > 1 else ""),
            [name for where in list(groups.values())[1:] for name in where],
            "copy it anew from one host to the others, or read it from a file system that all share",
        )


def _not_shared(seen: Seen, key: str, usable: list[tuple[int, PathFacts]]) -> Iterator[Finding]:
    """Every host has left a small file: who does not see the others' writes to a disk of its own."""
    if len(usable) < 2 or not several_machines(seen):
        return
    names = labels(seen)
    alone: list[str] = []
    for i, _ in usable:
        visit = seen.visits[i] if i < len(seen.visits) else None
        if visit is None or key in visit.blind:
            continue
        others = [other.token for j, other in usable if j != i]
        mutual = [token for token in others if token in visit.tokens]
        if len(mutual) * 2 < len(others) or not mutual:
            alone.append(names[i])
    if alone:
        first = usable[0][1]
        kinds = told(by_value([names[i] for i, _ in usable], [one.filesystem for _, one in usable]))
        where = told(by_value([names[i] for i, _ in usable], [one.seen for _, one in usable]))
        yield error(
            "folder-not-shared",
            f"{key} ({first.path}) is a folder of its own on {some(alone)}: what one host writes the others do not see "
            f"({where}; file systems: {kinds}). A checkpoint would be in pieces on all of them",
            alone,
            f"name a folder on a file system that all nodes mount, with {key}=FOLDER",
        )


def _slow(seen: Seen, key: str, usable: list[tuple[int, PathFacts]]) -> Iterator[Finding]:
    names = labels(seen)
    speeds = [(names[i], one.mib_per_s) for i, one in usable if one.mib_per_s is not None]
    middle = median_of([speed for _, speed in speeds])
    for name, speed in speeds:
        if speed < SLOW_MIB_PER_S or speed * SLOWER < middle:
            yield warning(
                "slow-read",
                f"{key} is read with {speed:.0f} MiB/s on {name}"
                + (f" (the median host: {middle:.0f})" if len(speeds) > 1 else ""),
                (name,),
                "see which of them the file server treats differently: a restart reads its checkpoint from there"
                if usable[0][1].writes
                else "copy the data to a local disk of every host first, or raise data.workers and data.prefetch",
            )
