"""Memory traffic of operators that a compiler fuses: an estimate by the dataflow of the operators
that run uncompiled.

Element-wise operators and reductions that pass each other tensors become one kernel, which reads
each of its inputs once and writes only what others read. Two operators are not fused across one
that the compiler calls as it is (a product, attention, a message): what comes after it waits for
it. Operators with a common input are fused as well, if they are of one size; and what is computed
twice, such as a rounded input of two layers, is computed once.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

# A tensor in memory: number of its storage, its begin there, its elements.
Place = tuple[int, int, int]


class Traffic(NamedTuple):
    """Bytes that kernels read and write, and their number."""

    moved: float
    kernels: int


@dataclass
class _Operator:
    is_fused: bool
    reads: dict[Place, float]  # -> bytes
    writes: dict[Place, float]
    before: list[int]  # numbers of the operators whose results it reads
    level: int  # how many operators that are not fused must have run
    moved: float  # of its own, if it is not fused
    read_by: list[int] = field(default_factory=list)


class Dataflow:
    """The operators of one pass through a block, in the order in which they run."""

    def __init__(self) -> None:
        self.operators: list[_Operator] = []
        self._made_by: dict[int, int] = {}  # storage -> number of the operator that wrote it last
        # address -> the storage there, if it is still alive, and its number
        self._storages: dict[int, tuple[Any, int]] = {}
        self._count = 0  # of storages
        # what an operator computes -> numbers of the storages of its results
        self._computed: dict[tuple[Any, ...], list[int]] = {}
        self._versions: dict[int, int] = defaultdict(int)  # storage -> how often it was written
        self._same: dict[int, int] = {}  # storage -> another one with the same values

    def add(self, func: Any, args: Any, out: Any, is_fused: bool, moved: float = 0.0) -> None:
        """Adds an operator. `moved`: its bytes, if it is not fused and these count as traffic."""
        number = len(self.operators)
        read, written = self._places(args), self._places(out)
        if is_fused and not func._schema.is_mutable:
            results = [storage for storage, _, _ in written]
            known = self._computed.setdefault(self._key(func, args), results)
            if known is not results and len(known) == len(results):
                self._same |= dict(zip(results, known, strict=True))
                return
        before = []
        for storage, _, _ in read:
            if storage in self._made_by:
                before.append(self._made_by[storage])
        level = 0
        for earlier in map(self.operators.__getitem__, before):
            earlier.read_by.append(number)
            waits = is_fused and not earlier.is_fused
            level = max(level, earlier.level + waits)
        self.operators.append(_Operator(is_fused, read, written, before, level, moved))
        for storage, _, _ in written:
            self._made_by[storage] = number
            self._versions[storage] += 1

    def traffic(self) -> Traffic:
        """Of the kernels that these operators become."""
        moved = 0.0
        kernels = 0
        for operator in self.operators:
            if not operator.is_fused:
                moved += operator.moved
                kernels += 1
        for members in self._kernels():
            moved += self._moved(members)
            kernels += 1
        return Traffic(moved, kernels)

    def _kernels(self) -> Iterable[list[int]]:
        """The numbers of the operators that become one kernel, for each."""
        kernel = _Sets(len(self.operators))
        first_reader: dict[tuple[int, int, Place], int] = {}
        for number, operator in enumerate(self.operators):
            if not operator.is_fused:
                continue
            for earlier in operator.before:
                if (
                    self.operators[earlier].is_fused
                    and self.operators[earlier].level == operator.level
                ):
                    kernel.join(number, earlier)
            size = max((elements for _, _, elements in operator.writes), default=0)
            for place in operator.reads:
                reader = first_reader.setdefault((operator.level, size, place), number)
                kernel.join(number, reader)
        members = defaultdict(list)
        for number, operator in enumerate(self.operators):
            if operator.is_fused:
                members[kernel.of(number)].append(number)
        return members.values()

    def _moved(self, members: list[int]) -> float:
        inside = set(members)
        made: set[int] = set()  # storages
        read: dict[Place, float] = {}
        written: dict[Place, float] = {}
        for number in members:
            operator = self.operators[number]
            read |= {
                place: nbytes for place, nbytes in operator.reads.items() if place[0] not in made
            }
            made |= {storage for storage, _, _ in operator.writes}
            # What nobody reads in this pass is a result of it.
            if not operator.read_by or not inside.issuperset(operator.read_by):
                written |= operator.writes
        return sum(read.values()) + sum(written.values())

    def _places(self, tree: Any) -> dict[Place, float]:
        """Where tensors are, and their bytes: of one that repeats elements, those that are
        there."""
        places: dict[Place, float] = {}
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                begin = int(tensor.storage_offset())
                place = self._number_of(storage), begin, tensor.numel()
                strides = zip(tensor.shape, tensor.stride(), strict=True)
                elements = math.prod(size for size, stride in strides if stride)
                places[place] = elements * tensor.itemsize
        return places

    def _key(self, func: Any, args: Any) -> tuple[Any, ...]:
        """What an operator computes: of which values."""
        values: list[Any] = [func]
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                number = self._number_of(leaf.untyped_storage())
                begin = leaf.storage_offset()
                values.append((number, self._versions[number], begin, leaf.shape, leaf.stride()))
                values.append(leaf.dtype)
            else:
                values.append(repr(leaf))
        return tuple(values)

    def _number_of(self, storage: Any) -> int:
        address = storage._cdata
        known, number = self._storages.get(address, (None, -1))
        # A new storage may be where a freed one was.
        if known is None or known() is not storage:
            number = self._count
            self._count += 1
            self._storages[address] = weakref.ref(storage), number
        return self._same.get(number, number)


class _Sets:
    """Disjoint sets of numbers, which are joined."""

    def __init__(self, count: int) -> None:
        self.parents = list(range(count))

    def of(self, number: int) -> int:
        """The number that stands for the set of this one."""
        while self.parents[number] != number:
            self.parents[number] = self.parents[self.parents[number]]
            number = self.parents[number]
        return number

    def join(self, one: int, other: int) -> None:
        self.parents[self.of(one)] = self.of(other)
