"""Rendezvous: the ranks of a job meet at its key-value store, and agree that this is one start of
the job.

The launcher says where the store is. It may keep it from one start to the next, start two processes
as one rank, or lose some: what is wrong is said by the rank that knows it, and names the others.
"""

import json
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from meshtrain.errors import InputError, StartError, any_of, join_some, plural, ranges
from meshtrain.job.environment import Environment, slurm_nodes, stale_store
from meshtrain.job.programs import ProgramError, run_program
from meshtrain.job.sockets import call_with_timeout
from meshtrain.job.storage import print_error
from meshtrain.job.store import LATER_S, SAY_EVERY_S

ATTEMPT_S = 5.0  # of one attempt to reach the store
MOST_LISTED = 8  # hosts or ranks in one message
# between two polls of the store while the ranks meet; longer in large jobs
POLL_S = 0.02
LONGEST_POLL_S = 0.25
LOOK_FOR_TWIN_S = 2.0  # between looks for another process of the same rank
TWINS = "twins"  # a key: two processes have the same rank
REFUSED = "refused "  # in an answer of rank 0, in place of the name of the start
LOOK_S = 30.0  # for a process that imports torch, and asks a store that answers at once
# `hello/0` is what rank 0 of a job of ours has put into its store.
LOOK_FOR_RANK_0 = (
    "import sys; from torch.distributed import TCPStore; "
    "print(TCPStore(sys.argv[1], int(sys.argv[2]), None, False, "
    "wait_for_workers=False).check(['hello/0']))"
)
ADDRESS_S = 20.0  # for SLURM to answer where a node is


def meet_at_store(environment: Environment, timeout_s: float) -> dist.Store | None:
    """The job's store, with keys of this start only; None in a world of one. Raises InputError: the
    store's port is taken, or two processes have the same rank; StartError: not all ranks have come
    within `timeout_s` seconds, or the store is out of reach."""
    if environment.world_size == 1 or environment.master is None:
        return None
    deadline = time.monotonic() + timeout_s
    if not environment.hosts_store:
        _wait_for_listener(environment, deadline)
    store = _reach_store(environment, deadline)
    try:
        return dist.PrefixStore(agree_on_start(environment, store, deadline), store)
    except dist.DistError:
        raise lost_store(environment) from None


def _reach_store(environment: Environment, deadline: float) -> dist.TCPStore:
    assert environment.master is not None
    address, port = environment.master
    seconds = max(ATTEMPT_S, deadline - time.monotonic())
    try:
        return _open_store(address, port, environment.hosts_store, seconds)
    except (dist.DistError, TimeoutError) as error:
        if environment.hosts_store and "EADDRINUSE" in str(error):
            raise InputError(_port_taken(environment)) from None
        raise StartError(
            f"rank {environment.rank} on host {environment.host} could not reach the job's store "
            f"at {address}:{port} ({str(error) or 'what listens there does not answer'}): is that "
            "host's process running, and does the network let this host through to that port?"
            + stale_store(os.environ)
        ) from None


def _open_store(address: str, port: int, serves: bool, seconds: float) -> dist.TCPStore:
    """The store that listens there. Raises DistError, or TimeoutError: torch's client would wait
    for ever for an answer of another program that has the port."""
    limit = timedelta(seconds=seconds)
    return call_with_timeout(
        seconds + ATTEMPT_S, dist.TCPStore, address, port, None, serves, limit, False
    )


