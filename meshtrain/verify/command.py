"""`meshtrain verify`: trains a config, or a script, on one process and on each layout, and compares
them step by step."""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtrain.errors import INPUT_STATUS, AgreedError, InputError, writing
from meshtrain.layout import LayoutError

if TYPE_CHECKING:
    from meshtrain.verify.session import Outcome, Sizes, Subject, Verification

STEPS = 20
RANKS = 2
PRECISIONS = ("float64", "float32", "bfloat16")


class _Layouts(argparse.Action):
    """Takes every following argument that begins with `{`; others are for `words`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        given = [value for value in values if value.startswith("{")]
        if not given:
            parser.error("--layouts takes layouts, such as '{tp: 2}' '{pp: 2, dp_shard: 2}'")
        others = [value for value in values if not value.startswith("{")]
        namespace.layouts = [*(namespace.layouts or []), *given]
        namespace.after = [*namespace.after, *others]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "meshtrain verify CONFIG [KEY=VALUE ...] [--layouts LAYOUT ...] [options]"
    parser.set_defaults(after=[])
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG",
        help="a YAML file or the name of a built-in config, and overrides; or a script of "
        "meshtrain.Run and its arguments",
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        action=_Layouts,
        metavar="LAYOUT",
        help="layouts to compare with one process: '{tp: 2}' '{pp: 2, dp_shard: 2}'",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=f"without --layouts: every axis and every two axes on N ranks ({RANKS})",
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of a run ({STEPS})")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float64",
        help="of the runs (float64, where nothing hides behind rounding)",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the model in its small copy: num_hidden_layers=3; several times for several",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--html", metavar="PATH", help="write the report as a page")
    parser.add_argument(
        "--folder",
        metavar="PATH",
        help="keep what the runs record here, in a folder that all hosts of a job see; without it "
        "it goes to a temporary one",
    )


def run(arguments: argparse.Namespace) -> int:
    # these bring torch
    from meshtrain.job.exit import job_exit
    from meshtrain.verify.ranks import ENDING, ForkedRanks, RanksOfJob, follow, job_of_launcher

    try:
        subject, layouts = _read(arguments)
    except InputError:
        if os.environ.get("RANK", "0") != "0":
            return INPUT_STATUS  # rank 0 of the job says it for all
        raise
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            # so that it ends its ranks, and removes what they have recorded
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    job = job_of_launcher()
    if job is None:
        return _verify(arguments, subject, layouts, ForkedRanks())
    # Whoever serves the job's store leaves last.
    with job_exit(job):
        if job.rank > 0:
            follow(job)
            return 0
        ranks = RanksOfJob(job)
        try:
            status = _verify(arguments, subject, layouts, ranks)
        except (InputError, LayoutError) as error:
            ranks.end(str(error))
            raise AgreedError(str(error)) from error
        ranks.end()
        return status


def _read(arguments: argparse.Namespace) -> "tuple[Subject, Sequence[Sizes]]":
    """What is verified, and on which layouts. Raises InputError."""
    from meshtrain.verify.covering import covering_layouts
    from meshtrain.verify.session import Subject, read_layouts

    words = [*arguments.words, *arguments.after]
    targets = [word for word in words if "=" not in word]
    if not targets:
        raise InputError(
            "meshtrain verify takes a config, or a script: meshtrain verify quickstart"
        )
    target = targets[0]
    words.remove(target)
    if len(targets) > 1 and not target.endswith(".py"):
        raise InputError(
            f"{targets[1]} is no override, which has a form like train.seed=1 (the config is "
            f"{target})"
        )
    if arguments.steps < 1:
        raise InputError(f"--steps is {arguments.steps}: expected at least 1")
    if arguments.layouts and arguments.ranks is not None:
        raise InputError("--ranks chooses layouts, and --layouts gives them: take one of them away")
    if target.endswith(".py") and arguments.model:
        raise InputError("--model is for the model of a config: that of a script is in the script")
    if target.endswith(".py") and not Path(target).is_file():
        raise InputError(f"there is no script {target}")
    if arguments.html is not None and not _can_be_written(Path(arguments.html)):
        raise InputError(f"--html {arguments.html}: expected a file in a folder that is there")
    layouts = read_layouts(arguments.layouts or [])
    if not layouts:
        ranks = RANKS if arguments.ranks is None else arguments.ranks
        if ranks < 2:
            raise InputError(f"--ranks is {ranks}: a layout has at least 2")
        layouts = covering_layouts(ranks)
    subject = Subject(target, words, arguments.model, arguments.steps, arguments.precision)
    return subject, layouts


def _can_be_written(file: Path) -> bool:
    """Whether a file can be written, as far as its folder tells before all runs."""
    return file.parent.is_dir() and not file.is_dir() and os.access(file.parent, os.W_OK)


def _verify(
    arguments: argparse.Namespace, subject: "Subject", layouts: "Sequence[Sizes]", ranks: Any
) -> int:
    import torch

    from meshtrain.verify.report import name_of, where
    from meshtrain.verify.session import Verification

    # Threads of torch would be missing in the processes that are forked from this one.
    torch.set_num_threads(1)
    with _folder(arguments.folder) as folder:
        verification = Verification(
            subject=subject,
            ranks=ranks,
            folder=folder,
            layouts=layouts,
            say=lambda text: print(text, file=sys.stderr, flush=True),
            keeps=arguments.folder is not None,
        )
        verification.begin()
        outcomes = []
        for sizes in layouts:
            outcome = verification.verify(sizes)
            outcomes.append(outcome)
            about = where(outcome)
            line = f"{name_of(sizes)}: {outcome.status}{': ' + about if about else ''}"
            print(line, file=sys.stderr, flush=True)
    return _report(arguments, verification, outcomes)


def _report(
    arguments: argparse.Namespace, verification: "Verification", outcomes: "Sequence[Outcome]"
) -> int:
    from rich.console import Console

    from meshtrain.verify.page import page
    from meshtrain.verify.report import as_json, print_table, status_of

    reference = verification.reference()
    if arguments.json:
        print(json.dumps(as_json(reference, outcomes)))
    else:
        print_table(Console(highlight=False), outcomes)
    if arguments.html:
        command = shlex.join(["meshtrain", "verify", *sys.argv[2:]])
        with writing(arguments.html):
            Path(arguments.html).write_text(page(reference, outcomes, command), encoding="utf-8")
        print(f"the report is in {arguments.html}", file=sys.stderr)
    return status_of(outcomes)


@contextmanager
def _folder(given: str | None) -> Iterator[Path]:
    """For what the runs record."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="meshtrain_verify") as folder:
            yield Path(folder)
        return
    kept = Path(given).expanduser()
    with writing(given):
        kept.mkdir(parents=True, exist_ok=True)
        is_empty = not any(kept.iterdir())
    if not is_empty:
        raise InputError(f"--folder {given} is not empty: name a new one, or remove it")
    yield kept.resolve()
