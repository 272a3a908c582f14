"""Faults on purpose strike the rank, the step and the save that were named, once, and what cannot
strike is refused."""

import errno
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from meshtrain.config import Config, ConfigErrors
from meshtrain.config.docs import schema
from meshtrain.config.schema import FaultSection
from meshtrain.run.fault_injection import FaultInjector, PlantedError, describe
from tests.launching import forked
from tests.parity.experiments import QUICKSTART, SMALL

BASE = (
    "model: {name: llama}\nbatch: {global_size: 8, micro_size: 2}\ntrain: {steps: 20}\ncheckpoint: "
    "{every: 5}\n"
)
FAULTS = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text())


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(BASE)
    return path


def errors(config: Path, faults: str, world_size: int) -> list[str]:
    """What is said about a list of faults on line 7 of the config and after it."""
    config.write_text(
        BASE.replace("train: {steps: 20}\n", "") + f"train:\n  steps: 20\n  chaos:\n{faults}"
    )
    with pytest.raises(ConfigErrors) as caught:
        Config.load(str(config), world_size=world_size)
    return [f"{error.place.line}: {error.message}" for error in caught.value.errors]


# The config ---------------------------------------------------------------------------------------


def test_faults_are_read_written_and_read_again(config: Path) -> None:
    faults = "[{fault: kill, rank: 1, step: 7}, {fault: slow, rank: 0, step: 3, seconds: 1}]"
    loaded = Config.load(str(config), [f"train.chaos={faults}"], world_size=2)
    assert loaded.train.chaos == (
        FaultSection("kill", 7, 1),
        FaultSection("slow", 3, 0, seconds=1.0),
    )
    again = config.with_name("again.yaml")
    again.write_text(loaded.to_yaml())
    assert Config.load(str(again)).train.chaos == loaded.train.chaos
    assert Config.load(str(config)).train.chaos == ()


def test_what_no_run_would_meet_is_refused(config: Path) -> None:
    for case in FAULTS["refused"]:
        (error,) = errors(config, f"    - {case['fault']}\n", world_size=4)
        assert error.startswith("7: ")
        assert case["text"] in error
    faults = (
        "    - {fault: kill, rank: 0, step: 1}\n    - fault: stop\n      rank: 9\n      step: 30\n"
    )
    lines = [error[:18] for error in errors(config, faults, world_size=2)]
    assert lines == ["9: train.chaos[1]:", "10: train.chaos[1]"], "each has its own"


def test_what_may_happen_is_accepted(config: Path) -> None:
    for case in FAULTS["accepted"]:
        Config.load(str(config), [f"train.chaos=[{case['fault']}]", *case["keys"]], world_size=1)


def test_after_a_restart_there_may_be_fewer_ranks_than_faults(config: Path) -> None:
    chaos = ["train.chaos=[{fault: kill, rank: 3, step: 7}]"]
    assert Config.load(str(config), chaos, world_size=3, again=True).train.chaos
    for world_size, ranks in ((3, "has ranks 0 to 2"), (1, "is rank 0 alone")):
        with pytest.raises(ConfigErrors, match=f"there is no rank 3: this job {ranks}"):
            Config.load(str(config), chaos, world_size=world_size)
    Config.load(str(config), chaos)  # a plan, which knows of no world


