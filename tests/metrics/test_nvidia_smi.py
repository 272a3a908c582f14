"""What is made of nvidia-smi's words, and of its silence."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from meshtrain.doctor import facts
from meshtrain.doctor.records import Gpu
from meshtrain.metrics.nvidia_smi import CONDITION, condition, gpu_condition


def test_the_condition_of_a_gpu() -> None:
    for case in yaml.safe_load(Path(__file__).with_name("gpu_conditions.yaml").read_text()):
        cells = [cell.strip() for cell in case["row"].split(",")]
        assert condition(cells) == (case["text"], "held down" in case["text"])


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in its place; what it was asked comes into the file `asked`, a line
    each."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def install(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{script}\n')
        program.chmod(0o755)

    return install


def test_the_gpu_is_asked_by_its_id(tmp_path: Path, nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi('echo "2, 900, 1980, 50, 300.0, 300.0, 0x4"')
    text = "GPU 2 at 900 of 1980 MHz, held down by the power limit, 50 °C, 300 of 300 W"
    assert gpu_condition("GPU-77aa") == (text, True)
    fields = ",".join((*CONDITION, "clocks_event_reasons.active"))
    asked = (tmp_path / "asked").read_text()
    assert asked.split() == [
        "--id=GPU-77aa",
        "--format=csv,noheader,nounits",
        f"--query-gpu={fields}",
    ]


@pytest.mark.parametrize(
    ("known", "questions", "held"),
    [
        ("clocks_event_reasons", 1, "heat (hardware)"),
        ("clocks_throttle_reasons", 2, "heat (hardware)"),
        ("no_reasons", 3, ""),
    ],
)
def test_a_field_that_a_driver_does_not_know_costs_no_other(
    tmp_path: Path, nvidia_smi: Callable[[str], None], known: str, questions: int, held: str
) -> None:
    row = "0, H100, GPU-1, 81920, 1024, 580.1"
    nvidia_smi(f"""case "$*" in
        *{known}*) echo "{row}, 0x40" ;;
        *reasons*) echo 'Field is not a valid field to query.'; exit 2 ;;
        *) echo "{row}" ;;
    esac""")
    assert facts._gpus() == (Gpu(0, "H100", "GPU-1", 80.0, 1.0, "580.1", held),)
    assert len((tmp_path / "asked").read_text().splitlines()) == questions


def test_where_nvidia_smi_fails_or_is_missing_nothing_is_known(
    tmp_path: Path, nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi("echo 'Unable to determine the device handle: Unknown Error'")
    assert (gpu_condition("GPU-77aa"), facts._gpus()) == (("", False), ())
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert (gpu_condition("GPU-77aa"), facts._gpus()) == (("", False), ())
