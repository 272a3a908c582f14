"""Faults on purpose strike the rank, the step and the save that were named, once, and what cannot strike is refused."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import yaml

from meshtrain.config import Config, ConfigErrors, Fault
from meshtrain.config.docs import schema
from meshtrain.metrics.logger import read
from meshtrain.run.fault_injection import FaultInjector, PlantedError, describe
from tests.launching import MARK, ROOT, environment, forked, kill_marked, marked, torchrun
from tests.metrics.test_stragglers import SMALL

BASE = "model: {name: llama}\nbatch: {global_size: 8, micro_size: 2}\ntrain: {steps: 20}\ncheckpoint: {every: 5}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(BASE)
    return path


def errors(config: Path, chaos: str, **how: object) -> list[str]:
    """What is said about a list of faults on line 5 of the config and after it."""
    config.write_text(BASE.replace("train: {steps: 20}\n", "") + f"train:\n  steps: 20\n  chaos:\n{chaos}")
    with pytest.raises(ConfigErrors) as caught:
        Config.load(str(config), **how)  # type: ignore[arg-type]
    return [f"{error.place.line}: {error.message}" for error in caught.value.errors]


# The config ---------------------------------------------------------------------------------------------------------


def test_faults_are_read_written_and_read_again(config: Path) -> None:
    given = "[{fault: kill, rank: 1, step: 7}, {fault: slow, rank: 0, step: 3, seconds: 1, until: 5, again: true}]"
    found = Config.load(str(config), [f"train.chaos={given}"], world_size=2)
    first, second = found.train.chaos
    assert first == Fault("kill", 7, 1)
    assert second == Fault("slow", 3, 0, seconds=1.0, until=5, again=True)
    assert not first.in_save
    again = config.with_name("again.yaml")
    again.write_text(found.to_yaml())
    assert Config.load(str(again)).train.chaos == found.train.chaos
    assert Config.load(str(config)).train.chaos == ()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (
            "{fault: kil, rank: 0, step: 1}",
            "train.chaos[0].fault: expected one of `kill`, `stop`, `slow`, `raise` or `fail-save`, found the text "
            "'kil' (did you mean kill?)",
        ),
        ("{rank: 0, step: 1}", "train.chaos[0].fault is missing: give one of `kill`, `stop`"),
        ("{fault: kill, rank: 0}", "train.chaos[0].step is missing: give an integer of at least 1"),
        (
            "{fault: kill, rank: 0, step: 0}",
            "train.chaos[0].step: expected an integer of at least 1, found the integer",
        ),
        ("{fault: kill, rank: -1, step: 1}", "train.chaos[0].rank: expected an integer of at least 0, or null, found"),
        ("{fault: slow, rank: 0, from: 1, seconds: 1}", "no key train.chaos[0].from: did you mean step?"),
        ("{fault: slow, rank: 0, step: 1, delay: 1}", "no key train.chaos[0].delay: did you mean seconds?"),
        ("{fault: slow, rank: 0, step: 1, seconds: 0}", "train.chaos[0].seconds: expected a number above 0, or null"),
        ("kill", "train.chaos[0]: expected a mapping, found the text 'kill'"),
        ("{fault: kill, step: 1}", "train.chaos[0]: kill needs a rank: say whose, such as rank: 1"),
        ("{fault: kill, rank: 4, step: 1}", "train.chaos[0]: there is no rank 4: this job has ranks 0 to 3"),
        ("{fault: kill, rank: 0, step: 21}", "step 21 is beyond the run, which ends at step 20: name one of its steps"),
        ("{fault: fail-save, step: 21}", "step 21 is beyond the run, which ends at step 20"),
        (
            "{fault: fail-save, step: 12}",
            "train.chaos[0]: no checkpoint is written after step 12: checkpoint.every 5 writes one every 5 steps, "
            "and at the end of the run",
        ),
        ("{fault: kill, rank: 0, step: 4, during: save}", "no checkpoint is written after step 4"),
        (
            "{fault: slow, rank: 0, step: 4}",
            "slow needs seconds: how much longer each step takes, such as seconds: 0.5",
        ),
        ("{fault: kill, rank: 0, step: 4, seconds: 1}", "seconds is for slow, and this fault is kill: take it away"),
        ("{fault: stop, rank: 0, step: 4, until: 5}", "until is for slow, and this fault is stop: take it away"),
        ("{fault: slow, rank: 0, step: 4, seconds: 1, until: 3}", "until 3 is before step 4, the first slow one"),
        ("{fault: slow, rank: 0, step: 5, seconds: 1, until: 9, during: save}", "until is for slow steps, and during"),
    ],
)
def test_what_no_run_would_meet_is_refused(fault: str, expected: str, config: Path) -> None:
    said = errors(config, f"    - {fault}\n", world_size=4)
    assert len(said) == 1
    assert said[0].startswith("7: ")
    assert expected in said[0]


def test_each_fault_has_its_own_line(config: Path) -> None:
    faults = "    - {fault: kill, rank: 0, step: 1}\n    - fault: stop\n      rank: 9\n      step: 30\n"
    said = errors(config, faults, world_size=2)
    assert [line[:18] for line in said] == ["9: train.chaos[1]:", "10: train.chaos[1]"]


@pytest.mark.parametrize(
    ("fault", "keys"),
    [
        ("{fault: kill, rank: 0, step: 18, during: save}", ("train.steps=18",)),  # the last one
        ("{fault: fail-save, step: 15}", ()),
        ("{fault: fail-save, step: 3}", ("checkpoint.every=epoch",)),  # nobody knows before the data is there
        ("{fault: fail-save, step: 3}", ("train.steps=null", "train.epochs=2")),
        ("{fault: kill, rank: 0, step: 300}", ("train.steps=null", "train.epochs=2")),
    ],
)
def test_what_may_happen_is_accepted(fault: str, keys: tuple[str, ...], config: Path) -> None:
    Config.load(str(config), [f"train.chaos=[{fault}]", *keys], world_size=1)


def test_after_a_restart_there_may_be_fewer_ranks_than_faults(config: Path) -> None:
    chaos = ["train.chaos=[{fault: kill, rank: 3, step: 7}]"]
    assert Config.load(str(config), chaos, world_size=3, again=True).train.chaos
    with pytest.raises(ConfigErrors, match=r"there is no rank 3: this job has ranks 0 to 2"):
        Config.load(str(config), chaos, world_size=3)
    with pytest.raises(ConfigErrors, match=r"there is no rank 3: this job is rank 0 alone"):
        Config.load(str(config), chaos, world_size=1)
    Config.load(str(config), chaos)  # a plan, which knows of no world


def test_editors_know_the_keys_of_a_fault() -> None:
    text = BASE.replace("steps: 20", "steps: 20, chaos: [{fault: kill, rank: 1, step: 7}]")
    jsonschema.validate(yaml.safe_load(text), schema())
    for wrong in ("{fault: kil, step: 7}", "{fault: kill, rank: 1}", "{fault: kill, step: 7, rnak: 1}"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.safe_load(text.replace("{fault: kill, rank: 1, step: 7}", wrong)), schema())


# When they strike ---------------------------------------------------------------------------------------------------

KILL = Fault("kill", 7, 1)
SLOW = Fault("slow", 3, 1, seconds=0.5, until=5)


def chaos(*faults: Fault, rank: int = 1, again: bool = False, slept: list[float] | None = None) -> FaultInjector:
    job = SimpleNamespace(rank=rank, again=again)
    return FaultInjector(faults, job, sleep=([] if slept is None else slept).append)  # type: ignore[arg-type]


@pytest.mark.parametrize(("fault", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_signals_strike_their_rank_at_their_step(
    fault: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    planted = Fault(fault, 7, 1)  # type: ignore[arg-type]
    for rank in (0, 1, 2):
        struck = []
        one = chaos(planted, rank=rank)
        for step in range(1, 20):
            one.at_step(step)
            one.in_save(step, tmp_path)
            struck += [step] * len(sent)
            sent.clear()
        assert struck == ([7] if rank == 1 else [])
    chaos(planted).at_step(7)
    assert sent == [(os.getpid(), number)]


def test_a_slow_rank_is_slow_from_the_first_to_the_last_of_its_steps() -> None:
    slept: list[float] = []
    one = chaos(SLOW, slept=slept)
    counts = []
    for step in range(1, 9):
        one.at_step(step)
        counts.append(len(slept))
    assert counts == [0, 0, 1, 2, 3, 3, 3, 3]
    assert set(slept) == {0.5}
    for_good = chaos(replace(SLOW, until=None), slept=slept)
    for_good.at_step(10**6)
    assert len(slept) == 4


def test_a_lasting_fault_says_once_that_it_strikes(capsys: pytest.CaptureFixture[str]) -> None:
    one = chaos(SLOW)
    for step in range(1, 9):
        one.at_step(step)
    assert capsys.readouterr().err.count("slow strikes, as planted") == 1


def test_a_save_fails_as_on_a_full_disk(tmp_path: Path) -> None:
    one = chaos(Fault("fail-save", 10), rank=5)  # every rank's
    one.at_step(10)
    one.in_save(9, tmp_path)
    with pytest.raises(OSError, match=r"planted by train\.chaos") as caught:
        one.in_save(10, tmp_path / "rank_00005.safetensors")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "rank_00005.safetensors"))


def test_an_exception_in_a_step_and_in_a_save(tmp_path: Path) -> None:
    with pytest.raises(PlantedError, match=r"rank 1 raises an exception at the beginning of step 4"):
        chaos(Fault("raise", 4, 1)).at_step(4)
    with pytest.raises(PlantedError, match=r"rank 1 raises an exception in the save after step 4"):
        chaos(Fault("raise", 4, 1, during="save")).in_save(4, tmp_path)
    chaos(Fault("raise", 4, 1, during="save")).at_step(4)
    chaos(Fault("raise", 4, 1)).in_save(4, tmp_path)


def test_a_job_that_was_started_again_is_spared_unless_it_was_told_otherwise() -> None:
    slept: list[float] = []
    faults = (SLOW, replace(SLOW, seconds=2.0, again=True))
    one = chaos(*faults, again=True, slept=slept)
    one.at_step(3)
    assert slept == [2.0]
    assert list(one.about()) == [
        "warning: a fault is planted (train.chaos): rank 1 takes 2 s longer for each step, from step 3 to step 5",
        "train.chaos: 1 of its faults struck in the first start, and are not planted again",
    ]
    assert len(list(chaos(*faults).about())) == 2
    assert list(chaos().about()) == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (KILL, "rank 1 is killed (SIGKILL) at the beginning of step 7"),
        (replace(KILL, during="save"), "rank 1 is killed (SIGKILL) in the save after step 7"),
        (Fault("stop", 7, 2), "rank 2 is stopped (SIGSTOP) at the beginning of step 7"),
        (Fault("fail-save", 7), "every rank finds no space left on its disk in the save after step 7"),
        (Fault("fail-save", 7, 3), "rank 3 finds no space left on its disk in the save after step 7"),
        (Fault("slow", 7, 0, seconds=0.25), "rank 0 takes 0.25 s longer for each step, from step 7 on"),
        (Fault("slow", 7, 0, "save", 3.0), "rank 0 takes 3 s longer in the save after step 7"),
    ],
)
def test_a_fault_in_a_sentence(fault: Fault, expected: str) -> None:
    assert describe(fault) == expected


# Real runs ----------------------------------------------------------------------------------------------------------


def train(folder: Path, planted: str, *keys: str) -> tuple[str, ...]:
    given = ("train.steps=8", "checkpoint.every=2", f"train.output={folder}", f"train.chaos=[{planted}]")
    return ("-m", "meshtrain.train", *SMALL, f"data.cache={folder.parent / 'cache'}", *given, *keys)


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("in_background", ["true", "false"])
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(in_background: str, tmp_path: Path) -> None:
    keys = (f"checkpoint.in_background={in_background}",)
    done = forked(2, *train(tmp_path, "{fault: kill, rank: 1, step: 4, during: save}", *keys))
    assert done.status != 0
    assert "kill strikes, as planted" in done.err
    assert steps_saved(tmp_path) == [2]
    assert (tmp_path / "checkpoints" / ".step_0000004.tmp").is_dir()


def test_a_failed_save_is_told_and_the_next_one_succeeds(tmp_path: Path) -> None:
    done = forked(2, *train(tmp_path, "{fault: fail-save, rank: 1, step: 4}")).check()
    assert "there is no checkpoint of step 4: rank 1 on host " in done.out
    assert "No space left on device (planted by train.chaos); training goes on" in done.out
    assert steps_saved(tmp_path) == [2, 6, 8]


def test_a_stopped_rank_is_there_and_does_not_go_on(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command = [
        sys.executable,
        str(ROOT / "tests" / "forked.py"),
        "2",
        *train(tmp_path, "{fault: stop, rank: 1, step: 6}"),
    ]
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen(command, cwd=ROOT, env=environment() | {MARK: mark}, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 120
        while not (stopped := [pid for pid in marked(mark) if state(pid) == "T"]):
            assert time.monotonic() < deadline, (tmp_path / "out").read_text()
            assert job.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.1)
        assert len(stopped) == 1
    finally:
        kill_marked(mark)
        job.wait()
    assert "stop strikes, as planted" in (tmp_path / "out").read_text()
    assert read(tmp_path / "metrics.jsonl")[-1]["step"] in (4, 5)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has gone meanwhile
        return ""


@pytest.mark.cluster
def test_torchrun_starts_the_job_again_and_the_fault_is_not_planted_again(tmp_path: Path) -> None:
    done = torchrun(2, "--max-restarts=1", *train(tmp_path, "{fault: kill, rank: 1, step: 6}")).check()
    assert re.search(r"train.chaos: rank 1 on host \S+ \(dp_shard 1\): kill strikes, as planted", done.err)
    assert done.out.count("warning: a fault is planted (train.chaos): rank 1 is killed (SIGKILL) at the beginning") == 1
    assert "train.chaos: 1 of its faults struck in the first start, and are not planted again" in done.out
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == list(range(1, 9))
    assert json.loads((tmp_path / "exit.json").read_text())["status"] == "done"
