"""What a job requests from SLURM: the command's options, and a script of tools/slurm filled in with
them.

Each option is checked before SLURM sees it: SLURM reports a wrong value only when the script is
submitted, or not at all, as a name with a space is two options.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshtrain.errors import InputError

TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
NAME = re.compile(r"[\w.:=@%+,/-]+", re.ASCII)
GRES = re.compile(r"[A-Za-z][\w.-]*(:[A-Za-z][\w.-]*)?(?::([1-9]\d*))?", re.ASCII)
OPTION = re.compile(r"(?:--)?([a-z][a-z-]+)(?:=([^\n\"\\]*))?")
OWN_DIRECTIVES = (
    "nodes",
    "ntasks-per-node",
    "gpus-per-node",
    "gres",
    "cpus-per-task",
    "time",
    "job-name",
    "chdir",
    "output",
)
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)

DIRECTIVE = re.compile(r"(#?)#SBATCH\s+--([a-z-]+)(?:[=\s]|$)")  # with `##` it is commented out
OPTIONS = {
    "--nodes": ("N", "number of nodes (required)"),
    "--gpus-per-node": ("M", "GPUs, and so processes, per node (required)"),
    "--spare-nodes": ("K", "keep K of the nodes idle, to replace lost ones"),
    "--container-image": ("IMAGE", "run the processes in this image; nodes need no torch"),
    "--container-mounts": ("A:B,...", "host folders to mount in it"),
    "--container-runtime": (
        "NAME",
        "pyxis (default), apptainer, or a program with the same options",
    ),
    "--gres": ("NAME", "request GPUs by this name: gpu, gpu:h100"),
    "--cpus-per-task": (
        "C",
        "cores per task, which is a node, or with --srun a GPU; default: 8 per GPU",
    ),
    "--time": ("T", "time limit: 3:50:00, 2-12:00:00, or 240 (minutes)"),
    "--partition": ("NAME", None),
    "--account": ("NAME", None),
    "--job-name": ("NAME", "default: the name of the config"),
    "--activate": ("PATH", "a virtual environment, or a file to source; default: this one"),
}
REPEATED = {
    "--sbatch": ("KEY=VALUE", "an option for sbatch: exclude=gpu07, exclusive"),
    "--env": ("NAME=VALUE", "a variable for the job; may be repeated"),
}
CPUS_PER_GPU = 8  # unless --cpus-per-task says how many
LEAD_S = 600  # how long before its end a job is told to save, in the scripts of tools/slurm
SHORTEST_S = 240  # the shortest job, of which a quarter is for saving


@dataclass(frozen=True)
class Request:
    """A job on `nodes` nodes with `gpus_per_node` processes each, one per GPU."""

    nodes: int
    gpus_per_node: int
    # whether SLURM starts a task per GPU (srun) instead of one per node (torchrun)
    per_gpu: bool = False
    gres: str | None = (
        # the GPUs' name here and their number (`gpu:h100:8`); None: requested by --gpus-per-node
        None
    )
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    job_name: str | None = None
    # the file to source for the environment; None: what the job finds on PATH
    activate: str | None = None
    variables: tuple[tuple[str, str], ...] = ()  # (name, value), to be exported
    spare_nodes: int = 0  # how many of the nodes are kept to replace lost ones
    # variables of the scripts: CONTAINER_IMAGE, ...
    container: Mapping[str, str] = field(default_factory=dict)
    srun: tuple[tuple[str, str], ...] = ()  # further options (name, value); an empty value: a flag
    sbatch: tuple[tuple[str, str], ...] = ()


def add_options(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("the job")
    job.add_argument(
        "--slurm", action="store_true", help="submit to SLURM, the only scheduler supported"
    )
    for name, (metavar, about) in OPTIONS.items():
        job.add_argument(name, metavar=metavar, help=about)
    for name, (metavar, about) in REPEATED.items():
        job.add_argument(name, metavar=metavar, action="append", default=[], help=about)
    about = (
        "without a value: srun starts every process, not torchrun; with one: an option for srun, "
        "cpu-bind=cores"
    )
    job.add_argument(
        "--srun", metavar="KEY=VALUE", nargs="?", const="", action="append", default=[], help=about
    )


def read_request(arguments: argparse.Namespace) -> Request:
    """The request of a command line. Raises InputError: a value is missing or invalid."""
    if not arguments.slurm:
        raise InputError(
            "say which scheduler: --slurm is the one that meshtrain launch knows (for Kubernetes "
            "see tools/k8s, and "
            "for nodes without a scheduler run torchrun on each)"
        )
    gpus = _count("--gpus-per-node", arguments.gpus_per_node, needed="the GPUs of each node")
    nodes = _count("--nodes", arguments.nodes, needed="the number of nodes")
    spare = 0 if arguments.spare_nodes is None else _count("--spare-nodes", arguments.spare_nodes)
    if spare >= nodes:
        raise InputError(
            f"--spare-nodes {spare} of --nodes {nodes} leave none to train: ask for --nodes "
            f"{nodes + spare}"
        )
    return Request(
        nodes=nodes,
        gpus_per_node=gpus,
        per_gpu="" in arguments.srun,
        gres=None if arguments.gres is None else _gres(arguments.gres, gpus),
        cpus_per_task=None
        if arguments.cpus_per_task is None
        else _count("--cpus-per-task", arguments.cpus_per_task),
        time=_time(arguments.time),
        partition=_name("--partition", arguments.partition),
        account=_name("--account", arguments.account),
        job_name=_name("--job-name", arguments.job_name),
        activate=None if arguments.container_image else _activate(arguments.activate),
        spare_nodes=spare,
        container=_container(arguments),
        srun=tuple(_option("--srun", text) for text in arguments.srun if text),
        sbatch=tuple(_option("--sbatch", text) for text in arguments.sbatch),
        variables=tuple(map(_variable, arguments.env)),
    )


def _count(option: str, value: str | None, needed: str | None = None) -> int:
    if value is None:
        raise InputError(f"{option} is missing: {needed}, for instance --nodes 4 --gpus-per-node 8")
    if not re.fullmatch(r"[1-9]\d{0,6}", value, re.ASCII):
        raise InputError(f"{option} {value}: expected a number of at least 1")
    return int(value)


def _gres(value: str, gpus: int) -> str:
    """Appends the number of GPUs, which SLURM's --gres needs, to `gpu` or `gpu:h100`, if it is not
    there yet."""
    match = GRES.fullmatch(value)
    if match is None:
        raise InputError(
            f"--gres {value}: expected a name such as gpu or gpu:h100 (see sinfo --format=%G)"
        )
    if match[2] is None:
        return f"{value}:{gpus}"
    if int(match[2]) != gpus:
        raise InputError(
            f"--gres {value} asks for {match[2]} GPUs on each node and --gpus-per-node for {gpus}: "
            f"use --gres {value.rpartition(':')[0]}, or --gpus-per-node {match[2]}"
        )
    return value


def _time(value: str | None) -> str | None:
    if value is None:
        return None
    if not TIME.fullmatch(value):
        raise InputError(
            f"--time {value}: SLURM does not know this form; write 3:50:00 (hours, minutes, "
            "seconds), 2-12:00:00 "
            "(with days) or 240 (minutes)"
        )
    if seconds(value) < SHORTEST_S:
        raise InputError(
            f"--time {value} is {seconds(value)} seconds, which are over before a job has started "
            "and saved: "
            f"give at least {SHORTEST_S // 60} minutes"
        )
    return value


def seconds(time: str) -> int:
    """A time limit in seconds, parsed like SLURM: minutes, minutes:seconds, hours:minutes:seconds,
    days-hours[:...]."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, secs = [*parts, 0, 0][:3]
    else:
        hours, (minutes, secs) = 0, [*parts, 0][:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + secs


def _name(option: str, value: str | None) -> str | None:
    if value is not None and not NAME.fullmatch(value):
        raise InputError(
            f"{option} {value!r}: expected a name of letters, digits and - _ . , without spaces"
        )
    return value


def _activate(value: str | None) -> str | None:
    if value is None:  # the environment in which this command runs, if it is a virtual one
        own = Path(sys.prefix) / "bin" / "activate"
        return str(own) if sys.prefix != sys.base_prefix and own.is_file() else None
    path = Path(value).expanduser().absolute()
    script = path / "bin" / "activate" if path.is_dir() else path
    if not script.is_file():
        raise InputError(
            f"--activate {value}: there is no {script}; name a virtual environment (a folder with "
            "bin/activate) or a "
            "file that is to be sourced, for instance one with `module load` or `conda activate` "
            "in it"
        )
    return str(script)


def _container(arguments: argparse.Namespace) -> dict[str, str]:
    """Variables of the scripts. Raises InputError: an image that is a file, or a folder to mount,
    is not there."""
    image, mounts = arguments.container_image, arguments.container_mounts
    if image is None:
        if mounts or arguments.container_runtime:
            raise InputError("--container-mounts and --container-runtime need a --container-image")
        return {}
    if image.startswith(("/", ".", "~")) or image.endswith((".sif", ".sqsh")):
        # a runtime would take any other form for a name in a registry
        file = Path(image).expanduser().absolute()
        if not file.exists():
            raise InputError(f"--container-image {image}: there is no such file")
        image = str(file)
    places = []
    for mount in mounts.split(",") if mounts else ():
        outside, colon, inside = mount.partition(":")
        folder = Path(outside).expanduser().absolute()
        if not folder.is_dir():
            raise InputError(
                f"--container-mounts {mounts}: there is no folder {outside} on this host"
            )
        places.append(f"{folder}{colon}{inside}")
    variables = {"CONTAINER_IMAGE": image, "CONTAINER_MOUNTS": ",".join(places)}
    variables["CONTAINER_RUNTIME"] = arguments.container_runtime
    return {name: value for name, value in variables.items() if value}


def _option(option: str, text: str) -> tuple[str, str]:
    """`exclude=gpu07`, `exclusive`, or either with dashes in front."""
    match = OPTION.fullmatch(text)
    if match is None:
        raise InputError(
            f"{option} {text!r}: expected KEY=VALUE, an option by its long name: {option} "
            "exclude=gpu07"
        )
    if match[1] in OWN_DIRECTIVES:
        raise InputError(
            f"{option} {text}: meshtrain launch sets {match[1]} itself, by its own options and the "
            "config"
        )
    return match[1], match[2] or ""


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not VARIABLE.fullmatch(name):
        raise InputError(f"--env {text!r}: expected NAME=VALUE, for instance --env NCCL_DEBUG=INFO")
    return name, value


def render(template: str, directives: Mapping[str, str | None], block: Sequence[str]) -> str:
    """The text of a script in tools/slurm with a `block` of shell lines after its directives, and
    with `directives` (option of sbatch, without dashes -> value) in place of the template's lines
    for them, or else after the last one; None removes the line. Raises ValueError: the template has
    no directives, or sbatch could not read a value."""
    lines = template.splitlines()
    places = [place for place, line in enumerate(lines) if DIRECTIVE.match(line)]
    if not places:
        raise ValueError("a template of sbatch has #SBATCH lines")
    remaining = {option: value for option, value in directives.items() if value is not None}
    head: list[str] = []
    for line in lines[: places[-1] + 1]:
        match = DIRECTIVE.match(line)
        option = match[2] if match else ""
        if option in remaining:
            head.append(_directive(option, remaining.pop(option)))
        elif match is None or match[1] or option not in directives:
            head.append(line)
    head += [_directive(option, value) for option, value in remaining.items()]
    return "\n".join([*head, "", *block, *lines[places[-1] + 1 :]]) + "\n"


def _directive(option: str, value: str) -> str:
    if re.search(r"[\"\\\n\r]", value):
        raise ValueError(
            f"sbatch cannot read a value with quotes, backslashes or line breaks: --{option} "
            f"{value!r}"
        )
    if not value:
        return f"#SBATCH --{option}"
    return (
        f'#SBATCH --{option}="{value}"'
        if re.search(r"[\s#']", value)
        else f"#SBATCH --{option}={value}"
    )


def block(
    arguments: Sequence[str], variables: Sequence[tuple[str, str]], remarks: Sequence[str]
) -> list[str]:
    """The lines of a job's script before the template's own commands."""
    return [
        *(f"# {' '.join(remark.split())}" for remark in remarks),
        *(f"export {name}={shlex.quote(value)}" for name, value in variables),
        f"set -- {shlex.join(arguments)}",
    ]


def lead_s(time: str | None) -> int:
    """How long before its limit a job is told to save: the scripts' own time, or for a short job a
    quarter of it."""
    return LEAD_S if time is None else min(LEAD_S, seconds(time) // 4)


def directives_of(request: Request, default_name: str) -> dict[str, str | None]:
    """Options of sbatch -> values; None for one that the script must not have."""
    processes = request.gpus_per_node if request.per_gpu else 1
    cpus = request.cpus_per_task or CPUS_PER_GPU * request.gpus_per_node // processes
    name, gpus = (
        request.job_name or re.sub(r"[^\w.-]", "-", default_name),
        str(request.gpus_per_node),
    )
    directives: dict[str, str | None] = {"job-name": name, "nodes": str(request.nodes)}
    directives |= {
        "ntasks-per-node": str(processes),
        "gpus-per-node": None if request.gres else gpus,
    }
    optional = {
        "gres": request.gres,
        "time": request.time,
        "partition": request.partition,
        "account": request.account,
    }
    directives |= {option: value for option, value in optional.items() if value is not None}
    directives["cpus-per-task"] = str(cpus)
    if lead_s(request.time) < LEAD_S:
        directives["signal"] = f"USR1@{lead_s(request.time)}"
    if request.spare_nodes:
        directives["no-kill"] = ""  # SLURM ends a job that has lost a node otherwise
    return directives | dict(request.sbatch)


def variables_of(request: Request) -> tuple[tuple[str, str], ...]:
    """The variables that the script reads, and those that the user wants exported."""
    own = {"ACTIVATE": request.activate or ""}
    if not request.per_gpu:
        own["PROCESSES_PER_NODE"] = str(request.gpus_per_node)
    if lead_s(request.time) < LEAD_S:
        own["SAVE_SECONDS"] = str(lead_s(request.time))
    if request.spare_nodes:
        own["SPARE_NODES"] = str(request.spare_nodes)
    if request.srun:
        own["SRUN_ARGS"] = shlex.join(
            f"--{name}={value}" if value else f"--{name}" for name, value in request.srun
        )
    own |= request.container
    return (*own.items(), *request.variables)
