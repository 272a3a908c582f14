"""Builds torch's DeviceMesh and process groups from a Layout. Nothing else in the project creates a
group.

torch accepts a mesh that does not cover the world and lets a rank call a collective of a group that
it is not in; both are errors here. Axes of size 1 have no group and no dim: `group` returns None,
and the caller skips the collective.
"""

import copy
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.layout import AXES, CONTEXT_AXES, EXPERT_AXES, VIEWS, Layout, LayoutError

# Devices whose backend runs all operations of a group strictly in order (NCCL, with one stream per
# group): there neighbours on `pp` have a group for each direction, and `ep` has its own group.
IN_TURN = ("cuda",)
# Groups whose messages are on the critical path of compute; those of parameters and gradients
# overlap with compute.
URGENT = ("tp", "cp", *CONTEXT_AXES, "ep", "pp_link")


class CommBytes:
    """Bytes that this rank sent, counted at the call that sends them.

    An all-gather or a reduce-scatter of n bytes over t ranks sends n (t - 1) / t from each, an
    all-reduce twice that: the lower bound of any algorithm (Chan et al.,
    https://doi.org/10.1002/cpe.1206).
    """

    def __init__(self) -> None:
        self._sent: Counter[tuple[str, str]] = Counter()

    def add(self, axis: str, kind: str, sent: float) -> None:
        """`kind`: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all"."""
        self._sent[axis, kind] += round(sent)

    def restart(self) -> None:
        self._sent.clear()

    def by_axis(self) -> dict[str, int]:
        """axis -> bytes sent over it so far, over all kinds."""
        return {axis: sum(self.by_kind(axis).values()) for axis, _ in self._sent}

    def by_kind(self, axis: str) -> dict[str, int]:
        """kind -> bytes sent over this axis so far."""
        return {kind: sent for (of, kind), sent in self._sent.items() if of == axis}


