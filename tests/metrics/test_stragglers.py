"""Ranks tell each other their times now and then, without waiting; a slowed rank is named, with
what is known of it."""

import itertools
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import yaml

from meshtrain.job.environment import Environment
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.metrics import gpu_probe, step_timer, straggler
from meshtrain.metrics.gpu_probe import GpuProbe
from meshtrain.metrics.pace import LOOKS, Quartiles, RankPace, Straggler
from meshtrain.metrics.straggler import (
    EVERY,
    RANKS_PER_STEP,
    StragglerDetector,
    advice,
    describe,
)
from meshtrain.parallel.fsdp import unmeasured_wait_phases
from meshtrain.run.fault_injection import FaultInjector
from tests.comparing import train

CASES = yaml.safe_load(Path(__file__).with_name("paces.yaml").read_text())
PACE = RankPace(
    own=Quartiles(0.9, 1.0, 1.1),
    total=Quartiles(0.95, 1.05, 1.15),
    limit=0.12,
    data=0.01,
    host="b",
    load=2.0,
    cores=8,
)
STRAGGLER = Straggler(2, PACE, 3, 1.0, 0.4, 2.0)


# The talk of the ranks ----------------------------------------------------------------------------


class FakeProbe:
    """Of a GPU that takes so long, as its timer would say it."""

    def __init__(self, seconds: float = 0.0, model: str = "H100") -> None:
        self.seconds, self.model = seconds, model

    def pop(self) -> list[float]:
        return [self.seconds] if self.seconds else []


def ranks(
    world_size: int,
    store: object,
    messages: list[str],
    first: int = 1,
    probes: Sequence[FakeProbe] = (),
    folder: Path | None = None,
) -> list[StragglerDetector]:
    layout = Layout({"dp_shard": world_size}).on_hosts([world_size], ["a"])
    jobs = [
        Job(
            Environment("none", rank, world_size, rank, "a", None),
            torch.device("cpu"),
            store,
            layout=layout,
        )
        for rank in range(world_size)
    ]
    detectors = [StragglerDetector(job, first, messages.append, folder) for job in jobs]
    for detector, probe in zip(detectors, probes, strict=False):
        detector.probe = probe
    return detectors


def times(own: float) -> dict[str, float]:
    return {"time_own_s": own, "time_queued_s": 0.0, "step_time_s": 1.0, "time_data_s": 0.0}


def take(
    detectors: list[StragglerDetector], steps: range, slow: int | None = None
) -> dict[str, float]:
    """All ranks look after each step, rank 0 first, as late as the others may be. Returns the last
    fields of rank 0."""
    for step in steps:
        rows = [
            detector.finish_step(step, times(0.5 if rank == slow else 0.1))
            for rank, detector in enumerate(detectors)
        ]
        assert not any(rows[1:])
    return rows[0]


NAMED = range(1, 20 * LOOKS + 2)  # until rank 0 has read the look with which a slow rank is named
RECOVERED = range(20 * LOOKS + 2, 20 * 2 * LOOKS + 2)


def test_a_slow_rank_is_named_after_its_third_look_and_when_it_recovers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    messages = []
    detectors = ranks(3, dist.HashStore(), messages, folder=tmp_path)
    comparison = detectors[0].comparison
    assert comparison is not None
    growing = itertools.count(1)
    monkeypatch.setattr(straggler, "memory_gib", lambda device: next(growing))
    take(detectors, NAMED[:-1], 1)
    assert messages == []
    comparison.writer.join()
    fields = take(detectors, NAMED[-1:])
    (message,) = messages
    assert message.startswith(
        "warning: rank 1 on host a (dp_shard 1) is slow: for 60 steps now it has taken 500 ms"
    )
    assert "the other 2 ranks with the same work take 100 ms. All ranks wait for it" in message
    comparison.writer.join()
    table = json.loads((tmp_path / "ranks.json").read_text())
    assert table.pop("memory_gib")[2] == fields.pop("memory_max_gib")
    assert table == {
        "step": 60,
        "axes": {"dp_shard": 3},
        "hosts": ["a"] * 3,
        "own_time_s": [0.1, 0.5, 0.1],
    }
    assert fields == {
        "own_time_median_s": 0.1,
        "own_time_max_s": 0.5,
        "own_time_max_rank": 1,
        "memory_max_rank": 2,
    }
    take(detectors, RECOVERED)
    assert messages[1:] == ["rank 1 on host a (dp_shard 1) is as fast as its peers again"]


