"""Weight gradients that are left for later: the same bits, and really not computed before."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.config.locate import model_file
from meshtrain.layout import Layout
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh
from meshtrain.parallel.parallelize import ParallelOptions, apply_data_parallel
from meshtrain.parallel.weight_grad import DeferredWeightGrad, WeightGradQueue, defer_weight_grads, run_weight_grads

llama = model_file("llama")
ALONE = Mesh(Layout({}), 0, "cpu", None, {})
TOKENS = torch.arange(24).view(2, 12) % 11
LINEAR = 2 * 7 + 1  # layers of the model: seven in each block, and the head


def model(
    recompute: str = "none", precision: str = "float32", queue: WeightGradQueue | None = None, tied: bool = False
) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 11}
    made = llama.Model(llama.Config(**sizes, num_hidden_layers=2, num_key_value_heads=2))
    if tied:  # two linear layers with one parameter
        made.model.layers[1].mlp.up_proj.weight = made.model.layers[0].mlp.up_proj.weight
    if queue is not None:
        defer_weight_grads(made, queue)
    return apply_data_parallel(made, ALONE, ParallelOptions(recompute=recompute, precision=precision))


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
    queue = WeightGradQueue()
    plain, deferring = model(recompute, precision, None, tied), model(recompute, precision, queue, tied)
    losses = [
        [sample_losses(m(tokens), tokens).sum() for tokens in (TOKENS, TOKENS.flip(1))] for m in (plain, deferring)
    ]
    due = []
    for at_once, split in zip(*losses, strict=True):
        assert torch.equal(at_once, split)
        at_once.backward()
        with queue.record() as left:
            split.backward()
        due.append(left)
    early = {name for name in gradients(deferring) if "norm" not in name and "embed" not in name}
    assert not early, "only norms and the embedding have gradients before their time"
    for left in due:
        run_weight_grads(left)
    actual, expected = gradients(deferring), gradients(plain)
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(actual[name], grad), name


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_each_product_is_computed_once(recompute: str) -> None:
    """A full recomputation repeats the products of a block's forward; those of the head are not computed again."""
    again = 2 * 7 if recompute == "full" else 0
    spared = 2 if recompute == "full" else 0  # torch's own layer saves its input before it multiplies, and stops there
    queue = WeightGradQueue()
    at_once = sample_losses(model(recompute)(TOKENS), TOKENS).sum()
    assert counted(at_once.backward) == 2 * LINEAR + again - spared
    split = sample_losses(model(recompute, queue=queue)(TOKENS), TOKENS).sum()
    with queue.record() as due:
        assert counted(split.backward) == LINEAR + again, "input gradients only"
    assert counted(lambda: run_weight_grads(due)) == LINEAR, "weight gradients only"


def test_a_whole_backward_leaves_nothing() -> None:
    queue = WeightGradQueue()
    whole = model(queue=queue)
    sample_losses(whole(TOKENS), TOKENS).sum().backward()
    expected = model()
    sample_losses(expected(TOKENS), TOKENS).sum().backward()
    for name, grad in gradients(expected).items():
        assert torch.equal(gradients(whole)[name], grad), name


def test_a_bias_is_computed_at_once_and_an_input_without_gradient_costs_nothing() -> None:
    queue = WeightGradQueue()
    torch.manual_seed(0)
    layer, known = nn.Linear(4, 3), nn.Linear(4, 3)
    known.load_state_dict(layer.state_dict())
    defer_weight_grads(layer, queue)
    x, weight_of = torch.randn(2, 5, 4), torch.randn(2, 5, 3)
    (known(x) * weight_of).sum().backward()
    y = layer(x)
    with queue.record() as due:
        assert counted((y * weight_of).sum().backward) == 0, "x needs no gradient"
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, known.bias.grad)
    assert layer.weight.grad is None
    run_weight_grads(due)
    assert torch.equal(layer.weight.grad, known.weight.grad)


def test_weight_gradients_are_made_one_after_the_other() -> None:
    """Those of a second microbatch are added to the first's, and let go: no two layers have theirs at once."""
    queue = WeightGradQueue()
    made = model(queue=queue)
    alive: list[StorageWeakRef] = []
    most: list[int] = []

    def watch(layer: DeferredWeightGrad) -> DeferredWeightGrad:
        def gradients() -> Sequence[Tensor]:
            computed = layer.compute()
            alive.extend(StorageWeakRef(gradient.untyped_storage()) for gradient in computed)
            most.append(sum(not ref.expired() for ref in alive))
            return computed

        return DeferredWeightGrad(layer.weights, gradients)

    for _ in range(2):
        loss = sample_losses(made(TOKENS), TOKENS).sum()
        with queue.record() as due:
            loss.backward()
        alive.clear()
        run_weight_grads([watch(layer) for layer in due])
    assert most[LINEAR:] == [1] * LINEAR


@pytest.mark.parametrize("queue", [None, WeightGradQueue()])
def test_frozen_weights_cost_no_product(queue: WeightGradQueue | None) -> None:
    """Each of the frozen layers keeps its input gradient, and has no other."""
    made, known = model(queue=queue), model()
    for either in (made, known):
        for name, parameter in either.named_parameters():
            parameter.requires_grad_("up_proj" not in name and "layers.1" not in name)
    frozen = 7 + 1
    sample_losses(known(TOKENS), TOKENS).sum().backward()
    loss = sample_losses(made(TOKENS), TOKENS).sum()
    if queue is None:
        assert counted(loss.backward) == 2 * LINEAR - frozen
    else:
        with queue.record() as due:
            assert counted(loss.backward) == LINEAR
        assert counted(lambda: run_weight_grads(due)) == LINEAR - frozen
    assert gradients(made).keys() == gradients(known).keys()
    for name, grad in gradients(known).items():
        assert torch.equal(gradients(made)[name], grad), name


def test_nothing_due_is_nothing_to_do() -> None:
    run_weight_grads([])
