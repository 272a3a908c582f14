"""One rank of a side of host_time.py: trains as side.py's ranks do, and looks at some of its steps.

After the first steps come three groups, of which each is looked at in another way:

    quiet      nothing is attached: CPU time of the process and of its main thread
    profiled   cProfile with the clock of the thread: calls and own time of every function
    counted    torch's profiler: operators, nodes of autograd, allocations
    products   the CPU time of every matrix product and attention kernel alone, which is the floor
               of a plain loop; inside of meshtrain's own operators they are not seen

What cProfile itself costs is the difference between a profiled and a quiet step, spread evenly over
the calls; each function's time is given without its share.
"""

import cProfile
import json
import os
import pstats
import re
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from side import run_side

QUIET, PROFILED, PRODUCTS = 4, 2, 1
PLAN = (
    *3 * ["warm-up"],
    *QUIET * ["quiet"],
    *PROFILED * ["profiled"],
    "counted",
    *PRODUCTS * ["products"],
    "end",  # begins, so that the step before it ends
)

BUILT_IN = "~"  # what cProfile has in place of a file for a function written in C
NODE = "autograd::engine::evaluate_function: "
MEMORY = "[memory]"
PRODUCT = re.compile(r"aten::(mm|addmm|bmm|baddbmm|_scaled_dot_product_\w+)\b")


class ProductTimes(TorchDispatchMode):
    """Adds up the CPU time of the thread in matrix products and kernels of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        if PRODUCT.match(func.name()):
            self.seconds += time.thread_time() - began
        return result


class Looks:
    """Looks at the steps of this rank; `before_step` is called before each of them."""

    def __init__(self, path: Path) -> None:
        """`path`: of the file that gets what was seen, as JSON."""
        self._path = path
        self._process: list[float] = []  # CPU seconds of each quiet step
        self._thread: list[float] = []  # the same, of the main thread alone
        self._calls = cProfile.Profile(time.thread_time)
        self._profiled_s = 0.0  # CPU seconds of the main thread in all profiled steps
        self._operators = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._products = ProductTimes()
        self._began = 0.0, 0.0

    def before_step(self, step: int) -> None:
        """`step`: from 1."""
        if step > 1:
            self._end(PLAN[step - 2])
        self._begin(PLAN[step - 1])

    def _begin(self, look: str) -> None:
        if look == "counted":
            self._operators.start()
        elif look == "products":
            self._products.__enter__()
        elif look == "end":
            self._path.write_text(json.dumps(self._seen()))
        self._began = time.process_time(), time.thread_time()
        if look == "profiled":
            self._calls.enable()

    def _end(self, look: str) -> None:
        self._calls.disable()
        thread_s = time.thread_time() - self._began[1]
        process_s = time.process_time() - self._began[0]
        if look == "quiet":
            self._process.append(process_s)
            self._thread.append(thread_s)
        elif look == "profiled":
            self._profiled_s += thread_s
        elif look == "counted":
            self._operators.stop()
        elif look == "products":
            self._products.__exit__(None, None, None)

    def _seen(self) -> dict[str, Any]:
        """Everything, per step."""
        thread_s = median(self._thread)
        functions = functions_of(pstats.Stats(self._calls))
        calls = sum(function["calls"] for function in functions)
        # Not below zero where a busy machine made the quiet steps the slower ones.
        cost_s = max(self._profiled_s - PROFILED * thread_s, 0.0) / calls
        for function in functions:
            own_s = function.pop("own_s") - cost_s * function["calls"]
            function["us"] = 1e6 * own_s / PROFILED
            function["calls"] /= PROFILED
        return {
            "process_s": median(self._process),
            "thread_s": thread_s,
            "products_s": self._products.seconds / PRODUCTS,
            "profiler_us_per_call": 1e6 * cost_s,
            **counts_of(self._operators),
            "functions": functions,
        }


def functions_of(stats: Any) -> list[dict[str, Any]]:
    """Every function that ran, from a `pstats.Stats`: file, line, name, calls, and own time. A
    function written in C is told once for each caller, whose file it has."""
    found = []
    for (file, line, name), (_, calls, own_s, _, callers) in stats.stats.items():
        if file != BUILT_IN:
            found.append(_function(file, line, name, calls, own_s, is_c=False))
            continue
        for (caller, at, _), (called, _, time_s, _) in callers.items():
            found.append(_function(caller, at, name, called, time_s, is_c=True))
    return found


def _function(
    file: str, line: int, name: str, calls: int, own_s: float, *, is_c: bool
) -> dict[str, Any]:
    return {"file": file, "line": line, "name": name, "calls": calls, "own_s": own_s, "is_c": is_c}


def counts_of(operators: profile) -> dict[str, int]:
    """Operators that Python or a node of autograd calls (those that operators call are none), nodes
    of autograd, and allocations of memory for tensors."""
    launched = nodes = allocations = 0
    for event in operators.events():
        if event.name.startswith(NODE):
            nodes += 1
        elif event.name == MEMORY:
            allocations += event.self_cpu_memory_usage > 0
        elif is_operator(event.name):
            launched += not is_inside_operator(event)
    return {"operators": launched, "nodes": nodes, "allocations": allocations}


def is_operator(name: str) -> bool:
    """Whether an event is an operator: a name with its namespace, such as aten::mm."""
    namespace, colons, rest = name.partition("::")
    return bool(colons) and namespace not in ("autograd", "torch") and ":" not in rest


def is_inside_operator(event: Any) -> bool:
    outer = event.cpu_parent
    while outer is not None:
        if is_operator(outer.name):
            return True
        outer = outer.cpu_parent
    return False


def main() -> int:
    """Called by host_time.py with a folder for what is seen, the kind of side, and its
    arguments."""
    folder, kind, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    looks = Looks(Path(folder) / f"{os.environ.get('RANK', '0')}.json")
    return run_side(kind, arguments, looks.before_step)


if __name__ == "__main__":
    sys.exit(main())
