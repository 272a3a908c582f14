"""The diagnosis of a lost job: which rank caused the loss, decided from what was found out about
every rank.

torchrun names the process that ended first, and ranks that waited report a time-out: both are often
victims.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from meshtrain.errors import group_values, ranges
from meshtrain.job.storage import print_error
from meshtrain.job.watchdog.deadlines import DeadlineClock
from meshtrain.job.watchdog.records import (
    Diagnosis,
    DiagnosisKind,
    FailureKind,
    PendingCollective,
    RankReport,
    RankStatus,
    Reach,
    ranks_of,
)

if TYPE_CHECKING:
    from meshtrain.job.watchdog.status_server import Peers

STACKS = 6  # distinct stacks that are shown; ranks in the same place share one
NAMED = 4  # ranks that are named with host and coordinate; more are listed by number
CRASHES = ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS")
FRESH_S = 5.0  # for which an inquiry that found nothing wrong is not repeated
MOVES_S = 5.0  # for ranks that all wait to make progress, before they count as stuck


def diagnose(reports: Sequence[RankReport], *, hangs: bool) -> Diagnosis | None:
    """The diagnosis from all ranks' reports, in order; None: nothing is wrong, or ranks are only
    slow (no `hangs`)."""
    answering = [report for report in reports if report.status is not None]
    if any(report.answer.debugged for report in answering):
        return None

    # The surest causes first: a process that is gone or stopped, then an error that is no
    # consequence of another rank's loss.
    lost = _out_of_reach(reports, DiagnosisKind.GONE, DiagnosisKind.STOPPED)
    if lost is not None:
        return lost
    failed = [report for report in answering if report.answer.failure is not None]
    errors = [report for report in failed if report.answer.kind != FailureKind.SIGNAL]
    own_errors = [report for report in errors if not report.answer.broken]
    if own_errors:
        return _failed(_first(own_errors))

    # A rank that does not answer may be busy, or behind a firewall: no reason to end a job that
    # makes progress.
    if hangs or errors:
        lost = _out_of_reach(reports, DiagnosisKind.UNREACHABLE, DiagnosisKind.SILENT)
        if lost is not None:
            return lost
    if hangs:
        absent = _absent(reports, spare_patient=not errors)
        if absent is not None:
            return absent

    # What is left may have been caused by a rank that nobody can find any more.
    if errors:
        return _failed(_first(errors))
    if failed:
        first = _first(failed)
        headline = f"{first.name} was {first.answer.failure}"
        return Diagnosis.of(DiagnosisKind.ENDED, [first], headline)
    return _stuck(reports) if hangs else None


def _first(failed: Sequence[RankReport]) -> RankReport:
    return max(failed, key=lambda report: (report.answer.failed_s, -report.rank))


def _failed(report: RankReport) -> Diagnosis:
    failure = report.answer.failure
    if report.answer.kind == FailureKind.INPUT:
        return Diagnosis.of(DiagnosisKind.INPUT, [report], f"{report.name}: {failure}")
    return Diagnosis.of(DiagnosisKind.FAILED, [report], f"{report.name} failed: {failure}")


def _out_of_reach(reports: Sequence[RankReport], *kinds: DiagnosisKind) -> Diagnosis | None:
    """The ranks that are out of reach in the first of these ways that applies to any rank."""
    for kind in kinds:
        lost = [report for report in reports if report.reach == kind]
        if not lost:
            continue
        ranks = set(ranks_of(lost))
        details = []
        for report in reports:
            if report.rank not in ranks:
                details += _also_wrong(report)
        details += waiting_lines(reports, ranks)
        if kind != DiagnosisKind.GONE:
            details += stacks(reports)
        return Diagnosis.of(kind, lost, _lost_headline(kind, lost, reports), details)
    return None


def _also_wrong(report: RankReport) -> list[str]:
    """A failure of another rank that does not look like a consequence."""
    status = report.status
    if status is None:
        if report.reach in (Reach.GONE, Reach.STOPPED):
            return []
        return [f"{report.name} is {report.reach} too"]
    if status.kind in (None, FailureKind.SIGNAL) or status.broken:
        return []
    return [f"besides, {report.name} failed: {status.failure}"]


def _lost_headline(
    kind: DiagnosisKind, lost: Sequence[RankReport], reports: Sequence[RankReport]
) -> str:
    if kind == DiagnosisKind.UNREACHABLE:
        return _unreachable_headline(lost)
    if kind == DiagnosisKind.GONE:
        return _gone_headline(lost, reports)
    many = len(lost) > 1
    names = named(lost)
    if kind == DiagnosisKind.STOPPED:
        are = "are" if many else "is"
        state = "the processes live" if many else f"process {lost[0].pid} lives"
        return f"{names} {are} stopped (SIGSTOP, or a debugger): {state}, and does not run"
    do = "do" if many else "does"
    return (
        f"{names} {do} not answer: process {lost[0].pid} is there, and is stopped, starved or in a "
        "call that lets none of its other threads run"
    )


def _unreachable_headline(lost: Sequence[RankReport]) -> str:
    by_host = group_values((report.host, report) for report in lost)
    ranks = "; ".join(f"host {host}: {named(of_host)}" for host, of_host in by_host.items())
    hosts = f"hosts {', '.join(by_host)}" if len(by_host) > 1 else f"host {lost[0].host}"
    they_are = "they are" if len(by_host) > 1 else "it is"
    return f"{hosts} cannot be reached: {they_are} down, or the network between is cut ({ranks})"


def _gone_headline(lost: Sequence[RankReport], reports: Sequence[RankReport]) -> str:
    ends = {report.end for report in lost[:NAMED]}
    one_end = ends.pop() if len(ends) == 1 else None
    how = _how_ended(one_end)
    if len(lost) == 1:
        return f"{lost[0].name} is gone: process {lost[0].pid} was {how}"

    lost_ranks = set(ranks_of(lost))
    hosts_alive = {report.host for report in reports if report.rank not in lost_ranks}
    hosts_hit = dict.fromkeys(report.host for report in lost)
    lost_whole = [host for host in hosts_hit if host not in hosts_alive]
    all_of = f" (all ranks of host {', '.join(lost_whole)})" if lost_whole else ""
    pids = ", ".join(str(report.pid) for report in lost[:NAMED])
    return f"{named(lost)} are gone{all_of}: processes {pids} were {how}"


def _how_ended(end: str | None) -> str:
    """The rest of `process 7 was ...`; `end`: as a neighbour has seen it."""
    killed = "killed (by somebody, or because memory was full)"
    if end is None:
        return f"{killed} or crashed; its output or the kernel's log may say why"
    if end == "SIGKILL":
        return f"{killed} with SIGKILL; the kernel's log may say by whom"
    if end == "SIGBUS":
        return (
            "ended by SIGBUS: a file that it read was cut off, or its disk failed; its output says "
            "where"
        )
    if end in CRASHES:
        return f"ended by {end}, a crash in native code; its output says where"
    return f"ended by an exit with {end}; its output may say why"


def _absent(reports: Sequence[RankReport], *, spare_patient: bool) -> Diagnosis | None:
    """Ranks that are waited for and wait for none, where all answer; `spare_patient`: none that may
    just be busy."""
    waited_for = ranks_waited_for(reports)
    if not waited_for:
        return None
    by_rank = {report.rank: report for report in reports}
    # Who waits is itself waited for: at the ends of such chains are ranks that wait for none.
    ends = sorted(_union(waited_for) - set(waited_for))
    if not ends:
        return _deadlock(reports, [by_rank[rank] for rank in sorted(waited_for)])
    if spare_patient:
        statuses = {rank: by_rank[rank].answer for rank in ends}
        ends = [rank for rank, status in statuses.items() if status.late or not status.patient]
        if not ends:
            return None

    culprits = [by_rank[rank] for rank in ends]
    victims = sorted(rank for rank, missing in waited_for.items() if ends[0] in missing)
    waits = [report.wait for report in map(by_rank.__getitem__, victims) if report.wait is not None]
    numbered = [wait for wait in waits if wait.number is not None]
    wait = (numbered or waits)[0]
    seconds = max(by_rank[rank].answer.seconds for rank in victims)
    headline = (
        f"{named(culprits)} did not arrive at {wait} (ranks {numbers(wait.ranks)}), where "
        f"{_ranks(victims)} waited for {seconds:.0f} s: {_doing(culprits[0])}"
    )
    failed = [report for report in culprits if report.answer.failure]
    details = [f"{report.name} failed: {report.answer.failure}" for report in failed]
    details += waiting_lines(reports, set(ends))
    details += stacks(reports)
    return Diagnosis.of(DiagnosisKind.ABSENT, culprits, headline, details)


def _deadlock(reports: Sequence[RankReport], circle: Sequence[RankReport]) -> Diagnosis:
    headline = (
        f"{named(circle)} wait for each other: they have not called the same collectives in the "
        "same order, or a message was lost"
    )
    details = (*waiting_lines(reports, set(ranks_of(circle))), *stacks(reports))
    return Diagnosis.of(DiagnosisKind.DEADLOCK, circle, headline, details)


def ranks_waited_for(reports: Sequence[RankReport]) -> dict[int, frozenset[int]]:
    """Waiting rank -> the ranks that have not arrived there. Computed once for each place, not for
    each rank."""
    statuses = {report.rank: report.status for report in reports if report.status is not None}
    missing_at: dict[object, frozenset[int]] = {}
    waited_for = {}
    for rank, status in statuses.items():
        wait = status.wait
        if wait is None:
            continue
        place = (wait.ranks, wait.number, wait.missing)
        if place not in missing_at:
            missing_at[place] = _ranks_not_arrived(wait, statuses)
        missing = missing_at[place]
        if rank in missing:
            missing = missing - {rank}
        if missing:
            waited_for[rank] = missing
    return waited_for


def _ranks_not_arrived(
    wait: PendingCollective, statuses: Mapping[int, RankStatus]
) -> frozenset[int]:
    """The ranks of a group that have not arrived where one of its ranks waits, as far as they
    answer."""
    if wait.missing is not None:
        return frozenset(wait.missing)
    group = ",".join(map(str, wait.ranks))

    def arrived(other: RankStatus) -> bool:
        if wait.number is not None and group in other.begun:
            return other.begun[group] >= wait.number
        return other.wait is not None and other.wait.ranks == wait.ranks

    answering = [rank for rank in wait.ranks if rank in statuses]
    return frozenset(rank for rank in answering if not arrived(statuses[rank]))


def _union(waited_for: Mapping[int, frozenset[int]]) -> set[int]:
    """The union of the sets. Ranks of a group share one set object, which is added once."""
    distinct = {id(ranks): ranks for ranks in waited_for.values()}
    return set().union(*distinct.values())


def _stuck(reports: Sequence[RankReport]) -> Diagnosis | None:
    """All ranks wait and none is behind: what they have begun together does not end."""
    waits = [report.wait for report in reports if report.wait is not None]
    if not waits or len(waits) < len(reports) or ranks_waited_for(reports):
        return None
    places = list(dict.fromkeys(map(str, waits)))
    named_places = ", ".join(places[:NAMED])
    if len(places) > NAMED:
        named_places += ", ..."
    headline = f"all ranks wait in {named_places}: a device or a link is stuck"
    if any(wait.number is None for wait in waits):
        headline += ", or a message was not sent"
    details = (*waiting_lines(reports, set(ranks_of(reports))), *stacks(reports))
    return Diagnosis.of(DiagnosisKind.STUCK, [], headline, details)


def nobody_moved(before: Sequence[RankReport], now: Sequence[RankReport]) -> bool:
    def place(report: RankReport) -> object:
        status = report.status
        if status is None:
            return None
        return status.phase, status.step, status.wait, dict(status.begun), status.stack

    return list(map(place, before)) == list(map(place, now))


def numbers(ranks: Iterable[int]) -> str:
    """`0-5, 8`."""
    return ", ".join(ranges(ranks))


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 5`, `ranks 0-3`."""
    return f"ranks {numbers(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"


