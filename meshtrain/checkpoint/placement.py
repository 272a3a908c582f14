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
    piece = (
        None if part is None else share_of(part, tensor, layout, copy_number(tensor, layout, rank))
    )
    return None if piece is None or is_empty(piece) else piece


def copy_number(tensor: Placement, layout: Layout, rank: int) -> int:
    """The index of a rank among the ranks, of all the tensor's stages, that hold the same part of
    it."""
    stage = tensor.stages.index(layout.index(rank, "pp"))
    return stage * _copies_of_a_stage(tensor, layout) + layout.copy(rank, *tensor.axes)


def share_of(part: Part, tensor: Placement, layout: Layout, copy: int, of: int = 1) -> Part:
    """The rows of a part that copy number `copy` writes, or the `of` copies from that number on."""
    shares = [
        chunk_range(part[0].stop - part[0].start, copies(tensor, layout), number)
        for number in (copy, copy + of - 1)
    ]
    return slice(part[0].start + shares[0].start, part[0].start + shares[1].stop), *part[1:]


def replica_axes(tensor: Placement, layout: Layout) -> list[str] | None:
    """The axes along which a stage's copies lie, innermost first; None if one of them is only part
    of an axis."""
    cut = tuple(axis for axis, _ in tensor.cuts)
    uncut = [
        axis
        for axis, size in layout.sizes.items()
        if size > 1 and axis != "pp" and not layout.covers(cut, axis)
    ]
    return uncut[::-1] if layout.size(*uncut) == _copies_of_a_stage(tensor, layout) else None


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
    in_stage = _copies_of_a_stage(tensor, layout)
    # The parts that ranks hold are cut once more, by rows, into the pieces that each of them
    # writes.
    all_cuts = [*cuts, (0, copies(tensor, layout))]
    for (*indices, copy), piece in overlapping(
        all_cuts, tuple(slice(0, size) for size in tensor.dims), part
    ):
        stage, number = divmod(copy, in_stage)
        coordinate = dict(zip(axes, indices, strict=True))
        yield layout.rank_of_copy(number, pp=tensor.stages[stage], **coordinate), piece
