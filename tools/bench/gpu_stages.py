"""The stages of gpu_check.py, each in a process of its own: `python gpu_stages.py STAGE PART`.

A stage writes a row for each thing that it finds, at once: its `result` is `good`, `bad` or
`unseen`, which says `why`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_check import HERE, LAYOUTS, MODELS, ROOT, SHARES_A_GPU, write_row

# Files with tests that are marked `gpu`, by group.
GROUPS = {
    "attention": ("tests/parallel/test_attention_kernels.py", "tests/test_attention.py"),
    "one process": (
        "tests/data/test_loader.py",
        "tests/metrics/test_profile.py",
        "tests/metrics/test_stragglers.py",
        "tests/metrics/test_timing.py",
        "tests/parallel/test_offload.py",
    ),
    "whole runs": ("tests/parity/test_parity_gpu.py",),
    "several ranks": (
        "tests/parallel/test_context_attention.py",
        "tests/parallel/test_tensor_parallel.py",
    ),
}
VERIFY_STEPS = 5
MEMORY_STEPS = 4
# Relative difference of planned and measured memory, after cuBLAS' workspace (docs/foresight.md).
MEMORY_NEAR = 0.02
WORKSPACE = 64 * 2**20
PAIRS, PAIR_STEPS = 6, 10
ROUNDING = 2e-2  # of 16 bits, relative to the largest value


# The machine --------------------------------------------------------------------------------------


def machine(when: str) -> int:
    """What is here; status 2 without a GPU."""
    try:
        import torch
    except ImportError as error:
        print(f"there is no torch here ({error}): install one with CUDA", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} finds no GPU here: this checks an NVIDIA GPU, with a torch "
            "that has CUDA",
            file=sys.stderr,
        )
        return 2
    commit = subprocess.run(
        ["git", "-C", HERE, "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    nccl = list(torch.cuda.nccl.version()) if torch.distributed.is_nccl_available() else None
    write_row(
        {
            "stage": "machine",
            "time": when,
            "commit": commit.stdout.strip() or None,
            "gpu": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": nccl,
        }
    )
    return 0


# Tests --------------------------------------------------------------------------------------------


class Results:
    """A plugin of pytest that writes a row for each test when it has ended."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        row = {"stage": "tests", "name": report.nodeid, "seconds": round(report.duration, 2)}
        if report.skipped:
            row |= {"result": "unseen", "why": report.longrepr[2].removeprefix("Skipped: ")}
        elif report.failed:
            row |= {"result": "bad", "why": str(report.longrepr)[-1500:]}
        else:
            row |= {"result": "good"}
        write_row(row)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            why = str(report.longrepr)[-1500:]
            write_row({"stage": "tests", "name": report.nodeid, "result": "bad", "why": why})


def run_group(group: str) -> int:
    """Runs the tests of a group that need a GPU."""
    if group == "several ranks":
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return run_tests(GROUPS[group])


def run_tests(files: Sequence[str]) -> int:
    """Runs the tests of these files that need a GPU, those first that failed last time on this
    machine."""
    try:
        import pytest
    except ImportError:
        why = "pytest is missing: pip install pytest pytest-timeout hypothesis"
        write_row({"stage": "tests", "name": files[0], "result": "unseen", "why": why})
        return 0
    arguments = [*files, "-m", "gpu", "-q", "-p", "no:xdist", "--failed-first"]
    # A file that lacks a package says so, and the others run.
    status = pytest.main([*arguments, "--continue-on-collection-errors"], plugins=[Results()])
    # 1: tests failed, which their rows say; 5: there are none.
    return 0 if status in (0, 1, 5) else int(status)


# Layouts ------------------------------------------------------------------------------------------


