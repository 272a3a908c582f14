"""Flight recorders in a failure's folder: which collectives some ranks of a group have entered and
others have not."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshtrain.errors import ranges
from meshtrain.explain.log_reader import Log
from meshtrain.job.parsing import parse_json, read_limited
from meshtrain.job.watchdog.records import VERDICT

RECORDERS = "*/rank-*.flight-recorder.json"  # in a folder for each host
MOST_BYTES = 1 << 28  # of a recorder
Group = tuple[int, ...]  # its ranks


def not_entered(logs: Iterable[Log]) -> Iterator[tuple[str, str]]:
    """For each collective that only some ranks of a group have entered, one file that shows it and
    a line for rules."""
    for folder in dict.fromkeys(
        os.path.dirname(log.path) for log in logs if os.path.basename(log.path) == VERDICT
    ):
        begun: dict[
            Group, dict[int, int]
        ] = {}  # group -> rank -> how many collectives it has entered
        names: dict[tuple[Group, int], str] = {}
        files: dict[int, Path] = {}
        for path in sorted(Path(folder).glob(RECORDERS)):
            try:
                files[_read(path, begun, names)] = path
            except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                yield str(path), f"this flight recorder cannot be read: {error!r}"
        for group, by_rank in begun.items():
            number = min(by_rank.values(), default=0) + 1
            entered = [rank for rank, count in by_rank.items() if count >= number]
            missing = [rank for rank in by_rank if rank not in entered]
            if entered:
                unknown = set(group) - by_rank.keys()
                rest = f" (nothing is known of {', '.join(ranges(unknown))})" if unknown else ""
                collective = names.get((group, number), f"collective {number} of {_ranks(group)}")
                parted = f"was entered by {_ranks(entered)} and not by {_ranks(missing)}{rest}"
                yield str(files[missing[0]]), f"flight recorder: {collective} {parted}"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(ranges(numbers))}"


def _read(
    path: Path, begun: dict[Group, dict[int, int]], names: dict[tuple[Group, int], str]
) -> int:
    """Adds what one rank has recorded; returns the rank."""
    recorder: dict[str, Any] = parse_json(read_limited(path, MOST_BYTES), most=MOST_BYTES)
    rank = int(recorder["rank"])
    groups = {
        name: (str(over), tuple(map(int, ranks)))
        for name, (over, ranks) in recorder["groups"].items()
    }
    for _, ranks in groups.values():
        begun.setdefault(ranks, {}).update({rank: 0} if recorder["whole"] else {})
    for entry in recorder["entries"]:
        name = entry["process_group"][0]
        if name in groups and not entry["is_p2p"]:
            over, ranks = groups[name]
            number = int(entry["collective_seq_id"])
            begun[ranks][rank] = max(number, begun[ranks].get(rank, 0))
            kind = str(entry["profiling_name"]).rpartition(":")[2]
            names[ranks, number] = f"{kind} {number} over {over} ({len(ranks)} ranks)"
    return rank
