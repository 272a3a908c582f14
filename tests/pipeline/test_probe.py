"""Models that stages would not compute as they are: refused before anything runs, with the place."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.cli.plan import make_plan
from meshtrain.config.locate import model_file
from meshtrain.errors import InputError
from meshtrain.pipeline.probe import blocks_used_outside, check_forward
from tests.launching import forked
from tests.parity.experiments import QUICKSTART
from tests.pipeline.formulas import table

SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "vocab_size": 16}
TWO_STAGES = [(0, 2), (2, 5)]
MODEL = "tests/models/between_blocks.py"
IMAGES = torch.zeros(2, 1, 8, 8)


def check_llama(
    tweak: str, bounds: Sequence[tuple[int, int]] = TWO_STAGES, dtype: torch.dtype = torch.float32, **keys: Any
) -> None:
    module = model_file(MODEL)
    with torch.device("meta"):
        model = module.Model(module.Config(**SIZES, num_hidden_layers=2, tweak=tweak, **keys))
    inputs = torch.zeros(2, 6, dtype=torch.int64), torch.arange(6)[None].expand(2, -1), None
    check_forward(model, bounds, inputs, dtype)


@pytest.mark.parametrize("bounds", [TWO_STAGES, [(0, 1), (1, 4), (4, 5)]])
@pytest.mark.parametrize("tweak", ["none", "inside", "values"])
def test_what_stages_compute_as_it_is_passes(tweak: str, bounds: list[tuple[int, int]]) -> None:
    check_llama(tweak, bounds)
    check_llama(tweak, bounds, hidden_dropout=0.1, tie_word_embeddings=True)


def test_what_every_stage_would_do_again_is_refused() -> None:
    for tweak, message in table("refused_models").items():
        with pytest.raises(InputError, match=f"{re.escape(message)}.* move it into the forward of the block.*pp: 1"):
            check_llama(tweak)


def test_a_cast_is_something_where_the_activation_is_of_another_type() -> None:
    check_llama("float")
    with pytest.raises(InputError, match="behind block lm_head"):
        check_llama("float", dtype=torch.float64)


class Images(nn.Module):
    """Convolutions, and a head that takes them as rows: what stands between them does nothing to rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Conv2d(1, 2, 3)
        self.second: nn.Module = nn.Conv2d(2, 2, 3)
        self.head: nn.Module = nn.Linear(2 * 4 * 4, 10)

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.second, self.head]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.second(self.first(images)).flatten(1))


class Asks(Images):
    """Reads a value, which the meta device has none of, and fails on what another stage would get."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        assert x.shape[1] == 2 * int(images.abs().sum() * 0 + images.shape[1])
        return x


class Hooked(Images):
    """Scales the gradient between blocks, and without a look at the activation."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.second(self.first(images))
        if x.requires_grad:
            x.register_hook(lambda grad: grad / 2)
        return self.head(x)


class Refers(Images):
    """Its second block computes with the weight of the first, which it does not hold."""

    def __init__(self) -> None:
        super().__init__()
        first, self.second, self.head = self.first, nn.Identity(), nn.Flatten(1)
        self.second.forward = lambda x: x + first.weight.sum()  # type: ignore[method-assign]


class Borrows(Images):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) @ self.head.weight


class Writes(Images):
    def forward(self, images: Tensor) -> Tensor:
        self.first.weight.data.clamp_(-1, 1)
        self.second.bias.data = self.second.bias.data * 2
        with torch.no_grad():
            self.head.weight[0] = 0
        return super().forward(images)


class Words(Images):
    """Its first block gives integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Threshold(0, 0), nn.Embedding(9, 4), nn.Flatten(1)


def on_meta(kind: type[Images]) -> Images:
    with torch.device("meta"):
        return kind()


def test_the_shapes_are_those_that_stages_get() -> None:
    check_forward(on_meta(Images), [(0, 2), (2, 3)], (IMAGES,), torch.float32)
    with pytest.raises(InputError, match="between block second and block head"):
        check_forward(on_meta(Images), [(0, 1), (1, 3)], (IMAGES,), torch.float32)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Asks, IMAGES, "its forward fails behind block first (AssertionError"),
        (Hooked, IMAGES, "it registers a hook on the activation"),
        (Refers, IMAGES, "block second computes with first.weight, which is a parameter of a block of"),
        (Words, torch.zeros(2, 3, dtype=torch.int64), "the first block of a stage, a Embedding gets torch.int64"),
    ],
)
def test_what_no_stage_would_notice_is_refused(kind: type[Images], values: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        check_forward(on_meta(kind), [(0, 1), (1, 3)], (values,), torch.float32)


def test_blocks_of_whose_parameters_others_make_use_and_parameters_that_are_written_to() -> None:
    expected: dict[type[Images], tuple[list[str], list[str]]] = {
        Images: ([], []),
        Asks: ([], []),
        Refers: (["first"], []),
        Borrows: (["head"], []),
        Writes: (["first", "second", "head"], ["first.weight", "second.bias", "head.weight"]),
    }
    assert {kind: blocks_used_outside(on_meta(kind), (IMAGES,)) for kind in expected} == expected


def test_it_is_said_by_the_plan_and_by_a_run_before_its_first_step(tmp_path: Path) -> None:
    sizes = ("model.hidden_size=8", "model.num_attention_heads=2", "model.num_key_value_heads=2", "data.seq_len=16")
    keys = (*sizes, "data.source=text", "data.path=README.md", f"model.name={MODEL}", "model.tweak=scale")
    make_plan(QUICKSTART, [*keys, "layout={tp: 2}"])
    with pytest.raises(InputError, match=r"between module model\.dropout and block"):
        make_plan(QUICKSTART, [*keys, "layout={pp: 2}"])
    shared = ("model.name=tests/models/unusual_layers.py", "model.kind=one module", "layout={pp: 2}")
    with pytest.raises(InputError, match=r"blocks\(\) name model.layers.0 twice"):
        make_plan(QUICKSTART, [*sizes, *shared])
    more = ("layout={pp: 2}", f"train.output={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}")
    job = forked(2, "-m", "meshtrain.train", QUICKSTART, *keys, *more)
    assert job.status == 2
    assert job.err.count("the model cannot be cut into stages") == 1, "told once for all ranks"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
