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
    world = "1 process" if layout.world_size == 1 else f"{layout.world_size} processes"
    if len(hosts_with) > 1 and len(processes_of) <= 8:
        parts = [f"{count} on {host}" for host, count in processes_of.items()]
    else:
        parts = [f"{_count(hosts, 'host')} x {count}" for count, hosts in hosts_with.items()]
    return f"{world} = {' + '.join(parts)}"


def _count(count: int, noun: str) -> str:
    """`1 host`, `1024 hosts`: as in the table, without commas."""
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def layout_text(layout: Layout, most_lines: int | None = None) -> str:
    """The table of a placed layout: rank -> host, local rank, coordinate; and every group of every
    axis. The middle is left out of a table longer than `most_lines`, and of a list of groups longer
    than half of that."""
    axes = (*layout.axes, *expert_axes(layout))
    rows = [["rank", "host", "local", *axes]]
    for rank in without_middle(range(layout.world_size), most_lines):
        if isinstance(rank, range):
            rows.append([f"... {len(rank)} more ranks ..."])
            continue
        place = [str(rank), layout.host(rank), str(layout.local_rank(rank))]
        coordinate = layout.coordinate(rank, *axes)
        rows.append([*place, *(str(index) for index in coordinate.values())])

    lines = [f"layout {layout} on {describe_hosts(layout)}", "", *columns(rows)]
    for grouped in grouped_axes(layout):
        lines += ["", *_group_lines(layout, grouped, most_lines)]
    return "\n".join(lines) + "\n"


def grouped_axes(layout: Layout) -> list[tuple[str, ...]]:
    """The axes with groups of more than one rank, and the derived ones that differ from these: the
    data axes together, the ranks that shard parameters, the two factors of `cp`; and the axes of
    experts."""
    grouped: list[tuple[str, ...]] = []
    large = [axis for axis in layout.axes if layout.size(axis) > 1]
    grouped += [(axis,) for axis in large]
    if set(DATA_AXES) <= set(large):
        grouped.append(tuple(DATA_AXES))
    # A derived axis is one of its own only where each of the axes that make it is.
    made_of = {"fsdp": FSDP_AXES, **dict.fromkeys(CONTEXT_AXES, CONTEXT_AXES)}
    for name, axes in made_of.items():
        if all(layout.size(axis) > 1 for axis in axes):
            grouped.append((name,))
    grouped += [(axis,) for axis in reversed(expert_axes(layout))]
    return grouped


def expert_axes(layout: Layout) -> list[str]:
    """The expert axes with more than one rank, if experts are distributed: copies, shards, and
    parts, `ep`."""
    if layout.experts <= 1:
        return []
    return [axis for axis in EXPERT_AXES if layout.size(axis) > 1]


def _group_lines(layout: Layout, axes: tuple[str, ...], most_lines: int | None) -> list[str]:
    groups = layout.groups(*axes)
    crossing = sum(layout.crosses_hosts(ranks) for ranks in groups)
    if crossing == 0:
        cross = "none crosses hosts"
    elif crossing == len(groups):
        cross = "each crosses hosts"
    elif crossing == 1:
        cross = "1 crosses hosts"
    else:
        cross = f"{crossing} cross hosts"
    name = axes[0] if len(axes) == 1 else f"data ({' x '.join(axes)})"
    title = f"{name}: {_count(len(groups), 'group')} of {len(groups[0])} ranks, {cross}"

    most_groups = None if most_lines is None else most_lines // 2
    rows = []
    for i in without_middle(range(len(groups)), most_groups):
        if isinstance(i, range):
            rows.append([f"... {len(i)} more groups ..."])
            continue
        ranks = str(groups[i]) if most_lines is None else short(groups[i])
        rows.append([ranks, _hosts_of(layout, groups[i])])
    return [title, *[f"  {line}" for line in columns(rows)]]


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
        if len(row) > 1:
            for i, cell in enumerate(row):
                widths[i] = max(widths.get(i, 0), len(cell))
    lines = []
    for row in rows:
        cells = [cell.ljust(widths.get(i, 0)) for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return lines
