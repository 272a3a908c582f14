"""A folder of checkpoints: what appears in it, when, and what is refused; nothing outside of it is ever touched."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint.directory import COMPLETE, complete_steps, lock_folder, name_of, open_manifest, step_of, steps
from meshtrain.checkpoint.manifest import MANIFEST, MAX_BYTES
from meshtrain.errors import DamagedError, InputError
from tests.checkpoint.by_hand import write_checkpoint

SHARD = "rank_00001.safetensors"


def saved(where: Path, step: int = 100) -> Path:
    return write_checkpoint(where, {"model.a": torch.arange(12.0).view(4, 3)}, step=step, sizes={"dp_shard": 2})


def test_names_and_steps() -> None:
    for step in (0, 7, 9_999_999, 10_000_000):
        assert step_of(name_of(step)) == step
    for name in ("step_100", "step_00000100", "step_٠٠٠٠١٠٠", "step_0000100.aside-1", "step_-000100", "step_0000100\n"):
        assert step_of(name) is None


def test_a_checkpoint_appears_whole(tmp_path: Path) -> None:
    assert complete_steps(tmp_path / "nothing") == []
    for step in (200, 100):
        checkpoint = saved(tmp_path, step)
        assert checkpoint == tmp_path / name_of(step)
    manifest, digest = open_manifest(checkpoint)
    assert (manifest.step, complete_steps(tmp_path)) == (100, [100, 200])
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted([COMPLETE, MANIFEST, *manifest.files])
    assert json.loads((checkpoint / COMPLETE).read_text()) == {"manifest_sha256": digest}


def test_what_is_not_finished_is_no_checkpoint(tmp_path: Path) -> None:
    """Killed before COMPLETE, or before the rename: the next start clears it away."""
    whole = saved(tmp_path)
    unfinished = folder.begin(tmp_path, 200)
    for path in whole.iterdir():
        (unfinished / path.name).write_bytes(path.read_bytes())
    assert complete_steps(tmp_path) == [100]
    assert folder.clear_unfinished(tmp_path) == [unfinished]
    assert [path.name for path in tmp_path.iterdir()] == [whole.name]
    assert folder.clear_unfinished(tmp_path / "nothing") == []
    folder.begin(tmp_path, 200).joinpath("rest").write_text("of an earlier try")
    assert list(folder.begin(tmp_path, 200).iterdir()) == []
    folder.abandon(tmp_path, 200)
    folder.abandon(tmp_path, 200)
    assert steps(tmp_path) == [100]


def test_complete_comes_after_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which things reach the disk; a kill after any of them leaves no half checkpoint with a name."""
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
    saved(tmp_path)
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


def test_what_is_in_the_way_is_renamed_and_said(tmp_path: Path) -> None:
    first = saved(tmp_path)
    (first / COMPLETE).unlink()
    saved(tmp_path)
    aside = tmp_path / "step_0000100.aside-1"
    assert (aside / SHARD).is_file()
    said: list[str] = []
    text = (first / MANIFEST).read_text()
    for path in (unfinished := folder.begin(tmp_path, 100), aside):
        assert path.is_dir()
    for name in json.loads(text)["files"]:
        (unfinished / name).write_bytes((first / name).read_bytes())
    folder.finish(tmp_path, 100, text, said.append)
    assert said == [f"{first} was in the way of a new checkpoint and is step_0000100.aside-2 now"]
    assert complete_steps(tmp_path) == [100]
    open_manifest(first)


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
    assert [path.name for path in place.iterdir()] == ["step_0000100"]
    open_manifest(other)


def test_a_removal_that_was_killed_is_finished_by_the_next_start(tmp_path: Path) -> None:
    saved(tmp_path).rename(gone := tmp_path / ".step_0000100.removed")
    assert complete_steps(tmp_path) == []
    assert folder.clear_unfinished(tmp_path) == [gone]
    assert list(tmp_path.iterdir()) == []


# Damage -------------------------------------------------------------------------------------------------------------


def rewritten(change: Callable[[str], str | bytes]) -> Callable[[Path], None]:
    """Another manifest, with a COMPLETE that fits to it, as a liar would write them."""

    def damage(checkpoint: Path) -> None:
        found = change((checkpoint / MANIFEST).read_text())
        text = found if isinstance(found, bytes) else found.encode()
        (checkpoint / MANIFEST).write_bytes(text)
        (checkpoint / COMPLETE).write_text(folder.complete_text(folder.hashlib.sha256(text).hexdigest()))

    return damage


def linked(name: str) -> Callable[[Path], None]:
    """A link in the place of a file, to a copy of it outside."""

    def damage(checkpoint: Path) -> None:
        outside = checkpoint.parent.parent / "outside"
        (checkpoint / name).rename(outside)
        (checkpoint / name).symlink_to(outside)

    return damage


