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

SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "vocab_size": 16}
TWO_STAGES = [(0, 2), (2, 5)]
MODEL = "tests/models/between_blocks.py"


def inputs() -> tuple[Tensor | None, ...]:
    return torch.zeros(2, 6, dtype=torch.int64), torch.arange(6)[None].expand(2, -1), None


def check(
    tweak: str, bounds: Sequence[tuple[int, int]] = TWO_STAGES, dtype: torch.dtype = torch.float32, **keys: Any
) -> None:
    module = model_file(MODEL)
    with torch.device("meta"):
        model = module.Model(module.Config(**SIZES, num_hidden_layers=2, tweak=tweak, **keys))
    check_forward(model, bounds, inputs(), dtype)


@pytest.mark.parametrize("bounds", [TWO_STAGES, [(0, 1), (1, 4), (4, 5)]])
@pytest.mark.parametrize("tweak", ["none", "inside", "values"])
def test_what_stages_compute_as_it_is_passes(tweak: str, bounds: list[tuple[int, int]]) -> None:
    check(tweak, bounds)
    check(tweak, bounds, hidden_dropout=0.1, tie_word_embeddings=True)


FIRST, SECOND = "block model.layers.0", "block model.layers.1"


@pytest.mark.parametrize(
    ("tweak", "said"),
    [
        ("scale", f"computes something between module model.dropout and {FIRST}."),
        ("in place", f"computes something between module model.dropout and {FIRST}."),
        ("middle", f"computes something between {FIRST} and {SECOND}."),
        ("cap", "computes something behind block lm_head, the last."),
        ("ids", "computes something before block model.embed_tokens."),
        ("eval", f"computes something between {SECOND} and block model.norm."),
        ("mask", f"{FIRST} gets, besides its first argument, something that is computed from the activation."),
        ("skip", f"{SECOND} gets, besides its first argument, something that is computed from the activation."),
        ("order", f"{FIRST} runs behind {SECOND}, and blocks() has them the other way round."),
        ("rotary", "computes something between module model.dropout and module rotary."),
    ],
)
def test_what_every_stage_would_do_again_is_refused(tweak: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as told:
        check(tweak)
    assert "move it into the forward of the block" in str(told.value)
    assert "pp: 1" in str(told.value)


def test_a_cast_is_something_where_the_activation_is_of_another_type() -> None:
    check("float")
    with pytest.raises(InputError, match="behind block lm_head"):
        check("float", dtype=torch.float64)


class Images(nn.Module):
    """Convolutions, and a head that takes them as rows: what stands between them does nothing to rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)
        self.head = nn.Linear(2 * 4 * 4, 10)

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.second, self.head]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.second(self.first(images)).flatten(1))


def test_the_shapes_are_those_that_stages_get() -> None:
    def cut(bounds: list[tuple[int, int]]) -> None:
        with torch.device("meta"):
            model = Images()
        check_forward(model, bounds, (torch.zeros(2, 1, 8, 8),), torch.float32)

    cut([(0, 2), (2, 3)])
    with pytest.raises(InputError, match="between block second and block head"):
        cut([(0, 1), (1, 3)])


class Asks(Images):
    """Reads a value, which the meta device has none of, and fails on what another stage would get."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        assert x.shape[1] == 2 * int(images.abs().sum() * 0 + images.shape[1])
        return x


def test_a_forward_that_fails_is_told() -> None:
    with torch.device("meta"):
        model = Asks()
    with pytest.raises(InputError, match=r"its forward fails behind block first \(AssertionError"):
        check_forward(model, [(0, 1), (1, 3)], (torch.zeros(2, 1, 8, 8),), torch.float32)


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
        first, self.second = self.first, nn.Identity()
        self.head = nn.Identity()
        self.second.forward = lambda x: x + first.weight.sum()  # type: ignore[method-assign]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.second(self.first(images)))


class Words(Images):
    """Its first block gives integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Threshold(0, 0)  # type: ignore[assignment]
        self.second, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)  # type: ignore[assignment]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.second(self.first(images)))


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (Hooked, torch.zeros(2, 1, 8, 8), "it registers a hook on the activation"),
        (
            Refers,
            torch.zeros(2, 1, 8, 8),
            "block second computes with first.weight, which is a parameter of a block of",
        ),
        (Words, torch.zeros(2, 3, dtype=torch.int64), "the first block of a stage, a Embedding gets torch.int64"),
    ],
)
def test_what_no_stage_would_notice_is_refused(kind: type[Images], values: Tensor, said: str) -> None:
    with torch.device("meta"):
        model = kind()
    with pytest.raises(InputError, match=re.escape(said)):
        check_forward(model, [(0, 1), (1, 3)], (values,), torch.float32)


class Borrows(Images):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) @ self.head.weight


@pytest.mark.parametrize(("kind", "names"), [(Images, []), (Refers, ["first"]), (Borrows, ["head"]), (Asks, [])])
def test_blocks_of_whose_parameters_others_make_use(kind: type[Images], names: list[str]) -> None:
    with torch.device("meta"):
        assert blocks_used_outside(kind(), (torch.zeros(2, 1, 8, 8),)) == (names, [])


class Writes(Images):
    def forward(self, images: Tensor) -> Tensor:
        self.first.weight.data.clamp_(-1, 1)
        self.second.bias.data = self.second.bias.data * 2
        with torch.no_grad():
            self.head.weight[0] = 0
        return super().forward(images)


def test_parameters_that_a_forward_writes_to() -> None:
    with torch.device("meta"):
        model = Writes()
    assert blocks_used_outside(model, (torch.zeros(2, 1, 8, 8),))[1] == ["first.weight", "second.bias", "head.weight"]


def test_it_is_said_by_the_plan_and_by_a_run_before_its_first_step(tmp_path: Path) -> None:
    keys = (f"model.name={MODEL}", "model.hidden_size=8", "model.num_attention_heads=2", "model.tweak=scale")
    keys += ("model.num_key_value_heads=2", "data.seq_len=16", "data.source=text", "data.path=README.md")
    make_plan(QUICKSTART, [*keys, "layout={tp: 2}"])
    with pytest.raises(InputError, match=r"between module model\.dropout and block"):
        make_plan(QUICKSTART, [*keys, "layout={pp: 2}"])
    shared = ("model.name=tests/models/shared_block.py", "model.num_hidden_layers=2")
    with pytest.raises(InputError, match=r"blocks\(\) name model.layers.0 twice"):
        make_plan(QUICKSTART, [key for key in (*keys, *shared) if key != "model.tweak=scale"] + ["layout={pp: 2}"])
    more = ("layout={pp: 2}", f"train.output={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}")
    done = forked(2, "-m", "meshtrain.train", QUICKSTART, *keys, *more)
    assert done.status == 2
    assert done.err.count("the model cannot be cut into stages") == 1, "told once for all ranks"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
