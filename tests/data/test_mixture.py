"""Mixtures and batch sizes as pure functions of the step, against the same counted step by step."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

from meshtrain.config import Config
from meshtrain.data import open_data
from meshtrain.data.mixture import MixedSamples, sample_order
from meshtrain.data.order import (
    BatchSizes,
    Mixture,
    changes_of,
    items,
    mixture_period,
    whole_weights,
)
from meshtrain.data.order_numpy import run_order
from meshtrain.errors import InputError
from tests.properties import given, settings, st
from tests.refusing import check_refusals

WEIGHTS = st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any)


@given(WEIGHTS)
def test_every_prefix_has_its_shares_to_within_a_sample(weights: list[int]) -> None:
    whole = whole_weights(weights)
    total, taken = sum(whole), [0] * len(whole)
    for t, source in enumerate(mixture_period(whole), 1):
        taken[source] += 1
        assert all(
            abs(count - t * weight / total) < 1 for count, weight in zip(taken, whole, strict=True)
        )
    assert tuple(taken) == whole


@settings(max_examples=40)
@given(
    WEIGHTS, WEIGHTS, st.integers(0, 70), st.integers(0, 200), st.integers(0, 40), st.integers(0, 9)
)
def test_a_source_goes_through_its_samples_as_if_alone(
    one: list[int], other: list[int], change: int, start: int, length: int, seed: int
) -> None:
    n = min(len(one), len(other))
    one, other = [w + 1 for w in one[:n]], [w + 1 for w in other[:n]]
    names, sizes = [f"source {i}" for i in range(n)], [5 + 7 * i for i in range(n)]
    mixture = Mixture(names, sizes, [(0, one), (change, other)] if change else [(0, other)])
    run = mixture.items(seed, range(start + length))
    assert mixture.items(seed, range(start, start + length)) == run[start:]
    order = run_order(seed, BatchSizes.of(1), sum(sizes), mixture)
    assert order.items(range(start, start + length)) == run[start:]
    sources = mixture.sources(range(start + length))
    assert mixture.taken(start + length) == tuple(sources.count(i) for i in range(n))
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        own = [
            (epoch, sample - sum(sizes[:i]))
            for source, (epoch, sample) in zip(sources, run, strict=True)
            if source == i
        ]
        assert own == items(f"{seed} {name}", range(len(own)), size)


def test_one_period_is_the_weights_as_written() -> None:
    assert whole_weights([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert whole_weights([3, 1.5]) == (2, 1)
    mixture = Mixture(["a", "b"], [10, 10], [(0, [0.75, 0.25]), (8, [0, 1])])
    assert Counter(mixture.sources(range(8))) == {0: 6, 1: 2}
    assert set(mixture.sources(range(8, 20))) == {1}
    assert mixture.taken(10**15) == (6, 10**15 - 6)
    assert changes_of([1, [[0, 2], [5, 3]], [[0, 4], [9, 0]]]) == [
        (0, (1, 2, 4)),
        (5, (1, 3, 4)),
        (9, (1, 3, 0)),
    ]


@pytest.mark.parametrize("weights", [[0, 0], [1, -0.5], [0.1234567, 0.2]])
def test_weights_that_are_none(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="the weights"):
        whole_weights(weights)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=4),
    st.integers(0, 40),
)
def test_batch_sizes_count_as_a_loop_does(parts: list[tuple[int, int]], step: int) -> None:
    starts = np.cumsum([0, *(length for length, _ in parts)])[:-1].tolist()
    sizes = BatchSizes.of([[first, size] for first, (_, size) in zip(starts, parts, strict=True)])
    of_steps = [size for length, size in parts for _ in range(length)] + [parts[-1][1]] * 41
    assert sizes.size(step) == of_steps[step]
    assert sizes.before(step) == sum(of_steps[:step])
    assert sizes.positions(step) == range(sum(of_steps[:step]), sum(of_steps[: step + 1]))
    for samples in (1, sizes.before(step) + 1, sizes.before(step + 1)):
        steps = sizes.steps(samples)
        assert sizes.before(steps) >= samples > sizes.before(steps - 1)


CONFIG = """
model: {hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 1}
data: {source: text, seq_len: 8, validation: 0.2, SOURCES}
batch: {global_size: SIZE, micro_size: 2}
train: {steps: 20}
"""


def config(tmp_path: Path, sources: str, size: str = "4") -> Config:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"text {name} " * 40)
    text = CONFIG.replace("SOURCES", sources).replace("SIZE", size).replace("DIR", str(tmp_path))
    (tmp_path / "run.yaml").write_text(text)
    return Config.load(
        str(tmp_path / "run.yaml"), [f"data.cache={tmp_path / 'cache'}"], for_training=True
    )


TWO = "sources: [{name: a, path: DIR/a.txt, weight: 3, epochs: 2}, {name: b, path: DIR/b.txt}]"


def test_samples_of_a_mixture_are_those_of_its_sources(tmp_path: Path) -> None:
    loaded = config(tmp_path, TWO)
    data = open_data(loaded.data, n_outputs=256, seed=0, say=print)
    assert isinstance(data.train, MixedSamples)
    assert isinstance(data.validation, MixedSamples)
    a, b = data.train.parts
    batch = data.train.read([(0, 1), (0, len(a)), (0, 2)], 2).batch()
    for row, (part, index) in enumerate([(a, 1), (b, 0), (a, 2)]):
        assert (batch.tensors["tokens"][row] == part.item(index, 0)[0][0]).all()
    assert (batch.targets[2] == -100).all()
    assert len(data.train) == len(a) + len(b)
    assert data.bytes_per_target is not None
    with pytest.raises(
        InputError, match=r"takes 60 samples of a, which has 28: 2\.14 passes, and its epochs is 2"
    ):
        sample_order(loaded, data.train, steps=20)
    assert sample_order(loaded, data.train, steps=18).mixture is not None


def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    def read(row: dict[str, str], folder: Path) -> None:
        config(folder, row.get("sources", TWO), row.get("size", "4"))

    check_refusals(
        yaml.safe_load(Path(__file__).with_name("mixtures.yaml").read_text()), tmp_path, read
    )
