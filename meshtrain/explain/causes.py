"""Causes of a job's failure, from its logs: separates root causes from their consequences, and
proposes options of the run's config that help, with their current values (`options.yaml`)."""

import fcntl
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
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
# folders above a log with its run's config.yaml: logs/slurm-7.0/node_0/ID/attempt_0/3/stderr.log is
# 7
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
        by_section = defaultdict[str, Any](dict, {} if sections is None else sections)
        keys = {
            name: by_section[name] if isinstance(by_section[name], Mapping) else {}
            for name in SECTIONS
        }
        keys["layout"] = dict.fromkeys(AXES if self.known else (), 1) | dict(keys["layout"])
        self._names: dict[str, Any] = {
            name: _Section(**{str(k): v for k, v in keys[name].items()}) for name in keys
        }
        self._names |= {"known": self.known, "now": _now, "max": max, "__builtins__": {}}

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
        fix = " ".join([self.fix, *(f"{option};" for option in self.options)]).rstrip(";")
        of_line = ("file", "line", "text", "rank")
        evidence = [
            {name: getattr(line, name) for name in of_line} for line in self.matches.evidence
        ]
        cause = {
            "id": self.id,
            "role": self.role,
            "cause": self.cause,
            "fix": fix,
            "evidence": evidence,
        }
        ranks = sorted(self.matches.ranks, key=_number)
        return cause | {"options": list(self.options), "count": self.matches.count, "ranks": ranks}


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
    search = Search(tuple(load_rules() if rules is None else rules))
    for log in logs:
        search.read(log, alone=len(logs) == 1)
    for file, text in not_entered(logs):
        search.read_text(file, text)
    for folder, end in zip(folders, ends, strict=True):
        if end is not None and end[0] == "failed":
            file, reason = str(Path(folder) / "exit.json"), end[1]
            if not search.read_text(file, reason):  # a reason that no rule knows is still a failure
                search.read_text(file, f"the run wrote down that it failed: {reason}")
    if (
        ends
        and len(folders) == len(paths)
        and all(end is not None and end[0] == "well" for end in ends)
    ):
        return []  # whatever the logs show, the run continued and ended well
    beside = (settings_beside(path) for path in paths)
    return _rank_causes(
        search, next((settings for settings in beside if settings.known), Settings(None))
    )


def _end_of_run(folder: Path) -> tuple[str, str] | None:
    """How the last job of a run's folder ended (failed, well or running) and why; None: it is not a
    run's folder."""
    if not (folder / "config.yaml").is_file():
        return None
    try:
        ended = parse_json(read_limited(folder / "exit.json"))
        status, reason = ended["status"], str(ended.get("reason"))
    except FileNotFoundError:
        if _is_locked(folder):
            return "running", ""
        return "failed", "there is no exit.json, and nobody holds the folder"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return "failed", f"exit.json cannot be read: {error!r}"
    return ("failed", reason) if status == "failed" else ("well", "")


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
    matches = {
        name: match
        for name, match in search.matches.items()
        if match.rule.role != "noise"
        and (not match.rule.only_with or set(match.rule.only_with) & set(search.matches))
    }
    failed = any(match.rule.role in ("root", "consequence") for match in matches.values())
    if not failed and search.worked:  # warnings of a job that has begun training are no failure
        return []
    last = max((match.attempt for match in matches.values()), default=0)
    roles = {name: _role(match, matches) for name, match in matches.items()}

    def key(match: Matches) -> tuple:
        role, rule = roles[match.rule.id], match.rule
        tier = 0 if role == "root" else 1 if role == "suspect" else 2 if rule.role == "root" else 3
        if tier == 2 and rule.outside:
            tier = 4
        return tier, last - match.attempt, CERTAINTIES.index(rule.certainty), match.evidence[0].key

    victims = {rank for match in matches.values() if _is_victim(match.rule) for rank in match.ranks}
    silent = [rank for rank in search.ranks if rank not in victims]
    ordered = sorted(matches.values(), key=key)
    return [_cause(match, roles[match.rule.id], silent, settings) for match in ordered]


def _role(match: Matches, matches: dict[str, Matches]) -> str:
    """A rule's role here: a root explained by another rule is a consequence, as is an end from
    outside after a hang."""
    rule = match.rule
    if any(name in matches and rule.id not in matches[name].rule.follows for name in rule.follows):
        return "consequence"
    if rule.outside and any(
        other.rule.waits and _long_before(other, match) for other in matches.values()
    ):
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
    parts = []
    for (node, kind), numbers in groupby(
        sorted(map(_number, ranks)), key=lambda parsed: parsed[:2]
    ):
        of = f" of node {node}" if node >= 0 else ""
        parts.append(f"{kind} {join_some(ranges(number for *_, number in numbers), NAMED)}{of}")
    return " and ".join(
        [*parts[:NAMED], *([f"{len(parts) - NAMED} more"] if len(parts) > NAMED else [])]
    )


def _number(rank: str) -> tuple[int, str, int]:
    """The node (-1: unknown), the kind and the number of `local rank 1 of node 0`."""
    match = RANK.match(rank)
    assert match is not None  # log_reader.py writes this form
    return int(match["node"] or -1), match["kind"], int(match["number"])


def settings_beside(path: str) -> Settings:
    """The config of the run to which a log belongs: the nearest config.yaml of meshtrain in the
    folders above it.

    Nobody has named these files, and in a folder of many users they may be anybody's: what cannot
    be read is passed over, and only texts of a config's form are looked at.
    """
    log = Path(path).resolve()
    for folder in ([log] if log.is_dir() else []) + list(log.parents)[:LEVELS]:
        file = folder / "config.yaml"
        with suppress(OSError, InputError):
            named = folder == log  # a file in a folder that the user names may be a link
            text = (
                read_limited(file, MOST_OF_CONFIG) if named else read_guarded(file, MOST_OF_CONFIG)
            )
            sections = parse_yaml(text)
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
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
