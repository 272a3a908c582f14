"""Weight gradients that are left for later: the same bits, and really not computed before."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.config.locate import model_file
from meshtrain.layout import Layout
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.weight_grad import DeferredWeightGrad, WeightGradQueue, run_weight_grads
from meshtrain.parallel.parallelize import ParallelOptions, apply_data_parallel

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
        use_products(made, queue=queue)
    return apply_data_parallel(made, ALONE, ParallelOptions(recompute=recompute, precision=precision))


class Products(TorchDispatchMode):
    """Counts products of matrices, but those of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default)
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
    use_products(layer, queue=queue)
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
        def gradient() -> Tensor:
            computed = layer.compute()
            alive.append(StorageWeakRef(computed.untyped_storage()))
            most.append(sum(not ref.expired() for ref in alive))
            return computed

        return replace(layer, compute=gradient, write=None)

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


def twice(net: nn.Module) -> None:
    """A layer that a forward calls twice."""
    mlp = net.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + forward(x.flip(1))


def tie(net: nn.Module) -> None:
    net.lm_head.weight = net.model.embed_tokens.weight


def freeze(net: nn.Module) -> None:
    net.model.layers[0].mlp.up_proj.weight.requires_grad_(False)


def with_bias(net: nn.Module) -> None:
    net.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 11).to(net.lm_head.weight))


MODELS: dict[str, Callable[[nn.Module], object]] = {
    "plain": lambda net: None, "tied": tie, "twice": twice, "frozen": freeze, "bias": with_bias
}  # fmt: skip


def pair(change: Callable[[nn.Module], object], **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model of torch's own layers, and the same with ours; float64."""
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 11}
    torch.manual_seed(0)
    plain = llama.Model(llama.Config(**sizes, num_hidden_layers=2, num_key_value_heads=2)).double()
    change(plain)
    ours = llama.Model(plain.config).double()
    change(ours)
    ours.load_state_dict(plain.state_dict())
    use_products(ours)  # as on GPUs
    return plain, apply_data_parallel(ours, ALONE, ParallelOptions(precision="float64", **options))


def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
    return sample_losses(net(tokens), tokens).sum()


