"""The records of a diagnosis: a rank's report on itself, what was found out about it, and why the
job was lost."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

FAILURE_MARK = "MESHTRAIN_FAILURE"  # the beginning of the machine-readable line
VERDICT = "verdict.txt"  # in the folder of a failure's evidence


class DiagnosisKind(StrEnum):
    """Why a job ends."""

    GONE = "gone"  # a process has ended without reporting why
    STOPPED = "stopped"  # by SIGSTOP or a debugger
    UNREACHABLE = "unreachable"  # nothing comes back from its host
    SILENT = "silent"  # it accepts connections and does not answer
    FAILED = "failed"  # with an exception
    ENDED = "ended"  # by a signal
    ABSENT = "absent"  # it has not arrived where other ranks wait for it
    DEADLOCK = "deadlock"  # ranks wait for each other
    STUCK = "stuck"  # all ranks have arrived, and what they wait for does not end
    TRAINING = "training"  # the run cannot continue, as all ranks agree
    INPUT = "input"  # what the user gave is wrong


OUT_OF_REACH = (
    DiagnosisKind.GONE,
    DiagnosisKind.STOPPED,
    DiagnosisKind.UNREACHABLE,
    DiagnosisKind.SILENT,
)


class Reach(StrEnum):
    """The outcome of asking a rank. The values are those of the resulting diagnoses."""

    ANSWERS = "answers"
    GONE = "gone"  # its host refuses the connection: nothing listens there any more
    STOPPED = "stopped"  # its process is stopped, as another rank of its host sees
    SILENT = "silent"  # the connection was accepted, but no answer came
    UNREACHABLE = "unreachable"  # nothing came back from its host


class FailureKind(StrEnum):
    ERROR = "error"
    INPUT = "input"  # the user's input is wrong, as this rank alone has found
    SIGNAL = "signal"


@dataclass(frozen=True)
class PendingCollective:
    label: str  # `all_reduce 204`, for people
    over: str  # the group, for people: `dp_shard`
    ranks: tuple[int, ...]  # of the group
    # how many collectives of this group the rank has begun, this one included; None: unknown
    number: int | None = None
    # the ranks not arrived yet, where the waiting rank knows
    missing: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.label} over {self.over}" if self.over else self.label


@dataclass(frozen=True)
class RankStatus:
    """What a living rank reports about itself."""

    phase: str  # start, step, evaluation, saving, end, or the user's own loop
    step: int  # the current or last one
    seconds: float  # since its last progress
    failure: str | None = None  # what it failed with
    kind: FailureKind | None = None
    failed_s: float = 0.0  # seconds since the failure
    # whether it failed because connections to other ranks broke, or they did not arrive
    broken: bool = False
    late: bool = False  # whether it has missed its own deadline
    # whether its phase may take long: files are read or written, or code is compiled
    patient: bool = False
    wait: PendingCollective | None = None  # for other ranks
    resource: str | None = None  # what else it waits for: data, the device, a disk
    # ranks of a group ("0,2") -> number of collectives begun
    begun: Mapping[str, int] = field(default_factory=dict)
    stack: tuple[str, ...] = ()  # of its main thread, innermost last
    debugged: bool = False  # whether a debugger holds it

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "RankStatus":
        wait = fields["wait"]
        if wait is not None:
            missing = wait["missing"]
            wait = PendingCollective(
                label=wait["label"],
                over=wait["over"],
                ranks=tuple(wait["ranks"]),
                number=wait["number"],
                missing=None if missing is None else tuple(missing),
            )
        return cls(**{**fields, "stack": tuple(fields["stack"]), "wait": wait})


@dataclass(frozen=True)
class RankReport:
    rank: int
    host: str
    name: str  # rank, host and coordinate, for people
    pid: int
    reach: Reach
    status: RankStatus | None = None
    # how its process ended, if a neighbour has seen it: `SIGSEGV`, `status 3`
    end: str | None = None

    @property
    def answer(self) -> RankStatus:
        assert self.status is not None
        return self.status

    @property
    def wait(self) -> PendingCollective | None:
        return None if self.status is None else self.status.wait


def ranks_of(reports: Iterable[RankReport]) -> tuple[int, ...]:
    return tuple(report.rank for report in reports)


@dataclass(frozen=True)
class Diagnosis:
    """Why a job was lost."""

    kind: DiagnosisKind
    ranks: tuple[int, ...]  # the ranks at fault; none where no rank is known to be
    headline: str  # a sentence, as it follows "rank 0 on host a stops, because"
    details: tuple[str, ...] = ()  # lines to go below it
    hosts: tuple[str, ...] = ()  # of the ranks
    # the folder below `failures` to which ranks write evidence; "": none is written
    evidence: str = ""

    @property
    def text(self) -> str:
        return "\n".join([self.headline, *(f"  {line}" for line in self.details)])

    @classmethod
    def of(
        cls, kind: str, reports: Iterable[RankReport], headline: str, details: Iterable[str] = ()
    ) -> "Diagnosis":
        reports = list(reports)
        hosts = tuple(dict.fromkeys(report.host for report in reports))
        return cls(DiagnosisKind(kind), ranks_of(reports), headline, tuple(details), hosts)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Diagnosis":
        return cls(
            kind=DiagnosisKind(fields["kind"]),
            ranks=tuple(fields["ranks"]),
            headline=fields["headline"],
            details=tuple(fields["details"]),
            hosts=tuple(fields["hosts"]),
            evidence=fields["evidence"],
        )


def failure_line(diagnosis: Diagnosis, phase: str | None, step: int | None) -> str:
    """The machine-readable line that a rank prints when its job fails; `phase` and `step`: where
    that rank was."""
    fields = {
        "kind": diagnosis.kind,
        "ranks": diagnosis.ranks,
        "hosts": diagnosis.hosts,
        "step": step,
        "phase": phase,
    }
    return f"{FAILURE_MARK} {json.dumps(fields | {'text': diagnosis.headline})}"
