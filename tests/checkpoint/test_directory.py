"""A folder of checkpoints: what appears in it, when, and nothing outside of it is ever touched.

Damaged checkpoints are rows of test_faults.py.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint.directory import (
    COMPLETE,
    complete_steps,
    name_of,
    open_manifest,
    step_of,
    steps,
)
from meshtrain.checkpoint.manifest import MANIFEST
from meshtrain.errors import DamagedError
from tests.checkpoint.by_hand import write_checkpoint

SHARD = "rank_00001.safetensors"


def saved(where: Path, step: int = 100) -> Path:
    return write_checkpoint(
        where, {"model.a": torch.arange(12.0).view(4, 3)}, step=step, sizes={"dp_shard": 2}
    )


def test_names_and_steps() -> None:
    for step in (0, 7, 9_999_999, 10_000_000):
        assert step_of(name_of(step)) == step
    for name in (
        "step_100",
        "step_00000100",
        "step_٠٠٠٠١٠٠",
        "step_0000100.aside-1",
        "step_-000100",
        "step_0000100\n",
    ):
        assert step_of(name) is None


def test_a_checkpoint_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which things reach the disk, a kill after any of them leaves no half
    checkpoint with a name."""
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(file: int) -> None:
        order.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{file}')).name}")
        fsync(file)

    def renamed(path: Path, to: Path) -> Path:
        order.append(f"rename {path.name}")
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    saved(tmp_path, 200)
    order.clear()
    checkpoint = saved(tmp_path)
    unfinished = ".step_0000100.tmp"
    assert order == [
        "fsync rank_00000.safetensors",
        f"fsync {SHARD}",
        f"fsync .{MANIFEST}.tmp",
        f"fsync {unfinished}",
        f"fsync .{COMPLETE}.tmp",
        f"fsync {unfinished}",
        f"rename {unfinished}",
        f"fsync {tmp_path.name}",
    ]
    assert checkpoint == tmp_path / name_of(100)
    manifest, digest = open_manifest(checkpoint)
    assert (manifest.step, complete_steps(tmp_path)) == (100, [100, 200])
    assert sorted(os.listdir(checkpoint)) == sorted([COMPLETE, MANIFEST, *manifest.files])
    assert json.loads((checkpoint / COMPLETE).read_text()) == {"manifest_sha256": digest}


def test_what_is_not_finished_is_no_checkpoint(tmp_path: Path) -> None:
    """Killed before COMPLETE, before the rename, or while it was removed: the next start clears it
    away."""
    complete = saved(tmp_path)
    unfinished = folder.begin(tmp_path, 200)
    for path in complete.iterdir():
        (unfinished / path.name).write_bytes(path.read_bytes())
    saved(tmp_path, 300).rename(removed := tmp_path / ".step_0000300.removed")
    assert complete_steps(tmp_path) == [100]
    assert sorted(folder.clear_unfinished(tmp_path)) == [unfinished, removed]
    assert os.listdir(tmp_path) == [complete.name]
    assert (
        complete_steps(tmp_path / "nothing"),
        folder.clear_unfinished(tmp_path / "nothing"),
    ) == ([], [])
    folder.begin(tmp_path, 200).joinpath("rest").write_text("of an earlier try")
    assert os.listdir(folder.begin(tmp_path, 200)) == []
    folder.abandon(tmp_path, 200)
    folder.abandon(tmp_path, 200)
    assert os.listdir(tmp_path) == [complete.name]


def test_what_is_in_the_way_is_renamed_and_said(tmp_path: Path) -> None:
    first = saved(tmp_path)
    (first / COMPLETE).unlink()
    saved(tmp_path)
    assert (tmp_path / "step_0000100.aside-1" / SHARD).is_file()
    text = (first / MANIFEST).read_text()
    unfinished = folder.begin(tmp_path, 100)
    for name in json.loads(text)["files"]:
        (unfinished / name).write_bytes((first / name).read_bytes())
    lines: list[str] = []
    folder.finish(tmp_path, 100, text, lines.append)
    assert lines == [f"{first} was in the way of a new checkpoint and is step_0000100.aside-2 now"]
    assert complete_steps(tmp_path) == [100]
    open_manifest(first)
    # it may have any name that is not another step's
    open_manifest(first.rename(tmp_path / "best"))


def test_a_manifest_of_files_that_are_not_there_makes_no_checkpoint(tmp_path: Path) -> None:
    text = (saved(tmp_path) / MANIFEST).read_text()
    unfinished = folder.begin(tmp_path, 200)
    with pytest.raises(DamagedError, match=r"rank_00000\.safetensors: is missing"):
        folder.finish(tmp_path, 200, text)
    assert not (unfinished / COMPLETE).exists()
    assert complete_steps(tmp_path) == [100]


def test_removing_touches_what_links_lead_to_as_little_as_reading(tmp_path: Path) -> None:
    other = saved(tmp_path / "other")
    place = tmp_path / "checkpoints"
    place.mkdir()
    (place / "step_0000100").symlink_to(other)
    (place / ".step_0000200.tmp").symlink_to(other)
    mine = saved(place, 300)
    (mine / "more").symlink_to(other)
    assert (steps(place), complete_steps(place)) == ([300], [300])
    folder.clear_unfinished(place)
    folder.remove(mine)
    assert os.listdir(place) == ["step_0000100"]
    open_manifest(other)
