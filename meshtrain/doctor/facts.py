"""The facts of a host, before it has met the others: from Linux, torch and the NVIDIA driver, and
from its config."""

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

import psutil

from meshtrain.config import Config
from meshtrain.doctor import nccl
from meshtrain.doctor.files import free_gib, named_paths, probe
from meshtrain.doctor.records import Host, Interface, Place, Port
from meshtrain.errors import InputError
from meshtrain.job import locate
from meshtrain.job.host_limits import memory_gib, usable_cores
from meshtrain.job.sockets import resolve
from meshtrain.metrics.nvml import Gpu, host_gpus

SLOW_S = 2.0  # a name resolution that takes longer slows every start
PACKAGES = (
    "meshtrain",
    "numpy",
    "einops",
    "safetensors",
    "pyyaml",
    "triton",
    "tokenizers",
    "transformers",
)
VARIABLES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "UCX_",
    "FI_",
    "PYTORCH_",
    "CUDA_",
    "CUBLAS_",
    "OMP_",
    "MKL_",
    "UCC_",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "MASTER_ADDR",
)


def collect(
    place: Place, config: str | None, overrides: Sequence[str], variables: Mapping[str, str]
) -> Host:
    """The facts of this host alone: those that need the other hosts (route, port, ranks) are still
    missing."""
    import torch  # here, because it takes two seconds

    name = socket.gethostname()
    resolves, slow_names = look_up({name, place.address})

    # The driver knows all GPUs of the host, and torch those that a process may use.
    gpus = host_gpus()
    gpus_seen = torch.cuda.device_count()
    rdma_ports = ports()
    nccl_conf = nccl.settings_of_files(variables)
    net_plugin = ""
    if gpus_seen:
        net_plugin = nccl.net_plugin(nccl_conf | dict(variables), nccl.library_cache())

    cores = usable_cores()
    memory, free_memory = memory_gib()
    shared_memory = free_gib("/dev/shm") if Path("/dev/shm").is_dir() else 0.0
    locked_memory, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked_memory == resource.RLIM_INFINITY

    return Host(
        host=name,
        place=place,
        processes=processes_of(place.processes, gpus_seen, cores),
        resolves=resolves,
        slow_names=slow_names,
        interfaces=interfaces(),
        variables={
            name: variables[name] for name in sorted(variables) if name.startswith(VARIABLES)
        },
        nccl_conf=nccl_conf,
        versions=_versions(gpus),
        code=locate.code(),
        folder=str(Path.cwd()),
        gpus=gpus,
        gpus_seen=gpus_seen,
        ports=rdma_ports,
        verbs=verbs() or not rdma_ports,
        net_plugin=net_plugin,
        cores=cores,
        load=os.getloadavg()[0],
        memory_gib=memory,
        memory_free_gib=free_memory,
        shared_memory_gib=shared_memory,
        locked_memory_kib=None if unlimited else locked_memory // 1024,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        # Hosts of one image may share a name, and even an address: each boot has another id.
        machine=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        **_config_facts(config, overrides),
    )


def look_up(names: set[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Name -> addresses, as this host resolves them, and the names whose resolution took long."""

    def timed(name: str) -> tuple[tuple[str, ...], float]:
        start = time.monotonic()
        return resolve(name), time.monotonic() - start

    # All at once: a name server that does not answer costs seconds for each name.
    ordered = sorted(names)
    with ThreadPoolExecutor(min(max(len(names), 1), 64)) as pool:
        answers = list(pool.map(timed, ordered))
    addresses = {}
    slow = []
    for name, (found, seconds) in zip(ordered, answers, strict=True):
        addresses[name] = found
        if seconds > SLOW_S:
            slow.append(name)
    return addresses, tuple(slow)


def processes_of(option: str, gpus: int, cores: int) -> int:
    """The number of processes by torchrun's --nproc-per-node: a number, `gpu`, `cpu`, or `auto`
    (GPUs if any)."""
    if option == "gpu" or (option == "auto" and gpus):
        return gpus
    if option in ("cpu", "auto"):
        return cores
    return int(option)


def _config_facts(name: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    if name is None:
        return {}
    try:
        config = Config.load(name, overrides)
    except InputError as error:
        return {"config_error": str(error)}
    lines = tuple(line for line in config.to_yaml().splitlines() if not line.startswith("#"))
    return {
        "config": lines,
        "layout": config.layout,
        "paths": tuple(map(probe, named_paths(config))),
    }


def _versions(gpus: Sequence[Gpu]) -> dict[str, str]:
    from meshtrain.job.consistency import versions  # here, because it imports torch

    found = versions(PACKAGES)
    found["kernel"] = platform.release()
    found["executable"] = sys.executable
    if gpus:
        found["driver"] = gpus[0].driver
    return found


def interfaces() -> tuple[Interface, ...]:
    addresses: dict[str, list[str]] = {}
    for label, entries in psutil.net_if_addrs().items():
        # A second IPv4 address of eth0 may be labelled eth0:1.
        own = addresses.setdefault(label.partition(":")[0], [])
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                # A link-local address names its interface: fe80::1%eth0.
                own.append(entry.address.partition("%")[0])
    return tuple(Interface(name, tuple(own)) for name, own in addresses.items())


def ports(cards: Path = Path("/sys/class/infiniband")) -> tuple[Port, ...]:
    """The ports of RDMA cards: InfiniBand, RoCE, and those of clouds."""
    found = []
    for folder in sorted(cards.glob("*/ports/*")):
        card = folder.parents[1]
        driver = card / "device" / "driver"
        rate = _text(folder / "rate").partition(" ")[0]  # 400 Gb/sec
        gid_types = (folder / "gid_attrs" / "types").glob("*")
        port = Port(
            name=f"{card.name}:{folder.name}",
            layer=_text(folder / "link_layer"),
            active="ACTIVE" in _text(folder / "state"),
            gbit=float(rate or 0),
            driver=driver.resolve().name if driver.exists() else "",
            roce_v2=any("v2" in _text(file) for file in gid_types),
        )
        found.append(port)
    return tuple(found)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # a GID that is not in use cannot be read
        return ""


def verbs(devices: Path = Path("/dev/infiniband")) -> bool:
    """Whether this process has the device files of RDMA cards: a container may see cards that it
    cannot open."""
    return any(devices.glob("uverbs*"))
