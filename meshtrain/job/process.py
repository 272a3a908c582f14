"""A process of a job: how it joins (device, store, process groups) and exchanges small values with
the other ranks.

Before any process group exists, the ranks communicate through the launcher's key-value store.
"""

import ctypes
import faulthandler
import json
import math
import os
import resource
import socket
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
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
    StartError,
    TrainingError,
    UnreadableError,
    any_of,
    group_values,
    join_some,
    plural,
    ranges,
)
from meshtrain.job.environment import (
    OWN_DESCRIPTORS,
    Environment,
    slurm_nodes,
    stale_store,
    started_before,
)
from meshtrain.job.locate import line_of
from meshtrain.job.programs import ProgramError, run_program
from meshtrain.job.sockets import call_with_timeout, is_loopback
from meshtrain.job.storage import DISK_ERRORS, print_error
from meshtrain.job.store import LATER_S, SAY_EVERY_S, Failures, Round
from meshtrain.layout import Layout, LayoutError

ATTEMPT_S = 5.0  # of one attempt to reach the store
MOST_FAILURES = 8  # of hosts or ranks that are listed in one message
# between two polls of the store while the ranks meet; longer in large jobs
POLL_S, LONGEST_POLL_S = (
    0.02,
    0.25,
)
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
        place = ""
        if self.layout is not None and self.layout.axes:
            place = (
                " ("
                + ", ".join(f"{axis} {i}" for axis, i in self.layout.coordinate(rank).items())
                + ")"
            )
        return f"rank {rank} on host {host}{place}"

    def device_name(self) -> str:
        """The device and the communication backend in log lines: `cpu over gloo`, or the GPU's name
        and `over NCCL`."""
        if self.device.type == "cpu":
            return "cpu" if self.store is None else "cpu over gloo"
        return torch.cuda.get_device_name(self.device) + (
            "" if self.store is None else " over NCCL"
        )

    def meeting_point(self) -> str:
        master = self.environment.master
        return (
            f"met at {master[0]}:{master[1]} by {self.environment.launcher}" if master else "alone"
        )

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
            raise _lost_store(self.environment) from None

    def _reduce(
        self, meeting: Round, activity: str, value: object, combine: Callable[[list], Any]
    ) -> Any:
        meeting.put(value)
        if self.rank == 0:
            values = meeting.gather(activity)
            if self._last_round is not None:
                # a rank that has put a value has received the previous answer
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
        meeting.limit_s, meeting.hosts = self.limit_s, self.known_hosts
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
        except OSError as error:
            known = isinstance(error, UnreadableError)
            if error.filename is None and not known:
                raise
            passes = known or error.errno in DISK_ERRORS
            # no program has to be mended
            place = "" if error.errno in DISK_ERRORS else f" ({line_of(error)})"
            failure = f"host {self.host} {error}" if known else f"host {self.host}: {error}{place}"
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
        runs = self.reduce(
            "comparing hosts",
            self.host,
            lambda hosts: [(k, len(list(of))) for k, of in groupby(hosts)],
        )
        return [host for host, _ in runs], [count for _, count in runs]

    def connect(self, timeout_s: float) -> None:
        """Creates the job's first process group, unless it exists: NCCL on GPUs, gloo on CPUs.
        Raises InputError: several ranks of a host were given the same GPU, or gloo would listen on
        a loopback address."""
        if self.store is None or dist.is_initialized():
            return
        name, gpu = socket.gethostname(), None
        if self.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        shared, alone = self.reduce(
            "comparing GPUs and names", [self.host, gpu, name], _compare_devices
        )
        with self.collective_check("connecting"):
            sharing: Sequence[int] = next(
                (ranks for *of, ranks in shared if of == [self.host, gpu]), ()
            )
            # NCCL hangs or fails obscurely when two ranks share a GPU, unless it was told to allow
            # it.
            if sharing and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
                raise InputError(
                    f"ranks {', '.join(ranges(sharing))} on host {self.host} were given the same "
                    f"GPU ({self.device}): "
                    f"start as many processes as GPUs, here {torch.cuda.device_count()}, or use "
                    "the CPU with "
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
            device_id=self.device
            if cuda
            else None,  # NCCL connects now, and smaller groups are split off this one
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
                "to. Give it its "
                "address in /etc/hosts, or export GLOO_SOCKET_IFNAME with the interface that leads "
                "to the others "
                f"(there is {', '.join(interfaces)})"
            )


