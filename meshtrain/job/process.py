"""A process of a job: how it joins (device, store, process groups) and exchanges small values with the other ranks.

Before any process group exists, the ranks communicate through the launcher's key-value store.
"""

import ctypes
import os
import resource
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from meshtrain.config.locate import line_of
from meshtrain.errors import AgreedError, InputError, TrainingError, UnreadableError, group_values, join_some, ranges
from meshtrain.job.environment import OWN_DESCRIPTORS, Environment, stale_store, started_before
from meshtrain.job.sockets import is_loopback
from meshtrain.job.store import SAY_EVERY_S, Failures, Round
from meshtrain.layout import Layout, LayoutError

ATTEMPT_S = 5.0  # of one attempt to reach the store
MOST_FAILURES = 8  # of hosts or ranks that are listed in one message
POLL_S = 0.02  # between two polls of the store while the ranks meet


@dataclass
class Job:
    """One process of a running job."""

    environment: Environment  # rank, world size and so on, as the launcher gave them
    device: torch.device  # where this process computes: a CUDA device picked by the local rank, or the CPU
    store: dist.Store | None  # the job's key-value store; None in a world of one
    again: bool = False  # whether any rank's launcher has started this job before; the same on all ranks
    layout: Layout | None = None  # once it is known; errors then name this process's coordinate
    failures: Failures = field(init=False)  # how this process learns of other ranks' failures; a watchdog replaces it
    _rounds: int = 0  # begun so far: each has its own keys in the store
    _last_round: Round | None = None  # on rank 0: the round whose answer is still in the store

    def __post_init__(self) -> None:
        self.failures = Failures(self.store)

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
        """The name of this rank in log lines: `rank 5 on host b (dp_shard 2, tp 1)`."""
        return self.name_of(self.rank, self.host)

    def name_of(self, rank: int, host: str) -> str:
        place = ""
        if self.layout is not None and self.layout.axes:
            place = " (" + ", ".join(f"{axis} {i}" for axis, i in self.layout.coordinate(rank).items()) + ")"
        return f"rank {rank} on host {host}{place}"

    def device_name(self) -> str:
        """The device and the communication backend in log lines: `cpu over gloo`, or the GPU's name and `over NCCL`."""
        if self.device.type == "cpu":
            return "cpu" if self.store is None else "cpu over gloo"
        return torch.cuda.get_device_name(self.device) + ("" if self.store is None else " over NCCL")

    def meeting_point(self) -> str:
        master = self.environment.master
        return f"met at {master[0]}:{master[1]} by {self.environment.launcher}" if master else "alone"

    def say(self, text: str) -> None:
        """Rank 0 prints; the others keep quiet."""
        if self.rank == 0:
            print(text, flush=True)

    def gather(self, activity: str, value: object) -> list:
        """Every rank's value (JSON) in rank order, on every rank: the store's traffic is quadratic in their number."""
        return self.reduce(activity, value, list)

    def reduce(self, activity: str, value: object, combine: Callable[[list], Any]) -> Any:
        """Returns, on every rank, what `combine` computes on rank 0 from all ranks' values in rank order, by way of the
        store (all JSON). There is no time limit: rank 0 prints the `activity` and the ranks that it waits for."""
        meeting = self.round()
        meeting.put(value)
        if self.rank == 0:
            values = meeting.gather(activity)
            if self._last_round is not None:
                self._last_round.delete()  # a rank that has put a value has received the previous answer
            self._last_round = meeting
            meeting.broadcast(combine(values))
        return meeting.receive(activity)

    def round(self) -> Round:
        """A gather whose steps the caller runs. All ranks begin their rounds in the same order, on the main thread."""
        self._rounds += 1
        return Round(self.store, self.rank, self.world_size, f"round {self._rounds}", self.failures.is_lost)

    @contextmanager
    def collective_check(self, activity: str) -> Iterator[None]:
        """Continues after its body, the `activity`, only if no rank found wrong input or unreachable files in it.
        Raises on every rank: AgreedError, with rank 0's problem, or if it has none, those of the other ranks;
        TrainingError: the file system of a host has failed."""
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
        failed, wrong = self.reduce(activity, [problem, failure], _describe_problems)
        if failed is not None:
            raise TrainingError(f"{activity}: {failed}")
        if wrong is not None:
            raise AgreedError(wrong)

    def hosts(self) -> tuple[list[str], list[int]]:
        """The hosts in rank order and how many consecutive ranks each has; a host may appear again later."""
        runs = self.reduce("comparing hosts", self.host, lambda hosts: [(k, len(list(of))) for k, of in groupby(hosts)])
        return [host for host, _ in runs], [count for _, count in runs]

    def connect(self, timeout_s: float) -> None:
        """Creates the job's first process group, unless it exists: NCCL on GPUs, gloo on CPUs. Raises InputError:
        several ranks of a host were given the same GPU, or gloo would listen on a loopback address."""
        if self.store is None or dist.is_initialized():
            return
        name, gpu = socket.gethostname(), None
        if self.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        shared, alone = self.reduce("comparing GPUs and names", [self.host, gpu, name], _compare_devices)
        with self.collective_check("connecting"):
            sharing: Sequence[int] = next((ranks for *of, ranks in shared if of == [self.host, gpu]), ())
            # NCCL hangs or fails obscurely when two ranks share a GPU, unless it was told to allow it.
            if sharing and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
                raise InputError(
                    f"ranks {', '.join(ranges(sharing))} on host {self.host} were given the same GPU ({self.device}): "
                    f"start as many processes as GPUs, here {torch.cuda.device_count()}, or use the CPU with "
                    "CUDA_VISIBLE_DEVICES="
                )
            if not alone:
                self._check_own_name(name)
        cuda = self.device.type == "cuda"
        if not cuda:
            _schedule_as_batch()  # before gloo starts its thread, which inherits the policy
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore("groups", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=self.device if cuda else None,  # NCCL connects now, and smaller groups are split off this one
        )

    def _check_own_name(self, name: str) -> None:
        """gloo listens on the address that the host's own name resolves to, unless it is given an interface."""
        if self.device.type == "cuda" or os.environ.get("GLOO_SOCKET_IFNAME"):
            return
        own = _own_address(name)
        if own is None or is_loopback(own):
            interfaces = [interface for _, interface in socket.if_nameindex() if interface != "lo"]
            leads = "leads to no address of it" if own is None else f"is {own}"
            raise InputError(
                f"on host {name} its own name {leads}: gloo would listen where no other host gets to. Give it its "
                "address in /etc/hosts, or export GLOO_SOCKET_IFNAME with the interface that leads to the others "
                f"(there is {', '.join(interfaces)})"
            )


