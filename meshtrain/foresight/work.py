"""The work of one block of a model on one rank, as plain values: matrix products, bytes moved, sent
and saved."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshtrain.foresight.parameters import first_part
from meshtrain.layout import Layout
from meshtrain.parallel.sharding import Cut, ParameterSpec, expert_shard_dim

Value = TypeVar("Value")


@dataclass(frozen=True)
class Product:
    """`times` products of an (m, k) matrix with a (k, n) matrix; a multiply-add is 2 flops."""

    m: int
    n: int
    k: int
    times: float = 1
    precision: str | None = None  # None: that of the step

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.times


@dataclass(frozen=True)
class Send:
    """`nbytes` that this rank sends over a mesh axis, in `times` messages; `kind` is one of
    `CommBytes`, such as all_gather, or p2p. They travel while the rank multiplies `beside`."""

    axis: str
    kind: str
    nbytes: float
    times: int = 1
    beside: tuple[Product, ...] = ()


@dataclass(frozen=True)
class Pass:
    """One pass through a block: its matrix products, flops of attention on the pairs of tokens that
    see each other, bytes that all other operators read and write, the number of operators launched,
    and sends. `fused_moved`, `fused_operators`: the same of a block that is compiled; None: it is
    not."""

    products: tuple[Product, ...] = ()
    attention_flops: float = 0
    moved: float = 0
    operators: int = 0
    sends: tuple[Send, ...] = ()
    fused_moved: float | None = None
    fused_operators: int | None = None


@dataclass(frozen=True)
class Parameter:
    """A parameter of a block on one rank, after tp and ep, before FSDP."""

    name: str
    shape: tuple[int, ...]
    trained: bool = True
    axis: str = "fsdp"  # that shards it: `efsdp` for experts; "": every rank holds it whole
    whole: tuple[int, ...] = ()  # its shape before tp and ep; (): the same

    def over(self, shards: int) -> ParameterSpec:
        """How FSDP shards it over so many ranks."""
        dim = expert_shard_dim(self.shape, 1, shards) if self.axis == "efsdp" else 0
        cuts = (Cut(self.axis, dim, shards),) if shards > 1 else ()
        return ParameterSpec(self.name, self.shape, cuts, trainable=self.trained)


@dataclass(frozen=True)
class Live:
    """Bytes of activations alive in a part of a block's backward, and elements of weight gradients
    that are made until its end. `temporary`: bytes on the way to a gradient in another type."""

    activations: float
    made: float = 0
    temporary: float = 0


@dataclass(frozen=True)
class BlockMemory:
    """Live tensors of one block on one rank for one microbatch, without weights, their gradients,
    and what blocks before it have saved.

    Attributes:
        saved: bytes that its forward leaves for its backward, its input included.
        forward: most bytes alive during its forward, its input included.
        backward: its backward, in parts that end where a weight gradient is made.
        sums: bytes of weight gradients that its forward makes, as a head that computes the loss
            does.
        left: bytes that it leaves when its backward is done, if weight gradients are computed
            later.
    """

    saved: float = 0
    forward: float = 0
    backward: tuple[Live, ...] = ()
    sums: float = 0
    left: float = 0


@dataclass(frozen=True)
class Work:
    """One block on one rank for one microbatch, without what FSDP and DDP add. Bytes are those of
    live tensors."""

    name: str
    parameters: tuple[Parameter, ...]
    forward: Pass
    input_grad: Pass  # recomputation is in here
    weight_grad: Pass
    memory: BlockMemory = BlockMemory()
    # bytes that its forward sends to the host's memory, and that come back for its backward
    offloaded: float = 0

    @property
    def passes(self) -> tuple[Pass, Pass, Pass]:
        return self.forward, self.input_grad, self.weight_grad

    @property
    def elements(self) -> int:
        """Elements of its parameters before FSDP."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters)


def shard_counts(layout: Layout) -> dict[str, int]:
    """Axis of a parameter -> the number of its shards."""
    return {"fsdp": layout.size("fsdp"), "efsdp": layout.size("efsdp"), "": 1}


def of_each(works: Sequence[Work], compute: Callable[[Work], Value]) -> list[Value]:
    """`compute` of each block. Blocks of a kind share one Work, for which it is called once."""
    kinds = {id(work): work for work in works}
    of_kind = {key: compute(work) for key, work in kinds.items()}
    return [of_kind[id(work)] for work in works]


@dataclass(frozen=True)
class Shards:
    """Elements of a block's parameters: of the first rank's shards, and of all shards together with
    their padding."""

    own: int
    all: int

    @property
    def others(self) -> int:
        """Elements on other ranks."""
        return self.all - self.own


def over_shards(works: Sequence[Work], layout: Layout, trained: bool = False) -> list[Shards]:
    """For each block its parameters over the shards of a layout, all or the trained ones alone.
    FSDP pads shards: of 8 rows over 64 ranks each rank allocates one."""
    shards = shard_counts(layout)

    def of_block(work: Work) -> Shards:
        own = total = 0
        for parameter in work.parameters:
            if parameter.trained or not trained:
                ranks = shards[parameter.axis]
                part = first_part(parameter.over(ranks))
                own += part
                total += part * ranks
        return Shards(own, total)

    return of_each(works, of_block)
