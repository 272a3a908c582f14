"""A constructor without memory for parameters gives them, later, the values that it would have given
at once."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from meshtrain.parallel.deferred_init import NotDeferredError, _Record, construct
from tests.models import of_transformers as hf

WIDTH = 6


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        mask = torch.ones(4, 4, device=self.weight.device).tril()
        self.register_buffer("mask", mask, persistent=False)
        self.angles = torch.arange(4) / 10


class Gpt(nn.Module):
    """As nanoGPT gives first values: a function applied to all modules, then names rescaled."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, WIDTH, padding_idx=2)
        self.h = nn.ModuleList(
            nn.ModuleDict({"norm": Norm(), "c_proj": nn.Linear(WIDTH, WIDTH)}) for _ in range(2)
        )
        self.lm_head = nn.Linear(WIDTH, 11, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(4))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)


class Bare(nn.Module):
    """Values by plain operators, before and after they are registered; some by way of others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, 3) * 0.1 + 1)
        pair = torch.randn(2, WIDTH)
        self.first = nn.Parameter(pair[0])
        self.second = nn.Parameter(pair[1:])
        late = torch.empty(5)
        self.late = nn.Parameter(late)
        nn.init.uniform_(late)
        self.given = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]), requires_grad=False)
        self.target = nn.Parameter(self.scale.detach().clone())
        self.never = nn.Parameter(torch.empty(3, dtype=torch.float64))
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self.wide = nn.Parameter(torch.rand(3))
        torch.set_default_dtype(default)
        self.replaced = nn.Linear(3, 3)
        self.replaced.weight.data = torch.eye(3) * torch.rand(1)
        with torch.no_grad():
            self.late[1:3].mul_(torch.arange(2) + 1.0)
            self.late[torch.tensor([True, False, False, False, True])] = 7.0
            self.scale[:, 1] = 0.0
        self.register_buffer("start", self.scale.detach() * 2)
        self.register_buffer("ones", torch.ones(2, device=self.scale.device))
        self.kept = [torch.rand(2), self.first.detach().sum()]


def with_parametrizations() -> nn.Module:
    return nn.Sequential(
        weight_norm(nn.Linear(WIDTH, 3)),
        spectral_norm(nn.Linear(WIDTH, 4)),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8), 2),
        nn.LSTM(WIDTH, 5),
        nn.BatchNorm1d(WIDTH),
        nn.Conv2d(2, 3, 3),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nanogpt": Gpt,
    "bare": Bare,
    "torch": with_parametrizations,
    "llama": lambda: hf.Model(hf.Config()),
    "gpt2": lambda: hf.Model(hf.Config(kind="gpt2", tied=True)),
}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and tensors in attributes."""
    found = dict(model.named_buffers())
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            for i, item in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(item, Tensor) and not key.startswith("_"):
                    found[f"{name}.{key}.{i}"] = item.detach()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_the_constructor(name: str) -> None:
    """To the bit: it draws the same random numbers with memory, if each operator has its own
    seed."""
    model, values = construct(MODELS[name], seed=3)
    with _Record(seed=3):
        plain = MODELS[name]()
    expected = dict(plain.named_parameters(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False))
    assert list(found) == list(expected)
    assert all(parameter.is_meta for parameter in found.values())
    for key, parameter in found.items():
        drawn = values.draw(key)
        assert drawn.dtype == expected[key].dtype == parameter.dtype
        assert parameter.requires_grad == expected[key].requires_grad
        if not key.endswith("never"):
            assert torch.equal(drawn, expected[key].detach()), key
    for first in found:
        for second in found:
            tied = expected[first] is expected[second]
            assert (found[first] is found[second]) == tied
    others = tensors_of(plain)
    assert {key: tensor.device for key, tensor in tensors_of(model).items()} == {
        key: torch.device("cpu") for key in others
    }
    for key, tensor in tensors_of(model).items():
        assert torch.equal(tensor, others[key]), key


def test_values_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    model, values = construct(Gpt, seed=0)
    drawn = {name: values.draw(name) for name, _ in model.named_parameters()}
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    _, again = construct(Gpt, seed=0)
    _, other = construct(Gpt, seed=1)
    for name in reversed(drawn):
        assert torch.equal(again.draw(name), drawn[name])
        assert name.endswith(("norm.weight", "bias")) or not torch.equal(
            other.draw(name), drawn[name]
        )
    assert drawn["h.1.c_proj.weight"].std().item() == pytest.approx(0.01, rel=0.4)
    assert not torch.equal(drawn["h.0.c_proj.weight"], drawn["h.1.c_proj.weight"])


def test_what_depends_on_parameters_is_known() -> None:
    assert not construct(Gpt, seed=0)[1].others_depend
    assert construct(Bare, seed=0)[1].others_depend


def test_a_value_that_nobody_sets_is_zero() -> None:
    _, values = construct(Bare, seed=0)
    assert torch.equal(values.draw("never"), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("init", [nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.dirac_])
def test_functions_that_read_values(init: Callable[[Tensor], Tensor]) -> None:
    """torch leaves them out on meta."""

    def make() -> nn.Module:
        layer = nn.Conv1d(12, 12, 5)
        init(layer.weight)
        return layer

    _, values = construct(make, seed=0)
    weight = values.draw("weight")
    assert torch.equal(weight, values.draw("weight"))
    if init is nn.init.trunc_normal_:
        assert weight.std().item() == pytest.approx(0.88, rel=0.1)
        assert weight.abs().max() <= 2
    elif init is nn.init.orthogonal_:
        rows = weight.flatten(1)
        torch.testing.assert_close(rows @ rows.T, torch.eye(12), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(weight[:, :, 2], torch.eye(12))
        assert weight.sum() == 12


def reads(model: nn.Linear) -> None:
    model.scale = model.weight.abs().max().item()  # type: ignore[assignment]


def looks_at_a_value(model: nn.Linear) -> None:
    if (model.weight > 1).any():
        nn.init.zeros_(model.weight)


def hooks(model: nn.Linear) -> None:
    model.weight.register_hook(lambda grad: grad)


def draws_by_a_generator(model: nn.Linear) -> None:
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(3))


def derives_a_class(model: nn.Linear) -> None:
    class Own(nn.Parameter):
        pass

    model.weight = Own(torch.ones(3, 3))


def keeps_parameters(model: Any) -> None:
    model.all = [model.weight, model.bias]


def hides_a_module(model: Any) -> None:
    model.layers = [nn.Linear(3, 3)]


def overwrites_a_buffer(model: nn.Linear) -> None:
    model.register_buffer("copy", torch.zeros(3, 3))
    model.get_buffer("copy").add_(model.weight.detach())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (reads, r"does not run without the values of parameters \(Tensor.item\(\) cannot"),
        (looks_at_a_value, r"does not run without the values of parameters"),
        (hooks, r"its parameter weight has a gradient hook"),
        (draws_by_a_generator, r"its parameter weight is drawn by a generator of its own"),
        (derives_a_class, r"its parameter weight of a Linear is of the class Own"),
        (keeps_parameters, r"it has parameters in the plain attribute all"),
        (hides_a_module, r"it has parameters in the plain attribute layers"),
        (overwrites_a_buffer, r"its constructor writes values of parameters into another tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_constructors_that_need_values(change: Callable[[Any], None], reason: str) -> None:
    def make() -> nn.Module:
        model = nn.Linear(3, 3)
        change(model)
        return model

    with pytest.raises(NotDeferredError, match=reason):
        construct(make, seed=0)
    assert not nn.Linear(2, 2).weight.is_meta, "the hook at registrations is gone"
