"""`meshtrain data verify`: whether token files are as they were written, and hold only ids of the
vocabulary.

    meshtrain data verify my_run.yaml  # what `meshtrain prepare` or a run has made for this config
    meshtrain data verify data/tokens
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from meshtrain.config import Config
from meshtrain.data.prepare import TEXT, preparations
from meshtrain.data.remote import is_remote
from meshtrain.data.tokens import verify
from meshtrain.errors import InputError, plural

HAS_ACTIONS = True  # each has arguments of its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "verify", help="read every byte: exit status 0 if all is intact, 1 if not"
    )
    check.add_argument("path", metavar="CONFIG|FOLDER", help="a config, or a folder of token files")
    check.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="override keys of the config"
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status. Raises InputError: there is nothing to verify."""
    status = 0
    for folder, n_outputs in _folders(arguments):
        problems, has_checksums = verify(folder, n_outputs)
        if problems:
            state = plural(len(problems), "problem")
            status = 1
        elif has_checksums:
            state = "intact"
        else:
            state = "no checksums, an older meshtrain has written it; sizes and ids are right"
        print(f"{folder}: {state}", flush=True)
        for problem in problems:
            print(f"  {problem}")
    return status


def _folders(arguments: argparse.Namespace) -> Iterator[tuple[Path, int | None]]:
    """Each folder of token files, with the size of the model's vocabulary if known."""
    if Path(arguments.path).is_dir():
        yield Path(arguments.path), None
        return
    config = Config.load(arguments.path, arguments.overrides)
    n_outputs = config.model.keys.get("vocab_size")
    paths: list[Path] = []
    for own in config.data.each_source():
        if own.source == "tokens":
            given = (own.path, own.validation)  # a share of the documents is no path
            for path in given:
                if isinstance(path, str) and is_remote(path):
                    raise InputError(
                        f"{path} is in object storage: verify the folder from which it was uploaded"
                    )
                if isinstance(path, str):
                    paths.append(Path(path).expanduser())
        elif config.data.sources and own.source not in TEXT:
            print(
                f"{own.path}: left out, as {own.source} is read as it is and has no checksums",
                flush=True,
            )
        else:
            paths += [preparation.folder for preparation in preparations(own)]
    if not paths:
        raise InputError(
            f"{arguments.path} has no source of which token files are made: there is nothing to "
            "verify"
        )
    for folder in paths:
        if not folder.is_dir():
            raise InputError(
                f"there is no folder {folder} yet: `meshtrain prepare {arguments.path}` makes it"
            )
        yield folder, n_outputs
