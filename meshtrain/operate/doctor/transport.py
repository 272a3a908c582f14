"""PURE: by which transport data goes from GPU to GPU, inside of a host and between hosts, and what switches it.

See https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

from collections.abc import Mapping, Sequence

from meshtrain.operate.doctor.interfaces import communicates_by
from meshtrain.operate.doctor.record import Host

OFF = ("LOC", "0")  # levels of NCCL_P2P_LEVEL and NCCL_NET_GDR_LEVEL at which there is none
OWN_NETWORKS = ("ib", "socket")  # NCCL_NET; another name is a plugin's


def transport(hosts: Sequence[Host]) -> list[str]:
    """Sentences about the way that data takes."""
    if not any(host.gpus_seen for host in hosts):
        names = {f"{one.name}" for host in hosts for one in communicates_by(host)[2]}
        return [f"gloo over TCP on {', '.join(sorted(names)) or 'no interface'}"]
    said = []
    if any(host.processes > 1 for host in hosts):
        said.append(f"inside of a host: {_of_all(hosts, [_inside(host) for host in hosts])}")
    if len(hosts) > 1:
        said.append(f"between hosts: {_of_all(hosts, [_between(host) for host in hosts])}")
    return said


def slow_switches(variables: Mapping[str, str]) -> dict[str, str]:
    """`NAME=value` of those that make a job slower -> how."""
    means = {
        _set(variables, "NCCL_P2P_DISABLE"): "GPUs of a host do not copy to each other directly",
        _at(variables, "NCCL_P2P_LEVEL", OFF): "GPUs of a host do not copy to each other directly",
        _set(variables, "NCCL_SHM_DISABLE"): "processes of a host do not share memory, and talk by sockets",
        _set(variables, "NCCL_IB_DISABLE"): "InfiniBand is not used",
        _at(variables, "NCCL_NET", ("SOCKET",)): "hosts talk by sockets, whatever else there is",
        _at(variables, "NCCL_NET_GDR_LEVEL", OFF): "network cards do not read a GPU's memory",
        _set(variables, "CUDA_LAUNCH_BLOCKING"): "every kernel is waited for",
    }
    return {switch: words for switch, words in means.items() if switch}


def _of_all(hosts: Sequence[Host], ways: Sequence[str]) -> str:
    different = sorted(set(ways))
    mixed = " (the hosts differ: NCCL takes what all have)" if len(different) > 1 else ""
    return " or ".join(different) + mixed


def _inside(host: Host) -> str:
    variables = host.variables or {}
    no_copies = _set(variables, "NCCL_P2P_DISABLE") or _at(variables, "NCCL_P2P_LEVEL", OFF)
    no_shared = _set(variables, "NCCL_SHM_DISABLE")
    if no_copies and no_shared:
        return f"sockets, because of {no_copies} and {no_shared}"
    if no_copies:
        return f"shared memory, because of {no_copies}"
    if host.links:
        return "NVLink (NCCL_P2P_DISABLE, NCCL_P2P_LEVEL switch it off)"
    return (
        "PCIe from GPU to GPU where the machine allows it (NCCL_P2P_LEVEL says how far apart), or "
        f"{f'sockets, because of {no_shared}' if no_shared else 'shared memory'}"
    )


def _between(host: Host) -> str:
    variables = host.variables or {}
    network = variables.get("NCCL_NET", "")
    if host.net_plugin and network.lower() not in OWN_NETWORKS:
        return f"what the plugin {host.net_plugin} offers, if it loads (NCCL_NET_PLUGIN=none switches it off)"
    names = ", ".join(one.name for one in communicates_by(host)[2]) or "no interface"
    sockets = f"TCP sockets on {names}"
    if not host.infiniband:
        return sockets
    no_infiniband = _set(variables, "NCCL_IB_DISABLE") or _at(variables, "NCCL_NET", ("SOCKET",))
    if no_infiniband:
        return f"{sockets}, because of {no_infiniband}"
    never = _at(variables, "NCCL_NET_GDR_LEVEL", OFF)
    if never:
        return f"InfiniBand without GPUDirect, because of {never}"
    if host.gpudirect:
        return f"InfiniBand with GPUDirect by {host.gpudirect}, as far apart as NCCL_NET_GDR_LEVEL allows"
    return "InfiniBand without GPUDirect"


def _set(variables: Mapping[str, str], name: str) -> str:
    """`NAME=value` if it is switched on, or else nothing."""
    return "" if variables.get(name, "0") in ("0", "") else f"{name}={variables[name]}"


def _at(variables: Mapping[str, str], name: str, values: Sequence[str]) -> str:
    """`NAME=value` if it has one of these values, or else nothing."""
    return f"{name}={variables[name]}" if variables.get(name, "").upper() in values else ""
