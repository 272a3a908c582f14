"""A watchdog on every rank: it examines hangs and failures, and names the rank that caused them.

While all is well it costs a thread that looks at the clock once a second, and one that sleeps
(deaths.py), and sends nothing. When a deadline has passed or a rank fails, the lowest rank that is
alive asks all others (status_server.py), decides (diagnose.py), prints one block, and tells the
others. All ranks end before the time limits of the process groups (`process_group_timeout`).
"""

import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from meshtrain.errors import InputError, StartError
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit, outlast_signals, refuse_start, signal_of
from meshtrain.job.pending import advances
from meshtrain.job.process import Job, join
from meshtrain.job.signals import (
    SignalWakeup,
    end_with_launcher,
    ignore_signals,
    in_main_thread,
    install_handlers,
)
from meshtrain.job.storage import print_error, warn
from meshtrain.job.store import Failures, RemoteFailure, describe
from meshtrain.job.threads import NoThreadError, start_thread
from meshtrain.job.watchdog import introspect
from meshtrain.job.watchdog.deadlines import (
    MEASURED,
    DeadlineClock,
    Deadlines,
    process_group_timeout,
)
from meshtrain.job.watchdog.diagnose import Coordinator
from meshtrain.job.watchdog.evidence import EVIDENCE_S, FailureReport, exit_now
from meshtrain.job.watchdog.introspect import Failure, local_status
from meshtrain.job.watchdog.records import Diagnosis, DiagnosisKind, FailureKind
from meshtrain.job.watchdog.status_server import Address, Peers, StatusServer, exchange_addresses

LOOK_EVERY_S = 1.0
# a look this late shows that this process was suspended: the clock proves nothing
SUSPENDED_S = 5.0
DIAGNOSIS_S = 20.0  # the most that a failed rank waits for a diagnosis
# ranks that wait for a diagnosis by this one, each on a connection; more of them ask again later
MOST_WAITERS = 32
AGAIN_S = 0.5  # until they do
BEGIN_UNWIND_S = 2.0  # for the main thread to begin leaving by itself
UNWIND_S = 15.0  # for the main thread of a failed rank to write what it must

T = TypeVar("T")


