"""The rules by which a failure is recognized: data, read from a YAML file and checked strictly.

A pattern is searched for within one line, ignoring case. As a log may be large and hostile,
patterns have no unbounded `.*`, and each has a literal text that every matching line contains,
which is searched for first.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshtrain.errors import InputError

OWN = Path(__file__).with_name("rules.yaml")
ROLES = ("root", "suspect", "consequence", "noise")
CERTAINTIES = ("sure", "likely", "hint")
LISTS = ("match", "follows", "only_with", "examples", "never")
TEXTS = ("id", "role", "cause", "fix", "certainty", "kind", "options")
FLAGS = ("waits", "closed", "outside", "in_traceback")
NEEDED = ("id", "match", "role", "cause", "fix", "examples")
# An escape, a class, a count in braces, or a character.
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|[\s\S]")
SHORTEST = 4  # characters of a pattern's literal text: shorter ones are in every line


@dataclass(frozen=True)
class Pattern:
    """A regular expression, and lower-case literals of which every line that it matches contains at
    least one."""

    regex: re.Pattern[str]
    literals: tuple[str, ...]

    def may_match(self, lower: str) -> bool:
        return any(literal in lower for literal in self.literals)


@dataclass(frozen=True)
class Rule:
    """One kind of failure. `role`: root ends jobs; suspect is a warning that explains a failure but
    does not end a job alone; consequence follows when something else has failed; noise looks like a
    failure and is none."""

    id: str
    match: tuple[Pattern, ...]
    role: str
    cause: str
    fix: str
    # how surely the line tells the cause, to choose between several roots
    certainty: str = "likely"
    # rules that explain this one: if one of them matches, this is a consequence
    follows: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()  # it counts only if one of these matches, too
    # the kind of a job's own diagnosis (`kind` in its line MESHTRAIN_FAILURE) that it is about
    kind: str | None = None
    options: str | None = None  # which of the config's options help: a name in `causes.OPTIONS`
    # ranks that report this waited for others, so those that report nothing are to blame
    waits: bool = False
    closed: bool = False  # the same for a connection that another rank has closed
    # the job was ended from outside: if ranks had waited in vain before, that is the reason
    outside: bool = False
    # applied only to the last line of a traceback that matches no other rule
    in_traceback: bool = False
    examples: tuple[str, ...] = ()  # lines that it matches
    never: tuple[str, ...] = ()  # similar lines that it must not match

    def may_match(self, lower: str) -> bool:
        """Whether a line, given in lower case, contains a literal of one of its patterns."""
        return any(pattern.may_match(lower) for pattern in self.match)

    def search(self, text: str, lower: str) -> re.Match[str] | None:
        """The match of the first of its patterns found in the line `text`; `lower` is the same line
        in lower case."""
        for pattern in self.match:
            # Literals are found faster than expressions.
            result = pattern.regex.search(text) if pattern.may_match(lower) else None
            if result is not None:
                return result
        return None


def load_rules(path: Path = OWN) -> tuple[Rule, ...]:
    """The rules of a file, in its order. Raises InputError: the file cannot be read, or a rule is
    wrong."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where it is there
    try:
        entries = yaml.load(path.read_text(encoding="utf-8"), loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: the rules cannot be read: {error}") from error
    if not isinstance(entries, list):
        raise InputError(f"{path}: expected a list of rules, found {type(entries).__name__}")
    rules = []
    for number, entry in enumerate(entries, 1):
        rules.append(_rule(entry, f"{path.name}, rule {number}"))
    _check_references(path.name, rules)
    return tuple(rules)


def _check_references(file: str, rules: Sequence[Rule]) -> None:
    known = [rule.id for rule in rules]
    for rule in rules:
        if known.count(rule.id) > 1:
            raise InputError(f"{file}: the id {rule.id} stands there twice")
        for name in (*rule.follows, *rule.only_with):
            if name not in known or name == rule.id:
                raise InputError(
                    f"{file}, {rule.id}: there is no other rule {name} to follow or to go with"
                )


def _rule(entry: Any, place: str) -> Rule:
    if not isinstance(entry, Mapping):
        raise InputError(f"{place}: expected keys and values, found {entry!r}")
    place = f"{place} ({entry.get('id')})"
    unknown = set(entry) - {*LISTS, *TEXTS, *FLAGS}
    missing = [key for key in NEEDED if not entry.get(key)]
    if unknown or missing:
        raise InputError(
            f"{place}: unknown keys {sorted(map(str, unknown))}, missing keys {missing}"
        )
    values = {key: _value(key, value, place) for key, value in entry.items()}
    for key, names in (("role", ROLES), ("certainty", CERTAINTIES)):
        if key in values and values[key] not in names:
            raise InputError(
                f"{place}: {key} should be one of {', '.join(names)}, not {values[key]!r}"
            )

    anywhere = not values.get("in_traceback", False)
    patterns = tuple(_pattern(text, place, anywhere) for text in values["match"])
    for name in re.findall(r"\{(\w+)\}", values["cause"] + values["fix"]):
        if any(name not in pattern.regex.groupindex for pattern in patterns):
            raise InputError(
                f"{place}: the text has {{{name}}}, and not every pattern has a group of that name"
            )
    return Rule(**{**values, "match": patterns})


def _value(key: str, value: Any, place: str) -> Any:
    """A value of a key of LISTS, FLAGS or TEXTS."""
    if key in LISTS:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(text, str) and text for text in texts):
            return tuple(texts)
        raise InputError(f"{place}: {key} should be a text or a list of texts and is {texts!r}")
    if key in FLAGS:
        if isinstance(value, bool):
            return value
        raise InputError(f"{place}: {key} should be true or false, not {value!r}")
    if isinstance(value, str):
        return " ".join(value.split())
    raise InputError(f"{place}: {key} should be a text, not {value!r}")