def piped(checkpoint: Path) -> None:
    (checkpoint / SHARD).unlink()
    os.mkfifo(checkpoint / SHARD)


def huge(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_bytes(b"")
    os.truncate(checkpoint / MANIFEST, 2**40)


DAMAGED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no COMPLETE": (lambda at: (at / COMPLETE).unlink(), COMPLETE, "never written to its end"),
    "an empty COMPLETE": (lambda at: (at / COMPLETE).write_text(""), MANIFEST, "do not fit together"),
    "a large COMPLETE": (lambda at: (at / COMPLETE).write_text(" " * 2000), COMPLETE, "at most 1,000"),
    "a COMPLETE that says more": (
        lambda at: (at / COMPLETE).write_text((at / COMPLETE).read_text() + " "),
        MANIFEST,
        "do not fit together",
    ),
    "no manifest": (lambda at: (at / MANIFEST).unlink(), MANIFEST, "is missing"),
    "an empty manifest": (lambda at: (at / MANIFEST).write_text(""), MANIFEST, "is empty"),
    "an empty manifest that fits": (rewritten(lambda text: ""), MANIFEST, "is empty"),
    "a manifest cut short": (lambda at: os.truncate(at / MANIFEST, 100), MANIFEST, "do not fit together"),
    "a manifest of a terabyte": (huge, MANIFEST, f"at most {MAX_BYTES:,}"),
    "a manifest that names ../../x": (
        rewritten(lambda text: text.replace(SHARD, "../../x")),
        MANIFEST,
        r"'\.\./\.\./x'",
    ),
    "a manifest that is a pickle": (rewritten(lambda text: b"\x80\x04cos\nsystem\n."), MANIFEST, "no JSON"),
    "a manifest of another step": (rewritten(lambda text: text.replace("100", "101", 1)), MANIFEST, "that of step 101"),
    "a missing shard": (lambda at: (at / SHARD).unlink(), SHARD, "is missing"),
    "a shard cut short": (lambda at: os.truncate(at / SHARD, 100), SHARD, "has 100 bytes"),
    "a shard that grew": (lambda at: (at / SHARD).open("ab").write(b"x"), SHARD, "were written"),
    "a shard that is a link": (linked(SHARD), SHARD, "is a link"),
    "a manifest that is a link": (linked(MANIFEST), MANIFEST, "is a link"),
    "a COMPLETE that is a link": (linked(COMPLETE), COMPLETE, "is a link"),
    "a shard that is a pipe": (piped, SHARD, "is no file"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    checkpoint = saved(tmp_path / "checkpoints")
    damage, file, why = DAMAGED[name]
    damage(checkpoint)
    with pytest.raises(DamagedError, match=why) as caught:
        open_manifest(checkpoint)
    assert caught.value.file == checkpoint / file


def test_a_newer_format_and_no_folder_are_no_damage(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    rewritten(lambda text: text.replace('"format": 2', '"format": 3'))(checkpoint)
    for path, why in ((checkpoint, "has format 3"), (tmp_path / "x", "there is no checkpoint")):
        with pytest.raises(InputError, match=why) as caught:
            open_manifest(path)
        assert not isinstance(caught.value, DamagedError)


def test_a_checkpoint_may_have_any_name_that_is_not_another_steps(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    open_manifest(checkpoint.rename(tmp_path / "best"))


# The lock -----------------------------------------------------------------------------------------------------------


def test_one_process_has_a_folder(tmp_path: Path) -> None:
    place = tmp_path / "new"
    why = f"new is in use by process {os.getpid()} on host"
    with lock_folder(place), pytest.raises(InputError, match=why), lock_folder(place):
        pytest.fail("two have the folder")
    with lock_folder(place):
        pass


def test_a_process_that_is_killed_lets_go_though_its_child_lives_on(tmp_path: Path) -> None:
    code = (
        "import os, time\nfrom pathlib import Path\nfrom meshtrain.checkpoint.directory import lock_folder\n"
        f"with lock_folder(Path({str(tmp_path)!r})):\n"
        "    if os.fork() == 0:\n"
        "        print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        try:
            with pytest.raises(InputError, match=f"in use by process {other.pid}"), lock_folder(tmp_path):
                pytest.fail("two have the folder")
            other.kill()
            other.wait()
            with lock_folder(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("precious")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").symlink_to(tmp_path / "outside")
    with pytest.raises(InputError, match="cannot be used"), lock_folder(tmp_path / "a"):
        pass
    assert (tmp_path / "outside").read_text() == "precious"
