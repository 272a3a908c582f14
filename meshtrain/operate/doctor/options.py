"""PURE: torchrun's options, or a launcher's variables, as the place where a node meets the others.

`meshtrain doctor` stands where `torchrun` stood on the command line, so it knows all of torchrun's options by name,
obeys those that say where and as whom to meet, and takes note of no other. Like torchrun it reads an option's default
from PET_NNODES and so on (Kubeflow sets these).
"""

import argparse
import re
from collections.abc import Mapping, Sequence

from meshtrain.environment import SLURM_NODES, read_environment
from meshtrain.errors import InputError
from meshtrain.operate.doctor.record import Place

C10D_PORT = 29400  # of an endpoint that names none
STATIC_PORT = 29500

# torchrun's other options, which change nothing here: with a value, and without.
PASSED_OVER = (
    "--max-restarts", "--monitor-interval", "--start-method", "--event-log-handler", "--role", "--log-dir",
    "-r", "--redirects", "-t", "--tee", "--local-ranks-filter", "--logs-specs", "--numa-binding",
    "--signals-to-handle", "--shutdown-timeout", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
)  # fmt: skip
FLAGS_PASSED_OVER = ("--no-python", "--run-path", "--virtual-local-rank")


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """torchrun's options with their own names, dashes or underscores."""
    group = parser.add_argument_group("torchrun's options", "as on the node's torchrun command line")

    def option(name: str, about: str, metavar: str | None = None) -> None:
        group.add_argument(name, *_underscored(name), metavar=metavar or name.lstrip("-").upper(), help=about)

    option("--nnodes", "number of nodes, or MIN:MAX", "N")
    option("--nproc-per-node", "processes of this node: a number, gpu, cpu or auto", "N")
    option("--rdzv-backend", "c10d or static", "NAME")
    option("--rdzv-endpoint", "HOST[:PORT] where the nodes meet", "HOST:PORT")
    option("--rdzv-id", "the job's id, the same on all nodes", "ID")
    option("--rdzv-conf", "is_host=1 where this node serves the endpoint and cannot know that by itself", "K=V,...")
    option("--node-rank", "this node's number (static)", "I")
    option("--master-addr", "the host of node 0 (static)", "HOST")
    option("--master-port", "the port there (static)", "PORT")
    option("--local-addr", "this node's address", "HOST")
    group.add_argument("--standalone", action="store_true", help="this node alone")
    group.add_argument("-m", "--module", action="store_true", help="a module's name stands before the config")
    for name in PASSED_OVER:
        group.add_argument(name, *_underscored(name), help=argparse.SUPPRESS)
    for name in FLAGS_PASSED_OVER:
        group.add_argument(name, *_underscored(name), action="store_true", help=argparse.SUPPRESS)


def _underscored(name: str) -> list[str]:
    other = "--" + name.removeprefix("--").replace("-", "_")
    return [other] if name.startswith("--") and other != name else []


def read_place(given: argparse.Namespace, variables: Mapping[str, str], host: str) -> Place:
    """The place of the node that was started with these options in this environment.

    Options win over what a launcher left in the environment, and what torchrun or srun left wins over nothing.

    Raises:
        InputError: an option has no value that torchrun would understand.
    """
    options = {name: _value(given, name, variables) for name in _READ}
    if given.local or given.standalone:
        return Place("local", "c10d", "localhost", 0, "none", 1, 1, 0, options["nproc_per_node"] or "auto", True, None)
    if not any(options.values()):
        environment = read_environment(variables)
        if environment.launcher == "torchrun":
            return _of_torchrun(variables)
        if environment.launcher == "srun":
            return _of_srun(variables)
    fewest, most = read_nodes(options["nnodes"] or "1")
    processes = options["nproc_per_node"] or "1"
    if not re.fullmatch(r"[1-9]\d*|gpu|cpu|auto", processes):
        raise InputError(f"--nproc-per-node {processes}: expected a number of processes, gpu, cpu or auto")
    backend = options["rdzv_backend"] or "static"
    if most == 1 and not options["rdzv_endpoint"] and backend == "static":
        return Place("local", backend, "localhost", 0, "none", 1, 1, 0, processes, True, None)
    if backend not in ("c10d", "static"):
        raise InputError(
            f"--rdzv-backend {backend}: the doctor meets by c10d or static; run it with --rdzv-backend c10d and an "
            "endpoint on one of the nodes to check everything else"
        )
    return _of_options(options, backend, fewest, most, processes)


_READ = ("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "node_rank",
         "master_addr", "master_port")  # fmt: skip


def _value(given: argparse.Namespace, name: str, variables: Mapping[str, str]) -> str | None:
    value = getattr(given, name)
    return variables.get(f"PET_{name.upper()}") if value is None else value


