"""Why a job has failed, by its logs.

Rules (`rules.yaml`) know what lines mean, `Search` finds them, and here the roots are separated from what followed
them: a time-out that ten ranks report is not the cause if an eleventh has run out of memory.
"""

import fcntl
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from meshtrain.errors import InputError
from meshtrain.operate.advice import Settings, advice, settings_beside
from meshtrain.operate.lines import logs_of
from meshtrain.operate.rules import CERTAINTIES, Rule, load_rules
from meshtrain.operate.search import Found, Search

NAMED = 6  # ranks that a text names
LAST_WORDS = re.compile(r"rank \d+ on host [^:]+ failed: |[\w.]+(?:Error|Exception|Interrupt)\b")
WHO = re.compile(r"(?P<kind>(?:local )?rank) (?P<number>\d+)(?: of node (?P<node>\d+))?")
LATE_S = 10.0  # seconds after which an end from outside is not what ranks were waiting for


@dataclass(frozen=True)
class Cause:
    """One cause: `role` is root where it is likely to have begun with it, suspect, or consequence of another one."""

    id: str
    role: str
    cause: str
    fix: str
    options: tuple[str, ...]
    found: Found

    def to_json(self) -> dict[str, Any]:
        ranks = sorted(self.found.ranks, key=_number)
        return {
            "id": self.id,
            "role": self.role,
            "cause": self.cause,
            "fix": " ".join([self.fix, *(f"{option};" for option in self.options)]).rstrip(";"),
            "evidence": [
                {"file": one.file, "line": one.line, "text": one.text, "rank": one.rank} for one in self.found.evidence
            ],
            "options": list(self.options),
            "count": self.found.count,
            "ranks": ranks,
        }


def explain(paths: Sequence[str], rules: Sequence[Rule] | None = None) -> list[Cause]:
    """The causes of a job's failure, most likely first; none where nothing has failed.

    Args:
        paths: logs of the job, or the folder of a run.
        rules: by default meshtrain's own.

    Raises:
        InputError: there is no such log, or it cannot be read.
    """
    folders = [path for path in paths if os.path.isdir(path)]
    logs = logs_of(list(paths))
    ends = [_end_of_run(Path(folder)) for folder in folders]
    if not logs and not any(ends):
        raise InputError(f"{', '.join(folders)} has no logs and is no run's folder: give the files")
    search = Search(tuple(load_rules() if rules is None else rules))
    for log in logs:
        search.read(log, alone=len(logs) == 1)
    for folder, end in zip(folders, ends, strict=True):
        if end is not None and end.status == "failed":
            search.tell(str(Path(folder) / "exit.json"), end.reason)
    if ends and len(folders) == len(paths) and all(end is not None and end.status == "well" for end in ends):
        return []  # the run went on after whatever the logs show, and ended well
    beside = (settings_beside(path) for path in paths)
    return _ranked(search, next((found for found in beside if found.known), Settings(None)))


@dataclass(frozen=True)
class _End:
    """How a run's folder says that its last job ended: `status` is failed, well, or running as long as it goes on."""

    status: str
    reason: str = ""


def _end_of_run(folder: Path) -> _End | None:
    """What a folder says of its run's end; None where it is no run's folder."""
    if not (folder / "config.yaml").is_file():
        return None
    try:
        found = json.loads((folder / "exit.json").read_text(encoding="utf-8"))
        status, reason = found["status"], str(found.get("reason"))
    except FileNotFoundError:
        if _held(folder):
            return _End("running")
        return _End("failed", "there is no exit.json, and nobody holds the folder")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return _End("failed", f"the run wrote down that it failed, and exit.json cannot be read: {error!r}")
    if status != "failed":
        return _End("well")
    return _End("failed", reason if LAST_WORDS.match(reason) else f"the run wrote down that it failed: {reason}")


