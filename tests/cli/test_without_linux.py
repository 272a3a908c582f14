"""Where Linux' own calls and files are missing, as on macOS, training and its commands work."""

import json
import sys
from pathlib import Path

import pytest

from tests.launching import TORCHRUN, run

SCRIPT = str(Path(__file__).parent / "without_linux.py")
SHORT = (
    "train.steps=3",
    "train.eval_every=0",
    "train.sample_tokens=0",
    "optimizer.warmup_steps=0",
    "batch.global_size=4",
    "batch.micro_size=2",
    "data.workers=2",
)


@pytest.mark.slow
def test_a_run_of_two_ranks_trains(tmp_path: Path) -> None:
    """Data workers, the watchdog, timing and checkpoints do without."""
    job = (*TORCHRUN, "--standalone", "--nproc-per-node=2", SCRIPT)
    run((*job, "meshtrain.train", "quickstart", *SHORT, f"train.output={tmp_path}")).check()
    end = json.loads((tmp_path / "exit.json").read_text())
    assert (end["status"], end["step"]) == ("done", 3)


@pytest.mark.slow
def test_prepare_works_in_one_process(tmp_path: Path) -> None:
    output = f"data.cache={tmp_path}"
    done = run((sys.executable, SCRIPT, "meshtrain.cli", "prepare", "quickstart", output)).check()
    assert "processes" not in done.out
    assert "fingerprint" in done.out


@pytest.mark.slow
def test_the_doctor_says_that_it_needs_linux() -> None:
    refused = run((sys.executable, SCRIPT, "meshtrain.cli", "doctor"))
    assert refused.status == 2
    assert (
        "meshtrain doctor reads what Linux says of a host, and this one has darwin" in refused.err
    )
