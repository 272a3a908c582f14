"""Where this process is, as another thread of it can see: the stack, and the collective that it waits in.

torch's flight recorder (on by default; TORCH_FR_BUFFER_SIZE=0 switches it off) knows the collectives that were begun
and not ended, and how many each group has had. It does not know gloo's sends and receives: for these the frames of the
stack are looked through for a process group. See https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

import json
import linecache
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import _world

from meshtrain.layout import Layout
from meshtrain.operate.testimony import Wait
from meshtrain.rounds import Round, described

FRAMES = 14  # of a stack, the innermost
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # NCCL's own, and that of the other backends
PASSED_OVER = ("runpy", "torch/nn/modules/module.py", "torch/_dynamo", "torch/utils/_contextlib.py", "_fsdp_common.py")
# Where ranks talk to each other: torch's collectives, and what is ours.
TALKING = (
    *("torch/distributed/", "torch/_ops.py", "torch/autograd/"),
    *("meshtrain/parallel/", "meshtrain/rounds.py", "meshtrain/runtime.py", "meshtrain/leaving.py"),
)
# What errors of collectives and of the store say: another process has gone before, or did not come. What reads from
# the network says the like of itself: see of_connections.
BROKEN = re.compile(
    r"another rank has failed|Connection (?:closed|reset|refused)|Broken pipe|closed by peer|Timed out waiting"
    r"|DistNetworkError|DistStoreError|DistBackendError|NCCL|gloo|Socket Timeout|recvValue|sendBytes",
    re.IGNORECASE,
)
INNERMOST = 3  # frames of an error that say where it comes from
TORCHS_OWN = (
    "gloo/",
    "NCCL",
    "ProcessGroup",
)  # in the words of errors that torch's collectives raise, wherever waited for
DEBUGGERS = ("pydevd", "debugpy")
DEBUGGER_FILES = ("bdb.py", "pdb.py")
STATUS = Path("/proc/self/status")
NONE: Mapping[str, int] = {}

T = TypeVar("T")


def frames(thread: threading.Thread) -> list[FrameType]:
    """What a thread is in, innermost first."""
    frame = sys._current_frames().get(thread.ident or 0)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def frames_of(error: BaseException) -> list[FrameType]:
    """Where an error was raised, innermost first."""
    found = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return found[::-1]


def of_connections(error: BaseException) -> bool:
    """Whether it says that other ranks have gone or did not come; what reads data from the network fails alike."""
    if isinstance(error, dist.DistError):
        return True
    words = described(error)
    if type(error) is not RuntimeError or not BROKEN.search(words):  # as torch and rounds.py raise it
        return False
    inner = [frame.f_code.co_filename for frame in frames_of(error)[:INNERMOST]]
    return any(part in words for part in TORCHS_OWN) or any(part in file for file in inner for part in TALKING)


def stack(of: list[FrameType]) -> tuple[str, ...]:
    """`meshtrain/step.py:131 update`, innermost last."""
    told = [one for one in of if not any(part in one.f_code.co_filename for part in PASSED_OVER)]
    lines = [f"{_short(one.f_code.co_filename)}:{one.f_lineno} {one.f_code.co_name}" for one in told[:FRAMES]]
    return tuple(reversed(lines))


def _short(path: str) -> str:
    parts = Path(path).parts
    for root in ("site-packages", "dist-packages", "meshtrain"):
        if root in parts[:-1]:
            at = parts.index(root)
            return "/".join(parts[at if root == "meshtrain" else at + 1 :])
    return "/".join(parts[-2:])


def groups(layout: Layout | None, rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every process group of this rank: its name -> what people call it, and its ranks."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for group, members in list(_world.pg_group_ranks.items()):
        ranks = tuple(sorted(members))
        if rank in members and len(ranks) > 1:
            found[group.group_name] = (_axes(layout, rank, ranks) or str(group.group_desc), ranks)
    return found


def _axes(layout: Layout | None, rank: int, ranks: tuple[int, ...]) -> str | None:
    if layout is None:
        return "all ranks" if len(ranks) == dist.get_world_size() else None
    for axis in layout.axes:
        if tuple(sorted(layout.group(rank, axis))) == ranks:
            return axis
    return "all ranks" if len(ranks) == layout.world_size else None


def recorded(known: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[Wait | None, dict[str, int]]:
    """What the flight recorder says: the oldest collective that has not ended, and how many each group has begun."""
    wait: Wait | None = None
    begun: dict[str, int] = {}
    keys = {group: ",".join(map(str, ranks)) for group, (_, ranks) in known.items()}
    for name in DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        found = {} if dump is None else json.loads(dump())
        for entry in sorted(found.get("entries", []), key=lambda one: one.get("record_id", 0)):
            group = entry["process_group"][0]
            if group not in known:
                continue
            over, ranks = known[group]
            number, key = entry["collective_seq_id"], keys[group]
            if not entry["is_p2p"]:  # those have numbers of their own for each pair
                begun[key] = max(number, begun.get(key, 0))
            if wait is None and not (entry["retired"] or entry["state"] == "completed"):
                kind = entry["profiling_name"].rpartition(":")[2]
                wait = Wait(kind, over, ranks) if entry["is_p2p"] else Wait(f"{kind} {number}", over, ranks, number)
    return wait, begun


def waits(
    of: list[FrameType], known: Mapping[str, tuple[str, tuple[int, ...]]], world: int, begun: Mapping[str, int] = NONE
) -> Wait | None:
    """Where a stack waits for other ranks: at the store, or in a process group that one of its frames has.

    Args:
        begun: as `recorded` has it.
    """
    for frame in of:
        names = frame.f_locals
        if isinstance(me := names.get("self"), Round) and frame.f_code.co_name == "_wait":
            missing = tuple(names.get("missing", ())) or (0,)
            return Wait(
                f"the meeting {names.get('what') or me.name!r} at the store", "", tuple(range(world)), None, missing
            )
        for value in names.values():
            group = _group_of(value)
            if group is not None and group.group_name in known and _waiting(of[0]):
                over, ranks = known[group.group_name]
                inner = of[0].f_code
                if "distributed_c10d" not in inner.co_filename:
                    return Wait(f"{inner.co_name} (sends and receives)", over, ranks)
                number = begun.get(",".join(map(str, ranks)))
                return Wait(inner.co_name if number is None else f"{inner.co_name} {number}", over, ranks, number)
    return None


def _group_of(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, dist.ProcessGroup):
        return value
    held = getattr(value, "__dict__", {})  # what it has, and nothing that it would compute
    return next((held[name] for name in ("group", "_group") if isinstance(held.get(name), dist.ProcessGroup)), None)


def _waiting(inner: FrameType) -> bool:
    """Whether this frame is at a call of `wait`, or in torch's own code of collectives."""
    code = inner.f_code.co_filename
    return "distributed_c10d" in code or "wait(" in linecache.getline(code, inner.f_lineno)


def within(seconds: float, do: Callable[[], T]) -> T | None:
    """What it returns; None if it fails, or takes longer: it may wait for a lock that a hanging thread has."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(do()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def thread_named(name: str) -> threading.Thread | None:
    return next((one for one in threading.enumerate() if one.name == name), None)


def debugged() -> bool:
    """Whether a debugger holds this process, or might: then nothing takes too long."""
    if any(name in sys.modules for name in DEBUGGERS):
        return True
    for frame in frames(threading.main_thread()):
        if frame.f_trace is not None or Path(frame.f_code.co_filename).name in DEBUGGER_FILES:
            return True
    return _traced()


def _traced() -> bool:
    """Whether gdb or strace is attached."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)
