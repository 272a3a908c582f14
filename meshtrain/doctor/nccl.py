"""What NCCL and gloo use on a host: interfaces, plugins, settings, which of these are slow, and
what NCCL's log says.

See https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html. NCCL_SOCKET_IFNAME
(socket.cc, `ncclFindInterfaces`) is a list of prefixes; a leading `=` means whole names, `^` all
others. GLOO_SOCKET_IFNAME is a list of whole names; without it gloo takes the address of the host's
own name.
"""

import ipaddress
import os
import pwd
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshtrain.doctor.records import Host, Interface
from meshtrain.job.sockets import is_loopback

CONF = Path("/etc/nccl.conf")
LDCONFIG_S = 5.0
CACHED = re.compile(r"^\t(\S+) \(.*\) => (/.*)$", re.MULTILINE)  # a line of `ldconfig -p`

ROW = re.compile(
    r"NCCL INFO (?:(NET/\w+ : Using .+?)(?:; OOB .*)?|Channel .* via (.+?)(?: comm .*)?)$",
    re.MULTILINE,
)

NUMBER_ONE, ANY_NUMBER, NEVER = r"\s*\+?0*1(?!\d)", r"\s*[+-]?0*[1-9]", r"LOC$|0+(?!\d)"
NO_SHARED_MEMORY = (
    "processes of a host do not share memory: GPUs that cannot copy directly talk by the network"
)
# Setting, pattern of the values that slow a job down, what the host must have for that to matter,
# the effect.
SLOW_SETTINGS = (
    ("NCCL_P2P_DISABLE", NUMBER_ONE, "", "GPUs of a host do not copy to each other directly"),
    ("NCCL_P2P_LEVEL", NEVER, "", "GPUs of a host do not copy to each other directly"),
    ("NCCL_SHM_DISABLE", NUMBER_ONE, "", NO_SHARED_MEMORY),
    ("NCCL_IB_DISABLE", ANY_NUMBER, "rdma", "{rdma} is not used"),
    ("NCCL_NET", "(?i:socket)$", "network", "hosts talk by sockets, whatever else there is"),
    ("NCCL_NET_GDR_LEVEL", NEVER, "network", "network cards do not read a GPU's memory"),
    ("CUDA_LAUNCH_BLOCKING", ANY_NUMBER, "", "every kernel is waited for"),
)  # fmt: skip

# Interfaces that NCCL takes without a setting only if there are no others, in this order.
LAST_CHOICES = ("docker", "lo", "virbr")


@dataclass(frozen=True)
class SlowSetting:
    """A setting that makes a job slower; `of_file`: it stands in a file of NCCL's."""

    variable: str
    value: str
    effect: str
    of_file: bool

    def __str__(self) -> str:
        return f"{self.variable}={self.value}"


@dataclass(frozen=True)
class Sockets:
    """The interfaces over which a host's library for communication opens sockets."""

    variable: str  # which selects them
    setting: str | None  # its value
    interfaces: Sequence[Interface]  # in the library's order


def slow_settings(host: Host) -> list[SlowSetting]:
    """The settings that make a job slower on this host."""
    if not host.gpus_seen:  # gloo does not read them
        return []
    has = {
        "": True,
        "rdma": bool(host.rdma_name),
        "network": bool(host.rdma_name or host.net_plugin),
    }
    slow = []
    for name, values, needs, effect in SLOW_SETTINGS:
        value = host.settings.get(name, "")
        if has[needs] and re.match(values, value):
            text = effect.format(rdma=host.rdma_name)
            slow.append(SlowSetting(name, value, text, of_file=name in host.nccl_conf))
    return slow


def transports(log: str) -> list[str]:
    """The transports in NCCL's log, each once: `NET/IB : Using [0]mlx5_0:1/IB`, `via
    NET/IB/GDRDMA`."""
    networks = set()
    ways = set()
    for network, way in ROW.findall(log):
        if network:
            networks.add(re.sub(r":[.:%\w]*<\d+>", "", network))  # without the host's address
        if way:
            ways.add("via " + re.sub(r"/\d+", "", way))  # without the channel's number
    return sorted(networks) + sorted(ways)


def plugins_asked(settings: Mapping[str, str]) -> list[str]:
    """The network plugins that NCCL_NET_PLUGIN names, in order."""
    names = settings.get("NCCL_NET_PLUGIN", "").split(",")
    return [name for name in names if name and name.lower() != "none"]


def network_of_plugin(settings: Mapping[str, str]) -> str:
    """The network that NCCL_NET requires, if it is not built into NCCL, which then fails if no
    plugin provides it."""
    name = settings.get("NCCL_NET", "")
    return "" if name.lower() in ("", "ib", "socket") else name


def settings_of_files(variables: Mapping[str, str], host_file: Path = CONF) -> dict[str, str]:
    """Settings that NCCL reads from files for variables that are not set: the user's file first,
    then the host's."""
    user_file = _home() / ".nccl.conf"
    if variables.get("NCCL_CONF_FILE"):
        user_file = Path(variables["NCCL_CONF_FILE"])
    settings: dict[str, str] = {}
    for file in (user_file, host_file):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, sign, value = line.partition("=")
            if sign and not line.startswith("#") and name not in variables:
                # with its spaces, which NCCL does not strip, either
                settings.setdefault(name, value)
    return settings


