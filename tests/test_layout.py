"""Layouts: coordinates, groups and hosts."""

import itertools
import math
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from meshtrain.layout import AXES, CONTEXT_AXES, EXPERT_AXES, VIEWS, Layout, LayoutError
from tests.properties import given, st

PERMUTATIONS = [
    list(axes) for n in range(len(AXES) + 1) for axes in itertools.permutations(AXES, n)
]
EXPERTS = ("pp", *EXPERT_AXES)
SPLIT_CP = ("pp", "dp_replicate", "dp_shard", *CONTEXT_AXES, "tp")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    axes = draw(st.sampled_from(PERMUTATIONS))
    return Layout({axis: draw(st.integers(1, 4)) for axis in axes})


@st.composite
def placed(draw: st.DrawFn) -> Layout:
    """A layout on hosts of any sizes, whose names may come back."""
    layout = draw(layouts())
    cuts = draw(st.sets(st.integers(1, layout.world_size), max_size=8)) | {0, layout.world_size}
    counts = [b - a for a, b in itertools.pairwise(sorted(cuts))]
    names = draw(
        st.none() | st.lists(st.sampled_from("abc"), min_size=len(counts), max_size=len(counts))
    )
    return layout.on_hosts(counts, names)


def grid_of(layout: Layout) -> np.ndarray:
    """The ranks by their positions on the axes in the usual order; they count row-major in the
    order of the layout."""
    axes = [*layout.axes, *(axis for axis in AXES if axis not in layout.axes)]
    ranks = np.arange(layout.world_size).reshape([layout.sizes.get(axis, 1) for axis in axes])
    return ranks.transpose([axes.index(axis) for axis in AXES])


def check_groups(
    layout: Layout, grid: np.ndarray, names: Sequence[str], axes: Sequence[str]
) -> None:
    """Groups over some of the grid's axes are its slices along these: ascending, by their first
    ranks."""
    last = [names.index(axis) for axis in axes]
    first = [i for i in range(len(names)) if i not in last]
    slices = grid.transpose(first + last).reshape(-1, math.prod(grid.shape[i] for i in last))
    groups = sorted(sorted(ranks) for ranks in slices.tolist())
    assert layout.groups(*axes) == groups
    assert layout.size(*axes) == len(groups[0])
    for group in groups:
        for position, rank in enumerate(group):
            assert layout.group(rank, *axes) == group
            assert layout.index(rank, *axes) == position


def axes_of(data: st.DataObject, names: Sequence[str]) -> list[str]:
    return data.draw(st.lists(st.sampled_from(names), unique=True))


# Coordinates and groups ---------------------------------------------------------------------------


def test_the_contract() -> None:
    layout = Layout({"pp": 2, "dp_shard": 4, "tp": 2})
    assert layout == Layout.resolve({"pp": 2, "dp_shard": -1, "tp": 2}, 16)
    assert layout.axes == ("pp", "dp_shard", "tp")
    assert list(layout.coordinate(5).items()) == [("pp", 0), ("dp_shard", 2), ("tp", 1)]
    assert layout.groups("pp", "dp_shard") == [
        [0, 2, 4, 6, 8, 10, 12, 14],
        [1, 3, 5, 7, 9, 11, 13, 15],
    ]
    assert repr(layout) == "Layout({pp: 2, dp_shard: 4, tp: 2})"
    assert layout.groups("cp") == [[rank] for rank in range(16)], (
        "an axis that is not named has size 1"
    )
    assert layout.rank(pp=0, dp_shard=2, tp=1, cp=0) == 5
    assert Layout({}).groups("pp") == [[0]]


@given(layouts(), st.data())
def test_ranks_are_row_major_and_groups_are_slices(layout: Layout, data: st.DataObject) -> None:
    grid = grid_of(layout)
    for rank in range(layout.world_size):
        assert grid[tuple(layout.coordinate(rank, *AXES).values())] == rank
        assert layout.rank(**layout.coordinate(rank)) == rank
    check_groups(layout, grid, AXES, axes_of(data, AXES))


