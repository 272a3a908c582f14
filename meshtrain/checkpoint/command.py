"""`meshtrain checkpoint`: what checkpoints there are, what is in one, whether it is intact, what differs, which may go.

    meshtrain checkpoint ls runs/x
    meshtrain checkpoint show runs/x                           # the newest, or one that is named
    meshtrain checkpoint verify runs/x/checkpoints/step_0000100
    meshtrain checkpoint diff runs/x runs/y
    meshtrain checkpoint prune runs/x --keep-last 3 --keep-every 1000 --dry-run

A path is that of a checkpoint, of the folder it is in, or of a run. None of this needs torch.
"""

import argparse
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshtrain.checkpoint import folder, strict
from meshtrain.checkpoint.manifest import MANIFEST, Manifest
from meshtrain.checkpoint.named import CHECKPOINTS, needed
from meshtrain.checkpoint.retention import judged_by, which
from meshtrain.checkpoint.verify import verify
from meshtrain.errors import DamagedError, InputError, UnreadableError

MOST_LINES = 20
HAS_ACTIONS = True  # each with arguments of its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    a_path = "a checkpoint, a folder of checkpoints, or a run's folder"
    newest = f"{a_path}, of which the newest is taken"
    ls = actions.add_parser("ls", allow_abbrev=False, help="the checkpoints of a run, one per line")
    ls.add_argument("path", type=Path, help=a_path)
    show = actions.add_parser("show", allow_abbrev=False, help="what is in a checkpoint")
    show.add_argument("path", type=Path, help=newest)
    show.add_argument("--tensors", action="store_true", help="list every tensor")
    check = actions.add_parser(
        "verify", allow_abbrev=False, help="read every byte: exit status 0 if all is intact, 1 if not"
    )
    check.add_argument("path", type=Path, help=f"{a_path}, of which every one is read")
    diff = actions.add_parser(
        "diff", allow_abbrev=False, help="compare two, whatever layouts wrote them: exit status 0 if equal, 1 if not"
    )
    diff.add_argument("a", type=Path, help=newest)
    diff.add_argument("b", type=Path, help="the same")
    prune = actions.add_parser(
        "prune", allow_abbrev=False, help="delete the checkpoints that no given rule keeps; the newest always stays"
    )
    prune.add_argument("path", type=Path, metavar="folder", help="a folder of checkpoints, or a run's folder")
    prune.add_argument("--keep-last", type=_positive, metavar="N", help="keep the newest N")
    prune.add_argument("--keep-every", type=_positive, metavar="N", help="keep those whose step is a multiple of N")
    prune.add_argument("--keep-best", action="store_true", help="keep the one with the best evaluation")
    prune.add_argument("--set-aside", action="store_true", help="delete what was set aside (step_*.aside-*), too")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    for action in (ls, show, check, diff, prune):
        action.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Runs the action; returns the exit status.

    Raises:
        InputError: a path means no checkpoint, or what is there cannot be used.
    """
    actions = {"ls": _ls, "show": _show, "verify": _verify, "diff": _diff, "prune": _prune}
    try:
        return actions[arguments.action](arguments)
    except PermissionError as error:
        raise InputError(f"{error.filename} may not be used: {error.strerror}") from error


# The actions --------------------------------------------------------------------------------------------------------


def _ls(arguments: argparse.Namespace) -> int:
    found = [_about(path) for path in _checkpoints(arguments.path)]
    if arguments.json:
        print(strict.dumps(found))
        return 0
    judged = judged_by(about["evaluation"] or {} for about in found)[0]
    head = ["checkpoint", "written", "size", "ranks", "layout", judged, ""]
    rows = [
        [about["name"], "?", "?", "?", "?", "", about["problem"]] if about["written"] is None else _row(about, judged)
        for about in found
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head) - 1)]
    for row in [head, *rows]:
        print("  ".join([cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)]).rstrip())
    return 0


def _show(arguments: argparse.Namespace) -> int:
    checkpoint = needed(arguments.path)
    manifest, digest = folder.open_manifest(checkpoint)
    if arguments.json:
        text = strict.parse(manifest.to_json(), checkpoint / MANIFEST)
        print(strict.dumps({"path": str(checkpoint), "manifest_sha256": digest} | text))
        return 0
    print(checkpoint)
    for name, value in _told(manifest):
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
    found = {path: verify(path) for path in _checkpoints(arguments.path)}
    damaged = any(found.values())
    if arguments.json:
        told = {str(path): [asdict(problem) for problem in problems] for path, problems in found.items()}
        print(strict.dumps([{"path": path, "intact": not told[path], "problems": told[path]} for path in told]))
        return int(damaged)
    for path, problems in found.items():
        print(f"{path}: " + (f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "intact"))
        _print_lines(problems)
    return int(damaged)


def _diff(arguments: argparse.Namespace) -> int:
    from meshtrain.checkpoint.diff import diff  # numpy

    a, b = needed(arguments.a), needed(arguments.b)
    found = diff(a, b)
    if arguments.json:
        print(strict.dumps({"a": str(a), "b": str(b), "same": found.same} | asdict(found)))
        return int(not found.same)
    for heading, values in (("what a run goes on from", found.state), ("how it came to that", found.about)):
        if values:
            print(f"differences in {heading}:")
            _print_lines(f"{name}: {_short(one)} -> {_short(other)}" for name, (one, other) in values.items())
    if found.tensors:
        print(f"{len(found.tensors)} tensors differ, {found.compared} are in both; the largest differences first:")
        ordered = sorted(found.tensors, key=lambda each: -(each.largest if each.largest is not None else float("inf")))
        _print_lines(f"{each.name}: {each.what}" for each in ordered)
    else:
        print(f"all {found.compared} tensors are equal to the bit")
    return int(not found.same)


def _prune(arguments: argparse.Namespace) -> int:
    rules = arguments.keep_last is not None or arguments.keep_every is not None or arguments.keep_best
    if not rules and not arguments.set_aside:
        raise InputError(
            "prune needs a rule of what to keep: --keep-last N, --keep-every N or --keep-best; or --set-aside"
        )
    found = _checkpoints(arguments.path)
    place = found[0].parent
    if found == [arguments.path]:
        raise InputError(f"{arguments.path} is one checkpoint, and prune looks at all of a folder: name {place}")
    with ExitStack() as locks:
        if not arguments.dry_run:
            for each in _lockable(place):
                locks.enter_context(folder.locked(each, takes=False))
        kept, gone, damaged = _sorted_out(place, arguments)
        if not rules:
            kept, gone = sorted([*kept, *gone]), []
        gone += folder.aside(place) if arguments.set_aside else []
        for path in () if arguments.dry_run else gone:
            folder.remove(path)
    if arguments.json:
        sorts = {"kept": kept, "removed": gone, "damaged": damaged}
        told = {name: [str(path) for path in paths] for name, paths in sorts.items()}
        print(strict.dumps({"dry_run": arguments.dry_run} | told))
        return 0
    for what, paths in (
        ("would be removed" if arguments.dry_run else "removed", gone),
        ("kept", kept),
        ("damaged or unfinished, left alone", damaged),
    ):
        if paths:
            print(f"{what}: {', '.join(path.name for path in paths)}")
    if not gone:
        print(f"nothing to remove in {place}")
    return 0


def _sorted_out(place: Path, arguments: argparse.Namespace) -> tuple[list[Path], list[Path], list[Path]]:
    """Checkpoints that stay, that go, and that are damaged: those stay, too, and count for no rule."""
    good: dict[int, Manifest] = {}
    damaged = []
    for step in folder.steps(place):
        try:
            good[step], _ = folder.open_manifest(place / folder.name_of(step))
        except InputError:
            damaged.append(place / folder.name_of(step))
    found = {step: each.evaluation or {} for step, each in good.items()}
    rules = {"keep_every": arguments.keep_every, "keep_best": arguments.keep_best}
    stay = which(list(good), found, keep_last=arguments.keep_last or 1, **rules)
    paths = {step: place / folder.name_of(step) for step in good}
    return [paths[step] for step in good if step in stay], [paths[step] for step in good if step not in stay], damaged


# Paths --------------------------------------------------------------------------------------------------------------


def _folder(path: Path) -> Path:
    """The folder of checkpoints that a path means."""
    if not path.is_dir():
        raise InputError(f"there is no folder {path}: name a run's folder, or one of checkpoints")
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint that a path means, or all that are in the folder that it means, whole or not."""
    if folder.step_of(path.name) is not None or os.path.lexists(path / MANIFEST):
        return [path]
    place = _folder(path)
    found = [place / folder.name_of(step) for step in folder.steps(place)]
    if not found:
        raise InputError(f"{place} holds no checkpoint: a checkpoint is a folder such as {folder.name_of(100)}")
    return found


