"""A trace holds the steps it was asked for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from meshtrain.metrics import profiler as profiler_module
from meshtrain.metrics.profiler import Profiler

CPU = torch.device("cpu")


@dataclass
class Wanted:
    profile: Sequence[int] | None = None


def train(profiler: Profiler, first: int, last: int) -> None:
    for step in range(first, last + 1):
        profiler.step(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(4) + 1
    profiler.close()


def traced(folder: Path, rank: int) -> set[str]:
    events = json.loads((folder / "profile" / f"rank_{rank:05d}.json").read_text())["traceEvents"]
    return {event["name"] for event in events if event["name"].startswith("step ")}


@pytest.mark.parametrize(
    ("profile", "first", "last", "steps"),
    [
        ([2, 3], 1, 5, {"step 2", "step 3"}),
        (
            [2, 9],
            1,
            3,
            {"step 2", "step 3"},
        ),  # a run that ends before the last one leaves its trace
        ([2, 4], 4, 6, {"step 4"}),  # a run that goes on inside of the steps
    ],
)
def test_a_trace_of_some_steps(
    profile: list[int], first: int, last: int, steps: set[str], tmp_path: Path
) -> None:
    train(Profiler(Wanted(profile), tmp_path, 7, CPU), first, last)
    assert traced(tmp_path, 7) == steps


@pytest.mark.parametrize(
    ("done", "steps", "start"),
    [
        (0, 5, "profiling steps 2 to 4 of every rank into {}"),
        (2, 8, "profiling steps 3 to 4 of every rank"),
        (4, 6, "metrics.profile names steps 2 to 4, and this job does steps 5 to 6: "),
        (0, 1, "metrics.profile names steps 2 to 4, and this job does steps 1 to 1: "),
    ],
)
def test_what_is_profiled_is_said(done: int, steps: int, start: str, tmp_path: Path) -> None:
    (line,) = Profiler(Wanted([2, 4]), tmp_path, 0, CPU).about(done, steps)
    assert line.startswith(start.format(tmp_path / "profile"))


def test_nothing_wanted_nothing_done(tmp_path: Path) -> None:
    profiler = Profiler(Wanted(), tmp_path, 0, CPU)
    train(profiler, 1, 3)
    assert list(profiler.about(0, 3)) == []
    assert list(tmp_path.iterdir()) == []


def test_the_history_of_a_gpus_memory_ends_with_the_last_profiled_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    memory = torch.cuda.memory

    def record(enabled: str | None = "all", max_entries: int = 0) -> None:
        calls.append("begin" if enabled else "end")

    def dump(file: str) -> None:
        calls.append("write")
        Path(file).write_text("history")

    monkeypatch.setattr(memory, "_record_memory_history", record)
    monkeypatch.setattr(memory, "_dump_snapshot", dump)
    history = tmp_path / "memory" / "rank_00003.pickle"
    monkeypatch.setattr(profiler_module, "profile", lambda activities: Mock())
    profiler = Profiler(Wanted([2, 3]), tmp_path, 3, torch.device("cuda"))
    assert any("memory history" in line for line in profiler.about(0, 5))
    for step in (1, 2, 3):
        profiler.step(step)
    assert calls == ["begin"]
    profiler.step(4)
    profiler.close()
    assert calls == ["begin", "write", "end"]
    assert history.read_text() == "history"

    calls.clear()
    out_of_memory = Profiler(Wanted([2, 3]), tmp_path, 3, torch.device("cuda"))
    out_of_memory.step(1)
    out_of_memory.close()
    assert calls == ["begin", "write", "end"]

    calls.clear()
    resumed_later = Profiler(Wanted([2, 3]), tmp_path, 3, torch.device("cuda"))
    assert [line for line in resumed_later.about(3, 9) if "memory" in line] == []
    resumed_later.step(4)
    resumed_later.close()
    assert calls == []


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: only CUDA's allocator keeps a history"
)
def test_a_memory_snapshot(tmp_path: Path) -> None:
    profiler = Profiler(Wanted([1, 1]), tmp_path, 3, torch.device("cuda"))
    profiler.step(1)
    torch.ones(1000, device="cuda")
    profiler.close()
    assert (tmp_path / "memory" / "rank_00003.pickle").stat().st_size > 0