def same_gradients(plain: nn.Module, ours: nn.Module) -> None:
    assert gradients(plain).keys() == gradients(ours).keys()
    for name, grad in gradients(plain).items():
        torch.testing.assert_close(gradients(ours)[name], grad, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("change", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_gradients_are_those_of_autograd(change: Callable[[nn.Module], object], recompute: str) -> None:
    """Three uneven microbatches in two steps, of which the second begins with gradients of zeros."""
    plain, ours = pair(change, recompute=recompute)
    for net in (plain, ours):
        for tokens in (TOKENS, TOKENS[:1], TOKENS[:, :5]):
            loss_of(net, tokens).backward()
        loss_of(net, TOKENS).backward(retain_graph=True)
    same_gradients(plain, ours)
    for net in (plain, ours):
        net.zero_grad(set_to_none=False)
        loss = loss_of(net, TOKENS)
        loss.backward(retain_graph=recompute == "none")
        if recompute == "none":
            loss.backward()
    same_gradients(plain, ours)


class Adds(TorchDispatchMode):
    """Gradients of matrices that are made apart from where they belong, and products that add."""

    def __init__(self) -> None:
        super().__init__()
        self.apart = self.added = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.added += func is torch.ops.aten.addmm_.default
        self.apart += func in (torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default) and args[0].dim() == 2
        return func(*args, **(kwargs or {}))


def test_products_add_where_gradients_belong() -> None:
    _, ours = pair(MODELS["plain"])
    for add in (False, True):
        loss = loss_of(ours, TOKENS)
        with Adds() as adds:
            loss.backward()
        assert (adds.added, adds.apart) == (LINEAR, add), "but the embedding's"


def test_autograd_keeps_what_it_is_asked_to_see() -> None:
    """Hooks, anomaly mode, gradients of some tensors only, or to have and not to add, sparse ones."""
    plain, ours = pair(MODELS["plain"])
    calls: list[list[float]] = [[], []]
    for net, own in zip((plain, ours), calls, strict=True):
        q, o = net.model.layers[1].self_attn.q_proj.weight, net.model.layers[0].self_attn.o_proj.weight
        hook = q.register_hook(lambda grad: 2 * grad)
        post = o.register_post_accumulate_grad_hook(lambda p, own=own: own.append(p.grad.sum().item()))
        for _ in range(2):
            loss_of(net, TOKENS).backward()
        hook.remove(), post.remove()
        with torch.autograd.set_detect_anomaly(True):
            loss_of(net, TOKENS).backward()
    same_gradients(plain, ours)
    torch.testing.assert_close(calls[1], calls[0], rtol=1e-12, atol=1e-14)
    assert len(calls[0]) == 2
    before = {name: grad.clone() for name, grad in gradients(ours).items()}
    asked = [torch.autograd.grad(loss_of(net, TOKENS), list(net.parameters())) for net in (plain, ours)]
    for actual, expected in zip(*reversed(asked), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert all(torch.equal(grad, before[name]) for name, grad in gradients(ours).items())
    for net in (plain, ours):
        loss_of(net, TOKENS).backward(inputs=[net.lm_head.weight, net.model.layers[0].mlp.up_proj.weight])
        net.lm_head.weight.grad = net.lm_head.weight.grad.to_sparse()
        loss_of(net, TOKENS).backward()
    same_gradients(plain, ours)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_second_derivatives() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    ours, x = copy.deepcopy(plain), torch.randn(2, 6, 5, dtype=torch.float64)
    use_products(ours)
    apply_data_parallel(ours, ALONE, ParallelOptions(precision="float64"))
    for net in (plain, ours):
        net(x).square().sum().backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in net.parameters())
        net.zero_grad()
        penalty.backward()
    same_gradients(plain, ours)


def test_a_compiled_block_leaves_its_gradients_to_autograd() -> None:
    with patch("torch.compile", partial(torch.compile, backend="aot_eager", fullgraph=True)):
        plain, ours = pair(MODELS["plain"], compile=True)
        for net in (plain, ours):
            for tokens in (TOKENS, TOKENS.flip(1)):
                loss_of(net, tokens).backward()
    same_gradients(plain, ours)


def test_a_queue_gets_what_goes_to_a_weight_whose_gradients_nobody_watches() -> None:
    queue, x = WeightGradQueue(), torch.ones(2, 3, requires_grad=True)
    layers = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False))
    use_products(layers, queue=queue)
    layers[0].weight.register_hook(lambda grad: 2 * grad)
    with queue.record() as due:
        torch.autograd.grad(layers(x).sum(), x)  # of a forward that runs again and has a backward inside
        assert not due
        layers(x).sum().backward()
    assert [deferred.parameter for deferred in due] == [layers[1].weight]
    torch.testing.assert_close(layers[0].weight.grad, 4 * layers[1].weight.sum(0)[:, None].expand(4, 3))


@pytest.mark.parametrize("queue", [None, WeightGradQueue()], ids=["whole", "split"])
def test_autocast_and_inputs_by_keyword_are_torchs(queue: WeightGradQueue | None) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(5, 4)
    ours, x = copy.deepcopy(plain), torch.randn(2, 6, 5)
    use_products(ours, queue=queue)
    for net in (plain, ours):
        with torch.autocast("cpu", torch.bfloat16):
            y = net(input=x)
        y.float().square().sum().backward()
    same_gradients(plain, ours)


def test_a_model_stays_one_that_can_be_copied_and_pickled() -> None:
    plain, ours = pair(MODELS["plain"])
    for net in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        plain.zero_grad()
        for _ in range(2):
            loss_of(net, TOKENS).backward()
            loss_of(plain, TOKENS).backward()
        same_gradients(plain, net)
    assert not gradients(ours)
