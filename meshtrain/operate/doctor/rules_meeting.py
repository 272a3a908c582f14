"""PURE: did all nodes meet, and do they mean the same job?"""

from collections.abc import Iterator

from meshtrain.operate.doctor.finding import Finding, by_value, error, labels, note, odd_ones, some, told, warning
from meshtrain.operate.doctor.interfaces import addresses_of, is_loopback
from meshtrain.operate.doctor.record import Attempt, Place, Seen


def meeting(seen: Seen) -> Iterator[Finding]:
    """Everything about who came, and as whom."""
    if seen.attempt is not None:
        yield _failed(seen, seen.attempt)
        yield from _elsewhere(seen)
        return
    yield from _missing(seen)
    if len(seen.hosts) < seen.hosts[0].place.most:
        yield from _elsewhere(seen)
    yield from _differences(seen)
    yield from _node_ranks(seen)
    yield from _strangers(seen)
    yield from _unrecognised(seen)
    if seen.silent:
        yield error(
            "node-fell-silent",
            f"{some(seen.silent)} came to the endpoint and then told nothing more",
            seen.silent,
            "look at that node's own output: its doctor was stopped, or hangs on a disk or a driver",
        )


def _who_serves(place: Place) -> str:
    if place.backend == "static":
        return "the node with --node-rank=0 serves it"
    return "the node whose host it names serves it (or the one started with --rdzv-conf is_host=1)"


def _failed(seen: Seen, attempt: Attempt) -> Finding:
    host = seen.hosts[0]
    place, where = host.place, (host.host,)
    endpoint = place.endpoint
    to = f" ({', '.join(attempt.addresses)})" if attempt.addresses and place.address not in attempt.addresses else ""
    tried = f"for {attempt.seconds:.0f} s"
    if place.most > 1 and any(map(is_loopback, attempt.addresses)):
        return error("endpoint-loopback", _loopback(place, host.host), where, _LOOPBACK_FIX)
    if place.launcher == "torchrun's options" and place.node_rank == 0 and attempt.how not in ("taken", "left"):
        return error(
            "serving-elsewhere",
            f"{host.host} was given --node-rank=0, whose host serves the endpoint, and {place.endpoint}{to} is another "
            f"host (and there: {attempt.how})",
            where,
            f"give --node-rank=0 to the host that the endpoint names, and {host.host} another one; or name "
            f"{host.host} with --master-addr on all nodes",
        )
    if attempt.how == "unresolved":
        return error(
            "endpoint-unresolved",
            f"the endpoint's name {place.address} does not resolve on {host.host}",
            where,
            "check its spelling against the other nodes' command; give an address instead of the name, or add the "
            "name to DNS or to /etc/hosts of every node",
        )
    numbered = place.launcher == "torchrun's options" and place.node_rank
    if attempt.how == "refused" and numbered and set(attempt.addresses) & set(addresses_of(host.interfaces)):
        return error(
            "not-serving",
            f"{host.host} is the host that the endpoint {endpoint}{to} names, and was given --node-rank="
            f"{place.node_rank}: only the node with rank 0 serves it ({tried})",
            where,
            f"give --node-rank=0 to {host.host}, and {place.node_rank} to the node that has 0 now; or start the node "
            f"with rank 0, if it is to be {host.host} too",
        )
    if attempt.how == "refused":
        return error(
            "endpoint-refused",
            f"{host.host} gets through to {place.address}{to}, and nothing listens on its port {place.port} ({tried})",
            where,
            f"all nodes need the same endpoint (this one was given {endpoint}): compare host and port with the other "
            f"nodes' commands, and start the doctor on the node that serves it: {_who_serves(place)}",
        )
    if attempt.how == "silent" and attempt.alive:
        return error(
            "endpoint-port-dropped",
            f"{place.address}{to} is there, but what {host.host} sends to its port {place.port} gets no answer "
            f"({tried}): a firewall drops it",
            where,
            f"let TCP port {place.port} of {place.address} through from {host.host}, and all other ports between the "
            "nodes too (security group, nftables, ufw)",
        )
    if attempt.how in ("silent", "unreachable"):
        why = "no answer" if attempt.how == "silent" else attempt.detail
        return error(
            "endpoint-unreachable",
            f"{host.host} gets no answer from {place.address}{to} on any port ({why}, {tried})",
            where,
            f"check that {place.address} is the right host and is up, that {host.host} has a route to it "
            f"(ip route get {(attempt.addresses or (place.address,))[0]}), and that no firewall drops everything",
        )
    return _somebody_else(seen, attempt)