def _port_taken(environment: Environment) -> str:
    """What to do where the port of the job's store is taken: by another rank 0, or by another
    program."""
    assert environment.master is not None
    address, port = environment.master
    # In a process of its own, which can be ended: torch's client waits for ever for the answer of
    # another program.
    look = (sys.executable, "-c", LOOK_FOR_RANK_0, address, str(port))
    try:
        is_ours = "True" in run_program(look, LOOK_S)
    except ProgramError:
        is_ours = False
    what = (
        f"port {port} of host {environment.host}, at which the ranks of this job should meet "
        "(MASTER_PORT),"
    )
    if is_ours:
        return (
            f"{what} is held by another rank {environment.rank} of such a job: two processes were "
            f"started as rank {environment.rank}, or an earlier job still runs there. Give each "
            "process a RANK of its own, or export another MASTER_PORT on all hosts"
        )
    return (
        f"{what} is in use by another program (ss -ltnp 'sport = :{port}' names it): export "
        "another MASTER_PORT on all hosts"
    )


def _wait_for_listener(environment: Environment, deadline: float) -> None:
    """Waits until the store's port accepts connections. torch would wait, too, but handle no
    signals then. The first process of each host says after a while that nobody listens, and why."""
    assert environment.master is not None
    address, port = environment.master
    begun = said_at = time.monotonic()
    pause = SAY_EVERY_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=ATTEMPT_S).close()
            return
        except OSError as error:  # not yet; if it never listens, torch's own attempt reports why
            now = time.monotonic()
            if environment.local_rank == 0 and now - said_at > pause:
                said_at = now
                pause *= 2
                print_error(
                    f"starting: rank {environment.rank} on host {environment.host} does not reach "
                    f"rank 0 at {address}:{port} ({error.strerror or error}), {now - begun:.0f} s "
                    "now"
                )
            time.sleep(POLL_S)


def agree_on_start(environment: Environment, store: dist.Store, deadline: float = math.inf) -> str:
    """A name for this start of the job that all its ranks know and no earlier start had.

    torchrun keeps its store when it restarts workers, and each agent has its own count of restarts.
    So every rank sets its own token, and rank 0 answers with that token and the name: an answer
    with another token is from an earlier start. The store's one thread serves all ranks, so they
    poll at growing intervals.

    Raises StartError at `deadline`; InputError: two processes have the same rank. Rank 0 tells
    those that have come.
    """
    start = _Start(environment, store, deadline)
    start.say_hello()
    if environment.rank != 0:
        return start.join()
    try:
        return start.begin()
    except (InputError, StartError) as error:
        start.refuse(error)
        raise


