"""Seconds of a collective over a placed group: rings, whose slowest link is that between hosts where they cross."""

import math
from bisect import bisect_left
from dataclasses import dataclass

from meshtrain.foresight.hardware import Hardware
from meshtrain.layout import Layout

STEPS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}  # rounds of n - 1 messages each


_groups: dict[tuple[object, ...], "Group"] = {}


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how many of them share a host."""

    ranks: int
    on_host: int

    @classmethod
    def of(cls, layout: Layout, axis: str) -> "Group":
        """That of rank 0 on an axis, in time of the logarithm of its size. Without hosts all ranks are on one."""
        # Of a ring the host with the fewest would be the slowest, and hosts are mostly alike.
        first = layout.runs[0].count if layout.runs else layout.world_size
        key = layout.axes, layout.shape, layout.experts, layout.context_heads, first, axis
        if key not in _groups:
            ranks = layout.size(axis)
            on_host = bisect_left(range(ranks), first, key=lambda i: layout.rank_of_copy(0, **{axis: i}))
            _groups[key] = cls(ranks, on_host)
        return _groups[key]

    @property
    def crosses_hosts(self) -> bool:
        return self.on_host < self.ranks


def seconds(kind: str, nbytes: float, group: Group, hardware: Hardware) -> float:
    """What a collective takes in which each rank sends `nbytes` (as `CommBytes` counts them).

    A ring leaves a host once, and each of the group's ranks there has an interface of its own: so many rings share it.
    The latency is that of n - 1 steps within a host, and between hosts of a tree, as NCCL takes for small messages.
    """
    if group.ranks == 1:
        return 0.0
    inside, outside = hardware.within_host, hardware.between_hosts
    hosts = math.ceil(group.ranks / group.on_host)
    if kind == "p2p":
        link = outside if group.crosses_hosts else inside
        return link.latency + link.message + nbytes / (link.bandwidth * 1e9)
    bandwidth = min(inside.bandwidth, group.on_host * outside.bandwidth) if group.crosses_hosts else inside.bandwidth
    if kind == "all_to_all" and group.crosses_hosts:  # each rank by its own interface
        bandwidth = min(inside.bandwidth, outside.bandwidth * (group.ranks - 1) / (group.ranks - group.on_host))
    steps = (group.on_host - 1) * inside.latency + math.ceil(math.log2(hosts)) * outside.latency
    return STEPS[kind] * steps + nbytes / (bandwidth * 1e9)
