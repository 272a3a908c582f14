"""What a job requests from SLURM, Kubernetes or SkyPilot: the command's options.

Each option is checked before the scheduler sees it: SLURM reports a wrong value only when the
script is submitted, or not at all, as a name with a space is two options.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshtrain.errors import InputError, any_of

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

SCHEDULERS = ("slurm", "k8s", "sky")
OPTIONS = {
    "--nodes": ("N", "number of nodes (required)"),
    "--gpus-per-node": ("M", "GPUs, and so processes, per node (required)"),
    "--spare-nodes": ("K", "SLURM: keep K of the nodes idle, to replace lost ones"),
    "--container-image": (
        "IMAGE",
        "run the processes in this image; nodes need no torch (k8s: required)",
    ),
    "--container-mounts": (
        "A:B,...",
        "host folders to mount in it; k8s: volume claims; sky: volumes, or buckets as s3://a:/b",
    ),
    "--container-runtime": (
        "NAME",
        "SLURM: pyxis (default), apptainer, or a program with the same options",
    ),
    "--gres": (
        "NAME",
        "request GPUs by this name: gpu:h100; k8s: nvidia.com/gpu (default); sky: H100 (required)",
    ),
    "--cpus-per-task": (
        "C",
        "cores per task, which is a node, or with --srun a GPU; default: 8 per GPU",
    ),
    "--time": ("T", "time limit: 3:50:00, 2-12:00:00, or 240 (minutes)"),
    "--partition": ("NAME", "k8s: the queue of Kueue; sky: where, as aws/us-east-1"),
    "--account": ("NAME", None),
    "--job-name": ("NAME", "default: the name of the config"),
    "--activate": ("PATH", "SLURM: a virtual environment, or a file to source; default: this one"),
}
# options that only SLURM has
OF_SLURM = ("spare_nodes", "container_runtime", "account", "activate", "srun", "sbatch")
REPEATED = {
    "--sbatch": ("KEY=VALUE", "an option for sbatch: exclude=gpu07, exclusive"),
    "--env": ("NAME=VALUE", "a variable for the job; may be repeated"),
}
SHORTEST_S = 240  # the shortest job, of which a quarter is for saving


@dataclass(frozen=True)
class Request:
    """A job on `nodes` nodes with `gpus_per_node` processes each, one per GPU."""

    nodes: int
    gpus_per_node: int
    to: str = "slurm"  # the scheduler, one of SCHEDULERS
    # whether SLURM starts a task per GPU (srun) instead of one per node (torchrun)
    per_gpu: bool = False
    # the GPUs' name here, in SLURM with their number (`gpu:h100:8`); None: the scheduler's own
    gres: str | None = None
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    job_name: str | None = None
    # the file to source for the environment; None: what the job finds on PATH
    activate: str | None = None
    variables: tuple[tuple[str, str], ...] = ()  # (name, value), to be exported
    spare_nodes: int = 0  # how many of the nodes are kept to replace lost ones
    # variables of SLURM's scripts: CONTAINER_IMAGE, ...
    container: Mapping[str, str] = field(default_factory=dict)
    # Kubernetes and SkyPilot: the image, and what is mounted: (volume or URL, folder)
    image: str | None = None
    mounts: tuple[tuple[str, str], ...] = ()
    srun: tuple[tuple[str, str], ...] = ()  # further options (name, value); an empty value: a flag
    sbatch: tuple[tuple[str, str], ...] = ()


def add_options(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("the job")
    job.add_argument(
        "--to", metavar="SCHEDULER", help="slurm, k8s (Kubernetes with JobSet) or sky (SkyPilot)"
    )
    job.add_argument("--slurm", action="store_true", help="the same as --to slurm")
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
    to = _scheduler(arguments)
    gpus = _needed_count("--gpus-per-node", arguments.gpus_per_node, "the GPUs of each node")
    nodes = _needed_count("--nodes", arguments.nodes, "the number of nodes")
    spare = _count("--spare-nodes", arguments.spare_nodes) or 0
    if spare >= nodes:
        raise InputError(
            f"--spare-nodes {spare} of --nodes {nodes} leave none to train: ask for --nodes "
            f"{nodes + spare}"
        )
    common = Request(
        nodes=nodes,
        gpus_per_node=gpus,
        to=to,
        cpus_per_task=_count("--cpus-per-task", arguments.cpus_per_task),
        time=_time(arguments.time),
        partition=_name("--partition", arguments.partition),
        job_name=_name("--job-name", arguments.job_name),
        variables=tuple(map(_variable, arguments.env)),
    )
    if to != "slurm":
        return _elsewhere(arguments, common)
    return replace(
        common,
        per_gpu="" in arguments.srun,
        gres=_gres(arguments.gres, gpus),
        account=_name("--account", arguments.account),
        activate=None if arguments.container_image else _activate(arguments.activate),
        spare_nodes=spare,
        container=_container(arguments),
        srun=tuple(_option("--srun", text) for text in arguments.srun if text),
        sbatch=tuple(_option("--sbatch", text) for text in arguments.sbatch),
    )


def _scheduler(arguments: argparse.Namespace) -> str:
    """Raises InputError: none is named, or one that is not known."""
    to = arguments.to
    if to is None and arguments.slurm:
        to = "slurm"
    if to not in SCHEDULERS or (arguments.slurm and to != "slurm"):
        raise InputError(
            f"say which scheduler: --to {any_of(SCHEDULERS)} (for nodes without a scheduler run "
            "torchrun on each)"
        )
    return to


def _elsewhere(arguments: argparse.Namespace, common: Request) -> Request:
    """The request of a job for Kubernetes or SkyPilot."""
    for option in OF_SLURM:
        if getattr(arguments, option):
            raise InputError(
                f"--{option.replace('_', '-')} is an option of SLURM alone, and the job is for "
                f"{common.to}: leave it out"
            )
    if common.to == "k8s" and not arguments.container_image:
        raise InputError(
            "--container-image is missing: pods run in an image with meshtrain, such as that of "
            "tools/docker"
        )
    if common.to == "sky" and not arguments.gres:
        raise InputError("--gres is missing: SkyPilot looks for GPUs by their name, --gres H100")
    gres = _name("--gres", arguments.gres)
    mounts: tuple[tuple[str, str], ...] = ()
    if arguments.container_mounts:
        mounts = tuple(map(_volume, arguments.container_mounts.split(",")))
    image = _name("--container-image", arguments.container_image)
    return replace(common, gres=gres, image=image, mounts=mounts)


def _volume(text: str) -> tuple[str, str]:
    """`claim:/data` or `s3://bucket/prefix:/data`."""
    source, _, inside = text.rpartition(":")
    folder = inside.rstrip("/")
    if not NAME.fullmatch(source) or not folder.startswith("/"):
        raise InputError(
            f"--container-mounts {text}: expected VOLUME:/FOLDER, such as checkpoints:/workspace"
        )
    return source, folder


def _count(option: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,6}", value, re.ASCII):
        raise InputError(f"{option} {value}: expected a number of at least 1")
    return int(value)


def _needed_count(option: str, value: str | None, about: str) -> int:
    count = _count(option, value)
    if count is None:
        raise InputError(f"{option} is missing: {about}, for instance --nodes 4 --gpus-per-node 8")
    return count


def _gres(value: str | None, gpus: int) -> str | None:
    """Appends the number of GPUs, which SLURM's --gres needs, to `gpu` or `gpu:h100`, if it is not
    there yet."""
    if value is None:
        return None
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
            "seconds), 2-12:00:00 (with days) or 240 (minutes)"
        )
    if seconds(value) < SHORTEST_S:
        raise InputError(
            f"--time {value} is {seconds(value)} seconds, which are over before a job has started "
            f"and saved: give at least {SHORTEST_S // 60} minutes"
        )
    return value


def seconds(time: str) -> int:
    """A time limit in seconds, parsed like SLURM: minutes, minutes:seconds, hours:minutes:seconds,
    days-hours[:...]."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # Behind days, or with three parts, the first one counts hours; otherwise it counts minutes.
    if not dash and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, secs = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


