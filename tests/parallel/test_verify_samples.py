"""Over data ranks, a sample's result may not depend on those beside it or on forwards before, and
no forward may change what each rank, or a second run of a block, would change."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshtrain
from meshtrain.errors import AgreedError, InputError
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.loss import attach, seen_terms
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.parallel.options import ParallelOptions
from meshtrain.parallel.parallelize import parallelize
from meshtrain.parallel.verify import Moment, Subject, check_model
from meshtrain.parallel.verify.side_effects import refuse_side_effects
from tests.comparing import ALONE, D, V
from tests.launching import forked
from tests.parallel.test_verify import Around, Mixture
from tests.parity.experiments import MODELS, QUICKSTART, SMALL

pytestmark = pytest.mark.usefixtures("float64")


class Beside(nn.Module):
    """Does something with all samples of a batch."""

    def __init__(self, action: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.action = nn.Linear(D, D), action

    def forward(self, x: Tensor) -> Tensor:
        return self.action(self, torch.tanh(self.layer(x)))


class Blocks(Around):
    """The given part is a block; takes a second input, which may be None."""

    def blocks(self) -> list[nn.Module]:
        return [self.inner]

    def forward(self, inputs: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(inputs)


class Borrowing(Blocks):
    """Computes with the weight of its embedding, a block, outside of it."""

    def blocks(self) -> list[nn.Module]:
        return [self.words, self.inner]

    def forward(self, inputs: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.words(inputs) + self.words(torch.arange(inputs.shape[1]))
        return F.linear(self.inner(x), self.words.weight)


@pytest.fixture
def data_ranks(job: Job) -> Mesh:
    return build_mesh(Layout({"dp_replicate": job.world_size}))


def check(model: nn.Module, mesh: Mesh, samples: int = 2, **options: Any) -> str:
    """Why the model is refused, or nothing."""
    sample = (torch.randint(V, (samples, 8)), None)
    settings = ParallelOptions(precision="float64", sample=sample, **options)
    subject = Subject(
        model=model, layout=mesh.layout, mesh=mesh, options=settings, terms=seen_terms
    )
    state = torch.get_rng_state()
    problem = ""
    try:
        check_model(Moment.PLAIN, subject)
    except InputError as error:
        problem = str(error)
    assert torch.equal(torch.get_rng_state(), state)
    return problem


def centre(_: Any, x: Tensor) -> Tensor:
    return x - x.mean((0, 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("action", "words"),
    [
        (centre, "output 0 differs by"),
        (lambda layer, x: x / len(x) if layer.training else x, "output 0 differs "),
        (
            lambda _, x: attach(x, "spread", x.var(0).sum(-1).expand(x.shape[:2])),
            ": spread differs by",
        ),
        (lambda _, x: x * (1 + 2**-8 * (len(x) - 2)), "output 0 differs by 0.0039"),
    ],
)
def test_what_depends_on_other_samples_is_refused(
    data_ranks: Mesh, action: Any, words: str
) -> None:
    problem = check(Blocks(Beside(action)), data_ranks)
    for part in ("inner", words, "use one data rank"):
        assert part in problem


def double_bright(_: Any, x: Tensor) -> Tensor:
    """Samples with a positive mean, if there are any."""
    bright = x.mean((1, 2)) > 0
    return x.index_put((bright,), x[bright] * 2) if bright.any() else x


def add_neighbour(_: Any, x: Tensor) -> Tensor:
    """Takes no batch of three: it is not compared."""
    return x + x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def by_the_weights(sign: int) -> Callable[[Any, Tensor], Tensor]:
    """Differs with one of two draws of weights alone, as if rounding had changed a router's
    choice."""
    return lambda layer, x: x + (len(x) - 2) * (sign * layer.layer.weight[0, 0] > 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "action",
    [
        lambda _, x: attach(x - x.mean(1, keepdim=True), "square", x.square().mean(-1)),
        double_bright,
        lambda _, x: F.dropout(x, 0.5) if x.requires_grad else x,
        add_neighbour,
        lambda _, x: (
            (x * (1 + 2**-8 * (len(x) - 2))).bfloat16().double()
        ),  # which another size rounds in another way
        by_the_weights(1),
        by_the_weights(-1),
    ],
)
def test_what_depends_on_its_sample_alone_is_accepted(data_ranks: Mesh, action: Any) -> None:
    assert check(Blocks(Beside(action)), data_ranks) == ""


@pytest.mark.ranks(2)
def test_other_models_and_settings(data_ranks: Mesh) -> None:
    dependent = Blocks(Beside(centre))
    assert check(Blocks(Mixture(centred=True)), data_ranks) == ""
    assert check(Borrowing(Beside(lambda _, x: x - x.mean(1, keepdim=True))), data_ranks) == ""
    assert "output 0 differs" in check(Borrowing(Beside(centre)), data_ranks)
    assert check(dependent, data_ranks, verify=False) == ""
    assert check(dependent, data_ranks, samples=1) == ""
    assert check(dependent, ALONE, recompute="full") == "", "one process may mix samples"
    sample = (torch.randint(V, (2, 8)),)
    with pytest.raises(InputError, match=r"inner|the model's output"):
        meshtrain.parallelize(
            Around(Beside(centre)), data_ranks, precision="float64", sample=sample
        )


def multiply_by_calls(layer: Any, x: Tensor) -> Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1
    return x * layer.calls


def subtract_average(layer: Any, x: Tensor) -> Tensor:
    layer.mean = 0.9 * getattr(layer, "mean", 0.0) + 0.1 * layer.layer.weight.detach().norm()
    return x - layer.mean


def cache(layer: Any, x: Tensor) -> Tensor:
    """Keeps a table for each length, the last input, and a counter from which nothing follows."""
    layer.tables = getattr(layer, "tables", {})
    table = layer.tables.setdefault(x.shape[1], torch.arange(x.shape[1])[:, None].to(x.dtype))
    layer.last, layer.calls = x, getattr(layer, "calls", 0) + 1
    return x * table


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_depends_on_forwards_before_is_refused(data_ranks: Mesh, recompute: str) -> None:
    """Over data ranks, and in one process where blocks run again."""
    mesh = data_ranks if recompute == "none" else ALONE
    for action in (multiply_by_calls, subtract_average):
        problem = check(Blocks(Beside(action)), mesh, recompute=recompute)
        assert "in a second forward of the same samples: inner: output 0" in problem
        assert "recompute: none" in problem
    assert check(Blocks(Beside(cache)), mesh, recompute=recompute) == ""
    assert check(Blocks(Beside(multiply_by_calls)), ALONE) == "", "one process may count"


class Caching(nn.Module):
    """Appends to a list that it is given, as a class of transformers does with its cache of keys
    and values."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(D, D), fails

    def forward(self, x: Tensor, cache: "Cache") -> Tensor:
        cache.append(x)
        assert not self.fails or len(cache) == 1
        return torch.tanh(self.layer(torch.stack(cache).sum(0)))


