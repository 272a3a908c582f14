"""Moves activations and gradients between neighbouring stages on different ranks.

Nothing here waits but a receive whose tensor is needed. Sends do not block, and receives are posted ahead. What makes
that safe is one order for all: the transfers of a step sorted by when the simulator has them made. A rank posts its own
in that order, so both ends of every connection agree, also where a backend (NCCL) runs those of a group strictly one
after another. There neighbours have a group for each direction (`Mesh.link`): in one for all, a receive that is posted
ahead would hold up every later send.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.errors import InputError
from meshtrain.mesh import Mesh
from meshtrain.parallel.waiting import Waiting
from meshtrain.pipeline.actions import Schedule, Transfer
from meshtrain.pipeline.simulate import simulate

AXIS = "pp"
AHEAD = 4  # receives that are posted before their tensors are needed
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_DIMS = 8


def in_order(schedule: Schedule) -> tuple[Transfer, ...]:
    """All transfers of a schedule, in an order in which they can be made one after the other."""
    timeline = simulate(schedule)
    made = [
        (event.end, event.rank, transfer)
        for events in timeline.events
        for event in events
        for transfer in schedule.sends(event.action)
    ]
    return tuple(transfer for _, _, transfer in sorted(made))


def acknowledged(schedule: Schedule, rank: int) -> dict[Transfer, tuple[Transfer, ...]]:
    """What a rank learns from each transfer that it receives: which of its own the sender had used before.

    So it knows without asking when a tensor has left for good. A backend need not tell (gloo's sends do not).
    """
    learnt = {}
    for other in range(schedule.ranks):
        used: list[Transfer] = []
        for action in schedule.flat(other):
            used += [transfer for transfer in schedule.receives(action) if transfer.source == rank]
            for transfer in schedule.sends(action):
                if transfer.target == rank:
                    learnt[transfer], used = tuple(used), []
    return learnt


@dataclass(frozen=True)
class Form:
    """What a receiver has to know of a tensor. `order`: its dims from the one with the largest stride."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
        return cls(tuple(tensor.shape), tuple(order), tensor.dtype)

    def packed(self) -> Tensor:
        """As numbers of a fixed count."""
        padding = [0] * (MOST_DIMS - len(self.shape))
        return torch.tensor([DTYPES.index(self.dtype), len(self.shape), *self.shape, *padding, *self.order, *padding])

    @classmethod
    def unpacked(cls, packed: Tensor) -> "Form":
        kind, dims, *rest = packed.tolist()
        return cls(tuple(rest[:dims]), tuple(rest[MOST_DIMS : MOST_DIMS + dims]), DTYPES[kind])

    @cached_property
    def _inverse(self) -> tuple[int, ...]:
        return tuple(self.order.index(dim) for dim in range(len(self.order)))

    def lay_out(self, tensor: Tensor) -> Tensor:
        """The tensor as contiguous memory, dims in `order`."""
        return tensor.permute(self.order).contiguous()

    def empty(self, device: torch.device) -> Tensor:
        """Memory to receive in; `view` shows it as the tensor was."""
        return torch.empty([self.shape[dim] for dim in self.order], dtype=self.dtype, device=device)

    def view(self, memory: Tensor) -> Tensor:
        return memory.permute(self._inverse)


class Transfers:
    """This rank's part of the transfers of a step."""

    def __init__(self, mesh: Mesh, device: torch.device, waiting: Waiting = nullcontext) -> None:
        self._mesh, self._device, self._waiting = mesh, device, waiting
        self._rank, self._ranks = mesh.index(AXIS), mesh.layout.group(mesh.rank, AXIS)
        self._forms: dict[tuple[Hashable, int], Form] = {}
        self._sending: dict[Transfer, list[tuple[dist.Work, Tensor]]] = {}

    def begin(
        self,
        order: Sequence[Transfer],
        keys: Sequence[Hashable],
        learnt: Mapping[Transfer, Sequence[Transfer]] | None = None,
    ) -> None:
        """A new series of transfers.

        Args:
            order: all of them, the same on every rank.
            keys: of each microbatch, what the forms of its tensors depend on, the same on every rank: of the first
                tensor between two stages under a new key the form is sent before it.
            learnt: see `acknowledged`; what nothing is learnt of is held until the end.
        """
        self._order = [transfer for transfer in order if self._rank in (transfer.source, transfer.target)]
        self._next, self._learnt = 0, learnt or {}
        self._keys = keys
        self._ready: dict[Transfer, Tensor] = {}
        self._posted: dict[Transfer, tuple[dist.Work, Tensor]] = {}
        self._post()

    def send(self, transfer: Transfer, tensor: Tensor) -> None:
        """Sends a tensor, when its turn has come; it may be let go of at once."""
        self._ready[transfer] = tensor.detach()
        self._post()

    def receive(self, transfer: Transfer) -> Tensor:
        """The tensor of a transfer, once it is there."""
        if transfer not in self._posted:
            self._post(transfer)
        work, memory = self._posted.pop(transfer)
        with self._waiting():
            work.wait()
        for sent in self._learnt.get(transfer, ()):
            self._let_go(sent)
        self._post()
        return self._forms[self._form(transfer)].view(memory)

    def end(self) -> None:
        """Waits until everything that was sent has left."""
        assert self._next == len(self._order)  # the schedule was run to its end
        with self._waiting():
            for transfer in list(self._sending):
                self._let_go(transfer)

    def _let_go(self, transfer: Transfer) -> None:
        for work, _ in self._sending.pop(transfer):
            work.wait()

    def _post(self, needed: Transfer | None = None) -> None:
        """Posts what is next, as far as possible; up to `needed` whatever it takes."""
        while self._next < len(self._order):
            transfer = self._order[self._next]
            if transfer.source == self._rank:
                if transfer not in self._ready:
                    assert needed is None  # what was made before is sent before
                    return
                self._post_send(transfer, self._ready.pop(transfer))
            else:
                if needed is None and (self._form(transfer) not in self._forms or len(self._posted) >= AHEAD):
                    return
                self._post_receive(transfer)
            self._next += 1
            needed = None if transfer == needed else needed

    def _post_send(self, transfer: Transfer, tensor: Tensor) -> None:
        key, own = self._form(transfer), Form.of(tensor)
        if key not in self._forms:
            self._forms[key] = own
            self._start_send(transfer, own.packed().to(self._device))
        known = self._forms[key]
        if (own.shape, own.dtype) != (known.shape, known.dtype):
            raise InputError(
                f"the {transfer.kind} for stage {transfer.stage} of microbatch {transfer.microbatch} is "
                f"{list(own.shape)} of {own.dtype}, and {list(known.shape)} of {known.dtype} is what is known of "
                f"microbatches whose inputs are {key[0]}: with pp the shapes of inputs must tell those of activations. "
                "Pad to shapes that do, or use pp: 1"
            )
        laid_out = known.lay_out(tensor)
        self._mesh.traffic.add(AXIS, "send", laid_out.nbytes)
        self._start_send(transfer, laid_out)

    def _start_send(self, transfer: Transfer, tensor: Tensor) -> None:
        target = self._ranks[transfer.target]
        work = dist.isend(tensor, target, self._mesh.link(self._mesh.rank, target))
        assert work is not None  # this rank is in the group
        self._sending.setdefault(transfer, []).append((work, tensor))

    def _post_receive(self, transfer: Transfer) -> None:
        key = self._form(transfer)
        if key not in self._forms:
            packed = torch.empty(2 + 2 * MOST_DIMS, dtype=torch.int64, device=self._device)
            with self._waiting():
                self._start_receive(packed, transfer).wait()
            self._forms[key] = Form.unpacked(packed)
        memory = self._forms[key].empty(self._device)
        self._posted[transfer] = self._start_receive(memory, transfer), memory

    def _start_receive(self, tensor: Tensor, transfer: Transfer) -> dist.Work:
        source = self._ranks[transfer.source]
        work = dist.irecv(tensor, source, self._mesh.link(source, self._mesh.rank))
        assert work is not None  # this rank is in the group
        return work

    def _form(self, transfer: Transfer) -> tuple[Hashable, int]:
        """By which the form of a tensor is known: its microbatch's key, and the later of the two stages between which
        it travels. Gradients have the form of the activations there."""
        stage = transfer.stage if transfer.kind == "activation" else transfer.stage + 1
        return self._keys[transfer.microbatch], stage
