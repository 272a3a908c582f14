"""Ranks tell each other their times now and then, without waiting; a slowed rank is named, with what is known of it."""

import itertools
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from meshtrain.doctor import facts
from meshtrain.doctor.records import Gpu
from meshtrain.job.environment import Environment
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.metrics import straggler
from meshtrain.metrics.gpu_probe import GpuProbe
from meshtrain.metrics.logger import read
from meshtrain.metrics.nvidia_smi import CONDITION, condition, gpu_condition, throttle_reasons
from meshtrain.metrics.straggler import (
    LOOKS,
    RANKS_PER_STEP,
    WARM_UP,
    RankPace,
    Straggler,
    StragglerDetector,
    advice,
    describe,
)
from meshtrain.parallel.fsdp import unmeasured_wait_phases
from tests.launching import forked

SMALL = (
    "configs/quickstart.yaml",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=2",
    "data.seq_len=32",
    "data.workers=0",
    "batch.global_size=6",
    "batch.micro_size=2",
    "train.sample_tokens=0",
    "train.eval_every=0",
    "checkpoint.every=0",
)
PACE = RankPace(0.9, 1.0, 1.1, 0.95, 1.05, 1.15, 1.2, 0.01, "b", 2.0, 8)
STRAGGLER = Straggler(2, PACE, 3, 1.0, 0.4, 2.0)


# The talk of the ranks ----------------------------------------------------------------------------------------------


class CountingStore:
    """A store that counts what is asked of it."""

    def __init__(self) -> None:
        self.store, self.calls = dist.HashStore(), 0

    def set(self, key: str, text: str) -> None:
        self.calls += 1
        self.store.set(key, text)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        assert all(self.store.check([key]) for key in keys), "rank 0 would have to wait"
        self.calls += 1
        return self.store.multi_get(keys)


class FakeProbe:
    """Of a GPU that takes so long, as its timer would say it."""

    def __init__(self, seconds: float = 0.0, model: str = "H100") -> None:
        self.seconds, self.model = seconds, model

    def pop(self) -> list[float]:
        return [self.seconds] if self.seconds else []


def ranks(
    world_size: int, store: object, said: list[str], first: int = 1, probes: Sequence[FakeProbe] = ()
) -> list[StragglerDetector]:
    layout = Layout({"dp_shard": world_size}).on_hosts([world_size], ["a"])
    jobs = [
        Job(Environment("none", rank, world_size, rank, "a", None), torch.device("cpu"), store, layout=layout)  # type: ignore[arg-type]
        for rank in range(world_size)
    ]
    each = [StragglerDetector(job, first, said.append, 0) for job in jobs]
    for one, probe in zip(each, probes, strict=False):
        one.probe = probe  # type: ignore[assignment]
    return each


def times(own: float) -> dict[str, float]:
    return {"time_own_s": own, "time_queued_s": 0.0, "step_time_s": 1.0, "time_data_s": 0.0}


def take(each: list[StragglerDetector], step: int, slow: int | None) -> dict[str, float]:
    """All ranks look, rank 0 first, as late as the others may be."""
    found = [one.finish_step(step, times(0.5 if rank == slow else 0.1)) for rank, one in enumerate(each)]
    assert not any(found[1:])
    return found[0]


def test_a_slow_rank_is_named_after_its_third_look_and_when_it_recovers(monkeypatch, tmp_path: Path) -> None:
    said: list[str] = []
    each = ranks(3, dist.HashStore(), said)
    each[0]._folder = tmp_path
    growing = itertools.count(1)
    monkeypatch.setattr(straggler, "memory_gib", lambda device: next(growing))
    for step in range(1, 20 * LOOKS + 1):
        take(each, step, 1)
    assert said == []
    each[0]._writer.join()
    found = take(each, 20 * LOOKS + 1, None)
    assert len(said) == 1
    assert said[0].startswith("warning: rank 1 on host a (dp_shard 1) is slow: for 60 steps now it has taken 500 ms")
    assert "the other 2 ranks with the same work take 100 ms. All ranks wait for it" in said[0]
    each[0]._writer.join()
    told = json.loads((tmp_path / "ranks.json").read_text())
    assert told.pop("memory_gib")[2] == found.pop("memory_max_gib")
    assert told == {"step": 60, "axes": {"dp_shard": 3}, "hosts": ["a"] * 3, "own_time_s": [0.1, 0.5, 0.1]}
    assert found == {"own_time_median_s": 0.1, "own_time_max_s": 0.5, "own_time_max_rank": 1, "memory_max_rank": 2}
    for step in range(20 * LOOKS + 2, 20 * 2 * LOOKS + 2):
        take(each, step, None)
    assert said[1:] == ["rank 1 on host a (dp_shard 1) is as fast as its peers again"]


