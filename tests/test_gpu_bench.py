"""The logic of benchmarks that need a GPU: what they count, read and compare, on small models and
made-up clocks."""

import argparse
import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import gpu_pair
import gpu_roofs
import gpu_titan
import kernel_classes
from baseline import Task
from gpu_pair import OURS, WORKLOADS, Measured, Sizes, Workload, make_sides, sizes_of, values_of
from harness import ON_CPU, Side, Turn, model_of
from meshtrain.data.order import batch_samples
from meshtrain.modeling.build import parameter_count
from meshtrain.modeling.flops import sample_flops
from tests.launching import ROOT

SMALL = {
    "name": "llama",
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
VALUES = {name: values_of(workload) for name, workload in WORKLOADS.items()}


@pytest.fixture
def small() -> dict[str, Any]:
    return values_of(Workload(SMALL, 16, 4, 2, 1))


# What a workload asks for -------------------------------------------------------------------------


def test_the_shapes_are_those_of_the_published_models() -> None:
    """GFLOP per token as torchtitan has them (full), and with the half of attention that a causal
    row needs."""
    published = {"A1": (1_498_482_688, 10.636, 9.025), "A-4k": (1_498_482_688, 9.025, 8.220)}
    for name, (parameters, full, causal) in published.items():
        sizes, length = sizes_of(VALUES[name]), WORKLOADS[name].seq_len
        assert sizes.parameters == parameters
        assert sizes.flops(length, causal=False) / 1e9 == pytest.approx(full, abs=5e-4)
        assert sizes.flops(length, causal=True) / 1e9 == pytest.approx(causal, abs=5e-4)
    assert sizes_of(VALUES["B21"]).parameters == 2_795_573_248
    assert sizes_of(VALUES["B21"]).flops(8192, causal=True) / 1e9 == pytest.approx(15.232, abs=5e-4)


def test_sizes_count_what_the_model_multiplies(small: dict[str, Any]) -> None:
    module, config = model_of(small)
    with torch.device("meta"):
        model = module.Model(config)
    assert sizes_of(small).parameters == parameter_count(model)
    flops, _ = sample_flops(model, (torch.zeros(1, 16, dtype=torch.long), None, None))
    assert flops == 16 * sizes_of(small).flops(16, causal=False)


# Turns, visits and the result ---------------------------------------------------------------------


def options_of(**further: Any) -> argparse.Namespace:
    shared = {
        "pairs": 2,
        "steps": 1,
        "warm_up": 1,
        "environment": ON_CPU,
        "overrides": [],
        "one_by_one": True,
    }
    return argparse.Namespace(**shared, **further)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sides_that_start_one_by_one_train_the_same(small: dict[str, Any], tmp_path: Path) -> None:
    small["parallel"] = {"compile": False}
    small["data"]["workers"] = 0
    small["train"]["precision"] = "float32"
    sides = make_sides(["plain"])
    measured = gpu_pair.run(sides, small, options_of(together=True), tmp_path)
    assert [len(turns) for turns in measured.turns.values()] == [2, 2]
    assert [len(losses) for losses in measured.losses.values()] == [4, 4], (
        "warming up, two turns and the last step"
    )
    assert gpu_pair.difference(measured.losses["plain"], measured.losses[OURS]) < 1e-5
    assert not list(tmp_path.glob("*/checkpoints/step_*")), "nothing is saved at the end"


def test_sides_that_do_not_fit_together_visit_the_gpu_there_and_back(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits: list[str] = []

    @contextmanager
    def start(
        sides: Sequence[Side], folder: Path, options: argparse.Namespace
    ) -> Iterator[list[Any]]:
        assert (folder / "tokens").resolve().exists()
        visits.extend(side.name for side in sides)
        clock = iter(range(10 * len(visits), 1000))
        yield [SimpleNamespace(turn=lambda: Turn(0.0, float(next(clock))))]

    monkeypatch.setattr(gpu_pair, "running", start)
    monkeypatch.setattr(gpu_pair, "read_losses", lambda sides, folder: [[float(len(visits))]])
    options = options_of(together=False)
    options.pairs = 3  # half of them in a visit, and the rest
    measured = gpu_pair.run(make_sides(["T-none"]), small, options, tmp_path)
    assert visits == [OURS, "T-none", "T-none", OURS]
    assert [turn.wall_s for turn in measured.turns[OURS]] == [10, 11, 40, 41]
    assert [turn.wall_s for turn in measured.turns["T-none"]] == [20, 21, 30, 31]
    assert measured.losses == {OURS: [1.0], "T-none": [2.0]}, "those of the first visit"


def test_the_result_follows_from_times_and_sizes(small: dict[str, Any]) -> None:
    losses = {OURS: [4.0] * 25, "T-none": [4.0] * 19 + [4.02] + [9.0] * 5}
    turns = {
        OURS: [
            Turn(0, wall, 2**30, 2**31, began) for wall, began in ((1.0, 0), (2.0, 10), (1.0, 20))
        ]
    }
    turns["T-none"] = [Turn(0, 1.5, began=began) for began in (3, 13, 23)]
    sizes = sizes_of(small)
    samples = [
        gpu_pair.Sample(time, 1500 + time, 400, 50 + time, 0x5) for time in (0.5, 11, 12, 13.5, 99)
    ]
    result = gpu_pair.summary(Measured(turns, losses, True), small, 2, samples, peak=1e9)
    ours, theirs = result["sides"][OURS], result["sides"]["T-none"]
    assert (ours["ms_per_step"], ours["tokens_per_s"]) == (500, 128)
    assert ours["mfu_causal"] == pytest.approx(128 * sizes.flops(16, causal=True) / 1e9)
    assert ours["mfu"] == pytest.approx(128 * sizes.flops(16, causal=False) / 1e9)
    assert ours["sm_mhz"] == 1511, "of the three samples in its turns"
    assert ours["held_down_by"] == ["software power cap"], "an idle clock is no reason"
    assert theirs["celsius"] == 63.5
    assert theirs["largest_difference_of_losses"] == pytest.approx(0.005), "of the first twenty"
    assert "T-none            1.500  0.750 - 1.500" in gpu_pair.table(result), (
        "above 1: meshtrain is faster"
    )


def test_what_nvidia_smi_says_is_read() -> None:
    """A line that is cut off, as the last one may be, counts for nothing."""
    text = (
        "2026/03/01 12:00:00.500, 1980, 512.31, 61, 0x0000000000000004\n"
        "2026/03/01 12:00:01.000, [N/A], 512.31, 61, 0x0000000000000001\n"
        "2026/03/01 12:00:01.500, 19"
    )
    first, second = gpu_pair.read_samples(text)
    assert (first.sm_mhz, first.power_w, first.reasons) == (1980, 512.31, 4)
    assert second.time - first.time == pytest.approx(0.5)
    assert math.isnan(second.sm_mhz)


def test_sides_are_baselines_or_settings() -> None:
    ours, titan, plain, other = make_sides(["T-sac", "plain", "parallel.compile=false"])
    assert (plain.kind, plain.overrides) == ("gpu_plain", ())
    assert (ours.overrides, titan.kind, titan.overrides) == (
        (),
        "gpu_titan",
        ("titan.baseline=T-sac",),
    )
    assert (other.kind, other.overrides) == ("meshtrain", ("parallel.compile=false",))
    with pytest.raises(SystemExit, match="T-nothing: expected T-none, T-sac, T-amp, plain or key"):
        make_sides(["T-nothing"])


# torchtitan's side --------------------------------------------------------------------------------


def test_torchtitan_reads_meshtrain_s_samples(small: dict[str, Any], tmp_path: Path) -> None:
    """In the order of `batch_samples`, with the next token as the target."""
    file = tmp_path / "tokens.bin"
    tokens = np.arange(10 * 16 + 1) % 300
    tokens.astype(np.uint16).tofile(file)
    config = small | {"train": {"seed": 3, "steps": 2}}
    task = Task(config, file, weights=tmp_path / "none", log=tmp_path / "none")
    batches = list(gpu_titan.Samples(task))
    assert len(batches) == 4, "two microbatches in each of two steps"
    read = torch.cat([inputs["input"] for inputs, _ in batches])
    order = [j for step in range(2) for j in batch_samples(3, step, 4, 10)]
    assert read.tolist() == [list(tokens[16 * j : 16 * j + 16]) for j in order]
    assert all(torch.equal(inputs["input"][:, 1:], targets[:, :-1]) for inputs, targets in batches)


def test_torchtitan_gets_the_workload_s_numbers() -> None:
    """Its feed-forward is 8/3 of the model's width, multiplied, rounded down, and up to a
    multiple."""
    values = VALUES["A1"] | {"titan": {"baseline": "T-sac", "compile": True, "folder": "x"}}
    sections = gpu_titan.sections_0_2(values)
    assert sections["training"]["max_norm"] == 1.0
    assert (sections["optimizer"]["beta2"], sections["optimizer"]["weight_decay"]) == (0.95, 0.0)
    assert sections["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    for model in (VALUES["A1"]["model"], VALUES["B21"]["model"], SMALL):
        _, config = model_of({"model": model})
        arguments = gpu_titan.arguments_0_2(config)
        hidden = int(arguments["ffn_dim_multiplier"] * int(8 * arguments["dim"] / 3))
        multiple = arguments["multiple_of"]
        assert -(-hidden // multiple) * multiple == config.intermediate_size
    with pytest.raises(AttributeError, match="no attribute 'stepz'"):
        gpu_titan.put(
            SimpleNamespace(training=SimpleNamespace(steps=1)), {"training": {"stepz": 2}}
        )


# Roofs --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_part_runs_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where some back ends do not exist; a clock that gives a tenth of a second for each
    call."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    shape = gpu_roofs.Shape(64, 32, "cpu", torch.bfloat16)
    sizes = Sizes(layers=2, width=32, heads=32, kv=16, hidden=48, vocabulary=64)
    roofs = [
        *gpu_roofs.layers("small", sizes, shape),
        *gpu_roofs.copies(shape, 1000),
        *gpu_roofs.attention("attention", 4, 2, 8, shape),
        *gpu_roofs.losses("small", 32, 64, shape),
    ]

    def seconds(function: Callable[[], object], times: int) -> float:
        function()
        return times / 10

    rows = {roof.name: gpu_roofs.row_of(roof, seconds) for roof in roofs}
    assert len(rows) == len(roofs), "names are unique"
    measured = {name for name, row in rows.items() if "ms" in row}
    assert {
        "small qkv weight gradient",
        "attention flash forward",
        "small loss compiled",
    } <= measured
    assert rows["attention cudnn forward"]["not_here"].startswith("RuntimeError: ")
    assert rows["small down forward"]["tflops"] == pytest.approx(2 * 64 * 48 * 32 / 0.1 / 1e12)
    assert rows["copy float32"]["gb_per_s"] == pytest.approx(8000 / 0.1 / 1e9)
    assert rows["attention flash backward"]["tflops"] == pytest.approx(
        2.5 * 2 * 2 * 4 * 32 * 32 * 8 / 0.1 / 1e12
    )
    assert gpu_roofs.line(rows["copy float32"], 989e12, 8e4).endswith("100.0 %")


def test_a_measurement_is_the_median_of_rounds() -> None:
    calls: list[int] = []
    extra = iter([9.0, 0.0, 0.3, 0.0, 0.0, 0.0, 0.1])  # the first call compiles

    def seconds(function: Callable[[], object], times: int) -> float:
        calls.append(times)
        return 0.001 * times + next(extra)

    assert gpu_roofs.measure(lambda: None, seconds) == pytest.approx(0.001)
    assert calls == [1, 2, 50, 50, 50, 50, 50]


# A profile by classes -----------------------------------------------------------------------------

NAMES = yaml.safe_load((ROOT / "tests" / "kernel_names.yaml").read_text())


def test_a_kernel_s_name_says_its_class() -> None:
    assert {
        kind: [kernel_classes.class_of(name) for name in names] for kind, names in NAMES.items()
    } == {kind: [kind] * len(names) for kind, names in NAMES.items()}


def trace_of(*events: tuple[str, str, float, float]) -> dict[str, Any]:
    """A trace of torch.profiler: (category, name, beginning, microseconds)."""
    made = [
        {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {}}
        for cat, name, ts, dur in events
    ]
    return {"traceEvents": [*made, {"ph": "M", "name": "process_name"}]}


def test_a_profile_is_divided_among_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two kernels of one class at once count once; what runs beside another class is not alone."""
    on_cpu = ("cpu_op", "aten::mm", 0.0, 1000.0)
    trace = trace_of(
        ("kernel", NAMES["gemm"][0], 100.0, 40.0),
        ("kernel", NAMES["gemm"][0], 120.0, 40.0),
        ("kernel", NAMES["communication"][0], 150.0, 30.0),
        ("gpu_memcpy", NAMES["copies"][0], 190.0, 10.0),
        on_cpu,
    )
    kernels = kernel_classes.read_kernels(trace)
    classes = {part.name: part for part in kernel_classes.summarise(kernels)}
    assert list(classes) == ["gemm", "communication", "copies", "idle"]
    assert (classes["gemm"].busy, classes["gemm"].alone, classes["gemm"].kernels) == (60, 50, 2)
    assert (classes["communication"].busy, classes["communication"].alone) == (30, 20)
    assert (classes["idle"].busy, kernel_classes.span(kernels)) == (10, 100)
    file = tmp_path / "rank_00000.json.gz"
    for content, status in ((trace, 0), (trace_of(on_cpu), 2)):
        with gzip.open(file, "wt") as out:
            json.dump(content, out)
        monkeypatch.setattr("sys.argv", ["kernel_classes.py", str(file), "--steps", "2"])
        assert kernel_classes.main() == status
    printed = capsys.readouterr()
    assert "gemm               0.030  60.0 %     0.025        1  nvjet" in printed.out
    assert "holds no kernels of a GPU" in printed.err
