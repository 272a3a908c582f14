"""Faults of checkpoints, and the one function that runs a row of a table of them.

Each row is about a run of 8 steps, which saves after every second one and has done 4. A fault is there at rest, before
the run is started again, or while that start loads or saves. The start ends as the row says; then the fault is over,
and the next start ends as a run to which nothing has happened.
"""

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
from meshtrain.checkpoint.directory import COMPLETE, LOCK, OWNER, complete_steps, complete_text, name_of
from meshtrain.checkpoint.manifest import MANIFEST, file_of
from meshtrain.cli import main as cli
from meshtrain.config.locate import model_file
from meshtrain.errors import InputError
from tests.checkpoint.going_on import Case, alone
from tests.checkpoint.kill import rows

SHARD = file_of(0)
OLDER, NEWER = name_of(2), name_of(4)
AT_REST, LOADING, SAVING = "at rest", "loading", "saving"


# The run --------------------------------------------------------------------------------------------------------------


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
        """Trains; asserts the exit status and returns all that was printed, and the message of an error."""
        options = (f"train.output={self.place / output}", *options)
        return self._ended(lambda: train_alone(self.config, options, **case), status)

    def command(self, *arguments: object, status: int = 0) -> str:
        """As `train`, for a command of `meshtrain`."""
        return self._ended(lambda: (cli.main([str(argument) for argument in arguments]), ""), status)

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
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=False)
        if mounted.returncode != 0:
            pytest.skip("no file system can be mounted here")
        self.mounted.callback(subprocess.run, ["umount", folder], check=True)


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """All that is in a folder. Locks and their owners do not count: whoever looks after a folder leaves one."""
    content: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            content[name] = os.readlink(path)
        elif path.name not in (LOCK, OWNER):
            content[name] = path.read_bytes() if path.is_file() else None
    return content


# Faults ---------------------------------------------------------------------------------------------------------------

# A fault damages files of a run, or patches functions until it is over; returns a list that grows when it is met.
Fault = Callable[[Run, pytest.MonkeyPatch], list | None]


def failing(function: str, error: int | BaseException, argument: str = "", times: int = 1000) -> Fault:
    """A function fails, with an errno or an exception, if its first argument (a path, a thread) has this text."""

    def fault(run: Run, patch: pytest.MonkeyPatch) -> list:
        plain = (
            open if function.endswith(".open") and not function.startswith("os.") else pkgutil.resolve_name(function)
        )
        met: list[str] = []

        def fail(*arguments: Any, **keywords: Any) -> Any:
            first = str(arguments[0])
            if argument not in first or len(met) == times:
                return plain(*arguments, **keywords)
            met.append(first)
            raise OSError(error, os.strerror(error), first) if isinstance(error, int) else error

        patch.setattr(function, fail, raising=False)
        return met

    return fault


def before(function: str, act: Callable[[Run], Any]) -> Fault:
    """Something happens when a function is called for the first time."""

    def fault(run: Run, patch: pytest.MonkeyPatch) -> list:
        plain = pkgutil.resolve_name(function)
        met: list[bool] = []

        def acting(*arguments: Any, **keywords: Any) -> Any:
            if not met:
                met.append(True)
                act(run)
            return plain(*arguments, **keywords)

        patch.setattr(function, acting)
        return met

    return fault


def both(first: Fault, second: Fault) -> Fault:
    def fault(run: Run, patch: pytest.MonkeyPatch) -> list | None:
        first(run, patch)
        return second(run, patch)

    return fault


def damaged(harm: Callable[[Path], object]) -> Fault:
    """Damage of the newest checkpoint."""

    def fault(run: Run, _: pytest.MonkeyPatch) -> None:
        harm(run.newest)

    return fault


def small_disk(run: Run, _: pytest.MonkeyPatch) -> None:
    """The checkpoints are on a disk with room for two."""
    saved = shutil.copytree(run.checkpoints, run.place / "saved")
    run.mount(run.checkpoints, "150k")
    shutil.copytree(saved, run.checkpoints, dirs_exist_ok=True)


