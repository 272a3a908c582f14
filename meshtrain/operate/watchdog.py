"""A watchdog on every rank: what takes too long, or has failed, is looked into, and the rank it began with is named.

While all is well it costs a rank one thread that looks at the clock once a second, and sends nothing. When a deadline
has passed or a rank fails, the lowest rank that lives asks all others (pulse.py), decides (inquest.py), prints one
block, and tells the others, and everybody ends. The deadline comes before the time limits of the process groups
(`patience`), which could only name a rank that has waited.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from meshtrain.environment import read_environment
from meshtrain.errors import InputError
from meshtrain.leaving import by_signal, leaving
from meshtrain.operate import witness
from meshtrain.operate.bell import Bell
from meshtrain.operate.deadlines import MEASURED, PATIENT, Deadlines, patience
from meshtrain.operate.inquest import Seen, Statement, Verdict, decide, same, unexplained, waited_for
from meshtrain.operate.pulse import Ear
from meshtrain.operate.ranks import Ranks, meet
from meshtrain.orphans import end_with_launcher
from meshtrain.rounds import Lost, described
from meshtrain.runtime import Job, join

LOOK_EVERY_S = 1.0
ASLEEP_S = 5.0  # a look that comes so late says that this process was stopped: no conclusions are drawn from the clock
VERDICT_S = 20.0  # the most that a failed rank waits for a verdict
GENTLY_S = 2.0  # for the main thread to end by itself, before it is not asked any more
UNWIND_S = 15.0  # for the main thread of a failed rank to write down what it has to
FRESH_S = 5.0  # so long nobody looks again where nothing was wrong
RECORDER_S = 1.5  # for the flight recorder to answer
MOVES_S = 5.0  # for ranks that all wait in one place to get on, before they count as stuck there
WRITE_S = 5.0  # for exit.json: its file system may be what was lost

T = TypeVar("T")


class Watch:
    """This rank's watchdog, and what it tells to others.

    Until `begin`, and in a world of one, it only takes notes.

    Attributes:
        deadlines: may be changed while it watches.
        lose: writes down in the run's folder that the job is lost; None: there is no folder.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.deadlines = Deadlines()
        self.lose: Callable[[str], None] | None = None
        self.verdict: Verdict | None = None
        self._phase, self._step, self._since = "start", 0, time.monotonic()
        self._extended, self._missed = 0.0, 0  # seconds that a deadline was put off, and how often it passed
        self._failure: tuple[str, str, float] | None = None  # kind, in words, when
        self._fell: list[FrameType] = []  # where, innermost first
        self._broken = False  # it failed because of others, as far as can be seen
        self._ear: Ear | None = None
        self._ranks: Ranks | None = None
        self._decided, self._closed, self._bell = threading.Event(), threading.Event(), Bell()
        self._leading, self._said = threading.Lock(), False
        self._signalled: set[int] = set()  # signals that came
        self._ends_on_signal = False
        self._unwinding = False  # the main thread is on its way out
        self._nothing = (False, False), float("-inf")  # when an inquest found nothing wrong, and of what kind
        self._noted = ""  # what was said last of ranks that take long
        self._stumbled = ""  # the last error of the watchdog's own

    @property
    def _others(self) -> Ranks:
        assert self._ranks is not None  # nobody asks before they have met
        return self._ranks

    # What the run says of itself -------------------------------------------------------------------------------------

    def at(self, phase: str, step: int | None = None) -> None:
        """The run has got on: it is in this phase now, and in this step."""
        self._step = self._step if step is None else step
        self._phase, self._since, self._extended, self._missed, self._noted = phase, time.monotonic(), 0.0, 0, ""

    def through(self, batches: Iterable[T], phase: str) -> Iterator[T]:
        """The batches, each of which is a sign that the run gets on."""
        self.at(phase)
        for batch in batches:
            self.at(phase)
            yield batch
        self.deadlines.seen.add(phase)

    def pace(self, steps: int, slowest_s: float, save_s: float | None) -> float | None:
        """After each step: the new time limit of process groups, if there is one.

        Args:
            steps: taken in this job.
            slowest_s: of these, the first left out.
            save_s: seconds that the last save took, if there was one.
        """
        self.deadlines.save_s = save_s
        if steps < MEASURED:
            return None
        changed = self.deadlines.measured(slowest_s)
        return None if changed is None else patience(changed)

    # Failures, as a job knows them -----------------------------------------------------------------------------------

    def failed(self, who: str, error: BaseException) -> Lost | None:
        """As `Failures` has it. Waits for the verdict."""
        if self._ear is None or self._closed.is_set():
            return None
        self._unwinding = True
        if self._failure is None and self.verdict is None:
            signalled = by_signal(error)
            words = f"ended by {_signal_of(error)}" if signalled else described(error)
            self._fell = witness.frames_of(error)
            self._broken = witness.of_connections(error)
            self._failure = "signal" if signalled else "error", words, time.monotonic()
            self._bell.ring()
        self._wait_for_verdict()
        if self.verdict is None:
            return None
        mine = self.job.rank in self.verdict.ranks
        if mine and (self.verdict.what == "ended" or self._own(error)):
            return None
        return Lost(self.verdict.headline, self._said or mine)

    def _own(self, error: BaseException) -> bool:
        """Whether it was there before the verdict, or does not come of it: nobody else tells it."""
        before = self._failure is not None and self._failure[0] == "error"
        return not by_signal(error) and (before or not witness.of_connections(error))

    def leave(self) -> None:
        """As `Failures` has it."""
        self._closed.set()
        self._bell.ring()

    def _wait_for_verdict(self) -> None:
        """The launcher's signals do not cut it short: they come just when a rank was lost."""
        deadline = time.monotonic() + VERDICT_S
        while (left := deadline - time.monotonic()) > 0 and not self._decided.is_set():
            try:
                self._decided.wait(left)
            except (SystemExit, KeyboardInterrupt):
                continue
        if self.verdict is not None and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # the end is near anyway, and bounded
                signal.signal(number, signal.SIG_IGN)

    def over(self) -> bool:
        """As `Failures` has it."""
        return self.verdict is not None

    # Start and end ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """From now on this rank listens, and looks at the clock. All ranks begin together."""
        job = self.job
        if job.store is None or job.environment.master is None:
            return
        self._ear = Ear(self._answer)
        self._ranks = meet(job, self._ear)
        job.failures = self
        self._bell.hang()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def hear_the_end(self) -> None:
        """SIGTERM ends this process by its watchdog, unless the program has a way of its own.

        A launcher sends it when a rank was lost, in the very moment in which this rank's collectives fail: that which
        rank it was is told first. An exception by a handler could come anywhere, also where nobody catches it.
        """
        self._ends_on_signal = self._ear is not None and self._bell.catch()

    def close(self) -> None:
        """Whoever asks now is told that nobody is here: this rank has left its job, or has failed."""
        self.leave()
        self._bell.take_down()
        main = threading.current_thread() is threading.main_thread()
        if self._ends_on_signal and main and self.verdict is not None:  # it was ignored since
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._ear is not None:
            self._ear.close()

    # The thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            before = time.monotonic()
            self._signalled |= self._bell.wait(LOOK_EVERY_S)
            if self._closed.is_set():
                return
            if time.monotonic() - before > LOOK_EVERY_S + ASLEEP_S:
                self._extended += time.monotonic() - self._since
                continue
            if self.verdict is None:
                try:
                    self._look()
                except Exception as error:  # a watch that has ended would let a job hang
                    self._stumble(error)
            if self.verdict is not None:
                self._end()
                return

    def _stumble(self, error: Exception) -> None:
        """An error of the watchdog itself: told once, and nobody waits for a verdict."""
        if (words := described(error)) != self._stumbled:
            self._stumbled = words
            text = "".join(traceback.format_exception(error))
            print(f"warning: the watchdog of {self.job} has failed, and goes on:\n{text}", file=sys.stderr, flush=True)
        self._decided.set()

    def _look(self) -> None:
        """Whether there is a reason to look into things, and then does."""
        late = time.monotonic() - self._since - self._extended - self.deadlines.of(self._phase)
        if self._failure is not None:
            self._inquire(hangs=self._failure[0] == "error", failed=True)
            self._decided.set()
        elif late > 0:
            self._missed += 1
            try:
                if not witness.debugged():
                    self._inquire(hangs=self.deadlines.hangs(self._phase, self._missed), late=True)
            finally:
                self._extended += self.deadlines.of(self._phase) + late
        elif self._signalled:
            # A launcher ends those that are left when one rank was killed: NCCL alone would not notice for minutes.
            ends = self._caught
            self._signalled = set()
            if ends:
                self._failure = "signal", "ended by SIGTERM", time.monotonic()
            self._inquire(hangs=False, failed=ends)

    def _inquire(self, hangs: bool, failed: bool = False, late: bool = False) -> None:
        """Has the lowest rank that lives decide.

        Args:
            failed: this rank has, and there will be a verdict.
            late: this rank has missed a deadline: if there is no verdict, it is said who takes long.
        """
        for to in self._others.lowest():
            if to.rank == self.job.rank:
                self._lead(hangs, failed, late)
                return
            try:
                question = {"ask": "lead", "hangs": hangs, "failed": failed, "late": late}
                self._learn(self._others.ask(to, question, VERDICT_S)["verdict"])
                return
            except OSError:  # it was lost meanwhile: the next one
                continue

    # Leading an inquest ----------------------------------------------------------------------------------------------

    def _lead(self, hangs: bool, failed: bool, late: bool = False) -> Verdict | None:
        """Asks all, decides, says so, and tells all. One at a time; who comes later is told the same."""
        with self._leading:
            if self.verdict is not None:
                return self.verdict
            if not failed and self._nothing[0] == (hangs, late) and time.monotonic() - self._nothing[1] < FRESH_S:
                return None  # all ranks come with this question, and it was answered just now
            seen = self._others.examine()
            verdict = decide(seen, hangs=hangs)
            if verdict is not None and verdict.what == "stuck":
                verdict = self._once_more(seen)
            if verdict is None or self._closed.is_set():
                if late and not self._closed.is_set():
                    self._note(seen, hangs)
                self._nothing = (hangs, late), time.monotonic()
                return None
            tells_itself = self.job.rank in verdict.ranks and verdict.what in ("failed", "ended")
            if not tells_itself and not (verdict.what == "ended" and self._asked_to_end):
                self._say(f"{self.job} stops, because {verdict.text}")
            left = self._others.left(verdict)
            told = {"ask": "end", "verdict": asdict(verdict)}
            self._others.tell(left - {self.job.rank}, told)
            self._others.put_down(verdict)
            if self.job.rank > 0 and self.job.rank == min(left):
                self._write_down(verdict.headline)
            self._learn(asdict(verdict))
            return verdict

    def _once_more(self, seen: list[Seen]) -> Verdict | None:
        """All ranks in one collective are stuck in it only if they are still there a little later."""
        if self._closed.wait(MOVES_S):
            return None
        again = self._others.examine()
        verdict = decide(again, hangs=True)
        return None if verdict is not None and verdict.what == "stuck" and not same(seen, again) else verdict

    def _note(self, seen: list[Seen], hangs: bool) -> None:
        """A deadline has passed, and the job goes on: says once what is known of it."""
        if any(one.statement is not None and one.statement.debugged for one in seen):
            return
        puzzle = unexplained(seen) if hangs else None
        kind, text = ("busy", waited_for(seen)) if puzzle is None else ("puzzle", f"warning: {puzzle}")
        if kind != self._noted:
            self._noted = kind
            print(text, file=sys.stderr, flush=True)

    # What others ask -------------------------------------------------------------------------------------------------

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        what = question.get("ask")
        if what == "state":
            return asdict(self.statement())
        if what == "lead":
            verdict = self._lead(bool(question["hangs"]), bool(question["failed"]), bool(question["late"]))
            return {"verdict": None if verdict is None else asdict(verdict)}
        if what == "end":
            self._learn(question["verdict"])
        if what == "look":
            return {"state": self._others.look(question["rank"])}
        if what == "put down":
            self._others.end(question["rank"])
        return {}

    def statement(self) -> Statement:
        """What this rank says of itself."""
        failure = self._failure
        at = witness.frames(threading.main_thread()) if failure is None else self._fell
        known = witness.groups(self.job.layout, self.job.rank)
        recorded, begun = witness.within(RECORDER_S, lambda: witness.recorded(known)) or (None, {})
        wait = recorded or witness.waits(at, known, self.job.world_size, begun)
        saving = witness.thread_named("checkpoint")
        if wait is None and saving is not None:
            writing = witness.frames(saving)
            wait = witness.waits(writing, known, self.job.world_size)
            if wait is None and self._phase == "saving" and failure is None:
                at = writing  # the main thread only waits for it
        if failure is not None and not self._broken:
            wait = None
        seconds = time.monotonic() - self._since
        return Statement(
            self._phase,
            self._step,
            seconds,
            None if failure is None else failure[1],
            None if failure is None else failure[0],
            0.0 if failure is None else time.monotonic() - failure[2],
            failure is not None and self._broken,
            seconds > self.deadlines.of(self._phase),
            self._phase in PATIENT,
            wait,
            begun,
            witness.stack(at),
            witness.debugged(),
        )

    # The end ---------------------------------------------------------------------------------------------------------

    def _learn(self, verdict: dict[str, Any] | None) -> None:
        if verdict is not None and self.verdict is None:
            self.verdict = Verdict(
                verdict["what"], tuple(verdict["ranks"]), verdict["headline"], tuple(verdict["details"])
            )
        if self.verdict is not None:
            self._decided.set()
            self._bell.ring()

    def _end(self) -> None:
        """Ends this process: by its main thread if that can, which knows more; otherwise here."""
        assert self.verdict is not None
        deadline = time.monotonic() + GENTLY_S
        while not self._unwinding and time.monotonic() < deadline:
            self._signalled |= self._bell.wait(0.05)
            if self._closed.is_set():
                return
        if self._unwinding and self._closed.wait(UNWIND_S):
            return
        if self._ends_on_signal and self.verdict.what == "ended" and self._asked_to_end:
            self._exit(128 + signal.SIGTERM)  # as were the others
        if not self._said and self.job.rank not in self.verdict.ranks:
            self._say(f"{self.job} stops, because {self.verdict.headline}")
        if self.job.rank == 0 and not self._unwinding:
            self._write_down(self.verdict.headline)
        try:
            raise RuntimeError(f"{self.job} stops, because {self.verdict.headline}")
        except RuntimeError as error:
            get_error_handler().record_exception(error)  # for torchrun's summary; it wants one that was raised
        self._exit(1)

    @property
    def _asked_to_end(self) -> bool:
        """Whether this process has had a signal."""
        asked = self._caught if self._ends_on_signal else bool(self._signalled)
        return asked or (self._failure is not None and self._failure[0] == "signal")

    @property
    def _caught(self) -> bool:
        """Whether SIGTERM has come, and this watchdog is what it ends the process by, still."""
        return self._ends_on_signal and signal.SIGTERM in self._signalled and self._bell.catches

    def _exit(self, status: int) -> None:
        """At once: the main thread may be in a collective that never ends."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _say(self, text: str) -> None:
        """In one piece, and once."""
        self._said = True
        sys.stdout.flush()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def _write_down(self, reason: str) -> None:
        """Waits for it no longer than it may take: the folder may be on a host that is gone."""
        lose, self.lose = self.lose, None
        if lose is not None and witness.within(WRITE_S, lambda: self._written(lose, reason)) is None:
            print(f"{self.job} could not write that down within {WRITE_S:.0f} s", file=sys.stderr, flush=True)

    def _written(self, lose: Callable[[str], None], reason: str) -> bool:
        try:
            lose(reason)
        except OSError as error:
            print(f"{self.job} could not write that down: {error}", file=sys.stderr, flush=True)
        return True


def _signal_of(error: BaseException) -> str:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return signal.Signals(error.code - 128).name
    return "SIGINT"


@contextmanager
def watched(job: Job) -> Iterator[Watch]:
    """While the body runs, the ranks of this job look after each other."""
    watch = Watch(job)
    try:
        watch.begin()
        yield watch
    finally:
        watch.close()


@contextmanager
def start(timeout_s: float = 600) -> Iterator[Job]:
    """Joins the job that the environment describes (torchrun, srun, or a world of one) and leaves it cleanly.

    If a rank is lost, the others say which; a rank that hangs is named when a collective has taken `timeout_s`.

    Args:
        timeout_s: the time limit in seconds for joining and for collectives.

    Raises:
        SystemExit: with status 2 if the body raises InputError, with status 1 if another rank was lost before. Whatever
            else the body raises passes through, with a note that names rank, host and coordinate.
    """
    end_with_launcher(os.environ)
    try:
        job = join(read_environment(os.environ), timeout_s)
    except InputError as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    with watched(job) as watch, leaving(job):
        watch.hear_the_end()
        watch.deadlines.start_s = float("inf")  # what the body does, and how fast, nobody knows here
        watch.at("its own loop")
        job.connect(timeout_s)
        yield job
