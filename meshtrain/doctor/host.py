"""What Linux says of this host: interfaces, ports, memory, RDMA cards."""

import array
import fcntl
import ipaddress
import os
import shutil
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from meshtrain.doctor.records import Interface, Port
from meshtrain.doctor.sockets import plain_address

SIOCGIFCONF = 0x8912  # <linux/sockios.h>
LISTENING = "0A"  # a state in /proc/net/tcp
IFREQ = 40  # bytes of `struct ifreq` on 64-bit Linux


def interfaces() -> tuple[Interface, ...]:
    addresses: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    buffer = array.array("B", bytes(IFREQ * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        reply = fcntl.ioctl(any_socket, SIOCGIFCONF, struct.pack("iL", len(buffer), buffer.buffer_info()[0]))
    for start in range(0, struct.unpack("iL", reply)[0], IFREQ):
        data = buffer[start : start + IFREQ].tobytes()
        name = data[:16].partition(b"\0")[0].decode().partition(":")[0]
        addresses.setdefault(name, []).append(socket.inet_ntoa(data[20:24]))
    table = Path("/proc/net/if_inet6")
    for row in map(str.split, table.read_text().splitlines() if table.exists() else ()):
        addresses.setdefault(row[5], []).append(str(ipaddress.IPv6Address(bytes.fromhex(row[0]))))
    return tuple(Interface(name, tuple(own)) for name, own in addresses.items())


def owner_of_port(port: int) -> str:
    """Which process of this host listens on a port, in words."""
    for inode in [row[9] for row in _tcp_rows(port) if row[3] == LISTENING]:
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if os.readlink(link) == f"socket:[{inode}]":
                    words = (link.parents[1] / "cmdline").read_bytes().split(b"\0")
                    return f"process {link.parts[2]} ({b' '.join(words).decode(errors='replace').strip()[:80]})"
            except OSError:  # another user's, or gone
                continue
    return "another process, of another user"


def peers_of_port(port: int) -> set[tuple[str, str]]:
    """The other ends of connections to a port of this host, also of those that were closed a moment ago."""
    peers = set()
    for address, _, number in (row[2].partition(":") for row in _tcp_rows(port) if row[3] != LISTENING):
        words = bytes.fromhex(address)  # of four bytes, each the last byte first
        data = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
        family = socket.AF_INET if len(data) == 4 else socket.AF_INET6
        peers.add((plain_address(socket.inet_ntop(family, data)), number))
    return peers


def _tcp_rows(port: int) -> list[list[str]]:
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return [row for row in rows if int(row[1].rpartition(":")[2], 16) == port]


def memory_gib(
    host: Path = Path("/proc/meminfo"), own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[float, float]:
    """All memory that this process may have, and what of it is free or can be freed: the host's, or its cgroup's."""
    rows = dict(line.split(":") for line in host.read_text().splitlines())
    most, free = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, available in _cgroups(own, root):
        most, free = min(most, limit), min(free, available)
    return most / 2**30, free / 2**30


def _cgroups(own: Path, root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each group that this process is in, from its own up, and what is left of it (cgroup v2, and v1)."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        v1 = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
        maximum, usage, inactive = v1 if kinds else ("max", "current", "inactive_file")
        group = root / kinds / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root / kinds):
                break
            with suppress(OSError, ValueError):  # the file is not there, or says "max"
                limit, used = (int((folder / f"memory.{name}").read_text()) for name in (maximum, usage))
                rows = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                yield limit, limit - used + int(rows.get(inactive, 0))


def free_gib(path: str) -> float:
    return shutil.disk_usage(path).free / 2**30


def filesystem(path: str) -> str:
    """The type of the file system on which a path lies: ext4, nfs4, lustre."""
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, type_, *_ = line.split()
        mount = mount.encode().decode("unicode_escape")  # a space is written as \040
        if len(mount) >= len(best) and (path == mount or path.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, type_
    return kind


def ports(cards: Path = Path("/sys/class/infiniband")) -> tuple[Port, ...]:
    """The ports of RDMA cards: InfiniBand, RoCE, and a cloud's own."""

    def text(file: Path) -> str:
        try:
            return file.read_text().strip()
        except OSError:  # a GID that is not in use cannot be read
            return ""

    rows = []
    for port in sorted(cards.glob("*/ports/*")):
        driver = port.parents[1] / "device" / "driver"
        name, rate = f"{port.parts[-3]}:{port.name}", float(text(port / "rate").partition(" ")[0] or 0)  # 400 Gb/sec
        roce_v2 = any("v2" in text(gid) for gid in (port / "gid_attrs" / "types").glob("*"))
        driver_name = driver.resolve().name if driver.exists() else ""
        active = "ACTIVE" in text(port / "state")
        rows.append(Port(name, text(port / "link_layer"), active, rate, driver_name, roce_v2))
    return tuple(rows)


def verbs(devices: Path = Path("/dev/infiniband")) -> bool:
    """Whether this process was given the devices of RDMA cards: a container may see cards that it cannot open."""
    return any(devices.glob("uverbs*"))
