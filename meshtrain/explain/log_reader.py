"""The log reader: takes logs of any size, with progress bars, colours, garbage, gzipped, with many
ranks in one file.

It yields blocks of whole lines, so that a block with nothing of interest can be skipped at once.
"""

import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshtrain.errors import InputError
from meshtrain.job.watchdog.records import FAILURE_MARK

BLOCK = 1 << 20  # bytes per read
LINE_BYTES = 1 << 16  # bytes kept of a line that does not end within a block
LONGEST = 4000  # characters that are searched at once: longer lines are searched in pieces
OVERLAP = 500  # characters that two pieces share
GZIP = b"\x1f\x8b"
ENDINGS = (".log", ".out", ".err", ".txt", ".gz")  # of the files in a folder that are logs
NAMES = re.compile(r"(?:stdout|stderr|slurm-\d+|log)(?:\W|$)", re.IGNORECASE)

# Colours, cursor movements and window titles; and control characters.
CONTROL = re.compile(
    rb"\x1b(?:\[[0-?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b\n]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])"
    rb"|[\x00-\x08\x0e-\x1f\x7f]"
)

# What launchers and collectors put before a line: torchrun's and torch's rank, srun -l, kubectl,
# containerd.
PREFIX = re.compile(
    r"\s*(?:\[(?P<role>[A-Za-z_]{0,20}?)(?P<number>\d{1,7})(?:\|\d{1,7})?\]:|(?P<task>\d{1,7}): "
    r"|\[pod/[^\]\s]{1,200}\]|\d{4}-\d\d-\d\dT\S{1,40} (?:stdout|stderr) [FP]) ?"
)
INSIDE = re.compile(
    r"(?:\[|\d\) )Rank (\d{1,7})\]|^rank (\d{1,7}) on host |\bThis was rank (\d{1,7}) on host "
)
IN_NAME = re.compile(
    r"(?:rank|task|worker)[_.-]?(\d{1,7})"
    r"|(?:^|/)(\d{1,7})\.(?:out|err|log)$|\d(?<!-\d\d)[_.-](\d{1,7})\.(?:out|err|log)$"
)
# torchrun's
LOCAL = re.compile(r"/attempt_(?P<attempt>\d{1,6})/(?P<number>\d{1,7})/std(?:out|err)\.log$")
NODE = re.compile(r"(?:^|/)node[_.-]?(\d{1,7})/")

TIMES = (
    re.compile(
        r"\d{4}-(?P<month>\d\d)-(?P<day>\d\d)[T "
        r"_](?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:[.,]\d{1,9})?)"
    ),
    re.compile(
        r"\[?[IWEF](?P<month>\d{1,2})(?P<day>\d\d) "
        r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:\.\d{1,9})?)"
    ),
    re.compile(
        r"\b(?P<name>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2}) "
        r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:\.\d{1,9})?)"
    ),
)
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True)
class Log:
    """A file to read."""

    path: str
    # its writer, from its path: `rank 3`, `local rank 3`, `local rank 3 of node 1`
    rank: str | None = None
    # its folder, if the path has only a local rank; its lines may have the global one
    process: str | None = None
    attempt: int = 0  # torchrun's, from its path

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """Blocks of whole lines, each with the number of its first line. Raises InputError: it
        cannot be read."""
        if self.path == "-":
            with open(0, "rb", closefd=False) as stream:
                yield from _blocks(stream)
            return
        try:
            with _open(self.path) as stream:
                yield from _blocks(stream)
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror or error}") from error


def _open(path: str) -> io.BufferedIOBase:
    if os.path.isfile(path):  # a pipe can be read only once
        with open(path, "rb") as start:
            if start.read(len(GZIP)) == GZIP:
                return gzip.open(path)
    return open(path, "rb")


def _blocks(stream: io.BufferedIOBase) -> Iterator[tuple[int, bytes]]:
    number = 1
    rest = b""
    while data := _read(stream):
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end == 0:
            rest = (rest + data)[:LINE_BYTES]
            continue
        yield number, CONTROL.sub(b"", rest + data[:end])
        number += data.count(b"\n")
        rest = data[end:]
    if rest:
        yield number, CONTROL.sub(b"", rest)


