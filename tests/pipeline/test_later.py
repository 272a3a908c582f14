"""Weight gradients that are left for later: the same bits, and really not computed before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.layout import Layout
from meshtrain.locate import model_file
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh
from meshtrain.parallel.apply import Options, spread_over_data
from meshtrain.parallel.later import Later, compute, defer

llama = model_file("llama")
ALONE = Mesh(Layout({}), 0, "cpu", None, {})
TOKENS = torch.arange(24).view(2, 12) % 11
LINEAR = 2 * 7 + 1  # layers of the model: seven in each block, and the head


def model(recompute: str = "none", precision: str = "float32", later: Later | None = None) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 11}
    made = llama.Model(llama.Config(**sizes, num_hidden_layers=2, num_key_value_heads=2))
    if later is not None:
        defer(made, later)
    return spread_over_data(made, ALONE, Options(recompute=recompute, precision=precision))


class Products(TorchDispatchMode):
    """Counts products of matrices, but those of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def counted(action: Callable[[], Any]) -> int:
    with Products() as products:
        action()
    return products.seen


def gradients(of: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in of.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_same_bits_as_at_once(recompute: str, precision: str) -> None:
    """Two microbatches, whose weight gradients come in the other order, after both input gradients."""
    later = Later()
    one, two = model(recompute, precision), model(recompute, precision, later)
    losses = [[sample_losses(m(tokens), tokens).sum() for tokens in (TOKENS, TOKENS.flip(1))] for m in (one, two)]
    due = []
    for at_once, split in zip(*losses, strict=True):
        assert torch.equal(at_once, split)
        at_once.backward()
        with later.collected() as left:
            split.backward()
        due.append(left)
    early = {name for name in gradients(two) if "norm" not in name and "embed" not in name}
    assert not early, "only norms and the embedding have gradients before their time"
    for left in due:
        compute(left)
    found, expected = gradients(two), gradients(one)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_each_product_is_computed_once(recompute: str) -> None:
    """A full recomputation repeats the products of a block's forward; those of the head are not computed again."""
    again = 2 * 7 if recompute == "full" else 0
    spared = 2 if recompute == "full" else 0  # torch's own layer saves its input before it multiplies, and stops there
    later = Later()
    at_once = sample_losses(model(recompute)(TOKENS), TOKENS).sum()
    assert counted(at_once.backward) == 2 * LINEAR + again - spared
    split = sample_losses(model(recompute, later=later)(TOKENS), TOKENS).sum()
    with later.collected() as due:
        assert counted(split.backward) == LINEAR + again, "input gradients only"
    assert counted(lambda: compute(due)) == LINEAR, "weight gradients only"


def test_a_whole_backward_leaves_nothing() -> None:
    later = Later()
    whole = model(later=later)
    sample_losses(whole(TOKENS), TOKENS).sum().backward()
    expected = model()
    sample_losses(expected(TOKENS), TOKENS).sum().backward()
    for name, grad in gradients(expected).items():
        assert torch.equal(gradients(whole)[name], grad), name


def test_a_bias_is_computed_at_once_and_an_input_without_gradient_costs_nothing() -> None:
    later = Later()
    torch.manual_seed(0)
    layer, known = nn.Linear(4, 3), nn.Linear(4, 3)
    known.load_state_dict(layer.state_dict())
    defer(layer, later)
    x, weight_of = torch.randn(2, 5, 4), torch.randn(2, 5, 3)
    (known(x) * weight_of).sum().backward()
    y = layer(x)
    with later.collected() as due:
        assert counted((y * weight_of).sum().backward) == 0, "x needs no gradient"
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, known.bias.grad)
    assert layer.weight.grad is None
    compute(due)
    assert torch.equal(layer.weight.grad, known.weight.grad)


def test_nothing_due_is_nothing_to_do() -> None:
    compute([])
