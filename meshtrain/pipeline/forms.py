"""What a block returns, and so what travels between stages: a tensor, or a nest (tuple, list, dict)
of tensors, None and plain values.

The *form* of such a value has `TensorMeta` in the place of its tensors: all that a receiver has to
know of it before it arrives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshtrain.parallel.torch_private import (
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)


@dataclass(frozen=True)
class TensorMeta:
    """What a receiver has to know about a tensor. `order`: its dims by descending stride."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMeta":
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
        return cls(tuple(tensor.shape), tuple(order), tensor.dtype)

    def fits(self, other: "TensorMeta") -> bool:
        """Whether tensors are alike but for their strides."""
        return (self.shape, self.dtype) == (other.shape, other.dtype)

    def lay_out(self, tensor: Tensor) -> Tensor:
        """The tensor as contiguous memory, with dims in `order`."""
        return tensor.permute(self.order).contiguous()

    def empty(self, device: torch.device) -> Tensor:
        """A buffer to receive into; `view` restores the tensor's shape and strides."""
        shape = [self.shape[dim] for dim in self.order]
        return torch.empty(shape, dtype=self.dtype, device=device)

    def view(self, memory: Tensor) -> Tensor:
        """The inverse of `lay_out`."""
        return memory.permute([self.order.index(dim) for dim in range(len(self.order))])


@dataclass(frozen=True)
class Activation:
    """What a stage hands on to the next.

    Attributes:
        value: what its last block has returned.
        earlier: the forms of what all blocks before that one have returned.
    """

    value: Any
    earlier: tuple[Any, ...]

    @property
    def about(self) -> tuple[Any, tuple[Any, ...]]:
        """All but the tensors."""
        return form_of(self.value), self.earlier


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def has_gradient(tensor: Tensor | TensorMeta) -> bool:
    """Whether a gradient travels back for a tensor: for one of real or complex numbers."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def form_of(value: Any) -> Any:
    return tree_map_only(Tensor, TensorMeta.of, value)


def filled(form: Any, tensors: Sequence[Tensor]) -> Any:
    """The value of a form, with these tensors in their order."""
    remaining = iter(tensors)
    leaves, nest = tree_flatten(form)
    leaves = [next(remaining) if isinstance(leaf, TensorMeta) else leaf for leaf in leaves]
    return tree_unflatten(leaves, nest)


def alike(form: Any, other: Any) -> bool:
    """Whether two forms are equal but for the strides of tensors."""
    leaves, nest = tree_flatten(form)
    other_leaves, other_nest = tree_flatten(other)
    return nest == other_nest and all(map(_same_leaf, leaves, other_leaves))


def _same_leaf(leaf: Any, other: Any) -> bool:
    if isinstance(leaf, TensorMeta) and isinstance(other, TensorMeta):
        return leaf.fits(other)
    return leaf == other