class Cache(list):
    """No list of which torch copies what is in it."""


class WithCache(Blocks):
    def forward(self, inputs: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.head(self.inner(self.words(inputs), Cache()))


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_that_changes_what_it_is_given_is_not_recomputed(fails: bool) -> None:
    model = WithCache(Caching(fails))
    assert check(model, ALONE) == ""
    problem = check(model, ALONE, recompute="full")
    words = "inner fails where its first forward does not" if fails else "inner: output 0 differs"
    assert f"would compute something else than before: {words}" in problem
    assert "recompute: none" in problem


def test_a_run_is_refused_before_its_first_step(tmp_path: Path) -> None:
    keys = (
        *SMALL,
        f"model.name={MODELS / 'mixing.py'}",
        "model.learned_positions=0",
        "layout={tp: 2}",
        "parallel.sequence_parallel=true",
    )
    keys += (f"data.cache={tmp_path / 'cache'}",)
    refused = forked(
        2, "-m", "meshtrain.train", QUICKSTART, *keys, f"train.output={tmp_path / 'run'}"
    )
    assert refused.status == 2
    assert (
        refused.err.count(
            "does not compute what it does on one device: blocks_.0: input 0 differs by"
        )
        == 1
    )
    assert (
        "Use parallel.sequence_parallel: false, which passes this check, or mend the model"
        in refused.err
    )
    assert "parallel.verify: false" in refused.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# What a forward changes besides its output --------------------------------------------------------


# Of two copies, one of which knows nothing of the other.
RANKS: Any = SimpleNamespace(
    size=lambda *axes: 1 if axes == ("pp",) else 2, uses_fsdp=False, world=None
)


class Changing(nn.Module):
    """A layer whose forward in training does something to its own tensors."""

    def __init__(self, change: Callable[["Changing"], None]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(2, 2), change
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unit", torch.tensor([0.6, 0.8]))
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("cache", torch.zeros(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("nan", torch.full((2,), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.change(self)
        return self.layer(x)


CHANGES: dict[str, Callable[[Changing], object]] = {
    "count": lambda layer: layer.count.add_(1),
    "unit": lambda layer: layer.unit.data.copy_(torch.tensor([1.0, 0.0])),
    "turns": lambda layer: setattr(layer, "turns", 1j + layer.turns),
    "nan": lambda layer: setattr(layer, "nan", torch.cat([layer.nan, layer.nan])),
    "layer.bias": lambda layer: layer.layer.bias.data.zero_(),
}
HARMLESS: dict[str, Callable[[Changing], object]] = {
    "nothing": lambda layer: None,
    "cache": lambda layer: setattr(layer, "cache", torch.ones(3)),
    "scratch": lambda layer: layer.scratch.add_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_each_rank_would_change_is_refused(name: str) -> None:
    model, x = nn.Sequential(Changing(CHANGES[name])), torch.ones(1, 2)
    refuse_side_effects(model, RANKS, ())
    model.eval()(x)
    refusal = rf"changes 0\.{name} in training, and with several data ranks or cp each rank"
    with pytest.raises(AgreedError, match=refusal):
        model.train()(x)


@pytest.mark.parametrize("name", HARMLESS)
def test_caches_and_what_is_no_state_may_change(name: str) -> None:
    model = nn.Sequential(Changing(HARMLESS[name]))
    refuse_side_effects(model, RANKS, set(model.modules()))
    model(torch.ones(1, 2))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks, "only the first forward is looked at"


def test_a_block_that_runs_again_may_not_count() -> None:
    """Where it does not run again, one process may have its own, as with a batch norm."""

    def placed(recompute: str, verify: bool = True) -> nn.Module:
        model = nn.Sequential(Changing(CHANGES["count"]))
        return parallelize(model, ALONE, precision="float64", recompute=recompute, verify=verify)

    x, refusal = (
        torch.ones(1, 2),
        r"changes 0\.count in training, and a block that is recomputed would change it",
    )
    with pytest.raises(AgreedError, match=refusal):
        placed("full")(x)
    for allowed in (placed("none"), placed("full", verify=False)):
        allowed(x).sum().backward()
