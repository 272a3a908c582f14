"""How a process joins its job: the device, the store, the process groups, and how it talks to the other ranks.

Before any process group exists the ranks talk through the launcher's key-value store: that is how they compare hosts,
agree that the input is good, and wait for one another without a collective that could time out. Nothing here depends
on which host rank 0 sits on.
"""

import ipaddress
import os
import resource
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import groupby

import torch
import torch.distributed as dist

from meshtrain.elastic import stale_store, started_before
from meshtrain.environment import OWN_DESCRIPTORS, Environment
from meshtrain.errors import AgreedError, InputError, TrainingError, UnreadableError
from meshtrain.layout import Layout, LayoutError
from meshtrain.locate import line_of
from meshtrain.rounds import SAY_EVERY_S, Failures, FirstFailure, Round

ATTEMPT_S = 5.0  # of reaching the store
MOST_TOLD = 8  # failures of hosts
POLL_S = 0.02  # between two looks at the store while the ranks meet


@dataclass
class Job:
    """One process of a running job.

    Attributes:
        environment: rank, world size and so on, as the launcher gave them.
        device: where this process computes: a CUDA device picked by the local rank, or the CPU.
        store: the job's key-value store; None in a world of one.
        again: whether this is not the job's first start, by any rank's launcher; the same on all ranks.
        layout: where this process sits, once that is known; it makes errors name the coordinate.
        failures: what it learns of other ranks' failures; a watched job has better ones.
    """

    environment: Environment
    device: torch.device
    store: dist.Store | None
    again: bool = False
    layout: Layout | None = None
    failures: Failures = field(init=False)
    _rounds: int = 0  # of `gather`: each has names of its own in the store
    _answered: Round | None = None  # the last one of rank 0, whose answer is still there

    def __post_init__(self) -> None:
        self.failures = FirstFailure(self.store)

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def world_size(self) -> int:
        return self.environment.world_size

    @property
    def host(self) -> str:
        return self.environment.host

    def __str__(self) -> str:
        """Who this is, for a line in a log: `rank 5 on host b (dp_shard 2, tp 1)`."""
        return self.name_of(self.rank, self.host)

    def name_of(self, rank: int, host: str) -> str:
        """Any rank's name for a line in a log."""
        place = ""
        if self.layout is not None and self.layout.axes:
            place = " (" + ", ".join(f"{axis} {i}" for axis, i in self.layout.coordinate(rank).items()) + ")"
        return f"rank {rank} on host {host}{place}"

    def device_name(self) -> str:
        """What this process computes on, for people: `cpu over gloo`, or the GPU's name."""
        if self.device.type == "cpu":
            return "cpu" if self.store is None else "cpu over gloo"
        return torch.cuda.get_device_name(self.device) + ("" if self.store is None else " over NCCL")

    def meeting_point(self) -> str:
        """Where the ranks met, for people."""
        master = self.environment.master
        return f"met at {master[0]}:{master[1]} by {self.environment.launcher}" if master else "alone"

    def say(self, text: str) -> None:
        """Rank 0 prints; the others keep quiet."""
        if self.rank == 0:
            print(text, flush=True)

    def gather(self, what: str, value: object) -> list:
        """Every rank's value in rank order, on every rank, by way of the store.

        It waits for as long as the ranks take: there is no time limit, and rank 0 says whom it waits for.

        Args:
            what: what the ranks are doing, for the message of a waiting rank 0.
            value: anything that JSON can carry.
        """
        meeting = self.round()
        meeting.give(value)
        if self.rank == 0:
            values = meeting.collect(what)
            if self._answered is not None:
                self._answered.forget()  # whoever gives a value has read the answer before, on the same thread
            self._answered = meeting
            meeting.answer(values)
        return meeting.answered(what)

    def round(self) -> Round:
        """A gather in steps of its own. All ranks make their rounds in the same order, on the main thread."""
        self._rounds += 1
        return Round(self.store, self.rank, self.world_size, f"round {self._rounds}", self.failures.over)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Goes on after its body only if no rank found its input wrong or its files out of reach; leaves none behind.

        Args:
            what: what is being done, for the message of a waiting rank 0.

        Raises:
            AgreedError: on every rank, with the same text: rank 0's problem, or else that of every rank that has one.
            TrainingError: on every rank: the file system of a host has failed.
        """
        problem = failure = None
        try:
            yield
        except (InputError, LayoutError) as error:
            problem = str(error)
        except OSError as error:
            known = isinstance(error, UnreadableError)
            if error.filename is None and not known:
                raise
            failure = f"host {self.host} {error}" if known else f"host {self.host}: {error} ({line_of(error)})"
        problems, failures = zip(*self.gather(what, [problem, failure]), strict=True)
        if failed := list(dict.fromkeys(text for text in failures if text is not None)):
            well = failures.count(None)
            others = f"; {well} of {len(failures)} ranks had no such trouble" if well else ""
            raise TrainingError(
                f"{what}: " + "; ".join(failed[:MOST_TOLD]) + ", ..." * (len(failed) > MOST_TOLD) + others
            )
        if problems[0]:
            raise AgreedError(problems[0])
        by_text: dict[str, list[str]] = {}
        for rank, text in enumerate(problems):
            if text:
                by_text.setdefault(text, []).append(str(rank))
        if by_text:
            raise AgreedError("\n".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in by_text.items()))

    def hosts(self) -> tuple[list[str], list[int]]:
        """The hosts in rank order and how many neighbouring ranks each has; a host may come back later."""
        names = self.gather("comparing hosts", self.host)
        runs = [(name, len(list(ranks))) for name, ranks in groupby(names)]
        return [name for name, _ in runs], [count for _, count in runs]

    def connect(self, timeout_s: float) -> None:
        """Makes the job's first process group, unless there is one: NCCL on GPUs, gloo on CPUs.

        Raises:
            InputError: several ranks of a host were given the same GPU.
        """
        if self.store is None or dist.is_initialized():
            return
        with self.together("connecting"):
            self._check_gpus()
        with self.together("connecting"):
            self._check_own_name()
        cuda = self.device.type == "cuda"
        if not cuda:
            _give_way()  # before gloo starts its thread, which takes it over
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore("groups", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=self.device if cuda else None,  # NCCL connects now, and smaller groups are split off this one
        )

    def _check_gpus(self) -> None:
        """NCCL hangs or fails obscurely when two ranks share a GPU, unless it was told to allow it."""
        gpu = str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else None
        seen = self.gather("comparing GPUs", [self.host, gpu])
        sharing = [rank for rank, other in enumerate(seen) if gpu is not None and other == [self.host, gpu]]
        if len(sharing) > 1 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise InputError(
                f"ranks {', '.join(map(str, sharing))} on host {self.host} were given the same GPU ({self.device}): "
                f"start as many processes as GPUs, here {torch.cuda.device_count()}, or use the CPU with "
                "CUDA_VISIBLE_DEVICES="
            )

    def _check_own_name(self) -> None:
        """gloo listens where the host's own name leads, unless it is given an interface."""
        name = socket.gethostname()
        alone = len(set(self.gather("comparing names", name))) == 1  # SLURM's names may be several of one host
        if alone or self.device.type == "cuda" or os.environ.get("GLOO_SOCKET_IFNAME"):
            return
        own = _own_address(name)
        if own is None or ipaddress.ip_address(own).is_loopback:
            there = [found for _, found in socket.if_nameindex() if found != "lo"]
            leads = "leads to no address of it" if own is None else f"is {own}"
            raise InputError(
                f"on host {name} its own name {leads}: gloo would listen where no other host gets to. Give it its "
                "address in /etc/hosts, or export GLOO_SOCKET_IFNAME with the interface that leads to the others "
                f"(there is {', '.join(there)})"
            )


