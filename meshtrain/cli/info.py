"""`meshtrain info`: versions, GPUs, NCCL, launcher and limits of this host, to paste into a bug
report.

It has no names or addresses of hosts, and of the environment only what changes how a job computes
or communicates.
"""

import argparse
import json
import os
from typing import Any

from meshtrain.doctor.facts import collect
from meshtrain.doctor.records import Host, Place

LAUNCHERS = {
    "SLURM_JOB_ID": "SLURM",
    "TORCHELASTIC_RUN_ID": "torchrun",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
}
# they reveal names of hosts and people
HIDDEN = (
    "MASTER_ADDR",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> None:
    host = collect(Place.alone("auto"), None, (), os.environ)
    facts = describe(host)
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        texts = value if isinstance(value, list) else [value]
        for i, text in enumerate(texts or ["none"]):
            label = name if i == 0 else ""
            print(f"{label.ljust(width)}  {text}")


def describe(host: Host) -> dict[str, Any]:
    """Fact -> text, or a list of texts."""
    import torch  # here, because it takes two seconds

    from meshtrain.job.consistency import untested_torch

    versions = {name: version for name, version in host.versions.items() if name != "executable"}
    untested = untested_torch(torch.__version__)
    launchers = [name for variable, name in LAUNCHERS.items() if variable in os.environ]
    gpus = [f"{gpu.name}, {gpu.memory_gib:.1f} GiB {gpu.throttled}".rstrip() for gpu in host.gpus]
    backends = ("gloo", "nccl", "mpi", "ucc")

    ports = []
    for port in host.ports:
        down = "" if port.active else ", down"
        ports.append(f"{port.name} {port.layer} {port.gbit:g} Gb/s{down}")

    variables = []
    for name, text in host.variables.items():
        variables.append(f"{name}={'(set)' if name in HIDDEN else text}")

    soft, hard = host.open_files or (-1, -1)
    locked = "unlimited" if host.locked_memory_kib is None else f"{host.locked_memory_kib} KiB"
    return {
        "versions": [f"{name} {version}" for name, version in sorted(versions.items())],
        "warnings": [] if untested is None else [untested],
        "launcher": launchers or ["none seen"],
        "GPUs": gpus,
        "GPUs of torch": str(host.gpus_seen),
        "backends": list(filter(torch.distributed.is_backend_available, backends)),
        "RDMA ports": ports,
        "CPU": f"{host.cores} cores, load {host.load:.1f}",
        "memory": f"{host.memory_gib:.1f} GiB, {host.memory_free_gib:.1f} free",
        "shared memory": f"{host.shared_memory_gib:.1f} GiB",
        "limits": f"open files {soft} of {hard}, locked memory {locked}",
        "environment": variables,
    }
