"""`meshtrain checkpoint`: lists, shows, verifies and prunes checkpoints, and imports those of
others.

    meshtrain checkpoint ls runs/x
    meshtrain checkpoint show runs/x                           # the newest, or a given one
    meshtrain checkpoint verify runs/x/checkpoints/step_0000100
    meshtrain checkpoint prune runs/x --keep-last 3 --keep-every 1000 --dry-run
    meshtrain checkpoint import outputs/step-100 runs/x --config x.yaml --as llama

A path names a checkpoint, a folder of checkpoints, or a run's folder. None of this needs torch,
but import.
"""

import argparse
import importlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from meshtrain.checkpoint import directory
from meshtrain.checkpoint.dcp.names import NAMINGS
from meshtrain.checkpoint.directory import CHECKPOINTS, require_checkpoint
from meshtrain.checkpoint.folder_lock import LOCK, lock_folder
from meshtrain.checkpoint.json_text import dumps, parse_json
from meshtrain.checkpoint.manifest import MANIFEST, Manifest
from meshtrain.checkpoint.retention import Retention, best_metric, steps_to_keep
from meshtrain.checkpoint.verify import verify
from meshtrain.errors import DamagedError, InputError, UnreadableError, bytes_text, plural
from meshtrain.run.rank_table import columns

