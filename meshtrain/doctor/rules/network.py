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
    if cluster.attempt is None and cluster.several_machines:
        for rule in (_own_names, _names_of_others, _interfaces, _ports, _rdma, _plugins):
            yield from rule(cluster)
    yield from _same_names(cluster)
    for name, host in cluster.labelled:
        if host.slow_names:
            yield finding("slow-look-up", name, names=names_text(host.slow_names))
    if cluster.attempt is None and sum(host.processes for host in cluster.hosts) > 1:
        yield from _transport(cluster)


def _own_names(cluster: ClusterFacts) -> Iterator[Finding]:
    """gloo announces to the others the address to which its host's name resolves."""
    for name, host in cluster.labelled:
        addresses = (host.resolves or {}).get(host.host, ())
        variable, value, _ = communicates_by(host)
        severity = "error" if variable == "GLOO_SOCKET_IFNAME" and not value else "warning"
        own, interface = host.route or "its address", _interface_of_route(host)
        words = {"host": host.host, "own": own, "interface": interface}
        if not addresses:
            yield finding("name-unresolved", name, severity, **words)
        elif is_loopback(addresses[0]):
            yield finding("name-is-loopback", name, severity, address=addresses[0], **words)


def _interface_of_route(host: Host) -> str:
    interface = interface_of(host.interfaces, host.route)
    return interface.name if interface is not None else "the interface between the hosts"


def _names_of_others(cluster: ClusterFacts) -> Iterator[Finding]:
    """Under c10d the workers meet at the name of rank 0's host, which can be any host: all must
    resolve it."""
    place = cluster.hosts[0].place
    severity = "error" if place.backend == "c10d" and place.launcher != "torchrun" else "warning"
    by_name = {host.host: host for host in cluster.hosts}
    for (name, own), checks in zip(cluster.labelled, cluster.visits, strict=False):
        for other, addresses in ((checks.names if checks else None) or {}).items():
            host = by_name.get(other)
            if host is None or other == own.host:
                continue
            case = (
                "unresolved"
                if not addresses
                else "loopback"
                if is_loopback(addresses[0])
                else "other"
            )
            if case != "other" or not set(addresses) & set(host.addresses):
                words = {
                    "other": other,
                    "resolved": "".join(addresses[:1]),
                    "address": host.route or "its address",
                }
                yield finding(f"name-of-other-wrong/{case}", name, severity, **words)


def _same_names(cluster: ClusterFacts) -> Iterator[Finding]:
    for name, nodes in group_values((host.host, i) for i, host in enumerate(cluster.hosts)).items():
        if len(nodes) > 1:
            machines = {(cluster.hosts[i].machine, cluster.hosts[i].addresses) for i in nodes}
            id_ = "same-host" if len(machines) == 1 else "same-name"
            hosts = [cluster.labels[i] for i in nodes]
            yield finding(id_, hosts, nodes=names_text([str(i) for i in nodes]), name=name)


def _interfaces(cluster: ClusterFacts) -> Iterator[Finding]:
    for i, (name, host) in enumerate(cluster.labelled):
        variable, value, chosen = communicates_by(host)
        words = {"variable": variable, "value": value, "interface": _interface_of_route(host)}
        if not chosen:
            present = names_text(
                [_interface_text(interface) for interface in host.interfaces if interface.addresses]
            )
            yield finding("interface-missing", name, interfaces=present, **words)
            continue
        route = interface_of(host.interfaces, host.route)
        if route is None or route.name == chosen[0].name:
            continue
        if not value and is_loopback(chosen[0].addresses[0]):
            continue  # a finding on its name reports this already
        addresses = {address for interface in chosen for address in interface.addresses}
        checks = [
            check
            for check in _port_checks(cluster)
            if check.target == i and check.address in addresses
        ]
        shut = [check for check in checks if check.how != "open"]
        if checks and not shut:
            # the hosts reach each other by it: InfiniBand's, beside an interface for names and
            # logins
            continue
        words["setting"] = f"{variable}={value}" if value else f"{variable} is not set, which"
        words |= {"chosen": _interface_text(chosen[0]), "route": _interface_text(route)}
        if shut:
            words |= {
                "address": shut[0].address,
                "how": PORT_STATES.get(shut[0].how, "is another host"),
            }
        yield finding(f"interface-wrong/{'shut' if shut else 'untried'}", name, **words)


def _interface_text(interface: Interface) -> str:
    return f"{interface.name} ({', '.join(interface.addresses[:2])})"


def _port_checks(cluster: ClusterFacts) -> list[PortCheck]:
    return [check for checks in cluster.visits if checks is not None for check in checks.reach]


