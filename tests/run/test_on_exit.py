"""train.on_exit runs once, hears how the run ended, and cannot harm it."""

import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from meshtrain.errors import InputError, TrainingError
from meshtrain.job.watchdog.records import Diagnosis, DiagnosisKind
from meshtrain.run import on_exit
from meshtrain.run.on_exit import run_on_exit
from meshtrain.run.run_folder import RunFolder
from meshtrain.run.status import RunStatus

END = {
    "status": "failed",
    "code": 1,
    "kind": "lost",
    "step": 7,
    "reason": 'rank 3 is "gone"; $(touch no)\nmore',
}
TELL = 'echo "$MESHTRAIN_STATUS|$MESHTRAIN_STEP|$MESHTRAIN_KIND|$MESHTRAIN_CODE|$MESHTRAIN_REASON" >> told'


def tell(folder: Path) -> str:
    return f"cd {shlex.quote(str(folder))} && {TELL}"


def test_it_gets_the_path_and_the_variables(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exit.json").write_text(json.dumps(END))
    run_on_exit(
        f'{tell(tmp_path)} && cp "$MESHTRAIN_EXIT_JSON" "$MESHTRAIN_RUN"/copy', END, tmp_path
    )
    assert (tmp_path / "told").read_text() == f"failed|7|lost|1|{END['reason']}\n"
    assert json.loads((tmp_path / "copy").read_text()) == END
    assert not (tmp_path / "no").exists()
    assert capfd.readouterr().err == ""


def test_what_is_wrong_with_it_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_exit("exit 3", END, tmp_path)
    assert (
        f"train.on_exit: 'exit 3' has ended with status 3; {tmp_path}/exit.json has"
        in capfd.readouterr().err
    )
    with monkeypatch.context() as patch:
        patch.setattr(on_exit, "ON_EXIT_S", 0.3)
        run_on_exit("sleep 1000", END, tmp_path, 0.3)
    assert "took more than 0.3 s and was ended" in capfd.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    run_on_exit("true", END, tmp_path)
    assert "train.on_exit could not be started" in capfd.readouterr().err


def test_a_process_that_is_about_to_be_ended_waits_shortly_and_the_command_goes_on(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "fifo")
    run_on_exit(f"read line < {tmp_path}/fifo; echo $line > {tmp_path}/fifo", END, tmp_path, 0.1)
    (tmp_path / "fifo").write_text("it goes on\n")  # returns when it is read
    assert (tmp_path / "fifo").read_text() == "it goes on\n"


def status_of(folder: Path, rank: int = 0, *, begun: bool = True) -> RunStatus:
    failures = SimpleNamespace(first_failure=lambda *_: None)
    job: Any = SimpleNamespace(rank=rank, failures=failures, say=lambda text: None)
    status = RunStatus(RunFolder(folder), job, tell(folder))
    if begun:
        status._goodput = Mock(finished_step=7)
        status._goodput.summary.return_value = SimpleNamespace(row=dict, jobs=1)
        status._sinks = Mock()
    return status


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (None, "done|7|done|0|all steps are done"),
        (TrainingError("not finite"), "failed|7|training|1|TrainingError: not finite"),
        (InputError("wrong"), "failed|7|input|1|InputError: wrong"),
    ],
)
def test_it_runs_when_a_run_ends_and_sinks_hear_of_it(
    tmp_path: Path, error: Exception | None, line: str
) -> None:
    status = status_of(tmp_path)
    status.__exit__(None, error, None)
    assert (tmp_path / "told").read_text() == f"{line}\n"
    word = line.partition("|")[0]
    status._sinks.close.assert_called_once_with(word, on_exit.ON_EXIT_S)
    assert json.loads((tmp_path / "exit.json").read_text())["status"] == word


@pytest.mark.parametrize("rank", [0, 2])
def test_it_runs_at_a_verdict_once(tmp_path: Path, rank: int) -> None:
    status = status_of(tmp_path, rank)
    status.write_failed(Diagnosis(DiagnosisKind.FAILED, (1,), "rank 1 is gone"))
    status.__exit__(None, None, None)
    assert (tmp_path / "told").read_text() == "failed|7|failed|1|rank 1 is gone\n"


def test_it_does_not_run_for_a_run_that_never_began(tmp_path: Path) -> None:
    status_of(tmp_path, begun=False).__exit__(None, InputError("a typo"), None)
    status_of(tmp_path, rank=1).__exit__(None, None, None)
    assert not (tmp_path / "told").exists()
