"""The cost of running a pipeline action, compared with torch's engine, if the action itself
computes next to nothing.

    python tools/bench/pipeline_overhead.py [--ranks 2] [--microbatches 8] [--pairs 20] [--steps 10]
    [--json]

The same processes run the same stages, a small linear layer each, in turns: some steps under
meshtrain's engine, some under torch.distributed.pipelining's schedule of the same name. Measured is
the CPU time of all ranks: of the engine, of its messages over gloo, and of autograd. The processes
start as in training, so both engines profit from meshtrain's sharing of few cores, which makes
torch's messages cheaper as well.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from harness import median_interval
from meshtrain.mesh import Mesh
from meshtrain.pipeline.actions import Action
from meshtrain.pipeline.schedule import build
from pipeline_idle import WIDTH, on_ranks, stages_of_linears
from torch_pipeline import DOUBLE, SINGLE, own_numbers, scheduled

WARM_UP = 3  # steps


@dataclass(frozen=True)
class Found:
    """The result of one schedule: microseconds of CPU time per action, and the ratio of meshtrain's
    to torch's."""

    schedule: str
    meshtrain: float
    torch: float
    ratio: float
    low: float
    high: float


class Numbers:
    """The microbatches of a step: two rows each."""

    def __init__(self, inputs: Tensor) -> None:
        self._inputs = inputs.split(2)

    def shapes(self, microbatch: int) -> tuple[tuple[int, ...] | None, ...]:
        return (self._inputs[microbatch].shape,)

    def inputs(self, microbatch: int) -> tuple[Tensor | None, ...]:
        return (self._inputs[microbatch],)

    def loss(self, microbatch: int, output: Tensor) -> Tensor:
        return output.square().mean()

    def around(self, stage: nn.Module, action: Action) -> AbstractContextManager[None]:
        return nullcontext()


def measure(name: str, mesh: Mesh, options: argparse.Namespace) -> Found:
    """Runs one schedule under both engines; every rank returns the same result."""
    ours, theirs, actions = engines(name, mesh, options.microbatches)
    for engine in (ours, theirs):
        cpu_s(engine, WARM_UP)
    times: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    for pair in range(options.pairs):
        for engine in (ours, theirs) if pair % 2 else (theirs, ours):
            times[engine].append(1e6 * cpu_s(engine, options.steps) / options.steps / actions)
    ratios = [x / y for x, y in zip(times[ours], times[theirs], strict=True)]
    low, high, _ = median_interval(ratios)
    return Found(name, median(times[ours]), median(times[theirs]), median(ratios), low, high)


def engines(
    name: str, mesh: Mesh, microbatches: int
) -> tuple[Callable[[], None], Callable[[], None], int]:
    """A step under meshtrain's engine, a step under torch's, and the number of actions of either on
    all ranks."""
    schedule = build(name, ranks=mesh.size("pp"), microbatches=microbatches)
    pipeline = stages_of_linears(schedule, mesh)
    inputs = torch.ones(2 * microbatches, WIDTH)
    stages = [
        PipelineStage(nn.Linear(WIDTH, WIDTH, bias=False), number, schedule.stages, inputs.device)
        for number in own_numbers(name, mesh.index("pp"), mesh.size("pp"))
    ]
    theirs = scheduled(
        name,
        stages,
        n_microbatches=microbatches,
        loss_fn=lambda output, target: output.square().mean(),
        scale_grads=False,
    )
    first, last = (
        any(getattr(stage, which) for stage in stages) for which in ("is_first", "is_last")
    )
    given: dict[str, Any] = {"target": inputs if last else None, "return_outputs": False}
    actions = sum(len(schedule.actions_of(rank)) for rank in range(schedule.ranks))
    return (
        lambda: pipeline.run(Numbers(inputs)),
        lambda: theirs.step(*([inputs] if first else []), **given),
        actions,
    )


def cpu_s(engine: Callable[[], None], steps: int) -> float:
    """CPU seconds of `steps` steps, over all threads of all ranks."""
    dist.barrier()
    start = time.process_time()
    for _ in range(steps):
        engine()
    taken = torch.tensor(time.process_time() - start, dtype=torch.float64)
    dist.all_reduce(taken)
    return taken.item()


def table(found: Sequence[Found], options: argparse.Namespace, load: float) -> str:
    """The results as text."""
    lines = [
        f"{os.cpu_count()} cores, torch {torch.__version__}; load {load:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after; "
        f"{options.ranks} processes x {options.microbatches} microbatches, "
        f"{options.pairs} pairs of {options.steps} steps",
        "",
        f"{'CPU time per action':<20} {'meshtrain':>11} {'torch':>11} {'ratio':>7}  "
        f"{'interval':<15} {'goal':>6}",
        *(
            f"{one.schedule:<20} {one.meshtrain:8.0f} us {one.torch:8.0f} us {one.ratio:7.3f}  "
            f"{f'{one.low:.3f} - {one.high:.3f}':<15} {1:6.2f}"
            for one in found
        ),
    ]
    return "\n".join(lines)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What running an action of a pipeline costs, beside torch's engine."
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (%(default)s)")
    parser.add_argument("--pairs", type=int, default=20, help="turns of each engine (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def main() -> int:
    return on_ranks(read_arguments(), (*SINGLE, *DOUBLE), measure, table)


if __name__ == "__main__":
    sys.exit(main())
