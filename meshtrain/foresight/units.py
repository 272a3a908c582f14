"""FSDP's units on a rank: which blocks gather their parameters together, and how much of gathered
weights and of summed gradients is there while a block computes.

In elements, as parallel/fsdp.py and torch's FSDP have it. A block's experts are a unit within the
block's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshtrain.foresight.parameters import first_part
from meshtrain.foresight.work import Work, of_each, shard_counts
from meshtrain.layout import Layout
from meshtrain.parallel.fsdp import MIN_UNIT_SIZE


@dataclass(frozen=True)
class Sizes:
    """Elements of a block's parameters on a rank.

    Attributes:
        dense, experts: of those that FSDP shards, all shards together, with their padding.
        dense_trained, experts_trained: of the trained ones among them.
        whole, whole_trained: of those that it does not shard.
        kept: of the gradients that the rank keeps.
    """

    dense: int = 0
    dense_trained: int = 0
    experts: int = 0
    experts_trained: int = 0
    whole: int = 0
    whole_trained: int = 0
    kept: int = 0

    @property
    def trained(self) -> int:
        """Of all gradients, before they are summed over ranks."""
        return self.dense_trained + self.experts_trained + self.whole_trained


@dataclass(frozen=True)
class Units:
    """The units of a rank's blocks. `unit`: block -> the number of its unit; blocks of the last
    number, if there are any, belong to the model's own unit, which stays gathered."""

    blocks: tuple[Sizes, ...]
    unit: tuple[int, ...]
    dense: tuple[int, ...]  # unit -> elements that it gathers, without experts
    dense_trained: tuple[int, ...]  # unit -> those whose gradients it sums

    @classmethod
    def of(cls, works: Sequence[Work], layout: Layout) -> "Units":
        shards = shard_counts(layout)
        blocks = tuple(of_each(works, lambda work: _sizes(work, shards)))
        unit = []
        number = size = 0
        for work in works:
            unit.append(number)
            size += work.elements
            if size >= MIN_UNIT_SIZE:
                number += 1
                size = 0
        dense = [0] * (number + 1)
        trained = [0] * (number + 1)
        for sizes, i in zip(blocks, unit, strict=True):
            dense[i] += sizes.dense
            trained[i] += sizes.dense_trained
        return cls(blocks, tuple(unit), tuple(dense), tuple(trained))

    @property
    def sharded(self) -> int:
        """Elements that all units together gather."""
        return sum(sizes.dense + sizes.experts for sizes in self.blocks)

    @property
    def whole(self) -> int:
        return sum(sizes.whole for sizes in self.blocks)

    @property
    def trained(self) -> int:
        return sum(sizes.trained for sizes in self.blocks)

    def kept_from(self, first: int) -> int:
        """Elements of the gradients that the rank keeps of blocks from `first` on."""
        return sum(sizes.kept for sizes in self.blocks[first:])

    def in_forward(self, i: int) -> int:
        """Gathered elements in the forward of block i. The message that has brought a unit is freed
        when the next one is unpacked, and the one behind that is on its way."""
        dense, experts = self._own(i), self.blocks[i].experts
        return dense + max(dense + experts, 2 * experts) + self._next(i, 1) + self.dense[-1]

    def in_backward(self, i: int) -> int:
        """Gathered elements in the backward of block i, until its experts are done."""
        return self.blocks[i].experts + self.behind_experts(i)

    def behind_experts(self, i: int) -> int:
        """... from then on: its own, and the message with those of the block before it."""
        return self._own(i) + self.ahead(i)

    def ahead(self, i: int) -> int:
        """... when the backward of block i is done."""
        return self._next(i, -1) + self.dense[-1]

    def summed_behind(self, i: int) -> int:
        """Elements in the message with the gradients of the block behind block i."""
        behind = self.unit[i] + 1
        return self.dense_trained[behind] if behind < len(self.dense) - 1 else 0

    def summed(self, i: int) -> int:
        """Elements in the message with the gradients of block i, without its experts'."""
        return 0 if self._is_models(i) else self.dense_trained[self.unit[i]]

    def _is_models(self, i: int) -> bool:
        return self.unit[i] == len(self.dense) - 1

    def _own(self, i: int) -> int:
        return 0 if self._is_models(i) else self.dense[self.unit[i]]

    def _next(self, i: int, step: int) -> int:
        other = self.unit[i] + step
        return self.dense[other] if 0 <= other < len(self.dense) - 1 else 0


def _sizes(work: Work, shards: Mapping[str, int]) -> Sizes:
    counts = dict.fromkeys(Sizes.__dataclass_fields__, 0)
    for parameter in work.parameters:
        ranks = shards[parameter.axis]
        part = first_part(parameter.over(ranks))
        name = "whole"
        if ranks > 1:
            name = "experts" if parameter.axis == "efsdp" else "dense"
        counts[name] += part * ranks
        if parameter.trained:
            counts[f"{name}_trained"] += part * ranks
            counts["kept"] += part
    return Sizes(**counts)
