"""The twelve disturbances of the witness, and when they come. Python alone: nothing is run here.

A disturbance ends a job; the next job goes on from the newest checkpoint. Those that keep one
process come first, since until the layout changes the bits must be equal.
"""

from dataclasses import dataclass

ONE = "{dp_shard: 1}"
SAVES = 40  # checkpoints of the whole run


@dataclass(frozen=True)
class Disturbance:
    """What ends a job.

    Attributes:
        kind: `kill` (SIGKILL at the beginning of a step), `full disk` (a save fails, and the rank
            is killed before the next one), `kill in save`, `damage` (killed, and a bit of the
            newest checkpoint turns over), or `stop` (SIGUSR1, as SLURM sends it: the job saves).
        at: when, in checkpoints of the run: 2.5 is halfway between the second and the third.
        then: the layout of the next job.
        text: for the picture.
        rank: whom it strikes.
    """

    kind: str
    at: float
    then: str
    text: str
    rank: int = 0


DISTURBANCES = (
    Disturbance("kill", 2.5, ONE, "kill -9"),
    Disturbance("full disk", 4, ONE, "disk full in a save, then kill -9"),
    Disturbance("kill in save", 6, ONE, "kill -9 in the middle of a save"),
    Disturbance("damage", 8.5, ONE, "kill -9, and a bit of the newest checkpoint turns over"),
    Disturbance("stop", 10.3, ONE, "stopped by the scheduler, and requeued"),
    Disturbance("stop", 12.5, "{dp_replicate: 2}", "goes on as 2 copies"),
    Disturbance("kill", 15.5, "{dp_replicate: 2}", "a rank is lost and comes back", rank=1),
    Disturbance("stop", 18.3, "{dp_shard: 3}", "3 shards, of 8 samples"),
    Disturbance("kill", 21.5, "{dp_shard: 2}", "a rank is lost for good: 2 shards", rank=2),
    Disturbance("stop", 25.3, "{tp: 2}", "tensor parallel"),
    Disturbance("stop", 29.6, "{pp: 2, dp_shard: 2}", "a pipeline of 2 stages x 2 shards"),
    Disturbance("stop", 34.4, "{cp: 2}", "each sequence in 2 parts"),
)


@dataclass(frozen=True)
class Leg:
    """A job of the disturbed run: its layout, and what ends it; None: the end of the training."""

    number: int  # from 0
    layout: str
    end: Disturbance | None


def legs() -> list[Leg]:
    """All jobs, in order: one more than there are disturbances."""
    layouts = [ONE, *(disturbance.then for disturbance in DISTURBANCES)]
    ends = [*DISTURBANCES, None]
    return [Leg(i, layout, end) for i, (layout, end) in enumerate(zip(layouts, ends, strict=True))]


def first_change() -> int:
    """The number of the first leg that has another layout than one process."""
    return next(leg.number for leg in legs() if leg.layout != ONE)


def save_every(steps: int) -> int:
    """Steps between checkpoints. Raises ValueError: the run is too short for its disturbances."""
    if steps < SAVES:
        raise ValueError(
            f"{steps} steps are too few for {len(DISTURBANCES)} disturbances: give at least {SAVES}"
        )
    return steps // SAVES


def step_of(end: Disturbance, every: int) -> int:
    """The step in which a disturbance comes: that of a save, or the one at whose beginning it
    strikes."""
    if end.kind in ("full disk", "kill in save"):
        return int(end.at) * every
    return int(end.at * every) + 1


def faults(end: Disturbance | None, every: int) -> tuple[list[str], list[str]]:
    """How a job is disturbed: arguments of `tools.witness.job`, and overrides of its config."""
    if end is None:
        return [], []
    step = step_of(end, every)
    kill = f"{{fault: kill, rank: {end.rank}, step: {step}}}"
    if end.kind == "stop":
        return ["signal", str(step)], []
    if end.kind == "kill in save":
        return ["kill-in-save", str(step)], []
    if end.kind == "full disk":
        later = step + every // 2 + 1
        kill = f"{{fault: kill, rank: 0, step: {later}}}"
        return [], [f"train.chaos=[{{fault: fail-save, rank: 0, step: {step}}}, {kill}]"]
    return [], [f"train.chaos=[{kill}]"]
