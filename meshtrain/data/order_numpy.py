"""`order.items` for many positions at once: the same values by numpy, a hundredth of the time."""

import numpy as np

from meshtrain.data.order import Permutation


def items(seed: int, positions: range, n_samples: int) -> list[tuple[int, int]]:
    """As `order.items`."""
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
