"""Which rank is where: the named axes of the mesh, outermost first, and the hosts under them.

A `Layout` is one small value that many parts read: process groups, the rank table of a run, `meshtrain plan`. It is
pure Python over integers, so that a job of 131,072 ranks can be laid out, checked and explained on a laptop.

Ranks are numbered row-major over the axes as they are written: neighbouring ranks differ in the last axis. A *group*
of some axes is the set of ranks that differ in those axes only. An axis that a layout does not name has size 1
everywhere in this file, so callers may ask for `tp` without asking first whether there is any.

(The same idea, without torch: Megatron-LM's `hyper_comm_grid.py`, DeepSpeed's `runtime/pipe/topology.py`.)
"""

import difflib
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # in the usual order
DATA_AXES = ("dp_replicate", "dp_shard")  # ranks that differ in these see different samples

# What these axes are called elsewhere, for "did you mean".
_ELSEWHERE = {
    "dp": ("dp_replicate", "dp_shard"),
    "data": ("dp_replicate", "dp_shard"),
    "ddp": ("dp_replicate",),
    "replicate": ("dp_replicate",),
    "fsdp": ("dp_shard",),
    "shard": ("dp_shard",),
    "tensor": ("tp",),
    "model": ("tp",),
    "mp": ("tp",),
    "pipeline": ("pp",),
    "pipe": ("pp",),
    "context": ("cp",),
    "ep": (),  # experts are split over ranks of the data axes, never a factor of the world
}


class LayoutError(ValueError):
    """A layout that cannot be, or a question about an axis, rank or host that it does not have."""


