"""`meshtrain plan --schedule` draws what the steps of a run do."""

import json
from pathlib import Path

import pytest

from meshtrain.cli.main import main
from meshtrain.cli.schedule import LEVELS, courses_of, schedule_json, schedule_text
from meshtrain.config import Config
from meshtrain.errors import InputError
from meshtrain.optim.lr_schedule import learning_rate

KEYS = [
    "train.steps=40",
    "optimizer.warmup_steps=4",
    "optimizer.schedule=wsd",
    "optimizer.decay_steps=10",
    "batch.global_size=[[0, 16], [8, 32], [90, 64]]",
    "data.sources=[{name: lib, weight: [[0, 3], [20, 1]]}, {name: own, source: tokens, path: "
    "there}]",
]


def test_each_course_has_the_value_of_each_step() -> None:
    config = Config.load("configs/quickstart.yaml", KEYS)
    rates, sizes, lib, own = (course.values for course in courses_of(config))
    assert rates == tuple(learning_rate(config.optimizer, step, 40) for step in range(1, 41))
    assert sizes == (16,) * 8 + (32,) * 32
    assert lib == (0.75,) * 20 + (0.5,) * 20
    assert own == (0.25,) * 20 + (0.5,) * 20


def test_drawn_in_a_terminal_and_as_numbers() -> None:
    config = Config.load("configs/quickstart.yaml", KEYS)
    lines = schedule_text(config, courses_of(config)).splitlines()
    assert lines[0] == "schedule of quickstart: 40 steps, 1,152 samples"
    assert lines[2] == f"batch size     {LEVELS[4] * 8}{LEVELS[-1] * 32}  16 -> 32, at most 32"
    assert lines[5].startswith(
        "from step 9 on, after 128 samples: batch size 32, share of lib 0.75"
    )
    assert len(lines) == 7
    plain = schedule_json(config, courses_of(config))
    assert plain["steps"] == list(range(1, 41))
    assert plain["samples"][-1] == 1152


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "schedule.png"
    assert (
        main(
            [
                "plan",
                "configs/quickstart.yaml",
                "--schedule",
                "--json",
                "--png",
                str(picture),
                *KEYS,
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["courses"]["batch size"][:9] == [16] * 8 + [32]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(InputError, match=r"give train\.steps=N"):
        courses_of(Config.load("configs/digits.yaml"))
