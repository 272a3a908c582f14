"""Faults that a run plants on purpose, so that people can rehearse what happens then (`train.chaos`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshtrain.config.rules import Draft
from meshtrain.config.values import INVALID, key


@dataclass(frozen=True)
class Fault:
    """One fault: what happens to which rank, and when."""

    fault: Literal["kill", "stop", "slow", "raise", "fail-save"] = key(
        doc="What happens: `kill` (SIGKILL) ends the process without a word, `stop` (SIGSTOP) makes it silent, `slow` "
        "makes its steps longer, `raise` is an exception, and `fail-save` a disk that is full.",
        also=("kind", "type", "what"),
    )
    step: int = key(
        doc="When: at the beginning of this step, or in the save of the checkpoint of this step. `slow`: the first "
        "slow step.",
        minimum=1,
        also=("at", "at_step", "from", "from_step"),
    )
    rank: int | None = key(
        None, "Whose. null is for `fail-save` alone, and means every rank.", minimum=0, also=("ranks", "who")
    )
    during: Literal["step", "save"] = key(
        "step", "`save`: while the rank writes its file of the checkpoint. `fail-save` is always then."
    )
    seconds: float | None = key(
        None, "`slow`: how much longer each step, or the save, takes.", above=0, also=("delay", "sleep")
    )
    until: int | None = key(
        None, "`slow`: the last slow step. null: the last one of the run.", minimum=1, also=("to", "last")
    )
    again: bool = key(False, "Whether it is planted once more when the launcher starts the job anew.")

    @property
    def in_save(self) -> bool:
        """Whether it waits for a checkpoint to be written."""
        return self.during == "save" or self.fault == "fail-save"


def check_chaos(draft: Draft, world_size: int | None) -> None:
    """Reports faults that no run would meet.

    Args:
        world_size: None where that is not known, or is not what the faults were written for.
    """
    faults, node = draft.values["train.chaos"], draft.root.get("train", "chaos")
    if faults is INVALID or node is None or not isinstance(node.value, list):
        return
    steps, every = draft.values["train.steps"], draft.values["checkpoint.every"]
    known = steps if isinstance(steps, int) else None
    for i, (fault, item) in enumerate(zip(faults, node.value, strict=True)):
        for name, problem in _problems(fault, known, every, world_size):
            draft.report((item.get(name) or item).at, f"train.chaos[{i}]: {problem}")


def _problems(fault: Fault, steps: int | None, every: object, world_size: int | None) -> Iterator[tuple[str, str]]:
    """What is wrong with a fault: the key that is, and a sentence with a way out."""
    if fault.rank is None and fault.fault != "fail-save":
        yield "fault", f"{fault.fault} needs a rank: say whose, such as rank: 1"
    if fault.rank is not None and world_size is not None and fault.rank >= world_size:
        ranks = "is rank 0 alone" if world_size == 1 else f"has ranks 0 to {world_size - 1}"
        yield "rank", f"there is no rank {fault.rank}: this job {ranks}"
    if steps is not None and fault.step > steps:
        yield "step", f"step {fault.step} is beyond the run, which ends at step {steps}: name one of its steps"
    elif fault.in_save and isinstance(every, int) and not _saved(fault.step, steps, every):
        when = f"every {every} steps, and " if every else ""
        yield (
            "step",
            f"no checkpoint is written after step {fault.step}: checkpoint.every {every} writes one {when}"
            "at the end of the run",
        )
    if fault.fault == "slow" and fault.seconds is None:
        yield "fault", "slow needs seconds: how much longer each step takes, such as seconds: 0.5"
    for name, value in (("seconds", fault.seconds), ("until", fault.until)):
        if fault.fault != "slow" and value is not None:
            yield name, f"{name} is for slow, and this fault is {fault.fault}: take it away"
    if fault.until is not None and fault.in_save:
        yield "until", "until is for slow steps, and during: save slows one save: take one of the two away"
    if fault.until is not None and fault.until < fault.step:
        yield "until", f"until {fault.until} is before step {fault.step}, the first slow one: raise it, or leave it out"


def _saved(step: int, steps: int | None, every: int) -> bool:
    """Whether a checkpoint is written after a step; of a run of unknown length the last one is anywhere."""
    return steps is None or step == steps or (every > 0 and step % every == 0)