def _describe_problems(reports: list) -> tuple[str | None, str | None]:
    """From [problem, failure] of every rank: a text of the failures, or else, if there are none, of the problems."""
    problems, failures = zip(*reports, strict=True)
    if different := list(dict.fromkeys(text for text in failures if text is not None)):
        healthy = failures.count(None)
        others = f"; {healthy} of {len(failures)} ranks had no such trouble" if healthy else ""
        listed = "; ".join(different[:MOST_FAILURES]) + ", ..." * (len(different) > MOST_FAILURES)
        return f"{listed}{others}", None
    if problems[0]:
        return None, problems[0]
    by_text = group_values((text, rank) for rank, text in enumerate(problems) if text)
    lines = [f"rank {join_some(ranges(ranks), MOST_FAILURES)}: {text}" for text, ranks in by_text.items()]
    if len(lines) > MOST_FAILURES:
        lines[MOST_FAILURES:] = [f"and {len(lines) - MOST_FAILURES} other problems on other ranks"]
    return None, "\n".join(lines) or None


def _compare_devices(rows: list) -> tuple[list, bool]:
    """From [host, GPU, own name] of every rank: host, GPU and ranks of each GPU that several ranks have; and whether
    all ranks have the same own name (SLURM may have several names for one host)."""
    by_gpu = group_values(((host, gpu), rank) for rank, (host, gpu, _) in enumerate(rows) if gpu)
    shared = [[*of, ranks] for of, ranks in by_gpu.items() if len(ranks) > 1]
    return shared, len({name for _, _, name in rows}) == 1