def _lockable(place: Path) -> list[Path]:
    """What a job that writes checkpoints here holds: its own folder, or that of the checkpoints."""
    run = place.absolute().parent
    return [*([run] if (run / folder.LOCK).exists() else []), place]


# Words --------------------------------------------------------------------------------------------------------------


def _about(path: Path) -> dict[str, Any]:
    """What `ls` says of a checkpoint; all but name, path and problem is None where it cannot be read."""
    about: dict[str, Any] = {"name": path.name, "path": str(path), "problem": None}
    about |= dict.fromkeys(("step", "written", "bytes", "ranks", "layout", "samples", "tokens", "evaluation"))
    try:
        manifest, _ = folder.open_manifest(path)
    except DamagedError as error:
        return about | {"problem": f"damaged: {error.file.name} {error.what}"}
    except UnreadableError as error:
        return about | {"problem": f"{error.file.name} cannot be read ({error.what})"}
    except InputError as error:
        return about | {"problem": str(error)}
    own = {name: getattr(manifest, name) for name in ("step", "written", "samples", "tokens", "evaluation")}
    size = {"bytes": manifest.total_bytes, "ranks": manifest.layout.world_size, "layout": manifest.layout.sizes}
    return about | own | size


def _row(about: dict[str, Any], judged: str) -> list[str]:
    layout = "{" + ", ".join(f"{axis}: {size}" for axis, size in about["layout"].items()) + "}"
    value = (about["evaluation"] or {}).get(judged)
    written = about["written"][:19].replace("T", " ")
    return [
        about["name"],
        written,
        _size(about["bytes"]),
        str(about["ranks"]),
        layout,
        "" if value is None else f"{value:.4f}",
        "",
    ]


