"""Step logging: turns the results of steps into rows, totals of the run and of its epochs, and
decisions to stop."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from meshtrain.checkpoint.retention import SAMPLES
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.data import OpenData
from meshtrain.data.mixture import sample_order
from meshtrain.data.order import BatchSizes, samples_digest, share
from meshtrain.errors import TrainingError, join_some, ranges
from meshtrain.evaluate import Evaluation
from meshtrain.job.process import Job
from meshtrain.layout import DATA_AXES
from meshtrain.loss import mean_of
from meshtrain.mesh import Mesh
from meshtrain.metrics.logger import NoMetrics
from meshtrain.metrics.step_timer import memory_gib, memory_reserved_gib
from meshtrain.modeling.build import spec_of
from meshtrain.modeling.flops import CausalCalls, causal_flops, mfu, peak_flops, sample_flops
from meshtrain.run.phase_monitor import PhaseMonitor
from meshtrain.trainer import StepResult

EMPTY_STEPS = 10  # in a row without any target with a loss, after which that is said
MOST_BAD = 8  # ranks whose samples are listed, and samples of each


class StepLogger(AbstractContextManager["StepLogger"]):
    """Takes the results of the steps in order. All ranks have a logger, because all of them stop
    together.

    Attributes:
        stop_asked: whether some rank asked for a stop before one of the steps whose results are
            known.
        tokens: valid targets since the start of the run.
        evaluations: step -> numbers of the last evaluation, as in a checkpoint's manifest.
    """

    def __init__(
        self,
        spec: RunSpec,
        job: Job,
        mesh: Mesh,
        data: OpenData,
        monitor: PhaseMonitor,
        metrics: NoMetrics,
        counters: Mapping[str, Any] | None = None,
    ) -> None:
        """`metrics`: on rank 0, a `Metrics`. `counters`: the `state_dict` in the checkpoint to
        resume from."""
        self.config = spec.config
        self.steps = spec.steps
        self.job = job
        self.mesh = mesh
        self.data = data
        self._monitor = monitor
        self._metrics = metrics

        self.stop_asked = False
        self.evaluations: dict[int, dict[str, float]] = {}
        self.tokens = 0 if counters is None else counters["tokens"]
        self._epoch = _Sums() if counters is None else _Sums(**counters["epoch"])
        self._order = sample_order(spec.config, data.train)
        self._pending: Callable[[], StepResult] | None = None
        self._empty = 0  # steps in a row without a target with a loss
        self._lengths = BatchSizes.of(spec.config.data.seq_len_warmup or spec.config.data.seq_len)
        if job.rank == 0:
            self._metrics.say(self._count_flops(spec.config.data.seq_len))

    def _count_flops(self, length: int) -> str:
        """Counts the FLOPs of a sample, cut to `length` if it is tokens. Returns a line about
        them."""
        batch = self.data.train.read([(0, 0)], 1).batch().shortened(length)
        self._counted = length
        self._packed = batch.tensors.get("documents") is not None
        self._causal = CausalCalls()
        self._flops, of_model = sample_flops(spec_of(self.config).meta, batch.inputs, self._causal)
        self._peak, of_device = peak_flops(self.job.device, self.config.train.precision)
        return f"{of_model}; {of_device} (for MFU)"

    def __exit__(self, *_: object) -> None:
        self._metrics.close()

    def defer(self, result: Callable[[], StepResult]) -> None:
        """Takes the result of a step that the device may still be working on; `flush` waits for
        it."""
        self._pending = result

    def flush(self) -> None:
        """Logs the deferred step, if any. Raises TrainingError, on every rank: it is not finite and
        stops the run."""
        if self._pending is None:
            return
        result = self._pending()
        self._pending = None
        self.stop_asked |= result.stop_asked
        if not result.finite and not result.overflow:
            self._handle_nonfinite(result)
        self._count_empty(result)
        times = self._monitor.finish_step(result.step)
        self.tokens += result.num_valid_tokens
        if result.finite:
            self._epoch.add(result)
        if self.job.rank == 0:
            self._metrics.row(self._row(result, times))
        if self.ends_epoch(result.step):
            self._metrics.epoch(self._order.epoch(result.step), self._epoch.means())
            self._epoch = _Sums()

    def evaluates_after(self, step: int) -> bool:
        """Whether the config asks for an evaluation after this step. The last step has one unless
        evaluation is off."""
        every = self.config.train.eval_every
        if every == "epoch":
            return step == self.steps or self.ends_epoch(step)
        return bool(every) and (step == self.steps or step % int(every) == 0)

    def evaluation(self, step: int, evaluation: Evaluation, samples: int) -> None:
        """Logs an evaluation of `samples` samples after `step`, whose row was the last."""
        numbers = evaluation.numbers(self.data.task, self.data.bytes_per_target)
        self.evaluations = {step: numbers | {SAMPLES: samples}}
        self._metrics.evaluation(step, numbers)

    def state_dict(self) -> dict[str, Any]:
        """The counters over the steps so far, for a checkpoint: JSON values."""
        return {"tokens": self.tokens, "epoch": dict(vars(self._epoch)), "steps": self.steps}

    def ends_epoch(self, step: int) -> bool:
        return self._order.epoch(step) > self._order.epoch(step - 1)

    def _row(self, result: StepResult, times: dict[str, float]) -> dict[str, object]:
        length = self._lengths.size(result.step - 1)
        if length != self._counted:
            self._count_flops(length)
        positions = self._order.sizes.positions(result.step - 1)
        seconds = times["step_time_s"]
        flops = None if self._flops is None else self._flops * len(positions)
        causal = self._causal_flops(result.step)
        return {
            "step": result.step,
            # That of its first sample: a last batch is filled from an epoch that the run does not
            # have.
            "epoch": positions.start // self._order.samples + 1,
            "loss": result.loss if result.weight else None,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": self.tokens,
            "samples": positions.stop,
            "samples_digest": samples_digest(sample for _, sample in self._items(result.step)),
            "tokens_per_s": result.num_valid_tokens / seconds,
            "mfu": mfu(flops, seconds, self._peak, self.job.world_size),
            "mfu_causal": mfu(causal, seconds, self._peak, self.job.world_size),
            "memory_gib": memory_gib(self.job.device),
            "memory_reserved_gib": memory_reserved_gib(self.job.device),
            **times,
            **{f"sent_bytes_{axis}": sent for axis, sent in result.sent.items()},
            **result.terms,
        }

    def _causal_flops(self, step: int) -> int | None:
        """FLOPs of a step, counting only pairs of tokens of which one attends to the other; None if
        unknown."""
        if self._flops is None:
            return None
        samples = [sample for _, sample in self._items(step)]
        lengths = None
        if self._counted == self.config.data.seq_len:  # samples are not cut
            lengths = self.data.train.document_lengths(samples)
        if self._packed and lengths is None:
            return None
        return causal_flops(self._flops, self._causal.flops, len(samples), lengths)

    def _items(self, step: int) -> list[tuple[int, int]]:
        return self._order.of_step(step - 1)

    def _count_empty(self, result: StepResult) -> None:
        if result.weight > 0:
            self._empty = 0
            return
        self._empty += 1
        # A run too short to get that far says so at its end.
        is_in_vain = result.step == self.steps and self.tokens == 0 and self._empty < EMPTY_STEPS
        if (self._empty == EMPTY_STEPS or is_in_vain) and self.job.rank == 0:
            steps = ranges(range(result.step - self._empty + 1, result.step + 1))[0]
            self._metrics.say(
                f"no target of the steps {steps} had a loss: such steps change no weight; look at "
                "the prompts of the data, or take a larger data.seq_len or batch.global_size"
            )

    def _handle_nonfinite(self, result: StepResult) -> None:
        """Names the ranks and samples whose loss is not finite. All ranks call it, as all have the
        same result."""
        batch = self._items(result.step)
        own = share(len(batch), self.mesh.size(*DATA_AXES), self.mesh.index(*DATA_AXES))
        samples = []
        if self.mesh.speaks_for_samples:
            # What lies behind this rank's share is padding.
            samples = [batch[own[i]][1] for i in result.bad_samples if i < len(own)]
        ranks = self.job.reduce(
            "naming what is not finite", [str(self.job), samples], _with_samples
        )
        problem = (
            f"step {result.step}: every sample's loss is finite, but the gradient's norm is "
            f"{result.grad_norm}"
        )
        if ranks:
            bad = []
            for rank, of_rank in ranks[:MOST_BAD]:
                bad.append(f"{rank}: samples {join_some(list(map(str, of_rank)), MOST_BAD)}")
            if len(ranks) > MOST_BAD:
                bad.append(f"and {len(ranks) - MOST_BAD} other ranks")
            problem = f"step {result.step}: the loss is not finite ({'; '.join(bad)})"
        if self.config.train.on_nonfinite == "stop":
            raise TrainingError(
                f"{problem}. Stopped before that update: the parameters are those of step "
                f"{result.step - 1}. Look at these samples, lower optimizer.lr, or leave such "
                "steps out with train.on_nonfinite=skip"
            )
        self._metrics.say(f"{problem}; its update is left out (train.on_nonfinite: skip)")


def first_counters(steps: int) -> dict[str, Any]:
    """The counters of a run of so many steps that has counted nothing yet."""
    return {"tokens": 0, "epoch": dict(vars(_Sums())), "steps": steps}


def _with_samples(rows: list) -> list:
    """Of [rank, samples] of every rank, those that have some."""
    return [row for row in rows if row[1]]


@dataclass
class _Sums:
    loss: float = 0.0
    targets: int = 0
    correct: int | None = None
    weight: float | None = None  # what the loss is divided by; None: in checkpoints from before

    def __post_init__(self) -> None:
        if self.weight is None:
            self.weight = self.targets

    def add(self, result: StepResult) -> None:
        assert self.weight is not None
        self.loss += result.loss * result.weight
        self.weight += result.weight
        self.targets += result.num_valid_tokens
        if result.correct is not None:
            self.correct = (self.correct or 0) + result.correct

    def means(self) -> dict[str, float]:
        assert self.weight is not None
        means = {"loss": mean_of(self.loss, self.weight)}
        if self.correct is not None:
            means["accuracy"] = mean_of(self.correct, self.targets)
        return means
