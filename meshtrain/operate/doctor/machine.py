"""What Linux says of this host: interfaces, memory, load, who has a port. Thin: it reads files and asks the kernel."""

import array
import fcntl
import ipaddress
import os
import resource
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from meshtrain.operate.doctor.record import Interface, Port

SIOCGIFCONF, SIOCGIFNETMASK, SIOCGIFFLAGS = 0x8912, 0x891B, 0x8913  # <linux/sockios.h>
IFF_UP = 0x1
IFREQ = 40  # bytes of `struct ifreq` on 64-bit Linux


def interfaces() -> tuple[Interface, ...]:
    """All network interfaces with their addresses, in the kernel's order."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        for name, address in _ipv4(ask):
            found.setdefault(name, []).append(address)
        for name, address in _ipv6():
            found.setdefault(name, []).append(address)
        return tuple(Interface(name, tuple(all_), _up(ask, name), _mbit(name)) for name, all_ in found.items())


def _ipv4(ask: socket.socket) -> list[tuple[str, str]]:
    room = array.array("B", bytes(IFREQ * 256))
    reply = fcntl.ioctl(ask, SIOCGIFCONF, struct.pack("iL", len(room), room.buffer_info()[0]))
    used, data, found = struct.unpack("iL", reply)[0], room.tobytes(), []
    for start in range(0, used, IFREQ):
        label = data[start : start + 16].partition(b"\0")[0]
        address = socket.inet_ntoa(data[start + 20 : start + 24])
        mask = fcntl.ioctl(ask, SIOCGIFNETMASK, struct.pack("256s", label))[20:24]
        length = ipaddress.ip_network(f"0.0.0.0/{socket.inet_ntoa(mask)}").prefixlen
        found.append((label.decode().partition(":")[0], f"{address}/{length}"))
    return found


def _ipv6() -> list[tuple[str, str]]:
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    return [(row[5], f"{ipaddress.IPv6Address(bytes.fromhex(row[0]))}/{int(row[2], 16)}") for row in rows]


def _up(ask: socket.socket, name: str) -> bool:
    flags = fcntl.ioctl(ask, SIOCGIFFLAGS, struct.pack("256s", name.encode()))
    return bool(struct.unpack_from("H", flags, 16)[0] & IFF_UP)


def _mbit(name: str) -> int | None:
    try:
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except (OSError, ValueError):  # virtual, down, or a namespace whose /sys is another's
        return None
    return speed if 0 < speed < 2**31 else None


def owner_of_port(port: int) -> str:
    """Which process of this host listens on a port, in words."""
    for inode in _listening(port):
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if os.readlink(link) == f"socket:[{inode}]":
                    words = (link.parents[1] / "cmdline").read_bytes().split(b"\0")
                    return f"process {link.parts[2]} ({b' '.join(words).decode(errors='replace').strip()[:80]})"
            except OSError:  # another user's, or gone
                continue
    return "another process, of another user"


def _listening(port: int) -> list[str]:
    found = []
    for name in ("tcp", "tcp6"):
        table = Path(f"/proc/net/{name}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            row = line.split()
            if int(row[1].rpartition(":")[2], 16) == port and row[3] == "0A":
                found.append(row[9])
    return found


def memory_gib(
    host: Path = Path("/proc/meminfo"), own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[float, float]:
    """All memory that this process may have, and what of it is free or can be freed: the host's, or its cgroup's."""
    rows = dict(line.split(":") for line in host.read_text().splitlines())
    most, free = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, left in _cgroups(own, root):
        most, free = min(most, limit), min(free, left)
    return most / 2**30, free / 2**30


def _cgroups(own: Path, root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each group that this process is in, from its own up, and what is left of it (cgroup v2, and v1)."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        top = root / kinds
        names = (
            ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
            if kinds
            else ("max", "current", "inactive_file")
        )
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                limit = int((folder / f"memory.{names[0]}").read_text())
                used = int((folder / f"memory.{names[1]}").read_text())
                rows = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                yield limit, limit - used + int(rows.get(names[2], 0))
            except (OSError, ValueError):  # the file is not there, or says "max"
                pass
            if folder == top:
                break


def free_gib(path: str) -> float:
    return shutil.disk_usage(path).free / 2**30


def shared_memory_gib() -> float:
    return free_gib("/dev/shm") if Path("/dev/shm").is_dir() else 0.0


def locked_memory_kib() -> int | None:
    """How much memory a process may lock, which InfiniBand needs; None: as much as it likes."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit // 1024


def filesystem(path: str) -> str:
    """The type of the file system on which a path lies: ext4, nfs4, lustre."""
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, type_, *_ = line.split()
        mount = mount.encode().decode("unicode_escape")  # a space is written as \040
        if len(mount) >= len(best) and (path == mount or path.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, type_
    return kind


def open_files() -> tuple[int, int]:
    """The soft and the hard limit of descriptors; below 0 there is none."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def ports(cards: Path = Path("/sys/class/infiniband")) -> tuple[Port, ...]:
    """The ports of RDMA cards: InfiniBand, RoCE, and a cloud's own."""
    return tuple(map(_port, sorted(cards.glob("*/ports/*"))))


def _port(port: Path) -> Port:
    driver = port.parents[1] / "device" / "driver"
    rate = _line(port / "rate").split()  # 400 Gb/sec (4X NDR)
    gids = sorted((port / "gid_attrs" / "types").glob("*"))
    return Port(
        f"{port.parts[-3]}:{port.name}",
        _line(port / "link_layer"),
        "ACTIVE" in _line(port / "state"),
        float(rate[0]) if rate else 0.0,
        driver.resolve().name if driver.exists() else "",
        any("v2" in _line(gid) for gid in gids),
    )


def _line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # a GID that is not in use cannot be read
        return ""


def verbs(devices: Path = Path("/dev/infiniband")) -> bool:
    """Whether this process was given the devices of RDMA cards: a container may see cards that it cannot open."""
    return any(devices.glob("uverbs*"))