def test_a_gpu_that_is_held_down_is_named_by_its_probe_where_steps_tell_nothing() -> None:
    said: list[str] = []
    store, probes = dist.HashStore(), [FakeProbe(s) for s in (0.0050, 0.0053, 0.0090, 0.0048)]
    each = ranks(4, store, said, probes=probes)
    for step in range(1, 20 * LOOKS + 2):
        found = take(each, step, None)
    assert (found["gpu_probe_median_s"], found["gpu_probe_max_s"], found["gpu_probe_max_rank"]) == (0.00515, 0.009, 2)
    assert len(said) == 1
    assert said[0].startswith(
        "warning: the GPU of rank 2 on host a (dp_shard 2) is slow: a product of matrices takes 9"
    )
    assert "takes 9.0 ms on it in 3 looks in a row, the others' take 5.0 ms" in said[0]
    assert store.get("pace/suspects") == b"[2]", "nvidia-smi is asked for it"
    probes[2].seconds = 0.0051
    for step in range(20 * LOOKS + 2, 20 * 2 * LOOKS + 2):
        take(each, step, None)
    assert said[1:] == ["rank 2 on host a (dp_shard 2): its GPU is as fast as the others again"]
    assert store.get("pace/suspects") == b"[]"


def test_gpus_of_another_model_are_slow_only_by_their_own_measure() -> None:
    said: list[str] = []
    probes = [FakeProbe(0.005), FakeProbe(0.005), FakeProbe(0.02, "A100"), FakeProbe(0.04, "L40S")]
    each = ranks(4, dist.HashStore(), said, probes=probes)
    for step in range(1, 20 * LOOKS + 2):
        take(each, step, None)
    assert said == []
    probes[3].seconds = 0.08  # in the middle of a look
    for step in range(20 * LOOKS + 2, 20 * (2 * LOOKS + 1) + 2):
        take(each, step, None)
    assert ["the GPU of rank 3" in text and "at first it took" in text for text in said] == [True]


def test_a_probe_runs_every_so_many_steps_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ready: list[bool] = []
    events: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            events.append(self)

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return bool(ready)

        def elapsed_time(self, end: object) -> float:
            return 5.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    probe = GpuProbe(10, torch.device("cpu"))
    for step in range(1, 31):
        probe.begin_step(step)
    assert events == [], "a CPU has none"
    probe._every, probe._a, probe._b, probe._product = 10, torch.eye(2), torch.eye(2), torch.zeros(2, 2)
    for step in range(1, 31):
        probe.begin_step(step)
    assert len(events) == 2 * 3
    assert torch.equal(probe._product, torch.eye(2))
    assert probe.pop() == []
    ready.append(True)
    assert probe.pop() == [0.005] * 3
    assert probe.pop() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_probe_of_a_real_gpu_takes_milliseconds() -> None:
    probe = GpuProbe(1, torch.device("cuda", 0))
    for step in range(3):
        probe.begin_step(step)
    torch.cuda.synchronize()
    assert all(0.0005 < seconds < 0.2 for seconds in probe.pop()[1:])


def test_between_two_looks_nobody_asks_the_store_for_anything() -> None:
    store = CountingStore()
    each = ranks(4, store, [])
    calls = []
    for step in range(1, 62):
        before = store.calls
        take(each, step, None)
        calls.append(store.calls - before)
    assert {step: n for step, n in enumerate(calls, 1) if n} == {20: 4, 21: 1, 40: 4, 41: 1, 60: 4, 61: 1}


def test_a_large_world_looks_more_seldom() -> None:
    store = CountingStore()
    world = 40 * RANKS_PER_STEP
    one = ranks(world, store, [])[5]
    for step in range(1, 81):
        one.finish_step(step, times(0.1))
    assert store.calls == 2


def test_the_first_steps_and_looks_at_too_few_do_not_count() -> None:
    store, said = CountingStore(), list[str]()
    each = ranks(2, store, said, first=12)
    for step in range(12, 21):  # 9 steps, 3 of which warm up
        take(each, step, 0)
    assert store.calls == 0
    for step in range(21, 42):
        found = take(each, step, None)
    assert store.calls == 2 + 1
    assert found["own_time_max_s"] == 0.1
    assert WARM_UP == 3