def roomy(_: Run, patch: pytest.MonkeyPatch) -> None:
    """Room is found before a save; somebody else takes it meanwhile."""
    free = shutil.disk_usage("/")
    patch.setattr(commit, "disk_usage", lambda _: free)


def take(folder: Path) -> None:
    """Takes a folder as a job on another host does."""
    (folder / "other").write_bytes(b"0123 process 7 on host b\n")
    (folder / "other").replace(folder / OWNER)


# Damage of a checkpoint -----------------------------------------------------------------------------------------------


def write_manifest(checkpoint: Path, text: bytes) -> None:
    """Another manifest, and a COMPLETE that fits to it, as somebody would write them who means harm."""
    (checkpoint / MANIFEST).write_bytes(text)
    (checkpoint / COMPLETE).write_text(complete_text(hashlib.sha256(text).hexdigest()))


def seal(checkpoint: Path, **changes: Any) -> None:
    """Makes manifest and COMPLETE agree with the files again."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    data = (checkpoint / SHARD).read_bytes()
    manifest["files"] = {SHARD: {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}}
    write_manifest(checkpoint, json.dumps(manifest | changes).encode())


def flip_a_bit(checkpoint: Path) -> None:
    """In the first tensor, which is one of the model's."""
    data = bytearray((checkpoint / SHARD).read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 500] ^= 4
    (checkpoint / SHARD).write_bytes(data)


def link(name: str) -> Callable[[Path], None]:
    """A link in the place of a file, to the file outside."""

    def harm(checkpoint: Path) -> None:
        outside = checkpoint.parents[2] / "outside"
        (checkpoint / name).rename(outside)
        (checkpoint / name).symlink_to(outside)

    return harm


def huge_header(checkpoint: Path) -> None:
    data = (checkpoint / SHARD).read_bytes()
    (checkpoint / SHARD).write_bytes(struct.pack("<Q", 2**60) + data[8:])
    seal(checkpoint)


class Harm:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def pickled(checkpoint: Path) -> None:
    size = (checkpoint / SHARD).stat().st_size
    harm = pickle.dumps(Harm(checkpoint.parents[2] / "was_run"))
    (checkpoint / SHARD).write_bytes(harm.ljust(size, b"\0"))  # nobody reads on behind its end
    seal(checkpoint)


def pipe(checkpoint: Path) -> None:
    (checkpoint / SHARD).unlink()
    os.mkfifo(checkpoint / SHARD)


# The driver -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A fault, when it is there, and how the start that meets it ends."""

    fault: Fault
    when: str
    says: str  # what the start prints, or the error; with names of a run's paths, such as {newest}
    status: int = 0
    steps: tuple[int, ...] = (4, 6, 8)  # the complete checkpoints afterwards
    options: tuple[str, ...] = ()


def check(row: Row, run: Run) -> None:
    with run.mounted:
        with pytest.MonkeyPatch.context() as patch:
            is_met = row.fault(run, patch)
            if row.when == AT_REST:
                damage = tree(run.newest)
                is_candidate = 4 in run.steps()
                refused_by_name(row, run)
            options = ("train.steps=6",) if row.when == SAVING else ()
            printed = run.train(*options, *row.options, status=row.status)
        assert is_met is None or is_met, "the fault was never met"
        assert run.steps() == list(row.steps)
        assert not list(run.checkpoints.glob(".step_*")), "an unfinished checkpoint is left"
    asides = list(run.checkpoints.glob(f"{NEWER}.aside-*"))
    if row.when != AT_REST or is_candidate:
        assert row.says.format(**vars(run)) in printed, printed
    if row.when != AT_REST:
        assert not asides, "what is intact was set aside"
    elif row.status == 0:
        assert f"goes on from {run.checkpoints / OLDER}: step 2" in printed
        assert [tree(aside) for aside in asides] == [damage], "it stays for whoever wants to look at it"
    else:
        return
    run.train()
    assert run.rows() == run.undisturbed()
    assert "intact" in run.command("checkpoint", "verify", run.folder)


def refused_by_name(row: Row, run: Run) -> None:
    """Whoever names a damaged checkpoint is told what is wrong with it, nothing is changed, and nothing is run."""
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