class Watchdog(Failures):
    """This rank's watchdog. Until `begin`, and in a world of one, it only records progress."""

    # It overrides every method of `Failures`, whose constructor would need the store.
    def __init__(self, job: Job) -> None:
        self.job = job
        self.diagnosis: Diagnosis | None = None  # why the job is lost
        self._clock = DeadlineClock()
        self._report = FailureReport(job)
        self._wakeup = SignalWakeup()
        self._failure: Failure | None = None  # of this rank
        # from `begin` on
        self._server: StatusServer | None = None
        self._peers: Peers | None = None
        self._coordinator: Coordinator | None = None

        self._decided = threading.Event()  # there is a diagnosis, or it is known that there is none
        self._closed = threading.Event()
        self._coordinating = threading.Lock()
        self._inquiring = threading.Lock()
        self._learning = threading.Lock()
        self._waiters = threading.Semaphore(MOST_WAITERS)
        self._signals: set[int] = set()  # received and not examined yet
        self._ends_on_sigterm = False
        self._unwinding = False  # the main thread is on its way out
        self._last_error = ""  # of the watchdog itself

    @property
    def deadlines(self) -> Deadlines:
        return self._clock.deadlines

    def on_job_lost(self, write: Callable[[Diagnosis], None], failures: Path | None = None) -> None:
        """Sets the function that records that the job is lost, and the parent folder of the
        evidence."""
        self._report.on_job_lost = write
        self._report.failures = failures

    @property
    def peers(self) -> Peers:
        assert self._peers is not None  # no rank asks before addresses were exchanged
        return self._peers

    def enter_phase(self, phase: str, step: int | None = None) -> None:
        """Records progress: the run is now in this phase and in this step."""
        self._clock.enter_phase(phase, step)

    def iterate(self, iterable: Iterable[T], phase: str) -> Iterator[T]:
        """Yields the same items, each of which counts as progress in this phase."""
        self.enter_phase(phase)
        for item in iterable:
            self.enter_phase(phase)
            yield item

    def adapt_deadline(self, steps: int, slowest_s: float, save_s: float | None) -> float | None:
        """Called after each step; returns the new time limit of process groups, if it changes.
        `slowest_s`: of the `steps` taken in this job except the first; `save_s`: of the last
        save."""
        self.deadlines.save_s = save_s
        if steps < MEASURED:
            return None
        deadline_s = self.deadlines.adapt(slowest_s)
        return None if deadline_s is None else process_group_timeout(deadline_s)

    def first_failure(self, name: str, error: BaseException) -> RemoteFailure | None:
        """As in `Failures`, but waits for the diagnosis."""
        if self._server is None or self._closed.is_set():
            return None
        self._unwinding = True
        if self._failure is None and self.diagnosis is None:
            self._failure = Failure.of(error)
            self._wakeup.wake()
        self._wait_for_diagnosis()
        if self.diagnosis is None:
            return None
        blamed = self.job.rank in self.diagnosis.ranks
        if blamed and (self.diagnosis.kind == DiagnosisKind.ENDED or self._is_own(error)):
            return None
        return RemoteFailure(self.diagnosis, self._report.printed or blamed)

    def _is_own(self, error: BaseException) -> bool:
        """Whether an error preceded the diagnosis, or is no consequence of it: then no other rank
        prints it."""
        if signal_of(error) is not None:
            return False
        preceded = self._failure is not None and self._failure.kind != FailureKind.SIGNAL
        return preceded or not introspect.is_connection_error(error)

    def _wait_for_diagnosis(self) -> None:
        """The launcher's signals do not interrupt it: they come exactly when a rank was lost."""
        deadline = time.monotonic() + DIAGNOSIS_S
        while time.monotonic() < deadline and not self._decided.is_set():
            with suppress(SystemExit, KeyboardInterrupt):
                self._decided.wait(max(0.0, deadline - time.monotonic()))
        if self.diagnosis is not None and in_main_thread():
            ignore_signals()  # this process ends soon anyway, within a time limit

    def is_lost(self) -> bool:
        return self.diagnosis is not None

    def leave(self) -> None:
        self._closed.set()
        self._wakeup.wake()

    def progress(self) -> tuple[str | None, int | None]:
        return self._clock.phase, self._clock.step

    def begin(self) -> None:
        """From now on this rank answers other ranks, and looks at the clock. All ranks call it
        together."""
        job = self.job
        if job.store is None:
            job.failures = self  # for its `progress`
        if job.store is None or job.environment.master is None:
            return
        self._server = StatusServer(self._answer)
        self._peers = exchange_addresses(job, self._server)
        self._coordinator = Coordinator(self._peers, self._clock, self._closed)
        job.failures = self
        job.limit_s = math.inf  # from now on this watchdog ends what takes too long
        self._wakeup.install()
        start_thread(self._run, name="watchdog")

    def handle_sigterm(self) -> None:
        """Lets the watchdog end this process on SIGTERM, unless the program has its own handler: a
        launcher sends it when a rank was lost, which is named first. A handler's exception might be
        raised where nothing catches it."""
        self._ends_on_sigterm = self._server is not None and self._wakeup.handle_sigterm()

    def close(self) -> None:
        """From now on connections are refused: this rank has left its job, or has failed."""
        self.leave()
        self._wakeup.uninstall()
        # it was ignored since
        if self._ends_on_sigterm and in_main_thread() and self.diagnosis is not None:
            install_handlers({signal.SIGTERM: signal.SIG_DFL})
        if self._server is not None:
            self._server.close()
        if self._peers is not None:
            self._peers.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            before = time.monotonic()
            self._signals |= self._wakeup.wait(LOOK_EVERY_S)
            if self._closed.is_set():
                return
            if time.monotonic() - before > LOOK_EVERY_S + SUSPENDED_S:
                self._clock.ignore_suspend()
                continue
            if self.diagnosis is None:
                try:
                    self._look()
                except Exception as error:  # a watchdog that has ended would let a job hang
                    self._print_own_error(error)
                    if self._failure is not None:  # there will be no diagnosis of it
                        self._decided.set()
            if self.diagnosis is not None:
                self._end_process()
                return

    def _print_own_error(self, error: Exception) -> None:
        text = describe(error)
        if text != self._last_error:  # once, not every second
            self._last_error = text
            trace = "".join(traceback.format_exception(error))
            warn(f"the watchdog of {self.job} has failed, and goes on:\n{trace}")

    def _look(self) -> None:
        self._clock.advanced(advances())
        # A failure of this rank comes first, then a deadline, then a signal of the launcher: it may
        # only be the consequence of one of the others.
        if self._failure is not None:
            self._inquire(hangs=self._failure.kind != FailureKind.SIGNAL, failed=True)
            if self.diagnosis is None:
                self._decided.set()
        elif self._clock.missed():
            if not introspect.debugger_attached():
                hangs = self.deadlines.hangs(self._clock.phase, self._clock.misses)
                self._inquire(hangs=hangs, late=True)
        elif self._signals:
            # A launcher ends the remaining ranks when one was killed: NCCL alone would not notice
            # for minutes.
            ends = self._sigterm_ends
            self._signals = set()
            if ends:
                self._failure = Failure(FailureKind.SIGNAL, "ended by SIGTERM")
            self._inquire(hangs=False, failed=ends)

    def _inquire(self, hangs: bool, failed: bool = False, late: bool = False) -> None:
        """Has the lowest living rank decide, asked only by the lowest one of each host: otherwise a
        coordinator of 4,096 ranks would have as many connections at once. The arguments are those
        of `Coordinator.diagnose`."""
        question = {"hangs": hangs, "failed": failed, "late": late}
        self._hand_on("inquire", self._inquire_for_host, question)

    def _inquire_for_host(self, **question: bool) -> None:
        """`_inquire` on the lowest rank of a host. One inquiry at a time; later callers get the
        same answer."""
        with self._inquiring:
            if self.diagnosis is None:
                self._hand_on("coordinate", self._coordinate, question)

    def _hand_on(
        self, request: str, answer: Callable[..., object], question: dict[str, bool]
    ) -> None:
        """Asks the lowest rank that answers, of this host or of all; `answer`: called instead if
        that is this rank."""
        for to in self.peers.alive_from_rank_0(same_host=request == "inquire"):
            if to.rank == self.job.rank:
                answer(**question)
                return
            if self._ask_for_diagnosis(to, {"ask": request, **question}):
                return

    def _ask_for_diagnosis(self, to: Address, question: dict[str, Any]) -> bool:
        """Whether that rank has answered, with or without a diagnosis; False: it was lost
        meanwhile."""
        deadline = time.monotonic() + DIAGNOSIS_S
        try:
            answer = self.peers.ask(to, question, DIAGNOSIS_S)
            while answer.get("later"):
                if self._decided.wait(AGAIN_S) or time.monotonic() > deadline:
                    return True
                answer = self.peers.ask(to, question, DIAGNOSIS_S)
            self._learn(answer["diagnosis"])
            return True
        except OSError:
            return False

    def _coordinate(self, hangs: bool, failed: bool, late: bool = False) -> Diagnosis | None:
        """Makes the diagnosis, prints it, and tells all ranks. One at a time; later callers get the
        same answer."""
        assert self._coordinator is not None  # no rank asks before addresses were exchanged
        with self._coordinating:
            if self.diagnosis is not None:
                return self.diagnosis
            diagnosis = self._coordinator.diagnose(hangs=hangs, failed=failed, late=late)
            if diagnosis is None:
                return None
            diagnosis = self._report.make_evidence_folder(
                diagnosis, self._clock.phase, self._clock.step
            )
            if self._prints(diagnosis):
                self._report.print(diagnosis, details=True)
            survivors = self._coordinator.broadcast(diagnosis, self.job.rank)
            if diagnosis.evidence:
                folder = f"{self._report.failures}/{diagnosis.evidence}"
                print_error(f"evidence of ranks and hosts: meshtrain explain {folder}")
            if self.job.rank > 0 and self.job.rank == min(survivors):
                self._report.write_exit_json(diagnosis)
            self._learn(asdict(diagnosis))
            return diagnosis

    def _prints(self, diagnosis: Diagnosis) -> bool:
        """Whether this rank, which has decided, prints the block: not where the rank at fault
        prints its own error, or where the launcher has ended the job."""
        kind = diagnosis.kind
        if kind == DiagnosisKind.INPUT:
            return False
        if kind == DiagnosisKind.ENDED and self._asked_to_end:
            return False
        is_error = kind in (DiagnosisKind.ENDED, DiagnosisKind.FAILED)
        return not (is_error and self.job.rank in diagnosis.ranks)

    def _answer(self, question: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return self._reply(question)
        # the asking rank sees that no answer comes; tracebacks of all threads fill pages
        except Exception as error:
            self._print_own_error(error)
            return None

    def _reply(self, question: dict[str, Any]) -> dict[str, Any]:
        request = question.pop("ask", None)
        if request == "state":
            return asdict(local_status(self.job, self._clock, self._failure))
        if request in ("inquire", "coordinate"):
            if not self._waiters.acquire(blocking=False):
                return {"later": True}
            try:
                if request == "coordinate":
                    self._coordinate(**question)
                else:
                    self._inquire_for_host(**question)
            finally:
                self._waiters.release()
            return {"diagnosis": None if self.diagnosis is None else asdict(self.diagnosis)}
        if request == "end":
            self._learn(question["diagnosis"])
        if request == "look":
            return {"state": self.peers.state(question["rank"])}
        if request == "end of":
            return {"end": self.peers.end_of(question["rank"])}
        if request == "kill":
            self.peers.kill(question["rank"])
        return {}

    def _learn(self, diagnosis: dict[str, Any] | None) -> None:
        """Takes the diagnosis. Threads that wait for it continue, and end, once this rank's
        evidence is written."""
        with self._learning:
            if diagnosis is None or self.diagnosis is not None:
                return
            self.diagnosis = Diagnosis.from_json(diagnosis)
        if self.diagnosis.evidence:
            try:
                start_thread(self._write_evidence, self.diagnosis, name="evidence")
                return
            except NoThreadError as error:  # the job ends without it
                self._print_own_error(error)
        self._decided.set()
        self._wakeup.wake()

    def _write_evidence(self, diagnosis: Diagnosis) -> None:
        try:
            self._report.write_evidence(diagnosis, of_host=self.peers.speaks_for_host(diagnosis))
        except Exception as error:  # the job ends all the same
            self._print_own_error(error)
        self._decided.set()
        self._wakeup.wake()

    def _end_process(self) -> None:
        """Lets the main thread, which knows more, end the process if it can; otherwise ends it
        here."""
        assert self.diagnosis is not None
        self._decided.wait(EVIDENCE_S + 1)  # until the evidence is written
        # The main thread unwinds with blocks, closes files and has a traceback; a thread that ends
        # the process has none of it.
        if self._main_thread_leaves():
            return
        is_ended = self.diagnosis.kind == DiagnosisKind.ENDED
        if is_ended and self._ends_on_sigterm and self._asked_to_end:
            exit_now(128 + signal.SIGTERM)  # as the other ranks do
        if self.job.rank not in self.diagnosis.ranks and self.diagnosis.kind != DiagnosisKind.INPUT:
            self._report.print(self.diagnosis, details=False)
        if self.job.rank == 0 and not self._unwinding:
            self._report.write_exit_json(self.diagnosis)
        self._report.abort(self.diagnosis)

    def _main_thread_leaves(self) -> bool:
        """Whether the main thread leaves the job by itself. It gets time to begin, and then to
        finish."""
        deadline = time.monotonic() + BEGIN_UNWIND_S
        while not self._unwinding and time.monotonic() < deadline:
            self._signals |= self._wakeup.wait(0.05)
            if self._closed.is_set():
                return True
        return self._unwinding and self._closed.wait(UNWIND_S)

    @property
    def _sigterm_ends(self) -> bool:
        """Whether SIGTERM has come, and this watchdog still handles it."""
        return (
            self._ends_on_sigterm
            and signal.SIGTERM in self._signals
            and self._wakeup.handles_sigterm
        )

    @property
    def _asked_to_end(self) -> bool:
        if self._failure is not None and self._failure.kind == FailureKind.SIGNAL:
            return True
        return self._sigterm_ends if self._ends_on_sigterm else bool(self._signals)


@contextmanager
def watched(job: Job) -> Iterator[Watchdog]:
    """While the body runs, the ranks of this job watch each other."""
    watchdog = Watchdog(job)
    try:
        watchdog.begin()
        yield watchdog
    finally:
        watchdog.close()


@contextmanager
def joined(timeout_s: float) -> Iterator[tuple[Job, Watchdog]]:
    """While the body runs, this process is in the job that the environment describes (torchrun,
    srun, or a world of one), whose ranks watch each other; afterwards it leaves it with all others.

    `timeout_s`: the most that ranks wait for each other to join. Raises SystemExit, and passes the
    body's errors on, as `start` does.
    """
    end_with_launcher(os.environ)
    try:
        job = join(read_environment(os.environ), timeout_s)
        try:
            with watched(job) as watchdog, job_exit(job):
                yield job, watchdog
        except SystemExit:
            outlast_signals(job)  # the watchdog has put the handler of SIGTERM back
            raise
    except (InputError, StartError) as error:
        # Before the ranks watch each other; later errors are job_exit's.
        raise SystemExit(refuse_start(error)) from None


@contextmanager
def start(timeout_s: float = 600) -> Iterator[Job]:
    """Joins the job that the environment describes (torchrun, srun, or a world of one) and leaves
    it cleanly.

    The others name a rank that is lost, or that a collective awaits for `timeout_s` seconds, which
    also limits joining.

    Raises:
        SystemExit: with status 2 if the body raises InputError on any rank, with status 1 if
            another rank was lost before. Whatever else the body raises passes through, with a note
            that names rank, host and coordinate.
    """
    with joined(timeout_s) as (job, watchdog):
        watchdog.handle_sigterm()
        # what the body does, and how fast, is unknown here
        watchdog.deadlines.start_s = float("inf")
        watchdog.enter_phase("its own loop")
        job.connect(timeout_s)
        yield job