def _name(option: str, value: str | None) -> str | None:
    if value is not None and not NAME.fullmatch(value):
        raise InputError(
            f"{option} {value!r}: expected a name of letters, digits and - _ . , without spaces"
        )
    return value


def _activate(value: str | None) -> str | None:
    if value is None:  # the environment in which this command runs, if it is a virtual one
        own = Path(sys.prefix) / "bin" / "activate"
        virtual = sys.prefix != sys.base_prefix and own.is_file()
        return str(own) if virtual else None
    script = Path(value).expanduser().absolute()
    if script.is_dir():
        script = script / "bin" / "activate"
    if not script.is_file():
        raise InputError(
            f"--activate {value}: there is no {script}; name a virtual environment (a folder with "
            "bin/activate) or a file that is to be sourced, for instance one with `module load` or "
            "`conda activate` in it"
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
    # A runtime takes any other form for a name in a registry.
    if image.startswith(("/", ".", "~")) or image.endswith((".sif", ".sqsh")):
        file = Path(image).expanduser().absolute()
        if not file.exists():
            raise InputError(f"--container-image {image}: there is no such file")
        image = str(file)
    variables = {"CONTAINER_IMAGE": image}
    if mounts:
        variables["CONTAINER_MOUNTS"] = ",".join(map(_mount, mounts.split(",")))
    if arguments.container_runtime:
        variables["CONTAINER_RUNTIME"] = arguments.container_runtime
    return variables


def _mount(text: str) -> str:
    """`data:/data`, with the host's folder as an absolute path."""
    outside, colon, inside = text.partition(":")
    folder = Path(outside).expanduser().absolute()
    if not folder.is_dir():
        raise InputError(f"--container-mounts {text}: there is no folder {outside} on this host")
    return f"{folder}{colon}{inside}"


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
