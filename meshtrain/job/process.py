"""A process of a job: how it joins (device, process groups) and exchanges small values with the
other ranks.

Before any process group exists, the ranks communicate through the launcher's key-value store.
"""

import ctypes
import faulthandler
import math
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from meshtrain.errors import (
    AgreedError,
    DiskError,
    InputError,
    TrainingError,
    UnreadableError,
    group_values,
    join_some,
    ranges,
)
from meshtrain.job.environment import OWN_DESCRIPTORS, Environment, started_before
from meshtrain.job.locate import line_of
from meshtrain.job.rendezvous import MOST_LISTED, address_of_node, lost_store, meet_at_store
from meshtrain.job.sockets import is_loopback
from meshtrain.job.storage import DISK_ERRORS
from meshtrain.job.store import Failures, Round
from meshtrain.layout import Layout, LayoutError


@dataclass
class Job:
    """One process of a running job."""

    environment: Environment  # rank, world size and so on, as the launcher gave them
    # where this process computes: a CUDA device picked by the local rank, or the CPU
    device: torch.device
    store: dist.Store | None  # the job's key-value store; None in a world of one
    # whether any rank's launcher has started this job before; the same on all ranks
    again: bool = False
    layout: Layout | None = None  # once it is known; errors then name this process's coordinate
    limit_s: float = math.inf  # for each meeting, until a watchdog looks after them
    known_hosts: Sequence[str] = ()  # on rank 0: the host of each rank, once all have met
    # how this process learns of other ranks' failures; a watchdog replaces it
    failures: Failures = field(init=False)
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
        name = f"rank {rank} on host {host}"
        if self.layout is None or not self.layout.axes:
            return name
        coordinate = self.layout.coordinate(rank).items()
        return f"{name} ({', '.join(f'{axis} {i}' for axis, i in coordinate)})"

    def device_name(self) -> str:
        """The device and the communication backend in log lines: `cpu over gloo`, or the GPU's name
        and `over NCCL`."""
        is_cpu = self.device.type == "cpu"
        name = "cpu" if is_cpu else torch.cuda.get_device_name(self.device)
        if self.store is None:
            return name
        return f"{name} over gloo" if is_cpu else f"{name} over NCCL"

    def meeting_point(self) -> str:
        if self.environment.master is None:
            return "alone"
        address, port = self.environment.master
        return f"met at {address}:{port} by {self.environment.launcher}"

    def say(self, text: str) -> None:
        """Rank 0 prints; the others keep quiet."""
        if self.rank == 0:
            print(text, flush=True)

    def gather(self, activity: str, value: object) -> list:
        """Every rank's value (JSON) in rank order, on every rank: the store's traffic is quadratic
        in their number."""
        return self.reduce(activity, value, list)

    def reduce(self, activity: str, value: object, combine: Callable[[list], Any]) -> Any:
        """Returns, on every rank, what `combine` computes on rank 0 from all ranks' values in rank
        order, by way of the store (all JSON). Rank 0 prints the `activity` and the ranks that it
        waits for. A watchdog limits the time, or before there is one, `limit_s`, with a
        StartError."""
        try:
            return self._reduce(self.round(), activity, value, combine)
        except dist.DistError:
            if math.isinf(self.limit_s):  # a watchdog finds out who has ended
                raise
            raise lost_store(self.environment) from None

    def _reduce(
        self, meeting: Round, activity: str, value: object, combine: Callable[[list], Any]
    ) -> Any:
        # Rank 0 may delete an answer once all have put the next value: they have received it.
        meeting.put(value)
        if self.rank == 0:
            values = meeting.gather(activity)
            if self._last_round is not None:
                self._last_round.delete()
            self._last_round = meeting
            meeting.broadcast(combine(values))
        return meeting.receive(activity)

    def round(self) -> Round:
        """A gather whose steps the caller runs. All ranks begin their rounds in the same order, on
        the main thread."""
        self._rounds += 1
        meeting = Round(
            self.store, self.rank, self.world_size, f"round {self._rounds}", self.failures.is_lost
        )
        meeting.limit_s = self.limit_s
        meeting.hosts = self.known_hosts
        return meeting

    @contextmanager
    def collective_check(self, activity: str) -> Iterator[None]:
        """Continues after its body, the `activity`, only if no rank found wrong input or
        unreachable files in it. Raises on every rank: AgreedError, with rank 0's problem, or if it
        has none, those of the other ranks; TrainingError: a file cannot be used on a host;
        DiskError, if its disk is full or has failed."""
        problem = failure = None
        passes = True  # whether the same may work later
        try:
            yield
        except (InputError, LayoutError) as error:
            problem = str(error)
        except UnreadableError as error:
            failure = f"host {self.host} {error}"
        except OSError as error:
            if error.filename is None:
                raise
            failure = f"host {self.host}: {error}"
            passes = error.errno in DISK_ERRORS
            if not passes:  # else no program has to be mended
                failure += f" ({line_of(error)})"
        failed, wrong, passes = self.reduce(
            activity, [problem, failure, passes], _describe_problems
        )
        if failed is not None:
            raise (DiskError if passes else TrainingError)(f"{activity}: {failed}")
        if wrong is not None:
            raise AgreedError(wrong)

    def hosts(self) -> tuple[list[str], list[int]]:
        """The hosts in rank order and how many consecutive ranks each has; a host may appear again
        later."""
        runs = self.reduce("comparing hosts", self.host, _runs_of)
        return [host for host, _ in runs], [count for _, count in runs]

    def connect(self, timeout_s: float) -> None:
        """Creates the job's first process group, unless it exists: NCCL on GPUs, gloo on CPUs.
        Raises InputError: several ranks of a host were given the same GPU, or gloo would listen on
        a loopback address."""
        if self.store is None or dist.is_initialized():
            return
        name = socket.gethostname()
        is_cuda = self.device.type == "cuda"
        gpu = str(torch.cuda.get_device_properties(self.device).uuid) if is_cuda else None
        shared, alone = self.reduce(
            "comparing GPUs and names", [self.host, gpu, name], _compare_devices
        )
        with self.collective_check("connecting"):
            self._check_own_gpu(gpu, shared)
            if not alone:
                self._check_own_name(name)
        if not is_cuda:
            _schedule_as_batch()  # before gloo starts its thread, which inherits the policy
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=dist.PrefixStore("groups", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
            # NCCL connects now, and smaller groups are split off this one.
            device_id=self.device if is_cuda else None,
        )

    def _check_own_gpu(self, gpu: str | None, shared: list) -> None:
        """NCCL hangs or fails obscurely when two ranks share a GPU, unless it was told to allow
        it."""
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            return
        for host, shared_gpu, ranks in shared:
            if (host, shared_gpu) == (self.host, gpu):
                raise InputError(
                    f"ranks {', '.join(ranges(ranks))} on host {self.host} were given the same GPU "
                    f"({self.device}): start as many processes as GPUs, here "
                    f"{torch.cuda.device_count()}, or use the CPU with CUDA_VISIBLE_DEVICES="
                )

    def _check_own_name(self, name: str) -> None:
        """gloo listens on the address that the host's own name resolves to, unless it is given an
        interface."""
        if self.device.type == "cuda" or os.environ.get("GLOO_SOCKET_IFNAME"):
            return
        own = _own_address(name)
        if own is None or is_loopback(own):
            interfaces = [interface for _, interface in socket.if_nameindex() if interface != "lo"]
            leads = "leads to no address of it" if own is None else f"is {own}"
            raise InputError(
                f"on host {name} its own name {leads}: gloo would listen where no other host gets "
                "to. Give it its address in /etc/hosts, or export GLOO_SOCKET_IFNAME with the "
                f"interface that leads to the others (there is {', '.join(interfaces)})"
            )


