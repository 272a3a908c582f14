"""Microbatches of a script's batch: this rank's share of a global batch, cut along its first dim.

All ranks of a step have the same number of microbatches, as collectives require, and each of them
has samples: shares that differ by one sample make microbatches that do. Only where a rank has fewer
samples than microbatches, the rest are copies of one of them, which count 0. Such a copy cannot
change a result: if its loss is not finite, so is that of the sample itself, which belongs to the
same step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshtrain.data.order import microbatches, share
from meshtrain.errors import InputError, plural
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import Mesh
from meshtrain.parallel.gather_samples import NOT_ALL, SampleShares
from meshtrain.parallel.torch_private import tree_leaves, tree_map_only


@dataclass(frozen=True)
class Microbatch:
    """Samples of one forward."""

    samples: Any
    positions: range  # of them in the global batch
    is_real: bool = True  # False: a copy that fills up, whose loss counts 0


def count_microbatches(global_size: int, micro_size: int | None, ranks: int) -> int:
    """How many forwards a step takes on each of `ranks` data ranks."""
    return 1 if micro_size is None else microbatches(global_size, micro_size, ranks)


def shares_of_step(global_size: int, count: int, mesh: Mesh) -> SampleShares:
    """How the samples of a step of `count` microbatches are shared out, for `gather_samples`."""
    ranks = mesh.size(*DATA_AXES)
    if count > 1:
        whole = -(-global_size // ranks)  # the largest share of a rank
        remedy = f"leave micro_size out, or use micro_size={whole}"
        return SampleShares.of(None, mesh, f"{NOT_ALL}: {remedy}")
    if global_size < ranks:
        remedy = f"use at most {global_size} data ranks, or global_size={ranks}"
        problem = f"gather_samples needs a sample on each rank, and a step has {global_size}"
        return SampleShares.of(None, mesh, f"{problem}: {remedy}")
    return SampleShares.of(global_size, mesh)


def split_batch(batch: Any, own: range, count: int) -> list[Microbatch]:
    """A rank's batch as `count` microbatches. `own`: its share, as positions in the global batch;
    if that is empty, the batch is a copy of the global batch's first sample.

    Raises InputError: the batch has not a sample of each position along its first dim.
    """
    if count == 1 and own:
        return [Microbatch(batch, own)]
    size = max(len(own), 1)
    _require_samples(batch, size)
    return list(_parts(batch, own, count))


def _parts(batch: Any, own: range, count: int) -> Iterator[Microbatch]:
    real = min(count, len(own))  # microbatches with samples that are not used elsewhere
    for number in range(real):
        rows = share(len(own), real, number)
        yield Microbatch(_rows(batch, rows), own[rows.start : rows.stop])

    # The rest are copies of the first sample: this rank's, or that of the global batch.
    first_row = range(1)
    its_position = own[:1] or range(1)
    for _ in range(count - real):
        yield Microbatch(_rows(batch, first_row), its_position, is_real=False)


def _rows(batch: Any, rows: range) -> Any:
    return tree_map_only(Tensor, lambda x: x[rows.start : rows.stop], batch)


def _require_samples(batch: Any, size: int) -> None:
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor):
            raise InputError(
                f"the batch has a {type(leaf).__name__}, and microbatches are cut from tensors, in "
                "lists, tuples and dicts: leave it out in `collate`, or leave micro_size out"
            )
        if leaf.dim() == 0 or leaf.shape[0] != size:
            raise InputError(
                f"the batch has a tensor of shape {tuple(leaf.shape)}: expected this rank's "
                f"{plural(size, 'sample')} along the first dim of each tensor, from which "
                "microbatches are cut"
            )
