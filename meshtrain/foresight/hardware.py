"""Hardware file: rates of a GPU and of the links between GPUs, from a YAML in hardware/ or a user's
own."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from meshtrain.config.convert import INVALID, convert
from meshtrain.config.errors import ConfigError, ConfigErrors
from meshtrain.config.keys import key
from meshtrain.config.yaml_reader import read_file
from meshtrain.errors import InputError, nearest
from meshtrain.job import locate
from meshtrain.job.host_limits import SPARE

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU's memory."""

    name: str
    memory_gib: float = key(above=0)  # available to a process
    # taken by libraries: context, workspaces, communicators
    reserve_gib: float = key(1.6, minimum=0)
    # share of the rest; fragmentation takes what is left
    usable: float = key(0.95, above=0, maximum=1)

    @property
    def room(self) -> float:
        """Bytes available to the tensors of a rank."""
        return (self.memory_gib - self.reserve_gib) * 2**30 * self.usable


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Rates of a GPU, and of the CPU thread that launches its kernels."""

    # precision -> TFLOP/s of matrix products by the data sheet, without sparsity
    peak: dict[str, float] = key(above=0)
    matmul: float = key(0.65, above=0, maximum=1)  # share of the peak that large products reach
    edge: float = key(100.0, minimum=0)  # smallest side of a product at which half of that is left
    # share of the peak that attention reaches on pairs of tokens that see each other
    attention: float = key(0.5, above=0, maximum=1)
    hbm: float = key(above=0)  # GB/s of the memory
    stream: float = key(0.8, above=0, maximum=1)  # share of it that all other operators reach
    launch: float = key(1.2e-5, minimum=0)  # s of the CPU thread per operator
    # share of the GPU that a message takes while it travels beside computing: kernels of NCCL run
    # on as many multiprocessors
    contention: float = key(0.15, minimum=0, maximum=1)
    # whether kernels run while that thread launches others; false for a CPU
    asynchronous: bool = True


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between ranks."""

    # GB/s in one direction. A number: of a rank. Between hosts also a table, the number of hosts ->
    # the bus bandwidth of all ranks of so many hosts together in one ring, as nccl-tests prints it
    # for large sizes.
    bandwidth: float | dict[int, float] = key(above=0)
    latency: float = key(minimum=0)  # s of one step of a collective
    message: float = key(0.0, minimum=0)  # s of a message or collective besides steps and bytes

    def of_rank(self, hosts: int = 1, ranks_of_host: int = 1) -> float:
        """GB/s of one rank, in one direction, in a group over so many hosts. Between the entries of
        a table it is interpolated by the logarithms of both, and beyond them constant."""
        if not isinstance(self.bandwidth, Mapping):
            return self.bandwidth
        return _interpolated(self.bandwidth, hosts) / ranks_of_host

    def slower(self, factor: float) -> "Link":
        """With all times multiplied by a factor."""
        bandwidth: Any
        if isinstance(self.bandwidth, Mapping):
            bandwidth = {hosts: rate / factor for hosts, rate in self.bandwidth.items()}
        else:
            bandwidth = self.bandwidth / factor
        return Link(
            bandwidth=bandwidth, latency=self.latency * factor, message=self.message * factor
        )


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host's memory, and the link of each GPU to it."""

    # GB/s between a GPU and pinned memory, each way, both ways at the same time; None: not known
    bandwidth: float | None = key(None, above=0)
    memory_gib: float | None = key(None, above=0)  # of a host; None: not known

    @property
    def room(self) -> float | None:
        """Bytes of a host's memory that a job may take; None: not known."""
        return None if self.memory_gib is None else (1 - SPARE) * self.memory_gib * 2**30


