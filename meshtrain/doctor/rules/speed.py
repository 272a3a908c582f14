"""Rules for what the workers measured: they name the slow rank, host or link. No I/O."""

from collections.abc import Iterator, Sequence

from meshtrain.doctor.findings import Finding, Groups, finding, median_of, names_text
from meshtrain.doctor.records import ClusterFacts, Link, Timings

SLOW_LINK = 0.5  # of the median link
SLOW_RANK = 1.6  # times the median rank
SPREAD = 4.0  # ratio of the slowest repetition to the median one
SHORT_S = 2e-3  # below this, a repetition's time cannot be told from scheduling noise


def speed(cluster: ClusterFacts) -> Iterator[Finding]:
    timings = cluster.timings
    if timings is None:
        return
    if timings.skipped:
        yield finding("not-timed", reason=timings.skipped)
        return
    if timings.left_out:
        yield finding("no-time-left", names=names_text(timings.left_out))
    yield from _stuck(cluster, timings)
    yield from _links(cluster, timings.links)
    yield from _ranks(cluster, timings)
    for row in timings.timings:
        if row.spread > SPREAD and row.seconds * row.spread > SHORT_S:
            yield finding("unsteady", row=row)


def host_of(cluster: ClusterFacts, rank: int) -> str:
    for name, host in cluster.labelled:
        if rank in host.ranks:
            return name
    return "?"


def _stuck(cluster: ClusterFacts, timings: Timings) -> Iterator[Finding]:
    for problem, names in Groups.of(timings.stuck).by_value.items():
        ranks = sorted(names, key=int)
        hosts = dict.fromkeys(host_of(cluster, int(rank)) for rank in ranks)
        yield finding("collective-failed", hosts, ranks=names_text(ranks), problem=problem)


def _links(cluster: ClusterFacts, links: Sequence[Link]) -> Iterator[Finding]:
    middle = median_of([link.bandwidth for link in links])
    best = max((link.bandwidth for link in links), default=0.0)
    slow = [link for link in links if link.bandwidth < SLOW_LINK * middle]
    if not slow:
        # With three hosts, one slow host makes two of the three links slow: then the median is
        # slow, too.
        slow = [link for link in links if link.bandwidth < SLOW_LINK * SLOW_LINK * best]
    if not slow:
        return

    # Two slow links or more that end at one host say that it is that host.
    ends = []
    texts = []
    for link in slow:
        source, target = host_of(cluster, link.source), host_of(cluster, link.target)
        ends.append({source, target})
        texts.append(f"{source} - {target} {_rate(link.bandwidth)}")
    common = set.intersection(*ends) if len(ends) > 1 else set()
    words = ""
    if common:
        words = f"every slow link is one of {names_text(sorted(common))}'s: "
    places = sorted(common or set.union(*ends))
    yield finding("slow-link", places, common=words, links=names_text(texts), best=_rate(best))


def _ranks(cluster: ClusterFacts, timings: Timings) -> Iterator[Finding]:
    times = {int(rank): seconds for rank, seconds in timings.compute.items()}
    middle = median_of(list(times.values()))
    for rank, seconds in sorted(times.items()):
        if middle and seconds > SLOW_RANK * middle:
            name = host_of(cluster, rank)
            yield finding("slow-rank", name, rank=rank, times=seconds / middle)


def _rate(bandwidth: float) -> str:
    if bandwidth >= 1e8:
        return f"{bandwidth / 1e9:.2f} GB/s"
    return f"{bandwidth / 1e6:.1f} MB/s"
