"""Introspection: where this process is, as its watchdog's thread sees it, and what it waits for.

Collectives that have begun and not ended are in torch's flight recorder, except for gloo's sends
and receives (https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html);
meshtrain's own waits are in pending.py.
"""

import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import _world

from meshtrain.job.exit import signal_of
from meshtrain.job.pending import PendingWait, Resource, pending_waits, wait_that_failed
from meshtrain.job.process import Job
from meshtrain.job.sockets import call_with_timeout
from meshtrain.job.store import describe, is_input
from meshtrain.job.watchdog.deadlines import DeadlineClock
from meshtrain.job.watchdog.records import FailureKind, PendingCollective, RankStatus
from meshtrain.layout import Layout

FRAMES = 14  # of a stack, the innermost
RECORDER_S = 1.5  # for the flight recorder to answer
# NCCL's flight recorder, and that of the other backends
DUMPS = (
    "_dump_nccl_trace_json",
    "_dump_fr_trace_json",
)
HIDDEN = (
    "runpy",
    "torch/nn/modules/module.py",
    "torch/_dynamo",
    "torch/utils/_contextlib.py",
    "_fsdp_common.py",
)
COLLECTIVES = "torch.distributed.distributed_c10d"  # the module of torch's blocking collectives
# torch's modules in which collectives fail
TALKING = (
    "torch.distributed",
    "torch._ops",
    "torch.autograd",
)
POINT_TO_POINT = ("send", "recv", "batch_isend_irecv")  # not in the flight recorder over gloo
# Texts of errors of collectives and of the store that mean that another process is gone or did not
# arrive. Code that reads data from the network raises similar ones: see is_connection_error.
BROKEN = re.compile(
    r"another rank has failed|Connection (?:closed|reset|refused)|Broken pipe|closed by peer|Timed "
    r"out waiting"
    r"|DistNetworkError|DistStoreError|DistBackendError|NCCL|gloo|Socket "
    r"Timeout|recvValue|sendBytes",
    re.IGNORECASE,
)
INNERMOST = 3  # frames of an error that tell where it comes from
BACKENDS = ("gloo/", "NCCL", "ProcessGroup")  # as their errors name them
DEBUGGERS = ("pydevd", "debugpy")
DEBUGGER_FILES = ("bdb.py", "pdb.py")
STATUS = Path("/proc/self/status")
PACKAGE = Path(__file__).parents[2]

# name of a process group -> its readable name and its ranks
Groups = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Failure:
    kind: FailureKind
    text: str
    frames: list[FrameType] = field(default_factory=list)  # where it was raised, innermost first
    broken: bool = False  # whether another rank seems to have caused it
    wait: PendingWait | None = None  # the wait that it ended
    at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        if (name := signal_of(error)) is not None:
            return cls(FailureKind.SIGNAL, f"ended by {name}", frames_of(error))
        if is_input(error):
            return cls(FailureKind.INPUT, str(error), frames_of(error))
        broken = is_connection_error(error)
        return cls(
            FailureKind.ERROR, describe(error), frames_of(error), broken, wait_that_failed(error)
        )


def local_status(job: Job, clock: DeadlineClock, failure: Failure | None) -> RankStatus:
    """This rank's answer when another one asks for its state."""
    groups = process_groups(job.layout, job.rank)
    pending, last, begun = None, None, dict[str, int]()
    try:
        pending, last, begun = call_with_timeout(RECORDER_S, flight_recorder_state, groups)
    except Exception as error:
        # the recorder may wait for a lock that a hanging thread holds
        if not isinstance(error, TimeoutError):
            traceback.print_exception(error)
    by_thread = pending_waits()
    main = threading.main_thread().ident or 0
    waits = by_thread.pop(main, ())
    background = [wait for of_thread in by_thread.values() for wait in of_thread]
    place = frames(main)
    if failure is not None:
        waits, place = (failure.wait,) if failure.wait is not None else (), failure.frames
    everybody = tuple(range(job.world_size))
    last = None if failure is None else last
    wait = (
        pending
        or pending_collective(waits, groups)
        or blocking_collective(place, last, groups, everybody)
    )
    if wait is None:
        wait = pending_collective(background, groups)
        if wait is None and by_thread and clock.phase == "saving" and failure is None:
            place = frames(next(iter(by_thread)))  # the main thread only waits for this one
    own = waits if clock.phase != "saving" else (*background, *waits)
    resource = next(
        (other.label for other in reversed(own) if other.resource != Resource.RANKS), None
    )
    return RankStatus(
        clock.phase,
        clock.step,
        clock.seconds,
        failure=None if failure is None else failure.text,
        kind=None if failure is None else failure.kind,
        failed_s=0.0 if failure is None else time.monotonic() - failure.at,
        broken=failure is not None and failure.broken,
        late=clock.late(
            for_device=any(other.resource == Resource.DEVICE for other in (*waits, *background))
        ),
        patient=clock.deadlines.patient(clock.phase),
        wait=wait if failure is None or failure.broken else None,
        resource=resource,
        begun=begun,
        stack=stack(place),
        debugged=debugger_attached(),
    )