def test_alone_there_is_nothing_to_compare() -> None:
    one = ranks(1, None, [])[0]
    assert [one.finish_step(step, times(1.0)) for step in range(1, 50)] == [{}] * 49


@pytest.mark.parametrize(
    ("device", "sizes", "expected"),
    [
        ("cpu", {"dp_replicate": 4, "tp": 2}, ()),
        ("cpu", {"dp_shard": 4}, ()),
        ("cpu", {"dp_replicate": 2, "dp_shard": 2}, ("backward",)),
        ("cuda", {"dp_replicate": 4, "tp": 2}, ()),
        ("cuda", {"dp_shard": 4}, ("forward", "backward")),
    ],
)
def test_where_fsdp_waits_unseen(device: str, sizes: dict[str, int], expected: tuple[str, ...]) -> None:
    mesh = SimpleNamespace(device_type=device, size=Layout(sizes).size, uses_fsdp="dp_shard" in sizes)
    assert unmeasured_wait_phases(mesh) == expected  # type: ignore[arg-type]


# What is said -------------------------------------------------------------------------------------------------------


def test_a_straggler_is_told_in_three_lines() -> None:
    gpu = "GPU 3 at 1230 of 1980 MHz, held down by heat (hardware), 88 °C"
    text = describe(
        replace(STRAGGLER, pace=replace(PACE, gpu=gpu, throttled=True)), "rank 2 on host b (dp_shard 2)", 60
    )
    assert text.splitlines() == [
        "warning: rank 2 on host b (dp_shard 2) is slow: for 60 steps now it has taken 1000 ms of its own for each, "
        "the other 3 ranks with the same work take 400 ms. All ranks wait for it",
        "  known of it: 10 ms waiting for data, 50 ms waiting for a core, load of its host 2.0 on 8 cores, " + gpu,
        "  what to do: see to the cooling and the power of that host (nvidia-smi -q -d PERFORMANCE), or leave it out",
    ]


@pytest.mark.parametrize(
    ("pace", "expected"),
    [
        ({"data": 0.5}, "data.workers or data.prefetch a larger"),
        ({"data": 0.5, "throttled": True}, "data.workers or data.prefetch a larger"),
        ({"throttled": True, "load": 30.0}, "cooling"),
        ({"gpu": "GPU 0 at 1980 of 1980 MHz", "load": 30.0}, "look with top"),
        ({"load": 9.0}, "look with top"),
        ({"load": 7.0}, "meshtrain doctor --local"),  # it has 8 cores
        ({}, "meshtrain doctor --local"),
    ],
)
def test_the_advice_follows_what_is_known(pace: dict, expected: str) -> None:
    assert expected in advice(replace(STRAGGLER, pace=replace(PACE, **pace)))


def test_a_load_that_its_peers_have_too_is_no_reason() -> None:
    busy = replace(PACE, load=20.0)
    assert "look with top" in advice(replace(STRAGGLER, pace=busy, load=3.0))
    assert "look with top" not in advice(replace(STRAGGLER, pace=busy, load=20.0))


# nvidia-smi ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "3, 1230, 1980, 88, 310.42, 700.00, 0x0000000000000048",
            "GPU 3 at 1230 of 1980 MHz, held down by a hardware slow-down, heat (hardware), 88 °C, 310 of 700 W",
        ),
        ("0, 1980, 1980, 41, 650.00, 700.00, 0x0000000000000000", "GPU 0 at 1980 of 1980 MHz, 41 °C, 650 of 700 W"),
        ("0, 1980, 1980, 41, [N/A], [N/A], 0x0000000000000001", "GPU 0 at 1980 of 1980 MHz, 41 °C"),  # idle
        ("1, [N/A], [N/A], [N/A], [N/A], [N/A], [Not Supported]", "GPU 1"),
        ("1, 900, 1980, 50, 300.0, 300.0, ", "GPU 1 at 900 of 1980 MHz, 50 °C, 300 of 300 W"),
    ],
)
def test_the_condition_of_a_gpu(line: str, expected: str) -> None:
    assert condition([cell.strip() for cell in line.split(",")]) == (expected, "held down" in expected)


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    """The body of a program in its place; what it was asked comes into the file `asked`, a line each."""
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n{says}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_gpu_is_asked_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, 'echo "2, 900, 1980, 50, 300.0, 300.0, 0x4"')
    told = gpu_condition("GPU-77aa")
    assert told == ("GPU 2 at 900 of 1980 MHz, held down by the power limit, 50 °C, 300 of 300 W", True)
    asked = (tmp_path / "asked").read_text()
    fields = ",".join((*CONDITION, "clocks_event_reasons.active"))
    assert asked.split() == ["--id=GPU-77aa", "--format=csv,noheader,nounits", f"--query-gpu={fields}"]


