"""Weight gradients that are left for later or added where they belong: the same numbers, and really
not computed before."""

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

from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.parallel.grad_sync import finish_reduce, set_is_last_backward, start_reduce
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.weight_grad import (
    DeferredWeightGrad,
    WeightGradQueue,
    run_weight_grads,
)
from meshtrain.parallel.mixed_precision import master_dtype
from meshtrain.parallel.parallelize import (
    ParallelOptions,
    apply_data_parallel,
    apply_tensor_parallel,
)
from tests.comparing import ALONE, V, gradients, small_llama, token_losses
from tests.parallel.operators import Operators

aten = torch.ops.aten
TOKENS = torch.arange(24).view(2, 12) % V
LINEAR = 2 * 7 + 1  # layers of the model: seven in each block, and the head


def tied(model: nn.Module) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def tied_layers(model: nn.Module) -> None:
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def twice(model: nn.Module) -> None:
    """A layer that a forward calls twice."""
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + forward(x.flip(1))


def frozen(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            not any(layer in name for layer in ("up_proj", "k_proj", "layers.1"))
        )


def bias(model: nn.Module) -> None:
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 11).to(model.lm_head.weight))


def unchanged(model: nn.Module) -> None:
    pass


Change = Callable[[nn.Module], None]


def torchs(change: Change = unchanged) -> nn.Module:
    """A model of torch's own layers, in float64."""
    model = small_llama().double()
    change(model)
    return model


def placed(model: nn.Module, precision: str = "float64", **options: Any) -> nn.Module:
    model = model if precision == "float64" else model.float()
    return apply_data_parallel(model, ALONE, ParallelOptions(precision=precision, **options))


def ours(
    change: Change = unchanged, queue: WeightGradQueue | None = None, **options: Any
) -> nn.Module:
    """The same model with our layers, as on GPUs."""
    model = torchs(change)
    use_products(model, queue=queue)
    return placed(model, **options)


def loss_of(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    return sample_losses(model(tokens), tokens).sum()


def assert_same(
    model: nn.Module, known: nn.Module, rtol: float = 1e-12, atol: float = 1e-14
) -> None:
    torch.testing.assert_close(gradients(model), gradients(known), rtol=rtol, atol=atol)


def products(action: Callable[[], Any]) -> int:
    """How many products of matrices it computes, but those of attention."""
    with Operators() as operators:
        action()
    return operators.of(aten.mm.default, aten.addmm.default, aten.addmm_.default)


# Left for later -----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [unchanged, tied_layers])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_same_bits_as_at_once(recompute: str, precision: str, change: Change) -> None:
    """Two microbatches, whose weight gradients come in the other order, after both input
    gradients."""
    queue, options = WeightGradQueue(), {"recompute": recompute, "precision": precision}
    plain, deferring = placed(torchs(change), **options), ours(change, queue, **options)
    losses = [
        [loss_of(model, tokens) for tokens in (TOKENS, TOKENS.flip(1))]
        for model in (plain, deferring)
    ]
    pending = []
    for at_once, split in zip(*losses, strict=True):
        assert torch.equal(at_once, split)
        at_once.backward()
        with queue.record() as deferred:
            split.backward()
        pending.append(deferred)
    assert all("norm" in name or "embed" in name for name in gradients(deferring)), (
        "no other has its gradient yet"
    )
    for deferred in pending:
        run_weight_grads(deferred)
    assert_same(deferring, plain, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_each_product_is_computed_once(recompute: str) -> None:
    """A full recomputation repeats the products of a block's forward; those of the head are not
    computed again."""
    again = 2 * 7 if recompute == "full" else 0
    # torch's own layer saves its input before it multiplies, and stops there
    spared = 2 if recompute == "full" else 0
    queue = WeightGradQueue()
    assert (
        products(loss_of(placed(torchs(), recompute=recompute)).backward)
        == 2 * LINEAR + again - spared
    )
    loss = loss_of(ours(queue=queue, recompute=recompute))
    with queue.record() as deferred:
        assert products(loss.backward) == LINEAR + again, "input gradients only"
    assert products(lambda: run_weight_grads(deferred)) == LINEAR, "weight gradients only"


def test_frozen_weights_cost_no_product() -> None:
    """Each of the frozen layers keeps its input gradient, and has no other."""
    queue = WeightGradQueue()
    known, whole, split = torchs(frozen), ours(frozen), ours(frozen, queue)
    trained = LINEAR - 7 - 2
    loss_of(known).backward()
    assert products(loss_of(whole).backward) == LINEAR + trained
    loss = loss_of(split)
    with queue.record() as deferred:
        assert products(loss.backward) == LINEAR
    assert products(lambda: run_weight_grads(deferred)) == trained
    assert_same(whole, known)
    assert_same(split, known)


def test_a_bias_is_computed_at_once_and_an_input_without_gradient_costs_nothing() -> None:
    torch.manual_seed(0)
    known, queue, x = nn.Linear(4, 3), WeightGradQueue(), torch.randn(2, 5, 4)
    layer = copy.deepcopy(known)
    use_products(layer, queue=queue)
    known(x).square().sum().backward()
    loss = layer(x).square().sum()
    with queue.record() as deferred:
        assert products(loss.backward) == 0, "x needs no gradient"
    assert gradients(layer).keys() == {"bias"}
    run_weight_grads(deferred)
    assert_same(layer, known, rtol=0, atol=0)


def test_weight_gradients_are_made_one_after_the_other() -> None:
    """Those of a second microbatch are added to the first's, and let go: no two layers have theirs
    at once."""
    queue = WeightGradQueue()
    model = ours(queue=queue)
    storages: list[StorageWeakRef] = []
    alive: list[int] = []

    def watch(deferred: DeferredWeightGrad) -> DeferredWeightGrad:
        def gradient() -> Tensor:
            grad = deferred.compute()
            storages.append(StorageWeakRef(grad.untyped_storage()))
            alive.append(sum(not storage.expired() for storage in storages))
            return grad

        return replace(deferred, compute=gradient, write=None)

    for _ in range(2):
        loss = loss_of(model)
        with queue.record() as deferred:
            loss.backward()
        storages.clear()
        alive.clear()
        run_weight_grads([watch(layer) for layer in deferred])
    assert alive == [1] * LINEAR


def test_a_queue_gets_what_goes_to_a_weight_whose_gradients_nobody_watches() -> None:
    queue, x = WeightGradQueue(), torch.ones(2, 3, requires_grad=True)
    layers = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False))
    use_products(layers, queue=queue)
    layers[0].weight.register_hook(lambda grad: 2 * grad)
    with queue.record() as deferred:
        # of a forward that runs again and has a backward inside
        torch.autograd.grad(layers(x).sum(), x)
        assert not deferred
        layers(x).sum().backward()
    assert [each.parameter for each in deferred] == [layers[1].weight]
    torch.testing.assert_close(
        layers[0].weight.grad, 4 * layers[1].weight.sum(0)[:, None].expand(4, 3)
    )


