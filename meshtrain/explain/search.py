"""Searches logs for lines that match rules; for each rule, keeps the first lines, their number, and
their ranks.

A lost job of meshtrain reports the reason in one line of JSON. All other lines are matched against
the rules.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshtrain.explain.log_reader import LONGEST, Log, pieces, time_of, without_prefix
from meshtrain.explain.rules import Rule
from meshtrain.job.parsing import parse_json
from meshtrain.job.watchdog.records import FAILURE_MARK

Rules = Sequence[Rule]

KEPT_LINES = 4  # of each rule
KEPT_RANKS = 100_000  # of each rule
KEPT_GROUPS = 400  # process groups of each rule
LONGEST_SHOWN = 400  # characters of a line that is evidence
TRACEBACK = "Traceback (most recent call last)"
STARTED = re.compile(r": \d+ process(?:es)? = .{1,300}, met at ")
SUMMARY_RANK = re.compile(r"^\s+rank\s+: (\d+) \(local_rank: \d+\)")
SUMMARY_END = re.compile(r"^(?:-{20,}|={20,}|\[\d+\]:$|Root Cause)")
# lines that match no rule but matter
CONTEXT = (
    FAILURE_MARK,
    TRACEBACK,
    "(local_rank: ",
    ", met at ",
)
CONTEXT_BYTES = tuple(text.lower().encode() for text in CONTEXT)
WORKED = re.compile(rb"\b(?:step|iteration|iter|epoch)\b\s{0,4}[:=]?\s{0,4}\[?\d")
C1 = re.compile("[\x80-\x9f]")  # control characters that some terminals obey
BLAMED = re.compile(
    r"^(?:rank \d{1,7} on host [^:]{1,200} stops, because )?(rank \d{1,7}) on host [^:]{1,200} "
    r"failed: "
    r"(\S[\s\S]{0,4000})$"
)


@dataclass(frozen=True)
class Evidence:
    """A line that matches a rule. `time` orders it among others of the same year; None if
    unknown."""

    file: str
    line: int
    text: str
    rank: str | None
    time: float | None
    order: tuple[int, int]  # number of the file, number of the line

    @property
    def key(self) -> tuple[float, tuple[int, int]]:
        return key_of(self.time, self.order)


def key_of(time: float | None, order: tuple[int, int]) -> tuple[float, tuple[int, int]]:
    """What lines are ordered by."""
    return (math.inf if time is None else time, order)


@dataclass
class Matches:
    """The matches of one rule: the first lines, their number, the ranks that wrote them, the values
    of their groups."""

    rule: Rule
    # from the job's own diagnosis; readable lines that repeat it are then left out
    by_kind: bool = False
    evidence: list[Evidence] = field(default_factory=list)
    count: int = 0
    ranks: dict[str, None] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    # process group -> rank -> collectives enqueued
    work: dict[str, dict[str, int]] = field(default_factory=dict)
    attempt: int = 0  # the last start of the job that has a match
    _last: tuple[int, int] = (0, 0)

    def count_line(
        self,
        order: tuple[int, int],
        rank: str | None,
        groups: Mapping[str, str | None],
        attempt: int,
    ) -> bool:
        """Counts a line that matches; returns whether it was not counted before."""
        # again in the next piece of a long line, or the next state of a progress bar
        if order == self._last:
            return False
        self._last = order
        self.count += 1
        if attempt > self.attempt:  # what ended an earlier start counts less
            self.evidence.clear()
            self.attempt = attempt
        if rank is not None:
            if len(self.ranks) < KEPT_RANKS:
                self.ranks[rank] = None
            self._note_work(rank, groups)
        return True

    def _note_work(self, rank: str, groups: Mapping[str, str | None]) -> None:
        enqueued, group = groups.get("enqueued"), groups.get("pg")
        if enqueued is None or group is None or len(self.work) >= KEPT_GROUPS:
            return
        ranks = self.work.setdefault(group.strip(), {})
        if len(ranks) < KEPT_RANKS:
            ranks[rank] = int(enqueued)

    def keeps(self, time: float | None, order: tuple[int, int], attempt: int) -> bool:
        """Whether a line is among the first, which are evidence: of millions the others are only
        counted."""
        if attempt < self.attempt:
            return False
        return len(self.evidence) < KEPT_LINES or key_of(time, order) < self.evidence[-1].key

    def keep(self, evidence: Evidence, groups: Mapping[str, str | None]) -> None:
        if not self.evidence or evidence.key < self.evidence[0].key:
            self.groups = {
                name: value.strip() for name, value in groups.items() if value is not None
            }
        lines = sorted([*self.evidence, evidence], key=lambda line: line.key)
        self.evidence = lines[:KEPT_LINES]


def _shown(text: str, start: int) -> str:
    """The part of a line around a match, as it is printed."""
    line = " ".join(C1.sub("", text).split())
    start = max(0, min(start - LONGEST_SHOWN // 2, len(line) - LONGEST_SHOWN))
    end = start + LONGEST_SHOWN
    before = "..." if start > 0 else ""
    after = "..." if end < len(line) else ""
    return before + line[start:end] + after


def _rules_by_literal(rules: Rules) -> dict[bytes, list[int]]:
    """Literal -> the numbers of the rules whose lines have it; without those that apply to ends of
    tracebacks only."""
    numbers: dict[bytes, list[int]] = {}
    for number, rule in enumerate(rules):
        if rule.in_traceback:
            continue
        literals = {literal for pattern in rule.match for literal in pattern.literals}
        for literal in literals:
            numbers.setdefault(literal.encode(), []).append(number)
    return numbers


class Search:
    """The matches in some logs."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.matches: dict[str, Matches] = {}  # by rule id
        self.worked = False  # whether a line shows that training had begun
        self._by_kind = {rule.kind: rule for rule in rules if rule.kind is not None}
        self._by_literal = _rules_by_literal(rules)
        self._rules_for_lines = [rule for rule in rules if not rule.in_traceback]
        self._rules_for_endings = [rule for rule in rules if rule.in_traceback]
        self._ranks: dict[str, None] = {}  # named by some line or file
        self._processes: dict[str, Log] = {}  # known only by a local rank
        self._identified: set[str] = set()  # those of them whose lines have their global rank
        # of failures that ranks reported of others, and repeat as a line of JSON
        self._headlines: set[str] = set()
        self._files = 0

    def read(self, log: Log, alone: bool) -> None:
        """Reads a log. `alone`: it is the only one, so starts of the job are told apart in it.
        Raises InputError."""
        self._files += 1
        position = _Position(log, self._files, alone)
        if log.process is not None:
            self._processes[log.process] = log
        elif log.rank is not None:
            self._add_rank(log.rank)
        for first, block in log.blocks():
            lower = block.lower()
            self.worked = self.worked or WORKED.search(lower) is not None
            rules_by_line = self._rules_by_line(lower)
            matters = bool(rules_by_line) or any(word in lower for word in CONTEXT_BYTES)
            if not matters and not position.tracebacks:
                position.time = None  # its last lines may have another time
                continue
            for number, line in enumerate(block.split(b"\n")):
                position.line = first + number
                rules = rules_by_line.get(number, ())
                for text in pieces(line):
                    self._line(position, text, rules)

    def _rules_by_line(self, lower: bytes) -> dict[int, list[Rule]]:
        """The rules of which a line has a literal, by the line's number in a block, which is given
        in lower case.

        Each literal is looked for in the whole block at once: to look for all of them in each line
        of a hundred megabytes that match would take minutes.
        """
        places: list[tuple[int, int]] = []  # (offset of a literal, number of a rule)
        for literal, numbers in self._by_literal.items():
            at = lower.find(literal)
            while at >= 0:
                places += [(at, number) for number in numbers]
                end = lower.find(b"\n", at)  # once in a line is enough
                at = lower.find(literal, end) if end >= 0 else -1

        # Lines are counted from one place to the next.
        numbers_by_line: dict[int, set[int]] = {}
        line = counted_to = 0
        for at, number in sorted(places):
            line += lower.count(b"\n", counted_to, at)
            counted_to = at
            numbers_by_line.setdefault(line, set()).add(number)
        by_line = {}
        for line, found in numbers_by_line.items():
            by_line[line] = [self.rules[number] for number in sorted(found)]
        return by_line

    @property
    def ranks(self) -> list[str]:
        """Ranks named by lines or files, and of torchrun's last start the local ranks without a
        global one."""
        ranks = dict(self._ranks)
        last = max((log.attempt for log in self._processes.values()), default=0)
        for process, log in self._processes.items():
            if process not in self._identified and log.attempt == last:
                ranks[str(log.rank)] = None
        return list(ranks)

    def read_text(self, file: str, text: str) -> bool:
        """Matches a line that is in no log; returns whether a rule matches."""
        self._files += 1
        position = _Position(Log(file), self._files, alone=False)
        return self._match_blamed(position, text, self._rules_for_lines, rank=None, last=True)

    def _line(self, position: "_Position", text: str, rules: Rules) -> None:
        position.time = time_of(text) or position.time
        lower = text.lower()
        candidates = [rule for rule in rules if rule.may_match(lower)]
        if not candidates and not position.tracebacks and not position.may_matter(text):
            return
        text, named = without_prefix(text)
        if position.notes(text):
            return
        rank = named or position.rank
        if position.log.process is None:
            if rank is not None:
                self._add_rank(rank)
        elif named is not None and named.startswith("rank "):
            self._identified.add(position.log.process)
            self._add_rank(named)

        if FAILURE_MARK in text:
            self._failure(position, text.partition(FAILURE_MARK)[2])
            return
        last = position.ends_traceback(rank, text)
        self._match_blamed(position, text, candidates, rank, last)

    def _failure(self, position: "_Position", line: str) -> None:
        """Reads the line of JSON: its kind belongs to a rule, or it is an exception whose text
        rules match."""
        try:
            failure = parse_json(line)
            kind, text = failure["kind"], str(failure["text"])[:LONGEST]
            ranks = [f"rank {rank}" for rank in failure["ranks"] if type(rank) is int and rank >= 0]
            rule = self._by_kind.get(kind)
        except (ValueError, TypeError, KeyError):  # cut off; the readable block says the same
            return
        for rank in ranks:
            self._add_rank(rank)
        first = next(iter(ranks), None)
        if rule is not None:
            self._add(rule, None, position, text, first)
            self.matches[rule.id].ranks |= dict.fromkeys(ranks)
        elif text.partition("\n")[0] not in self._headlines:
            self._match_blamed(position, text, self._rules_for_lines, first, last=True)

    def _match_blamed(
        self, position: "_Position", text: str, rules: Rules, rank: str | None, last: bool
    ) -> bool:
        """Matches rules against a line. A report of how another rank failed counts as a line of
        that rank."""
        blamed = BLAMED.search(text)
        if blamed is None:
            return self._match(position, text, rules, rank, last)
        reporter, culprit = text[: blamed.start(2)], blamed[1]
        if len(self._headlines) < KEPT_RANKS:
            self._headlines.add(text[blamed.start(1) :].partition("\n")[0])
        self._add_rank(culprit)
        self._match(position, reporter, rules, rank, last=False)
        return self._match(position, blamed[2], self._rules_for_lines, culprit, last=True)

    def _match(
        self, position: "_Position", text: str, rules: Rules, rank: str | None, last: bool
    ) -> bool:
        """Rules for the last line of a traceback are tried only on such a line, and only if no
        other rule matches."""
        known = self._try(position, text, rules, rank)
        # Any exception ends a traceback: what a rule knows of it by name goes first.
        if last and not known:
            return self._try(position, text, self._rules_for_endings, rank)
        return known

    def _try(self, position: "_Position", text: str, rules: Rules, rank: str | None) -> bool:
        lower = text.lower()
        known = False
        for rule in rules:
            match = rule.search(text, lower)
            if match is not None:
                known = True
                self._add(rule, match, position, text, rank)
        return known

    def _add(
        self,
        rule: Rule,
        match: re.Match[str] | None,
        position: "_Position",
        text: str,
        rank: str | None,
    ) -> None:
        """`match`: the rule's match in the text; None: the job's own diagnosis is of the rule's
        kind."""
        by_kind = match is None
        matches = self.matches.setdefault(rule.id, Matches(rule))
        # The job's own diagnosis knows more than the lines that repeat it.
        if by_kind and not matches.by_kind:
            matches = self.matches[rule.id] = Matches(rule, by_kind=True)
        elif matches.by_kind and not by_kind:
            return
        order = (position.order, position.line)
        groups = {} if match is None else match.groupdict()
        if not matches.count_line(order, rank, groups, position.attempt):
            return
        if matches.keeps(position.time, order, position.attempt):
            shown = _shown(text, 0 if match is None else match.start())
            evidence = Evidence(position.log.path, position.line, shown, rank, position.time, order)
            matches.keep(evidence, groups)

    def _add_rank(self, rank: str) -> None:
        if len(self._ranks) < KEPT_RANKS:
            self._ranks[rank] = None


