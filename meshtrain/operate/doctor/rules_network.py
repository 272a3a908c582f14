"""PURE: names, interfaces and ports between the hosts."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import zip_longest

from meshtrain.operate.doctor.finding import Finding, error, labels, note, own, several_machines, some, warning
from meshtrain.operate.doctor.interfaces import communicates_by, interface_of, is_loopback
from meshtrain.operate.doctor.record import Host, Interface, Reach, Seen
from meshtrain.operate.doctor.transport import network_of_plugin, plugins_asked, transport

HOW = {
    "refused": "is refused",
    "silent": "gets no answer",
    "unreachable": "finds no route",
    "mute": "is accepted by somebody who says nothing",
}


def network(seen: Seen) -> Iterator[Finding]:
    """Everything between the hosts, and what a host thinks its own name is."""
    if seen.attempt is None and several_machines(seen):
        yield from _own_names(seen)
        yield from _others_names(seen)
        yield from _interfaces(seen)
        yield from _ports(seen)
        yield from _infiniband(seen)
        yield from _plugins(seen)
    yield from _same_names(seen)
    for name, host in zip(labels(seen), seen.hosts, strict=True):
        if host.slow_names:
            yield warning(
                "slow-look-up",
                f"{name} takes seconds to resolve {some(host.slow_names)}",
                (name,),
                "add the names to /etc/hosts, or remove a name server that does not answer from /etc/resolv.conf",
            )
    if seen.attempt is None and sum(host.processes for host in seen.hosts) > 1:
        for sentence in transport(seen.hosts):
            yield note("transport", sentence)


def _own_names(seen: Seen) -> Iterator[Finding]:
    """gloo tells the others the address to which its host's name resolves."""
    for name, host in zip(labels(seen), seen.hosts, strict=True):
        addresses = (host.resolves or {}).get(host.host, ())
        variable, asked, _ = communicates_by(host)
        matters = variable == "GLOO_SOCKET_IFNAME" and not asked
        kind = error if matters else warning
        line = f"{host.route or 'its address'} {host.host}"
        if not addresses:
            yield kind(
                "name-unresolved",
                f"{name} cannot resolve its own name: gloo falls back to 127.0.0.1, which no other host can reach",
                (name,),
                f"add `{line}` to its /etc/hosts, or export GLOO_SOCKET_IFNAME={_by_route(host)}",
            )
        elif is_loopback(addresses[0]):
            yield kind(
                "name-is-loopback",
                f"on {name} its own name resolves to {addresses[0]}: gloo tells the other hosts that address, and "
                "they reach themselves by it",
                (name,),
                f"in its /etc/hosts let {host.host} stand at {host.route or 'its address'} instead of {addresses[0]}, "
                f"or export GLOO_SOCKET_IFNAME={_by_route(host)}",
            )


def _by_route(host: Host) -> str:
    found = interface_of(host.interfaces, host.route)
    return found.name if found is not None else "the interface between the hosts"


def _others_names(seen: Seen) -> Iterator[Finding]:
    """Under c10d the workers meet at the name of the host of rank 0, which can be any: all have to know it."""
    names = labels(seen)
    matters = seen.hosts[0].place.backend == "c10d" and seen.hosts[0].place.launcher != "torchrun"
    kind = error if matters else warning
    index = {host.host: i for i, host in enumerate(seen.hosts)}
    for name, visit in zip(names, seen.visits, strict=False):
        for other, addresses in ((visit.names if visit else None) or {}).items():
            host = seen.hosts[index[other]] if other in index else None
            if host is None or other == seen.hosts[names.index(name)].host:
                continue
            theirs = {address.partition("/")[0] for address in own(host)}
            if not addresses:
                what = f"{name} cannot resolve the name {other}"
            elif is_loopback(addresses[0]):
                what = f"on {name} the name {other} resolves to {addresses[0]}, which is {name} itself"
            elif not set(addresses) & theirs:
                what = f"on {name} the name {other} resolves to {addresses[0]}, which is no address of {other}"
            else:
                continue
            yield kind(
                "name-of-other-wrong",
                f"{what}: torchrun's workers meet at the name of one of the hosts",
                (name,),
                f"let {other} be {host.route or 'its address'} in DNS or in /etc/hosts of {name}, or start every node "
                "with --local-addr=ADDRESS",
            )


