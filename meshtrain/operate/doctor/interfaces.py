"""PURE: which network interface NCCL and gloo take on a host.

NCCL's reading of NCCL_SOCKET_IFNAME is that of its source (socket.cc, `ncclFindInterfaces`): a list of prefixes, `=`
in front asks for whole names, `^` for all others. gloo's GLOO_SOCKET_IFNAME is a list of whole names (torch,
ProcessGroupGloo.cpp); without it gloo takes the address to which the host's own name resolves.
"""

import ipaddress
from collections.abc import Sequence

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
    variables = host.settings
    if host.gpus_seen:
        asked = variables.get("NCCL_SOCKET_IFNAME")
        return "NCCL_SOCKET_IFNAME", asked, nccl_interfaces(host.interfaces, asked)
    asked = variables.get("GLOO_SOCKET_IFNAME")
    own = (host.resolves or {}).get(host.host, ())
    return "GLOO_SOCKET_IFNAME", asked, gloo_interfaces(host.interfaces, asked, own)