def _pattern(text: str, place: str, anywhere: bool) -> Pattern:
    """`anywhere` False: the pattern is applied only to the ends of tracebacks."""
    try:
        regex = re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise InputError(f"{place}: {text!r} is no regular expression: {error}") from error
    plain = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", text)  # without escapes and character classes
    if re.search(r"\.[*+]|\.\{\d*,\}|\)(?:[*+]|\{)", plain):
        raise InputError(
            f"{place}: {text!r} repeats `.` or a group without a bound, which may take forever on "
            "a long line: write .{0,80}, or a class such as [^,]+"
        )
    literals = literals_of(text) if anywhere else ("",)
    if not literals:
        raise InputError(
            f"{place}: {text!r} has an alternative without {SHORTEST} plain characters in a row to "
            "look for"
        )
    return Pattern(regex, literals)


def literals_of(text: str) -> tuple[str, ...]:
    """For each alternative of a regular expression, the longest literal in every match; empty if
    one has none."""
    if text.startswith("(?-i:") and text.endswith(")"):  # a whole pattern that is case-sensitive
        text = text[5:-1]
    alternatives: list[list[str]] = [[""]]  # runs of literal characters outside groups
    depth = 0
    for token in TOKEN.findall(text):
        runs = alternatives[-1]
        if token == "(":
            depth += 1
        elif token == ")":
            depth -= 1
        if token == "|" and depth == 0:
            alternatives.append([""])
        elif depth > 0:
            runs.append("")
        elif token in ("?", "*") or (token[0] == "{" and len(token) > 1):
            # The character before it is optional.
            runs[-1] = runs[-1][:-1]
            runs.append("")
        elif token[0] == "\\" and not token[1].isalnum():
            runs[-1] += token[1]
        elif len(token) == 1 and token not in ".^$+)":
            runs[-1] += token
        else:
            runs.append("")
    longest = tuple(max(runs, key=len).lower() for runs in alternatives)
    return longest if min(map(len, longest)) >= SHORTEST else ()
