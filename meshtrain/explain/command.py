"""`meshtrain explain LOG... [--json]`: finds in its logs why a job has failed, and what to do.

    meshtrain explain slurm-4211.out
    meshtrain explain runs/llama

Exit status 0: no failure found; 1: found; 2: there is no such log. See docs/failures.md.
"""

import argparse
import json
import shutil
import textwrap
from collections.abc import Sequence

from meshtrain.explain.causes import Cause, explain, names

WIDEST = 110  # columns
NARROWEST = 40
NOTHING = "no failure found"
SILENT_END = (
    "If the job did end too early, it was killed without a word: look at its exit status (137 is "
    "SIGKILL, 138 SIGUSR1, 143 SIGTERM), at what the scheduler says (sacct -j JOB, kubectl "
    "describe pod) and at dmesg of its hosts."
)
ROOTLESS = "only what followed a failure; its root is not in these logs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs", nargs="+", metavar="LOG", help="logs (also .gz), a run's folder, or - for stdin"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the causes as a JSON list, most likely first"
    )


def run(arguments: argparse.Namespace) -> int:
    causes = explain(arguments.logs)
    if arguments.json:
        print(json.dumps([cause.to_json() for cause in causes], indent=1))
    else:
        columns = shutil.get_terminal_size((WIDEST, 24)).columns
        print(explanation(causes, min(columns, WIDEST)), end="")
    return 1 if causes else 0


def explanation(causes: Sequence[Cause], width: int = WIDEST) -> str:
    """The causes as text: roots with their lines and fixes, and briefly their consequences."""
    if not causes:
        return "\n".join([NOTHING, *textwrap.wrap(SILENT_END, width)]) + "\n"
    shown = [cause for cause in causes if cause.role != "consequence"] or [causes[0]]
    lines = []
    for number, cause in enumerate(shown, 1):
        lines += [*_block(number, cause, width), ""]
    followed = [cause for cause in causes if cause not in shown]
    if followed:
        lines.append("What followed from it:")
        for cause in followed:
            lines += _in_short(cause, width)
    return "\n".join(lines).rstrip("\n") + "\n"


def _block(number: int, cause: Cause, width: int) -> list[str]:
    matches = cause.matches
    role = ROOTLESS if cause.role == "consequence" else cause.role
    lines = [f"{number}. {cause.id} ({role})"]
    lines += _paragraph("cause", cause.cause, width)
    for evidence in matches.evidence:
        by = f" ({evidence.rank})" if evidence.rank else ""
        lines += _paragraph("seen", f"{evidence.file}:{evidence.line}{by}: {evidence.text}", width)
    if matches.count > len(matches.evidence):
        of = f", of {names(list(matches.ranks))}" if matches.ranks else ""
        lines += _paragraph("", f"... {matches.count} lines in all{of}", width)
    lines += _paragraph("fix", cause.fix, width)
    for option in cause.options:
        lines += _paragraph("", f"- {option}", width)
    return lines


def _in_short(cause: Cause, width: int) -> list[str]:
    first = cause.matches.evidence[0]
    ranks = list(cause.matches.ranks)
    of = f" of {names(ranks)}" if ranks else ""
    return _paragraph("", f"- {cause.id}{of}: {first.file}:{first.line}: {first.text[:120]}", width)


def _paragraph(title: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width=max(width, NARROWEST),
        initial_indent=f"   {title.ljust(6)} ",
        subsequent_indent=" " * 10,
        break_long_words=False,
        break_on_hyphens=False,
    )
