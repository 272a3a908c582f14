"""The numbers of a step by name: packed for one message, and as the host reads them."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn

from meshtrain.config import Config
from meshtrain.data.batch import Batch
from meshtrain.loss import Field
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.optim.optimizer import Optimizer
from meshtrain.step_sums import StepOutcome, StepSums
from meshtrain.trainer import StepResult, Trainer
from tests.comparing import ALONE, CPU

FIELDS = (Field("loss", "balance"), Field("mean", "rms", size=2), Field("tally", "hits", size=3))


def numbered(cls: type, terms: tuple[Field, ...]) -> StepSums | StepOutcome:
    """Each number is another one."""
    names = [field.name for field in fields(cls) if field.name != "terms"]
    numbers = iter(range(100))
    scalars = {name: torch.tensor(float(next(numbers)), dtype=torch.float64) for name in names}
    sums = {
        field: torch.tensor([float(next(numbers)) for _ in range(field.size)], dtype=torch.float64)
        for field in terms
    }
    return cls(**scalars, terms=sums)


@pytest.mark.parametrize("cls", [StepSums, StepOutcome])
@pytest.mark.parametrize("terms", [(), FIELDS], ids=["no terms", "terms"])
def test_numbers_come_out_under_their_names(cls: type, terms: tuple[Field, ...]) -> None:
    numbers = numbered(cls, terms)
    packed = numbers.pack()
    assert len(packed) == len(packed.unique()) == len(numbers.names()) + sum(f.size for f in terms)
    doubled = numbers.unpack(2 * packed)
    for name in numbers.names():
        assert getattr(doubled, name) == 2 * getattr(numbers, name), name
        assert getattr(doubled, name).dim() == 0
    assert tuple(doubled.terms) == terms
    for field in terms:
        assert torch.equal(doubled.terms[field], 2 * numbers.terms[field])


def test_what_the_host_reads_later_is_what_it_was() -> None:
    outcome = numbered(StepOutcome, FIELDS)
    assert isinstance(outcome, StepOutcome)
    read = outcome.read_later()
    expected = outcome.pack().clone()
    outcome.loss.add_(1)
    outcome.terms[FIELDS[1]].add_(1)
    assert torch.equal(read().pack(), expected)


def step_of_classifier(images: Tensor) -> tuple[StepResult, bool]:
    """A step in float64, and whether it has moved the weights."""
    keys = ("train.precision=float64", "optimizer.warmup_steps=0")
    config = Config.load("configs/quickstart.yaml", keys, world_size=1)
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    before = model.weight.detach().clone()
    optimizer = Optimizer(model, config.optimizer, ALONE, 10)
    trainer = Trainer(
        model, optimizer, config, ALONE, CPU, task="classification", timer=StepTimer(CPU)
    )
    trainer.forward_backward(1, [Batch.of([images], torch.arange(5) % 4)])
    return trainer.optimizer_step(1)(), not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("scale", "finite"), [(1.0, True), (1e100, True), (torch.inf, False)], ids=str
)
def test_the_host_calls_finite_what_the_device_does(scale: float, finite: bool) -> None:
    """1e100 is a number in float64, and none in float32."""
    torch.manual_seed(1)
    result, updated = step_of_classifier(torch.rand(5, 6, dtype=torch.float64) * scale)
    assert (result.finite, updated) == (finite, finite)
    assert bool(result.bad_samples) is not finite
