"""Point-to-point transfers: activations and gradients between neighbouring stages on different
ranks.

Only a receive whose tensor is needed waits. Sends do not block, and receives are posted ahead. This
is safe because all ranks use one global order: the transfers of a step sorted by their time in the
simulator. A rank posts its own transfers in that order, so both ends of every connection agree,
even if a backend (NCCL) runs those of a group strictly in order. With such a backend neighbours
have one group per direction (`Mesh.link`): in a shared group, a receive posted ahead would block
every later send.
"""

import pickle
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.errors import InputError
from meshtrain.job.pending import PendingWait, waiting
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import MeasuredWait
from meshtrain.pipeline.actions import Schedule, Transfer
from meshtrain.pipeline.forms import Activation, TensorMeta, alike, has_gradient, tensors_of
from meshtrain.pipeline.simulate import simulate

AXIS = "pp"
AHEAD = 4  # number of receives posted before their tensors are needed


def transfer_order(schedule: Schedule) -> tuple[Transfer, ...]:
    """All transfers of a schedule, in an order in which they can be executed one after the
    other."""
    sends: list[tuple[float, int, Transfer]] = []  # by time, then by rank: one order for all
    for events in simulate(schedule).events:
        for event in events:
            transfers = schedule.sends(event.action)
            sends += [(event.end, event.rank, transfer) for transfer in transfers]
    return tuple(transfer for _, _, transfer in sorted(sends))


def sends_confirmed_by(schedule: Schedule, rank: int) -> dict[Transfer, tuple[Transfer, ...]]:
    """Receive of this rank -> this rank's earlier sends that must have arrived by then.

    A peer that sends a tensor has done its earlier actions, and so has received their inputs: the
    memory of those sends can be freed, which a backend need not report (gloo does not).
    """
    confirmed: dict[Transfer, tuple[Transfer, ...]] = {}
    for peer in range(schedule.ranks):
        # Sends of this rank that the peer has received since its own last send to this rank.
        arrived: list[Transfer] = []
        for action in schedule.actions_of(peer):
            receives = schedule.receives(action)
            arrived += [transfer for transfer in receives if transfer.source == rank]
            for transfer in schedule.sends(action):
                if transfer.target == rank:
                    confirmed[transfer] = tuple(arrived)
                    arrived = []
    return confirmed


@dataclass(frozen=True)
class Described:
    """What the receiver of an activation knows before it arrives, and the sender of its gradient
    too."""

    metas: tuple[TensorMeta, ...]  # of its tensors, in order
    about: Any  # all else: `Activation.about`

    def of_kind(self, kind: str) -> tuple[TensorMeta, ...]:
        """The metas of the tensors of a transfer."""
        if kind == "activation":
            return self.metas
        return tuple(meta for meta in self.metas if has_gradient(meta))


