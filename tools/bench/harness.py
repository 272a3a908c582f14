"""The room in which a benchmark is made: sides train the same model in turns, and their CPU times make ratios.

A benchmark is a file beside this one. It names its sides and its goals and calls `command`. All sides are started at
once and then take turns of a few steps, one side at a time and in alternating order, so that whatever else the machine
does hits all of them alike. Each ratio is a median over the pairs of turns that lie next to each other in time.
README.md says how to read the result.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from meshtrain.config.locate import model_file
from meshtrain.data.tokens import Document, write
from meshtrain.modeling.init import initialise

HERE = Path(__file__).resolve().parent
WORKLOAD = HERE / "workload.yaml"
WARM_UP = 2  # steps: allocations, and DDP makes its buckets anew in the second
START_S = 300.0  # how long a side may take for its start, or for a turn
SAMPLES = 2000  # of the token file


@dataclass(frozen=True)
class Side:
    name: str
    kind: str  # "meshtrain", or the file beside this one that trains: "plain_ddp" or another with a `train`
    layout: Mapping[str, int] = field(default_factory=dict)  # empty: one process
    overrides: tuple[str, ...] = ()  # of workload.yaml, key.path=value
    actions: int = 0  # of a pipeline, in a step on all ranks: what the side takes beyond the first one is told for each

    @property
    def ranks(self) -> int:
        return math.prod(self.layout.values())


@dataclass(frozen=True)
class Goal:
    """A ratio of two sides, by their names, and what it is to be at most."""

    side: str
    to: str
    at_most: float | None = None


def command(sides: Sequence[Side], goals: Sequence[Goal], description: str, workload: Path = WORKLOAD) -> int:
    """The whole of a benchmark's command line; the exit status does not depend on the goals."""
    options = read_arguments(description, workload)
    sides, goals = chosen(sides, goals, options.only)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="meshtrain-bench-") as name:
        folder = Path(name)
        prepare(folder, options.workload)
        with running(sides, folder, options) as started:
            turns = measure(started, options.pairs)
        losses = read_losses(sides, folder)
    times = {side.name: [turn / options.steps for turn in made] for side, made in zip(sides, turns, strict=True)}
    result = summary(times, losses, goals, options, (before, os.getloadavg()[0]))
    result["overhead_ms_per_action"] = overheads(sides, times)
    print(json.dumps(result, indent=1) if options.json else table(result))
    return 0


def read_arguments(description: str, workload: Path = WORKLOAD) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pairs", type=_positive, default=20, help="turns of each side that count (%(default)s)")
    parser.add_argument("--steps", type=_positive, default=2, help="steps of a turn (%(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="SIDE", help="run this side and the first one")
    parser.add_argument("--workload", type=Path, default=workload, metavar="YAML", help="what they train (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, with the time of every turn")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="for meshtrain's sides")
    return parser.parse_args()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, found {text!r}")
    return int(text)


def chosen(sides: Sequence[Side], goals: Sequence[Goal], only: Sequence[str]) -> tuple[Sequence[Side], Sequence[Goal]]:
    """The sides of these names and the first one, with the goals between them; all of them if no name is given."""
    names = {side.name for side in sides}
    if unknown := [name for name in only if name not in names]:
        raise SystemExit(f"no side is called {unknown[0]!r}; there are: " + "; ".join(side.name for side in sides))
    if only:
        names = {sides[0].name, *only}
    return (
        [side for side in sides if side.name in names],
        [goal for goal in goals if goal.side in names and goal.to in names],
    )


def prepare(folder: Path, workload: Path) -> None:
    """What both sides begin with: tokens (their values do not matter for the time) and the first weights."""
    values = yaml.safe_load(workload.read_text())
    vocabulary, length = values["model"]["vocab_size"], SAMPLES * values["data"]["seq_len"] + 1
    ids = np.random.default_rng(0).zipf(1.5, length) % vocabulary
    write(folder / "tokens", [Document(ids)], vocab_size=vocabulary, tokenizer="none", source="random numbers")
    module = model_file(values["model"]["name"])
    config = module.Config(**{key: value for key, value in values["model"].items() if key != "name"})
    model = module.Model(config)
    initialise(model, module.init_plan, seed=values["train"]["seed"], std=config.initializer_range)
    save_file(model.state_dict(), folder / "weights.safetensors")


