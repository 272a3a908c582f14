"""All-gather and reduce-scatter over gloo, built on send and receive, between processes on CPUs.

Each part goes directly to its target rank: gloo's own collectives take about twice the CPU time for
the same bytes. Parts are added in rank order, so that a sum is bitwise the same every time and on
every rank.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.job.pending import waiting
from meshtrain.parallel.torch_private import start_receive, start_send


def all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Fills `output` (n·m,) with the `part` (m,) of each of the n ranks of the group, in rank
    order.

    `part` may be this rank's slice of `output` itself, as in FSDP.
    """
    wait(start_all_gather(output, part, group), group)


def reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Fills `output` (m,) with the sum over the n ranks of the group of this rank's part of their
    `whole` (n·m,)."""
    works, received = start_reduce_scatter(whole.chunk(group.size()), group)
    wait(works, group)
    ordered_sum(received, output)


def start_all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """`all_gather` without waiting; returns the works to wait for."""
    parts = output.chunk(group.size())
    own = parts[group.rank()]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    return start_exchange([part] * len(parts), parts, group)


def start_reduce_scatter(
    parts: Sequence[Tensor], group: dist.ProcessGroup
) -> tuple[list[dist.Work], list[Tensor]]:
    """Sends parts[i] to rank i; returns the works to wait for, and the tensors for `ordered_sum` to
    add after that."""
    own = parts[group.rank()]
    received = list(own.new_empty(len(parts) - 1, *own.shape).unbind())
    received.insert(group.rank(), own)
    return start_exchange(parts, received, group), received


def ordered_sum(received: Sequence[Tensor], output: Tensor) -> Tensor:
    """The sum in rank order, written into `output`."""
    torch.add(received[0], received[1], out=output)
    for part in received[2:]:
        output += part
    return output


def start_exchange(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Sends outgoing[i] to rank i of the group and receives incoming[i] from it, for all other
    ranks."""
    rank, size = group.rank(), group.size()
    works = []
    # Sends come first. What the peer sends arrives at the same connection, which gloo's thread may
    # not read while this thread writes to it: until then it would poll without a pause. The peer
    # sends nothing before a receive is posted.
    #
    # At each distance every rank has a different target, so none is sent to by all at once.
    for distance in range(1, size):
        target = (rank + distance) % size
        if outgoing[target].numel() > 0:
            works.append(start_send(outgoing[target], group, target))
    for distance in range(1, size):
        source = (rank - distance) % size
        if incoming[source].numel() > 0:
            works.append(start_receive(incoming[source], group, source))
    return works


def wait(works: Sequence[dist.Work], group: dist.ProcessGroup) -> None:
    with waiting("sends and receives", group):
        for work in works:
            work.wait()
