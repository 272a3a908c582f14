"""The ranks of a job as one of them can reach them: without the job's store, and without rank 0."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshtrain.operate import pulse
from meshtrain.operate.inquest import Seen, Statement, Verdict, Wait
from meshtrain.operate.pulse import Address, Ear
from meshtrain.runtime import Job

LOWEST = 16  # ranks among which the lowest that lives is looked for at once
TELL_S = 2.0  # for a rank to hear a verdict


def meet(job: Job, ear: Ear) -> "Ranks":
    """Tells all ranks where this one listens, by the job's store; all call it together."""
    assert job.environment.master is not None  # there is a store
    own = list(pulse.addresses_towards([job.environment.master[0]]))
    seen = job.gather("exchanging addresses", [job.host, os.getpid(), ear.port, own, ear.token])
    if len({host for host, *_ in seen}) > 1 and any(pulse.loopback(ips[0]) for *_, ips, _ in seen if ips):
        # The host of the store reaches itself by loopback, or by a name that means nothing elsewhere.
        theirs = [ip for host, _, _, ips, _ in seen if host != job.host for ip in ips if not pulse.loopback(ip)]
        own = list(pulse.addresses_towards(theirs[:4])) or own
        ways = job.gather("exchanging addresses", own)
        seen = [[*one[:3], ips, one[4]] for one, ips in zip(seen, ways, strict=True)]
    ear.token = seen[0][4]
    addresses = [Address(rank, host, pid, port, tuple(ips)) for rank, (host, pid, port, ips, _) in enumerate(seen)]
    return Ranks(job, ear, addresses)


class Ranks:
    """All ranks, this one too."""

    def __init__(self, job: Job, ear: Ear, addresses: Sequence[Address]) -> None:
        self._job, self._ear, self._addresses = job, ear, addresses

    def lowest(self) -> Iterator[Address]:
        """Ranks that answer, from the lowest on, up to this one."""
        lower = self._addresses[: self._job.rank]
        for start in range(0, len(lower), LOWEST):
            some = lower[start : start + LOWEST]
            for to, found in zip(some, self._ask_all(some, {"ask": "here"}), strict=True):
                if not isinstance(found, OSError):
                    yield to
        yield self._addresses[self._job.rank]

    def examine(self) -> list[Seen]:
        """What is found out about every rank."""
        answers = self._ask_all(self._addresses, {"ask": "state"})
        again = [to for to, found in zip(self._addresses, answers, strict=True) if isinstance(found, pulse.SilentError)]
        states = {to.rank: self._look_at(to, answers) for to in again}
        busy = [to for to in again if states[to.rank] not in ("T", "t")]
        second = dict(zip([to.rank for to in busy], self._ask_all(busy, {"ask": "state"}), strict=True))
        seen = []
        for to, found in zip(self._addresses, answers, strict=True):
            found = second.get(to.rank, found)
            who = self._job.name_of(to.rank, to.host)
            if not isinstance(found, OSError):
                seen.append(Seen(to.rank, to.host, who, to.pid, "answers", _statement(found)))
                continue
            reach = "silent" if isinstance(found, pulse.SilentError) else "unreachable"
            reach = "gone" if isinstance(found, ConnectionRefusedError) else reach
            seen.append(Seen(to.rank, to.host, who, to.pid, reach, None, states.get(to.rank) in ("T", "t")))
        return seen

    def _look_at(self, silent: Address, answers: list[Any]) -> str:
        """The state of a process that does not answer, as a rank of its host sees it; "" if nobody can."""
        if silent.host == self._job.host:
            return pulse.state_of(silent.pid)
        for to, found in zip(self._addresses, answers, strict=True):
            if to.host == silent.host and not isinstance(found, OSError):
                try:
                    return str(self.ask(to, {"ask": "look", "rank": silent.rank})["state"])
                except OSError:
                    continue
        return ""

    def put_down(self, verdict: Verdict) -> None:
        """A stopped process would stay for ever where no launcher ends it: a rank of its host does."""
        if verdict.what not in ("stopped", "silent"):
            return
        for lost in (self._addresses[rank] for rank in verdict.ranks):
            near = [to for to in self._addresses if to.host == lost.host and to.rank not in verdict.ranks]
            for to in near:
                try:
                    self.ask(to, {"ask": "put down", "rank": lost.rank})
                    break
                except OSError:
                    continue

    def left(self, verdict: Verdict) -> set[int]:
        """The ranks that live, and can be talked to."""
        lost = verdict.ranks if verdict.what in ("gone", "stopped", "unreachable", "silent") else ()
        return {to.rank for to in self._addresses} - set(lost)

    def tell(self, ranks: set[int], what: Mapping[str, Any]) -> None:
        """Tells these ranks something, as far as they hear it."""
        self._ask_all([to for to in self._addresses if to.rank in ranks], what, seconds=TELL_S)

    def look(self, rank: int) -> str:
        """The state of a rank's process on this host, as `pulse.state_of` has it."""
        return pulse.state_of(self._addresses[rank].pid) if self._near(rank) else ""

    def end(self, rank: int) -> None:
        """Ends the process of a rank of this host."""
        if self.look(rank) not in ("", "Z"):
            os.kill(self._addresses[rank].pid, signal.SIGKILL)

    def _near(self, rank: int) -> bool:
        return self._addresses[rank].host == self._job.host

    def ask(self, to: Address, question: Mapping[str, Any], seconds: float = pulse.ANSWER_S) -> Any:
        """As `pulse.ask` has it."""
        return pulse.ask(to, question, self._ear.token, seconds=seconds, here=self._job.host)

    def _ask_all(self, some: Sequence[Address], question: Mapping[str, Any], seconds: float = pulse.ANSWER_S) -> list:
        return pulse.ask_all(some, question, self._ear.token, self._job.host, seconds)


def _statement(said: dict[str, Any]) -> Statement:
    wait = said.pop("wait")
    if wait is not None:
        missing = wait.pop("missing")
        wait = Wait(**wait | {"ranks": tuple(wait["ranks"])}, missing=None if missing is None else tuple(missing))
    return Statement(**said | {"stack": tuple(said["stack"])}, wait=wait)
