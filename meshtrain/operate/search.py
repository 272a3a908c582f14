"""Goes through logs and collects what the rules know: of each rule the first lines, how many, and which ranks.

A block in which no rule's plain text occurs is passed over whole, so that a long log of a healthy run costs a search
for some hundred words. What is kept is bounded, however often a rule matches.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshtrain.operate.lines import Log, pieces, time_of, without_prefix
from meshtrain.operate.rules import Rule

Rules = Sequence[Rule]

KEPT_LINES = 4  # of each rule
KEPT_RANKS = 100_000  # of each rule
LONGEST_SHOWN = 400  # characters of a line that is evidence
CONTEXT = (b"traceback (most recent", b"(local_rank: ", b", met at ")
WORKED = re.compile(rb"\b(?:step|iteration|iter|epoch)\b\s{0,4}[:=]?\s{0,4}\[?\d")
C1 = re.compile("[\x80-\x9f]")  # controls that some terminals obey
TRACEBACK = "Traceback (most recent call last)"
SUMMARY_RANK = re.compile(r"^\s+rank\s+: (\d+) \(local_rank: \d+\)")
SUMMARY_END = re.compile(r"^(?:-{20,}|={20,}|\[\d+\]:$|Root Cause)")
STARTED = re.compile(r": \d+ process(?:es)? = .{1,300}, met at ")
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
        """Earlier lines come first, those whose time nobody knows last."""
        return (float("inf") if self.time is None else self.time, self.order)


@dataclass
class Found:
    """What was found of one rule: its first lines, how many there are, who wrote them, what their groups held."""

    rule: Rule
    evidence: list[Evidence] = field(default_factory=list)
    count: int = 0
    ranks: dict[str, None] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    work: dict[str, dict[str, int]] = field(default_factory=dict)  # process group -> rank -> collectives enqueued
    attempt: int = 0  # the last start of the job in which it was found
    _last: tuple[int, int] = (0, 0)

    def add(self, evidence: Evidence, match: re.Match[str], attempt: int) -> None:
        if evidence.order == self._last:  # in the next piece of a long line, or the next state of a progress bar
            return
        self._last = evidence.order
        self.count += 1
        if attempt > self.attempt:  # what ended an earlier start counts less
            self.evidence.clear()
        self.attempt = max(attempt, self.attempt)
        if evidence.rank is not None and len(self.ranks) < KEPT_RANKS:
            self.ranks[evidence.rank] = None
        groups = {name: value.strip() for name, value in match.groupdict().items() if value is not None}
        if "enqueued" in groups and evidence.rank is not None and len(self.work) < KEPT_LINES * 100:
            ranks = self.work.setdefault(groups["pg"], {})
            if len(ranks) < KEPT_RANKS:
                ranks[evidence.rank] = int(groups["enqueued"])
        if attempt < self.attempt:
            return
        if not self.evidence or evidence.key < self.evidence[0].key:
            self.groups = groups
        self.evidence = sorted([*self.evidence, evidence], key=lambda one: one.key)[:KEPT_LINES]


class Search:
    """All that is found in some logs.

    Attributes:
        found: by the id of its rule.
        worked: whether a line shows that training had begun.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.found: dict[str, Found] = {}
        self._spoken: dict[str, None] = {}  # ranks of which some line or file speaks
        self._processes: dict[str, Log] = {}  # known by a number of their node's
        self._named: set[str] = set()  # of these, the ones whose lines know their number in the job
        self.worked = False
        self._words = [(rule, _words(rule)) for rule in rules]
        self._files = 0

    def read(self, log: Log, alone: bool) -> None:
        """Reads a log to its end; `alone`: it is the only one, so that starts of the job can be told apart by it.

        Raises:
            InputError: the file cannot be read.
        """
        self._files += 1
        place = _Place(log, self._files, alone)
        if log.process is not None:
            self._processes[log.process] = log
        elif log.who is not None:
            self._see(log.who)
        for first, block in log.blocks():
            lower = block.lower()
            self.worked = self.worked or WORKED.search(lower) is not None
            rules = [rule for rule, words in self._words if any(word in lower for word in words)]
            if not rules and not place.tracebacks and not any(word in lower for word in CONTEXT):
                place.time = None
                continue
            for number, line in enumerate(block.split(b"\n"), first):
                for text in pieces(line):
                    self._line(place, number, text, rules)

    @property
    def seen(self) -> list[str]:
        """Who is there: ranks of which lines or files speak, and in torchrun's last start who has no better name."""
        last = max((log.attempt for log in self._processes.values()), default=0)
        nameless = [log for process, log in self._processes.items() if process not in self._named]
        return list(self._spoken | {str(log.who): None for log in nameless if log.attempt == last})

    def tell(self, file: str, text: str) -> None:
        """Looks at one line that stands in no log."""
        self._files += 1
        place = _Place(Log(file), self._files, False)
        self._look(place, 1, text, self.rules, None, True)

    def _line(self, place: "_Place", number: int, text: str, rules: Rules) -> None:
        place.time = time_of(text) or place.time
        lower = text.lower()
        interesting = [rule for rule in rules if not rule.in_traceback and rule.may_match(lower)]
        if not interesting and not place.tracebacks and not place.may_matter(text):
            return
        text, who = without_prefix(text)
        if place.notes(text):
            return
        if who is not None and who.startswith("rank ") and place.log.process is not None:
            self._named.add(place.log.process)
            self._see(who)
        who = who or place.rank
        if who is not None and place.log.process is None:
            self._see(who)
        last = place.ends_traceback(who, text)
        self._look(place, number, text, self.rules if last else interesting, who, last)

    def _look(self, place: "_Place", number: int, text: str, rules: Rules, who: str | None, last: bool) -> None:
        """Matches rules with a line. Where a rank tells how another one failed, that is another line, of the other."""
        blamed = BLAMED.search(text)
        if blamed is None:
            self._match(place, number, text, rules, who, last)
            return
        self._see(blamed[1])
        self._match(place, number, text[: blamed.start(2)], rules, who, False)
        self._match(place, number, blamed[2], self.rules, blamed[1], True)

    def _match(self, place: "_Place", number: int, text: str, rules: Rules, who: str | None, last: bool) -> None:
        """Rules for the last line of a traceback are asked only about such a line, and if no other one knows it."""
        lower, known = text.lower(), False
        for ending in (False, True) if last else (False,):
            for rule in self.rules if ending else rules:
                if rule.in_traceback == ending and not (ending and known) and (match := rule.search(text, lower)):
                    known = True
                    self._add(rule, match, place, number, text, who)

    def _add(self, rule: Rule, match: re.Match[str], place: "_Place", number: int, text: str, who: str | None) -> None:
        shown = " ".join(C1.sub("", text).split())
        start = max(0, min(match.start() - LONGEST_SHOWN // 2, len(shown) - LONGEST_SHOWN))
        shown = (
            ("..." if start else "")
            + shown[start : start + LONGEST_SHOWN]
            + "..." * (len(shown) > start + LONGEST_SHOWN)
        )
        evidence = Evidence(place.log.path, number, shown, who, place.time, (place.order, number))
        self.found.setdefault(rule.id, Found(rule)).add(evidence, match, place.attempt)

    def _see(self, who: str) -> None:
        if len(self._spoken) < KEPT_RANKS:
            self._spoken[who] = None


class _Place:
    """Where in a log the search is, and what the lines before have said."""

    def __init__(self, log: Log, order: int, alone: bool) -> None:
        self.log = log
        self.order = order
        self.alone = alone
        self.attempt = log.attempt
        self.time: float | None = None
        self.tracebacks: dict[str | None, None] = {}  # of which ranks one has begun
        self._summary: str | None = None

    @property
    def rank(self) -> str | None:
        """Who speaks where a line does not say it."""
        return self._summary or self.log.who

    def may_matter(self, text: str) -> bool:
        """Whether a line that no rule knows may be one for `notes`."""
        return "(local_rank: " in text or TRACEBACK in text or ", met at " in text or self._summary is not None

    def notes(self, text: str) -> bool:
        """Whether the line only says where we are: a start of the job, or of whom torchrun's summary speaks."""
        if self.alone and STARTED.search(text):
            self.attempt += 1
            return True
        if (found := SUMMARY_RANK.match(text)) is not None:
            self._summary = f"rank {found[1]}"
            return True
        if self._summary is not None and SUMMARY_END.match(text):
            self._summary = None
        return False

    def ends_traceback(self, who: str | None, text: str) -> bool:
        """Whether the line is the last of a traceback: the first one of that rank that is not indented."""
        if TRACEBACK in text:
            if len(self.tracebacks) < KEPT_RANKS:
                self.tracebacks[who] = None
            return False
        if who not in self.tracebacks or not text.strip() or text[0].isspace():
            return False
        del self.tracebacks[who]
        return True


def _words(rule: Rule) -> tuple[bytes, ...]:
    if rule.in_traceback:
        return ()
    return tuple(literal.encode() for pattern in rule.match for literal in pattern.literals)
