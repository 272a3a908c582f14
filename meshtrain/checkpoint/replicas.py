"""Whether ranks that must hold the same do hold the same: memory that fails silently shows here, and in no loss.

Each rank adds up the bits of every tensor that others hold too. Tensors with one placement lie alike, so one digest of
all their sums is enough to compare; which tensor it is that differs is asked only where a digest does.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshtrain.checkpoint.placement import Placement, copies
from meshtrain.checkpoint.state import State
from meshtrain.layout import Layout
from meshtrain.weights import some

MOST_NAMED = 4  # ranks of one group that are asked for more

Kind = tuple[tuple[tuple[str, int], ...], tuple[int, ...]]  # cuts and stages of tensors that lie alike


class Sums:
    """The sums of a rank's tensors as they are now. The numbers are read later; nothing here waits for the device."""

    def __init__(self, state: State) -> None:
        names = Counter(held.name for held in state.held)
        compared = [
            held
            for held in state.held
            if held.compared and (copies(held.placement, state.layout) > 1 or names[held.name] > 1)
        ]
        self._kinds = kinds(state.placements)
        self._names = [(self._kinds.index(kind(held.placement)), held.name) for held in compared]
        self._sums = torch.stack([bit_sum(held.local) for held in compared]) if compared else None
        self._values: list[int] | None = None

    def digests(self) -> dict[str, str]:
        """Number of a kind -> one digest of all its tensors here."""
        texts: dict[int, list[str]] = {}
        for number, name, value in self._all():
            texts.setdefault(number, []).append(f"{name} {value}")
        return {str(n): hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] for n, lines in texts.items()}

    def apart(self) -> list[str]:
        """The tied weights of which two stages of this rank hold different values."""
        first: dict[str, int] = {}
        return sorted({name for _, name, value in self._all() if first.setdefault(name, value) != value})

    def of(self, number: int) -> dict[str, list[int]]:
        """The sums of the tensors of a kind; of a tied weight of two stages there are two."""
        found: dict[str, list[int]] = {}
        for other, name, value in self._all():
            if other == number:
                found.setdefault(name, []).append(value)
        return found

    def _all(self) -> Iterator[tuple[int, str, int]]:
        if self._values is None:
            self._values = [] if self._sums is None else self._sums.tolist()
        for (number, name), value in zip(self._names, self._values, strict=True):
            yield number, name, value


@dataclass(frozen=True)
class Suspicion:
    """Ranks that must hold the same tensors of a kind, and do not; those that are to tell their sums."""

    kind: int
    group: tuple[int, ...]
    asked: tuple[int, ...]
    odd: tuple[int, ...]  # those that differ from most; with two that differ, both


def suspicions(
    placements: Mapping[str, Placement], layout: Layout, digests: Sequence[Mapping[str, str]]
) -> list[Suspicion]:
    """Where digests of ranks, in rank order, differ that should not."""
    cuts = [axes for axes, _ in kinds(placements)]
    groups: dict[tuple[int, ...], dict[int, str]] = {}  # the ranks that hold the same part of tensors of a kind
    for rank, told in enumerate(digests):
        place = layout.coordinate(rank)
        for number, digest in told.items():
            part = int(number), *(place[axis] for axis, _ in cuts[int(number)])
            groups.setdefault(part, {})[rank] = digest
    return [_suspicion(part[0], group) for part, group in groups.items() if len(set(group.values())) > 1]


def _suspicion(kind: int, told: Mapping[int, str]) -> Suspicion:
    right, n = Counter(told.values()).most_common(1)[0]
    agreed = 2 * n > len(told)
    odd = tuple(rank for rank, digest in told.items() if not agreed or digest != right)
    witness = [rank for rank, digest in told.items() if agreed and digest == right][:1]
    return Suspicion(kind, tuple(told), (*odd[:MOST_NAMED], *witness), odd)


def verdict(suspicion: Suspicion, sums: Mapping[int, Mapping[str, Sequence[int]]], who: Sequence[str]) -> str:
    """Which ranks differ and in what.

    Args:
        sums: of those that were asked, by rank.
        who: the names of all ranks.
    """
    odd = [rank for rank in suspicion.odd if rank in suspicion.asked]
    ranks = " and ".join(who[rank] for rank in odd)
    if len(suspicion.odd) > len(odd):
        ranks += f" and {len(suspicion.odd) - len(odd)} more"
    names = dict.fromkeys(name for rank in odd for name in sums[rank])
    differ = [name for name in names if len({tuple(sums[rank].get(name, ())) for rank in suspicion.asked}) > 1]
    agreeing = len(suspicion.group) - len(suspicion.odd)
    others = f"the {agreeing} other ranks that hold the same part" if agreeing else "each other"
    return f"{ranks} differ{'s' * (len(suspicion.odd) == 1)} from {others}, in {some(differ)}"


def bit_sum(tensor: Tensor) -> Tensor:
    """The bytes of a tensor added up 8 at a time, modulo 2^64: a scalar on its device. One changed bit changes it."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = len(data) // 8 * 8
    total = data[:whole].view(torch.int64).sum()
    return total if whole == len(data) else total + data[whole:].sum(dtype=torch.int64)


def kind(tensor: Placement) -> Kind:
    return tensor.cuts, tensor.stages


def kinds(placements: Mapping[str, Placement]) -> list[Kind]:
    """The different ways in which tensors lie, in an order that all ranks have."""
    return list(dict.fromkeys(kind(tensor) for tensor in placements.values()))
