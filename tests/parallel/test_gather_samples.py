"""Samples of all data ranks in a loss: their order, their gradients, and what is refused."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from meshtrain import gather_samples, sample_positions
from meshtrain.data.order import BatchSizes, share
from meshtrain.errors import AgreedError
from meshtrain.job.process import Job
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.parallel.gather_samples import SampleShares, several_microbatches
from meshtrain.parallel.step_context import StepContext, use_context
from tests.comparing import ALONE, same
from tests.ranks import row

WIDTH = 3


def own_rows(x: Tensor, mesh: Mesh) -> Tensor:
    own = share(len(x), mesh.size(*DATA_AXES), mesh.index(*DATA_AXES))
    return x[own.start : own.stop]


def batch(samples: int) -> Tensor:
    draws = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 2, WIDTH, dtype=torch.float64, generator=draws)


def contrastive_losses(x: Tensor) -> Tensor:
    """(b, 2, d) -> (b,): the first view of each sample among the second views of all."""
    positions = sample_positions(x)
    logits = x[:, 0] @ gather_samples(x[:, 1]).T
    return torch.nn.functional.cross_entropy(logits, positions, reduction="none")


@pytest.mark.parametrize("shares", [None, SampleShares.of(5, ALONE)])
def test_one_process_has_all_samples(shares: SampleShares | None) -> None:
    x = batch(5)
    with use_context(StepContext(shares=shares)):
        assert gather_samples(x) is x
        assert sample_positions(x).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("job", "axes", "samples"),
    [
        row(2, {"dp_replicate": 2}, 6, name="replicas"),
        row(2, {"dp_shard": 2}, 7, name="shards"),
        row(3, {"dp_shard": 3}, 16, name="uneven"),
        row(4, {"dp_shard": 2, "dp_replicate": 2}, 9, name="both"),
        row(4, {"dp_replicate": 4}, 3, name="without-samples"),
        row(4, {"dp_replicate": 2, "tp": 2}, 5, name="tp"),
        row(4, {"dp_shard": 2, "cp": 2}, 5, name="cp"),
    ],
    indirect=["job"],
)
def test_losses_and_gradients_are_those_of_one_process(
    job: Job, axes: dict[str, int], samples: int
) -> None:
    mesh = build_mesh(Layout(axes))
    shares = SampleShares.of(samples, mesh)

    whole = batch(samples).requires_grad_()
    expected = contrastive_losses_alone(whole)
    expected.sum().backward()
    assert whole.grad is not None

    own = own_rows(batch(samples), mesh).requires_grad_()
    with use_context(StepContext(shares=shares)):
        same(gather_samples(own), whole, "samples")
        losses = contrastive_losses(own)
    same(losses, own_rows(expected, mesh), "losses")
    losses.sum().backward()
    assert own.grad is not None
    same(own.grad, own_rows(whole.grad, mesh), "gradients")


def contrastive_losses_alone(x: Tensor) -> Tensor:
    with use_context(StepContext(shares=SampleShares.of(len(x), ALONE))):
        return contrastive_losses(x)


@pytest.mark.ranks(2)
def test_a_gradient_is_the_sum_of_what_all_ranks_make_of_a_sample(job: Job) -> None:
    """Rank r multiplies sample i by 10^r (i + 1): all of them add up, whichever rank has it."""
    mesh = build_mesh(Layout({"dp_shard": 2}))
    x = torch.ones(1 + job.rank, requires_grad=True)
    with use_context(StepContext(shares=SampleShares.of(3, mesh))):
        factors = 10**job.rank * torch.tensor([1.0, 2.0, 3.0])
        (factors * gather_samples(x)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == ([11], [22, 33])[job.rank]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float16])
def test_values_of_any_dtype(job: Job, dtype: torch.dtype) -> None:
    mesh = build_mesh(Layout({"dp_replicate": 3}))
    shares = SampleShares.of(16, mesh)
    whole = torch.arange(16) % 3
    with use_context(StepContext(shares=shares)):
        found = gather_samples(own_rows(whole, mesh).to(dtype))
    assert found.dtype == dtype
    assert torch.equal(found, whole.to(dtype))


@pytest.mark.ranks(3)
def test_gradients_in_16_bits_are_rounded_once(job: Job) -> None:
    """1 + 2^-8 + 2^-8 in bfloat16, which has 8 bits: added one by one nothing would change."""
    mesh = build_mesh(Layout({"dp_replicate": 3}))
    addend = torch.tensor([1.0, 2.0**-8, 2.0**-8][job.rank], dtype=torch.bfloat16)
    x = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    with use_context(StepContext(shares=SampleShares.of(3, mesh))):
        (gather_samples(x) * addend).sum().backward()
    assert x.grad is not None
    assert x.grad.item() == 1 + 2.0**-7


@pytest.mark.ranks(2)
def test_outside_of_a_step_nobody_knows_the_others_samples(job: Job) -> None:
    with pytest.raises(RuntimeError, match="for a loss: outside of a step"):
        gather_samples(torch.zeros(1))


@pytest.mark.parametrize("x", [torch.zeros(4, 2), torch.zeros(())])
def test_x_has_a_row_for_each_sample(x: Tensor) -> None:
    with (
        use_context(StepContext(shares=SampleShares.of(5, ALONE))),
        pytest.raises(
            ValueError, match=r"expected a plain tensor with a row for each .* 5 samples"
        ),
    ):
        gather_samples(x)


def test_a_part_of_a_step_is_refused() -> None:
    shares = SampleShares.of(None, ALONE, "batch.micro_size=4")
    with (
        use_context(StepContext(shares=shares)),
        pytest.raises(AgreedError, match=r"batch\.micro_size=4"),
    ):
        gather_samples(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("global_size", "micro_size", "ranks", "told"),
    [
        (16, 16, 1, None),
        (16, 6, 3, None),
        (16, 4, 1, r"16 is 4 microbatches: use batch\.micro_size=16$"),
        (16, 5, 3, r"16 is 2 microbatches: use batch\.micro_size=6$"),
        ([[0, 8], [10, 16]], 4, 2, r"16 is 2 microbatches: use batch\.micro_size=8$"),
        ([[0, 4], [10, 16]], 4, 2, "use 4 data ranks, or one batch.global_size for all steps$"),
    ],
)
def test_a_step_of_several_microbatches_is_told_what_works(
    global_size: Any, micro_size: int, ranks: int, told: str | None
) -> None:
    problem = several_microbatches(BatchSizes.of(global_size), micro_size, ranks)
    if told is None:
        assert problem is None
    else:
        assert problem is not None
        assert re.search(told, problem)
