"""The rules by which a failure is recognized: data, read from a YAML file and checked strictly.

Each rule knows texts that a log shows (`match`), what they mean (`role`, `cause`) and what to do (`fix`). A pattern is
searched for in one line, whatever its case. As a log may be large and hostile, patterns have no unbounded `.*`, and
each has a piece of plain text that has to be in a line: the engine looks for that first.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshtrain.errors import InputError

OWN = Path(__file__).with_name("rules.yaml")
ROLES = ("root", "suspect", "consequence", "noise")
CERTAINTIES = ("sure", "likely", "hint")
LISTS = ("match", "follows", "only_with", "examples", "never")
TEXTS = ("id", "role", "cause", "fix", "certainty", "options")
FLAGS = ("waits", "closed", "outside", "in_traceback")
NEEDED = ("id", "match", "role", "cause", "fix", "examples")
SHORTEST = 4  # characters of a pattern's plain text: shorter ones are in every line


@dataclass(frozen=True)
class Pattern:
    """A regular expression, and texts in lower case one of which is in every line that it matches."""

    regex: re.Pattern[str]
    literals: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """One failure.

    Attributes:
        role: `root` ends jobs; `suspect` is a warning that explains a failure and alone ends nothing; `consequence`
            follows when something else has failed; `noise` looks like a failure and is none.
        certainty: how surely the line tells the cause, to choose between several roots.
        follows: rules that explain this one: where one of them is found, this is what followed.
        only_with: the rule counts only where one of these is found, too.
        options: which of the config's own options help: a name in `advice.OPTIONS`.
        waits: whether the ranks that say so waited for another one, so that those that keep silent are to blame.
        closed: the same for a connection that another rank has closed.
        outside: whether somebody ended the job from outside: where ranks had waited in vain before, that is why.
        in_traceback: whether it is looked for only in the last line of a traceback that no other rule knows.
        examples, never: lines that it matches, and lines that look like it and that it leaves alone.
    """

    id: str
    match: tuple[Pattern, ...]
    role: str
    cause: str
    fix: str
    certainty: str = "likely"
    follows: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()
    options: str | None = None
    waits: bool = False
    closed: bool = False
    outside: bool = False
    in_traceback: bool = False
    examples: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    def may_match(self, lower: str) -> bool:
        """Whether a line, given in lower case, has the plain text of one of its patterns."""
        return any(literal in lower for pattern in self.match for literal in pattern.literals)

    def search(self, text: str, lower: str) -> re.Match[str] | None:
        """The first of its patterns that the line `text` matches; `lower` is the same line in lower case."""
        for pattern in self.match:
            if any(literal in lower for literal in pattern.literals) and (found := pattern.regex.search(text)):
                return found
        return None


def load_rules(path: Path = OWN) -> tuple[Rule, ...]:
    """The rules of a file, in its order.

    Raises:
        InputError: the file cannot be read, or a rule is wrong; the message names it.
    """
    try:
        entries = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: the rules cannot be read: {error}") from error
    if not isinstance(entries, list):
        raise InputError(f"{path}: expected a list of rules, found {type(entries).__name__}")
    rules = tuple(_rule(entry, f"{path.name}, rule {number}") for number, entry in enumerate(entries, 1))
    known = [rule.id for rule in rules]
    for rule in rules:
        if known.count(rule.id) > 1:
            raise InputError(f"{path.name}: the id {rule.id} stands there twice")
        for name in (*rule.follows, *rule.only_with):
            if name not in known or name == rule.id:
                raise InputError(f"{path.name}, {rule.id}: there is no other rule {name} to follow or to go with")
    return rules


def _rule(entry: Any, where: str) -> Rule:
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: expected keys and values, found {entry!r}")
    where = f"{where} ({entry.get('id')})"
    unknown = set(entry) - {*LISTS, *TEXTS, *FLAGS}
    missing = [key for key in NEEDED if not entry.get(key)]
    if unknown or missing:
        raise InputError(f"{where}: unknown keys {sorted(map(str, unknown))}, missing keys {missing}")
    values: dict[str, Any] = {}
    for key, value in entry.items():
        if key in LISTS:
            value = [value] if isinstance(value, str) else value
            if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
                raise InputError(f"{where}: {key} should be a text or a list of texts and is {value!r}")
            values[key] = tuple(value)
        elif not isinstance(value, bool if key in FLAGS else str):
            raise InputError(f"{where}: {key} should be {'true or false' if key in FLAGS else 'a text'}, not {value!r}")
        else:
            values[key] = " ".join(value.split()) if isinstance(value, str) else value
    for key, names in (("role", ROLES), ("certainty", CERTAINTIES)):
        if values.get(key, names[0]) not in names:
            raise InputError(f"{where}: {key} should be one of {', '.join(names)}, not {values[key]!r}")
    anywhere = not values.get("in_traceback", False)
    values["match"] = tuple(_pattern(text, where, anywhere) for text in values["match"])
    for name in re.findall(r"\{(\w+)\}", values["cause"] + values["fix"]):
        if any(name not in pattern.regex.groupindex for pattern in values["match"]):
            raise InputError(f"{where}: the text has {{{name}}}, and not every pattern has a group of that name")
    return Rule(**values)


def _pattern(text: str, where: str, anywhere: bool) -> Pattern:
    """A pattern that is looked for in every line, or not `anywhere` but at the end of tracebacks."""
    try:
        regex = re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise InputError(f"{where}: {text!r} is no regular expression: {error}") from error
    plain = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", text)  # without escapes and character classes
    if re.search(r"\.[*+]|\.\{\d*,\}|\)(?:[*+]|\{)", plain):
        raise InputError(
            f"{where}: {text!r} repeats `.` or a group without a bound, which may take forever on a long line: "
            "write .{0,80}, or a class such as [^,]+"
        )
    literals = literals_of(text) if anywhere else ("",)
    if not literals:
        raise InputError(
            f"{where}: {text!r} has an alternative without {SHORTEST} plain characters in a row to look for"
        )
    return Pattern(regex, literals)


def literals_of(text: str) -> tuple[str, ...]:
    """Of each alternative of a regular expression the longest plain text that every match of it contains.

    Groups, classes and whatever may be missing are left out. Empty where an alternative has none that is long enough.
    """
    if text.startswith("(?-i:") and text.endswith(")"):  # a whole pattern that heeds case
        text = text[5:-1]
    found = []
    for alternative in _alternatives(text):
        longest = max(_plain_runs(alternative), key=len, default="")
        if len(longest) < SHORTEST:
            return ()
        found.append(longest.lower())
    return tuple(found)


# An escape, a class, a count in braces, or a character.
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|[\s\S]")


def _alternatives(text: str) -> list[str]:
    """A regular expression split at the `|` that are in no group."""
    parts, depth = [""], 0
    for token in TOKEN.findall(text):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def _plain_runs(alternative: str) -> list[str]:
    """Runs of plain characters outside of groups; a character with `?`, `*` or `{` behind it is not part of one."""
    runs, depth = [""], 0
    for token in [*TOKEN.findall(alternative), ""]:
        if token == "(":
            depth += 1
            runs.append("")
        elif token == ")":
            depth -= 1
            runs.append("")
        elif depth > 0:
            continue
        elif token in ("?", "*") or (token.startswith("{") and len(token) > 1):
            runs[-1] = runs[-1][:-1]
            runs.append("")
        elif token.startswith("\\") and not token[1].isalnum():
            runs[-1] += token[1]
        elif len(token) == 1 and token not in ".^$+":
            runs[-1] += token
        else:
            runs.append("")
    return runs
