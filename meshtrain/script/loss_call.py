"""Calls of a script's `loss_of(model, microbatch) -> (sum, count)`.

It gets a `ModelCall` in the model's place, on every layout the same: something to call, with the
model's settings as attributes. A pipeline's stage cannot run the model as a whole, so there the
function runs twice for a microbatch: up to the call of the model, whose arguments are the stage's
inputs, and on the last stage once more, where that call returns the output that the stages have
computed.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.errors import InputError, plural
from meshtrain.parallel.torch_private import ends_in_mean

LossOf = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Sums:
    """What `loss_of` has returned."""

    total: Tensor  # scalar, with a graph
    count: Tensor  # scalar in float64


class ModelCall:
    """The model, as `loss_of` sees it."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        self.__model = model
        self.__call = call

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.__call(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__model, name)
        is_own = getattr(value, "__self__", None) is self.__model
        if is_own or isinstance(value, Tensor | nn.Module):
            raise InputError(
                f"loss_of uses `{name}` of the model, of which a rank may hold only a part: it may "
                "call the model and read its settings. What lies inside belongs into the model's "
                "forward, and a penalty on weights into the optimizer's weight_decay"
            )
        return value


class _LeaveLoss(BaseException):
    """Ends `loss_of` at its call of the model. No Exception, so that a function that catches those
    lets it pass."""


def call_loss(
    loss_of: LossOf, model: nn.Module, samples: Any, size: int, device: torch.device
) -> Sums:
    """Runs `loss_of` with the whole model on a microbatch of `size` samples. Raises InputError: it
    does not return what it should."""
    return _checked(loss_of(ModelCall(model, model), samples), size, device)


def inputs_of(loss_of: LossOf, stage: nn.Module, samples: Any) -> tuple[Tensor | None, ...]:
    """What `loss_of` calls the model with, by position. Raises InputError: it does not call it, or
    with something that cannot travel with a pipeline's microbatch."""
    found: tuple[Any, ...] | None = None

    def record(*inputs: Any, **named: Any) -> Any:
        nonlocal found
        found = _by_position(stage, inputs, named)
        raise _LeaveLoss

    with suppress(_LeaveLoss):
        loss_of(ModelCall(stage, record), samples)
    if found is None:
        raise InputError("loss_of does not call the model, and under pp it has to, once")
    for value in found:
        if value is not None and not isinstance(value, Tensor):
            raise InputError(
                f"loss_of gives the model a {type(value).__name__}, and under pp its arguments are "
                "tensors or None: make it a setting of the model, or use pp: 1"
            )
    return found


def loss_of_output(
    loss_of: LossOf,
    stage: nn.Module,
    samples: Any,
    size: int,
    output: Any,
    device: torch.device,
) -> Sums:
    """Runs `loss_of` with the output of the model that the stages have computed. Raises InputError:
    it calls the model more than once."""
    calls = 0

    def give(*inputs: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise InputError(
                "loss_of calls the model more than once, and under pp a microbatch passes the "
                "stages once: join the inputs of both calls along their first dim, or use pp: 1"
            )
        return output

    return _checked(loss_of(ModelCall(stage, give), samples), size, device)


def _by_position(model: nn.Module, inputs: Any, named: Any) -> tuple[Any, ...]:
    if not named:
        return inputs
    forward = type(model).forward
    bound = inspect.signature(forward).bind(model, *inputs, **named)
    bound.apply_defaults()
    if bound.kwargs:
        raise InputError(
            f"loss_of gives the model {', '.join(bound.kwargs)} by keyword only, and a stage of pp "
            "gets its inputs by position: let forward take them so, or use pp: 1"
        )
    return bound.args[1:]


def _checked(returned: Any, size: int, device: torch.device) -> Sums:
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not is_pair:
        raise InputError(
            f"loss_of returned a {type(returned).__name__}: expected (sum, count), the sum of the "
            "losses of its samples as a scalar tensor, and what they count"
        )
    total, count = returned
    if not isinstance(total, Tensor) or total.dim() > 0 or not total.is_floating_point():
        found = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise InputError(
            f"loss_of returned {found} as its sum: expected a scalar tensor, the sum (no mean) of "
            "the losses of its samples"
        )
    if not total.requires_grad:
        raise InputError(
            "loss_of returned a sum that does not depend on the model's parameters, so that there "
            "is no gradient: compute it from what the model returns, with a trained parameter"
        )
    # The mean of one sample's elements is as good a loss of it as any other.
    if size > 1 and ends_in_mean(total, least=size):
        raise InputError(
            f"loss_of returned a mean over its {plural(size, 'sample')} as their sum, and the mean "
            'of a share depends on the layout: add up, by reduction="sum" or .sum(), and return '
            "the number of what was added up as the count. A mean over something else than samples "
            "is written .sum() / n"
        )
    if isinstance(count, Tensor):
        if count.dim() > 0:
            raise InputError(
                f"loss_of returned a count of shape {tuple(count.shape)}: expected one number"
            )
        if count.requires_grad:
            raise InputError(
                "loss_of returned a count that depends on the model, of which the gradient would "
                "have to know: a count says how much its samples weigh, from their data alone"
            )
        return Sums(total, count.to(device, torch.float64))
    if not isinstance(count, int | float):
        raise InputError(
            f"loss_of returned a {type(count).__name__} as its count: expected a number, or a "
            "scalar tensor"
        )
    return Sums(total, torch.full((), float(count), dtype=torch.float64, device=device))
