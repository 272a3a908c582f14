"""A script with a loop of its own by `meshtrain.Run`, as the tests of it run it:

    program.py OUTPUT OPTIONS      OPTIONS: a JSON object of the fields of `Options`

Rank 0 prints what it has seen as one JSON object.
"""

import dataclasses
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import meshtrain
from meshtrain.dropout import Dropout
from meshtrain.loss import attach
from meshtrain.parallel.step_context import current_context

SAMPLES, LENGTH, WIDTH, WORDS = 37, 6, 8, 11
TP_PLAN = {"*.up": "colwise", "*.down": "rowwise"}


@dataclass(frozen=True)
class Options:
    layout: str = "{dp_shard: -1}"
    steps: int = 4
    global_size: int = 7
    micro_size: int | None = None
    clip_norm: float | None = None
    precision: str = "float64"
    schedule: str | None = None
    every: int = 0
    optimizer: str = "AdamW"  # of torch, or one of meshtrain's own
    optimizer_options: dict[str, Any] = dataclasses.field(default_factory=lambda: {"lr": 0.02})
    model: str = "sequential"
    sample: bool = False  # whether `prepare` is told the inputs
    tp_plan: bool = False
    dropout: float = 0.0
    attach: bool = False  # whether layers add a term to the loss
    loss: str = "tokens"  # the name of a function of LOSSES
    # what rank 0 does in step 3: die, raise, stop (by a file), signal (to itself); or all: leave
    third_step: str = ""
    data_of_rank: bool = False  # whether each rank draws other data
    scheduler: bool = False  # whether a scheduler of torch halves the learning rate in each step


class Layer(nn.Module):
    terms: ClassVar[list[Tensor]] = []  # of forwards outside of a run, for a loop in plain torch

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.attaches = options.attach
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.attaches:
            term = 0.3 * x.square().sum((1, 2))
            if current_context().terms is None and not term.is_meta:
                self.terms.append(term.sum())
            x = attach(x, "size", term)
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Blocks(nn.Module):
    """A model with `blocks()`, and parameters outside of them."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer(options) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def blocks(self) -> list[nn.Module]:
        return [self.embedding, *self.layers, self.head]

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_model(options: Options) -> nn.Module:
    torch.manual_seed(1)
    if options.model == "blocks":
        return Blocks(options)
    layers = [Layer(options) for _ in range(3)]
    head = nn.Linear(WIDTH, WORDS, bias=False)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, head)


def make_data(seed: int = 2) -> list[dict[str, Tensor]]:
    """Samples with different numbers of targets, one of them without any."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(SAMPLES):
        tokens = torch.randint(0, WORDS, (LENGTH,), generator=generator)
        targets = torch.randint(0, WORDS, (LENGTH,), generator=generator)
        targets[: i % (LENGTH + 1)] = -100
        samples.append({"tokens": tokens, "targets": targets})
    return samples


def token_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum and count of all valid targets."""
    logits = model(batch["tokens"])
    total = F.cross_entropy(logits.mT, batch["targets"], reduction="sum")
    return total, (batch["targets"] != -100).sum()


def regression(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    outputs = model(batch["tokens"]).mean((1, 2))
    return (outputs - 1).square().sum(), len(outputs)


def contrast(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Compares each sample with all others of the step."""
    features = model(batch["tokens"]).mean(1)
    scores = features @ meshtrain.gather_samples(features).T
    own = meshtrain.sample_positions(features)
    return F.cross_entropy(scores, own, reduction="sum"), len(features)


def by_keyword(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    assert model.training
    logits = model(mask=None, tokens=batch["tokens"])
    return F.cross_entropy(logits.mT, batch["targets"], reduction="sum"), _count(batch)


def calls_twice(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    total = model(batch["tokens"]).sum() + model(batch["tokens"]).sum()
    return total, 1


def calls_never(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return torch.zeros((), requires_grad=True), 1


def penalty(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return sum(p.square().sum() for p in model.parameters()), 1


def mean_only(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["tokens"]).mean()


def mean_as_sum(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(model(batch["tokens"]).mT, batch["targets"]).double(), _count(batch)


def no_sum(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(batch["tokens"]), 1


def count_of_model(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    outputs = model(batch["tokens"])
    return outputs.sum(), outputs.square().sum()


def nothing_counts(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(batch["tokens"]).sum() * 0, 0


def not_finite(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(batch["tokens"]).sum() * torch.inf, 1


def _count(batch: dict[str, Tensor]) -> Tensor:
    return (batch["targets"] != -100).sum()


LOSSES = {
    "tokens": token_loss,
    "regression": regression,
    "contrast": contrast,
    "by_keyword": by_keyword,
    "calls_twice": calls_twice,
    "calls_never": calls_never,
    "penalty": penalty,
    "mean_only": mean_only,
    "mean_as_sum": mean_as_sum,
    "no_sum": no_sum,
    "count_of_model": count_of_model,
    "nothing_counts": nothing_counts,
    "not_finite": not_finite,
}


def main(output: str, options: Options) -> None:
    run = meshtrain.Run(
        options.layout,
        global_size=options.global_size,
        micro_size=options.micro_size,
        clip_norm=options.clip_norm,
        precision=options.precision,
        schedule=options.schedule,
        every=options.every,
        output=output,
    )
    model = make_model(options)
    optimizer: Any = {"name": options.optimizer, **options.optimizer_options}
    if hasattr(torch.optim, options.optimizer):
        make_optimizer = getattr(torch.optim, options.optimizer)
        optimizer = make_optimizer(model.parameters(), **options.optimizer_options)
    data = make_data(seed=2 + run.job.rank * options.data_of_rank)
    spreading: dict[str, Any] = {}
    if options.tp_plan:
        spreading["tp_plan"] = TP_PLAN
    if options.sample:
        spreading["sample"] = (data[0]["tokens"][None], None)[: 1 + (options.model == "blocks")]
    model, optimizer = run.prepare(model, optimizer, **spreading)

    scheduler = ExponentialLR(optimizer, 0.5) if options.scheduler else None

    losses = []
    steps = []
    for step, batch in run.steps(data, steps=options.steps):
        if step == 3 and run.job.rank == 0:
            act(options.third_step, Path(output))
        while scheduler is not None and scheduler.last_epoch < step - 1:
            scheduler.step()
        loss = run.backward(LOSSES[options.loss], batch)
        run.update(optimizer)
        if step == 3 and options.third_step == "leave":
            break
        steps.append(step)
        losses.append(loss.item())
    run.say(json.dumps({"steps": steps, "losses": losses}))


def act(what: str, output: Path) -> None:
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ZeroDivisionError("planted")
    if what == "stop":
        (output / "STOP").touch()
    if what == "signal":
        os.kill(os.getpid(), signal.SIGUSR1)


if __name__ == "__main__":
    main(sys.argv[1], Options(**json.loads(sys.argv[2])))
