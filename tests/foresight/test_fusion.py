"""Operators that a compiler fuses read their inputs once and write what others read."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.config import Config
from meshtrain.foresight.blocks import works_of
from meshtrain.foresight.fusion import Dataflow, Traffic
from meshtrain.foresight.work import Work
from tests.launching import ROOT

N, D = 64, 32
SIZE = 4 * N * D  # bytes of x


class Recorded(TorchDispatchMode):
    """Feeds a dataflow with the operators that run: products are called, all others are fused."""

    def __init__(self, dataflow: Dataflow) -> None:
        super().__init__()
        self.dataflow = dataflow

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not any(returned.alias_info for returned in func._schema.returns) or "_." in str(func):
            self.dataflow.add(func, args, out, "mm" not in func.name())
        return out


def traffic_of(compute: Callable[..., object], *sizes: tuple[int, ...]) -> Traffic:
    dataflow = Dataflow()
    tensors = [torch.empty(*size, device="meta") for size in sizes]
    with Recorded(dataflow):
        _kept = compute(*tensors)
    return dataflow.traffic()


def cases() -> dict[str, tuple[Callable[..., object], int, int]]:
    """What is computed of x, y (n, d) and W (d, d) -> bytes that fused kernels move, and kernels,
    products among them."""
    row = 4 * N
    return {
        "a chain is one kernel": (lambda x, y, w: F.silu(x) * y + 1, 3 * SIZE, 1),
        "a reduction belongs to it": (lambda x, y, w: x / x.norm(dim=1, keepdim=True), 2 * SIZE, 1),
        "a product divides": (lambda x, y, w: F.silu(F.silu(x) @ w) + y, 5 * SIZE, 3),
        "what is read later is written": (
            lambda x, y, w: (x + y) + (x + y + 1) @ w,
            # reads x and y; writes their sum, and the sum plus one; reads the sum and the product
            (2 + 2) * SIZE + 3 * SIZE,
            3,
        ),
        "a common input is read once": (lambda x, y, w: (x + 1, x * y), 4 * SIZE, 1),
        "nothing in common": (lambda x, y, w: (x + 1, y + 1), 4 * SIZE, 2),
        "the same twice is once": (lambda x, y, w: ((x + 1) @ w, (x + 1) @ w), 2 * SIZE, 3),
        "in place": (lambda x, y, w: x.add_(y).mul_(2), 3 * SIZE, 1),
        "of one row each": (lambda x, y, w: x.abs().amax(1), SIZE + row, 1),
        "repeated elements are read once": (
            lambda x, y, w: x[:1].expand(N, D) + y,
            2 * SIZE + 4 * D,
            1,
        ),
    }


@pytest.mark.parametrize("name", cases())
def test_bytes_and_kernels(name: str) -> None:
    compute, moved, kernels = cases()[name]
    assert traffic_of(compute, (N, D), (N, D), (D, D)) == (moved, kernels)


def test_new_memory_is_not_taken_for_old() -> None:
    """A tensor may come where a freed one was, which says nothing about what they have in common."""

    def loop(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(20):
            y = torch.empty(N, D, device="meta")  # from elsewhere, as far as this is concerned
            last = y + 1
            del y
        return last

    dataflow = Dataflow()
    x = torch.empty(N, D, device="meta")
    for _ in range(20):
        other = torch.empty(N, D, device="meta")
        with Recorded(dataflow):
            x + other
        del other
    # each reads x, and another tensor that nobody has written
    assert dataflow.traffic() == ((1 + 20 + 20) * SIZE, 1)


def test_a_compiled_layer_moves_what_is_counted_by_hand() -> None:
    """Of a Llama's layer in bfloat16, forward and backward, per token: 50 d + 8 kv + 18 f bytes (d
    the width, kv that of keys, f that of the feed-forward part), by the kernels that inductor makes
    of it. Uncompiled it is 3.2 times (38 d + 18 kv + 10 f)."""
    d, kv, f, s = 256, 128, 1024, 512
    overrides = [
        f"model.hidden_size={d}",
        f"model.intermediate_size={f}",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "model.num_hidden_layers=2",
        f"data.seq_len={s}",
        "batch.micro_size=1",
        "train.precision=bfloat16",
    ]
    config = Config.load(ROOT / "configs/quickstart.yaml", overrides, world_size=1)
    layer = layer_of(config)
    passes = layer.passes
    fused = sum(one.fused_moved or 0 for one in passes) / s
    assert fused == pytest.approx(50 * d + 8 * kv + 18 * f, rel=0.1)
    moved = sum(one.moved for one in passes) / s
    assert moved == pytest.approx(3.2 * (38 * d + 18 * kv + 10 * f), rel=0.3)
    operators = sum(one.operators for one in passes)
    assert sum(one.fused_operators or 0 for one in passes) < 0.5 * operators


def layer_of(config: Config) -> Work:
    return next(work for work in works_of(config, config.resolved) if "layers" in work.name)


def test_experts_that_are_recomputed_are_not_compiled() -> None:
    for recompute, compiled in (("none", True), ("full", False)):
        overrides = [f"parallel.recompute={recompute}", "model.num_hidden_layers=2"]
        config = Config.load(ROOT / "configs/moe.yaml", overrides, world_size=1)
        assert (layer_of(config).forward.fused_moved is not None) == compiled
