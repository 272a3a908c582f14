"""Rules for names, interfaces and ports between the hosts. No I/O."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import zip_longest

from meshtrain.doctor.findings import Finding, finding, names_text
from meshtrain.doctor.nccl import communicates_by, interface_of, network_of_plugin, plugins_asked
from meshtrain.doctor.records import ClusterFacts, Host, Interface, PortCheck
from meshtrain.errors import group_values
from meshtrain.job.sockets import is_loopback

PORT_STATES = {
    "refused": "is refused",
    "silent": "gets no answer",
    "unreachable": "finds no route",
    "mute": "is accepted by somebody who says nothing",
}


def network(cluster: ClusterFacts) -> Iterator[Finding]:
    met = cluster.attempt is None
    if met and cluster.several_machines:
        for rule in (_own_names, _names_of_others, _interfaces, _ports, _rdma, _plugins):
            yield from rule(cluster)
    yield from _same_names(cluster)
    for name, host in cluster.labelled:
        if host.slow_names:
            yield finding("slow-look-up", name, names=names_text(host.slow_names))
    if met and sum(host.processes for host in cluster.hosts) > 1:
        yield _transport(cluster)


# Names --------------------------------------------------------------------------------------------


def _own_names(cluster: ClusterFacts) -> Iterator[Finding]:
    """gloo announces to the others the address to which its host's name resolves."""
    for name, host in cluster.labelled:
        addresses = host.resolves.get(host.host, ())
        by = communicates_by(host)
        by_own_name = by.variable == "GLOO_SOCKET_IFNAME" and not by.setting
        severity = "error" if by_own_name else "warning"
        words = {
            "host": host.host,
            "own": host.route or "its address",
            "interface": _interface_of_route(host),
        }
        if not addresses:
            yield finding("name-unresolved", name, severity, **words)
        elif is_loopback(addresses[0]):
            yield finding("name-is-loopback", name, severity, address=addresses[0], **words)


def _names_of_others(cluster: ClusterFacts) -> Iterator[Finding]:
    """Under c10d the workers meet at the name of rank 0's host, which can be any host: all must
    resolve it."""
    place = cluster.hosts[0].place
    severity = "error" if place.backend == "c10d" and place.launcher != "torchrun" else "warning"
    by_name = {host.host: host for host in cluster.hosts}
    for (name, own), checks in zip(cluster.labelled, cluster.visits, strict=False):
        if checks is None:
            continue
        for other, addresses in checks.names.items():
            host = by_name.get(other)
            if host is None or other == own.host:
                continue
            case = _wrong_name(addresses, host)
            if case is not None:
                yield finding(
                    f"name-of-other-wrong/{case}",
                    name,
                    severity,
                    other=other,
                    resolved=addresses[0] if addresses else "",
                    address=host.route or "its address",
                )


def _wrong_name(addresses: tuple[str, ...], host: Host) -> str | None:
    """What is wrong with the addresses to which another host resolves this one's name."""
    if not addresses:
        return "unresolved"
    if is_loopback(addresses[0]):
        return "loopback"
    if not set(addresses) & set(host.addresses):
        return "other"
    return None


def _same_names(cluster: ClusterFacts) -> Iterator[Finding]:
    by_name = group_values((host.host, i) for i, host in enumerate(cluster.hosts))
    for name, nodes in by_name.items():
        if len(nodes) < 2:
            continue
        hosts = [cluster.hosts[i] for i in nodes]
        machines = {(host.machine, host.addresses) for host in hosts}
        # Two nodes of one machine, or two machines of one name.
        id_ = "same-host" if len(machines) == 1 else "same-name"
        labels = [cluster.labels[i] for i in nodes]
        numbers = names_text([str(i) for i in nodes])
        yield finding(id_, labels, nodes=numbers, name=name)


# Interfaces and ports -----------------------------------------------------------------------------


def _interfaces(cluster: ClusterFacts) -> Iterator[Finding]:
    for i, (name, host) in enumerate(cluster.labelled):
        by = communicates_by(host)
        words = {"variable": by.variable, "value": by.setting}
        words["interface"] = _interface_of_route(host)
        if not by.interfaces:
            present = [_interface_text(each) for each in host.interfaces if each.addresses]
            yield finding("interface-missing", name, interfaces=names_text(present), **words)
            continue

        chosen = by.interfaces[0]
        route = interface_of(host.interfaces, host.route)
        if route is None or route.name == chosen.name:
            continue
        if not by.setting and is_loopback(chosen.addresses[0]):
            continue  # a finding on its name reports this already
        addresses = {address for interface in by.interfaces for address in interface.addresses}
        checks = [
            check
            for check in _port_checks(cluster)
            if check.target == i and check.address in addresses
        ]
        shut = [check for check in checks if check.how != "open"]
        if checks and not shut:
            # The hosts reach each other by it: InfiniBand's, beside an interface for names and
            # logins.
            continue
        words["setting"] = f"{by.variable} is not set, which"
        if by.setting:
            words["setting"] = f"{by.variable}={by.setting}"
        words["chosen"] = _interface_text(chosen)
        words["route"] = _interface_text(route)
        if shut:
            words["address"] = shut[0].address
            words["how"] = PORT_STATES.get(shut[0].how, "is another host")
            yield finding("interface-wrong/shut", name, **words)
        else:
            yield finding("interface-wrong/untried", name, **words)


def _interface_of_route(host: Host) -> str:
    interface = interface_of(host.interfaces, host.route)
    return interface.name if interface is not None else "the interface between the hosts"


def _interface_text(interface: Interface) -> str:
    return f"{interface.name} ({', '.join(interface.addresses[:2])})"


