"""Saving: whole or not at all, beside the training, and told aloud when it goes wrong."""

import errno
import json
import os
import shutil
import subprocess
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshtrain.checkpoint import commit, retention, save
from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint.commit import checkpoint_bytes
from meshtrain.checkpoint.placement import Placement
from meshtrain.checkpoint.replica_check import Sums, bit_sum, describe_divergence, find_divergence
from meshtrain.checkpoint.retention import Retention
from meshtrain.checkpoint.save import Saver
from meshtrain.checkpoint.shard_file import write_shard
from meshtrain.checkpoint.state import State
from meshtrain.checkpoint.verify import verify
from meshtrain.errors import bytes_text
from meshtrain.layout import Layout
from tests.checkpoint.known import ABOUT, alone, clear, fill, on, whole
from tests.launching import forked
from tests.parallel.test_tensor_parallel import assert_none_failed

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def filled() -> State:
    return on(alone(), {})


@pytest.fixture
def state(filled: State) -> State:
    fill(filled)
    return filled


@pytest.fixture
def saver(state: State, tmp_path: Path) -> Iterator[Callable[..., Saver]]:
    """Makes one that writes to the test's folder, and remembers what it says as `said`."""
    made: list[Saver] = []

    def make(where: Path = tmp_path, **how: Any) -> Saver:
        said: list[str] = []
        made.append(Saver(state, where, alone(), say=said.append, **how))
        made[-1].said = said  # type: ignore[attr-defined]
        return made[-1]

    yield make
    for each in made:
        each.close()


class Slow:
    """In place of write_shard: waits until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        self.begun.set()
        assert self.go.wait(60)
        return write_shard(*arguments)


def test_a_checkpoint_is_whole_and_readable_by_others(
    saver: Callable[..., Saver], state: State, tmp_path: Path
) -> None:
    one = saver(in_background=False)
    one.save(100, ABOUT | {"samples": 5, "evaluation": {"eval_loss": 1.5}})
    assert (one.saved, one.problem, one.wants_stop) == (100, None, None)
    checkpoint = tmp_path / "step_0000100"
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "COMPLETE",
        "manifest.json",
        "rank_00000.safetensors",
    ]
    assert not verify(checkpoint)
    found = json.loads((checkpoint / "manifest.json").read_text())
    assert (found["step"], found["samples"], found["evaluation"]) == (100, 5, {"eval_loss": 1.5})
    tensors = load_file(checkpoint / "rank_00000.safetensors")
    assert tensors.keys() == state.placements.keys()
    for name, placement in state.placements.items():
        assert torch.equal(tensors[name], whole(name, placement)), name
    written = bytes_text((checkpoint / "rank_00000.safetensors").stat().st_size)
    assert len(one.said) == 1
    assert one.said[0].startswith(f"checkpoint step_0000100: {written} in ")
    assert "training waited" in one.said[0]


def test_training_goes_on_while_its_state_is_written(
    saver: Callable[..., Saver], state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    monkeypatch.setattr(commit, "write_shard", slow)
    one = saver()
    one.save(1, ABOUT)
    assert slow.begun.wait(60)
    one.poll()
    assert one.saved is None
    assert not one.said
    clear(state)  # the training goes on
    slow.go.set()
    one.wait()
    assert one.saved == 1
    for name, tensor in load_file(tmp_path / "step_0000001" / "rank_00000.safetensors").items():
        assert torch.equal(tensor, whole(name, state.placements[name])), name


def test_at_most_one_save_is_under_way(saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr(commit, "write_shard", slow)
    one = saver()
    one.save(1, ABOUT)
    threading.Timer(0.3, slow.go.set).start()
    one.save(2, ABOUT)
    assert one.saved == 1
    assert one.said[0].startswith("step 2 waited 0.")
    assert "the checkpoint of step 1 was still being written" in one.said[0]
    one.wait()
    assert one.saved == 2
    assert one.last_wait_s > 0.2, "that is time which training lost"


def test_a_run_that_fails_does_not_wait_for_its_save(
    saver: Callable[..., Saver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    monkeypatch.setattr(commit, "write_shard", slow)
    monkeypatch.setattr(save, "CLOSING_S", 0.1)
    one = saver()
    one.save(1, ABOUT)
    one.close()
    assert os.listdir(tmp_path) == [".step_0000001.tmp"]
    slow.go.set()


def test_too_little_room_is_found_before_anything_is_written(
    saver: Callable[..., Saver], state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = saver()
    one.save(1, ABOUT, wait=True)
    need = checkpoint_bytes(state.placements, 1)
    there = sum(path.stat().st_size for path in (tmp_path / "step_0000001").glob("rank*"))
    assert there <= need <= 1.2 * there
    monkeypatch.setattr(commit, "disk_usage", lambda path: Usage(0, 0, need - 1))
    one.save(2, ABOUT, wait=True)
    assert one.problem is not None
    assert (
        f"it needs {bytes_text(need)}, and the file system of {tmp_path} has {bytes_text(need - 1)} free: make room"
        in one.problem
    )
    assert one.wants_stop is None
    assert one.said[-1].startswith("there is no checkpoint of step 2: it needs ")
    assert one.said[-1].endswith("training goes on, and the checkpoints before it are there")
    assert os.listdir(tmp_path) == ["step_0000001"]
    monkeypatch.setattr(commit, "disk_usage", lambda path: Usage(0, 0, need))
    one.save(3, ABOUT, wait=True)
    assert (one.saved, one.problem) == (3, None)


def test_a_warning_comes_before_the_disk_is_full(
    saver: Callable[..., Saver], state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and again only if there was room in between."""
    need, one, warned = checkpoint_bytes(state.placements, 1), saver(), []
    for step, free in enumerate((2 * need, 2 * need - 1, need, 3 * need, need), start=1):
        monkeypatch.setattr(retention, "disk_usage", lambda path, free=free: Usage(0, 0, free))
        one.save(step, ABOUT, wait=True)
        one._thread.join()
        one.poll()
        warned.append(sum(line.startswith("warning: the file system of ") for line in one.said))
    assert warned == [0, 1, 1, 1, 2]
    assert any(f"not enough for two more checkpoints of {bytes_text(need)} each" in line for line in one.said)


