"""The placement of ranks on the named axes of the mesh, outermost first, and on hosts.

Pure Python over integers. Ranks are numbered row-major over the axes in the order written:
neighbours differ in the last one. A *group* of some axes is a set of ranks that differ only in
those axes. An axis that is not named has size 1.

*Derived axes* are further names for sets of ranks: products of axes (`VIEWS`), the factors of `cp`
(`CONTEXT_AXES`), and a second factorization of the same ranks for experts (`EXPERT_AXES`). Methods
here accept them; a config does not.
"""

import difflib
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

# What a rank has of the model and the batch, for people, by the axis; in the usual order.
ABOUT_AXES = {
    "pp": "Pipeline stages: each holds some of the blocks.",
    "dp_replicate": (
        "Copies of the model on different samples (DDP; with `dp_shard` above 1: HSDP)."
    ),
    "dp_shard": "Ranks that share one copy of the model and take different samples (FSDP).",
    "cp": "Parts of each sequence (context parallel).",
    "tp": "Parts of each layer (tensor parallel).",
}
AXES = tuple(ABOUT_AXES)

# Ranks that differ in these axes ...
DATA_AXES = ("dp_replicate", "dp_shard")  # ... see different samples
LOSS_AXES = (*DATA_AXES, "cp")  # ... see different tokens: losses and gradients are sums over these
FSDP_AXES = ("dp_shard", "cp")  # ... share one copy of the parameters

# products of axes with their own groups
VIEWS = {"data": DATA_AXES, "loss": LOSS_AXES, "fsdp": FSDP_AXES}
# all ranks of a pipeline stage, which together hold its parameters; has a group only on request
STAGE = "stage"
# factors of `cp`: ranks that split the sequence, neighbours that split heads
CONTEXT_AXES = ("cp_ring", "cp_heads")
# With `pp`, a second factorization of the ranks: replicas of an expert, shards of one replica,
# subsets of the experts.
EXPERT_AXES = ("edp_replicate", "efsdp", "ep")

# A factor of the world: (stride, size), `size` ranks that are `stride` apart. Disjoint factors of a
# row-major numbering are disjoint intervals [stride, stride * size), and a group is a product of
# factors.
Factor = tuple[int, int]

# Why ZeRO-1 and FSDP exclude each other.
NOT_WITH_FSDP = (
    "shard_optimizer shares the optimizer among the copies of dp_replicate, and with dp_shard or "
    "cp FSDP has sharded "
    "it already: leave it false, or use dp_replicate in the place of dp_shard and cp"
)

# Names of these axes in other projects, for "did you mean".
_ELSEWHERE = {
    **dict.fromkeys(("dp", "data"), DATA_AXES),
    **dict.fromkeys(("ddp", "replicate"), ("dp_replicate",)),
    **dict.fromkeys(("fsdp", "shard"), ("dp_shard",)),
    **dict.fromkeys(("tensor", "model", "mp"), ("tp",)),
    **dict.fromkeys(("pipeline", "pipe"), ("pp",)),
    "context": ("cp",),
}


class LayoutError(ValueError):
    """A layout that cannot exist, or a query for an axis, rank or host that it does not have."""


class WorldSizeError(LayoutError):
    """The product of the axes' sizes differs from the number of processes."""