def _describe_problems(reports: list) -> tuple[str | None, str | None, bool]:
    """From [problem, failure, whether it may pass] of every rank: a text of the failures, or else,
    if there are none, of the problems; and whether all failures may pass."""
    problems, failures, passing = zip(*reports, strict=True)
    if different := list(dict.fromkeys(text for text in failures if text is not None)):
        healthy = failures.count(None)
        others = f"; {healthy} of {len(failures)} ranks had no such trouble" if healthy else ""
        listed = "; ".join(different[:MOST_FAILURES]) + ", ..." * (len(different) > MOST_FAILURES)
        return f"{listed}{others}", None, all(passing)
    if problems[0]:
        return None, problems[0], False
    by_text = group_values((text, rank) for rank, text in enumerate(problems) if text)
    lines = [
        f"rank {join_some(ranges(ranks), MOST_FAILURES)}: {text}" for text, ranks in by_text.items()
    ]
    if len(lines) > MOST_FAILURES:
        lines[MOST_FAILURES:] = [f"and {len(lines) - MOST_FAILURES} other problems on other ranks"]
    return None, "\n".join(lines) or None, False


def _compare_devices(rows: list) -> tuple[list, bool]:
    """From [host, GPU, own name] of every rank: host, GPU and ranks of each GPU that several ranks
    have; and whether all ranks have the same own name (SLURM may have several names for one
    host)."""
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
    _report_crashes()
    choose_allocator(os.environ)
    device = pick_device(environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif not any(name.startswith("MALLOC_") for name in os.environ):  # the user has not chosen
        _keep_freed_memory()
    _open_files(environment)
    environment = replace(environment, started_before=started_before(os.environ))
    if (
        environment.launcher == "srun"
        and environment.master is not None
        and "MASTER_ADDR" not in os.environ
    ):
        node, port = environment.master
        environment = replace(environment, master=(address_of_node(node), port))
    job = Job(environment, device, _store(environment, timeout_s), limit_s=timeout_s)

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


def choose_allocator(variables: MutableMapping[str, str]) -> None:
    """Makes torch's CUDA allocator use expandable segments, which fragment less, unless the
    environment configures the allocator. Call it before CUDA is initialized."""
    if not any(f"PYTORCH_{backend}ALLOC_CONF" in variables for backend in ("", "CUDA_", "HIP_")):
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
            f"{environment.world_size} "
            f"ranks, which takes {needed} descriptors, and its limit is {hard}: raise the hard "
            "limit there ("
            "ulimit -Hn, LimitNOFILE of the service that starts jobs, or nofile in "
            "/etc/security/limits.conf)"
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


def _store(environment: Environment, timeout_s: float) -> dist.Store | None:
    if environment.world_size == 1 or environment.master is None:
        return None
    address, port = environment.master
    deadline = time.monotonic() + timeout_s
    if not environment.hosts_store:
        _wait_for_listener(environment, deadline)
    try:
        seconds = max(ATTEMPT_S, deadline - time.monotonic())
        store = _open_store(address, port, environment.hosts_store, seconds)
    except (dist.DistError, TimeoutError) as error:
        if environment.hosts_store and "EADDRINUSE" in str(error):
            raise InputError(_port_taken(environment)) from None
        raise StartError(
            f"rank {environment.rank} on host {environment.host} could not reach the job's store "
            f"at {address}:{port} "
            f"({str(error) or 'what listens there does not answer'}): is that host's process "
            "running, and does the "
            "network let this host through to that port?" + stale_store(os.environ)
        ) from None
    try:
        return dist.PrefixStore(_agree_on_start(environment, store, deadline), store)
    except dist.DistError:
        raise _lost_store(environment) from None


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
    try:
        is_ours = "True" in run_program(
            (sys.executable, "-c", LOOK_FOR_RANK_0, address, str(port)), LOOK_S
        )
    except ProgramError:
        is_ours = False
    what = (
        f"port {port} of host {environment.host}, at which the ranks of this job should meet "
        "(MASTER_PORT),"
    )
    if is_ours:
        return (
            f"{what} is held by another rank {environment.rank} of such a job: two processes were "
            "started as rank "
            f"{environment.rank}, or an earlier job still runs there. Give each process a RANK of "
            "its own, or export "
            "another MASTER_PORT on all hosts"
        )
    return (
        f"{what} is in use by another program (ss -ltnp 'sport = :{port}' names it): export "
        "another MASTER_PORT on "
        "all hosts"
    )


def _wait_for_listener(environment: Environment, deadline: float) -> None:
    """Waits until the store's port accepts connections. torch would wait, too, but handle no
    signals then. The first process of each host says after a while that nobody listens, and why."""
    assert environment.master is not None
    address, port = environment.master
    begun = time.monotonic()
    said_at, pause = begun, SAY_EVERY_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=ATTEMPT_S).close()
            return
        except OSError as error:  # not yet; if it never listens, torch's own attempt reports why
            now = time.monotonic()
            if environment.local_rank == 0 and now - said_at > pause:
                said_at, pause = now, 2 * pause
                print_error(
                    f"starting: rank {environment.rank} on host {environment.host} does not reach "
                    "rank 0 at "
                    f"{address}:{port} ({error.strerror or error}), {now - begun:.0f} s now"
                )
            time.sleep(POLL_S)