def _own_address(name: str) -> str | None:
    """The first address that a name resolves to and at which this host can listen."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family) as probe:
                probe.bind((address[0], 0))
                return str(address[0])
    return None


def _schedule_as_batch() -> None:
    """SCHED_BATCH: this process preempts no other when it wakes up.

    gloo's thread spins while the thread that it works for holds a connection's lock. Where ranks share cores, a sender
    preempted at that moment made it spin for the rest of a time slice: 1 ms of CPU time for a message of 50 us.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    with suppress(PermissionError):  # a sandbox may forbid it: messages then only cost more
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def join(environment: Environment, timeout_s: float = 600) -> Job:
    """Picks this process's device and meets the other ranks at the job's store. Raises InputError: this host has fewer
    GPUs than the job has processes on it, or too few descriptors for the store; TimeoutError: the store could not be
    reached within `timeout_s` seconds."""
    choose_allocator(os.environ)
    device = pick_device(environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif not any(name.startswith("MALLOC_") for name in os.environ):  # the user has not chosen
        _keep_freed_memory()
    _open_files(environment)
    environment = replace(environment, started_before=started_before(os.environ))
    job = Job(environment, device, _store(environment, timeout_s))
    job.again = job.reduce("meeting", environment.again, any)  # a node that joins later knows of no earlier start
    return job


def choose_allocator(variables: MutableMapping[str, str]) -> None:
    """Makes torch's CUDA allocator use expandable segments, which fragment less, unless the environment configures the
    allocator. Call it before CUDA is initialized."""
    if not any(f"PYTORCH_{backend}ALLOC_CONF" in variables for backend in ("", "CUDA_", "HIP_")):
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _keep_freed_memory() -> None:
    """Makes glibc keep the freed memory of tensors up to 32 MiB. By default it returns the end of its heap to the
    system after each backward, and the next forward takes a page fault for each 4 KiB of it."""
    with suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD: the most to which glibc raises it by itself
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never


def _open_files(environment: Environment) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = environment.world_size + OWN_DESCRIPTORS
    if environment.hosts_store and 0 <= hard < needed:  # RLIM_INFINITY is negative
        raise InputError(
            f"rank {environment.rank} on host {environment.host} serves the job's store to {environment.world_size} "
            f"ranks, which takes {needed} descriptors, and its limit is {hard}: raise the hard limit there ("
            "ulimit -Hn, LimitNOFILE of the service that starts jobs, or nofile in /etc/security/limits.conf)"
        )
    if soft != hard:
        with suppress(ValueError, OSError):  # "unlimited" may exceed what the system allows: keep the soft limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def pick_device(local_rank: int) -> torch.device:
    """The GPU of index `local_rank`, or the only one that the process sees (`srun --gpus-per-task=1`), or the CPU.
    Raises InputError: there are several GPUs, but none of this index."""
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
        _wait_for_listener(address, port, timeout_s)
    try:
        limit = timedelta(seconds=max(ATTEMPT_S, begun + timeout_s - time.monotonic()))
        store = dist.TCPStore(address, port, None, environment.hosts_store, limit, wait_for_workers=False)
    except dist.DistError as error:
        raise TimeoutError(
            f"rank {environment.rank} on host {environment.host} could not reach the job's store at {address}:{port} "
            f"({error}): is that host's process running, and does the network let this host through to that port?"
            + stale_store(os.environ)
        ) from error
    return dist.PrefixStore(_agree_on_start(environment, store), store)


def _wait_for_listener(address: str, port: int, timeout_s: float) -> None:
    """Waits up to `timeout_s` until the port accepts connections. torch would wait, too, but handle no signals then."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=ATTEMPT_S).close()
            return
        except OSError:  # not yet; if it never listens, torch's own attempt reports why
            time.sleep(POLL_S)


def _agree_on_start(environment: Environment, store: dist.Store) -> str:
    """A name for this start of the job that all its ranks know and no earlier start had.

    torchrun keeps its store when it restarts workers, and each agent has its own count of restarts. So every rank sets
    its own token, and rank 0 answers with that token and the name: an answer with another token is from an earlier
    start. The store's one thread serves all ranks, so they poll at growing intervals.
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
    start = printed_at = time.monotonic()
    keys = [f"hello/{rank}" for rank in range(1, world)]
    answered = [""] * len(keys)  # the token each was answered with: one of an earlier start may be read first
    while (met := store.add(f"{token}/met", 0)) < len(keys):
        if store.check(keys):
            tokens = [hello.decode() for hello in store.multi_get(keys)]
            new = [i for i, (hello, before) in enumerate(zip(tokens, answered, strict=True)) if hello != before]
            if new:
                values = [f"{tokens[i]} {token}" for i in new]
                store.multi_set([f"welcome/{i + 1}" for i in new], values)  # type: ignore[attr-defined]  # not in stubs
                answered = tokens
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
        if time.monotonic() - printed_at > SAY_EVERY_S:
            printed_at = time.monotonic()
            missing = sum(not store.check([key]) for key in keys) or len(keys) - met
            hint = stale_store(os.environ)
            print(f"starting: waiting for {missing} ranks, {printed_at - start:.0f} s now{hint}", flush=True)
    return token
