"""Faults of checkpoints, and the one function that runs a row of a table of them.

Each row is about a run of 8 steps, which saves after every second one and has done 4. A fault is
there at rest, before the run is started again, or while that start loads or saves. The start ends
as the row says; then the fault is over, and the next start ends as a run to which nothing has
happened.
"""

import builtins
import errno
import hashlib
import json
import os
import pickle
import pkgutil
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshtrain.checkpoint import commit, load_weights
from meshtrain.checkpoint.directory import (
    COMPLETE,
    complete_steps,
    complete_text,
    name_of,
)
from meshtrain.checkpoint.folder_lock import LOCK, OWNER
from meshtrain.checkpoint.manifest import MANIFEST, file_of
from meshtrain.cli import main as cli
from meshtrain.errors import InputError
from meshtrain.job.locate import model_file
from tests.checkpoint.by_hand import data_of, flip
from tests.checkpoint.going_on import Case, alone
from tests.checkpoint.kill import rows

SHARD = file_of(0)
OLDER, NEWER = name_of(2), name_of(4)


# The run ------------------------------------------------------------------------------------------


def train_alone(config: Path, options: Sequence[str], **case: Any) -> tuple[int, str]:
    """Trains in this process; the exit status, and the message if the run was refused or failed."""
    result = alone(Case(str(config), tuple(options), **case))
    return result["status"], result.get("error", "")


class Run:
    """A run in a folder, and what a user can start."""

    def __init__(self, config: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.config, self.place, self._capsys = config, place, capsys
        self.folder = place / "run"
        self.checkpoints = self.folder / "checkpoints"
        self.newest = self.checkpoints / NEWER
        self.mounted = ExitStack()

    def train(self, *options: str, output: str = "run", status: int = 0, **case: Any) -> str:
        """Trains; asserts the exit status and returns all that was printed, and the message of an
        error."""
        options = (f"train.output={self.place / output}", *options)
        return self._ended(lambda: train_alone(self.config, options, **case), status)

    def command(self, *arguments: object, status: int = 0) -> str:
        """As `train`, for a command of `meshtrain`."""
        return self._ended(
            lambda: (cli.main([str(argument) for argument in arguments]), ""), status
        )

    def _ended(self, start: Callable[[], tuple[int, str]], status: int) -> str:
        self._capsys.readouterr()
        found, error = start()
        printed = "".join(self._capsys.readouterr()) + error
        assert found == status, printed
        return printed

    def steps(self) -> list[int]:
        return complete_steps(self.checkpoints)

    def rows(self, output: str = "run") -> list[tuple]:
        return rows(self.place / output)

    def undisturbed(self) -> list[tuple]:
        return rows(self.config.parent / "8 steps")

    def mount(self, folder: Path, size: str) -> None:
        """Mounts an empty file system of this size."""
        folder.mkdir(exist_ok=True)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=False
        )
        if mounted.returncode != 0:
            pytest.skip("no file system can be mounted here")
        self.mounted.callback(subprocess.run, ["umount", folder], check=True)


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """All that is in a folder. Locks and their owners do not count: whoever looks after a folder
    leaves one."""
    content: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            content[name] = os.readlink(path)
        elif path.name not in (LOCK, OWNER):
            content[name] = path.read_bytes() if path.is_file() else None
    return content


# Faults -------------------------------------------------------------------------------------------


def failing(
    _: Run | None,
    patch: pytest.MonkeyPatch,
    function: str,
    error: str,
    argument: str = "",
    times: int = 1000,
) -> list[str]:
    """A function fails, with an errno or an exception, if its first argument (a path, a thread) has
    this text; returns the arguments with which it has."""
    module, _, name = function.rpartition(".")
    plain = getattr(pkgutil.resolve_name(module), name, getattr(builtins, name, None))
    met: list[str] = []

    def fail(*arguments: Any, **keywords: Any) -> Any:
        first = str(arguments[0]) if arguments else ""
        if argument not in first or len(met) == times:
            return plain(*arguments, **keywords)
        met.append(first)
        number = getattr(errno, error, None)
        raise (
            getattr(builtins, error)(error)
            if number is None
            else OSError(number, os.strerror(number), first)
        )

    patch.setattr(function, fail, raising=False)
    return met


def taken(run: Run, patch: pytest.MonkeyPatch, function: str) -> None:
    """A job on another host takes the run's folders when a function is called."""
    plain = pkgutil.resolve_name(function)

    def taking(*arguments: Any) -> Any:
        for folder in (run.folder, run.checkpoints):
            take(folder)
        return plain(*arguments)

    patch.setattr(function, taking)


def take(folder: Path) -> None:
    (folder / "other").write_bytes(b"0123 process 7 on host b\n")
    (folder / "other").replace(folder / OWNER)


def small_disk(run: Run, _: pytest.MonkeyPatch) -> None:
    """The checkpoints are on a disk with room for two."""
    saved = shutil.copytree(run.checkpoints, run.place / "saved")
    run.mount(run.checkpoints, "150k")
    shutil.copytree(saved, run.checkpoints, dirs_exist_ok=True)


def roomy(_: Run, patch: pytest.MonkeyPatch) -> None:
    """Room is found before a save; somebody else takes it meanwhile."""
    free = shutil.disk_usage("/")
    patch.setattr(commit, "disk_usage", lambda _: free)


def occupied(run: Run, _: pytest.MonkeyPatch) -> None:
    (run.checkpoints / name_of(6)).mkdir()


