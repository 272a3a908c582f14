"""`meshtrain checkpoint`: lists, shows, verifies and prunes checkpoints.

    meshtrain checkpoint ls runs/x
    meshtrain checkpoint show runs/x                           # the newest, or a given one
    meshtrain checkpoint verify runs/x/checkpoints/step_0000100
    meshtrain checkpoint prune runs/x --keep-last 3 --keep-every 1000 --dry-run

A path names a checkpoint, a folder of checkpoints, or a run's folder. None of this needs torch.
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from meshtrain.checkpoint import directory
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
    for action in (ls, show, check, prune):
        action.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Runs the action and returns the exit status. Raises InputError: a path is not a usable
    checkpoint."""
    actions = {"ls": _ls, "show": _show, "verify": _verify, "prune": _prune}
    try:
        return actions[arguments.action](arguments)
    except PermissionError as error:
        raise InputError(f"{error.filename} may not be used: {error.strerror}") from error


def _ls(arguments: argparse.Namespace) -> int:
    checkpoints = [_about(path) for path in _checkpoints(arguments.path)]
    if arguments.json:
        print(dumps(checkpoints))
        return 0
    metric = best_metric(about["evaluation"] or {} for about in checkpoints)[0]
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
        rows = {
            str(path): [asdict(problem) for problem in problems]
            for path, problems in problems_of.items()
        }
        print(
            dumps(
                [{"path": path, "intact": not rows[path], "problems": rows[path]} for path in rows]
            )
        )
    else:
        for path, problems in problems_of.items():
            print(f"{path}: " + (plural(len(problems), "problem") if problems else "intact"))
            _print_lines(problems)
    return int(any(problems_of.values()))


def _prune(arguments: argparse.Namespace) -> int:
    rules = (
        arguments.keep_last is not None or arguments.keep_every is not None or arguments.keep_best
    )
    if not rules and not arguments.set_aside:
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
        # a job that writes here has locked its run's folder, or that of the checkpoints
        if not arguments.dry_run:
            run = folder.absolute().parent
            for locked in [run, folder] if (run / LOCK).exists() else [folder]:
                locks.enter_context(lock_folder(locked, takes=False))
        retained, removed, damaged = _by_rules(folder, arguments)
        if not rules:
            retained, removed = sorted([*retained, *removed]), []
        removed += directory.list_set_aside(folder) if arguments.set_aside else []
        for path in () if arguments.dry_run else removed:
            directory.remove(path)
    if arguments.json:
        lists = {"kept": retained, "removed": removed, "damaged": damaged}
        print(
            dumps(
                {"dry_run": arguments.dry_run}
                | {name: list(map(str, paths)) for name, paths in lists.items()}
            )
        )
        return 0
    for heading, paths in (
        ("would be removed" if arguments.dry_run else "removed", removed),
        ("kept", retained),
        ("damaged or unfinished, left alone", damaged),
    ):
        if paths:
            print(f"{heading}: {', '.join(path.name for path in paths)}")
    if not removed:
        print(f"nothing to remove in {folder}")
    return 0


def _by_rules(
    folder: Path, arguments: argparse.Namespace
) -> tuple[list[Path], list[Path], list[Path]]:
    """The checkpoints to keep, to remove, and the damaged ones, which are kept, too, and count for
    no rule."""
    evaluations: dict[int, Mapping[str, float]] = {}
    damaged = []
    for step in directory.steps(folder):
        path = folder / directory.name_of(step)
        try:
            evaluations[step] = directory.open_manifest(path)[0].evaluation or {}
        except InputError:
            damaged.append(path)
    rules = Retention(arguments.keep_last or 1, arguments.keep_every, arguments.keep_best)
    stay = steps_to_keep(list(evaluations), evaluations, rules)
    paths = {step: folder / directory.name_of(step) for step in evaluations}
    retained = [path for step, path in paths.items() if step in stay]
    return retained, [path for step, path in paths.items() if step not in stay], damaged


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


def _about(path: Path) -> dict[str, Any]:
    """The fields of a checkpoint in `ls`; all but name, path and problem are None if it cannot be
    read."""
    about: dict[str, Any] = {"name": path.name, "path": str(path), "problem": None}
    about |= dict.fromkeys(
        ("step", "written", "bytes", "ranks", "layout", "samples", "tokens", "evaluation")
    )
    try:
        manifest, _ = directory.open_manifest(path)
    except DamagedError as error:
        return about | {"problem": f"damaged: {error.file.name} {error.problem}"}
    except UnreadableError as error:
        return about | {"problem": f"{error.file.name} cannot be read ({error.reason})"}
    except InputError as error:
        return about | {"problem": str(error)}
    fields = {
        name: getattr(manifest, name)
        for name in ("step", "written", "samples", "tokens", "evaluation")
    }
    size = {
        "bytes": manifest.total_bytes,
        "ranks": manifest.layout.world_size,
        "layout": manifest.layout.sizes,
    }
    return about | fields | size


def _row(about: dict[str, Any], metric: str) -> list[str]:
    if about["problem"] is not None:
        return [about["name"], "?", "?", "?", "?", "", about["problem"]]
    layout = "{" + ", ".join(f"{axis}: {size}" for axis, size in about["layout"].items()) + "}"
    value = (about["evaluation"] or {}).get(metric)
    written, size = about["written"][:19].replace("T", " "), bytes_text(about["bytes"])
    return [
        about["name"],
        written,
        size,
        str(about["ranks"]),
        layout,
        "" if value is None else f"{value:.4f}",
        "",
    ]


def _description(manifest: Manifest) -> list[tuple[str, str]]:
    """The lines of `show`: name and value."""
    kinds = Counter(name.partition(".")[0] for name in manifest.tensors)
    return [
        ("step", f"{manifest.step:,}"),
        ("samples", f"{manifest.samples:,}"),
        ("tokens", f"{manifest.tokens:,}"),
        ("written", manifest.written),
        ("layout", f"{manifest.layout} ({plural(manifest.layout.world_size, 'rank')})"),
        *(
            [("experts", f"over {manifest.layout.experts} ranks")]
            if manifest.layout.experts > 1
            else []
        ),
        ("size", f"{bytes_text(manifest.total_bytes)} in {plural(len(manifest.files), 'file')}"),
        (
            "tensors",
            f"{len(manifest.tensors)}: " + ", ".join(f"{n} of {kind}" for kind, n in kinds.items()),
        ),
        (
            "evaluation",
            "none at this step" if manifest.evaluation is None else _listed(manifest.evaluation),
        ),
        ("data", _listed(manifest.data)),
        ("rng", _listed(manifest.rng)),
        ("versions", _listed(manifest.versions)),
    ]


def _print_nested(values: Mapping[str, Any], indent: str) -> None:
    for key, value in values.items():
        nested = isinstance(value, Mapping) and bool(value)
        print(f"{indent}{_short(key)[1:-1]}:" + ("" if nested else f" {_short(value)}"))
        if nested:
            _print_nested(value, indent + "  ")


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


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on; found {text}")
    return number
