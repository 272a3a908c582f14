"""Models that stages would not compute as they are: refused before anything runs, with the
place."""

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.cli.plan import make_plan
from meshtrain.errors import InputError
from meshtrain.job.locate import model_file
from meshtrain.parallel.options import ParallelOptions
from meshtrain.parallel.verify import Moment, Subject, check_model
from meshtrain.pipeline.probe import UsedOutside, blocks_used_outside, check_forward, outline_of
from meshtrain.pipeline.stage import call_stage, keep_stage
from tests.comparing import ALONE
from tests.launching import forked
from tests.parity.experiments import QUICKSTART
from tests.pipeline.formulas import table

SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "vocab_size": 16,
}
TWO_STAGES = [(0, 2), (2, 5)]
MODEL = "tests/models/between_blocks.py"
PASS = [
    "none",
    "inside",
    "values",
    "rotary",
    "scale",
    "in_place",
    "middle",
    "cap",
    "ids",
    "eval",
    "mask",
    "float",
]
IMAGES = torch.zeros(2, 1, 8, 8)


def check_llama(
    tweak: str,
    bounds: Sequence[tuple[int, int]] = TWO_STAGES,
    dtype: torch.dtype = torch.float32,
    **keys: Any,
) -> None:
    module = model_file(MODEL)
    with torch.device("meta"):
        model = module.Model(module.Config(**SIZES, num_hidden_layers=2, tweak=tweak, **keys))
    inputs = torch.zeros(2, 6, dtype=torch.int64), torch.arange(6)[None].expand(2, -1), None
    check_forward(model, bounds, inputs, dtype)


@pytest.mark.parametrize("bounds", [TWO_STAGES, [(0, 1), (1, 4), (4, 5)]])
@pytest.mark.parametrize("tweak", PASS)
def test_what_stages_compute_as_it_is_passes(tweak: str, bounds: list[tuple[int, int]]) -> None:
    tweak = tweak.replace("_", " ")
    check_llama(tweak, bounds)
    check_llama(tweak, bounds, hidden_dropout=0.1, tie_word_embeddings=True)


def test_blocks_that_run_otherwise_are_refused() -> None:
    for tweak, message in table("refused_models").items():
        with pytest.raises(InputError, match=f"cannot be cut.*{re.escape(message)}.*use pp: 1"):
            check_llama(tweak)


class Images(nn.Module):
    """Convolutions, and a head that takes them as rows: what stands between them does nothing to
    rows."""

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
    """Reads a value, which the meta device has none of."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images * float(images.new_ones(1).sum()))
        return self.head(self.second(x).flatten(1))


class Reads(Images):
    """Its blocks get a number that it reads of the first one's result, with or without an
    operator."""

    def __init__(self, read: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.read = read
        self.second = Times()

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        return self.head(self.second(x, self.read(x.detach())).flatten(1))


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(2, 2, 3)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return self.inner(x) * factor


class Hooked(Images):
    """Scales the gradient between blocks, and without a look at the activation."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.second(self.first(images))
        if x.requires_grad:
            x.register_hook(lambda grad: grad / 2)
        return self.head(x.flatten(1))


class Refers(Images):
    """Its second block computes with the weight of the first, which it does not hold."""

    def __init__(self) -> None:
        super().__init__()
        first, self.second, self.head = self.first, nn.Identity(), nn.Flatten(1)
        self.second.forward = lambda x: x + first.weight.sum()  # type: ignore[method-assign]


class Lists(Images):
    """Its second block is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.ModuleList([nn.Conv2d(2, 2, 3)])

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.second[0](self.first(images)).flatten(1))


class Borrows(Images):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.head.weight.sum()


class ReadsAndBorrows(Borrows):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images + float(images.sum()))


class Reversible(Images):
    """Its convolutions return records, and have a backward of their own, which calls what is inside
    of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Recorded(1), Recorded(2)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(Backwards.apply(images * self.scale, self).flatten(1))


class Recorded(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, 2, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.inner(x)}


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Reversible) -> Tensor:
        ctx.model = model
        ctx.save_for_backward(x)
        return model.second(model.first(x)["x"])["x"]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.model.second.inner(ctx.model.first.inner(x))
        y.backward(grad)
        return x.grad, None


class Writes(Images):
    def forward(self, images: Tensor) -> Tensor:
        self.first.weight.data.clamp_(-1, 1)
        self.second.bias.data = self.second.bias.data * 2
        with torch.no_grad():
            self.head.weight[0] = 0
        return super().forward(images)


def on_meta(kind: type[Images]) -> Images:
    with torch.device("meta"):
        return kind()