# Damage of the newest checkpoint ------------------------------------------------------------------


def write_manifest(run: Run, _: pytest.MonkeyPatch, text: str) -> None:
    """Another manifest, and a COMPLETE that fits to it, as somebody would write them who means
    harm."""
    data = text.encode("latin-1")
    (run.newest / MANIFEST).write_bytes(data)
    (run.newest / COMPLETE).write_text(complete_text(hashlib.sha256(data).hexdigest()))


def seal(run: Run, patch: pytest.MonkeyPatch, changes: dict[str, Any] | None = None) -> None:
    """Makes manifest and COMPLETE agree with the files again."""
    manifest = json.loads((run.newest / MANIFEST).read_text())
    data = (run.newest / SHARD).read_bytes()
    manifest["files"] = {SHARD: {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}}
    write_manifest(run, patch, json.dumps(manifest | (changes or {})))


def damage(checkpoint: Path) -> None:
    """Flips a bit in the first tensor, which is one of the model's."""
    shard = checkpoint / SHARD
    flip(shard, 8 * (data_of(shard) + 500))


def flip_a_bit(run: Run, _: pytest.MonkeyPatch) -> None:
    damage(run.newest)


def truncate(run: Run, _: pytest.MonkeyPatch, file: str, size: int) -> None:
    os.truncate(run.newest / file, size)


def append(run: Run, _: pytest.MonkeyPatch, file: str, text: str) -> None:
    with (run.newest / file).open("a") as end:
        end.write(text)


def delete(run: Run, _: pytest.MonkeyPatch, file: str) -> None:
    (run.newest / file).unlink()


def replace(run: Run, _: pytest.MonkeyPatch, file: str, checkpoint: str) -> None:
    shutil.copy(run.checkpoints / checkpoint / file, run.newest / file)


def link(run: Run, _: pytest.MonkeyPatch, file: str) -> None:
    """A link in the place of a file, to the file outside."""
    (run.newest / file).rename(run.place / "outside")
    (run.newest / file).symlink_to(run.place / "outside")


def pipe(run: Run, _: pytest.MonkeyPatch, file: str) -> None:
    (run.newest / file).unlink()
    os.mkfifo(run.newest / file)


def huge_header(run: Run, _: pytest.MonkeyPatch) -> None:
    data = (run.newest / SHARD).read_bytes()
    (run.newest / SHARD).write_bytes(struct.pack("<Q", 2**60) + data[8:])


class Harm:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def pickled(run: Run, _: pytest.MonkeyPatch) -> None:
    size = (run.newest / SHARD).stat().st_size
    harm = pickle.dumps(Harm(run.place / "was_run"))
    (run.newest / SHARD).write_bytes(harm.ljust(size, b"\0"))  # nobody reads on behind its end


# The driver ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Faults, when they are there, and how the start that meets them ends."""

    faults: Sequence[Sequence[Any]]  # each a function of this module and its arguments
    when: str  # "at rest", before that start, "loading" or "saving"
    says: str  # what the start prints, or the error; with names of a run's paths, such as {newest}
    status: int = 0
    steps: Sequence[int] = (4, 6, 8)  # the complete checkpoints afterwards
    options: Sequence[str] = ()


def check(row: Row, run: Run) -> None:
    with run.mounted:
        with pytest.MonkeyPatch.context() as patch:
            met = [globals()[name](run, patch, *arguments) for name, *arguments in row.faults]
            if row.when == "at rest":
                damage = tree(run.newest)
                is_candidate = 4 in run.steps()
                refused_by_name(row, run)
            options = ("train.steps=6",) if row.when == "saving" else ()
            printed = run.train(*options, *row.options, status=row.status)
        assert [] not in met, "a fault was never met"
        assert run.steps() == list(row.steps), printed
        assert not list(run.checkpoints.glob(".step_*")), "an unfinished checkpoint is left"
    asides = list(run.checkpoints.glob(f"{NEWER}.aside-*"))
    if row.when != "at rest" or is_candidate:
        assert row.says.format(**vars(run)) in printed, printed
    if row.when != "at rest":
        assert not asides, "what is intact was set aside"
    elif row.status == 0:
        assert f"goes on from {run.checkpoints / OLDER}: step 2" in printed
        assert [tree(aside) for aside in asides] == [damage], (
            "it stays for whoever wants to look at it"
        )
    else:
        return
    run.train()
    assert run.rows() == run.undisturbed()
    assert "intact" in run.command("checkpoint", "verify", run.folder)


def refused_by_name(row: Row, run: Run) -> None:
    """Whoever names a damaged checkpoint is told what is wrong with it, nothing is changed, and
    nothing is run."""
    content = tree(run.place)
    is_newer_format = row.status == 2
    module = model_file(str(run.config.parent / "model.py"))
    with pytest.raises(InputError) as refused:
        load_weights(run.newest, module.Model(module.Config()))
    for printed in (
        str(refused.value),
        run.train(f"checkpoint.resume={run.newest}", status=2),
        run.command("checkpoint", "verify", run.newest, status=2 if is_newer_format else 1),
        run.command("export", run.newest, run.place / "exported", "--dtype", "float32", status=2),
    ):
        assert row.says in printed
        assert str(run.newest) in printed
        assert tree(run.place) == content
    assert row.says in run.train(f"model.weights={run.newest}", output="new", status=2)
    assert not (run.place / "new/metrics.jsonl").exists()
    assert not (run.place / "was_run").exists()
