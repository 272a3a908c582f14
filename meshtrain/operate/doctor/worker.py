"""One rank that times the collectives of a layout: `python -m meshtrain.operate.doctor.worker TASK`.

It joins as training does, makes the mesh of the layout, and prints JSON lines: `{"at": ...}` before each part, so that
whoever started it knows how far it came, and `{"result": ...}` at the end.
"""

import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from meshtrain.environment import Environment
from meshtrain.leaving import leaving
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.operate.doctor.collectives import (
    LARGER,
    MET,
    REPETITIONS,
    SHARE,
    SMALL,
    START_S,
    WHAT,
    WORLD,
    Spec,
    axes_to_time,
    choose_size,
    pairs_in_rounds,
)
from meshtrain.operate.doctor.record import from_json
from meshtrain.runtime import Job, join

LINK_BYTES = {"gloo": 2**18, "nccl": 2**24}
MATRIX = {"cpu": 384, "cuda": 4096}


def main(task: dict[str, Any]) -> None:
    spec = from_json(Spec, task["spec"])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    at("meeting")
    environment = Environment(
        "torchrun",
        task["rank"],
        len(spec.hosts),
        task["local_rank"],
        socket.gethostname(),
        (task["address"], spec.port),
        task["serves"],
    )
    job = join(environment, START_S)
    with leaving(job):
        at(MET)
        until = time.monotonic() + SHARE * spec.seconds
        job.connect(spec.seconds)
        mesh = build_mesh(spec.layout, job.device.type)
        result = measure(job, mesh, until)
        print(json.dumps({"result": result}), flush=True)


def _end_with_parent() -> None:
    """The other end of stdin is the doctor's: when it is gone there is nobody to measure for."""
    sys.stdin.read()
    os._exit(1)


def at(what: str) -> None:
    print(json.dumps({"at": what}), flush=True)


def measure(job: Job, mesh: Mesh, until: float) -> dict[str, Any]:
    """Everything that this rank can time. Each rank does the same things in the same order, and begins none after
    `until`, a time of `time.monotonic`."""
    at("a computation of its own")
    compute = _compute(job)
    backend = "nccl" if job.device.type == "cuda" else "gloo"
    links = _links(job, mesh, backend)
    timings, left_out = [], []
    for axis in axes_to_time(mesh.layout):
        for what in WHAT:
            late = torch.tensor([float(time.monotonic() > until)], device=job.device)
            if mesh.sum(late).item():  # for one of the ranks, so for all
                left_out.append(f"{what} over {axis}")
            else:
                timings.append(_time(job, mesh, axis, what, LARGER[backend]))
    return {"backend": backend, "compute": compute, "links": links, "timings": timings, "left_out": left_out}


def _clocked(job: Job, do: Callable[[], object]) -> float:
    """Seconds of one call, until the device has done it."""
    start = time.perf_counter()
    do()
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    return time.perf_counter() - start


def _compute(job: Job) -> float:
    """Seconds of a matrix product: the best of several, so that a busy neighbour does not look like a slow rank."""
    n = MATRIX[job.device.type]
    matrix = torch.ones(n, n, device=job.device)
    return min(_clocked(job, lambda: matrix @ matrix) for _ in range(12))


def _links(job: Job, mesh: Mesh, backend: str) -> list[dict[str, Any]]:
    """Bandwidth between the first ranks of pairs of hosts; each number is told by the lower one of the two."""
    layout = mesh.layout
    firsts = [next(r for r in range(layout.world_size) if layout.host_index(r) == i) for i in range(len(layout.hosts))]
    found = []
    for pairs in pairs_in_rounds(len(firsts)):
        at(f"sending between hosts, {len(pairs)} pairs at a time")
        for a, b in pairs:
            if job.rank in (firsts[a], firsts[b]):
                found += _link(job, firsts[a], firsts[b], LINK_BYTES[backend])
        mesh.sum(torch.zeros(1, device=job.device))  # nobody sends while others still measure
    return found


def _link(job: Job, source: int, target: int, size: int) -> list[dict[str, Any]]:
    data, word = (torch.zeros(n, dtype=torch.uint8, device=job.device) for n in (size, 1))
    first = job.rank == source

    def there_and_back(message: torch.Tensor) -> None:
        for sends in (first, not first):
            if sends:
                dist.send(message, target if first else source)
            else:
                dist.recv(message, target if first else source)

    there_and_back(word)  # both are here, and connected
    seconds = min(_clocked(job, lambda: there_and_back(data)) for _ in range(3)) / 2
    return [{"source": source, "target": target, "bandwidth": size / seconds}] if first else []


def _time(job: Job, mesh: Mesh, axis: str, what: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """One collective on this rank's group: latency by a message of a few bytes, bandwidth by as large a one as fits."""
    at(f"{what} over {axis}")
    group = mesh.world if axis == WORLD else mesh.group(axis)
    ranks = dist.get_world_size(group)
    latency = statistics.median(_repeat(job, group, what, ranks, 4 * ranks))
    small = torch.tensor([statistics.median(_repeat(job, group, what, ranks, SMALL, 2))], device=job.device)
    dist.all_reduce(small, dist.ReduceOp.MAX, group=group)  # all choose the same size
    size = choose_size(small.item(), sizes)
    times = _repeat(job, group, what, ranks, size)
    middle = statistics.median(times)
    return {
        "axes": axis,
        "what": what,
        "latency": latency,
        "size": size,
        "seconds": middle,
        "spread": max(times) / middle,
    }


def _repeat(
    job: Job, group: dist.ProcessGroup | None, what: str, ranks: int, size: int, times: int = REPETITIONS
) -> list[float]:
    """Seconds of each of several calls; `size` is in bytes, of the whole tensor. The first call does not count."""
    part = max(size // 4 // ranks, 1)
    whole, own = torch.zeros(part * ranks, device=job.device), torch.zeros(part, device=job.device)
    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group_src=0, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(own, whole, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, own, group=group),
    }
    found = []
    for _ in range(times + 1):
        dist.all_reduce(torch.zeros(1, device=job.device), group=group)  # all begin together
        found.append(_clocked(job, calls[what]))
    return found[1:]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
