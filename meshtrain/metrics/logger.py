"""The logger of metrics: passes what a run measures on to `metrics.jsonl`, the terminal and the
sinks.

Rank 0 has a `Metrics`; the others have a `NoMetrics`, which does nothing. docs/metrics.md lists the
fields.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from meshtrain.errors import InputError
from meshtrain.job.parsing import parse_json
from meshtrain.job.storage import SideFile, move_damaged, open_guarded, optional, warn
from meshtrain.metrics.progress import open_progress
from meshtrain.metrics.sink_threads import SinkThreads

FILE = "metrics.jsonl"


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, even while it is being written; an incomplete last line is
    left out.

    Raises InputError: a line is not a JSON object with a step.
    """
    path = Path(path)
    # without O_NONBLOCK a pipe of that name would be waited for
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        return [row for _, _, row in _rows(file, path)]


def _rows(file: Iterable[bytes], path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Each complete row, with the byte offsets of its start and its end."""
    start = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        try:
            row = parse_json(line)
        except InputError as error:
            raise InputError(
                f"{path}:{number}: expected one JSON object per line, found {line[:60]!r} "
                f"({error}); remove the line, or move the file away"
            ) from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise InputError(
                f"{path}:{number}: expected an object with a whole number as `step`, found "
                f"{line[:60]!r}"
            )
        yield start, start + len(line), row
        start += len(line)


class MetricsFile:
    """`metrics.jsonl`: one object per step, in the order of the steps, each written as soon as it
    is known; an evaluation is added to its step's object. NaN and infinity, which JSON lacks, are
    written as null."""

    def __init__(self, path: Path) -> None:
        """Opens the file to append after its last complete row. A file with invalid lines is moved
        away."""
        self._path = path
        self._last: dict[str, Any] = {"step": 0}
        with optional(f"{path} cannot be read"):
            try:
                if os.path.lexists(path):
                    with open(open_guarded(path), "rb") as file:
                        for _ in _rows(file, path):
                            pass
            except InputError as error:
                _keep_whole(move_damaged(path, error), path)
        self._file = SideFile(path, end=None)
        self.drop_after(None)

    def drop_after(self, step: int | None) -> None:
        """Removes the rows after `step`, and an incomplete last row, in one truncation."""
        last_start = last_end = 0
        self._last = {"step": 0}
        try:
            with open(open_guarded(self._path), "rb") as file:
                for start, end, row in _rows(file, self._path):
                    if step is not None and row["step"] > step:
                        break
                    last_start, last_end = start, end
                    self._last = row
        except (OSError, InputError) as error:  # it could not be moved away, either
            warn(f"{self._path} cannot be read, and is only added to: {error}")
            return
        self._file.close()
        self._file = SideFile(self._path, last_start, last_end)

    def row(self, row: dict[str, Any]) -> None:
        """Appends a row. Raises ValueError: the file has that step already."""
        if row["step"] <= self._last["step"]:
            raise ValueError(
                f"{self._path} has step {self._last['step']} already; step {row['step']} cannot "
                "follow it"
            )
        self._last = dict(row)
        self._file.append(_line(row))

    def amend(self, step: int, values: dict[str, Any]) -> None:
        """Adds values to the last row. Raises ValueError: that is another step's."""
        if step != self._last["step"] or step == 0:
            raise ValueError(
                f"{self._path}: the last row is step {self._last['step']}, nothing can be added "
                f"to {step}"
            )
        self._last |= values
        self._file.replace_last(_line(self._last))

    def close(self) -> None:
        self._file.close()


def _keep_whole(damaged: Path, path: Path) -> None:
    """Begins a file with the valid rows of a damaged one whose steps increase."""
    step = 0
    with damaged.open("rb") as file, path.open("xb") as target:
        for line in file:
            with suppress(InputError):
                for _, _, row in _rows([line], path):
                    if row["step"] > step:
                        step = row["step"]
                        target.write(line)


def _line(row: dict[str, Any]) -> bytes:
    finite = dict(row)
    for key, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            finite[key] = None
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


class NoMetrics:
    """The interface of `Metrics`, doing nothing: for all ranks but 0."""

    def say(self, text: str) -> None:
        """Prints a line, above the progress line if there is one."""

    def row(self, row: dict[str, Any]) -> None:
        """A step is done: takes its row, Python numbers and strings under the names in
        docs/metrics.md."""

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Takes the evaluation after `step`, whose row must have been the last."""

    def epoch(self, epoch: int, values: dict[str, Any]) -> None:
        """Epoch number `epoch`, counted from 1, is over: `loss`, and `accuracy` (a fraction) for a
        classifier."""

    def close(self) -> None:
        """Ends the progress line and the files; may be called twice."""


class Metrics(NoMetrics):
    """Hands each row, evaluation and epoch to the file, the terminal and the sinks."""

    def __init__(
        self,
        folder: Path,
        *,
        task: str,
        steps: int,
        step: int = 0,
        sinks: SinkThreads | None = None,
        console: Console | None = None,
    ) -> None:
        """`step`: rows after it are dropped. `sinks`: closed by the caller, once it is known how
        the run ends."""
        self._file = MetricsFile(folder / FILE)
        self._file.drop_after(step)
        self._tell = (lambda *_: None) if sinks is None else sinks.tell
        self._progress = open_progress(console or Console(), task=task, steps=steps)

    def say(self, text: str) -> None:
        self._progress.say(text)
        self._tell("event", "message", {"text": text})

    def row(self, row: dict[str, Any]) -> None:
        self._file.row(row)
        self._progress.row(row)
        self._tell("row", dict(row))

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        self._file.amend(step, values)
        self._progress.evaluation(step, values)
        self._tell("evaluation", step, dict(values))

    def epoch(self, epoch: int, values: dict[str, Any]) -> None:
        self._progress.epoch(epoch, values)
        self._tell("event", "epoch", {"epoch": epoch, **values})

    def close(self) -> None:
        self._progress.close()
        self._file.close()
