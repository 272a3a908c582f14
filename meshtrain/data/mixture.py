"""Mixtures: several sources of tokens as one data set, whose samples are numbered source by source.

`order.Mixture` decides which source each position of the run takes its sample from.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from meshtrain.data.batch import Item, LossTargets, Samples
from meshtrain.data.order import BatchSizes, Mixture, SampleOrder, changes_of
from meshtrain.data.order_numpy import run_order
from meshtrain.data.packing import PackedTokens, TokenSamples
from meshtrain.errors import InputError, plural

if TYPE_CHECKING:
    from meshtrain.config import Config
    from meshtrain.config.schema import DataSection


class MixedSamples(Samples):
    """The samples of several sources, one source after the other."""

    def __init__(self, name: str, names: Sequence[str], parts: Sequence[TokenSamples]) -> None:
        self.name = name
        self.names = tuple(names)
        self.parts = tuple(parts)
        self.offsets = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self.offsets[-1]

    def _place(self, index: int) -> tuple[int, int]:
        """The source of a sample, and the sample's number within that source."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)}")
        source = bisect_right(self.offsets, index) - 1
        return source, index - self.offsets[source]

    def item(self, index: int, epoch: int) -> Item:
        source, own = self._place(index)
        return self.parts[source].item(own, epoch)

    def read(self, items: Sequence[tuple[int, int]], valid: int) -> PackedTokens:
        rows = []
        for epoch, index in items:
            source, own = self._place(index)
            rows.append(self.parts[source].read([(epoch, own)], valid=1))
        samples = tuple(index for _, index in items[:valid])
        return PackedTokens.together(rows, samples)

    def loss_targets(self) -> dict[str, LossTargets]:
        by_source = {}
        for name, part in zip(self.names, self.parts, strict=True):
            (targets,) = part.loss_targets().values()
            by_source[name] = targets
        return by_source

    def document_lengths(self, indices: Sequence[int]) -> np.ndarray | None:
        known = []
        for index in indices:
            source, own = self._place(index)
            lengths = self.parts[source].document_lengths([own])
            if lengths is not None:
                known.append(lengths)
        # Either all sources mask documents, or none does.
        return np.concatenate(known) if known else None


def mixture_of(
    config: "DataSection", samples: Samples, sizes: BatchSizes, steps: int | None = None
) -> Mixture | None:
    """The mixture of a run's sources; None if the run has only one.

    Raises InputError: `steps` steps (None: do not check) would go through a source more often than
    its `epochs` allows.
    """
    if not isinstance(samples, MixedSamples):
        return None
    # Weights change at steps, and a mixture counts samples.
    by_step = changes_of([own.weight for own in config.sources])
    changes = [(sizes.before(step), weights) for step, weights in by_step]
    mixture = Mixture(samples.names, [len(part) for part in samples.parts], changes)
    taken = mixture.taken(sizes.before(steps or 0))
    for own, size, count in zip(config.sources, mixture.sizes, taken, strict=True):
        if own.epochs is not None and count > own.epochs * size:
            takes = (
                f"the run takes {count:,} samples of {own.name}, which has {size:,}: "
                f"{count / size:.3g} passes"
            )
            lower = (
                "lower its weight, train.steps or batch.global_size, or raise epochs to "
                f"{-(-count // size)}"
            )
            raise InputError(f"data.sources: {takes}, and its epochs is {own.epochs}; {lower}")
    return mixture


def sample_order(config: "Config", train: Samples, steps: int | None = None) -> SampleOrder:
    """Which samples the steps of a run take. Raises InputError: see `mixture_of`."""
    sizes = config.batch.sizes
    mixture = mixture_of(config.data, train, sizes, steps)
    return run_order(config.train.seed, sizes, len(train), mixture)


def about_mixture(config: "Config", train: Samples, steps: int) -> list[str]:
    """Lines for people: how much the run takes of each source; [] without a mixture."""
    mixture = mixture_of(config.data, train, config.batch.sizes)
    if mixture is None:
        return []
    taken = mixture.taken(config.batch.sizes.before(steps))
    total = max(sum(taken), 1)
    lines = []
    for own, size, count in zip(config.data.sources, mixture.sizes, taken, strict=True):
        share = f"{100 * count / total:.4g} %"
        passes = f"{count / size:.3g} passes"
        lines.append(f"mixture: {share} {own.name}, {plural(count, 'sample')}, {passes}")
    return lines
