"""The rank table of a placed layout (`layout.txt` of a run's folder): each rank's host and
coordinate, and the groups of every axis. Pure functions."""

from collections import Counter
from collections.abc import Sequence

from meshtrain.errors import short
from meshtrain.layout import CONTEXT_AXES, DATA_AXES, EXPERT_AXES, FSDP_AXES, Layout


def describe_hosts(layout: Layout) -> str:
    """`32 processes = 4 hosts x 8`, or `6 processes = 4 on host 0 + 2 on host 1`. The layout is
    placed on hosts."""
    counts = layout.host_counts()
    world = f"{layout.world_size} process{'es' * (layout.world_size != 1)}"
    kinds = Counter(counts.values())
    if len(kinds) > 1 and len(counts) <= 8:
        return f"{world} = " + " + ".join(f"{count} on {host}" for host, count in counts.items())
    return f"{world} = " + " + ".join(
        f"{n} host{'s' * (n != 1)} x {count}" for count, n in kinds.items()
    )


def layout_text(layout: Layout, most_lines: int | None = None) -> str:
    """The table of a placed layout: rank -> host, local rank, coordinate; and every group of every
    axis. The middle is left out of a table longer than `most_lines`, and of a list of groups longer
    than half of that."""
    axes = (*layout.axes, *expert_axes(layout))
    rows = [["rank", "host", "local", *axes]]
    rows += [
        [f"... {len(rank)} more ranks ..."]
        if isinstance(rank, range)
        else [str(rank), layout.host(rank), str(layout.local_rank(rank))]
        + [str(position) for position in layout.coordinate(rank, *axes).values()]
        for rank in without_middle(range(layout.world_size), most_lines)
    ]
    lines = [f"layout {layout} on {describe_hosts(layout)}", "", *columns(rows)]
    for grouped in grouped_axes(layout):
        lines += ["", *_group_lines(layout, grouped, most_lines)]
    return "\n".join(lines) + "\n"


def grouped_axes(layout: Layout) -> list[tuple[str, ...]]:
    """The axes with groups of more than one rank, and the derived ones that differ from these: the
    data axes together, the ranks that shard parameters, the two factors of `cp`; and the axes of
    experts."""
    large = [axis for axis in layout.axes if layout.size(axis) > 1]
    both = [tuple(DATA_AXES)] if set(DATA_AXES) <= set(large) else []
    made_of = {"fsdp": FSDP_AXES, **dict.fromkeys(CONTEXT_AXES, CONTEXT_AXES)}
    derived = [
        (name,) for name, axes in made_of.items() if all(layout.size(axis) > 1 for axis in axes)
    ]
    return [
        *((axis,) for axis in large),
        *both,
        *derived,
        *((axis,) for axis in reversed(expert_axes(layout))),
    ]


def expert_axes(layout: Layout) -> list[str]:
    """The expert axes with more than one rank, if experts are distributed: copies, shards, and
    parts, `ep`."""
    return [axis for axis in EXPERT_AXES if layout.experts > 1 and layout.size(axis) > 1]


def _group_lines(layout: Layout, axes: tuple[str, ...], most_lines: int | None) -> list[str]:
    groups = layout.groups(*axes)
    crossing = sum(layout.crosses_hosts(ranks) for ranks in groups)
    count_text = f"{crossing} cross{'es' * (crossing == 1)} hosts"
    cross = {0: "none crosses hosts", len(groups): "each crosses hosts"}.get(crossing, count_text)
    title = f"data ({' x '.join(axes)})" if len(axes) > 1 else axes[0]
    count = f"{len(groups)} group{'s' * (len(groups) != 1)} of {len(groups[0])} ranks"
    rows = [
        [f"... {len(i)} more groups ..."]
        if isinstance(i, range)
        else [short(groups[i]) if most_lines else str(groups[i]), _hosts_of(layout, groups[i])]
        for i in without_middle(range(len(groups)), most_lines and most_lines // 2)
    ]
    return [f"{title}: {count}, {cross}", *("  " + line for line in columns(rows))]


def _hosts_of(layout: Layout, ranks: Sequence[int]) -> str:
    hosts = list(layout.hosts_of(ranks))
    if len(hosts) == 1:
        return hosts[0]
    return (
        f"crosses hosts: {', '.join(hosts)}" if len(hosts) <= 3 else f"crosses {len(hosts)} hosts"
    )


def without_middle(items: range, most: int | None) -> list[int | range]:
    """The items of a range; of a long one the first and last, and between them the range of the
    others."""
    if most is None or len(items) <= most:
        return list(items)
    head, tail = items[: most // 2], items[-(most // 2) :]
    return [*head, items[len(head) : -len(tail)], *tail]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines; a row with a single cell is a remark and sets no width."""
    width: dict[int, int] = {}
    for row in rows:
        for i, cell in enumerate(row if len(row) > 1 else ()):
            width[i] = max(width.get(i, 0), len(cell))
    return [
        "  ".join(cell.ljust(width.get(i, 0)) for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]