# Added where they belong --------------------------------------------------------------------------


@pytest.mark.parametrize("change", [unchanged, tied, twice, frozen, bias])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_gradients_are_those_of_autograd(change: Change, recompute: str) -> None:
    """Three uneven microbatches in two steps, of which the second begins with gradients of
    zeros."""
    models = ours(change, recompute=recompute), torchs(change)
    for model in models:
        for tokens in (TOKENS, TOKENS[:1], TOKENS[:, :5]):
            loss_of(model, tokens).backward()
        loss_of(model).backward(retain_graph=True)
    assert_same(*models)
    for model in models:
        model.zero_grad(set_to_none=False)
        loss = loss_of(model)
        loss.backward(retain_graph=recompute == "none")
        if recompute == "none":
            loss.backward()
    assert_same(*models)


def test_products_add_where_gradients_belong() -> None:
    model = ours()
    for step in range(2):
        loss = loss_of(model)
        with Operators() as operators:
            loss.backward()
        assert operators.of(aten.addmm_.default) == LINEAR
        assert operators.of(aten.add_.Tensor, aten.copy_.default) == step, "that of the embedding"


def test_autograd_keeps_what_it_is_asked_to_see() -> None:
    """Hooks, anomaly mode, gradients of some tensors only, or to have and not to add, sparse
    ones."""
    models = ours(), torchs()
    calls: list[list[float]] = [[], []]
    for model, own in zip(models, calls, strict=True):
        q, o = (
            model.model.layers[1].self_attn.q_proj.weight,
            model.model.layers[0].self_attn.o_proj.weight,
        )
        hook = q.register_hook(lambda grad: 2 * grad)
        post = o.register_post_accumulate_grad_hook(
            lambda p, own=own: own.append(p.grad.sum().item())
        )
        for _ in range(2):
            loss_of(model).backward()
        hook.remove()
        post.remove()
        with torch.autograd.set_detect_anomaly(True):
            loss_of(model).backward()
    assert_same(*models)
    assert len(calls[0]) == 2
    torch.testing.assert_close(*calls, rtol=1e-12, atol=1e-14)
    before = {name: grad.clone() for name, grad in gradients(models[0]).items()}
    asked = [torch.autograd.grad(loss_of(model), list(model.parameters())) for model in models]
    torch.testing.assert_close(*asked, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients(models[0]), before, rtol=0, atol=0)
    for model in models:
        head = model.lm_head.weight
        loss_of(model).backward(inputs=[head, model.model.layers[0].mlp.up_proj.weight])
        head.grad = head.grad.to_sparse()
        loss_of(model).backward()
    assert_same(*models)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_second_derivatives() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model, x = copy.deepcopy(plain), torch.randn(2, 6, 5, dtype=torch.float64)
    use_products(model)
    for net in (plain, placed(model)):
        net(x).square().sum().backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in net.parameters())
        net.zero_grad()
        penalty.backward()
    assert_same(model, plain)