def _interpolated(table: Mapping[int, float], hosts: int) -> float:
    known = sorted(table)
    above = next((count for count in known if count >= hosts), known[-1])
    below = next((count for count in reversed(known) if count <= hosts), known[0])
    if above <= below:
        return table[below]
    share = math.log(hosts / below) / math.log(above / below)
    return math.exp((1 - share) * math.log(table[below]) + share * math.log(table[above]))


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Sizes and rates from which memory and time of a step are predicted."""

    device: Device
    compute: Compute
    within_host: Link
    between_hosts: Link
    host: Host = Host()
    # relative error of predicted seconds of a step; by default that of the published ones that
    # tools/bench/published.py predicts by data sheets: two of three are closer
    error: float = key(0.15, above=0, below=1)
    # of the rates: "data sheet", or the runs and reports that they were fitted to
    source: str = key("data sheet")

    @property
    def band(self) -> str:
        """` +- 15 %, data sheet`: of predicted seconds."""
        return f" +- {100 * self.error:.0f} %, {self.source}"

    def flops(self, precision: str) -> float:
        """FLOP/s by the data sheet. Raises InputError: the file has no peak for this precision."""
        if precision not in self.compute.peak:
            known = ", ".join(self.compute.peak)
            raise InputError(
                f"the hardware {self.device.name} has no peak for {precision}: its compute.peak "
                f"has {known}"
            )
        return self.compute.peak[precision] * 1e12

    @property
    def has_host_memory(self) -> bool:
        """Whether what `parallel.offload` moves leaves the device: a CPU is its own host."""
        return self.compute.asynchronous and self.host.bandwidth is not None

    def host_seconds(self, nbytes: float) -> float:
        """Seconds of so many bytes to the memory of the host, or back. Raises InputError: the file
        does not give the link's rate."""
        if self.host.bandwidth is None:
            raise InputError(
                f"the hardware {self.device.name} has no host.bandwidth, without which the time of "
                "parallel.offload is not known: give the GB/s between a GPU and its host's memory, "
                "such as host: {bandwidth: 50}"
            )
        return nbytes / (self.host.bandwidth * 1e9)


def load(name: str) -> Hardware:
    """Hardware from a file's path, or by the name of a built-in file: `h100`. Raises InputError:
    names wrong lines."""
    return _read(name, "hardware", Hardware)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The links of a cluster, in the place of those of a hardware file."""

    between_hosts: Link
    within_host: Link | None = None  # None: the hardware file's


def with_fabric(hardware: Hardware, name: str) -> Hardware:
    """The hardware in another network: of a file's path, or the name of a built-in file: `efa`.
    Raises InputError: names wrong lines."""
    fabric = _read(name, "hardware/fabrics", Fabric)
    return replace(
        hardware,
        within_host=fabric.within_host or hardware.within_host,
        between_hosts=fabric.between_hosts,
        source=f"{hardware.source}, links of {name}",
    )


def _read(name: str, folder: str, record: type[Record]) -> Record:
    """A record from a YAML: a path, or the name of a file in a folder of the project's own."""
    own = locate.bundled(folder)
    path = Path(name) if Path(name).is_file() else own / f"{name.lower()}.yaml"
    what = folder.rpartition("/")[2]
    if not path.is_file():
        known = locate.names(folder, ".yaml")
        near = nearest(name.lower(), known)
        hint = f"did you mean {near}? " if near else ""
        raise InputError(
            f"there is no {what} {name}: {hint}give the path of a YAML file, or one of "
            f"{', '.join(known)}"
        )
    errors: list[ConfigError] = []
    root = read_file(path, str(path), errors)
    read = INVALID if root is None else convert(root, record, what, errors)
    if not isinstance(read, record):
        raise ConfigErrors(str(path), errors)
    _check_tables(path, read)
    return read


def _check_tables(path: Path, record: Any) -> None:
    if record.within_host is not None and isinstance(record.within_host.bandwidth, Mapping):
        raise InputError(
            f"{path}: within_host.bandwidth: expected a number: tables are by numbers of hosts"
        )
    table = record.between_hosts.bandwidth
    if isinstance(table, Mapping) and min(table, default=0) < 2:
        found = ", ".join(map(str, table)) or "none"
        raise InputError(
            f"{path}: between_hosts.bandwidth: expected numbers of hosts from 2 on, found {found}"
        )
