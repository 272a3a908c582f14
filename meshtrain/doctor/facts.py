"""The facts of a host, before it has met the others."""

import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshtrain.config import Config, locate
from meshtrain.doctor import host as machine
from meshtrain.doctor import nccl
from meshtrain.doctor.files import named_paths, probe
from meshtrain.doctor.records import Gpu, Host, Place
from meshtrain.doctor.sockets import resolve
from meshtrain.errors import InputError
from meshtrain.metrics.nvidia_smi import query, throttle_reasons

SLOW_S = 2.0  # a look-up of a name that takes longer slows every start
PACKAGES = ("meshtrain", "numpy", "einops", "safetensors", "pyyaml", "triton", "tokenizers", "transformers")
VARIABLES = (
    "NCCL_", "GLOO_", "TORCH_", "UCX_", "FI_", "PYTORCH_", "CUDA_", "CUBLAS_", "OMP_", "MKL_", "UCC_",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHASHSEED", "MASTER_ADDR",
)  # fmt: skip
QUERY = ("index", "name", "uuid", "memory.total", "memory.used", "driver_version")


def collect(place: Place, config: str | None, overrides: Sequence[str], variables: Mapping[str, str]) -> Host:
    """This host alone: what only shows together with the others (route, port, ranks) is not in it yet."""
    import torch  # here, because it takes two seconds

    name = socket.gethostname()
    resolves, slow = look_up({name, place.address})
    gpus = _gpus()
    memory, free = machine.memory_gib()
    gpus_seen, ports, cores = torch.cuda.device_count(), machine.ports(), len(os.sched_getaffinity(0))
    nccl_conf = nccl.settings_of_files(variables)
    lockable = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Host(
        host=name,
        place=place,
        processes=processes_of(place.processes, gpus_seen, cores),
        resolves=resolves,
        slow_names=slow,
        interfaces=machine.interfaces(),
        variables={name: variables[name] for name in sorted(variables) if name.startswith(VARIABLES)},
        nccl_conf=nccl_conf,
        versions=_versions(gpus),
        code=locate.code(),
        folder=str(Path.cwd()),
        gpus=gpus,
        gpus_seen=gpus_seen,
        ports=ports,
        verbs=machine.verbs() or not ports,
        net_plugin=nccl.net_plugin(nccl_conf | dict(variables), nccl.library_cache()) if gpus_seen else "",
        cores=cores,
        load=os.getloadavg()[0],
        memory_gib=memory,
        memory_free_gib=free,
        shared_memory_gib=machine.free_gib("/dev/shm") if Path("/dev/shm").is_dir() else 0.0,
        locked_memory_kib=None if lockable == resource.RLIM_INFINITY else lockable // 1024,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        machine=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        **_config_facts(config, overrides),
    )


def look_up(names: set[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Name -> addresses, as this host resolves them, and the names for which that took long."""

    def timed(name: str) -> tuple[str, tuple[str, ...], float]:
        start = time.monotonic()
        return name, resolve(name), time.monotonic() - start

    with ThreadPoolExecutor(min(max(len(names), 1), 64)) as pool:
        rows = list(pool.map(timed, sorted(names)))
    slow = tuple(name for name, _, seconds in rows if seconds > SLOW_S)
    return {name: addresses for name, addresses, _ in rows}, slow


def processes_of(option: str, gpus: int, cores: int) -> int:
    """torchrun's --nproc-per-node: a number, `gpu`, `cpu`, or `auto` (GPUs where there are any)."""
    if option == "gpu" or (option == "auto" and gpus):
        return gpus
    return cores if option in ("cpu", "auto") else int(option)


def _config_facts(name: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    if name is None:
        return {}
    try:
        config = Config.load(name, overrides)
    except InputError as error:
        return {"config_error": str(error)}
    lines = tuple(line for line in config.to_yaml().splitlines() if not line.startswith("#"))
    return {"config": lines, "layout": config.layout, "paths": tuple(map(probe, named_paths(config)))}


def _versions(gpus: Sequence[Gpu]) -> dict[str, str]:
    from meshtrain.job.consistency import versions  # here, because it imports torch

    own = {"kernel": platform.release(), "executable": sys.executable}
    return versions(PACKAGES) | own | ({"driver": gpus[0].driver} if gpus else {})


def _gpus() -> tuple[Gpu, ...]:
    """None where nvidia-smi is missing or does not answer, which shows as a number that does not fit."""
    gpus = []
    for index, name, uuid, total, used, driver, reasons in query(QUERY):
        total_gib, used_gib = (float(mib) / 1024 if mib.replace(".", "").isdecimal() else 0.0 for mib in (total, used))
        gpus.append(Gpu(int(index), name, uuid, total_gib, used_gib, driver, throttle_reasons(reasons)))
    return tuple(gpus)