def _home() -> Path:
    """The home folder that NCCL uses: HOME may be another user's."""
    with suppress(KeyError):  # in containers
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    return Path("/nonexistent")


def net_plugin(variables: Mapping[str, str], cached: Mapping[str, str]) -> str:
    """The file of the network plugin that NCCL will load, or ""; `cached`: the `library_cache`.
    NCCL_NET_PLUGIN is a list of files, or of the suffixes after libnccl-net- in their names."""
    names = []
    for plugin in plugins_asked(variables):
        names += [plugin, f"libnccl-net-{plugin}.so"]
    if "NCCL_NET_PLUGIN" not in variables:
        names = ["libnccl-net.so"]

    # The dynamic loader's order: LD_LIBRARY_PATH, then its cache.
    folders = [folder for folder in variables.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for name in names:
        files = [name]
        if "/" not in name:
            files = [os.path.join(folder, name) for folder in folders]
            files.append(cached.get(name, ""))
        for file in files:
            if os.path.exists(file) or file in cached.values():
                return file
    return ""


def library_cache() -> dict[str, str]:
    """The libraries that the dynamic loader knows: name -> file. Empty if `ldconfig` does not
    tell."""
    # ldconfig is not on everybody's PATH.
    variables = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    try:
        text = subprocess.check_output(
            ["ldconfig", "-p"],
            env=variables,
            text=True,
            timeout=LDCONFIG_S,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    # Of several files with one name, the first counts.
    return dict(reversed(CACHED.findall(text)))


def nccl_interfaces(interfaces: Sequence[Interface], setting: str | None) -> list[Interface]:
    """The interfaces that NCCL's sockets use, in order; empty if NCCL_SOCKET_IFNAME matches
    none."""
    usable = [interface for interface in interfaces if interface.addresses]
    if setting:
        return _named_interfaces(usable, setting)
    # Without a setting: InfiniBand's, or else any other real ones, or else the rest.
    infiniband = [each for each in usable if each.name.startswith("ib")]
    real = [each for each in usable if not each.name.startswith(LAST_CHOICES)]
    if infiniband or real:
        return infiniband or real
    for prefix in LAST_CHOICES:
        chosen = [each for each in usable if each.name.startswith(prefix)]
        if chosen:
            return chosen
    return []


def _named_interfaces(usable: Sequence[Interface], setting: str) -> list[Interface]:
    """Those that a value of NCCL_SOCKET_IFNAME names: `eth,ib` by prefixes, `=eth0` by whole names,
    `^docker` all others."""
    excludes = setting.startswith("^")
    names = setting.removeprefix("^")
    whole = names.startswith("=")
    words = [part.partition(":")[0] for part in names.removeprefix("=").split(",") if part]
    chosen = []
    for interface in usable:
        fits = interface.name in words if whole else interface.name.startswith(tuple(words))
        if fits != excludes:
            chosen.append(interface)
    return chosen


def gloo_interfaces(
    interfaces: Sequence[Interface], setting: str | None, own: Sequence[str]
) -> list[Interface]:
    """The interfaces that gloo uses; `own`: the addresses of the host's own name. Empty if none
    fits."""
    if setting:
        names = setting.split(",")
        return [each for each in interfaces if each.name in names and each.addresses]
    for address in own:  # gloo takes the first one to which it can bind
        interface = interface_of(interfaces, address)
        if interface is not None:
            return [interface]
    # with a warning that few people read
    return [interface for interface in interfaces if interface.name == "lo"]


def interface_of(interfaces: Sequence[Interface], address: str) -> Interface | None:
    """The interface that has this address; all of 127.0.0.0/8 belongs to the loopback interface."""
    for interface in interfaces:
        if address in interface.addresses:
            return interface
    for interface in interfaces:
        if interface.name == "lo" and is_loopback(address):
            return interface
    return None


def addresses_of(interfaces: Sequence[Interface]) -> list[str]:
    """Addresses that other hosts can try: no loopback or link-local ones, IPv4 first."""
    wide = []
    for interface in interfaces:
        for text in interface.addresses:
            address = ipaddress.ip_address(text)
            if not address.is_loopback and not address.is_link_local:
                wide.append(str(address))
    return sorted(wide, key=lambda address: ":" in address)


def communicates_by(host: Host) -> Sockets:
    """The interfaces of the library that the host would use: NCCL with GPUs, otherwise gloo."""
    if host.gpus_seen:
        setting = host.settings.get("NCCL_SOCKET_IFNAME")
        return Sockets("NCCL_SOCKET_IFNAME", setting, nccl_interfaces(host.interfaces, setting))
    setting = host.settings.get("GLOO_SOCKET_IFNAME")
    own = host.resolves.get(host.host, ())
    return Sockets("GLOO_SOCKET_IFNAME", setting, gloo_interfaces(host.interfaces, setting, own))