@given(layouts(), st.sampled_from(list(VIEWS)), st.data())
def test_a_view_is_the_product_of_its_axes(layout: Layout, view: str, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert layout.groups(view) == layout.groups(*VIEWS[view])
    assert layout.index(rank, view) == layout.index(rank, *VIEWS[view])
    others = [axis for axis in AXES if axis not in VIEWS[view]]
    place = layout.coordinate(rank, view, *others)
    assert layout.rank(**place) == rank
    del place[others[-1]]
    copies = [
        other for other in range(layout.world_size) if layout.coordinate(other, *place) == place
    ]
    assert copies[layout.copy(rank, *place)] == rank
    assert [layout.rank_of_copy(copy, **place) for copy in range(len(copies))] == copies


@given(layouts(), st.data())
def test_experts_are_a_second_factorization_of_the_same_ranks(
    layout: Layout, data: st.DataObject
) -> None:
    """`ep` takes the inner ranks, by whole axes and a divisor of the next one; what is left are
    shards and copies."""
    stages, copies, *inner = grid_of(layout).shape
    sharded, within = math.prod(inner), copies * math.prod(inner)
    sizes = [*reversed(inner), copies]
    fits = [
        math.prod(sizes[:i]) * n
        for i, size in enumerate(sizes)
        for n in range(1, size + 1)
        if size % n == 0
    ]
    experts = data.draw(st.sampled_from(fits) | st.integers(1, within))
    if experts not in fits:
        with pytest.raises(
            LayoutError, match=f"experts cannot be dealt out over {experts} ranks; use "
        ):
            layout.with_experts(experts)
        return
    folded = layout.with_experts(experts)
    shards = max(sharded // experts, 1) if layout.size("fsdp") > 1 else 1
    grid = grid_of(layout).reshape(stages, within // experts // shards, shards, experts)
    assert (folded.axes, folded.sizes) == (layout.axes, layout.sizes)
    for rank in range(layout.world_size):
        place = folded.coordinate(rank, *EXPERTS)
        assert folded.rank(**place) == rank
        if list(layout.axes) == sorted(layout.axes, key=AXES.index):
            assert grid[tuple(place.values())] == rank
    check_groups(folded, grid, EXPERTS, axes_of(data, EXPERTS))


def test_experts_where_parameters_are_not_sharded() -> None:
    """What `ep` leaves of tp are copies of the experts."""
    layout = Layout({"tp": 4}).with_experts(2)
    assert layout.groups("ep") == [[0, 1], [2, 3]]
    assert layout.groups("edp_replicate") == [[0, 2], [1, 3]]
    assert layout.groups("efsdp") == [[0], [1], [2], [3]]


@given(layouts(), st.data())
def test_cp_is_neighbours_that_split_heads_and_what_is_left(
    layout: Layout, data: st.DataObject
) -> None:
    cp = layout.size("cp")
    heads = data.draw(st.sampled_from([n for n in range(1, cp + 1) if cp % n == 0]))
    split = layout.with_context_heads(heads)
    *outer, _, tp = grid_of(layout).shape
    grid = grid_of(layout).reshape(*outer, cp // heads, heads, tp)
    for rank in range(split.world_size):
        assert grid[tuple(split.coordinate(rank, *SPLIT_CP).values())] == rank
    check_groups(split, grid, SPLIT_CP, axes_of(data, SPLIT_CP))
    assert split.sizes == layout.sizes


def test_layouts_are_values() -> None:
    layout, same, other_order = (
        Layout({"pp": 2, "tp": 3}),
        Layout({"pp": 2, "tp": 3}),
        Layout({"tp": 3, "pp": 2}),
    )
    hosts = layout.on_hosts((2, 2, 2))
    assert layout == same
    assert len({layout, same, other_order}) == 2
    assert hosts == same.on_hosts((2, 2, 2)) != layout
    assert layout.with_experts(3) != layout
    assert layout.with_experts(3).on_hosts((6,)).experts == 3
    assert hosts.with_axes({"dp_shard": 6}) == Layout({"dp_shard": 6}).on_hosts((2, 2, 2))
    assert pickle.loads(pickle.dumps(hosts)).local_rank(5) == 1  # data workers may be spawned
    with pytest.raises(AttributeError):
        layout.world_size = 7  # type: ignore[misc]
    layout.sizes["pp"] = 7
    assert layout.sizes == {"pp": 2, "tp": 3}


def test_one_group_of_a_large_job_builds_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout({"pp": 16, "dp_replicate": 8, "dp_shard": 128, "tp": 8}).on_hosts([8] * 16384)
    built: list[int] = []
    offsets = Layout._offsets

    def counted(self: Layout, places: list[int]) -> list[int]:
        result = offsets(self, places)
        built.append(len(result))
        return result

    monkeypatch.setattr(Layout, "_offsets", counted)
    for rank in range(0, layout.world_size, 131):
        assert len(layout.group(rank, "pp", "tp")) == 128
    assert set(built) == {128}
    assert layout.host(131_071) == "host 16383"


# Errors -------------------------------------------------------------------------------------------


def test_errors_name_the_numbers_and_a_way_out() -> None:
    rows: list[dict[str, Any]] = yaml.safe_load(
        (Path(__file__).parent / "layout_errors.yaml").read_text()
    )
    for row in rows:
        layout: Any = Layout
        if "of" in row:
            layout = Layout(row["of"])
            if "cp" in layout.axes:
                layout = layout.with_experts(4).with_context_heads(2)
        method = Layout if row["call"] == "__call__" else getattr(layout, row["call"])
        arguments = row["with"]
        with pytest.raises(LayoutError, match=re.escape(row["says"])):
            method(**arguments) if isinstance(arguments, dict) else method(*arguments)


# Hosts --------------------------------------------------------------------------------------------


def test_a_host_may_come_back() -> None:
    layout = Layout({"dp_shard": 6}).on_hosts((1, 1, 2, 1, 1), ("a", "b", "a", "a", "b"))
    assert repr(layout) == "Layout({dp_shard: 6} on 2 hosts)"
    assert layout.hosts == ("a", "b")
    assert [layout.host(rank) for rank in range(6)] == ["a", "b", "a", "a", "a", "b"]
    assert not layout.crosses_hosts([0, 2, 3, 4])
    assert layout.crosses_hosts([4, 5])
    assert not layout.crosses_hosts([])


@given(placed())
def test_ranks_of_a_host_are_numbered_from_zero(layout: Layout) -> None:
    on_host: dict[str, list[int]] = {host: [] for host in layout.hosts}
    for rank in range(layout.world_size):
        assert layout.local_rank(rank) == len(on_host[layout.host(rank)])
        on_host[layout.host(rank)].append(rank)
    assert layout.host_counts() == {host: len(ranks) for host, ranks in on_host.items()}
    assert list(layout.hosts) == sorted(on_host, key=lambda host: on_host[host][0])