class GatherOrder:
    """The order in which this rank has gathered FSDP's units in a step, as a number: equal on ranks
    that share them."""

    def __init__(self) -> None:
        self.units = 0  # numbered as they are made, in the same order on all ranks
        self.value = 0

    def add(self, unit: int) -> None:
        # a prime, whose square times a number of ranks is exact
        self.value = (self.value * 31 + unit + 1) % 65_521

    def restart(self) -> None:
        self.value = 0


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the layout, and the groups it belongs to."""

    layout: Layout
    rank: int  # this process's global rank
    device_type: str  # "cpu" or "cuda"
    # torch's mesh with the layout's `mesh_dims`; None if the world size is 1
    device_mesh: DeviceMesh | None
    # by the ranks in them: one group per distinct set
    _groups: dict[tuple[int, ...], dist.ProcessGroup]
    # with the `expert_mesh_dims`, over the same groups; None without those
    expert_mesh: DeviceMesh | None = None
    comm_bytes: CommBytes = field(default_factory=CommBytes)  # sent by this rank
    gather_order: GatherOrder = field(default_factory=GatherOrder)
    # by source and target
    _links: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    # by axis, for axes that share no group
    _own: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    # by axes, a cache
    _by_axes: dict[tuple[str, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    _submeshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict)  # by dims

    def size(self, *axes: str) -> int:
        return self.layout.size(*axes)

    def index(self, *axes: str) -> int:
        return self.layout.index(self.rank, *axes)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """This rank's group over one or several axes; None when the group is this rank alone.

        Raises LayoutError: an axis that no layout has, or a combination for which no group was
        made.
        """
        if axes not in self._by_axes:  # _find() lists all ranks of the group
            self._by_axes[axes] = self._find(axes)
        return self._by_axes[axes]

    def _find(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        ranks = tuple(self.layout.group(self.rank, *axes))
        if len(ranks) == 1:
            return None
        if len(axes) == 1 and axes[0] in self._own:
            return self._own[axes[0]]
        if ranks not in self._groups:
            views = ", ".join(" x ".join(view) for view in VIEWS.values())
            raise LayoutError(
                f"no group was made over {' x '.join(axes)}: the mesh has one per axis and over "
                f"{views}"
            )
        return self._groups[ranks]

    def make_group(self, axis: str) -> None:
        """Creates the group over an axis that has none by default, such as `stage`. All ranks of
        the job call it."""
        ranks = tuple(self.layout.group(self.rank, axis))
        if len(ranks) > 1 and ranks not in self._groups:
            self._groups[ranks] = _make_group(self.layout.groups(axis), self.rank, axis)

    def link(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The group over which one rank of a pipeline sends to another, both given as global ranks:
        a group of their own for neighbours (also last to first), where the backend needs it;
        otherwise that of `pp`."""
        return self._links.get((source, target)) or self.group("pp")

    def submesh(self, *axes: str) -> DeviceMesh | None:
        """torch's mesh over some axes, which may be derived, with the dims larger than 1; None if
        there is none. Axes of experts come from `expert_mesh`, if it exists.

        Raises LayoutError: an unknown axis, an axis without a dim of its own, or axes of both
        meshes.
        """
        if self.size(*axes) == 1 or self.device_mesh is None:
            return None
        of_experts = set(axes) & set(EXPERT_AXES)
        if of_experts and set(axes) - {"pp"} - of_experts:
            raise LayoutError(
                f"axes of experts and other axes have no common mesh: {', '.join(axes)}"
            )
        mesh = self.device_mesh
        if of_experts and self.expert_mesh is not None:
            mesh = self.expert_mesh
        assert mesh.mesh_dim_names is not None  # build_mesh() has named them
        dims = tuple(dim for dim in mesh.mesh_dim_names if self.layout.covers(axes, dim))
        if self.size(*dims) != self.size(*axes):
            raise LayoutError(
                f"the mesh has the dims {', '.join(mesh.mesh_dim_names)}: none for {axes}"
            )
        if dims not in self._submeshes:  # torch goes through every rank of the world for each
            self._submeshes[dims] = mesh[dims]
        return self._submeshes[dims]

    @property
    def speaks_for_samples(self) -> bool:
        """Whether this rank, among the ranks with the same tokens and the same loss, is the one
        that counts them."""
        return self.index("tp") == 0

    @property
    def uses_fsdp(self) -> bool:
        """Whether parameters are sharded over several ranks."""
        return self.size("fsdp") > 1

    @property
    def world(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None if the world size is 1."""
        return self.group(*self.layout.axes)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over all ranks, in place; returns it."""
        if self.world is not None:
            dist.all_reduce(tensor, group=self.world)
        return tensor

    def set_timeout(self, seconds: float) -> None:
        """Makes later collectives of every group fail after this time, so that a broken link is
        noticed."""
        for group in (*self._groups.values(), *self._links.values(), *self._own.values()):
            _set_timeout(group, timedelta(seconds=seconds))


def build_mesh(layout: Layout, device_type: str | None = None) -> Mesh:
    """The mesh of a layout over the running world; every rank calls it, with the same layout.

    Works with gloo, NCCL and torch's fake backend. Without a process group it builds the mesh of a
    world of size 1. `device_type` defaults to that of the backend. Raises LayoutError: the layout
    does not cover the world.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if layout.world_size != world_size:
        raise LayoutError(
            f"{layout} has {layout.world_size} ranks and the job has {world_size} processes: "
            "a mesh covers the whole world"
        )
    if world_size == 1:
        return Mesh(layout, 0, device_type or "cpu", None, {})
    rank = dist.get_rank()
    if device_type is None:
        device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"

    # torch's mesh makes a group for each of its dims. Without options a dim that is the whole world
    # gets the world's own.
    dims = layout.mesh_dims
    options = tuple(
        (None, _options(dim) if layout.size(dim) < world_size else None) for dim in dims
    )
    device_mesh = DeviceMesh(
        device_type, _ranks_by_dim(layout, dims), mesh_dim_names=dims, backend_override=options
    )
    assert dist.group.WORLD is not None  # the job has several processes, so it has joined them
    groups = {tuple(range(world_size)): dist.group.WORLD}
    for dim in dims:
        groups.setdefault(tuple(layout.group(rank, dim)), device_mesh.get_group(dim))

    # Every other set of ranks that communicates, in the same order on every rank.
    own_axes = _own_axes(layout, device_type)
    for axes in _grouped(layout, own_axes):
        ranks = tuple(layout.group(rank, *axes))
        if len(ranks) > 1 and ranks not in groups:
            groups[ranks] = _make_group(layout.groups(*axes), rank, "_".join(axes))
    own = {axis: _make_group(layout.groups(axis), rank, axis) for axis in own_axes}

    expert_mesh = None
    if layout.expert_mesh_dims:
        group_of = {
            dim: own[dim] if dim in own else groups[tuple(layout.group(rank, dim))]
            for dim in layout.expert_mesh_dims
        }
        expert_mesh = _mesh_of_groups(layout, group_of, device_type)
    links = _make_links(layout, rank) if device_type in IN_TURN else {}
    return Mesh(layout, rank, device_type, device_mesh, groups, expert_mesh, _links=links, _own=own)


def _mesh_of_groups(
    layout: Layout, group_of: dict[str, dist.ProcessGroup], device_type: str
) -> DeviceMesh:
    """torch's mesh with these dims, over groups that exist."""
    dims = tuple(group_of)
    groups: Any = list(group_of.values())
    if len(groups) == 1:  # torch takes the ranks of one dim from its group
        groups = groups[0]
    return DeviceMesh.from_group(
        groups, device_type, _ranks_by_dim(layout, dims), mesh_dim_names=dims
    )


def _own_axes(layout: Layout, device_type: str) -> list[str]:
    """Axes of experts that have their own group even if another axis has the same ranks.

    On `ep`, messages to experts would otherwise wait behind the collectives of parameters. On
    `edp_replicate` a second gradient reducer runs next to that of `dp_replicate`: which of the two
    starts first depends on the gradients that a rank has, so over a shared group ranks could reduce
    different buckets together.
    """
    if layout.experts == 1:
        return []
    axes = []
    if device_type in IN_TURN:
        axes.append("ep")
    if layout.size("fsdp") == 1:
        axes.append("edp_replicate")
    return [axis for axis in axes if layout.size(axis) > 1]


def _grouped(layout: Layout, own_axes: list[str]) -> list[tuple[str, ...]]:
    """The axes, alone or combined, that have a group, one per set of ranks; with experts also all
    ranks of a sample."""
    axes = [VIEWS.get(axis, (axis,)) for axis in (*AXES, *VIEWS, *CONTEXT_AXES)]
    if layout.experts > 1:
        axes.append(("cp", "tp"))
        axes += [(axis,) for axis in EXPERT_AXES if axis not in own_axes]
    return axes


def _ranks_by_dim(layout: Layout, dims: tuple[str, ...]) -> torch.Tensor:
    """The ranks as an array with these dims, ascending along each dim, as in torch's groups."""
    # A rank is the sum of its offsets along each dim, those of rank 0's group: broadcast.
    ranks = torch.zeros([1] * len(dims), dtype=torch.int64)
    for i, dim in enumerate(dims):
        shape = [1] * len(dims)
        shape[i] = -1
        ranks = ranks + torch.tensor(layout.group(0, dim)).view(shape)
    return ranks


def _make_group(partition: list[list[int]], rank: int, description: str) -> dist.ProcessGroup:
    """Creates groups that partition the world, and returns this rank's own.

    All ranks create all groups, which keeps the order of creation the same on every rank. NCCL,
    once connected, splits the world into all of them at once; created one by one, each group costs
    a round over the whole world.
    """
    if _splits(dist.group.WORLD):
        of_each = [sorted(ranks) for ranks in partition]
        own = dist.split_group(
            split_ranks=of_each, pg_options=_options(description), group_desc=description
        )
    else:
        groups = [dist.new_group(ranks, group_desc=description) for ranks in partition]
        own = next(group for group, ranks in zip(groups, partition, strict=True) if rank in ranks)
    assert own is not None  # this rank is in one of them
    return own


def _options(name: str) -> Any:
    """Backend options of a group split off the world: for an urgent group a high-priority stream,
    where the backend has such streams (NCCL). None: the options of the world."""
    world = dist.group.WORLD
    if name not in URGENT or not _splits(world):
        return None
    options = copy.deepcopy(_backend_of(world).options)
    if not hasattr(options, "is_high_priority_stream"):
        return None
    options.is_high_priority_stream = True
    return options


def _splits(world: Any) -> bool:
    """Whether the backend can split a group at once: torch's own condition, also for the dims of a
    mesh."""
    device = getattr(world, "bound_device_id", None)
    if device is None or device.type != "cuda":
        return False
    return _backend_of(world).supports_splitting


def rounds(ranks: int) -> list[list[tuple[int, ...]]]:
    """All pairs of neighbours on a ring, in rounds with each rank once (some alone): two rounds, or
    three if odd."""
    # Two ranks are one pair of neighbours, not two.
    count = ranks if ranks > 2 else ranks - 1
    pairs = [(i, (i + 1) % ranks) for i in range(count)]
    # Alternate pairs are disjoint; of an odd ring the last one touches both its neighbours.
    last = [pairs.pop()] if ranks % 2 and ranks > 1 else []
    found = []
    for chosen in (pairs[::2], pairs[1::2], last):
        if chosen:
            busy = {i for pair in chosen for i in pair}
            alone = [(i,) for i in range(ranks) if i not in busy]
            found.append([*chosen, *alone])
    return found


def _make_links(layout: Layout, rank: int) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A group for each neighbour of this rank on `pp` and each direction: 4, or 2 where `pp` is 2.

    All ranks create all pairs of a round in one call: 4 calls (2 if `pp` is 2, 6 if it is odd) in a
    job of any size. Ranks without a neighbour in a round take part too, because torch names groups
    by a running count.
    """
    links = {}
    for pairs in rounds(layout.size("pp")):
        partition = [[column[i] for i in pair] for column in layout.groups("pp") for pair in pairs]
        own = next(tuple(ranks) for ranks in partition if rank in ranks)
        for direction in (own, own[::-1]):
            group = _make_group(partition, rank, "pp_link")
            if len(direction) == 2:
                links[direction[0], direction[1]] = group
    return links


# Private torch API, as read in torch 2.13. It stands here, and not with the rest in
# `parallel/torch_private.py`, because nothing below this module may import from `parallel`.


def _set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    if hasattr(dist, "set_timeout"):  # public from torch 2.14 on
        dist.set_timeout(timeout, group)
    else:
        distributed_c10d._set_pg_timeout(timeout, group)


def _backend_of(world: Any) -> Any:
    """The backend of a group bound to a device, with its options."""
    return world._get_backend(world.bound_device_id)
