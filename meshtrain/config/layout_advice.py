"""Advice where a layout does not work: the nearest sizes, the world sizes that fit, and groups that
cross hosts."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from meshtrain.errors import any_of, join_some, plural, short
from meshtrain.layout import AXES, DATA_AXES, Layout, LayoutError, WorldSizeError, written

Size = TypeVar("Size")  # a number of ranks, or the config node that holds it

MOST_PROPOSALS = 2  # nearest layouts that an error names
_BY_HOST = "host by host (srun --distribution=block)"


def resolve(sizes: Mapping[str, int], world_size: int, experts: int = 1) -> Layout:
    """`Layout.resolve`, whose LayoutError also names the nearest layouts of `world_size` ranks."""
    try:
        return Layout.resolve(sizes, world_size)
    except WorldSizeError as error:
        proposals = [written(near) for near in nearest(sizes, world_size, experts)]
        if not proposals:
            raise LayoutError(str(error)) from None
        raise LayoutError(f"{error}, or use {' or '.join(proposals)}") from None


def nearest(sizes: Mapping[str, int], world_size: int, experts: int = 1) -> list[dict[str, int]]:
    """At most two layouts of exactly `world_size` ranks that are near to `sizes`, nearest first.
    There is always one, unless expert parallelism over `experts` ranks folds into none.

    Layouts with fewer changed axes come first, then those with nearer sizes; data axes are easier
    to change than axes that have to fit the model. A size of -1 changes freely, and a layout
    without a data axis may get one.
    """
    has_data_axis = any(axis in sizes for axis in DATA_AXES)
    base = dict(sizes) if has_data_axis else add_axis(sizes, "dp_shard", 1)
    free = [axis for axis, size in base.items() if size == -1]
    fixed = [axis for axis in base if axis not in free]

    layouts: list[dict[str, int]] = []
    for changes in range(len(fixed) + 1):
        candidates: list[dict[str, int]] = []
        for changed in itertools.combinations(fixed, changes):
            candidates += _with_other_sizes(base, free, changed, world_size)
        fitting = [sizes for sizes in candidates if Layout(sizes).folds(experts)]
        layouts += sorted(fitting, key=lambda sizes: _distance(base, sizes))

        # After two changes the list is as good as it gets: three would be another layout.
        if len(layouts) >= MOST_PROPOSALS or (layouts and changes >= 2):
            break

    return [_without_added(near, sizes) for near in layouts[:MOST_PROPOSALS]]


def _with_other_sizes(
    base: Mapping[str, int], free: Sequence[str], changed: Sequence[str], world_size: int
) -> Iterator[dict[str, int]]:
    """Every layout of `world_size` ranks in which the free axes have any size, each changed axis
    another one, and all other axes that of `base`."""
    open_axes = (*changed, *free)
    kept = math.prod(size for axis, size in base.items() if axis not in open_axes)
    if world_size % kept:
        return
    for factors in factorizations(world_size // kept, len(open_axes)):
        sizes = {**base, **dict(zip(open_axes, factors, strict=True))}
        if all(sizes[axis] != base[axis] for axis in changed):
            yield sizes


def _without_added(layout: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """A layout near to `sizes`, without an added axis that stayed at 1."""
    return {axis: size for axis, size in layout.items() if axis in sizes or size > 1}


def add_axis(sizes: Mapping[str, Size], axis: str, size: Size) -> dict[str, Size]:
    """`sizes` with the size of an axis changed, or the axis inserted in the usual order; an unknown
    axis goes last."""
    if axis in sizes:
        return {**sizes, axis: size}

    later_axes = AXES[AXES.index(axis) + 1 :] if axis in AXES else ()
    items = list(sizes.items())
    position = 0
    while position < len(items) and items[position][0] not in later_axes:
        position += 1
    items.insert(position, (axis, size))
    return dict(items)


def _distance(old: Mapping[str, int], new: Mapping[str, int]) -> float:
    """How far the sizes of a layout are from those asked for, in doublings of an axis."""
    far = 0.0
    for axis, size in new.items():
        before = old[axis]
        if before == -1:
            continue
        step = abs(math.log2(size / before))
        if axis in DATA_AXES:
            far += step
            continue
        # In place of tp: 2, tp: 3 fits few models; tp: 1 or 4 fits most.
        is_multiple = size % before == 0 or before % size == 0
        far += 2 * step + (0 if is_multiple else 4)
    return far


def factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered product of `parts` factors."""
    if parts == 0:
        if number == 1:
            yield ()
        return
    if parts == 1:
        yield (number,)
        return
    for factor in range(1, math.isqrt(number) + 1):
        if number % factor:
            continue
        for first in {factor, number // factor}:  # one factor, if number is its square
            for rest in factorizations(number // first, parts - 1):
                yield (first, *rest)


def world_sizes_text(sizes: Mapping[str, int], experts: int = 1) -> str:
    """Words for the numbers of processes that can form a layout into which `experts` ranks fold."""
    for axis, size in sizes.items():
        if size == -1:
            return f"{_multiples_text(sizes, axis, experts)} can form it"

    fixed = math.prod(sizes.values())
    axis = _innermost_data_axis(sizes)
    multiples = _multiples_text(sizes, axis, experts)
    return f"{fixed} processes can form it, and with {axis}: -1 {multiples} can"


def _multiples_text(sizes: Mapping[str, int], axis: str, experts: int) -> str:
    """Words for the numbers of processes with any size of one axis."""
    others = math.prod(size for other, size in sizes.items() if other != axis)
    if others == experts == 1:
        return "any number"

    candidates = range(1, 3 * experts + 1)
    fitting = [size for size in candidates if Layout(add_axis(sizes, axis, size)).folds(experts)]
    if not fitting:
        return "no number of processes"
    worlds = [str(size * others) for size in fitting[:3]]
    return f"{', '.join(worlds)}, ... processes"


def _innermost_data_axis(sizes: Mapping[str, int]) -> str:
    for axis in reversed(DATA_AXES):
        if axis in sizes:
            return axis
    return "dp_shard"


def host_warnings(layout: Layout) -> list[str]:
    """Sentences about what is allowed but probably a mistake: groups of tp, cp_heads or ep that
    cross hosts."""
    warnings = []

    crossing = _crossing(layout, "tp")
    if crossing:
        warnings.append(
            f"tp crosses hosts {crossing}, and tp communicates in every layer, forward and "
            f"backward: {_why_tp_crosses(layout)}"
        )

    crossing = _crossing(layout, "cp_heads")
    if crossing:
        heads = layout.context_heads
        warnings.append(
            f"context_heads: {heads} crosses hosts {crossing}, and these ranks exchange queries, "
            f"keys and values in every layer: write cp (or what stands behind it) so that {heads} "
            "neighbours share a host"
        )

    crossing = _crossing(layout, "ep")
    if crossing:
        warnings.append(
            f"expert_parallel: {layout.experts} crosses hosts {crossing}, and these ranks exchange "
            f"what tokens are to their experts in every layer{_experts_within_hosts(layout)}"
        )
    return warnings


def _crossing(layout: Layout, axis: str) -> str:
    """`in 2 of 16 groups (the first is ranks [0, 4] on host 0 and host 1)`; empty if no group
    crosses hosts."""
    if layout.size(axis) == 1 or len(layout.hosts) <= 1:
        return ""
    crossing = [group for group in layout.groups(axis) if layout.crosses_hosts(group)]
    if not crossing:
        return ""

    total = layout.world_size // layout.size(axis)
    hosts = list(layout.hosts_of(crossing[0]))
    names = any_of(hosts, "and") if len(hosts) <= 3 else f"{join_some(hosts, 3)} hosts"
    return (
        f"in {len(crossing)} of {total} groups (the first is ranks {short(crossing[0])} on {names})"
    )


def _why_tp_crosses(layout: Layout) -> str:
    """Why a tp group crosses hosts, and what would keep it within one host."""
    sizes, tp = layout.sizes, layout.size("tp")
    without_tp = {axis: size for axis, size in sizes.items() if axis != "tp"}
    tp_last = written({**without_tp, "tp": tp})
    after_tp = [axis for axis in layout.axes[layout.axes.index("tp") + 1 :] if sizes[axis] > 1]

    # Hosts hold whole multiples of tp ranks: it is enough to have tp innermost.
    edges = [span.start for span in layout.host_spans]
    if after_tp and all(edge % tp == 0 for edge in edges):
        apart = math.prod(sizes[axis] for axis in after_tp)
        return (
            f"{any_of(after_tp, 'and')} after tp in the layout keeps tp's ranks {apart} apart; put "
            f"tp last: {tp_last}"
        )

    # Each host has a multiple of tp ranks in all, but not in a row.
    counts = layout.host_counts()
    odd_hosts = [host for host, count in counts.items() if count % tp]
    if not odd_hosts:
        order = f", and use {tp_last}" if after_tp else ""
        return f"the ranks are dealt out over the hosts in turn; start them {_BY_HOST}{order}"

    # Some host cannot be filled with groups of tp: a smaller tp fits all, the rest goes to data.
    fits = math.gcd(tp, *counts.values())
    data_axis = _innermost_data_axis(sizes)
    data_size = sizes.get(data_axis, 1) * tp // fits
    smaller = written({**add_axis(without_tp, data_axis, data_size), "tp": fits})

    first, others = odd_hosts[0], len(odd_hosts) - 1
    processes = "process" if counts[first] == 1 else "processes"
    reason = f"tp: {tp} does not divide the {counts[first]} {processes} of {first}"
    if others:
        reason += f" and {plural(others, 'other host')}"
    advice = f"use {smaller}"
    dealt_out = len(layout.host_spans) > len(layout.hosts)
    if dealt_out and any(edge % fits for edge in edges):
        advice += f", with the ranks started {_BY_HOST}"
    return f"{reason}; {advice}"


def _experts_within_hosts(layout: Layout) -> str:
    """A way to keep each expert group on one host, as the end of a sentence: the axes in the usual
    order, or a smaller expert_parallel. Empty if there is none."""
    counts = [span.count for span in layout.host_spans]
    hosts = [layout.hosts[span.host] for span in layout.host_spans]
    usual_order = {axis: layout.sizes[axis] for axis in AXES if axis in layout.sizes}

    smaller = [ranks for ranks in layout.expert_sizes() if ranks <= layout.experts]
    for ranks in reversed(smaller):
        for sizes in (layout.sizes, usual_order):
            if _crossing(Layout(sizes).on_hosts(counts, hosts).with_experts(ranks), "ep"):
                continue
            advice = []
            if ranks < layout.experts:
                advice.append(f"expert_parallel: {ranks}")
            if list(sizes) != list(layout.axes):
                advice.append(f"the layout {written(sizes)}")
            return f": use {' and '.join(advice)}"
    return ""
