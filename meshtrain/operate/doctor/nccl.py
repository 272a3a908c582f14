"""What NCCL will find on this host: its files of settings, a network's plugin, and what lets cards read GPUs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

CONF = Path("/etc/nccl.conf")
LIBRARIES = ("/usr/local/lib", "/lib/*-linux-gnu", "/usr/lib/*-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


def settings(variables: Mapping[str, str], of_host: Path = CONF) -> dict[str, str]:
    """The variables as NCCL will have them: what they lack it reads from the user's file, and then the host's."""
    of_user = variables.get("NCCL_CONF_FILE") or str(Path(variables.get("HOME", "/")) / ".nccl.conf")
    found: dict[str, str] = {}
    for file in (Path(of_user), of_host):
        for line in _text(file).splitlines():
            name, sign, value = line.strip().partition("=")
            if sign and not name.startswith("#"):
                found.setdefault(name.strip(), value.strip())
    return found | dict(variables)


def gpudirect(variables: Mapping[str, str], proc: Path = Path("/proc")) -> str:
    """By what network cards can read a GPU's memory: nvidia_peermem or DMA-BUF; empty: they cannot.

    DMA-BUF wants Linux 5.12 and NVIDIA's open kernel modules, and NCCL_DMABUF_ENABLE=0 switches it off.
    """
    modules = _text(proc / "modules").splitlines()
    if any(line.startswith(("nvidia_peermem ", "nv_peer_mem ")) for line in modules):
        return "nvidia_peermem"
    numbers = re.findall(r"\d+", _text(proc / "sys/kernel/osrelease"))[:2]
    recent = [int(number) for number in numbers] >= [5, 12]
    is_open = "Open Kernel Module" in _text(proc / "driver/nvidia/version")
    return "DMA-BUF" if recent and is_open and variables.get("NCCL_DMABUF_ENABLE") != "0" else ""


def net_plugin(variables: Mapping[str, str], folders: Sequence[str] = LIBRARIES) -> str:
    """The file of the network plugin that NCCL will load; empty: there is none.

    NCCL_NET_PLUGIN is a file, or what comes after libnccl-net- in its name; without it NCCL looks for libnccl-net.so.
    """
    asked = variables.get("NCCL_NET_PLUGIN", "")
    if asked == "none":
        return ""
    names = (asked, f"libnccl-net-{asked}.so") if asked else ("libnccl-net.so",)
    for folder in (*variables.get("LD_LIBRARY_PATH", "").split(":"), *folders):
        for name in names:
            for found in sorted(Path("/").glob(f"{folder.strip('/')}/{name}")) if folder else ():
                return str(found)
    return names[0] if asked else ""


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
