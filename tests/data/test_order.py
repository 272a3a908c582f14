"""The order of samples: a permutation per epoch, a function of the step, never a list."""

import hashlib
import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from meshtrain.data import order_numpy
from meshtrain.data.order import (
    Permutation,
    batch_samples,
    items,
    microbatches,
    samples_digest,
    share,
)
from tests.properties import given, st

PINNED = [9, 71, 48, 10, 70, 21, 35, 93]


@given(st.integers(1, 20_000), st.integers(), st.integers(0, 2**40))
def test_is_a_permutation_of_any_size(n: int, seed: int, epoch: int) -> None:
    permutation = Permutation(n, seed, epoch)
    assert sorted(permutation[i] for i in range(n)) == list(range(n))


@given(st.integers(2**40, 2**70), st.integers(0, 2**32))
def test_large_permutations_stay_in_range_and_do_not_collide(n: int, seed: int) -> None:
    permutation = Permutation(n, seed, 0)
    samples = [permutation[i] for i in [*range(100), *range(n - 100, n)]]
    assert len(set(samples)) == 200
    assert all(0 <= sample < n for sample in samples)


@given(st.integers(1, 60), st.integers(1, 150), st.integers(0, 5))
def test_every_sample_once_per_epoch_over_batches_that_straddle(
    n: int, batch: int, seed: int
) -> None:
    epochs = 4
    steps = -(-epochs * n // batch)
    run = items(seed, range(steps * batch), n)
    assert [epoch for epoch, _ in run] == [position // n for position in range(steps * batch)]
    for epoch in range(epochs):
        assert sorted(sample for e, sample in run if e == epoch) == list(range(n))


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 40), st.integers(0, 20))
def test_a_batch_depends_on_its_positions_only(n: int, batch: int, step: int, cut: int) -> None:
    first = step * batch
    whole = items(3, range(first, first + batch), n)
    middle = first + min(cut, batch)
    assert items(3, range(first, middle), n) + items(3, range(middle, first + batch), n) == whole
    assert batch_samples(3, step, batch, n) == [sample for _, sample in whole]


@given(st.integers(1, 2**63 - 1), st.integers(0, 2**62), st.integers(0, 60), st.integers())
def test_numpy_gives_the_same(n: int, first: int, count: int, seed: int) -> None:
    positions = range(first, first + count)
    assert order_numpy.items(seed, positions, n) == items(seed, positions, n)
    near = range(2 * n - 5, 2 * n + 5)  # over the end of an epoch
    assert n < 3 or order_numpy.items(seed, near, n) == items(seed, near, n)
    small = n % 50 + 1  # over several
    assert order_numpy.items(seed, positions, small) == items(seed, positions, small)


@pytest.mark.parametrize(
    "n", [2**63 - 1, 2**62, 3037000499**2, 3037000499**2 + 1, 2**32, 10**12, 1]
)
def test_numpy_gives_the_same_at_the_edges(n: int) -> None:
    for positions in (range(3), range(max(0, n - 3), n + 3), range(5 * n + 1, 5 * n + 1)):
        assert order_numpy.items(7, positions, n) == items(7, positions, n)


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    orders = [
        tuple(items(seed, range(e * 100, (e + 1) * 100), 100))
        for seed in range(20)
        for e in range(20)
    ]
    assert len({tuple(sample for _, sample in order) for order in orders}) == 400


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_every_sample_comes_at_every_place_about_equally_often(n: int) -> None:
    """1,500 epochs: 6 standard deviations of a binomial."""
    epochs = 1500
    counts = Counter(
        (place, Permutation(n, 0, epoch)[place]) for epoch in range(epochs) for place in range(n)
    )
    expected, spread = epochs / n, (epochs / n * (1 - 1 / n)) ** 0.5
    for place in range(n):
        for sample in range(n):
            assert abs(counts[place, sample] - expected) < 6 * spread, (place, sample)


def test_is_the_same_on_every_machine_and_version() -> None:
    """Pinned: a run resumed with a newer meshtrain must go on with the same samples."""
    assert batch_samples(0, 0, 8, 100) == PINNED
    assert (
        samples_digest(PINNED) == hashlib.sha256(np.array(PINNED, "<i8").tobytes()).hexdigest()[:16]
    )


def test_memory_does_not_grow_with_the_corpus() -> None:
    tracemalloc.start()
    samples = batch_samples(0, 10**6, 512, 10**12)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(samples)) == 512
    assert max(samples) > 10**11
    assert peak < 300_000


@given(st.integers(0, 3000), st.integers(1, 200))
def test_shares_partition_and_differ_by_at_most_one(count: int, parts: int) -> None:
    shares = [share(count, parts, part) for part in range(parts)]
    assert [position for part in shares for position in part] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 3000), st.integers(1, 64), st.integers(1, 200))
def test_microbatches_hold_the_largest_share_and_no_more(
    count: int, micro: int, parts: int
) -> None:
    largest = max(len(share(count, parts, part)) for part in range(parts))
    number = microbatches(count, micro, parts)
    assert (number - 1) * micro < largest <= number * micro


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (batch_samples, (0, 0, 0, 5)),
        (batch_samples, (0, -1, 4, 5)),
        (batch_samples, (0, 0, 4, 0)),
        (order_numpy.items, (7, range(3), 0)),
        (share, (5, 2, 2)),
        (share, (5, 2, -1)),
        (microbatches, (4, 0, 1)),
        (microbatches, (0, 1, 1)),
        (Permutation(7, 0, 0).__getitem__, (-1,)),
        (Permutation(7, 0, 0).__getitem__, (7,)),
    ],
)
def test_refuses_sizes_that_make_no_sense(function: Callable, arguments: tuple) -> None:
    with pytest.raises(
        (ValueError, IndexError), match=r"expected|must be|at least 1|permutation of 7"
    ):
        function(*arguments)
