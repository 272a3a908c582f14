"""Hardware file: rates of a GPU and of the links between GPUs, from a YAML in hardware/ or a user's
own."""

from dataclasses import dataclass
from pathlib import Path

from meshtrain.config.convert import INVALID, convert
from meshtrain.config.errors import ConfigError, ConfigErrors
from meshtrain.config.keys import key
from meshtrain.config.yaml_reader import read_file
from meshtrain.errors import InputError
from meshtrain.job import locate


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
    peak: dict[str, float]
    matmul: float = key(0.65, above=0, maximum=1)  # share of the peak that large products reach
    edge: float = key(100.0, minimum=0)  # smallest side of a product at which half of that is left
    attention: float = key(0.35, above=0, maximum=1)  # share of the peak that attention reaches
    hbm: float = key(above=0)  # GB/s of the memory
    stream: float = key(0.8, above=0, maximum=1)  # share of it that all other operators reach
    launch: float = key(1.2e-5, minimum=0)  # s of the CPU thread per operator
    # whether kernels run while that thread launches others; false for a CPU
    asynchronous: bool = True


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between ranks."""

    bandwidth: float = key(above=0)  # GB/s of a rank, in one direction
    latency: float = key(minimum=0)  # s of one step of a collective
    message: float = key(0.0, minimum=0)  # s of a point-to-point message besides its bytes


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Sizes and rates from which memory and time of a step are predicted."""

    device: Device
    compute: Compute
    within_host: Link
    between_hosts: Link
    error: float = key(0.1, above=0, below=1)  # relative error of predicted seconds of a step
    # of the rates: "data sheet", or the runs and reports that they were fitted to
    source: str = key("data sheet")

    def flops(self, precision: str) -> float:
        """FLOP/s by the data sheet. Raises InputError: the file has no peak for this precision."""
        if precision not in self.compute.peak:
            known = ", ".join(self.compute.peak)
            raise InputError(
                f"the hardware {self.device.name} has no peak for {precision}: its compute.peak "
                f"has {known}"
            )
        return self.compute.peak[precision] * 1e12


def load(name: str) -> Hardware:
    """Hardware from a file's path, or by the name of a built-in file: `h100`. Raises InputError:
    names wrong lines."""
    own = locate.bundled("hardware")
    path = Path(name) if Path(name).is_file() else own / f"{name.lower()}.yaml"
    if not path.is_file():
        known = ", ".join(locate.names("hardware", ".yaml"))
        raise InputError(
            f"there is no hardware {name}: give the path of a YAML file, or one of {known}"
        )
    errors: list[ConfigError] = []
    root = read_file(path, str(path), errors)
    hardware = INVALID if root is None else convert(root, Hardware, "hardware", errors)
    if isinstance(hardware, Hardware):
        for precision, rate in hardware.compute.peak.items():
            if not isinstance(rate, int | float) or not rate > 0:
                raise InputError(
                    f"{path}: hardware.compute.peak.{precision}: expected TFLOP/s above 0, found "
                    f"{rate!r}"
                )
        return hardware
    raise ConfigErrors(str(path), errors)
