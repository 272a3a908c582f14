"""`order.items` for many positions at once: the same values by numpy, a hundredth of the time."""

import numpy as np

from meshtrain.data.order import Permutation

_UINT = np.uint64


def items(seed: int, positions: range, n_samples: int) -> list[tuple[int, int]]:
    """As `order.items`."""
    if n_samples < 1:
        raise ValueError(f"there are {n_samples} samples to take batches from: expected at least 1")
    pairs: list[tuple[int, int]] = []
    while positions:
        epoch, first = divmod(positions.start, n_samples)
        count = min(len(positions), n_samples - first)
        samples = _permute(Permutation(n_samples, seed, epoch), np.arange(first, first + count, dtype=_UINT))
        pairs += [(epoch, sample) for sample in samples.tolist()]
        positions = positions[count:]
    return pairs


def _permute(permutation: Permutation, indices: np.ndarray) -> np.ndarray:
    """Where a permutation of fewer than 2**63 takes these indices."""
    images = _encipher(permutation, indices)
    while (outside := images >= _UINT(permutation.n)).any():  # cycle walking
        images[outside] = _encipher(permutation, images[outside])
    return images


def _encipher(permutation: Permutation, indices: np.ndarray) -> np.ndarray:
    a, b = _UINT(permutation.left), _UINT(permutation.right)
    left, right = np.divmod(indices, b)
    keys = [_UINT(key) for key in permutation.keys]
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        left = (left + mix(right, left_key) % a) % a  # reduced first: the sum of 64 bits would not fit
        right = (right + mix(left, right_key) % b) % b
    return left * b + right


def mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """As `order.mix`; numpy's products and sums of unsigned integers are modulo 2**64."""
    values = values * _UINT(0x9E3779B97F4A7C15) + key
    values = (values ^ (values >> _UINT(30))) * _UINT(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _UINT(27))) * _UINT(0x94D049BB133111EB)
    return values ^ (values >> _UINT(31))
