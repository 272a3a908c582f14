"""Checkpoints on the hosts' own disks: a run goes on from the newest that is whole over all of them, or is shared."""

import json
from pathlib import Path
from typing import Any

from tests.checkpoint.going_on import small_run
from tests.checkpoint.kill import rows
from tests.launching import forked


def test_a_run_goes_on_from_what_is_whole(tmp_path: Path) -> None:
    """Full disks, a lost one, changed and cut files: no more is lost than the steps since the newest whole one."""
    job = forked(2, "tests/checkpoint/local_cases.py", str(small_run(tmp_path)), str(tmp_path)).check()
    results = json.loads((tmp_path / "results.json").read_text())
    found, stored, branch = results[:6], results[6:11], results[11:]
    begun = [(step, local_only, notes[-1] if notes else "") for _, step, local_only, notes in found]
    read = "{} of 2 ranks read from their local disks"
    assert begun == [
        (0, False, ""),
        (6, True, read.format(2)),
        (8, False, read.format(1)),  # host n1 has lost its disk
        (12, False, read.format(1)),  # a changed file is read from the shared folder
        (16, False, read.format(0)),  # the local disk of n1 was full
        (16, False, read.format(0)),  # what is cut is not there
    ], job.err
    assert [result["status"] for result, *_ in found] == [1, 1, 1, 1, 1, 0]
    for at, step in ((2, 10), (5, 18)):
        passed = f"step {step} is on the local disks of 1 of 2 ranks, not whole: passed over"
        assert passed in found[at][3], found[at]
    assert "the shared folder is read instead" in job.err
    assert "checkpoint step_0000014: is not on the local disks: rank 1 on host n1" in job.out
    assert "No space left on device" in job.out
    assert rows(tmp_path / "run") == rows(tmp_path / "whole"), "no step was lost or mixed"
    local = [sorted(path.name for path in disk.iterdir()) for disk in (tmp_path / "disk_0").glob("*/rank_00000")]
    assert all(names == ["step_0000018", "step_0000020"] for names in local), "two stay"
    of_three_copies(tmp_path, stored)
    # What began with another run's checkpoint goes on from its own, though only the local disks have it.
    assert [[step, local_only] for _, step, local_only, _ in branch] == [[16, False], [18, True]]
    assert branch[0][0]["status"] == 1
    assert rows(tmp_path / "branch") == rows(tmp_path / "whole")[16:]


def of_three_copies(folder: Path, found: list[Any]) -> None:
    """The newest step that is whole anywhere is gone on from, whatever is missing or damaged elsewhere."""
    assert [result["status"] for result, *_ in found] == [1, 1, 1, 1, 0], found
    assert [[step, local_only] for _, step, local_only, _ in found] == [
        [0, False],
        [6, True],  # the shared manifest is damaged
        [10, False],  # a local disk is lost, and a shared file is damaged: from storage
        [14, True],  # a shared file is missing, and one in storage is damaged
        [12, False],  # of 16 and 14 no copy is whole
    ], found
    assert any("step_0000010 was brought from file://" in note for note in found[2][3])
    assert any("step_0000016 is passed over" in note for note in found[4][3])
    assert any("step_0000014 is passed over" in note for note in found[4][3])
    assert rows(folder / "stored") == rows(folder / "whole"), "no step was lost or mixed"
