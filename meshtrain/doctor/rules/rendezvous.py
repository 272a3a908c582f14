"""Rules for the rendezvous: whether all nodes met, and mean the same job. No I/O."""

from collections.abc import Iterator

from meshtrain.doctor.findings import (
    Finding,
    finding,
    group_by_value,
    groups_text,
    minority,
    names_text,
)
from meshtrain.doctor.nccl import addresses_of
from meshtrain.doctor.records import ClusterFacts, Host, JoinFailure, Place
from meshtrain.job.sockets import is_loopback


def rendezvous(cluster: ClusterFacts) -> Iterator[Finding]:
    if cluster.attempt is not None:
        yield _failure(cluster.hosts[0], cluster.attempt)
        return
    names, leader = cluster.labels, cluster.hosts[0]
    yield from _missing(cluster)
    for name, host in cluster.labelled[1:]:
        if host.place.serves and host.place.backend == "c10d" and host.place.by_options:
            yield finding("served-twice", name, host=name, place=host.place, leader=names[0])
    yield from _differences(cluster)
    yield from _node_ranks(cluster)
    for stranger in cluster.strangers:
        severity = "error" if len(cluster.hosts) < leader.place.fewest else "warning"
        yield finding("stranger-at-endpoint", (), severity, stranger=stranger)
    yield from _unrecognised(names[0], leader)
    if cluster.silent:
        yield finding("node-fell-silent", cluster.silent)


def _failure(host: Host, failure: JoinFailure) -> Finding:
    place, outcome, addresses = host.place, failure.how, failure.addresses
    by_rank = place.by_options and place.node_rank is not None
    if place.most > 1 and any(map(is_loopback, addresses)):
        return _loopback(place, host.host)
    id_ = "leader-left" if outcome == "left" else f"endpoint-{outcome}"
    if by_rank and place.node_rank == 0 and outcome not in ("taken", "left"):
        id_ = "serving-elsewhere"
    elif (
        by_rank
        and place.node_rank
        and outcome == "refused"
        and set(addresses) & set(addresses_of(host.interfaces))
    ):
        id_ = "not-serving"
    elif outcome == "silent":
        id_ = "endpoint-port-dropped" if failure.alive else "endpoint-unreachable"
    server = (
        "the node whose host it names serves it (or the one started with --rdzv-conf is_host=1)"
    )
    words = {
        "to": f" ({', '.join(addresses)})" if addresses and place.address not in addresses else "",
        "first": (addresses or (place.address,))[0],
        "reason": "no answer" if outcome == "silent" else failure.detail,
        "detail": failure.detail or "something that accepts connections and says nothing",
        "server": "the node with --node-rank=0 serves it" if place.backend == "static" else server,
    }
    return finding(id_, host.host, host=host.host, place=place, failure=failure, **words)


def _loopback(place: Place, host: str) -> Finding:
    named = (
        "is a loopback one"
        if is_loopback(place.address)
        else f"{place.address} resolves to a loopback address"
    )
    return finding("endpoint-loopback", host, place=place, host=host, named=named)


def _missing(cluster: ClusterFacts) -> Iterator[Finding]:
    leader, came = cluster.hosts[0], len(cluster.hosts)
    place = leader.place
    if came >= place.most:
        return
    absent = ""
    ranks = {host.place.node_rank for host in cluster.hosts}
    if place.backend == "static" and place.by_options:
        absent = "; node ranks that did not come: " + names_text(
            [str(i) for i in range(place.most) if i not in ranks]
        )
    if place.expected:
        absent = "; missing: " + names_text(
            [name for i, name in enumerate(place.expected) if i not in ranks]
        )
    resolved = (leader.resolves or {}).get(place.address, ())
    loopback = bool(resolved) and all(map(is_loopback, resolved))
    # If that is its own name, only how the others resolve it counts.
    if came < place.fewest and place.most > 1 and loopback and place.address != leader.host:
        yield _loopback(place, leader.host)
    nodes = []
    for name, host in cluster.labelled:
        rank = "" if host.place.node_rank is None else f", node rank {host.place.node_rank}"
        nodes.append(
            f"{name} (id {host.place.id}, {host.place.nodes} nodes{rank}, {host.place.endpoint})"
        )
    words = {
        "came": came,
        "place": place,
        "waited": cluster.waited,
        "who": names_text(nodes),
        "absent": absent,
    }
    yield finding("nodes-missing", (), "error" if came < place.fewest else "warning", **words)
    told_to_serve = place.backend == "c10d" and place.by_options and place.serves
    own = set(addresses_of(leader.interfaces))
    if (
        told_to_serve
        and resolved
        and not own & set(resolved)
        and not any(map(is_loopback, resolved))
    ):
        words = {"host": leader.host, "place": place, "resolved": ", ".join(resolved)}
        yield finding("serving-elsewhere/told", leader.host, **words)


def _differences(cluster: ClusterFacts) -> Iterator[Finding]:
    """Differing ids, numbers of nodes, backends, endpoints: torchrun would wait ten minutes and not
    say which it is."""
    names, places = cluster.labels, [host.place for host in cluster.hosts]
    ids = {
        "id": "id-differs",
        "nodes": "nodes-differ",
        "backend": "backend-differs",
        "endpoint": "endpoint-differs",
    }
    for attribute, id_ in ids.items():
        groups = group_by_value(names, [getattr(place, attribute) for place in places])
        if len(groups) > 1:
            yield finding(id_, minority(groups), groups=groups_text(groups))


def _node_ranks(cluster: ClusterFacts) -> Iterator[Finding]:
    if not cluster.hosts[0].place.by_options:
        return
    ranks = [host.place.node_rank for host in cluster.hosts]
    for rank in sorted({rank for rank in ranks if rank is not None and ranks.count(rank) > 1}):
        same = [name for name, other in zip(cluster.labels, ranks, strict=True) if other == rank]
        free = [str(i) for i in range(cluster.hosts[0].place.most) if i not in ranks]
        unused = (
            f" ({' and '.join(free)} {'is' if len(free) == 1 else 'are'} not taken)" if free else ""
        )
        yield finding("node-rank-twice", same, rank=rank, unused=unused)


def _unrecognised(name: str, leader: Host) -> Iterator[Finding]:
    """torchrun compares the endpoint only with the addresses of its host's name."""
    place, resolves = leader.place, leader.resolves or {}
    if (
        place.backend != "c10d"
        or not place.by_options
        or place.serves is not None
        or place.most == 1
    ):
        return
    own = resolves.get(leader.host, ())
    named = place.address in ("localhost", leader.host) or is_loopback(place.address)
    if not named and not set(resolves.get(place.address, ())) & set(own):
        resolved = ", ".join(own) or "to none"
        yield finding(
            "serving-unrecognised", name, address=place.address, host=leader.host, resolved=resolved
        )
