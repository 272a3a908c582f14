"""What NCCL will find on this host: its files of settings, a network's plugin, and what lets cards read GPUs."""

import os
import pwd
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from meshtrain.operate.doctor.transport import plugins_asked

CONF = Path("/etc/nccl.conf")
LDCONFIG_S = 5.0
CACHED = re.compile(r"^\t(\S+) \(.*\) => (/.*)$", re.MULTILINE)  # a line of `ldconfig -p`


def settings(variables: Mapping[str, str], of_host: Path = CONF) -> dict[str, str]:
    """What NCCL reads from files for variables that are not set: the user's file first, and then the host's."""
    asked = variables.get("NCCL_CONF_FILE")
    found: dict[str, str] = {}
    for file in (Path(asked) if asked else _home() / ".nccl.conf", of_host):
        for line in _text(file).splitlines():
            name, sign, value = line.partition("=")
            if sign and not line.startswith("#") and name not in variables:
                found.setdefault(name, value)  # with its spaces, which NCCL does not take away either
    return found


def _home() -> Path:
    """As NCCL has it: HOME may be another user's."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # in containers
        return Path("/nonexistent")


def gpudirect(variables: Mapping[str, str], proc: Path = Path("/proc")) -> str:
    """By what network cards can read a GPU's memory, as far as can be seen: DMA-BUF, nvidia_peermem, or nothing ("").

    DMA-BUF wants NVIDIA's open kernel modules and Linux 5.12 (or a distribution that has brought it to an older one,
    which cannot be seen), and NCCL_DMABUF_ENABLE=0 switches it off. NCCL asks the cards' driver, which this does not.
    """
    numbers = re.findall(r"\d+", _text(proc / "sys/kernel/osrelease"))[:2]
    recent = [int(number) for number in numbers] >= [5, 12]
    is_open = "Open Kernel Module" in _text(proc / "driver/nvidia/version")
    if recent and is_open and variables.get("NCCL_DMABUF_ENABLE") != "0":
        return "DMA-BUF"
    modules = _text(proc / "modules").splitlines()
    peermem = any(line.startswith(("nvidia_peermem ", "nv_peer_mem ")) for line in modules)
    return "nvidia_peermem" if peermem else ""


def net_plugin(variables: Mapping[str, str], cached: Mapping[str, str]) -> str:
    """The file of the network's plugin that NCCL will load; empty: it finds none.

    NCCL_NET_PLUGIN is a list of files, or of what comes after libnccl-net- in their names; without it NCCL looks for
    libnccl-net.so. All are looked for where the loader looks.

    Args:
        cached: `library_cache`.
    """
    names = []
    for one in plugins_asked(variables):
        names += [one, f"libnccl-net-{one}.so"]
    folders = [folder for folder in variables.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for name in names or ([] if "NCCL_NET_PLUGIN" in variables else ["libnccl-net.so"]):
        if "/" in name:
            if os.path.exists(name):
                return name
            continue
        for folder in folders:
            if os.path.exists(path := os.path.join(folder, name)):
                return path
        if name in cached:
            return cached[name]
    return ""


def library_cache() -> dict[str, str]:
    """The libraries that the loader knows: name -> file. Empty where that cannot be found out."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    try:
        done = subprocess.run(
            ["ldconfig", "-p"], env={"PATH": path}, capture_output=True, text=True, timeout=LDCONFIG_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(reversed(CACHED.findall(done.stdout)))  # of several files of one name the first counts


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
