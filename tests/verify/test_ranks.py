"""Forked ranks: how they end, and that none is left, however the command ends. And what becomes of
runs that are made up."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest

from meshtrain.errors import InputError
from meshtrain.script.settings import OUTPUT, PRECISION
from meshtrain.verify import ranks, recording, session
from meshtrain.verify.ranks import CANNOT_RECORD, Ended, ForkedRanks, RankEnd, Work
from meshtrain.verify.session import Subject, Verification
from tests.launching import ROOT


def script(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(
        f"import os, signal, sys, time\nrank = int(os.environ.get('RANK', 0))\n{text}\n"
    )
    return str(path)


def run(folder: Path, text: str, world: int = 1) -> Ended:
    arguments = [script(folder, text)]
    work = Work(arguments, is_script=True, variables={}, world=world, folder=str(folder))
    # A rank's log is what is written to the descriptor; pytest's `sys.stderr` writes elsewhere.
    with open(2, "w", closefd=False) as plain, patch.object(sys, "stderr", plain):
        return ForkedRanks().run(work)


def test_what_a_script_says_at_its_end_is_kept(tmp_path: Path) -> None:
    ended = run(tmp_path, "sys.exit('there is no data')")
    assert ended.ranks[0].status == 1
    assert ended.failed[0].last_line == "there is no data"


def test_the_rank_that_failed_first_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one, which waits for it, is killed and says nothing."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    ended = run(tmp_path, "time.sleep(600) if rank == 0 else sys.exit('the cause')", world=2)
    assert [rank.status for rank in ended.ranks] == [-signal.SIGKILL, 1]
    assert session._failure(ended) == "it fails where one process does not: the cause"


def test_a_rank_that_says_nothing_is_told_by_its_end() -> None:
    assert RankEnd(-9).last_line == "a rank was ended by signal 9"
    assert RankEnd(3).last_line == "a rank ended with status 3"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_no_rank_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Nor one that still writes into the folder, which is removed next."""
    forked: list[int] = []
    plain: Callable[..., Any] = ranks.fork

    def fork(*arguments: Any) -> Any:
        rank = plain(*arguments)
        forked.append(rank.pid)
        return rank

    def interrupted(running: object) -> NoReturn:
        raise error

    monkeypatch.setattr(ranks, "fork", fork)
    monkeypatch.setattr(ranks, "_wait_for", interrupted)
    with pytest.raises(type(error)):
        run(tmp_path, "time.sleep(600)", world=2)
    assert len(forked) == 2
    for pid in forked:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_command_that_is_ended_removes_what_was_recorded(tmp_path: Path) -> None:
    begun, temporary = tmp_path / "begun", tmp_path / "temporary"
    os.mkfifo(begun)
    temporary.mkdir()
    mine = script(tmp_path, f"open({str(begun)!r}, 'w').close()\ntime.sleep(600)")
    command = subprocess.Popen(
        [sys.executable, "-m", "meshtrain.cli", "verify", mine, "--layouts", "{tp: 2}"],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
    )
    begun.read_text()  # returns when the script has opened it
    assert list(temporary.glob("meshtrain_verify*"))
    command.terminate()
    assert command.wait(60) == 128 + signal.SIGTERM
    assert not list(temporary.glob("meshtrain_verify*"))


def test_a_rank_that_cannot_print_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk. It must not come back to what its parent does."""
    test = os.getpid()

    def flush() -> None:
        if os.getpid() != test:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.stdout, "flush", flush)
    try:
        ended = run(tmp_path, "pass")
    finally:
        if os.getpid() != test:
            os._exit(99)
    assert ended.ranks[0].status != 99


def test_a_recording_that_cannot_be_written_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, text: str) -> int:
        raise OSError(28, "No space left on device", str(self))

    plain = Path.write_text
    monkeypatch.setattr(Path, "write_text", full)
    recorder = recording.Recorder(tmp_path, 0)
    recorder.close()
    assert recorder.problem is not None
    assert "No space left on device" in recorder.problem
    monkeypatch.setattr(Path, "write_text", plain)

    class Full:
        most = None

        def run(self, work: Work) -> Ended:
            return Ended([RankEnd(CANNOT_RECORD, "x.json: No space left on device\n")])

    subject = Subject("mine.py", [], [], 1, "float64")
    verification = Verification(subject, Full(), tmp_path, [{"tp": 2}])
    with pytest.raises(InputError, match=r"No space left.*make room there, or let --folder"):
        verification.begin()


def test_a_killed_writer_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    def write_half() -> None:
        with recording.Recorder(tmp_path, 0)._writing(tmp_path / "x.json") as unfinished:
            unfinished.write_text("[{")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert not (tmp_path / "x.json").exists()


def test_a_script_that_trains_nothing_is_not_equal(tmp_path: Path) -> None:
    subject = Subject(script(tmp_path, "pass"), [], [], 1, "float64")
    verification = Verification(subject, ForkedRanks(), tmp_path / "runs", [{"tp": 2}])
    with pytest.raises(InputError, match=r"one process makes no step of .* by meshtrain.Run"):
        verification.begin()


def test_runs_are_removed_but_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        most = None

        def run(self, work: Work) -> Ended:
            Path(work.folder, "run").mkdir()
            if work.world > 1:
                return Ended([RankEnd(2, "no such layout", time.time())] * work.world)
            Path(work.folder, "run", "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
            return Ended([RankEnd()])

    subject = Subject("mine.py", [], [], 1, "float64")
    verification = Verification(subject, Refusing(), tmp_path, [{"tp": 2}])
    verification.begin()
    assert verification.verify({"tp": 2}).reason == "no such layout"
    assert [folder.name for folder in tmp_path.iterdir()] == ["001"]


@dataclass
class MadeUp:
    """Runs that have only a loss in each step: 1 on one process, and on a layout what is given for
    the precision."""

    losses: dict[str, list[float]]
    most: int | None = None

    def run(self, work: Work) -> Ended:
        losses = [1.0, 1.0]
        if work.world > 1:
            losses = self.losses[work.variables[PRECISION]]
        lines = [
            json.dumps({"step": step, "loss": loss, "grad_norm": 1.0}) + "\n"
            for step, loss in enumerate(losses, 1)
        ]
        output = Path(work.variables[OUTPUT])
        output.mkdir()
        (output / "metrics.jsonl").write_text("".join(lines))
        return Ended([RankEnd()] * work.world)


@pytest.mark.parametrize(
    ("in_32_bits", "kind"),
    [
        (1 + 0.1, "rounding"),
        (1 + 5e-6, "forward"),  # rounding, as large as everywhere
    ],
)
def test_a_small_difference_is_rounding_if_it_grows_with_it(
    tmp_path: Path, in_32_bits: float, kind: str
) -> None:
    runs = MadeUp({"float64": [1.0, 1 + 1e-8], "float32": [1.0, in_32_bits]})
    subject = Subject("mine.py", [], [], 2, "float64")
    outcome = Verification(subject, runs, tmp_path, [{"tp": 2}]).verify({"tp": 2})
    assert (outcome.status, outcome.step, outcome.kind) == ("different", 2, kind)


def test_a_layout_that_makes_other_steps_says_so(tmp_path: Path) -> None:
    subject = Subject("mine.py", [], [], 2, "float64")
    runs = MadeUp({"float64": [1.0, 1.0, 1.0]})
    outcome = Verification(subject, runs, tmp_path, [{"tp": 2}]).verify({"tp": 2})
    assert (outcome.status, outcome.kind) == ("different", "metric")
    assert outcome.reason == "it makes 3 steps in the place of 2"
