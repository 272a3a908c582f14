"""16 bits without FSDP: one copy of the weights that stays, written once a step, and never one of
old weights."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.errors import InputError
from meshtrain.evaluate import evaluation_mode
from meshtrain.parallel import mixed_precision as precision
from meshtrain.parallel import parallelize as parallelizing
from meshtrain.parallel.grad_sync import finish_reduce, set_is_last_backward, start_reduce
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, run_weight_grads
from meshtrain.parallel.parallelize import ParallelOptions, apply_data_parallel
from meshtrain.parallel.torch_private import allocate
from meshtrain.trainer import LossScale
from tests.comparing import ALONE, small_llama
from tests.parallel.operators import Operators

TOKENS = torch.randint(0, 11, (4, 2, 12), generator=torch.Generator().manual_seed(1))


def model(queue: WeightGradQueue | None = None, tied: bool = False, **options: Any) -> nn.Module:
    plain = small_llama(tie_word_embeddings=tied)
    if queue is not None:
        use_products(plain, queue=queue)
    return apply_data_parallel(plain, ALONE, ParallelOptions(precision="bfloat16", **options))


def twin(net: nn.Module) -> nn.Module:
    """A new model with the same weights."""
    fresh = model()
    fresh.load_state_dict(net.state_dict())
    return fresh


def loss(net: nn.Module, tokens: Tensor) -> Tensor:
    return net(tokens).float().square().sum()


def assert_same_gradients(net: nn.Module, known: nn.Module) -> None:
    for parameter, expected in zip(net.parameters(), known.parameters(), strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, expected.grad)


class Writes:
    """Copies of weights that were written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[Tensor] = []
        write = precision.copy_all
        monkeypatch.setattr(
            precision,
            "copy_all",
            lambda copies, *of: self.copies.extend(copies) or write(copies, *of),
        )

    def take_bytes(self) -> int:
        size = sum(copied.nbytes for copied in self.copies)
        self.copies.clear()
        return size


def by_adamw(net: nn.Module) -> None:
    torch.optim.AdamW(net.parameters(), lr=0.1).step()


def by_hand(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.1)


def by_data(net: nn.Module) -> None:
    """Which torch counts as no new version."""
    for parameter in net.parameters():
        parameter.data.mul_(1.1)


def by_loading(net: nn.Module, assign: bool = False) -> None:
    net.load_state_dict(
        {name: value * 1.1 for name, value in net.state_dict().items()}, assign=assign
    )


def by_assigning(net: nn.Module) -> None:
    by_loading(net, assign=True)