def _same_names(seen: Seen) -> Iterator[Finding]:
    by_name: dict[str, list[int]] = {}
    for i, host in enumerate(seen.hosts):
        by_name.setdefault(host.host, []).append(i)
    for name, nodes in by_name.items():
        if len(nodes) < 2:
            continue
        where = [labels(seen)[i] for i in nodes]
        if len({(seen.hosts[i].machine, own(seen.hosts[i])) for i in nodes}) == 1:
            yield note("same-host", f"nodes {some([str(i) for i in nodes])} are on the same host {name}", where)
        else:
            yield error(
                "same-name",
                f"nodes {some([str(i) for i in nodes])} are different hosts that all call themselves {name}: NCCL and "
                "torch take processes for neighbours by the host's name",
                where,
                "give each host a name of its own (hostnamectl set-hostname NAME)",
            )


def _interfaces(seen: Seen) -> Iterator[Finding]:
    for i, (name, host) in enumerate(zip(labels(seen), seen.hosts, strict=True)):
        variable, asked, chosen = communicates_by(host)
        there = some([_told(one) for one in host.interfaces if one.addresses])
        if not chosen:
            yield error(
                "interface-missing",
                f"{variable}={asked} fits no interface of {name}, which has {there}",
                (name,),
                f"export {variable}={_by_route(host)}, which has the route to the endpoint",
            )
            continue
        by_route = interface_of(host.interfaces, host.route)
        if by_route is None or by_route.name == chosen[0].name:
            continue
        if not asked and is_loopback(chosen[0].addresses[0].partition("/")[0]):
            continue  # its name is told already
        addresses = {address.partition("/")[0] for one in chosen for address in one.addresses}
        tried = [one for one in _reaches(seen) if one.target == i and one.address in addresses]
        shut = [one for one in tried if one.how != "open"]
        picks = f"{variable}={asked}" if asked else f"{variable} is not set, which"
        if tried and not shut:
            continue  # the hosts reach each other by it: InfiniBand's, beside an interface for names and logins
        yield (error if shut else warning)(
            "interface-wrong",
            f"{picks} takes {_told(chosen[0])} of {name}, and the route to the other hosts goes by {_told(by_route)}"
            + (
                f"; {shut[0].address} {HOW.get(shut[0].how, 'is another host')} from the other hosts"
                if shut
                else "; nobody has tried whether the other hosts reach it"
            ),
            (name,),
            f"export {variable}={by_route.name} on {name}",
        )


def _told(one: Interface) -> str:
    return f"{one.name} ({', '.join(address.partition('/')[0] for address in one.addresses[:2])})"


def _reaches(seen: Seen) -> list[Reach]:
    return [reach for visit in seen.visits if visit is not None for reach in visit.reach]


def _ports(seen: Seen) -> Iterator[Finding]:
    """A random port of a host on the address by which it came to the endpoint."""
    names = labels(seen)
    shut: dict[str, list[Reach]] = {}
    for one in _reaches(seen):
        if one.how != "open" and one.address == seen.hosts[one.target].route:
            shut.setdefault(one.how, []).append(one)
    for how, all_ in shut.items():
        pairs = [f"{names[one.source]} to {names[one.target]}" for one in all_]
        one = all_[0]
        where = sorted({names[i] for reach in all_ for i in (reach.source, reach.target)})
        if how.startswith("another"):
            yield error(
                "address-of-another",
                f"who connects from {some(pairs)} reaches another host at {one.address}",
                where,
                "two hosts have the same address, or something translates addresses between them (NAT): give each its "
                "own",
            )
        else:
            yield error(
                "ports-closed",
                f"the endpoint's port is open, and a random other one (such as {one.port}) {HOW[how]}: "
                f"{some(pairs)}. The workers of a job listen on random ports (torch's store, gloo, NCCL)",
                where,
                "let all TCP ports through between the nodes of a job (at least those of "
                "/proc/sys/net/ipv4/ip_local_port_range)",
            )


