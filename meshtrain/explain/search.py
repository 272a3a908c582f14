"""Goes through logs and collects what the rules know: of each rule the first lines, how many, and which ranks.

A job of meshtrain that was lost says by what in one line of JSON. All other lines are matched with the rules.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshtrain.explain.log_reader import LONGEST, Log, pieces, time_of, without_prefix
from meshtrain.explain.rules import Rule
from meshtrain.job.watchdog.records import FAILURE_MARK

Rules = Sequence[Rule]

KEPT_LINES = 4  # of each rule
KEPT_RANKS = 100_000  # of each rule
LONGEST_SHOWN = 400  # characters of a line that is evidence
TRACEBACK = "Traceback (most recent call last)"
STARTED = re.compile(r": \d+ process(?:es)? = .{1,300}, met at ")
SUMMARY_RANK = re.compile(r"^\s+rank\s+: (\d+) \(local_rank: \d+\)")
SUMMARY_END = re.compile(r"^(?:-{20,}|={20,}|\[\d+\]:$|Root Cause)")
CONTEXT = (FAILURE_MARK, TRACEBACK, "(local_rank: ", ", met at ")  # lines that no rule knows, and that matter
CONTEXT_BYTES = tuple(text.lower().encode() for text in CONTEXT)
WORKED = re.compile(rb"\b(?:step|iteration|iter|epoch)\b\s{0,4}[:=]?\s{0,4}\[?\d")
C1 = re.compile("[\x80-\x9f]")  # controls that some terminals obey
BLAMED = re.compile(
    r"^(?:rank \d{1,7} on host [^:]{1,200} stops, because )?(rank \d{1,7}) on host [^:]{1,200} failed: "
    r"(\S[\s\S]{0,4000})$"
)


@dataclass(frozen=True)
class Evidence:
    """A line that a rule knows. `time` orders it among others of the year; None where nothing says so."""

    file: str
    line: int
    text: str
    rank: str | None
    time: float | None
    order: tuple[int, int]  # the file's place among the files, the line

    @property
    def key(self) -> tuple[float, tuple[int, int]]:
        return (float("inf") if self.time is None else self.time, self.order)


@dataclass
class Matches:
    """The matches of one rule: its first lines, how many there are, who wrote them, what their groups held."""

    rule: Rule
    by_kind: bool = False  # the job's own diagnosis; sentences that say the same to people are left out then
    evidence: list[Evidence] = field(default_factory=list)
    count: int = 0
    ranks: dict[str, None] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    work: dict[str, dict[str, int]] = field(default_factory=dict)  # process group -> rank -> collectives enqueued
    attempt: int = 0  # the last start of the job in which there was one
    _last: tuple[int, int] = (0, 0)

    def add(self, evidence: Evidence, groups: Mapping[str, str | None], attempt: int) -> None:
        if evidence.order == self._last:  # in the next piece of a long line, or the next state of a progress bar
            return
        self._last = evidence.order
        self.count += 1
        if attempt > self.attempt:  # what ended an earlier start counts less
            self.evidence.clear()
        self.attempt = max(attempt, self.attempt)
        if evidence.rank is not None and len(self.ranks) < KEPT_RANKS:
            self.ranks[evidence.rank] = None
        stripped = {name: value.strip() for name, value in groups.items() if value is not None}
        if "enqueued" in stripped and evidence.rank is not None and len(self.work) < KEPT_LINES * 100:
            ranks = self.work.setdefault(stripped["pg"], {})
            if len(ranks) < KEPT_RANKS:
                ranks[evidence.rank] = int(stripped["enqueued"])
        if attempt < self.attempt:
            return
        if not self.evidence or evidence.key < self.evidence[0].key:
            self.groups = stripped
        self.evidence = sorted([*self.evidence, evidence], key=lambda line: line.key)[:KEPT_LINES]


class Search:
    """The matches in some logs."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.matches: dict[str, Matches] = {}  # by the id of their rule
        self.worked = False  # whether a line shows that training had begun
        self._by_kind = {rule.kind: rule for rule in rules if rule.kind is not None}
        self._words = [
            (rule, [literal.encode() for pattern in rule.match for literal in pattern.literals])
            for rule in rules
            if not rule.in_traceback
        ]
        self._ranks: dict[str, None] = {}  # of which some line or file speaks
        self._processes: dict[str, Log] = {}  # known by a number of their node's
        self._identified: set[str] = set()  # of these, the ones whose lines know their number in the job
        self._headlines: set[str] = set()  # of what ranks told of others: their line of JSON says the same once more
        self._files = 0

    def read(self, log: Log, alone: bool) -> None:
        """Reads a log; `alone`: it is the only one, and tells the starts of the job apart. Raises InputError."""
        self._files += 1
        position = _Position(log, self._files, alone)
        if log.process is not None:
            self._processes[log.process] = log
        elif log.rank is not None:
            self._add_rank(log.rank)
        for first, block in log.blocks():
            lower = block.lower()
            self.worked = self.worked or WORKED.search(lower) is not None
            rules = [rule for rule, words in self._words if any(word in lower for word in words)]
            if not rules and not position.tracebacks and not any(word in lower for word in CONTEXT_BYTES):
                position.time = None
                continue
            for position.line, line in enumerate(block.split(b"\n"), first):
                for text in pieces(line):
                    self._line(position, text, rules)

    @property
    def ranks(self) -> list[str]:
        """Ranks of which lines or files speak, and in torchrun's last start those that have no better name."""
        last = max((log.attempt for log in self._processes.values()), default=0)
        nameless = [log for process, log in self._processes.items() if process not in self._identified]
        return list(self._ranks | {str(log.rank): None for log in nameless if log.attempt == last})

    def read_text(self, file: str, text: str) -> bool:
        """Whether a rule knows this line, which stands in no log."""
        self._files += 1
        return self._match_blamed(_Position(Log(file), self._files, False), text, self.rules, None, True)

    def _line(self, position: "_Position", text: str, rules: Rules) -> None:
        position.time = time_of(text) or position.time
        lower = text.lower()
        candidates = [rule for rule in rules if not rule.in_traceback and rule.may_match(lower)]
        if not candidates and not position.tracebacks and not position.may_matter(text):
            return
        text, rank = without_prefix(text)
        if position.notes(text):
            return
        if rank is not None and rank.startswith("rank ") and position.log.process is not None:
            self._identified.add(position.log.process)
            self._add_rank(rank)
        rank = rank or position.rank
        if rank is not None and position.log.process is None:
            self._add_rank(rank)
        if FAILURE_MARK in text:
            self._failure(position, text.partition(FAILURE_MARK)[2])
            return
        last = position.ends_traceback(rank, text)
        self._match_blamed(position, text, self.rules if last else candidates, rank, last)

    def _failure(self, position: "_Position", line: str) -> None:
        """The line of JSON: a kind that a rule is about, or an exception, whose text rules know."""
        try:
            failure = json.loads(line)
            kind, text = failure["kind"], str(failure["text"])[:LONGEST]
            ranks = [f"rank {rank}" for rank in failure["ranks"] if type(rank) is int and rank >= 0]
            rule = self._by_kind.get(kind)
        except (ValueError, TypeError, KeyError, RecursionError):  # cut off; the block for people says the same
            return
        for rank in ranks:
            self._add_rank(rank)
        first = next(iter(ranks), None)
        if rule is not None:
            self._add(rule, None, position, text, first)
            self.matches[rule.id].ranks |= dict.fromkeys(ranks)
        elif text.partition("\n")[0] not in self._headlines:
            self._match_blamed(position, text, self.rules, first, True)

    def _match_blamed(self, position: "_Position", text: str, rules: Rules, rank: str | None, last: bool) -> bool:
        """Matches rules with a line. Where a rank tells how another one failed, that counts as a line of the other."""
        blamed = BLAMED.search(text)
        if blamed is None:
            return self._match(position, text, rules, rank, last)
        if len(self._headlines) < KEPT_RANKS:
            self._headlines.add(text[blamed.start(1) :].partition("\n")[0])
        self._add_rank(blamed[1])
        self._match(position, text[: blamed.start(2)], rules, rank, False)
        return self._match(position, blamed[2], self.rules, blamed[1], True)

    def _match(self, position: "_Position", text: str, rules: Rules, rank: str | None, last: bool) -> bool:
        """Rules for the last line of a traceback are asked only about such a line, and if no other one knows it."""
        lower, known = text.lower(), False
        for ending in (False, True) if last else (False,):
            for rule in self.rules if ending else rules:
                if rule.in_traceback == ending and not (ending and known) and (match := rule.search(text, lower)):
                    known = True
                    self._add(rule, match, position, text, rank)
        return known

    def _add(self, rule: Rule, match: re.Match[str] | None, position: "_Position", text: str, rank: str | None) -> None:
        """`match`: of the rule in the text; None: the job's own diagnosis is of the rule's kind."""
        by_kind = match is None
        matches = self.matches.setdefault(rule.id, Matches(rule))
        if by_kind and not matches.by_kind:
            matches = self.matches[rule.id] = Matches(rule, by_kind=True)
        elif matches.by_kind and not by_kind:
            return
        start, groups = (0, {}) if match is None else (match.start(), match.groupdict())
        line = " ".join(C1.sub("", text).split())
        start = max(0, min(start - LONGEST_SHOWN // 2, len(line) - LONGEST_SHOWN))
        shown = "..." * (start > 0) + line[start : start + LONGEST_SHOWN] + "..." * (len(line) > start + LONGEST_SHOWN)
        order = (position.order, position.line)
        evidence = Evidence(position.log.path, position.line, shown, rank, position.time, order)
        matches.add(evidence, groups, position.attempt)

    def _add_rank(self, rank: str) -> None:
        if len(self._ranks) < KEPT_RANKS:
            self._ranks[rank] = None


class _Position:
    """Where in a log the search is."""

    def __init__(self, log: Log, order: int, alone: bool) -> None:
        self.log = log
        self.order = order
        self.line = 1
        self.alone = alone
        self.attempt = log.attempt
        self.time: float | None = None
        self.tracebacks: dict[str | None, None] = {}  # of which ranks one has begun
        self._summary: str | None = None

    @property
    def rank(self) -> str | None:
        """The writer of lines that do not name one."""
        return self._summary or self.log.rank

    def may_matter(self, text: str) -> bool:
        return self._summary is not None or any(word in text for word in CONTEXT)

    def notes(self, text: str) -> bool:
        """Whether the line only says where we are: a start of the job, or of whom torchrun's summary speaks."""
        if self.alone and STARTED.search(text):
            self.attempt += 1
            return True
        if (summary := SUMMARY_RANK.match(text)) is not None:
            self._summary = f"rank {summary[1]}"
            return True
        if self._summary is not None and SUMMARY_END.match(text):
            self._summary = None
        return False

    def ends_traceback(self, rank: str | None, text: str) -> bool:
        """Whether the line is the last of a traceback: the first one of that rank that is not indented."""
        if TRACEBACK in text:
            if len(self.tracebacks) < KEPT_RANKS:
                self.tracebacks[rank] = None
            return False
        if rank not in self.tracebacks or not text.strip() or text[0].isspace():
            return False
        del self.tracebacks[rank]
        return True
