"""Tensor-parallel layers that leave their weight gradients for later, as a stage with a split backward makes them."""

from typing import Any

import pytest
import torch
from torch import nn

from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.parallel.grad_sync import finish_reduce, set_is_last_backward, start_reduce
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, run_weight_grads
from meshtrain.parallel.mixed_precision import master_dtype
from meshtrain.parallel.parallelize import ParallelOptions, apply_data_parallel, apply_tensor_parallel
from tests.comparing import small_llama, token_losses

FROZEN = ("up_proj", "k_proj", "layers.1.self_attn.o_proj")
REGATHERED = {"precision": "float32", "recompute": "full", "regather": True}


def model_of(
    tp: Mesh, key_value_heads: int, frozen: bool, options: dict[str, Any], queue: WeightGradQueue | None = None
) -> nn.Module:
    model = small_llama(num_key_value_heads=key_value_heads)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and any(layer in name for layer in FROZEN)))
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
    ("key_value_heads", "frozen", "options"),
    [
        *((heads, False, options) for heads in (2, 1) for options in ({}, {"sequence_parallel": False}, REGATHERED)),
        (2, True, {"regather": True}),
        (1, True, {"recompute": "full", "sequence_parallel": False}),
        (2, False, {"precision": "bfloat16", "recompute": "selective"}),
        (2, False, {"precision": "bfloat16", "recompute": "full"}),
    ],
)
def test_the_same_bits_as_at_once(job: Job, key_value_heads: int, frozen: bool, options: dict[str, Any]) -> None:
    """Of two microbatches, after both of their backwards. Nothing is left for frozen weights."""
    tp, queue = build_mesh(Layout({"tp": 2})), WeightGradQueue()
    models = [model_of(tp, key_value_heads, frozen, options, queue) for queue in (None, queue)]
    losses = [[token_losses(model, 0, microbatch).sum() for microbatch in (0, 1)] for model in models]
    pending = []
    for at_once, split in zip(*losses, strict=True):
        at_once.backward()
        with queue.record() as deferred:
            split.backward()
        pending += deferred
    early = [name for name, parameter in models[1].named_parameters() if parameter.grad is not None]
    assert not any("proj" in name or "lm_head" in name for name in early)
    values = [value for layer in pending for value in layer.compute()]
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
