"""torchrun's options, or a launcher's variables, as the place where a node meets the others. No
I/O.

All of torchrun's options are known by name. Like torchrun, it reads defaults from PET_NNODES and so
on (Kubeflow).
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshtrain.doctor.records import Place
from meshtrain.errors import InputError
from meshtrain.job.environment import Environment, read_environment, slurm_nodes

C10D_PORT = 29400  # of an endpoint without a port
STATIC_PORT = 29500
YES, NO = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")

OPTIONS = {
    "--nnodes": ("N", "number of nodes, or MIN:MAX"),
    "--nproc-per-node": ("N", "processes of this node: a number, gpu, cpu or auto"),
    "--rdzv-backend": ("NAME", "c10d or static"),
    "--rdzv-endpoint": ("HOST:PORT", "HOST[:PORT] where the nodes meet"),
    "--rdzv-id": ("ID", "the job's id, the same on all nodes"),
    "--rdzv-conf": (
        "K=V,...",
        "is_host=1 if this node serves the endpoint and cannot find that out itself",
    ),
    "--node-rank": ("I", "index of this node (static)"),
    "--master-addr": ("HOST", "host of node 0 (static)"),
    "--master-port": ("PORT", "port on node 0 (static)"),
    "--local-addr": ("HOST", "address of this node"),
}
# torchrun's other options, which have no effect here: with a value, and without.
PASSED_OVER = (
    "--max-restarts",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--log-dir",
    "-r",
    "--redirects",
    "-t",
    "--tee",
    "--local-ranks-filter",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
)
FLAGS_PASSED_OVER = ("--no-python", "--run-path", "--virtual-local-rank")


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """Adds torchrun's options under their own names, with dashes or underscores."""
    group = parser.add_argument_group(
        "torchrun's options", "as on the node's torchrun command line"
    )

    def option(name: str, about: str = argparse.SUPPRESS, **more: Any) -> None:
        other = "--" + name.removeprefix("--").replace("-", "_")
        names = [name, other] if name.startswith("--") and other != name else [name]
        group.add_argument(*names, help=about, **more)

    for name, (metavar, about) in OPTIONS.items():
        option(name, about, metavar=metavar)
    group.add_argument("--standalone", action="store_true", help="a job of this node alone")
    group.add_argument(
        "-m", "--module", action="store_true", help="a module's name precedes the config"
    )
    for name in PASSED_OVER:
        option(name)
    for name in FLAGS_PASSED_OVER:
        option(name, action="store_true")


def read_place(arguments: argparse.Namespace, variables: Mapping[str, str]) -> Place:
    """The place of the node that was started with these options; they override a launcher's
    variables in the environment. Raises InputError: torchrun would not understand an option's
    value."""
    # As torchrun does, it takes from PET_NNODES and so on what the command line does not say.
    options: dict[str, str | None] = {}
    for option in OPTIONS:
        name = option.removeprefix("--").replace("-", "_")
        value = getattr(arguments, name)
        options[name] = variables.get(f"PET_{name.upper()}") if value is None else value
    del options["local_addr"]  # it does not say where the nodes meet

    if arguments.local or arguments.standalone:
        return Place.alone(options["nproc_per_node"] or "auto")
    if not any(options.values()):
        environment = read_environment(variables)
        if environment.launcher == "torchrun":
            return _of_torchrun(environment, variables)
        if environment.launcher == "srun":
            return _of_srun(environment, variables)
    return _of_options(options)


def _of_options(options: Mapping[str, str | None]) -> Place:
    fewest, most = read_nodes(options["nnodes"] or "1")
    processes = options["nproc_per_node"] or "1"
    if not re.fullmatch(r"[1-9]\d*|gpu|cpu|auto", processes):
        raise InputError(
            f"--nproc-per-node {processes}: expected a number of processes, gpu, cpu or auto"
        )
    backend = options["rdzv_backend"] or "static"
    if most == 1 and not options["rdzv_endpoint"] and backend == "static":
        return Place.alone(processes, backend)

    conf: dict[str, str] = {}
    for part in (options["rdzv_conf"] or "").split(","):
        name, _, value = part.partition("=")
        conf[name] = value
    node_rank, serves = None, None
    if backend == "static":
        fewest = most  # it waits for all of them, whatever MIN:MAX says
        node_rank = _node_rank(options["node_rank"] or conf.get("rank", "0"), most)
        serves = node_rank == 0
        master = f"{options['master_addr'] or '127.0.0.1'}:{options['master_port'] or STATIC_PORT}"
        address, port = read_endpoint(options["rdzv_endpoint"] or master, STATIC_PORT)
    elif backend == "c10d":
        if not options["rdzv_endpoint"]:
            raise InputError(
                "--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, the same on all nodes"
            )
        address, port = read_endpoint(options["rdzv_endpoint"], C10D_PORT)
        serves = _is_host(conf.get("is_host"))
    else:
        raise InputError(
            f"--rdzv-backend {backend}: the doctor meets by c10d or static; run it with "
            "--rdzv-backend c10d and an endpoint on one of the nodes to check everything else"
        )
    return Place(
        launcher="torchrun's options",
        backend=backend,
        address=address,
        port=port,
        id=options["rdzv_id"] or "none",
        fewest=fewest,
        most=most,
        node_rank=node_rank,
        processes=processes,
        serves=serves,
    )


