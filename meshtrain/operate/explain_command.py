"""`meshtrain explain LOG... [--json]`: why a job has failed, by its logs, and what to do.

    meshtrain explain slurm-4211.out
    meshtrain explain runs/llama

Exit status 0: no failure found; 1: found; 2: there is no such log. docs/failures.md tells more.
"""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence

from meshtrain.operate.explain import Cause, explain, names

WIDEST = 110  # columns
NARROWEST = 40
NOTHING = "no failure found"
SILENT_END = (
    "If the job did end too early, it was killed without a word: look at its exit status (137 is SIGKILL, 138 SIGUSR1, "
    "143 SIGTERM), at what the scheduler says (sacct -j JOB, kubectl describe pod) and at dmesg of its hosts."
)
ROOTLESS = "only what followed a failure; its root is not in these logs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", nargs="+", metavar="LOG", help="logs of the job (gz, too), a run's folder, or -")
    parser.add_argument("--json", action="store_true", help="print the causes as a JSON list, most likely first")


def run(arguments: argparse.Namespace) -> int:
    causes = explain(arguments.logs)
    if arguments.json:
        print(json.dumps([one.to_json() for one in causes], indent=1))
    else:
        text = explanation(causes, min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST))
        encoding = sys.stdout.encoding or "utf-8"  # which may lack what a log has
        print(text.encode(encoding, "replace").decode(encoding), end="")
    return 1 if causes else 0


def explanation(causes: Sequence[Cause], width: int = WIDEST) -> str:
    """The causes for a person: what has begun it with its lines and its fix, and in short what followed from that."""
    if not causes:
        return "\n".join([NOTHING, *textwrap.wrap(SILENT_END, width)]) + "\n"
    told = [one for one in causes if one.role != "consequence"] or [causes[0]]
    lines = [line for place, one in enumerate(told, 1) for line in [*_block(place, one, width), ""]]
    followed = [one for one in causes if one not in told]
    if followed:
        lines.append("What followed from it:")
        lines += [line for one in followed for line in _in_short(one, width)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _block(place: int, one: Cause, width: int) -> list[str]:
    lines = [f"{place}. {one.id} ({ROOTLESS if one.role == 'consequence' else one.role})"]
    lines += _paragraph("cause", one.cause, width)
    for evidence in one.found.evidence:
        by = f" ({evidence.rank})" if evidence.rank else ""
        lines += _paragraph("seen", f"{evidence.file}:{evidence.line}{by}: {evidence.text}", width)
    if one.found.count > len(one.found.evidence):
        of = f", of {names(list(one.found.ranks))}" if one.found.ranks else ""
        lines += _paragraph("", f"... {one.found.count} lines in all{of}", width)
    lines += _paragraph("fix", one.fix, width)
    return lines + [line for option in one.options for line in _paragraph("", f"- {option}", width)]


def _in_short(one: Cause, width: int) -> list[str]:
    first = one.found.evidence[0]
    of = f" of {names(list(one.found.ranks))}" if one.found.ranks else ""
    return _paragraph("", f"- {one.id}{of}: {first.file}:{first.line}: {first.text[:120]}", width)


def _paragraph(title: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, NARROWEST),
        initial_indent=f"   {title.ljust(6)} ",
        subsequent_indent=" " * 10,
        break_long_words=False,
        break_on_hyphens=False,
    )