def _somebody_else(seen: Seen, attempt: Attempt) -> Finding:
    host = seen.hosts[0]
    place, where = host.place, (host.host,)
    if attempt.how == "taken":
        return error(
            "endpoint-taken",
            f"this node serves the endpoint {place.endpoint}, and cannot use its port: {attempt.detail}",
            where,
            "end that process if it is left over from an earlier job, or choose another port on all nodes",
        )
    if attempt.how == "left":
        return error(
            "leader-left",
            f"the node that serves {place.endpoint} met {host.host} and then was gone: {attempt.detail}",
            where,
            "look at that node's own output: its doctor was stopped, or its host or link failed",
        )
    who = attempt.detail or "something that accepts connections and says nothing"
    return error(
        "endpoint-stranger",
        f"at the endpoint {place.endpoint} there is no doctor but {who}",
        where,
        "if another program has that port, choose another port on all nodes; if a job runs there already, stop it, "
        "or run the doctor on the node that serves the endpoint too",
    )


_LOOPBACK_FIX = (
    "give all nodes an address or name of one of them that the others can reach, such as its address on the network "
    "between them (ip -br address)"
)


def _loopback(place: Place, host: str) -> str:
    named = f"{place.address} resolves to a loopback address" if not is_loopback(place.address) else "is a loopback one"
    return (
        f"the endpoint {place.endpoint} {named} on {host}, which means {host} itself: on several nodes everybody waits "
        "for the others alone"
    )


def _missing(seen: Seen) -> Iterator[Finding]:
    leader = seen.hosts[0]
    place = leader.place
    came = len(seen.hosts)
    if came >= place.most:
        return
    absent = ""
    if place.backend == "static" and place.launcher == "torchrun's options":
        ranks = {host.place.node_rank for host in seen.hosts}
        absent = "; node ranks that did not come: " + some([str(i) for i in range(place.most) if i not in ranks])
    if place.expected:
        came_ranks = {host.place.node_rank for host in seen.hosts}
        absent = "; missing: " + some([name for i, name in enumerate(place.expected) if i not in came_ranks])
    told_ = (
        f"{came} of {place.nodes} nodes came to {place.endpoint} within {seen.waited:.0f} s: "
        f"{some([_as_whom(seen, i) for i in range(came)])}{absent}"
    )
    fix = (
        f"run the doctor on every node with the same endpoint ({place.endpoint}), id ({place.id}) and --nnodes "
        f"({place.nodes}); the doctor of a node that cannot get here says on that node why"
    )
    resolved = (leader.resolves or {}).get(place.address, ())
    if came < place.fewest and place.most > 1 and resolved and all(map(is_loopback, resolved)):
        own_name = place.address == leader.host  # then it is the others' resolution that counts
        if not own_name:
            yield error("endpoint-loopback", _loopback(place, leader.host), (leader.host,), _LOOPBACK_FIX)
    yield (error if came < place.fewest else warning)("nodes-missing", told_, (), fix)
    own = set(addresses_of(leader.interfaces))
    told_to = place.backend == "c10d" and place.launcher == "torchrun's options" and place.serves
    if told_to and resolved and not own & set(resolved) and not any(map(is_loopback, resolved)):
        yield warning(
            "serving-elsewhere",
            f"{leader.host} was told to serve the endpoint (is_host=1), which is not one of its addresses: "
            f"{place.address} is {', '.join(resolved)}. The others go there",
            (leader.host,),
            "give --rdzv-conf is_host=1 to the host that the endpoint names; it is right here only if something "
            "passes on to this host what goes to that address",
        )


def _elsewhere(seen: Seen) -> Iterator[Finding]:
    """Where somebody is missing: who else runs a doctor nearby, and where it goes."""
    mine = seen.hosts[0].place
    came = {host.host for host in seen.hosts}
    for one in seen.heard:
        theirs = one.place
        if one.host in came:
            continue
        same_end = (theirs.address, theirs.port) == (mine.address, mine.port)
        if same_end and (seen.attempt is not None or mine.address == "localhost" or is_loopback(mine.address)):
            continue  # it waits for this node, as it should; or what is wrong is told already
        who = f"{one.host} ({one.address}) runs the doctor too, and "
        if same_end and theirs.serves:
            yield error(
                "served-twice",
                f"{who}serves the same endpoint {mine.endpoint} itself, as {seen.hosts[0].host} does",
                (one.host,),
                "give --node-rank=0, or --rdzv-conf is_host=1, to the one host that the endpoint names, and not to "
                f"{one.host}",
            )
        elif same_end:
            yield warning(
                "node-cannot-come",
                f"{who}was given the same endpoint, and did not get through to it",
                (one.host,),
                f"look at the output of the doctor on {one.host}, which says why",
            )
        elif theirs.id == mine.id:
            yield error(
                "node-elsewhere",
                f"{who}goes to the endpoint {theirs.endpoint}; {seen.hosts[0].host} was given {mine.endpoint}",
                (one.host,),
                "start all nodes with the same endpoint: the name of one of them, not $(hostname), which every node "
                "puts its own name for",
            )
        else:
            yield note(
                "another-job",
                f"{who}goes to {theirs.endpoint} with the id {theirs.id}: another job, if that is meant",
                (one.host,),
            )


