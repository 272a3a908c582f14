"""A loss of the user's own: what a model file says about it, read and checked without torch."""

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from meshtrain.errors import InputError

LOSS, WEIGHT, OVER_WHOLE_SAMPLES = "loss", "weight", "over_whole_samples"
ALONE = ("outputs", "targets")
WITH_REFERENCE = (*ALONE, "reference")


class LossFunctions(NamedTuple):
    """What a model file defines in the place of the cross entropy (docs/losses.md).

    Attributes:
        loss: (outputs, targets), or with a reference (outputs, targets, reference) -> (b,), the sum
            of each sample's loss, alone or with metrics.
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
    loss = _function(names[LOSS], LOSS, ALONE, WITH_REFERENCE)
    weight = None
    if names.get(WEIGHT) is not None:
        weight = _function(names[WEIGHT], WEIGHT, ("targets",))
    over_whole_samples = names.get(OVER_WHOLE_SAMPLES, False)
    if not isinstance(over_whole_samples, bool):
        raise InputError(
            f"`{OVER_WHOLE_SAMPLES}` is a {type(over_whole_samples).__name__}: expected True or "
            "False"
        )
    return LossFunctions(loss, weight, over_whole_samples)


def reference_problem(own: LossFunctions | None, *, has_reference: bool) -> str | None:
    """What is wrong with a config that has `train.reference`, or has none; None: nothing."""
    if own is None:
        if not has_reference:
            return None
        return (
            f"nothing looks at a reference: define `{_call(LOSS, WITH_REFERENCE)}` in the model's "
            "file, or take train.reference away"
        )
    if has_reference and not _takes(own.loss, WITH_REFERENCE):
        return (
            f"`{LOSS}` of the model's file is called as `{_call(LOSS, WITH_REFERENCE)}` then, and "
            "takes two arguments: give it a third one, or take train.reference away"
        )
    if not has_reference and not _takes(own.loss, ALONE):
        return (
            f"`{LOSS}` of the model's file takes three arguments, and without a reference it is "
            f"called as `{_call(LOSS, ALONE)}`: give train.reference: {{weights: FOLDER}}"
        )
    return None


def _function(value: Any, name: str, *forms: Sequence[str]) -> Callable[..., Any]:
    """`forms`: the arguments with which the function may be called; it has to take one of them."""
    expected = " or ".join(f"`{_call(name, arguments)}`" for arguments in forms)
    if not callable(value):
        raise InputError(
            f"`{name}` is a {type(value).__name__}: expected a function {expected} "
            "(docs/losses.md), or another name for it"
        )
    if not any(_takes(value, arguments) for arguments in forms):
        raise InputError(
            f"`{name}{inspect.signature(value)}` is called as {expected}: give it these arguments "
            "(docs/losses.md)"
        )
    return value


def _call(name: str, arguments: Sequence[str]) -> str:
    return f"{name}({', '.join(arguments)})"


def _takes(function: Callable[..., Any], arguments: Sequence[str]) -> bool:
    """Whether a function can be called with so many arguments, given by their places."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function written in C
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True
