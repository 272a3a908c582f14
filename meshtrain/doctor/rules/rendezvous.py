"""Rules for the rendezvous: whether all nodes met, and mean the same job. No I/O."""

from collections.abc import Iterator

from meshtrain.doctor.findings import Finding, Groups, finding, names_text
from meshtrain.doctor.nccl import addresses_of
from meshtrain.doctor.records import ClusterFacts, Host, JoinFailure, Place
from meshtrain.job.sockets import is_loopback


def rendezvous(cluster: ClusterFacts) -> Iterator[Finding]:
    if cluster.attempt is not None:
        yield _failure(cluster.hosts[0], cluster.attempt)
        return
    yield from _missing(cluster)
    yield from _told_to_serve(cluster)
    yield from _differences(cluster)
    yield from _node_ranks(cluster)
    for stranger in cluster.strangers:
        short = len(cluster.hosts) < cluster.hosts[0].place.fewest
        severity = "error" if short else "warning"
        yield finding("stranger-at-endpoint", (), severity, stranger=stranger)
    yield from _unrecognised(cluster)
    if cluster.silent:
        yield finding("node-fell-silent", cluster.silent)


# This node could not join -------------------------------------------------------------------------


def _failure(host: Host, failure: JoinFailure) -> Finding:
    place = host.place
    addresses = failure.addresses
    if place.most > 1 and any(map(is_loopback, addresses)):
        return _loopback(place, host.host)

    # An endpoint that is given by its address needs no second mention of it.
    to = ""
    if addresses and place.address not in addresses:
        to = f" ({', '.join(addresses)})"
    server = (
        "the node whose host it names serves it (or the one started with --rdzv-conf is_host=1)"
    )
    if place.backend == "static":
        server = "the node with --node-rank=0 serves it"
    return finding(
        _kind_of_failure(host, failure),
        host.host,
        host=host.host,
        place=place,
        failure=failure,
        to=to,
        first=addresses[0] if addresses else place.address,
        reason="no answer" if failure.how == "silent" else failure.detail,
        detail=failure.detail,
        server=server,
    )


def _kind_of_failure(host: Host, failure: JoinFailure) -> str:
    place, how = host.place, failure.how
    if how == "left":
        return "leader-left"
    if how == "taken":
        return "endpoint-taken"
    if place.by_options and place.node_rank is not None:
        if place.node_rank == 0:  # it came as a client because the endpoint is not its own
            return "serving-elsewhere"
        own = set(addresses_of(host.interfaces))
        if how == "refused" and own & set(failure.addresses):
            return "not-serving"
    if how == "silent":
        return "endpoint-port-dropped" if failure.alive else "endpoint-unreachable"
    return f"endpoint-{how}"


def _loopback(place: Place, host: str) -> Finding:
    named = f"{place.address} resolves to a loopback address"
    if is_loopback(place.address):
        named = "is a loopback one"
    return finding("endpoint-loopback", host, place=place, host=host, named=named)


# This node leads ----------------------------------------------------------------------------------


def _missing(cluster: ClusterFacts) -> Iterator[Finding]:
    leader, came = cluster.hosts[0], len(cluster.hosts)
    place = leader.place
    if came >= place.most:
        return
    resolved = leader.resolves.get(place.address, ())
    loopback = bool(resolved) and all(map(is_loopback, resolved))
    # If that is its own name, only how the others resolve it counts.
    if came < place.fewest and place.most > 1 and loopback and place.address != leader.host:
        yield _loopback(place, leader.host)

    nodes = []
    for name, host in cluster.labelled:
        identity = f"id {host.place.id}, {host.place.nodes} nodes"
        if host.place.node_rank is not None:
            identity += f", node rank {host.place.node_rank}"
        nodes.append(f"{name} ({identity}, {host.place.endpoint})")
    yield finding(
        "nodes-missing",
        (),
        "error" if came < place.fewest else "warning",
        came=came,
        place=place,
        waited=cluster.waited,
        who=names_text(nodes),
        absent=_absent(cluster),
    )

    # It was told to serve the endpoint, and nobody may be able to find it there.
    told = place.backend == "c10d" and place.by_options and place.serves
    elsewhere = not set(resolved) & set(addresses_of(leader.interfaces))
    if told and resolved and elsewhere and not any(map(is_loopback, resolved)):
        yield finding(
            "serving-elsewhere/told",
            leader.host,
            host=leader.host,
            place=place,
            resolved=", ".join(resolved),
        )


def _absent(cluster: ClusterFacts) -> str:
    """Which nodes did not come, as far as their ranks or names are known."""
    place = cluster.hosts[0].place
    ranks = {host.place.node_rank for host in cluster.hosts}
    if place.expected:
        names = [name for i, name in enumerate(place.expected) if i not in ranks]
        return "; missing: " + names_text(names)
    if place.backend == "static" and place.by_options:
        numbers = [str(i) for i in range(place.most) if i not in ranks]
        return "; node ranks that did not come: " + names_text(numbers)
    return ""


def _told_to_serve(cluster: ClusterFacts) -> Iterator[Finding]:
    """Nodes that joined another one, although they were told to serve the endpoint."""
    for name, host in cluster.labelled[1:]:
        place = host.place
        if place.serves and place.backend == "c10d" and place.by_options:
            leader = cluster.labels[0]
            yield finding("served-twice", name, host=name, place=place, leader=leader)


def _differences(cluster: ClusterFacts) -> Iterator[Finding]:
    """Differing ids, numbers of nodes, backends, endpoints: torchrun would wait ten minutes and not
    say which it is."""
    ids = {
        "id": "id-differs",
        "nodes": "nodes-differ",
        "backend": "backend-differs",
        "endpoint": "endpoint-differs",
    }
    for attribute, id_ in ids.items():
        groups = Groups.of(
            {name: getattr(host.place, attribute) for name, host in cluster.labelled}
        )
        if groups.differ:
            yield finding(id_, groups.minority, groups=groups)


def _node_ranks(cluster: ClusterFacts) -> Iterator[Finding]:
    place = cluster.hosts[0].place
    if not place.by_options:
        return
    by_rank: dict[int, list[str]] = {}
    for name, host in cluster.labelled:
        if host.place.node_rank is not None:
            by_rank.setdefault(host.place.node_rank, []).append(name)
    free = [str(i) for i in range(place.most) if i not in by_rank]
    unused = ""
    if free:
        unused = f" ({' and '.join(free)} {'is' if len(free) == 1 else 'are'} not taken)"
    for rank, names in sorted(by_rank.items()):
        if len(names) > 1:
            yield finding("node-rank-twice", names, rank=rank, unused=unused)


def _unrecognised(cluster: ClusterFacts) -> Iterator[Finding]:
    """torchrun compares the endpoint only with the addresses of its host's name."""
    leader = cluster.hosts[0]
    place, resolves = leader.place, leader.resolves
    decides_itself = place.backend == "c10d" and place.by_options and place.serves is None
    if not decides_itself or place.most == 1:
        return
    if place.address in ("localhost", leader.host) or is_loopback(place.address):
        return
    own = resolves.get(leader.host, ())
    if not set(resolves.get(place.address, ())) & set(own):
        yield finding(
            "serving-unrecognised",
            cluster.labels[0],
            address=place.address,
            host=leader.host,
            resolved=", ".join(own) or "to none",
        )
