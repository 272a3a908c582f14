"""RPC between the watchdogs of a job: each rank has a server that answers questions about it.

Nothing is sent while all is well, and nothing goes through the job's store, which may be what was
lost. A question is one line of JSON with the job's token, on a connection of its own; the answer is
one line of JSON.
"""

import errno
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from typing import Any
from weakref import ref

from meshtrain.errors import group_values
from meshtrain.job.parsing import parse_json
from meshtrain.job.process import Job
from meshtrain.job.sockets import address_towards, is_loopback, listen
from meshtrain.job.threads import NoThreadError, start_thread
from meshtrain.job.watchdog.deaths import Deaths
from meshtrain.job.watchdog.records import (
    OUT_OF_REACH,
    Diagnosis,
    DiagnosisKind,
    RankReport,
    RankStatus,
    Reach,
)

CONNECT_S = 3.0
# a healthy rank needs a few milliseconds; on an oversubscribed host it may take seconds
ANSWER_S = 4.0
TELL_S = 2.0  # for a rank to receive a diagnosis
AT_ONCE = 64  # ranks that are asked at the same time
MOST_ENDS = 4  # processes that are gone whose neighbours are asked how they ended
READERS = 256  # questions that are read at the same time
PAUSE_S = 0.1  # before a retry where the system has run out of a resource
# of this process or its host
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)
EXHAUSTED_S = 30.0  # for which it waits for others to free such a resource
# marks an answer: another program may have got the port of a rank that is gone
ANSWERED = "answered"
LINE = 2**20  # bytes of a question or an answer
READ = 2**16  # bytes that are read of it at a time
LOWEST = 16  # ranks that are asked at once to find the lowest one alive, to begin with
STOPPED_STATES = ("T", "t")
BOOT = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True)
class Address:
    """Where a rank listens; `ips`: addresses of its host, the likeliest first.

    `net`, `pids`: its network and PID namespaces, as hosts may share a name (cloned images,
    containers), and one host may have several. Processes of one `net` reach each other by loopback;
    those of one `pids` see the same process ids.
    """

    rank: int
    host: str
    pid: int
    port: int
    ips: Sequence[str]
    net: str
    pids: str


def namespace_ids(host: str) -> list[str]:
    """`net` and `pids` of this process; the name `host` is the fallback where the system does not
    tell them."""
    kernel = host
    with suppress(OSError), open(BOOT) as file:
        kernel = file.read().strip()
    names = []
    for kind in ("net", "pid"):
        names.append(kernel)
        with suppress(OSError):
            names[-1] += f" {os.stat(f'/proc/self/ns/{kind}').st_ino}"
    return names


class NoReplyError(OSError):
    """The connection was accepted, but no answer came."""


class ExhaustedError(RuntimeError):
    """This process has no descriptor or memory left to ask with: that says nothing about the rank
    to be asked."""