class Keeps(Images):
    """Its head gets a result of the first block too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Adds()

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        return self.head(self.second(x).flatten(1), x)


class Adds(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2 * 4 * 4, 10)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return super().forward(x) + first.mean()


class Fills(Images):
    """Writes what a stage lacks into a tensor that it has, which its last block gets."""

    def forward(self, images: Tensor) -> Tensor:
        kept = torch.zeros(images.shape[0])
        x = self.first(images)
        kept += x.mean((1, 2, 3))
        return self.head(self.second(x).flatten(1)) + kept[:, None]


class Scatters(Images):
    """Draws random numbers before its first block, for its last."""

    def forward(self, images: Tensor) -> Tensor:
        noise = torch.rand(len(images), 1)
        return self.head(self.second(self.first(images)).flatten(1)) + noise


class Bags(Images):
    """Its first block returns an object."""

    def __init__(self) -> None:
        super().__init__()
        first = self.first
        self.first = nn.Identity()
        self.first.forward = lambda x: Bag(first(x))  # type: ignore[method-assign]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.second(self.first(images).x).flatten(1))


class Bag:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class ReadsOfFirst(Images):
    """Its head gets a number of the first block's, which no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_buffer("table", torch.ones(1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.second(self.first(images))
        return self.head(x.flatten(1) * self.first.table)


class Drops(Images):
    def forward(self, images: Tensor) -> Tensor:
        return self.first(images)


@pytest.mark.parametrize("kind", [Images, Asks, Hooked, Borrows, ReadsAndBorrows])
def test_a_forward_with_work_between_its_blocks_passes(kind: type[Images]) -> None:
    check_forward(on_meta(kind), [(0, 1), (1, 3)], (IMAGES,), torch.float32)
    check_forward(on_meta(kind), [(0, 1), (1, 2), (2, 3)], (IMAGES,), torch.float32)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Lists, "block second, a ModuleList, has no forward"),
        (Refers, "block second computes with first.weight, which is a parameter of a block of"),
        (Keeps, "block head gets something computed from what block first returns"),
        (Fills, "behind block first it writes something computed from what block first returns"),
        (Scatters, "what the model returns is computed from random numbers"),
        (Bags, "block first returns a Bag, and between stages tensors"),
        (Drops, "its forward does not call block second"),
        (Reversible, "block first runs inside a torch.autograd.Function"),
        (ReadsOfFirst, "block head gets something computed from the buffer first.table"),
    ],
)
def test_what_a_stage_lacks_is_refused(kind: type[Images], message: str) -> None:
    bounds = [(0, 1), (1, 3)] if kind is Refers else [(0, 2), (2, 3)]
    with pytest.raises(InputError, match=rf"cannot be cut into stages: .*{re.escape(message)}"):
        check_forward(on_meta(kind), bounds, (IMAGES,), torch.float32)


def test_frozen_blocks_may_have_a_backward_of_their_own() -> None:
    """In which nothing is computed."""
    model = on_meta(Reversible)
    for part in (model.first, model.second):
        part.requires_grad_(False)
    check_forward(model, [(0, 1), (1, 3)], (IMAGES,), torch.float32)


@pytest.mark.parametrize(
    "read", [lambda x: float(x.sum()), lambda x: x.numpy().max(), lambda x: x.tolist()[0][0][0][0]]
)
def test_a_number_is_read_where_its_tensor_is(read: Callable[[Tensor], float]) -> None:
    """Behind the first block, in the stage that receives what it returns; in no later one."""
    with torch.device("meta"):
        model = Reads(read)
    check_forward(model, [(0, 1), (1, 3)], (IMAGES,), torch.float32)
    with pytest.raises(InputError, match=r"behind block first (it reads values of|its forward f)"):
        check_forward(model, [(0, 2), (2, 3)], (IMAGES,), torch.float32)


def test_blocks_of_whose_parameters_others_make_use_and_parameters_that_are_written_to() -> None:
    written = ["first.weight", "second.bias", "head.weight"]
    expected: dict[type[Images], UsedOutside] = {
        Images: UsedOutside([], [], []),
        Asks: UsedOutside([], [], []),
        Lists: UsedOutside(["second"], [], []),
        ReadsAndBorrows: UsedOutside(["head"], [], []),
        Refers: UsedOutside(["first"], [], []),
        Borrows: UsedOutside(["head"], [], []),
        Reversible: UsedOutside(["first", "second"], ["first", "second"], []),
        Writes: UsedOutside(["first", "second", "head"], [], written),
    }
    assert {kind: blocks_used_outside(on_meta(kind), (IMAGES,)) for kind in expected} == expected


