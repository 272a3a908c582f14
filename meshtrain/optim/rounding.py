"""Stochastic rounding to bfloat16, the same on every layout.

Rounding to nearest discards every change of an average by less than half the spacing of its type:
bfloat16 has 8 bits of precision, and with a decay of 0.999 the second moment could neither fall nor
follow the squared gradients. Rounding up or down with probabilities that preserve the mean avoids
this (Zamirai et al., https://arxiv.org/abs/2010.06192). The random bits of an element are a
function of (update number, parameter name, position in the whole parameter).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshtrain.dropout import GAMMA, hash64, mix
from meshtrain.parallel.sharding import Part, Shape

BLOCK = 2**22  # elements computed at once, so that no whole average exists in float32


def blocks(shape: Sequence[int]) -> Iterator[slice]:
    """Slices of the rows of a tensor of this nonempty shape: about `BLOCK` elements each, or one
    row."""
    rows = max(1, BLOCK * shape[0] // torch.Size(shape).numel())
    for first in range(0, shape[0], rows):
        yield slice(first, min(first + rows, shape[0]))


def random_bits(name: str, update: Tensor, whole: Shape, part: Part) -> Tensor:
    """64 random bits per element of a part, as int64 of its shape. `update`: its number, a scalar
    on the device."""
    # Of each element: its position in the flattened whole.
    numbers = torch.zeros((), dtype=torch.int64, device=update.device)
    for rows, size in zip(part, whole, strict=True):
        positions = torch.arange(rows.start, rows.stop, device=update.device)
        numbers = numbers[..., None] * size + positions
    seed = mix(update.long() * GAMMA ^ hash64(f"meshtrain rounding {name}"))
    return mix(seed + numbers * GAMMA)


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds x, which must be finite, to bfloat16. `bits`: of the shape of x; the lowest 16 of each
    are used."""
    # bfloat16 is the upper half of float32. A carry rounds away from zero, with probability lower
    # half / 2^16.
    carried = x.float().view(torch.int32) + (bits & 0xFFFF).int()
    upper_half = carried & -0x10000
    return upper_half.view(torch.float32).bfloat16()