def _read(stream: io.BufferedIOBase) -> bytes:
    try:
        return stream.read1(BLOCK)  # what is available: of a truncated gzip file, all up to its end
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return b""


def pieces(line: bytes) -> Iterator[str]:
    """The texts to search in a line: each state of a progress bar, and overlapping pieces of a long
    line. A job's own diagnosis is one piece: it is JSON, which may name thousands of ranks."""
    for part in line.split(b"\r"):
        if not part:
            continue
        text = part.decode("utf-8", errors="replace")
        if FAILURE_MARK in text[:LONGEST]:
            yield text
            continue
        for start in range(0, max(len(text) - OVERLAP, 1), LONGEST - OVERLAP):
            yield text[start : start + LONGEST]


def without_prefix(text: str) -> tuple[str, str | None]:
    """A line without the prefixes of launchers, and its writer: `rank 3`, `local rank 3`, or
    None."""
    rank = None
    for _ in range(4):
        prefix = PREFIX.match(text)
        if prefix is None:
            break
        if prefix["task"] is not None or prefix["role"] == "rank":
            rank = f"rank {int(prefix['task'] or prefix['number'])}"
        elif prefix["number"] is not None:
            rank = f"local rank {int(prefix['number'])}"
        text = text[prefix.end() :]
    inside = INSIDE.search(text[:300])
    if rank is None and inside is not None:
        rank = f"rank {int(next(filter(None, inside.groups())))}"
    return text, rank


def time_of(text: str) -> float | None:
    """When a line was written, if there is a time near its beginning: in seconds that order the
    lines of one year."""
    for form in TIMES:
        match = form.search(text[:120])
        if match is None:
            continue
        name = match.groupdict().get("name")
        if name is None:
            month = int(match["month"]) - 1
        elif name in MONTHS:
            month = MONTHS.index(name)
        else:
            continue
        days = month * 31 + int(match["day"])  # a month of 31 days keeps the order
        hours = days * 24 + int(match["h"])
        minutes = hours * 60 + int(match["m"])
        return minutes * 60 + float(match["s"].replace(",", "."))
    return None


def logs_of(paths: list[str]) -> list[Log]:
    """The logs among files and folders: of a folder, all logs below it. Raises InputError: there is
    no such file."""
    files: dict[str, None] = {}
    for path in paths:
        if os.path.isdir(path):
            files |= dict.fromkeys(_in_folder(path))
        elif path == "-" or os.path.exists(path):
            files[path] = None
        else:
            raise InputError(
                f"there is no log {path}: give files, the folder of a run, or - for standard input"
            )
    return [_log(path) for path in files]


def _in_folder(folder: str) -> list[str]:
    files = []
    for root, folders, names in os.walk(folder):
        # os.walk goes on with what is left of its list.
        folders[:] = sorted(
            name for name in folders if name != "checkpoints" and not name.startswith(".")
        )
        if os.path.basename(root) == "failures":
            # the last one only: the run has recovered from earlier ones
            newest_last = sorted(
                folders, key=lambda name: os.path.getmtime(os.path.join(root, name))
            )
            folders[:] = newest_last[-1:]
        for name in sorted(names):
            is_log = name.endswith(ENDINGS) or NAMES.match(name)
            path = Path(root, name)
            if is_log and name != "layout.txt" and path.is_file():
                files.append(str(path))
    return files


def _log(path: str) -> Log:
    local = LOCAL.search(path)
    if local is not None:
        rank = f"local rank {int(local['number'])}"
        # the last one: a folder above may be called node7, too
        nodes = NODE.findall(path[: local.start() + 1])
        if nodes:
            rank += f" of node {int(nodes[-1])}"
        return Log(path, rank, process=os.path.dirname(path), attempt=int(local["attempt"]))
    by_name = IN_NAME.search(path)
    if by_name is None:
        return Log(path)
    number = next(filter(None, by_name.groups()))
    return Log(path, f"rank {int(number)}")
