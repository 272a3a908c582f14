"""Seconds of a collective: rings and trees over a group, as fast as their slowest link, which is
the one between hosts."""

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property

from meshtrain.foresight.hardware import Hardware
from meshtrain.layout import Layout

# rounds of n - 1 messages
STEPS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
TREE = 0.92  # share of a ring's bandwidth that a tree reaches

_groups: dict[tuple[object, ...], "Group"] = {}


@dataclass(frozen=True)
class Group:
    """A process group: how many ranks it has, and how many of them share a host."""

    ranks: int
    on_host: int
    # of all groups together; 0: as many as of this one
    ranks_of_host: int = field(default=0, compare=False)

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
            ranks_of_host = next(iter(layout.host_counts().values()), first)
            _groups[key] = cls(ranks, on_host, ranks_of_host)
        return _groups[key]

    @cached_property
    def hosts(self) -> int:
        return math.ceil(self.ranks / self.on_host)

    @property
    def crosses_hosts(self) -> bool:
        return self.on_host < self.ranks


def seconds(kind: str, nbytes: float, group: Group, hardware: Hardware, times: int = 1) -> float:
    """Seconds of collectives in which each rank sends `nbytes` (as `CommBytes` counts them), in so
    many messages.

    Latency grows as NCCL's own model has it (`src/graph/tuning.cc` of 2.30): a ring has a step for
    each rank, of which one in each host goes to the next host. An all-reduce takes a tree where
    that is faster, with a step for each doubling of the hosts, and 92 % of the bandwidth. Messages
    of an all-to-all travel beside each other.
    """
    if group.ranks == 1:
        return 0.0
    link = hardware.between_hosts if group.crosses_hosts else hardware.within_host
    sending = nbytes / (bandwidth(kind, group, hardware) * 1e9)
    if kind == "p2p":
        return times * (link.message + link.latency) + sending

    within, between = hardware.within_host.latency, hardware.between_hosts.latency
    in_host = (group.on_host - 1) * within
    in_tree = in_host + math.ceil(math.log2(group.hosts)) * between
    if kind == "all_to_all":
        return times * (link.message + in_tree) + sending
    in_ring = group.hosts * in_host + (group.hosts - 1) * between
    ring = times * (link.message + STEPS[kind] * in_ring) + sending
    if kind != "all_reduce":
        return ring
    tree = times * (link.message + STEPS[kind] * in_tree) + sending / TREE
    return min(ring, tree)


def bandwidth(kind: str, group: Group, hardware: Hardware) -> float:
    """GB/s at which a rank sends its bytes of a collective."""
    inside = hardware.within_host.of_rank()
    if not group.crosses_hosts:
        return inside
    hosts = 2 if kind == "p2p" else group.hosts
    interface = hardware.between_hosts.of_rank(hosts, group.ranks_of_host or group.on_host)
    if kind == "p2p":
        return interface
    if kind == "all_to_all":
        # A rank sends by its own interface what is not for its host.
        share = (group.ranks - group.on_host) / (group.ranks - 1)
        return min(inside, interface / share)
    # A ring leaves each host once. Every rank has a network interface of its own, so a group has as
    # many rings as ranks on a host.
    return min(inside, group.on_host * interface)
