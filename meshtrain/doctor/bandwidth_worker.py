"""A worker: one rank that times the collectives of a layout: `python -m
meshtrain.doctor.bandwidth_worker TASK`.

It prints JSON lines: `{"at": ...}` before each part, so that the doctor knows how far it got, then
`{"result": ...}`.
"""

import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from meshtrain.doctor import bandwidth
from meshtrain.doctor.bandwidth import (
    LARGER,
    REPETITIONS,
    SMALL,
    SMALLER,
    START_S,
    WORLD,
    Spec,
    WorkerReport,
    WorkerTiming,
)
from meshtrain.doctor.nccl import transports
from meshtrain.doctor.records import Link, from_json, to_json
from meshtrain.job.environment import Environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import Job, join
from meshtrain.job.signals import end_with_parent
from meshtrain.mesh import Mesh, build_mesh

LINK_BYTES = {"gloo": 2**18, "nccl": 2**24}
MATRIX = {"cpu": 384, "cuda": 4096}


def main(task: dict[str, Any]) -> None:
    end_with_parent(task["parent"])
    spec = from_json(Spec, task["spec"])
    # NCCL says only in its log which transports it has chosen. The file has no name, so that
    # nothing is left of it.
    log = tempfile.TemporaryFile()  # noqa: SIM115
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"/proc/self/fd/{log.fileno()}"}
    at("meeting")
    environment = Environment(
        launcher="torchrun",
        rank=task["rank"],
        world_size=len(spec.hosts),
        local_rank=task["local_rank"],
        host=socket.gethostname(),
        master=(task["address"], spec.port),
        hosts_store=task["serves"],
    )
    job = join(environment, START_S)
    with job_exit(job):
        at("connecting")
        until = time.monotonic() + bandwidth.SHARE * spec.seconds
        job.connect(spec.seconds)
        mesh = build_mesh(spec.layout, job.device.type)
        report = measure(job, mesh, until)
        ways = transports(log.read().decode(errors="replace"))
        report = replace(report, transport=tuple(ways))
        print(json.dumps({"result": to_json(report)}), flush=True)


def at(activity: str) -> None:
    print(json.dumps({"at": activity}), flush=True)


def measure(job: Job, mesh: Mesh, until: float) -> WorkerReport:
    """Times all collectives, in the same order on all ranks; none begins after `until` (of
    `time.monotonic`)."""
    at("a computation of its own")
    n = MATRIX[job.device.type]
    matrix = torch.ones(n, n, device=job.device)
    # The best of several, so that a busy neighbour does not look like a slow rank.
    compute = min(_clocked(job, lambda: matrix @ matrix) for _ in range(12))

    backend = "nccl" if job.device.type == "cuda" else "gloo"
    links = _links(job, mesh, LINK_BYTES[backend])
    timings, left_out = [], []
    for name, (layout, axis) in bandwidth.timed_groups(mesh.layout).items():
        collectives: tuple[str, ...] = bandwidth.COLLECTIVES
        own = mesh
        if layout is not mesh.layout:
            collectives = bandwidth.OF_HOSTS
            own = build_mesh(layout, job.device.type)
        group = own.world if axis == WORLD else own.group(axis)
        for collective in collectives:
            late = torch.tensor([float(time.monotonic() > until)], device=job.device)
            if mesh.sum(late).item():  # late on one rank, so left out on all
                left_out.append(f"{collective} over {name}")
            else:
                timings.append(_time(job, name, group, collective, LARGER[backend]))
    return WorkerReport(
        backend=backend,
        compute=compute,
        links=tuple(links),
        timings=tuple(timings),
        left_out=tuple(left_out),
        transport=(),
    )


def _clocked(job: Job, do: Callable[[], object]) -> float:
    """Seconds of one call, until the device has finished it."""
    start = time.perf_counter()
    do()
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    return time.perf_counter() - start


def _links(job: Job, mesh: Mesh, size: int) -> list[Link]:
    """Bandwidth between the first ranks of pairs of hosts; the lower rank of each pair reports
    it."""
    layout = mesh.layout
    first_ranks: dict[str, int] = {}
    for rank in range(layout.world_size):
        first_ranks.setdefault(layout.host(rank), rank)
    firsts = [first_ranks[host] for host in layout.hosts]

    links = []
    for pairs in bandwidth.pairs_in_rounds(len(firsts)):
        at(f"sending between hosts, {len(pairs)} pairs at a time")
        for a, b in pairs:
            source, target = firsts[a], firsts[b]
            if job.rank in (source, target):
                speed = _bandwidth(job, source, target, size)
                if job.rank == source:
                    links.append(Link(source, target, speed))
        mesh.sum(torch.zeros(1, device=job.device))  # no pair sends while others still measure
    return links


def _bandwidth(job: Job, source: int, target: int, size: int) -> float:
    """Bytes per second between two ranks, each of which calls it."""
    data = torch.zeros(size, dtype=torch.uint8, device=job.device)
    byte = torch.zeros(1, dtype=torch.uint8, device=job.device)

    def there_and_back(message: torch.Tensor) -> None:
        if job.rank == source:
            dist.send(message, target)
            dist.recv(message, target)
        else:
            dist.recv(message, source)
            dist.send(message, source)

    there_and_back(byte)  # now both are ready and connected
    seconds = min(_clocked(job, lambda: there_and_back(data)) for _ in range(3)) / 2
    return size / seconds


def _time(
    job: Job,
    name: str,
    group: dist.ProcessGroup | None,
    collective: str,
    sizes: tuple[int, ...],
) -> WorkerTiming:
    """Times a collective on this rank's group: latency with a few bytes, bandwidth with the largest
    size that fits."""
    at(f"{collective} over {name}")

    def seconds(size: int, times: int = REPETITIONS) -> list[float]:
        return _repeat(job, group, collective, size, times)

    # A number of four bytes for each rank.
    latency = statistics.median(seconds(4 * dist.get_world_size(group)))
    small = torch.tensor([statistics.median(seconds(SMALL, 2))], device=job.device)
    dist.all_reduce(small, dist.ReduceOp.MAX, group=group)  # all ranks choose the same size
    size = bandwidth.choose_size(small.item(), sizes)
    measured = seconds(size)
    middle = statistics.median(measured)
    # Of a few bytes NCCL sends otherwise than of many: what a large message takes besides its bytes
    # follows from two large ones.
    less = size // SMALLER
    fixed = (SMALLER * statistics.median(seconds(less)) - middle) / (SMALLER - 1)
    return WorkerTiming(
        axes=name,
        what=collective,
        latency=latency,
        size=size,
        seconds=middle,
        fixed=min(max(fixed, 0.0), middle),
        spread=max(measured) / middle,
    )


def _repeat(
    job: Job, group: dist.ProcessGroup | None, collective: str, size: int, times: int
) -> list[float]:
    """Seconds of each of several calls, without the first; `size`: bytes of the whole tensor."""
    ranks = dist.get_world_size(group)
    part = max(size // 4 // ranks, 1)  # numbers of four bytes
    whole = torch.zeros(part * ranks, device=job.device)
    own = torch.zeros(part, device=job.device)
    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group_src=0, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(own, whole, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, own, group=group),
    }
    seconds = []
    for _ in range(times + 1):
        dist.all_reduce(torch.zeros(1, device=job.device), group=group)  # all begin together
        seconds.append(_clocked(job, calls[collective]))
    return seconds[1:]  # in the first call connections are opened


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
