"""A run that was interrupted goes on as if nothing had happened, or says why it does not."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshtrain.checkpoint.directory import complete_steps, open_manifest
from meshtrain.checkpoint.folder_lock import lock_folder
from meshtrain.data import OpenData
from meshtrain.job.process import Job
from meshtrain.metrics.logger import read
from tests.checkpoint.faults import NEWER, OLDER, SHARD, Run, damage, tree
from tests.checkpoint.going_on import (
    Case,
    run_case,
    run_cases,
    signals_installed,
    small_run,
    written_down,
)
from tests.parity.experiments import QUICKSTART, SMALL

TIMES = re.compile(r"time|per_s|mfu|memory|sent_bytes|goodput|wall")
EVALUATED = ("data.validation=0.2", "train.eval_every=2")


def values(folder: Path) -> list[dict[str, Any]]:
    """What must be the same whenever a run was interrupted."""
    rows = read(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not TIMES.search(name)} for row in rows]


def exit_of(run: Run) -> dict[str, Any]:
    return json.loads((run.folder / "exit.json").read_text())


# The same bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "float16", "float64"])
def test_one_process_goes_on_with_the_same_bits(fresh: Run, precision: str) -> None:
    """Also what was counted, the evaluations, and the random numbers that the model draws."""
    options = (*EVALUATED, f"train.precision={precision}", "checkpoint.every=3")
    fresh.train(*options, output="whole")
    fresh.train(*options, interrupt="SIGUSR1", at=3, status=75)
    assert exit_of(fresh)["step"] == 4
    fresh.train(*options, interrupt="crash", at=8, status=1)
    assert exit_of(fresh)["status"] == "failed"
    assert values(fresh.folder)[-1]["step"] in (6, 7), "rows behind the checkpoint are made again"
    fresh.train(*options)
    assert values(fresh.folder) == values(fresh.place / "whole")
    assert len(fresh.rows()) == 8
    assert "eval_loss" in values(fresh.folder)[7]
    assert fresh.steps() == [4, 6, 8]


def test_an_epoch_that_was_interrupted_has_its_sum(fresh: Run) -> None:
    options = ("batch.global_size=100", "batch.micro_size=50", "checkpoint.every=epoch")
    epoch = re.compile(r"^epoch .*", re.MULTILINE)
    epochs = epoch.findall(fresh.train(*options, output="whole"))
    assert len(epochs) >= 2, "this test has epochs"
    first = next(row["step"] for row in values(fresh.place / "whole") if row["epoch"] == 2) - 1
    assert complete_steps(fresh.place / "whole/checkpoints")[0] in (first, first + 1)
    printed = fresh.train(*options, interrupt="SIGUSR1", at=first, status=75)
    assert epoch.findall(printed + fresh.train(*options)) == epochs


# What it goes on from -----------------------------------------------------------------------------


def test_where_nothing_is_whole_nothing_begins_anew(run: Run) -> None:
    damage(run.newest)
    damage(run.checkpoints / OLDER)
    content = tree(run.place)
    refused = run.train("optimizer.lr=0.1", status=2)
    assert "no checkpoint is whole that this run could go on from" in refused
    for checkpoint in (OLDER, NEWER):
        assert f"{run.checkpoints / checkpoint}/{SHARD}" in refused
    assert tree(run.place) == content


def test_a_used_folder_is_no_fresh_one(fresh: Run) -> None:
    fresh.train("checkpoint.resume=none", "train.steps=2")
    assert "holds a run already" in fresh.train("checkpoint.resume=none", status=2)
    fresh.train("checkpoint.resume=none", again=True)
    assert fresh.rows() == fresh.undisturbed(), "a restart goes on"
    shutil.rmtree(fresh.checkpoints)
    assert "holds a run already" in fresh.train("checkpoint.resume=none", status=2)


def test_a_run_branches_off_another_and_then_goes_on_from_its_own(run: Run) -> None:
    content = tree(run.folder)
    for output, start, name in (
        ("a", 4, "run"),
        ("b", 4, "run/checkpoints"),
        ("c", 2, f"run/checkpoints/{OLDER}"),
    ):
        branch = f"checkpoint.resume={run.place}/{name}"
        run.train(branch, "train.steps=6", output=output)
        assert run.rows(output) == run.undisturbed()[start:6]
    printed = run.train(branch, output="c")
    assert "with which this run began; it goes on from its own checkpoints now" in printed
    assert run.rows("c") == run.undisturbed()[2:]
    assert tree(run.folder) == content


def test_a_run_can_go_back(run: Run) -> None:
    back = (f"checkpoint.resume={run.checkpoints / OLDER}", "checkpoint.keep_last=9")
    printed = run.train(*back, interrupt="SIGTERM", at=3, status=75)
    assert f"{run.newest} is set aside as {NEWER}.aside-1" in printed
    assert "start the same command again with checkpoint.resume=latest" in printed
    printed = run.train(*back)
    assert (
        "to which this run went back with the same config before; it goes on from its newest"
        in printed
    )
    assert f"goes on from {run.newest}: step 4" in printed, (
        "the next job of a chain does not go back once more"
    )
    assert run.rows() == run.undisturbed()
    another = (*back, "optimizer.lr=1e-5")
    printed = run.train(*another, interrupt="SIGTERM", at=3, status=75)
    assert f"goes on from {run.checkpoints / OLDER}: step 2" in printed
    printed = run.train(*another, again=True)
    assert f"goes on from {run.newest}: step 4" in printed, "nor does a restart"
    refused = run.train(f"checkpoint.resume={run.place}", output="fresh", status=2)
    assert "is no checkpoint and holds none" in refused


def test_a_finished_run_says_so_goes_further_and_not_backwards(run: Run) -> None:
    metrics = run.folder / "metrics.jsonl"
    first = metrics.read_bytes()
    assert "is done: 4 steps" in run.train("train.steps=4")
    assert metrics.read_bytes() == first
    refused = run.train("train.steps=3", status=2)
    assert f"{NEWER} is of step 4, and this run ends at step 3" in refused
    assert exit_of(run)["status"] == "done", "a run that is refused writes nothing"
    assert "the last step, where the learning rate ends: 4 -> 8" in run.train()
    assert run.rows() == run.undisturbed()
    assert metrics.read_bytes().startswith(first)
    shutil.rmtree(run.checkpoints)
    assert "no checkpoint of it" in run.train("train.steps=12", status=2)


def test_a_run_that_goes_on_does_not_ask_for_the_weights_that_it_began_with(run: Run) -> None:
    shutil.copytree(run.newest, run.place / NEWER)
    begun = (f"model.weights={run.place / NEWER}", "train.steps=2")
    run.train(*begun, output="new")
    assert run.rows("new")[0][1] < run.rows()[0][1] - 0.01, (
        "it starts with what the other run had learned"
    )
    damage(run.place / NEWER)
    run.train(*begun, "train.steps=3", output="new")
    run.train(*begun, output="another", status=2)


# Folders ------------------------------------------------------------------------------------------


def test_a_read_only_folder_can_be_read(run: Run) -> None:
    disk = run.place / "disk"
    run.mount(disk, "150k")
    shutil.copytree(run.newest, disk / NEWER)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    refused = run.train(f"checkpoint.path={disk}", output="new", status=2)
    assert f"the folder {disk} cannot be used (Read-only file system)" in refused
    assert "name another one with checkpoint.path=FOLDER" in refused
    assert "Read-only file system" in run.train(output="disk/run", status=2)
    run.command("checkpoint", "verify", disk)
    run.command("export", disk, run.place / "exported")
    run.command("export", disk, disk / "exported", status=2)
    run.train(f"checkpoint.resume={disk / NEWER}", output="new")


def test_two_runs_on_one_folder(run: Run) -> None:
    for folder, output in ((run.folder, "run"), (run.checkpoints, "other")):
        with lock_folder(folder):
            content = tree(run.folder)
            refused = run.train(f"checkpoint.path={run.checkpoints}", output=output, status=2)
            assert f"the folder {folder} is in use by process {os.getpid()} on host" in refused
            run.command("checkpoint", "verify", run.folder)
            run.command("export", run.folder, run.place / "exported")
            assert tree(run.folder) == content
    run.train(f"checkpoint.path={run.folder}", status=2)
    run.train(f"checkpoint.path={run.place}/elsewhere", "train.steps=2", output="other")
    assert complete_steps(run.place / "elsewhere") == [2]


# What has to agree --------------------------------------------------------------------------------


def test_another_run_is_refused_with_all_that_differs(run: Run) -> None:
    content = tree(run.place)
    refused = run.train(
        "model.width=16",
        "batch.global_size=24",
        "train.seed=1",
        "train.steps=9",
        "optimizer.lr=0.1",
        status=2,
    )
    for line in ("model.width: 8 -> 16", "batch.global_size: 12 -> 24", "train.seed: 0 -> 1"):
        assert line in refused
    assert "optimizer.lr" not in refused
    assert tree(run.place) == content


def test_what_may_change_is_said(run: Run) -> None:
    printed = run.train("batch.micro_size=3", "optimizer.min_lr=1e-3", "train.steps=5")
    (line,) = re.findall(r"^changed since that checkpoint: (.*)$", printed, re.MULTILINE)
    for change in (
        "batch.micro_size: 2 -> 3",
        "optimizer.min_lr: 0.0 -> 0.001",
        "the learning rate ends: 4 -> 5",
    ):
        assert change in line
    assert "train.output" not in line


@pytest.fixture
def own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """A run whose data may be changed."""
    return Run(small_run(tmp_path), tmp_path, capsys)


def test_other_data_is_refused_unless_allowed(own: Run) -> None:
    own.train("train.steps=2")
    text = own.place / "text.txt"
    text.write_text(text.read_text().replace("7", "8"))
    refused = own.train("train.steps=4", status=2)
    assert "the data: " in refused
    assert "allow other data with checkpoint.allow_other_data=true" in refused
    printed = own.train("train.steps=4", "checkpoint.allow_other_data=true")
    assert "changed since that checkpoint: checkpoint.allow_other_data" in printed


def test_another_validation_of_the_same_training_data_is_other_data(
    own: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a checkpoint whose fingerprint was of the training's data alone, as long as these are
    the same."""
    held_out = own.place / "held.txt"
    validation = f"data.validation={held_out}"
    held_out.write_text("7 days are a week. " * 20)
    identity = OpenData.identity.fget

    def of_training(data: OpenData) -> dict[str, Any]:
        both = identity(data)
        return both | {"fingerprint": both["fingerprint"].split()[0]}

    with monkeypatch.context() as patch:
        patch.setattr(OpenData, "identity", property(of_training))
        own.train("train.steps=2", validation)
    own.train("train.steps=4", validation)
    held_out.write_text("8 days are a week. " * 20)
    (line,) = re.findall("the data: .*", own.train("train.steps=6", validation, status=2))
    then, now = (re.findall("[0-9a-f]{12}", part) for part in line.split(" -> "))
    assert then[0] == now[0]
    assert then[1] != now[1], "people see what differs"


