"""The doctor's judgement: from a healthy job, one thing is made wrong at a time, and just that is
found."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.doctor import __main__ as doctor
from meshtrain.doctor import command, records
from meshtrain.doctor import rules as rules_package
from meshtrain.doctor.findings import SENTENCES, Finding, status
from meshtrain.doctor.records import ClusterFacts, Host, RecordError, from_json, to_json
from meshtrain.doctor.report import (
    block,
    findings_text,
    print_report,
    report_json,
)
from meshtrain.doctor.rules import BLOCKING, blocking, judge
from tests.launching import ROOT


class Tables(yaml.SafeLoader):
    """YAML in which `!Host {...}` is a record of that class, and lists are tuples."""


def record(loader: Tables, name: str, node: yaml.MappingNode) -> Any:
    return getattr(records, name)(**loader.construct_mapping(node, deep=True))


def sequence(loader: Tables, node: yaml.SequenceNode) -> tuple[Any, ...]:
    return tuple(loader.construct_sequence(node, deep=True))


Tables.add_multi_constructor("!", record)
Tables.add_constructor("tag:yaml.org,2002:seq", sequence)
TABLES = yaml.load(Path(__file__).with_name("findings.yaml").read_text(), Tables)
HEALTHY: ClusterFacts = TABLES["clusters"]["healthy"]


def changed(old: Any, path: Sequence[str], value: Any) -> Any:
    """A record, a tuple or a dict with another value at the path; `*` stands for all of a tuple."""
    if not path:
        return value
    name, *rest = path
    if isinstance(old, tuple):
        return tuple(
            changed(part, rest, value) if name in ("*", str(i)) else part
            for i, part in enumerate(old)
        )
    if isinstance(old, dict):
        return old | {name: changed(old.get(name), rest, value)}
    return replace(old, **{name: changed(getattr(old, name), rest, value)})


def cluster(**row: Any) -> ClusterFacts:
    """The cluster of a row of the table."""
    facts = TABLES["clusters"][row.get("of", "healthy")]
    for changes in (*(TABLES["changes"][name] for name in row.get("with", ())), row):
        for path, value in changes.items():
            if path not in ("is", "of", "with", "says", "where", "severity"):
                facts = changed(facts, path.split("/"), value)
    return facts


def ids_of(row: Mapping[str, Any]) -> set[str]:
    return {row["is"]} if isinstance(row["is"], str) else set(row["is"])


def wrongly_judged(row: Mapping[str, Any]) -> str:
    """What is wrong with the judgement of a row's cluster; empty if it is as expected."""
    findings = judge(cluster(**row))
    problems = [finding for finding in findings if finding.id != "transport"]
    printed = findings_text(findings)
    if {finding.id for finding in problems} != ids_of(row):
        return f"other findings: {printed}"
    missing = [words for words in row["says"] if words not in printed]
    if missing:
        return f"{missing} are not in {printed}"
    if not all(finding.fix for finding in problems if finding.severity != "note"):
        return f"no remedy in {printed}"
    severities = {finding.severity for finding in problems}
    if "severity" in row and severities != {row["severity"]}:
        return f"severities {severities}"
    if status(findings) != ("error" in severities):
        return f"status {status(findings)}"
    return "" if "where" not in row else other_places(problems, row["where"])


def other_places(problems: Sequence[Finding], places: Sequence[str]) -> str:
    named = sorted({name for finding in problems for name in finding.where})
    return "" if named == sorted(places) else f"it is about {named}"


