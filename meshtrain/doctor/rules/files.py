"""Rules for the files that the job reads and writes, on every host. No I/O."""

from collections.abc import Iterator

from meshtrain.doctor.findings import (
    Finding,
    finding,
    group_by_value,
    groups_text,
    median_of,
    minority,
    names_text,
)
from meshtrain.doctor.records import ClusterFacts, PathFacts

SLOW_MIB_PER_S = 50.0
SLOWER = 4.0  # than the median host

PathOfHost = tuple[int, str, PathFacts]  # index and label of the host


def files(cluster: ClusterFacts) -> Iterator[Finding]:
    names = cluster.labels
    by_key: dict[tuple[str, int], list[PathOfHost]] = {}
    for i, host in enumerate(cluster.hosts):
        counts: dict[str, int] = {}
        for path in host.paths:  # a key may stand for two files
            counts[path.key] = counts.get(path.key, 0) + 1
            by_key.setdefault((path.key, counts[path.key]), []).append((i, names[i], path))
    for (key, _), paths in by_key.items():
        yield from _problems(key, paths)
        usable = [row for row in paths if not row[2].problem]
        yield from (
            _not_shared(cluster, key, usable) if paths[0][2].writes else _not_the_same(key, usable)
        )
        yield from _slow(key, usable)


def _problems(key: str, paths: list[PathOfHost]) -> Iterator[Finding]:
    bad = {name: path for _, name, path in paths if path.problem}
    good = [name for _, name, path in paths if not path.problem]
    groups = group_by_value(list(bad), [f"{path.path} {path.problem}" for path in bad.values()])
    for text, hosts in groups.items():
        path = bad[hosts[0]]
        elsewhere = f" (it is all right on {names_text(good)})" if good else ""
        above = f"; the nearest folder that is there is {path.seen}" if path.seen else ""
        sentence = (
            ("path-not-writable/elsewhere" if good else "path-not-writable")
            if path.writes
            else "path-missing"
        )
        yield finding(sentence, hosts, key=key, problem=f"{text}{above}{elsewhere}")


def _not_the_same(key: str, usable: list[PathOfHost]) -> Iterator[Finding]:
    names = [name for _, name, _ in usable]
    groups = group_by_value(
        names, [f"{path.size} bytes, digest {path.digest}" for _, _, path in usable]
    )
    if len(groups) > 1:
        paths = group_by_value(names, [path.path for _, _, path in usable])
        text = groups_text(groups) + (f" ({groups_text(paths)})" if len(paths) > 1 else "")
        yield finding("data-differs", minority(groups), key=key, groups=text)


def _not_shared(cluster: ClusterFacts, key: str, usable: list[PathOfHost]) -> Iterator[Finding]:
    """Every host has left a small file: a host that does not see the others' files writes to a disk
    of its own."""
    if len(usable) < 2 or not cluster.several_machines:
        return
    alone: list[str] = []
    for i, name, _ in usable:
        checks = cluster.visits[i] if i < len(cluster.visits) else None
        if checks is None or key in checks.blind:
            continue
        others = [path.token for j, _, path in usable if j != i]
        mutual = [token for token in others if token in checks.tokens]
        if len(mutual) * 2 < len(others) or not mutual:
            alone.append(name)
    if alone:
        names = [name for _, name, _ in usable]
        folders = groups_text(group_by_value(names, [path.seen for _, _, path in usable]))
        kinds = groups_text(group_by_value(names, [path.filesystem for _, _, path in usable]))
        yield finding(
            "folder-not-shared",
            alone,
            key=key,
            path=usable[0][2].path,
            folders=folders,
            kinds=kinds,
        )


def _slow(key: str, usable: list[PathOfHost]) -> Iterator[Finding]:
    speeds = [(name, path.mib_per_s) for _, name, path in usable if path.mib_per_s is not None]
    middle = median_of([speed for _, speed in speeds])
    others = f" (the median host: {middle:.0f})" if len(speeds) > 1 else ""
    for name, speed in speeds:
        if speed < SLOW_MIB_PER_S or speed * SLOWER < middle:
            sentence = "slow-read/checkpoint" if usable[0][2].writes else "slow-read"
            yield finding(sentence, name, key=key, speed=speed, others=others)
