"""PURE: which network interface NCCL and gloo take on a host, and by which transport two GPUs talk.

NCCL's reading of NCCL_SOCKET_IFNAME is that of its source (socket.cc, `ncclFindInterfaces`): a list of prefixes, `=`
in front asks for whole names, `^` for all others. gloo's GLOO_SOCKET_IFNAME is a list of whole names (torch,
ProcessGroupGloo.cpp); without it gloo takes the address to which the host's own name resolves.
"""

import ipaddress
from collections.abc import Mapping, Sequence

from meshtrain.operate.doctor.record import Host, Interface

# Where nothing is asked for: InfiniBand's first, then anything real (None), then what is left.
_LEFT = ("docker", "lo", "virbr")
_ORDER: tuple[tuple[str, ...] | None, ...] = (("ib",), None, *((name,) for name in _LEFT))


def nccl_interfaces(interfaces: Sequence[Interface], asked: str | None) -> list[Interface]:
    """The interfaces that NCCL's sockets take, in their order; empty where NCCL_SOCKET_IFNAME fits none."""
    usable = [one for one in interfaces if one.addresses]
    if asked:
        others = asked.startswith("^")
        rest = asked[1:] if others else asked
        whole = rest.startswith("=")
        names = [part.partition(":")[0] for part in (rest[1:] if whole else rest).split(",") if part]
        return [one for one in usable if _fits(one.name, names, whole) != others]
    for prefixes in _ORDER:
        found = [one for one in usable if _fits(one.name, prefixes or _LEFT) != (prefixes is None)]
        if found:
            return found
    return []


def _fits(name: str, names: Sequence[str], whole: bool = False) -> bool:
    return any(name == one or (not whole and name.startswith(one)) for one in names)


def gloo_interfaces(interfaces: Sequence[Interface], asked: str | None, own: Sequence[str]) -> list[Interface]:
    """The interfaces that gloo takes; `own` are the addresses of the host's own name. Empty where none fits."""
    if asked:
        return [one for one in interfaces if one.name in asked.split(",") and one.addresses]
    # Of several addresses gloo takes the first to which it can bind.
    for address in own:
        if found := interface_of(interfaces, address):
            return [found]
    return [one for one in interfaces if one.name == "lo"]  # with a warning that few people read


def interface_of(interfaces: Sequence[Interface], address: str) -> Interface | None:
    """The interface that has this address; all of 127.0.0.0/8 is the loopback's."""
    for one in interfaces:
        if any(part.partition("/")[0] == address for part in one.addresses):
            return one
    if is_loopback(address):
        return next((one for one in interfaces if one.name == "lo"), None)
    return None


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def addresses_of(interfaces: Sequence[Interface]) -> list[str]:
    """Addresses that other hosts can try: no loopback's, none that holds on one link only, IPv4 first."""
    found = [part.partition("/")[0] for one in interfaces for part in one.addresses]
    wide = [one for one in found if not is_loopback(one) and not ipaddress.ip_address(one).is_link_local]
    return sorted(wide, key=lambda one: ":" in one)


def communicates_by(host: Host) -> tuple[str, str | None, list[Interface]]:
    """For a host's job: the library, the variable that picks its interface with its value, the interfaces."""
    variables = host.variables or {}
    if host.gpus_seen:
        asked = variables.get("NCCL_SOCKET_IFNAME")
        return "NCCL_SOCKET_IFNAME", asked, nccl_interfaces(host.interfaces, asked)
    asked = variables.get("GLOO_SOCKET_IFNAME")
    own = (host.resolves or {}).get(host.host, ())
    return "GLOO_SOCKET_IFNAME", asked, gloo_interfaces(host.interfaces, asked, own)


def transport(hosts: Sequence[Host]) -> list[str]:
    """Sentences about the way that data takes: inside of hosts, and between them."""
    if not any(host.gpus_seen for host in hosts):
        names = {f"{one.name}" for host in hosts for one in communicates_by(host)[2]}
        return [f"gloo over TCP on {', '.join(sorted(names)) or 'no interface'}"]
    said = []
    if any(host.processes > 1 for host in hosts):
        said.append(f"inside of a host: {' or '.join(sorted({_inside(host) for host in hosts}))}")
    if len(hosts) > 1:
        ways = {_between(host) for host in hosts}
        mixed = " (the hosts differ: NCCL takes what all have)" if len(ways) > 1 else ""
        said.append(f"between hosts: {' or '.join(sorted(ways))}{mixed}")
    return said


def _inside(host: Host) -> str:
    variables = host.variables or {}
    p2p = variables.get("NCCL_P2P_DISABLE") != "1" and variables.get("NCCL_P2P_LEVEL", "").upper() not in ("LOC", "0")
    if p2p and host.links:
        return "NVLink"
    if p2p:
        return "PCIe from GPU to GPU where the machine allows it, or shared memory"
    return "sockets (NCCL_P2P_DISABLE, NCCL_SHM_DISABLE)" if _is(variables, "NCCL_SHM_DISABLE") else "shared memory"


def _between(host: Host) -> str:
    variables = host.variables or {}
    network = variables.get("NCCL_NET", "").lower()
    if host.infiniband and not _is(variables, "NCCL_IB_DISABLE") and network in ("", "ib"):
        level = variables.get("NCCL_NET_GDR_LEVEL", "").upper()
        direct = host.gpudirect and level not in ("LOC", "0")
        return f"InfiniBand {'with' if direct else 'without'} GPUDirect"
    names = ", ".join(one.name for one in communicates_by(host)[2]) or "no interface"
    return f"TCP sockets on {names}"


def _is(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "0") not in ("0", "")