def _node_rank(text: str, nodes: int) -> int:
    node = _count(text, "--node-rank")
    if not 0 <= node < nodes:
        raise InputError(
            f"--node-rank {node} with --nnodes {nodes}: node ranks go from 0 to {nodes - 1}"
        )
    return node


def _is_host(text: str | None) -> bool | None:
    if text is None:
        return None
    if text.lower() not in (*YES, *NO):
        raise InputError(f"--rdzv-conf is_host={text}: expected 1 or 0")
    return text.lower() in YES


def _of_torchrun(environment: Environment, variables: Mapping[str, str]) -> Place:
    """The place of a torchrun worker: all nodes have met, and the doctors use torchrun's own
    store."""

    def count(name: str, default: str) -> int:
        return _count(variables.get(name, default), name)

    nodes = count("GROUP_WORLD_SIZE", "1")
    processes = count("LOCAL_WORLD_SIZE", "1")
    first = environment.rank - environment.local_rank
    address, port = environment.master or ("localhost", 0)
    return Place(
        launcher="torchrun",
        backend="c10d",
        address=address,
        port=port,
        id=variables.get("TORCHELASTIC_RUN_ID", "none"),
        fewest=nodes,
        most=nodes,
        node_rank=count("GROUP_RANK", "0"),
        processes=str(processes),
        serves=environment.rank == 0,
        ranks=tuple(range(first, first + processes)),
    )


def _of_srun(environment: Environment, variables: Mapping[str, str]) -> Place:
    """The place of one task of a job step. As in training, the first node of the list serves the
    endpoint."""
    # A job step may have fewer nodes and tasks than the job, and only newer versions of SLURM set
    # its own variables.
    names = slurm_nodes(variables)
    name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in variables else "SLURM_NNODES"
    nodes = _count(variables.get(name, str(len(names) or 1)), name)
    node = _count(variables.get("SLURM_NODEID", "0"), "SLURM_NODEID")
    job_tasks = variables.get("SLURM_TASKS_PER_NODE", "1")
    per_node = _tasks(variables.get("SLURM_STEP_TASKS_PER_NODE", job_tasks))
    tasks = per_node[min(node, len(per_node) - 1)]

    first = environment.rank - environment.local_rank
    ranks = tuple(range(first, first + tasks))
    if variables.get("SLURM_GTIDS"):  # --distribution=cyclic interleaves the nodes' ranks
        ranks = tuple(map(int, variables["SLURM_GTIDS"].split(",")))
    address, port = environment.master or ("localhost", 0)
    return Place(
        launcher="srun",
        backend="static",
        address=address,
        port=port,
        id=variables.get("SLURM_JOB_ID", "none"),
        fewest=nodes,
        most=nodes,
        node_rank=node,
        processes=str(tasks),
        serves=environment.hosts_store or environment.master is None,
        ranks=ranks,
        expected=names,
    )


def speaks_for_node(variables: Mapping[str, str], place: Place) -> bool:
    """Whether this process speaks for its node: one of each node does, and the others leave."""
    name = {"torchrun": "LOCAL_RANK", "srun": "SLURM_LOCALID"}.get(place.launcher)
    return name is None or variables.get(name, "0") == "0"


def read_nodes(text: str) -> tuple[int, int]:
    """`2` or `2:4` -> (2, 2) or (2, 4). Raises InputError."""
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    if match is not None:
        fewest, most = int(match[1]), int(match[2] or match[1])
        if fewest <= most:
            return fewest, most
    raise InputError(f"--nnodes {text}: expected a number of nodes, or MIN:MAX such as 2:4")


def read_endpoint(text: str, port: int) -> tuple[str, int]:
    """`host`, `host:29500`, `[::1]:29500` -> address and port. Raises InputError."""
    match = re.fullmatch(r"(?:\[([\da-fA-F:.]+)\]|([^:\s/]+))(?::(\d+))?", text)
    if match is None or not 0 <= int(match[3] or port) < 65536:
        raise InputError(
            f"the endpoint {text!r} is none: expected HOST:PORT, for instance node1:29500"
        )
    return match[1] or match[2], int(match[3] or port)


def _tasks(text: str) -> Sequence[int]:
    """`4(x2),2` -> 4, 4, 2."""
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise InputError(
            f"SLURM_TASKS_PER_NODE={text} is not of SLURM's form, for instance 4(x2),2"
        )
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    return tasks


def _count(text: str, name: str) -> int:
    if not text.isdecimal():
        raise InputError(f"{name} {text}: expected a number")
    return int(text)
