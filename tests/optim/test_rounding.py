"""AdamW's averages in bfloat16, rounded stochastically. Layouts and checkpoints are in
test_zero.py."""

import pytest
import torch
from torch import nn

from meshtrain.optim import rounding
from meshtrain.optim.rounding import random_bits, round_stochastically
from tests.optim.steps import optimizer_of, update


def test_averages_in_bfloat16_are_right_in_the_mean() -> None:
    """The first step is AdamW's. With a decay whose steps are lost when they are rounded to
    nearest, the averages of many elements still follow gradients up and down."""
    torch.manual_seed(0)
    models = [nn.Linear(200, 100) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    exact, rounded = (
        optimizer_of(model, lr=1e-3, betas=(0.9, 0.999), state_precision=precision)
        for model, precision in zip(models, ("float32", "bfloat16"), strict=True)
    )
    for step in range(1, 61):
        skip = step == 7
        for model, optimizer in zip(models, (exact, rounded), strict=True):
            for p in model.parameters():
                p.grad = torch.full_like(p, torch.nan if skip else 3.0 if step < 30 else 0.5)
            update(optimizer, step, torch.tensor(0.25, dtype=torch.float64), skip)
        theirs, ours = (model.weight.detach() for model in models)
        if step == 1:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
        assert abs((ours - theirs).mean().item()) < step * 1e-3 * 2e-3, "1e-3 is a step"
        expected = exact.state(models[0].weight)
        for kind, (_, average) in rounded.state(models[1].weight).items():
            assert average.dtype == torch.bfloat16
            assert average.float().mean().item() == pytest.approx(
                expected[kind][1].mean().item(), rel=2e-3
            ), kind
    assert rounded.updates == exact.updates == 59


def test_random_bits_are_those_of_the_element_wherever_it_lies() -> None:
    whole, step = (7, 5, 3), torch.tensor(3.0)
    bits = random_bits("w", step, whole, (slice(0, 7), slice(0, 5), slice(0, 3)))
    part = (slice(2, 6), slice(1, 2), slice(0, 3))
    assert torch.equal(random_bits("w", step, whole, part), bits[part])
    assert bits.unique().numel() == bits.numel()
    assert not torch.equal(random_bits("v", step, whole, part), bits[part])
    assert not torch.equal(random_bits("w", step + 1, whole, part), bits[part])


def test_stochastic_rounding_keeps_the_mean_and_what_needs_no_rounding() -> None:
    bits = random_bits("w", torch.tensor(1.0), (100_000,), (slice(0, 100_000),))
    exact = torch.tensor([1.0, -3.0, 0.0, 2.0**-130])
    assert torch.equal(round_stochastically(exact, bits[:4]).float(), exact)
    for value in (1 + 2**-9, -1 - 3 * 2**-10):
        rounded = round_stochastically(torch.full((100_000,), value), bits >> 16).double()
        assert set(rounded.abs().tolist()) == {1.0, 1 + 2**-7}
        assert rounded.mean().item() == pytest.approx(value, abs=4 * 2**-8 / 100_000**0.5)


def test_an_average_in_bfloat16_is_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which change nothing, as a memory format does not."""

    def trained(block: int, memory_format: torch.memory_format) -> list[torch.Tensor]:
        monkeypatch.setattr(rounding, "BLOCK", block)
        torch.manual_seed(0)
        model = nn.ParameterList(
            [torch.randn(5, 3, 2, 2).to(memory_format=memory_format), torch.tensor(0.5)]
        )
        optimizer = optimizer_of(model, lr=1.0, state_precision="bfloat16")
        for step in (1, 2):
            for p in model:
                p.grad = p.detach().sin()
            update(optimizer, step)
        return [p.detach() for p in model]

    expected = trained(2**22, torch.contiguous_format)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        assert all(
            torch.equal(a, b) for a, b in zip(trained(20, memory_format), expected, strict=True)
        )