class StatusServer:
    """Answers each question with `answer`, in its own thread; if that returns None, nothing is
    sent."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        self.token = secrets.token_hex(16)  # until the job has agreed on one
        self._answer = answer
        self._listening = listen(0)
        self.port: int = self._listening.getsockname()[1]
        close_in_children(self._listening)
        self._closed = threading.Event()
        self._readers = threading.Semaphore(READERS)
        start_thread(self._accept, name="status server")

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:  # it is closed, too many files are open, or the peer has given up
                self._closed.wait(PAUSE_S)
                continue
            # Strangers that say nothing may hold so many threads, and no more.
            self._readers.acquire()
            while not self._closed.is_set():
                try:
                    start_thread(self._serve, connection, name="answer")
                    break
                except NoThreadError:
                    self._closed.wait(PAUSE_S)

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the peer has gone
            question = self._read(connection)
            if question is None:
                return
            answer = self._answer(question)
            if answer is None:
                return
            connection.settimeout(ANSWER_S)
            connection.sendall(json.dumps({ANSWERED: answer}).encode() + b"\n")

    def _read(self, connection: socket.socket) -> dict[str, Any] | None:
        """The question, if it comes from this job. Strangers hold READERS threads at most,
        questions once read none."""
        try:
            question = parse_json(_read_line(connection, ANSWER_S))
        except ValueError:  # another protocol
            return None
        finally:
            self._readers.release()
        if not isinstance(question, dict):
            return None
        token = str(question.pop("token", "")).encode(errors="replace")
        return question if secrets.compare_digest(token, self.token.encode()) else None

    def close(self) -> None:
        """From now on connections are refused: this rank has left."""
        self._closed.set()
        with suppress(OSError):  # closed before
            self._listening.shutdown(socket.SHUT_RDWR)  # the thread that listens would keep it open
        self._listening.close()


def close_in_children(listening: socket.socket) -> None:
    """Forked children (data readers) do not keep a port open when this process is gone."""
    weak = ref(listening)

    def close() -> None:
        inherited = weak()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)


def ask(
    to: Address,
    question: Mapping[str, Any],
    token: str,
    *,
    seconds: float = ANSWER_S,
    net: str = "",
) -> Any:
    """A rank's answer. `net`: this process's network namespace. Raises ConnectionRefusedError:
    nothing listens there, so the process is gone; NoReplyError: no answer, or not in time; OSError:
    nothing came back from the host; ExhaustedError: this process could not ask."""
    problem: OSError | None = None
    ips = ("127.0.0.1", *to.ips) if to.net == net else to.ips
    for ip in ips:
        try:
            with _connect(ip, to.port) as connection:
                return _exchange(connection, {**question, "token": token}, seconds)
        except NoReplyError:
            raise
        except OSError as error:
            # An address may belong to another host elsewhere: a refusal is that of the rank's host
            # only if all refuse.
            if problem is None or isinstance(problem, ConnectionRefusedError):
                problem = error
    raise problem or OSError(f"no address of {to.host} is known")


def _connect(ip: str, port: int) -> socket.socket:
    """A connection to a numeric address: `getaddrinfo` would open files. Waits for resources that
    have run out."""
    deadline = time.monotonic() + EXHAUSTED_S
    while True:
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
            try:
                connection.settimeout(CONNECT_S)
                connection.connect((ip, port))
            except BaseException:
                connection.close()
                raise
            return connection
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            if time.monotonic() > deadline:
                raise ExhaustedError(
                    f"this process could not connect to another rank: {error.strerror}"
                ) from error
            time.sleep(PAUSE_S)


def _exchange(connection: socket.socket, question: Mapping[str, Any], seconds: float) -> Any:
    connection.settimeout(seconds)
    try:
        connection.sendall(json.dumps(question).encode() + b"\n")
        line = _read_line(connection, seconds)
    except ConnectionError as error:  # the process ended before it had answered
        raise ConnectionRefusedError(str(error)) from error
    except TimeoutError as error:
        raise NoReplyError(str(error)) from error
    if not line:
        raise NoReplyError("it does not answer such questions, or not yet")
    try:
        answer = parse_json(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get(ANSWERED), dict):
        raise ConnectionRefusedError("another program listens there now")
    return answer[ANSWERED]


def _read_line(connection: socket.socket, seconds: float) -> bytes:
    """What comes before the end of the line or of the stream. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    line = bytearray()
    while b"\n" not in line[-READ:] and len(line) < LINE:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(remaining)
        data = connection.recv(READ)
        if not data:
            break
        line += data
    return bytes(line.partition(b"\n")[0])


def ask_all(
    addresses: Iterable[Address],
    question: Mapping[str, Any],
    token: str,
    net: str,
    seconds: float = ANSWER_S,
) -> list[Any]:
    """The answers of several ranks in their order, an OSError in place of each that failed. If
    there are more ranks than AT_ONCE, and two of a host cannot be reached, no more of its ranks are
    asked."""

    def ask_one(to: Address) -> Any:
        try:
            return ask(to, question, token, net=net, seconds=seconds)
        except OSError as error:
            return error

    def ask_host(ranks: list[Address]) -> list[Any]:
        answers = [ask_one(ranks[0])]
        if unreachable(answers[0]) and len(ranks) > 1:
            answers.append(ask_one(ranks[1]))
            if unreachable(answers[1]):
                return answers + [answers[1]] * (len(ranks) - 2)
        return answers + list(pool.map(ask_one, ranks[len(answers) :]))

    addresses = list(addresses)
    with ThreadPoolExecutor(max(1, min(AT_ONCE, len(addresses)))) as pool:
        if len(addresses) <= AT_ONCE:
            return list(pool.map(ask_one, addresses))

        # The first ranks of all hosts, in threads of their own: they use the pool for the others.
        hosts = group_values((to.net, to) for to in addresses)
        with ThreadPoolExecutor(min(AT_ONCE, len(hosts))) as firsts:
            answers_of_hosts = list(firsts.map(ask_host, hosts.values()))
        answers: dict[int, Any] = {}
        for ranks, of_host in zip(hosts.values(), answers_of_hosts, strict=True):
            for to, answer in zip(ranks, of_host, strict=True):
                answers[to.rank] = answer
        return [answers[to.rank] for to in addresses]


def unreachable(answer: Any) -> bool:
    return isinstance(answer, OSError) and not isinstance(
        answer, ConnectionRefusedError | NoReplyError
    )


