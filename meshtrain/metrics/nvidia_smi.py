"""What nvidia-smi reports about this host's GPUs. It comes with the driver, so it needs no
installation."""

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from meshtrain.job.programs import ProgramError, run_program

LIMIT_S = 10.0  # a failing driver lets nvidia-smi hang
THROTTLES = {  # nvml.h, nvmlClocksEventReason*
    0x4: "the power limit",
    0x8: "a hardware slow-down",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake",
}
CONDITION = ("index", "clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw", "power.limit")
# of current drivers, and of old ones
REASONS = (
    "clocks_event_reasons.active",
    "clocks_throttle_reasons.active",
)


def query(fields: Sequence[str], *arguments: str) -> list[list[str]]:
    """The cells of these fields for each GPU, and as the last one its throttle reasons as a bit
    mask: queried under each of the field's names, because nvidia-smi prints nothing if one field is
    unknown to it. Empty where nvidia-smi is missing, fails or does not answer in time."""
    begun = time.monotonic()
    for reasons in (*REASONS, ""):
        names = ",".join((*fields, reasons) if reasons else fields)
        lines: list[str] = []
        with suppress(ProgramError):
            command = (
                "nvidia-smi",
                *arguments,
                "--format=csv,noheader,nounits",
                f"--query-gpu={names}",
            )
            lines = run_program(command, LIMIT_S).splitlines()
        cells = [
            [cell.strip() for cell in line.split(",")] + [""] * (not reasons) for line in lines
        ]
        if cells and all(len(row) == len(fields) + 1 for row in cells):
            return cells
        if time.monotonic() - begun > LIMIT_S:  # it hangs
            break
    return []


def throttle_reasons(bits: str) -> str:
    """nvidia-smi's `0x0000000000000040` in words; empty if the clocks are not throttled."""
    if not re.fullmatch(r"0x[\da-fA-F]+", bits):
        return ""
    return ", ".join(word for bit, word in THROTTLES.items() if int(bits, 16) & bit)


class GpuCondition(NamedTuple):
    """The condition of a GPU in words (empty where nvidia-smi does not tell), and whether its
    clocks are throttled."""

    text: str
    throttled: bool


UNKNOWN = GpuCondition("", False)


def condition(cells: Sequence[str]) -> GpuCondition:
    """From a row of `query` for `CONDITION`: `GPU 3 at 1230 of 1980 MHz, held down by heat
    (hardware), 88 °C`."""
    # not `[N/A]` and the like
    known = (cell if re.fullmatch(r"[\da-fA-Fx.]+", cell) else "" for cell in cells)
    index, clock, most, heat, power, limit, bits = known
    reasons = throttle_reasons(bits)
    parts = [
        f"GPU {index}" + (f" at {clock} of {most} MHz" if clock and most else ""),
        f"held down by {reasons}" if reasons else "",
        f"{heat} °C" if heat else "",
        f"{float(power):.0f} of {float(limit):.0f} W" if power and limit else "",
    ]
    return GpuCondition(", ".join(filter(None, parts)), bool(reasons))


def gpu_condition(uuid: str) -> GpuCondition:
    rows = query(CONDITION, f"--id={uuid}")
    return condition(rows[0]) if rows else UNKNOWN
