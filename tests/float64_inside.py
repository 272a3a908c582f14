"""Test aid: code of a package that rounds to float32 inside (norms, softmax, angles) keeps float64.

A comparison to 1e-9 tells a bug from rounding only if nothing in the model rounds. Only what has
float64 already stays so: the class computes what it does, with more digits.
"""

import math
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
    `float()`, `to()`, `type()` and softmax, and a number too large for float32 is made float64.
    Calling it again does no harm."""
    if not _packages:
        for owner, name in (
            (Tensor, "to"),
            (Tensor, "type"),
            (Tensor, "float"),
            (Tensor, "softmax"),
            (F, "softmax"),
            (torch, "softmax"),
        ):
            _replace(owner, name, _kept(getattr(owner, name), stays=name == "float"))
        _replace(torch, "full", _kept_full(torch.full))
    _packages.update(packages)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, function)


def round_again() -> None:
    """Undoes `keep_float64`: tests/conftest.py does so after each test. The compiler, for one, does
    not know the functions that it puts in place of torch's."""
    while _replaced:
        setattr(*_replaced.pop())
    _packages.clear()


def _kept(function: Callable[..., Any], *, stays: bool) -> Callable[..., Any]:
    """`stays`: the call does nothing but round."""

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_called_by_packages() and isinstance(x, Tensor) and x.dtype == torch.float64:
            if stays:
                return x
            args = tuple(map(_wide, args))
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        return function(x, *args, **kwargs)

    return call


def _kept_full(function: Callable[..., Any]) -> Callable[..., Any]:
    """The smallest number of float64, in a mask for instance, is none of torch's default dtype."""

    def call(size: Any, fill_value: Any, *args: Any, **kwargs: Any) -> Any:
        is_finite = isinstance(fill_value, float) and math.isfinite(fill_value)
        is_too_large = is_finite and abs(fill_value) > torch.finfo(torch.float32).max
        if is_too_large and _is_called_by_packages():
            kwargs.setdefault("dtype", torch.float64)
        return function(size, fill_value, *args, **kwargs)

    return call


def _is_called_by_packages() -> bool:
    """Of the function that calls this one."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return caller.partition(".")[0] in _packages


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
