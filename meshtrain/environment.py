"""What the launcher left in the environment: torchrun's variables, SLURM's, or none."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from meshtrain.errors import InputError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
OWN_DESCRIPTORS = 512  # of a process; who serves the job's store has one more for each rank
SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


@dataclass(frozen=True)
class Environment:
    """Where one process stands in its job.

    Attributes:
        launcher: "torchrun", "srun" or "none".
        local_rank: its number among the job's processes of this host; it picks the GPU.
        master: host and port at which the job's store listens; None where there is no store.
        hosts_store: whether this process is the one to serve the store there.
        restarts: how often torchrun has started this worker anew.
        restarts_left: how often it would do that again.
        requeues: how often SLURM has started this job anew.
        started_before: whether its agent has started this worker before, also for another reason than a failure.
        launch: what tells this job's launch, with all of its restarts, from others; None where nothing does.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    host: str
    master: tuple[str, int] | None
    hosts_store: bool = False
    restarts: int = 0
    requeues: int = 0
    restarts_left: int = 0
    started_before: bool = False
    launch: str | None = None

    @property
    def again(self) -> bool:
        """Whether this is not the first start of a job that the launcher starts anew when it was lost."""
        return self.restarts > 0 or self.requeues > 0 or self.started_before


def read_environment(variables: Mapping[str, str]) -> Environment:
    """This process's place in the job, by the environment of its launcher.

    Raises:
        InputError: a variable is missing or no number; the message names it.
    """
    host = socket.gethostname()
    requeues = _number(variables, "SLURM_RESTART_COUNT", 0)
    launch = variables.get("SLURM_JOB_ID")
    if any(name in variables for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")):
        _need(variables, TORCHRUN, "torchrun sets them all; to run a single process, unset them all")
        rank, restarts = _number(variables, "RANK"), _number(variables, "TORCHELASTIC_RESTART_COUNT", 0)
        if variables.get("TORCHELASTIC_RUN_ID", "none") != "none":  # as torchrun has it where nobody names one
            launch = variables["TORCHELASTIC_RUN_ID"]
        return Environment(
            "torchrun",
            rank,
            _number(variables, "WORLD_SIZE"),
            _number(variables, "LOCAL_RANK"),
            host,
            (variables["MASTER_ADDR"], _number(variables, "MASTER_PORT")),
            rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            restarts,
            requeues,
            _number(variables, "TORCHELASTIC_MAX_RESTARTS", 0) - restarts,
            launch=launch,
        )
    # The shell of an sbatch script carries SLURM_PROCID=0 as well, but it is no task of a step: python there is alone.
    batch_shell = variables.get("ENVIRONMENT") == "BATCH" and not variables.get("SLURM_STEP_ID")
    if "SLURM_PROCID" in variables and not batch_shell:
        _need(variables, SLURM, "srun sets them all")
        rank, local_rank = _number(variables, "SLURM_PROCID"), _number(variables, "SLURM_LOCALID")
        # An exported address is that of task 0. Otherwise it is the first node's, wherever task 0 was put.
        chosen = "MASTER_ADDR" in variables or "SLURM_NODEID" not in variables
        return Environment(
            "srun",
            rank,
            _number(variables, "SLURM_NTASKS"),
            local_rank,
            variables.get("SLURMD_NODENAME", host),
            _slurm_master(variables) if variables["SLURM_NTASKS"] != "1" else None,
            rank == 0 if chosen else (local_rank == 0 and _number(variables, "SLURM_NODEID") == 0),
            requeues=requeues,
            launch=launch,
        )
    return Environment("none", 0, 1, 0, host, None, requeues=requeues, launch=launch)


def _need(variables: Mapping[str, str], names: tuple[str, ...], why: str) -> None:
    missing = [name for name in names if name not in variables]
    if missing:
        found = ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
        raise InputError(f"the environment has {found} but not {', '.join(missing)}: {why}")


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Of a variable that is there, or may be missing or empty and is `default` then."""
    if default is not None and not variables.get(name):
        return default
    if not variables[name].isdecimal():
        raise InputError(f"the environment variable {name} should be a number and is {variables[name]!r}")
    return int(variables[name])


def _slurm_master(variables: Mapping[str, str]) -> tuple[str, int]:
    """Where the ranks of a job step meet: exported MASTER_ADDR and MASTER_PORT win.

    By default it is the first node of the step and a port that the ids of job and step give, so that neighbouring jobs
    on one node do not meet each other. It is below those that Linux gives to outgoing connections, from 32768 on.
    """
    address = variables.get("MASTER_ADDR")
    if address is None:
        nodes = next((variables[name] for name in SLURM_NODES if name in variables), None)
        if nodes is None:
            raise InputError(
                f"the environment has neither MASTER_ADDR nor a node list ({', '.join(SLURM_NODES)}): "
                "export MASTER_ADDR as the host of task 0"
            )
        address = first_host(nodes)
    if "MASTER_PORT" in variables:
        return address, _number(variables, "MASTER_PORT")
    if "SLURM_JOB_ID" not in variables:
        raise InputError("the environment has neither MASTER_PORT nor SLURM_JOB_ID: export MASTER_PORT, a free port")
    job, step = _number(variables, "SLURM_JOB_ID"), _number(variables, "SLURM_STEP_ID", 0)
    return address, 10000 + (job * 16 + step) % 20000


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: `rack[1-2]gpu[007-012,020],login1` -> `rack1gpu007`.

    Raises:
        InputError: the list is empty or its brackets do not close.
    """
    match = re.match(r"(?=[^,\[\]])((?:[^,\[\]]+|\[\w[^\]]*\])+)(?:,|$)", nodes.strip())
    if match is None:
        raise InputError(
            f"the node list {nodes!r} is not of SLURM's form, for instance node[01-04,07]: export MASTER_ADDR"
        )
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[1])
