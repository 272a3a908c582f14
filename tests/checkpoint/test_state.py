"""What a checkpoint is made of: every tensor that training changes, once, under one name on every
layout."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from meshtrain.checkpoint.placement import Placement
from meshtrain.checkpoint.state import State, gather_placements
from meshtrain.config import Config
from meshtrain.config.schema import OptimizerSection
from meshtrain.errors import InputError
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.modeling.build import build_model
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel.sharding import shape_of, tensor_spec
from meshtrain.trainer import LossScale
from tests.checkpoint.known import MODEL, OF_4, alone, on
from tests.comparing import ALONE, CPU
from tests.parity.experiments import QUICKSTART


class Model(nn.Module):
    """Tied, frozen and scalar parameters; a buffer that a forward replaces, and one that is no part
    of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gain * self.b(self.a(x))
        self.mean = 0.9 * self.mean + y.detach().mean(0)
        return y


def optimizer_of(model: nn.Module) -> Optimizer:
    return Optimizer(model, OptimizerSection(), ALONE, 10)


def test_names_shapes_and_types() -> None:
    model = Model().double()
    state = State(model, optimizer_of(model), ALONE, alone(), LossScale(CPU))
    trained = {"a.weight": (3, 3), "b.bias": (3,), "gain": ()}
    expected = {f"model.{name}": Placement(shape, "F64") for name, shape in trained.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        expected |= {
            f"optimizer.{name}.{kind}": Placement(shape, "F64") for name, shape in trained.items()
        }
    expected |= {"model.frozen": Placement((2,), "F64"), "model.mean": Placement((3,), "F64")}
    expected |= {name: Placement((), "F32") for name in ("optimizer.step", "loss_scale.value")}
    expected |= {"loss_scale.good": Placement((), "I64")}
    assert state.placements == expected
    assert [held.name for held in state.shards if not held.compared] == ["model.mean"]
    assert sorted(held.name for held in state.shards) == sorted(expected)
    assert all(held.local.dim() > 0 for held in state.shards), "scalars have one dim"


def test_the_memory_is_that_of_the_training() -> None:
    """Also where a forward has put another tensor in the place of a buffer, and after updates."""
    model = Model()
    optimizer, scale = optimizer_of(model), LossScale(CPU)
    state = State(model, optimizer, ALONE, alone(), scale)
    for overflow in (0.0, 1.0, 0.0):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.squared_norm()
        optimizer.update(5, None, torch.tensor(overflow))
        scale.update(torch.tensor(overflow) > 0)
    local = {held.name: held.local for held in state.shards}
    assert torch.equal(local["model.mean"], model.mean)
    assert local["model.mean"].abs().sum() > 0
    assert torch.equal(local["model.a.weight"], model.a.weight)
    assert local["optimizer.step"].item() == 2, "a skipped update does not count"
    assert local["loss_scale.value"].item() == LossScale.FIRST / 2
    assert local["loss_scale.good"].item() == 1
    adamw = optimizer.rules["adamw"]
    assert adamw._updates.item() == 2
    (weight,) = [p for p in adamw.group_of if p.local.shape == (3, 3)]
    assert local["optimizer.a.weight.exp_avg"].data_ptr() == weight.state["exp_avg"].data_ptr()
    assert local["optimizer.a.weight.exp_avg"].abs().sum() > 0


def test_a_type_that_no_file_holds_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"w has the type torch.complex64, and files of weights hold float64, float32",
    ):
        gather_placements(
            [tensor_spec("w", torch.zeros(2, dtype=torch.complex64))], alone(), Layout({})
        )


def test_a_buffer_that_has_grown_is_not_cut_to_the_shape_that_it_had() -> None:
    model = Model()
    state = State(model, optimizer_of(model), ALONE, alone())
    model.mean = torch.zeros(5)
    (held,) = (held for held in state.shards if held.name == "model.mean")
    with pytest.raises(
        InputError, match=r"model\.mean has the shape \(5,\), and had \(3,\) when the run began"
    ):
        _ = held.local


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", OF_4)
def test_each_rank_holds_the_parts_that_the_layout_says(job: Job, kind: str) -> None:
    """All ranks list the same tensors."""
    layout = OF_4[kind]
    state = on(job, layout, "train.precision=float16", kind=kind)
    placements = [
        [name, *map(str, vars(placement).values())] for name, placement in state.placements.items()
    ]
    assert job.gather("comparing", placements) == [placements] * 4

    config = Config.load(QUICKSTART, [*MODEL, "layout={}"], world_size=1)
    plain = {
        f"model.{name}": value for name, value in build_model(config, ALONE, CPU).named_parameters()
    }
    assert {name for name in state.placements if name.startswith("model.")} == set(plain)
    assert len(state.placements) == 3 * len(plain) + 3, "averages, updates, and the loss scale"
    for held in state.shards:
        assert held.local.shape == shape_of(held.part), held.name
        if held.name in plain:
            assert torch.equal(held.local, plain[held.name][held.part]), held.name

    embedding = "model.model.embed_tokens.weight"
    copies = Counter(held.name for held in state.shards)
    twice = {name for name, count in copies.items() if count > 1}
    tied = {
        embedding,
        f"optimizer.{embedding[6:]}.exp_avg",
        f"optimizer.{embedding[6:]}.exp_avg_sq",
    }
    assert twice == (tied if kind == "V" and job.rank == 0 else set())
    last_stage = 0 if kind == "V" else layout.get("pp", 1) - 1
    assert state.placements[embedding].stages == tuple(sorted({0, last_stage}))
