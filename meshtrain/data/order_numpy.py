"""`order.items` for many positions at once: the same values, computed by numpy in a hundredth of
the time."""

from dataclasses import dataclass

import numpy as np

from meshtrain.data.order import BatchSizes, Mixture, Permutation


def items(seed: int | str, positions: range, n_samples: int) -> list[tuple[int, int]]:
    """The same as `order.items`."""
    if n_samples < 1:
        raise ValueError(f"there are {n_samples} samples to take batches from: expected at least 1")
    pairs: list[tuple[int, int]] = []
    while positions:
        epoch, first = divmod(positions.start, n_samples)
        count = min(len(positions), n_samples - first)
        permutation = Permutation(n_samples, seed, epoch)
        samples = permutation.encipher(np.arange(first, first + count, dtype=np.uint64))
        while (outside := samples >= np.uint64(n_samples)).any():  # cycle walking
            samples[outside] = permutation.encipher(samples[outside])
        pairs += [(epoch, sample) for sample in samples.tolist()]
        positions = positions[count:]
    return pairs


@dataclass(frozen=True)
class SampleOrder:
    """Which samples each step of a run takes. Steps are counted from 0."""

    seed: int
    sizes: BatchSizes
    samples: int  # of all sources together
    mixture: Mixture | None = None

    def items(self, positions: range) -> list[tuple[int, int]]:
        """The pairs (epoch, sample) at these positions of the run."""
        if self.mixture is None:
            return items(self.seed, positions, self.samples)
        return self.mixture.items(self.seed, positions, items)

    def of_step(self, step: int) -> list[tuple[int, int]]:
        """The pairs (epoch, sample) of the global batch of a step."""
        return self.items(self.sizes.positions(step))

    def epoch(self, step: int) -> int:
        """Full passes taken before this step: samples taken // number of samples."""
        return self.sizes.before(step) // self.samples