def _own_address(name: str) -> str | None:
    """The first address that a name resolves to and at which this host can listen."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family) as probe:
                probe.bind((address[0], 0))
                return str(address[0])
    return None


def _give_way() -> None:
    """Asks the kernel not to interrupt whoever is running in favour of this process when it wakes up.

    gloo's thread spins while the thread that it works for holds the lock of a connection. Where ranks share cores, a
    sender that was interrupted in just that moment made it spin for the rest of a time slice: up to a millisecond of
    CPU time for a message that costs 50 microseconds.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    with suppress(PermissionError):  # a sandbox may forbid it: then messages cost more, and nothing else
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def join(environment: Environment, timeout_s: float = 600) -> Job:
    """Picks this process's device and meets the other ranks at the job's store.

    Raises:
        InputError: this host has fewer GPUs than the job has processes on it, or too few descriptors for the store.
        TimeoutError: the store could not be reached within `timeout_s` seconds.
    """
    device = pick_device(environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _open_files(environment)
    environment = replace(environment, started_before=started_before(os.environ))
    job = Job(environment, device, _store(environment, timeout_s))
    job.again = any(job.gather("meeting", environment.again))  # a node that joins later knows of no earlier start
    return job


def _open_files(environment: Environment) -> None:
    """Raises the soft limit of descriptors to the hard one: the store takes one for each rank, and 1024 is usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = environment.world_size + OWN_DESCRIPTORS
    if environment.hosts_store and 0 <= hard < needed:  # below 0 there is no limit
        raise InputError(
            f"rank {environment.rank} on host {environment.host} serves the job's store to {environment.world_size} "
            f"ranks, which takes {needed} descriptors, and its limit is {hard}: raise the hard limit there ("
            "ulimit -Hn, LimitNOFILE of the service that starts jobs, or nofile in /etc/security/limits.conf)"
        )
    if soft != hard:
        with suppress(ValueError, OSError):  # no limit is more than the system allows: what there is stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def pick_device(local_rank: int) -> torch.device:
    """The GPU of this number on this host, or the CPU where there is none.

    A process that sees one GPU only (as `srun --gpus-per-task=1` arranges) takes that one.

    Raises:
        InputError: there are GPUs, and fewer than this number asks for.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        raise InputError(
            f"local rank {local_rank} has no GPU: this host has {count}; start at most {count} processes here"
        )
    return torch.device("cuda", local_rank if count > 1 else 0)


def _store(environment: Environment, timeout_s: float) -> dist.Store | None:
    if environment.world_size == 1 or environment.master is None:
        return None
    address, port = environment.master
    begun = time.monotonic()
    if not environment.hosts_store:
        _listened(address, port, timeout_s)
    try:
        store = dist.TCPStore(
            address,
            port,
            is_master=environment.hosts_store,
            timeout=timedelta(seconds=max(ATTEMPT_S, begun + timeout_s - time.monotonic())),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        raise TimeoutError(
            f"rank {environment.rank} on host {environment.host} could not reach the job's store at {address}:{port} "
            f"({error}): is that host's process running, and does the network let this host through to that port?"
            + stale_store(os.environ)
        ) from error
    return dist.PrefixStore(_meet(environment, store), store)


def _listened(address: str, port: int, timeout_s: float) -> None:
    """Returns when somebody listens there, or after so many seconds.

    torch would wait too, but deaf to signals: the launcher's, when the rank that should listen was lost.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=ATTEMPT_S).close()
            return
        except OSError:  # not yet; what keeps it from coming torch will say at the end
            time.sleep(POLL_S)


def _meet(environment: Environment, store: dist.Store) -> str:
    """A name for this start of the job that all its ranks know and no earlier start had.

    torchrun keeps its store when it starts workers again, and its count of restarts is each agent's own. So every rank
    shows a token of its own, and rank 0 answers each with that token and the name, until all have taken it: whoever
    reads an answer to another token reads what an earlier start has left. The store's one thread serves all of them:
    they ask more and more seldom, and rank 0 asks about all ranks at once.
    """
    token, rank, world = uuid.uuid4().hex, environment.rank, environment.world_size
    pause, longest = max(POLL_S, world / 50_000), max(0.25, world / 2000)
    store.set(f"hello/{rank}", token)
    if rank != 0:
        answer = ["", ""]
        while answer[0] != token:
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
            if store.check([f"welcome/{rank}"]):
                answer = store.get(f"welcome/{rank}").decode().split()
        store.add(f"{answer[1]}/met", 1)
        return answer[1]
    start = said = time.monotonic()
    hellos = [f"hello/{rank}" for rank in range(1, world)]
    answered = [""] * len(hellos)  # the token that each was answered with: one of an earlier start may be there first
    while (met := store.add(f"{token}/met", 0)) < len(hellos):
        if store.check(hellos):
            shown = [hello.decode() for hello in store.multi_get(hellos)]
            new = [i for i, (hello, before) in enumerate(zip(shown, answered, strict=True)) if hello != before]
            if new:
                keys, values = [f"welcome/{i + 1}" for i in new], [f"{shown[i]} {token}" for i in new]
                store.multi_set(keys, values)  # type: ignore[attr-defined]  # torch's stubs lack it
                answered = shown
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
        if time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            missing = sum(not store.check([hello]) for hello in hellos) or len(hellos) - met
            hint = stale_store(os.environ)
            print(f"starting: waiting for {missing} ranks, {said - start:.0f} s now{hint}", flush=True)
    return token
