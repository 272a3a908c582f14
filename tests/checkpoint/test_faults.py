"""Faults of checkpoints, a row each of faults.yaml: damaged files, reads that fail, and saves that
fail."""

from pathlib import Path

import pytest
import yaml

from tests.checkpoint.faults import Row, Run, check, failing

TABLE = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text())
ROWS = {name: Row(when=when, **row) for when, rows in TABLE.items() for name, row in rows.items()}


@pytest.mark.parametrize("name", ROWS)
def test_a_fault(run: Run, name: str) -> None:
    check(ROWS[name], run)


def test_no_memory_for_the_manifest_is_a_failed_save(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(run, monkeypatch, "meshtrain.checkpoint.commit.Manifest", "MemoryError")
    """Its files, which are written by then, are removed."""
    for options in ((), ("checkpoint.in_background=false",)):
        printed = run.train(*options, status=1)
        assert "are done and not saved: rank 0 on host here (dp_shard 0): MemoryError" in printed
        assert run.steps() == [2, 4]
        assert not list(run.checkpoints.glob(".step_*"))


def test_no_memory_for_the_manifest_of_the_local_disks_leaves_the_shared_folder(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = run.place / "disk"
    failing(run, monkeypatch, "meshtrain.checkpoint.commit.Manifest", "MemoryError", times=1)
    printed = run.train(f"checkpoint.local={disk}", "train.steps=6")
    not_there = "is not on the local disks: rank 0 on host here (dp_shard 0): MemoryError"
    assert f"warning: checkpoint step_0000006: {not_there}" in printed
    assert run.steps() == [2, 4, 6]
    assert not list(disk.rglob(".step_*"))


def test_a_fault_of_the_program_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would come again with each save."""
    failing(run, monkeypatch, "meshtrain.checkpoint.commit.write_shard", "ZeroDivisionError")
    with pytest.raises(ZeroDivisionError):
        run.train()
