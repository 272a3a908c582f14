"""`meshtrain launch CONFIG --to slurm|k8s|sky --nodes 4 --gpus-per-node 8 [--dry-run]`: submits a
checked job to SLURM, Kubernetes or SkyPilot.

The job is a script of tools/slurm, or the manifest of tools/k8s or tools/sky, with this job's
values. With --dry-run it is written and printed, not submitted. Exit status 1: the scheduler has
refused it; 2: config, layout or options are wrong. See docs/clusters.md.
"""

import argparse
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from meshtrain.config import Config
from meshtrain.config.layout_advice import host_warnings, resolve
from meshtrain.config.yaml_reader import parse_yaml
from meshtrain.data.order import describe_ramp
from meshtrain.doctor.files import filesystem, named_paths
from meshtrain.errors import InputError, plural
from meshtrain.job import locate
from meshtrain.launch.manifest import (
    jobset,
    name_of_job,
    sky_task,
    text_of,
    with_time_limit,
)
from meshtrain.launch.request import Request, add_options, read_request
from meshtrain.launch.script import block, directives_of, render, variables_of
from meshtrain.layout import DATA_AXES, Layout, LayoutError

SCRIPT = "launch.sbatch"  # in the run's folder
TEMPLATES = "tools/slurm"
MANIFESTS = {"k8s": "tools/k8s/jobset.yaml", "sky": "tools/sky/train.yaml"}
# scheduler -> the command that submits a file
SUBMIT = {
    "slurm": ("sbatch",),
    "k8s": ("kubectl", "apply", "--filename"),
    "sky": ("sky", "jobs", "launch", "--yes", "--detach-run"),
}
IN_MEMORY = ("tmpfs", "ramfs")  # each host has its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="?", help="a YAML file, or the name of a built-in config (required)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="override a key: layout.tp=2"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="write and print the job without submitting it"
    )
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    words = _config_and_overrides(arguments)
    request = read_request(arguments)
    is_slurm = request.to == "slurm"
    submit = SUBMIT[request.to]
    if not arguments.dry_run and shutil.which(submit[0]) is None:
        raise InputError(
            f"there is no {submit[0]} on this host: run this where jobs are submitted, or with "
            "--dry-run to see the job"
        )
    if not is_slurm:
        words = with_time_limit(words, request)
    plan = fit_on_nodes(words[0], words[1:], request)
    if is_slurm:
        text = script_of(words, request, plan)
        path = _write_script(Path(plan.config.train.output).expanduser(), text)
    else:
        text = manifest_of(words, request, plan)
        path = _write_manifest(Path(f"launch-{name_of_job(request, plan.config.name)}.yaml"), text)
    about = "\n".join([*plan.about, *(f"note: {note}" for note in plan.notes)])
    if arguments.dry_run:
        # The job alone goes to standard output, so that it can be piped.
        print(text, end="")
        print(about, file=sys.stderr)
        command = shlex.join([*submit, str(path)])
        print(f"written to {path}, not submitted: {command}", file=sys.stderr)
        return 0
    print(about)
    if is_slurm:
        return _submit_script(path)
    return _submit_manifest(path, request, name_of_job(request, plan.config.name))


def _config_and_overrides(arguments: argparse.Namespace) -> list[str]:
    """The config and the overrides. --srun, whose value is optional, may have taken one of them: a
    value that is no option of srun is put back. Raises InputError: there is no config."""
    sections = {section.name for section in fields(Config)}
    taken = []
    for place, text in enumerate(arguments.srun):
        name, equals, _ = text.partition("=")
        is_override = bool(equals) and ("." in name or name in sections)
        is_config = bool(text) and not equals
        if is_override or is_config:
            taken.append(text)
            arguments.srun[place] = ""
    words = [word for word in (*taken, arguments.config, *arguments.overrides) if word]
    words.sort(key=lambda word: "=" in word)  # the config first
    if not words or "=" in words[0]:
        raise InputError(
            "no config was named: meshtrain launch CONFIG --to slurm --nodes 4 --gpus-per-node 8"
        )
    return words


@dataclass(frozen=True)
class ConfigOnNodes:
    """A config that fits its nodes: `layout` is placed on them; `notes` are possible but not
    certain problems."""

    config: Config
    layout: Layout
    notes: tuple[str, ...] = ()

    @property
    def about(self) -> list[str]:
        """Lines that describe the job."""
        nodes = len(self.layout.hosts)
        machine = f"{plural(nodes, 'node')} x {plural(self.layout.world_size // nodes, 'GPU')}"
        batch = self.config.batch
        return [
            f"{self.config.name} on {machine}: layout {self.layout}",
            *describe_ramp(batch.sizes, batch.micro_size, self.layout.size(*DATA_AXES)),
        ]


