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
from typing import Any

import torch
import torch.distributed as dist

from meshtrain.doctor import bandwidth
from meshtrain.doctor.bandwidth import LARGER, REPETITIONS, SMALL, START_S, WORLD, Spec
from meshtrain.doctor.nccl import transports
from meshtrain.doctor.records import from_json
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
    log = tempfile.TemporaryFile()  # noqa: SIM115  # an unnamed file for NCCL's log
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"/proc/self/fd/{log.fileno()}"}
    at("meeting")
    numbers, endpoint = (
        (task["rank"], len(spec.hosts), task["local_rank"]),
        (task["address"], spec.port),
    )
    job = join(
        Environment("torchrun", *numbers, socket.gethostname(), endpoint, task["serves"]), START_S
    )
    with job_exit(job):
        at("connecting")
        until = time.monotonic() + bandwidth.SHARE * spec.seconds
        job.connect(spec.seconds)
        mesh = build_mesh(spec.layout, job.device.type)
        result = measure(job, mesh, until)
        result["transport"] = transports(log.read().decode(errors="replace"))
        print(json.dumps({"result": result}), flush=True)


def at(activity: str) -> None:
    print(json.dumps({"at": activity}), flush=True)


def measure(job: Job, mesh: Mesh, until: float) -> dict[str, Any]:
    """Times all collectives, in the same order on all ranks; none begins after `until` (of
    `time.monotonic`)."""
    at("a computation of its own")
    n = MATRIX[job.device.type]
    matrix = torch.ones(n, n, device=job.device)
    # The best of several, so that a busy neighbour does not look like a slow rank.
    compute = min(_clocked(job, lambda: matrix @ matrix) for _ in range(12))
    backend = "nccl" if job.device.type == "cuda" else "gloo"
    links = _links(job, mesh, backend)
    timings, left_out = [], []
    for axis in bandwidth.axes_to_time(mesh.layout):
        for collective in bandwidth.COLLECTIVES:
            late = torch.tensor([float(time.monotonic() > until)], device=job.device)
            if mesh.sum(late).item():  # late on one rank, so left out on all
                left_out.append(f"{collective} over {axis}")
            else:
                timings.append(_time(job, mesh, axis, collective, LARGER[backend]))
    return {
        "backend": backend,
        "compute": compute,
        "links": links,
        "timings": timings,
        "left_out": left_out,
    }


def _clocked(job: Job, do: Callable[[], object]) -> float:
    """Seconds of one call, until the device has finished it."""
    start = time.perf_counter()
    do()
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    return time.perf_counter() - start


def _links(job: Job, mesh: Mesh, backend: str) -> list[dict[str, Any]]:
    """Bandwidth between the first ranks of pairs of hosts; the lower rank of each pair reports
    it."""
    layout = mesh.layout
    firsts = [
        next(r for r in range(layout.world_size) if layout.host(r) == host) for host in layout.hosts
    ]
    links = []
    for pairs in bandwidth.pairs_in_rounds(len(firsts)):
        at(f"sending between hosts, {len(pairs)} pairs at a time")
        for a, b in pairs:
            if job.rank in (firsts[a], firsts[b]):
                links += _link(job, firsts[a], firsts[b], LINK_BYTES[backend])
        mesh.sum(torch.zeros(1, device=job.device))  # no pair sends while others still measure
    return links


def _link(job: Job, source: int, target: int, size: int) -> list[dict[str, Any]]:
    data, byte = (torch.zeros(n, dtype=torch.uint8, device=job.device) for n in (size, 1))
    first = job.rank == source

    def there_and_back(message: torch.Tensor) -> None:
        for operation in (dist.send, dist.recv) if first else (dist.recv, dist.send):
            operation(message, target if first else source)

    there_and_back(byte)  # now both are ready and connected
    seconds = min(_clocked(job, lambda: there_and_back(data)) for _ in range(3)) / 2
    return [{"source": source, "target": target, "bandwidth": size / seconds}] if first else []


def _time(
    job: Job, mesh: Mesh, axis: str, collective: str, sizes: tuple[int, ...]
) -> dict[str, Any]:
    """Times a collective on this rank's group: latency with a few bytes, bandwidth with the largest
    size that fits."""
    at(f"{collective} over {axis}")
    group = mesh.world if axis == WORLD else mesh.group(axis)
    ranks = dist.get_world_size(group)
    latency = statistics.median(_repeat(job, group, collective, ranks, 4 * ranks))
    small = torch.tensor(
        [statistics.median(_repeat(job, group, collective, ranks, SMALL, 2))], device=job.device
    )
    dist.all_reduce(small, dist.ReduceOp.MAX, group=group)  # all ranks choose the same size
    size = bandwidth.choose_size(small.item(), sizes)
    times = _repeat(job, group, collective, ranks, size)
    seconds = statistics.median(times)
    numbers = {"latency": latency, "size": size, "seconds": seconds, "spread": max(times) / seconds}
    return {"axes": axis, "what": collective, **numbers}


def _repeat(
    job: Job,
    group: dist.ProcessGroup | None,
    collective: str,
    ranks: int,
    size: int,
    times: int = REPETITIONS,
) -> list[float]:
    """Seconds of each of several calls, without the first; `size`: bytes of the whole tensor."""
    part = max(size // 4 // ranks, 1)
    whole, own = torch.zeros(part * ranks, device=job.device), torch.zeros(part, device=job.device)
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
    return seconds[1:]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