def _infiniband(seen: Seen) -> Iterator[Finding]:
    names = labels(seen)
    without = [name for name, host in zip(names, seen.hosts, strict=True) if not host.rdma]
    if without and len(without) < len(names):
        kind = next(host.rdma_name for host in seen.hosts if host.rdma)
        yield warning(
            "infiniband-differs",
            f"{some(without)} has no active {kind} port, and the other hosts have: NCCL would hang or fall back "
            "to sockets",
            without,
            "look at ibstat there, or leave that host out, or set NCCL_IB_DISABLE=1 on all",
        )
    have = {name: host for name, host in zip(names, seen.hosts, strict=True) if host.rdma}
    for name, slow in _slow_ports(have).items():
        yield warning(
            "infiniband-differs",
            f"{name} has less to send by than the other hosts: {some(slow)}. Every rank waits for it",
            (name,),
            "look at ibstat there, at the cable and at the switch's port; or leave that host out",
        )
    no_gid = [
        f"{port.name} of {name}"
        for name, host in have.items()
        for port in host.rdma
        if port.layer == "Ethernet" and not port.roce_v2
    ]
    if no_gid:
        yield warning(
            "roce-gid-missing",
            f"{some(no_gid)} has no address (GID) of RoCE v2, without which NCCL's packets are not routed, or are not "
            "sent at all",
            [name for name, host in have.items() if any(f"{port.name} of {name}" in no_gid for port in host.rdma)],
            "give its interface an IP address and look at show_gids; in a container, start it in the host's network",
        )
    closed = [name for name, host in zip(names, seen.hosts, strict=True) if host.ports and not host.verbs]
    if closed:
        yield warning(
            "rdma-not-given",
            f"{some(closed)} has RDMA cards, and nothing in /dev/infiniband by which a process could use them: hosts "
            "would talk by sockets",
            closed,
            "give the container the devices: --device=/dev/infiniband, or on Kubernetes the resource of the cluster's "
            "device plugin (rdma/..., vpc.amazonaws.com/efa)",
        )
    direct = [
        name
        for name, host in zip(names, seen.hosts, strict=True)
        if host.rdma and host.gpus_seen and not host.gpudirect and not host.net_plugin
    ]
    if direct:
        yield note(
            "no-gpudirect",
            f"{some(direct)} has {have[direct[0]].rdma_name}, and nothing can be seen there by which its cards read a "
            "GPU's memory: neither the kernel module nvidia_peermem, nor DMA-BUF (Linux 5.12 and NVIDIA's open kernel "
            "modules). Data then goes through the host's memory",
            direct,
            "look for GDRDMA in what NCCL_DEBUG=INFO tells of its channels; if it is not there: modprobe "
            "nvidia_peermem, or install NVIDIA's open kernel modules",
        )


def _slow_ports(hosts: Mapping[str, Host]) -> dict[str, list[str]]:
    """Of each host that has less than another: its ports that are down, or slower than those of that name on most.

    The rates are compared first: names differ between healthy hosts, and one may have a port more, for storage.
    """
    rates = {name: {port.name: port.gbit * port.of_nccl for port in host.ports} for name, host in hosts.items()}
    most = [max(column) for column in zip_longest(*map(_ordered, rates.values()), fillvalue=0.0)]
    found: dict[str, list[str]] = {}
    for name, of_host in rates.items():
        if _ordered(of_host) == most:
            continue
        for port, rate in sorted(of_host.items()):
            counts = Counter(others[port] for others in rates.values() if port in others)
            usual = max(counts, key=lambda each: (counts[each], each))
            if rate < usual:
                how = f"has {rate:.0f} instead of" if rate else "is not active, and elsewhere has"
                found.setdefault(name, []).append(f"{port} {how} {usual:.0f} Gb/s")
    return found


def _ordered(rates: Mapping[str, float]) -> list[float]:
    """Those of active ports, the fastest first."""
    return sorted(filter(None, rates.values()), reverse=True)


def _plugins(seen: Seen) -> Iterator[Finding]:
    """A plugin that NCCL does not find is silent, and the network is then sockets; a network that it lacks ends it."""
    for name, host in zip(labels(seen), seen.hosts, strict=True):
        if not host.gpus_seen or host.net_plugin:
            continue
        fix = "install the plugin of that network (libnccl-net.so), and let LD_LIBRARY_PATH or ldconfig lead to it"
        if network := network_of_plugin(host.settings):
            yield error(
                "plugin-missing",
                f"NCCL_NET={network} asks on {name} for a network of a plugin, and there is no plugin: NCCL would end",
                (name,),
                f"{fix}, or unset NCCL_NET",
            )
        elif host.efa and not host.rdma:
            yield error(
                "plugin-missing",
                f"{name} has cards of EFA, which NCCL knows by the plugin aws-ofi-nccl alone, and there is none: hosts "
                "would talk by sockets, many times slower",
                (name,),
                "install aws-ofi-nccl, and let LD_LIBRARY_PATH or ldconfig lead to its libnccl-net.so",
            )
        elif asked := plugins_asked(host.settings):
            yield warning(
                "plugin-missing",
                f"NCCL_NET_PLUGIN asks on {name} for {', '.join(asked)}, which is not found: NCCL goes on without",
                (name,),
                f"{fix}, or unset NCCL_NET_PLUGIN",
            )
