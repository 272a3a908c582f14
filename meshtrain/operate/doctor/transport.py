"""PURE: by which transport data goes from GPU to GPU, inside of a host and between hosts, and what switches it.

Values are read as NCCL reads them (src/graph/paths.cc, src/misc/param.cc): levels to the letter, numbers as C does. See
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

import re
from collections.abc import Mapping, Sequence

from meshtrain.operate.doctor.interfaces import communicates_by
from meshtrain.operate.doctor.record import Host

NUMBER = re.compile(r"\s*([+-]?\d+)")


def transport(hosts: Sequence[Host]) -> list[str]:
    """Sentences about the way that data takes."""
    if not any(host.gpus_seen for host in hosts):
        names = {f"{one.name}" for host in hosts for one in communicates_by(host)[2]}
        return [f"gloo over TCP on {', '.join(sorted(names)) or 'no interface'}"]
    said = []
    if any(host.processes > 1 for host in hosts):
        said.append(f"inside of a host: {_of_all([_inside(host) for host in hosts])}")
    if len(hosts) > 1:
        said.append(f"between hosts: {_of_all([_between(host) for host in hosts])}")
    return said


def slow_switches(host: Host) -> dict[str, str]:
    """`NAME=value` of the settings that make a job slower on this host -> how."""
    found = host.settings
    network = host.rdma or host.net_plugin
    means = {
        _is(found, "NCCL_P2P_DISABLE", 1) or _off(found, "NCCL_P2P_LEVEL"): (
            "GPUs of a host do not copy to each other directly"
        ),
        _is(found, "NCCL_SHM_DISABLE", 1): (
            "processes of a host do not share memory: GPUs that cannot copy directly talk by the network"
        ),
        _on(found, "NCCL_IB_DISABLE") if host.rdma else "": f"{host.rdma_name} is not used",
        _sockets(found) if network else "": "hosts talk by sockets, whatever else there is",
        _off(found, "NCCL_NET_GDR_LEVEL") if network else "": "network cards do not read a GPU's memory",
        _on(found, "CUDA_LAUNCH_BLOCKING"): "every kernel is waited for",
    }
    return {switch: words for switch, words in means.items() if switch and host.gpus_seen}


def plugins_asked(settings: Mapping[str, str]) -> list[str]:
    """The plugins of networks that NCCL_NET_PLUGIN names, in their order."""
    names = settings.get("NCCL_NET_PLUGIN", "").split(",")
    return [name for name in names if name and name.lower() != "none"]


def network_of_plugin(settings: Mapping[str, str]) -> str:
    """The network that NCCL_NET asks for, if NCCL does not have it itself; it ends where no plugin has it either."""
    name = settings.get("NCCL_NET", "")
    return "" if name.lower() in ("", "ib", "socket") else name


def _of_all(ways: Sequence[str]) -> str:
    different = sorted(set(ways))
    mixed = " (the hosts differ: NCCL takes what all have)" if len(different) > 1 else ""
    return " or ".join(different) + mixed


def _inside(host: Host) -> str:
    settings = host.settings
    no_copies = _is(settings, "NCCL_P2P_DISABLE", 1) or _off(settings, "NCCL_P2P_LEVEL")
    no_shared = _is(settings, "NCCL_SHM_DISABLE", 1)
    rest = f"the network between hosts, because of {no_shared}" if no_shared else "shared memory"
    if no_copies:
        return f"{rest} and {no_copies}" if no_shared else f"{rest}, because of {no_copies}"
    if host.links:
        return "NVLink (NCCL_P2P_DISABLE, NCCL_P2P_LEVEL switch it off)"
    return f"PCIe from GPU to GPU where the machine allows it (NCCL_P2P_LEVEL says how far apart), or {rest}"


def _between(host: Host) -> str:
    settings = host.settings
    asked = network_of_plugin(settings)
    if asked and not host.net_plugin:
        return f"nothing, because of NCCL_NET={asked}, which is a plugin's, and there is none"
    if (host.net_plugin and not settings.get("NCCL_NET", "")) or asked:
        return f"what the plugin {host.net_plugin} offers, if it loads (NCCL_NET_PLUGIN=none switches it off)"
    names = ", ".join(one.name for one in communicates_by(host)[2]) or "no interface"
    sockets = f"TCP sockets on {names}"
    if not host.rdma:
        return sockets + ", because EFA is by the plugin aws-ofi-nccl alone, and there is none" * host.efa
    if no_infiniband := _on(settings, "NCCL_IB_DISABLE") or _sockets(settings):
        return f"{sockets}, because of {no_infiniband}"
    if never := _off(settings, "NCCL_NET_GDR_LEVEL"):
        return f"{host.rdma_name} without GPUDirect, because of {never}"
    if host.gpudirect:
        return (
            f"{host.rdma_name} with GPUDirect by {host.gpudirect} if the cards' driver has it, as far apart as "
            "NCCL_NET_GDR_LEVEL allows"
        )
    return f"{host.rdma_name}, as far as can be seen without GPUDirect"


def _number(settings: Mapping[str, str], name: str) -> int:
    """As C's strtol has it: 0 for what is no number."""
    found = NUMBER.match(settings.get(name, ""))
    return 0 if found is None else int(found[1])


def _is(settings: Mapping[str, str], name: str, number: int) -> str:
    """`NAME=value` if it is that number, or else nothing."""
    return f"{name}={settings[name]}" if name in settings and _number(settings, name) == number else ""


def _on(settings: Mapping[str, str], name: str) -> str:
    """`NAME=value` if it is any number but 0, or else nothing."""
    return f"{name}={settings[name]}" if _number(settings, name) != 0 else ""


def _off(settings: Mapping[str, str], name: str) -> str:
    """`NAME=value` if this level is the one at which there is nothing of the kind; 0 is what it once was called."""
    value = settings.get(name, "")
    old = value[:1].isdigit() and _number(settings, name) == 0
    return f"{name}={value}" if value == "LOC" or old else ""


def _sockets(settings: Mapping[str, str]) -> str:
    return f"NCCL_NET={settings['NCCL_NET']}" if settings.get("NCCL_NET", "").lower() == "socket" else ""