def _describe_problems(reports: list) -> tuple[str | None, str | None, bool]:
    """From [problem, failure, whether it may pass] of every rank: a text of the failures, or else,
    if there are none, of the problems; and whether all failures may pass."""
    problems, failures, passing = zip(*reports, strict=True)
    different = list(dict.fromkeys(text for text in failures if text is not None))
    if different:
        listed = "; ".join(different[:MOST_LISTED])
        if len(different) > MOST_LISTED:
            listed += ", ..."
        healthy = failures.count(None)
        if healthy:
            listed += f"; {healthy} of {len(failures)} ranks had no such trouble"
        return listed, None, all(passing)
    if problems[0]:
        return None, problems[0], False

    by_text = group_values((text, rank) for rank, text in enumerate(problems) if text)
    lines = []
    for text, ranks in by_text.items():
        lines.append(f"rank {join_some(ranges(ranks), MOST_LISTED)}: {text}")
    if len(lines) > MOST_LISTED:
        lines[MOST_LISTED:] = [f"and {len(lines) - MOST_LISTED} other problems on other ranks"]
    return None, "\n".join(lines) or None, False


def _runs_of(hosts: list[str]) -> list[tuple[str, int]]:
    """Each host, with how many consecutive ranks it has."""
    return [(host, len(list(ranks))) for host, ranks in groupby(hosts)]


