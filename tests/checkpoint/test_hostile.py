"""Checkpoints that are damaged, made up or in the way, through everything that a user can start.

Each time there is a clear error or an older checkpoint is taken, what is there stays as it is, and nothing is run.
"""

import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any

import pytest

import meshtrain.run.results
import meshtrain.run.step_logger
import meshtrain.train
from meshtrain.checkpoint import load_weights
from meshtrain.checkpoint.directory import complete_steps, lock_folder
from meshtrain.cli import main as cli
from meshtrain.config.locate import model_file
from meshtrain.errors import InputError
from meshtrain.job.signals import Signals
from meshtrain.metrics.logger import read
from tests.checkpoint.going_on import small_run

SHARD, MANIFEST, COMPLETE = "rank_00000.safetensors", "manifest.json", "COMPLETE"
OLDER, NEWER = "step_0000002", "step_0000004"


# What can be wrong --------------------------------------------------------------------------------------------------


def seal(checkpoint: Path, change: Callable[[dict[str, Any]], Any] = lambda manifest: None) -> None:
    """Makes manifest and COMPLETE agree with the files again, as somebody would who means harm."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    data = (checkpoint / SHARD).read_bytes()
    manifest["files"] = {SHARD: {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}}
    change(manifest)
    text = json.dumps(manifest)
    (checkpoint / MANIFEST).write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / COMPLETE).write_text(json.dumps({"manifest_sha256": digest}, separators=(",", ":")) + "\n")


def flip_a_bit(checkpoint: Path) -> None:
    data = bytearray((checkpoint / SHARD).read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 500] ^= 4  # of the first tensor, which is one of the model's
    (checkpoint / SHARD).write_bytes(data)


def link_out(checkpoint: Path) -> None:
    outside = checkpoint.parent.parent / "outside.safetensors"
    (checkpoint / SHARD).rename(outside)
    (checkpoint / SHARD).symlink_to(outside)


def name_a_file_outside(checkpoint: Path) -> None:
    (checkpoint.parent.parent / "x").write_bytes((checkpoint / SHARD).read_bytes())
    seal(checkpoint, lambda manifest: manifest.update(files={"../../x": manifest["files"][SHARD]}))


def huge_header(checkpoint: Path) -> None:
    data = (checkpoint / SHARD).read_bytes()
    (checkpoint / SHARD).write_bytes(struct.pack("<Q", 2**60) + data[8:])
    seal(checkpoint)


class Harm:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.marker, "w")


def pickled(checkpoint: Path) -> None:
    size = (checkpoint / SHARD).stat().st_size
    harm = pickle.dumps(Harm(str(checkpoint.parent.parent / "was_run")))
    (checkpoint / SHARD).write_bytes(harm.ljust(size, b"\0"))  # nobody reads on behind its end
    seal(checkpoint)


def of_another_step(checkpoint: Path) -> None:
    shutil.copy(checkpoint.parent / OLDER / SHARD, checkpoint / SHARD)


def pipe(checkpoint: Path) -> None:
    (checkpoint / SHARD).unlink()
    os.mkfifo(checkpoint / SHARD)


@dataclass(frozen=True)
class Case:
    """What is done to a checkpoint, and what every error then says."""

    harm: Callable[[Path], Any]
    says: str
    of_a_newer_format: bool = False


CASES = {
    "a flipped bit": Case(flip_a_bit, f"{SHARD}: model.embed.weight: its bytes 0 to 8,192 are not those"),
    "a truncated shard": Case(lambda path: os.truncate(path / SHARD, 9999), f"{SHARD}: has 9,999 bytes;"),
    "an empty shard": Case(lambda path: os.truncate(path / SHARD, 0), f"{SHARD}: has 0 bytes;"),
    "a missing shard": Case(lambda path: (path / SHARD).unlink(), f"{SHARD}: is missing"),
    "an empty manifest": Case(lambda path: os.truncate(path / MANIFEST, 0), f"{MANIFEST}: is empty"),
    "a changed manifest": Case(lambda path: (path / MANIFEST).write_text("{}"), "do not fit together"),
    "no manifest": Case(lambda path: (path / MANIFEST).unlink(), f"{MANIFEST}: is missing"),
    "a manifest that names ../../x": Case(name_a_file_outside, "'../../x'"),
    "a shard that is a link": Case(link_out, f"{SHARD}: is a link"),
    "a header of 2^60 bytes": Case(huge_header, "its header would have 1,152,921,504,606,846,976 bytes"),
    "no COMPLETE": Case(lambda path: (path / COMPLETE).unlink(), "was never written to its end"),
    "a newer format": Case(
        lambda path: seal(path, lambda manifest: manifest.update(format=3)), "format 3, and this meshtrain", True
    ),
    "a pickle": Case(pickled, f"{SHARD}: "),
    "a shard of another step": Case(of_another_step, f"{SHARD}: its header or its checksums are not those"),
    "a pipe": Case(pipe, f"{SHARD}: is no file"),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


# What a user can start ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


class Desk:
    """A user with a run of 4 steps, which saved after the second and at the end."""

    def __init__(self, config: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.config, self.folder, self.capsys = config, folder, capsys
        self.run = folder / "run"
        self.newer = self.run / "checkpoints" / NEWER

    def train(self, *overrides: str, output: str = "run") -> Ended:
        """`python -m meshtrain.train`, in this process."""
        arguments = [str(self.config), f"train.output={self.folder / output}", *overrides]
        return self.ended(lambda: meshtrain.train.main(arguments, Signals()))

    def meshtrain(self, *arguments: object) -> Ended:
        return self.ended(lambda: cli.main([str(each) for each in arguments]))

    def ended(self, command: Callable[[], int]) -> Ended:
        self.capsys.readouterr()
        try:
            status = command()
        except SystemExit as error:
            status = int(error.code or 0)
        return Ended(status, *self.capsys.readouterr())


@pytest.fixture(scope="module", autouse=True)
def _quickly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshtrain.run.step_logger, "sample_flops", lambda *_: (None, "FLOPs are not counted"))
        patch.setattr(meshtrain.run.step_logger, "peak_flops", lambda *_: (1.0, "a peak of 1 FLOP/s"))
        patch.setattr(meshtrain.run.results, "plot_loss", lambda *_: "no picture is drawn")
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The config, a run of 4 steps, and one of 6 that nothing happened to."""
    config = small_run(tmp_path_factory.mktemp("small"))
    text = config.read_text().replace("warmup_steps: 2", "warmup_steps: 2, schedule: constant")
    text = text.replace("every: 4", "every: 2").replace("seq_len: 32", "seq_len: 32, workers: 0")
    config.write_text(text.replace("steps: 8", "steps: 6"))
    found = {"config": config}
    for name, steps in (("four", 4), ("six", 6)):
        found[name] = config.parent / name
        arguments = [str(config), f"train.steps={steps}", f"train.output={found[name]}"]
        assert meshtrain.train.main(arguments, Signals()) == 0
    return found