def test_what_is_wrong_is_found_and_nothing_else() -> None:
    wrong = [
        f"{row['is']} {row['says']}: {problem}"
        for row in TABLES["rows"]
        if (problem := wrongly_judged(row))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_finding_has_a_row_a_rule_and_a_place_in_the_docs() -> None:
    in_rows = {id_ for row in TABLES["rows"] for id_ in ids_of(row)}
    # The ids are the names in the table of sentences, up to the case.
    ids = {key.partition("/")[0] for key in SENTENCES} - {"version-differs"}
    assert ids - in_rows == {"transport"}
    assert in_rows >= BLOCKING
    rules = "".join(room.read_text() for room in Path(rules_package.__file__).parent.glob("*.py"))
    unused = {
        key
        for key in SENTENCES
        if f'"{key}"' not in rules and f'"{key.partition("/")[0]}/{{' not in rules
    }
    assert {id_ for id_ in unused if not id_.startswith("endpoint-")} == set()
    document = (ROOT / "docs" / "multi-node.md").read_text()
    document = document.partition("\n## Troubleshooting\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`([a-z]+(?:-[a-z]+)+|transport|unsteady)`", document))
    explained_by_themselves = {
        "config-wrong",
        "not-timed",
        "same-host",
        "leader-left",
        "node-fell-silent",
    }
    every = (ids | in_rows) - {"numpy-differs", "kernel-differs"}
    assert every - documented == explained_by_themselves
    assert documented - every == {"nvidia-smi"}, "the docs name what no rule says"


def test_only_what_hinders_the_ranks_hinders_timing_them() -> None:
    assert blocking(judge(HEALTHY)) == []
    assert blocking(judge(cluster(**{"hosts/1/paths/0/problem": "is not there"}))) == []
    unreachable = cluster(**{"visits/0/reach/0/how": "silent"})
    assert [finding.id for finding in blocking(judge(unreachable))] == ["ports-closed"]


def test_a_record_survives_the_journey_and_a_forged_one_does_not() -> None:
    assert from_json(ClusterFacts, json.loads(json.dumps(to_json(HEALTHY)))) == HEALTHY
    host = to_json(HEALTHY.hosts[0])
    for name, value in (
        ("processes", "2"),
        ("processes", True),
        ("ranks", [None]),
        ("variables", []),
        ("place", 1),
    ):
        with pytest.raises(RecordError, match=f"Host.{name}"):
            from_json(Host, host | {name: value})
    with pytest.raises(RecordError, match="extra"):
        from_json(Host, host | {"extra": 1})


def test_a_text_from_elsewhere_cannot_steer_the_terminal() -> None:
    findings = judge(cluster(**{"hosts/1/versions/torch": "\x1b[2J"}))
    (differs,) = [finding for finding in findings if finding.id == "torch-differs"]
    assert "\x1b" not in block(differs)


def test_json_holds_what_was_found_and_from_what() -> None:
    report = json.loads(json.dumps(report_json(HEALTHY, judge(HEALTHY))))
    assert report["status"] == 0
    assert report["findings"][0]["id"] == "transport"
    assert report["seen"]["hosts"][1]["host"] == "node2"


def test_a_table_in_80_columns_cuts_no_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshtrain.doctor.report.WIDTH", 80)
    print_report(HEALTHY, [], as_json=False)
    table = capsys.readouterr().out
    assert "…" not in table
    assert {"processes", "GPUs", "clock", "disk"} <= set(table.split())
    assert max(map(len, table.splitlines())) <= 80


def test_torchruns_report_names_what_the_doctor_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where in Python the doctor ended, which torchrun gives as the cause otherwise."""
    told = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    wrong = {"hosts/1/code": {"meshtrain/train.py": "a2"}, "hosts/1/versions/torch": "2.11"}
    findings = judge(cluster(**wrong))
    what = [finding.what for finding in findings if finding.severity == "error"]
    assert len(what) == 2
    monkeypatch.setattr(command, "examine", lambda run: command.Outcome(findings))
    monkeypatch.setattr(sys, "argv", ["doctor", "--local"])
    assert doctor.main() == 1
    said = json.loads(told.read_text())["message"]["message"]
    assert said == f"meshtrain doctor: {what[0]} (and 1 more, printed above)"
    monkeypatch.setattr(sys, "argv", ["doctor", "train.steps=3"])
    assert doctor.main() == 2
    assert "without a config" in json.loads(told.read_text())["message"]["message"]
