"""A finding: what is wrong, where, and how to fix it; the rules' sentences are in
rules/findings.toml. No I/O."""

import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.errors import group_values, join_some

SEVERITIES = ("error", "warning", "note")
MOST_NAMES = 8
SENTENCES = tomllib.loads(
    Path(__file__).with_name("rules").joinpath("findings.toml").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Finding:
    # "error": the job would not start or be wrong; "warning": it may be slow or surprising; "note"
    severity: str
    id: str  # one per kind of problem
    what: str
    where: tuple[
        str, ...
    ] = ()  # hosts (or ranks, or links) that it concerns; empty for the job as a whole
    fix: str = ""


def finding(
    sentence: str, places: str | Iterable[str] = (), severity: str = "", /, **words: Any
) -> Finding:
    """The finding for a sentence (its id, or id/case), filled in with `words`, and with `name`,
    `names` of `places`."""
    row, places = SENTENCES[sentence], (places,) if isinstance(places, str) else tuple(places)
    words = {"name": places[0] if places else "", "names": names_text(places)} | words
    text, fix = (row.get(part, "").format(**words) for part in ("what", "fix"))
    return Finding(severity or row["severity"], sentence.partition("/")[0], text, places, fix)


def status(findings: Iterable[Finding]) -> int:
    """The exit status: 1 if there is an error, 0 otherwise."""
    return int(any(finding.severity == "error" for finding in findings))


def names_text(names: Sequence[str]) -> str:
    return join_some(names, MOST_NAMES)


def group_by_value(names: Sequence[str], values: Sequence[str]) -> dict[str, list[str]]:
    """Value -> the names that have it, most frequent value first; ties in the order of `names`."""
    groups = group_values(zip(values, names, strict=True))
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def groups_text(groups: Mapping[str, Sequence[str]]) -> str:
    """`2 on mth1, mth2; 3 on mth3`."""
    return "; ".join(
        f"{value or '(none)'} on {names_text(names)}" for value, names in groups.items()
    )


def minority(groups: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for names in list(groups.values())[1:] for name in names]


def median_of(values: Sequence[float]) -> float:
    return statistics.median(values or [0.0])