def backend() -> tuple[str, list[str], dict[str, str]]:
    """How two ranks on one GPU communicate: its name, what runs meshtrain's commands, and the
    environment."""
    import torch

    shared = {
        # Without it a job whose ranks share a GPU is refused.
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        # Asking whether there is a GPU must not start CUDA: `verify` forks its ranks.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    if torch.cuda.nccl.version() >= SHARES_A_GPU:
        # Ranks that wait for each other on one GPU need room beside each other.
        few = {"NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
        return "NCCL", ["-m", "meshtrain.cli"], shared | few
    return "gloo", [str(HERE / "gloo_on_gpu.py"), "meshtrain.cli"], shared


def layouts(name: str) -> int:
    """Compares a layout of two ranks on this GPU with one rank, in float64."""
    by, program, environment = backend()
    config, overrides, layout = LAYOUTS[name]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(*program, "verify", config, *overrides, "parallel.compile=false", "--layouts", layout),
        *(f"--steps={VERIFY_STEPS}", "--precision=float64", "--json"),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout)
    found = verified(done.stdout)
    row = {"stage": "layouts", "name": name, "layout": layout, "by": by}
    if found is None:
        write_row(row | {"result": "bad", "why": f"verify ended with {done.returncode}"})
        return 1
    for compared in found["layouts"]:
        write_row(row | row_of_layout(compared))
    return 0


def verified(printed: str) -> dict[str, Any] | None:
    """The JSON object among what `meshtrain verify --json` has printed; None: there is none."""
    for start in re.finditer(r"^\{", printed, re.MULTILINE):
        try:
            value, _ = json.JSONDecoder().raw_decode(printed, start.start())
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict) and "layouts" in value:
            return value
    return None


def row_of_layout(compared: dict[str, Any]) -> dict[str, Any]:
    """What a comparison by `verify` says: `equal`, `different` or `refused`."""
    if compared["status"] == "equal":
        return {"result": "good", "difference": compared.get("difference")}
    if compared["status"] == "refused":
        return {"result": "unseen", "why": compared["reason"]}
    where = f"step {compared.get('step')}, {compared.get('parameter')}"
    why = f"{where}: differs by {compared.get('difference')} ({compared.get('kind')})"
    return {"result": "bad", "why": why, "difference": compared.get("difference")}


# Memory -------------------------------------------------------------------------------------------


def memory_overrides(name: str) -> list[str]:
    return [
        f"model={MODELS[name]}",
        "data.seq_len=4096",
        "data.validation=0",
        "data.workers=0",
        "batch.global_size=1",
        "batch.micro_size=1",
        "parallel.compile=false",
        "train.precision=bfloat16",
        f"train.steps={MEMORY_STEPS}",
        "train.eval_every=0",
        "train.sample_tokens=0",
        "optimizer.warmup_steps=2",
        "checkpoint.every=0",
    ]


CONFIG = str(ROOT / "configs" / "quickstart.yaml")


def memory(name: str) -> int:
    """The memory that a plan foresees, and that a run takes."""
    import side
    from meshtrain.metrics.logger import read

    # Beside the run, in a process that sees no GPU.
    planning = subprocess.Popen(
        [sys.executable, str(HERE / "gpu_stages.py"), "planned", name],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="meshtrain-gpu-memory-") as folder:
            output = Path(folder) / "run"
            keys = [*memory_overrides(name), f"train.output={output}"]
            status = side.run_meshtrain([CONFIG, *keys], lambda step: None)
            if status != 0:
                return status
            measured = max(row["memory_gib"] for row in read(output / "metrics.jsonl"))
        printed, _ = planning.communicate()
    finally:
        planning.kill()  # where the run has failed
    if planning.returncode != 0:
        return planning.returncode  # it has printed why
    foreseen = int(printed.split()[-1]) / 2**30
    write_row({"stage": "memory", "name": name} | compare_memory(foreseen, measured))
    return 0


def planned(name: str) -> int:
    """Prints the bytes that a plan foresees."""
    from meshtrain.foresight import predict

    print(predict(CONFIG, memory_overrides(name), hosts=(1,), hardware="h200").memory.total)
    return 0


def compare_memory(planned_gib: float, measured_gib: float) -> dict[str, Any]:
    expected = planned_gib + WORKSPACE / 2**30
    difference = (measured_gib - expected) / expected
    row = {"planned_gib": round(planned_gib, 3), "measured_gib": round(measured_gib, 3)}
    if abs(difference) <= MEMORY_NEAR:
        return row | {"result": "good"}
    why = f"{100 * difference:+.1f} % beside the plan and cuBLAS' 64 MiB"
    return row | {"result": "bad", "why": why}


# A pair -------------------------------------------------------------------------------------------

TURN = re.compile(r"^pair (\d+)/\d+: \S+ \((\S+)\), \S+ \((\S+)\) CPU s")


