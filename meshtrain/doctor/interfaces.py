"""Which network interface NCCL and gloo take on a host. Pure.

NCCL_SOCKET_IFNAME (socket.cc, `ncclFindInterfaces`) is a list of prefixes, `=` in front asks for whole names, `^` for
all others. GLOO_SOCKET_IFNAME is a list of whole names; without it gloo takes the address of the host's own name.
"""

import ipaddress
from collections.abc import Sequence

from meshtrain.doctor.records import Host, Interface

# Where nothing is asked for: InfiniBand's first, then anything real (None), then what is left.
_LAST = ("docker", "lo", "virbr")
_ORDER: tuple[tuple[str, ...] | None, ...] = (("ib",), None, *((name,) for name in _LAST))


def nccl_interfaces(interfaces: Sequence[Interface], setting: str | None) -> list[Interface]:
    """The interfaces that NCCL's sockets take, in their order; empty where NCCL_SOCKET_IFNAME fits none."""

    def fits(interface: Interface, names: Sequence[str], whole: bool = False) -> bool:
        return any(interface.name == name or (not whole and interface.name.startswith(name)) for name in names)

    usable = [interface for interface in interfaces if interface.addresses]
    if setting:
        others = setting.startswith("^")
        rest = setting.removeprefix("^")
        names = [part.partition(":")[0] for part in rest.removeprefix("=").split(",") if part]
        return [interface for interface in usable if fits(interface, names, rest.startswith("=")) != others]
    for prefixes in _ORDER:
        chosen = [interface for interface in usable if fits(interface, prefixes or _LAST) != (prefixes is None)]
        if chosen:
            return chosen
    return []


def gloo_interfaces(interfaces: Sequence[Interface], setting: str | None, own: Sequence[str]) -> list[Interface]:
    """The interfaces that gloo takes; `own` are the addresses of the host's own name. Empty where none fits."""
    if setting:
        return [interface for interface in interfaces if interface.name in setting.split(",") and interface.addresses]
    for address in own:  # gloo takes the first to which it can bind
        if interface := interface_of(interfaces, address):
            return [interface]
    return [interface for interface in interfaces if interface.name == "lo"]  # with a warning that few people read


def interface_of(interfaces: Sequence[Interface], address: str) -> Interface | None:
    """The interface that has this address; all of 127.0.0.0/8 is the loopback's."""
    with_address = (interface for interface in interfaces if address in interface.addresses)
    loopback = (interface for interface in interfaces if interface.name == "lo" and is_loopback(address))
    return next(with_address, None) or next(loopback, None)


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def addresses_of(interfaces: Sequence[Interface]) -> list[str]:
    """Addresses that other hosts can try: no loopback's, none that holds on one link only, IPv4 first."""
    addresses = [ipaddress.ip_address(address) for interface in interfaces for address in interface.addresses]
    wide = [str(address) for address in addresses if not address.is_loopback and not address.is_link_local]
    return sorted(wide, key=lambda address: ":" in address)


def communicates_by(host: Host) -> tuple[str, str | None, list[Interface]]:
    """For a host's job: the variable that picks its library's interface, its value, the interfaces."""
    if host.gpus_seen:
        setting = host.settings.get("NCCL_SOCKET_IFNAME")
        return "NCCL_SOCKET_IFNAME", setting, nccl_interfaces(host.interfaces, setting)
    setting = host.settings.get("GLOO_SOCKET_IFNAME")
    own = (host.resolves or {}).get(host.host, ())
    return "GLOO_SOCKET_IFNAME", setting, gloo_interfaces(host.interfaces, setting, own)