def _agree_on_start(environment: Environment, store: dist.Store, deadline: float = math.inf) -> str:
    """A name for this start of the job that all its ranks know and no earlier start had.

    torchrun keeps its store when it restarts workers, and each agent has its own count of restarts.
    So every rank sets its own token, and rank 0 answers with that token and the name: an answer
    with another token is from an earlier start. The store's one thread serves all ranks, so they
    poll at growing intervals.

    Raises StartError at `deadline`; InputError: two processes have the same rank. Rank 0 tells
    those that have come.
    """
    token, rank = uuid.uuid4().hex, environment.rank
    store.set(f"hello/{rank}", f"{token} {environment.host}")
    if rank != 0:
        return _join_start(environment, store, token, deadline)
    try:
        return _begin_start(environment, store, token, deadline)
    except (InputError, StartError) as error:
        _refuse_start(environment, store, error)
        raise


def _pauses(world_size: int) -> Iterator[float]:
    """Seconds between two polls of the store, without end: it has one thread for all ranks."""
    pause, longest = max(POLL_S, world_size / 50_000), max(LONGEST_POLL_S, world_size / 2000)
    while True:
        yield pause
        pause = min(1.5 * pause, longest)


def _join_start(environment: Environment, store: dist.Store, token: str, deadline: float) -> str:
    rank = environment.rank
    begun = looked_at = time.monotonic()
    for pause in _pauses(environment.world_size):
        time.sleep(pause)
        if store.check([f"welcome/{rank}"]):
            answered, _, name = store.get(f"welcome/{rank}").decode().partition(" ")
            if answered == token:
                break
        now = time.monotonic()
        if now - looked_at > LOOK_FOR_TWIN_S:
            looked_at = now
            _check_for_twin(environment, store, token)
        # Rank 0 names the missing ranks; this one must not end before it has.
        if now > deadline + LATER_S:
            raise StartError(
                f"rank {rank} on host {environment.host} has waited {now - begun:.0f} s for rank 0 "
                "to begin the job"
            )
    if name.startswith(REFUSED):
        is_input, text = json.loads(name.removeprefix(REFUSED))
        raise InputError(text) if is_input else StartError(text)
    store.append(f"{name}/met", f"{rank}\n")  # type: ignore[attr-defined]  # not in stubs
    return name


def _begin_start(environment: Environment, store: dist.Store, token: str, deadline: float) -> str:
    world = environment.world_size
    begun = printed_at = time.monotonic()
    keys = [f"hello/{rank}" for rank in range(1, world)]
    # the token each was answered with: one of an earlier start may be read first
    answered = [""] * len(keys)
    store.append(f"{token}/met", "0\n")  # type: ignore[attr-defined]  # from now on it can be read
    for pause in _pauses(world):
        met = list(map(int, store.get(f"{token}/met").split()))
        if len(set(met)) < len(met):
            twice = next(rank for rank in met if met.count(rank) > 1)
            raise InputError(_two_processes(twice, []))
        if len(met) == world:
            break
        _check_for_twins(store)
        if store.check(keys):
            tokens = [hello.decode().split()[0] for hello in store.multi_get(keys)]
            new = [
                i
                for i, (hello, before) in enumerate(zip(tokens, answered, strict=True))
                if hello != before
            ]
            if new:
                values = [f"{tokens[i]} {token}" for i in new]
                store.multi_set([f"welcome/{i + 1}" for i in new], values)  # type: ignore[attr-defined]  # not in stubs
                answered = tokens
        time.sleep(pause)
        now = time.monotonic()
        if now - printed_at > SAY_EVERY_S or now > deadline:
            printed_at = now
            hint = stale_store(os.environ)
            missing = _missing_ranks(environment, store, met)
            if now > deadline:
                raise StartError(
                    f"the job does not begin: after {now - begun:.0f} s it still waits for "
                    f"{missing}{hint}"
                )
            print(f"starting: waiting for {missing}, {now - begun:.0f} s now{hint}", flush=True)
    return token


def _refuse_start(
    environment: Environment, store: dist.Store, error: InputError | StartError
) -> None:
    """Rank 0 tells the ranks that have come why there is no start, and gives them time to read
    it."""
    text = json.dumps([isinstance(error, InputError), str(error)])
    for rank in range(1, environment.world_size):
        if store.check([f"hello/{rank}"]):
            token = store.get(f"hello/{rank}").decode().split()[0]
            store.set(f"welcome/{rank}", f"{token} {REFUSED}{text}")
    time.sleep(2 * max(LONGEST_POLL_S, environment.world_size / 2000))


