"""Stand-ins: tensors with a shape, a dtype and a device, and without values.

A stage runs the model's own forward from its start, although what comes before its first block is
the work of other stages. There stand-ins take the place of what it does not have: parameters, and
what blocks return. Whatever is computed from a stand-in is one: it takes neither memory nor time on
the device, draws no random number, and cannot be mistaken for a result.
"""

from typing import Any

import torch
from torch import Tensor

from meshtrain.parallel.torch_private import (
    tree_leaves,
    tree_map_only,
    without_dispatch_modes,
    without_torch_function,
    wrapper_without_memory,
    written_tensors,
)
from meshtrain.pipeline.forms import TensorMeta


class StandInError(RuntimeError):
    """A forward needs the values of a stand-in. The message is the end of a sentence that begins
    with "it"."""


class StandIn(Tensor):
    """See the module.

    Attributes:
        meta: a tensor like it on the meta device.
        source: what it stands for, or was computed from, for people.
    """

    meta: Tensor
    source: str

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, source: str) -> "StandIn":
        stand_in = wrapper_without_memory(cls, meta, device)
        stand_in.meta, stand_in.source = meta, source
        return stand_in

    @classmethod
    def like(
        cls, x: Tensor, device: torch.device, source: str, dtype: torch.dtype | None = None
    ) -> "StandIn":
        """In the place of a tensor. `dtype`: of real numbers; None: the tensor's own."""
        dtype = dtype if dtype is not None and x.is_floating_point() else x.dtype
        return cls(torch.empty(x.shape, dtype=dtype, device="meta"), device, source)

    __torch_function__ = without_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_dispatch_modes():
            return _run(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StandIn":
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StandIn({tuple(self.shape)}, {self.dtype}, {self.source})"


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn))
    if _uses_shape_alone(func):
        args, kwargs = tree_map_only(StandIn, _without_values, (args, kwargs))
        return func(*args, **kwargs)
    for x in written_tensors(func, args, kwargs):
        if not isinstance(x, StandIn):
            raise StandInError(f"writes something computed from {first.source} into another tensor")

    # The same operator on the meta device, which has no values either.
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else first.device
    stand_in_of: dict[int, StandIn] = {}  # so that an operator in place returns what it was given

    def to_meta(x: Tensor) -> Tensor:
        if isinstance(x, StandIn):
            stand_in_of[id(x.meta)] = x
            return x.meta
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    on_meta, named = tree_map_only(Tensor, to_meta, (args, kwargs))
    if "device" in named:
        named["device"] = torch.device("meta")
    try:
        result = func(*on_meta, **named)
    except Exception as error:
        what = "reads values of" if _reads(func) else f"cannot compute {func} without"
        raise StandInError(f"{what} {first.source}") from error

    def to_stand_in(x: Tensor) -> StandIn:
        if id(x) in stand_in_of:
            return stand_in_of[id(x)]
        return StandIn(x, device, first.source)

    return tree_map_only(Tensor, to_stand_in, result)


def _uses_shape_alone(func: Any) -> bool:
    """Whether an operator makes the same tensor of all tensors of one shape, dtype and device."""
    name = func.__name__
    makes_another = name.startswith("new_") or "_like" in name
    return makes_another and torch.Tag.nondeterministic_seeded not in func.tags


def _without_values(x: StandIn) -> Tensor:
    """A tensor of one element that looks like the stand-in."""
    return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)


def _reads(func: Any) -> bool:
    return torch.Tag.data_dependent_output in func.tags


def stand_ins(form: Any, device: torch.device, source: str) -> Any:
    """Stand-ins in the place of the tensors of a form (`forms.py`)."""

    def stand_in(meta: TensorMeta) -> StandIn:
        return StandIn(meta.view(meta.empty(torch.device("meta"))), device, source)

    with without_dispatch_modes():
        return tree_map_only(TensorMeta, stand_in, form)


def first_stand_in(values: Any) -> StandIn | None:
    """A stand-in among these values, or in a record among them; None: there is none."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, StandIn):
            return leaf
        if isinstance(leaf, Tensor):
            continue
        for field in getattr(leaf, "__dict__", {}).values():
            if isinstance(field, StandIn):
                return field
    return None
