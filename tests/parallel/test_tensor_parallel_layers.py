"""Tensor-parallel layers against plain ones, and the bytes a step sends."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshtrain
from meshtrain.data.batch import IGNORE
from meshtrain.errors import InputError
from meshtrain.loss import correct_predictions, sample_losses
from meshtrain.mesh import Mesh
from meshtrain.parallel import linear_cross_entropy
from meshtrain.parallel.cross_entropy import CROSS_ENTROPY, LossOptions, gather_logits
from meshtrain.parallel.grad_sync import set_is_last_backward
from meshtrain.parallel.linear_cross_entropy import LossRequest, fuse_loss, request_loss
from meshtrain.parallel.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from tests.comparing import (
    B,
    D,
    S,
    Sent,
    V,
    compare,
    gradients,
    latent_attention,
    same,
    same_gradients,
    small_llama,
    tokens,
)
from tests.parallel.operators import Operators

pytestmark = pytest.mark.ranks(2, 4)


class Gated(nn.Module):
    """A user's model with layers that read the same input, and a bias in every layer that can have
    one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.gate, self.up, self.down = nn.Linear(D, 7), nn.Linear(D, 7), nn.Linear(7, D)
        self.head = nn.Linear(D, V)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.words(inputs)
        return self.head(x + self.down(F.silu(self.gate(x)) * self.up(x)))


class Padded(Gated):
    """Its embedding gives one id's row no gradient."""

    def __init__(self, padding_idx: int) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D, padding_idx)


GATED = {
    "words": "embedding_rowwise_sequence",
    "gate": "colwise",
    "up": "colwise",
    "down": "rowwise",
}
GATED |= {"head": "colwise_logits"}


def some_targets() -> Tensor:
    targets = tokens(microbatch=9)
    targets[0, :5] = IGNORE
    return targets


def part_of(x: Tensor, tp: Mesh, sequence_parallel: bool) -> Tensor:
    """A leaf with this rank's part of the sequence, or the whole one."""
    size = x.shape[1] // tp.size("tp")
    part = x.narrow(1, tp.index("tp") * size, size) if sequence_parallel else x
    return part.detach().clone().requires_grad_()


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("padding_idx", [0, 4, -1])
def test_the_row_of_padding_has_no_gradient(
    tp: Mesh, padding_idx: int, sequence_parallel: bool
) -> None:
    assert (tokens() == padding_idx % V).any()
    options = {"tp_plan": GATED, "sequence_parallel": sequence_parallel}
    plain: Any = compare(lambda: Padded(padding_idx), tp, steps=2, **options)[1]
    assert not plain.words.weight.grad[padding_idx].any()


def test_a_sample_that_tp_does_not_divide_is_refused_by_each_rank(tp: Mesh) -> None:
    model = meshtrain.parallelize(Gated(), tp, tp_plan=GATED, precision="float64")
    odd = torch.zeros(B, 4 * tp.size("tp") + 1, dtype=torch.int64)
    with pytest.raises(
        InputError, match=f"a sample of {odd.shape[1]} tokens does not divide over layout"
    ) as refused:
        model(odd)
    assert type(refused.value) is InputError, (
        "other data ranks do not find it, and would wait for this one"
    )


@pytest.mark.parametrize(
    ("sequence_parallel", "regather"), [(True, False), (True, True), (False, False)]
)
def test_layers_of_uneven_parts(tp: Mesh, sequence_parallel: bool, regather: bool) -> None:
    """Losses and gradients of two steps; whole logits on request, and as many hits."""
    targets = some_targets()

    def weighted_losses(model: nn.Module, data_rank: int, microbatch: int) -> Tensor:
        return sample_losses(model(tokens(microbatch=microbatch)), targets) * torch.tensor(
            [1.0, 3.0]
        )

    options = {"tp_plan": GATED, "sequence_parallel": sequence_parallel, "regather": regather}
    model, plain = compare(Gated, tp, weighted_losses, steps=2, microbatches=2, **options)
    logits, expected = model(tokens()), plain(tokens())
    assert logits.shape == (B, S, V)
    same(gather_logits(logits), expected)
    assert correct_predictions(logits, targets) == correct_predictions(expected, targets)


@pytest.mark.parametrize("token", [-1, V, V + 40])
def test_one_rank_refuses_an_id_outside_of_the_vocabulary(tp: Mesh, token: int) -> None:
    """As a plain embedding does: no row of zeros stands for such an id."""
    layer = VocabParallelEmbedding(nn.Embedding(V, D), tp)
    refusals = torch.tensor(0)
    try:
        layer(torch.full((B, S), token))
    except IndexError:
        refusals += 1
        layer(torch.zeros(B, S, dtype=torch.int64))  # the others wait for its addend
    dist.all_reduce(refusals, group=tp.group("tp"))
    assert refusals == 1


@pytest.mark.parametrize("token", [-1, V, V + 40])
def test_all_ranks_refuse_a_target_outside_of_the_vocabulary(tp: Mesh, token: int) -> None:
    """With and without logits."""
    targets = torch.zeros(B, S, dtype=torch.int64)
    targets[0, :2] = torch.tensor([IGNORE, token])
    x = torch.randn(B, S, D)
    layer = ColumnParallelLinear(
        nn.Linear(D, V, bias=False), tp, sequence_parallel=False, use_local_output=False
    )
    with pytest.raises(RuntimeError, match=f"0 to {V - 1}"):
        sample_losses(layer(x), targets)
    fuse_loss(layer, compiled=False)
    request = request_loss(LossRequest(lambda: targets))
    with torch.no_grad(), request, pytest.raises(RuntimeError, match=f"0 to {V - 1}"):
        layer(x)


