"""Evidence of a failure: what ranks and their hosts still know is printed and written to a folder
before the job ends.

Every surviving rank writes its stacks and flight recorder, and one rank of each host the output of
PROGRAMS. No rank waits for another, or longer than EVIDENCE_S: a disk or driver may have failed.
`meshtrain explain` reads the folder.
"""

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import NoReturn

from meshtrain.errors import INPUT_STATUS
from meshtrain.job.environment import tell_launcher
from meshtrain.job.exit import print_failure
from meshtrain.job.process import Job
from meshtrain.job.programs import ProgramError, run_program
from meshtrain.job.sockets import call_with_timeout, in_thread
from meshtrain.job.storage import print_error
from meshtrain.job.torch_private import recorder_entries
from meshtrain.job.watchdog.introspect import process_groups
from meshtrain.job.watchdog.records import VERDICT, Diagnosis, DiagnosisKind, failure_line

EVIDENCE_S = 4.0  # the longest by which the end of a job is delayed
PROGRAM_S = 3.0
PREPARE_S = 1.0  # to create the folder
WRITE_S = 5.0  # to write exit.json: its file system may be what was lost
ENTRIES = 200  # the last ones of a flight recorder
# the last ones of the kernel's log: errors of last month do not help
KERNEL_LINES = 500
KERNEL_S = 3600.0
STAMP = re.compile(r"\[ *(\d+\.\d+)\]")
KERNEL = re.compile(
    r"NVRM|\bXid\b|nvidia|mlx[45]|infiniband|EDAC|machine check"
    r"|out of memory|oom-kill|killed process|I/O error|nfs:",
    re.IGNORECASE,
)
PROGRAMS = {"nvidia-smi": ("-q",), "ibstat": (), "dmesg": ()}  # and their arguments


def make_folder(failures: Path, step: int, verdict: str) -> str:
    """Creates the folder of a failure in this step, with the verdict in it; returns its name.
    Raises OSError."""
    failures.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        name = str(step) if number == 1 else f"{step}-{number}"
        # perhaps just made by ranks on the other side of a cut link
        with suppress(FileExistsError):
            (failures / name).mkdir()
            break
    (failures / name / VERDICT).write_text(verdict, encoding="utf-8")
    return name


def collect(folder: Path, job: Job, *, of_host: bool) -> list[str]:
    """Writes this rank's evidence below `folder`; `of_host`: PROGRAMS' output, too. Returns what
    failed, in words."""
    sources: dict[str, Callable[[], str]] = {
        f"rank-{job.rank}.stacks": all_stacks,
        f"rank-{job.rank}.flight-recorder.json": partial(flight_recorder, job),
    }
    if of_host:
        for name in PROGRAMS:
            sources[f"{name}.txt"] = partial(output_of, name)

    # At once, each in its own thread: a disk, a driver or a lock may let one of them wait for ever.
    deadline = time.monotonic() + EVIDENCE_S
    place = folder / job.host
    files = {name: in_thread(_save, place / name, source) for name, source in sources.items()}
    problems = []
    for name, file in files.items():
        try:
            file.result(max(0.0, deadline - time.monotonic()))
        except Exception as error:  # the job ends all the same
            if file.done():
                problems.append(f"{name}: {error!r}")
            else:
                problems.append(f"{name} was not written within {EVIDENCE_S:g} s")
    return problems


def _save(path: Path, source: Callable[[], str]) -> None:
    text = source()
    # the run's folder may not be shared between hosts
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def output_of(name: str) -> str:
    """The output of one of PROGRAMS, or a line that says why there is none; of the kernel's log,
    the relevant lines."""
    try:
        text = run_program((name, *PROGRAMS[name]), PROGRAM_S)
    except ProgramError as error:
        return f"{error}\n"
    if name != "dmesg":
        return text
    since = time.monotonic() - KERNEL_S
    lines = []
    for line in text.splitlines():
        stamp = STAMP.match(line)
        is_old = stamp is not None and float(stamp[1]) <= since
        if KERNEL.search(line) and not is_old:
            lines.append(line)
    if not lines:
        return "the last hour of the kernel's log has no errors of devices or memory\n"
    return "\n".join(lines[-KERNEL_LINES:]) + "\n"