@pytest.fixture
def desk(made: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    shutil.copytree(made["four"], tmp_path / "run")
    return Desk(made["config"], tmp_path, capsys)


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """All that is in a folder. Locks and their owners are none of it: whoever looks after a folder leaves one."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.name not in (".lock", ".owner"):
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read(run / "metrics.jsonl")]


# All of it ----------------------------------------------------------------------------------------------------------


@EACH
def test_latest_takes_the_older_one_and_loses_nothing(case: Case, desk: Desk, made: dict[str, Path]) -> None:
    case.harm(desk.newer)
    before = tree(desk.folder)
    damaged = tree(desk.newer)
    ended = desk.train()
    if case.of_a_newer_format:  # what is newer than this program is not judged by it
        assert (ended.status, case.says in ended.err, tree(desk.folder)) == (2, True, before)
        return
    assert ended.status == 0, ended.err
    assert f"goes on from {desk.newer.parent / OLDER}: step 2" in ended.out
    if case is not CASES["no COMPLETE"]:  # which is no checkpoint for any reader
        assert f"damaged: {desk.newer}/" in ended.out
        assert case.says in ended.out
    aside = desk.newer.with_name(f"{NEWER}.aside-1")
    assert aside.name in ended.out
    assert tree(aside) == damaged, "what is damaged stays for whoever wants to look at it"
    assert complete_steps(desk.newer.parent) == [2, 4, 6]
    assert losses(desk.run) == losses(made["six"])
    assert desk.meshtrain("checkpoint", "verify", desk.run).status == 0
    assert not (desk.folder / "was_run").exists()


@EACH
def test_whoever_names_it_is_told_and_nothing_is_changed(case: Case, desk: Desk) -> None:
    case.harm(desk.newer)
    before = tree(desk.folder)

    def refused(ended: Ended, status: int = 2) -> None:
        assert ended.status == status, ended
        assert case.says in (ended.err if status == 2 else ended.out), ended
        assert str(desk.newer) in ended.err + ended.out
        assert tree(desk.folder) == before

    refused(desk.train(f"checkpoint.resume={desk.newer}"))
    refused(desk.meshtrain("checkpoint", "verify", desk.newer), 2 if case.of_a_newer_format else 1)
    refused(desk.meshtrain("export", desk.newer, desk.folder / "exported", "--dtype", "float32"))
    module = model_file(str(desk.config.parent / "model.py"))
    with pytest.raises(InputError) as caught:
        load_weights(desk.newer, module.Model(module.Config()))
    refused(Ended(2, "", str(caught.value)))
    assert not (desk.folder / "was_run").exists()


@EACH
def test_no_new_run_starts_from_it(case: Case, desk: Desk) -> None:
    case.harm(desk.newer)
    before = tree(desk.run)
    ended = desk.train(f"model.weights={desk.newer}", "train.steps=2", output="new")
    assert ended.status == 2
    assert case.says in ended.err
    assert str(desk.newer) in ended.err
    assert tree(desk.run) == before
    assert not (desk.folder / "new" / "metrics.jsonl").exists()


def test_a_run_that_goes_on_does_not_ask_for_the_weights_that_it_began_with(desk: Desk) -> None:
    shutil.copytree(desk.newer, desk.folder / NEWER)
    begun = (f"model.weights={desk.folder / NEWER}", "train.steps=2")
    assert desk.train(*begun, output="new").status == 0
    first = read(desk.folder / "new" / "metrics.jsonl")[0]["loss"]
    assert first < losses(desk.run)[0] - 0.01, "it starts with what the other run had learned"
    flip_a_bit(desk.folder / NEWER)
    assert desk.train(*begun, "train.steps=3", output="new").status == 0
    assert desk.train(*begun, output="another").status == 2


def test_where_nothing_is_whole_nothing_begins_anew(desk: Desk) -> None:
    flip_a_bit(desk.newer)
    flip_a_bit(desk.newer.parent / OLDER)
    before = tree(desk.folder)
    ended = desk.train()
    assert ended.status == 2
    assert "no checkpoint is whole that this run could go on from" in ended.err
    assert ended.err.count(f"{SHARD}: ") == 2
    assert tree(desk.folder) == before


def test_a_config_that_contradicts_the_checkpoint(desk: Desk) -> None:
    before = tree(desk.folder)
    ended = desk.train("model.vocab_size=300", "train.seed=3")
    assert ended.status == 2
    assert "model.vocab_size: 256 -> 300" in ended.err
    assert "train.seed: 0 -> 3" in ended.err
    assert tree(desk.folder) == before


# Folders that do not do what they should ----------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for two checkpoints."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=150k", "none", str(place)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_a_full_disk_costs_no_step_and_no_earlier_checkpoint(
    in_the_middle: bool, desk: Desk, disk: Path, made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_the_middle:  # somebody else fills it after the room was checked
        free = disk_usage(desk.folder)
        monkeypatch.setattr("meshtrain.checkpoint.commit.disk_usage", lambda path: free)
    place = ["train.steps=6", f"checkpoint.path={disk}", "checkpoint.keep_last=9"]
    ended = desk.train(*place, output="full")
    assert ended.status == 1
    assert "6 steps of 6 are done and not saved: " in ended.err
    says = f"{disk}/.step_0000006.tmp/{SHARD}: No space left on device" if in_the_middle else f"{disk} has "
    assert says in ended.err
    assert "loss" in read(desk.folder / "full" / "metrics.jsonl")[-1]
    assert complete_steps(disk) == [2, 4]
    assert desk.meshtrain("checkpoint", "verify", disk).status == 0
    assert not [path.name for path in disk.iterdir() if path.name.endswith(".tmp")]
    shutil.rmtree(disk / OLDER)
    assert desk.train(*place, output="full").status == 0
    assert losses(desk.folder / "full") == losses(made["six"])


def test_a_read_only_folder_can_be_read(desk: Desk, disk: Path) -> None:
    shutil.copytree(desk.newer, disk / NEWER)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    ended = desk.train(f"checkpoint.path={disk}", output="new")
    assert ended.status == 2
    assert f"the folder {disk} cannot be used (Read-only file system)" in ended.err
    assert "name another one with checkpoint.path=FOLDER" in ended.err
    ended = desk.train(f"train.output={disk / 'run'}")
    assert ended.status == 2
    assert "Read-only file system" in ended.err
    assert desk.meshtrain("checkpoint", "verify", disk).status == 0
    assert desk.meshtrain("export", disk, desk.folder / "exported").status == 0
    assert desk.meshtrain("export", disk, disk / "exported").status == 2
    assert desk.train(f"checkpoint.resume={disk / NEWER}", output="new").status == 0


def test_two_runs_on_one_folder(desk: Desk, tmp_path: Path) -> None:
    checkpoints = desk.run / "checkpoints"
    for folder, output in ((desk.run, "run"), (checkpoints, "other")):
        with lock_folder(folder):
            before = tree(desk.run)
            ended = desk.train(f"checkpoint.path={checkpoints}", output=output)
            assert ended.status == 2
            assert f"the folder {folder} is in use by process {os.getpid()} on host" in ended.err
            assert desk.meshtrain("checkpoint", "verify", desk.run).status == 0
            assert desk.meshtrain("export", desk.run, tmp_path / "exported").status == 0
            assert tree(desk.run) == before
