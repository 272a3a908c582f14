"""Where every byte of a checkpoint lies: plain arithmetic over the layout that wrote it.

The manifest says of each tensor its global shape and which axes cut it. From that and the layout follows the part that
each rank holds. Ranks that hold the same part share the work: its rows are cut once more, and each rank writes one of
the pieces. So each byte is written once, and what a reader needs of which file is found without looking into any.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshtrain.layout import Layout, LayoutError
from meshtrain.parallel.sharding import Part, chunk_range, local_slice


@dataclass(frozen=True)
class Placement:
    """A tensor of a checkpoint, and how a layout's ranks hold it."""

    shape: tuple[int, ...]  # of the whole; a scalar's counts as one dim of size 1 wherever parts are meant
    dtype: str  # in safetensors' words, "F32"
    cuts: tuple[tuple[str, int], ...] = ()  # axis and dim of each cut, in their order
    stages: tuple[int, ...] = (0,)  # the indices on `pp` of the ranks that hold it, ascending

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape with a scalar as one dim."""
        return self.shape or (1,)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes whose ranks differ in what they hold."""
        return ("pp", *(axis for axis, _ in self.cuts))


def fits(tensor: Placement, layout: Layout) -> bool:
    """Whether the layout has the axes that cut a tensor, derived ones too, and none of them twice."""
    try:
        layout.size(*tensor.axes)
    except LayoutError:
        return False
    return all(axis in layout.axes or layout.size(axis) > 1 for axis, _ in tensor.cuts)


def part_of_rank(tensor: Placement, layout: Layout, rank: int) -> Part | None:
    """The part of the whole that a rank holds, maybe empty; None on other stages. LayoutError: an unknown axis."""
    if layout.index(rank, "pp") not in tensor.stages:
        return None
    cuts = [(dim, layout.size(axis), layout.index(rank, axis)) for axis, dim in tensor.cuts]
    return local_slice(tensor.dims, cuts)


def part_to_write(tensor: Placement, layout: Layout, rank: int) -> Part | None:
    """The part that a rank writes: a share of the rows of what it holds. None if there is nothing for it to write."""
    part = part_of_rank(tensor, layout, rank)
    if part is None:
        return None
    stage = tensor.stages.index(layout.index(rank, "pp"))
    copy = stage * _copies_of_a_stage(tensor, layout) + layout.copy(rank, *tensor.axes)
    rows = chunk_range(part[0].stop - part[0].start, copies(tensor, layout), copy)
    piece = (slice(part[0].start + rows.start, part[0].start + rows.stop), *part[1:])
    return None if is_empty(piece) else piece


def copies(tensor: Placement, layout: Layout) -> int:
    """How many ranks hold each part of a tensor."""
    return len(tensor.stages) * _copies_of_a_stage(tensor, layout)


def _copies_of_a_stage(tensor: Placement, layout: Layout) -> int:
    return layout.world_size // layout.size(*tensor.axes)


def pieces(tensor: Placement, layout: Layout, part: Part) -> Iterator[tuple[int, Part]]:
    """The pieces that a reader of a part needs, rank and part of the whole, in time for these and not for all ranks."""
    axes = [axis for axis, _ in tensor.cuts]
    cuts = [(dim, layout.size(axis)) for axis, dim in tensor.cuts]
    in_stage = _copies_of_a_stage(tensor, layout)
    # The parts that ranks hold are cut once more, by rows, into what each of them writes.
    all_cuts = [*cuts, (0, copies(tensor, layout))]
    for (*indices, copy), piece in _overlapping(all_cuts, tuple(slice(0, size) for size in tensor.dims), part):
        stage, number = divmod(copy, in_stage)
        coordinate = dict(zip(axes, indices, strict=True))
        yield layout.rank_of_copy(number, pp=tensor.stages[stage], **coordinate), piece


def overlap(first: Part, second: Part) -> Part:
    """What two parts of a whole have in common; it may be empty."""
    pairs = zip(first, second, strict=True)
    return tuple(slice(low := max(a.start, b.start), max(low, min(a.stop, b.stop))) for a, b in pairs)


def within(inner: Part, outer: Part) -> Part:
    """Where a part lies in another part that contains it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True))


def is_empty(part: Part) -> bool:
    return any(rows.stop <= rows.start for rows in part)


def shape_of(part: Part) -> tuple[int, ...]:
    return tuple(rows.stop - rows.start for rows in part)


def _overlapping(cuts: Sequence[tuple[int, int]], whole: Part, part: Part) -> Iterator[tuple[tuple[int, ...], Part]]:
    """The parts of a whole after cuts, (dim, parts) each, that overlap with `part`, and their index on every cut."""
    if not cuts:
        if not is_empty(overlap(whole, part)):
            yield (), whole
        return
    dim, parts = cuts[0]
    start, size = whole[dim].start, whole[dim].stop - whole[dim].start
    if size == 0:
        return
    chunk = chunk_range(size, parts, 0).stop
    low, high = max(part[dim].start, start) - start, min(part[dim].stop, whole[dim].stop) - start
    for index in range(low // chunk, min(parts, -(-high // chunk))):
        rows = chunk_range(size, parts, index)
        inner = (*whole[:dim], slice(start + rows.start, start + rows.stop), *whole[dim + 1 :])
        for others, piece in _overlapping(cuts[1:], inner, part):
            yield (index, *others), piece