def test_a_gpu_that_is_held_down_is_named_by_its_probe_where_steps_tell_nothing() -> None:
    messages = []
    store, probes = dist.HashStore(), [FakeProbe(s) for s in (0.0050, 0.0053, 0.0090, 0.0048)]
    detectors = ranks(4, store, messages, probes=probes)
    fields = take(detectors, NAMED)
    probed = {name: value for name, value in fields.items() if name.startswith("gpu_probe")}
    assert probed == {
        "gpu_probe_median_s": 0.00515,
        "gpu_probe_max_s": 0.009,
        "gpu_probe_max_rank": 2,
    }
    (message,) = messages
    assert message.startswith(
        "warning: the GPU of rank 2 on host a (dp_shard 2) is slow: a product of matrices takes "
        "9.0 ms on it "
        "in 3 looks in a row, the others' take 5.0 ms"
    )
    assert store.get("pace/suspects") == b"[2]", "the driver is asked about its GPU"
    probes[2].seconds = 0.0051
    take(detectors, RECOVERED)
    assert messages[1:] == ["rank 2 on host a (dp_shard 2): its GPU is as fast as the others again"]
    assert store.get("pace/suspects") == b"[]"


def test_gpus_of_another_model_are_slow_only_by_their_own_measure() -> None:
    messages = []
    probes = [FakeProbe(0.005), FakeProbe(0.005), FakeProbe(0.02, "A100"), FakeProbe(0.04, "L40S")]
    detectors = ranks(4, dist.HashStore(), messages, probes=probes)
    take(detectors, NAMED)
    assert messages == []
    probes[3].seconds = 0.08  # in the middle of a look
    take(detectors, range(RECOVERED[0], RECOVERED[-1] + 21))
    assert [
        "the GPU of rank 3" in message and "at first it took" in message for message in messages
    ] == [True]


def test_a_probe_runs_every_so_many_steps_and_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, ready, events = torch.device("cpu"), threading.Event(), []

    def event(enable_timing: bool) -> SimpleNamespace:
        events.append(None)
        return SimpleNamespace(
            record=lambda: None, query=ready.is_set, elapsed_time=lambda end: 5.0
        )

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(gpu_probe, "SIZE", 2)
    probe = GpuProbe(cpu, active=True)
    for step in range(1, 601):
        probe.begin_step(step)
    assert events == [], "a CPU has none"
    probe._active = True
    for step in range(1, 601):
        probe.begin_step(step)
    assert len(events) == 2 * 3
    assert probe.pop() == []
    ready.set()
    assert probe.pop() == [0.005] * 3
    assert probe.pop() == []


def test_a_probe_is_done_by_the_next_look() -> None:
    assert 0 < gpu_probe.FIRST % EVERY < EVERY
    assert gpu_probe.EVERY % EVERY == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_probe_of_a_real_gpu_takes_milliseconds() -> None:
    device = torch.device("cuda", 0)
    probe = GpuProbe(device, active=True)
    before = torch.cuda.memory_allocated(device)
    for step in range(1, 601):
        probe.begin_step(step)
    assert torch.cuda.memory_allocated(device) == before
    torch.cuda.synchronize()
    seconds = probe.pop()
    assert len(seconds) == 3
    assert all(0.0005 < each < 0.2 for each in seconds)


