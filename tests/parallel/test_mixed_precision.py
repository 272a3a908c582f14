"""16 bits without FSDP: one copy of the weights that stays, written once a step, and never one of old weights."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.config.locate import model_file
from meshtrain.errors import InputError
from meshtrain.evaluate import evaluation_mode
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.parallel import compile as parallel_compile
from meshtrain.parallel import mixed_precision as precision
from meshtrain.parallel import parallelize as parallelizing
from meshtrain.parallel.grad_sync import finish_reduce, set_is_last_backward, start_reduce
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.weight_grad import DeferredWeightGrad, WeightGradQueue, run_weight_grads
from meshtrain.parallel.parallelize import ParallelOptions, apply_data_parallel
from meshtrain.parallel.torch_private import allocate
from meshtrain.trainer import LossScale

compiler = torch.compile
llama = model_file("llama")
ALONE = Mesh(Layout({}), 0, "cpu", None, {})
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 11}
SMALLEST = llama.Config(**SIZES, num_hidden_layers=2, num_key_value_heads=2)
TOKENS = torch.randint(0, 11, (4, 2, 12), generator=torch.Generator().manual_seed(1))


def model(queue: WeightGradQueue | None = None, tied: bool = False, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    made = llama.Model(replace(SMALLEST, tie_word_embeddings=tied))
    if queue is not None:
        use_products(made, queue=queue)
    return apply_data_parallel(made, ALONE, ParallelOptions(precision="bfloat16", **options))


class Writes:
    """Bytes that were written as copies of weights, and where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Tensor] = []
        write = precision._write
        monkeypatch.setattr(precision, "_write", lambda copies, *of: self.made.extend(copies) or write(copies, *of))

    @property
    def size(self) -> int:
        return sum(values.nbytes for values in self.made)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_microbatches_under_way_share_one_copy(recompute: str, deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pipeline: four forwards before the first backward. The copy stays where it is."""
    queue = WeightGradQueue()
    net = model(queue if deferred else None, recompute=recompute, tied=True)
    size, writes, places = 2 * sum(p.numel() for p in net.parameters()), Writes(monkeypatch), set()
    for _ in range(3):  # steps
        writes.made.clear()
        set_is_last_backward(net, False)
        outputs = [net(tokens).float().square().sum() for tokens in TOKENS]
        dues: list[list[DeferredWeightGrad]] = []
        for output in outputs:
            with queue.record() as due:
                output.backward()
            dues.append(due)
        for due in dues:
            run_weight_grads(due)
        assert writes.size == size, "weights are cast once in a step"
        places |= {values.data_ptr() for values in writes.made}
        start_reduce(net)
        finish_reduce(net)
        by_data(net)  # of which nobody knows
    assert len(places) == len(list(net.parameters())), "of all steps"
    assert not any(place % 16 for place in places)


@pytest.mark.parametrize("merges", [False, True])
def test_the_copies_of_a_block_lie_in_its_order(merges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`merges`: as in compiled blocks on GPUs, where they are parts of one weight. Each layer sees its own."""
    monkeypatch.setattr(parallelizing, "MERGED_ON", ("cpu",) * merges)
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)
    net, weights = model(compile=True), {}
    for name, module in net.model.layers[1].named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, x, name=name: weights.update({name: module.weight}))
    net(TOKENS[0])
    for above, names in {"self_attn": "qkv", "mlp": ["gate", "up"]}.items():
        copies = [weights[f"{above}.{name}_proj"] for name in names]
        for copied, name in zip(copies, names, strict=True):
            assert copied.equal(net.get_parameter(f"model.layers.1.{above}.{name}_proj.weight").to(copied.dtype))
        for one, following in pairwise(copies):
            assert one.dtype == torch.bfloat16
            assert one.data_ptr() + one.nbytes == following.data_ptr()
            assert one.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()