class Running:
    """The processes of one side: their sockets, in the order of their ranks."""

    def __init__(self, side: Side, process: subprocess.Popen, log: Path) -> None:
        self.side, self.process, self.log = side, process, log
        self.ranks: dict[int, TextIO] = {}

    def turn(self) -> float:
        """Lets the side make one turn; CPU seconds of all of its ranks."""
        self.go()
        return self.wait()

    def go(self) -> None:
        for rank in self.ranks.values():
            rank.write("go\n")
            rank.flush()

    def wait(self) -> float:
        """Until every rank stands before its next turn; what the last one has cost, in CPU seconds."""
        return sum(json.loads(self._line(rank))["cpu_s"] for rank in self.ranks.values())

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
        return f"{self.side.name} did not come to the end of its turn; the last lines of what it said:\n{said}"


@contextmanager
def running(sides: Sequence[Side], folder: Path, options: argparse.Namespace) -> Iterator[list[Running]]:
    """All sides, started and waiting before their first turn; they end with the steps that they have left."""
    total = WARM_UP + options.pairs * options.steps + 1  # the last one takes place after the last turn
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        server.listen()
        started: list[Running] = []
        try:
            for i, side in enumerate(sides):
                started.append(start(i, side, folder, total, options))
            meet(server, started)
            for one in started:
                one.wait()
            yield started
            for one in started:
                one.go()
            for one in started:
                if one.process.wait(START_S) != 0:
                    raise SystemExit(one.failed())
        finally:
            for one in started:
                if one.process.poll() is None:
                    one.process.terminate()  # torchrun ends its ranks
            for one in started:
                one.process.wait()


def start(number: int, side: Side, folder: Path, steps: int, options: argparse.Namespace) -> Running:
    """Starts one side: as `python` for a world of one, under torchrun for more."""
    turns = {"address": str(folder / "socket"), "side": number, "warm_up": WARM_UP, "steps": options.steps}
    overrides = [f"train.steps={steps}", *side.overrides]
    if side.layout:
        overrides.append(f"layout={json.dumps(side.layout)}")
    if side.kind == "meshtrain":
        ours = [f"data.path={folder / 'tokens'}", f"train.output={folder / str(number)}"]
        arguments = [options.workload, *options.overrides, *overrides, *ours]
    else:
        paths = [folder / "tokens" / "tokens.bin", folder / "weights.safetensors", folder / f"{number}.jsonl"]
        arguments = [options.workload, *paths, *overrides]
    launcher = [sys.executable]
    if side.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={side.ranks}"]
    command = [*launcher, HERE / "side.py", json.dumps(turns), side.kind, *arguments]
    log = folder / f"{number}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # One thread per process, as torchrun has it; a GPU would compare two other things.
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
    return Running(side, process, log)


def meet(server: socket.socket, sides: Sequence[Running]) -> None:
    """Until every rank of every side has connected."""
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


def measure(sides: Sequence[Running], pairs: int) -> list[list[float]]:
    """CPU seconds of every turn of every side. The order is turned round each time: none is always the first."""
    times: list[list[float]] = [[] for _ in sides]
    order = list(enumerate(sides))
    for pair in range(pairs):
        for i, side in order:
            times[i].append(side.turn())
        order.reverse()
        said = ", ".join(f"{turns[-1]:.2f}" for turns in times)
        print(f"pair {pair + 1}/{pairs}: {said} CPU s", file=sys.stderr, flush=True)
    return times