def _ports(cluster: ClusterFacts) -> Iterator[Finding]:
    """Tries of a host's random port at the address from which it came to the endpoint."""
    names, nodes = cluster.labels, range(len(cluster.hosts))
    shut: dict[str, list[PortCheck]] = {}
    for check in _port_checks(cluster):
        known = check.source in nodes and check.target in nodes
        if known and check.how != "open" and check.address == cluster.hosts[check.target].route:
            shut.setdefault(check.how, []).append(check)
    for outcome, checks in shut.items():
        pairs = names_text([f"{names[check.source]} to {names[check.target]}" for check in checks])
        hosts = sorted({names[i] for check in checks for i in (check.source, check.target)})
        if outcome in PORT_STATES:
            yield finding(
                "ports-closed", hosts, port=checks[0].port, how=PORT_STATES[outcome], pairs=pairs
            )
        else:
            yield finding("address-of-another", hosts, pairs=pairs, address=checks[0].address)


def _rdma(cluster: ClusterFacts) -> Iterator[Finding]:
    have = {name: host for name, host in cluster.labelled if host.rdma}
    without = [name for name in cluster.labels if name not in have]
    if have and without:
        yield finding("infiniband-differs", without, kind=next(iter(have.values())).rdma_name)
    for name, slow in _slow_ports(have).items():
        yield finding("infiniband-differs/slow", name, ports=names_text(slow))
    ports = [
        (name, port)
        for name, host in have.items()
        for port in host.rdma
        if port.layer == "Ethernet"
    ]
    no_gid = {f"{port.name} of {name}": name for name, port in ports if not port.roce_v2}
    if no_gid:
        yield finding(
            "roce-gid-missing", dict.fromkeys(no_gid.values()), ports=names_text(list(no_gid))
        )
    closed = [name for name, host in cluster.labelled if host.ports and not host.verbs]
    if closed:
        yield finding("rdma-not-given", closed)
    transports = cluster.timings.transport if cluster.timings is not None else ()
    indirect = [
        way.removeprefix("via ")
        for way in transports
        if way.startswith("via NET/IB") and "GDRDMA" not in way
    ]
    if indirect and have:
        yield finding("no-gpudirect", have, ways=", ".join(indirect))


def _slow_ports(hosts: Mapping[str, Host]) -> dict[str, list[str]]:
    """For each host with lower rates than another: its ports that are down, or slower than ports of
    that name on most hosts. Rates are compared first: names differ between healthy hosts, and one
    may have a port more, for storage."""
    rates = {
        name: {port.name: port.gbit * port.of_nccl for port in host.ports}
        for name, host in hosts.items()
    }
    active = {
        name: sorted(filter(None, of_host.values()), reverse=True)
        for name, of_host in rates.items()
    }
    most = [max(column) for column in zip_longest(*active.values(), fillvalue=0.0)]
    slow: dict[str, list[str]] = {}
    for name, of_host in rates.items():
        if active[name] == most:
            continue
        for port, rate in sorted(of_host.items()):
            counts = Counter(others[port] for others in rates.values() if port in others)
            usual = max(counts, key=lambda value: (counts[value], value))
            if rate < usual:
                state = f"has {rate:.0f} instead of" if rate else "is not active, and elsewhere has"
                slow.setdefault(name, []).append(f"{port} {state} {usual:.0f} Gb/s")
    return slow


def _plugins(cluster: ClusterFacts) -> Iterator[Finding]:
    """If NCCL does not find a plugin, it silently uses sockets; if it lacks the network of
    NCCL_NET, it fails."""
    for name, host in cluster.labelled:
        if not host.gpus_seen or host.net_plugin:
            continue
        if net := network_of_plugin(host.settings):
            yield finding("plugin-missing/network", name, net=net)
        elif host.efa and not host.rdma:
            yield finding("plugin-missing/efa", name)
        elif plugins := plugins_asked(host.settings):
            yield finding("plugin-missing/named", name, plugins=", ".join(plugins))


def _transport(cluster: ClusterFacts) -> Iterator[Finding]:
    """The transports of data: what NCCL's log says if it was timed, or else what the hosts have."""
    if cluster.timings is not None and cluster.timings.transport:
        yield finding("transport", ways=f"NCCL says: {'; '.join(cluster.timings.transport)}")
    elif not any(host.gpus_seen for host in cluster.hosts):
        gloo = {interface.name for host in cluster.hosts for interface in communicates_by(host)[2]}
        yield finding(
            "transport", ways=f"gloo over TCP on {', '.join(sorted(gloo)) or 'no interface'}"
        )
    else:
        networks = set()
        for host in cluster.hosts:
            names = (
                ", ".join(interface.name for interface in communicates_by(host)[2])
                or "no interface"
            )
            plugin = host.net_plugin and f"the plugin {host.net_plugin}"
            networks.add(plugin or host.rdma_name or f"TCP sockets on {names}")
        yield finding(
            "transport",
            ways=f"NCCL was not asked; between hosts there is: {' or '.join(sorted(networks))}",
        )