def _check_for_twin(environment: Environment, store: dist.Store, token: str) -> None:
    """Raises InputError, and has rank 0 raise it: another process has said hello with this one's
    rank since. In an earlier start of the job there may have been one; a later start begins when no
    process of this one is left."""
    rank, host = environment.rank, environment.host
    other, its_host = store.get(f"hello/{rank}").decode().split()
    if other != token:
        store.set(TWINS, f"{rank} {other} {host}")
        raise InputError(_two_processes(rank, [host, its_host]))


def _check_for_twins(store: dist.Store) -> None:
    """Raises InputError, on rank 0: a rank has found another process with its number."""
    if not store.check([TWINS]):
        return
    rank, other, host = store.get(TWINS).decode().split()
    token, its_host = store.get(f"hello/{rank}").decode().split()
    if token == other:  # else it was in an earlier start
        raise InputError(_two_processes(int(rank), [host, its_host]))


def _two_processes(rank: int, hosts: Sequence[str]) -> str:
    where = (
        f", on host{'s' * (len(set(hosts)) > 1)} {any_of(list(dict.fromkeys(hosts)), 'and')}"
        if hosts
        else ""
    )
    return (
        f"two processes were started as rank {rank}{where}: give each process of the job a RANK of "
        "its own"
    )


def _lost_store(environment: Environment) -> StartError:
    """What a rank says whose launcher, or the rank that serves the store, has ended while it waits
    there."""
    assert environment.master is not None
    address, port = environment.master
    return StartError(
        f"rank {environment.rank} on host {environment.host} has lost the job's store at "
        f"{address}:{port} before the "
        "job began: rank 0, or its launcher, has ended, and its output says why",
        follows=True,
    )


def _missing_ranks(environment: Environment, store: dist.Store, met: Collection[int]) -> str:
    """The ranks that are not among those that have `met`, for people, with their hosts as far as
    these are known."""
    hosts: list[str | None] = [None] * environment.world_size
    for rank in met:
        hosts[rank] = store.get(f"hello/{rank}").decode().split()[-1]
    # Where one rank is missing, none has been answered: those that have said hello in this or in an
    # earlier start.
    if len(met) == 1:
        for rank in range(1, environment.world_size):
            if store.check([f"hello/{rank}"]):
                hosts[rank] = store.get(f"hello/{rank}").decode().split()[-1]
    if None not in hosts:
        return plural(environment.world_size - len(met), "rank")
    nodes: tuple[str, ...] = ()
    with suppress(InputError):
        nodes = slurm_nodes(os.environ)
    return describe_missing(hosts, nodes)


def describe_missing(hosts: Sequence[str | None], nodes: Sequence[str] = ()) -> str:
    """`rank 5 (host b)`, `ranks 8-15 (no rank of host gpu02 has come)`. A pure function.

    Args:
        hosts: by rank, None for a rank that has not come.
        nodes: the hosts of the job as SLURM lists them, if it does.
    """
    missing = [rank for rank, host in enumerate(hosts) if host is None]
    named = f"rank{'s' * (len(missing) > 1)} {join_some(ranges(missing), MOST_FAILURES)}"
    # A rank between two of one host is on that host, too: launchers count host by host.
    partly = dict.fromkeys(
        host for rank in missing if (host := _host_around(hosts, rank)) is not None
    )
    come = {host.partition(".")[0] for host in hosts if host is not None}
    absent = [node for node in nodes if node.partition(".")[0] not in come]
    reasons = []
    if partly:
        reasons.append(f"host{'s' * (len(partly) > 1)} {join_some(list(partly), MOST_FAILURES)}")
    if absent:
        reasons.append(
            f"no rank of host{'s' * (len(absent) > 1)} {join_some(absent, MOST_FAILURES)} has come"
        )
    if not reasons:
        known = list(dict.fromkeys(host for host in hosts if host is not None))
        reasons.append(
            f"ranks have come from host{'s' * (len(known) > 1)} {join_some(known, MOST_FAILURES)}"
        )
    return f"{named} ({'; '.join(reasons)})"


def _host_around(hosts: Sequence[str | None], rank: int) -> str | None:
    """The host of the nearest ranks before and after this one that have come, if it is the same."""
    before = next((host for host in reversed(hosts[:rank]) if host is not None), None)
    after = next((host for host in hosts[rank + 1 :] if host is not None), None)
    return before if before == after else None