@dataclass(frozen=True)
class HostSpan:
    """Ranks `start` to `start + count - 1`, which are on the same host with local ranks from
    `local` on."""

    host: int
    start: int
    count: int
    local: int


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """Sizes of the mesh's axes, and optionally the hosts on which its ranks run: a value,
    hashable."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    # names in order of first appearance; empty until the layout is placed with `on_hosts`
    hosts: tuple[str, ...] = ()
    host_spans: tuple[HostSpan, ...] = ()  # in rank order
    experts: int = 1  # ranks over which the experts of a layer are distributed: the size of `ep`
    # neighbours on `cp` that split the heads of attention: the size of `cp_heads`
    context_heads: int = 1

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes`: axis -> number of ranks, outermost first. Raises LayoutError: an unknown axis or
        a size below 1."""
        _check(sizes, free_allowed=False)
        self.__dict__.update(axes=tuple(sizes), shape=tuple(sizes.values()))

    def _with(self, **fields: object) -> "Layout":
        changed = Layout.__new__(Layout)
        changed.__dict__.update(
            {name: getattr(self, name) for name in self.__dataclass_fields__} | fields
        )
        return changed

    @cached_property
    def world_size(self) -> int:
        return math.prod(self.shape)

    @property
    def mesh_dims(self) -> tuple[str, ...]:
        """The dims of torch's mesh: the axes larger than 1 in the usual order, which HSDP needs.
        FSDP takes one dim, so with `cp` the dim `fsdp` replaces `dp_shard` and `cp`."""
        dims = AXES if self.size("cp") == 1 else ("pp", "dp_replicate", "fsdp", "tp")
        return tuple(dim for dim in dims if self.size(dim) > 1)

    @property
    def expert_mesh_dims(self) -> tuple[str, ...]:
        """The dims of torch's second mesh, over the same ranks, for experts if `experts` > 1;
        otherwise none."""
        return (
            tuple(dim for dim in ("pp", *EXPERT_AXES) if self.size(dim) > 1)
            if self.experts > 1
            else ()
        )

    @classmethod
    def resolve(cls, sizes: Mapping[str, int], world_size: int) -> "Layout":
        """The layout of `world_size` processes; at most one size may be -1, which becomes the
        remaining factor.

        Raises LayoutError: no layout has such sizes. WorldSizeError: they do not multiply to
        `world_size`.
        """
        _check(sizes, free_allowed=True)
        if not _is_count(world_size):
            raise LayoutError(f"a job has at least 1 process; found a world size of {world_size!r}")
        fixed = math.prod(size for size in sizes.values() if size != -1)
        free = [axis for axis, size in sizes.items() if size == -1]
        if world_size % fixed == 0 and (free or world_size == fixed):
            return cls(
                {axis: world_size // fixed if size == -1 else size for axis, size in sizes.items()}
            )
        if not free:
            are = "is" if world_size == 1 else "are"
            needs = f"needs {_processes(fixed)} and there {are} {world_size}"
            raise WorldSizeError(f"layout {written(sizes)} {needs}: start {fixed}")
        below = world_size // fixed * fixed
        worlds = f"{below} or {below + fixed}" if below else f"{fixed}"
        product = (
            f"the other axes multiply to {fixed}, which does not divide {_processes(world_size)}"
        )
        raise WorldSizeError(f"layout {written(sizes)}: {product}: start {worlds} processes")

    def __str__(self) -> str:
        return written(self.sizes)

    def __repr__(self) -> str:
        placed = f" on {len(self.hosts)} host{'s' * (len(self.hosts) != 1)}" if self.hosts else ""
        return f"Layout({self}{placed})"

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size, outermost first: the argument of `Layout(...)`."""
        return dict(zip(self.axes, self.shape, strict=True))

    def size(self, *axes: str) -> int:
        """How many ranks a group of these axes has: 1 for an axis that the layout does not name."""
        return math.prod(size for _, size in self._factors_of(axes))

    def coordinate(self, rank: int, *axes: str) -> dict[str, int]:
        """The position of a rank on every axis of the layout, outermost first, or on `axes`, which
        may be derived."""
        self._check_rank(rank)
        return {axis: _index(rank, self._factors_of((axis,))) for axis in axes or self.axes}

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate on all axes, or on derived axes that replace them: the inverse
        of `coordinate`.

        Raises LayoutError: an axis is missing or unknown, or a position lies outside its axis.
        """
        if self.size(*coordinate) != self.world_size:
            missing = [axis for axis in self.axes if not self.covers(tuple(coordinate), axis)]
            raise LayoutError(
                f"layout {self}: rank(...) needs a position on every axis; missing: "
                f"{', '.join(missing)}"
            )
        return self.rank_of_copy(0, **coordinate)

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` only in `axes`, `rank` included, ascending. Linear in
        their number."""
        self._check_rank(rank)
        factors = self._factors_of(axes)
        first = rank - sum(rank // stride % size * stride for stride, size in factors)
        return [first + offset for offset in self._offsets(factors)]

    def groups(self, *axes: str) -> list[list[int]]:
        """Every group of `axes`, ordered by first rank: one per coordinate on the remaining
        axes."""
        factors = self._factors_of(axes)
        offsets = self._offsets(factors)
        return [
            [first + offset for offset in offsets] for first in self._offsets(self._rest(factors))
        ]

    def index(self, rank: int, *axes: str) -> int:
        """The position of a rank in `group(rank, *axes)`."""
        self._check_rank(rank)
        return _index(rank, self._factors_of(axes))

    def copy(self, rank: int, *axes: str) -> int:
        """The position of a rank among the ranks, ascending, that share its positions on these
        axes."""
        self._check_rank(rank)
        return _index(rank, self._rest(self._factors_of(axes)))

    def rank_of_copy(self, copy: int, **coordinate: int) -> int:
        """The rank at a coordinate on some axes whose `copy(rank, *axes)` is `copy`.

        Raises LayoutError: an axis is unknown, two of them overlap, or a position lies outside its
        axis.
        """
        rest = self._rest(self._factors_of(tuple(coordinate)))
        rank = _offset(copy, rest)
        for axis, position in coordinate.items():
            factors = self._named_factors[axis]
            last = math.prod(size for _, size in factors) - 1
            if not 0 <= position <= last:
                raise LayoutError(
                    f"layout {self}: there is no {axis}={position}; {axis} goes from 0 to {last}"
                )
            rank += _offset(position, factors)
        return rank

    @cached_property
    def _named_factors(self) -> dict[str, tuple[Factor, ...]]:
        """Axis (derived axes included) -> its factors larger than 1, outermost first.

        `Layout({"dp_shard": 4, "tp": 2}).with_experts(4)` has 8 ranks, r = 2 dp_shard + tp:

            dp_shard   (2, 4)            rank 0's group: 0 2 4 6
            tp         (1, 2)                            0 1
            fsdp       (2, 4)                            0 2 4 6
            ep         (2, 2) (1, 2)                     0 1 2 3
            efsdp      (4, 2)                            0 4

        `pp` and `cp` have no factors: a group of them is the rank alone.
        """
        factors: dict[str, tuple[Factor, ...]] = dict.fromkeys(AXES, ())
        stride = self.world_size
        for axis, size in self.sizes.items():
            stride //= size  # the outermost axis has the largest one
            factors[axis] = _outermost_first([(stride, size)])

        derived: dict[str, list[Factor]] = {}
        all_but_pp = tuple(axis for axis in AXES if axis != "pp")
        for name, axes in (*VIEWS.items(), (STAGE, all_but_pp)):
            derived[name] = [factor for axis in axes for factor in factors[axis]]

        [(stride, size)] = factors["cp"] or [(1, 1)]
        heads = self.context_heads
        derived["cp_ring"] = [(stride * heads, size // heads)]
        derived["cp_heads"] = [(stride, heads)]

        experts = _fold(factors, self.experts)
        assert experts is not None  # with_experts() has checked it
        derived.update(zip(EXPERT_AXES, experts, strict=True))
        return factors | {name: _outermost_first(product) for name, product in derived.items()}

    def _factors_of(self, axes: Sequence[str]) -> tuple[Factor, ...]:
        for axis in axes:
            if axis not in self._named_factors:
                raise LayoutError(unknown_axis(axis))
        if len(axes) == 1:
            return self._named_factors[axes[0]]
        factors = _outermost_first(factor for axis in axes for factor in self._named_factors[axis])
        overlap = any(
            stride < below * size for (stride, _), (below, size) in itertools.pairwise(factors)
        )
        if overlap or len(set(axes)) != len(axes):
            raise LayoutError(f"an axis is named twice: {', '.join(axes)}")
        return factors

    def _rest(self, factors: Sequence[Factor]) -> list[Factor]:
        """The complement of these factors (outermost first) in the world, with adjacent axes merged
        into one factor."""
        rest, end = [], self.world_size
        for stride, size in (*factors, (1, 1)):
            if stride * size < end:
                rest.append((stride * size, end // (stride * size)))
            end = stride
        return rest

    def covers(self, outer: Sequence[str], axis: str) -> bool:
        """Whether each group of `axis` lies within one group of the axes `outer`."""
        factors = self._factors_of(outer)
        return all(
            any(start <= stride and stride * size <= start * n for start, n in factors)
            for stride, size in self._factors_of((axis,))
        )

    def _offsets(self, factors: Sequence[Factor]) -> list[int]:
        """The ranks of the group of rank 0, ascending."""
        offsets = [0]
        for stride, n in factors:
            steps = range(0, n * stride, stride)
            offsets = (
                [first + step for first in offsets for step in steps]
                if len(offsets) > 1
                else list(steps)
            )
        return offsets

    def _check_rank(self, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise LayoutError(
                f"layout {self}: there is no rank {rank!r}; ranks go from 0 to "
                f"{self.world_size - 1}"
            )

    def with_context_heads(self, ranks: int) -> "Layout":
        """This layout with `cp` split into two factors: `cp_heads`, `ranks` neighbours that split
        the attention heads, and `cp_ring`, the rest, which splits the sequence. Raises LayoutError:
        `ranks` does not divide `cp`."""
        if not _is_count(ranks) or self.size("cp") % ranks:
            raise LayoutError(context_heads_problem(ranks, self.size("cp")))
        return self._with(context_heads=ranks)

    def with_experts(self, ranks: int) -> "Layout":
        """This layout with the experts of each layer distributed over `ranks` ranks.

        `ep` takes whole axes, innermost first in the usual order, and a divisor of the next. The
        remaining ranks shard a copy of the experts (`efsdp`) or hold replicas (`edp_replicate`).
        Raises LayoutError: no such group exists.
        """
        if not _is_count(ranks) or not self.folds(ranks):
            fits = self.expert_sizes()
            raise LayoutError(
                f"layout {self}: experts cannot be dealt out over {ranks!r} ranks; use one of "
                f"{fits}"
            )
        return self._with(experts=ranks)

    def with_axes(self, sizes: Mapping[str, int]) -> "Layout":
        """Other axes over the same ranks and hosts. Raises LayoutError: their product is another
        number of ranks."""
        changed = Layout(sizes)
        if changed.world_size != self.world_size:
            raise WorldSizeError(
                f"layout {changed} needs {changed.world_size} processes; there are "
                f"{self.world_size}"
            )
        return changed._with(hosts=self.hosts, host_spans=self.host_spans)

    def resized(self, sizes: Mapping[str, int]) -> "Layout":
        """A layout of other ranks, with as many of them for attention heads and experts. Raises
        LayoutError: these do not fit."""
        return Layout(sizes).with_context_heads(self.context_heads).with_experts(self.experts)

    def folds(self, ranks: int) -> bool:
        """Whether experts can be distributed over this number of ranks."""
        return _fold(self._named_factors, ranks) is not None

    def expert_sizes(self) -> list[int]:
        """The numbers of ranks over which experts can be distributed, ascending."""
        within = self.world_size // self.size("pp")
        return [
            ranks for ranks in range(1, within + 1) if within % ranks == 0 and self.folds(ranks)
        ]

    def on_hosts(self, counts: Sequence[int], names: Sequence[str] | None = None) -> "Layout":
        """This layout with its ranks placed on hosts, in rank order: the first `counts[0]` ranks on
        the first, ...

        `names`: by default `host 0`, `host 1`, ...; a name may recur (a, b, a, b: SLURM's cyclic
        distribution). Raises LayoutError: a count below 1, names that do not fit, or counts that do
        not add up to the world.
        """
        if not counts:
            raise LayoutError(f"layout {self} needs at least one host; found none")
        names = [f"host {i}" for i in range(len(counts))] if names is None else names
        if len(names) != len(counts):
            uneven = f"{len(counts)} counts of processes for {len(names)} names of hosts"
            raise LayoutError(f"{uneven}: give one count per name")
        for name, count in zip(names, counts, strict=True):
            if not _is_count(count):
                raise LayoutError(
                    f"{name} has {count!r} processes; expected an integer of at least 1"
                )
        if sum(counts) != self.world_size:
            needs = (
                f"the hosts have {_processes(sum(counts))} and layout {self} needs "
                f"{self.world_size}"
            )
            raise WorldSizeError(f"{needs}: give counts that add up to {self.world_size}")
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        spans: list[HostSpan] = []
        used = dict.fromkeys(numbers, 0)  # ranks of each host so far
        start = 0
        for name, count in zip(names, counts, strict=True):
            host = numbers[name]
            if spans and spans[-1].host == host:  # the same host twice in a row
                last = spans.pop()
                spans.append(replace(last, count=last.count + count))
            else:
                spans.append(HostSpan(host=host, start=start, count=count, local=used[name]))
            used[name] += count
            start += count
        return self._with(hosts=tuple(numbers), host_spans=tuple(spans))

    def host(self, rank: int) -> str:
        return self.hosts[self._host_span(rank).host]

    def local_rank(self, rank: int) -> int:
        """The position of a rank among the ranks of its host."""
        span = self._host_span(rank)
        return span.local + rank - span.start

    def host_counts(self) -> dict[str, int]:
        """Host -> number of its ranks, in order of first appearance; empty for a layout without
        hosts."""
        counts = dict.fromkeys(self.hosts, 0)
        for span in self.host_spans:
            counts[self.hosts[span.host]] += span.count
        return counts

    def crosses_hosts(self, ranks: Iterable[int]) -> bool:
        return len(list(itertools.islice(self.hosts_of(ranks), 2))) > 1

    def hosts_of(self, ranks: Iterable[int]) -> Iterator[str]:
        """The hosts of the ranks, each once, in the order of the ranks. One lookup per span of
        ranks."""
        seen = set[int]()
        span = None
        for rank in ranks:
            if span is not None and span.start <= rank < span.start + span.count:
                continue
            span = self._host_span(rank)
            if span.host not in seen:
                seen.add(span.host)
                yield self.hosts[span.host]

    def _host_span(self, rank: int) -> HostSpan:
        self._check_rank(rank)
        if not self.host_spans:
            raise LayoutError(f"layout {self} is not placed on hosts: call on_hosts(counts) first")
        after = bisect_right(self.host_spans, rank, key=lambda span: span.start)
        return self.host_spans[after - 1]


def _outermost_first(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    return tuple(sorted((factor for factor in factors if factor[1] > 1), reverse=True))


def _index(rank: int, factors: Sequence[Factor]) -> int:
    """The position of a rank along factors, outermost first."""
    position = 0
    for stride, size in factors:
        position = position * size + rank // stride % size
    return position


def _offset(position: int, factors: Sequence[Factor]) -> int:
    """The inverse of `_index`: the distance of the rank at this position from the first rank."""
    offset = 0
    for stride, size in reversed(factors):
        position, index = divmod(position, size)
        offset += index * stride
    return offset


def _fold(factors: Mapping[str, Sequence[Factor]], experts: int) -> tuple[list[Factor], ...] | None:
    """The factors of each of the `EXPERT_AXES`; None if `experts` is not a product of whole axes,
    innermost first in the usual order, and a divisor of the next.

    {dp_shard: 4, tp: 2}, experts 4: `ep` takes all of `tp` and half of `dp_shard`. Of the 8 ranks
    0 1 2 3 have a copy of the experts, a fourth each, and 4 5 6 7 the other one; `efsdp` shards
    each expert over the two ranks that have it: 0 and 4, 1 and 5, ...

    {dp_replicate: 4, tp: 2}, experts 4: the same groups, but parameters are replicated, so the two
    ranks of an expert are replicas of it (`edp_replicate`).
    """
    inside: list[Factor] = []  # of `ep`
    outside: dict[str, Factor] = {}  # what is left of each axis
    left = experts
    for axis in ("tp", "cp", "dp_shard", "dp_replicate"):
        [(stride, size)] = factors[axis] or [(1, 1)]
        taken = min(left, size)
        if left % taken or size % taken:
            return None
        left //= taken
        inside.append((stride, taken))
        outside[axis] = (stride * taken, size // taken)
    if left > 1:
        return None

    replicas = [outside.pop("dp_replicate")]
    shards = list(outside.values())
    parameters_are_sharded = factors["dp_shard"] or factors["cp"]
    if not parameters_are_sharded:
        replicas += shards
        shards = []
    return replicas, shards, inside


def context_heads_problem(heads: object, cp: int) -> str:
    """`parallel.context_heads 3 does not divide layout.cp 4: use 1, 2 or 4`."""
    fits = [str(n) for n in range(1, cp + 1) if cp % n == 0]
    use = f"{', '.join(fits[:-1])} or {fits[-1]}" if len(fits) > 1 else fits[0]
    return f"parallel.context_heads {heads} does not divide layout.cp {cp}: use {use}"


def written(sizes: Mapping[str, int]) -> str:
    """`{pp: 2, tp: 4}`: sizes in YAML syntax."""
    return "{" + ", ".join(f"{axis}: {size}" for axis, size in sizes.items()) + "}"


def _check(sizes: Mapping[str, int], free_allowed: bool) -> None:
    """Raises LayoutError, listing every problem with the sizes themselves."""
    if not isinstance(sizes, Mapping):
        raise LayoutError(
            f"a layout names axes and their sizes, such as {{dp_shard: 4, tp: 2}}; found {sizes!r}"
        )
    wrong = []
    for axis, size in sizes.items():
        if axis not in AXES:
            wrong.append(unknown_axis(axis))
        if not _is_count(size) and not (free_allowed and isinstance(size, int) and size == -1):
            or_free = ", or -1 for whatever is left" if free_allowed else ""
            wrong.append(f"{axis} is {size!r} (expected an integer of at least 1{or_free})")
    free = [axis for axis, size in sizes.items() if size == -1]
    if free_allowed and len(free) > 1:
        wrong.append(f"only one axis can be -1, found {len(free)}: {', '.join(map(str, free))}")
    if wrong:
        raise LayoutError(f"layout {written(sizes)}: " + "; ".join(wrong))


def _is_count(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def unknown_axis(axis: object) -> str:
    """`there is no axis 'fsdp' (did you mean dp_shard?)`."""
    name = str(axis).lower()
    if name == "ep":
        hint = (
            "experts lie on ranks of the other axes: give parallel.expert_parallel, or call "
            "Layout.with_experts"
        )
        return f"there is no axis {axis!r} ({hint})"
    suggestions = (
        _ELSEWHERE[name]
        if name in _ELSEWHERE
        else difflib.get_close_matches(name, AXES, n=1, cutoff=0.5)
    )
    hint = (
        f"did you mean {' or '.join(suggestions)}?"
        if suggestions
        else f"the axes are {', '.join(AXES)}"
    )
    return f"there is no axis {axis!r} ({hint})"


def _processes(count: int) -> str:
    return f"{count} process" + "es" * (count != 1)
