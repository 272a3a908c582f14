"""A run that was interrupted goes on as if nothing had happened, or says why it does not."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import meshtrain.run.results
import meshtrain.run.step_logger
import meshtrain.train
from meshtrain.checkpoint.directory import complete_steps, lock_folder, open_manifest
from meshtrain.data import OpenData
from meshtrain.job import signals as stopping
from meshtrain.metrics.logger import read
from tests.checkpoint import going_on
from tests.checkpoint.going_on import Case, alone, as_json, small_run, written_down
from tests.launching import forked

TIMES = re.compile(r"time|per_s|mfu|memory|sent_bytes|goodput|wall")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A config; its text has been prepared by the first run of it."""
    return str(small_run(tmp_path_factory.mktemp("small")))


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshtrain.run.step_logger, "sample_flops", lambda *_: (None, "FLOPs are not counted"))
    monkeypatch.setattr(meshtrain.run.step_logger, "peak_flops", lambda *_: (1.0, "a peak of 1 FLOP/s"))
    monkeypatch.setattr(meshtrain.run.results, "plot_loss", lambda *_: "no picture is drawn")
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.0)


@pytest.fixture
def go(small: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Trains in this process; the run's folder is `run` in the test's own unless an override says otherwise."""

    def go(*overrides: str, **case: Any) -> dict[str, Any]:
        return alone(Case(small, (f"train.output={tmp_path}/run", "data.workers=0", *overrides), **case))

    return go


def rows(folder: Path) -> list[dict[str, Any]]:
    """What must be the same whenever a run was interrupted."""
    found = read(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not TIMES.search(name)} for row in found]


def exit_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "exit.json").read_text())


# The same bits ------------------------------------------------------------------------------------------------------

PRECISIONS = ("float32", "float16", "float64")
EVALUATED = ("data.validation=0.2", "train.eval_every=2")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_process_goes_on_with_the_same_bits(
    go: Callable[..., dict[str, Any]], tmp_path: Path, precision: str
) -> None:
    """Also what was counted, the evaluations, and the random numbers that the model draws."""
    options = (*EVALUATED, f"train.precision={precision}", "checkpoint.every=3")
    assert go(*options, f"train.output={tmp_path}/whole") == {"status": 0}
    assert go(*options, interrupt="SIGUSR1", at=3) == {"status": 75}
    assert exit_of(tmp_path / "run")["step"] == 4
    assert go(*options, interrupt="crash", at=8)["status"] == 1
    assert [row["step"] for row in rows(tmp_path / "run")][-1] in (6, 7)
    assert go(*options) == {"status": 0}
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert len(rows(tmp_path / "run")) == 8
    assert "eval_loss" in rows(tmp_path / "run")[7]
    assert complete_steps(tmp_path / "run/checkpoints") == [4, 6, 8]


def test_an_epoch_that_was_interrupted_has_its_sum(
    go: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("batch.global_size=100", "batch.micro_size=50", "checkpoint.every=epoch")
    assert go(*options, f"train.output={tmp_path}/whole") == {"status": 0}
    whole = re.findall(r"^epoch .*", capsys.readouterr().out, re.MULTILINE)
    assert len(whole) >= 2, "this test has epochs"
    first = next(row["step"] for row in rows(tmp_path / "whole") if row["epoch"] == 2) - 1
    assert complete_steps(tmp_path / "whole/checkpoints")[0] in (first, first + 1)
    assert go(*options, interrupt="SIGUSR1", at=first)["status"] == 75
    assert go(*options) == {"status": 0}
    assert re.findall(r"^epoch .*", capsys.readouterr().out, re.MULTILINE) == whole


def test_rows_behind_the_checkpoint_are_made_again(go: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert go("train.steps=6", interrupt="crash", at=6)["status"] == 1
    assert exit_of(tmp_path / "run")["status"] == "failed"
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5][: len(rows(tmp_path / "run"))]
    assert go("train.steps=6") == {"status": 0}
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


# What it goes on from -----------------------------------------------------------------------------------------------


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("file", ["rank_00000.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_next_older_one_is_taken(
    go: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    assert go("checkpoint.every=2", interrupt="crash", at=7)["status"] == 1
    newest = tmp_path / "run/checkpoints/step_0000006"
    damage(newest / file)
    assert go("checkpoint.every=2") == {"status": 0}
    printed = capsys.readouterr().out
    assert re.search(rf"^damaged: {newest / file}: ", printed, re.MULTILINE), printed
    assert f"goes on from {tmp_path}/run/checkpoints/step_0000004: step 4" in printed
    assert f"{newest} is set aside as step_0000006.aside-1" in printed
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 9))
    assert (tmp_path / "run/checkpoints/step_0000006.aside-1").is_dir()


def test_where_no_checkpoint_is_whole_nothing_begins_anew(go: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert go("checkpoint.every=2", interrupt="crash", at=7)["status"] == 1
    files = [tmp_path / "run" / name for name in ("metrics.jsonl", "exit.json", "config.yaml", "layout.txt")]
    before = [file.read_bytes() for file in files]
    damaged = sorted((tmp_path / "run/checkpoints").glob("step_*"))
    assert len(damaged) == 3
    for checkpoint in damaged:
        damage(checkpoint / "rank_00000.safetensors")
    refused = go("checkpoint.every=2", "optimizer.lr=0.1")
    assert refused["status"] == 2
    assert "no checkpoint is whole" in refused["error"]
    for checkpoint in damaged:
        assert f"{checkpoint}/rank_00000.safetensors" in refused["error"]
    assert sorted((tmp_path / "run/checkpoints").glob("step_*")) == damaged
    assert [file.read_bytes() for file in files] == before


def test_a_used_folder_is_no_fresh_one(go: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert go("checkpoint.resume=none", "train.steps=2") == {"status": 0}
    refused = go("checkpoint.resume=none", "train.steps=4")
    assert refused["status"] == 2
    assert "holds a run already" in refused["error"]
    assert go("checkpoint.resume=none", "train.steps=4", again=True) == {"status": 0}, "a restart goes on"
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert "holds a run already" in go("checkpoint.resume=none")["error"]


def test_a_run_branches_off_another_and_then_goes_on_from_its_own(
    go: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go("checkpoint.every=2") == {"status": 0}
    whole = rows(tmp_path / "run")
    for name, start, given in (
        ("a", 8, "run"),
        ("b", 8, "run/checkpoints"),
        ("c", 6, "run/checkpoints/step_0000006"),
    ):
        branch = (f"train.output={tmp_path}/{name}", f"checkpoint.resume={tmp_path}/{given}", "train.steps=10")
        assert go(*branch) == {"status": 0}
        assert [row["step"] for row in rows(tmp_path / name)] == list(range(start + 1, 11))
    assert [row["samples"] for row in rows(tmp_path / "c")][:2] == [row["samples"] for row in whole[6:]]
    assert [row["tokens"] for row in rows(tmp_path / "c")][:2] == [row["tokens"] for row in whole[6:]]
    capsys.readouterr()
    assert go(*branch, "train.steps=12") == {"status": 0}
    assert "with which this run began; it goes on from its own checkpoints now" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path / "c")] == list(range(7, 13))
    assert rows(tmp_path / "run") == whole


def test_a_run_can_go_back(
    go: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go("checkpoint.every=2") == {"status": 0}
    whole = rows(tmp_path / "run")
    back = f"checkpoint.resume={tmp_path}/run/checkpoints/step_0000004"
    assert go(back, "checkpoint.every=2", interrupt="SIGTERM", at=5) == {"status": 75}
    printed = capsys.readouterr().out
    assert f"{tmp_path}/run/checkpoints/step_0000008 is set aside as step_0000008.aside-1" in printed
    assert "start the same command again with checkpoint.resume=latest" in printed
    assert go(back, "checkpoint.every=2") == {"status": 0}, "the next job of a chain does not go back once more"
    printed = capsys.readouterr().out
    assert "to which this run went back with the same config before; it goes on from its newest" in printed
    assert f"goes on from {tmp_path}/run/checkpoints/step_0000006: step 6" in printed
    assert rows(tmp_path / "run") == whole
    another = (back, "checkpoint.every=2", "optimizer.lr=1e-5")
    assert go(*another, interrupt="SIGTERM", at=5) == {"status": 75}
    assert f"goes on from {tmp_path}/run/checkpoints/step_0000004: step 4" in capsys.readouterr().out
    assert go(*another, again=True) == {"status": 0}, "nor does a restart"
    assert f"goes on from {tmp_path}/run/checkpoints/step_0000006: step 6" in capsys.readouterr().out
    refused = go(f"checkpoint.resume={tmp_path}", f"train.output={tmp_path}/fresh")
    assert "is no checkpoint and holds none" in refused["error"]


def test_a_finished_run_says_so_goes_further_and_not_backwards(
    go: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go() == {"status": 0}
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert go() == {"status": 0}
    assert "is done: 8 steps" in capsys.readouterr().out
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    refused = go("train.steps=6")
    assert refused["status"] == 2
    assert "step_0000008 is of step 8, and this run ends at step 6" in refused["error"]
    assert exit_of(tmp_path / "run")["status"] == "done", "a run that is refused writes nothing"
    assert go("train.steps=10") == {"status": 0}
    assert "the last step, where the learning rate ends: 8 -> 10" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 11))
    assert (tmp_path / "run/metrics.jsonl").read_bytes().startswith(before)
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert "no checkpoint of it" in go("train.steps=12")["error"]


# What has to agree --------------------------------------------------------------------------------------------------


def test_another_run_is_refused_with_all_that_differs(go: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert go("train.steps=2") == {"status": 0}
    refused = go("model.width=16", "batch.global_size=24", "train.seed=1", "train.steps=9", "optimizer.lr=0.1")
    assert refused["status"] == 2
    for line in ("model.width: 8 -> 16", "batch.global_size: 12 -> 24", "train.seed: 0 -> 1"):
        assert line in refused["error"]
    assert "optimizer.lr" not in refused["error"]
    assert exit_of(tmp_path / "run")["status"] == "done"


def test_what_may_change_is_said(
    go: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go("train.steps=2") == {"status": 0}
    assert go("batch.micro_size=3", "optimizer.min_lr=1e-3", "train.steps=4") == {"status": 0}
    (line,) = re.findall(r"^changed since that checkpoint: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert "batch.micro_size: 2 -> 3" in line
    assert "optimizer.min_lr: 0.0 -> 0.001" in line
    assert "the last step, where the learning rate ends: 2 -> 4" in line
    assert "train.output" not in line


def test_other_data_is_refused_unless_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(small_run(tmp_path))
    assert alone(Case(config, ("train.steps=2",))) == {"status": 0}
    text = tmp_path / "text.txt"
    text.write_text(text.read_text().replace("7", "8"))
    refused = alone(Case(config, ("train.steps=4",)))
    assert refused["status"] == 2
    assert "the data: " in refused["error"]
    assert "allow other data with checkpoint.allow_other_data=true" in refused["error"]
    assert alone(Case(config, ("train.steps=4", "checkpoint.allow_other_data=true"))) == {"status": 0}
    assert "changed since that checkpoint: checkpoint.allow_other_data" in capsys.readouterr().out


def test_another_validation_of_the_same_training_data_is_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a checkpoint whose fingerprint was of the training's data alone, as long as these are the same."""
    config = str(small_run(tmp_path))
    held_out = tmp_path / "held.txt"
    options = (f"data.validation={held_out}",)
    held_out.write_text("7 days are a week. " * 20)
    with monkeypatch.context() as before:
        plain = OpenData.identity.fget
        before.setattr(
            OpenData,
            "identity",
            property(lambda data: plain(data) | {"fingerprint": plain(data)["fingerprint"].split()[0]}),
        )
        assert alone(Case(config, ("train.steps=2", *options))) == {"status": 0}
    assert alone(Case(config, ("train.steps=4", *options))) == {"status": 0}
    held_out.write_text("8 days are a week. " * 20)
    refused = alone(Case(config, ("train.steps=6", *options)))
    assert refused["status"] == 2
    (line,) = re.findall("the data: .*", refused["error"])
    then, now = (re.findall("[0-9a-f]{12}", part) for part in line.split(" -> "))
    assert then[0] == now[0]
    assert then[1] != now[1], "people see what differs"


def test_two_runs_do_not_share_checkpoints(go: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = f"checkpoint.path={tmp_path}/shared"
    with lock_folder(tmp_path / "shared"):
        refused = go(path)
    assert refused["status"] == 2
    assert "the folder of the checkpoints" in refused["error"]
    assert "is in use by process" in refused["error"]
    assert go(path, "train.steps=2") == {"status": 0}
    assert complete_steps(tmp_path / "shared") == [2]
    assert go("checkpoint.path=" + str(tmp_path / "run"))["status"] == 2


def test_a_manifest_says_what_the_run_was(go: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert go(*EVALUATED, "train.steps=4", "train.eval_samples=3") == {"status": 0}
    manifest, _ = open_manifest(tmp_path / "run/checkpoints/step_0000004")
    assert (manifest.step, manifest.samples) == (4, 48)
    assert manifest.tokens == rows(tmp_path / "run")[-1]["tokens"]
    assert manifest.config["train"]["steps"] == 4
    assert manifest.evaluation is not None
    assert manifest.evaluation["eval_loss"] == rows(tmp_path / "run")[-1]["eval_loss"]
    assert manifest.evaluation["eval_samples"] == 3, "by which evaluations are known to be comparable"
    assert set(manifest.versions) == {"meshtrain", "torch", "python", "code"}
    assert manifest.rng["seed"] == 0


# Jobs ---------------------------------------------------------------------------------------------------------------


def job(processes: int, cases: Sequence[Case], folder: Path) -> list[dict[str, Any]]:
    """Runs one after another in one job."""
    folder.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(as_json(cases))
    arguments = (str(folder / "cases.json"), str(folder / "results.json"))
    done = forked(processes, Path(going_on.__file__), *arguments).check()
    (folder / "printed").write_text(done.out)
    return json.loads((folder / "results.json").read_text())


LAYOUTS = {
    "dp": "{dp_replicate: 2}",
    "fsdp": "{dp_shard: 2}",
    "cp": "{cp: 2}",
    "tp": "{tp: 2}",
    "pp": "{pp: 2}",
}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on two ranks: whole, and stopped on the request of one rank and gone on with; then with damage."""
    from tests.parity.experiments import QUICKSTART, SMALL

    folder = tmp_path_factory.mktemp("layouts")
    cases = []
    options = (*SMALL, f"data.cache={folder}/cache", "model.hidden_dropout=0.1", "train.steps=6", "checkpoint.every=2")
    for name, layout in LAYOUTS.items():
        of = (*options, f"layout={layout}")
        cases.append(Case(QUICKSTART, (*of, f"train.output={folder}/{name}-whole")))
        part = (*of, f"train.output={folder}/{name}")
        cases += [Case(QUICKSTART, part, interrupt="SIGUSR1", at=2, rank=1), Case(QUICKSTART, part)]
    results = job(2, cases, folder)
    assert [found["status"] for found in results] == [0, 75, 0] * len(LAYOUTS), results
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_go_on_with_the_same_bits(layouts: Path, name: str) -> None:
    assert rows(layouts / name) == rows(layouts / f"{name}-whole")
    assert len(rows(layouts / name)) == 6


def test_rank_0_says_who_asked_and_how_to_go_on(layouts: Path) -> None:
    printed = (layouts / "printed").read_text()
    assert "stopped after step 3 of 6: asked to stop by SIGUSR1 on rank 1" in printed
    assert f"the state is in {layouts}/dp/checkpoints/step_0000003\nto go on, start the same command again\n" in printed
    assert f"goes on from {layouts}/dp/checkpoints/step_0000003: step 3" in printed


def test_other_worlds_use_every_sample_of_the_epoch_once(small: str, tmp_path: Path) -> None:
    """4, 2, then 6 ranks: what the steps see is what one process sees, and the losses agree."""
    options = (
        "model.noise=0",
        "batch.global_size=14",
        "train.steps=null",
        "train.epochs=1",
        f"train.output={tmp_path}/run",
    )
    whole = (*options, f"train.output={tmp_path}/whole")
    assert alone(Case(small, whole, record=f"{tmp_path}/seen-whole")) == {"status": 0}
    seen = f"{tmp_path}/seen"
    last = rows(tmp_path / "whole")[-1]["step"]
    third = last // 3
    for processes, layout, at in (
        (4, "{dp_shard: 4}", third),
        (2, "{dp_replicate: 2}", 2 * third),
        (6, "{dp_replicate: 3, dp_shard: 2}", 0),
    ):
        case = Case(small, (*options, f"layout={layout}"), "STOP" if at else None, at, record=f"{seen}-{processes}")
        (found,) = job(processes, [case], tmp_path / f"job-{processes}")
        assert found["status"] == (75 if at else 0), found
    assert not (tmp_path / "run/STOP").exists()
    there = sorted(line for n in (4, 2, 6) for line in written_down(Path(f"{seen}-{n}")))
    assert there == written_down(Path(f"{seen}-whole"))
    assert len(there) == last * 14
    for row, expected in zip(rows(tmp_path / "run"), rows(tmp_path / "whole"), strict=True):
        assert row["samples_digest"] == expected["samples_digest"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    printed = (tmp_path / "job-2/printed").read_text()
    assert "layout: {dp_shard: 4} -> {dp_replicate: 2}" in printed
    assert "global batch 14 over 2 data ranks" in printed
