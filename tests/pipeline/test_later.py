"""Weight gradients that are left for later: the same bits, and really not computed before."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.layout import Layout
from meshtrain.locate import model_file
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh
from meshtrain.parallel.apply import Options, spread_over_data
from meshtrain.parallel.later import Due, Later, compute, defer

llama = model_file("llama")
ALONE = Mesh(Layout({}), 0, "cpu", None, {})
TOKENS = torch.arange(24).view(2, 12) % 11
LINEAR = 2 * 7 + 1  # layers of the model: seven in each block, and the head


def model(
    recompute: str = "none", precision: str = "float32", later: Later | None = None, tied: bool = False
) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 11}
    made = llama.Model(llama.Config(**sizes, num_hidden_layers=2, num_key_value_heads=2))
    if tied:  # two linear layers with one parameter
        made.model.layers[1].mlp.up_proj.weight = made.model.layers[0].mlp.up_proj.weight
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_same_bits_as_at_once(recompute: str, precision: str, tied: bool) -> None:
    """Two microbatches, whose weight gradients come in the other order, after both input gradients."""
    later = Later()
    one, two = model(recompute, precision, None, tied), model(recompute, precision, later, tied)
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


def test_weight_gradients_are_made_one_after_the_other() -> None:
    """Those of a second microbatch are added to the first's, and let go: no two layers have theirs at once."""
    later = Later()
    made = model(later=later)
    alive: list[StorageWeakRef] = []
    most: list[int] = []

    def watched(one: Due) -> Due:
        def gradients() -> Sequence[Tensor]:
            found = one.compute()
            alive.extend(StorageWeakRef(gradient.untyped_storage()) for gradient in found)
            most.append(sum(not ref.expired() for ref in alive))
            return found

        return Due(one.weights, gradients)

    for _ in range(2):
        loss = sample_losses(made(TOKENS), TOKENS).sum()
        with later.collected() as due:
            loss.backward()
        alive.clear()
        compute([watched(one) for one in due])
    assert most[LINEAR:] == [1] * LINEAR


@pytest.mark.parametrize("later", [None, Later()])
def test_frozen_weights_cost_no_product(later: Later | None) -> None:
    """Each of the frozen layers keeps its input gradient, and has no other."""
    made, known = model(later=later), model()
    for one in (made, known):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_("up_proj" not in name and "layers.1" not in name)
    frozen = 7 + 1
    sample_losses(known(TOKENS), TOKENS).sum().backward()
    loss = sample_losses(made(TOKENS), TOKENS).sum()
    if later is None:
        assert counted(loss.backward) == 2 * LINEAR - frozen
    else:
        with later.collected() as due:
            assert counted(loss.backward) == LINEAR
        assert counted(lambda: compute(due)) == LINEAR - frozen
    assert gradients(made).keys() == gradients(known).keys()
    for name, grad in gradients(known).items():
        assert torch.equal(gradients(made)[name], grad), name


def test_nothing_due_is_nothing_to_do() -> None:
    compute([])
