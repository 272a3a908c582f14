"""Everything that a host can say of itself before it has met anybody. Thin: it asks and writes down."""

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from meshtrain import locate
from meshtrain.config import Config
from meshtrain.errors import InputError
from meshtrain.operate.doctor import machine, nccl
from meshtrain.operate.doctor.dial import resolve
from meshtrain.operate.doctor.files import named_paths, probe
from meshtrain.operate.doctor.record import Gpu, Host, Place
from meshtrain.operate.smi import query, smi, throttle_reasons

SLOW_S = 2.0  # a look-up of a name that takes longer slows every start
PACKAGES = ("meshtrain", "torch", "numpy", "einops", "safetensors", "pyyaml", "triton", "tokenizers", "transformers")
VARIABLES = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "FI_", "PYTORCH_", "CUDA_", "CUBLAS_", "OMP_", "MKL_", "UCC_")
VARIABLE_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHASHSEED", "MASTER_ADDR")
QUERY = ("index", "name", "uuid", "memory.total", "memory.used", "driver_version")


def collect(place: Place, config: str | None, overrides: Sequence[str], variables: Mapping[str, str]) -> Host:
    """This host, alone: what only shows together with the others (route, port, ranks) is not in it yet."""
    name = socket.gethostname()
    resolves, slow = look_up({name, place.address})
    gpus = _gpus()
    memory, free = machine.memory_gib()
    seen, ports = _gpus_seen(), machine.ports()
    conf = nccl.settings(variables)
    switches = conf | dict(variables)
    return Host(
        host=name,
        place=place,
        processes=processes_of(place.processes, seen, len(os.sched_getaffinity(0))),
        resolves=resolves,
        slow_names=slow,
        interfaces=machine.interfaces(),
        variables=_variables(variables),
        nccl_conf=conf,
        versions=_versions(gpus),
        code=locate.code(),
        folder=str(Path.cwd()),
        gpus=gpus,
        gpus_seen=seen,
        links=_nvlinks() if gpus else (),
        ports=ports,
        verbs=machine.verbs() or not ports,
        gpudirect=nccl.gpudirect(switches),
        net_plugin=nccl.net_plugin(switches, nccl.library_cache()) if seen else "",
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        memory_gib=memory,
        memory_free_gib=free,
        shared_memory_gib=machine.shared_memory_gib(),
        locked_memory_kib=machine.locked_memory_kib(),
        open_files=machine.open_files(),
        machine=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        **_of_config(config, overrides),
    )


def look_up(names: set[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Name -> addresses, as this host resolves them, and the names for which that took long."""

    def one(name: str) -> tuple[str, tuple[str, ...], float]:
        start = time.monotonic()
        return name, resolve(name), time.monotonic() - start

    with ThreadPoolExecutor(max(len(names), 1)) as pool:
        found = list(pool.map(one, sorted(names)))
    slow = tuple(name for name, _, seconds in found if seconds > SLOW_S)
    return {name: addresses for name, addresses, _ in found}, slow


def processes_of(asked: str, gpus: int, cores: int) -> int:
    """torchrun's --nproc-per-node: a number, `gpu`, `cpu`, or `auto` (GPUs where there are any)."""
    if asked == "gpu" or (asked == "auto" and gpus):
        return gpus
    return cores if asked in ("cpu", "auto") else int(asked)


def _of_config(name: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    if name is None:
        return {}
    try:
        config = Config.load(name, overrides)
    except InputError as error:
        return {"config_error": str(error)}
    lines = tuple(line for line in config.to_yaml().splitlines() if not line.startswith("#"))
    return {"config": lines, "layout": config.layout, "paths": tuple(map(probe, named_paths(config)))}


def _variables(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in sorted(variables.items()) if name.startswith(VARIABLES) or name in VARIABLE_NAMES
    }


def _versions(gpus: Sequence[Gpu]) -> dict[str, str]:
    import torch  # here, because it takes two seconds

    found = {"python": platform.python_version(), "kernel": platform.release(), "executable": sys.executable}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found | ({"driver": gpus[0].driver} if gpus else {})


def _gpus_seen() -> int:
    import torch

    return torch.cuda.device_count()


def _gpus() -> tuple[Gpu, ...]:
    """As nvidia-smi tells; none where it is missing or does not answer, which shows as a number that does not fit."""
    found = []
    for index, name, uuid, total, used, driver, reasons in query(QUERY):
        found.append(Gpu(int(index), name, uuid, _gib(total), _gib(used), driver, throttle_reasons(reasons)))
    return tuple(found)


def _gib(mib: str) -> float:
    return float(mib) / 1024 if re.fullmatch(r"[\d.]+", mib) else 0.0


def _nvlinks() -> tuple[str, ...]:
    return nvlinks(smi("topo", "-m"))


def nvlinks(table: str) -> tuple[str, ...]:
    """The pairs of GPUs that NVLink joins, from the matrix that `nvidia-smi topo -m` prints: `NV12 0-1`."""
    found = []
    for line in re.sub(r"\x1b\[[\d;]*m", "", table).splitlines():
        cells = line.split()
        if cells and (row := re.fullmatch(r"GPU(\d+)", cells[0])) and len(cells) > 1 and "GPU" not in cells[1]:
            pairs = ((i, cell) for i, cell in enumerate(cells[1:]) if re.fullmatch(r"NV\d+", cell))
            found += [f"{cell} {row[1]}-{i}" for i, cell in pairs if i > int(row[1])]
    return tuple(found)
