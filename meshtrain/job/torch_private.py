"""What jobs use of torch without a promise that it stays, each as read in torch 2.13: which process
groups there are, and the flight recorder of their collectives."""

import json
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import _world

# NCCL's flight recorder, and that of the other backends; a build without NCCL lacks the former.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def group_ranks() -> list[tuple[dist.ProcessGroup, tuple[int, ...]]]:
    """The process groups that this process knows, with their global ranks, ascending."""
    return [
        (group, tuple(sorted(members))) for group, members in list(_world.pg_group_ranks.items())
    ]


def recorder_entries() -> Iterator[dict[str, Any]]:
    """The entries of torch's flight recorders, backend by backend, oldest first."""
    for name in _DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            entries = json.loads(dump()).get("entries", [])
            yield from sorted(entries, key=lambda entry: entry.get("record_id", 0))
