"""The console script `meshtrain`: commands that look at a job from outside. Training is `python -m
meshtrain.train`.

A command is a line in the table below and a module with `add_arguments(parser)` and
`run(arguments)`, which may return an exit status. The module is imported only when the command is
used, so that `meshtrain --help` answers at once.
"""

import argparse
import atexit
import difflib
import gc
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from meshtrain.errors import InputError, UnreadableError
from meshtrain.job.storage import DISK_ERRORS, show_any_text
from meshtrain.layout import LayoutError

OBJECTS_BETWEEN_COLLECTIONS = 200_000

# name -> (module, what it does, an example)
COMMANDS = {
    "new": (
        "meshtrain.cli.new",
        "create a project to start from: model, data, config, job and test",
        "meshtrain new my_project",
    ),
    "plan": (
        "meshtrain.cli.plan",
        "show what a config does on given hosts: groups, memory, time",
        "meshtrain plan configs/quickstart.yaml --hosts 4,2",
    ),
    "search": (
        "meshtrain.cli.search",
        "find the fastest layouts of a config that fit given hosts",
        "meshtrain search configs/quickstart.yaml --hosts 8x8 --gpu h100",
    ),
    "verify": (
        "meshtrain.verify.command",
        "train layouts and one process, and say where they differ",
        "meshtrain verify quickstart --layouts '{tp: 2}' '{pp: 2, dp_shard: 2}'",
    ),
    "doctor": (
        "meshtrain.doctor.command",
        "find faults of nodes and network; start it on each like torchrun",
        "meshtrain doctor --nnodes 2 --nproc-per-node 8 --rdzv-endpoint node0:29400",
    ),
    "launch": (
        "meshtrain.launch.command",
        "check a job, and submit it to SLURM, Kubernetes or SkyPilot",
        "meshtrain launch quickstart --to slurm --nodes 4 --gpus-per-node 8",
    ),
    "prepare": (
        "meshtrain.cli.prepare",
        "tokenize a config's text before its job, on hosts without GPUs",
        "meshtrain prepare configs/text.yaml --workers 8",
    ),
    "data": (
        "meshtrain.cli.data",
        "verify token files against their checksums",
        "meshtrain data verify data/train",
    ),
    "pipeline": (
        "meshtrain.cli.pipeline",
        "draw a pipeline schedule as a timeline",
        "meshtrain pipeline zbv --ranks 4 --microbatches 8",
    ),
    "checkpoint": (
        "meshtrain.cli.checkpoint",
        "list, show, verify, prune and import checkpoints",
        "meshtrain checkpoint ls runs/quickstart",
    ),
    "watch": (
        "meshtrain.watch.command",
        "serve a page on which to watch runs while they train",
        "meshtrain watch runs/quickstart",
    ),
    "explain": (
        "meshtrain.explain.command",
        "say why a job failed, from its logs, and what to do",
        "meshtrain explain job.log",
    ),
    "export": (
        "meshtrain.cli.export",
        "write the weights of a checkpoint as a Hugging Face directory",
        "meshtrain export runs/quickstart exported",
    ),
    "eval": (
        "meshtrain.cli.eval",
        "evaluate a checkpoint: lm-eval's tasks, perplexity of files",
        "meshtrain eval runs/quickstart --files README.md",
    ),
    "generate": (
        "meshtrain.cli.generate",
        "generate text with a checkpoint's model, on any layout",
        "meshtrain generate runs/quickstart --prompt 'import '",
    ),
    "docs": (
        "meshtrain.cli.docs",
        "open the documentation of this version in a browser, offline",
        "meshtrain docs layouts",
    ),
    "info": (
        "meshtrain.cli.info",
        "print versions, GPUs, NCCL and limits for a bug report",
        "meshtrain info",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: the command's own, usually 0; 2 if the user's
    input is wrong."""
    argv = sys.argv[1:] if argv is None else argv
    show_any_text()
    # Importing torch and tracing a model make millions of objects that stay. Python's garbage
    # collector, which would look through them after every 700 new ones, does so less often.
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    # if torch was imported, Python's last garbage collection would take a second
    atexit.register(gc.freeze)
    status = 0
    try:
        status = _run(argv)
        sys.stdout.flush()
    except (InputError, LayoutError, UnreadableError) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has seen enough (`meshtrain plan ... | head`). Python flushes stdout once more
        # at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno not in DISK_ERRORS or error.filename is None:
            raise
        # no wrong input: the same may work later
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if argv[0] == "--version":
        print(f"meshtrain {importlib.metadata.version('meshtrain')}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
        raise InputError(f"meshtrain has no command {name!r} ({hint})")

    module_name, about, example = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(
        prog=f"meshtrain {name}",
        description=about,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)

    if getattr(module, "HAS_ACTIONS", False):  # subparsers, which take their arguments in order
        return module.run(parser.parse_args(rest))
    # Options may stand between the overrides.
    return module.run(parser.parse_intermixed_args(rest)) or 0


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = [f"  {name.ljust(width)}  {about}" for name, (_, about, _) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: meshtrain COMMAND ... | --version | --help",
            "",
            *commands,
            "",
            "`meshtrain COMMAND --help` shows the options and an example.",
            "Training: python -m meshtrain.train CONFIG [key.path=value ...]",
        ]
    )


# otherwise `python -m meshtrain.cli.main` would do nothing and exit with status 0
if __name__ == "__main__":
    sys.exit(main())
