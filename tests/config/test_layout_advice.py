"""Sentences that name layouts that work, where one does not."""

import re

import pytest
import yaml

from meshtrain.config.layout_advice import add_axis, host_warnings, nearest, resolve
from meshtrain.layout import AXES, Layout, LayoutError
from tests.properties import given, st
from tests.test_layout import layouts, placed


@pytest.mark.parametrize(
    ("sizes", "world_size", "sentence"),
    [
        (
            {"dp_shard": 4, "tp": 2},
            6,
            "layout {dp_shard: 4, tp: 2} needs 8 processes and there are 6: start 8, "
            "or use {dp_shard: 3, tp: 2} or {dp_shard: 6, tp: 1}",
        ),
        (
            {"pp": 2, "dp_shard": -1, "tp": 4},
            12,
            "layout {pp: 2, dp_shard: -1, tp: 4}: the other axes multiply to 8, which does not divide 12 processes: "
            "start 8 or 16 processes, or use {pp: 1, dp_shard: 3, tp: 4} or {pp: 2, dp_shard: 3, tp: 2}",
        ),
        (
            {"dp_shard": -1, "tp": 4},
            3,
            "layout {dp_shard: -1, tp: 4}: the other axes multiply to 4, which does not divide 3 processes: "
            "start 4 processes, or use {dp_shard: 3, tp: 1} or {dp_shard: 1, tp: 3}",
        ),
        (
            {"tp": 2},
            6,
            "layout {tp: 2} needs 2 processes and there are 6: start 2, or use {dp_shard: 3, tp: 2} or {tp: 6}",
        ),
        ({"dp_shard": 2}, 1, "layout {dp_shard: 2} needs 2 processes and there is 1: start 2, or use {dp_shard: 1}"),
    ],
)
def test_a_layout_that_does_not_fit_is_told_which_would(sizes: dict[str, int], world_size: int, sentence: str) -> None:
    with pytest.raises(LayoutError, match=f"^{re.escape(sentence)}$"):
        resolve(sizes, world_size)


def test_an_axis_that_is_not_there_is_no_matter_of_sizes() -> None:
    with pytest.raises(LayoutError, match=re.escape("there is no axis 'fsdp' (did you mean dp_shard?)") + "$"):
        resolve({"fsdp": 2}, 3)


@given(layouts(), st.integers(1, 200), st.sampled_from([None, *AXES]))
def test_there_is_always_a_near_layout_and_it_works(layout: Layout, world_size: int, free: str | None) -> None:
    sizes = layout.sizes | ({free: -1} if free in layout.axes else {})
    found = nearest(sizes, world_size, limit=5)
    assert found
    for near in found:
        assert Layout.resolve(near, world_size).world_size == world_size
        assert [axis for axis in near if axis in sizes] == list(sizes)  # the order stays

    def changes(near: dict[str, int]) -> int:
        return sum(size not in (-1, near[axis]) for axis, size in sizes.items()) + len(near) - len(sizes)

    assert [changes(near) for near in found] == sorted(changes(near) for near in found)


def test_the_nearest_layout_of_a_layout_that_works_is_itself() -> None:
    assert nearest({"pp": 2, "dp_shard": 3}, 6)[0] == {"pp": 2, "dp_shard": 3}
    assert nearest({"pp": 2, "dp_shard": -1}, 6)[0] == {"pp": 2, "dp_shard": 3}
    assert nearest({"pp": 7, "dp_replicate": 13, "dp_shard": 17, "cp": 19, "tp": 23}, 110_880)


def test_an_axis_is_added_where_the_usual_order_has_it() -> None:
    assert list(add_axis({"pp": 2, "tp": 2}, "dp_shard", 3).items()) == [("pp", 2), ("dp_shard", 3), ("tp", 2)]
    assert list(add_axis({"tp": 2, "pp": 2}, "dp_shard", 3)) == ["dp_shard", "tp", "pp"]
    assert list(add_axis({"pp": 2}, "tp", 2)) == ["pp", "tp"]
    assert add_axis({"pp": 2}, "pp", 4) == {"pp": 4}


@pytest.mark.parametrize(
    ("sizes", "counts", "names", "sentences"),
    [
        ({"dp_shard": 4, "tp": 4}, (6, 10), None, ["in 1 of 4 groups", "[4, 5, 6, 7] on host 0 and host 1"]),
        (
            {"dp_shard": 4, "tp": 4},
            (6, 10),
            None,
            ["tp: 4 does not divide the 6 processes of host 0 and 1 other host; use {dp_shard: 8, tp: 2}"],
        ),
        ({"tp": 2, "dp_shard": 2}, (2, 2), None, ["dp_shard after tp", "2 apart; put tp last: {dp_shard: 2, tp: 2}"]),
        (
            dict.fromkeys(("tp", "pp", "dp_replicate", "dp_shard", "cp"), 2),
            (8,) * 4,
            None,
            ["dp_shard and cp after tp"],
        ),
        ({"tp": 16}, (8, 8), None, ["tp: 16 does not divide the 8 processes of host 0", "use {dp_shard: 2, tp: 8}"]),
        ({"dp_shard": 2, "tp": 2}, (1, 1, 1, 1), "abab", ["dealt out over the hosts in turn", "--distribution=block"]),
        ({"tp": 2, "dp_shard": 2}, (1, 2, 1), "aba", ["--distribution=block), and use {dp_shard: 2, tp: 2}"]),
        (
            {"dp_shard": 2, "tp": 4},
            [1] * 4 + [2, 2],
            "ababab",
            ["dealt out over the hosts in turn; start them host by host"],
        ),
        ({"tp": 4}, (1, 1, 1, 1), "abab", ["does not divide the 2 processes of a", "{dp_shard: 2, tp: 2}, with the"]),
        ({"dp_shard": 2, "tp": 2}, (1, 1, 1, 1), "abcd", ["the 1 process of a and 3 other hosts"]),
    ],
)
def test_tp_across_hosts_warns_with_the_reason(
    sizes: dict[str, int], counts: list[int], names: str | None, sentences: list[str]
) -> None:
    (warning,) = host_warnings(Layout(sizes).on_hosts(counts, names))
    for sentence in sentences:
        assert sentence in warning