MOST_LINES = 20
HAS_ACTIONS = True  # each has arguments of its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add = partial(actions.add_parser, allow_abbrev=False)
    a_path = "a checkpoint, a folder of checkpoints, or a run's folder"
    newest = f"{a_path}, for its newest checkpoint"

    ls = add("ls", help="list the checkpoints of a run")
    ls.add_argument("path", type=Path, help=a_path)

    show = add("show", help="show the contents of a checkpoint")
    show.add_argument("path", type=Path, help=newest)
    show.add_argument("--tensors", action="store_true", help="list every tensor")

    check = add("verify", help="read every byte: exit status 0 if all is intact, 1 if not")
    check.add_argument("path", type=Path, help=f"{a_path}, for all its checkpoints")

    prune = add(
        "prune", help="delete checkpoints that none of these rules keeps; the newest always stays"
    )
    prune.add_argument(
        "path", type=Path, metavar="folder", help="a folder of checkpoints, or a run's folder"
    )
    prune.add_argument("--keep-last", type=_positive, metavar="N", help="keep the newest N")
    prune.add_argument(
        "--keep-every", type=_positive, metavar="N", help="keep those whose step is a multiple of N"
    )
    prune.add_argument(
        "--keep-best", action="store_true", help="keep the one with the best evaluation"
    )
    prune.add_argument(
        "--set-aside",
        action="store_true",
        help="also delete checkpoints set aside (step_*.aside-*)",
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")

    from_dcp = add("import", help="make a checkpoint of one of torch.distributed.checkpoint")
    from_dcp.add_argument(
        "dcp_folder", type=Path, metavar="DCP_FOLDER", help="a folder with a file .metadata"
    )
    from_dcp.add_argument(
        "run_folder", type=Path, metavar="RUN_FOLDER", help="the folder of the run to go on with"
    )
    from_dcp.add_argument(
        "--config",
        nargs="+",
        required=True,
        metavar=("CONFIG", "KEY=VALUE"),
        help="the config of the run, and overrides of it",
    )
    add_names_option(from_dcp)
    from_dcp.add_argument(
        "--step",
        type=_step,
        metavar="N",
        help="the number of steps done (default: as the folder says)",
    )

    for action in (ls, show, check, prune):
        action.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_names_option(parser: argparse.ArgumentParser, when: str = "") -> None:
    """Adds `--as`: whose names the tensors of a DCP folder have. `when`: the option that it needs,
    for the help."""
    parser.add_argument(
        "--as",
        dest="names",
        choices=list(NAMINGS),
        help=f"{when}torchtitan's names of this model (default: the model's own names)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the action and returns the exit status. Raises InputError: a path is not a usable
    checkpoint."""
    actions = {
        "ls": _ls,
        "show": _show,
        "verify": _verify,
        "prune": _prune,
        "import": _import,
    }
    try:
        return actions[arguments.action](arguments)
    except PermissionError as error:
        raise InputError(f"{error.filename} may not be used: {error.strerror}") from error


def _import(arguments: argparse.Namespace) -> int:
    # The one action that needs torch.
    return importlib.import_module("meshtrain.cli.checkpoint_import").run(arguments)


def _ls(arguments: argparse.Namespace) -> int:
    checkpoints = [_about(path) for path in _checkpoints(arguments.path)]
    if arguments.json:
        print(dumps([asdict(about) for about in checkpoints]))
        return 0
    metric, _ = best_metric(about.evaluation or {} for about in checkpoints)
    table = [["checkpoint", "written", "size", "ranks", "layout", metric, ""]]
    table += [_row(about, metric) for about in checkpoints]
    print(*columns(table), sep="\n")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    checkpoint = require_checkpoint(arguments.path)
    manifest, digest = directory.open_manifest(checkpoint)
    if arguments.json:
        text = parse_json(manifest.to_json(), checkpoint / MANIFEST)
        print(dumps({"path": str(checkpoint), "manifest_sha256": digest} | text))
        return 0
    print(checkpoint)
    for name, value in _description(manifest):
        print(f"{name.ljust(12)}{value}")
    print("config")
    _print_nested(manifest.config, "  ")
    if arguments.tensors:
        print("tensors (type, shape, axes that cut a dim, pipeline stages)")
        for name, tensor in manifest.tensors.items():
            cuts = ", ".join(f"{axis}: {dim}" for axis, dim in tensor.cuts)
            print(f"  {name}  {tensor.dtype} {list(tensor.shape)} {{{cuts}}} {list(tensor.stages)}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    problems_of = {path: verify(path) for path in _checkpoints(arguments.path)}
    if arguments.json:
        rows = []
        for path, problems in problems_of.items():
            row = {"path": str(path), "intact": not problems}
            rows.append(row | {"problems": [asdict(problem) for problem in problems]})
        print(dumps(rows))
    else:
        for path, problems in problems_of.items():
            print(f"{path}: " + (plural(len(problems), "problem") if problems else "intact"))
            _print_lines(problems)
    return int(any(problems_of.values()))


@dataclass
class _Pruned:
    """What prune does with the checkpoints of a folder."""

    kept: list[Path] = field(default_factory=list)
    removed: list[Path] = field(default_factory=list)
    damaged: list[Path] = field(default_factory=list)  # they are left alone


def _prune(arguments: argparse.Namespace) -> int:
    has_rules = (
        arguments.keep_last is not None or arguments.keep_every is not None or arguments.keep_best
    )
    if not has_rules and not arguments.set_aside:
        raise InputError(
            "prune needs a rule of what to keep: --keep-last N, --keep-every N or --keep-best; or "
            "--set-aside"
        )
    checkpoints = _checkpoints(arguments.path)
    folder = checkpoints[0].parent
    if checkpoints == [arguments.path]:
        raise InputError(
            f"{arguments.path} is one checkpoint, and prune looks at all of a folder: name {folder}"
        )
    with ExitStack() as locks:
        if not arguments.dry_run:
            for locked in _folders_of_job(folder):
                locks.enter_context(lock_folder(locked, takes=False))
        pruned = _by_rules(folder, arguments)
        if not has_rules:
            pruned.kept = sorted([*pruned.kept, *pruned.removed])
            pruned.removed = []
        if arguments.set_aside:
            pruned.removed += directory.list_set_aside(folder)
        if not arguments.dry_run:
            for path in pruned.removed:
                directory.remove(path)
    _print_pruned(pruned, folder, arguments)
    return 0


def _folders_of_job(folder: Path) -> list[Path]:
    """The folders that a job which writes here has locked: its run's, or that of the
    checkpoints."""
    run = folder.absolute().parent
    return [run, folder] if (run / LOCK).exists() else [folder]


def _by_rules(folder: Path, arguments: argparse.Namespace) -> _Pruned:
    """What the rules say. Damaged checkpoints count for no rule."""
    pruned = _Pruned()
    evaluations: dict[int, Mapping[str, float]] = {}
    for step in directory.steps(folder):
        path = folder / directory.name_of(step)
        try:
            manifest, _ = directory.open_manifest(path)
        except InputError:
            pruned.damaged.append(path)
        else:
            evaluations[step] = manifest.evaluation or {}
    rules = Retention(arguments.keep_last or 1, arguments.keep_every, arguments.keep_best)
    keep = steps_to_keep(list(evaluations), evaluations, rules)
    for step in evaluations:
        paths = pruned.kept if step in keep else pruned.removed
        paths.append(folder / directory.name_of(step))
    return pruned


def _print_pruned(pruned: _Pruned, folder: Path, arguments: argparse.Namespace) -> None:
    if arguments.json:
        lists = {name: [str(path) for path in paths] for name, paths in vars(pruned).items()}
        print(dumps({"dry_run": arguments.dry_run} | lists))
        return
    lines = {
        "would be removed" if arguments.dry_run else "removed": pruned.removed,
        "kept": pruned.kept,
        "damaged or unfinished, left alone": pruned.damaged,
    }
    for heading, paths in lines.items():
        if paths:
            print(f"{heading}: {', '.join(path.name for path in paths)}")
    if not pruned.removed:
        print(f"nothing to remove in {folder}")


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint that a path names, or all in the folder that it names, complete or not."""
    if directory.step_of(path.name) is not None or os.path.lexists(path / MANIFEST):
        return [path]
    if not path.is_dir():
        raise InputError(f"there is no folder {path}: name a run's folder, or one of checkpoints")
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    checkpoints = [folder / directory.name_of(step) for step in directory.steps(folder)]
    if not checkpoints:
        raise InputError(
            f"{folder} holds no checkpoint: a checkpoint is a folder such as "
            f"{directory.name_of(100)}"
        )
    return checkpoints


@dataclass(frozen=True)
class _Listed:
    """A checkpoint in `ls`; all but name, path and problem are None if it cannot be read."""

    name: str
    path: str
    problem: str | None = None
    step: int | None = None
    written: str | None = None
    bytes: int | None = None
    ranks: int | None = None
    layout: Mapping[str, int] | None = None
    samples: int | None = None
    tokens: int | None = None
    evaluation: Mapping[str, float] | None = None


def _about(path: Path) -> _Listed:
    try:
        manifest, _ = directory.open_manifest(path)
    except DamagedError as error:
        problem = f"damaged: {error.file.name} {error.problem}"
    except UnreadableError as error:
        problem = f"{error.file.name} cannot be read ({error.reason})"
    except InputError as error:
        problem = str(error)
    else:
        return _Listed(
            name=path.name,
            path=str(path),
            step=manifest.step,
            written=manifest.written,
            bytes=manifest.total_bytes,
            ranks=manifest.layout.world_size,
            layout=manifest.layout.sizes,
            samples=manifest.samples,
            tokens=manifest.tokens,
            evaluation=manifest.evaluation,
        )
    return _Listed(path.name, str(path), problem)


def _row(about: _Listed, metric: str) -> list[str]:
    if about.layout is None:  # it cannot be read
        return [about.name, "?", "?", "?", "?", "", about.problem or ""]
    layout = "{" + ", ".join(f"{axis}: {size}" for axis, size in about.layout.items()) + "}"
    value = (about.evaluation or {}).get(metric)
    return [
        about.name,
        str(about.written)[:19].replace("T", " "),
        bytes_text(about.bytes or 0),
        str(about.ranks),
        layout,
        "" if value is None else f"{value:.4f}",
        "",
    ]


def _description(manifest: Manifest) -> list[tuple[str, str]]:
    """The lines of `show`: name and value."""
    layout = manifest.layout
    kinds = Counter(name.partition(".")[0] for name in manifest.tensors)
    kinds_text = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    lines = [
        ("step", f"{manifest.step:,}"),
        ("samples", f"{manifest.samples:,}"),
        ("tokens", f"{manifest.tokens:,}"),
        ("written", manifest.written),
        ("layout", f"{layout} ({plural(layout.world_size, 'rank')})"),
    ]
    if layout.experts > 1:
        lines.append(("experts", f"over {layout.experts} ranks"))
    size = f"{bytes_text(manifest.total_bytes)} in {plural(len(manifest.files), 'file')}"
    evaluation = "none at this step"
    if manifest.evaluation is not None:
        evaluation = _listed(manifest.evaluation)
    return [
        *lines,
        ("size", size),
        ("tensors", f"{len(manifest.tensors)}: {kinds_text}"),
        ("evaluation", evaluation),
        ("data", _listed(manifest.data)),
        ("rng", _listed(manifest.rng)),
        ("versions", _listed(manifest.versions)),
    ]


def _print_nested(values: Mapping[str, Any], indent: str) -> None:
    for key, value in values.items():
        name = _short(key)[1:-1]
        if isinstance(value, Mapping) and value:
            print(f"{indent}{name}:")
            _print_nested(value, indent + "  ")
        else:
            print(f"{indent}{name}: {_short(value)}")


def _print_lines(lines: Iterable[object]) -> None:
    lines = list(lines)
    for line in lines[:MOST_LINES]:
        print(f"  {line}")
    if len(lines) > MOST_LINES:
        print(f"  and {len(lines) - MOST_LINES} more (--json lists all)")


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{_short(name)[1:-1]} {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    """A value as JSON, which contains no control characters that a terminal would obey."""
    text = dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of steps; found {text}")
    return int(text)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on; found {text}")
    return number
