"""One rank of one side of a benchmark: runs meshtrain's command or a baseline script, a few steps
at a time.

Between its turns it waits on a socket and takes no CPU time. Measured are the CPU time of the
process, all threads included, and of its data workers; the wall time; and, on a GPU, the peak
memory. The GPU is synchronized at both ends of a turn and nowhere in between.
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

from baseline import Task
from meshtrain import train as command


class Turns:
    """Stops before the first step of every turn until told to continue, and reports what the
    previous turn cost."""

    def __init__(self, address: str, side: int, warm_up: int, steps: int) -> None:
        """
        Args:
            address: the socket on which harness.py listens.
            side: the number of this side in harness.py.
            warm_up: steps before the first turn.
            steps: steps per turn.
        """
        self._warm_up, self._steps = warm_up, steps
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        self._lines = connection.makefile("rw")
        self._say({"side": side, "rank": int(os.environ.get("RANK", "0"))})
        self._cpu, self._wall, self._readers = 0.0, 0.0, 0.0

    def before_step(self, step: int) -> None:
        """Called before step `step`, counted from 1."""
        done = step - 1 - self._warm_up
        if done < 0 or done % self._steps:
            return
        memory = self._settle()
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        before, self._readers = self._readers, _readers_cpu_s()
        # Workers go on for a moment after a turn and are then idle, so they are measured from end
        # to end of turns.
        self._say({"cpu_s": cpu + self._readers - before, "wall_s": wall, **memory})
        if not self._lines.readline():
            os._exit(1)  # another side has failed, and the harness is gone
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def _settle(self) -> dict[str, int]:
        """Synchronizes the GPU, if any; returns the peak memory since the last turn, and frees the
        cache for others."""
        if not torch.cuda.is_initialized():
            return {}
        torch.cuda.synchronize()
        memory = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return memory

    def _say(self, what: dict[str, Any]) -> None:
        self._lines.write(json.dumps(what) + "\n")
        self._lines.flush()


def _readers_cpu_s() -> float:
    """The CPU time of this process's children, the data workers."""
    # clock_getcpuclockid
    clocks = [(~child.pid << 3) | 2 for child in multiprocessing.active_children() if child.pid]
    return sum(time.clock_gettime(clock) for clock in clocks)


def run_meshtrain(arguments: list[str], before_step: Callable[[int], None]) -> int:
    """Runs meshtrain's whole command, but calls `before_step` before each step and does not save
    the final state, which would take longer than the turns for a model that fills a GPU."""

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
    """The YAML's values with `key.path=value` overrides applied."""
    for text in overrides:
        path, _, value = text.partition("=")
        *sections, key = path.split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = yaml.safe_load(value)
    return values


def main() -> int:
    """Called by harness.py with the arguments of `Turns` as a JSON object, the kind of side, and
    its arguments."""
    turns = Turns(**json.loads(sys.argv[1]))
    kind, *arguments = sys.argv[2:]
    if kind == "meshtrain":
        return run_meshtrain(arguments, turns.before_step)
    config, tokens, weights, log, *overrides = arguments
    values = overridden(yaml.safe_load(Path(config).read_text()), overrides)
    # this folder is on sys.path, since this file is run by its path
    script = importlib.import_module(kind)
    task = Task(values, Path(tokens), Path(weights), Path(log), turns.before_step)
    script.train(task)
    return 0


if __name__ == "__main__":
    sys.exit(main())
