"""The environment as the launcher has set it (torchrun's variables, SLURM's, or none), and what is
left for it to read.

The launcher passes variables; a worker leaves marks of earlier starts, and the reason for which it
ends.
"""

import hashlib
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshtrain.errors import InputError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
# file descriptors of a process; the one that serves the job's store has one more per rank
OWN_DESCRIPTORS = 512
SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
# an item of a SLURM node list
HOSTS = re.compile(r"[^,\[\]\s]+(?:\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\][^,\[\]]*)*")
MOST_HOSTS = 1 << 20  # in a range
# What may differ between hosts, as it changes neither results nor traffic: which device or
# interface of a host is used, where something lies there (ends of names), and what is logged
# (beginnings of names).
OF_EACH_HOST = (
    "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_HOSTID",
)
PLACES = ("_HOME", "_PATH", "_DIR", "_DIRECTORY", "_FILE", "_ROOT")
LOGS = ("NCCL_DEBUG", "TORCH_LOGS", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES")
# by which the failure of a rank that is not at fault counts as later than that of the one that is
VICTIM_LATER_S = 5
# set to 1, torchrun opens a store for each start of the workers
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True)
class Environment:
    """Where one process stands in its job."""

    launcher: str  # "torchrun", "srun" or "none"
    rank: int
    world_size: int
    local_rank: int  # its number among the job's processes of this host; it picks the GPU
    host: str
    # host and port at which the job's store listens; None where there is no store
    master: tuple[str, int] | None
    hosts_store: bool = False  # whether this process serves the store there
    restarts: int = 0  # how often torchrun has restarted this worker
    requeues: int = 0  # how often SLURM has requeued this job
    restarts_left: int = 0  # how often torchrun would still restart this worker
    started_before: bool = False  # by the same torchrun agent, for whatever reason
    launch: str | None = None  # identifies this launch of the job, with all of its restarts

    @property
    def again(self) -> bool:
        """Whether the launcher has restarted this job: this is not its first start."""
        return self.restarts > 0 or self.requeues > 0 or self.started_before


