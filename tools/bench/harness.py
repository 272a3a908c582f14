"""The benchmark harness: sides train the same model in turns, and their times are compared as
ratios.

A benchmark is a file next to this one, which names its sides and goals and calls `command`. All
sides are started at once and then take turns of a few steps, one side at a time and in alternating
order, so that other load on the machine affects all of them equally. Each ratio is a median over
pairs of turns that are adjacent in time. README.md says how to read the result.
"""

import argparse
import json
import math
import os
import platform
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from meshtrain.data.tokens import Document, write
from meshtrain.job.locate import model_file
from meshtrain.modeling.init import initialise

HERE = Path(__file__).resolve().parent
WORKLOAD = HERE / "workload.yaml"
WARM_UP = 2  # steps for allocations; DDP rebuilds its buckets in the second
START_S = 600.0  # time limit for a side's start, and for a turn
# One thread per process, as under torchrun, and no GPU: CPU time is what is compared.
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SAMPLES = 2000  # samples in the token file


@dataclass(frozen=True)
class Side:
    name: str
    # "meshtrain", or a module next to this one with a function `train(task)`, such as "plain_ddp"
    kind: str
    layout: Mapping[str, int] = field(default_factory=dict)  # empty: one process
    overrides: tuple[str, ...] = ()  # key.path=value, of workload.yaml
    # pipeline actions of a step on all ranks; CPU time beyond the first side's is reported per
    # action
    actions: int = 0

    @property
    def ranks(self) -> int:
        return math.prod(self.layout.values())


@dataclass(frozen=True)
class Turn:
    """The cost of the steps of one turn of a side."""

    cpu_s: float  # sum over all ranks
    wall_s: float  # of the slowest rank
    allocated: int = 0  # peak bytes of GPU memory, of the rank with the highest peak; 0: on a CPU
    reserved: int = 0
    began: float = 0.0  # time.time()


@dataclass(frozen=True)
class Goal:
    """A ratio of two sides, given by name, and its upper limit, if any."""

    side: str
    to: str
    at_most: float | None = None


def command(
    sides: Sequence[Side], goals: Sequence[Goal], description: str, workload: Path = WORKLOAD
) -> int:
    """Runs a benchmark's whole command line; the exit status does not depend on the goals."""
    options = read_arguments(description, workload)
    sides, goals = chosen(sides, goals, options.only)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="meshtrain-bench-") as name:
        folder = Path(name)
        prepare(folder, options.workload)
        with running(sides, folder, options) as started:
            turns = measure(started, options.pairs)
        losses = read_losses(sides, folder)
    by_name = {side.name: made for side, made in zip(sides, turns, strict=True)}
    result = summary(by_name, losses, goals, options, (before, os.getloadavg()[0]))
    result["overhead_ms_per_action"] = overheads(sides, result["turns"])
    print(json.dumps(result, indent=1) if options.json else table(result))
    return 0


def read_arguments(description: str, workload: Path = WORKLOAD) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--pairs", type=positive, default=20, help="turns of each side that count (%(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=2, help="steps of a turn (%(default)s)")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="SIDE",
        help="run this side and the first one",
    )
    parser.add_argument(
        "--workload",
        type=Path,
        default=workload,
        metavar="YAML",
        help="what they train (%(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with the time of every turn"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="for meshtrain's sides"
    )
    parser.set_defaults(warm_up=WARM_UP, environment=ON_CPU, one_by_one=False)
    return parser.parse_args()


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, found {text!r}")
    return int(text)


def chosen(
    sides: Sequence[Side], goals: Sequence[Goal], only: Sequence[str]
) -> tuple[Sequence[Side], Sequence[Goal]]:
    """The first side and those named in `only`, with the goals between them; all of them if `only`
    is empty."""
    names = {side.name for side in sides}
    if unknown := [name for name in only if name not in names]:
        raise SystemExit(
            f"no side is called {unknown[0]!r}; there are: "
            + "; ".join(side.name for side in sides)
        )
    if only:
        names = {sides[0].name, *only}
    return (
        [side for side in sides if side.name in names],
        [goal for goal in goals if goal.side in names and goal.to in names],
    )


def prepare(folder: Path, workload: Path) -> None:
    """Writes the inputs of all sides: tokens (their values do not matter for the time) and the
    initial weights."""
    values = yaml.safe_load(workload.read_text())
    module, config = model_of(values)
    vocabulary, length = config.vocab_size, SAMPLES * values["data"]["seq_len"] + 1
    ids = np.random.default_rng(0).zipf(1.5, length) % vocabulary
    write(
        folder / "tokens",
        [Document(ids)],
        vocab_size=vocabulary,
        tokenizer="none",
        source="random numbers",
    )
    model = module.Model(config)
    initialise(model, module.init_plan, seed=values["train"]["seed"], std=config.initializer_range)
    save_file(model.state_dict(), folder / "weights.safetensors")


