"""Flight recorders of several ranks show at which collective they have parted, and claim nothing
else."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshtrain.explain.flight_recorder import not_entered
from meshtrain.explain.log_reader import Log

GROUPS = {"0": ["all ranks", [0, 1, 2]], "7": ["tp", [0, 1]]}


def entry(
    group: str, number: int, kind: str = "nccl:all_reduce", is_p2p: bool = False
) -> dict[str, Any]:
    return {
        "process_group": [group, ""],
        "collective_seq_id": number,
        "profiling_name": kind,
        "is_p2p": is_p2p,
    }


def write(folder: Path, rank: int, entries: list[dict[str, Any]], whole: bool = True) -> None:
    (folder / "a").mkdir(exist_ok=True)
    groups = {name: group for name, group in GROUPS.items() if rank in group[1]}
    recorder = {"rank": rank, "host": "a", "groups": groups, "whole": whole, "entries": entries}
    (folder / "a" / f"rank-{rank}.flight-recorder.json").write_text(json.dumps(recorder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path,
        0,
        [entry("7", 4), entry("0", 9, "nccl:reduce_scatter"), entry("7", 99, is_p2p=True)],
    )
    return tmp_path


def lines(folder: Path) -> list[tuple[str, str]]:
    return [
        (Path(file).name[:6], line)
        for file, line in not_entered([Log(str(folder / "verdict.txt"))])
    ]


def test_who_has_not_entered_is_named_for_each_group(folder: Path) -> None:
    write(folder, 1, [entry("7", 4), entry("0", 8)])
    write(folder, 2, [entry("0", 9, "nccl:reduce_scatter")])
    line = (
        "flight recorder: reduce_scatter 9 over all ranks (3 ranks) was entered by ranks 0, 2 and "
        "not by rank 1"
    )
    assert lines(folder) == [("rank-1", line)]


def test_a_rank_without_a_recorder_is_not_blamed(folder: Path) -> None:
    write(folder, 1, [entry("7", 4), entry("0", 9)])
    assert lines(folder) == []
    write(folder, 1, [entry("7", 3), entry("0", 9)])
    assert lines(folder) == [
        (
            "rank-1",
            "flight recorder: all_reduce 4 over tp (2 ranks) was entered by rank 0 and not by rank "
            "1",
        )
    ]
    write(folder, 1, [entry("7", 4), entry("0", 8)])
    assert lines(folder)[0][1].endswith(
        "was entered by rank 0 and not by rank 1 (nothing is known of 2)"
    )


def test_a_recorder_that_has_forgotten_its_beginning_proves_no_absence(folder: Path) -> None:
    write(folder, 1, [entry("0", 9)])
    entered = "collective 1 of ranks 0-1 was entered by rank 0 and not by rank 1"
    assert lines(folder) == [("rank-1", f"flight recorder: {entered}")]
    write(folder, 1, [entry("0", 9)], whole=False)
    assert lines(folder) == []


def test_a_damaged_recorder_is_told_and_hides_no_other(folder: Path) -> None:
    write(folder, 1, [])
    write(folder, 2, [entry("0", 8)])
    for text in (
        "",
        "{",
        "[]",
        '{"rank": 1}',
        '{"rank": 1, "groups": {"0": 3}, "entries": []}',
        "[" * 9999,
    ):
        (folder / "a" / "rank-1.flight-recorder.json").write_text(text)
        (damaged, problem), (other, _) = lines(folder)
        assert (damaged, other) == ("rank-1", "rank-2")
        assert problem.startswith("this flight recorder cannot be read: ")
