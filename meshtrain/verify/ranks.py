"""Starts the runs that are compared: the ranks of a run are processes forked from this one, which
has imported torch.

On one machine all ranks of a run are forked here, and talk over gloo. Under torchrun every process
of the job forks one rank of each run, with its GPU. Rank 0 of the job says which run is next, and
the others follow.
"""

import math
import os
import re
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.nn.functional as F

import meshtrain.train
from meshtrain import observer
from meshtrain.dropout import Dropout
from meshtrain.errors import INPUT_STATUS, AgreedError
from meshtrain.job.environment import read_environment
from meshtrain.job.process import Job
from meshtrain.job.rendezvous import meet_at_store
from meshtrain.job.signals import end_with_parent
from meshtrain.metrics.logger import read
from meshtrain.parallel.torch_private import AnyDropout
from meshtrain.script.membership import leave_all
from meshtrain.verify.compare import Tolerances
from meshtrain.verify.recording import Recorder

# of a launcher that has started this process, and would be obeyed by the ranks that it forks
OF_LAUNCHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_",
    "ROLE_",
    "SLURM_",
    "TORCHELASTIC_",
)
GRACE_S = 20.0  # for ranks to end by themselves once one of them has failed
POLL_S = 0.01
LAST_CHARACTERS = 4000  # of what a rank has printed
RAISED = re.compile(r"[\w.]+(Error|Exception): ")  # begins the end of a traceback
NAME_OF_RANK = re.compile(r"^rank \d+ on host \S+( \([^)]*\))?: ")  # before what it says
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what ends the command
CANNOT_RECORD = 74  # the status of a rank that cannot write what it records: EX_IOERR of sysexits.h


@dataclass(frozen=True)
class Work:
    """One run.

    Attributes:
        arguments: of `python -m meshtrain.train`, or a script and its arguments.
        is_script: which of the two.
        variables: of the environment.
        world: its number of ranks.
        folder: for what is recorded, and `run` in it for the run's own files.
        reference: the folder of one process's recording; None: this is one process.
        tolerances: those of `compare.Tolerances`.
        contributions: a step, of which what each microbatch adds is recorded.
        drops: whether probabilities of dropout are as they are; else they are 0.
    """

    arguments: Sequence[str]
    is_script: bool
    variables: Mapping[str, str]
    world: int
    folder: str
    reference: str | None = None
    tolerances: Sequence[float] | None = None
    contributions: int | None = None
    drops: bool = True


@dataclass(frozen=True)
class RankEnd:
    """How a rank of a run ended.

    Attributes:
        status: below 0: by which signal.
        printed: the end of what it has written to stderr.
        time: of its end, in seconds since 1970, by its host's clock.
    """

    status: int = 0
    printed: str = ""
    time: float = 0.0

    @property
    def last_line(self) -> str:
        """The last thing that it has said, or how it ended where it has said nothing."""
        if self.printed.strip():
            return self.printed.strip().rpartition("\n")[2]
        if self.status < 0:
            return f"a rank was ended by signal {-self.status}"
        return f"a rank ended with status {self.status}"


@dataclass(frozen=True)
class Ended:
    """How a run ended, by rank."""

    ranks: Sequence[RankEnd]

    @property
    def failed(self) -> list[RankEnd]:
        """The ranks that have failed, first the one that failed first: others fail for want of it,
        or are killed."""
        return sorted((rank for rank in self.ranks if rank.status), key=lambda rank: rank.time)

    @property
    def is_done(self) -> bool:
        return not self.failed

    @property
    def refusal(self) -> str | None:
        """Why the run was refused; None: it was not."""
        for rank in self.failed:
            if rank.status == INPUT_STATUS and rank.printed.strip():
                return _message(rank.printed)
        return None


def _message(text: str) -> str:
    """What an error says, without the traceback with which a script ends, and the rank's name."""
    if "Traceback (most recent call last)" in text:
        lines = text.strip().splitlines()
        raised = [n for n, line in enumerate(lines) if RAISED.match(line)]
        if raised:
            _, _, text = "\n".join(lines[raised[-1] :]).partition(": ")
    return NAME_OF_RANK.sub("", text.strip())


