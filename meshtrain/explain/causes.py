"""Causes of a job's failure, from its logs: separates root causes from their consequences, and
proposes options of the run's config that help, with their current values (`options.yaml`)."""

import fcntl
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from meshtrain.config.yaml_reader import parse_yaml
from meshtrain.errors import InputError, join_some, ranges
from meshtrain.explain.flight_recorder import not_entered
from meshtrain.explain.log_reader import logs_of
from meshtrain.explain.rules import CERTAINTIES, Rule, load_rules
from meshtrain.explain.search import Matches, Search
from meshtrain.job.parsing import parse_json, read_limited
from meshtrain.job.storage import read_guarded
from meshtrain.layout import AXES

NAMED = 6  # the most ranks that a text names
RANK = re.compile(r"(?P<kind>(?:local )?rank) (?P<number>\d+)(?: of node (?P<node>\d+))?")
# Folders above a log with its run's config.yaml: logs/slurm-7.0/node_0/ID/attempt_0/3/stderr.log
# has 7.
LEVELS = 8
OPTIONS: dict[str, list[dict[str, str]]] = yaml.safe_load(
    Path(__file__).with_name("options.yaml").read_text()
)
SECTIONS = (
    "model",
    "data",
    "layout",
    "batch",
    "parallel",
    "pipeline",
    "optimizer",
    "train",
    "checkpoint",
    "metrics",
)
MOST_OF_CONFIG = 1 << 18  # bytes: a run's own has some thousand
LATE_S = 10.0  # if an end from outside comes this much later, it is not why ranks waited


class _Section(SimpleNamespace):
    """The keys of a section; None for a key that is not given."""

    def __getattr__(self, name: str) -> None:
        return None