def test_an_evaluation_writes_copies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a forward without gradients anywhere else leaves them alone: a backward may need them."""
    net, fresh, writes = model(), model(), Writes(monkeypatch)
    size = 2 * sum(p.numel() for p in net.parameters())
    output = net(TOKENS[0]).float().square().sum()
    kept = [p.detach().clone() for p in net.parameters()]
    by_data(net)
    with torch.no_grad():
        for _ in range(2):
            outside = net(TOKENS[1])
        assert writes.size == size
    for parameter, value in zip(net.parameters(), kept, strict=True):
        parameter.data.copy_(value)
    output.backward()
    fresh(TOKENS[0]).float().square().sum().backward()
    for ours, theirs in zip(net.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    by_data(net)
    writes.made.clear()
    with torch.no_grad(), evaluation_mode(net):
        inside = [net(TOKENS[1]) for _ in range(2)]
    assert writes.size == size
    assert torch.equal(inside[0], outside)
    assert torch.equal(inside[1], outside)


def test_forwards_before_their_backwards_in_a_loop_that_tells_nothing() -> None:
    """Such loops sum two losses. Weights that change in between are refused, as without copies."""
    both, each = model(), model()
    sum(net(tokens).float().square().sum() for net in (both,) for tokens in TOKENS[:2]).backward()
    for tokens in TOKENS[:2]:
        each(tokens).float().square().sum().backward()
    for ours, theirs in zip(both.parameters(), each.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    output = both(TOKENS[0]).float().square().sum()
    by_hand(both)
    both(TOKENS[1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.parametrize("last", [False, True])
def test_a_step_that_was_given_up_leaves_no_old_copies(last: bool) -> None:
    """Its forward failed; the weights are then others, as those of an older checkpoint."""
    net, fresh = model(), model()
    set_is_last_backward(net, last)
    net(TOKENS[0])
    with pytest.raises(IndexError):
        net(TOKENS[0] + 100)
    by_data(net)
    fresh.load_state_dict(net.state_dict())
    with torch.no_grad(), evaluation_mode(net):
        assert torch.equal(net(TOKENS[1]), fresh(TOKENS[1]))
    set_is_last_backward(net, last)
    assert torch.equal(net(TOKENS[2]), fresh(TOKENS[2]))


def test_memory_that_a_model_gets_later() -> None:
    with torch.device("meta"):
        net = model()
    fresh = model()
    allocate(net, torch.device("cpu"))
    net.load_state_dict(fresh.state_dict())
    assert torch.equal(net(TOKENS[0]), fresh(TOKENS[0]))


def test_a_compiler_makes_one_graph_of_all_layers() -> None:
    net, plain = model(compile=True), model()
    torch._dynamo.reset()
    frames = CompileCounterWithBackend("aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            parallel_compile.torch, "compile", lambda forward, **options: compiler(forward, backend=frames, **options)
        )
        net = model(compile=True)
    for tokens in TOKENS[:2]:
        for one in (net, plain):
            one(tokens).float().square().sum().backward()
    assert frames.frame_count == 1
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


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


class Types(TorchDispatchMode):
    """Operators with a matrix as the first argument, and the types of all matrices among their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        matrices = [x.dtype for x in args if isinstance(x, Tensor) and x.dim() == 2]
        self.calls[(func, *matrices, *(kwargs or {}).values())] += bool(matrices)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_in_16_bits_are_added_in_one_pass(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, those of all matrices; a tied one's, which come from two places, are cast first. The same bits."""
    nets = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(precision, "ADDED_ON", devices)
        net = model(tied=tied)
        nets.append(net)
        net(TOKENS[0]).float().square().sum().backward()
        output = net(TOKENS[1]).float().square().sum()
        with Types() as found:
            output.backward()
        aten, matrices = torch.ops.aten, sum(p.dim() == 2 for p in net.parameters())
        once = matrices - tied if devices else 0
        assert found.calls[aten.add_.Tensor, torch.float32, torch.bfloat16] == once
        assert found.calls[aten.add_.Tensor, torch.float32, torch.float32] == matrices - once
    for plain, added in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(plain.grad, added.grad)


def test_a_copy_of_the_model_is_refused() -> None:
    """It would compute with the original's weights."""
    for net in (model(), apply_data_parallel(llama.Model(SMALLEST), ALONE, ParallelOptions(compile=True))):
        with pytest.raises(InputError, match="copy the plain model"):
            copy.deepcopy(net)
    plain = apply_data_parallel(llama.Model(SMALLEST), ALONE, ParallelOptions(recompute="full"))
    twin = copy.deepcopy(plain)
    by_hand(twin)
    assert not torch.equal(twin(TOKENS[0]), plain(TOKENS[0]))


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
