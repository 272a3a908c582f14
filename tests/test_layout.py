"""Layouts: coordinates, groups and hosts."""

import itertools
import math
import pickle
import re
import subprocess
import sys

import pytest

from meshtrain.layout import AXES, EXPERT_AXES, VIEWS, Layout, LayoutError
from tests.properties import given, st

PERMUTATIONS = [list(axes) for n in range(len(AXES) + 1) for axes in itertools.permutations(AXES, n)]


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
    names = draw(st.none() | st.lists(st.sampled_from("abc"), min_size=len(counts), max_size=len(counts)))
    return layout.on_hosts(counts, names)


def brute_group(layout: Layout, rank: int, axes: tuple[str, ...]) -> list[int]:
    own = layout.coordinate(rank)
    same = [axis for axis in layout.axes if axis not in axes]
    everyone = ((other, layout.coordinate(other)) for other in range(layout.world_size))
    return [other for other, coordinate in everyone if all(coordinate[axis] == own[axis] for axis in same)]


# Coordinates and groups ---------------------------------------------------------------------------------------------


def test_a_rank_in_every_kind_of_group() -> None:
    layout = Layout({"pp": 2, "dp_replicate": 8, "tp": 4})
    assert layout.world_size == 64
    assert [len(layout.groups(axis)) for axis in ("pp", "dp_replicate", "tp")] == [32, 8, 16]
    assert layout.group(37, "pp") == [5, 37]
    assert layout.group(37, "dp_replicate") == list(range(33, 62, 4))
    assert layout.group(37, "tp") == [36, 37, 38, 39]
    assert layout.coordinate(37) == {"pp": 1, "dp_replicate": 1, "tp": 1}


def test_the_contract() -> None:
    layout = Layout({"pp": 2, "dp_shard": 4, "tp": 2})
    assert layout == Layout.resolve({"pp": 2, "dp_shard": -1, "tp": 2}, 16)
    assert layout.axes == ("pp", "dp_shard", "tp")
    assert layout.sizes == {"pp": 2, "dp_shard": 4, "tp": 2}
    assert layout.coordinate(5) == {"pp": 0, "dp_shard": 2, "tp": 1}
    assert list(layout.coordinate(5)) == ["pp", "dp_shard", "tp"]
    assert layout.rank(pp=0, dp_shard=2, tp=1) == 5
    assert layout.groups("tp")[:2] == [[0, 1], [2, 3]]
    assert layout.groups("pp", "dp_shard") == [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]]
    assert layout.group(5, "tp") == [4, 5]
    assert repr(layout) == "Layout({pp: 2, dp_shard: 4, tp: 2})"


@pytest.mark.parametrize("axes", PERMUTATIONS[1:], ids=",".join)
def test_every_order_is_row_major(axes: list[str]) -> None:
    sizes = dict(zip(axes, (2, 3, 1, 2, 3), strict=False))
    layout = Layout(sizes)
    expected = list(itertools.product(*(range(size) for size in sizes.values())))
    assert [tuple(layout.coordinate(rank).values()) for rank in range(layout.world_size)] == expected


@given(layouts())
def test_coordinates_and_ranks_are_inverse(layout: Layout) -> None:
    for rank in range(layout.world_size):
        assert layout.rank(**layout.coordinate(rank)) == rank


@given(layouts(), st.sets(st.sampled_from(AXES)), st.randoms())
def test_groups_partition_the_world(layout: Layout, axes: set[str], random) -> None:
    asked = list(axes)
    random.shuffle(asked)  # the order of asking changes nothing
    groups = layout.groups(*asked)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert group == sorted(group)
        assert len(group) == layout.size(*axes) == math.prod(layout.sizes.get(axis, 1) for axis in axes)
        for position, rank in enumerate(group):
            assert layout.group(rank, *asked) == group
            assert layout.index(rank, *asked) == position


