"""The loss of each token from whole and split logits, with label smoothing and z-loss, against
torch's cross entropy in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from meshtrain.data.batch import IGNORE
from meshtrain.errors import InputError
from meshtrain.job.process import Job
from meshtrain.loss import full, log_probs, sample_losses, token_losses
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import axis_group
from meshtrain.parallel.cross_entropy import losses_and_gradient
from tests.comparing import same

B, S, V = 2, 6, 11
OPTIONS = [
    pytest.param(0.0, 0.0, id="cross entropy"),
    pytest.param(0.1, 0.0, id="smoothed"),
    pytest.param(0.0, 0.01, id="z-loss"),
    pytest.param(0.2, 0.03, id="both"),
]
options = pytest.mark.parametrize(("label_smoothing", "z_loss"), OPTIONS)


def known_losses(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """By torch, from the logits of valid targets alone."""
    valid = targets != IGNORE
    cross_entropy = F.cross_entropy(
        logits[valid], targets[valid], reduction="none", label_smoothing=label_smoothing
    )
    losses = cross_entropy + z_loss * logits[valid].logsumexp(-1) ** 2
    return torch.zeros(targets.shape, dtype=logits.dtype).masked_scatter(valid, losses)


def logits_and_targets(
    *leading: int, vocabulary: int = V, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """The same on every rank; every third target has no loss."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(*leading, vocabulary, dtype=torch.float64)).to(dtype)
    targets = torch.randint(vocabulary, leading)
    targets.view(-1)[::3] = IGNORE
    return logits.requires_grad_(), targets


def weights(losses: Tensor) -> Tensor:
    """A gradient that differs between the losses."""
    return torch.arange(1.0, 1 + losses.numel(), dtype=losses.dtype).view(losses.shape)


def gradient(losses: Tensor, leaf: Tensor) -> Tensor:
    (found,) = torch.autograd.grad((losses * weights(losses)).sum(), leaf)
    return found


# One process --------------------------------------------------------------------------------------


@options
@pytest.mark.parametrize("leading", [(B, S), (5,), (0, S), (0,)], ids=str)
def test_losses_are_those_of_torch(
    leading: tuple[int, ...], label_smoothing: float, z_loss: float
) -> None:
    """Of tokens and of classes, and of no sample."""
    logits, targets = logits_and_targets(*leading)
    losses = token_losses(logits, targets, label_smoothing, z_loss)
    expected = known_losses(logits, targets, label_smoothing, z_loss)
    assert losses.shape == targets.shape
    same(losses, expected)
    same(gradient(losses, logits), gradient(expected, logits))
    of_samples = sample_losses(logits, targets, label_smoothing, z_loss)
    same(of_samples, expected if len(leading) == 1 else expected.sum(1))


@options
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_pass_that_overwrites_logits_has_the_same_losses_and_gradients(
    dtype: torch.dtype, label_smoothing: float, z_loss: float
) -> None:
    """Computed in float32 at least, and rounded once."""
    logits, targets = logits_and_targets(5, dtype=dtype)
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    expected = known_losses(wide, targets, label_smoothing, z_loss)
    factor = torch.tensor(3.0, dtype=wide.dtype)
    losses, grad = losses_and_gradient(
        logits.detach().clone(),
        targets,
        factor,
        0,
        None,
        vocabulary=V,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    assert (losses.dtype, grad.dtype) == (wide.dtype, dtype)  # type: ignore[union-attr]
    torch.testing.assert_close(losses, expected.detach())
    (exact,) = torch.autograd.grad(expected.sum() * factor, wide)
    torch.testing.assert_close(grad, exact.to(dtype))


@options
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_float32(
    dtype: torch.dtype, label_smoothing: float, z_loss: float
) -> None:
    logits, targets = logits_and_targets(B, S, dtype=dtype)
    wide = logits.detach().float().requires_grad_()
    losses = token_losses(logits, targets, label_smoothing, z_loss)
    expected = token_losses(wide, targets, label_smoothing, z_loss)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, expected)
    assert torch.equal(gradient(losses, logits), gradient(expected, wide).to(dtype))


def test_a_target_without_a_loss_has_no_gradient_either() -> None:
    logits, targets = logits_and_targets(B, S)
    losses = token_losses(logits, targets, label_smoothing=0.1, z_loss=0.1)
    ignored = targets == IGNORE
    assert ignored.any()
    assert not losses[ignored].any()
    assert not gradient(losses, logits)[ignored].any()


def test_log_probabilities() -> None:
    logits, targets = logits_and_targets(B, S)
    of_targets = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = torch.where(targets == IGNORE, 0, of_targets)
    found = log_probs(logits, targets)
    same(found, expected)
    same(gradient(found, logits), gradient(expected, logits))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_targets_are_whole_numbers_of_any_width(dtype: torch.dtype) -> None:
    logits, targets = logits_and_targets(B, S)
    targets = targets.clamp(min=0)
    assert torch.equal(token_losses(logits, targets.to(dtype)), token_losses(logits, targets))


