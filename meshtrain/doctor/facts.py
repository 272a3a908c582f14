"""The facts of a host, before it has met the others: from Linux, torch and nvidia-smi, and from its
config."""

import array
import fcntl
import ipaddress
import os
import platform
import resource
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshtrain.config import Config, locate
from meshtrain.doctor import nccl
from meshtrain.doctor.files import free_gib, named_paths, probe
from meshtrain.doctor.records import Gpu, Host, Interface, Place, Port
from meshtrain.errors import InputError
from meshtrain.job.host_memory import memory_gib
from meshtrain.job.sockets import resolve
from meshtrain.metrics.nvidia_smi import query, throttle_reasons

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
QUERY = ("index", "name", "uuid", "memory.total", "memory.used", "driver_version")
SIOCGIFCONF = 0x8912  # <linux/sockios.h>
IFREQ = 40  # bytes of `struct ifreq` on 64-bit Linux


def collect(
    place: Place, config: str | None, overrides: Sequence[str], variables: Mapping[str, str]
) -> Host:
    """The facts of this host alone: those that need the other hosts (route, port, ranks) are still
    missing."""
    import torch  # here, because it takes two seconds

    name = socket.gethostname()
    resolves, slow = look_up({name, place.address})
    gpus = _gpus()
    memory, free = memory_gib()
    gpus_seen, rdma, cores = torch.cuda.device_count(), ports(), len(os.sched_getaffinity(0))
    nccl_conf = nccl.settings_of_files(variables)
    lockable = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Host(
        host=name,
        place=place,
        processes=processes_of(place.processes, gpus_seen, cores),
        resolves=resolves,
        slow_names=slow,
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
        ports=rdma,
        verbs=verbs() or not rdma,
        net_plugin=nccl.net_plugin(nccl_conf | dict(variables), nccl.library_cache())
        if gpus_seen
        else "",
        cores=cores,
        load=os.getloadavg()[0],
        memory_gib=memory,
        memory_free_gib=free,
        shared_memory_gib=free_gib("/dev/shm") if Path("/dev/shm").is_dir() else 0.0,
        locked_memory_kib=None if lockable == resource.RLIM_INFINITY else lockable // 1024,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        machine=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        **_config_facts(config, overrides),
    )


def look_up(names: set[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Name -> addresses, as this host resolves them, and the names whose resolution took long."""

    def timed(name: str) -> tuple[str, tuple[str, ...], float]:
        start = time.monotonic()
        return name, resolve(name), time.monotonic() - start

    with ThreadPoolExecutor(min(max(len(names), 1), 64)) as pool:
        rows = list(pool.map(timed, sorted(names)))
    slow = tuple(name for name, _, seconds in rows if seconds > SLOW_S)
    return {name: addresses for name, addresses, _ in rows}, slow


def processes_of(option: str, gpus: int, cores: int) -> int:
    """The number of processes by torchrun's --nproc-per-node: a number, `gpu`, `cpu`, or `auto`
    (GPUs if any)."""
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
    return {
        "config": lines,
        "layout": config.layout,
        "paths": tuple(map(probe, named_paths(config))),
    }


def _versions(gpus: Sequence[Gpu]) -> dict[str, str]:
    from meshtrain.job.consistency import versions  # here, because it imports torch

    own = {"kernel": platform.release(), "executable": sys.executable}
    return versions(PACKAGES) | own | ({"driver": gpus[0].driver} if gpus else {})


def _gpus() -> tuple[Gpu, ...]:
    """Empty if nvidia-smi is missing or does not answer, which shows as a mismatch of numbers."""
    gpus = []
    for index, name, uuid, total, used, driver, reasons in query(QUERY):
        total_gib, used_gib = (
            float(mib) / 1024 if mib.replace(".", "").isdecimal() else 0.0 for mib in (total, used)
        )
        gpus.append(
            Gpu(int(index), name, uuid, total_gib, used_gib, driver, throttle_reasons(reasons))
        )
    return tuple(gpus)


def interfaces() -> tuple[Interface, ...]:
    addresses: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    buffer = array.array("B", bytes(IFREQ * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        reply = fcntl.ioctl(
            any_socket, SIOCGIFCONF, struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        )
    for start in range(0, struct.unpack("iL", reply)[0], IFREQ):
        data = buffer[start : start + IFREQ].tobytes()
        name = data[:16].partition(b"\0")[0].decode().partition(":")[0]
        addresses.setdefault(name, []).append(socket.inet_ntoa(data[20:24]))
    table = Path("/proc/net/if_inet6")
    for row in map(str.split, table.read_text().splitlines() if table.exists() else ()):
        addresses.setdefault(row[5], []).append(str(ipaddress.IPv6Address(bytes.fromhex(row[0]))))
    return tuple(Interface(name, tuple(own)) for name, own in addresses.items())


def ports(cards: Path = Path("/sys/class/infiniband")) -> tuple[Port, ...]:
    """The ports of RDMA cards: InfiniBand, RoCE, and those of clouds."""

    def text(file: Path) -> str:
        try:
            return file.read_text().strip()
        except OSError:  # a GID that is not in use cannot be read
            return ""

    rows = []
    for port in sorted(cards.glob("*/ports/*")):
        driver = port.parents[1] / "device" / "driver"
        # 400 Gb/sec
        name, rate = (
            f"{port.parts[-3]}:{port.name}",
            float(text(port / "rate").partition(" ")[0] or 0),
        )
        roce_v2 = any("v2" in text(gid) for gid in (port / "gid_attrs" / "types").glob("*"))
        driver_name = driver.resolve().name if driver.exists() else ""
        active = "ACTIVE" in text(port / "state")
        rows.append(Port(name, text(port / "link_layer"), active, rate, driver_name, roce_v2))
    return tuple(rows)


def verbs(devices: Path = Path("/dev/infiniband")) -> bool:
    """Whether this process has the device files of RDMA cards: a container may see cards that it
    cannot open."""
    return any(devices.glob("uverbs*"))