@given(layouts(), st.sets(st.sampled_from(AXES)), st.data())
def test_groups_are_those_of_brute_force(layout: Layout, axes: set[str], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert layout.group(rank, *axes) == brute_group(layout, rank, tuple(axes))


def test_an_axis_that_is_not_there_has_size_one() -> None:
    layout = Layout({"dp_shard": 3})
    assert layout.size("tp") == 1
    assert layout.group(2, "tp") == [2]
    assert layout.groups("tp") == [[0], [1], [2]]
    assert layout.index(2, "tp") == 0
    assert layout.group(1, "dp_replicate", "dp_shard") == [0, 1, 2]
    assert layout.rank(dp_shard=2, tp=0) == 2
    assert Layout({}).world_size == 1
    assert Layout({}).groups("pp") == [[0]]


def test_layouts_are_values() -> None:
    one, same, other_order = Layout({"pp": 2, "tp": 3}), Layout({"pp": 2, "tp": 3}), Layout({"tp": 3, "pp": 2})
    assert one == same
    assert len({one, same, other_order}) == 2
    assert one != one.on_hosts((6,))
    assert one.on_hosts((2, 2, 2)) == same.on_hosts((2, 2, 2))
    assert pickle.loads(pickle.dumps(one.on_hosts((4, 2)))).local_rank(5) == 1  # data workers may be spawned
    with pytest.raises(AttributeError):
        one.world_size = 7  # type: ignore[misc]
    one.sizes["pp"] = 7
    assert one.sizes == {"pp": 2, "tp": 3}


def test_one_group_of_a_large_job_builds_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout({"pp": 16, "dp_replicate": 8, "dp_shard": 128, "tp": 8}).on_hosts([8] * 16384)
    assert layout.world_size == 131_072
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
    assert len(layout.groups("dp_replicate", "dp_shard")) == 128


# Derived axes -------------------------------------------------------------------------------------------------------

DENSE = ("dp_replicate", "dp_shard", "cp", "tp")
EXPERTS = ("pp", *EXPERT_AXES)


def folded_by_hand(layout: Layout, experts: int) -> tuple[int, int, int] | None:
    """Sizes of the second factorization: `ep` takes the inner ranks, by whole axes and a divisor of the next one."""
    copies, shard, cp, tp = (layout.size(axis) for axis in DENSE)
    left = experts
    for size in (tp, cp, shard, copies):
        if left <= size:
            left = 1 if size % left == 0 else 0
            break
        if left % size:
            return None
        left //= size
    if left != 1:
        return None
    inner = shard * cp * tp
    shards = (inner // experts if experts <= inner else 1) if shard * cp > 1 else 1
    return copies * inner // experts // shards, shards, experts


@given(layouts(), st.data())
def test_experts_are_a_second_factorization_of_the_same_ranks(layout: Layout, data: st.DataObject) -> None:
    within = layout.world_size // layout.size("pp")
    experts = data.draw(st.integers(1, within))
    sizes = folded_by_hand(layout, experts)
    if sizes is None:
        with pytest.raises(LayoutError, match=f"experts cannot be dealt out over {experts} ranks; use "):
            layout.with_experts(experts)
        return
    folded = layout.with_experts(experts)
    assert tuple(folded.size(axis) for axis in EXPERT_AXES) == sizes
    assert (folded.axes, folded.sizes, folded.coordinate(0)) == (layout.axes, layout.sizes, layout.coordinate(0))
    seen = set()
    for rank in range(layout.world_size):
        place = folded.coordinate(rank, *EXPERTS)
        assert folded.rank(**place) == rank
        assert place["pp"] == layout.coordinate(rank).get("pp", 0)
        seen.add(tuple(place.values()))
        if layout.axes == tuple(axis for axis in AXES if axis in layout.axes):  # numbered as in the usual order
            n = layout.index(rank, *DENSE)
            assert tuple(place.values())[1:] == (n // experts // sizes[1], n // experts % sizes[1], n % experts)
        if experts <= within // layout.size("dp_replicate") and layout.size("fsdp") > 1:
            assert place["edp_replicate"] == layout.index(rank, "dp_replicate"), "a copy stays a copy"
    assert len(seen) == layout.world_size
    for axes in (("ep",), ("efsdp",), ("edp_replicate",), ("efsdp", "ep"), ("pp", "ep")):
        groups = folded.groups(*axes)
        assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
        assert all(group == folded.group(rank, *axes) for group in groups for rank in group)
        others = [axis for axis in EXPERTS if axis not in axes]
        assert all(len({tuple(folded.coordinate(rank, *others).values()) for rank in group}) == 1 for group in groups)


@given(layouts(), st.sampled_from(list(VIEWS)), st.data())
def test_a_view_is_the_product_of_its_axes(layout: Layout, view: str, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert layout.group(rank, view) == brute_group(layout, rank, VIEWS[view])
    assert layout.groups(view) == layout.groups(*VIEWS[view])
    assert layout.index(rank, view) == layout.index(rank, *VIEWS[view]) == layout.group(rank, view).index(rank)
    others = [axis for axis in AXES if axis not in VIEWS[view]]
    place = layout.coordinate(rank, view, *others)
    assert layout.rank(**place) == rank
    del place[others[-1]]
    copies = [other for other in range(layout.world_size) if layout.coordinate(other, *place) == place]
    assert copies[layout.copy(rank, *place)] == rank
    assert [layout.rank_of_copy(copy, **place) for copy in range(len(copies))] == copies


def test_derived_axes_of_131072_ranks() -> None:
    layout = Layout({"pp": 8, "dp_replicate": 4, "dp_shard": 256, "cp": 2, "tp": 8}).with_experts(64)
    assert layout.world_size == 131_072
    assert [layout.size(axis) for axis in EXPERT_AXES] == [4, 64, 64]
    assert layout.coordinate(131_071, *EXPERTS) == {"pp": 7, "edp_replicate": 3, "efsdp": 63, "ep": 63}
    assert layout.group(131_071, "ep") == list(range(131_008, 131_072))
    assert (layout.size("fsdp"), layout.index(131_071, "fsdp")) == (512, 511)
    for rank in range(0, layout.world_size, 131):
        assert layout.rank(**layout.coordinate(rank, *EXPERTS)) == rank
        assert layout.rank(**layout.coordinate(rank, "pp", "dp_replicate", "fsdp", "tp")) == rank
    assert layout != Layout(layout.sizes)
    assert layout.on_hosts([8] * 16384).experts == 64


@given(layouts(), st.data())
def test_cp_is_neighbours_that_split_heads_and_what_is_left(layout: Layout, data: st.DataObject) -> None:
    cp = layout.size("cp")
    heads = data.draw(st.sampled_from([n for n in range(1, cp + 1) if cp % n == 0]))
    split = layout.with_context_heads(heads)
    assert (split.size("cp_ring"), split.size("cp_heads"), split.sizes) == (cp // heads, heads, layout.sizes)
    for rank in range(split.world_size):
        own, index = split.group(rank, "cp"), split.index(rank, "cp")
        assert divmod(index, heads) == (split.index(rank, "cp_ring"), split.index(rank, "cp_heads"))
        assert split.group(rank, "cp_heads") == own[index - index % heads :][:heads]
        assert split.group(rank, "cp_ring") == own[index % heads :: heads]
        assert split.group(rank, "cp_ring", "cp_heads") == own
    assert split == layout or heads > 1


def test_what_derived_axes_cannot_answer() -> None:
    layout = Layout({"dp_shard": 4, "cp": 2, "tp": 2}).with_experts(4)
    for question, sentence in [
        (lambda: layout.groups("fsdp", "cp"), "an axis is named twice: fsdp, cp"),
        (lambda: layout.group(0, "ep", "tp"), "an axis is named twice: ep, tp"),
        (lambda: layout.rank(fsdp=1), "needs a position on every axis; missing: tp"),
        (lambda: layout.rank(fsdp=8, tp=0), "there is no fsdp=8; fsdp goes from 0 to 7"),
        (lambda: layout.with_experts(3), "experts cannot be dealt out over 3 ranks; use one of [1, 2, 4, 8, 16]"),
        (lambda: layout.with_experts(0), "experts cannot be dealt out over 0 ranks"),
        (lambda: layout.with_context_heads(3), "parallel.context_heads 3 does not divide layout.cp 2: use 1 or 2"),
        (
            lambda: layout.with_context_heads(2).groups("cp", "cp_heads"),
            "an axis is named twice: cp, cp_heads",
        ),
        (lambda: Layout({"fsdp": 2}), "there is no axis 'fsdp' (did you mean dp_shard?)"),
        (lambda: Layout({"efsdp": 2}), "there is no axis 'efsdp'"),
    ]:
        with pytest.raises(LayoutError, match=re.escape(sentence)):
            question()


def test_layout_needs_nothing_but_the_standard_library() -> None:
    code = "import sys, meshtrain.layout; print(*{m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(output) & {"torch", "numpy", "yaml", "rich"} == set()


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "world_size", "sentence"),
    [
        ({"dp_shard": 4, "tp": 2}, 6, "layout {dp_shard: 4, tp: 2} needs 8 processes and there are 6: start 8"),
        ({"dp_shard": 2}, 1, "layout {dp_shard: 2} needs 2 processes and there is 1: start 2"),
        (
            {"pp": 2, "dp_shard": -1, "tp": 4},
            12,
            "layout {pp: 2, dp_shard: -1, tp: 4}: the other axes multiply to 8, which does not divide 12 processes: "
            "start 8 or 16 processes",
        ),
        (
            {"dp_shard": -1, "tp": -1},
            4,
            "layout {dp_shard: -1, tp: -1}: only one axis can be -1, found 2: dp_shard, tp",
        ),
        ({"dp_shard": 0}, 4, "dp_shard is 0 (expected an integer of at least 1, or -1 for whatever is left)"),
        ({"dp_shard": True}, 4, "dp_shard is True (expected"),
        ({"dp_shard": 2.0}, 2, "dp_shard is 2.0 (expected"),
        ({"dp_shard": 2}, 0, "a job has at least 1 process; found a world size of 0"),
        ({"dp": 2}, 2, "there is no axis 'dp' (did you mean dp_replicate or dp_shard?)"),
        ({"fsdp": 2}, 2, "there is no axis 'fsdp' (did you mean dp_shard?)"),
        ({"dp_shards": 2}, 2, "there is no axis 'dp_shards' (did you mean dp_shard?)"),
        ({"ep": 2}, 2, "there is no axis 'ep' (experts lie on ranks of the other axes: give parallel.expert_parallel"),
        ({7: 2, "tp": 0}, 2, "layout {7: 2, tp: 0}: there is no axis 7 (the axes are"),
        ({7: 2, "tp": 0}, 2, "; tp is 0"),
        ([2, 2], 4, "a layout names axes and their sizes, such as {dp_shard: 4, tp: 2}; found [2, 2]"),
    ],
)
def test_errors_name_the_numbers_and_a_way_out(sizes: dict[str, int], world_size: int, sentence: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(sentence)):
        Layout.resolve(sizes, world_size)


def test_a_layout_itself_has_no_free_axis() -> None:
    with pytest.raises(LayoutError, match=re.escape("dp_shard is -1 (expected an integer of at least 1)")):
        Layout({"dp_shard": -1})


def test_other_axes_over_the_same_ranks() -> None:
    placed = Layout({"dp_shard": 12}).on_hosts((8, 4))
    other = placed.with_axes({"pp": 3, "tp": 4})
    assert other == Layout({"pp": 3, "tp": 4}).on_hosts((8, 4))
    with pytest.raises(LayoutError, match="needs 6 processes; there are 12"):
        placed.with_axes({"tp": 6})


def test_wrong_questions() -> None:
    layout = Layout({"pp": 2, "tp": 3})
    for question, sentence in [
        (lambda: layout.group(0, "tb"), "there is no axis 'tb' (did you mean tp?)"),
        (lambda: layout.groups("tp", "tp"), "an axis is named twice: tp, tp"),
        (lambda: layout.size("dp"), "there is no axis 'dp'"),
        (lambda: layout.index(0, "x"), "there is no axis 'x'"),
        (lambda: layout.coordinate(6), "layout {pp: 2, tp: 3}: there is no rank 6; ranks go from 0 to 5"),
        (lambda: layout.group(-1, "tp"), "there is no rank -1"),
        (lambda: layout.rank(pp=1), "rank(...) needs a position on every axis; missing: tp"),
        (lambda: layout.rank(pp=1, tp=3), "there is no tp=3; tp goes from 0 to 2"),
        (lambda: layout.rank(pp=1, tp=-1), "there is no tp=-1"),
        (lambda: layout.rank(pp=1, tp=0, cp=1), "there is no cp=1; cp goes from 0 to 0"),
        (lambda: layout.host(0), "layout {pp: 2, tp: 3} is not placed on hosts: call on_hosts(counts) first"),
    ]:
        with pytest.raises(LayoutError, match=re.escape(sentence)):
            question()


# Hosts --------------------------------------------------------------------------------------------------------------


def test_ranks_on_four_hosts_of_eight() -> None:
    layout = Layout({"dp_shard": 4, "tp": 8}).on_hosts((8, 8, 8, 8))
    assert (layout.host(8), layout.local_rank(8)) == ("host 1", 0)
    assert (layout.host(31), layout.local_rank(31)) == ("host 3", 7)
    assert layout.hosts == ("host 0", "host 1", "host 2", "host 3")
    assert repr(layout) == "Layout({dp_shard: 4, tp: 8} on 4 hosts)"
    assert not layout.crosses_hosts(layout.group(31, "tp"))
    assert layout.crosses_hosts(layout.group(31, "dp_shard"))


def test_a_host_may_come_back() -> None:
    layout = Layout({"dp_shard": 6}).on_hosts((1, 1, 2, 1, 1), ("a", "b", "a", "a", "b"))
    assert layout.hosts == ("a", "b")
    assert [layout.host(rank) for rank in range(6)] == ["a", "b", "a", "a", "a", "b"]
    assert [layout.local_rank(rank) for rank in range(6)] == [0, 0, 1, 2, 3, 1]
    assert layout.host_counts() == {"a": 4, "b": 2}
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


@pytest.mark.parametrize(
    ("counts", "names", "sentence"),
    [
        (
            (4, 2),
            None,
            "the hosts have 6 processes and layout {dp_shard: 4, tp: 2} needs 8: give counts that add up to 8",
        ),
        ([1] * 9, None, "the hosts have 9 processes and layout"),
        ((4, 4), ("a",), "2 counts of processes for 1 names of hosts"),
        ((8, 0), None, "host 1 has 0 processes; expected an integer of at least 1"),
        ((4, True, 3), None, "host 1 has True processes"),
        ((), None, "layout {dp_shard: 4, tp: 2} needs at least one host; found none"),
    ],
)
def test_hosts_that_do_not_fit(counts: tuple[int, ...], names: tuple[str, ...] | None, sentence: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(sentence)):
        Layout({"dp_shard": 4, "tp": 2}).on_hosts(counts, names)
