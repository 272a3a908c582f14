"""Whether the ranks of a pipeline idle as much as the simulator says, for every schedule.

    python tools/bench/pipeline_idle.py [--ranks 4] [--microbatches 8] [--unit 0.08] [--runs 3]
    [--json] [SCHEDULE ...]

The engine runs each schedule on processes that communicate over gloo. Each action computes next to
nothing, but sleeps first: one unit for a forward, an input gradient or a weight gradient, two for a
whole backward. So ranks need no core of their own, and the time that a rank does not spend in its
actions is the time it waited for others.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshtrain
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.weight_grad import WeightGradQueue
from meshtrain.pipeline.actions import Action, Kind, Schedule
from meshtrain.pipeline.engine import Pipeline
from meshtrain.pipeline.probe import outline_of
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.pipeline.simulate import Event, Timeline, simulate
from meshtrain.pipeline.stage import keep_stage

WIDTH = 16  # width of the model, a linear layer per stage
POINTS = 5.0  # percentage points by which the measured idle share may differ


@dataclass(frozen=True)
class Found:
    """The result of one schedule; idle shares of the ranks' time, 0 to 1.

    Attributes:
        measured: the median over the runs.
        time: the measured time of a step divided by the simulated, the median over the runs.
        computation: the most CPU time of an action, as a share of its sleep.
    """

    schedule: str
    simulated: float
    measured: float
    time: float
    computation: float

    @property
    def points(self) -> float:
        return 100 * (self.measured - self.simulated)


class Sleeping:
    """The microbatches of a step: a few numbers each. An action takes its time by sleeping."""

    def __init__(self, microbatches: int, unit: float) -> None:
        self._inputs = torch.ones(microbatches, 2, WIDTH)
        self._unit = unit
        self.computed_s = 0.0  # the most CPU time of an action per unit that it slept

    def shapes(self, microbatch: int) -> tuple[tuple[int, ...] | None, ...]:
        return (self._inputs[microbatch].shape,)

    def inputs(self, microbatch: int) -> tuple[Tensor | None, ...]:
        return (self._inputs[microbatch],)

    def loss(self, microbatch: int, output: Tensor) -> Tensor:
        return output.square().mean()

    @contextmanager
    def around(self, stage: nn.Module, action: Action) -> Iterator[None]:
        time.sleep(units(action) * self._unit)
        start = time.thread_time()
        yield
        self.computed_s = max(self.computed_s, (time.thread_time() - start) / units(action))


def units(action: Action) -> int:
    """The units that an action sleeps, equal to its cost in `simulate` by default."""
    return 2 if action.kind is Kind.BACKWARD else 1


def measure(name: str, mesh: Mesh, options: argparse.Namespace) -> Found:
    """Runs one schedule; every rank returns the same result."""
    schedule = build(name, ranks=options.ranks, microbatches=options.microbatches)
    pipeline = stages_of_linears(schedule, mesh)
    pipeline.run(Sleeping(options.microbatches, 0))  # exchanges tensor shapes and makes connections
    simulated = simulate(schedule)
    idle, times, computed = [], [], torch.zeros(())
    for _ in range(options.runs):
        pipeline.recorded = []
        dist.barrier()
        work = Sleeping(options.microbatches, options.unit)
        pipeline.run(work)
        timeline = gathered(schedule, pipeline.recorded)
        idle.append(timeline.idle_share)
        times.append(timeline.makespan / simulated.makespan / options.unit)
        computed = computed.clamp(min=work.computed_s)
    dist.all_reduce(computed, dist.ReduceOp.MAX)
    return Found(
        name, simulated.idle_share, median(idle), median(times), computed.item() / options.unit
    )


def stages_of_linears(schedule: Schedule, mesh: Mesh) -> Pipeline:
    """A pipeline with minimal stages: a small linear layer each."""
    cpu = torch.device("cpu")
    stages: dict[int, nn.Module] = {}
    for number in schedule.stages_of(mesh.index("pp")):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(schedule.stages)]
        stage = nn.Sequential(*layers)
        outline = outline_of(copy.deepcopy(stage).to("meta"), [torch.empty(2, WIDTH)])
        keep_stage(stage, number, number + 1, outline, device=cpu, dtype=torch.float32)
        stages[number] = stage
    splits_backward = any(
        action.kind is Kind.WEIGHT_GRAD for action in schedule.actions_of(mesh.index("pp"))
    )
    later = WeightGradQueue() if splits_backward else None
    if later is not None:
        for kept in stages.values():
            use_products(kept, queue=later)
    return Pipeline(stages, schedule, mesh, cpu, parameter_stages={}, weight_grads=later)


def gathered(schedule: Schedule, events: Sequence[Event]) -> Timeline:
    """The timeline of all ranks. Ranks know one another's actions, so only times are sent."""
    actions = [schedule.actions_of(rank) for rank in range(schedule.ranks)]
    times = torch.zeros(max(map(len, actions)), 2, dtype=torch.float64)
    times[: len(events)] = torch.tensor(
        [[event.start, event.end] for event in events], dtype=torch.float64
    )
    every = [torch.empty_like(times) for _ in actions]
    dist.all_gather(every, times)
    found = (
        Event(rank, action, start, end)
        for rank, row in enumerate(actions)
        for action, (start, end) in zip(row, every[rank].tolist(), strict=False)
    )
    return Timeline.measured(found, schedule.ranks)


