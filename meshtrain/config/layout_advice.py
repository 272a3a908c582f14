"""Advice where a layout does not work: the nearest sizes, the world sizes that fit, and groups that
cross hosts."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from meshtrain.errors import any_of, join_some, short
from meshtrain.layout import AXES, DATA_AXES, Layout, LayoutError, WorldSizeError, written

Size = TypeVar("Size")  # a number of ranks, or the config node that holds it
_BY_HOST = "host by host (srun --distribution=block)"


def resolve(sizes: Mapping[str, int], world_size: int, experts: int = 1) -> Layout:
    """`Layout.resolve`, whose LayoutError also names the nearest layouts of `world_size` ranks."""
    try:
        return Layout.resolve(sizes, world_size)
    except WorldSizeError as error:
        fits = " or ".join(map(written, nearest(sizes, world_size, experts=experts)))
        raise LayoutError(f"{error}, or use {fits}" if fits else str(error)) from None


def nearest(
    sizes: Mapping[str, int], world_size: int, limit: int = 2, experts: int = 1
) -> list[dict[str, int]]:
    """Layouts of exactly `world_size` ranks that are near to `sizes`, nearest first. There is
    always one, unless expert parallelism over `experts` ranks folds into none.

    Layouts with fewer changed axes come first, then those with nearer sizes; data axes are easier
    to change than axes that have to fit the model. A size of -1 changes freely, and a layout
    without a data axis may get one.
    """
    base = (
        dict(sizes) if any(axis in sizes for axis in DATA_AXES) else add_axis(sizes, "dp_shard", 1)
    )
    free = tuple(axis for axis, size in base.items() if size == -1)
    fixed = [axis for axis in base if axis not in free]
    layouts: list[dict[str, int]] = []
    for changes in range(len(fixed) + 1):
        candidates = []
        for axes in itertools.combinations(fixed, changes):
            rest = math.prod(base[axis] for axis in fixed if axis not in axes)
            if world_size % rest:
                continue
            for factors in factorizations(world_size // rest, len(axes + free)):
                new = base | dict(zip(axes + free, factors, strict=True))
                if all(new[axis] != base[axis] for axis in axes) and Layout(new).folds(experts):
                    candidates.append(new)
        layouts += sorted(candidates, key=lambda new: _distance(base, new))
        if layouts and (changes >= 2 or len(layouts) >= limit):
            break
    # Leave out an added axis that stayed at 1.
    return [
        {axis: size for axis, size in new.items() if axis in sizes or size > 1}
        for new in layouts[:limit]
    ]


def add_axis(sizes: Mapping[str, Size], axis: str, size: Size) -> dict[str, Size]:
    """`sizes` with the size of an axis changed, or the axis inserted in the usual order; an unknown
    axis goes last."""
    if axis in sizes:
        return {**sizes, axis: size}
    later = AXES[AXES.index(axis) + 1 :] if axis in AXES else ()
    items = list(sizes.items())
    items.insert(
        next((i for i, (name, _) in enumerate(items) if name in later), len(items)), (axis, size)
    )
    return dict(items)


def _distance(old: Mapping[str, int], new: Mapping[str, int]) -> float:
    far = 0.0
    for axis, size in new.items():
        before = size if old[axis] == -1 else old[axis]
        step = abs(math.log2(size / before))
        # In place of tp: 2, tp: 3 fits few models; tp: 1 or 4 fits most.
        far += (
            step
            if axis in DATA_AXES
            else 2 * step + 4 * (size % before != 0 and before % size != 0)
        )
    return far


def factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered product of `parts` factors."""
    if parts <= 1:
        if parts == 1 or number == 1:
            yield (number,) * parts
        return
    for factor in range(1, math.isqrt(number) + 1):
        if number % factor == 0:
            for first in {factor, number // factor}:
                for rest in factorizations(number // first, parts - 1):
                    yield (first, *rest)


def world_sizes_text(sizes: Mapping[str, int], experts: int = 1) -> str:
    """Words for the numbers of processes that can form a layout into which `experts` ranks fold."""

    def multiples(axis: str) -> str:
        fixed = math.prod(size for other, size in sizes.items() if other != axis)
        if fixed == experts == 1:
            return "any number"
        free = (
            n for n in range(1, 3 * experts + 1) if Layout(add_axis(sizes, axis, n)).folds(experts)
        )
        worlds = [str(n * fixed) for n in itertools.islice(free, 3)]
        return f"{', '.join(worlds)}, ... processes" if worlds else "no number of processes"

    if -1 in sizes.values():
        return f"{multiples(next(axis for axis, size in sizes.items() if size == -1))} can form it"
    fixed = math.prod(sizes.values())
    axis = next((axis for axis in reversed(DATA_AXES) if axis in sizes), "dp_shard")
    return f"{fixed} processes can form it, and with {axis}: -1 {multiples(axis)} can"


def host_warnings(layout: Layout) -> list[str]:
    """Sentences about what is allowed but probably a mistake: groups of tp, cp_heads or ep that
    cross hosts."""
    warnings = []
    if crossing := _crossing(layout, "tp"):
        reason = f"tp communicates in every layer, forward and backward: {_why_tp_crosses(layout)}"
        warnings.append(f"tp crosses hosts {crossing}, and {reason}")
    if crossing := _crossing(layout, "cp_heads"):
        heads = layout.context_heads
        warnings.append(
            f"context_heads: {heads} crosses hosts {crossing}, and these ranks exchange queries, "
            "keys and values in "
            f"every layer: write cp (or what stands behind it) so that {heads} neighbours share a "
            "host"
        )
    if crossing := _crossing(layout, "ep"):
        reason = (
            "these ranks exchange what tokens are to their experts in every "
            f"layer{_within_hosts(layout)}"
        )
        warnings.append(f"expert_parallel: {layout.experts} crosses hosts {crossing}, and {reason}")
    return warnings


def _within_hosts(layout: Layout) -> str:
    """A way to keep each expert group on one host: the axes in the usual order, or a smaller
    expert_parallel."""
    runs = (
        [span.count for span in layout.host_spans],
        [layout.hosts[span.host] for span in layout.host_spans],
    )
    usual = {axis: layout.sizes[axis] for axis in AXES if axis in layout.sizes}
    for ranks in reversed([n for n in layout.expert_sizes() if n <= layout.experts]):
        for sizes in (layout.sizes, usual):
            if not _crossing(Layout(sizes).on_hosts(*runs).with_experts(ranks), "ep"):
                fewer = [f"expert_parallel: {ranks}"] * (ranks < layout.experts)
                order = [f"the layout {written(sizes)}"] * (list(sizes) != list(layout.axes))
                return f": use {' and '.join(fewer + order)}"
    return ""


def _crossing(layout: Layout, axis: str) -> str:
    """`in 2 of 16 groups (the first is ranks [0, 4] on host 0 and host 1)`; empty if no group
    crosses hosts."""
    groups = layout.groups(axis) if layout.size(axis) > 1 and len(layout.hosts) > 1 else []
    crossing = [group for group in groups if layout.crosses_hosts(group)]
    if not crossing:
        return ""
    hosts = list(layout.hosts_of(crossing[0]))
    total = layout.world_size // layout.size(axis)
    return (
        f"in {len(crossing)} of {total} groups (the first is ranks {short(crossing[0])} on "
        f"{_first_names(hosts)})"
    )


def _why_tp_crosses(layout: Layout) -> str:
    """Why a tp group crosses hosts, and what would keep it within one host."""
    sizes, tp, counts = layout.sizes, layout.size("tp"), layout.host_counts()
    after = [axis for axis in layout.axes[layout.axes.index("tp") + 1 :] if sizes[axis] > 1]
    tp_last = {axis: size for axis, size in sizes.items() if axis != "tp"}
    edges = [span.start for span in layout.host_spans]
    if after and all(edge % tp == 0 for edge in edges):
        apart = math.prod(sizes[axis] for axis in after)
        last = written(tp_last | {"tp": tp})
        return (
            f"{any_of(after, 'and')} after tp in the layout keeps tp's ranks {apart} apart; put tp "
            f"last: {last}"
        )
    odd = [host for host, count in counts.items() if count % tp]
    if not odd:
        order = f", and use {written(tp_last | {'tp': tp})}" if after else ""
        return f"the ranks are dealt out over the hosts in turn; start them {_BY_HOST}{order}"
    host = odd[0]
    fits = math.gcd(tp, *counts.values())
    data = next((axis for axis in reversed(DATA_AXES) if axis in sizes), "dp_shard")
    smaller = add_axis(tp_last, data, sizes.get(data, 1) * tp // fits) | {"tp": fits}
    in_blocks = len(layout.host_spans) > len(layout.hosts) and any(edge % fits for edge in edges)
    return (
        f"tp: {tp} does not divide the {counts[host]} process{'es' * (counts[host] != 1)} of {host}"
        + (f" and {len(odd) - 1} other host{'s' * (len(odd) > 2)}" if len(odd) > 1 else "")
        + f"; use {written(smaller)}"
        + (f", with the ranks started {_BY_HOST}" if in_blocks else "")
    )


def _first_names(names: Sequence[str]) -> str:
    return any_of(names, "and") if len(names) <= 3 else f"{join_some(names, 3)} hosts"
