"""`meshtrain checkpoint`, as it is typed: what it prints, its exit status, and what it leaves alone."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.checkpoint.directory import COMPLETE, LOCK, complete_steps, lock_folder
from meshtrain.checkpoint.manifest import MANIFEST, Manifest
from meshtrain.cli.main import main
from tests.checkpoint.by_hand import write_checkpoint

LOSSES = {100: 3.0, 200: 2.5, 300: 2.75, 400: math.nan}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with four checkpoints of two ranks."""
    for step, loss in LOSSES.items():
        write_checkpoint(
            tmp_path / "run" / "checkpoints",
            {"model.a": torch.arange(6.0), "optimizer.step": torch.tensor(float(step))},
            step=step,
            sizes={"dp_shard": 2},
            config={"model": {"name": "llama"}, "train": {"seed": 0}},
            evaluation={"eval_loss": loss},
        )
    (tmp_path / "run" / LOCK).touch()
    return tmp_path / "run"


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command: exit status, what it printed, what it said of errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main(["checkpoint", *map(str, arguments)])
        found = capsys.readouterr()
        return status, found.out, found.err

    return run


def spoil(checkpoint: Path, file: str = "rank_00001.safetensors") -> None:
    text = bytearray((checkpoint / file).read_bytes())
    text[-1] ^= 64
    (checkpoint / file).write_bytes(text)


def test_ls(run_folder: Path, typed: Any) -> None:
    os.truncate(run_folder / "checkpoints" / "step_0000300" / "rank_00001.safetensors", 5)
    status, out, _ = typed("ls", run_folder)
    lines = out.splitlines()
    assert (status, len(lines)) == (0, 5)
    assert lines[0].split() == ["checkpoint", "written", "size", "ranks", "layout", "eval_loss"]
    assert lines[1].split()[:3] == ["step_0000100", "2026-01-01", "00:00:00"]
    assert lines[1].endswith("2      {dp_shard: 2}  3.0000")
    assert "step_0000300  ?" in lines[3]
    assert "damaged: rank_00001.safetensors has 5 bytes" in lines[3]
    assert typed("ls", run_folder / "checkpoints") == (0, out, "")
    found = json.loads(typed("ls", run_folder, "--json")[1])
    assert [about["step"] for about in found] == [100, 200, None, 400]
    assert found[1]["layout"] == {"dp_shard": 2}
    assert found[1]["evaluation"] == {"eval_loss": 2.5}
    assert found[2]["problem"].startswith("damaged: rank_00001.safetensors")


def test_show(run_folder: Path, typed: Any) -> None:
    status, out, _ = typed("show", run_folder)
    lines = out.splitlines()
    assert status == 0
    assert lines[0] == str(run_folder / "checkpoints" / "step_0000400")
    assert "layout      {dp_shard: 2} (2 ranks)" in lines
    assert "tensors     2: 1 of model, 1 of optimizer" in lines
    assert '    name: "llama"' in lines
    named = run_folder / "checkpoints" / "step_0000100"
    assert "  model.a  F32 [6] {} [0]" in typed("show", named, "--tensors")[1].splitlines()
    found = json.loads(typed("show", named, "--json")[1])
    assert found.pop("path") == str(named)
    assert found.pop("manifest_sha256") == json.loads((named / COMPLETE).read_text())["manifest_sha256"]
    assert found == json.loads((named / MANIFEST).read_text())
    assert Manifest.parse(json.dumps(found), named).step == 100


def test_show_prints_nothing_that_a_terminal_obeys(tmp_path: Path, typed: Any) -> None:
    found = write_checkpoint(tmp_path, {"model.a": torch.zeros(1)}, config={"\x1b[2J": {"\x1b[1m": "\x1b]0;x\x07"}})
    out = typed("show", found, "--tensors")[1] + typed("show", found, "--json")[1] + typed("diff", found, found)[1]
    assert all(character.isprintable() or character == "\n" for character in out)


