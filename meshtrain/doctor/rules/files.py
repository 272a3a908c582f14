"""Rules for the files that the job reads and writes, on every host. No I/O."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshtrain.doctor.findings import Finding, Groups, finding, median_of, names_text
from meshtrain.doctor.records import ClusterFacts, PathFacts

SLOW_MIB_PER_S = 50.0
SLOWER = 4.0  # than the median host


@dataclass(frozen=True)
class HostPath:
    """A path of the config, as one host sees it."""

    host: int  # its index
    name: str  # the host's label
    facts: PathFacts


def files(cluster: ClusterFacts) -> Iterator[Finding]:
    for key, paths in _by_file(cluster):
        yield from _problems(key, paths)
        usable = [path for path in paths if not path.facts.problem]
        if paths[0].facts.writes:
            yield from _not_shared(cluster, key, usable)
        else:
            yield from _not_the_same(key, usable)
        yield from _slow(key, usable)


def _by_file(cluster: ClusterFacts) -> list[tuple[str, list[HostPath]]]:
    """Each file of the config: its key, and its path on each host."""
    by_file: dict[tuple[str, int], list[HostPath]] = {}
    for i, (name, host) in enumerate(cluster.labelled):
        # A key may stand for two files, as that of a megatron corpus does: on every host the first
        # is the same file, and the second.
        files_of_key = Counter[str]()
        for facts in host.paths:
            number = files_of_key[facts.key]
            files_of_key[facts.key] += 1
            by_file.setdefault((facts.key, number), []).append(HostPath(i, name, facts))
    return [(key, paths) for (key, _), paths in by_file.items()]


def _problems(key: str, paths: Sequence[HostPath]) -> Iterator[Finding]:
    bad = {path.name: path.facts for path in paths if path.facts.problem}
    good = [path.name for path in paths if not path.facts.problem]
    problems = {name: f"{facts.path} {facts.problem}" for name, facts in bad.items()}
    for problem, hosts in Groups.of(problems).by_value.items():
        facts = bad[hosts[0]]
        if facts.seen:
            problem += f"; the nearest folder that is there is {facts.seen}"
        if good:
            problem += f" (it is all right on {names_text(good)})"

        if not facts.writes:
            sentence = "path-missing"
        elif good:
            sentence = "path-not-writable/elsewhere"
        else:
            sentence = "path-not-writable"
        yield finding(sentence, hosts, key=key, problem=problem)


def _not_the_same(key: str, usable: Sequence[HostPath]) -> Iterator[Finding]:
    contents_of = {}
    for path in usable:
        contents_of[path.name] = f"{path.facts.size} bytes, digest {path.facts.digest}"
    contents = Groups.of(contents_of)
    if not contents.differ:
        return
    text = str(contents)
    # The paths may say why: a host may have another file system mounted there.
    places = Groups.of({path.name: path.facts.path for path in usable})
    if places.differ:
        text += f" ({places})"
    yield finding("data-differs", contents.minority, key=key, groups=text)


def _not_shared(cluster: ClusterFacts, key: str, usable: Sequence[HostPath]) -> Iterator[Finding]:
    """Every host has left a small file: a host that does not see the others' files writes to a disk
    of its own."""
    if len(usable) < 2 or not cluster.several_machines:
        return
    alone = []
    for path in usable:
        visit = None
        if path.host < len(cluster.visits):
            visit = cluster.visits[path.host]
        if visit is None or key in visit.blind:  # it has not looked, or could not
            continue
        files_of_others = [other.facts.token for other in usable if other.host != path.host]
        seen = [token for token in files_of_others if token in visit.tokens]
        # A host with a disk of its own makes every other one miss a file: only who misses most of
        # them is alone.
        misses_most = len(seen) < len(files_of_others) / 2
        if misses_most or not seen:
            alone.append(path.name)
    if alone:
        yield finding(
            "folder-not-shared",
            alone,
            key=key,
            path=usable[0].facts.path,
            folders=Groups.of({path.name: path.facts.seen for path in usable}),
            kinds=Groups.of({path.name: path.facts.filesystem for path in usable}),
        )


def _slow(key: str, usable: Sequence[HostPath]) -> Iterator[Finding]:
    measured: list[tuple[HostPath, float]] = []
    for path in usable:
        speed = path.facts.mib_per_s
        if speed is not None:  # None: the file is too small to tell
            measured.append((path, speed))

    middle = median_of([speed for _, speed in measured])
    others = f" (the median host: {middle:.0f})" if len(measured) > 1 else ""
    for path, speed in measured:
        if speed < SLOW_MIB_PER_S or speed < middle / SLOWER:
            sentence = "slow-read/checkpoint" if path.facts.writes else "slow-read"
            yield finding(sentence, path.name, key=key, speed=speed, others=others)
