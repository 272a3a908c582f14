"""`meshtrain launch CONFIG --slurm --nodes 4 --gpus-per-node 8 [--dry-run]`: a checked script, handed to sbatch.

The script is one of tools/slurm with this job's values, in the run's folder. With --dry-run it is written and printed,
not submitted. Exit status 1: sbatch has refused it; 2: config, layout or options are wrong. See docs/multi-node.md.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.config import locate
from meshtrain.errors import InputError
from meshtrain.launch.checks import ConfigOnNodes, fit_on_nodes
from meshtrain.launch.request import Request, add_options, read_request
from meshtrain.launch.script import block, directives_of, render, variables_of

SCRIPT = "launch.sbatch"  # in the run's folder
TEMPLATES = "tools/slurm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, or the name of one of meshtrain's own")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="as for training: layout.tp=2")
    parser.add_argument("--dry-run", action="store_true", help="write and print the script, and do not submit it")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    request = read_request(arguments)
    if not arguments.dry_run and shutil.which("sbatch") is None:
        raise InputError(
            "there is no sbatch on this host: run this where jobs are submitted, or with --dry-run to see the script"
        )
    plan = fit_on_nodes(arguments.config, arguments.overrides, request)
    words = [arguments.config, *arguments.overrides]
    script = script_of(words, request, plan)
    path = _write_script(Path(plan.config.train.output).expanduser(), script)
    lines = [*plan.about, *(f"note: {note}" for note in plan.notes)]
    if arguments.dry_run:
        print(script, end="")
        print(*lines, f"written to {path}, not submitted: sbatch {shlex.quote(str(path))}", sep="\n", file=sys.stderr)
        return 0
    print(*lines, sep="\n")
    return _submit(path)


def script_of(words: Sequence[str], request: Request, plan: ConfigOnNodes) -> str:
    """The script of a job; `words`: its config and overrides. Raises InputError: sbatch could not read a path."""
    template = locate.bundled(TEMPLATES) / ("train-srun.sbatch" if request.per_gpu else "train.sbatch")
    folder = Path.cwd()
    output = folder / Path(plan.config.train.output).expanduser() / "logs" / "slurm-%j.out"
    directives = directives_of(request, default_name=plan.config.name) | {
        "chdir": str(folder),
        "output": str(output.parent).replace("%", "%%") + f"/{output.name}",
    }
    remarks = [
        f"Written by meshtrain launch, out of {TEMPLATES}/{template.name}. {plan.about[0]}; {plan.about[1]}.",
        "The lines above, these, and their values are this job's; what follows is the same for all.",
    ]
    try:
        return render(template.read_text(), directives, block(words, variables_of(request), remarks))
    except ValueError as error:
        raise InputError(f"{error}: name a folder without them (train.output=FOLDER)") from error


def _write_script(folder: Path, script: str) -> Path:
    """Writes the script into the run's folder, and makes the folder of SLURM's own output, which a job needs."""
    path = folder / SCRIPT
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        path.write_text(script)
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}): name another folder with train.output") from error
    return path


def _submit(script: Path) -> int:
    """Hands the script to sbatch and says how to look after the job; 1 if sbatch refuses it."""
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        problem = done.stderr.strip() or f"exit status {done.returncode}"
        print(f"sbatch has refused {script}: {problem}", file=sys.stderr)
        return 1
    print(done.stderr, end="", file=sys.stderr)  # warnings
    job = done.stdout.strip().partition(";")[0]  # the cluster's name may stand behind it
    print(f"submitted {script} as job {job}")
    hints = {
        f"squeue --job={job}": "is it running, and if not, why",
        f"tail -F {shlex.quote(str(script.parent / 'logs' / f'slurm-{job}.out'))}": "what it says",
        f"scancel --signal=USR1 {job}": "save, and back into the queue",
        f"touch {shlex.quote(str(script.parent / 'STOP'))}": "save, and end",
        f"scancel {job}": "end",
    }
    width = max(map(len, hints))
    print(*(f"  {command.ljust(width)}  {use}" for command, use in hints.items()), sep="\n")
    return 0
