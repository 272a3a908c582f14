"""Where bytes lie, against brute force over every rank and element; and the sums that go with
it."""

import itertools
import math
import zlib
from collections import Counter

import pytest

from meshtrain.checkpoint.placement import (
    Placement,
    copies,
    fits,
    part_of_rank,
    part_to_write,
    pieces,
)
from meshtrain.checkpoint.shard_file import combine
from meshtrain.layout import AXES, EXPERT_AXES, Layout, LayoutError
from meshtrain.parallel.sharding import Part, is_empty, overlap, shape_of
from tests.properties import given, settings, st


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes: dict[str, int] = {}
    for axis in draw(st.permutations(AXES))[: draw(st.integers(0, 4))]:
        sizes[axis] = draw(st.integers(1, max(1, min(4, 32 // math.prod(sizes.values())))))
    return Layout(sizes)


@st.composite
def with_experts(draw: st.DrawFn) -> Layout:
    layout = draw(layouts())
    try:
        return layout.with_experts(draw(st.sampled_from([1, 2, 3, 4, 6, 8])))
    except LayoutError:
        return layout


@st.composite
def placements(draw: st.DrawFn, layout: Layout, smallest: int = 1) -> Placement:
    shape = tuple(draw(st.lists(st.integers(smallest, 7), max_size=3)))
    # Axes of the layout, some of which a derived one may stand for; or, with experts, those of the
    # other factorization.
    dense = [*(axis for axis in layout.axes if axis not in ("pp", "dp_shard", "cp")), "fsdp"]
    kinds = [
        [axis for axis in layout.axes if axis != "pp"],
        dense,
        EXPERT_AXES if layout.experts > 1 else dense,
    ]
    known = [
        axis
        for axis in draw(st.sampled_from(kinds))
        if axis in layout.axes or layout.size(axis) > 1
    ]
    axes = draw(st.permutations(known))
    cuts = tuple(
        (axis, draw(st.integers(0, max(0, len(shape) - 1))))
        for axis in axes[: draw(st.integers(0, 4))]
    )
    stages = draw(st.sets(st.integers(0, layout.size("pp") - 1), min_size=1))
    return Placement(shape, "F32", cuts, tuple(sorted(stages)))


def elements(part: Part) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(each.start, each.stop) for each in part)))


@settings(max_examples=60)
@given(st.data())
def test_each_element_is_written_once_by_one_who_holds_it(data: st.DataObject) -> None:
    layout = data.draw(with_experts())
    tensor = data.draw(placements(layout, smallest=0))
    written: Counter[tuple[int, ...]] = Counter()
    held: Counter[tuple[int, ...]] = Counter()
    for rank in range(layout.world_size):
        mine, part = part_of_rank(tensor, layout, rank), part_to_write(tensor, layout, rank)
        assert part is None or (
            mine is not None and elements(part) <= elements(mine) and not is_empty(part)
        )
        held.update(() if mine is None else elements(mine))
        written.update(() if part is None else elements(part))
    assert written == dict.fromkeys(itertools.product(*map(range, tensor.dims)), 1)
    assert held == dict.fromkeys(written, copies(tensor, layout))


@settings(max_examples=60)
@given(st.data())
def test_a_reader_is_told_all_pieces_that_it_needs_and_no_other(data: st.DataObject) -> None:
    layout = data.draw(with_experts())
    tensor = data.draw(placements(layout))
    starts = [data.draw(st.integers(0, size - 1)) for size in tensor.dims]
    ends = [st.integers(start + 1, size) for start, size in zip(starts, tensor.dims, strict=True)]
    wanted = tuple(slice(start, data.draw(end)) for start, end in zip(starts, ends, strict=True))
    written = ((rank, part_to_write(tensor, layout, rank)) for rank in range(layout.world_size))
    expected = [
        (rank, part) for rank, part in written if part and not is_empty(overlap(part, wanted))
    ]
    assert sorted(pieces(tensor, layout, wanted), key=str) == sorted(expected, key=str)


def test_an_axis_that_no_layout_has_is_refused() -> None:
    layout = Layout({"dp_shard": 2})
    with pytest.raises(LayoutError, match="there is no axis 'fsdp2'"):
        part_of_rank(Placement((4,), "F32", (("fsdp2", 0),)), layout, 0)
    assert fits(Placement((4,), "F32", (("fsdp", 0),)), layout)
    for axes in (("fsdp2",), ("cp",), ("pp",), ("dp_shard", "dp_shard"), ("fsdp", "dp_shard")):
        assert not fits(Placement((4,), "F32", tuple((axis, 0) for axis in axes)), layout)


def test_pieces_of_a_large_layout_are_found_without_a_walk_over_its_ranks() -> None:
    layout = Layout({"pp": 16, "dp_replicate": 64, "dp_shard": 16, "tp": 8})  # 131,072 ranks
    tensor = Placement((16384, 53248), "F32", (("tp", 1), ("dp_shard", 0)), (3,))
    found = list(pieces(tensor, layout, (slice(0, 8), slice(0, 53248))))
    # 1,024 rows of each of tp's 8 columns are shared by 64 copies, 16 rows each.
    assert [rank for rank, _ in found] == [
        layout.rank(pp=3, dp_replicate=0, dp_shard=0, tp=tp) for tp in range(8)
    ]
    assert {shape_of(piece) for _, piece in found} == {(16, 6656)}


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 1_000_000))
def test_the_crc_of_a_whole_follows_from_its_pieces(pieces: list[bytes], zeros: int) -> None:
    pieces = [*pieces, bytes(zeros)]
    assert combine((zlib.crc32(piece), len(piece)) for piece in pieces) == zlib.crc32(
        b"".join(pieces)
    )
