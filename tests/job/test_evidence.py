"""What ranks and hosts know when a job fails is found in the run's folder afterwards, whatever
hangs or is missing."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshtrain.explain.causes import explain
from meshtrain.job.programs import ProgramError, run_program
from meshtrain.job.watchdog import evidence, watchdog
from meshtrain.job.watchdog.evidence import collect, make_folder
from meshtrain.job.watchdog.records import Diagnosis, DiagnosisKind
from tests.job.fakes import FakeTime, job_of
from tests.launching import forked

JOB = job_of(3, 8, "gpu07")
HANGS = """
import os, sys, time
import torch, torch.distributed as dist
from pathlib import Path
import meshtrain
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import join
from meshtrain.job.watchdog import evidence
from meshtrain.job.watchdog.watchdog import watched

evidence.EVIDENCE_S = evidence.PROGRAM_S = 60.0
os.environ["PATH"] = sys.argv[2] + ":" + os.environ["PATH"]
job = join(read_environment(os.environ))
with watched(job) as watchdog, job_exit(job):
    watchdog.handle_sigterm()
    watchdog.on_job_lost(print, Path(sys.argv[1]))
    job.connect(60)
    dist.all_reduce(torch.ones(4))
    watchdog.deadlines.start_s = 2.0
    watchdog.enter_phase("its own loop", 7)
    if job.rank == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(4))
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH, for programs that are not those of this machine."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_program_says_what_it_does_or_why_it_does_not(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs, "speaks", "echo all is well")
    program(programs, "fails", "echo not permitted >&2; exit 3")
    program(programs, "ibstat", "/bin/sleep 1000 & wait")  # its child has its output
    assert run_program(["speaks"], 60) == "all is well\n"
    for name, seconds, problem in (
        ("fails", 60, "fails has failed, with exit status 3: not permitted"),
        ("missing", 60, "there is no missing on this host"),
    ):
        with pytest.raises(ProgramError, match=f"^{problem}$"):
            run_program([name], seconds)
    monkeypatch.setattr(evidence, "PROGRAM_S", 0.2)
    assert evidence.output_of("ibstat") == "ibstat did not end within 0.2 s\n"


def test_a_host_without_the_programs_has_a_line_for_each(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "EVIDENCE_S", 60.0)
    monkeypatch.setattr(evidence, "PROGRAM_S", 60.0)
    monkeypatch.setattr(evidence, "KERNEL_S", 1000.0)
    monkeypatch.setattr(evidence, "time", FakeTime(5000.0))  # the kernel counts like this
    lines = [
        "[4999.000001] usb 1-1: new device",
        "[ 3999.500000] NVRM: Xid 31",
        "[4998.000000] NVRM: Xid 79",
    ]
    program(
        programs,
        "dmesg",
        f"printf '{'%s' + chr(92) + 'n'}' " + " ".join(f"'{line}'" for line in lines),
    )
    assert collect(tmp_path / "7", JOB, of_host=True) == []
    files = {path.name: path.read_text() for path in (tmp_path / "7" / "gpu07").iterdir()}
    assert files.pop("nvidia-smi.txt") == "there is no nvidia-smi on this host\n"
    assert files.pop("ibstat.txt") == "there is no ibstat on this host\n"
    assert files.pop("dmesg.txt") == f"{lines[2]}\n"
    assert "in test_a_host_without_the_programs_has_a_line_for_each\n" in files.pop("rank-3.stacks")
    assert json.loads(files.pop("rank-3.flight-recorder.json"))["rank"] == 3
    assert files == {}
    collect(tmp_path / "8", JOB, of_host=False)
    assert sorted(path.name[:6] for path in (tmp_path / "8" / "gpu07").iterdir()) == [
        "rank-3",
        "rank-3",
    ]


def test_a_recorder_says_whether_it_has_forgotten_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = evidence.ENTRIES
    for records, whole in (
        (range(most), True),
        (range(most + 1), False),
        (range(1, 4), False),
        (range(0), True),
    ):
        entries = [{"record_id": record, "frames": ["forward"]} for record in records]
        monkeypatch.setattr(evidence, "recorder_entries", entries.copy)
        recorder = json.loads(evidence.flight_recorder(JOB))
        assert recorder["whole"] is whole
        assert recorder["entries"] == [
            {"record_id": record, "frames": []} for record in records[-most:]
        ]


