"""The rank table of a placed layout (`layout.txt` of a run's folder): each rank's host and
coordinate, and the groups of every axis. Pure functions."""

from collections import Counter
from collections.abc import Sequence

from meshtrain.errors import short
from meshtrain.layout import CONTEXT_AXES, DATA_AXES, EXPERT_AXES, FSDP_AXES, Layout


def describe_hosts(layout: Layout) -> str:
    """`32 processes = 4 hosts x 8`, or `6 processes = 4 on host 0 + 2 on host 1`. The layout is
    placed on hosts."""
    processes_of = layout.host_counts()  # host -> its processes
    hosts_with = Counter(processes_of.values())  # number of processes -> hosts that have so many
    parts = []
    if len(hosts_with) > 1 and len(processes_of) <= 8:
        for host, count in processes_of.items():
            parts.append(f"{count} on {host}")
    else:
        for count, hosts in hosts_with.items():
            parts.append(f"{_count(hosts, 'host', 'hosts')} x {count}")
    world = _count(layout.world_size, "process", "processes")
    return f"{world} = {' + '.join(parts)}"


def _count(count: int, one: str, many: str) -> str:
    """`1 host`, `1024 hosts`: as in the table, without commas."""
    if count == 1:
        return f"1 {one}"
    return f"{count} {many}"


def layout_text(layout: Layout, most_lines: int | None = None) -> str:
    """The table of a placed layout: rank -> host, local rank, coordinate; and every group of every
    axis. The middle is left out of a table longer than `most_lines`, and of a list of groups longer
    than half of that."""
    lines = [f"layout {layout} on {describe_hosts(layout)}", ""]
    lines += _rank_lines(layout, most_lines)
    for axes in grouped_axes(layout):
        lines.append("")
        lines += _group_lines(layout, axes, most_lines)
    return "\n".join(lines) + "\n"


def _rank_lines(layout: Layout, most_lines: int | None) -> list[str]:
    axes = (*layout.axes, *expert_axes(layout))
    rows = [["rank", "host", "local", *axes]]
    for rank in without_middle(range(layout.world_size), most_lines):
        if isinstance(rank, range):
            rows.append([f"... {len(rank)} more ranks ..."])
            continue
        row = [str(rank), layout.host(rank), str(layout.local_rank(rank))]
        coordinate = layout.coordinate(rank, *axes)
        for axis in axes:
            row.append(str(coordinate[axis]))
        rows.append(row)
    return columns(rows)


def grouped_axes(layout: Layout) -> list[tuple[str, ...]]:
    """The axes with groups of more than one rank, and the derived ones that differ from these: the
    data axes together, the ranks that shard parameters, the two factors of `cp`; and the axes of
    experts."""
    grouped: list[tuple[str, ...]] = []
    for axis in layout.axes:
        if layout.size(axis) > 1:
            grouped.append((axis,))
    # Groups of several axes differ from those of each only where each of these axes has some.
    if _are_large(layout, DATA_AXES):
        grouped.append(DATA_AXES)
    if _are_large(layout, FSDP_AXES):
        grouped.append(("fsdp",))
    # `cp` is the product of its two factors.
    if _are_large(layout, CONTEXT_AXES):
        for axis in CONTEXT_AXES:
            grouped.append((axis,))
    for axis in reversed(expert_axes(layout)):
        grouped.append((axis,))
    return grouped


def _are_large(layout: Layout, axes: Sequence[str]) -> bool:
    return all(layout.size(axis) > 1 for axis in axes)


def expert_axes(layout: Layout) -> list[str]:
    """The expert axes with more than one rank, if experts are distributed: copies, shards, and
    parts, `ep`."""
    if layout.experts <= 1:
        return []
    return [axis for axis in EXPERT_AXES if layout.size(axis) > 1]


def _group_lines(layout: Layout, axes: tuple[str, ...], most_lines: int | None) -> list[str]:
    groups = layout.groups(*axes)
    name = axes[0]
    if len(axes) > 1:
        name = f"data ({' x '.join(axes)})"
    count = _count(len(groups), "group", "groups")
    title = f"{name}: {count} of {len(groups[0])} ranks, {_crossing(layout, groups)}"

    most_groups = None
    if most_lines is not None:
        most_groups = most_lines // 2
    rows = []
    for i in without_middle(range(len(groups)), most_groups):
        if isinstance(i, range):
            rows.append([f"... {len(i)} more groups ..."])
            continue
        group = groups[i]
        ranks = str(group)
        if most_lines is not None:
            ranks = short(group)
        rows.append([ranks, _hosts_of(layout, group)])
    indented = [f"  {line}" for line in columns(rows)]
    return [title, *indented]


def _crossing(layout: Layout, groups: Sequence[Sequence[int]]) -> str:
    """How many groups have ranks on several hosts."""
    crossing = sum(layout.crosses_hosts(ranks) for ranks in groups)
    if crossing == 0:
        return "none crosses hosts"
    if crossing == len(groups):
        return "each crosses hosts"
    if crossing == 1:
        return "1 crosses hosts"
    return f"{crossing} cross hosts"


def _hosts_of(layout: Layout, ranks: Sequence[int]) -> str:
    hosts = list(layout.hosts_of(ranks))
    if len(hosts) == 1:
        return hosts[0]
    if len(hosts) <= 3:
        return f"crosses hosts: {', '.join(hosts)}"
    return f"crosses {len(hosts)} hosts"


def without_middle(items: range, most: int | None) -> list[int | range]:
    """The items of a range; of a long one the first and last, and between them the range of the
    others."""
    if most is None or len(items) <= most:
        return list(items)
    half = most // 2
    return [*items[:half], items[half:-half], *items[-half:]]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines; a row with a single cell is a remark and sets no width."""
    widths: dict[int, int] = {}  # by the number of the column
    for row in rows:
        if len(row) == 1:
            continue
        for i, cell in enumerate(row):
            widths[i] = max(widths.get(i, 0), len(cell))
    lines = []
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            width = widths.get(i, 0)
            cells.append(cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines
