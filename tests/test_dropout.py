"""Dropout: good masks, and the same ones whatever computes them."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from meshtrain.data.order import mix
from meshtrain.data.sequence import chunks_of, padded_length
from meshtrain.dropout import (
    Dropout,
    SequencePart,
    bind_dropout,
    head_keys,
    keep_mask,
    keep_pairs,
    set_dropout,
)
from meshtrain.job.locate import model_file
from meshtrain.parallel.activation_checkpoint import checkpoint_block
from meshtrain.parallel.compile import compile_block
from tests.properties import given, settings, st

llama = model_file("llama")


class Two(nn.Module):
    """Two dropouts, whose masks on ones are the output."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.first, self.second = Dropout(p), Dropout(p)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def masks(
    shape: tuple[int, ...],
    *,
    p: float = 0.5,
    seed: int = 0,
    step: int = 1,
    first: int = 0,
    part: SequencePart | None = None,
) -> list[Tensor]:
    """Where the two dropouts keep, as booleans."""
    model = Two(p)
    bind_dropout(model, part)
    set_dropout(model, seed=seed, step=step, samples=range(first, first + shape[0]))
    return [y != 0 for y in model(torch.ones(shape))]


def correlation(a: Tensor, b: Tensor) -> float:
    """Between two arrays of booleans, in units of its standard deviation if they are
    independent."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]) * a.numel() ** 0.5


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_share_and_scale_of_what_is_kept(p: float) -> None:
    model = Two(p)
    set_dropout(model, seed=3, step=1, samples=range(8))
    x = torch.rand(8, 64, 101, dtype=torch.float64) + 1
    y = model(x)[0]
    torch.testing.assert_close(y[y != 0], x[y != 0] / (1 - p), rtol=1e-12, atol=0)
    for dim in (None, 0, 1, 2):  # altogether, and of each sample, position and feature
        share = (
            (y != 0).double().mean(dim=None if dim is None else [d for d in range(3) if d != dim])
        )
        n = y.numel() / share.numel()
        assert (share - (1 - p)).abs().max() < 5 * (p * (1 - p) / n) ** 0.5 + 5 / n


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_have_nothing_to_do_with_each_other(p: float) -> None:
    shape = (8, 64, 96)
    mask, other_name = masks(shape, p=p)
    others = {
        "name": other_name,
        "step": masks(shape, p=p, step=2)[0],
        "seed": masks(shape, p=p, seed=1)[0],
        "samples": masks(shape, p=p, first=8)[0],
        "part": masks(shape, p=p, part=SequencePart(2, 1))[0],
    }
    correlations = {name: correlation(mask, other) for name, other in others.items()}
    for dim in range(3):
        for lag in (1, 2, 3):
            n = shape[dim] - lag
            correlations[f"dim {dim}, lag {lag}"] = correlation(
                mask.narrow(dim, 0, n), mask.narrow(dim, lag, n)
            )
    assert {name: z for name, z in correlations.items() if not abs(z) < 5} == {}


@settings(max_examples=50)
@given(
    cp=st.integers(1, 5),
    tp=st.integers(1, 3),
    chunks=st.integers(2, 3),
    width=st.integers(1, 7),
    micro=st.integers(1, 4),
)
def test_parts_and_microbatches_make_the_whole(
    cp: int, tp: int, chunks: int, width: int, micro: int
) -> None:
    """Ranks that share sequences, as data/sequence.py deals positions out and `tp` cuts each part
    of `cp` once more."""
    samples, length = 4, padded_length(chunks * cp * tp, cp, tp)
    whole = masks((samples, length, width))
    for i, j in product(range(cp), range(tp)):
        positions = torch.tensor(
            [at for chunk in chunks_of(length, cp, i, tp) for at in chunk]
        ).chunk(tp)[j]
        part = SequencePart(tp, j, cp, i)
        assert torch.equal(part.positions(len(positions), torch.device("cpu")), positions)
        for first in range(0, samples, micro):
            size = min(micro, samples - first)
            own = masks((size, len(positions), width), first=first, part=part)
            for mask, expected in zip(own, whole, strict=True):
                assert torch.equal(mask, expected[first : first + size, positions])


def pairs(
    heads: int,
    queries: Tensor,
    keys: Tensor,
    *,
    p: float = 0.5,
    of: int = 6,
    tp_index: int = 0,
    first: int = 0,
    name: str = "0",
) -> Tensor:
    """Which probabilities (4, heads, s, t) attention keeps, of `of` heads of the whole layer."""
    model = nn.ModuleDict({name: Dropout(p, of)})
    bind_dropout(model, tp_index=tp_index)
    set_dropout(model, seed=0, step=1, samples=range(first, first + 4))
    return model[name].keep_pairs(4, heads, queries[None], keys[None])


def test_any_part_of_attention_can_be_asked_for() -> None:
    """Of samples, heads, queries and keys, in any order of keys."""
    tokens = torch.arange(40)
    whole = pairs(6, tokens, tokens)
    own, others = tokens[[3, 17, 30]], tokens.flip(0)[::3]
    for index in range(3):
        part = pairs(2, own, others, tp_index=index)
        assert torch.equal(part, whole[:, 2 * index : 2 * index + 2][:, :, own][..., others])
    assert torch.equal(pairs(6, tokens, tokens, first=2)[:2], whole[2:])
    # A plan that does not split attention leaves every rank all heads.
    assert torch.equal(pairs(6, tokens, tokens, tp_index=1), whole)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_of_attention_have_nothing_to_do_with_each_other(p: float) -> None:
    tokens = torch.arange(96)
    mask = pairs(6, tokens, tokens, p=p)
    share = mask.double().mean((2, 3))
    assert (share - (1 - p)).abs().max() < 5 * (p * (1 - p) / 96**2) ** 0.5
    correlations = {
        "transposed": correlation(mask[..., :48, 48:], mask[..., 48:, :48].transpose(2, 3)),
        "name": correlation(mask, pairs(6, tokens, tokens, p=p, name="1")),
        "position": correlation(mask, pairs(6, tokens + 96, tokens, p=p)),
    }
    for dim in range(4):
        for lag in (1, 2, 3):
            n = mask.shape[dim] - lag
            correlations[f"dim {dim}, lag {lag}"] = correlation(
                mask.narrow(dim, 0, n), mask.narrow(dim, lag, n)
            )
    assert {name: z for name, z in correlations.items() if not abs(z) < 5} == {}


def test_a_pair_is_splitmix64_of_its_positions() -> None:
    key, at = -(2**63) + 12345, torch.tensor([[2**31 - 1, 7]])
    keep = keep_pairs(head_keys(torch.tensor([key]), 3, 2), at, at, 0.4)
    for head, (i, query), (j, k) in product((3, 4), enumerate(at[0]), enumerate(at[0])):
        of_head = mix(head, mix(0, key % 2**64))
        word = mix(int(query) * 2**32 + int(k), of_head)
        assert keep[0, head - 3, i, j] == (word % 2**32 >= round(0.4 * 2**32))


@pytest.mark.parametrize("shape", [(4,), (4, 6), (4, 3, 5, 7), (5, 1, 1), (5, 1, 4)], ids=str)
def test_any_shape(shape: tuple[int, ...]) -> None:
    """A second dim of 1 stands for a whole sample (stochastic depth), which ranks that share it
    drop together."""
    whole = masks(shape)[0]
    assert whole.shape == shape
    assert torch.equal(whole[1:3], masks((2, *shape[1:]), first=1)[0])
    if shape[1:2] == (1,):
        for part in (SequencePart(2, 1), SequencePart(2, 1, 2, 0), SequencePart(2, 1, 2, 1)):
            assert torch.equal(masks(shape, part=part)[0], whole)


@settings(max_examples=30)
@given(
    key=st.integers(-(2**63), 2**63 - 1),
    part=st.integers(0, 5),
    p=st.floats(0, 1, exclude_max=True),
)
def test_it_is_splitmix64_of_the_element(key: int, part: int, p: float) -> None:
    """Against integers of Python, which do not wrap around; signed tensors must not show."""
    positions = torch.arange(3) + part * 3
    mask = keep_mask(torch.tensor([key]), torch.Size((1, 3, 5)), positions, p)
    start = mix(0, key % 2**64)
    for row in range(3):
        for feature in range(5):
            word = mix((part * 3 + row) * 3 + feature // 2, start)
            assert mask[0, row, feature] == (
                (word >> 32 * (feature % 2)) % 2**32 >= round(p * 2**32)
            )


def test_masks_stay_as_they_are() -> None:
    """A checkpoint of today goes on with the same masks tomorrow."""
    model = nn.ModuleDict({"mlp_dropout": Dropout(0.5)})
    set_dropout(model, seed=0, step=1, samples=range(1))
    mask = (model["mlp_dropout"](torch.ones(1, 2, 16)) != 0).int().flatten(1)[0].tolist()
    assert "".join(map(str, mask)) == "11111100101000110101010011000111"


def test_without_keys_it_is_torchs_own() -> None:
    x = torch.rand(3, 5, 8)
    torch.manual_seed(0)
    ours = Dropout(0.3)(x)
    torch.manual_seed(0)
    assert torch.equal(ours, nn.Dropout(0.3)(x))


def test_nothing_is_dropped_in_evaluation_nor_with_0() -> None:
    x = torch.rand(3, 5, 8)
    placed = Two()
    bind_dropout(placed)
    assert all(y is x for y in (Dropout(0.0)(x), Dropout(0.3).eval()(x), *placed.eval()(x)))
    none = Two(0.0)
    set_dropout(none, seed=0, step=1, samples=range(3))
    assert none.first.keys is None  # nothing was computed nor copied
    assert all(y is x for y in none(x))


def test_a_placed_model_wants_to_know_the_samples_and_has_a_dim_for_parts_of_sequences() -> None:
    model, x = Two(), torch.ones(2, 3)
    bind_dropout(model, SequencePart(cp=2))
    with pytest.raises(RuntimeError, match="call set_dropout"):
        model(x)
    set_dropout(model, seed=0, step=1, samples=range(1))
    with pytest.raises(RuntimeError, match="batch of 2 samples, but set_dropout told of 1"):
        model(x)
    set_dropout(model, seed=0, step=1, samples=range(2))
    with pytest.raises(RuntimeError, match=r"dropout of \(2, 3\) on a part of each sequence"):
        model(x)


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_p_is_a_probability_below_1(p: float) -> None:
    with pytest.raises(ValueError, match="expected 0 <= p < 1"):
        Dropout(p)
    ((key, problem),) = llama.check(llama.Config(hidden_dropout=p))
    assert (key, "from 0 to below 1" in problem) == ("hidden_dropout", True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(9, 9), Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


def test_a_compiled_block_drops_the_same_and_is_compiled_once() -> None:
    """One graph for all steps, samples and layers."""

    def outputs(**options: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), Block())
        if options:
            for block in model:
                block.forward = torch.compile(block.forward, fullgraph=True, **options)
        results = []
        for step in (1, 2, 3):
            set_dropout(model, seed=0, step=step, samples=range(step, step + 4))
            results.append(model(torch.linspace(-1, 1, 4 * 7 * 9).view(4, 7, 9).requires_grad_()))
        return results

    torch.testing.assert_close(outputs(backend="inductor"), outputs(), rtol=1e-5, atol=1e-6)
    counter = CompileCounter()
    outputs(backend=counter)
    assert counter.frame_count == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_blocks_compute_again_what_is_under_way(
    recompute: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two forwards before their backwards, as in a pipeline: each keeps the keys of its own
    masks."""
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition")
    )
    torch._dynamo.reset()

    def gradients(recompute: str, compiled: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        block = Block().double()
        block.forward = checkpoint_block(block.forward, recompute)
        if compiled:
            block.forward = compile_block(block, block.forward)
        x, losses = torch.randn(4, 3, 9, dtype=torch.float64, requires_grad=True), []
        parts = (range(0, 2), range(2, 4))
        for samples in parts:
            set_dropout(block, seed=0, step=1, samples=samples)
            losses.append(block(x[samples.start : samples.stop]).square().sum())
        for samples, loss in zip(parts, losses, strict=True):
            set_dropout(block, seed=0, step=1, samples=samples)
            loss.backward()
        return [tensor.grad for tensor in (x, *block.parameters())]

    torch.testing.assert_close(
        gradients(recompute, compiled), gradients("none", False), rtol=1e-12, atol=1e-12
    )
