"""Host limits: how much of the host's memory this process may use, and how much of that is free, on
the host and in its cgroups; and on how many of its cores it may run."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from meshtrain.errors import bytes_text, group_values

if TYPE_CHECKING:
    from meshtrain.job.process import Job

SPARE = 0.1  # share of a host's memory that is left free for other growth

# The files of a cgroup's memory controller: its limit, its use, and the row of memory.stat with
# the page cache that the kernel takes back before anything else.
V1 = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
V2 = ("max", "current", "inactive_file")


def memory_gib(
    own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[float, float]:
    """Total and available (free or reclaimable) memory of this process: the least of the host's and
    its cgroups'."""
    host = psutil.virtual_memory()
    most, free = host.total, host.available
    for limit, available in _cgroups(own, root):
        most = min(most, limit)
        free = min(free, available)
    return most / 2**30, free / 2**30


def usable_cores() -> int:
    """The cores on which this process may run: all, where the system cannot tell (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cgroups(own: Path, root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each cgroup of this process, from its own up, and the bytes left of it (cgroup
    v2 and v1)."""
    lines = own.read_text().splitlines() if own.exists() else []
    for line in lines:
        # 0::/user.slice for v2; 9:memory:/user.slice for v1
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            with suppress(OSError, ValueError):  # the file is not there, or says "max"
                yield _limit_and_rest(folder, V1 if controllers else V2)


def _limit_and_rest(folder: Path, names: tuple[str, str, str]) -> tuple[int, int]:
    maximum, usage, inactive = names
    limit = int((folder / f"memory.{maximum}").read_text())
    used = int((folder / f"memory.{usage}").read_text())
    rows = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
    return limit, limit - used + int(rows.get(inactive, 0))


def find_short_hosts(job: "Job", nbytes: int, activity: str) -> list[str]:
    """The hosts with too little memory for what their ranks are about to allocate, each with the
    bytes needed and available. All ranks call it. `nbytes`: of this rank; `activity`: see
    `Job.reduce`."""
    room = None
    with suppress(FileNotFoundError):  # the system does not report its memory
        most, free = memory_gib()
        room = max(0.0, free - SPARE * most) * 2**30
    return job.reduce(activity, [job.host, nbytes, room], _short_hosts)


def _short_hosts(reports: list[list]) -> list[str]:
    """From [host, bytes needed, bytes of room or None] of every rank."""
    by_host = group_values((host, (nbytes, room)) for host, nbytes, room in reports)
    short = []
    for host, ranks in by_host.items():
        needed = sum(nbytes for nbytes, _ in ranks)
        rooms = [room for _, room in ranks if room is not None]
        if rooms and needed > min(rooms):
            short.append(
                f"host {host} needs {bytes_text(needed)} and can spare {bytes_text(min(rooms))}"
            )
    return short
