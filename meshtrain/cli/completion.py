"""`meshtrain completion bash|zsh|tcsh`: prints a script with which a shell completes commands and
options."""

import argparse
import importlib

from meshtrain.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")


def run(arguments: argparse.Namespace) -> None:
    from meshtrain.cli.main import COMMANDS  # which imports this module

    try:
        import shtab
    except ImportError:
        raise InputError("completion needs shtab: pip install 'meshtrain[completion]'") from None
    parser = argparse.ArgumentParser(prog="meshtrain")
    commands = parser.add_subparsers()
    for name, (module, about, _) in COMMANDS.items():
        importlib.import_module(module).add_arguments(commands.add_parser(name, help=about))
    print(shtab.complete(parser, arguments.shell))
