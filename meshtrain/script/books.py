"""The books of a script's run: rows of metrics.jsonl, and what a checkpoint records of the steps so
far."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from meshtrain.data.order import SampleOrder, samples_digest
from meshtrain.job.process import Job
from meshtrain.metrics.logger import NoMetrics
from meshtrain.metrics.step_timer import memory_gib, memory_reserved_gib
from meshtrain.run.phase_monitor import PhaseMonitor


@dataclass(frozen=True)
class StepNumbers:
    """What a step has computed, the same on every rank."""

    step: int
    loss: float | None  # mean over the global batch; None: its counts add up to 0
    grad_norm: float  # of the gradient of that loss, before clipping
    count: float  # of the global batch
    lr: float
    sent: Mapping[str, int]  # axis -> bytes that this rank sent over it for the step
    terms: Mapping[str, float] = field(default_factory=dict)


class ScriptBooks(AbstractContextManager["ScriptBooks"]):
    """Takes the numbers of the steps in order, on all ranks, and gives rank 0's metrics a row of
    each. The times of a step are read a step later, when the device has long done it."""

    def __init__(
        self,
        job: Job,
        order: SampleOrder,
        monitor: PhaseMonitor,
        metrics: NoMetrics,
        steps: int,
    ) -> None:
        self.tokens = 0  # what samples consist of is the script's
        self.evaluations: dict[int, dict[str, float]] = {}
        self._job = job
        self._order = order
        self._monitor = monitor
        self._metrics = metrics
        self._steps = steps
        self._pending: StepNumbers | None = None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None or kind is GeneratorExit:  # the script has left its loop
            self.flush()
        self._metrics.close()

    def take(self, numbers: StepNumbers) -> None:
        """Takes a step that is done; `flush` writes its row."""
        self._pending = numbers

    def flush(self) -> None:
        """Writes the row of the last step, if it is not written yet."""
        if self._pending is None:
            return
        numbers, self._pending = self._pending, None
        times = self._monitor.finish_step(numbers.step)
        if self._job.rank == 0:
            self._metrics.row(self._row(numbers, times))

    def ends_epoch(self, step: int) -> bool:
        return self._order.epoch(step) > self._order.epoch(step - 1)

    def state_dict(self) -> dict[str, Any]:
        epoch = {"loss": 0.0, "targets": 0, "correct": None}
        return {"tokens": self.tokens, "epoch": epoch, "steps": self._steps}

    def _row(self, numbers: StepNumbers, times: Mapping[str, float]) -> dict[str, Any]:
        positions = self._order.sizes.positions(numbers.step - 1)
        return {
            "step": numbers.step,
            "epoch": positions.start // self._order.samples + 1,
            "loss": numbers.loss,
            "grad_norm": numbers.grad_norm,
            "lr": numbers.lr,
            "count": numbers.count,
            "samples": positions.stop,
            "samples_digest": samples_digest(self._samples(numbers.step)),
            "samples_per_s": len(positions) / times["step_time_s"],
            "memory_gib": memory_gib(self._job.device),
            "memory_reserved_gib": memory_reserved_gib(self._job.device),
            **times,
            **{f"sent_bytes_{axis}": sent for axis, sent in numbers.sent.items()},
            **numbers.terms,
        }

    def _samples(self, step: int) -> Sequence[int]:
        return [sample for _, sample in self._order.of_step(step - 1)]