def pending_collective(waits: Sequence[PendingWait], groups: Groups) -> PendingCollective | None:
    """The innermost wait for other ranks."""
    for wait in reversed(waits):
        if wait.resource != Resource.RANKS:
            continue
        missing = None if wait.missing is None else tuple(wait.missing())
        if wait.group is None:
            return PendingCollective(wait.label, "", tuple(wait.ranks), None, missing)
        if wait.group.group_name in groups:
            over, ranks = groups[wait.group.group_name]
            return PendingCollective(wait.label, over, ranks, None, missing)
    return None


def blocking_collective(
    place: Sequence[FrameType],
    last: PendingCollective | None,
    groups: Groups,
    everybody: tuple[int, ...],
) -> PendingCollective | None:
    """The torch.distributed call that a stack is in, where the flight recorder has no pending
    collective: it is off, or the call sends, receives or creates a group. If its argument `group`
    is None, all ranks are meant. `last`: the collective begun last, if the call has failed: a
    failed one is not pending."""
    if not place or place[0].f_globals.get("__name__") != COLLECTIVES:
        return None
    name = place[0].f_code.co_name
    if last is not None and name not in POINT_TO_POINT:
        return last
    group = place[0].f_locals.get("group")
    axis, ranks = groups.get(getattr(group, "group_name", ""), ("", everybody))
    return PendingCollective(name, axis, ranks)


def process_groups(layout: Layout | None, rank: int) -> Groups:
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    for group, members in list(_world.pg_group_ranks.items()):
        ranks = tuple(sorted(members))
        if rank in members and len(ranks) > 1:
            groups[group.group_name] = (
                _axis_of(layout, rank, ranks) or str(group.group_desc),
                ranks,
            )
    return groups


def _axis_of(layout: Layout | None, rank: int, ranks: tuple[int, ...]) -> str | None:
    if layout is not None:
        for axis in layout.axes:
            if tuple(sorted(layout.group(rank, axis))) == ranks:
                return axis
    return "all ranks" if len(ranks) == dist.get_world_size() else None


def flight_recorder_state(
    groups: Groups,
) -> tuple[PendingCollective | None, PendingCollective | None, dict[str, int]]:
    """The oldest collective that has not ended, the one begun last, and ranks of a group ("0,2") ->
    how many collectives have begun there."""
    pending = last = None
    begun: dict[str, int] = {}
    keys = {group: ",".join(map(str, ranks)) for group, (_, ranks) in groups.items()}
    for entry in recorder_entries():
        group = entry["process_group"][0]
        if group not in groups:
            continue
        over, ranks = groups[group]
        number, kind = entry["collective_seq_id"], entry["profiling_name"].rpartition(":")[2]
        if entry["is_p2p"]:  # these are numbered per pair of ranks
            collective = PendingCollective(kind, over, ranks)
        else:
            collective = last = PendingCollective(f"{kind} {number}", over, ranks, number)
            begun[keys[group]] = max(number, begun.get(keys[group], 0))
        if pending is None and not (entry["retired"] or entry["state"] == "completed"):
            pending = collective
    return pending, last, begun


def recorder_entries() -> Iterator[dict[str, Any]]:
    """The entries of torch's flight recorders, backend by backend, oldest first."""
    for name in DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        trace = {} if dump is None else json.loads(dump())
        yield from sorted(trace.get("entries", []), key=lambda entry: entry.get("record_id", 0))


def is_connection_error(error: BaseException) -> bool:
    """Whether it means that other ranks are gone or did not arrive; reading data from the network
    fails similarly."""
    if isinstance(error, dist.DistError):
        return True
    text = describe(error)
    if type(error) is not RuntimeError or not BROKEN.search(text):  # as torch and `Round` raise it
        return False
    if wait_that_failed(error) is not None or any(part in text for part in BACKENDS):
        return True
    modules = [str(frame.f_globals.get("__name__")) for frame in frames_of(error)[:INNERMOST]]
    return any(module.startswith(TALKING) for module in modules)


def frames(thread: int) -> list[FrameType]:
    """The frames that the thread of this identifier is in, innermost first."""
    frame = sys._current_frames().get(thread)
    return [] if frame is None else [frame for frame, _ in traceback.walk_stack(frame)]


def frames_of(error: BaseException) -> list[FrameType]:
    """The frames in which an error was raised, innermost first."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]


def stack(place: Sequence[FrameType]) -> tuple[str, ...]:
    """Lines like `meshtrain/trainer.py:131 update`, innermost last."""
    shown = [
        frame for frame in place if not any(part in frame.f_code.co_filename for part in HIDDEN)
    ]
    lines = [
        f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
        for frame in shown[:FRAMES]
    ]
    return tuple(reversed(lines))


def _short(path: str) -> str:
    if Path(path).is_relative_to(PACKAGE):
        return str(Path(path).relative_to(PACKAGE.parent))
    parts = Path(path).parts
    for root in ("site-packages", "dist-packages"):
        if root in parts[:-1]:
            return "/".join(parts[parts.index(root) + 1 :])
    return "/".join(parts[-2:])


def debugger_attached() -> bool:
    """Whether a debugger holds this process, or might: then no deadline counts."""
    if any(name in sys.modules for name in DEBUGGERS):
        return True
    place = frames(threading.main_thread().ident or 0)
    if any(
        frame.f_trace is not None or Path(frame.f_code.co_filename).name in DEBUGGER_FILES
        for frame in place
    ):
        return True
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []  # gdb or strace
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)
