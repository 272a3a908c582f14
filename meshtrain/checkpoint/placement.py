"""Where every byte of a checkpoint lies: plain arithmetic over the layout that wrote it.

The manifest gives each tensor's global shape and the axes that cut it. With the layout, this
determines the part that each rank holds. Ranks that hold the same part divide the work: its rows
are cut once more, and each rank writes one of the pieces. So each byte is written once, and a
reader knows which file has what without opening any.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshtrain.layout import Layout, LayoutError
from meshtrain.parallel.sharding import Part, chunk_range, is_empty, local_slice, overlapping


@dataclass(frozen=True)
class Placement:
    """A tensor of a checkpoint, and how a layout's ranks hold it."""

    shape: tuple[int, ...]  # the global shape; parts of a scalar have one dim of size 1
    dtype: str  # safetensors' name, such as "F32"
    cuts: tuple[tuple[str, int], ...] = ()  # (axis, dim) of each cut, in order
    stages: tuple[int, ...] = (0,)  # indices on `pp` of the ranks that hold it, ascending

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape, with a scalar's as one dim of size 1."""
        return self.shape or (1,)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different parts."""
        return ("pp", *(axis for axis, _ in self.cuts))


def fits(tensor: Placement, layout: Layout) -> bool:
    """Whether the layout has all axes that cut a tensor, derived ones included, and none is used
    twice."""
    try:
        layout.size(*tensor.axes)
    except LayoutError:
        return False
    return all(axis in layout.axes or layout.size(axis) > 1 for axis, _ in tensor.cuts)


def part_of_rank(tensor: Placement, layout: Layout, rank: int) -> Part | None:
    """The part that a rank holds, possibly empty; None on other stages. Raises LayoutError: an
    unknown axis."""
    if layout.index(rank, "pp") not in tensor.stages:
        return None
    cuts = [(dim, layout.size(axis), layout.index(rank, axis)) for axis, dim in tensor.cuts]
    return local_slice(tensor.dims, cuts)


def part_to_write(tensor: Placement, layout: Layout, rank: int) -> Part | None:
    """The part that a rank writes: a share of the rows that it holds. None if it writes nothing."""
    part = part_of_rank(tensor, layout, rank)
    if part is None:
        return None
    share = share_of(part, tensor, layout, copy_number(tensor, layout, rank))
    return None if is_empty(share) else share


def copy_number(tensor: Placement, layout: Layout, rank: int) -> int:
    """The index of a rank among the ranks, of all the tensor's stages, that hold the same part of
    it."""
    stage = tensor.stages.index(layout.index(rank, "pp"))
    return stage * _copies_of_a_stage(tensor, layout) + layout.copy(rank, *tensor.axes)


def share_of(part: Part, tensor: Placement, layout: Layout, copy: int, of: int = 1) -> Part:
    """The rows of a part that copy number `copy` writes, or the `of` copies from that number on."""
    rows, *others = part
    size, number_of_copies = rows.stop - rows.start, copies(tensor, layout)
    first = chunk_range(size, number_of_copies, copy)
    last = chunk_range(size, number_of_copies, copy + of - 1)
    return slice(rows.start + first.start, rows.start + last.stop), *others


def replica_axes(tensor: Placement, layout: Layout) -> list[str] | None:
    """The axes along which a stage's copies lie, innermost first; None if one of them is only part
    of an axis.

    With `{dp_shard: 4, tp: 2}` a tensor that `tp` cuts has its copies along `dp_shard`. If `ep`
    over 4 ranks cuts it, they lie along a half of `dp_shard`, which is no axis.
    """
    cut = tuple(axis for axis, _ in tensor.cuts)
    uncut = []
    for axis, size in layout.sizes.items():  # outermost first
        if size > 1 and axis != "pp" and not layout.covers(cut, axis):
            uncut.append(axis)
    if layout.size(*uncut) != _copies_of_a_stage(tensor, layout):
        return None
    return uncut[::-1]


def copies(tensor: Placement, layout: Layout) -> int:
    """How many ranks hold each part of a tensor."""
    return len(tensor.stages) * _copies_of_a_stage(tensor, layout)


def _copies_of_a_stage(tensor: Placement, layout: Layout) -> int:
    return layout.world_size // layout.size(*tensor.axes)


def pieces(tensor: Placement, layout: Layout, part: Part) -> Iterator[tuple[int, Part]]:
    """The pieces that a reader of a part needs, as (rank, part of the whole), in O(pieces), not
    O(ranks)."""
    axes = [axis for axis, _ in tensor.cuts]
    cuts = [(dim, layout.size(axis)) for axis, dim in tensor.cuts]
    # The parts that ranks hold are cut once more, by rows, into the pieces that each of them
    # writes.
    cuts.append((0, copies(tensor, layout)))
    whole = tuple(slice(0, size) for size in tensor.dims)
    for (*indices, copy), piece in overlapping(cuts, whole, part):
        # The inverse of `copy_number`.
        stage, copy_in_stage = divmod(copy, _copies_of_a_stage(tensor, layout))
        coordinate = dict(zip(axes, indices, strict=True))
        rank = layout.rank_of_copy(copy_in_stage, pp=tensor.stages[stage], **coordinate)
        yield rank, piece