class Transfers:
    """This rank's part of the transfers of a step."""

    def __init__(
        self, mesh: Mesh, device: torch.device, measured_wait: MeasuredWait = nullcontext
    ) -> None:
        self._mesh = mesh
        self._device = device
        self._measured_wait = measured_wait
        self._rank = mesh.index(AXIS)  # on `pp`
        self._ranks = mesh.layout.group(mesh.rank, AXIS)  # index on `pp` -> rank
        self._known: dict[tuple[Hashable, int], Described] = {}
        # The memory of a send is held until it has arrived.
        self._sending: dict[Transfer, list[tuple[dist.Work, Tensor]]] = {}

    def begin(
        self,
        order: Sequence[Transfer],
        keys: Sequence[Hashable],
        confirmed: Mapping[Transfer, Sequence[Transfer]] | None = None,
    ) -> None:
        """Starts a new series of transfers.

        Args:
            order: all of them, the same on every rank.
            keys: for each microbatch, what the shapes of its tensors depend on, the same on every
                rank. Before the first activation between two stages with a new key, what has
                to be known of it (`Described`) is sent.
            confirmed: see `sends_confirmed_by`; the memory of other sends is held until the end.
        """
        self._order = [
            transfer for transfer in order if self._rank in (transfer.source, transfer.target)
        ]
        self._next = 0  # the first transfer that is not posted
        self._confirmed = confirmed or {}
        self._keys = keys
        self._ready: dict[Transfer, _Ready] = {}  # whose turn to be sent has not come
        self._posted: dict[Transfer, list[tuple[dist.Work, Tensor]]] = {}  # receives
        self._post()

    def describe(self, key: Hashable, stage: int, activation: Activation) -> None:
        """Makes known what a stage receives for microbatches with this key, so that nobody sends
        it. Tensors count by their shapes."""
        metas = map(TensorMeta.of, tensors_of(activation.value))
        self._known[key, stage] = Described(tuple(metas), activation.about)

    def send(self, transfer: Transfer, tensors: Sequence[Tensor], about: Any = None) -> None:
        """Sends tensors when their turn comes; the caller may drop them at once. `about`: of an
        activation, what its receiver gets with them."""
        self._ready[transfer] = _Ready([tensor.detach() for tensor in tensors], about)
        self._post()

    def receive(self, transfer: Transfer) -> tuple[list[Tensor], Any]:
        """Waits for tensors. Returns them, and what there is to know about them."""
        if transfer not in self._posted:
            self._post(transfer)
        posted = self._posted.pop(transfer)
        with self._measured_wait(), self._pending(transfer):
            for work, _ in posted:
                work.wait()
        for sent in self._confirmed.get(transfer, ()):
            self._let_go(sent)
        self._post()
        known = self._known[self._known_key(transfer)]
        tensors = []
        for meta, (_, memory) in zip(known.of_kind(transfer.kind), posted, strict=True):
            tensors.append(meta.view(memory))
        return tensors, known.about

    def end(self) -> None:
        """Waits until all sends are complete."""
        assert self._next == len(self._order)  # the schedule was run to its end
        with self._measured_wait():
            for transfer in list(self._sending):
                self._let_go(transfer)

    def can_receive_ahead(self, index: int) -> bool:
        """Whether all transfers are posted, and a receive after them would not block sends to that
        rank."""
        if self._next < len(self._order):
            return False
        link = self._mesh.link(self._ranks[index], self._mesh.rank)
        has_own_group = link is not self._mesh.group(AXIS)
        # gloo does not run the transfers of a group in order.
        return has_own_group or self._device.type == "cpu"

    def _let_go(self, transfer: Transfer) -> None:
        with self._pending(transfer):
            for work, _ in self._sending.pop(transfer):
                work.wait()

    def _post(self, needed: Transfer | None = None) -> None:
        """Posts the next transfers, as far as possible; those up to `needed` even if it has to
        wait."""
        while self._next < len(self._order):
            transfer = self._order[self._next]
            if transfer.source == self._rank:
                if transfer not in self._ready:
                    # What was computed earlier was sent earlier: it cannot stand before `needed`.
                    assert needed is None
                    return
                self._post_send(transfer, self._ready.pop(transfer))
            else:
                if needed is None and not self._can_post_receive(transfer):
                    return
                self._post_receive(transfer)
            self._next += 1
            if transfer == needed:
                needed = None  # and go on as far as possible

    def _can_post_receive(self, transfer: Transfer) -> bool:
        """Whether a receive may be posted ahead: without a wait for its description, and without
        holding too much memory."""
        return self._known_key(transfer) in self._known and len(self._posted) < AHEAD

    def _post_send(self, transfer: Transfer, ready: "_Ready") -> None:
        key = self._known_key(transfer)
        own = tuple(map(TensorMeta.of, ready.tensors))
        if key not in self._known:
            self._known[key] = Described(own, ready.about)
            self._send_description(transfer, self._known[key])
        known = self._known[key]
        expected = known.of_kind(transfer.kind)
        found = None
        if len(own) != len(expected) or not _fit(own, expected):
            found = _words(own)
        elif transfer.kind == "activation" and not alike(ready.about, known.about):
            found = f"{_words(own)} with another plain value among what blocks return"
        if found is not None:
            raise InputError(
                f"the {transfer.kind} for stage {transfer.stage} of microbatch "
                f"{transfer.microbatch} is {found}, and {_words(expected)} is what is known "
                f"of microbatches whose inputs are {key[0]}: with pp the shapes of inputs must "
                "tell what blocks return, but for the values of tensors. Pad to shapes that do, or "
                "use pp: 1"
            )
        for meta, tensor in zip(expected, ready.tensors, strict=True):
            laid_out = meta.lay_out(tensor)
            self._mesh.comm_bytes.add(AXIS, "send", laid_out.nbytes)
            self._start_send(transfer, laid_out)

    def _send_description(self, transfer: Transfer, known: Described) -> None:
        packed = torch.frombuffer(bytearray(pickle.dumps(known)), dtype=torch.uint8)
        self._start_send(transfer, torch.tensor([len(packed)]).to(self._device))
        self._start_send(transfer, packed.to(self._device))

    def _receive_description(self, transfer: Transfer) -> Described:
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        with self._measured_wait(), self._pending(transfer):
            self.start_receive(size, transfer.source).wait()
            packed = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            self.start_receive(packed, transfer.source).wait()
        return pickle.loads(bytes(packed.tolist()))

    def _start_send(self, transfer: Transfer, tensor: Tensor) -> None:
        work = self.start_send(tensor, transfer.target)
        self._sending.setdefault(transfer, []).append((work, tensor))

    def start_send(self, tensor: Tensor, index: int) -> dist.Work:
        """Starts a send to a rank, by its index on `pp`, after all posted transfers."""
        target = self._ranks[index]
        work = dist.isend(tensor, target, self._mesh.link(self._mesh.rank, target))
        assert work is not None  # this rank is in the group
        return work

    def _post_receive(self, transfer: Transfer) -> None:
        key = self._known_key(transfer)
        if key not in self._known:
            self._known[key] = self._receive_description(transfer)
        posted = []
        for meta in self._known[key].of_kind(transfer.kind):
            memory = meta.empty(self._device)
            posted.append((self.start_receive(memory, transfer.source), memory))
        self._posted[transfer] = posted

    def start_receive(self, tensor: Tensor, index: int) -> dist.Work:
        """Starts a receive from a rank, by its index on `pp`, after all posted transfers."""
        source = self._ranks[index]
        work = dist.irecv(tensor, source, self._mesh.link(source, self._mesh.rank))
        assert work is not None  # this rank is in the group
        return work

    def _pending(self, transfer: Transfer) -> PendingWait:
        """Encloses a wait for the rank at the other end of a transfer."""
        source = self._ranks[transfer.source]
        target = self._ranks[transfer.target]
        other = target if transfer.source == self._rank else source
        label = f"{transfer.kind} for stage {transfer.stage} of microbatch {transfer.microbatch}"
        return waiting(label, self._mesh.link(source, target), missing=lambda: [other])

    def _known_key(self, transfer: Transfer) -> tuple[Hashable, int]:
        """The microbatch's key, and the later of the two stages: a gradient has the shape of the
        activation there."""
        stage = transfer.stage if transfer.kind == "activation" else transfer.stage + 1
        return self._keys[transfer.microbatch], stage


class _Ready(NamedTuple):
    tensors: list[Tensor]
    about: Any


def _fit(metas: Sequence[TensorMeta], expected: Sequence[TensorMeta]) -> bool:
    return all(meta.fits(other) for meta, other in zip(metas, expected, strict=True))


def _words(metas: Sequence[TensorMeta]) -> str:
    return " and ".join(f"{list(meta.shape)} of {meta.dtype}" for meta in metas) or "no tensor"