# When copies are written --------------------------------------------------------------------------


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_microbatches_under_way_share_one_copy(
    recompute: str, deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pipeline: four forwards before the first backward. The copy stays where it is."""
    queue = WeightGradQueue()
    net = model(queue if deferred else None, recompute=recompute, tied=True)
    size, writes, places = 2 * sum(p.numel() for p in net.parameters()), Writes(monkeypatch), set()
    for _ in range(3):  # steps
        set_is_last_backward(net, False)
        losses = [loss(net, tokens) for tokens in TOKENS]
        pending = []
        for each in losses:
            with queue.record() as grads:
                each.backward()
            pending.append(grads)
        for grads in pending:
            run_weight_grads(grads)
        places |= {copied.data_ptr() for copied in writes.copies}
        assert writes.take_bytes() == size, "weights are cast once in a step"
        start_reduce(net)
        finish_reduce(net)
        by_data(net)  # of which nobody knows
    assert len(places) == len(list(net.parameters())), "of all steps"
    assert not any(place % 16 for place in places)


def test_an_evaluation_writes_copies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a forward without gradients anywhere else leaves them alone: a backward may need them."""
    net, fresh, writes = model(), model(), Writes(monkeypatch)
    size = 2 * sum(p.numel() for p in net.parameters())
    output = loss(net, TOKENS[0])
    before = copy.deepcopy(net.state_dict())
    by_data(net)
    with torch.no_grad():
        outside = net(TOKENS[1])
    assert writes.take_bytes() == size, "of the first forward"
    for name, parameter in net.named_parameters():
        parameter.data.copy_(before[name])
    output.backward()
    loss(fresh, TOKENS[0]).backward()
    assert_same_gradients(net, fresh)
    by_data(net)
    writes.take_bytes()
    with torch.no_grad(), evaluation_mode(net):
        for _ in range(2):
            assert torch.equal(net(TOKENS[1]), outside)
    assert writes.take_bytes() == size


@pytest.mark.parametrize("merges", [False, True])
def test_the_copies_of_a_block_lie_in_its_order(
    merges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`merges`: as in compiled blocks on GPUs, where they are parts of one weight. Each layer sees
    its own."""
    monkeypatch.setattr(parallelizing, "MERGED_ON", ("cpu",) * merges)
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)
    net, weights = model(compile=True), {}
    for name, module in net.model.layers[1].named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda module, x, name=name: weights.update({name: module.weight})
            )
    net(TOKENS[0])
    for above, names in {"self_attn": "qkv", "mlp": ["gate", "up"]}.items():
        copies = [weights[f"{above}.{name}_proj"] for name in names]
        for copied, name in zip(copies, names, strict=True):
            assert copied.dtype == torch.bfloat16
            assert copied.equal(
                net.get_parameter(f"model.layers.1.{above}.{name}_proj.weight").bfloat16()
            )
        for before, after in pairwise(copies):
            assert before.data_ptr() + before.nbytes == after.data_ptr()
            assert before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()


# Weights that change ------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [by_adamw, by_hand, by_data, by_loading, by_assigning])
@pytest.mark.parametrize("told", [False, True])
def test_changed_weights_are_seen(change: Callable[[nn.Module], None], told: bool) -> None:
    """After a step that accumulated, in evaluation and in the next step; `told`:
    set_is_last_backward was called."""
    net = model()
    for _ in range(2):
        for i, tokens in enumerate(TOKENS[:2]):
            if told:
                set_is_last_backward(net, i == 1)
            loss(net, tokens).backward()
        change(net)
        fresh = twin(net)
        with torch.no_grad():
            assert torch.equal(net(TOKENS[3]), fresh(TOKENS[3]))
        if told:
            set_is_last_backward(net, False)
        assert torch.equal(net(TOKENS[2]), fresh(TOKENS[2]))


def test_assigned_weights_stay() -> None:
    net = model()
    by_assigning(net)
    assigned = [parameter.detach().clone() for parameter in net.parameters()]
    loss(net, TOKENS[0]).backward()
    for parameter, value in zip(net.parameters(), assigned, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is not None


def test_weights_that_change_between_microbatches_are_seen() -> None:
    net = model()
    set_is_last_backward(net, False)
    net(TOKENS[0])
    by_hand(net)
    assert torch.equal(net(TOKENS[0]), twin(net)(TOKENS[0]))


def test_forwards_before_their_backwards_in_a_loop_that_tells_nothing() -> None:
    """Such loops sum two losses. Weights that change in between are refused, as without copies."""
    both, each = model(), model()
    (loss(both, TOKENS[0]) + loss(both, TOKENS[1])).backward()
    for tokens in TOKENS[:2]:
        loss(each, tokens).backward()
    for parameter, expected in zip(both.parameters(), each.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    output = loss(both, TOKENS[0])
    by_hand(both)
    both(TOKENS[1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.parametrize("last", [False, True])
def test_a_step_that_was_given_up_leaves_no_old_copies(last: bool) -> None:
    """Its forward failed; the weights are then others, as those of an older checkpoint."""
    net = model()
    set_is_last_backward(net, last)
    net(TOKENS[0])
    with pytest.raises(IndexError):
        net(TOKENS[0] + 100)
    by_data(net)
    fresh = twin(net)
    with torch.no_grad(), evaluation_mode(net):
        assert torch.equal(net(TOKENS[1]), fresh(TOKENS[1]))
    set_is_last_backward(net, last)
    assert torch.equal(net(TOKENS[2]), fresh(TOKENS[2]))


def test_memory_that_a_model_gets_later() -> None:
    with torch.device("meta"):
        net = model()
    allocate(net, torch.device("cpu"))
    fresh = model()
    net.load_state_dict(fresh.state_dict())
    assert torch.equal(net(TOKENS[0]), fresh(TOKENS[0]))


def test_a_copy_of_the_model_is_refused() -> None:
    """It would compute with the original's weights."""
    for net in (model(), apply_data_parallel(small_llama(), ALONE, ParallelOptions(compile=True))):
        with pytest.raises(InputError, match="copy the plain model"):
            copy.deepcopy(net)
    plain = apply_data_parallel(small_llama(), ALONE, ParallelOptions(recompute="full"))
    copied = copy.deepcopy(plain)
    by_hand(copied)
    assert not torch.equal(copied(TOKENS[0]), plain(TOKENS[0]))


# Gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_gradients_of_a_shared_copy_are_summed_in_float32(recompute: str) -> None:
    """The same bits as those of forwards that each cast for themselves, in a loop that
    accumulates."""
    shared, each = model(tied=True, recompute=recompute), model(tied=True, recompute=recompute)
    for i, tokens in enumerate(TOKENS):
        set_is_last_backward(shared, i == 3)
        for net in (shared, each):
            loss(net, tokens).backward()
    assert_same_gradients(shared, each)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_in_16_bits_are_added_in_one_pass(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, those of all matrices; a tied one's, which come from two places, are cast first.
    The same bits."""
    nets = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(precision, "ADDED_ON", devices)
        net = model(tied=tied)
        nets.append(net)
        loss(net, TOKENS[0]).backward()
        output = loss(net, TOKENS[1])
        with Operators() as operators:
            output.backward()
        add, matrices = torch.ops.aten.add_.Tensor, sum(p.dim() == 2 for p in net.parameters())
        once = matrices - tied if devices else 0
        assert operators.calls[add, torch.float32, torch.bfloat16] == once
        assert operators.calls[add, torch.float32, torch.float32] == matrices - once
    assert_same_gradients(*nets)


# Numbers ------------------------------------------------------------------------------------------


def test_the_loss_scale_has_a_floor() -> None:
    """Two hundred bad steps (on_nonfinite: skip) leave a scale that a good one can be taken with,
    and that grows."""
    scale = LossScale(torch.device("cpu"))
    for _ in range(200):
        scale.update(torch.tensor(True))
    assert (scale.value.item(), scale.good.item()) == (1.0, 0)
    for _ in range(LossScale.GROWTH):
        scale.update(torch.tensor(False))
    assert (scale.value.item(), scale.good.item()) == (2.0, 0)


@pytest.mark.parametrize("deterministic", [True, False])
def test_convolutions_are_picked_by_a_race_unless_bits_must_repeat(deterministic: bool) -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled()
    try:
        precision.set_numerics(deterministic)
        assert cudnn.benchmark is not deterministic
    finally:
        cudnn.benchmark, cudnn.allow_tf32, enabled = before
        torch.use_deterministic_algorithms(enabled)
