"""`meshtrain watch RUN [RUN ...] [--port 8000] [--host 127.0.0.1]`: serves one page about runs
until Ctrl-C."""

import argparse
from pathlib import Path

from meshtrain.errors import InputError, plural
from meshtrain.watch.run_files import RunFiles
from meshtrain.watch.server import PageServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", type=Path, help="folders of runs (train.output)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port (8000); 0: any free port")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to serve on (default: this host alone; 0.0.0.0: everyone in the network)",
    )


def run(arguments: argparse.Namespace) -> None:
    for folder in arguments.runs:
        if not folder.is_dir():
            raise InputError(
                f"{folder} is no folder: name what train.output was, for instance runs/quickstart"
            )
    names = [folder.resolve().name for folder in arguments.runs]
    runs = []
    for folder, name in zip(arguments.runs, names, strict=True):
        unique = names.count(name) == 1
        runs.append(RunFiles(folder, name if unique else str(folder)))
    try:
        server = PageServer((arguments.host, arguments.port), runs)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"cannot serve on {arguments.host}:{arguments.port} ({error}): name another with "
            "--port or --host"
        ) from error
    with server:
        print(f"{plural(len(runs), 'run')} on {server.url} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