def counting_store() -> Mock:
    """It would wait for a second for what is not there yet, and raise."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    return Mock(wraps=store)


def test_between_two_looks_nobody_asks_the_store_for_anything() -> None:
    store = counting_store()
    detectors = ranks(4, store, [])
    calls = {}
    for step in range(1, 62):
        store.reset_mock()
        take(detectors, range(step, step + 1))
        if store.mock_calls:
            calls[step] = len(store.mock_calls)
    assert calls == {20: 4, 21: 1, 40: 4, 41: 1, 60: 4, 61: 1}
    store.reset_mock()
    one_of_many = ranks(40 * RANKS_PER_STEP, store, [])[5]
    for step in range(1, 81):
        one_of_many.finish_step(step, times(0.1))
    assert len(store.mock_calls) == 2, "a large world looks more seldom"


def test_the_first_steps_and_looks_at_too_few_do_not_count() -> None:
    store = counting_store()
    detectors = ranks(2, store, [], first=12)
    take(detectors, range(12, 21), 0)  # 9 steps, 3 of which warm up
    assert store.mock_calls == []
    fields = take(detectors, range(21, 42))
    assert len(store.mock_calls) == 2 + 1
    assert fields["own_time_max_s"] == 0.1


def test_alone_there_is_nothing_to_compare() -> None:
    one = ranks(1, None, [])[0]
    assert [one.finish_step(step, times(1.0)) for step in range(1, 50)] == [{}] * 49


def test_where_fsdp_waits_unseen() -> None:
    for case in CASES["unseen_waits"]:
        layout = Layout(case["layout"])
        mesh: Any = SimpleNamespace(
            device_type=case["device"], size=layout.size, uses_fsdp="dp_shard" in case["layout"]
        )
        assert unmeasured_wait_phases(mesh) == tuple(case["phases"]), case


# What is said -------------------------------------------------------------------------------------


def test_a_straggler_is_told_in_three_lines() -> None:
    gpu = "GPU 3 at 1230 of 1980 MHz, held down by heat (hardware), 88 °C"
    text = describe(
        replace(STRAGGLER, pace=replace(PACE, gpu=gpu, throttled=True)),
        "rank 2 on host b (dp_shard 2)",
        60,
    )
    assert text.splitlines() == [
        "warning: rank 2 on host b (dp_shard 2) is slow: for 60 steps now it has taken 1000 ms of "
        "its own for each, "
        "the other 3 ranks with the same work take 400 ms. All ranks wait for it",
        "  known of it: 10 ms waiting for data, 50 ms waiting for a core, load of its host 2.0 on "
        "8 cores, " + gpu,
        "  what to do: see to the cooling and the power of that host (nvidia-smi -q -d "
        "PERFORMANCE), or leave it out",
    ]


def test_the_advice_follows_what_is_known() -> None:
    for case in CASES["advice"]:
        one = replace(
            STRAGGLER, pace=replace(PACE, **case["pace"]), load=case.get("of_peers", STRAGGLER.load)
        )
        assert case["text"] in advice(one), case


# Real runs ----------------------------------------------------------------------------------------


class OwnTime:
    """In place of the module `time` of the step timer: each look takes a millisecond, and each of
    the first `sleeps` sleeps what it does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = 10**6

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now

    def sleep(self, seconds: float) -> None:
        if self.sleeps > 0:
            self.sleeps -= 1
            self.now += seconds


Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def train_with(job: Job, shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains with a fault on a clock of the rank's own: what else the machine does counts for
    nothing."""
    own_time = OwnTime()
    monkeypatch.setattr(step_timer, "time", own_time)
    monkeypatch.setattr(step_timer.TimeSource, "queued", lambda source: 0.0)
    monkeypatch.setitem(FaultInjector.__init__.__kwdefaults__, "sleep", own_time.sleep)

    def train_with(fault: str, *keys: str, slow_steps: int = 10**6) -> list[dict[str, Any]]:
        own_time.sleeps = slow_steps
        return train(job, shared_path / "run", f"train.chaos=[{fault}]", *keys)

    return train_with


def slow_ranks(out: str) -> list[str]:
    return re.findall(r"warning: (rank \d+) on host \S+ \([^)]*\) is slow", out)


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_a_slowed_rank_of_a_run_is_named_and_no_other(
    job: Job, train_with: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = train_with(
        "{fault: slow, rank: 2, step: 4, seconds: 0.15}", "train.steps=125", slow_steps=61
    )
    looks = {row["step"]: row for row in rows if "own_time_max_rank" in row}
    assert list(looks) == [22, 42, 62, 82, 102, 122]
    for step in (22, 42, 62):
        assert looks[step]["own_time_max_rank"] == 2
        assert looks[step]["own_time_max_s"] - looks[step]["own_time_median_s"] == pytest.approx(
            0.15
        )
    printed = capsys.readouterr().out
    if job.rank == 0:
        assert slow_ranks(printed) == ["rank 2"], printed
        assert printed.count("is as fast as its peers again") == 1


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_stage_of_a_pipeline_that_becomes_slow_is_named(
    job: Job, train_with: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is alone in its stage, so that it can be compared only with what it took before."""
    train_with(
        "{fault: slow, rank: 1, step: 21, seconds: 0.15}", "layout={pp: 2}", "train.steps=85"
    )
    printed = capsys.readouterr().out
    if job.rank == 0:
        assert slow_ranks(printed) == ["rank 1"], printed
        assert "at first it took" in printed