def _as_whom(seen: Seen, i: int) -> str:
    place = seen.hosts[i].place
    rank = "" if place.node_rank is None else f", node rank {place.node_rank}"
    return f"{labels(seen)[i]} (id {place.id}, {place.nodes} nodes{rank}, {place.endpoint})"


def _differences(seen: Seen) -> Iterator[Finding]:
    """Ids, numbers of nodes and backends: torchrun would wait ten minutes and not say which of them it is."""
    names, places = labels(seen), [host.place for host in seen.hosts]
    for id_, word, option, values in (
        ("id-differs", "rendezvous id", "--rdzv-id", [place.id for place in places]),
        ("nodes-differ", "number of nodes", "--nnodes", [place.nodes for place in places]),
        ("backend-differs", "rendezvous backend", "--rdzv-backend", [place.backend for place in places]),
    ):
        groups = by_value(names, values)
        if len(groups) > 1:
            yield error(
                id_,
                f"the nodes do not have the same {word}: {told(groups)}",
                odd_ones(groups),
                f"start every node with the same {option}; with different ones they wait for each other in vain",
            )
    ends = by_value(names, [place.endpoint for place in places])
    if len(ends) > 1:
        yield warning(
            "endpoint-differs",
            f"the nodes name the endpoint differently, and met all the same: {told(ends)}",
            odd_ones(ends),
            "use one name or address on all nodes, so that all of them mean the same network",
        )


def _node_ranks(seen: Seen) -> Iterator[Finding]:
    if seen.hosts[0].place.launcher != "torchrun's options":
        return
    names = labels(seen)
    given = [host.place.node_rank for host in seen.hosts]
    for rank in sorted({rank for rank in given if rank is not None and given.count(rank) > 1}):
        same = [name for name, one in zip(names, given, strict=True) if one == rank]
        free = [str(i) for i in range(seen.hosts[0].place.most) if i not in given]
        unused = f" ({' and '.join(free)} {'is' if len(free) == 1 else 'are'} not taken)" if free else ""
        yield error(
            "node-rank-twice",
            f"node rank {rank} was given to {some(same)}",
            same,
            f"give each node a --node-rank of its own, from 0 to --nnodes - 1{unused}",
        )


def _strangers(seen: Seen) -> Iterator[Finding]:
    incomplete = len(seen.hosts) < seen.hosts[0].place.fewest
    for stranger in seen.strangers:
        yield (error if incomplete else warning)(
            "stranger-at-endpoint",
            f"from {stranger.address} came {stranger.what}",
            (stranger.address,),
            "run the doctor on that node if it is one of the job's; otherwise keep others away from the port: torch's "
            "store listens on every interface and has no password",
        )


def _unrecognised(seen: Seen) -> Iterator[Finding]:
    """torchrun compares the endpoint with the addresses of its host's name, and no others."""
    leader = seen.hosts[0]
    place, resolves = leader.place, leader.resolves or {}
    if place.backend != "c10d" or place.launcher != "torchrun's options" or place.serves is not None:
        return
    if place.most == 1 or place.address in ("localhost", leader.host) or is_loopback(place.address):
        return
    if not set(resolves.get(place.address, ())) & set(resolves.get(leader.host, ())):
        yield error(
            "serving-unrecognised",
            f"{place.address} is an address of {leader.host}, but not one to which its own name resolves "
            f"({', '.join(resolves.get(leader.host, ())) or 'to none'}): torchrun would not see that it is to serve "
            "the endpoint, and all nodes would wait",
            (labels(seen)[0],),
            f"start {leader.host} with --rdzv-conf is_host=1 (and the others with is_host=0), or let its name "
            f"resolve to {place.address}",
        )