def read_environment(variables: Mapping[str, str]) -> Environment:
    """This process's place in the job. Raises InputError: a variable is missing or no number; the
    message names it."""
    host = socket.gethostname()
    requeues = _number(variables, "SLURM_RESTART_COUNT", 0)
    launch = variables.get("SLURM_JOB_ID")
    if any(name in variables for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")):
        _need(
            variables, TORCHRUN, "torchrun sets them all; to run a single process, unset them all"
        )
        return _of_torchrun(variables, host, requeues, launch)
    # The shell of an sbatch script has SLURM_PROCID=0, too, but is no task of a step: Python runs
    # alone there.
    batch_shell = variables.get("ENVIRONMENT") == "BATCH" and not variables.get("SLURM_STEP_ID")
    if "SLURM_PROCID" in variables and not batch_shell:
        _need(variables, SLURM, "srun sets them all")
        return _of_srun(variables, host, requeues, launch)
    return Environment("none", 0, 1, 0, host, None, requeues=requeues, launch=launch)


def _of_torchrun(
    variables: Mapping[str, str], host: str, requeues: int, launch: str | None
) -> Environment:
    rank = _number(variables, "RANK")
    restarts = _number(variables, "TORCHELASTIC_RESTART_COUNT", 0)
    run_id = variables.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":  # torchrun's default where no id is given
        launch = run_id
    agent_serves = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Environment(
        "torchrun",
        rank,
        world_size=_number(variables, "WORLD_SIZE"),
        local_rank=_number(variables, "LOCAL_RANK"),
        host=host,
        master=(variables["MASTER_ADDR"], _number(variables, "MASTER_PORT")),
        hosts_store=rank == 0 and not agent_serves,
        restarts=restarts,
        requeues=requeues,
        restarts_left=_number(variables, "TORCHELASTIC_MAX_RESTARTS", 0) - restarts,
        launch=launch,
    )


def _of_srun(
    variables: Mapping[str, str], host: str, requeues: int, launch: str | None
) -> Environment:
    rank, local_rank, world_size = (_number(variables, name) for name in SLURM)
    # An exported address is that of task 0. Otherwise it is the first node's, wherever task 0 was
    # put.
    if "MASTER_ADDR" in variables or "SLURM_NODEID" not in variables:
        serves = rank == 0
    else:
        serves = local_rank == 0 and _number(variables, "SLURM_NODEID") == 0
    return Environment(
        "srun",
        rank,
        world_size=world_size,
        local_rank=local_rank,
        host=variables.get("SLURMD_NODENAME", host),
        master=_slurm_master(variables) if world_size > 1 else None,
        hosts_store=serves,
        requeues=requeues,
        launch=launch,
    )


def _need(variables: Mapping[str, str], names: tuple[str, ...], reason: str) -> None:
    missing = [name for name in names if name not in variables]
    if missing:
        present = ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
        raise InputError(f"the environment has {present} but not {', '.join(missing)}: {reason}")


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not variables.get(name):
        return default
    if not variables[name].isdecimal():
        raise InputError(
            f"the environment variable {name} should be a number and is {variables[name]!r}"
        )
    return int(variables[name])


def _slurm_master(variables: Mapping[str, str]) -> tuple[str, int]:
    """Where the ranks of a job step meet: MASTER_ADDR and MASTER_PORT, or the first node of the
    step and a port derived from the ids of job and step, below Linux's ephemeral ports (from 32768
    on)."""
    address = variables.get("MASTER_ADDR")
    if address is None:
        nodes = slurm_nodes(variables)
        if not nodes:
            raise InputError(
                "the environment has neither MASTER_ADDR nor a node list "
                f"({', '.join(SLURM_NODES)}): export MASTER_ADDR as the host of task 0"
            )
        address = nodes[0]
    if "MASTER_PORT" in variables:
        return address, _number(variables, "MASTER_PORT")
    if "SLURM_JOB_ID" not in variables:
        raise InputError(
            "the environment has neither MASTER_PORT nor SLURM_JOB_ID: export MASTER_PORT, a free "
            "port"
        )
    job, step = _number(variables, "SLURM_JOB_ID"), _number(variables, "SLURM_STEP_ID", 0)
    return address, 10000 + (job * 16 + step) % 20000


def slurm_nodes(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The nodes of a job step, or else of its job, in SLURM's order; none where no list is given.
    Raises InputError."""
    for name in SLURM_NODES:
        if name in variables:
            return expand_hosts(variables[name])
    return ()


def expand_hosts(nodes: str) -> tuple[str, ...]:
    """All names of a SLURM node list: `gpu[07-09,12],login1` -> gpu07, gpu08, gpu09, gpu12, login1;
    or InputError."""
    names: list[str] = []
    items = re.split(r",(?![^\[]*\])", nodes) if nodes.strip() else []
    for item in map(str.strip, items):  # a blank after a comma is no part of a name
        if HOSTS.fullmatch(item) is None:
            form = "is not of SLURM's form, for instance node[01-04,07]"
            raise InputError(f"the node list {nodes!r} {form}: export MASTER_ADDR")
        parts = re.split(r"\[([^\]]*)\]", item)  # names and lists of numbers in turn
        choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
        names += ["".join(combination) for combination in itertools.product(*choices)]
    return tuple(names)


def _numbers(listed: str) -> list[str]:
    """`007-009,020` -> 007, 008, 009, 020."""
    numbers = []
    for part in listed.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if not 0 < len(span) <= MOST_HOSTS:
            problem = "runs backwards" if len(span) == 0 else f"has more than {MOST_HOSTS:,} nodes"
            raise InputError(f"the range {part} of the node list {problem}: export MASTER_ADDR")
        numbers += [f"{i:0{len(first)}}" for i in span]
    return numbers


def is_of_host(variable: str) -> bool:
    """Whether a variable of the environment may well have another value on each host."""
    return variable in OF_EACH_HOST or variable.endswith(PLACES) or variable.startswith(LOGS)


def started_before(variables: Mapping[str, str]) -> bool:
    """Whether this worker's agent has started this local rank before; records that it now has.

    torchrun counts failures, not starts: when a node joins, it ends all workers and restarts them
    with the same count, and the agent of a joining node begins at 0. So a worker leaves a mark in
    the folder that its agent has made for the error files of its workers: the agent keeps the
    folder across restarts, and no other agent uses it.
    """
    folder = _agent_folder(variables)
    if folder is None:
        return False
    mark = folder / f"started_{variables.get('LOCAL_RANK', '0')}"
    before = mark.exists()
    mark.touch()
    return before


def already_printed(text: str, variables: Mapping[str, str]) -> bool:
    """Whether the last text recorded here by a worker of this agent was the same; records this
    one."""
    folder = _agent_folder(variables)
    if folder is None:
        return False
    digest = hashlib.sha256(text.encode()).hexdigest()
    mark = folder / "told"
    before = mark.exists() and mark.read_text() == digest
    mark.write_text(digest)
    return before


def tell_launcher(sentence: str, *, at_fault: bool = True) -> None:
    """Writes torch's error file: torchrun's report then gives this sentence as the cause, and not
    the place in Python where it was raised, which says nothing to who has to mend a config or a
    disk.

    torchrun calls that rank the root whose file has the earliest second, and a failure is on all
    ranks within one: who is not at fault gives a later one. All tell the same sentence."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    stamp = int(time.time()) + (0 if at_fault else VICTIM_LATER_S)
    message = {"message": _one_sentence(sentence), "extraInfo": {"timestamp": str(stamp)}}
    with suppress(OSError):  # its own folder may be on the disk that is full
        Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def _one_sentence(text: str) -> str:
    """Of a text of many lines the first one: the rest stands in the log once, and would be in the
    report again."""
    lines = [line.strip() for line in text.strip().splitlines()]
    if len(lines) <= 2:
        return " ".join(lines)
    return f"{lines[0]} (the rest is printed above)"


def _agent_folder(variables: Mapping[str, str]) -> Path | None:
    """The folder above `attempt_0/LOCAL_RANK/error.json`; None where no torchrun has made one."""
    file = Path(variables.get("TORCHELASTIC_ERROR_FILE", ""))
    if len(file.parts) > 3 and file.parts[-3].startswith("attempt_"):
        return file.parents[2]
    return None


def stale_store(variables: Mapping[str, str]) -> str:
    """A hint where ranks do not meet at one store: torchrun may have given some of them that of an
    earlier start."""
    agent_serves = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not agent_serves or variables.get("GROUP_WORLD_SIZE") == "1":
        return ""
    return (
        "; if nodes have joined or left since torchrun was started, it may have given ranks the "
        f"store of an earlier start: export {OWN_STORE}=1 before torchrun, on every node"
    )
