"""Where every byte of a checkpoint lies: plain arithmetic over the layout that wrote it.

The manifest says of each tensor its global shape and which axes cut it, and nothing of ranks. From that and the layout
follows the part that each rank holds. Ranks that hold the same part share the work: its rows are cut once more, into
as many pieces as there are of these ranks, and each of them writes one. So each byte is written once, and what a
reader needs of which file is found without looking into any.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshtrain.cuts import Part, part
from meshtrain.layout import Layout


@dataclass(frozen=True)
class Placement:
    """A tensor of a checkpoint, and how a layout's ranks hold it.

    Attributes:
        shape: of the whole; () for a scalar, which counts as one dim of size 1 wherever parts are meant.
        dtype: in safetensors' words, "F32".
        cuts: which axes cut it, in the order of their cuts, each with the dim that it cuts.
        stages: the indices on `pp` of the ranks that hold it, ascending.
    """

    shape: tuple[int, ...]
    dtype: str
    cuts: tuple[tuple[str, int], ...] = ()
    stages: tuple[int, ...] = (0,)

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape with a scalar as one dim."""
        return self.shape or (1,)


def held_part(tensor: Placement, layout: Layout, rank: int) -> Part | None:
    """The part of the whole that a rank holds; None on the ranks of other stages. It may be empty."""
    place = layout.coordinate(rank)
    if place.get("pp", 0) not in tensor.stages:
        return None
    return part(tensor.dims, [(dim, layout.size(axis), place[axis]) for axis, dim in _cuts(tensor, layout)])


def written_part(tensor: Placement, layout: Layout, rank: int) -> Part | None:
    """The part that a rank writes: a share of the rows of what it holds. None if there is nothing for it to write."""
    held = held_part(tensor, layout, rank)
    if held is None:
        return None
    piece = _shared(held, copies(tensor, layout), _copy(tensor, layout, rank))
    return None if is_empty(piece) else piece


def copies(tensor: Placement, layout: Layout) -> int:
    """How many ranks hold each part of a tensor."""
    return len(tensor.stages) * math.prod(layout.size(axis) for axis in _copying(tensor, layout))


def pieces(tensor: Placement, layout: Layout, wanted: Part) -> Iterator[tuple[int, Part]]:
    """The pieces that a reader of the part `wanted` needs: the rank that wrote each, and its part of the whole.

    Takes time for the pieces that are found, not for the ranks of the layout.
    """
    cuts = _cuts(tensor, layout)
    for indices, held in _meeting([(axis, dim, layout.size(axis)) for axis, dim in cuts], _whole(tensor), wanted):
        place = {axis: index for (axis, _), index in zip(cuts, indices, strict=True)}
        n = copies(tensor, layout)
        for copy, piece in _indices(held, 0, n, wanted):
            yield layout.rank(**place, **_coordinate(tensor, layout, copy)), piece


def overlap(one: Part, other: Part) -> Part:
    """What two parts of a whole have in common; it may be empty."""
    both = zip(one, other, strict=True)
    return tuple(slice(low := max(a.start, b.start), max(low, min(a.stop, b.stop))) for a, b in both)


def within(inner: Part, outer: Part) -> Part:
    """Where a part lies in another part that contains it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True))


def is_empty(piece: Part) -> bool:
    return any(each.stop <= each.start for each in piece)


def shape_of(piece: Part) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in piece)


def _whole(tensor: Placement) -> Part:
    return tuple(slice(0, size) for size in tensor.dims)


def _cuts(tensor: Placement, layout: Layout) -> list[tuple[str, int]]:
    return [(axis, dim) for axis, dim in tensor.cuts if axis in layout.axes]


def _copying(tensor: Placement, layout: Layout) -> list[str]:
    """The axes whose ranks hold the same part, outermost first."""
    cutting = {axis for axis, _ in tensor.cuts}
    return [axis for axis in layout.axes if axis != "pp" and axis not in cutting]


def _copy(tensor: Placement, layout: Layout, rank: int) -> int:
    """The number of a rank among those that hold the same part."""
    place = layout.coordinate(rank)
    number = tensor.stages.index(place.get("pp", 0))
    for axis in _copying(tensor, layout):
        number = number * layout.size(axis) + place[axis]
    return number


def _coordinate(tensor: Placement, layout: Layout, copy: int) -> dict[str, int]:
    """The other way round: where on the axes that do not cut the rank with this number sits."""
    place = {}
    for axis in reversed(_copying(tensor, layout)):
        copy, place[axis] = divmod(copy, layout.size(axis))
    if "pp" in layout.axes:
        place["pp"] = tensor.stages[copy]
    return place


def _shared(held: Part, n: int, index: int) -> Part:
    """The `index`-th of n pieces of a part, by rows."""
    rows = part([held[0].stop - held[0].start], [(0, n, index)])[0]
    return slice(held[0].start + rows.start, held[0].start + rows.stop), *held[1:]


def _meeting(cuts: Sequence[tuple[str, int, int]], left: Part, wanted: Part) -> Iterator[tuple[tuple[int, ...], Part]]:
    """The parts after these cuts that have something in common with `wanted`, each with its index on every cut."""
    if not cuts:
        if not is_empty(overlap(left, wanted)):
            yield (), left
        return
    _, dim, parts = cuts[0]
    for index, piece in _indices(left, dim, parts, wanted):
        for others, found in _meeting(cuts[1:], piece, wanted):
            yield (index, *others), found


def _indices(left: Part, dim: int, parts: int, wanted: Part) -> Iterator[tuple[int, Part]]:
    """Of the parts of one cut those that meet `wanted` in that dim; they are as long as cuts.py makes them."""
    start, size = left[dim].start, left[dim].stop - left[dim].start
    if size == 0:
        return
    each = -(-size // parts)
    low, high = max(wanted[dim].start, start) - start, min(wanted[dim].stop, left[dim].stop) - start
    for index in range(low // each, min(parts, -(-high // each))):
        piece = slice(start + index * each, min(start + (index + 1) * each, left[dim].stop))
        yield index, (*left[:dim], piece, *left[dim + 1 :])
