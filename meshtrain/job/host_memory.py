"""Host memory: how much this process may use, and how much of that is free, on the host and in its
cgroups."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def memory_gib(
    host: Path = Path("/proc/meminfo"),
    own: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
) -> tuple[float, float]:
    """Total and available (free or reclaimable) memory of this process: the least of the host's and
    its cgroups'."""
    rows = dict(line.split(":") for line in host.read_text().splitlines())
    most, free = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, available in _cgroups(own, root):
        most, free = min(most, limit), min(free, available)
    return most / 2**30, free / 2**30


def _cgroups(own: Path, root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each cgroup of this process, from its own up, and the bytes left of it (cgroup
    v2 and v1)."""
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
                limit, used = (
                    int((folder / f"memory.{name}").read_text()) for name in (maximum, usage)
                )
                rows = dict(
                    row.split() for row in (folder / "memory.stat").read_text().splitlines()
                )
                yield limit, limit - used + int(rows.get(inactive, 0))
