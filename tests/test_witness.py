"""The witness: when its disturbances come, what it compares, and a run of it in miniature."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.config import Config
from meshtrain.layout import Layout
from tests.launching import forked
from tools.witness import __main__ as witness
from tools.witness.plan import DISTURBANCES, ONE, faults, first_change, legs, save_every, step_of

TINY = (
    "model={name: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 2, vocab_size: 256}",
    "data.seq_len=16",
    "optimizer.warmup_steps=4",
    "checkpoint.in_background=false",  # steps are shorter than a save
)


# The plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [40, 60, 100, 2000])
def test_disturbances_come_one_after_the_other(steps: int) -> None:
    """Each strikes behind the checkpoint from which its job went on, and before the end."""
    every = save_every(steps)
    assert len(DISTURBANCES) == 12
    came = [step_of(disturbance, every) for disturbance in DISTURBANCES]
    assert came == sorted(set(came))
    assert came[-1] < steps


def test_those_that_keep_one_process_come_first() -> None:
    layouts = [leg.layout for leg in legs()]
    assert layouts[: first_change()] == [ONE] * first_change()
    assert ONE not in layouts[first_change() :]
    kinds = {disturbance.kind for disturbance in DISTURBANCES[: first_change() - 1]}
    assert kinds == {"kill", "full disk", "kill in save", "damage", "stop"}
    assert len({*layouts}) == 7, "one process and six other layouts"


def test_a_full_disk_is_in_a_save_and_the_kill_before_the_next() -> None:
    (full,) = (d for d in DISTURBANCES if d.kind == "full disk")
    (keys,) = faults(full, every=50)[1]
    assert keys == (
        "train.chaos=[{fault: fail-save, rank: 0, step: 200}, {fault: kill, rank: 0, step: 226}]"
    )


def test_jobs_of_all_legs_are_configs_and_words_that_torchrun_leaves_alone() -> None:
    for leg in legs():
        how, more = faults(leg.end, every=50)
        assert not any(word.startswith("-") for word in how)
        ranks = Layout(yaml.safe_load(leg.layout)).world_size
        keys = [*witness.OVERRIDES, f"layout={leg.layout}", "checkpoint.every=50", *more]
        config = Config.load(str(witness.CONFIG), [*keys, "train.steps=2000"], world_size=ranks)
        assert config.batch.global_size * config.data.seq_len == 1024


def test_a_run_that_is_too_short_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--steps", "39"], "39 steps are too few for 12 disturbances: give at least 40"),
        (["--stepz", "39"], "expected key.path=value, found --stepz"),
        (["train.seed=1"], "expected a folder before key.path=value"),
    ):
        with pytest.raises(SystemExit) as ended:
            witness.main(arguments)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


# Comparing ----------------------------------------------------------------------------------------


def rows(*losses: float) -> list[dict[str, Any]]:
    return [
        {"step": i, "loss": loss, "grad_norm": 1.0, "samples_digest": str(i)}
        for i, loss in enumerate(losses, 1)
    ]


def test_bits_are_equal_until_the_layout_changes() -> None:
    result = witness.compare(rows(4, 2, 1), rows(4, 2, 1 + 1e-12), changed_after=2, tolerance=1e-9)
    assert result["problems"] == []
    assert result["bit_equal_until"] == 2
    assert result["largest"] == pytest.approx(1e-12, rel=1e-3)
    assert result["rows"][0] == (1, 4, 4, 0, 0)


def test_what_is_no_rounding_is_a_problem() -> None:
    late = witness.compare(rows(4, 2, 1), rows(4, 2 + 1e-15, 1), changed_after=2, tolerance=1e-9)
    assert [text[:22] for text in late["problems"]] == ["step 2 has other bits,"]
    apart = witness.compare(rows(4, 2, 1), rows(4, 2, 1.01), changed_after=2, tolerance=1e-9)
    assert "differ by 1.0e-02: more than rounding" in apart["problems"][0]
    other = rows(4, 2, 1)
    other[1]["samples_digest"] = "7"
    assert witness.compare(rows(4, 2, 1), other, 3, 1e-9)["problems"] == [
        "step 2 has other samples"
    ]
    assert witness.compare(rows(4, 2), rows(4), 1, 1e-9)["problems"] == [
        "the runs have not the same steps"
    ]


# Runs ---------------------------------------------------------------------------------------------


def launch(ranks: int, arguments: Sequence[str], log: Path) -> int:
    job = forked(ranks, *arguments)
    with log.open("a") as file:
        file.write(job.out + job.err)
    return job.status


@pytest.mark.slow
def test_in_miniature(tmp_path: Path) -> None:
    """With all disturbances, and stopped itself in the middle: it goes on behind the last leg."""
    folder = tmp_path / "witness"
    arguments = [str(folder), "--steps", "60", *TINY, f"data.cache={tmp_path / 'cache'}"]
    started: list[int] = []

    def until_the_eighth(ranks: int, job: Sequence[str], log: Path) -> int:
        if len(started) == 8:
            raise KeyboardInterrupt
        started.append(ranks)
        return launch(ranks, job, log)

    with pytest.raises(KeyboardInterrupt):
        witness.main(arguments, until_the_eighth)
    assert len((folder / witness.LEGS).read_text().splitlines()) == 7

    began: list[int] = []

    def goes_on(ranks: int, job: Sequence[str], log: Path) -> int:
        began.append(ranks)
        return launch(ranks, job, log)

    assert witness.main(arguments, goes_on) == 0
    assert began == [1, 2, 3, 2, 2, 4, 2], "the finished run, and the six legs that were left"
    result = json.loads((folder / witness.RESULT).read_text())
    assert result["problems"] == []
    assert result["bit_equal_until"] >= result["changed_after"] > 10
    assert 0 < result["largest"] < 1e-9, "rounding, and nothing else"
    log = (folder / "disturbed.log").read_text()
    assert log.count("kill strikes, as planted") == 5
    assert "No space left on device (planted by train.chaos)" in log
    assert "is set aside as" in log
    assert (folder / "witness.png").stat().st_size > 10_000