def fit_on_nodes(name: str, overrides: Sequence[str], request: Request) -> ConfigOnNodes:
    """Loads a config and fits it to a request's nodes. Raises InputError or LayoutError: wrong, or
    does not fit."""
    nodes, gpus = request.nodes - request.spare_nodes, request.gpus_per_node
    # The nodes of SLURM see the files of this host, so a missing one is an error. Others need not.
    is_slurm = request.to == "slurm"
    config = Config.load(name, overrides, for_training=is_slurm)
    try:
        layout = resolve(config.layout, nodes * gpus)
    except LayoutError as error:
        raise InputError(f"{error}. {nodes_that_fit(config.layout, nodes, gpus)}") from error
    # Once more with the world's size, which resolves what was left open.
    config = Config.load(name, overrides, for_training=is_slurm, world_size=nodes * gpus)

    placed = layout.on_hosts([gpus] * nodes, [f"node {i}" for i in range(nodes)])
    # Only warnings for a running job; this one can still be requested differently.
    crossing = host_warnings(placed)
    if crossing:
        raise InputError(" ".join(crossing))
    if not is_slurm:
        _check_kept(config, request)
        return ConfigOnNodes(config, placed, tuple(_notes_elsewhere(config, request)))
    _check_writable(config)
    notes = _notes(config, request) if nodes > 1 else []
    return ConfigOnNodes(config, placed, tuple(notes))


def nodes_that_fit(sizes: Mapping[str, int], nodes: int, gpus: int) -> str:
    """A sentence with the numbers of nodes that a layout fits, nearest to the requested number."""
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        step = fixed // math.gcd(fixed, gpus)
        below = nodes // step * step
        counts = [str(count) for count in (below, below + step) if count]
        return f"With {gpus} GPUs per node: --nodes {' or --nodes '.join(counts)}"
    if fixed % gpus == 0:
        return f"With {gpus} GPUs per node: --nodes {fixed // gpus}"
    per_node = max(count for count in range(1, gpus + 1) if fixed % count == 0)
    return (
        f"{fixed} processes are no multiple of {gpus}: --nodes {fixed // per_node} --gpus-per-node "
        f"{per_node}"
    )


def _check_writable(config: Config) -> None:
    """Refuses folders that could not be created from here: otherwise that shows only once the job
    leaves the queue."""
    for entry in named_paths(config):
        if not entry.writes:
            continue
        ancestor = _nearest(Path(entry.path))
        if not ancestor.is_dir():
            problem = "is no folder"
        elif not os.access(ancestor, os.W_OK | os.X_OK):
            problem = "may not be written to by this user"
        else:
            continue
        raise InputError(
            f"{entry.key} is {entry.path}, and {ancestor} {problem}: name another with "
            f"{entry.key}=FOLDER"
        )