def test_losses_of_logits_whose_exponentials_overflow(tp: Mesh, float64: None) -> None:
    torch.manual_seed(0)
    head, x = nn.Linear(D, V, bias=False), torch.randn(B, S, D)
    head.weight.data *= 10_000
    layer = ColumnParallelLinear(head, tp, sequence_parallel=False, use_local_output=False)
    same(sample_losses(layer(x), tokens()), sample_losses(head(x), tokens()))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("vocabulary", [V, 5])
@pytest.mark.parametrize("factor", [None, 3.0])
@pytest.mark.parametrize("options", [CROSS_ENTROPY, LossOptions(0.1, 0.01)], ids=str)
def test_loss_without_logits(
    tp: Mesh,
    float64: None,
    sequence_parallel: bool,
    vocabulary: int,
    factor: float | None,
    options: LossOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In chunks of a size that divides nothing; of a vocabulary of 5, the last of 4 ranks has no
    part. `factor`: on the losses, whose gradient is wanted; None: it is not."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_TOKENS", 7)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_LOGITS", 0)
    torch.manual_seed(0)
    head, whole = nn.Linear(D, vocabulary, bias=False), torch.randn(B, S, D, requires_grad=True)
    targets = some_targets().clamp(max=vocabulary - 1)
    expected = sample_losses(head(whole), targets, options.label_smoothing, options.z_loss)
    layer = ColumnParallelLinear(
        head, tp, sequence_parallel=sequence_parallel, use_local_output=False
    )
    fuse_loss(layer, compiled=False)
    x = part_of(whole, tp, sequence_parallel)
    tp.comm_bytes.restart()
    scale = None if factor is None else lambda: torch.tensor(factor)
    with (
        torch.set_grad_enabled(factor is not None),
        request_loss(LossRequest(lambda: targets, scale, options=options)) as request,
    ):
        output = layer(x)
    same(request.losses, expected)
    t, n = tp.size("tp"), B * S
    share = (t - 1) / t
    elements_sent = 3 * n * (t - 1)
    if sequence_parallel:
        elements_sent += n * D * share
    if factor is not None:
        (expected.sum() * factor).backward()
        output.backward()
        same(x.grad, part_of(whole.grad, tp, sequence_parallel))
        same_gradients(layer, gradients(head))
        elements_sent += n * D * share * (1 if sequence_parallel else 2)
    assert sum(tp.comm_bytes.by_kind("tp").values()) == round(8 * elements_sent)


def bytes_of_a_step(model: nn.Module, tp: Mesh, microbatches: int) -> int:
    """By the counter, which is compared with what torch sends."""
    tp.comm_bytes.restart()
    with Operators() as operators, Sent() as sent:
        for microbatch in range(microbatches):
            set_is_last_backward(model, microbatch == microbatches - 1)
            sample_losses(model(tokens()), tokens()).sum().backward()
    assert not any(str(operator).startswith("c10d.") for operator, *_ in operators.calls), (
        "ours are not seen here"
    )
    counted = sum(tp.comm_bytes.by_kind("tp").values())
    # A tensor that does not divide is sent in parts that differ by an element: the counter uses
    # their mean.
    assert sent.bytes == pytest.approx(counted, abs=64)
    return counted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sequence_parallel": False},
        {"regather": True},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "selective", "regather": True},
    ],
)
def test_bytes_of_two_microbatches_are_those_of_the_formula(
    tp: Mesh, options: dict[str, Any]
) -> None:
    model = meshtrain.parallelize(
        small_llama(num_hidden_layers=3), tp, precision="float64", **options
    )
    t, n = tp.size("tp"), B * S * 24
    share = (t - 1) / t
    activations = 3 * 8 + 4
    if options.get("regather"):
        activations += 3 * 2 + 1
    if options.get("recompute") == "full":
        activations += 3 * 4
    loss = 3 * B * S * t
    partial_gradients = 0  # summed once for both microbatches
    if options.get("sequence_parallel", True):
        partial_gradients += 7 * 24  # norms
    if t > 2:
        partial_gradients += 3 * 2 * 12 * 24  # key/value weights that all ranks hold
    expected = round(8 * share * 2 * (activations * n + loss + partial_gradients))
    assert bytes_of_a_step(model, tp, microbatches=2) == pytest.approx(expected, abs=8)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_bytes_of_latent_attention(tp: Mesh, sequence_parallel: bool) -> None:
    """Latents and the rotary key are sent, once each, instead of the block's input."""
    options = {"sequence_parallel": sequence_parallel, "precision": "float64", "verify": False}
    model = meshtrain.parallelize(latent_attention(), tp, **options)
    d, latents = 24, 8 + 10 + 2
    t, n = tp.size("tp"), B * S
    share = (t - 1) / t
    partial_gradients = 3 * d + 8 * d + 8 + 12 * d + 10 if sequence_parallel else 0
    expected = round(
        8 * share * (n * (6 * d + 2 * latents) + 4 * n * d + 3 * n * t + 2 * partial_gradients)
    )
    assert bytes_of_a_step(model, tp, microbatches=1) == pytest.approx(expected, abs=8)