def pair(_: str) -> int:
    """meshtrain in turns with torchtitan, or with a plain loop where that is missing."""
    import gpu_titan

    lacking = gpu_titan.needed(["T-none"])
    against = "T-none" if lacking is None else "plain"
    if lacking is not None:
        row = {"stage": "pair", "name": "torchtitan", "result": "unseen", "why": lacking}
        write_row(row)
    with tempfile.TemporaryDirectory(prefix="meshtrain-gpu-pair-") as folder:
        file = Path(folder) / "pair.json"
        command = [sys.executable, str(HERE / "gpu_pair.py"), "S", "--against", against]
        command += [f"--pairs={PAIRS}", f"--steps={PAIR_STEPS}", "--json", str(file)]
        status = follow(command, against)
        if not file.exists():
            return status or 1
        write_row(row_of_pair(json.loads(file.read_text()), against))
    return 0


def follow(command: Sequence[str], against: str) -> int:
    """Runs gpu_pair.py, and writes a row for each pair of turns when it has ended."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            turn = TURN.match(line)
            if turn is not None:
                seconds = [float(turn[2]), float(turn[3])]
                name = f"turn {turn[1]} against {against}"
                row = {"stage": "pair", "name": name, "result": "good"}
                write_row(row | {"seconds_of_turns": seconds})
    return process.returncode


def row_of_pair(result: dict[str, Any], against: str) -> dict[str, Any]:
    """What gpu_pair.py has found; bad: the losses of the sides are not the same."""
    from gpu_pair import TOLERANCE

    sides = result["sides"].values()
    apart = max(side["largest_difference_of_losses"] for side in sides)
    row = {
        "stage": "pair",
        "name": f"{result['workload']} against {against}",
        "ratio": result["ratios"][against],
        "tokens_per_s": {name: side["tokens_per_s"] for name, side in result["sides"].items()},
        "mfu_causal": {name: side["mfu_causal"] for name, side in result["sides"].items()},
        "allocated_gib": {
            name: round(side["allocated"] / 2**30, 2) for name, side in result["sides"].items()
        },
        "largest_difference_of_losses": apart,
    }
    if apart > TOLERANCE:
        return row | {"result": "bad", "why": f"losses differ by {100 * apart:.1f} %"}
    return row | {"result": "good"}


# Kernels ------------------------------------------------------------------------------------------


def kernels(_: str, device: str = "cuda", size: int = 4096) -> int:
    """Which kernels attention and experts get, and what float8 gains. `size`: tokens, and features
    of the largest products; tests take less, on a CPU."""
    for what in (attention_kernels, context_kernels, grouped_experts, float8_gain):
        for row in what(device, size):
            write_row({"stage": "kernels"} | row)
    return 0


def attention_kernels(device: str, size: int) -> Iterator[dict[str, Any]]:
    """The kernel that takes most of the time of attention's forward and backward."""
    import torch

    from meshtrain.attention import AttentionContext, attention, cumulative_lengths

    documents = (torch.arange(size) // max(1, size // 5)).expand(1, size)
    packed = AttentionContext(documents, cumulative_lengths(documents))
    cases = {
        "causal, bfloat16, heads of 64": (torch.bfloat16, 64, None),
        "causal, bfloat16, heads of 128": (torch.bfloat16, 128, None),
        "causal, float32, heads of 64": (torch.float32, 64, None),
        "documents, bfloat16, heads of 128": (torch.bfloat16, 128, packed),
    }
    for name, (dtype, width, context) in cases.items():
        inputs = [
            torch.randn(1, heads, size, width, dtype=dtype, device=device, requires_grad=True)
            for heads in (16, 4, 4)
        ]
        record = None
        if context is not None:
            record = AttentionContext.of(context.to(torch.device(device), dtype))

        def step(inputs: Any = inputs, record: Any = record) -> None:
            q, k, v = inputs
            attention(q, k, v, record).sum().backward()

        yield {"name": f"attention: {name}", "result": "good"} | busiest(step, device)


def busiest(function: Callable[[], object], device: str) -> dict[str, Any]:
    """The kernels (on a CPU, operators) that take most of the time of a call, with the call's
    milliseconds on the device."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    function()  # loads and selects kernels
    with profile(activities=[kind]) as profiler:
        function()
        if device == "cuda":
            torch.cuda.synchronize()
    clock = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, clock))
    total = sum(getattr(event, clock) for event in events)
    return {"kernels": [event.key[:120] for event in events[:2]], "ms": round(total / 1000, 3)}


def context_kernels(device: str, size: int) -> Iterator[dict[str, Any]]:
    """The kernel of blocks of attention over `cp`, which is tried on small blocks first."""
    import torch

    from meshtrain.parallel.context.kernels import choose_kernel

    q = torch.empty(1, 4, 16, 128, dtype=torch.bfloat16, device=device)
    for visible in ("all", "documents", "mask"):
        chosen = type(choose_kernel(q, q, False, visible)).__name__.lstrip("_")
        yield {"name": f"attention over cp: {visible}", "result": "good", "kernels": [chosen]}


def grouped_experts(device: str, size: int) -> Iterator[dict[str, Any]]:
    """The grouped product of experts, forward and both gradients, beside a plain loop."""
    import torch

    from meshtrain.parallel.linear.grouped import GroupedMatmul, _has_kernel

    experts, width, rows = 16, size // 4, 2 * size
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.randn(experts, width, width, dtype=torch.bfloat16, device=device) / width**0.5
    weight.requires_grad_()
    counts = torch.full((experts,), rows // experts, device=device)
    counts[0] += counts[1].clone()  # an expert without rows
    counts[1] = 0
    gradient = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    of_each = counts.tolist()

    def grouped() -> list[Any]:
        y = GroupedMatmul.apply(x, weight, counts, None)
        return [y, *torch.autograd.grad(y, (x, weight), gradient)]

    def loop() -> list[Any]:
        parts = zip(x.split(of_each), weight, strict=True)
        y = torch.cat([part @ matrix.t() for part, matrix in parts])
        return [y, *torch.autograd.grad(y, (x, weight), gradient)]

    apart = 0.0
    for ours, plain in zip(grouped(), loop(), strict=True):
        ours, plain = ours.detach(), plain.detach()
        apart = max(apart, float((ours - plain).abs().max() / plain.abs().max()))
    row = {
        "name": "grouped experts: bfloat16 beside a loop",
        "fused": _has_kernel(x, weight),
        "difference": apart,
        "ms": 1000 * seconds_of(grouped, device),
        "ms_of_loop": 1000 * seconds_of(loop, device),
    }
    is_right = apart <= ROUNDING
    why = {} if is_right else {"why": f"differs from a loop by {apart:.1e} of the largest value"}
    yield row | {"result": "good" if is_right else "bad"} | why


def float8_gain(device: str, size: int) -> Iterator[dict[str, Any]]:
    """A compiled feed-forward block in bfloat16 and with float8, forward and backward."""
    import torch
    from torch import nn

    from meshtrain.parallel.linear import use_products
    from meshtrain.parallel.linear.float8 import apply_float8, kernel_of

    dtype = torch.bfloat16
    if not kernel_of(dtype, device):
        why = "this device has no float8 product with row scales: it is emulated"
        yield {"name": "float8: feed-forward block", "result": "unseen", "why": why}
        return

    class Block(nn.Sequential):
        def blocks(self) -> list[nn.Module]:
            return list(self)

    def seconds(float8: bool) -> float:
        layers = nn.Sequential(
            nn.Linear(size, 3 * size, bias=False), nn.SiLU(), nn.Linear(3 * size, size, bias=False)
        )
        model = Block(layers).to(device, dtype)
        use_products(model)
        if float8:
            apply_float8(model, dtype, device, compiled=True)
        compiled = torch.compile(model)
        x = torch.randn(4 * size, size, dtype=dtype, device=device, requires_grad=True)
        return seconds_of(lambda: compiled(x).sum().backward(), device)

    plain, in_8_bits = seconds(False), seconds(True)
    yield {
        "name": "float8: feed-forward block",
        "result": "good",
        "ms": 1000 * in_8_bits,
        "ms_of_bfloat16": 1000 * plain,
        "gain": plain / in_8_bits,
    }


def seconds_of(function: Callable[[], object], device: str) -> float:
    """Seconds of one call, the median of a few rounds."""
    import time

    from gpu_roofs import gpu_seconds, measure

    if device == "cuda":
        return measure(function, gpu_seconds)
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


STAGES: dict[str, Callable[[str], int]] = {
    "machine": machine,
    "tests": run_group,
    "layouts": layouts,
    "memory": memory,
    "planned": planned,
    "pair": pair,
    "kernels": kernels,
}


if __name__ == "__main__":
    sys.exit(STAGES[sys.argv[1]](sys.argv[2]))
