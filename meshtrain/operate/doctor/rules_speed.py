"""PURE: what the workers measured; the slow rank, host or link by its name."""

from collections.abc import Iterator

from meshtrain.operate.doctor.finding import Finding, error, labels, median_of, note, some, warning
from meshtrain.operate.doctor.record import Link, Seen, Timings

SLOW_LINK = 0.5  # of the median link
SLOW_RANK = 1.6  # times the median rank
SPREAD = 4.0  # the slowest repetition to the median one
SHORT_S = 2e-3  # below this a repetition is too short to be told from the scheduler's whims


def speed(seen: Seen) -> Iterator[Finding]:
    """Ranks that did not arrive, slow links, slow ranks, repetitions that differ."""
    timings = seen.timings
    if timings is None:
        return
    if timings.skipped:
        yield note("not-timed", f"the collectives were not timed: {timings.skipped}")
        return
    if timings.left_out:
        yield warning(
            "no-time-left",
            f"the hosts or the network are so slow that there was no time for {some(timings.left_out)}",
            (),
            "see what else is told here, and run the doctor again",
        )
    yield from _stuck(seen, timings)
    yield from _links(seen, timings)
    yield from _ranks(seen, timings)
    for one in timings.timings:
        if one.spread > SPREAD and one.seconds * one.spread > SHORT_S:
            yield warning(
                "unsteady",
                f"{one.what} over {one.axes} ({one.ranks} ranks): the slowest repetition took {one.spread:.1f} times "
                "as long as the median one",
                (),
                "other traffic on the network or other work on the hosts: run the doctor again, and on fewer hosts",
            )


def host_of(seen: Seen, rank: int) -> str:
    """The label of the host on which a rank runs."""
    for name, host in zip(labels(seen), seen.hosts, strict=True):
        if rank in host.ranks:
            return name
    return "?"


def _stuck(seen: Seen, timings: Timings) -> Iterator[Finding]:
    by_what: dict[str, list[int]] = {}
    for rank, what in (timings.stuck or {}).items():
        by_what.setdefault(what, []).append(int(rank))
    for what, ranks in by_what.items():
        where = list(dict.fromkeys(host_of(seen, rank) for rank in sorted(ranks)))
        yield error(
            "collective-failed",
            f"ranks {some([str(rank) for rank in sorted(ranks)])} on {some(where)}: {what}",
            where,
            "the ranks that came least far are those to look at; NCCL_DEBUG=INFO (or TORCH_DISTRIBUTED_DEBUG=DETAIL "
            "over gloo) says more",
        )


def _links(seen: Seen, timings: Timings) -> Iterator[Finding]:
    middle = median_of([link.bandwidth for link in timings.links])
    slow = [link for link in timings.links if link.bandwidth < SLOW_LINK * middle]
    if not slow:
        slow = _one_slow_host(seen, timings)
    if not slow:
        return
    ends = [{host_of(seen, link.source), host_of(seen, link.target)} for link in slow]
    common = set.intersection(*ends) if len(ends) > 1 else set()
    pairs = [f"{host_of(seen, one.source)} - {host_of(seen, one.target)} {_rate(one.bandwidth)}" for one in slow]
    best = max(link.bandwidth for link in timings.links)
    who = f"every slow link is one of {some(sorted(common))}'s: " if common else ""
    yield warning(
        "slow-link",
        f"{who}{some(pairs)}, and the best link between hosts has {_rate(best)}",
        sorted(common or set().union(*ends)),
        "look at that host's cable, port and interface (ethtool IFACE: speed, duplex, errors), and at what else uses "
        "the link",
    )


def _one_slow_host(seen: Seen, timings: Timings) -> list[Link]:
    """With three hosts two of the three links are slow when one host is: then the median is slow too."""
    best = max((link.bandwidth for link in timings.links), default=0.0)
    return [link for link in timings.links if link.bandwidth < SLOW_LINK * SLOW_LINK * best]


def _ranks(seen: Seen, timings: Timings) -> Iterator[Finding]:
    times = {int(rank): seconds for rank, seconds in (timings.compute or {}).items()}
    middle = median_of(list(times.values()))
    for rank, seconds in sorted(times.items()):
        if middle and seconds > SLOW_RANK * middle:
            yield warning(
                "slow-rank",
                f"rank {rank} on {host_of(seen, rank)} takes {seconds / middle:.1f} times as long as the median rank "
                "for the same computation",
                (host_of(seen, rank),),
                "look at that host's load, clocks and temperature; every other rank waits for it in every step",
            )


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.2f} GB/s" if bandwidth >= 1e8 else f"{bandwidth / 1e6:.1f} MB/s"