def _compare_devices(rows: list) -> tuple[list, bool]:
    """From [host, GPU, own name] of every rank: host, GPU and ranks of each GPU that several ranks
    have; and whether all ranks have the same own name (SLURM may have several names for one
    host)."""
    by_gpu = group_values(((host, gpu), rank) for rank, (host, gpu, _) in enumerate(rows) if gpu)
    shared = [[host, gpu, ranks] for (host, gpu), ranks in by_gpu.items() if len(ranks) > 1]
    names = {name for _, _, name in rows}
    return shared, len(names) == 1


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

    gloo's thread spins while the thread that it works for holds a connection's lock. Where ranks
    share cores, a sender preempted at that moment made it spin for the rest of a time slice: 1 ms
    of CPU time for a message of 50 us.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    with suppress(PermissionError):  # a sandbox may forbid it: messages then only cost more
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def join(environment: Environment, timeout_s: float = 600) -> Job:
    """Picks this process's device and meets the other ranks at the job's store. Raises InputError:
    this host has fewer GPUs than the job has processes on it, or too few descriptors for the store,
    or the store's port is taken; StartError: not all ranks have come within `timeout_s` seconds:
    names those that are missing."""
    # Before CUDA is initialized, and before anything takes much memory.
    _report_crashes()
    choose_allocator(os.environ)
    device = pick_device(environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif not any(name.startswith("MALLOC_") for name in os.environ):  # the user has not chosen
        _keep_freed_memory()
    _open_files(environment)
    environment = replace(environment, started_before=started_before(os.environ))
    of_slurm = environment.launcher == "srun" and "MASTER_ADDR" not in os.environ
    if of_slurm and environment.master is not None:
        node, port = environment.master
        environment = replace(environment, master=(address_of_node(node), port))
    store = meet_at_store(environment, timeout_s)
    job = Job(environment, device, store, limit_s=timeout_s)

    def meet(rows: list) -> bool:
        again, hosts = zip(*rows, strict=True)
        job.known_hosts = hosts
        return any(again)  # a node that joins later knows of no earlier start

    job.again = job.reduce("meeting", [environment.again, environment.host], meet)
    return job


def _report_crashes() -> None:
    """A process that dies of SIGSEGV, SIGBUS, SIGFPE, SIGILL or an abort says so, and where its
    Python code was."""
    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError, AttributeError):  # stderr is no file here
            faulthandler.enable(all_threads=True)


def choose_allocator(variables: MutableMapping[str, str]) -> None:
    """Makes torch's CUDA allocator use expandable segments, which fragment less, unless the
    environment configures the allocator. Call it before CUDA is initialized."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not any(name in variables for name in names):
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _keep_freed_memory() -> None:
    """Makes glibc keep the freed memory of tensors up to 32 MiB. By default it returns the end of
    its heap to the system after each backward, and the next forward takes a page fault for each 4
    KiB of it."""
    with suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD: the most to which glibc raises it by itself
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never


def _open_files(environment: Environment) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = environment.world_size + OWN_DESCRIPTORS
    if environment.hosts_store and 0 <= hard < needed:  # RLIM_INFINITY is negative
        raise InputError(
            f"rank {environment.rank} on host {environment.host} serves the job's store to "
            f"{environment.world_size} ranks, which takes {needed} descriptors, and its limit is "
            f"{hard}: raise the hard limit there (ulimit -Hn, LimitNOFILE of the service that "
            "starts jobs, or nofile in /etc/security/limits.conf)"
        )
    if soft != hard:
        # "unlimited" may exceed what the system allows: keep the soft limit
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def pick_device(local_rank: int) -> torch.device:
    """The GPU of index `local_rank`, or the only one that the process sees (`srun
    --gpus-per-task=1`), or the CPU. Raises InputError: there are several GPUs, but none of this
    index."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        raise InputError(
            f"local rank {local_rank} has no GPU: this host has {count}; start at most {count} "
            "processes here"
        )
    return torch.device("cuda", local_rank if count > 1 else 0)