def named(reports: Sequence[RankReport]) -> str:
    if len(reports) <= NAMED:
        return ", ".join(report.name for report in reports)
    hosts = list(dict.fromkeys(report.host for report in reports))
    names = ", ".join(hosts[:NAMED])
    if len(hosts) > NAMED:
        names += ", ..."
    return f"ranks {numbers(ranks_of(reports))} on host {names}"


def _place(status: RankStatus) -> str:
    if status.phase == "step":
        return f"step {status.step}"
    return f"{status.phase} (step {status.step})" if status.step else status.phase


def _doing(report: RankReport) -> str:
    status = report.answer
    if status.failure is not None:
        return f"rank {report.rank} failed in {_place(status)}: {status.failure.splitlines()[0]}"
    resource = f", waiting for {status.resource}" if status.resource else ""
    frame = f"; it is at {status.stack[-1]}" if status.stack else ""
    return f"rank {report.rank} is in {_place(status)}{resource}{frame}"


def waiting_lines(reports: Sequence[RankReport], culprits: set[int]) -> list[str]:
    """Which groups wait for the culprits, and which ranks wait there."""
    # Ranks in the same place are looked at once: there may be thousands of them.
    by_place: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for report in reports:
        wait = report.wait
        if wait is not None:
            place = (str(wait), wait.ranks, wait.missing or ())
            by_place.setdefault(place, []).append(report.rank)

    # Waits of one label and group are one line, whatever the ranks there know to be missing.
    by_group: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for (label, group, missing), waiting in by_place.items():
        if not culprits.isdisjoint(group) or not culprits.isdisjoint(missing):
            by_group.setdefault((label, group), []).extend(waiting)

    lines = []
    for (label, group), waiting in list(by_group.items())[:STACKS]:
        of_group = f" (ranks {numbers(group)})" if group else ""
        wait_there = "wait" if len(waiting) > 1 else "waits"
        line = f"{label}{of_group}: {_ranks(waiting)} {wait_there}"
        absent = (set(group) & culprits or culprits) - set(waiting)
        if absent:
            line += f", not arrived: {numbers(absent)}"
        lines.append(line)
    return lines


