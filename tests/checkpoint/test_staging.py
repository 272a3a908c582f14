"""Where host memory is short the state is streamed: the same bytes, in bounded memory, and told
once."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshtrain.checkpoint import staging
from meshtrain.checkpoint.directory import name_of, open_manifest
from meshtrain.checkpoint.save import Saver
from meshtrain.checkpoint.shard_file import BLOCK
from meshtrain.checkpoint.staging import Snapshot, snapshot_bytes
from meshtrain.checkpoint.state import State
from meshtrain.checkpoint.verify import verify
from meshtrain.config.schema import OptimizerSection
from meshtrain.job import host_limits
from meshtrain.job.host_limits import find_short_hosts
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.optim.optimizer import Optimizer
from tests.checkpoint.faults import Run
from tests.checkpoint.known import ABOUT, alone, on

MIB = 2**20


def resident(peak: bool = False) -> int:
    """Bytes of this process in memory, or the most since they were last counted anew."""
    found = re.search(
        rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", Path("/proc/self/status").read_text()
    )
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.parametrize("streams", [False, True])
def test_what_streams_needs_no_memory(tmp_path: Path, streams: bool) -> None:
    """The peak over a save of 96 MiB, as the system counts it."""
    job, mesh = alone(), Mesh(Layout({}), 0, "cpu", None, {})
    model = nn.Linear(8 * MIB // 8, 8, bias=False)
    state = State(model, Optimizer(model, OptimizerSection(), mesh, 1), mesh, job)
    nbytes = snapshot_bytes(state, 0)
    assert nbytes > 96 * MIB
    for held in state.shards:
        held.local.fill_(1.0)  # in memory before it is counted
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    saver = Saver(state, tmp_path, job, in_background=not streams, say=lambda _: None)
    saver.save(1, ABOUT, wait=True)
    saver.close()
    if streams:
        assert saver.last_wait_s >= saver.last_save_s, "training waited for all of it"
    grown = resident(peak=True) - before
    assert (grown < 24 * MIB) if streams else (grown > 90 * MIB), grown
    assert not verify(tmp_path / name_of(1))


def test_a_piece_that_does_not_lie_in_one_piece_is_streamed() -> None:
    """The files have the same bytes: see test_load.py."""
    apart = torch.arange(4 * MIB).view(2048, 2048)[3:2000, :1500]
    blocks = [bytes(block) for block in staging._stream(apart)]
    assert b"".join(blocks) == apart.contiguous().numpy().tobytes()
    assert {len(block) for block in blocks[:-1]} == {BLOCK}


class Gathering:
    """In place of a job of several ranks on two hosts."""

    host = "a"
    rank = 0

    def reduce(self, activity: str, report: Sequence[Any], combine: Callable[[list], Any]) -> Any:
        _, nbytes, room = report
        return combine([["a", nbytes, room], ["a", nbytes, room], ["b", nbytes, room + 1]])


def test_the_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    state, gib = on(alone(), {}), 2**30
    nbytes = snapshot_bytes(state, 0)
    job: Any = Gathering()
    for spare, short in ((2 * nbytes, 0), (2 * nbytes - 4096, 1), (nbytes - 4096, 2)):
        monkeypatch.setattr(
            host_limits, "memory_gib", lambda spare=spare: (40.0, 4.0 + spare / gib)
        )
        found = find_short_hosts(job, nbytes, "looking")
        assert len(found) == short, (spare, found)
        assert all(
            line.startswith(f"host {host} needs ") for line, host in zip(found, "ab", strict=False)
        )

    def unknown() -> Any:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(host_limits, "memory_gib", unknown)
    job.reduce = lambda _, report, combine: combine([report])
    assert find_short_hosts(job, nbytes, "looking") == []


def test_a_run_goes_on_in_little_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same rows, and the same checksums in its checkpoints."""
    streaming: list[bool] = []
    init = Snapshot.__init__

    def noted(self: Snapshot, *arguments: Any, streams: bool) -> None:
        streaming.append(streams)
        init(self, *arguments, streams=streams)
        assert self._memory.nbytes == 0

    monkeypatch.setattr(host_limits, "memory_gib", lambda: (64.0, 6.4))
    monkeypatch.setattr(Snapshot, "__init__", noted)
    problem = (
        "checkpoints are written while training waits, because the memory for copies of the state "
        "is short: host"
    )
    assert run.train().count(f"{problem} here") == 1
    assert streaming == [True]
    assert run.rows() == run.undisturbed()
    for step in run.steps():
        names = [
            folder / "checkpoints" / name_of(step)
            for folder in (run.folder, run.config.parent / "8 steps")
        ]
        files = [open_manifest(name)[0].files for name in names]
        assert files[0] == files[1]