def all_stacks() -> str:
    """The stack of every thread of this process, innermost first; no source lines, as their disk
    may have failed."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for thread, innermost in sys._current_frames().items():
        lines.append(f"thread {names.get(thread, thread)}:")
        for frame, line in traceback.walk_stack(innermost):
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}')
    return "\n".join(lines) + "\n"


def flight_recorder(job: Job) -> str:
    """The last collectives of this rank (torch's flight recorder, as JSON), and its process
    groups."""
    groups = {}
    for name, (over, ranks) in process_groups(job.layout, job.rank).items():
        groups[name] = [over, list(ranks)]
    entries = [{**entry, "frames": []} for entry in recorder_entries()]
    # Whether no entry is missing: the recorder forgets the oldest ones.
    begins = not entries or entries[0]["record_id"] == 0
    whole = begins and len(entries) <= ENTRIES
    recorder = {
        "rank": job.rank,
        "host": job.host,
        "groups": groups,
        "whole": whole,
        "entries": entries[-ENTRIES:],
    }
    return json.dumps(recorder) + "\n"


class FailureReport:
    """What a rank prints and writes before it ends because its job is lost."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.printed = False
        # called once; writes into the run's folder
        self.on_job_lost: Callable[[Diagnosis], None] | None = None
        self.failures: Path | None = None  # the parent folder of the evidence

    def print(self, diagnosis: Diagnosis, *, details: bool) -> None:
        if not self.printed:
            self.printed = True
            text = diagnosis.text if details else diagnosis.headline
            print_failure(self._job, diagnosis, f"{self._job} stops, because {text}")

    def write_exit_json(self, diagnosis: Diagnosis) -> None:
        """Calls `on_job_lost`, for WRITE_S seconds at most: the folder may be on a host that is
        gone."""
        write, self.on_job_lost = self.on_job_lost, None
        try:
            if write is not None:
                call_with_timeout(WRITE_S, write, diagnosis)
        except Exception as error:  # the job ends all the same
            problem = f": {error}" if str(error) else f" within {WRITE_S:.0f} s"
            print_error(f"{self._job} could not write that down{problem}")

    def make_evidence_folder(self, diagnosis: Diagnosis, phase: str | None, step: int) -> Diagnosis:
        """The diagnosis, with the folder to which all ranks that learn of it write evidence, if it
        can be created."""
        if self.failures is None or diagnosis.kind in (DiagnosisKind.ENDED, DiagnosisKind.INPUT):
            return diagnosis
        try:
            verdict = f"{failure_line(diagnosis, phase, step)}\n{diagnosis.text}\n"
            name = call_with_timeout(PREPARE_S, make_folder, self.failures, step, verdict)
        except OSError as error:  # TimeoutError is one, too
            print_error(f"{self.failures} cannot be written to, so there is no evidence: {error!r}")
            return diagnosis
        return replace(diagnosis, evidence=name)

    def write_evidence(self, diagnosis: Diagnosis, *, of_host: bool) -> None:
        if self.failures is not None:  # None: the run's folder is not known yet
            problems = collect(self.failures / diagnosis.evidence, self._job, of_host=of_host)
            if of_host:
                for problem in problems:
                    print_error(f"{self._job}: evidence: {problem}")

    def abort(self, diagnosis: Diagnosis) -> NoReturn:
        """Ends this process, with the reason in torchrun's summary."""
        tell_launcher(diagnosis.headline, at_fault=self._job.rank in diagnosis.ranks)
        exit_now(INPUT_STATUS if diagnosis.kind == DiagnosisKind.INPUT else 1)


def exit_now(status: int) -> NoReturn:
    """Ends this process at once: its main thread may be in a collective that never ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