def test_verify(run_folder: Path, typed: Any) -> None:
    place = run_folder / "checkpoints"
    assert typed("verify", place / "step_0000100") == (0, f"{place / 'step_0000100'}: intact\n", "")
    assert typed("verify", run_folder)[0] == 0
    spoil(place / "step_0000300")
    status, out, _ = typed("verify", run_folder)
    assert status == 1
    assert out.splitlines()[2:4] == [
        f"{place / 'step_0000300'}: 1 problem",
        "  rank_00001.safetensors: model.a: its bytes 0 to 12 are not those that were written",
    ]
    status, out, _ = typed("verify", place / "step_0000300", "--json")
    assert status == 1
    (found,) = json.loads(out)
    assert (found["intact"], found["problems"][0]["tensor"]) == (False, "model.a")
    (place / "step_0000200" / COMPLETE).unlink()
    assert typed("verify", place / "step_0000200")[0] == 1


def test_diff(run_folder: Path, typed: Any) -> None:
    place = run_folder / "checkpoints"
    status, out, _ = typed("diff", place / "step_0000400", run_folder)
    assert (status, out) == (0, "all 2 tensors are equal to the bit\n")
    status, out, _ = typed("diff", place / "step_0000100", run_folder)
    assert status == 1
    assert out.splitlines()[0] == "differences in what a run goes on from:"
    assert "  step: 100 -> 400" in out.splitlines()
    assert out.splitlines()[-1] == "  optimizer.step: 1 of 1 elements differ, most: 100.0 and 400.0"
    status, out, _ = typed("diff", place / "step_0000100", run_folder, "--json")
    found = json.loads(out)
    assert (status, found["same"], found["compared"]) == (1, False, 2)
    assert found["tensors"][0]["largest"] == 300.0


def left(run_folder: Path) -> list[int]:
    return complete_steps(run_folder / "checkpoints")


@pytest.mark.parametrize(
    ("rules", "stay"),
    [
        (["--keep-last", 2], [300, 400]),
        (["--keep-every", 300], [300, 400]),
        (["--keep-best"], [200, 400]),
        (["--keep-last", 1, "--keep-every", 100], [100, 200, 300, 400]),
    ],
)
def test_prune(run_folder: Path, typed: Any, rules: list[object], stay: list[int]) -> None:
    status, out, _ = typed("prune", run_folder, *rules, "--dry-run")
    assert (status, left(run_folder)) == (0, [100, 200, 300, 400])
    gone = [f"step_{step:07d}" for step in LOSSES if step not in stay]
    assert out.startswith(f"would be removed: {', '.join(gone)}\n" if gone else "kept")
    assert typed("prune", run_folder, *rules)[0] == 0
    assert left(run_folder) == stay
    found = json.loads(typed("prune", run_folder / "checkpoints", *rules, "--json")[1])
    assert (found["removed"], len(found["kept"])) == ([], len(stay))


def test_prune_keeps_the_most_accurate(run_folder: Path, typed: Any) -> None:
    for step, accuracy in ((500, 0.5), (600, 0.9), (700, 0.7)):
        write_checkpoint(
            run_folder / "checkpoints", {}, step=step, evaluation={"eval_loss": 9.0 - accuracy, "accuracy": accuracy}
        )
    assert typed("prune", run_folder, "--keep-best")[0] == 0
    assert left(run_folder) == [600, 700]


def test_prune_keeps_the_best_of_each_number_of_samples(run_folder: Path, typed: Any) -> None:
    for step, loss in ((500, 9.0), (600, 8.0), (700, 8.5)):
        evaluation = {"eval_loss": loss, "eval_samples": 20}
        write_checkpoint(run_folder / "checkpoints", {}, step=step, evaluation=evaluation)
    assert typed("prune", run_folder, "--keep-best")[0] == 0
    assert left(run_folder) == [min(LOSSES, key=LOSSES.__getitem__), 600, 700]


