"""Activation offloading: what blocks save for their backward waits in the host's memory, and comes
back ahead of it.

As torch's `save_on_cpu`, by hooks of saved tensors, but beside the computation, within a limit of
bytes, and only where it frees memory: what belongs to the model (weights, their 16-bit copies and
gathered shards, buffers) stays, and so does what is small. A storage is copied once, however many
tensors and blocks save a part of it, and comes back with the same strides, so that a backward
computes the same bits.

    forward    block i ends     its copies are under way; those of block i - 2 have been waited for
    backward   block i begins   what it needs is there or waited for; block i - 1 is being fetched

What has not left yet when a backward asks for it is used where it is. A tensor that is written to
after it was saved is an error, as it is without offloading.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshtrain.parallel.host_link import HostBuffer, HostLink
from meshtrain.parallel.torch_private import (
    StorageReference,
    memory_of,
    own_buffers,
    own_parameters,
    share_version,
    version_of,
    version_witness,
    without_dispatch_modes,
)

# Smaller storages stay: each takes some 50 microseconds of the host's time, in which the link would
# carry twice as much.
LEAST = 2**20


class _Stored:
    """A storage that was saved. Its bytes are on the device (`bytes`), on the host (`buffer`), or
    on their way."""

    def __init__(self, x: Tensor, link: HostLink, place: "_Place") -> None:
        self.place = place
        self.nbytes = x.untyped_storage().nbytes()
        # While it exists, no other storage gets this one's id.
        self.reference = StorageReference(x.untyped_storage())
        self.witness, self.version = version_witness(x), version_of(x)
        self.bytes: Tensor | None = _bytes_of(x)
        self.arrival: Any = None  # the copy from the host, if it is not waited for yet
        self.buffer: HostBuffer = link.borrow(self.nbytes, x.device)
        self._link = link
        own = weakref.ref(self)

        def release() -> None:
            stored = own()
            if stored is not None:
                stored.bytes = None

        link.send(self.buffer, self.bytes, is_needed=lambda: own() is not None, release=release)

    def __del__(self) -> None:
        self._link.give_back(self.buffer)

    def is_of(self, x: Tensor) -> bool:
        """Whether it has the values of x, which has the same storage: none was written since."""
        return self.version == version_of(x) and share_version(self.witness, x)


class _Place(NamedTuple):
    """Where a storage was saved: in a pass through the blocks, by its number in it."""

    all: "list[weakref.ref[_Stored]]"  # of the pass, in the order of the forward
    number: int
    block: int


class _OnHost(NamedTuple):
    """A saved tensor: a view of a storage that leaves the device."""

    stored: _Stored
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Stays(NamedTuple):
    """A saved tensor that stays on the device."""

    tensor: Tensor
    version: int


class _Arriving(NamedTuple):
    """What is fetched ahead, and held until it is asked for or nobody can ask for it any more."""

    stored: "weakref.ref[_Stored]"
    target: Tensor
    copy: Any


class ActivationOffload:
    """Offloads what the blocks of a model, or of a stage, save."""

    def __init__(self, link: HostLink, device_type: str) -> None:
        """`device_type`: of the device that computes."""
        self._link = link
        self._device_type = device_type
        # The same functions for all blocks: compiled code is specific to them.
        self._hooks = self.pack, self.unpack
        self._blocks = 0  # their number
        self._modules: Sequence[nn.Module] = ()  # of the block whose forward runs
        self._block = -1  # its number
        self._pass: list[weakref.ref[_Stored]] = []
        self._stored: weakref.WeakValueDictionary[int, _Stored] = weakref.WeakValueDictionary()
        self._arriving: list[_Arriving] = []

    def wrap(self, block: nn.Module, forward: Callable) -> Callable:
        """A block's forward that offloads what it saves. Called with the blocks in the order in
        which they run."""
        modules = list(block.modules())
        number = self._blocks
        self._blocks += 1

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with self._running(modules, number), saved_tensors_hooks(*self._hooks):
                return forward(*args, **kwargs)

        return run

    @contextmanager
    def _running(self, modules: Sequence[nn.Module], number: int) -> Iterator[None]:
        before = self._modules
        if number <= self._block or not self._pass:
            self._pass = []  # another microbatch
        self._modules, self._block = modules, number
        self._link.begin_block()
        try:
            yield
        finally:
            self._modules = before

    # In the forward -------------------------------------------------------------------------------

    def pack(self, x: Tensor) -> _OnHost | _Stays:
        """What is saved in the place of a tensor."""
        stored = self._stored_of(x) if self._may_leave(x) else None
        if stored is None:
            return _Stays(x, version_of(x))
        return _OnHost(stored, x.dtype, x.shape, x.stride(), x.storage_offset())

    def keep(self, x: Tensor) -> Callable[[], Tensor]:
        """Offloads a tensor that no graph saves, as selective recomputation keeps results of
        operators; returns what gives it back."""
        return partial(self.unpack, self.pack(x))

    def _may_leave(self, x: Tensor) -> bool:
        # A compiler's tensors and other subclasses are no memory of their own.
        is_plain = type(x) is Tensor and x.layout == torch.strided
        return (
            is_plain
            and x.device.type == self._device_type
            and not x.is_conj()
            and not x.is_neg()
            and x.untyped_storage().nbytes() >= max(LEAST, 1)
        )

    def _stored_of(self, x: Tensor) -> _Stored | None:
        """The storage of a tensor, which begins to leave if it is saved for the first time; None:
        it belongs to the model."""
        memory = memory_of(x)
        known = self._stored.get(memory)
        if known is not None and known.is_of(x):
            return known
        if memory in self._memory_of_model():
            return None
        place = _Place(self._pass, len(self._pass), self._block)
        stored = self._stored[memory] = _Stored(x, self._link, place)
        self._pass.append(weakref.ref(stored))
        return stored

    def _memory_of_model(self) -> set[int]:
        """The memory of parameters and buffers as they are now: a forward may run with gathered
        ones, or with copies in 16 bits."""
        memory = set()
        for module in self._modules:
            for tensor in (*own_parameters(module).values(), *own_buffers(module).values()):
                if tensor is not None and type(tensor) in (Tensor, nn.Parameter):
                    memory.add(memory_of(tensor))
        return memory

    # In the backward ------------------------------------------------------------------------------

    def unpack(self, saved: _OnHost | _Stays) -> Tensor:
        """The saved tensor. Raises RuntimeError: it was written to since."""
        if isinstance(saved, _Stays):
            _require_version(saved.tensor, saved.version, saved.tensor.shape)
            return saved.tensor
        stored = saved.stored
        _require_version(stored.witness, stored.version, saved.shape)
        storage = self._on_device(stored).untyped_storage()
        like = torch.empty(0, dtype=saved.dtype, device=storage.device)
        return like.set_(storage, saved.offset, saved.shape, saved.stride)

    def _on_device(self, stored: _Stored) -> Tensor:
        """The bytes of a storage, complete for what is computed from here on."""
        self._release_unneeded()
        if stored.bytes is None:
            self._fetch(stored)
        self._fetch_ahead(stored.place)
        if stored.arrival is not None:
            self._link.wait(stored.arrival)
            stored.arrival = None
            self._arriving = [one for one in self._arriving if one.stored() is not stored]
        assert stored.bytes is not None  # fetched, or not gone
        return stored.bytes

    def _fetch_ahead(self, place: _Place) -> None:
        """Fetches what was saved before, in this block and the previous one, as far as the limit
        allows: a backward asks for it next."""
        for number in range(place.number - 1, -1, -1):
            stored = place.all[number]()
            if stored is None or stored.bytes is not None:
                continue
            on_the_way = sum(one.target.nbytes for one in self._arriving)
            is_far = stored.place.block < place.block - 1
            if is_far or (on_the_way and on_the_way + stored.nbytes > self._link.limit):
                return
            self._fetch(stored)

    def _fetch(self, stored: _Stored) -> None:
        device = stored.witness.device
        target = torch.empty(stored.nbytes, dtype=torch.uint8, device=device)
        stored.bytes = target
        stored.arrival = self._link.fetch(stored.buffer, target)
        self._arriving.append(_Arriving(weakref.ref(stored), target, stored.arrival))

    def _release_unneeded(self) -> None:
        """Frees what was fetched or sent for nodes of a graph that were freed since."""
        self._link.release_unneeded()
        needed = []
        for one in self._arriving:
            if one.stored() is None:
                self._link.wait(one.copy)
            else:
                needed.append(one)
        self._arriving = needed


def _bytes_of(x: Tensor) -> Tensor:
    """All bytes of the storage of x, as a flat tensor."""
    with without_dispatch_modes(), torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=x.device)
        return flat.set_(x.untyped_storage())


def _require_version(tensor: Tensor, version: int, shape: torch.Size) -> None:
    """Raises RuntimeError: the tensor was written to since it had this version."""
    # torch does not look at the versions of what hooks have saved.
    now = version_of(tensor)
    if now != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(shape)} is at version {now} and was saved at "
            f"version {version}"
        )
