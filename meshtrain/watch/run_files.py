"""What a run's folder tells of it, read again as the run writes: rows of metrics.jsonl as columns,
and small files."""

import math
import os
import stat
import time
from array import array
from pathlib import Path
from typing import Any

from meshtrain.job.parsing import parse_json

SMALL = 8 * 2**20  # bytes of a file that is sent whole
AT_ONCE = 16 * 2**20  # bytes of metrics.jsonl that are read for one request: the next one reads on
LONGEST = 2**20  # bytes of a line; a longer one counts as a bad one
COLUMNS = 500  # the most fields that are shown: a row with ever new ones would be a column for each
LAST_STEP = 2**53  # beyond which a page cannot tell one step from the next
REMEMBERED = 4096  # bytes before the offset, by which a file that was cut is noticed
NOT_SHOWN = {"step", "samples_digest"}  # of a row


class RunFiles:
    """The folder of a run. Nothing outside of it is read, also not over a link."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.folder = folder.resolve()
        self.name = name or self.folder.name
        self._forget()

    def _forget(self) -> None:
        self.bad_lines = 0
        self._offset = 0  # up to which the file has been read
        self._last = b""  # the bytes before the offset
        self._in_long_line = False  # whether the offset is inside of a line that is too long
        self._left_out: set[str] = set()  # fields beyond the most columns
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._stride = 1
        self._means: dict[str, list[float | None]] = {}  # of the strides that are full

    def read_rows(self) -> None:
        """Adds the rows that were written since; all anew where the last one read is no more where
        it was, as a resume cuts the file and writes on."""
        descriptor = self._open("metrics.jsonl")
        if descriptor is None:
            return self._forget()
        with os.fdopen(descriptor, "rb") as file:
            # A file that was cut and written again has other bytes there.
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._forget()
                file.seek(0)
            end = self._offset + AT_ONCE
            while self._offset < end and (line := file.readline(LONGEST)):
                is_whole = line.endswith(b"\n")
                if not is_whole and len(line) < LONGEST:
                    break  # it is being written
                self._take(line, is_whole)
                self._offset += len(line)
                self._last = (self._last + line)[-REMEMBERED:]

    def _take(self, line: bytes, is_whole: bool) -> None:
        """Takes a line, or a part of one that is too long, of which nothing is read."""
        if self._in_long_line:
            self._in_long_line = not is_whole
        elif is_whole:
            self._add(line)
        else:
            self.bad_lines += 1
            self._in_long_line = True

    def _add(self, line: bytes) -> None:
        try:
            row = parse_json(line, most=LONGEST)
            step = int(row["step"])
            numbers = _numbers(row)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            self.bad_lines += 1
            return
        if abs(step) > LAST_STEP:
            self.bad_lines += 1
            return
        for name, number in numbers.items():
            column = self._column(name)
            if column is not None:
                column.append(number)
        self._steps.append(step)

    def _column(self, name: str) -> "array[float] | None":
        """The column of a field, filled up to the row before this one; None beyond the most
        columns."""
        if name not in self._columns:
            if len(self._columns) == COLUMNS:
                if len(self._left_out) < COLUMNS:
                    self._left_out.add(name)
                return None
            self._columns[name] = array("d")
        column = self._columns[name]
        column.extend([math.nan] * (len(self._steps) - len(column)))
        return column

    def rows(self, points: int) -> dict[str, Any]:
        """Columns of at most so many rows: each is the mean of as many neighbours as it takes, a
        power of two, so that means stay as they are while a run goes on; its step is their last.
        None where no neighbour has a value."""
        rows = len(self._steps)
        stride = 1
        while stride * points < rows:
            stride *= 2
        if stride != self._stride:
            self._stride = stride
            self._means = {}

        # A run of so many neighbours each, and at the end what is left.
        full, rest = divmod(rows, stride)
        columns = {}
        for name, column in self._columns.items():
            # The means of full runs are kept from one request to the next.
            known = self._means.setdefault(name, [])
            for i in range(len(known), full):
                known.append(_mean(column[i * stride : (i + 1) * stride]))
            columns[name] = list(known)
            if rest > 0:
                columns[name].append(_mean(column[full * stride :]))
        steps = []
        for start in range(0, rows, stride):
            last = min(start + stride, rows) - 1
            steps.append(self._steps[last])

        newest = {}
        for name, column in self._columns.items():
            if len(column) == rows:
                newest[name] = _finite(column[-1])
        return {"rows": rows, "stride": stride, "step": steps, "columns": columns, "newest": newest}

    def page_data(self, points: int) -> dict[str, Any]:
        """All that the page shows of the run."""
        self.read_rows()
        ended = self._json("exit.json")
        checkpoints = self._names("checkpoints")
        return {
            **self.rows(points),
            "name": self.name,
            "age_s": self._age() if ended is None else None,
            "bad_lines": self.bad_lines,
            "left_out": len(self._left_out),
            "exit": ended,
            "ranks": self._json("ranks.json"),
            "timeline": self._json("timeline.json"),
            "layout": (self._text("layout.txt") or "").partition("\n")[0],
            "events": self._events(),
            "checkpoints": [name for name in checkpoints if name.startswith("step_")],
            "failures": self._names("failures")[-20:],
        }

    def _age(self) -> int | None:
        """Seconds since the last row was written."""
        try:
            return round(time.time() - (self.folder / "metrics.jsonl").lstat().st_mtime)
        except OSError:
            return None

    def _names(self, folder: str) -> list[str]:
        """What lies in a folder of the run's, which may go away meanwhile."""
        path = self.folder / folder
        try:
            return [] if path.is_symlink() else sorted(os.listdir(path))
        except OSError:
            return []

    def _events(self) -> list[dict[str, Any]]:
        """Starts, checkpoints and ends of jobs, from goodput.jsonl."""
        events = []
        for line in (self._text("goodput.jsonl") or "").splitlines():
            try:
                row = parse_json(line, finite=True)
                kinds = [name for name in ("started", "saved", "end") if name in row]
                step = min(int(row["step"]), LAST_STEP)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                continue  # half of it was there, or it is none
            if kinds:
                kind = kinds[0]
                events.append({"kind": kind, "step": step, "value": row[kind]})
        return events[-200:]

    def _json(self, name: str) -> Any:
        text = self._text(name)
        try:
            return None if text is None else parse_json(text, finite=True)
        except ValueError:  # half of it was there
            return None

    def _text(self, name: str) -> str | None:
        descriptor = self._open(name)
        if descriptor is None:
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read(SMALL).decode(errors="replace")

    def _open(self, name: str) -> int | None:
        """A file of the folder, not of another one that a link names."""
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        return None


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """The fields of a row of which the page draws curves."""
    numbers = {}
    for name, value in row.items():
        # For Python, True is an int.
        if type(value) in (int, float) and name not in NOT_SHOWN:
            numbers[name] = float(value)
    return numbers


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: "array[float]") -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    # Six digits: a curve shows no more, and it is sent often.
    return float(f"{sum(finite) / len(finite):.6g}")