def stacks(reports: Sequence[RankReport]) -> list[str]:
    by_stack: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for report in reports:
        status = report.status
        if status is not None and status.stack:
            by_stack.setdefault((_place(status), status.stack), []).append(report.rank)
    # The odd one out comes first.
    groups = sorted(by_stack.items(), key=lambda item: (len(item[1]), item[1][0]))
    lines = []
    for (place, stack), ranks in groups[:STACKS]:
        lines.append(f"{_ranks(ranks)}, in {place}:")
        lines += [f"    {frame}" for frame in stack]
    if len(groups) > STACKS:
        lines.append(f"and {len(groups) - STACKS} other stacks")
    return lines


def unexplained(reports: Sequence[RankReport]) -> str | None:
    """Where all ranks are, if they take too long and none of them waits for another, as far as can
    be seen."""
    statuses = [report.status for report in reports if report.status is not None]
    if len(statuses) < len(reports):
        return None
    if any(status.wait or status.failure or status.debugged for status in statuses):
        return None
    longest = max(statuses, key=lambda status: status.seconds)
    head = f"this takes long ({longest.seconds:.0f} s in {_place(longest)}), and no rank waits"
    lines = [f"  {line}" for line in stacks(reports)]
    return "\n".join([f"{head} for another one, as far as can be seen. They are:", *lines])


