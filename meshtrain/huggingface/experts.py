"""Experts of transformers' classes: they compute by `meshtrain.experts`, so that
`parallel.expert_parallel` distributes them over ranks, and their routers get the loss term of
their balance.

transformers asks a registry how a layer of experts computes. `adopt_experts` names meshtrain's way
there, and nothing of a class is replaced.
"""

import fnmatch
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.errors import InputError
from meshtrain.experts import Balance, choose, run_experts
from meshtrain.loss import by_sample
from meshtrain.parallel.linear.grouped import GroupedMatmul
from meshtrain.parallel.torch_private import never_compiled, to_local
from meshtrain.parallel.tp_plan import EXPERTS, SplitError, expert_modules

NAME = "meshtrain"  # of the way in transformers' registry


def adopt_experts(model: nn.Module) -> dict[str, str]:
    """Makes the layers of experts of a transformers model compute as meshtrain's do.

    Takes those of classes with transformers' decorator `use_experts_implementation`, with any
    activation, with biases, and with transposed or interleaved weights.

    Args:
        model: on any device, meta included; may contain the class as a child.

    Returns:
        its `ep_plan`; empty if it has no experts that can be distributed.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        if not _is_decorated(module):
            continue
        found: Any = module
        found.config._experts_implementation = NAME
        found.dispatch = None  # see `meshtrain.experts.Experts`
        found.weight_grad_queue = None  # see `SupportsDeferral`
        if _has_own_experts(model, name):
            plan[name] = EXPERTS
    return plan


def plan_without_experts(
    model: nn.Module, ep_plan: Mapping[str, str], tp_plan: Mapping[str, str]
) -> dict[str, str]:
    """A class's `tp_plan` without the words for layers that the `ep_plan` names, and for what is in
    them: whole experts are distributed, and tp splits none."""
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    of_experts = {name for name in names if any(f"{name}.".startswith(f"{e}.") for e in ep_plan)}
    return {
        pattern: word
        for pattern, word in tp_plan.items()
        if not of_experts.intersection(fnmatch.filter(names, pattern))
    }


def _is_decorated(module: nn.Module) -> bool:
    """Whether a layer asks transformers' registry how to compute: the decorator sets these."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def _has_own_experts(model: nn.Module, name: str) -> bool:
    """Whether all parameters of the layer have its experts as first dim. A norm behind the experts,
    for instance, has none: then each rank has the whole layer."""
    try:
        counts = expert_modules(model, {name: EXPERTS})
    except SplitError:
        return False
    return counts[name] == model.get_submodule(name).num_experts


@never_compiled
def _forward(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """x (n, d), and of each token the experts and their weights (n, j) -> (n, d)."""
    return run_experts(module, x, chosen, weights, partial(_products, module))


def _products(module: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """What the experts of this rank compute of their rows: down(activation(up(x)))."""
    expert_of_row = _one_hot(counts, rows) if module.has_bias else None
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _linear(module, first, rows, counts, expert_of_row)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outputs = _linear(module, "down_proj", inner, counts, expert_of_row)
    return module.post_expert_norm(outputs) if module.has_post_expert_norm else outputs


def _linear(
    module: Any, name: str, rows: Tensor, counts: Tensor, expert_of_row: Tensor | None
) -> Tensor:
    weight = to_local(getattr(module, name))  # (E, out, in), or transposed (E, in, out)
    queue = module.weight_grad_queue
    y = GroupedMatmul.apply(rows, weight, counts, queue, module.is_transposed)
    if expert_of_row is None:
        return y
    # A product, because its gradient sums the rows of an expert in the same order each time, and
    # rows of no expert get no bias.
    return torch.addmm(y, expert_of_row, to_local(getattr(module, f"{name}_bias")))


def _one_hot(counts: Tensor, rows: Tensor) -> Tensor:
    """(n, E) in the dtype of the rows (n, d): 1 where a row is of an expert."""
    ends = counts.cumsum(0)
    row = torch.arange(len(rows), device=rows.device)[:, None]
    return ((row >= ends - counts) & (row < ends)).to(rows.dtype)


# Balance ------------------------------------------------------------------------------------------


def attach_balance(model: Any, kind: str = "batch") -> None:
    """Gives the routers of a transformers model the load-balancing term that its class adds to the
    loss, if its config asks for it (`output_router_logits`, `router_aux_loss_coef`).

    The class takes the loads of all layers together, over what one forward sees, which depends on
    the layout. Here the term is that of `meshtrain.experts.Balance`, with the same scale: the loads
    are those of each layer, over the global batch of the previous step or over the token's sample.

    Adds a parameter `balance.loads` to each router; files do not store it.

    Args:
        model: the transformers model itself, on any device.
        kind: see `Balance`.
    """
    coefficient = getattr(model, "router_aux_loss_coef", 0)  # set by classes that add the term
    asked = getattr(model.config.get_text_config(), "output_router_logits", False)
    if not asked or not coefficient:
        return
    routers = list(_routers(model))
    for i, (router, index) in enumerate(routers):
        balance = Balance(model.num_experts, len(routers), i, kind=kind, aux_loss_coef=coefficient)
        router.balance = balance.to(next(router.parameters()).device)
        router.register_forward_hook(partial(_balance, index, model.num_experts_per_tok))


def _routers(model: Any) -> Iterator[tuple[Any, int]]:
    """The modules whose output has router logits, and where: as the class says it for its own
    `router_logits`."""
    recorders = model._can_record_outputs["router_logits"]
    if not isinstance(recorders, list):
        recorders = [recorders]
    for name, module in model.named_modules():
        for recorder in recorders:
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                yield module, recorder.index


def _balance(index: int, per_token: int, router: Any, inputs: Any, output: Any) -> Any:
    """A hook: the output of a router, with the terms attached to one of its tensors."""
    outputs = [output] if isinstance(output, Tensor) else list(output)
    index = 0 if isinstance(output, Tensor) else index
    logits = outputs[index]
    experts = router.balance.num_experts
    if logits.shape[-1] != experts:
        raise InputError(
            f"{type(router).__name__} returns logits {tuple(logits.shape)}, not one for each of "
            f"{experts} experts, so the term that balances them is unknown: give "
            "output_router_logits: false"
        )
    # Logits of a tuple have no further use, and what has none gets no gradient.
    used = [i for i, x in enumerate(outputs) if x is not logits and x.is_floating_point()]
    carrier = used[0] if used else index
    logits = by_sample(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    scores = logits.softmax(-1)
    chosen = choose(scores.detach(), per_token)
    outputs[carrier] = router.balance(outputs[carrier], logits, scores, chosen, None)
    return outputs[0] if isinstance(output, Tensor) else tuple(outputs)