def _told(manifest: Manifest) -> list[tuple[str, str]]:
    """The lines of `show`: name and value."""
    kinds: dict[str, int] = {}
    for name in manifest.tensors:
        kind = name.partition(".")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    ranks = manifest.layout.world_size
    return [
        ("step", f"{manifest.step:,}"),
        ("samples", f"{manifest.samples:,}"),
        ("tokens", f"{manifest.tokens:,}"),
        ("written", manifest.written),
        ("layout", f"{manifest.layout} ({ranks} rank{'s' * (ranks != 1)})"),
        ("size", f"{_size(manifest.total_bytes)} in {len(manifest.files)} file{'s' * (len(manifest.files) != 1)}"),
        ("tensors", f"{len(manifest.tensors)}: " + ", ".join(f"{n} of {kind}" for kind, n in kinds.items())),
        ("evaluation", "none at this step" if manifest.evaluation is None else _listed(manifest.evaluation)),
        ("data", _listed(manifest.data)),
        ("rng", _listed(manifest.rng)),
        ("versions", _listed(manifest.versions)),
    ]


def _print_nested(value: Mapping[str, Any], indent: str) -> None:
    for key, each in value.items():
        if isinstance(each, Mapping) and each:
            print(f"{indent}{_short(key)[1:-1]}:")
            _print_nested(each, indent + "  ")
        else:
            print(f"{indent}{_short(key)[1:-1]}: {_short(each)}")


def _print_lines(lines: Iterable[object]) -> None:
    lines = list(lines)
    for line in lines[:MOST_LINES]:
        print(f"  {line}")
    if len(lines) > MOST_LINES:
        print(f"  and {len(lines) - MOST_LINES} more (--json lists all)")


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{_short(name)[1:-1]} {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    """A value as JSON, which has nothing in it that a terminal would obey."""
    text = strict.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _size(nbytes: int) -> str:
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} bytes"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on; found {text}")
    return number
