"""Models with something around their blocks (`tests/models/unchanged.py`) train in a pipeline as in
one process, or are refused with the place."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.config import Config
from meshtrain.errors import InputError
from meshtrain.job.locate import model_file
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.modeling.build import build_model
from meshtrain.pipeline.engine import Pipeline, shapes_of
from meshtrain.pipeline.probe import check_forward
from tests.comparing import ALONE, CPU, gradients, same, same_gradients
from tests.parity.experiments import QUICKSTART
from tests.pipeline.steps import Step, train

FILE = "tests/models/unchanged.py"
IMAGES = "tests/models/unchanged_images.py"


def of_kind(kind: str, **keys: Any) -> str:
    others = "".join(f", {key}: {value}" for key, value in keys.items())
    return f"model={{name: {FILE}, kind: {kind}{others}}}"


def compare_training(mesh: Mesh, schedule: str, *overrides: str, microbatches: int = 3) -> None:
    """Losses and gradient norms of four updates, with the run's dropout."""
    model, numbers = train(mesh, schedule, microbatches, *overrides)
    _, expected = train(ALONE, "1f1b", microbatches, *overrides)
    same(torch.tensor(numbers), torch.tensor(expected), tolerance=1e-10)
    assert isinstance(model, Pipeline)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["nanogpt", "tuples", "gpt2", "gemma2"])
def test_a_language_model_trains_as_in_one_process(pp: Mesh, kind: str) -> None:
    compare_training(pp, "1f1b", of_kind(kind))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("keys", ["parallel.recompute=full", "pipeline.split=[1, 3]"])
def test_with_other_options(pp: Mesh, keys: str) -> None:
    compare_training(pp, "1f1b", of_kind("nanogpt"), keys)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["zbv", "interleaved-zb"])
@pytest.mark.parametrize("kind", ["nanogpt", "tuples"])
def test_on_schedules_that_split_backwards(pp: Mesh, kind: str, schedule: str) -> None:
    compare_training(pp, schedule, of_kind(kind))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["nanogpt", "tuples"])
def test_on_four_ranks_with_two_stages_each(pp: Mesh, kind: str) -> None:
    compare_training(pp, "interleaved-1f1b", of_kind(kind, num_hidden_layers=8), microbatches=4)


@pytest.mark.ranks(4)
def test_beside_shards(job: Job) -> None:
    mesh = build_mesh(Layout({"pp": 2, "dp_shard": 2}))
    model, numbers = train(mesh, "1f1b", 2, of_kind("nanogpt", dropout=0))
    assert isinstance(model, Pipeline)
    # Both data ranks have the same samples here.
    _, expected = train(ALONE, "1f1b", 2, of_kind("nanogpt", dropout=0))
    same(torch.tensor(numbers), torch.tensor(expected), tolerance=1e-10)


@pytest.mark.ranks(4)
def test_beside_layers_that_are_split(job: Job) -> None:
    """Embedding and head too, which are outside of blocks: they exchange nothing in the stages of
    others."""
    mesh = build_mesh(Layout({"pp": 2, "tp": 2}))
    compare_training(
        mesh, "1f1b", of_kind("nanogpt"), "parallel.sequence_parallel=false", microbatches=2
    )


@pytest.mark.ranks(2)
def test_the_first_loss_in_16_bits_is_that_of_one_process(pp: Mesh) -> None:
    """Stand-ins have the dtype in which the run computes, which angles follow."""
    keys = (of_kind("gemma2"), "train.precision=bfloat16")
    _, numbers = train(pp, "1f1b", 3, *keys)
    _, expected = train(ALONE, "1f1b", 3, *keys)
    assert numbers[0][0] == expected[0][0]


class Classified(Step):
    """Microbatches of classes."""

    def __init__(self, inputs: list[Tensor], classes: int) -> None:
        super().__init__(len(inputs))
        self.values = inputs
        draws = torch.Generator().manual_seed(1)
        self.targets = [torch.randint(classes, (len(x),), generator=draws) for x in inputs]

    def shapes(self, microbatch: int) -> Any:
        return shapes_of(self.inputs(microbatch))

    def inputs(self, microbatch: int) -> tuple[Tensor | None, ...]:
        return (self.values[microbatch],)

    def loss(self, microbatch: int, output: Tensor) -> Tensor:
        self.losses[microbatch] = sample_losses(output, self.targets[microbatch]).sum()
        return self.losses[microbatch]


def images(count: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    return [torch.rand(2, 1, 8, 8, generator=draws, dtype=torch.float64) for _ in range(count)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_a_classifier_has_the_gradients_of_one_process(pp: Mesh, kind: str) -> None:
    keys = [
        f"model={{name: {IMAGES}}}" if kind == "vit" else of_kind(kind),
        "data.source=digits" if kind == "vit" else "data.source=tokens",
        *(["data.path=tests"] if kind == "bert" else []),
        "train.precision=float64",
        "batch.global_size=6",
        "batch.micro_size=2",
    ]
    model = build_model(Config.load(QUICKSTART, [*keys, "layout={pp: 2}"]), pp, CPU)
    assert isinstance(model, Pipeline)
    step = Classified(Step(3).tokens if kind == "bert" else images(3), 3 if kind == "bert" else 10)
    model.run(step)
    alone = build_model(Config.load(QUICKSTART, [*keys, "layout={pp: 1}"]), ALONE, CPU)
    for i in range(3):
        loss = step.loss(i, alone(*step.inputs(i)))
        loss.backward()
    for stage in model.stages():
        same_gradients(stage, gradients(alone))


# What is refused ----------------------------------------------------------------------------------


def check(bounds: list[tuple[int, int]], **keys: Any) -> None:
    module = model_file(FILE)
    with torch.device("meta"):
        model = module.Model(module.Config(**keys))
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    check_forward(model, bounds, (tokens, torch.zeros_like(tokens), None), torch.float32)


@pytest.mark.parametrize(
    ("tweak", "message"),
    [
        ("skip", "block transformer.h.3 gets something computed from the parameter transformer.w"),
        ("read", "reads values of"),
        ("embedding kept", "what the model returns is computed from"),
    ],
)
def test_what_a_stage_lacks_is_refused(tweak: str, message: str) -> None:
    with pytest.raises(
        InputError, match=rf"cannot be cut into stages: .*{re.escape(message)}.*use pp: 1"
    ):
        check([(0, 2), (2, 4)], tweak=tweak)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_images_have_the_dtype_of_the_run(dtype: torch.dtype) -> None:
    """What runs before the first block is a stand-in in the stages behind it, of that dtype."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(1, 4, 2, 2)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def blocks(self) -> list[nn.Module]:
            return list(self.layers)

        def forward(self, images: Tensor) -> Tensor:
            x = self.patches(images).flatten(2).mean(2)
            for layer in self.layers:
                x = layer(x)
            return x

    with torch.device("meta"):
        model = Patches()
    check_forward(model, [(0, 1), (1, 2)], (torch.zeros(2, 1, 8, 8),), dtype)


def test_what_no_cut_separates_passes() -> None:
    check([(0, 3), (3, 4)], tweak="embedding again")
    check([(0, 1), (1, 2), (2, 3), (3, 4)])
    check([(0, 1), (1, 2), (2, 3), (3, 4)], kind="tuples")


@pytest.mark.ranks(2)
def test_an_embedding_that_is_used_again_is_a_tied_weight(pp: Mesh) -> None:
    compare_training(pp, "1f1b", of_kind("nanogpt", tweak="embedding again"))
