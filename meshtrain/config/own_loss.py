"""A loss of the user's own: what a model file says about it, read and checked without torch."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from meshtrain.errors import InputError

LOSS, WEIGHT, OVER_WHOLE_SAMPLES = "loss", "weight", "over_whole_samples"


class LossFunctions(NamedTuple):
    """What a model file defines in the place of the cross entropy (docs/losses.md).

    Attributes:
        loss: (outputs, targets) -> (b,), the sum of each sample's loss, alone or with metrics.
        weight: (targets) -> (b,), what each sample counts; None: the default.
        over_whole_samples: the loss is no sum over tokens, so that parts of a sequence have none.
    """

    loss: Callable[..., Any]
    weight: Callable[..., Any] | None
    over_whole_samples: bool


def loss_functions(module: ModuleType) -> LossFunctions | None:
    """The loss that a model file defines; None: it defines none. Raises InputError: it defines
    something else under these names."""
    names = vars(module)
    if LOSS not in names:
        for name in (WEIGHT, OVER_WHOLE_SAMPLES):
            if name in names:
                raise InputError(
                    f"it defines `{name}` and no `{LOSS}`, and without that it changes nothing: "
                    f"define `{LOSS}(outputs, targets)` too, or call it something else"
                )
        return None
    loss = _function(names[LOSS], LOSS, "outputs", "targets")
    weight = None
    if names.get(WEIGHT) is not None:
        weight = _function(names[WEIGHT], WEIGHT, "targets")
    over_whole_samples = names.get(OVER_WHOLE_SAMPLES, False)
    if not isinstance(over_whole_samples, bool):
        raise InputError(
            f"`{OVER_WHOLE_SAMPLES}` is a {type(over_whole_samples).__name__}: expected True or "
            "False"
        )
    return LossFunctions(loss, weight, over_whole_samples)


def _function(value: Any, name: str, *arguments: str) -> Callable[..., Any]:
    expected = f"{name}({', '.join(arguments)})"
    if not callable(value):
        raise InputError(
            f"`{name}` is a {type(value).__name__}: expected a function `{expected}` "
            "(docs/losses.md), or another name for it"
        )
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # of a function written in C
        return value
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise InputError(
            f"`{name}{signature}` is called as `{expected}`: {error} (docs/losses.md)"
        ) from error
    return value
