"""The work of one block of a model on one rank, as plain values: matrix products, bytes moved, sent
and saved."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshtrain.layout import Layout


@dataclass(frozen=True)
class Product:
    """`times` products of an (m, k) matrix with a (k, n) matrix; a multiply-add is 2 flops."""

    m: int
    n: int
    k: int
    times: float = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.times


@dataclass(frozen=True)
class Send:
    """`nbytes` that this rank sends over a mesh axis; `kind` is one of `CommBytes`, such as
    all_gather, or p2p."""

    axis: str
    kind: str
    nbytes: float


@dataclass(frozen=True)
class Pass:
    """One pass through a block: its matrix products, flops of attention, bytes that all other
    operators read and write, the number of operators launched, and sends."""

    products: tuple[Product, ...] = ()
    attention_flops: float = 0
    moved: float = 0
    operators: int = 0
    sends: tuple[Send, ...] = ()


@dataclass(frozen=True)
class Work:
    """One block on one rank for one microbatch, without what FSDP and DDP add. Bytes are those of
    live tensors."""

    name: str
    parameters: int  # elements on this rank: after tp and ep, before FSDP
    forward: Pass
    input_grad: Pass  # recomputation is in here
    weight_grad: Pass
    saved: float  # bytes that its forward leaves for its backward, its input included
    peak_forward: float  # most bytes alive during its forward, beyond its input and its weights
    # most bytes alive during its backward, beyond `saved`, its weights and their gradients
    peak_backward: float
    # For each parameter: the axis that shards it, its rows, elements per row, and whether it is
    # trained.
    rows: tuple[tuple[str, int, int, bool], ...] = ()


def over_shards(
    works: Sequence[Work], layout: Layout, trained: bool = False
) -> tuple[list[int], list[int]]:
    """For each block the elements of its largest shard and of all its shards together, of all
    parameters or of trained ones alone. FSDP shards rows and pads them: with 8 rows over 64 ranks
    each rank allocates one."""
    sizes: dict[int, tuple[int, int]] = {}  # blocks of a kind share one Work
    for work in works:
        if id(work) not in sizes:
            rows = [
                row
                for row in work.rows or (("fsdp", work.parameters, 1, True),)
                if row[3] or not trained
            ]
            shards = [
                (layout.size(axis), -(-n // layout.size(axis)) * width)
                for axis, n, width, _ in rows
            ]
            sizes[id(work)] = sum(size for _, size in shards), sum(n * size for n, size in shards)
    return [sizes[id(work)][0] for work in works], [sizes[id(work)][1] for work in works]