class Ranks(Protocol):
    """Where runs can be made."""

    most: int | None  # ranks of a run; None: as many as the machine bears

    def run(self, work: Work) -> Ended: ...


class ForkedRanks:
    """All ranks of a run on this machine's CPU."""

    most = None

    def run(self, work: Work) -> Ended:
        port = free_port()
        of_ranks: dict[int, dict[str, str]] = {}
        for rank in range(work.world):
            variables = {"CUDA_VISIBLE_DEVICES": "", **work.variables}
            if work.world > 1:
                variables |= _place(rank, rank, work.world, "127.0.0.1", port)
            of_ranks[rank] = variables
        return Ended(run_here(work, of_ranks))


class RanksOfJob:
    """The ranks of a run on the processes of a job, of which this one is rank 0."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.most: int | None = job.world_size

    def run(self, work: Work) -> Ended:
        port = free_port()
        message = [asdict(work), port]
        self.job.reduce("beginning the next run", None, lambda _: message)
        return _run_together(self.job, work, port)

    def end(self, problem: str | None = None) -> None:
        """Tells the others that there are no more runs. `problem`: what is wrong with the input."""
        self.job.reduce("beginning the next run", None, lambda _: problem)


def follow(job: Job) -> None:
    """On the other ranks of the job: makes the runs that rank 0 begins, until there are no more.
    Raises AgreedError: rank 0 has found that the input is wrong."""
    while True:
        message = job.reduce("beginning the next run", None, lambda _: None)
        if message is None:
            return
        if isinstance(message, str):
            raise AgreedError(message)
        work, port = message
        _run_together(job, Work(**work), port)


def job_of_launcher() -> Job | None:
    """The job of which torchrun or srun has started this process; None: of none. It touches no GPU,
    so that its forks can."""
    environment = read_environment(os.environ)
    if environment.world_size == 1:
        return None
    store = meet_at_store(environment, timeout_s=600)
    return Job(environment, torch.device("cpu"), store)


def _run_together(job: Job, work: Work, port: int) -> Ended:
    """Forks this process's rank of a run, and gathers how all of them have ended."""
    environment = job.environment
    own = RankEnd()
    if job.rank < work.world:
        assert environment.master is not None
        variables = dict(work.variables)
        if work.world > 1:
            address, _ = environment.master
            variables |= _place(job.rank, environment.local_rank, work.world, address, port)
        [own] = run_here(work, {job.rank: variables})
    of_all = job.gather("ending a run", asdict(own))
    return Ended([RankEnd(**of_rank) for of_rank in of_all[: work.world]])