def _held(folder: Path) -> bool:
    """Whether a job works in a run's folder: it holds a lock there."""
    try:
        lock = os.open(folder / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


# Order --------------------------------------------------------------------------------------------------------------


def _ranked(search: Search, settings: Settings) -> list[Cause]:
    """What was found, most likely first: roots by certainty and time, then suspects, then what followed."""
    found = {
        name: one
        for name, one in search.found.items()
        if one.rule.role != "noise" and (not one.rule.only_with or set(one.rule.only_with) & set(search.found))
    }
    failed = any(one.rule.role in ("root", "consequence") for one in found.values())
    if not failed and search.worked:  # warnings of a job that got going are no failure
        return []
    last = max((one.attempt for one in found.values()), default=0)
    roles = {name: _role(one, found) for name, one in found.items()}

    def key(one: Found) -> tuple:
        role = roles[one.rule.id]
        tier = 0 if role == "root" else 1 if role == "suspect" else 2 if one.rule.role == "root" else 3
        if tier == 2 and one.rule.outside:
            tier = 4
        return tier, last - one.attempt, CERTAINTIES.index(one.rule.certainty), one.evidence[0].key

    victims = {rank for one in found.values() if _is_victim(one.rule) for rank in one.ranks}
    silent = [rank for rank in search.seen if rank not in victims]
    return [_cause(one, roles[one.rule.id], silent, settings) for one in sorted(found.values(), key=key)]


def _role(one: Found, found: dict[str, Found]) -> str:
    """A rule's role here: a root that another one explains has followed it, and so has an end of a job that hung."""
    if any(name in found and one.rule.id not in found[name].rule.follows for name in one.rule.follows):
        return "consequence"
    if one.rule.outside and any(other.rule.waits and _long_before(other, one) for other in found.values()):
        return "consequence"
    return one.rule.role


def _long_before(first: Found, second: Found) -> bool:
    """Whether the one was there long before the other; without times the order in one file has to do."""
    a, b = first.evidence[0], second.evidence[0]
    if a.time is not None and b.time is not None:
        return a.time + LATE_S < b.time
    return a.file == b.file and a.line < b.line


def _cause(one: Found, role: str, silent: Sequence[str], settings: Settings) -> Cause:
    text = _filled(one.rule.cause, one.groups)
    if _is_victim(one.rule):
        text = " ".join([text, *_who_did_not_come(one, silent)])
    options = tuple(advice(one.rule.options, settings))
    return Cause(one.rule.id, role, text, _filled(one.rule.fix, one.groups), options, one)


def _is_victim(rule: Rule) -> bool:
    """Whether the ranks that say so are not to blame, but those that keep silent."""
    return rule.waits or rule.closed


def _who_did_not_come(one: Found, silent: Sequence[str]) -> list[str]:
    """What the lines of those that waited tell of those that did not."""
    told = []
    for group, ranks in sorted(one.work.items()):
        least, most = min(ranks.values()), max(ranks.values())
        if least < most:
            behind = [rank for rank, work in ranks.items() if work == least]
            told.append(f"In process group {group} {names(behind)} had only begun collective {least}, others {most}.")
    if one.ranks and silent:
        told.append(f"{names(silent).capitalize()} reported nothing of the kind: look there first.")
    return told


def _filled(text: str, groups: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda name: groups.get(name[1], name[0]), text)


def names(ranks: Sequence[str]) -> str:
    """`rank 1, 2 and 5 more`; with logs of several nodes `local rank 0, 1 of node 0 and local rank 1 of node 1`."""
    ordered = sorted(ranks, key=_number)
    parts = []
    for (node, kind), some in groupby(map(_number, ordered[:NAMED]), key=lambda one: one[:2]):
        of = f" of node {node}" if node >= 0 else ""
        parts.append(f"{kind} {', '.join(str(number) for *_, number in some)}{of}")
    return " and ".join([*parts, *([f"{len(ordered) - NAMED} more"] if len(ordered) > NAMED else [])])


def _number(rank: str) -> tuple[int, str, int]:
    """The node (-1: not known), the kind and the number of `local rank 1 of node 0`."""
    found = WHO.match(rank)
    assert found is not None  # as lines.py writes it
    return int(found["node"] or -1), found["kind"], int(found["number"])
