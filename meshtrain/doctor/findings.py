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
    # hosts (or ranks, or links) that it concerns; empty for the job as a whole
    where: tuple[str, ...] = ()
    fix: str = ""


def finding(
    sentence: str, places: str | Iterable[str] = (), severity: str = "", /, **words: Any
) -> Finding:
    """The finding for a sentence (its id, or id/case), filled in with `words`, and with `name`,
    `names` of `places`."""
    row = SENTENCES[sentence]
    where = (places,) if isinstance(places, str) else tuple(places)
    words = {"name": where[0] if where else "", "names": names_text(where), **words}
    return Finding(
        severity=severity or row["severity"],
        id=sentence.partition("/")[0],
        what=row["what"].format(**words),
        where=where,
        fix=row.get("fix", "").format(**words),
    )


def status(findings: Iterable[Finding]) -> int:
    """The exit status: 1 if there is an error, 0 otherwise."""
    return int(any(finding.severity == "error" for finding in findings))


def names_text(names: Sequence[str]) -> str:
    return join_some(names, MOST_NAMES)


@dataclass(frozen=True)
class Groups:
    """Names, by the value that each of them has; `2 on mth1, mth2; 3 on mth3` as text."""

    by_value: Mapping[str, Sequence[str]]  # the most frequent value first, then as the names come

    @classmethod
    def of(cls, values: Mapping[str, str]) -> "Groups":
        """From the value of each name."""
        groups = group_values((value, name) for name, value in values.items())
        return cls(dict(sorted(groups.items(), key=lambda group: -len(group[1]))))

    @property
    def differ(self) -> bool:
        return len(self.by_value) > 1

    @property
    def minority(self) -> list[str]:
        """The names that do not have the most frequent value."""
        _, *others = self.by_value.values()
        return [name for names in others for name in names]

    def __str__(self) -> str:
        parts = []
        for value, names in self.by_value.items():
            parts.append(f"{value or '(none)'} on {names_text(names)}")
        return "; ".join(parts)


def median_of(values: Sequence[float]) -> float:
    return statistics.median(values or [0.0])