def _of_options(options: Mapping[str, str | None], backend: str, fewest: int, most: int, processes: str) -> Place:
    conf = dict(part.partition("=")[::2] for part in (options["rdzv_conf"] or "").split(",") if part)
    id_ = options["rdzv_id"] or "none"
    if backend == "static":
        node = _count(options["node_rank"] or conf.get("rank", "0"), "--node-rank")
        if not 0 <= node < most:
            raise InputError(f"--node-rank {node} with --nnodes {most}: node ranks go from 0 to {most - 1}")
        endpoint = options["rdzv_endpoint"] or (
            f"{options['master_addr'] or '127.0.0.1'}:{options['master_port'] or STATIC_PORT}"
        )
        address, port = read_endpoint(endpoint, STATIC_PORT)
        return Place("torchrun's options", backend, address, port, id_, most, most, node, processes, node == 0)
    if not options["rdzv_endpoint"]:
        raise InputError("--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, the same on all nodes")
    address, port = read_endpoint(options["rdzv_endpoint"], C10D_PORT)
    serves = conf.get("is_host")
    if serves is not None and serves.lower() not in ("0", "1", "true", "false", "t", "f", "yes", "no", "y", "n"):
        raise InputError(f"--rdzv-conf is_host={serves}: expected 1 or 0")
    known = None if serves is None else serves.lower() in ("1", "true", "t", "yes", "y")
    return Place("torchrun's options", backend, address, port, id_, fewest, most, None, processes, known)


def _of_torchrun(variables: Mapping[str, str]) -> Place:
    """The place of a torchrun worker: all nodes have met, and only the first process of each speaks for its node.

    Its port is open already, by torch's store: the doctors choose another one and tell it through that store.
    """
    nodes = _count(variables.get("GROUP_WORLD_SIZE", "1"), "GROUP_WORLD_SIZE")
    rank = _count(variables["RANK"], "RANK")
    return Place(
        "torchrun",
        "c10d",
        variables["MASTER_ADDR"],
        _count(variables["MASTER_PORT"], "MASTER_PORT"),
        variables.get("TORCHELASTIC_RUN_ID", "none"),
        nodes,
        nodes,
        _count(variables.get("GROUP_RANK", "0"), "GROUP_RANK"),
        variables.get("LOCAL_WORLD_SIZE", "1"),
        rank == 0,
        rank,
    )


def _of_srun(variables: Mapping[str, str]) -> Place:
    """The place of one task of a job step. As in training, the first node of the list serves the endpoint."""
    environment = read_environment(variables)
    names = next((expand_hosts(variables[name]) for name in SLURM_NODES if name in variables), ())
    nodes = int(variables.get("SLURM_STEP_NUM_NODES", variables.get("SLURM_NNODES", str(len(names) or 1))))
    per_node = _tasks(variables.get("SLURM_STEP_TASKS_PER_NODE", variables.get("SLURM_TASKS_PER_NODE", "1")))
    node = int(variables.get("SLURM_NODEID", "0"))
    address, port = environment.master or ("localhost", 0)
    return Place(
        "srun",
        "static",
        address,
        port,
        variables.get("SLURM_JOB_ID", "none"),
        nodes,
        nodes,
        node,
        str(per_node[min(node, len(per_node) - 1)]),
        environment.hosts_store or environment.master is None,
        environment.rank,
        names,
    )


def speaks_for_node(variables: Mapping[str, str], place: Place) -> bool:
    """Whether this process speaks for its node: one of each node does, and the others wait for what it has to time."""
    name = {"torchrun": "LOCAL_RANK", "srun": "SLURM_LOCALID"}.get(place.launcher)
    return name is None or variables.get(name, "0") == "0"


def read_nodes(text: str) -> tuple[int, int]:
    """`2` or `2:4` -> (2, 2) or (2, 4). Raises InputError."""
    found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    if found is None or (found[2] and int(found[2]) < int(found[1])):
        raise InputError(f"--nnodes {text}: expected a number of nodes, or MIN:MAX such as 2:4")
    return int(found[1]), int(found[2] or found[1])


def read_endpoint(text: str, port: int) -> tuple[str, int]:
    """`host`, `host:29500`, `[::1]:29500` -> address and port. Raises InputError."""
    found = re.fullmatch(r"(?:\[([\da-fA-F:.]+)\]|([^:\s/]+))(?::(\d+))?", text)
    if found is None or not 0 <= int(found[3] or port) < 65536:
        raise InputError(f"the endpoint {text!r} is none: expected HOST:PORT, for instance node1:29500")
    return found[1] or found[2], int(found[3] or port)


def expand_hosts(nodes: str) -> tuple[str, ...]:
    """All names of a SLURM node list: `gpu[07-09,12],login1` -> gpu07, gpu08, gpu09, gpu12, login1.

    Raises:
        InputError: the list has not SLURM's form.
    """
    names: list[str] = []
    rest = nodes.strip()
    while rest:
        match = re.match(r"([^,\[\]]*)(?:\[([\d,-]+)\]([^,\[\]]*))?(?:,|$)", rest)
        if match is None or not match[0]:
            raise InputError(f"the node list {nodes!r} is not of SLURM's form, for instance node[01-04,07]")
        stem, numbers, end = match.groups()
        if numbers is None:
            names.append(stem)
        else:
            for part in numbers.split(","):
                first, _, last = part.partition("-")
                names += [f"{stem}{i:0{len(first)}}{end}" for i in range(int(first), int(last or first) + 1)]
        rest = rest[match.end() :]
    return tuple(names)


def _tasks(text: str) -> Sequence[int]:
    """SLURM's `4(x2),2` -> 4, 4, 2."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise InputError(f"SLURM_TASKS_PER_NODE={text} is not of SLURM's form, for instance 4(x2),2")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _count(text: str, name: str) -> int:
    if not text.isdecimal():
        raise InputError(f"{name} {text}: expected a number")
    return int(text)
