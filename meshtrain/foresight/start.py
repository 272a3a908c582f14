"""A run's warning before its first step that memory will be short, and its note after an
out-of-memory error.

A process beside rank 0 predicts memory while the run reads its data and builds its model, because a
trace needs process groups of its own. It sees no GPU, and the run goes on whatever happens to it.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshtrain.config import Config
from meshtrain.errors import bytes_text
from meshtrain.foresight.model import without_sequence_parts
from meshtrain.job.storage import optional, read_guarded, write_whole
from meshtrain.parallel.parallelize import has_sequence_part

PATIENCE_S = 5.0  # longest that a run waits for the prediction before its first step
ROOM = "MESHTRAIN_DEVICE_MEMORY_GIB"  # variable that replaces the device's memory
FILE = "memory.txt"  # in the run's folder


def device_gib(device: torch.device) -> float | None:
    """Memory of a device in GiB; None for a CPU."""
    override = os.environ.get(ROOM)
    if override:
        return float(override)
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[1] / 2**30


class MemoryForecast:
    """The predicted memory of a run, begun on rank 0. As a context around the run's steps it adds
    notes to an out-of-memory error: predicted memory, its parts, and settings that save memory."""

    def __init__(self, folder: Path, device: torch.device, config: Config, rank: int) -> None:
        self.file = folder / FILE
        self.source = folder / f"{FILE}.yaml"  # the config, for the other process
        self.config = config
        self.process: subprocess.Popen[bytes] | None = None
        self.gib: float | None = None
        if rank == 0 and config.resolved is not None:
            self.gib = device_gib(device)
        self._begin(config)

    def follow(self, model: nn.Module) -> None:
        """Begins anew if the check of the parallelized model has turned sequence parallelism off:
        that takes memory."""
        if self.process is None or has_sequence_part(model) is not False:
            return
        config = without_sequence_parts(self.config)
        if config is not None:
            self._end()
            self._begin(config)

    def _begin(self, config: Config) -> None:
        if self.gib is None:
            return
        assert config.resolved is not None
        with optional("how much memory the run takes is not foreseen"):
            self.file.unlink(missing_ok=True)
            write_whole(self.source, config.to_yaml())
            arguments = [self.source, self.file, config.resolved.world_size, self.gib]
            # It must not touch the GPU, whose memory it foresees, nor take the run's cores.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "meshtrain.foresight.start", *map(str, arguments)],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def note(self) -> list[str]:
        """Lines for people if the run is about to run out of memory; none if it fits, or no
        prediction came in time."""
        if self.process is None:
            return []
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_S)
        lines = self._read()
        fits = bool(lines) and lines[0].endswith(": fits")
        return [] if fits else lines

    def _read(self) -> list[str]:
        with suppress(OSError):  # not written yet
            return read_guarded(self.file).decode().splitlines()
        return []

    def __enter__(self) -> "MemoryForecast":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            for line in self._read():
                error.add_note(line)
        self._end()

    def _end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            # The run does not wait for a prediction that is no longer of use.
            self.process.kill()
            self.process.wait()
            self.source.unlink(missing_ok=True)


def main(source: str, file: str, world_size: str, gib: str) -> None:
    """Writes the predicted memory of a config into a file, and deletes the config."""
    from meshtrain.foresight.hardware import Device
    from meshtrain.foresight.prediction import Prediction

    # Names on the hub have their commits, whose files are here.
    config = Config.load(source, world_size=int(world_size), hub={})
    Path(source).unlink()
    prediction = Prediction(config, exact=True)
    memory = prediction.memory
    room = Device(name="", memory_gib=float(gib)).room
    verdict = memory.verdict(room)
    largest_first = sorted(memory.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in largest_first)
    lines = [
        f"memory: {bytes_text(memory.total)} at the peak, {bytes_text(room)} available to tensors: "
        f"{verdict}",
        f"  in the {memory.moment}: {parts}",
    ]
    if verdict != "fits":
        savings = [
            f"{change} {bytes_text(fewer_bytes)}"
            for change, (fewer_bytes, _) in prediction.saves.items()
        ]
        lines.append(f"  would save: {'; '.join(savings)}")
    write_whole(Path(file), "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
