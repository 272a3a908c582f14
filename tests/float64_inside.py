"""Test aid: code of a package that rounds to float32 inside (norms, softmax, angles) keeps float64.

A comparison to 1e-9 tells a bug from rounding only if nothing in the model rounds. Only what has
float64 already stays so: the class computes what it does, with more digits.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_packages: set[str] = set()
_replaced: list[tuple[Any, str, Callable[..., Any]]] = []


def keep_float64(*packages: str) -> None:
    """From now on float64 tensors stay float64 in calls that modules of these packages make of
    `float()`, `to()` and softmax. Calling it again does no harm."""
    if not _packages:
        for owner, name in (
            (Tensor, "to"),
            (Tensor, "float"),
            (Tensor, "softmax"),
            (F, "softmax"),
            (torch, "softmax"),
        ):
            function = getattr(owner, name)
            _replaced.append((owner, name, function))
            setattr(owner, name, _kept(function, stays=name == "float"))
    _packages.update(packages)


def round_again() -> None:
    """Undoes `keep_float64`: tests/conftest.py does so after each test. The compiler, for one, does
    not know the functions that it puts in place of torch's."""
    while _replaced:
        setattr(*_replaced.pop())
    _packages.clear()


def _kept(function: Callable[..., Any], *, stays: bool) -> Callable[..., Any]:
    """`stays`: the call does nothing but round."""

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if caller in _packages and isinstance(x, Tensor) and x.dtype == torch.float64:
            if stays:
                return x
            args = tuple(map(_wide, args))
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        return function(x, *args, **kwargs)

    return call


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