def model_of(values: Mapping[str, Any]) -> tuple[ModuleType, Any]:
    """The module of a workload's model and its Config; keys in the file override those of its
    preset."""
    module = model_file(values["model"]["name"])
    preset = module.presets[values["model"]["preset"]] if "preset" in values["model"] else {}
    keys = {key: value for key, value in values["model"].items() if key not in ("name", "preset")}
    return module, module.Config(**preset | keys)


class Running:
    """The processes of one side, with a socket for each rank."""

    def __init__(self, side: Side, process: subprocess.Popen, log: Path) -> None:
        self.side, self.process, self.log = side, process, log
        self.ranks: dict[int, TextIO] = {}

    def turn(self) -> Turn:
        """Lets the side take one turn."""
        began = time.time()
        self.go()
        return replace(self.wait(), began=began)

    def go(self) -> None:
        for rank in self.ranks.values():
            rank.write("go\n")
            rank.flush()

    def wait(self) -> Turn:
        """Waits until every rank is ready for its next turn; returns the cost of the last one."""
        ranks = [Turn(**json.loads(self._line(rank))) for rank in self.ranks.values()]
        allocated, reserved = (
            max(rank.allocated for rank in ranks),
            max(rank.reserved for rank in ranks),
        )
        return Turn(
            sum(rank.cpu_s for rank in ranks),
            max(rank.wall_s for rank in ranks),
            allocated,
            reserved,
        )

    def _line(self, rank: TextIO) -> str:
        try:
            line = rank.readline()
        except TimeoutError:
            line = ""
        if not line:
            raise SystemExit(self.failed())
        return line

    def failed(self) -> str:
        said = "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-40:])
        return (
            f"{self.side.name} did not come to the end of its turn; the last lines of what it "
            f"said:\n{said}"
        )


@contextmanager
def running(
    sides: Sequence[Side], folder: Path, options: argparse.Namespace
) -> Iterator[list[Running]]:
    """All sides, started and waiting for their first turn; at the end they run their remaining
    steps and exit.

    `options.one_by_one`: a side starts when the one before it has warmed up, and exits before the
    next one does, since they share a GPU's memory.
    """
    # the last step runs after the last turn
    total = options.warm_up + options.pairs * options.steps + 1
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        server.listen()
        started: list[Running] = []
        ready: list[Running] = []
        try:
            for i, side in enumerate(sides):
                started.append(start(i, side, folder, total, options))
                if options.one_by_one or i == len(sides) - 1:
                    meet(server, started)
                    for rest in started[len(ready) :]:
                        rest.wait()
                    ready = [*started]
            yield started
            for group in [[side] for side in started] if options.one_by_one else [started]:
                for one in group:
                    one.go()
                for one in group:
                    if one.process.wait(START_S) != 0:
                        raise SystemExit(one.failed())
        finally:
            for one in started:
                for rank in one.ranks.values():
                    rank.close()  # a side that waits for its turn then exits
                if one.process.poll() is None:
                    one.process.terminate()  # torchrun ends its ranks
            for one in started:
                one.process.wait()


def start(
    number: int, side: Side, folder: Path, steps: int, options: argparse.Namespace
) -> Running:
    """Starts one side: with `python` for a world of one, otherwise under torchrun."""
    turns = {
        "address": str(folder / "socket"),
        "side": number,
        "warm_up": options.warm_up,
        "steps": options.steps,
    }
    overrides = [f"train.steps={steps}", *side.overrides]
    if side.layout:
        overrides.append(f"layout={json.dumps(side.layout)}")
    if side.kind == "meshtrain":
        ours = [f"data.path={folder / 'tokens'}", f"train.output={folder / str(number)}"]
        arguments = [options.workload, *options.overrides, *overrides, *ours]
    else:
        paths = [
            folder / "tokens" / "tokens.bin",
            folder / "weights.safetensors",
            folder / f"{number}.jsonl",
        ]
        arguments = [options.workload, *paths, *overrides]
    launcher = [sys.executable]
    if side.ranks > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={side.ranks}",
        ]
    command = [*launcher, HERE / "side.py", json.dumps(turns), side.kind, *arguments]
    log = folder / f"{number}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | options.environment,
        )
    return Running(side, process, log)


def meet(server: socket.socket, sides: Sequence[Running]) -> None:
    """Waits until every rank of every side has connected."""
    deadline = time.monotonic() + START_S
    while any(len(side.ranks) < side.side.ranks for side in sides):
        for side in sides:
            if side.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(side.failed())
        if not select.select([server], [], [], 0.5)[0]:
            continue
        connection, _ = server.accept()
        connection.settimeout(START_S)
        lines = connection.makefile("rw")
        hello = json.loads(lines.readline())
        sides[hello["side"]].ranks[hello["rank"]] = lines


def measure(sides: Sequence[Running], pairs: int) -> list[list[Turn]]:
    """Every turn of every side. The order is reversed each time, so that no side is always
    first."""
    turns: list[list[Turn]] = [[] for _ in sides]
    order = list(enumerate(sides))
    for pair in range(pairs):
        for i, side in order:
            turns[i].append(side.turn())
        order.reverse()
        said = ", ".join(f"{made[-1].cpu_s:.2f} ({made[-1].wall_s:.2f})" for made in turns)
        print(f"pair {pair + 1}/{pairs}: {said} CPU s (on the wall)", file=sys.stderr, flush=True)
    return turns


