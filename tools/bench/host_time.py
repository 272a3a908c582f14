"""Where the host's time of a step goes: CPU time by room and by function, operators, nodes of
autograd, Python frames, calls of C functions and allocations, of one rank.

    python tools/bench/host_time.py [--only SIDE] [--rank 0] [--functions 25] [--json]
    [key.path=value ...]

The same small model trains by a plain loop (plain_ddp.py, plain_experts.py) and by meshtrain's
command in one process and on meshes of two and four. host_time_side.py says how each step is looked
at.

Counts do not depend on what else the machine does. Times are CPU time of the rank's main thread, in
which it waits for nobody; those of functions have the profiler's own cost taken out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experts
from harness import HERE, ON_CPU, START_S, WORKLOAD, Side, chosen, command_of, positive, prepare
from host_time_side import PLAN

REPO = HERE.parent.parent
# The first side of a workload is the plain loop, beside which the others stand.
SIDES = (
    Side("plain loop", "plain_ddp"),
    Side("one process", "meshtrain"),
    Side("dp 2", "meshtrain", {"dp_replicate": 2}),
    Side("fsdp 2", "meshtrain", {"dp_shard": 2}),
    Side("tp 2", "meshtrain", {"tp": 2}),
    Side("pp 2", "meshtrain", {"pp": 2}),
    Side("2 x 2", "meshtrain", {"dp_shard": 2, "tp": 2}, ("parallel.reshard_after_forward=false",)),
    Side("cp 2", "meshtrain", {"cp": 2}),
)
WITH_EXPERTS = (
    Side("plain loop, experts", "plain_experts"),
    Side("one process, experts", "meshtrain"),
    Side("ep 2", "meshtrain", {"dp_shard": 2}, experts.DEALT),
)


@dataclass(frozen=True)
class Seen:
    """What was seen of one rank of a side, per step; `functions` as in host_time_side.py."""

    side: str
    process_s: float  # CPU time of the process
    thread_s: float  # of its main thread
    products_s: float  # of that, products of matrices and attention, outside of own operators
    profiler_us_per_call: float
    operators: int
    nodes: int
    allocations: int
    functions: list[dict[str, Any]]

    def calls(self, *, is_c: bool) -> float:
        """Python frames, or calls of C functions from Python."""
        return sum(one["calls"] for one in self.functions if one["is_c"] == is_c)

    def rooms(self) -> dict[str, dict[str, float]]:
        """By room: frames, microseconds of its own Python code, and those in the C functions that
        it calls. The room with most Python first."""
        rooms: dict[str, dict[str, float]] = defaultdict(lambda: {"frames": 0, "us": 0, "c_us": 0})
        for one in self.functions:
            room = rooms[room_of(one["file"])]
            if one["is_c"]:
                room["c_us"] += one["us"]
            else:
                room["frames"] += one["calls"]
                room["us"] += one["us"]
        return dict(sorted(rooms.items(), key=lambda item: -item[1]["us"]))


def room_of(file: str) -> str:
    """The room or module of meshtrain, the part of torch, or the package that a file belongs to."""
    path = Path(file)
    # first, since a virtual environment may lie within the repository
    if "site-packages" in path.parts:
        parts = path.parts[path.parts.index("site-packages") + 1 :]
        return "/".join(parts[:2]) if parts[0] == "torch" else parts[0]
    if path.is_relative_to(REPO):
        return "/".join(path.relative_to(REPO).parts[:2])
    return "Python's library"


def look(side: Side, folder: Path, options: argparse.Namespace) -> Seen:
    """Runs a side to its end and reads what was seen of the rank asked for."""
    seen = folder / f"{side.name} seen"
    seen.mkdir()
    script = [HERE / "host_time_side.py", seen]
    command = command_of(side, script, folder, side.name, len(PLAN), options)
    finished = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | ON_CPU,
        timeout=START_S,
        text=True,
        check=False,
    )
    if finished.returncode != 0:
        said = finished.stdout[-4000:]
        raise SystemExit(f"{side.name} failed; the last of what it said:\n{said}")
    rank = min(options.rank, side.ranks - 1)
    return Seen(side.name, **json.loads((seen / f"{rank}.json").read_text()))


def summary(found: Sequence[Seen]) -> str:
    """A line for each side. The floor is what the plain loop's products take alone."""
    lines = [
        f"{'one rank, per step':<22} {'CPU ms':>8} {'main':>8} {'operators':>10} {'nodes':>7} "
        f"{'frames':>8} {'C calls':>8} {'allocations':>12}"
    ]
    for one in found:
        if one.side.startswith("plain loop"):
            lines.append(f"{'  products alone':<22} {'':>8} {1e3 * one.products_s:8.1f}")
        lines.append(
            f"{one.side:<22} {1e3 * one.process_s:8.1f} {1e3 * one.thread_s:8.1f} "
            f"{one.operators:10d} {one.nodes:7d} {one.calls(is_c=False):8.0f} "
            f"{one.calls(is_c=True):8.0f} {one.allocations:12d}"
        )
    return "\n".join(lines)


