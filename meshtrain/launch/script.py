"""PURE: the text of one of tools/slurm with a job's own `#SBATCH` lines, variables and arguments in it."""

import re
import shlex
from collections.abc import Mapping, Sequence

from meshtrain.launch.request import Request, seconds

DIRECTIVE = re.compile(r"(#?)#SBATCH\s+--([a-z-]+)(?:[=\s]|$)")  # with two signs it is an offer, which does nothing
CPUS_PER_GPU = 8  # unless --cpus-per-task says how many
LEAD_S = 600  # before its end a job is told to save, in the scripts of tools/slurm


def render(template: str, directives: Mapping[str, str | None], block: Sequence[str]) -> str:
    """The script of a job.

    Args:
        template: the text of a script in tools/slurm.
        directives: option of sbatch, without dashes -> its value, in the place of the template's line for it, or else
            behind the last one. None takes the template's line away.
        block: lines of shell, for behind the last directive.

    Raises:
        ValueError: the template has no directives, or sbatch could not read a value.
    """
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
        raise ValueError(f"sbatch cannot read a value with quotes, backslashes or line breaks: --{option} {value!r}")
    return f'#SBATCH --{option}="{value}"' if re.search(r"[\s#']", value) else f"#SBATCH --{option}={value}"


def block(arguments: Sequence[str], variables: Sequence[tuple[str, str]], remarks: Sequence[str]) -> list[str]:
    """What a job's script says before the template's own lines."""
    return [
        *(f"# {' '.join(remark.split())}" for remark in remarks),
        *(f"export {name}={shlex.quote(value)}" for name, value in variables),
        f"set -- {shlex.join(arguments)}",
    ]


def lead_s(time: str | None) -> int:
    """How long before its limit a job is told to save: the scripts' own time, and a quarter of a short job's."""
    return LEAD_S if time is None else min(LEAD_S, seconds(time) // 4)


def directives_of(request: Request, default_name: str) -> dict[str, str | None]:
    """Options of sbatch -> values; None for one that the script must not have."""
    processes = request.gpus_per_node if request.per_gpu else 1
    cpus = request.cpus_per_task or CPUS_PER_GPU * request.gpus_per_node // processes
    directives: dict[str, str | None] = {
        "job-name": request.job_name or re.sub(r"[^\w.-]", "-", default_name),
        "nodes": str(request.nodes),
        "ntasks-per-node": str(processes),
        "gpus-per-node": None if request.gres else str(request.gpus_per_node),
        "cpus-per-task": str(cpus),
    }
    optional = {"gres": request.gres, "time": request.time, "partition": request.partition, "account": request.account}
    directives |= {option: value for option, value in optional.items() if value is not None}
    if lead_s(request.time) < LEAD_S:
        directives["signal"] = f"USR1@{lead_s(request.time)}"
    return directives


def variables_of(request: Request) -> tuple[tuple[str, str], ...]:
    """What the script reads from its environment, and what the user has asked for."""
    own = {"ACTIVATE": request.activate or ""}
    if not request.per_gpu:
        own["PROCESSES_PER_NODE"] = str(request.gpus_per_node)
    if lead_s(request.time) < LEAD_S:
        own["SAVE_SECONDS"] = str(lead_s(request.time))
    return (*own.items(), *request.variables)
