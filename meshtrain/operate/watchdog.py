"""A watchdog on every rank: what takes too long, or has failed, is looked into, and the rank it began with is named.

While all is well it costs a rank one thread that looks at the clock once a second, and sends nothing. When a deadline
has passed or a rank fails, the lowest rank that lives asks all others (pulse.py), decides (leading.py), prints one
block, and tells the others, and everybody ends. The deadline comes before the time limits of the process groups
(`patience`), which could only name a rank that has waited.
"""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from meshtrain.leaving import by_signal
from meshtrain.operate import witness
from meshtrain.operate.bell import Bell
from meshtrain.operate.deadlines import MEASURED, Clock, Deadlines, patience
from meshtrain.operate.last_words import LastWords, end
from meshtrain.operate.leading import Leader
from meshtrain.operate.pulse import Address, Ear
from meshtrain.operate.ranks import Ranks, meet
from meshtrain.operate.testify import Failure, statement
from meshtrain.operate.testimony import Verdict
from meshtrain.rounds import Lost, described
from meshtrain.runtime import Job

LOOK_EVERY_S = 1.0
ASLEEP_S = 5.0  # a look that comes so late says that this process was stopped: no conclusions are drawn from the clock
VERDICT_S = 20.0  # the most that a failed rank waits for a verdict
GENTLY_S = 2.0  # for the main thread to end by itself, before it is not asked any more
HELD = 32  # ranks that wait here for a verdict, each with a connection; more of them ask again
AGAIN_S = 0.5  # later
UNWIND_S = 15.0  # for the main thread of a failed rank to write down what it has to

T = TypeVar("T")


