"""The ranks of a job as one of them can reach them: without the job's store, and without rank 0."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshtrain.operate import pulse
from meshtrain.operate.pulse import Address, Ear
from meshtrain.operate.testimony import Seen, Statement, Verdict, Wait
from meshtrain.runtime import Job

LOWEST = 16  # ranks among which the lowest that lives is looked for at once, to begin with
TELL_S = 2.0  # for a rank to hear a verdict


def meet(job: Job, ear: Ear) -> "Ranks":
    """Tells all ranks where this one listens, by the job's store; all call it together."""
    assert job.environment.master is not None  # there is a store
    own = list(pulse.addresses_towards([job.environment.master[0]]))
    here = pulse.place(job.host)
    seen = job.gather("exchanging addresses", [ear.token, own, job.host, os.getpid(), ear.port, here.net, here.pids])
    ways, nets = [ips for _, ips, *_ in seen], [one[5] for one in seen]
    if len(set(nets)) > 1 and any(pulse.loopback(ips[0]) for ips in ways if ips):
        # The host of the store reaches itself by loopback, or by a name that means nothing elsewhere.
        others = [ips for net, ips in zip(nets, ways, strict=True) if net != here.net]
        theirs = [ip for ips in others for ip in ips if not pulse.loopback(ip)]
        own = list(pulse.addresses_towards(theirs[:4])) or own
        ways = job.gather("exchanging addresses", own)
    ear.token = seen[0][0]
    addresses = [
        Address(rank, host, pid, port, tuple(ips), net, pids)
        for rank, ((_, _, host, pid, port, net, pids), ips) in enumerate(zip(seen, ways, strict=True))
    ]
    return Ranks(job, ear, addresses)


class Ranks:
    """All ranks, this one too."""

    def __init__(self, job: Job, ear: Ear, addresses: Sequence[Address]) -> None:
        self._job, self._ear, self._addresses = job, ear, addresses
        self._here = addresses[job.rank]

    def lowest(self, *, near: bool = False) -> Iterator[Address]:
        """Ranks that answer, from the lowest on, up to this one.

        Args:
            near: of this host only.
        """
        lower = [to for to in self._addresses[: self._job.rank] if not near or to.net == self._here.net]
        size = LOWEST
        while lower:
            some, lower = lower[:size], lower[size:]
            size *= 4  # where so many are lost, whole hosts are: not one after the other
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
        if self._near(silent.rank):
            return pulse.state_of(silent.pid)
        for to, found in zip(self._addresses, answers, strict=True):
            if to.pids == silent.pids and not isinstance(found, OSError):
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
            near = [to for to in self._addresses if to.pids == lost.pids and to.rank not in verdict.ranks]
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
        """Tells these ranks something, as far as they hear it; once more those who did not seem to."""
        to_tell = [to for to in self._addresses if to.rank in ranks]
        for _ in range(2):
            heard = self._ask_all(to_tell, what, seconds=TELL_S)
            to_tell = [to for to, found in zip(to_tell, heard, strict=True) if isinstance(found, OSError)]

    def look(self, rank: int) -> str:
        """The state of a rank's process on this host, as `pulse.state_of` has it."""
        return pulse.state_of(self._addresses[rank].pid) if self._near(rank) else ""

    def end(self, rank: int) -> None:
        """Ends the process of a rank of this host."""
        if self.look(rank) not in ("", "Z"):
            os.kill(self._addresses[rank].pid, signal.SIGKILL)

    def _near(self, rank: int) -> bool:
        """Whether the number of its process means the same to this one."""
        return self._addresses[rank].pids == self._here.pids

    def ask(self, to: Address, question: Mapping[str, Any], seconds: float = pulse.ANSWER_S) -> Any:
        """As `pulse.ask` has it."""
        return pulse.ask(to, question, self._ear.token, seconds=seconds, here=self._here.net)

    def _ask_all(self, some: Sequence[Address], question: Mapping[str, Any], seconds: float = pulse.ANSWER_S) -> list:
        return pulse.ask_all(some, question, self._ear.token, self._here.net, seconds)


def _statement(said: dict[str, Any]) -> Statement:
    wait = said.pop("wait")
    if wait is not None:
        missing = wait.pop("missing")
        wait = Wait(**wait | {"ranks": tuple(wait["ranks"])}, missing=None if missing is None else tuple(missing))
    return Statement(**said | {"stack": tuple(said["stack"])}, wait=wait)