def read_losses(sides: Sequence[Side], folder: Path) -> list[list[float]]:
    """The losses of every side, which show that all did the same."""
    files = [
        folder / str(i) / "metrics.jsonl" if side.kind == "meshtrain" else folder / f"{i}.jsonl"
        for i, side in enumerate(sides)
    ]
    return [[json.loads(line)["loss"] for line in file.read_text().splitlines()] for file in files]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """An interval that holds the median of what these values are drawn from, and with which probability.

    The narrowest pair of order statistics, the same number from both ends, that reaches 95 %; it assumes no
    distribution (binomial; Conover, Practical Nonparametric Statistics, 3.2). Fewer than 6 values never reach 95 %:
    they give their smallest and largest.
    """
    ordered, n = sorted(values), len(values)
    outside = [2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range((n + 1) // 2)]
    k = max((k for k, beyond in enumerate(outside) if beyond <= 0.05), default=0)
    return ordered[k], ordered[n - 1 - k], max(0.0, 1 - outside[k])


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def summary(
    times: dict[str, list[float]],
    losses: list[list[float]],
    goals: Sequence[Goal],
    options: argparse.Namespace,
    load: tuple[float, float],
) -> dict[str, Any]:
    """Everything that is printed. `times`: CPU seconds per step of every turn, over all ranks."""
    apart = max(abs(x - y) / abs(y) for side in losses[1:] for x, y in zip(side, losses[0], strict=True))
    ratios = []
    for goal in goals:
        values = [x / y for x, y in zip(times[goal.side], times[goal.to], strict=True)]
        low, high, coverage = median_interval(values)
        ratios.append(asdict(goal) | {"median": _median(values), "low": low, "high": high, "coverage": coverage})
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "load_before": load[0],
        "load_after": load[1],
        "pairs": options.pairs,
        "steps": options.steps,
        "overrides": options.overrides,
        "cpu_s_per_step": {name: _median(turns) for name, turns in times.items()},
        "ratios": ratios,
        "largest_difference_of_losses": apart,
        "turns": times,
    }


def overheads(sides: Sequence[Side], times: dict[str, list[float]]) -> dict[str, float]:
    """Of the sides with actions: CPU time beyond that of the first side, in milliseconds for each action."""
    base = times[sides[0].name]
    return {
        side.name: 1000 * _median([x - y for x, y in zip(times[side.name], base, strict=True)]) / side.actions
        for side in sides
        if side.actions
    }


def table(result: dict[str, Any]) -> str:
    """The summary for people."""
    overhead = result["overhead_ms_per_action"]
    labels = [f"{ratio['side']} / {ratio['to']}" for ratio in result["ratios"]]
    width = max(50, *map(len, labels))
    lines = [
        f"{result['machine']}; load {result['load_before']:.1f} before, {result['load_after']:.1f} after; "
        f"{result['pairs']} pairs of {result['steps']} steps"
        + "".join(f", {override}" for override in result["overrides"]),
        "",
        f"{'CPU seconds per step, all ranks':<{width}} {'median':>7}"
        + ", ms per action beyond the first" * bool(overhead),
        *(
            f"{name:<{width}} {seconds:7.3f}" + (f"  {overhead[name]:.2f}" if name in overhead else "")
            for name, seconds in result["cpu_s_per_step"].items()
        ),
        "",
        f"{'ratio':<{width}} {'median':>7}  {'interval':<15} {'goal':>6}",
    ]
    for label, ratio in zip(labels, result["ratios"], strict=True):
        goal = f"{ratio['at_most']:.2f}" if ratio["at_most"] else "-"
        interval = f"{ratio['low']:.3f} - {ratio['high']:.3f}"
        lines.append(f"{label:<{width}} {ratio['median']:7.3f}  {interval:<15} {goal:>6}")
    if result["ratios"]:
        lines += ["", f"the interval holds the median with {100 * result['ratios'][0]['coverage']:.1f} %"]
    lines += [
        f"losses of the sides differ by at most {result['largest_difference_of_losses']:.1e}",
    ]
    return "\n".join(lines)