def test_editors_know_the_keys_of_a_fault() -> None:
    import jsonschema

    text = BASE.replace("steps: 20", "steps: 20, chaos: [{fault: kill, rank: 1, step: 7}]")
    jsonschema.validate(yaml.safe_load(text), schema())
    for wrong in (
        "{fault: kil, step: 7}",
        "{fault: kill, rank: 1}",
        "{fault: kill, step: 7, rnak: 1}",
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(
                yaml.safe_load(text.replace("{fault: kill, rank: 1, step: 7}", wrong)), schema()
            )


# When they strike ---------------------------------------------------------------------------------

SLOW = FaultSection("slow", 3, 1, seconds=0.5)


def chaos(
    *faults: FaultSection, rank: int = 1, again: bool = False, slept: list[float] | None = None
) -> FaultInjector:
    job = SimpleNamespace(rank=rank, again=again)
    return FaultInjector(faults, job, sleep=([] if slept is None else slept).append)


@pytest.mark.parametrize(("fault", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_signals_strike_their_rank_at_their_step(
    fault: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    struck = []
    monkeypatch.setattr(os, "kill", lambda pid, sent: struck.append((pid, sent)))
    for rank in (0, 1, 2):
        injector = chaos(FaultSection(fault, 7, 1), rank=rank)
        for step in range(1, 20):
            injector.at_step(step)
            injector.in_save(step, tmp_path)
            assert struck == ([(os.getpid(), number)] if (rank, step) == (1, 7) else [])
            struck.clear()


def test_a_slow_rank_is_slow_from_its_step_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slept = []
    injector = chaos(SLOW, slept=slept)
    counts = []
    for step in range(1, 9):
        injector.at_step(step)
        counts.append(len(slept))
    assert counts == [0, 0, 1, 2, 3, 4, 5, 6]
    assert set(slept) == {0.5}
    assert capsys.readouterr().err.count("slow strikes, as planted") == 1


def test_a_save_fails_as_on_a_full_disk(tmp_path: Path) -> None:
    injector = chaos(FaultSection("fail-save", 10), rank=5)  # every rank's
    injector.at_step(10)
    injector.in_save(9, tmp_path)
    file = tmp_path / "rank_00005.safetensors"
    with pytest.raises(OSError, match=r"planted by train\.chaos") as caught:
        injector.in_save(10, file)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(file))


def test_an_exception_in_a_step(tmp_path: Path) -> None:
    injector = chaos(FaultSection("raise", 4, 1))
    injector.in_save(4, tmp_path)
    with pytest.raises(
        PlantedError, match=r"rank 1 raises an exception at the beginning of step 4"
    ):
        injector.at_step(4)


def test_a_job_that_was_started_again_is_spared() -> None:
    slept = []
    injector = chaos(SLOW, again=True, slept=slept)
    injector.at_step(3)
    assert slept == []
    assert list(injector.about()) == [
        "train.chaos: 1 of its faults struck in the first start, and are not planted again",
    ]
    assert list(chaos(SLOW).about()) == [
        "warning: a fault is planted (train.chaos): rank 1 takes 0.5 s longer for each step, from "
        "step 3 on",
    ]
    assert list(chaos().about()) == []
    assert list(chaos(again=True).about()) == []


def test_a_fault_in_a_sentence() -> None:
    for case in FAULTS["sentences"]:
        assert describe(FaultSection(**case["of"])) == case["text"]


# Real runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_background", ["true", "false"])
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(
    in_background: str, tmp_path: Path
) -> None:
    keys = (
        "train.steps=8",
        "checkpoint.every=2",
        f"checkpoint.in_background={in_background}",
        f"train.output={tmp_path}",
        f"data.cache={tmp_path.parent / 'cache'}",
    )
    killed = ("-m", "tests.fault_in_save", "kill", "1", "4")  # rank 1, step 4
    job = forked(2, *killed, QUICKSTART, *SMALL, *keys)
    assert job.status != 0
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*")) == [
        "step_0000002"
    ]
    assert (tmp_path / "checkpoints" / ".step_0000004.tmp").is_dir()


def test_a_run_announces_a_fault_and_the_rank_reports_it(tmp_path: Path) -> None:
    keys = (
        "train.steps=8",
        "train.chaos=[{fault: kill, rank: 1, step: 4}]",
        f"train.output={tmp_path}",
        f"data.cache={tmp_path.parent / 'cache'}",
    )
    job = forked(2, "-m", "meshtrain.train", QUICKSTART, *SMALL, *keys)
    assert job.status != 0
    announced = "warning: a fault is planted (train.chaos): rank 1 is killed (SIGKILL) at the"
    assert job.out.count(announced) == 1
    struck = r"train.chaos: rank 1 on host \S+ \(dp_shard 1\): kill strikes, as planted"
    assert re.search(struck, job.err)