def read_losses(sides: Sequence[Side], folder: Path) -> list[list[float]]:
    """The losses of every side, which show that all did the same work."""
    files = [
        folder / str(i) / "metrics.jsonl" if side.kind == "meshtrain" else folder / f"{i}.jsonl"
        for i, side in enumerate(sides)
    ]
    return [[json.loads(line)["loss"] for line in file.read_text().splitlines()] for file in files]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """A confidence interval of the median of the values' distribution, and its coverage.

    The narrowest pair of order statistics, equally far from both ends, with a coverage of at least
    95 %; it assumes no distribution (binomial; Conover, Practical Nonparametric Statistics, 3.2).
    Fewer than 6 values never reach 95 %: the interval is then their smallest and largest.
    """
    ordered, n = sorted(values), len(values)
    outside = [2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range((n + 1) // 2)]
    k = max((k for k, beyond in enumerate(outside) if beyond <= 0.05), default=0)
    return ordered[k], ordered[n - 1 - k], max(0.0, 1 - outside[k])


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def ratio_of(values: Sequence[float], to: Sequence[float]) -> dict[str, float]:
    """The median of the ratios of adjacent turns, and its confidence interval."""
    ratios = [x / y for x, y in zip(values, to, strict=True)]
    low, high, coverage = median_interval(ratios)
    return {"median": _median(ratios), "low": low, "high": high, "coverage": coverage}


def summary(
    turns: dict[str, list[Turn]],
    losses: list[list[float]],
    goals: Sequence[Goal],
    options: argparse.Namespace,
    load: tuple[float, float],
) -> dict[str, Any]:
    """All results to print. Times are seconds per step: CPU time over all ranks, and wall time."""
    apart = max(
        abs(x - y) / abs(y) for side in losses[1:] for x, y in zip(side, losses[0], strict=True)
    )
    cpu, wall = (
        {
            name: [getattr(turn, clock) / options.steps for turn in made]
            for name, made in turns.items()
        }
        for clock in ("cpu_s", "wall_s")
    )
    ratios = [
        asdict(goal)
        | ratio_of(cpu[goal.side], cpu[goal.to])
        | {f"wall_{key}": value for key, value in ratio_of(wall[goal.side], wall[goal.to]).items()}
        for goal in goals
    ]
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "load_before": load[0],
        "load_after": load[1],
        "pairs": options.pairs,
        "steps": options.steps,
        "overrides": options.overrides,
        "cpu_s_per_step": {name: _median(values) for name, values in cpu.items()},
        "wall_s_per_step": {name: _median(values) for name, values in wall.items()},
        "ratios": ratios,
        "largest_difference_of_losses": apart,
        "turns": cpu,
        "wall_turns": wall,
    }


def overheads(sides: Sequence[Side], times: dict[str, list[float]]) -> dict[str, float]:
    """For sides with actions: CPU time beyond that of the first side, in milliseconds per
    action."""
    base = times[sides[0].name]
    return {
        side.name: 1000
        * _median([x - y for x, y in zip(times[side.name], base, strict=True)])
        / side.actions
        for side in sides
        if side.actions
    }


def table(result: dict[str, Any]) -> str:
    """The summary as text."""
    overhead = result["overhead_ms_per_action"]
    labels = [f"{ratio['side']} / {ratio['to']}" for ratio in result["ratios"]]
    width = max([50, *map(len, labels)])
    lines = [
        f"{result['machine']}; load {result['load_before']:.1f} before, {result['load_after']:.1f} "
        "after; "
        f"{result['pairs']} pairs of {result['steps']} steps"
        + "".join(f", {override}" for override in result["overrides"]),
        "",
        f"{'seconds per step, all ranks':<{width}} {'CPU':>7} {'wall':>7}"
        + ", CPU ms per action beyond the first" * bool(overhead),
        *(
            f"{name:<{width}} {seconds:7.3f} {result['wall_s_per_step'][name]:7.3f}"
            + (f"  {overhead[name]:.2f}" if name in overhead else "")
            for name, seconds in result["cpu_s_per_step"].items()
        ),
        "",
        f"{'ratio':<{width}} {'CPU':>7}  {'interval':<15} {'goal':>6} {'wall':>7}  interval",
    ]
    for label, ratio in zip(labels, result["ratios"], strict=True):
        goal = f"{ratio['at_most']:.2f}" if ratio["at_most"] else "-"
        cpu, wall = (
            f"{ratio[of + 'median']:7.3f}  {ratio[of + 'low']:.3f} - {ratio[of + 'high']:.3f}"
            for of in ("", "wall_")
        )
        lines.append(f"{label:<{width}} {cpu:<24} {goal:>6} {wall}")
    if result["ratios"]:
        lines += [
            "",
            f"an interval holds its median with {100 * result['ratios'][0]['coverage']:.1f} %",
        ]
    lines += [
        f"losses of the sides differ by at most {result['largest_difference_of_losses']:.1e}",
    ]
    return "\n".join(lines)
