"""What a checkpoint is made of: every tensor that training changes, once, under one name on every layout."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshtrain.checkpoint.placement import Placement
from meshtrain.checkpoint.state import State, gather_placements
from meshtrain.config.schema import Optimizer as Keys
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel.sharding import tensor_spec
from meshtrain.trainer import LossScale
from tests.checkpoint.known import alone
from tests.launching import forked
from tests.parallel.test_tensor_parallel import assert_none_failed

ALONE = Mesh(Layout({}), 0, "cpu", None, {})
CPU = torch.device("cpu")


class Model(nn.Module):
    """Tied, frozen and scalar parameters; a buffer that a forward replaces, and one that is no part of the state."""

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
    return Optimizer(model, Keys(), ALONE, 10)


def test_names_shapes_and_types() -> None:
    model = Model().double()
    state = State(model, optimizer_of(model), ALONE, alone(), LossScale(CPU))
    trained = {"a.weight": (3, 3), "b.bias": (3,), "gain": ()}
    expected = {f"model.{name}": Placement(shape, "F64") for name, shape in trained.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        expected |= {f"optimizer.{name}.{kind}": Placement(shape, "F64") for name, shape in trained.items()}
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
    (adamw,) = [s for p, s in optimizer.rules["adamw"]._adamw.state.items() if p.shape == (3, 3)]
    assert adamw["step"].item() == 2
    assert local["optimizer.a.weight.exp_avg"].data_ptr() == adamw["exp_avg"].data_ptr()
    assert local["optimizer.a.weight.exp_avg"].abs().sum() > 0


def test_a_type_that_no_file_holds_is_refused() -> None:
    with pytest.raises(InputError, match=r"w has the type torch.complex64, and files of weights hold float64, float32"):
        gather_placements([tensor_spec("w", torch.zeros(2, dtype=torch.complex64))], alone(), Layout({}))


def test_a_buffer_that_has_grown_is_not_cut_to_the_shape_that_it_had() -> None:
    model = Model()
    state = State(model, optimizer_of(model), ALONE, alone())
    model.mean = torch.zeros(5)
    (held,) = (held for held in state.shards if held.name == "model.mean")
    with pytest.raises(InputError, match=r"model\.mean has the shape \(5,\), and had \(3,\) when the run began"):
        _ = held.local


@pytest.mark.timeout(400)
def test_parts_on_every_layout_of_4_ranks(tmp_path: Path) -> None:
    job = forked(4, "-m", "tests.checkpoint.ranks", str(tmp_path), "state", timeout=300)
    assert_none_failed(job, 4, 1000)


@pytest.mark.timeout(400)
def test_parameters_that_are_sharded_over_a_derived_axis(tmp_path: Path) -> None:
    """Files name it, each rank writes its part once, and any other layout reads it."""
    job = forked(4, "-m", "tests.checkpoint.derived_cases", str(tmp_path), timeout=300)
    assert_none_failed(job, 4, 50)
