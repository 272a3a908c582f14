"""16 bits without FSDP: one copy of the weights for all microbatches under way, and never one of old weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshtrain.config.locate import model_file
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.parallel import mixed_precision as precision
from meshtrain.parallel.grad_sync import reduce_gradients, set_is_last_backward
from meshtrain.parallel.parallelize import ParallelOptions, apply_data_parallel
from meshtrain.parallel.weight_grad import DeferredWeightGrad, WeightGradQueue, defer_weight_grads, run_weight_grads
from meshtrain.trainer import LossScale

llama = model_file("llama")
TOKENS = torch.randint(0, 11, (4, 2, 12), generator=torch.Generator().manual_seed(1))


def model(queue: WeightGradQueue | None = None, tied: bool = False, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 11}
    made = llama.Model(llama.Config(**sizes, num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=tied))
    if queue is not None:
        defer_weight_grads(made, queue)
    return apply_data_parallel(
        made, Mesh(Layout({}), 0, "cpu", None, {}), ParallelOptions(precision="bfloat16", **options)
    )


class Casts:
    """The memory that copies of weights have taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[StorageWeakRef, int]] = []
        self._copy = precision._copy
        monkeypatch.setattr(precision, "_copy", self._watch)

    def _watch(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        copy = self._copy(parameter, dtype)
        self.made.append((StorageWeakRef(copy.untyped_storage()), copy.nbytes))
        return copy

    def alive(self) -> int:
        return sum(size for reference, size in self.made if not reference.expired())


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_microbatches_under_way_share_one_copy(recompute: str, deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pipeline: four forwards before the first backward."""
    queue = WeightGradQueue()
    net = model(queue if deferred else None, recompute=recompute)
    copy, casts = 2 * sum(p.numel() for p in net.parameters()), Casts(monkeypatch)
    for _ in range(2):  # steps
        casts.made.clear()
        set_is_last_backward(net, False)
        outputs = [net(tokens).float().square().sum() for tokens in TOKENS]
        assert casts.alive() == copy
        dues: list[list[DeferredWeightGrad]] = []
        for output in outputs:
            with queue.record() as due:
                output.backward()
            dues.append(due)
        for due in dues:
            run_weight_grads(due)
        assert sum(size for _, size in casts.made) == copy, "weights are cast once in a step"
        del outputs, output, dues, due
        reduce_gradients(net)
        assert casts.alive() == 0, "and the copy goes with it"


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_gradients_of_a_shared_copy_are_summed_in_float32(recompute: str) -> None:
    """The same bits as those of forwards that each cast for themselves, in a loop that accumulates."""
    shared, each = model(tied=True, recompute=recompute), model(tied=True, recompute=recompute)
    for i, tokens in enumerate(TOKENS):
        set_is_last_backward(shared, i == 3)
        for net in (shared, each):
            net(tokens).float().square().sum().backward()
    for actual, expected in zip(shared.parameters(), each.parameters(), strict=True):
        assert actual.grad is not None
        assert actual.grad.dtype == torch.float32
        assert torch.equal(actual.grad, expected.grad)


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
    net.load_state_dict({name: value * 1.1 for name, value in net.state_dict().items()}, assign=assign)


def by_assigning(net: nn.Module) -> None:
    by_loading(net, assign=True)


@pytest.mark.parametrize("change", [by_adamw, by_hand, by_data, by_loading, by_assigning])
@pytest.mark.parametrize("told", [False, True])
def test_changed_weights_are_seen(change: Callable[[nn.Module], None], told: bool) -> None:
    """After a step that accumulated, in evaluation and in the next step; `told`: set_is_last_backward was called."""
    net = model()
    for _ in range(2):
        for i, tokens in enumerate(TOKENS[:2]):
            if told:
                set_is_last_backward(net, i == 1)
            net(tokens).float().square().sum().backward()
        change(net)
        fresh = model()
        fresh.load_state_dict(net.state_dict())
        with torch.no_grad():
            before = net(TOKENS[3])
        assert torch.equal(before, fresh(TOKENS[3]))
        if told:
            set_is_last_backward(net, False)
        assert torch.equal(net(TOKENS[2]), fresh(TOKENS[2]))


def test_weights_that_change_between_microbatches_are_seen() -> None:
    net, fresh = model(), model()
    set_is_last_backward(net, False)
    net(TOKENS[0])
    by_hand(net)
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(net(TOKENS[0]), fresh(TOKENS[0]))


def test_assigned_weights_stay() -> None:
    net = model()
    net.load_state_dict({name: torch.full_like(value, 0.5) for name, value in net.state_dict().items()}, assign=True)
    net(TOKENS[0]).float().sum().backward()
    for parameter in net.parameters():
        assert bool((parameter == 0.5).all())
        assert parameter.grad is not None


def test_the_loss_scale_has_a_floor() -> None:
    """Two hundred bad steps (on_nonfinite: skip) leave a scale that a good one can be taken with, and that grows."""
    scale = LossScale(torch.device("cpu"))
    for _ in range(200):
        scale.update(torch.tensor(True))
    assert (scale.value.item(), scale.good.item()) == (1.0, 0)
    for _ in range(LossScale.GROWTH):
        scale.update(torch.tensor(False))
    assert (scale.value.item(), scale.good.item()) == (2.0, 0)