@dataclass(frozen=True)
class _Start:
    """A start of the job, as one of its ranks takes part in it."""

    environment: Environment
    store: dist.Store
    deadline: float
    token: str = field(default_factory=lambda: uuid.uuid4().hex)  # of this process

    def say_hello(self) -> None:
        hello = f"{self.token} {self.environment.host}"
        self.store.set(f"hello/{self.environment.rank}", hello)

    def join(self) -> str:
        """On the ranks but 0: waits for rank 0's answer."""
        rank = self.environment.rank
        begun = looked_at = time.monotonic()
        for pause in _pauses(self.environment.world_size):
            time.sleep(pause)
            if self.store.check([f"welcome/{rank}"]):
                answered, _, name = self.store.get(f"welcome/{rank}").decode().partition(" ")
                if answered == self.token:
                    break
            now = time.monotonic()
            if now - looked_at > LOOK_FOR_TWIN_S:
                looked_at = now
                self._check_for_twin()
            # Rank 0 names the missing ranks; this one must not end before it has.
            if now > self.deadline + LATER_S:
                raise StartError(
                    f"rank {rank} on host {self.environment.host} has waited {now - begun:.0f} s "
                    "for rank 0 to begin the job"
                )
        if name.startswith(REFUSED):
            is_input, text = json.loads(name.removeprefix(REFUSED))
            raise InputError(text) if is_input else StartError(text)
        self.store.append(f"{name}/met", f"{rank}\n")  # type: ignore[attr-defined]  # not in stubs
        return name

    def begin(self) -> str:
        """On rank 0: answers every hello until all ranks have met. The start's name is rank 0's
        token."""
        world = self.environment.world_size
        begun = printed_at = time.monotonic()
        # rank -> the token it was answered with: one of an earlier start may be read first
        answered: dict[int, str] = {}
        met_key = f"{self.token}/met"
        self.store.append(met_key, "0\n")  # type: ignore[attr-defined]  # now it can be read
        for pause in _pauses(world):
            met = [int(rank) for rank in self.store.get(met_key).split()]
            if len(set(met)) < len(met):
                twice = next(rank for rank in met if met.count(rank) > 1)
                raise InputError(_two_processes(twice, []))
            if len(met) == world:
                break
            check_for_twins(self.store)
            self._welcome(answered)
            time.sleep(pause)
            now = time.monotonic()
            if now - printed_at > SAY_EVERY_S or now > self.deadline:
                printed_at = now
                self._report_missing(met, now - begun, is_over=now > self.deadline)
        return self.token

    def _welcome(self, answered: dict[int, str]) -> None:
        """Answers those that have said hello since, once all have: one call reads them all."""
        ranks = range(1, self.environment.world_size)
        keys = [f"hello/{rank}" for rank in ranks]
        if not self.store.check(keys):
            return
        hellos = self.store.multi_get(keys)
        tokens = {
            rank: hello.decode().split()[0] for rank, hello in zip(ranks, hellos, strict=True)
        }
        new = [rank for rank in ranks if tokens[rank] != answered.get(rank)]
        if new:
            names = [f"welcome/{rank}" for rank in new]
            values = [f"{tokens[rank]} {self.token}" for rank in new]
            self.store.multi_set(names, values)  # type: ignore[attr-defined]  # not in stubs
            answered.update(tokens)

    def _report_missing(self, met: Collection[int], seconds: float, *, is_over: bool) -> None:
        missing = self._missing_ranks(met)
        hint = stale_store(os.environ)
        if is_over:
            raise StartError(
                f"the job does not begin: after {seconds:.0f} s it still waits for {missing}{hint}"
            )
        print(f"starting: waiting for {missing}, {seconds:.0f} s now{hint}", flush=True)

    def refuse(self, error: InputError | StartError) -> None:
        """Rank 0 tells the ranks that have come why there is no start, and gives them time to read
        it."""
        text = json.dumps([isinstance(error, InputError), str(error)])
        for rank in range(1, self.environment.world_size):
            if self.store.check([f"hello/{rank}"]):
                token = self.store.get(f"hello/{rank}").decode().split()[0]
                self.store.set(f"welcome/{rank}", f"{token} {REFUSED}{text}")
        time.sleep(2 * max(LONGEST_POLL_S, self.environment.world_size / 2000))

    def _check_for_twin(self) -> None:
        """Raises InputError, and has rank 0 raise it: another process has said hello with this
        one's rank since. In an earlier start of the job there may have been one; a later start
        begins when no process of this one is left."""
        rank = self.environment.rank
        host = self.environment.host
        other, its_host = self.store.get(f"hello/{rank}").decode().split()
        if other != self.token:
            self.store.set(TWINS, f"{rank} {other} {host}")
            raise InputError(_two_processes(rank, [host, its_host]))

    def _missing_ranks(self, met: Collection[int]) -> str:
        """The ranks that are not among those that have `met`, for people, with their hosts as far
        as these are known."""
        hosts: list[str | None] = [None] * self.environment.world_size
        for rank in met:
            hosts[rank] = self._host_of(rank)
        # Where one rank is missing, none has been answered: those that have said hello in this or
        # in an earlier start.
        if len(met) == 1:
            for rank in range(1, self.environment.world_size):
                if self.store.check([f"hello/{rank}"]):
                    hosts[rank] = self._host_of(rank)
        if None not in hosts:
            return plural(self.environment.world_size - len(met), "rank")
        nodes: tuple[str, ...] = ()
        with suppress(InputError):
            nodes = slurm_nodes(os.environ)
        return describe_missing(hosts, nodes)

    def _host_of(self, rank: int) -> str:
        return self.store.get(f"hello/{rank}").decode().split()[-1]