def _place(rank: int, local_rank: int, world: int, address: str, port: int) -> dict[str, str]:
    """The variables of torchrun for a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


# Processes ----------------------------------------------------------------------------------------


@dataclass
class _Forked:
    pid: int
    log: Path
    end: RankEnd | None = None  # None: it is running

    def look(self, options: int = os.WNOHANG) -> None:
        """Notes its end, if it has ended."""
        if self.end is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.end = RankEnd(os.waitstatus_to_exitcode(status), _tail(self.log), time.time())

    def kill(self) -> None:
        if self.end is None:
            os.kill(self.pid, signal.SIGKILL)


def run_here(work: Work, of_ranks: Mapping[int, Mapping[str, str]]) -> list[RankEnd]:
    """Forks these ranks of a run, each with its variables, and waits until all have ended; if one
    fails, others that wait for it are killed. However this function ends, it leaves none: they
    write into a folder that is removed next."""
    running: list[_Forked] = []
    try:
        for rank, variables in of_ranks.items():
            running.append(fork(work, rank, variables))
        _wait_for(running)
    finally:
        for each in running:
            each.kill()
        for each in running:
            each.look(options=0)
    return [each.end for each in running if each.end is not None]


def _wait_for(running: Sequence[_Forked]) -> None:
    """Returns when all have ended, or some time after one has failed."""
    deadline = math.inf
    while any(each.end is None for each in running) and time.monotonic() < deadline:
        for each in running:
            each.look()
        some_failed = any(each.end is not None and each.end.status for each in running)
        if some_failed and deadline == math.inf:
            deadline = time.monotonic() + GRACE_S
        time.sleep(POLL_S)


def fork(work: Work, rank: int, variables: Mapping[str, str]) -> _Forked:
    """Forks a process that makes one rank of a run."""
    log = Path(work.folder) / f"rank_{rank:05}.err"
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_rank(work, rank, variables, log, parent)
    return _Forked(pid, log)


def _tail(log: Path) -> str:
    with suppress(OSError):
        return log.read_text(errors="replace")[-LAST_CHARACTERS:]
    return ""


def _become_rank(
    work: Work, rank: int, variables: Mapping[str, str], log: Path, parent: int
) -> NoReturn:
    """In the forked process: runs, and ends it without returning to what this process was."""
    status = 1
    try:
        end_with_parent(parent)
        # The command cleans up before it ends; a rank has nothing to clean.
        for number in ENDING:
            if callable(signal.getsignal(number)):  # nohup's SIG_IGN stays
                signal.signal(number, signal.SIG_DFL)
        for standard, file in ((1, log.with_suffix(".out")), (2, log)):
            with file.open("w") as opened:
                os.dup2(opened.fileno(), standard)
        status = _status_of_rank(work, rank, variables)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Whatever has happened, even if nothing can be printed on a full disk: an exception would
        # go on in what this process was, and remove the folder of the others.
        os._exit(status)


def _status_of_rank(work: Work, rank: int, variables: Mapping[str, str]) -> int:
    """Runs, and prints why it failed if it did; returns the exit status."""
    for name in [name for name in os.environ if name.startswith(OF_LAUNCHERS)]:
        del os.environ[name]
    os.environ.update(variables)
    warnings.simplefilter("ignore")  # stderr is for what ends the run
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // work.world))
    recorder = _recorder(work, rank)
    observer.current = recorder
    try:
        with _dropout(drops=work.drops):
            status = _run_script(work) if work.is_script else _train(work)
    except SystemExit as error:
        status = _status_of_exit(error)
    except BaseException:
        traceback.print_exc()
        status = 1
    recorder.close()
    if recorder.problem is not None:
        print(recorder.problem, file=sys.stderr)
        return CANNOT_RECORD
    return status


def _status_of_exit(error: SystemExit) -> int:
    """As Python ends with it: `sys.exit("why")` prints why."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _recorder(work: Work, rank: int) -> Recorder:
    return Recorder(
        Path(work.folder),
        rank,
        reference=None if work.reference is None else Path(work.reference),
        tolerances=None if work.tolerances is None else Tolerances(*work.tolerances),
        contributions=work.contributions,
    )


def _train(work: Work) -> int:
    return meshtrain.train.main(list(work.arguments))


def _run_script(work: Work) -> int:
    """Runs a script as Python would."""
    script, *_ = work.arguments
    sys.argv = list(work.arguments)
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        leave_all(error)  # it prints what is wrong input, and ends with a status
        raise
    leave_all(None)
    return 0


@contextmanager
def _dropout(*, drops: bool) -> Iterator[None]:
    """Inside, unless it drops, no module and no function of torch drops anything."""
    if drops:
        yield
        return

    def keep_all(module: torch.nn.Module, _: object) -> None:
        if isinstance(module, AnyDropout | Dropout):
            module.p = 0.0

    def keep(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return x

    hook = torch.nn.modules.module.register_module_forward_pre_hook(keep_all)
    before = F.dropout
    F.dropout = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout = before
        hook.remove()


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    file = folder / "run" / "metrics.jsonl"
    return read(file) if file.exists() else []
