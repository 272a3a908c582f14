"""Introspection: where this process is, as its watchdog's thread sees it, and what it waits for.

Collectives that have begun and not ended are in torch's flight recorder, except for gloo's sends
and receives (https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html);
meshtrain's own waits are in pending.py.
"""

import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from meshtrain.job.exit import signal_of
from meshtrain.job.pending import PendingWait, Resource, pending_waits, wait_that_failed
from meshtrain.job.process import Job
from meshtrain.job.sockets import call_with_timeout
from meshtrain.job.store import describe, is_input
from meshtrain.job.torch_private import group_ranks, recorder_entries
from meshtrain.job.watchdog.deadlines import DeadlineClock
from meshtrain.job.watchdog.records import FailureKind, PendingCollective, RankStatus
from meshtrain.layout import Layout

FRAMES = 14  # of a stack, the innermost
RECORDER_S = 1.5  # for the flight recorder to answer
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
    r"another rank has failed|Connection (?:closed|reset|refused)|Broken pipe|closed by peer"
    r"|Timed out waiting|Socket Timeout|recvValue|sendBytes"
    r"|DistNetworkError|DistStoreError|DistBackendError|NCCL|gloo",
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
        signal_name = signal_of(error)
        if signal_name is not None:
            return cls(FailureKind.SIGNAL, f"ended by {signal_name}", frames_of(error))
        if is_input(error):
            return cls(FailureKind.INPUT, str(error), frames_of(error))
        return cls(
            FailureKind.ERROR,
            describe(error),
            frames_of(error),
            broken=is_connection_error(error),
            wait=wait_that_failed(error),
        )


class RecorderState(NamedTuple):
    """What torch's flight recorder says of this process."""

    pending: PendingCollective | None  # the oldest collective that has not ended
    last: PendingCollective | None  # the one begun last
    begun: dict[str, int]  # ranks of a group ("0,2") -> how many collectives have begun there


def local_status(job: Job, clock: DeadlineClock, failure: Failure | None) -> RankStatus:
    """This rank's answer when another one asks for its state."""
    groups = process_groups(job.layout, job.rank)
    recorded = _recorded(groups)

    # Where the main thread is, and what it and the others wait for.
    main = threading.main_thread().ident or 0
    by_thread = pending_waits()
    waits = by_thread.pop(main, ())
    background = [wait for of_thread in by_thread.values() for wait in of_thread]
    place = frames(main)
    last = None
    if failure is not None:
        waits = () if failure.wait is None else (failure.wait,)
        place = failure.frames
        last = recorded.last

    everybody = tuple(range(job.world_size))
    wait = (
        recorded.pending
        or pending_collective(waits, groups)
        or blocking_collective(place, last, groups, everybody)
    )
    if wait is None:
        wait = pending_collective(background, groups)
        if wait is None and by_thread and clock.phase == "saving" and failure is None:
            # The main thread only waits for the one that saves.
            place = frames(next(iter(by_thread)))
    for_device = any(other.resource == Resource.DEVICE for other in (*waits, *background))

    status = RankStatus(
        clock.phase,
        clock.step,
        clock.seconds,
        late=clock.late(for_device=for_device),
        patient=clock.deadlines.patient(clock.phase),
        wait=wait,
        resource=_resource(waits if clock.phase != "saving" else (*background, *waits)),
        begun=recorded.begun,
        stack=stack(place),
        debugged=debugger_attached(),
    )
    if failure is None:
        return status
    return replace(
        status,
        failure=failure.text,
        kind=failure.kind,
        failed_s=time.monotonic() - failure.at,
        broken=failure.broken,
        wait=wait if failure.broken else None,
    )


def _recorded(groups: Groups) -> RecorderState:
    """`flight_recorder_state`, or nothing where the recorder does not answer: it may wait for a
    lock that a hanging thread holds."""
    try:
        return call_with_timeout(RECORDER_S, flight_recorder_state, groups)
    except TimeoutError:
        pass
    except Exception as error:
        traceback.print_exception(error)
    return RecorderState(None, None, {})


def _resource(waits: Sequence[PendingWait]) -> str | None:
    """What is waited for besides other ranks, by the innermost of such waits."""
    for wait in reversed(waits):
        if wait.resource != Resource.RANKS:
            return wait.label
    return None


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
    for group, ranks in group_ranks():
        if rank in ranks and len(ranks) > 1:
            name = _axis_of(layout, rank, ranks) or str(group.group_desc)
            groups[group.group_name] = (name, ranks)
    return groups


def _axis_of(layout: Layout | None, rank: int, ranks: tuple[int, ...]) -> str | None:
    if layout is not None:
        for axis in layout.axes:
            if tuple(sorted(layout.group(rank, axis))) == ranks:
                return axis
    return "all ranks" if len(ranks) == dist.get_world_size() else None


def flight_recorder_state(groups: Groups) -> RecorderState:
    pending = last = None
    begun: dict[str, int] = {}
    for entry in recorder_entries():
        group = entry["process_group"][0]
        if group not in groups:
            continue
        over, ranks = groups[group]
        number = entry["collective_seq_id"]
        kind = entry["profiling_name"].rpartition(":")[2]
        if entry["is_p2p"]:  # these are numbered per pair of ranks
            collective = PendingCollective(kind, over, ranks)
        else:
            collective = PendingCollective(f"{kind} {number}", over, ranks, number)
            last = collective
            key = ",".join(map(str, ranks))
            begun[key] = max(number, begun.get(key, 0))
        has_ended = entry["retired"] or entry["state"] == "completed"
        if pending is None and not has_ended:
            pending = collective
    return RecorderState(pending, last, begun)


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
    lines = []
    for frame in place:
        code = frame.f_code
        if not any(part in code.co_filename for part in HIDDEN):
            lines.append(f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}")
    return tuple(reversed(lines[:FRAMES]))


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
    for frame in frames(threading.main_thread().ident or 0):
        if frame.f_trace is not None or Path(frame.f_code.co_filename).name in DEBUGGER_FILES:
            return True
    # gdb or strace, as the kernel tells
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)
