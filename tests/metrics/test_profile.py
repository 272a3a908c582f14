"""A trace holds the steps it was asked for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from meshtrain.metrics.profiler import Profiler

CPU = torch.device("cpu")


@dataclass
class Wanted:
    profile: Sequence[int] | None = None
    memory_snapshot: bool = False


def train(profiler: Profiler, first: int, last: int) -> None:
    for step in range(first, last + 1):
        profiler.step(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(4) + 1
    profiler.close()


def traced(folder: Path, rank: int) -> set[str]:
    events = json.loads((folder / "profile" / f"rank_{rank:05d}.json").read_text())["traceEvents"]
    return {event["name"] for event in events if event["name"].startswith("step ")}


def test_a_trace_of_some_steps(tmp_path: Path) -> None:
    profiler = Profiler(Wanted([2, 3]), tmp_path, 7, CPU)
    assert list(profiler.about(0, 5)) == [f"profiling steps 2 to 3 of every rank into {tmp_path / 'profile'}"]
    train(profiler, 1, 5)
    assert traced(tmp_path, 7) == {"step 2", "step 3"}


def test_a_run_that_ends_before_the_last_step_leaves_its_trace(tmp_path: Path) -> None:
    train(Profiler(Wanted([2, 9]), tmp_path, 0, CPU), 1, 3)
    assert traced(tmp_path, 0) == {"step 2", "step 3"}


def test_a_run_that_goes_on_inside_of_the_steps(tmp_path: Path) -> None:
    train(Profiler(Wanted([2, 4]), tmp_path, 0, CPU), 4, 6)
    assert traced(tmp_path, 0) == {"step 4"}


@pytest.mark.parametrize(("done", "steps"), [(4, 6), (0, 1)])
def test_steps_that_a_job_does_not_do_are_said(done: int, steps: int, tmp_path: Path) -> None:
    (line,) = Profiler(Wanted([2, 4]), tmp_path, 0, CPU).about(done, steps)
    assert line.startswith(f"metrics.profile names steps 2 to 4, and this job does steps {done + 1} to {steps}: ")
    (line,) = Profiler(Wanted([2, 6]), tmp_path, 0, CPU).about(4, 8)
    assert line.startswith("profiling steps 5 to 6 of every rank")


def test_nothing_wanted_nothing_done(tmp_path: Path) -> None:
    profiler = Profiler(Wanted(), tmp_path, 0, CPU)
    train(profiler, 1, 3)
    assert list(profiler.about(0, 3)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_memory_snapshot_on_a_cpu_is_said_to_need_cuda(tmp_path: Path) -> None:
    profiler = Profiler(Wanted(memory_snapshot=True), tmp_path, 0, CPU)
    train(profiler, 1, 3)
    (line,) = profiler.about(0, 3)
    assert "needs CUDA" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only CUDA's allocator keeps a history")
def test_a_memory_snapshot(tmp_path: Path) -> None:
    profiler = Profiler(Wanted(memory_snapshot=True), tmp_path, 3, torch.device("cuda"))
    torch.ones(1000, device="cuda")
    profiler.close()
    assert (tmp_path / "memory" / "rank_00003.pickle").stat().st_size > 0
