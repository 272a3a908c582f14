"""Which part of a dim, and of a whole parameter, is whose: plain arithmetic, the same for training and for a plan.

Each cut is torch's own (`torch.chunk`): all parts are of one size but the last ones, which may be smaller or empty.
"""

from collections.abc import Sequence

Part = tuple[slice, ...]  # of each dim of the whole


def cut(size: int, parts: int, index: int) -> slice:
    """The `index`-th of `parts` parts of a dim."""
    each = -(-size // parts)
    return slice(min(index * each, size), min((index + 1) * each, size))


def part(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Part:
    """What is left of a whole of this shape after cuts made one after the other: (dim, parts, index) each."""
    left = [slice(0, size) for size in shape]
    for dim, parts, index in cuts:
        inner = cut(left[dim].stop - left[dim].start, parts, index)
        left[dim] = slice(left[dim].start + inner.start, left[dim].start + inner.stop)
    return tuple(left)
