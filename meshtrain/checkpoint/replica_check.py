"""Replica check: whether ranks that must hold the same values do. Shows silent memory faults that
no loss reveals.

Each rank sums up the bits of every tensor that other ranks hold, too. Tensors with the same
placement have the same replicas, so one digest of all their sums suffices; only if digests differ
are ranks asked which tensor differs. Besides, each rank looks for weights that are not finite:
where no batch uses them, no loss and no norm shows them.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshtrain.checkpoint.placement import Placement, copies
from meshtrain.checkpoint.state import MODEL, LocalShard, State
from meshtrain.errors import join_some
from meshtrain.job.pending import Resource, waiting
from meshtrain.layout import Layout

MOST_NAMED = 4  # ranks of one group that are asked for their sums

# cuts and stages of tensors with the same placement
Kind = tuple[tuple[tuple[str, int], ...], tuple[int, ...]]


class Sums:
    """Bit sums of a rank's tensors at construction. They are read later; constructing does not wait
    for the device."""

    def __init__(self, state: State) -> None:
        kinds = kinds_of(state.placements)
        occurrences = Counter(shard.name for shard in state.shards)
        self._names: list[tuple[int, str]] = []  # of the summed tensors: number of the kind, name
        self._weights: list[str] = []
        sums = []
        largest_values = []
        for shard in state.shards:
            is_shared = copies(shard.placement, state.layout) > 1 or occurrences[shard.name] > 1
            if shard.compared and is_shared:
                self._names.append((kinds.index(kind_of(shard.placement)), shard.name))
                sums.append(bit_sum(shard.local))
            if _is_weight(shard):
                self._weights.append(shard.name)
                largest_values.append(largest(shard.local))
        # One tensor each, so that one copy from the device reads all of them. Optimizer states may
        # lie on the host.
        device = state.mesh.device_type
        sums = [value.to(device, non_blocking=True) for value in sums]
        self._sums = torch.stack(sums) if sums else None
        self._largest = torch.stack(largest_values) if largest_values else None
        self._values: list[int] | None = None  # the sums, once they were read

    def not_finite(self) -> list[str]:
        """The weights of which this rank holds values that are NaN or infinite."""
        if self._largest is None:
            return []
        with waiting("the largest values of the weights", resource=Resource.DEVICE):
            finite = torch.isfinite(self._largest).tolist()
        names = {
            name for name, is_finite in zip(self._weights, finite, strict=True) if not is_finite
        }
        return sorted(names)

    def digests(self) -> dict[str, str]:
        """Number of a kind -> one digest of all this rank's tensors of that kind."""
        lines_of_kind: dict[int, list[str]] = {}
        # Once for equal copies on two stages: other ranks may have one.
        for kind, name, value in sorted(set(self._read())):
            lines_of_kind.setdefault(kind, []).append(f"{name} {value}")
        digests = {}
        for kind, lines in lines_of_kind.items():
            digests[str(kind)] = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        return digests

    def inconsistent_ties(self) -> list[str]:
        """The tied weights that have different values on two stages of this rank."""
        first: dict[str, int] = {}
        differing = set()
        for _, name, value in self._read():
            if first.setdefault(name, value) != value:
                differing.add(name)
        return sorted(differing)

    def of_kind(self, number: int) -> dict[str, list[int]]:
        """The sums of the tensors of a kind; a tied weight with other values on two stages of this
        rank has two."""
        sums: dict[str, list[int]] = {}
        for kind, name, value in sorted(set(self._read())):
            if kind == number:
                sums.setdefault(name, []).append(value)
        return sums

    def _read(self) -> Iterator[tuple[int, str, int]]:
        """Number of the kind, name and sum of each tensor."""
        if self._values is None:
            with waiting("the sums of the state's bits", resource=Resource.DEVICE):
                self._values = [] if self._sums is None else self._sums.tolist()
        for (kind, name), value in zip(self._names, self._values, strict=True):
            yield kind, name, value


