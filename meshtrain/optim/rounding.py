"""Stochastic rounding to bfloat16, the same on every layout.

An average that moves by less than half a step of its type stays where it is when it is rounded to the nearest number:
bfloat16 has 8 bits, and with a decay of 0.999 the second moment could neither fall nor follow its squares. Rounding up
or down with the probabilities that keep the mean lets it (Zamirai et al., https://arxiv.org/abs/2010.06192). The random
bits of an element are a function of (number of the update, name of the parameter, place in the whole parameter).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshtrain.dropout import GAMMA, hash64, mix
from meshtrain.parallel.sharding import Part, Shape

BLOCK = 2**22  # elements that are computed at once, so that no average is there in float32 as a whole


def blocks(shape: Sequence[int]) -> Iterator[slice]:
    """Rows of a tensor of this shape, which is not empty: about `BLOCK` elements together, or one row."""
    rows = max(1, BLOCK * shape[0] // torch.Size(shape).numel())
    for first in range(0, shape[0], rows):
        yield slice(first, min(first + rows, shape[0]))


def random_bits(name: str, update: Tensor, whole: Shape, part: Part) -> Tensor:
    """64 bits for each element of a part, int64 in its shape. `update`: its number, a scalar on the device."""
    numbers = torch.zeros((), dtype=torch.int64, device=update.device)
    for rows, size in zip(part, whole, strict=True):
        numbers = numbers[..., None] * size + torch.arange(rows.start, rows.stop, device=update.device)
    return mix(mix(update.long() * GAMMA ^ hash64(f"meshtrain rounding {name}")) + numbers * GAMMA)


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """x, which is finite, in bfloat16; `bits`: of its shape, the lowest 16 of each are used."""
    # bfloat16 is float32's upper half. A carry leads away from zero, with the lower half's share as its probability.
    return ((x.float().view(torch.int32) + (bits & 0xFFFF).int()) & -0x10000).view(torch.float32).bfloat16()