@pytest.mark.parametrize(
    ("known", "asked", "held"),
    [
        ("clocks_event_reasons", 1, "heat (hardware)"),
        ("clocks_throttle_reasons", 2, "heat (hardware)"),
        ("no_reasons", 3, ""),
    ],
)
def test_a_field_that_a_driver_does_not_know_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str, asked: int, held: str
) -> None:
    row = "0, H100, GPU-1, 81920, 1024, 580.1"
    says = f"""case "$*" in
        *{known}*) echo "{row}, 0x40" ;;
        *reasons*) echo 'Field is not a valid field to query.'; exit 2 ;;
        *) echo "{row}" ;;
    esac"""
    nvidia_smi(tmp_path, monkeypatch, says)
    assert facts._gpus() == (Gpu(0, "H100", "GPU-1", 80.0, 1.0, "580.1", held),)
    assert len((tmp_path / "asked").read_text().splitlines()) == asked


def test_an_nvidia_smi_that_fails_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "echo 'Unable to determine the device handle: Unknown Error'")
    assert gpu_condition("GPU-77aa") == ("", False)
    assert facts._gpus() == ()


def test_without_nvidia_smi_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_condition("GPU-77aa") == ("", False)
    assert throttle_reasons("0x0") == ""


# Real runs ----------------------------------------------------------------------------------------------------------


@contextmanager
def busy_machine(processes: int = 3) -> Iterator[None]:
    """Others compute on the same cores, in bursts, as on a machine that people share."""
    code = "import time\nwhile True:\n  end = time.time() + 0.05\n  while time.time() < end: pass\n  time.sleep(0.03)"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def places(folder: Path) -> tuple[str, str]:
    return f"train.output={folder}", f"data.cache={folder.parent / 'cache'}"


def named(out: str) -> list[str]:
    return re.findall(r"warning: (rank \d+ on host \S+ \([^)]*\)) is slow", out)


def test_a_slowed_rank_is_named_and_no_other_on_a_busy_machine(tmp_path: Path) -> None:
    """Three ranks on the cores of one machine, with others beside them: only the sleeper is named, and its recovery."""
    chaos = "train.chaos=[{fault: slow, rank: 2, step: 4, seconds: 0.15, until: 64}]"
    arguments = ("-m", "meshtrain.train", *SMALL, "train.steps=125", *places(tmp_path), chaos)
    with busy_machine():
        done = forked(3, *arguments).check()
    assert len(named(done.out)) == 1, done.out
    assert named(done.out)[0].startswith("rank 2 on host ")
    assert named(done.out)[0].endswith("(dp_shard 2)")
    assert re.search(
        r"known of it: [\d.]+ ms waiting for data, [\d.]+ ms waiting for a core, load of its host", done.out
    )
    assert done.out.count("is as fast as its peers again") == 1
    looks = {row["step"]: row for row in read(tmp_path / "metrics.jsonl") if "own_time_max_rank" in row}
    assert list(looks) == [22, 42, 62, 82, 102, 122]
    assert [looks[step]["own_time_max_rank"] for step in (22, 42, 62)] == [2, 2, 2]
    assert all(looks[step]["own_time_max_s"] - looks[step]["own_time_median_s"] > 0.1 for step in (22, 42, 62))


def test_nobody_is_named_on_a_busy_machine_without_a_slow_rank(tmp_path: Path) -> None:
    arguments = ("-m", "meshtrain.train", *SMALL, "train.steps=165", *places(tmp_path))
    with busy_machine():
        done = forked(3, *arguments).check()
    assert "is slow" not in done.out
    assert len([row for row in read(tmp_path / "metrics.jsonl") if "own_time_max_rank" in row]) == 8


@pytest.mark.cluster
def test_a_stage_of_a_pipeline_that_becomes_slow_is_named(tmp_path: Path) -> None:
    """It is alone in its stage, so that it can be compared only with what it took before."""
    chaos = "train.chaos=[{fault: slow, rank: 1, step: 21, seconds: 0.15}]"
    layout = ("layout={pp: 2}", "train.steps=85", *places(tmp_path), chaos)
    done = forked(2, "-m", "meshtrain.train", *SMALL, *layout).check()
    assert [who[:6] for who in named(done.out)] == ["rank 1"], done.out
    assert "at first it took" in done.out