@dataclass(frozen=True)
class Run:
    """Ranks `start` to `start + count - 1`, which lie on the same host with local ranks from `local` on."""

    host: int
    start: int
    count: int
    local: int


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """Sizes of the mesh's axes, outermost first, and optionally the hosts on which its ranks run.

    Layouts are values: hashable, equal when axes (in order), sizes and hosts are equal.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    hosts: tuple[str, ...]  # names in order of first appearance; empty until the layout is placed with `on_hosts`
    runs: tuple[Run, ...]  # in rank order
    world_size: int = field(compare=False)  # the product of the shape
    _strides: tuple[int, ...] = field(compare=False)  # how far apart neighbours on each axis are
    _starts: tuple[int, ...] = field(compare=False)  # the first rank of each run

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes`: axis -> number of ranks along it, at least 1, in the order of the mesh.

        Raises:
            LayoutError: an unknown axis, or a size that is no integer of at least 1.
        """
        _check(sizes, free_allowed=False)
        self._set(tuple(sizes), tuple(sizes.values()), (), ())

    def _set(
        self, axes: tuple[str, ...], shape: tuple[int, ...], hosts: tuple[str, ...], runs: tuple[Run, ...]
    ) -> None:
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        starts = tuple(run.start for run in runs)
        for name, value in zip(
            self.__dataclass_fields__, (axes, shape, hosts, runs, math.prod(shape), strides, starts), strict=True
        ):
            object.__setattr__(self, name, value)  # the one place that writes to this frozen value

    @classmethod
    def resolve(cls, sizes: Mapping[str, int], world_size: int) -> "Layout":
        """The layout of `world_size` processes; at most one size may be -1, which becomes whatever is left.

        Raises:
            LayoutError: the sizes do not multiply to `world_size`; the message names sizes that would.
        """
        _check(sizes, free_allowed=True)
        if not _is_count(world_size):
            raise LayoutError(f"a job has at least 1 process; found a world size of {world_size!r}")
        fixed = math.prod(size for size in sizes.values() if size != -1)
        free = [axis for axis, size in sizes.items() if size == -1]
        if free and world_size % fixed == 0:
            return cls({**sizes, free[0]: world_size // fixed})
        if not free and fixed == world_size:
            return cls(sizes)
        use = " or ".join(written(near) for near in nearest(sizes, world_size))
        if not free:
            raise LayoutError(
                f"layout {written(sizes)} needs {_processes(fixed)} and there {'is' if world_size == 1 else 'are'} "
                f"{world_size}: start {fixed}, or use {use}"
            )
        below = world_size // fixed * fixed
        worlds = f"{below} or {below + fixed}" if below else f"{fixed}"
        raise LayoutError(
            f"layout {written(sizes)}: the other axes multiply to {fixed}, which does not divide "
            f"{_processes(world_size)}: start {worlds} processes, or use {use}"
        )

    def __str__(self) -> str:
        return written(self.sizes)

    def __repr__(self) -> str:
        placed = f" on {len(self.hosts)} host{'s' * (len(self.hosts) != 1)}" if self.hosts else ""
        return f"Layout({self}{placed})"

    # Axes -----------------------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size, outermost first: what `Layout(...)` was given."""
        return dict(zip(self.axes, self.shape, strict=True))

    def size(self, *axes: str) -> int:
        """How many ranks a group of these axes has: 1 for an axis that the layout does not name."""
        return math.prod(self.shape[i] for i in self._places(axes))

    def coordinate(self, rank: int) -> dict[str, int]:
        """The position of a rank on every axis of the layout, outermost first."""
        self._check_rank(rank)
        return {
            axis: rank // stride % size for axis, stride, size in zip(self.axes, self._strides, self.shape, strict=True)
        }

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate: the inverse of `coordinate`.

        Every axis of the layout must be given; another known axis only as 0.

        Raises:
            LayoutError: an axis is missing or unknown, or a position lies outside its axis.
        """
        self._places(tuple(coordinate))
        missing = [axis for axis in self.axes if axis not in coordinate]
        if missing:
            raise LayoutError(f"layout {self}: rank(...) needs a position on every axis; missing: {', '.join(missing)}")
        for axis, position in coordinate.items():
            last = self.size(axis) - 1
            if not 0 <= position <= last:
                raise LayoutError(f"layout {self}: there is no {axis}={position}; {axis} goes from 0 to {last}")
        return sum(coordinate[axis] * stride for axis, stride in zip(self.axes, self._strides, strict=True))

    # Groups ---------------------------------------------------------------------------------------------------------

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` in `axes` only, ascending, itself among them.

        Takes time in the size of the group, not of the world. Axes that the layout does not name add nothing, so the
        answer is `[rank]` when it names none of them.
        """
        self._check_rank(rank)
        places = self._places(axes)
        first = rank - sum(rank // self._strides[i] % self.shape[i] * self._strides[i] for i in places)
        return [first + offset for offset in self._offsets(places)]

    def groups(self, *axes: str) -> list[list[int]]:
        """Every group of `axes`, ordered by first rank; together they hold each rank once.

        Several axes give combined groups: one per coordinate on the remaining axes.
        """
        places = self._places(axes)
        offsets = self._offsets(places)
        firsts = self._offsets([i for i in range(len(self.axes)) if i not in places])
        return [[first + offset for offset in offsets] for first in firsts]

    def index(self, rank: int, *axes: str) -> int:
        """The position of a rank in `group(rank, *axes)`."""
        self._check_rank(rank)
        position = 0
        for i in self._places(axes):
            position = position * self.shape[i] + rank // self._strides[i] % self.shape[i]
        return position

    def _places(self, axes: Sequence[str]) -> list[int]:
        """Where the named axes stand in the layout, outermost first."""
        for axis in axes:
            if axis not in AXES:
                raise LayoutError(_unknown(axis))
        if len(set(axes)) != len(axes):
            raise LayoutError(f"an axis is named twice: {', '.join(axes)}")
        return [i for i, axis in enumerate(self.axes) if axis in axes]

    def _offsets(self, places: Sequence[int]) -> list[int]:
        """The ranks of the group of rank 0, ascending (row-major over axes in the layout's order)."""
        offsets = [0]
        for i in places:
            steps = range(0, self.shape[i] * self._strides[i], self._strides[i])
            offsets = [offset + step for offset in offsets for step in steps]
        return offsets

    def _check_rank(self, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise LayoutError(f"layout {self}: there is no rank {rank!r}; ranks go from 0 to {self.world_size - 1}")

    # Hosts ----------------------------------------------------------------------------------------------------------

    def on_hosts(self, counts: Sequence[int], names: Sequence[str] | None = None) -> "Layout":
        """This layout with its ranks placed on hosts, in rank order: the first `counts[0]` ranks on the first, ...

        `names` default to `host 0`, `host 1`, ... A name may come back later: names a, b, a, b with counts of 1 deal
        the ranks out in turn, as SLURM's cyclic distribution does.

        Raises:
            LayoutError: a count below 1, names that do not fit, or counts that do not add up to the world.
        """
        if not counts:
            raise LayoutError(f"layout {self} needs at least one host; found none")
        names = [f"host {i}" for i in range(len(counts))] if names is None else names
        if len(names) != len(counts):
            raise LayoutError(
                f"{len(counts)} counts of processes for {len(names)} names of hosts: give one count per name"
            )
        for name, count in zip(names, counts, strict=True):
            if not _is_count(count):
                raise LayoutError(f"{name} has {count!r} processes; expected an integer of at least 1")
        if sum(counts) != self.world_size:
            raise LayoutError(
                f"the hosts have {_sum(counts)} and layout {self} needs {self.world_size}: give counts that add up to "
                f"{self.world_size}, or use {' or '.join(map(written, nearest(self.sizes, sum(counts))))}"
            )
        index: dict[str, int] = {}
        used: dict[str, int] = {}
        runs: list[Run] = []
        start = 0
        for name, count in zip(names, counts, strict=True):
            host, local = index.setdefault(name, len(index)), used.get(name, 0)
            if runs and runs[-1].host == host:
                last = runs.pop()
                runs.append(Run(host, last.start, last.count + count, last.local))
            else:
                runs.append(Run(host, start, count, local))
            used[name] = local + count
            start += count
        placed = Layout.__new__(Layout)
        placed._set(self.axes, self.shape, tuple(index), tuple(runs))
        return placed

    def host(self, rank: int) -> str:
        """The name of the host of a rank."""
        return self.hosts[self._run(rank).host]

    def host_index(self, rank: int) -> int:
        """The position of a rank's host in `hosts`."""
        return self._run(rank).host

    def local_rank(self, rank: int) -> int:
        """The position of a rank among the ranks of its host."""
        run = self._run(rank)
        return run.local + rank - run.start

    def host_counts(self) -> dict[str, int]:
        """Host -> number of its ranks, in order of first appearance; empty for a layout without hosts."""
        counts = dict.fromkeys(self.hosts, 0)
        for run in self.runs:
            counts[self.hosts[run.host]] += run.count
        return counts

    def crosses_hosts(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks lie on more than one host."""
        hosts = (self._run(rank).host for rank in ranks)
        first = next(hosts, None)
        return any(host != first for host in hosts)

    def _run(self, rank: int) -> Run:
        self._check_rank(rank)
        if not self.runs:
            raise LayoutError(f"layout {self} is not placed on hosts: call on_hosts(counts) first")
        return self.runs[bisect_right(self._starts, rank) - 1]

    def warnings(self) -> list[str]:
        """What is allowed and probably a mistake, as sentences: groups of tp that cross hosts.

        dp and pp groups that cross hosts are normal and raise no warning. Empty for a layout without hosts.
        """
        if self.size("tp") == 1 or len(self.hosts) < 2:
            return []
        crossing = [group for group in self.groups("tp") if self.crosses_hosts(group)]
        if not crossing:
            return []
        ranks = crossing[0]
        hosts = dict.fromkeys(self.host(rank) for rank in ranks)
        return [
            f"tp crosses hosts in {len(crossing)} of {self.world_size // self.size('tp')} groups (the first is ranks "
            f"{short(ranks)} on {_some(list(hosts))}), and tp communicates in every layer, forward and backward: "
            + _why_tp_crosses(self)
        ]


def _why_tp_crosses(layout: Layout) -> str:
    """The reason that a tp group crosses hosts and what would keep it inside of one."""
    sizes, tp, counts = layout.sizes, layout.size("tp"), layout.host_counts()
    after = [axis for axis in layout.axes[layout.axes.index("tp") + 1 :] if sizes[axis] > 1]
    tp_last = {axis: size for axis, size in sizes.items() if axis != "tp"}
    edges = [run.start for run in layout.runs]
    if after and all(edge % tp == 0 for edge in edges):
        apart = math.prod(sizes[axis] for axis in after)
        last = written(tp_last | {"tp": tp})
        return f"{_some(after)} after tp in the layout keeps tp's ranks {apart} apart; put tp last: {last}"
    odd = [host for host, count in counts.items() if count % tp]
    if not odd:
        order = f", and use {written(tp_last | {'tp': tp})}" if after else ""
        return (
            "the ranks are dealt out over the hosts in turn; start them host by host "
            f"(srun --distribution=block){order}"
        )
    host = odd[0]
    fits = math.gcd(tp, *counts.values())
    data = next((axis for axis in reversed(DATA_AXES) if axis in sizes), "dp_shard")
    smaller = add_axis(tp_last, data, sizes.get(data, 1) * tp // fits) | {"tp": fits}
    in_blocks = len(layout.runs) > len(layout.hosts) and any(edge % fits for edge in edges)
    return (
        f"tp: {tp} does not divide the {_processes(counts[host])} of {host}"
        + (f" and {len(odd) - 1} other host{'s' * (len(odd) > 2)}" if len(odd) > 1 else "")
        + f"; use {written(smaller)}"
        + (", with the ranks started host by host (srun --distribution=block)" if in_blocks else "")
    )


# Sizes that work ----------------------------------------------------------------------------------------------------


def nearest(sizes: Mapping[str, int], world_size: int, limit: int = 2) -> list[dict[str, int]]:
    """Layouts of exactly `world_size` ranks that are near to `sizes`, nearest first; there is always one.

    Layouts that change one axis come first, then those that change two, and more only where two are not enough. Among
    them the nearer sizes come first; the data axes are easier to change than the others, whose sizes have to fit
    the model: they rather become a multiple or a divisor of what they were. A size of -1 changes freely, and a layout
    without a data axis may get one.
    """
    base = dict(sizes) if any(axis in sizes for axis in DATA_AXES) else add_axis(sizes, "dp_shard", 1)
    free = tuple(axis for axis, size in base.items() if size == -1)
    fixed = [axis for axis in base if axis not in free]
    found: list[dict[str, int]] = []
    for changes in range(len(fixed) + 1):
        near = []
        for axes in itertools.combinations(fixed, changes):
            rest = math.prod(base[axis] for axis in fixed if axis not in axes)
            if world_size % rest:
                continue
            for factors in _factorizations(world_size // rest, len(axes + free)):
                new = base | dict(zip(axes + free, factors, strict=True))
                if all(new[axis] != base[axis] for axis in axes):
                    near.append(new)
        found += sorted(near, key=lambda new: _distance(base, new))
        if found and (changes >= 2 or len(found) >= limit):
            break
    # An added axis that stayed at 1 is not worth naming.
    return [{axis: size for axis, size in new.items() if axis in sizes or size > 1} for new in found[:limit]]


def add_axis(sizes: Mapping[str, int], axis: str, size: int) -> dict[str, int]:
    """`sizes` with another size of an axis, or with the axis where the usual order (`AXES`) has it."""
    if axis in sizes:
        return {**sizes, axis: size}
    items = list(sizes.items())
    later = (i for i, (name, _) in enumerate(items) if AXES.index(name) > AXES.index(axis))
    items.insert(next(later, len(items)), (axis, size))
    return dict(items)


def _distance(old: Mapping[str, int], new: Mapping[str, int]) -> float:
    far = 0.0
    for axis, size in new.items():
        before = old[axis]
        if before in (-1, size):
            continue
        step = abs(math.log2(size / before))
        # tp: 3 instead of 2 fits few models; tp: 1 or 4 fits most.
        far += step if axis in DATA_AXES else 2 * step + 4 * (size % before != 0 and before % size != 0)
    return far


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered product of `parts` factors."""
    if parts <= 1:
        if parts == 1 or number == 1:
            yield (number,) * parts
        return
    for factor in range(1, math.isqrt(number) + 1):
        if number % factor == 0:
            for first in {factor, number // factor}:
                for rest in _factorizations(number // first, parts - 1):
                    yield (first, *rest)


# Words --------------------------------------------------------------------------------------------------------------


def written(sizes: Mapping[str, int]) -> str:
    """`{pp: 2, tp: 4}`: sizes as they stand in YAML."""
    return "{" + ", ".join(f"{axis}: {size}" for axis, size in sizes.items()) + "}"


def short(ranks: Sequence[int], most: int = 8) -> str:
    """`[0, 1, 2]`, and `[0, 8, ..., 248]` when there are more than `most`."""
    if len(ranks) <= most:
        return str(list(ranks))
    return f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"


def _check(sizes: Mapping[str, int], free_allowed: bool) -> None:
    """Raises a LayoutError with everything that is wrong with the sizes alone."""
    if not isinstance(sizes, Mapping):
        raise LayoutError(f"a layout names axes and their sizes, such as {{dp_shard: 4, tp: 2}}; found {sizes!r}")
    wrong = []
    for axis, size in sizes.items():
        if axis not in AXES:
            wrong.append(_unknown(axis))
        if not _is_count(size) and not (free_allowed and _is_free(size)):
            or_free = ", or -1 for whatever is left" if free_allowed else ""
            wrong.append(f"{axis} is {size!r} (expected an integer of at least 1{or_free})")
    free = [axis for axis, size in sizes.items() if _is_free(size)]
    if free_allowed and len(free) > 1:
        wrong.append(f"only one axis can be -1, found {len(free)}: {', '.join(map(str, free))}")
    if wrong:
        raise LayoutError(f"layout {written(sizes)}: " + "; ".join(wrong))


def _is_count(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def _is_free(size: object) -> bool:
    return isinstance(size, int) and size == -1


def _unknown(axis: object) -> str:
    name = str(axis).lower()
    meant = _ELSEWHERE[name] if name in _ELSEWHERE else difflib.get_close_matches(name, AXES, n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"the axes are {', '.join(AXES)}"
    return f"there is no axis {axis!r} ({hint})"


def _processes(count: int) -> str:
    return f"{count} process" + "es" * (count != 1)


def _sum(counts: Sequence[int]) -> str:
    if len(counts) == 1:
        return _processes(counts[0])
    return f"{' + '.join(map(str, counts))} = {sum(counts)} processes" if len(counts) <= 8 else _processes(sum(counts))


def _some(names: Sequence[str], most: int = 3) -> str:
    if len(names) <= most:
        return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"{', '.join(names[:most])} and {len(names) - most} more hosts"
