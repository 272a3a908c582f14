"""NVML: what the NVIDIA driver says about this host's GPUs.

Without a driver nothing is known, which is no error: a host may have no GPUs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from meshtrain.job.sockets import call_with_timeout

T = TypeVar("T")

LIMIT_S = 10.0  # a failing driver lets its library hang
THROTTLES = {  # nvml.h, nvmlClocksEventReason*
    0x4: "the power limit",
    0x8: "a hardware slow-down",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake",
}


@dataclass(frozen=True)
class Gpu:
    """A GPU of this host; `throttled`: why its clocks are held down, empty if they are not."""

    index: int
    name: str
    uuid: str
    memory_gib: float
    used_gib: float
    driver: str
    throttled: str = ""


@dataclass(frozen=True)
class GpuCondition:
    """The condition of a GPU in words, and whether its clocks are held down."""

    text: str
    throttled: bool


UNKNOWN = GpuCondition("", False)


def host_gpus() -> tuple[Gpu, ...]:
    """All GPUs of this host, also those that CUDA_VISIBLE_DEVICES hides. Empty if the driver is
    missing or does not answer, which shows as a mismatch of numbers."""
    try:
        return call_with_timeout(LIMIT_S, _host_gpus)
    except TimeoutError:
        return ()


def gpu_condition(uuid: str) -> GpuCondition:
    """`GPU 3 at 1230 of 1980 MHz, held down by heat (hardware), 88 °C, 310 of 700 W`.

    It may take seconds, or hang with a failing driver.
    """
    with _driver() as pynvml:
        if pynvml is None:
            return UNKNOWN
        handle = _known(pynvml.nvmlDeviceGetHandleByUUID, uuid)
        return UNKNOWN if handle is None else _condition(pynvml, handle)


def throttle_reasons(bits: int) -> str:
    """NVML's bit mask in words; empty if the clocks are not held down."""
    return ", ".join(word for bit, word in THROTTLES.items() if bits & bit)


@contextmanager
def _driver() -> Iterator[Any]:
    """The library, ready for questions; None without a working driver."""
    import pynvml  # only where a GPU is asked for

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        _known(pynvml.nvmlShutdown)


def _known(question: Callable[..., T], *arguments: Any) -> T | None:
    """The answer; None if this GPU or this version of the driver has none."""
    import pynvml

    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _host_gpus() -> tuple[Gpu, ...]:
    gpus = []
    with _driver() as pynvml:
        if pynvml is None:
            return ()
        driver = _known(pynvml.nvmlSystemGetDriverVersion) or ""
        for index in range(_known(pynvml.nvmlDeviceGetCount) or 0):
            handle = _known(pynvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:  # it has fallen off the bus
                continue
            # Version 2 does not count what the driver reserves for itself as used.
            version = pynvml.nvmlMemory_v2
            memory = _known(pynvml.nvmlDeviceGetMemoryInfo, handle, version)
            gpu = Gpu(
                index=index,
                name=_known(pynvml.nvmlDeviceGetName, handle) or "",
                uuid=_known(pynvml.nvmlDeviceGetUUID, handle) or "",
                memory_gib=memory.total / 2**30 if memory is not None else 0.0,
                used_gib=memory.used / 2**30 if memory is not None else 0.0,
                driver=driver,
                throttled=throttle_reasons(_throttle_bits(pynvml, handle)),
            )
            gpus.append(gpu)
    return tuple(gpus)


def _throttle_bits(pynvml: Any, handle: Any) -> int:
    # Drivers before 535 know the older name alone, and one day drivers may know only the newer.
    for name in (
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ):
        bits = _known(getattr(pynvml, name), handle)
        if bits is not None:
            return int(bits)
    return 0


def _condition(pynvml: Any, handle: Any) -> GpuCondition:
    clock = _known(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
    highest = _known(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM)
    heat = _known(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    milliwatts = _known(pynvml.nvmlDeviceGetPowerUsage, handle)
    limit = _known(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    reasons = throttle_reasons(_throttle_bits(pynvml, handle))

    text = f"GPU {_known(pynvml.nvmlDeviceGetIndex, handle)}"
    if clock is not None and highest is not None:
        text += f" at {clock} of {highest} MHz"
    if reasons:
        text += f", held down by {reasons}"
    if heat is not None:
        text += f", {heat} °C"
    if milliwatts is not None and limit is not None:
        text += f", {milliwatts / 1000:.0f} of {limit / 1000:.0f} W"
    return GpuCondition(text, bool(reasons))