@pytest.mark.parametrize(
    ("rules", "values", "kept"),
    [
        (Retention(keep_last=2), {}, [5, 6]),
        (Retention(keep_last=1, keep_every=2), {}, [2, 4, 6]),
        (Retention(keep_last=1, keep_best=True), {"eval_loss": [3, 1, 2, 5, 4, 6]}, [2, 6]),
        (
            Retention(keep_last=1, keep_best=True),
            {"eval_loss": [3, 1, 2, 5, 4, 6], "accuracy": [0, 0, 0.7, 0, 0, 0]},
            [3, 6],
        ),
        (
            Retention(keep_last=1, keep_best=True),  # not comparable
            {"eval_loss": [1, 2, 3, 4, 3.5, 5], "eval_samples": [8, 8, 8, 20, 20, 20]},
            [1, 5, 6],
        ),
        (Retention(keep_last=None), {}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_what_no_rule_keeps_is_deleted(
    saver: Callable[..., Saver], tmp_path: Path, rules: Retention, values: dict[str, list[float]], kept: list[int]
) -> None:
    """After each save, by two jobs one after the other: the second one reads what the first has written."""
    for steps in ((1, 2, 3), (4, 5, 6)):
        one = saver(keep=rules)
        for step in steps:
            evaluation = {name: of_steps[step - 1] for name, of_steps in values.items()} or None
            one.save(step, ABOUT | {"evaluation": evaluation}, wait=True)
        one.close()
    assert folder.complete_steps(tmp_path) == kept
    assert len(os.listdir(tmp_path)) == len(kept)


def test_what_is_in_the_way_keeps_its_bytes(saver: Callable[..., Saver], tmp_path: Path) -> None:
    (tmp_path / "step_0000001").mkdir()
    (tmp_path / "step_0000001" / "precious").touch()
    one = saver()
    one.save(1, ABOUT, wait=True)
    assert one.said[0].endswith("step_0000001 was in the way of a new checkpoint and is step_0000001.aside-1 now")
    assert (tmp_path / "step_0000001.aside-1" / "precious").exists()


# Disks ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for less than three checkpoints."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=900k", "none", place]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_gets_full_in_the_middle(
    saver: Callable[..., Saver], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else fills it after the room was checked. The third save has no room, and the next one again has."""
    one = saver(small_disk, keep=Retention(keep_last=None), on_failure="continue")
    monkeypatch.setattr(commit, "disk_usage", lambda path: Usage(0, 0, 2**30))
    for step in (1, 2, 3):
        one.save(step, ABOUT, wait=True)
    assert one.saved == 2, one.said
    path = small_disk / ".step_0000003.tmp" / "rank_00000.safetensors"
    assert one.problem == f"rank 0 on host here: {path}: No space left on device"
    one._thread.join()
    assert sorted(os.listdir(small_disk)) == ["step_0000001", "step_0000002"]
    assert not verify(small_disk / "step_0000002")
    folder.remove(small_disk / "step_0000001")
    one.save(4, ABOUT, wait=True)
    one._thread.join()  # nothing of it is open when the disk goes
    assert (one.saved, one.problem) == (4, None)


@pytest.mark.parametrize("found", ["before", "while it is written"])
def test_an_old_checkpoint_makes_room(
    saver: Callable[..., Saver], small_disk: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    """A real disk with room for two: the third save is there, and of those before it just the oldest is gone."""
    if found != "before":
        monkeypatch.setattr(commit, "disk_usage", lambda path: Usage(0, 0, 2**30))
    without = saver(small_disk, keep=Retention(keep_last=2))
    for step in (1, 2, 3):
        without.save(step, ABOUT, wait=True)
    assert (without.saved, without.problem is None) == (2, False)
    without.close()
    one = saver(small_disk, keep=Retention(keep_last=2), make_room=True)
    for step in (3, 4):
        one.save(step, ABOUT, wait=True)
        assert (one.saved, one.problem) == (step, None)
        one._thread.join()
        assert sorted(os.listdir(small_disk)) == [f"step_000000{step - 1}", f"step_000000{step}"]
        assert not verify(small_disk / f"step_000000{step}")
        note = f"step_000000{step - 2} was deleted before step {step} was saved: the disk is full"
        assert [note in line for line in one.said].count(True) == 1
    one.close()
    three = saver(small_disk, keep=Retention(keep_last=3), make_room=True)
    three.save(5, ABOUT, wait=True)
    assert three.saved is None, "what stays after a save is never deleted before it"
    three._thread.join()
    assert folder.complete_steps(small_disk) == [3, 4]


@pytest.mark.parametrize(
    ("rules", "there", "left"),
    [
        (Retention(keep_last=1), (1,), [1]),
        (Retention(keep_last=1), (1, 2), [2]),
        (Retention(keep_last=2), (1, 2), [2]),
        (Retention(keep_last=3), (1, 2), [1, 2]),
        (Retention(keep_last=1, keep_every=2), (2, 3), [2, 3]),
        (Retention(keep_last=1, keep_best=True), (1, 2, 3), [1, 3]),
        (Retention(keep_last=None), (1, 2, 3), [1, 2, 3]),
    ],
)
def test_the_newest_and_what_is_kept_never_make_room(
    saver: Callable[..., Saver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    rules: Retention, there: tuple[int, ...], left: list[int],
) -> None:  # fmt: skip
    """The disk takes nothing more, so one goes, where one may, and the save fails all the same."""
    one = saver(keep=Retention(keep_last=None))
    for step in there:
        one.save(step, ABOUT | {"evaluation": {"eval_loss": float(step)}}, wait=True)
    one.close()

    def full(path: Path, tensors: Any) -> Any:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    monkeypatch.setattr(commit, "write_shard", full)
    one = saver(keep=rules, make_room=True)
    one.save(9, ABOUT | {"evaluation": {"eval_loss": 9.0}}, wait=True)
    assert str(one.problem).endswith("Disk quota exceeded")
    assert folder.complete_steps(tmp_path) == left


def test_only_a_full_disk_asks_for_room(
    saver: Callable[..., Saver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, calls = saver(keep=Retention(keep_last=1), make_room=True), []
    for step in (1, 2):
        one.save(step, ABOUT, wait=True)

    def broken(path: Path, tensors: Any) -> Any:
        calls.append(path)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(commit, "write_shard", broken)
    one._thread.join()  # the first is deleted
    shutil.copytree(tmp_path / "step_0000002", tmp_path / "step_0000001")
    one.save(3, ABOUT, wait=True)
    assert "Input/output error" in str(one.problem)
    assert len(calls) == 1
    assert folder.complete_steps(tmp_path) == [1, 2]


def test_a_folder_that_becomes_read_only(saver: Callable[..., Saver], small_disk: Path) -> None:
    one = saver(small_disk, on_failure="stop")
    one.save(1, ABOUT, wait=True)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    one.save(2, ABOUT, wait=True)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert one.problem == f"rank 0 on host here: {small_disk / '.step_0000002.tmp'}: Read-only file system"
    assert one.wants_stop == f"there is no checkpoint of step 2: {one.problem}"
    one._thread.join()
    assert os.listdir(small_disk) == ["step_0000001"]


def test_a_folder_that_is_a_file(saver: Callable[..., Saver], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    one = saver(tmp_path / "file")
    one.save(1, ABOUT, wait=True)
    assert one.problem == f"rank 0 on host here: {tmp_path / 'file'}: File exists"


def test_a_fault_of_the_program_is_no_failed_save(
    saver: Callable[..., Saver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the run: it would come again with each save."""
    monkeypatch.setattr(commit, "write_shard", lambda *_: 1 / 0)
    one = saver()
    with pytest.raises(ZeroDivisionError):
        one.save(1, ABOUT, wait=True)


# Ranks ---------------------------------------------------------------------------------------------------------------


def test_one_changed_bit_changes_the_sum() -> None:
    for tensor in (torch.randn(5, 3), torch.randn(7).double(), torch.randn(9).bfloat16(), torch.tensor([True, False])):
        before = bit_sum(tensor)
        for at in range(tensor.nbytes):
            data = tensor.clone().view(torch.uint8)
            data[..., at % data.shape[-1]] ^= 0x40
            assert bit_sum(data.view(tensor.dtype)) != before
    x = torch.arange(12.0)
    assert bit_sum(x[1:]) == bit_sum(x[1:].clone()), "also where memory begins anywhere"
    assert bit_sum(x.view(3, 4).t()) == bit_sum(x.view(3, 4).t().contiguous())


def test_the_majority_is_right_and_few_are_asked() -> None:
    """8 ranks hold all of `a`; of `b` each pair of `tp` holds a half."""
    layout = Layout({"dp_replicate": 8, "tp": 2})
    placements = {"a": Placement((4,), "F32"), "b": Placement((4,), "F32", (("tp", 0),))}
    digests = [{"0": "same", "1": f"half {rank % 2}"} for rank in range(16)]
    assert find_divergence(placements, layout, digests) == []
    for rank in (3, 5, 7, 9, 11, 13):
        digests[rank]["1"] = f"other {rank}"
    (found,) = find_divergence(placements, layout, digests)
    assert (found.kind, found.group, found.odd) == (1, tuple(range(1, 16, 2)), tuple(range(1, 16, 2)))
    assert found.reporters == (1, 3, 5, 7), "nobody has a majority"
    digests[3]["1"] = digests[5]["1"] = digests[7]["1"] = "half 1"
    (found,) = find_divergence(placements, layout, digests)
    assert (found.odd, found.reporters) == ((9, 11, 13), (9, 11, 13, 1))
    sums = {9: {"b": [1], "c": [5]}, 11: {"b": [2], "c": [5]}, 13: {"b": [3], "c": [5]}, 1: {"b": [4], "c": [5]}}
    said = describe_divergence(found, sums, [f"rank {rank}" for rank in range(16)])
    assert said == "rank 9 and rank 11 and rank 13 differ from the 5 other ranks that hold the same part, in b"


def test_nothing_is_summed_up_where_nobody_else_holds_the_same(state: State) -> None:
    sums = Sums(state)
    assert sums.digests() == {}
    assert sums.inconsistent_ties() == []


@pytest.mark.timeout(400)
def test_ranks_agree_whatever_happens_to_one(tmp_path: Path) -> None:
    """A slow disk, a folder that vanishes, copies that differ: see ranks.py."""
    job = forked(4, "-m", "tests.checkpoint.ranks", str(tmp_path), "save", timeout=300)
    assert_none_failed(job, 4, 50)


@pytest.mark.timeout(400)
def test_a_rank_that_is_killed_while_it_writes_leaves_no_checkpoint(tmp_path: Path) -> None:
    done = forked(4, "-m", "tests.checkpoint.ranks", str(tmp_path), "killed", timeout=300)
    assert done.status != 0
    place = tmp_path / "killed"
    assert sorted(os.listdir(place)) == [".step_0000002.tmp", "step_0000001"]
    assert folder.complete_steps(place) == [1]
    assert not verify(place / "step_0000001")
    assert folder.clear_unfinished(place) == [place / ".step_0000002.tmp"]
    shutil.rmtree(place)