def test_a_backward_of_the_models_own_is_not_cast() -> None:
    subject = Subject(
        model=Reversible(),
        layout=ALONE.layout,
        mesh=ALONE,
        options=ParallelOptions(precision="bfloat16"),
        copy=lambda: on_meta(Reversible),
        inputs=(IMAGES,),
    )
    with pytest.raises(InputError, match=r"block first has a backward of the model's own.*float32"):
        check_model(Moment.PLAIN, subject)


class Outside(nn.Module):
    """Layers that get the result of a module outside blocks, to which it gives the activation."""

    def __init__(self, beside: nn.Module) -> None:
        super().__init__()
        self.embed, self.beside = nn.Embedding(9, 4), beside
        self.layers: Any = nn.ModuleList(Scaled() for _ in range(2))

    def blocks(self) -> list[nn.Module]:
        return [self.embed, *self.layers]

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(input=tokens)
        scale = self.beside(x, place=positions)
        for layer in self.layers:
            x = layer(scale=scale, hidden=x)
        return x


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        return super().forward(hidden) * scale


class Gives(nn.Module):
    """The result of a function of the activation and of the places of tokens."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any], persistent: bool = False) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.ones(3), persistent=persistent)

    def forward(self, x: Tensor, place: Tensor) -> Any:
        return self.function(x, place) * self.table.sum()


PLACES = torch.arange(3).expand(2, 3)
OF_NO_VALUES: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, place: place[..., None].to(x.dtype),
    lambda x, place: torch.zeros_like(x) + x.shape[-1] + place[..., None],
    lambda x, place: (
        place[..., None].to(x.dtype) * (1 + int(place.max()))
    ),  # as rotary angles that grow with the length
]


@pytest.mark.parametrize("function", OF_NO_VALUES)
def test_a_module_that_uses_no_value_of_the_activation_runs_in_each_stage(function: Any) -> None:
    torch.manual_seed(0)
    whole = Outside(Gives(function))
    with torch.device("meta"):
        on_meta = Outside(Gives(function))
    check_forward(on_meta, [(0, 1), (1, 2), (2, 3)], (PLACES, PLACES), torch.float32)
    outline = outline_of(copy.deepcopy(whole), (PLACES, PLACES))
    x: Any = None
    for number in range(3):
        stage = copy.deepcopy(whole)
        keep_stage(
            stage, number, number + 1, outline, device=torch.device("cpu"), dtype=torch.float32
        )
        assert list(stage.state_dict()) == [
            name for name in whole.state_dict() if name in stage.state_dict()
        ]
        x = call_stage(stage, (PLACES, PLACES), x)
    assert torch.equal(x, whole(PLACES, PLACES))


@pytest.mark.parametrize(
    ("function", "persistent", "source"),
    [
        (lambda x, _: x.mean(), False, "what block embed returns"),
        (
            lambda x, _: torch.rand_like(x),
            False,
            "what block embed returns",
        ),  # others in each stage
        (OF_NO_VALUES[0], True, "the buffer beside.table"),  # which would be in two stages' files
    ],
)
def test_a_module_that_uses_values_draws_or_stores_runs_in_one(
    function: Any, persistent: bool, source: str
) -> None:
    """And gives the layers of a later stage nothing."""
    with torch.device("meta"):
        model = Outside(Gives(function, persistent))
    with pytest.raises(InputError, match=rf"block layers\.1 gets something computed from {source}"):
        check_forward(model, [(0, 2), (2, 3)], (PLACES, PLACES), torch.float32)


def test_it_is_said_by_the_plan_and_by_a_run_before_its_first_step(tmp_path: Path) -> None:
    sizes = (
        "model.hidden_size=8",
        "model.num_attention_heads=2",
        "model.num_key_value_heads=2",
        "data.seq_len=16",
    )
    keys = (
        *sizes,
        "data.source=text",
        "data.path=README.md",
        f"model.name={MODEL}",
        "model.tweak=order",
    )
    make_plan(QUICKSTART, [*keys, "layout={tp: 2}"])
    with pytest.raises(InputError, match=r"block model\.layers\.0 runs behind block model\.lay"):
        make_plan(QUICKSTART, [*keys, "layout={pp: 2}"])
    shared = (
        "model.name=tests/models/unusual_layers.py",
        "model.kind=one module",
        "layout={pp: 2}",
    )
    with pytest.raises(InputError, match=r"blocks\(\) name model.layers.0 twice"):
        make_plan(QUICKSTART, [*sizes, *shared])
    more = (
        "layout={pp: 2}",
        f"train.output={tmp_path / 'run'}",
        f"data.cache={tmp_path / 'cache'}",
    )
    job = forked(2, "-m", "meshtrain.train", QUICKSTART, *keys, *more)
    assert job.status == 2
    assert job.err.count("the model cannot be cut into stages") == 1, "told once for all ranks"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