def addresses_towards(others: Sequence[str]) -> tuple[str, ...]:
    """The addresses at which others reach this host: those from which it reaches them. Loopback
    last."""
    own = [address for address in map(address_towards, others) if address]
    return tuple(sorted(dict.fromkeys(own), key=is_loopback))


def process_state(pid: int) -> str:
    """The state of a process of this host, in Linux's letters: R, S, D, T (stopped), Z; "" if there
    is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def exchange_addresses(job: Job, server: StatusServer) -> "Peers":
    """Tells all ranks where this one listens, through the job's store; all ranks call it
    together."""
    assert job.environment.master is not None  # there is a store
    activity = "exchanging addresses"
    master, _ = job.environment.master
    net, pids = namespace_ids(job.host)
    ips = addresses_towards([master])
    own = Address(job.rank, job.host, os.getpid(), server.port, ips, net, pids)
    server.token, hosts = job.reduce(activity, [server.token, *astuple(own)], _by_host)
    addresses = _by_rank(hosts)

    # The host of the store reaches itself by loopback, or by a name that means nothing elsewhere:
    # it learns from the others' addresses which of its own they reach.
    several_hosts = len({to.net for to in addresses}) > 1
    if several_hosts and any(is_loopback(to.ips[0]) for to in addresses if to.ips):
        theirs: list[str] = []
        for to in addresses:
            if to.net != own.net:
                theirs += [ip for ip in to.ips if not is_loopback(ip)]
        ips_of = job.gather(activity, addresses_towards(theirs[:4]) or own.ips)
        addresses = [replace(to, ips=ips) for to, ips in zip(addresses, ips_of, strict=True)]
    return Peers(job, server, addresses)


def _by_host(rows: list) -> tuple[str, list]:
    """Rank 0's token, and for each host what its ranks share and their numbers: short, as every
    rank gets all of it."""
    hosts: dict[str, list] = {}
    for _, rank, host, pid, port, ips, net, pids in rows:
        shared = json.dumps([host, ips, net, pids])
        hosts.setdefault(shared, []).append([rank, pid, port])
    token = rows[0][0]
    return token, [[*json.loads(shared), processes] for shared, processes in hosts.items()]


def _by_rank(hosts: list) -> list[Address]:
    """The addresses of all ranks, in order, from what `_by_host` has made of them."""
    addresses = []
    for host, ips, net, pids, processes in hosts:
        for rank, pid, port in processes:
            addresses.append(Address(rank, host, pid, port, ips, net, pids))
    return sorted(addresses, key=lambda to: to.rank)


class Peers:
    def __init__(self, job: Job, server: StatusServer, addresses: Sequence[Address]) -> None:
        self._job = job
        self._server = server
        self._addresses = addresses
        self._own = addresses[job.rank]
        neighbours = [to for to in addresses if to.pids == self._own.pids and to.rank != job.rank]
        self._deaths = Deaths({to.rank: to.pid for to in neighbours})

    def close(self) -> None:
        self._deaths.close()

    def alive_from_rank_0(self, *, same_host: bool = False) -> Iterator[Address]:
        """Ranks that answer, from the lowest on, up to this one."""
        lower = self._addresses[: self._job.rank]
        if same_host:
            lower = [to for to in lower if to.net == self._own.net]
        size = LOWEST
        while lower:
            batch = lower[:size]
            lower = lower[size:]
            size *= 4  # where so many are lost, whole hosts are: do not ask one by one
            for to, answer in zip(batch, self._ask_all(batch, {"ask": "here"}), strict=True):
                if not isinstance(answer, OSError):
                    yield to
        yield self._own

    def examine(self) -> list[RankReport]:
        """Asks all ranks for their state; what each answers, or why it does not."""
        answers = self._ask_all(self._addresses, {"ask": "state"})

        # A rank that does not answer in time is stopped, or so busy that it is asked once more.
        silent = [to for to in self._addresses if isinstance(answers[to.rank], NoReplyError)]
        states = {to.rank: self._state_by_neighbour(to, answers) for to in silent}
        stopped = {rank for rank, state in states.items() if state in STOPPED_STATES}
        busy = [to for to in silent if to.rank not in stopped]
        for to, answer in zip(busy, self._ask_all(busy, {"ask": "state"}), strict=True):
            answers[to.rank] = answer

        reports = []
        ends_asked = 0
        for to, answer in zip(self._addresses, answers, strict=True):
            status = end = None
            if not isinstance(answer, OSError):
                reach = Reach.ANSWERS
                status = RankStatus.from_json(answer)
            elif isinstance(answer, ConnectionRefusedError) or self._is_gone_from_here(to):
                reach = Reach.GONE
                if ends_asked < MOST_ENDS:
                    ends_asked += 1
                    end = self._end_by_neighbour(to, answers)
            elif to.rank in stopped:
                reach = Reach.STOPPED
            elif isinstance(answer, NoReplyError):
                reach = Reach.SILENT
            else:
                reach = Reach.UNREACHABLE
            name = self._job.name_of(to.rank, to.host)
            reports.append(RankReport(to.rank, to.host, name, to.pid, reach, status, end))
        return reports

    def _state_by_neighbour(self, silent: Address, answers: list[Any]) -> str:
        """The state of a process that does not answer, as a rank of its host sees it; "" if none
        can."""
        if self._same_pids(silent.rank):
            return process_state(silent.pid)
        for to in self._neighbours(silent, answers):
            with suppress(OSError):
                return str(self.ask(to, {"ask": "look", "rank": silent.rank})["state"])
        return ""

    def _is_gone_from_here(self, to: Address) -> bool:
        """Whether a process of this host is gone, however the attempt to ask it has failed."""
        can_see = self._same_pids(to.rank) and process_state(os.getpid()) != ""
        return can_see and process_state(to.pid) in ("", "Z", "X")

    def _end_by_neighbour(self, gone: Address, answers: list[Any]) -> str | None:
        """How a process ended, as a rank of its host has seen it; None if none has."""
        if self._same_pids(gone.rank):
            return self.end_of(gone.rank)
        for to in self._neighbours(gone, answers):
            with suppress(OSError):
                end = self.ask(to, {"ask": "end of", "rank": gone.rank})["end"]
                return None if end is None else str(end)
        return None

    def _neighbours(self, lost: Address, answers: list[Any]) -> list[Address]:
        """The ranks that see the process of a lost one and have answered."""
        return [
            to
            for to in self._addresses
            if to.pids == lost.pids and not isinstance(answers[to.rank], OSError)
        ]

    def end_of(self, rank: int) -> str | None:
        return self._deaths.end_of(rank) if self._same_pids(rank) else None

    def kill_stopped(self, diagnosis: Diagnosis) -> None:
        """Has a rank of its host kill each stopped process, which would stay forever where no
        launcher ends it."""
        if diagnosis.kind not in (DiagnosisKind.STOPPED, DiagnosisKind.SILENT):
            return
        survivors = [to for to in self._addresses if to.rank not in diagnosis.ranks]
        for rank in diagnosis.ranks:
            for to in survivors:
                if to.pids == self._addresses[rank].pids:
                    with suppress(OSError):
                        self.ask(to, {"ask": "kill", "rank": rank})
                        break

    def survivors(self, diagnosis: Diagnosis) -> set[int]:
        everybody = {to.rank for to in self._addresses}
        if diagnosis.kind in OUT_OF_REACH:
            return everybody - set(diagnosis.ranks)
        return everybody

    def speaks_for_host(self, diagnosis: Diagnosis) -> bool:
        """Whether this rank is the lowest survivor of its host."""
        same_host = {to.rank for to in self._addresses if to.net == self._own.net}
        lower = {rank for rank in same_host if rank < self._own.rank}
        return not lower & self.survivors(diagnosis)

    def tell(self, ranks: set[int], message: Mapping[str, Any]) -> None:
        """Sends these ranks a message, and once more to those that did not seem to receive it."""
        # A rank may have been too busy to take it, or its answer may have been lost.
        remaining = [to for to in self._addresses if to.rank in ranks]
        for _ in range(2):
            answers = self._ask_all(remaining, message, seconds=TELL_S)
            answered = list(zip(remaining, answers, strict=True))
            remaining = [to for to, answer in answered if isinstance(answer, OSError)]

    def state(self, rank: int) -> str:
        return process_state(self._addresses[rank].pid) if self._same_pids(rank) else ""

    def kill(self, rank: int) -> None:
        if self.state(rank) not in ("", "Z"):
            os.kill(self._addresses[rank].pid, signal.SIGKILL)

    def _same_pids(self, rank: int) -> bool:
        """Whether that rank's process id is valid in this process's PID namespace."""
        return self._addresses[rank].pids == self._own.pids

    def ask(self, to: Address, question: Mapping[str, Any], seconds: float = ANSWER_S) -> Any:
        return ask(to, question, self._server.token, seconds=seconds, net=self._own.net)

    def _ask_all(
        self, ranks: Sequence[Address], question: Mapping[str, Any], seconds: float = ANSWER_S
    ) -> list:
        return ask_all(ranks, question, self._server.token, self._own.net, seconds)