def test_prune_of_what_was_set_aside(run_folder: Path, typed: Any) -> None:
    """Alone it leaves all checkpoints."""
    place = run_folder / "checkpoints"
    before = complete_steps(place)
    for name in ("step_0000100.aside-1", "step_0000100.aside-12", "step_0000100.aside-x"):
        (place / name).mkdir()
        (place / name / "file").touch()
    status, out, _ = typed("prune", run_folder, "--set-aside", "--dry-run")
    assert (status, "would be removed: step_0000100.aside-1, step_0000100.aside-12" in out) == (0, True), out
    assert typed("prune", run_folder, "--set-aside")[0] == 0
    assert complete_steps(place) == before
    assert [path.name for path in place.glob("*aside*")] == ["step_0000100.aside-x"]
    assert typed("prune", run_folder)[0] == 2


def test_prune_never_counts_a_damaged_one_as_kept(run_folder: Path, typed: Any) -> None:
    """The newest that can be read stays, and what cannot is left for a person to look at."""
    place = run_folder / "checkpoints"
    os.truncate(place / "step_0000400" / "rank_00000.safetensors", 9)
    (place / "step_0000300" / COMPLETE).unlink()
    status, out, _ = typed("prune", run_folder, "--keep-last", 1)
    assert status == 0
    assert "damaged or unfinished, left alone: step_0000300, step_0000400" in out.splitlines()
    assert sorted(path.name for path in place.iterdir() if path.name != LOCK) == [
        "step_0000200",
        "step_0000300",
        "step_0000400",
    ]


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_prune_leaves_the_folder_of_a_running_job_alone(run_folder: Path, typed: Any, inside: str) -> None:
    with lock_folder(run_folder / inside):
        for path in (run_folder, run_folder / "checkpoints"):
            status, _, err = typed("prune", path, "--keep-last", 1)
            assert status == 2
            assert f"in use by process {os.getpid()}" in err
            assert typed("prune", path, "--keep-last", 1, "--dry-run")[0] == 0
    assert left(run_folder) == [100, 200, 300, 400]


def test_what_may_not_be_removed_is_named(run_folder: Path, typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, to: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", refused)
    status, _, err = typed("prune", run_folder, "--keep-last", 1)
    assert (status, err) == (2, f"{run_folder / 'checkpoints' / 'step_0000100'} may not be used: Permission denied\n")


def test_the_folder_that_one_is_in(run_folder: Path, typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_folder / "checkpoints")
    assert typed("prune", ".", "--keep-last", 3)[:2] == (
        0,
        "removed: step_0000100\nkept: step_0000200, step_0000300, step_0000400\n",
    )
    assert typed("verify", "step_0000200") == (0, "step_0000200: intact\n", "")


def test_wrong_input(run_folder: Path, typed: Any) -> None:
    checkpoint = run_folder / "checkpoints" / "step_0000100"
    for arguments, why in {
        ("prune", run_folder): "needs a rule",
        ("prune", run_folder / "x", "--keep-last", 1): "there is no folder",
        ("prune", checkpoint, "--keep-last", 1): "is one checkpoint",
        ("prune", run_folder.parent, "--keep-last", 1): "holds no checkpoint",
        ("ls", run_folder / "x"): "there is no folder",
        ("ls", run_folder.parent): "holds no checkpoint",
        ("show", run_folder / "x"): "is no folder",
        ("verify", run_folder / "x"): "there is no folder",
        ("verify", run_folder / "step_0000900"): "there is no checkpoint",
        ("diff", checkpoint, run_folder / "x"): "is no folder",
    }.items():
        status, out, err = typed(*arguments)
        assert (status, out) == (2, "")
        assert why in err
    assert not list(run_folder.parent.glob(LOCK))
    assert not list(checkpoint.glob(LOCK))
    for arguments in ([], ["ls"], ["verify", checkpoint, "--keep-last", 1], ["prune", checkpoint, "--keep-last", 0]):
        with pytest.raises(SystemExit) as caught:
            typed(*arguments)
        assert caught.value.code == 2
    spoil(checkpoint, MANIFEST)
    assert typed("show", checkpoint)[0] == 2