def test_outputs_that_are_whole_stay_as_they_are() -> None:
    logits, _ = logits_and_targets(B, S)
    assert full(logits) is logits


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, t: token_losses(x, t.float()), "targets are of the type torch.float32"),
        (lambda x, t: token_losses(x[0], t), r"a tensor \(6, 11\)"),
        (lambda x, t: log_probs({"logits": x}, t), "a dict"),
        (lambda x, t: token_losses(x, t, label_smoothing=1.5), "use a number from 0 to 1"),
        (lambda x, t: token_losses(x, t, z_loss=-1e-4), "use a number of at least 0"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[Any, Tensor], Tensor], says: str) -> None:
    with pytest.raises(InputError, match=says):
        call(*logits_and_targets(B, S))


# Split over `tp` ----------------------------------------------------------------------------------


def split(logits: Tensor, tp: Mesh, placement: Placement | None = None) -> DTensor:
    """As a tensor-parallel model returns it, over the last dim, or with another placement; a leaf,
    whose gradient is that of this rank's part."""
    whole = logits.detach()
    mesh = tp.submesh("tp")
    return distribute_tensor(whole, mesh, [placement or Shard(logits.dim() - 1)]).requires_grad_()


def part_of(gradient: Tensor) -> Tensor:
    """This rank's part of the gradient of a DTensor."""
    assert isinstance(gradient, DTensor)
    return gradient.to_local()


@pytest.mark.ranks(2, 3, 4)
@options
@pytest.mark.parametrize("vocabulary", [V, 5, 2])
@pytest.mark.parametrize("leading", [(B, S), (5,), (0, S)], ids=str)
def test_losses_of_split_logits_are_those_of_whole_ones(
    tp: Mesh, vocabulary: int, leading: tuple[int, ...], label_smoothing: float, z_loss: float
) -> None:
    """Of uneven parts; of a vocabulary of 2, some ranks have none."""
    group = axis_group(tp, "tp")
    whole, targets = logits_and_targets(*leading, vocabulary=vocabulary)
    logits = split(whole, tp)
    losses = token_losses(logits, targets, label_smoothing, z_loss)
    expected = known_losses(whole, targets, label_smoothing, z_loss)
    same(losses, expected)
    known = split(gradient(expected, whole), tp)
    same(part_of(gradient(losses, logits)), known.to_local())
    same(log_probs(logits, targets), -known_losses(whole, targets))
    assert group.size == tp.size("tp")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("vocabulary", [V, 5, 2])
def test_full_outputs_have_the_gradients_of_whole_ones(tp: Mesh, vocabulary: int) -> None:
    """Of a function of the whole last dim, the entropy."""
    group = axis_group(tp, "tp")

    def entropy(logits: Tensor) -> Tensor:
        return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    whole, _ = logits_and_targets(B, S, vocabulary=vocabulary)
    logits = split(whole, tp)
    tp.comm_bytes.restart()
    found = full(logits)
    assert not isinstance(found, DTensor)
    assert torch.equal(found, whole)
    known = split(gradient(entropy(whole), whole), tp)
    same(part_of(gradient(entropy(found), logits)), known.to_local())
    chunk = -(-vocabulary // group.size)
    sent = 8 * B * S * chunk * (group.size - 1)
    assert tp.comm_bytes.by_kind("tp") == {"all_gather": sent}, "nothing in the backward"


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_that_are_split_are_computed_in_float32(tp: Mesh, dtype: torch.dtype) -> None:
    _group = axis_group(tp, "tp")
    whole, targets = logits_and_targets(B, S, dtype=dtype)
    logits = split(whole, tp)
    losses = token_losses(logits, targets, label_smoothing=0.1, z_loss=0.01)
    expected = token_losses(whole, targets, label_smoothing=0.1, z_loss=0.01)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected)
    known = split(gradient(expected, whole), tp)
    torch.testing.assert_close(part_of(gradient(losses, logits)), known.to_local())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_logits_that_are_split_over_another_dim_are_moved(tp: Mesh, placement: Placement) -> None:
    _group = axis_group(tp, "tp")
    whole, targets = logits_and_targets(B, S)
    expected = known_losses(whole, targets, 0.1, 0.01)
    known = split(gradient(expected, whole), tp, placement)
    logits = split(whole, tp, placement)
    losses = token_losses(logits, targets, 0.1, 0.01)
    same(losses, expected)
    same(part_of(gradient(losses, logits)), known.to_local())
    logits = split(whole, tp, placement)
    known = split(gradient(whole.tanh(), whole), tp, placement)
    same(full(logits), whole)
    same(part_of(gradient(full(logits).tanh(), logits)), known.to_local())


@pytest.mark.ranks(4)
def test_logits_over_two_axes_are_refused(job: Job) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    whole, targets = logits_and_targets(B, S)
    logits = distribute_tensor(whole.detach(), mesh, [Shard(0), Shard(2)])
    for call in (full, lambda logits: token_losses(logits, targets)):
        with pytest.raises(InputError, match="over the axis tp alone"):
            call(logits)


@pytest.mark.ranks(2)
def test_a_gradient_of_the_gradient_of_split_logits_is_refused(tp: Mesh) -> None:
    """That of whole logits has one, and here it would be left out."""
    _group = axis_group(tp, "tp")
    whole, targets = logits_and_targets(B, S)
    logits = split(whole, tp)
    with pytest.raises(RuntimeError, match="no second derivative"):
        token_losses(logits, targets).sum().backward(create_graph=True)
