"""Whether a job that has failed goes on: what is decided, of every kind of failure, and what is
counted."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from meshtrain.launch.requeue import (
    HISTORY,
    Decision,
    History,
    decide,
    furthest_step,
    main,
    read_history,
)
from meshtrain.metrics.goodput import SPENT, GoodputRecord, JobRecord

NODES = ("gpu07", "gpu08", "gpu09")
NOTHING = dict.fromkeys(SPENT, 0.0)


def decided(
    end: dict | None, failures: int = 1, needed: int = 3, down: tuple[str, ...] = ()
) -> Decision:
    return decide(end, History("1", 7, failures), NODES, needed, tries=2, down=down)


def test_a_node_is_left_out_if_the_failure_is_its_own() -> None:
    """Its host may call itself by more words than SLURM does."""
    for case in yaml.safe_load(Path(__file__).with_name("failures.yaml").read_text()):
        lost = case.pop("lost")
        end = case | {"status": "failed", "hosts": ["gpu08.cluster.local", "elsewhere"]}
        decision = decided(end)
        assert (decision.action, decision.lost) == (
            ("requeue", ("gpu08",)) if lost else ("again", ())
        ), case
        assert decided(end, needed=2).action == "again", "there is a spare one"
        assert decided(end, failures=3).action == "end"


@pytest.mark.parametrize("kind", ["training", "input"])
def test_what_would_happen_again_ends_the_job(kind: str) -> None:
    end = {"status": "failed", "kind": kind, "reason": "bad", "hosts": ["gpu08"]}
    assert decided(end) == Decision("end", (), "bad: the same would happen again")


def test_nodes_that_others_know_to_be_down() -> None:
    end = {"status": "failed", "kind": "failed", "reason": "x", "hosts": []}
    assert decided(end, down=("gpu09", "gpu99")).lost == ("gpu09",)
    assert decided(None, down=("gpu07",)).action == "requeue"
    assert decided(None).action == "end"


def test_how_far_a_run_is() -> None:
    saved, later = GoodputRecord(5, NOTHING, saved=True), GoodputRecord(8, NOTHING)
    assert furthest_step([]) == 0
    assert furthest_step([JobRecord(0.0, 3, [saved, later])]) == 5
    assert furthest_step([JobRecord(0.0, 3, [saved]), JobRecord(0.0, 5, [later])]) == 5


def test_failures_count_until_the_run_gets_further() -> None:
    history = History()
    for step, failures in ((0, 1), (0, 2), (4, 1), (4, 2), (2, 3), (5, 1)):
        history = history.after_failure("1", step)
        assert (history.failures, history.step) == (failures, max(4, step) if step != 0 else 0)
    assert history.after_failure("2", 5).failures == 1, "a person has submitted it anew"


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = {"status": "failed", "kind": "gone", "reason": "rank 1\nis gone", "hosts": ["b"]}
    (tmp_path / "exit.json").write_text(json.dumps(end))
    words = [
        "requeue",
        str(tmp_path),
        "--job",
        "4",
        "--nodes",
        "a b c",
        "--needed",
        "2",
        "--tries",
        "1",
        "--down",
        "",
    ]
    monkeypatch.setattr(sys, "argv", words)
    printed = []
    for _ in range(2):
        main()
        printed.append(capsys.readouterr().out.splitlines())
    assert printed[0] == ["again", "b", "rank 1 is gone; goes on without b"]
    assert printed[1] == [
        "end",
        "b",
        "rank 1 is gone: 2 failures in a row have got no further than step 0",
    ]


def test_a_history_that_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / HISTORY).write_text("[1]")
    assert read_history(tmp_path) == History()
    assert (tmp_path / f"{HISTORY}.damaged").exists()
