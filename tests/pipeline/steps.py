"""Steps of pipelines of a small Llama, and of the whole model in one process, in float64."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from meshtrain.config import Config
from meshtrain.data.batch import Batch
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh
from meshtrain.modeling.build import build_model
from meshtrain.pipeline.actions import Action
from meshtrain.pipeline.engine import Pipeline, shapes_of
from meshtrain.pipeline.schedule import NAMES
from tests.comparing import ALONE, CPU, gradients, same_gradients, trainer_of
from tests.parity.experiments import QUICKSTART

V, D = 24, 16  # vocabulary, width
B, S = 2, 12  # samples of a microbatch, tokens of a sample
LAYERS = 6
MODEL = (
    f"model={{name: llama, hidden_size: {D}, intermediate_size: 24, num_hidden_layers: {LAYERS}, "
    f"num_attention_heads: 4, num_key_value_heads: 2, vocab_size: {V}}}",
    "data.source=tokens",
    "data.path=tests",
    "train.precision=float64",
)
TIED = "model.tie_word_embeddings=true"


def schedules(
    of_ranks: Mapping[int, Sequence[str]], slow: Sequence[str] = ()
) -> pytest.MarkDecorator:
    """Parametrizes `schedule` by number of ranks. `slow`: repetitions on 4 ranks, which `make test`
    leaves out."""
    rows = [(world, name, ()) for world, names in of_ranks.items() for name in names]
    rows += [(4, name, (pytest.mark.slow,)) for name in slow]
    cases = [
        pytest.param(world, name, marks=marks, id=f"{world}-ranks-{name}")
        for world, name, marks in rows
    ]
    return pytest.mark.parametrize(("job", "schedule"), cases, indirect=["job"])


MIDDLE = ("interleaved-1f1b", "zbv")  # on 4 ranks, of which some have neither end of the model
each_schedule = schedules(
    {2: NAMES, 4: MIDDLE}, slow=[name for name in NAMES if name not in MIDDLE]
)


class Event(NamedTuple):
    kind: str
    action: Action | None  # the latest one of this rank
    running: bool  # it has not ended


class Step:
    """The microbatches of a step: (b, s) tokens each, whose lengths s are those given, in turn."""

    def __init__(
        self, microbatches: int, b: int = B, lengths: Sequence[int] = (S,), seed: int = 0
    ) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.tokens = [
            torch.randint(V, (b, lengths[i % len(lengths)]), generator=draws)
            for i in range(microbatches)
        ]
        self.losses: dict[int, Tensor] = {}
        self.events: list[Event] = []
        self._latest: Any = None, False

    def shapes(self, microbatch: int) -> tuple[tuple[int, ...] | None, ...]:
        return shapes_of(self.inputs(microbatch))

    def inputs(self, microbatch: int) -> tuple[Tensor | None, ...]:
        tokens = self.tokens[microbatch]
        # a later stage may have only a part of the tokens
        positions = torch.arange(tokens.shape[1])[None]
        return tokens, positions, None

    def loss(self, microbatch: int, output: Tensor) -> Tensor:
        self.losses[microbatch] = sample_losses(output, self.tokens[microbatch]).sum()
        return self.losses[microbatch]

    @contextmanager
    def around(self, stage: nn.Module, action: Action) -> Iterator[None]:
        self._latest = action, True
        yield
        self._latest = action, False

    def add(self, kind: str) -> None:
        self.events.append(Event(kind, *self._latest))

    def adding(self, kind: str, function: Any) -> Any:
        """The function, each call of which adds an event."""

        def observed(*arguments: Any, **named: Any) -> Any:
            self.add(kind)
            return function(*arguments, **named)

        return observed

    def kinds(self, action: Action) -> list[str]:
        """What happened during the action."""
        return [event.kind for event in self.events if event.action == action and event.running]

    def batches(self) -> list[Batch]:
        return [Batch.of(self.inputs(i), tokens) for i, tokens in enumerate(self.tokens)]


def config(mesh: Mesh, schedule: str, microbatches: int, *overrides: str) -> Config:
    layout = dict(zip(mesh.layout.axes, mesh.layout.shape, strict=True))
    keys = {
        "layout": layout,
        "batch.global_size": B * microbatches * mesh.size("dp_replicate", "dp_shard"),
        "batch.micro_size": B,
        "pipeline.schedule": schedule,
    }
    return Config.load(
        QUICKSTART, [*MODEL, *(f"{key}={value}" for key, value in keys.items()), *overrides]
    )


def pipeline(mesh: Mesh, schedule: str, microbatches: int, *overrides: str) -> Pipeline:
    model = build_model(config(mesh, schedule, microbatches, *overrides), mesh, CPU)
    assert isinstance(model, Pipeline)
    return model


def plain(*overrides: str) -> nn.Module:
    """The same model in one process."""
    return build_model(config(ALONE, "1f1b", 1, *overrides), ALONE, CPU)


def compare_gradients(model: Pipeline, step: Step, *overrides: str, data_ranks: int = 1) -> None:
    """Asserts the gradients of one process; all data ranks have had the same samples."""
    alone = plain(*overrides)
    for i, tokens in enumerate(step.tokens):
        loss = sample_losses(alone(*step.inputs(i)), tokens).sum()
        (loss * data_ranks).backward()
    for stage in model.stages():
        same_gradients(stage, gradients(alone))


def train(
    mesh: Mesh, schedule: str, microbatches: int, *overrides: str, seed: int = 0
) -> tuple[nn.Module, list[list[float]]]:
    """Returns the model after four updates, and the loss and the norm of each."""
    keys = (*overrides, "optimizer.warmup_steps=0", "optimizer.lr=0.01")
    trainer = trainer_of(config(mesh, schedule, microbatches, *keys), mesh)
    numbers = []
    for update in range(1, 5):
        trainer.forward_backward(update, Step(microbatches, seed=10 * update + seed).batches())
        result = trainer.optimizer_step(update)()
        numbers.append([result.loss, result.grad_norm])
    return trainer.model, numbers