def test_what_fails_is_told_and_nothing_is_waited_for_longer_than_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "EVIDENCE_S", 60.0)
    monkeypatch.setattr(evidence, "all_stacks", lambda: 1 / 0)
    assert collect(tmp_path, JOB, of_host=False) == [
        "rank-3.stacks: ZeroDivisionError('division by zero')"
    ]
    hang = threading.Event()
    monkeypatch.setattr(evidence, "EVIDENCE_S", 0.1)
    monkeypatch.setattr(evidence, "_save", lambda path, source: hang.wait())
    names = ("rank-3.stacks", "rank-3.flight-recorder.json")
    assert collect(tmp_path, JOB, of_host=False) == [
        f"{name} was not written within 0.1 s" for name in names
    ]
    hang.set()


def test_each_failure_has_a_folder_of_its_own(tmp_path: Path) -> None:
    failures = tmp_path / "failures"
    assert [make_folder(failures, 7, "it was\n") for _ in range(3)] == ["7", "7-2", "7-3"]
    assert (failures / "7-2" / "verdict.txt").read_text() == "it was\n"
    # both sides of a link that was cut have a verdict at the same moment
    for step in range(100, 120):
        with ThreadPoolExecutor(4) as pool:
            names = list(pool.map(lambda step: make_folder(failures, step, "it was\n"), [step] * 4))
        assert sorted(names) == [f"{step}", *(f"{step}-{number}" for number in (2, 3, 4))]


def test_a_folder_that_hangs_or_is_none_ends_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    report, hang = evidence.FailureReport(JOB), threading.Event()
    lost = Diagnosis(DiagnosisKind.GONE, (2,), "rank 2 is gone")
    assert report.make_evidence_folder(lost, "step", 7) is lost, "no folder is known yet"
    report.failures = tmp_path / "file"
    report.failures.write_text("")
    assert report.make_evidence_folder(lost, "step", 7) is lost
    with monkeypatch.context() as patch:
        patch.setattr(evidence, "PREPARE_S", 0.1)
        patch.setattr(evidence, "make_folder", lambda *_: hang.wait())
        assert report.make_evidence_folder(lost, "step", 7) is lost
    hang.set()
    assert capsys.readouterr().err.count("cannot be written to, so there is no evidence: ") == 2
    monkeypatch.setattr(evidence, "PREPARE_S", 60.0)
    report.failures = tmp_path
    assert report.make_evidence_folder(lost, "step", 7).evidence == "7"
    ended = Diagnosis(DiagnosisKind.ENDED, (2,), "rank 2 was ended by SIGTERM")
    assert report.make_evidence_folder(ended, "step", 7) is ended, "somebody wanted it"


def test_who_waits_for_the_verdict_waits_for_the_evidence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writes, goes_on = [], threading.Event()
    watch = watchdog.Watchdog(JOB)
    watch._peers = SimpleNamespace(speaks_for_host=lambda diagnosis: True)
    watch.on_job_lost(print, tmp_path)
    monkeypatch.setattr(
        evidence, "collect", lambda *of, of_host: (goes_on.wait() and writes.append(of)) or []
    )
    diagnosis = {
        "kind": "gone",
        "ranks": [2],
        "headline": "",
        "details": [],
        "hosts": [],
        "evidence": "7",
    }
    watch._learn(diagnosis)
    watch._learn(diagnosis)  # as a rank hears of it that has asked, and is told besides
    assert watch.diagnosis is not None
    assert not watch._decided.is_set()
    goes_on.set()
    assert watch._decided.wait(60)
    assert writes == [(tmp_path / "7", JOB)]


def test_a_rank_that_hangs_in_a_collective_leaves_all_that_is_known(tmp_path: Path) -> None:
    programs, script, failures = tmp_path / "bin", tmp_path / "hangs.py", tmp_path / "failures"
    programs.mkdir()
    xid = f"[{time.monotonic():.1f}] NVRM: Xid (PCI:0000:3b:00): 94, pid=7, Contained ECC error"
    program(programs, "dmesg", f"echo '{xid}'")
    script.write_text(HANGS)
    job = forked(2, script, failures, programs)
    assert job.status == 1
    assert re.search(r"did not arrive at all_reduce 2 over all ranks", job.err), job.err
    assert f"evidence of ranks and hosts: meshtrain explain {failures}/7" in job.err
    files = {path.name: path.read_text() for path in (failures / "7").rglob("*.*")}
    assert files["dmesg.txt"] == f"{xid}\n"
    assert "rank 1" in files["verdict.txt"]
    assert "MESHTRAIN_FAILURE" in files["verdict.txt"]
    for rank in range(2):
        assert (
            f'File "{script}", line {24 if rank == 0 else 23}, in <module>'
            in files[f"rank-{rank}.stacks"]
        )
    causes = {cause.id: cause for cause in explain([str(failures / "7")])}
    assert set(causes) == {"GPU_ECC", "GPU_XID", "RANK_ABSENT", "COLLECTIVE_NOT_ENTERED"}
    assert "all_reduce 2" in causes["COLLECTIVE_NOT_ENTERED"].cause