class Watch:
    """This rank's watchdog, and what it tells to others.

    Until `begin`, and in a world of one, it only takes notes.

    Attributes:
        verdict: what the job is lost by; None: it is not.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.verdict: Verdict | None = None
        self._clock, self._words = Clock(), LastWords(job)
        self._failure: Failure | None = None
        self._ear: Ear | None = None
        self._ranks: Ranks | None = None
        self._leader: Leader | None = None
        self._decided, self._closed, self._bell = threading.Event(), threading.Event(), Bell()
        self._leading, self._asking, self._held = threading.Lock(), threading.Lock(), threading.Semaphore(HELD)
        self._signalled: set[int] = set()  # signals that came
        self._ends_on_signal = False
        self._unwinding = False  # the main thread is on its way out
        self._stumbled = ""  # the last error of the watchdog's own

    @property
    def deadlines(self) -> Deadlines:
        """May be changed while it watches."""
        return self._clock.deadlines

    def loses(self, lose: Callable[[str], None]) -> None:
        """From now on this writes down in the run's folder that the job is lost."""
        self._words.lose = lose

    @property
    def _others(self) -> Ranks:
        assert self._ranks is not None  # nobody asks before they have met
        return self._ranks

    # What the run says of itself -------------------------------------------------------------------------------------

    def at(self, phase: str, step: int | None = None) -> None:
        """The run has got on: it is in this phase now, and in this step."""
        self._clock.at(phase, step)

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
            self._failure = Failure.of(error)
            self._bell.ring()
        self._wait_for_verdict()
        if self.verdict is None:
            return None
        mine = self.job.rank in self.verdict.ranks
        if mine and (self.verdict.what == "ended" or self._own(error)):
            return None
        return Lost(self.verdict.headline, self._words.said or mine)

    def _own(self, error: BaseException) -> bool:
        """Whether it was there before the verdict, or does not come of it: nobody else tells it."""
        before = self._failure is not None and self._failure.kind == "error"
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
        self._leader = Leader(self._ranks, self._clock, self._closed)
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
                self._clock.slept()
                continue
            if self.verdict is None:
                try:
                    self._look()
                except Exception as error:  # a watch that has ended would let a job hang
                    self._stumble(error)
                    if self._failure is not None:  # its verdict does not come
                        self._decided.set()
            if self.verdict is not None:
                self._end()
                return

    def _stumble(self, error: Exception) -> None:
        """An error of the watchdog itself: told once."""
        if (words := described(error)) != self._stumbled:
            self._stumbled = words
            text = "".join(traceback.format_exception(error))
            print(f"warning: the watchdog of {self.job} has failed, and goes on:\n{text}", file=sys.stderr, flush=True)

    def _look(self) -> None:
        """Whether there is a reason to look into things, and then does."""
        if self._failure is not None:
            self._inquire(hangs=self._failure.kind == "error", failed=True)
            self._decided.set()
        elif self._clock.missed():
            if not witness.debugged():
                self._inquire(hangs=self.deadlines.hangs(self._clock.phase, self._clock.misses), late=True)
        elif self._signalled:
            # A launcher ends those that are left when one rank was killed: NCCL alone would not notice for minutes.
            ends = self._caught
            self._signalled = set()
            if ends:
                self._failure = Failure("signal", "ended by SIGTERM")
            self._inquire(hangs=False, failed=ends)

    def _inquire(self, hangs: bool, failed: bool = False, late: bool = False) -> None:
        """Has the lowest rank that lives decide. The arguments are those of `Leader.judge`.

        It is asked by the lowest rank of each host, which the others of that host ask: a leader of 4,096 ranks would
        have as many connections at once.
        """
        question = {"hangs": hangs, "failed": failed, "late": late}
        for to in self._others.lowest(near=True):
            if to.rank == self.job.rank:
                self._inquire_afar(question)
            elif not self._ask_for_verdict(to, {"ask": "inquire", **question}):
                continue
            return

    def _inquire_afar(self, question: dict[str, Any]) -> None:
        """As `_inquire`, on the lowest rank of a host. One at a time; who comes later is told the same."""
        with self._asking:
            if self.verdict is not None:
                return
            for to in self._others.lowest():
                if to.rank == self.job.rank:
                    self._lead(**question)
                elif not self._ask_for_verdict(to, {"ask": "lead", **question}):
                    continue
                return

    def _ask_for_verdict(self, to: Address, question: dict[str, Any]) -> bool:
        """Whether that rank has answered: a verdict, or that there is none; not if it was lost meanwhile."""
        deadline = time.monotonic() + VERDICT_S
        try:
            while (answer := self._others.ask(to, question, VERDICT_S)).get("later"):
                if self._decided.wait(AGAIN_S) or time.monotonic() > deadline:
                    return True
            self._learn(answer["verdict"])
            return True
        except OSError:
            return False

    def _lead(self, hangs: bool, failed: bool, late: bool = False) -> Verdict | None:
        """Decides, says so, and tells all. One at a time; who comes later is told the same."""
        assert self._leader is not None  # nobody asks before they have met
        with self._leading:
            if self.verdict is not None:
                return self.verdict
            verdict = self._leader.judge(hangs=hangs, failed=failed, late=late)
            if verdict is None:
                return None
            tells_itself = self.job.rank in verdict.ranks and verdict.what in ("failed", "ended")
            if not tells_itself and not (verdict.what == "ended" and self._asked_to_end):
                self._words.say(verdict.text)
            left = self._leader.spread(verdict, self.job.rank)
            if self.job.rank > 0 and self.job.rank == min(left):
                self._words.write_down(verdict.headline)
            self._learn(asdict(verdict))
            return verdict

    # What others ask -------------------------------------------------------------------------------------------------

    def _answer(self, question: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return self._reply(question)
        except Exception as error:  # who asks sees that there is no answer; a thread's traceback each would be pages
            self._stumble(error)
            return None

    def _reply(self, question: dict[str, Any]) -> dict[str, Any]:
        what = question.pop("ask", None)
        if what == "state":
            return asdict(statement(self.job, self._clock, self._failure))
        if what in ("inquire", "lead"):
            if not self._held.acquire(blocking=False):
                return {"later": True}
            try:
                if what == "lead":
                    self._lead(**question)
                else:
                    self._inquire_afar(question)
            finally:
                self._held.release()
            return {"verdict": None if self.verdict is None else asdict(self.verdict)}
        if what == "end":
            self._learn(question["verdict"])
        if what == "look":
            return {"state": self._others.look(question["rank"])}
        if what == "put down":
            self._others.end(question["rank"])
        return {}

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
            end(128 + signal.SIGTERM)  # as were the others
        if self.job.rank not in self.verdict.ranks:
            self._words.say(self.verdict.headline)
        if self.job.rank == 0 and not self._unwinding:
            self._words.write_down(self.verdict.headline)
        self._words.fail(self.verdict.headline)

    @property
    def _asked_to_end(self) -> bool:
        """Whether this process has had a signal."""
        asked = self._caught if self._ends_on_signal else bool(self._signalled)
        return asked or (self._failure is not None and self._failure.kind == "signal")

    @property
    def _caught(self) -> bool:
        """Whether SIGTERM has come, and this watchdog is what it ends the process by, still."""
        return self._ends_on_signal and signal.SIGTERM in self._signalled and self._bell.catches


@contextmanager
def watched(job: Job) -> Iterator[Watch]:
    """While the body runs, the ranks of this job look after each other."""
    watch = Watch(job)
    try:
        watch.begin()
        yield watch
    finally:
        watch.close()
