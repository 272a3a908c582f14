"""From a Layout to torch's DeviceMesh and process groups. Nothing else in the project creates a group.

torch accepts a mesh that does not cover the world and lets a rank call a collective of a group that it is not in; both
are errors here. Axes of size 1 get no group and no dim: whoever asks for such a group is told None and does nothing.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from meshtrain.layout import AXES, DATA_AXES, Layout, LayoutError
from meshtrain.traffic import Traffic

# Combined groups that training asks for, created in this order on every rank: the ranks that share the samples of a
# batch, those among which the loss is summed, and those that share the parameters.
COMBINED = (DATA_AXES, ("dp_replicate", "dp_shard", "cp"), ("dp_shard", "cp"))

# Devices whose backend runs all that a group sends and receives strictly one after the other (NCCL, each group on a
# stream of its own): there neighbours on `pp` have a group for each direction.
IN_TURN = ("cuda",)


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the layout, and the groups it belongs to.

    Attributes:
        layout: what the mesh was made from.
        rank: this process's global rank.
        device_type: "cpu" or "cuda".
        device_mesh: torch's mesh of the axes larger than 1, in torch's usual order; None in a world of one.
        traffic: counts what this rank sends over it.
    """

    layout: Layout
    rank: int
    device_type: str
    device_mesh: DeviceMesh | None
    _groups: dict[tuple[int, ...], dist.ProcessGroup]  # by the ranks in them: one group per distinct set
    traffic: Traffic = field(default_factory=Traffic)
    _links: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)  # by source and target

    def size(self, *axes: str) -> int:
        """How many ranks the group of these axes has."""
        return self.layout.size(*axes)

    def index(self, *axes: str) -> int:
        """This rank's position in its group of these axes."""
        return self.layout.index(self.rank, *axes)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """This rank's group over one or several axes; None when the group is this rank alone.

        Raises:
            LayoutError: an axis that no layout has, or a combination for which no group was made.
        """
        ranks = tuple(self.layout.group(self.rank, *axes))
        if len(ranks) == 1:
            return None
        if ranks not in self._groups:
            raise LayoutError(
                f"no group was made over {' x '.join(axes)}: the mesh has one per axis and over "
                + ", ".join(" x ".join(combined) for combined in COMBINED)
            )
        return self._groups[ranks]

    def link(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The group over which one rank of a pipeline sends to another, both of the job: one of their own for
        neighbours, the last and the first included, where the backend asks for it; else that of `pp`."""
        return self._links.get((source, target)) or self.group("pp")

    def submesh(self, *axes: str) -> DeviceMesh | None:
        """torch's mesh of those of the given axes that are larger than 1; None if there is none.

        Raises:
            LayoutError: an axis that no layout has.
        """
        kept = tuple(axis for axis in AXES if axis in axes and self.layout.size(axis) > 1)
        for axis in axes:
            self.layout.size(axis)  # an axis nobody knows is an error, not an empty mesh
        return self.device_mesh[kept] if kept and self.device_mesh is not None else None

    @property
    def speaks_for_samples(self) -> bool:
        """Whether it is this one, of the ranks that see the same tokens and have the same loss, that counts them."""
        return self.index("tp") == 0

    @property
    def world(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None in a world of one."""
        return self.group(*self.layout.axes)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over all ranks, in place; returns it."""
        if self.world is not None:
            dist.all_reduce(tensor, group=self.world)
        return tensor

    def set_timeout(self, seconds: float) -> None:
        """From now on a collective of any group that takes longer than this fails.

        Starting needs a long limit (hosts come one by one, kernels compile), a running step a short one: a cut link
        is noticed only by this clock.
        """
        for group in (*self._groups.values(), *self._links.values()):
            _set_pg_timeout(timedelta(seconds=seconds), group)


def build_mesh(layout: Layout, device_type: str | None = None) -> Mesh:
    """The mesh of a layout over the running world; every rank calls it, with the same layout.

    Works on gloo, NCCL and torch's fake backend. Without a process group it makes the mesh of a world of one.

    Args:
        layout: its world size must be that of the job.
        device_type: "cpu" or "cuda"; by default what the job's backend serves.

    Raises:
        LayoutError: the layout does not cover the world.
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
    device_type = device_type or ("cuda" if dist.get_backend() == "nccl" else "cpu")
    device_mesh = DeviceMesh(device_type, _ranks_in_usual_order(layout), mesh_dim_names=_large_axes(layout))
    assert dist.group.WORLD is not None  # the job has several processes, so it has joined them
    groups = {tuple(range(world_size)): dist.group.WORLD}
    for axis in _large_axes(layout):
        groups.setdefault(tuple(layout.group(rank, axis)), device_mesh.get_group(axis))
    for axes in COMBINED:
        if tuple(layout.group(rank, *axes)) not in groups and layout.size(*axes) > 1:
            groups[tuple(layout.group(rank, *axes))] = _make_group(list(layout.groups(*axes)), rank, "_".join(axes))
    links = _make_links(layout, rank) if device_type in IN_TURN else {}
    return Mesh(layout, rank, device_type, device_mesh, groups, _links=links)


def _large_axes(layout: Layout) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if layout.size(axis) > 1)