def test_a_manifest_says_what_the_run_was(fresh: Run) -> None:
    fresh.train(*EVALUATED, "train.steps=4", "train.eval_samples=3")
    manifest, _ = open_manifest(fresh.newest)
    last = values(fresh.folder)[-1]
    assert (manifest.step, manifest.samples, manifest.tokens) == (4, 48, last["tokens"])
    assert manifest.config["train"]["steps"] == 4
    assert manifest.evaluation is not None
    assert manifest.evaluation["eval_loss"] == last["eval_loss"]
    assert manifest.evaluation["eval_samples"] == 3, (
        "by which evaluations are known to be comparable"
    )
    assert set(manifest.versions) == {"meshtrain", "torch", "python", "code"}
    assert manifest.rng["seed"] == 0


# Several ranks ------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "axis",
    [
        *(pytest.param(axis, marks=pytest.mark.slow) for axis in ("dp_replicate", "cp", "tp")),
        "dp_shard",
        "pp",
    ],
)
def test_two_ranks_go_on_with_the_same_bits(
    axis: str, hosts: Job, shared_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the run was stopped on the request of one of them."""
    keys = (
        *SMALL,
        f"layout={{{axis}: 2}}",
        "model.hidden_dropout=0.1",
        "train.steps=6",
        "checkpoint.every=2",
    )
    keys += (f"data.cache={shared_path}/cache",)
    whole = Case(QUICKSTART, (*keys, f"train.output={shared_path}/whole"))
    case = Case(QUICKSTART, (*keys, f"train.output={shared_path}/run"))
    assert run_case(whole, hosts) == {"status": 0}
    with signals_installed() as signals:
        assert run_case(replace(case, interrupt="SIGUSR1", at=2, rank=1), hosts, signals) == {
            "status": 75
        }
    assert run_case(case, hosts) == {"status": 0}
    rows = values(shared_path / "run")
    assert rows == values(shared_path / "whole")
    assert len(rows) == 6
    if hosts.rank == 0:
        printed = capsys.readouterr().out
        saved = shared_path / "run/checkpoints/step_0000003"
        assert "stopped after step 3 of 6: asked to stop by SIGUSR1 on rank 1" in printed
        assert f"the state is in {saved}\nto go on, start the same command again\n" in printed
        assert f"goes on from {saved}: step 3" in printed


@pytest.mark.slow
def test_other_worlds_use_every_sample_of_the_epoch_once(fresh: Run, tmp_path: Path) -> None:
    """4, 2, then 6 ranks: what the steps see is what one process sees, and the losses agree."""
    options = ("model.noise=0", "batch.global_size=14", "train.steps=null", "train.epochs=1")
    fresh.train(*options, output="whole", record=f"{tmp_path}/seen-whole")
    expected_rows = values(tmp_path / "whole")
    last = expected_rows[-1]["step"]
    third = last // 3
    seen = f"{tmp_path}/seen"
    printed = {}
    for processes, layout, at in (
        (4, "{dp_shard: 4}", third),
        (2, "{dp_replicate: 2}", 2 * third),
        (6, "{dp_replicate: 3, dp_shard: 2}", 0),
    ):
        own = (*options, f"train.output={fresh.folder}", f"layout={layout}")
        case = Case(
            str(fresh.config), own, "STOP" if at else None, at, record=f"{seen}-{processes}"
        )
        results, printed[processes] = run_cases(processes, [case], tmp_path)
        assert results == [{"status": 75 if at else 0}]
    assert not (fresh.folder / "STOP").exists()
    samples = sorted(line for ranks in (4, 2, 6) for line in written_down(Path(f"{seen}-{ranks}")))
    assert samples == written_down(Path(f"{seen}-whole"))
    assert len(samples) == last * 14
    for row, expected in zip(values(fresh.folder), expected_rows, strict=True):
        assert row["samples_digest"] == expected["samples_digest"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert "layout: {dp_shard: 4} -> {dp_replicate: 2}" in printed[2]
    assert "global batch 14 over 2 data ranks" in printed[2]