@dataclass(frozen=True)
class Divergence:
    """A group of ranks that must hold the same tensors of a kind, but do not."""

    kind: int
    group: tuple[int, ...]
    reporters: tuple[int, ...]  # ranks whose sums are compared
    # ranks that differ from the majority; all of the group if there is no majority
    odd: tuple[int, ...]


def find_divergence(
    placements: Mapping[str, Placement], layout: Layout, digests: Sequence[Mapping[str, str]]
) -> list[Divergence]:
    """Where digests that should be equal differ; `digests` are in rank order."""
    kinds = kinds_of(placements)
    # The ranks that hold the same part of tensors of a kind, with their digests. The key is the
    # number of the kind and the index on each axis that cuts its tensors.
    groups: dict[tuple[int, ...], dict[int, str]] = {}
    for rank, digest_of in enumerate(digests):
        for number, digest in digest_of.items():
            kind = int(number)
            cuts, _ = kinds[kind]
            part = kind, *(layout.index(rank, axis) for axis, _ in cuts)
            groups.setdefault(part, {})[rank] = digest
    divergences = []
    for (kind, *_), group in groups.items():
        if len(set(group.values())) > 1:
            divergences.append(_divergence(kind, group))
    return divergences


def _divergence(kind: int, digests: Mapping[int, str]) -> Divergence:
    # Ranks are odd that differ from most: all of them, if no digest is that of more than half.
    [(common, count)] = Counter(digests.values()).most_common(1)
    has_majority = 2 * count > len(digests)
    majority: list[int] = []
    odd: list[int] = []
    for rank, digest in digests.items():
        if has_majority and digest == common:
            majority.append(rank)
        else:
            odd.append(rank)
    # Some of the odd ones, and one to compare them with.
    reporters = *odd[:MOST_NAMED], *majority[:1]
    return Divergence(kind, group=tuple(digests), reporters=reporters, odd=tuple(odd))


def describe_divergence(
    divergence: Divergence,
    sums: Mapping[int, Mapping[str, Sequence[int]]],
    rank_names: Sequence[str],
) -> str:
    """Which ranks differ, and in which tensors; `sums` of the reporters, `rank_names` of all
    ranks."""
    odd = [rank for rank in divergence.odd if rank in divergence.reporters]
    ranks = " and ".join(rank_names[rank] for rank in odd)
    if len(divergence.odd) > len(odd):
        ranks += f" and {len(divergence.odd) - len(odd)} more"

    differing = []
    names = dict.fromkeys(name for rank in odd for name in sums[rank])
    for name in names:
        values = {tuple(sums[rank].get(name, ())) for rank in divergence.reporters}
        if len(values) > 1:
            differing.append(name)

    verb = "differs" if len(divergence.odd) == 1 else "differ"
    agreeing = len(divergence.group) - len(divergence.odd)
    others = f"the {agreeing} other ranks that hold the same part" if agreeing else "each other"
    return f"{ranks} {verb} from {others}, in {join_some(differing)}"


def bit_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bytes taken 8 at a time, modulo 2^64: a scalar on its device. One bit
    flip changes it."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()  # a view as 8-byte integers has to begin at a multiple of 8
    whole = len(data) // 8 * 8
    total = data[:whole].view(torch.int64).sum()
    if whole < len(data):
        total = total + data[whole:].sum(dtype=torch.int64)
    return total


def largest(tensor: Tensor) -> Tensor:
    """The largest absolute value of a tensor: a float64 scalar on its device; NaN if any value is
    NaN."""
    return torch.linalg.vector_norm(tensor, ord=float("inf")).double()


def _is_weight(shard: LocalShard) -> bool:
    """Buffers may hold infinities on purpose, as masks do; the ranks compare parameters alone."""
    if not shard.compared or not shard.name.startswith(f"{MODEL}."):
        return False
    dtype = shard.local.dtype
    return dtype.is_floating_point and dtype.itemsize > 1


def kind_of(tensor: Placement) -> Kind:
    return tensor.cuts, tensor.stages


def kinds_of(placements: Mapping[str, Placement]) -> list[Kind]:
    """The distinct placements (kinds) of tensors, in the same order on all ranks."""
    return list(dict.fromkeys(kind_of(tensor) for tensor in placements.values()))
