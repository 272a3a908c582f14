"""The console script `meshtrain`: commands that look at a job from outside. Training is `python -m meshtrain.train`.

A command is a line in the table below and a module with `add_arguments(parser)` and `run(arguments)`, which may return
an exit status. It is imported when it is asked for, so that `meshtrain --help` answers at once.
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
from meshtrain.job.storage import show_any_text
from meshtrain.layout import LayoutError

# name -> (module, what it does, an example)
COMMANDS = {
    "new": (
        "meshtrain.cli.new",
        "a project to start from: model, data, config, job and test",
        "meshtrain new my_project",
    ),
    "plan": (
        "meshtrain.cli.plan",
        "what a config would do on given hosts, with nothing started",
        "meshtrain plan configs/quickstart.yaml --hosts 4,2",
    ),
    "search": (
        "meshtrain.cli.search",
        "the best layouts of a config on given hosts, with nothing started",
        "meshtrain search configs/quickstart.yaml --hosts 8x8 --gpu h100",
    ),
    "doctor": (
        "meshtrain.doctor.command",
        "what is wrong with these nodes, run on each in torchrun's place",
        "meshtrain doctor --nnodes 2 --nproc-per-node 8 --rdzv-endpoint node0:29400",
    ),
    "launch": (
        "meshtrain.launch.command",
        "a job for SLURM: checks its config, writes its script, submits it",
        "meshtrain launch configs/quickstart.yaml --slurm --nodes 4 --gpus-per-node 8",
    ),
    "prepare": (
        "meshtrain.cli.prepare",
        "tokenizes a config's text before its job, on hosts without GPUs",
        "meshtrain prepare configs/text.yaml --workers 8",
    ),
    "data": ("meshtrain.cli.data", "whether token files are what was written", "meshtrain data verify data/train"),
    "pipeline": (
        "meshtrain.cli.pipeline",
        "a pipeline schedule as a timeline: who computes what when",
        "meshtrain pipeline zbv --ranks 4 --microbatches 8",
    ),
    "checkpoint": (
        "meshtrain.cli.checkpoint",
        "lists, shows, verifies, compares and prunes checkpoints",
        "meshtrain checkpoint ls runs/quickstart",
    ),
    "watch": (
        "meshtrain.watch.command",
        "a page on which runs can be watched while they train",
        "meshtrain watch runs/quickstart",
    ),
    "explain": (
        "meshtrain.explain.command",
        "why a job has failed, by its logs, and what to do",
        "meshtrain explain job.log",
    ),
    "export": (
        "meshtrain.cli.export",
        "the weights of a checkpoint as a Hugging Face directory",
        "meshtrain export runs/quickstart exported",
    ),
    "eval": (
        "meshtrain.cli.eval",
        "scores of a checkpoint: lm-eval's tasks, perplexity of files",
        "meshtrain eval runs/quickstart --files README.md",
    ),
    "generate": (
        "meshtrain.cli.generate",
        "text that a checkpoint's model writes, on any layout",
        "meshtrain generate runs/quickstart --prompt 'import '",
    ),
    "info": ("meshtrain.cli.info", "versions, GPUs, NCCL, launcher and limits, for a bug report", "meshtrain info"),
    "completion": (
        "meshtrain.cli.completion",
        "a script by which a shell completes these commands",
        "meshtrain completion bash > ~/.meshtrain.bash",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: the command's own, as a rule 0; 2 the user's input is wrong."""
    argv = sys.argv[1:] if argv is None else argv
    show_any_text()
    atexit.register(gc.freeze)  # where torch was imported, Python would take a second to look through it at its end
    status = 0
    try:
        status = _run(argv)
        sys.stdout.flush()
    except (InputError, LayoutError, UnreadableError) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has seen enough (`meshtrain plan ... | head`). Python flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
    if getattr(module, "HAS_ACTIONS", False):  # parsers of their own, which take their arguments in order
        return module.run(parser.parse_args(rest))
    # Options may stand between the overrides, as people write them.
    return module.run(parser.parse_intermixed_args(rest)) or 0


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: meshtrain COMMAND ... | --version | --help",
            "",
            *(f"  {name.ljust(width)}  {about}" for name, (_, about, _) in COMMANDS.items()),
            "",
            "`meshtrain COMMAND --help` tells more, with an example.",
            "Training: python -m meshtrain.train CONFIG [key.path=value ...]",
        ]
    )


if __name__ == "__main__":  # else `python -m` of it would do nothing and end with status 0
    sys.exit(main())
