"""Where a GPU's time goes, by classes of kernels: reads traces of torch.profiler, as
`metrics.profile` writes them.

    python tools/bench/kernel_classes.py runs/NAME/profile/rank_00000.json [--steps 2] [--json]

A kernel's class follows from its name. The time of a class is the time in which at least one of its
kernels runs; `alone` is the part of it in which no other class runs, which for communication is its
exposed cost. `idle` is the time between the first kernel's start and the last one's end in which
none runs. Exits with 2 for a file without kernels.
"""

import argparse
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import positive

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events that run on a GPU
# The first pattern that matches a name decides. Inductor's names of fused kernels say what they
# compute.
CLASSES = (
    ("communication", r"nccl|multimem|symm_mem|one_shot_all|two_shot_all|nvshmem"),
    ("attention", r"flash|fmha|sdpa|attention|attn|cudnn_generated"),
    ("optimizer", r"multi_tensor_apply|adam|lpnorm|l2norm"),
    ("loss", r"softmax|nll_loss|logsumexp|cross_entropy|triton_(red|per)_\w*amax"),
    ("gemm", r"nvjet|gemm|cutlass|cublas|splitk|wgmma|\bgemv|triton_tem|_scaled_mm"),
    (
        "copies",
        r"memcpy|memset|copy_kernel|batchedcopy|chunk_cat|fillfunctor|triton_poi_fused_(_to_copy_|cat_|clone_)+\d",
    ),
    (
        "elementwise",
        r"elementwise|triton_|norm|reduce_kernel|embedding|indexing|index_|sort|scan|unrolled|rotary|silu",
    ),
)
OTHER, IDLE = "other", "idle"


class Kernel(NamedTuple):
    name: str
    begin: float  # microseconds
    end: float


class Class(NamedTuple):
    """Microseconds and number of kernels of one class; `largest` are the names with the most
    time."""

    name: str
    busy: float
    alone: float
    kernels: int
    largest: tuple[str, ...]


def class_of(name: str) -> str:
    return next(
        (kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), OTHER
    )


def read_kernels(trace: dict[str, Any]) -> list[Kernel]:
    """The kernels that ran on the GPU; in a trace with several GPUs, on the one with the most
    kernels."""
    by_device: dict[Any, list[Kernel]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in KERNELS:
            begin, device = float(event["ts"]), event.get("args", {}).get("device", 0)
            by_device[device].append(Kernel(event["name"], begin, begin + float(event["dur"])))
    _, most = max(((len(kernels), kernels) for kernels in by_device.values()), default=(0, []))
    return sorted(most, key=lambda kernel: kernel.begin)


def covered(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one of these kernels runs; they are sorted by their begin."""
    total, until = 0.0, float("-inf")
    for _, begin, end in kernels:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def summarise(kernels: Sequence[Kernel]) -> list[Class]:
    """Every class that occurs, the longest first, and the idle time last."""
    by_class: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_class[class_of(kernel.name)].append(kernel)
    busy, classes = covered(kernels), []
    for name, own in by_class.items():
        others = covered(kernel for kernel in kernels if class_of(kernel.name) != name)
        times: dict[str, float] = defaultdict(float)
        for kernel in own:
            times[kernel.name] += kernel.end - kernel.begin
        largest = tuple(sorted(times, key=lambda kernel: -times[kernel])[:3])
        classes.append(Class(name, covered(own), busy - others, len(own), largest))
    idle = span(kernels) - busy
    return [*sorted(classes, key=lambda of: -of.busy), Class(IDLE, idle, idle, 0, ())]


def span(kernels: Sequence[Kernel]) -> float:
    """Microseconds from the first kernel's begin to the last one's end."""
    return max(kernel.end for kernel in kernels) - kernels[0].begin


def table(classes: Sequence[Class], whole: float, steps: int) -> str:
    """The classes as text. `whole`: microseconds that correspond to a share of 100 %."""
    rows = [f"{'class':<14} {'ms':>9} {'share':>7} {'alone ms':>9} {'kernels':>8}  longest"]
    for name, busy, alone, kernels, largest in classes:
        longest = largest[0][:48] if largest else ""
        times = (
            f"{busy / 1000 / steps:9.3f} {100 * busy / whole:5.1f} % {alone / 1000 / steps:9.3f}"
        )
        rows.append(f"{name:<14} {times} {kernels / steps:8.0f}  {longest}".rstrip())
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="A GPU's time by classes of kernels, from a trace of torch.profiler."
    )
    parser.add_argument("trace", type=Path, help="a file of metrics.profile, also with .gz")
    parser.add_argument(
        "--steps", type=positive, default=1, help="steps in it, for times of one step (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with (gzip.open if options.trace.suffix == ".gz" else open)(options.trace, "rt") as file:
        kernels = read_kernels(json.load(file))
    if not kernels:
        print(
            f"{options.trace} holds no kernels of a GPU: was it recorded on one?", file=sys.stderr
        )
        return 2
    classes = summarise(kernels)
    if options.json:
        print(
            json.dumps(
                {
                    "span": span(kernels),
                    "steps": options.steps,
                    "classes": [c._asdict() for c in classes],
                }
            )
        )
    else:
        print(table(classes, span(kernels), options.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