class _Position:
    """The search's position in a log."""

    def __init__(self, log: Log, order: int, alone: bool) -> None:
        self.log = log
        self.order = order
        self.line = 1
        self.alone = alone
        self.attempt = log.attempt
        self.time: float | None = None
        self.tracebacks: dict[str | None, None] = {}  # the ranks whose traceback has begun
        self._summary: str | None = None

    @property
    def rank(self) -> str | None:
        """The writer of lines that name no rank."""
        return self._summary or self.log.rank

    def may_matter(self, text: str) -> bool:
        return self._summary is not None or any(word in text for word in CONTEXT)

    def notes(self, text: str) -> bool:
        """Whether the line only updates the position: a start of the job, or the rank in torchrun's
        summary."""
        if self.alone and STARTED.search(text):
            self.attempt += 1
            return True
        summary = SUMMARY_RANK.match(text)
        if summary is not None:
            self._summary = f"rank {summary[1]}"
            return True
        if self._summary is not None and SUMMARY_END.match(text):
            self._summary = None
        return False

    def ends_traceback(self, rank: str | None, text: str) -> bool:
        """Whether the line is the last of a traceback: the first line of that rank that is not
        indented."""
        if TRACEBACK in text:
            if len(self.tracebacks) < KEPT_RANKS:
                self.tracebacks[rank] = None
            return False
        if rank not in self.tracebacks or not text.strip() or text[0].isspace():
            return False
        del self.tracebacks[rank]
        return True
