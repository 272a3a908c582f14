"""What this rank says of itself when another one asks."""

import threading
import time
from dataclasses import dataclass, field, replace
from types import FrameType

from meshtrain.leaving import by_signal, signal_of
from meshtrain.operate import witness
from meshtrain.operate.deadlines import Clock
from meshtrain.operate.testimony import Statement
from meshtrain.rounds import described
from meshtrain.runtime import Job

RECORDER_S = 1.5  # for the flight recorder to answer
OF_DEVICE = ("checkpoint/snapshot.py", "checkpoint/replicas.py")  # where a save waits for its device, and for no disk


@dataclass(frozen=True)
class Failure:
    """What this rank has failed with.

    Attributes:
        kind: "error", or "signal" if a signal has ended it.
        words: for people.
        frames: where it was raised, innermost first.
        broken: whether it comes of others, as far as can be seen.
        at: when, by the monotonic clock.
    """

    kind: str
    words: str
    frames: list[FrameType] = field(default_factory=list)
    broken: bool = False
    at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        words = f"ended by {signal_of(error)}" if by_signal(error) else described(error)
        kind = "signal" if by_signal(error) else "error"
        return cls(kind, words, witness.frames_of(error), witness.of_connections(error))


def statement(job: Job, clock: Clock, failure: Failure | None) -> Statement:
    at = witness.frames(threading.main_thread()) if failure is None else failure.frames
    known = witness.groups(job.layout, job.rank)
    recorded, begun = witness.within(RECORDER_S, lambda: witness.recorded(known)) or (None, {})
    wait = recorded or witness.waits(at, known, job.world_size, begun)
    saving = witness.thread_named("checkpoint")
    writing = [] if saving is None else witness.frames(saving)
    for_device = any(frame.f_code.co_filename.endswith(OF_DEVICE) for frame in (*at, *writing))
    if wait is None and saving is not None:
        wait = witness.waits(writing, known, job.world_size)
        if wait is None and clock.phase == "saving" and failure is None:
            at = writing  # the main thread only waits for it
    said = Statement(
        clock.phase,
        clock.step,
        clock.seconds,
        late=clock.late(for_device=for_device),
        patient=clock.deadlines.patient(clock.phase),
        wait=wait,
        begun=begun,
        stack=witness.stack(at),
        debugged=witness.debugged(),
    )
    if failure is None:
        return said
    return replace(
        said,
        failure=failure.words,
        kind=failure.kind,
        failed_s=time.monotonic() - failure.at,
        broken=failure.broken,
        wait=wait if failure.broken else None,
    )