def test_a_compiled_block_leaves_its_gradients_to_autograd() -> None:
    with patch("torch.compile", partial(torch.compile, backend="aot_eager", fullgraph=True)):
        models = ours(compile=True), torchs()
        for model in models:
            for tokens in (TOKENS, TOKENS.flip(1)):
                loss_of(model, tokens).backward()
    assert_same(*models)


@pytest.mark.parametrize("queue", [None, WeightGradQueue()], ids=["whole", "split"])
def test_autocast_and_inputs_by_keyword_are_torchs(queue: WeightGradQueue | None) -> None:
    """And a backward that is not recorded leaves nothing to the queue."""
    torch.manual_seed(0)
    plain = nn.Linear(5, 4)
    layer, x = copy.deepcopy(plain), torch.randn(2, 6, 5)
    use_products(layer, queue=queue)
    for net in (plain, layer):
        with torch.autocast("cpu", torch.bfloat16):
            y = net(input=x)
        y.float().square().sum().backward()
    assert_same(layer, plain)


def test_a_model_stays_one_that_can_be_copied_and_pickled() -> None:
    plain, model = torchs(), ours()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        plain.zero_grad()
        for net in (copied, plain):
            for _ in range(2):
                loss_of(net).backward()
        assert_same(copied, plain)
    assert not gradients(model)


# Over tp ------------------------------------------------------------------------------------------


REGATHERED = {"precision": "float32", "recompute": "full", "regather": True}


def model_of(
    tp: Mesh,
    key_value_heads: int,
    change: Change,
    options: dict[str, Any],
    queue: WeightGradQueue | None = None,
) -> nn.Module:
    model = small_llama(num_key_value_heads=key_value_heads)
    change(model)
    settings = ParallelOptions(**{"precision": "float64", **options})
    model.to(master_dtype(settings.precision))
    settings = apply_tensor_parallel(model, tp, settings)
    if queue is not None:
        use_products(model, queue=queue)
    apply_data_parallel(model, tp, settings)
    set_is_last_backward(model, False)
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("key_value_heads", "change", "options"),
    [
        *(
            (heads, unchanged, keys)
            for heads in (2, 1)
            for keys in ({}, {"sequence_parallel": False}, REGATHERED)
        ),
        (2, frozen, {"regather": True}),
        (1, frozen, {"recompute": "full", "sequence_parallel": False}),
        *(
            (2, unchanged, {"precision": "bfloat16", "recompute": kind})
            for kind in ("none", "selective", "full")
        ),
    ],
)
def test_the_same_bits_as_at_once_over_tp(
    job: Job, key_value_heads: int, change: Change, options: dict[str, Any]
) -> None:
    """Of two microbatches, after both of their backwards. Nothing is left for frozen weights."""
    tp, queue = build_mesh(Layout({"tp": 2})), WeightGradQueue()
    models = [model_of(tp, key_value_heads, change, options, queue) for queue in (None, queue)]
    losses = [
        [token_losses(model, 0, microbatch).sum() for microbatch in (0, 1)] for model in models
    ]
    pending = []
    for at_once, split in zip(*losses, strict=True):
        at_once.backward()
        with queue.record() as deferred:
            split.backward()
        pending += deferred
    early = [name for name, parameter in models[1].named_parameters() if parameter.grad is not None]
    assert not any("proj" in name or "lm_head" in name for name in early)
    values = [layer.compute() for layer in pending]
    assert not any(value.requires_grad for value in values), "it leads back into the forward"
    run_weight_grads(pending)
    for model in models:
        start_reduce(model)
        finish_reduce(model)
    for plain, deferring in zip(*(model.parameters() for model in models), strict=True):
        if plain.requires_grad:
            assert torch.equal(plain.grad, deferring.grad)
        else:
            assert plain.grad is None is deferring.grad
