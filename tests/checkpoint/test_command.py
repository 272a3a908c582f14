"""`meshtrain checkpoint`, as it is typed: what it prints, its exit status, and what it leaves
alone."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from meshtrain.checkpoint.directory import COMPLETE, complete_steps
from meshtrain.checkpoint.folder_lock import LOCK, lock_folder
from meshtrain.checkpoint.manifest import MANIFEST
from meshtrain.cli.main import main
from tests.checkpoint.by_hand import flip, write_checkpoint

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
        try:
            status = main(["checkpoint", *map(str, arguments)])
        except SystemExit as error:
            status = int(error.code or 0)
        return status, *capsys.readouterr()

    return run


def test_what_is_printed_and_what_is_wrong(run_folder: Path, typed: Any) -> None:
    names = {"run": run_folder, "place": run_folder / "checkpoints"}
    for row in yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text()):
        status, out, err = typed(*row["type"].format(**names).split())
        assert status == row.get("status", 0), row
        assert {line.format(**names) for line in row.get("prints", ())} <= set(out.splitlines()), (
            row,
            out,
        )
        assert row.get("says", "") in err, row
        assert status != 2 or out == "", row
    assert not list(run_folder.parent.glob(LOCK))
    assert not list((run_folder / "checkpoints/step_0000100").glob(LOCK))


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
    rows = json.loads(typed("ls", run_folder, "--json")[1])
    assert [row["step"] for row in rows] == [100, 200, None, 400]
    assert (rows[1]["layout"], rows[1]["evaluation"]) == ({"dp_shard": 2}, {"eval_loss": 2.5})
    assert rows[2]["problem"].startswith("damaged: rank_00001.safetensors")


def test_show_as_json(run_folder: Path, typed: Any) -> None:
    checkpoint = run_folder / "checkpoints" / "step_0000100"
    content = json.loads(typed("show", checkpoint, "--json")[1])
    assert content.pop("path") == str(checkpoint)
    assert (
        content.pop("manifest_sha256")
        == json.loads((checkpoint / COMPLETE).read_text())["manifest_sha256"]
    )
    assert content == json.loads((checkpoint / MANIFEST).read_text())
    flip(checkpoint / MANIFEST)
    assert typed("show", checkpoint)[0] == 2


def test_show_prints_nothing_that_a_terminal_obeys(tmp_path: Path, typed: Any) -> None:
    found = write_checkpoint(
        tmp_path, {"model.a": torch.zeros(1)}, config={"\x1b[2J": {"\x1b[1m": "\x1b]0;x\x07"}}
    )
    out = typed("show", found, "--tensors")[1] + typed("show", found, "--json")[1]
    assert all(character.isprintable() or character == "\n" for character in out)


def test_verify(run_folder: Path, typed: Any) -> None:
    place = run_folder / "checkpoints"
    flip(place / "step_0000300/rank_00001.safetensors")
    status, out, _ = typed("verify", run_folder)
    assert status == 1
    assert out.splitlines()[2:4] == [
        f"{place / 'step_0000300'}: 1 problem",
        "  rank_00001.safetensors: model.a: its bytes 0 to 12 are not those that were written",
    ]
    status, out, _ = typed("verify", place / "step_0000300", "--json")
    assert status == 1
    (answer,) = json.loads(out)
    assert (answer["intact"], answer["problems"][0]["tensor"]) == (False, "model.a")


def steps_of(run_folder: Path) -> list[int]:
    return complete_steps(run_folder / "checkpoints")


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (["--keep-every", 300], [300, 400]),
        (["--keep-last", 1, "--keep-best"], [200, 400]),
        (["--keep-last", 1, "--keep-every", 100], [100, 200, 300, 400]),
    ],
)
def test_prune(run_folder: Path, typed: Any, rules: list[object], kept: list[int]) -> None:
    status, out, _ = typed("prune", run_folder, *rules, "--dry-run")
    assert (status, steps_of(run_folder)) == (0, [100, 200, 300, 400])
    superfluous = [f"step_{step:07d}" for step in LOSSES if step not in kept]
    assert out.startswith(
        f"would be removed: {', '.join(superfluous)}\n" if superfluous else "kept"
    )
    assert typed("prune", run_folder, *rules)[0] == 0
    assert steps_of(run_folder) == kept
    answer = json.loads(typed("prune", run_folder / "checkpoints", *rules, "--json")[1])
    assert (answer["removed"], len(answer["kept"])) == ([], len(kept))


def test_prune_of_what_was_set_aside(run_folder: Path, typed: Any) -> None:
    """Alone it leaves all checkpoints."""
    place = run_folder / "checkpoints"
    before = complete_steps(place)
    for name in ("step_0000100.aside-1", "step_0000100.aside-12", "step_0000100.aside-x"):
        (place / name).mkdir()
        (place / name / "file").touch()
    status, out, _ = typed("prune", run_folder, "--set-aside", "--dry-run")
    assert (status, "would be removed: step_0000100.aside-1, step_0000100.aside-12" in out) == (
        0,
        True,
    ), out
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
def test_prune_leaves_the_folder_of_a_running_job_alone(
    run_folder: Path, typed: Any, inside: str
) -> None:
    with lock_folder(run_folder / inside):
        for path in (run_folder, run_folder / "checkpoints"):
            status, _, err = typed("prune", path, "--keep-last", 1)
            assert status == 2
            assert f"in use by process {os.getpid()}" in err
            assert typed("prune", path, "--keep-last", 1, "--dry-run")[0] == 0
    assert steps_of(run_folder) == [100, 200, 300, 400]


def test_what_may_not_be_removed_is_named(
    run_folder: Path, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, to: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", refused)
    status, _, err = typed("prune", run_folder, "--keep-last", 1)
    assert (status, err) == (
        2,
        f"{run_folder / 'checkpoints' / 'step_0000100'} may not be used: Permission denied\n",
    )


def test_the_folder_that_one_is_in(
    run_folder: Path, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_folder / "checkpoints")
    assert typed("prune", ".", "--keep-last", 3)[:2] == (
        0,
        "removed: step_0000100\nkept: step_0000200, step_0000300, step_0000400\n",
    )
    assert typed("verify", "step_0000200") == (0, "step_0000200: intact\n", "")