class Settings:
    """A config as written, in which any section and key may be missing."""

    def __init__(self, sections: Mapping[str, Any] | None) -> None:
        self.known = sections is not None
        self._names: dict[str, Any] = {
            "known": self.known,
            "now": _now,
            "max": max,
            "__builtins__": {},
        }
        for name in SECTIONS:
            keys = (sections or {}).get(name)
            if not isinstance(keys, Mapping):
                keys = {}
            if name == "layout" and self.known:
                keys = {**dict.fromkeys(AXES, 1), **keys}
            self._names[name] = _Section(**{str(key): value for key, value in keys.items()})

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of options.yaml. Raises TypeError: a value in it is missing or
        not a number."""
        return eval(expression, self._names)  # our own text; values of a config are only read

    def fill(self, text: str) -> str:
        """A text with its expressions, in braces, replaced by their values."""
        return re.sub(r"\{([^{}]+)\}", lambda match: _written(self.evaluate(match[1])), text)


@dataclass(frozen=True)
class Cause:
    """One cause. `role`: root if the failure has probably begun with it, suspect, or consequence of
    another cause."""

    id: str
    role: str
    cause: str
    fix: str
    options: tuple[str, ...]
    matches: Matches

    def to_json(self) -> dict[str, Any]:
        evidence = [
            {"file": line.file, "line": line.line, "text": line.text, "rank": line.rank}
            for line in self.matches.evidence
        ]
        return {
            "id": self.id,
            "role": self.role,
            "cause": self.cause,
            "fix": " ".join([self.fix, "; ".join(self.options)]).rstrip(),
            "evidence": evidence,
            "options": list(self.options),
            "count": self.matches.count,
            "ranks": sorted(self.matches.ranks, key=_number),
        }


def explain(paths: Sequence[str], rules: Sequence[Rule] | None = None) -> list[Cause]:
    """The causes of a job's failure, most likely first; none if nothing has failed. `paths`: logs
    of the job, or the folder of a run. `rules`: by default meshtrain's own. Raises InputError:
    there is no such log, or it cannot be read.
    """
    folders = [path for path in paths if os.path.isdir(path)]
    logs = logs_of(list(paths))
    ends = [_end_of_run(Path(folder)) for folder in folders]
    if not logs and not any(ends):
        raise InputError(f"{', '.join(folders)} has no logs and is no run's folder: give the files")
    only_folders = bool(folders) and len(folders) == len(paths)
    if only_folders and all(end is not None and end.status == "well" for end in ends):
        return []  # whatever the logs show, the run continued and ended well

    search = Search(tuple(load_rules() if rules is None else rules))
    for log in logs:
        search.read(log, alone=len(logs) == 1)
    for file, text in not_entered(logs):
        search.read_text(file, text)
    for folder, end in zip(folders, ends, strict=True):
        if end is not None and end.status == "failed":
            file = str(Path(folder) / "exit.json")
            if not search.read_text(file, end.reason):
                # a reason that no rule knows is still a failure
                search.read_text(file, f"the run wrote down that it failed: {end.reason}")
    return _rank_causes(search, _settings_of(paths))


@dataclass(frozen=True)
class _End:
    """How the last job of a run ended."""

    status: str  # "failed", "well" or "running"
    reason: str = ""


def _end_of_run(folder: Path) -> _End | None:
    """How the last job of a run's folder ended; None: it is not a run's folder."""
    if not (folder / "config.yaml").is_file():
        return None
    try:
        written = parse_json(read_limited(folder / "exit.json"))
        status, reason = written["status"], str(written.get("reason"))
    except FileNotFoundError:
        if _is_locked(folder):
            return _End("running")
        return _End("failed", "there is no exit.json, and nobody holds the folder")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return _End("failed", f"exit.json cannot be read: {error!r}")
    return _End("failed", reason) if status == "failed" else _End("well")


def _is_locked(folder: Path) -> bool:
    with suppress(OSError):
        lock = os.open(folder / ".lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
    return False


def _rank_causes(search: Search, settings: Settings) -> list[Cause]:
    """The causes, most likely first: roots by certainty and time, then suspects, then
    consequences."""
    matches = {}
    for name, match in search.matches.items():
        needs = match.rule.only_with
        if match.rule.role != "noise" and (not needs or search.matches.keys() & set(needs)):
            matches[name] = match
    failed = any(match.rule.role in ("root", "consequence") for match in matches.values())
    if not failed and search.worked:  # warnings of a job that has begun training are no failure
        return []
    # A job that was restarted failed for what its last start shows.
    last_attempt = max((match.attempt for match in matches.values()), default=0)
    roles = {name: _role(match, matches) for name, match in matches.items()}

    def order(match: Matches) -> tuple:
        rule = match.rule
        return (
            _tier(rule, roles[rule.id]),
            last_attempt - match.attempt,
            CERTAINTIES.index(rule.certainty),
            match.evidence[0].key,
        )

    # Where ranks waited in vain, those that say nothing of it are the ones to look at.
    victims = {rank for match in matches.values() if _is_victim(match.rule) for rank in match.ranks}
    silent = [rank for rank in search.ranks if rank not in victims]
    ordered = sorted(matches.values(), key=order)
    return [_cause(match, roles[match.rule.id], silent, settings) for match in ordered]


def _tier(rule: Rule, role: str) -> int:
    """How early a cause comes: roots and suspects, then what follows from them."""
    if role == "root":
        return 0
    if role == "suspect":
        return 1
    if rule.role != "root":
        return 3
    # What would be a root by itself tells more than what never is; an end from outside tells least.
    return 4 if rule.outside else 2


def _role(match: Matches, matches: dict[str, Matches]) -> str:
    """A rule's role here: a root explained by another rule is a consequence, as is an end from
    outside after a hang."""
    rule = match.rule
    for name in rule.follows:
        if name in matches and rule.id not in matches[name].rule.follows:
            return "consequence"
    if rule.outside:
        hangs = [other for other in matches.values() if other.rule.waits]
        if any(_long_before(hang, match) for hang in hangs):
            return "consequence"
    return rule.role


def _long_before(first: Matches, second: Matches) -> bool:
    """Whether `first` came long before `second`; without times, whether it comes earlier in the
    same file."""
    a, b = first.evidence[0], second.evidence[0]
    if a.time is not None and b.time is not None:
        return a.time + LATE_S < b.time
    return a.file == b.file and a.line < b.line


def _cause(match: Matches, role: str, silent: Sequence[str], settings: Settings) -> Cause:
    rule = match.rule
    text = _fill_in(rule.cause, match.groups)
    if _is_victim(rule):
        text = " ".join([text, *_missing_ranks(match, silent)])
    options = tuple(advice(rule.options, settings))
    return Cause(rule.id, role, text, _fill_in(rule.fix, match.groups), options, match)


def _is_victim(rule: Rule) -> bool:
    """Whether not the ranks that report this are to blame, but those that report nothing."""
    return rule.waits or rule.closed


def _missing_ranks(match: Matches, silent: Sequence[str]) -> list[str]:
    sentences = []
    for group, ranks in sorted(match.work.items()):
        least, most = min(ranks.values()), max(ranks.values())
        if least < most:
            behind = names([rank for rank, work in ranks.items() if work == least])
            sentences.append(
                f"In process group {group} {behind} had only begun collective {least}, others "
                f"{most}."
            )
    if match.ranks and silent:
        sentences.append(
            f"{names(silent).capitalize()} reported nothing of the kind: look there first."
        )
    return sentences


def _fill_in(text: str, groups: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda name: groups.get(name[1], name[0]), text)


def names(ranks: Sequence[str]) -> str:
    """`rank 1-3, 8`; with logs of several nodes `local rank 0-1 of node 0 and local rank 1 of node
    1`."""
    by_node: dict[tuple[int, str], list[int]] = {}
    for node, kind, number in sorted(map(_number, ranks)):
        by_node.setdefault((node, kind), []).append(number)
    parts = []
    for (node, kind), numbers in by_node.items():
        of = f" of node {node}" if node >= 0 else ""
        parts.append(f"{kind} {join_some(ranges(numbers), NAMED)}{of}")
    if len(parts) > NAMED:
        parts = [*parts[:NAMED], f"{len(parts) - NAMED} more"]
    return " and ".join(parts)


def _number(rank: str) -> tuple[int, str, int]:
    """The node (-1: unknown), the kind and the number of `local rank 1 of node 0`."""
    match = RANK.match(rank)
    assert match is not None  # log_reader.py writes this form
    return int(match["node"] or -1), match["kind"], int(match["number"])


def _settings_of(paths: Sequence[str]) -> Settings:
    """The config of the first path that has one."""
    for path in paths:
        settings = settings_beside(path)
        if settings.known:
            return settings
    return Settings(None)


def settings_beside(path: str) -> Settings:
    """The config of the run to which a log belongs: the nearest config.yaml of meshtrain in the
    folders above it.

    Nobody has named these files, and in a folder of many users they may be anybody's: what cannot
    be read is passed over, and only texts of a config's form are looked at.
    """
    log = Path(path).resolve()
    folders = list(log.parents)[:LEVELS]
    if log.is_dir():
        folders.insert(0, log)
    for folder in folders:
        # A file in a folder that the user names may be a link.
        read = read_limited if folder == log else read_guarded
        with suppress(OSError, InputError):
            sections = parse_yaml(read(folder / "config.yaml", MOST_OF_CONFIG))
            if isinstance(sections, dict) and {"model", "batch", "train"} <= set(sections):
                return Settings(sections)
    return Settings(None)


def advice(name: str | None, settings: Settings) -> list[str]:
    """Options that help, best first: each an override with a short explanation, or a sentence."""
    texts = []
    for option in [] if name is None else OPTIONS[name]:
        with suppress(TypeError):  # a value that it uses is missing
            if settings.evaluate(option.get("if", "True")):
                texts.append(settings.fill(option["text"]))
    return texts


def _now(value: Any) -> str:
    return "" if value is None else f" (now {_written(value)})"


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
