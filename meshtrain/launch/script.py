"""The script of a job: a script of tools/slurm, filled in with what the job requests."""

import re
import shlex
from collections.abc import Mapping, Sequence

from meshtrain.launch.request import Request, seconds

DIRECTIVE = re.compile(r"(#?)#SBATCH\s+--([a-z-]+)(?:[=\s]|$)")  # with `##` it is commented out
CPUS_PER_GPU = 8  # unless --cpus-per-task says how many
LEAD_S = 600  # how long before its end a job is told to save, in the scripts of tools/slurm


def render(template: str, directives: Mapping[str, str | None], block: Sequence[str]) -> str:
    """The text of a script in tools/slurm with a `block` of shell lines after its directives, and
    with `directives` (option of sbatch, without dashes -> value) in place of the template's lines
    for them, or else after the last one; None removes the line. Of the comment at its top the first
    paragraph stays: the others say how to submit the template itself. Raises ValueError: the
    template has no directives, or sbatch could not read a value."""
    lines = _without_usage(template.splitlines())
    places = [place for place, line in enumerate(lines) if DIRECTIVE.match(line)]
    if not places:
        raise ValueError("a template of sbatch has #SBATCH lines")
    # sbatch reads directives up to the first command only: what is added stands behind the last
    # one of the template.
    end = places[-1] + 1
    remaining = {option: value for option, value in directives.items() if value is not None}
    head: list[str] = []
    for line in lines[:end]:
        match = DIRECTIVE.match(line)
        option = match[2] if match else ""
        if option in remaining:
            head.append(_directive(option, remaining.pop(option)))
            continue
        commented_out = match is not None and match[1]
        if match is None or commented_out or option not in directives:
            head.append(line)
    for option, value in remaining.items():
        head.append(_directive(option, value))
    return "\n".join([*head, "", *block, *lines[end:]]) + "\n"


def _without_usage(lines: Sequence[str]) -> list[str]:
    """A script without the paragraphs behind the first one of the comment at its top."""
    end = lines.index("") if "" in lines else len(lines)
    header = [*lines[:end]]
    if "#" in header:
        header = header[: header.index("#")]
    return [*header, *lines[end:]]


def _directive(option: str, value: str) -> str:
    if re.search(r"[\"\\\n\r]", value):
        raise ValueError(
            f"sbatch cannot read a value with quotes, backslashes or line breaks: --{option} "
            f"{value!r}"
        )
    if not value:
        return f"#SBATCH --{option}"
    if re.search(r"[\s#']", value):
        value = f'"{value}"'
    return f"#SBATCH --{option}={value}"


def block(
    arguments: Sequence[str], variables: Mapping[str, str], remarks: Sequence[str]
) -> list[str]:
    """The lines of a job's script before the template's own commands."""
    lines = [f"# {' '.join(remark.split())}" for remark in remarks]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines.append(f"set -- {shlex.join(arguments)}")
    return lines


def lead_s(time: str | None) -> int:
    """How long before its limit a job is told to save: the scripts' own time, or for a short job a
    quarter of it."""
    return LEAD_S if time is None else min(LEAD_S, seconds(time) // 4)


def directives_of(request: Request, default_name: str) -> dict[str, str | None]:
    """Options of sbatch -> values; None for one that the script must not have."""
    gpus = request.gpus_per_node
    tasks = gpus if request.per_gpu else 1
    directives: dict[str, str | None] = {
        "job-name": request.job_name or re.sub(r"[^\w.-]", "-", default_name),
        "nodes": str(request.nodes),
        "ntasks-per-node": str(tasks),
        "gpus-per-node": None if request.gres else str(gpus),
        "cpus-per-task": str(request.cpus_per_task or CPUS_PER_GPU * gpus // tasks),
    }
    optional = {
        "gres": request.gres,
        "time": request.time,
        "partition": request.partition,
        "account": request.account,
    }
    directives |= {option: value for option, value in optional.items() if value is not None}
    if lead_s(request.time) < LEAD_S:
        directives["signal"] = f"USR1@{lead_s(request.time)}"
    if request.spare_nodes:
        directives["no-kill"] = ""  # SLURM ends a job that has lost a node otherwise
    return {**directives, **dict(request.sbatch)}


def variables_of(request: Request) -> dict[str, str]:
    """The variables that the script reads, and those that the user wants exported, which come
    last."""
    variables = {"ACTIVATE": request.activate or ""}
    if not request.per_gpu:
        variables["PROCESSES_PER_NODE"] = str(request.gpus_per_node)
    if lead_s(request.time) < LEAD_S:
        variables["SAVE_SECONDS"] = str(lead_s(request.time))
    if request.spare_nodes:
        variables["SPARE_NODES"] = str(request.spare_nodes)
    if request.srun:
        options = [f"--{name}={value}" if value else f"--{name}" for name, value in request.srun]
        variables["SRUN_ARGS"] = shlex.join(options)
    return {**variables, **request.container, **dict(request.variables)}