def _nearest(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _notes(config: Config, request: Request) -> list[str]:
    """Notes on paths that are probably local to each node."""
    paths = {entry.key: entry.path for entry in named_paths(config)}
    paths["the config"] = config.file
    if request.activate is not None:
        paths["the environment"] = request.activate
    notes = []
    for key, name in paths.items():
        path = Path(name).absolute()
        ancestor = _nearest(path)
        in_memory = filesystem(str(ancestor)) in IN_MEMORY
        if in_memory or ancestor.is_relative_to(tempfile.gettempdir()):
            notes.append(f"{key} is {path}, and of such a folder each node has its own, as a rule")
    return notes


def _check_kept(config: Config, request: Request) -> None:
    """Refuses a job whose checkpoints would be lost with their node, or be parts that no node sees
    together."""
    volume = "CLAIM" if request.to == "k8s" else "VOLUME"
    # Checkpoints are renamed when they are complete, which a mounted bucket (s3://...) cannot do.
    folders = [folder for source, folder in request.mounts if "://" not in source]
    path = Path(config.checkpoint.path or config.train.output)
    if any(path.is_relative_to(folder) for folder in folders):
        return
    if request.nodes == 1 and config.checkpoint.upload is not None:
        return
    raise InputError(
        f"checkpoints would be written to {path}, which is on no volume, and be lost with its "
        f"node: --container-mounts {volume}:/workspace train.output=/workspace/{config.name}, or "
        "for one node checkpoint.upload=s3://BUCKET/PREFIX"
    )


def _notes_elsewhere(config: Config, request: Request) -> list[str]:
    """A note on the files that a job for Kubernetes or SkyPilot reads, if there are any."""
    keys = sorted({entry.key for entry in named_paths(config) if not entry.writes})
    if not keys:
        return []
    where = "the image or a volume" if request.to == "k8s" else "this folder or a volume"
    return [f"the job reads files where it runs, so they have to be in {where}: {', '.join(keys)}"]


def manifest_of(words: Sequence[str], request: Request, plan: ConfigOnNodes) -> str:
    """The text of a job for Kubernetes or SkyPilot. `words`: its config and overrides. Raises
    InputError: SkyPilot would not bring the config to the nodes."""
    file = Path(MANIFESTS[request.to])
    template = parse_yaml((locate.bundled(str(file.parent)) / file.name).read_bytes())
    name = name_of_job(request, plan.config.name)
    # A config of meshtrain's own is wherever meshtrain is.
    config = locate.config_path(words[0]).resolve()
    is_own = config.parent == locate.bundled("configs").resolve()
    if request.to == "sky":
        if not is_own and not config.is_relative_to(Path.cwd()):
            raise InputError(
                f"{words[0]} is not below {Path.cwd()}, the folder that SkyPilot brings to the "
                f"nodes: cd {shlex.quote(str(config.parent))} first"
            )
        if not is_own:
            words = [str(config.relative_to(Path.cwd())), *words[1:]]
        manifests = [sky_task(template, request, words, name=name)]
    else:
        config_file = None
        if not is_own:
            config_file = (config.name, config.read_text(encoding="utf-8-sig"))
        manifests = jobset(
            template,
            request,
            words,
            name=name,
            output=plan.config.train.output,
            config_file=config_file,
        )
    return text_of(
        manifests, f"Written by meshtrain launch, out of {file}. {plan.about[0]}; {plan.about[1]}."
    )


def _write_manifest(path: Path, text: str) -> Path:
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(
            f"cannot write {path.absolute()} ({error.strerror}): run this in another folder"
        ) from error
    return path


def _submit_manifest(path: Path, request: Request, name: str) -> int:
    """Submits the job of this name and prints how to monitor it; returns 1 if it is refused."""
    submit = SUBMIT[request.to]
    done = subprocess.run([*submit, str(path)], check=False)
    if done.returncode != 0:
        print(f"{submit[0]} has refused {path}: exit status {done.returncode}", file=sys.stderr)
        return 1
    if request.to == "sky":
        hints = {
            "sky jobs queue": "is it running, and where",
            f"sky jobs logs --name {name}": "what it says",
            f"sky jobs cancel --name {name}": "end",
        }
    else:
        pods = f"-l jobset.sigs.k8s.io/jobset-name={name}"
        hints = {
            f"kubectl get jobset {name}": "how it goes",
            f"kubectl get pods {pods}": "is it running, and where",
            f"kubectl logs -f {pods} --prefix": "what it says",
            f"kubectl delete jobset {name}": "save, and end",
        }
    _print_hints(hints)
    return 0


def _print_hints(hints: Mapping[str, str]) -> None:
    width = max(map(len, hints))
    for command, use in hints.items():
        print(f"  {command.ljust(width)}  {use}")


def script_of(words: Sequence[str], request: Request, plan: ConfigOnNodes) -> str:
    """The script of a job. `words`: its config and overrides. Raises InputError: sbatch could not
    read a path."""
    name = "train-srun.sbatch" if request.per_gpu else "train.sbatch"
    template = locate.bundled(TEMPLATES) / name
    folder = Path.cwd()
    logs = folder / Path(plan.config.train.output).expanduser() / "logs"
    directives = directives_of(request, default_name=plan.config.name)
    directives["chdir"] = str(folder)
    # sbatch replaces %j by the job's number; other percent signs are doubled.
    directives["output"] = str(logs).replace("%", "%%") + "/slurm-%j.out"
    remarks = [
        f"Written by meshtrain launch, out of {TEMPLATES}/{name}. {plan.about[0]}; "
        f"{plan.about[1]}.",
        "The lines above, these, and their values are this job's; what follows is the same for "
        "all.",
    ]
    lines = block(words, variables_of(request), remarks)
    try:
        return render(template.read_text(), directives, lines)
    except ValueError as error:
        raise InputError(f"{error}: name a folder without them (train.output=FOLDER)") from error


def _write_script(folder: Path, script: str) -> Path:
    """Writes the script into the run's folder, and creates the folder of SLURM's output, which a
    job needs."""
    path = folder / SCRIPT
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        path.write_text(script)
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror}): name another folder with train.output"
        ) from error
    return path


def _submit_script(script: Path) -> int:
    """Submits the script with sbatch and prints how to monitor the job; returns 1 if sbatch refuses
    it."""
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        problem = done.stderr.strip() or f"exit status {done.returncode}"
        print(f"sbatch has refused {script}: {problem}", file=sys.stderr)
        return 1
    print(done.stderr, end="", file=sys.stderr)  # warnings
    job = done.stdout.strip().partition(";")[0]  # the cluster's name may follow it
    print(f"submitted {script} as job {job}")
    hints = {
        f"squeue --job={job}": "is it running, and if not, why",
        f"tail -F {shlex.quote(str(script.parent / 'logs' / f'slurm-{job}.out'))}": "what it says",
        f"scancel --signal=USR1 {job}": "save, and back into the queue",
        f"touch {shlex.quote(str(script.parent / 'STOP'))}": "save, and end",
        f"scancel {job}": "end",
    }
    _print_hints(hints)
    return 0
