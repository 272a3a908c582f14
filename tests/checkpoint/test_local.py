"""Checkpoints on the hosts' own disks: a run goes on from the newest that is whole over all of them, or is shared."""

import json
from pathlib import Path

from tests.checkpoint.going_on import small_run
from tests.checkpoint.kill import rows
from tests.launching import forked


def test_a_run_goes_on_from_what_is_whole(tmp_path: Path) -> None:
    """Full disks, a lost one, changed and cut files: no more is lost than the steps since the newest whole one."""
    job = forked(2, "tests/checkpoint/local_cases.py", str(small_run(tmp_path)), str(tmp_path)).check()
    found = json.loads((tmp_path / "results.json").read_text())
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
    local = sorted(path.name for path in (tmp_path / "disk_0").glob("*/rank_00000/step_*"))
    assert local == ["step_0000018", "step_0000020"], "two stay"