def waited_for_line(reports: Sequence[RankReport]) -> str:
    """A line that names the ranks that are busy for long in a phase that allows it, and what they
    do."""
    waited_for = ranks_waited_for(reports)
    late = {report.rank for report in reports if report.status and report.status.late}
    ends = _union(waited_for) - set(waited_for) or late
    busy = [report for report in reports if report.rank in ends and report.status is not None]
    silent = [report for report in reports if report.status is None]
    if not busy:
        return f"waiting for {named(silent or reports)}"
    longest = max(busy, key=lambda report: report.answer.seconds).answer
    line = f"waiting for {named(busy)}: {_place(longest)}, for {longest.seconds:.0f} s now"
    return line + (f"; no answer from {named(silent)}" if silent else "")


class Coordinator:
    """The rank that decides: it asks all ranks, diagnoses, and tells the survivors. One inquiry at
    a time."""

    def __init__(self, peers: "Peers", clock: DeadlineClock, closed: threading.Event) -> None:
        """`clock`: of this rank. `closed`: set once the ranks leave, and no longer answer."""
        self._peers = peers
        self._clock = clock
        self._closed = closed
        # the last question that found nothing wrong, and when
        self._all_well = ((False, False), float("-inf"))
        # the kind of the last note on slow ranks, and this rank's last progress then
        self._noted = ("", 0.0)

    def diagnose(self, *, hangs: bool, failed: bool, late: bool) -> Diagnosis | None:
        """Asks all ranks and decides; None if nothing is wrong. `failed`: a rank has failed, so
        there will be a diagnosis. `late`: a rank has missed a deadline: without a diagnosis, the
        slow ranks are printed."""
        question, at = self._all_well
        if not failed and question == (hangs, late) and time.monotonic() - at < FRESH_S:
            return None  # all ranks ask this question, and it was answered just now
        reports = self._peers.examine()
        diagnosis = diagnose(reports, hangs=hangs)
        all_wait = (DiagnosisKind.STUCK, DiagnosisKind.DEADLOCK)
        if diagnosis is not None and diagnosis.kind in all_wait:
            diagnosis = self._look_again(reports)
        if self._closed.is_set():
            diagnosis = None
        elif diagnosis is None and late:
            self._note(reports, hangs)
        if diagnosis is None:
            self._all_well = (hangs, late), time.monotonic()
        return diagnosis

    def broadcast(self, diagnosis: Diagnosis, rank: int) -> set[int]:
        """Tells all survivors except this rank, and kills stopped processes; returns the
        survivors."""
        survivors = self._peers.survivors(diagnosis)
        self._peers.tell(survivors - {rank}, {"ask": "end", "diagnosis": asdict(diagnosis)})
        self._peers.kill_stopped(diagnosis)
        return survivors

    def _look_again(self, reports: list[RankReport]) -> Diagnosis | None:
        """Ranks that all wait are stuck only if they still wait in the same place a little later: a
        rank that gathers at the store polls it, and may not have read yet the value of a rank that
        waits for its answer."""
        if self._closed.wait(MOVES_S):
            return None
        again = self._peers.examine()
        diagnosis = diagnose(again, hangs=True)
        if diagnosis is None:
            return None
        if diagnosis.kind == DiagnosisKind.DEADLOCK:
            same_waits = [report.wait for report in reports] == [report.wait for report in again]
            return diagnosis if same_waits else None
        if diagnosis.kind == DiagnosisKind.STUCK:
            return diagnosis if nobody_moved(reports, again) else None
        return diagnosis

    def _note(self, reports: list[RankReport], hangs: bool) -> None:
        """A deadline has passed, and the job continues: prints once what is known about it."""
        if any(report.status is not None and report.status.debugged for report in reports):
            return
        puzzle = unexplained(reports) if hangs else None
        if puzzle is None:
            kind = "busy"
            text = waited_for_line(reports)
        else:
            kind = "puzzle"
            text = f"warning: {puzzle}"
        noted = (kind, self._clock.since)
        if self._noted != noted:
            self._noted = noted
            print_error(text)