@given(placed())
def test_a_warning_names_a_layout_without_one(layout: Layout) -> None:
    crossing = any(layout.crosses_hosts(group) for group in layout.groups("tp"))
    warnings = host_warnings(layout)
    assert bool(warnings) == crossing
    for warning in warnings:
        advice = re.search(r"(?:use|last:) (\{.*?\})", warning)
        better = Layout(yaml.safe_load(advice[1]) if advice else layout.sizes)
        counts = layout.host_counts()
        if "--distribution=block" in warning:
            better = better.on_hosts(list(counts.values()), list(counts))
        else:
            better = better.on_hosts(
                [run.count for run in layout.runs], [layout.hosts[run.host] for run in layout.runs]
            )
        assert host_warnings(better) == []


def test_data_across_hosts_is_normal() -> None:
    assert host_warnings(Layout({"dp_replicate": 2, "dp_shard": 3}).on_hosts((4, 2))) == []
    assert host_warnings(Layout({"pp": 2, "dp_shard": 2, "tp": 2}).on_hosts((4, 2, 2))) == []
    assert host_warnings(Layout({"tp": 2, "dp_shard": 2})) == []  # not placed


def test_a_job_of_131072_ranks() -> None:
    layout = Layout({"pp": 16, "dp_replicate": 8, "dp_shard": 128, "tp": 8}).on_hosts([8] * 16384)
    assert host_warnings(layout) == []


def test_neighbours_that_split_heads_and_cross_hosts_are_warned_of() -> None:
    layout = Layout({"cp": 4, "tp": 2})
    assert host_warnings(layout.with_context_heads(2).on_hosts((4, 4))) == []
    (warning,) = host_warnings(layout.with_context_heads(4).on_hosts((4, 4)))
    assert "context_heads: 4 crosses hosts in 2 of 2 groups (the first is ranks [0, 2, 4, 6] on host 0 and" in warning
    assert "so that 4 neighbours share a host" in warning
    assert host_warnings(layout.on_hosts((4, 4))) == []  # keys and values may travel


def test_near_layouts_are_those_into_which_experts_fold() -> None:
    with pytest.raises(LayoutError, match=re.escape("start 8, or use {dp_shard: 12, tp: 2} or {dp_shard: 6, tp: 4}")):
        resolve({"dp_shard": 4, "tp": 2}, 24, experts=8)
    with pytest.raises(LayoutError, match=r"start 8$"):
        resolve({"dp_shard": 4, "tp": 2}, 6, experts=4)


@pytest.mark.parametrize(
    ("sizes", "experts", "counts", "sentences"),
    [
        (
            {"dp_shard": 8, "tp": 2},
            16,
            (8, 8),
            ["expert_parallel: 16 crosses hosts in 1 of 1 groups (the first is", "layer: use expert_parallel: 8"],
        ),
        (
            {"dp_shard": 4, "dp_replicate": 4},
            4,
            [4] * 4,
            ["in 4 of 4", ": use the layout {dp_replicate: 4, dp_shard: 4}"],
        ),
        (
            {"dp_shard": 4, "dp_replicate": 2},
            4,
            [2] * 4,
            ["use expert_parallel: 2 and the layout {dp_replicate: 2, dp_shard: 4}"],
        ),
        ({"dp_shard": 6}, 6, (1, 5), ["use expert_parallel: 1"]),
    ],
)
def test_experts_across_hosts_are_warned_of(
    sizes: dict[str, int], experts: int, counts: list[int], sentences: list[str]
) -> None:
    layout = Layout(sizes).on_hosts(counts)
    assert host_warnings(layout.with_experts(1)) == []
    (warning,) = host_warnings(layout.with_experts(experts))
    for sentence in sentences:
        assert sentence in warning
    advice = re.search(r"layout (\{.*?\})", warning)
    ranks = re.search(r"use expert_parallel: (\d+)", warning)
    better = Layout(yaml.safe_load(advice[1]) if advice else sizes).on_hosts(counts)
    assert host_warnings(better.with_experts(int(ranks[1]) if ranks else experts)) == []


def test_experts_of_131072_ranks_are_kept_on_their_hosts() -> None:
    layout = Layout({"pp": 16, "dp_shard": 2048, "tp": 4}).on_hosts([8] * 16384)
    assert host_warnings(layout.with_experts(8)) == []
    (warning,) = host_warnings(layout.with_experts(64))
    assert warning.endswith("use expert_parallel: 8")