def _port_checks(cluster: ClusterFacts) -> list[PortCheck]:
    return [check for checks in cluster.visits if checks is not None for check in checks.reach]


def _ports(cluster: ClusterFacts) -> Iterator[Finding]:
    """Tries of a host's random port at the address from which it came to the endpoint."""
    names = cluster.labels
    nodes = range(len(names))
    shut: dict[str, list[PortCheck]] = {}  # what happened -> the tries
    for check in _port_checks(cluster):
        if check.how == "open" or check.source not in nodes or check.target not in nodes:
            continue
        if check.address == cluster.hosts[check.target].route:
            shut.setdefault(check.how, []).append(check)

    for outcome, checks in shut.items():
        pairs = names_text([f"{names[check.source]} to {names[check.target]}" for check in checks])
        ends = {names[i] for check in checks for i in (check.source, check.target)}
        hosts = sorted(ends)
        state = PORT_STATES.get(outcome)
        if state is None:
            yield finding("address-of-another", hosts, pairs=pairs, address=checks[0].address)
        else:
            yield finding("ports-closed", hosts, port=checks[0].port, how=state, pairs=pairs)


# RDMA and transports ------------------------------------------------------------------------------


def _rdma(cluster: ClusterFacts) -> Iterator[Finding]:
    have = {name: host for name, host in cluster.labelled if host.rdma}
    without = [name for name in cluster.labels if name not in have]
    if have and without:
        yield finding("infiniband-differs", without, kind=next(iter(have.values())).rdma_name)
    for name, slow in _slow_ports(have).items():
        yield finding("infiniband-differs/slow", name, ports=names_text(slow))

    no_gid = {}  # port -> its host
    for name, host in have.items():
        for port in host.rdma:
            if port.layer == "Ethernet" and not port.roce_v2:
                no_gid[f"{port.name} of {name}"] = name
    if no_gid:
        hosts = dict.fromkeys(no_gid.values())
        yield finding("roce-gid-missing", hosts, ports=names_text(list(no_gid)))

    closed = [name for name, host in cluster.labelled if host.ports and not host.verbs]
    if closed:
        yield finding("rdma-not-given", closed)

    ways = cluster.timings.transport if cluster.timings is not None else ()
    by_card = [way.removeprefix("via ") for way in ways if way.startswith("via NET/IB")]
    indirect = [way for way in by_card if "GDRDMA" not in way]
    if indirect and have:
        yield finding("no-gpudirect", have, ways=", ".join(indirect))


def _slow_ports(hosts: Mapping[str, Host]) -> dict[str, list[str]]:
    """For each host with lower rates than another: its ports that are down, or slower than ports of
    that name on most hosts. Rates are compared first: names differ between healthy hosts, and one
    may have a port more, for storage."""
    rates: dict[str, dict[str, float]] = {}  # host -> port -> its rate, 0 if it is down
    fastest_first: dict[str, list[float]] = {}
    for name, host in hosts.items():
        rates[name] = {port.name: port.gbit if port.of_nccl else 0.0 for port in host.ports}
        up = [rate for rate in rates[name].values() if rate]
        fastest_first[name] = sorted(up, reverse=True)
    # The best that any host has as its first, its second, ... port.
    columns = zip_longest(*fastest_first.values(), fillvalue=0.0)
    best = [max(column) for column in columns]

    slow: dict[str, list[str]] = {}
    for name, of_host in rates.items():
        if fastest_first[name] == best:
            continue
        for port, rate in sorted(of_host.items()):
            usual = _usual_rate(port, rates)
            if rate < usual:
                state = f"has {rate:.0f} instead of" if rate else "is not active, and elsewhere has"
                slow.setdefault(name, []).append(f"{port} {state} {usual:.0f} Gb/s")
    return slow


def _usual_rate(port: str, rates: Mapping[str, Mapping[str, float]]) -> float:
    """That of most hosts with a port of this name; the higher one of two that are as frequent."""
    counts = Counter(of_host[port] for of_host in rates.values() if port in of_host)
    return max(counts, key=lambda rate: (counts[rate], rate))


def _plugins(cluster: ClusterFacts) -> Iterator[Finding]:
    """If NCCL does not find a plugin, it silently uses sockets; if it lacks the network of
    NCCL_NET, it fails."""
    for name, host in cluster.labelled:
        if not host.gpus_seen or host.net_plugin:
            continue
        net = network_of_plugin(host.settings)
        plugins = plugins_asked(host.settings)
        if net:
            yield finding("plugin-missing/network", name, net=net)
        elif host.efa and not host.rdma:
            yield finding("plugin-missing/efa", name)
        elif plugins:
            yield finding("plugin-missing/named", name, plugins=", ".join(plugins))


def _transport(cluster: ClusterFacts) -> Finding:
    """The transports of data: what NCCL's log says if it was timed, or else what the hosts have."""
    if cluster.timings is not None and cluster.timings.transport:
        ways = f"NCCL says: {'; '.join(cluster.timings.transport)}"
    elif not any(host.gpus_seen for host in cluster.hosts):
        names = {
            interface.name
            for host in cluster.hosts
            for interface in communicates_by(host).interfaces
        }
        ways = f"gloo over TCP on {', '.join(sorted(names)) or 'no interface'}"
    else:
        networks = {_network_of(host) for host in cluster.hosts}
        ways = f"NCCL was not asked; between hosts there is: {' or '.join(sorted(networks))}"
    return finding("transport", ways=ways)


def _network_of(host: Host) -> str:
    if host.net_plugin:
        return f"the plugin {host.net_plugin}"
    if host.rdma_name:
        return host.rdma_name
    names = [interface.name for interface in communicates_by(host).interfaces]
    return f"TCP sockets on {', '.join(names) or 'no interface'}"
