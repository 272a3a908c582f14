"""The rules themselves: each knows its own lines and leaves alone those of others, and none takes
long over a line."""

import re
import time
from pathlib import Path

import pytest
import yaml

from meshtrain.errors import InputError
from meshtrain.explain.causes import OPTIONS, Settings, advice, explain
from meshtrain.explain.log_reader import LONGEST, without_prefix
from meshtrain.explain.rules import Rule, literals_of, load_rules

RULES = load_rules()
BY_ID = {rule.id: rule for rule in RULES}
EXAMPLES = [(rule, text) for rule in RULES for text in rule.examples]
HERE = Path(__file__).parent
TABLES = yaml.safe_load((HERE / "wrong_rules.yaml").read_text())
AFTERWARDS = """\
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14214.
W1121 23:00:00.1 14637 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 9 closing signal SIGTERM
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  exitcode  : -15 (pid: 14649)  (SIGTERM)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def in_a_log(rule: Rule, text: str) -> str:
    """An example with what it needs around it: a traceback, or another rule without which it says
    nothing."""
    if rule.in_traceback:
        return f'Traceback (most recent call last):\n  File "a.py", line 2, in <module>\n    f()\n{text}\n'
    return "".join(f"{BY_ID[name].examples[0]}\n" for name in rule.only_with[:1]) + f"{text}\n"


def matching(text: str) -> set[str]:
    text, _ = without_prefix(text)
    return {rule.id for rule in RULES if not rule.in_traceback and rule.search(text, text.lower())}


def test_there_are_many_and_each_is_complete() -> None:
    assert sum(rule.role == "root" for rule in RULES) >= 60
    assert {rule.options for rule in RULES} - {None} == set(OPTIONS)


def test_an_example_alone_is_recognized_and_comes_first(tmp_path: Path) -> None:
    log = tmp_path / "job.txt"
    for rule, text in EXAMPLES:
        log.write_text(in_a_log(rule, text))
        causes = explain([str(log)], RULES)
        places = [cause.id for cause in causes]
        if rule.role == "noise":
            assert places == [], text
            continue
        before = {*rule.follows} | ({*rule.only_with} if rule.role == "suspect" else set())
        assert rule.id in places, text
        assert places[0] == rule.id or places[0] in before, f"{places}: {text}"
        line = causes[places.index(rule.id)].matches.evidence[0]
        assert (line.file, log.read_text().splitlines()[line.line - 1]) == (str(log), text)


def test_a_root_comes_before_what_followed_it(tmp_path: Path) -> None:
    log = tmp_path / "job.txt"
    for rule, text in EXAMPLES:
        if rule.role == "root":
            log.write_text(in_a_log(rule, text) + AFTERWARDS)
            first, *others = explain([str(log)], RULES)
            assert first.role == "root", text
            assert first.id == rule.id or first.id in rule.follows, text
            afterwards = {cause.id for cause in others}
            assert {"GLOO_CLOSED", "SIGTERM_COLLATERAL", "WORKER_FAILED"} <= afterwards, text
            assert "NO_TRACEBACK" not in afterwards, text


def test_a_line_is_known_to_its_rule_and_to_those_that_speak_of_it_and_to_no_other() -> None:
    """A line that two rules know is one that the order between them settles: one follows the
    other."""
    for rule, text in EXAMPLES:
        for name in matching(text) - {rule.id}:
            other = BY_ID[name]
            ordered = name in rule.follows or rule.id in other.follows
            assert ordered or {rule.role, other.role} & {"consequence", "suspect"}, (
                f"{rule.id} and {name}: {text}"
            )
    for rule in RULES:
        for text in rule.never:
            assert rule.id not in matching(text), text
    for name in ("clean.log", "clean_torchrun.log"):
        for line in (HERE / "logs" / name).read_text().splitlines():
            assert {id_ for id_ in matching(line) if BY_ID[id_].role != "noise"} == set(), line


def test_no_line_takes_long() -> None:
    """Lines of the longest size made of what the patterns look for, begun again and again and never
    ended."""
    for rule in RULES:
        for pattern in rule.match:
            plain = re.sub(r"\\[dwsSb]|\W", " ", pattern.regex.pattern)
            seeds = {
                *pattern.literals,
                *plain.split(),
                plain,
                rule.examples[0][:-1],
                "a",
                "1 ",
                "[",
                "(",
            } - {""}
            for seed in seeds:
                text = (seed * LONGEST)[:LONGEST]
                start = time.process_time()
                pattern.regex.search(text)
                assert time.process_time() - start < 0.5, (pattern.regex.pattern, seed)


def test_the_plain_text_of_a_pattern() -> None:
    for pattern, literals in TABLES["literals"].items():
        assert literals_of(pattern) == tuple(literals), pattern


def test_a_wrong_rule_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    good = TABLES["good"]
    path.write_text(repr([good]))
    assert [rule.id for rule in load_rules(path)] == ["X"]
    for rules, reason in (
        ([good, good], "twice"),
        *(([good | change], reason) for change, reason in TABLES["wrong"]),
    ):
        path.write_text(repr(rules))
        with pytest.raises(InputError, match=re.escape(reason)):
            load_rules(path)


def test_options_are_proposed_whatever_a_config_holds() -> None:
    """An expression that lacks a value is left out, and none is wrong in itself."""
    for sections in TABLES["sections"]:
        texts = [text for name in OPTIONS for text in advice(name, Settings(sections))]
        assert not [text for text in texts if "{" in text], sections
    for name, options in OPTIONS.items():
        for option in options:
            assert set(option) <= {"if", "text"}
            for expression in [
                option.get("if", "True"),
                *re.findall(r"\{([^{}]+)\}", option["text"]),
            ]:
                compile(expression, name, "eval")
