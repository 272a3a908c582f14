"""The records of a diagnosis: what a rank says of itself, what was found out about it, and what the job was lost by."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

FAILURE_MARK = "MESHTRAIN_FAILURE"  # with which the line for programs begins


class DiagnosisKind(StrEnum):
    """What ends a job."""

    GONE = "gone"  # a process has ended without a word
    STOPPED = "stopped"  # by SIGSTOP or a debugger
    UNREACHABLE = "unreachable"  # nothing comes back from its host
    SILENT = "silent"  # it takes connections and does not answer
    FAILED = "failed"  # with an exception
    ENDED = "ended"  # by a signal
    ABSENT = "absent"  # it is elsewhere than where others wait for it
    DEADLOCK = "deadlock"  # ranks wait for each other
    STUCK = "stuck"  # all are where they should be, and what they wait for does not end
    TRAINING = "training"  # the run cannot go on, as all ranks have found out together
    INPUT = "input"  # what the user gave is wrong


OUT_OF_REACH = (DiagnosisKind.GONE, DiagnosisKind.STOPPED, DiagnosisKind.UNREACHABLE, DiagnosisKind.SILENT)


class Reach(StrEnum):
    """What came of asking a rank. The values are those of the diagnoses that follow."""

    ANSWERS = "answers"
    GONE = "gone"  # its host says that nobody listens there any more
    STOPPED = "stopped"  # its process is, as another rank of its host sees
    SILENT = "silent"  # the connection was taken and not answered
    UNREACHABLE = "unreachable"  # nothing came back from its host


class FailureKind(StrEnum):
    ERROR = "error"
    SIGNAL = "signal"


@dataclass(frozen=True)
class PendingCollective:
    label: str  # `all_reduce 204`, for people
    over: str  # the group, for people: `dp_shard`
    ranks: tuple[int, ...]  # of the group
    number: int | None = None  # how many collectives of this group the rank has begun with this one, where known
    missing: tuple[int, ...] | None = None  # who has not come, where the rank knows it itself

    def __str__(self) -> str:
        return f"{self.label} over {self.over}" if self.over else self.label


@dataclass(frozen=True)
class RankStatus:
    """What a living rank answers about itself."""

    phase: str  # start, step, evaluation, saving, end, or a loop of the user's own
    step: int  # that it is in, or was in last
    seconds: float  # since it last made progress
    failure: str | None = None  # what it failed with
    kind: FailureKind | None = None
    failed_s: float = 0.0  # seconds since then
    broken: bool = False  # whether it failed because its connections to other ranks broke, or they did not come
    late: bool = False  # whether it has missed its own deadline
    patient: bool = False  # whether it does what may take long: it reads or writes files
    wait: PendingCollective | None = None  # for others
    resource: str | None = None  # what else it waits for: data, the device, a disk
    begun: Mapping[str, int] = field(default_factory=dict)  # ranks of a group ("0,2") -> collectives that it has begun
    stack: tuple[str, ...] = ()  # of its main thread, innermost last
    debugged: bool = False  # whether a debugger holds it

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "RankStatus":
        wait = fields["wait"]
        if wait is not None:
            missing = None if wait["missing"] is None else tuple(wait["missing"])
            wait = PendingCollective(**wait | {"ranks": tuple(wait["ranks"]), "missing": missing})
        return cls(**{**fields, "stack": tuple(fields["stack"]), "wait": wait})


@dataclass(frozen=True)
class RankReport:
    rank: int
    host: str
    name: str  # rank, host and coordinate, for people
    pid: int
    reach: Reach
    status: RankStatus | None = None

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
    """What a job was lost by."""

    kind: DiagnosisKind
    ranks: tuple[int, ...]  # to whom it happened; none where it was nobody in particular
    headline: str  # in a sentence, as it follows "rank 0 on host a stops, because"
    details: tuple[str, ...] = ()  # lines to go below it
    hosts: tuple[str, ...] = ()  # of the ranks
    evidence: str = ""  # the folder below `failures` in which ranks write what they know; none: nowhere

    @property
    def text(self) -> str:
        return "\n".join([self.headline, *(f"  {line}" for line in self.details)])

    @classmethod
    def of(cls, kind: str, reports: Iterable[RankReport], headline: str, details: Iterable[str] = ()) -> "Diagnosis":
        reports = list(reports)
        hosts = tuple(dict.fromkeys(report.host for report in reports))
        return cls(DiagnosisKind(kind), ranks_of(reports), headline, tuple(details), hosts)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Diagnosis":
        ranks, details, hosts = (tuple(fields[name]) for name in ("ranks", "details", "hosts"))
        return cls(DiagnosisKind(fields["kind"]), ranks, fields["headline"], details, hosts, fields["evidence"])


def failure_line(diagnosis: Diagnosis, phase: str | None, step: int | None) -> str:
    """The line for programs that a rank prints when its job fails; `phase` and `step`: where that rank was."""
    fields = {"kind": diagnosis.kind, "ranks": diagnosis.ranks, "hosts": diagnosis.hosts, "step": step, "phase": phase}
    return f"{FAILURE_MARK} {json.dumps(fields | {'text': diagnosis.headline})}"