def table(found: Sequence[Found], options: argparse.Namespace, load: float) -> str:
    """The results as text."""
    within = sum(abs(one.points) <= POINTS for one in found)
    least = 1 / max(one.computation for one in found)
    lines = [
        f"{os.cpu_count()} cores, torch {torch.__version__}; load {load:.1f} before; "
        f"{options.ranks} processes x "
        f"{options.microbatches} microbatches, a unit of {1000 * options.unit:.0f} ms, the median "
        f"of {options.runs}",
        "",
        f"{'idle share':<20} {'simulated':>9} {'measured':>9} {'points':>7} {'time':>7}",
        *(
            f"{one.schedule:<20} {100 * one.simulated:7.1f} % {100 * one.measured:7.1f} % "
            f"{one.points:+7.1f} {one.time:7.3f}"
            for one in found
        ),
        "",
        f"{within} of {len(found)} are within {POINTS:g} points of the simulator",
        f"an action sleeps at least {least:.0f} times as long as it computes",
    ]
    return "\n".join(lines)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Whether ranks of a pipeline idle as much as the simulator says."
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (%(default)s)")
    parser.add_argument(
        "--unit", type=float, default=0.08, help="seconds of a forward (%(default)s)"
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        help="steps of each schedule; the median counts (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "schedules", nargs="*", metavar="SCHEDULE", help=f"default: {', '.join(NAMES)}"
    )
    return parser.parse_args()


def start(ranks: int) -> int:
    """Runs this command again under torchrun, once for each rank."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*launcher, *sys.argv], env=environment, check=False).returncode


def on_ranks(
    options: argparse.Namespace, schedules: Sequence[str], measure: Callable, table: Callable
) -> int:
    """Measures every schedule on `options.ranks` processes and prints the results; returns the exit
    status."""
    if "RANK" not in os.environ:
        return start(options.ranks)
    load = os.getloadavg()[0]
    # as in training: among other things, ranks yield to one another on few cores
    with meshtrain.start() as job:
        mesh = build_mesh(Layout({"pp": options.ranks}))
        found = [measure(name, mesh, options) for name in schedules]
        said = (
            json.dumps([asdict(one) for one in found], indent=1)
            if options.json
            else table(found, options, load)
        )
        job.say(said)
    return 0


def main() -> int:
    options = read_arguments()
    return on_ranks(options, options.schedules or NAMES, measure, table)


if __name__ == "__main__":
    sys.exit(main())