def _ranks_in_usual_order(layout: Layout) -> torch.Tensor:
    """The ranks as an array with one dimension per axis larger than 1, in the usual order of the axes.

    A layout may name its axes in any order. torch's HSDP slices a mesh only in the usual order, so it is the array of
    ranks that is permuted, not the layout.
    """
    ranks = torch.arange(layout.world_size).reshape([layout.size(axis) for axis in layout.axes])
    order = [layout.axes.index(axis) for axis in AXES if axis in layout.axes]
    return ranks.permute(order).squeeze()


def _make_group(every: list[list[int]], rank: int, description: str) -> dist.ProcessGroup:
    """Creates groups that partition the world, and returns this rank's own.

    All ranks create all groups: that is what keeps the order of creation the same on every rank. NCCL splits the world
    into all of them at once, where it has connected; one by one each costs the whole world a round.
    """
    if _splits(dist.group.WORLD):
        split = dist.split_group(split_ranks=[sorted(ranks) for ranks in every], group_desc=description)
        assert split is not None  # the groups partition the world
        return split
    mine = None
    for ranks in every:
        group = dist.new_group(ranks, group_desc=description)
        if rank in ranks:
            mine = group
    assert mine is not None  # the groups partition the world
    return mine


def _splits(world: Any) -> bool:
    """Whether a group's backend makes groups out of it at once: torch's own condition, also for the axes of a mesh."""
    device = getattr(world, "bound_device_id", None)
    return device is not None and device.type == "cuda" and world._get_backend(device).supports_splitting


def rounds(ranks: int) -> list[list[tuple[int, ...]]]:
    """Every pair of neighbours on a ring, in rounds that have each rank once: two rounds, or three if the number of
    ranks is odd. A rank that has nobody to pair with is alone."""
    pairs = [(i, (i + 1) % ranks) for i in range(ranks if ranks > 2 else ranks - 1)]
    last = [pairs.pop()] if ranks % 2 and ranks > 1 else []
    made: list[list[tuple[int, ...]]] = []
    for some in (pairs[::2], pairs[1::2], last):
        alone = set(range(ranks)).difference(*some)
        made += [[*some, *((rank,) for rank in sorted(alone))]] if some else []
    return made


def _make_links(layout: Layout, rank: int) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A group for each neighbour of this rank on `pp` and each direction: 4, or 2 where `pp` is 2.

    All pairs of a round are made in one call, by all ranks: 4 calls (2 where `pp` is 2, 6 where it is odd) in a job of
    any size. Ranks without a neighbour in a round take part too, because the names of groups go by their number.
    """
    links = {}
    for pairs in rounds(layout.size("pp")):
        every = [[column[i] for i in pair] for column in layout.groups("pp") for pair in pairs]
        mine = next(tuple(ranks) for ranks in every if rank in ranks)
        for direction in (mine, mine[::-1]):
            group = _make_group(every, rank, "pp_link")
            if len(direction) == 2:
                links[direction[0], direction[1]] = group
    return links
