"""Flight recorders in a failure's folder: which collectives some ranks of a group have entered and
others have not."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshtrain.errors import ranges
from meshtrain.explain.log_reader import Log
from meshtrain.job.parsing import parse_json, read_limited
from meshtrain.job.watchdog.records import VERDICT

RECORDERS = "*/rank-*.flight-recorder.json"  # in a folder for each host
MOST_BYTES = 1 << 28  # of a recorder
Ranks = tuple[int, ...]


@dataclass
class _Group:
    """What is known of one process group."""

    ranks: Ranks
    entered: dict[int, int] = field(default_factory=dict)  # rank -> number of its last collective
    names: dict[int, str] = field(default_factory=dict)  # number of a collective -> what it is


def not_entered(logs: Iterable[Log]) -> Iterator[tuple[str, str]]:
    """For each collective that only some ranks of a group have entered, one file that shows it and
    a line for rules."""
    paths = [Path(log.path) for log in logs]
    folders = [path.parent for path in paths if path.name == VERDICT]
    for folder in dict.fromkeys(folders):
        yield from _not_entered_in(folder)


def _not_entered_in(folder: Path) -> Iterator[tuple[str, str]]:
    groups: dict[Ranks, _Group] = {}
    files: dict[int, Path] = {}  # rank -> its recorder
    for path in sorted(folder.glob(RECORDERS)):
        try:
            files[_read(path, groups)] = path
        except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            yield str(path), f"this flight recorder cannot be read: {error!r}"
    for group in groups.values():
        # All have entered the collectives up to the slowest rank's last one.
        number = min(group.entered.values(), default=0) + 1
        inside = [rank for rank, last in group.entered.items() if last >= number]
        outside = [rank for rank, last in group.entered.items() if last < number]
        if inside:
            yield str(files[outside[0]]), _sentence(group, number, inside, outside)


def _sentence(group: _Group, number: int, inside: Sequence[int], outside: Sequence[int]) -> str:
    collective = group.names.get(number, f"collective {number} of {_ranks(group.ranks)}")
    text = (
        f"flight recorder: {collective} was entered by {_ranks(inside)} and not by "
        f"{_ranks(outside)}"
    )
    unknown = set(group.ranks) - group.entered.keys()
    if unknown:
        text += f" (nothing is known of {', '.join(ranges(unknown))})"
    return text


def _ranks(numbers: Sequence[int]) -> str:
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {', '.join(ranges(numbers))}"


def _read(path: Path, groups: dict[Ranks, _Group]) -> int:
    """Adds what one rank has recorded; returns the rank."""
    recorder: dict[str, Any] = parse_json(read_limited(path, MOST_BYTES), most=MOST_BYTES)
    rank = int(recorder["rank"])
    axes_and_group = {}  # by torch's name of the group
    for name, (axes, members) in recorder["groups"].items():
        ranks = tuple(map(int, members))
        group = groups.setdefault(ranks, _Group(ranks))
        # A recorder that has lost its beginning does not tell that the rank has entered nothing.
        if recorder["whole"]:
            group.entered[rank] = 0
        axes_and_group[name] = (str(axes), group)
    for entry in recorder["entries"]:
        name = entry["process_group"][0]
        if name not in axes_and_group or entry["is_p2p"]:
            continue
        axes, group = axes_and_group[name]
        number = int(entry["collective_seq_id"])
        group.entered[rank] = max(number, group.entered.get(rank, 0))
        kind = str(entry["profiling_name"]).rpartition(":")[2]
        group.names[number] = f"{kind} {number} over {axes} ({len(group.ranks)} ranks)"
    return rank