def details(one: Seen, functions: int) -> str:
    """The rooms of a side, and its functions with the most Python time."""
    lines = [
        f"{one.side}; cProfile's {one.profiler_us_per_call:.2f} us per call are taken out",
        f"{'room':<34} {'frames':>8} {'Python us':>10} {'in C us':>10}",
    ]
    for name, room in one.rooms().items():
        lines.append(f"{name:<34} {room['frames']:8.0f} {room['us']:10.0f} {room['c_us']:10.0f}")
    python = sorted((f for f in one.functions if not f["is_c"]), key=lambda f: -f["us"])
    lines.append(f"{'function':<72} {'calls':>8} {'Python us':>10}")
    for function in python[:functions]:
        path = Path(function["file"])
        where = f"{room_of(function['file'])}: {path.name}:{function['line']} {function['name']}"
        lines.append(f"{where:<72} {function['calls']:8.1f} {function['us']:10.0f}")
    return "\n".join(lines)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Where the host's time of a step goes.")
    parser.add_argument(
        "--only", action="append", default=[], metavar="SIDE", help="this side and the plain loop"
    )
    parser.add_argument("--rank", type=int, default=0, help="the rank to look at (%(default)s)")
    parser.add_argument(
        "--functions", type=positive, default=25, help="functions to list (%(default)s)"
    )
    parser.add_argument(
        "--workload", type=Path, default=WORKLOAD, metavar="YAML", help="what they train"
    )
    parser.add_argument(
        "--experts",
        type=Path,
        default=experts.WORKLOAD,
        metavar="YAML",
        help="what those with experts train",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every function")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="for meshtrain's sides"
    )
    return parser.parse_args()


def main() -> int:
    options = read_arguments()
    found: list[Seen] = []
    experts_asked = [side.name for side in WITH_EXPERTS if side.name in options.only]
    dense_asked = [name for name in options.only if name not in experts_asked]
    if dense_asked or not options.only:
        found += look_at(SIDES, dense_asked, options)
    if experts_asked or not options.only:
        options.workload = options.experts
        found += look_at(WITH_EXPERTS, experts_asked, options)
    if options.json:
        print(json.dumps([vars(one) for one in found], indent=1))
        return 0
    print(summary(found))
    for one in found:
        print("\n" + details(one, options.functions))
    return 0


def look_at(sides: Sequence[Side], only: Sequence[str], options: argparse.Namespace) -> list[Seen]:
    """One side after the other."""
    sides, _ = chosen(sides, [], only)
    found = []
    with tempfile.TemporaryDirectory(prefix="meshtrain-bench-") as name:
        folder = Path(name)
        prepare(folder, options.workload)
        for side in sides:
            print(f"{side.name} ...", file=sys.stderr, flush=True)
            found.append(look(side, folder, options))
    return found


if __name__ == "__main__":
    sys.exit(main())
