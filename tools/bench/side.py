"""One rank of one side of a benchmark: runs meshtrain's command or a script beside it, a few steps at a time.

Between its turns it waits on a socket and takes no CPU time. What is measured is the process's own clock of CPU time,
all threads included, and that of the processes that read data for it; the clock on the wall; and, on a GPU, the most
memory. A GPU is waited for at both ends of a turn and nowhere in between.
"""

import importlib
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from meshtrain import train as command


class Turns:
    """Stops before the first step of every turn until it is told to go on, and tells what the turn before has cost."""

    def __init__(self, address: str, side: int, warm_up: int, steps: int) -> None:
        """
        Args:
            address: the socket at which harness.py listens.
            side: the number of this side there.
            warm_up: steps before the first turn.
            steps: of a turn.
        """
        self._warm_up, self._steps = warm_up, steps
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        self._lines = connection.makefile("rw")
        self._say({"side": side, "rank": int(os.environ.get("RANK", "0"))})
        self._cpu, self._wall, self._readers = 0.0, 0.0, 0.0

    def before_step(self, step: int) -> None:
        """Step `step`, counted from 1, is about to begin."""
        done = step - 1 - self._warm_up
        if done < 0 or done % self._steps:
            return
        memory = self._settle()
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        before, self._readers = self._readers, _readers_cpu_s()
        # Readers go on for a moment when a turn is over, and are then idle: they count from turn's end to turn's end.
        self._say({"cpu_s": cpu + self._readers - before, "wall_s": wall, **memory})
        if not self._lines.readline():
            os._exit(1)  # another side has failed, and nobody measures any more
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def _settle(self) -> dict[str, int]:
        """Waits for the GPU, if there is one: the most bytes of it since the last turn; what is free goes to others."""
        if not torch.cuda.is_initialized():
            return {}
        torch.cuda.synchronize()
        memory = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return memory

    def _say(self, what: dict[str, Any]) -> None:
        self._lines.write(json.dumps(what) + "\n")
        self._lines.flush()


def _readers_cpu_s() -> float:
    """The CPU time of the processes that this one has started."""
    clocks = [(~child.pid << 3) | 2 for child in multiprocessing.active_children() if child.pid]  # clock_getcpuclockid
    return sum(time.clock_gettime(clock) for clock in clocks)


def run_meshtrain(arguments: list[str], before_step: Callable[[int], None]) -> int:
    """meshtrain's own command, whole; only what it does between two steps is preceded by `before_step`, and the last
    state is not saved: of a model that fills a GPU that takes longer than the turns."""

    class PacedMonitor(command.PhaseMonitor):
        @contextmanager
        def step(self, step: int) -> Iterator[None]:
            before_step(step)
            with super().step(step):
                yield

    class UnsavedCheckpointer(command.Checkpointer):
        def finish(self) -> None:
            pass

    command.PhaseMonitor = PacedMonitor  # type: ignore[misc]
    command.Checkpointer = UnsavedCheckpointer  # type: ignore[misc]
    return command.main(arguments)


def overridden(values: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """The YAML's values with `key.path=value` in their places."""
    for text in overrides:
        path, _, value = text.partition("=")
        *sections, key = path.split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = yaml.safe_load(value)
    return values


def main() -> int:
    """Called by harness.py: a JSON object of `Turns`, then the kind of side, then its arguments."""
    turns = Turns(**json.loads(sys.argv[1]))
    kind, *arguments = sys.argv[2:]
    if kind == "meshtrain":
        return run_meshtrain(arguments, turns.before_step)
    config, tokens, weights, log, *overrides = arguments
    values = overridden(yaml.safe_load(Path(config).read_text()), overrides)
    script = importlib.import_module(kind)  # this folder is on the path, because this file is run by its path
    script.train(values, Path(tokens), Path(weights), Path(log), before_step=turns.before_step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
