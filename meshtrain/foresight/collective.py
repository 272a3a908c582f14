"""Seconds of a collective: rings over a group, as fast as their slowest link, which is the one
between hosts."""

import math
from bisect import bisect_left
from dataclasses import dataclass

from meshtrain.foresight.hardware import Hardware
from meshtrain.layout import Layout

# rounds of n - 1 messages
STEPS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}

_groups: dict[tuple[object, ...], "Group"] = {}


@dataclass(frozen=True)
class Group:
    """A process group: how many ranks it has, and how many of them share a host."""

    ranks: int
    on_host: int

    @classmethod
    def of(cls, layout: Layout, axis: str) -> "Group":
        """The group of rank 0 over an axis, found in time O(log size). A layout without hosts has
        all ranks on one."""
        # The host with the fewest ranks would limit a ring; hosts are mostly alike.
        first = layout.host_spans[0].count if layout.host_spans else layout.world_size
        key = layout.axes, layout.shape, layout.experts, layout.context_heads, first, axis
        if key not in _groups:
            ranks = layout.size(axis)
            on_host = bisect_left(
                range(ranks), first, key=lambda i: layout.rank_of_copy(0, **{axis: i})
            )
            _groups[key] = cls(ranks, on_host)
        return _groups[key]

    @property
    def crosses_hosts(self) -> bool:
        return self.on_host < self.ranks


def seconds(kind: str, nbytes: float, group: Group, hardware: Hardware) -> float:
    """Seconds of a collective in which each rank sends `nbytes` (as `CommBytes` counts them).

    A ring leaves each host once. Every rank has a network interface of its own, so a group has as
    many rings as ranks on a host. Latency: n - 1 steps within a host, and between hosts a tree,
    which NCCL uses for small messages.
    """
    if group.ranks == 1:
        return 0.0
    inside, outside = hardware.within_host, hardware.between_hosts
    if kind == "p2p":
        link = outside if group.crosses_hosts else inside
        return link.latency + link.message + nbytes / (link.bandwidth * 1e9)

    bandwidth = inside.bandwidth
    if group.crosses_hosts and kind == "all_to_all":
        # A rank sends by its own interface what is not for its host.
        share = (group.ranks - group.on_host) / (group.ranks - 1)
        bandwidth = min(inside.bandwidth, outside.bandwidth / share)
    elif group.crosses_hosts:
        bandwidth = min(inside.bandwidth, group.on_host * outside.bandwidth)

    hosts = math.ceil(group.ranks / group.on_host)
    ring = (group.on_host - 1) * inside.latency
    tree = math.ceil(math.log2(hosts)) * outside.latency
    return STEPS[kind] * (ring + tree) + nbytes / (bandwidth * 1e9)