def _pauses(world_size: int) -> Iterator[float]:
    """Seconds between two polls of the store, without end: it has one thread for all ranks."""
    pause = max(POLL_S, world_size / 50_000)
    longest = max(LONGEST_POLL_S, world_size / 2000)
    while True:
        yield pause
        pause = min(1.5 * pause, longest)


def check_for_twins(store: dist.Store) -> None:
    """Raises InputError, on rank 0: a rank has found another process with its number."""
    if not store.check([TWINS]):
        return
    rank, other, host = store.get(TWINS).decode().split()
    token, its_host = store.get(f"hello/{rank}").decode().split()
    if token == other:  # else it was in an earlier start
        raise InputError(_two_processes(int(rank), [host, its_host]))


def _two_processes(rank: int, hosts: Sequence[str]) -> str:
    where = ""
    if hosts:
        names = list(dict.fromkeys(hosts))
        where = f", on {'hosts' if len(names) > 1 else 'host'} {any_of(names, 'and')}"
    return (
        f"two processes were started as rank {rank}{where}: give each process of the job a RANK of "
        "its own"
    )


def lost_store(environment: Environment) -> StartError:
    """What a rank says whose launcher, or the rank that serves the store, has ended while it waits
    there."""
    assert environment.master is not None
    address, port = environment.master
    return StartError(
        f"rank {environment.rank} on host {environment.host} has lost the job's store at "
        f"{address}:{port} before the job began: rank 0, or its launcher, has ended, and its "
        "output says why",
        follows=True,
    )


def describe_missing(hosts: Sequence[str | None], nodes: Sequence[str] = ()) -> str:
    """`rank 5 (host b)`, `ranks 8-15 (no rank of host gpu02 has come)`. A pure function.

    Args:
        hosts: by rank, None for a rank that has not come.
        nodes: the hosts of the job as SLURM lists them, if it does.
    """
    missing = [rank for rank, host in enumerate(hosts) if host is None]
    ranks = "ranks" if len(missing) > 1 else "rank"
    known = list(dict.fromkeys(host for host in hosts if host is not None))
    short_names = {host.partition(".")[0] for host in known}

    # A rank between two of one host is on that host, too: launchers count host by host.
    around = [_host_around(hosts, rank) for rank in missing]
    partly = list(dict.fromkeys(host for host in around if host is not None))
    absent = [node for node in nodes if node.partition(".")[0] not in short_names]
    reasons = []
    if partly:
        reasons.append(_hosts(partly))
    if absent:
        reasons.append(f"no rank of {_hosts(absent)} has come")
    if not reasons:
        reasons.append(f"ranks have come from {_hosts(known)}")
    return f"{ranks} {join_some(ranges(missing), MOST_LISTED)} ({'; '.join(reasons)})"


def _hosts(names: Sequence[str]) -> str:
    """`host a`, `hosts a, b`."""
    hosts = "hosts" if len(names) > 1 else "host"
    return f"{hosts} {join_some(names, MOST_LISTED)}"


def _host_around(hosts: Sequence[str | None], rank: int) -> str | None:
    """The host of the nearest ranks before and after this one that have come, if it is the same."""
    before = next((host for host in reversed(hosts[:rank]) if host is not None), None)
    after = next((host for host in hosts[rank + 1 :] if host is not None), None)
    return before if before == after else None


def address_of_node(node: str) -> str:
    """Where a node of SLURM is reached: under its name, or if that leads nowhere, at the NodeAddr
    that SLURM has for it. In clouds, and where several slurmd run on a host, the NodeName is no
    name of a host."""
    with suppress(OSError):
        socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)
        return node
    try:
        shown = run_program(("scontrol", "--oneliner", "show", "node", node), ADDRESS_S)
    except ProgramError:
        return node
    fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    return fields.get("NodeAddr", node)
