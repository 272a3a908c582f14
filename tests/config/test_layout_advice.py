"""Sentences that name layouts that work, where one does not."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.config.layout_advice import add_axis, host_warnings, nearest, resolve
from meshtrain.layout import AXES, Layout, LayoutError
from tests.properties import given, st
from tests.test_layout import layouts, placed

TABLES = yaml.safe_load(Path(__file__).with_name("layout_advice.yaml").read_text())


def test_a_layout_that_does_not_fit_is_told_which_would() -> None:
    for row in TABLES["misfits"]:
        with pytest.raises(LayoutError, match=f"{re.escape(row['says'])}$"):
            resolve(row["sizes"], row["processes"], experts=row.get("experts", 1))


@given(layouts(), st.integers(1, 200), st.sampled_from([None, *AXES]))
def test_there_is_always_a_near_layout_and_it_works(
    layout: Layout, world_size: int, free: str | None
) -> None:
    sizes = layout.sizes | ({free: -1} if free in layout.axes else {})
    proposals = nearest(sizes, world_size)
    assert proposals
    for near in proposals:
        assert Layout.resolve(near, world_size).world_size == world_size
        assert [axis for axis in near if axis in sizes] == list(sizes)  # the order stays

    def changes(near: dict[str, int]) -> int:
        return (
            sum(size not in (-1, near[axis]) for axis, size in sizes.items())
            + len(near)
            - len(sizes)
        )

    assert [changes(near) for near in proposals] == sorted(changes(near) for near in proposals)


def test_the_nearest_layout_of_a_layout_that_works_is_itself() -> None:
    assert nearest({"pp": 2, "dp_shard": 3}, 6)[0] == {"pp": 2, "dp_shard": 3}
    assert nearest({"pp": 2, "dp_shard": -1}, 6)[0] == {"pp": 2, "dp_shard": 3}
    assert nearest({"pp": 7, "dp_replicate": 13, "dp_shard": 17, "cp": 19, "tp": 23}, 110_880)


def test_an_axis_is_added_where_the_usual_order_has_it() -> None:
    assert list(add_axis({"pp": 2, "tp": 2}, "dp_shard", 3).items()) == [
        ("pp", 2),
        ("dp_shard", 3),
        ("tp", 2),
    ]
    assert list(add_axis({"tp": 2, "pp": 2}, "dp_shard", 3)) == ["dp_shard", "tp", "pp"]
    assert list(add_axis({"pp": 2}, "tp", 2)) == ["pp", "tp"]
    assert add_axis({"pp": 2}, "pp", 4) == {"pp": 4}


def placed_layout(row: Mapping[str, Any]) -> Layout:
    layout = Layout(row["sizes"])
    if "context_heads" in row:
        layout = layout.with_context_heads(row["context_heads"])
    if "counts" in row:
        layout = layout.on_hosts(row["counts"], row.get("names"))
    return layout.with_experts(row["experts"]) if "experts" in row else layout


def test_groups_that_should_stay_on_a_host_are_warned_of_with_the_reason() -> None:
    for row in TABLES["hosts"]:
        warnings = host_warnings(placed_layout(row))
        assert len(warnings) == ("says" in row), row
        for sentence in row.get("says", ()):
            assert sentence in warnings[0]
        if "experts" in row and warnings:
            layout = re.search(r"layout (\{.*?\})", warnings[0])
            experts = re.search(r"use expert_parallel: (\d+)", warnings[0])
            better = {"sizes": yaml.safe_load(layout[1])} if layout else {}
            better |= {"experts": int(experts[1])} if experts else {}
            assert host_warnings(placed_layout(row | better)) == [], "the advice mends it"


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
                [span.count for span in layout.host_spans],
                [layout.hosts[span.host] for span in layout.host_spans],
            )
        assert host_warnings(better) == []


def test_a_job_of_131072_ranks() -> None:
    layout = Layout({"pp": 16, "dp_shard": 2048, "tp": 4}).on_hosts([8] * 16384)
    assert host_warnings(layout) == []
    assert host_warnings(layout.with_experts(8)) == []
    (warning,) = host_warnings(layout.with_experts(64))
    assert warning.endswith("use expert_parallel: 8")
