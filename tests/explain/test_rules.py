"""The rules themselves: each knows its own lines and leaves alone those of others, and none takes long over a line."""

import re
import time
from pathlib import Path

import pytest

from meshtrain.errors import InputError
from meshtrain.explain.causes import OPTIONS, Settings, advice, explain
from meshtrain.explain.log_reader import LONGEST, without_prefix
from meshtrain.explain.rules import Rule, literals_of, load_rules

RULES = load_rules()
BY_ID = {rule.id: rule for rule in RULES}
HERE = Path(__file__).parent
AFTERWARDS = """\
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14214.
W1121 23:00:00.1 14637 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 9 closing signal SIGTERM
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  exitcode  : -15 (pid: 14649)  (SIGTERM)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""
EXAMPLES = [pytest.param(rule, text, id=f"{rule.id}-{n}") for rule in RULES for n, text in enumerate(rule.examples)]


def in_a_log(rule: Rule, text: str) -> str:
    """An example with what it needs around it: a traceback, or another rule without which it says nothing."""
    if rule.in_traceback:
        return f'Traceback (most recent call last):\n  File "a.py", line 2, in <module>\n    f()\n{text}\n'
    return "".join(f"{BY_ID[name].examples[0]}\n" for name in rule.only_with[:1]) + f"{text}\n"


def matching(text: str) -> set[str]:
    text, _ = without_prefix(text)
    return {rule.id for rule in RULES if not rule.in_traceback and rule.search(text, text.lower())}


def test_there_are_many_and_each_is_complete() -> None:
    assert len(RULES) >= 60
    assert {rule.options for rule in RULES} - {None} == set(OPTIONS)
    assert sum(rule.role == "root" for rule in RULES) >= 60


@pytest.mark.parametrize(("rule", "text"), EXAMPLES)
def test_an_example_alone_is_recognized_and_comes_first(rule: Rule, text: str, tmp_path: Path) -> None:
    log = tmp_path / "job.txt"
    log.write_text(in_a_log(rule, text))
    found = explain([str(log)], RULES)
    if rule.role == "noise":
        assert found == []
        return
    places = [one.id for one in found]
    explained = {name for one in places for name in (BY_ID[one].follows if one == rule.id else ())}
    others = {*rule.only_with} if rule.role == "suspect" else set()
    assert rule.id in places
    assert places[0] == rule.id or places[0] in explained | others, places
    line = next(one for one in found if one.id == rule.id).matches.evidence[0]
    assert (line.file, log.read_text().splitlines()[line.line - 1]) == (str(log), text)


@pytest.mark.parametrize(("rule", "text"), [example for example in EXAMPLES if example.values[0].role == "root"])
def test_a_root_comes_before_what_followed_it(rule: Rule, text: str, tmp_path: Path) -> None:
    log = tmp_path / "job.txt"
    log.write_text(in_a_log(rule, text) + AFTERWARDS)
    found = explain([str(log)], RULES)
    assert found[0].role == "root"
    assert found[0].id == rule.id or found[0].id in rule.follows
    assert {"GLOO_CLOSED", "SIGTERM_COLLATERAL", "WORKER_FAILED"} <= {one.id for one in found[1:]}
    assert "NO_TRACEBACK" not in {one.id for one in found}


@pytest.mark.parametrize(("rule", "text"), EXAMPLES)
def test_an_example_is_known_to_its_rule_and_to_those_that_speak_of_it(rule: Rule, text: str) -> None:
    """A line that two rules know is one that the order between them settles: one follows the other."""
    for name in matching(text) - {rule.id}:
        other = BY_ID[name]
        ordered = name in rule.follows or rule.id in other.follows
        assert ordered or {rule.role, other.role} & {"consequence", "suspect"}, f"{rule.id} and {name}: {text}"


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.never], ids=lambda rule: rule.id)
def test_a_line_that_only_looks_like_it_is_left_alone(rule: Rule) -> None:
    for text in rule.never:
        assert rule.id not in matching(text), text


@pytest.mark.parametrize("name", ["clean.log", "clean_torchrun.log"])
def test_no_rule_knows_a_line_of_a_healthy_run(name: str) -> None:
    for line in (HERE / "logs" / name).read_text().splitlines():
        assert {one for one in matching(line) if BY_ID[one].role != "noise"} == set(), line


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_no_line_takes_long(rule: Rule) -> None:
    """Lines of the longest size made of what the patterns look for, begun again and again and never ended."""
    for pattern in rule.match:
        plain = re.sub(r"\\[dwsSb]|\W", " ", pattern.regex.pattern)
        seeds = {*pattern.literals, *plain.split(), plain, rule.examples[0][:-1], "a", "1 ", "[", "("}
        for seed in seeds:
            text = (seed * LONGEST)[:LONGEST] if seed else "x"
            start = time.process_time()
            pattern.regex.search(text)
            assert time.process_time() - start < 0.5, (pattern.regex.pattern, seed)


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        ("CUDA out of memory", ("cuda out of memory",)),
        (r"exitcode\s*: -9\b", ("exitcode",)),
        (r"abcd?efgh|(?:x|y) ijkl", ("efgh", " ijkl")),
        (r"\[Rank \d+\]: late{2,3}r", ("[rank ",)),
        (r"[abc]defg+h", ("defg",)),
        (r"abc|defgh", ()),  # the first has too little to look for
        (r"(?:alpha|beta)", ()),
        (r"(?-i:^Killed$)", ("killed",)),
    ],
)
def test_the_plain_text_of_a_pattern(pattern: str, literals: tuple[str, ...]) -> None:
    assert literals_of(pattern) == literals


GOOD = {
    "id": "X",
    "match": "something",
    "role": "root",
    "cause": "c",
    "fix": "f",
    "examples": ["something"],
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"role": "culprit"}, "role should be one of root, suspect"),
        ({"match": "some.*thing"}, "without a bound"),
        ({"match": "(some)+thing"}, "without a bound"),
        ({"match": "some(thing"}, "no regular expression"),
        ({"match": "a.{0,9}b"}, "plain characters in a row"),
        ({"match": 7}, "match should be a text or a list of texts"),
        ({"cause": "it is {host}"}, "not every pattern has a group"),
        ({"follows": ["Y"]}, "no other rule Y"),
        ({"follows": ["X"]}, "no other rule X"),
        ({"because": "x"}, "unknown keys ['because']"),
        ({"fix": ""}, "missing keys ['fix']"),
        ({"waits": "yes please"}, "waits should be true or false"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_name(change: dict, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(repr([GOOD]))
    assert [rule.id for rule in load_rules(path)] == ["X"]
    path.write_text(repr([GOOD | change]))
    with pytest.raises(InputError, match=re.escape(says)):
        load_rules(path)


def test_an_id_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(repr([GOOD, GOOD]))
    with pytest.raises(InputError, match="twice"):
        load_rules(path)


@pytest.mark.parametrize(
    "sections", [None, {}, {"model": 3}, *({"layout": {"tp": size}} for size in (0, -1, 2, "two", None))]
)
def test_options_are_proposed_whatever_a_config_holds(sections: dict | None) -> None:
    """An expression that lacks a value is left out, and none is wrong in itself."""
    settings = Settings(sections)
    for name in OPTIONS:
        for text in advice(name, settings):
            assert "{" not in text
    for option in (option for options in OPTIONS.values() for option in options):
        assert set(option) <= {"if", "text"}
        for expression in [option.get("if", "True"), *re.findall(r"\{([^{}]+)\}", option["text"])]:
            compile(expression, name, "eval")
