"""Whole models split over `tp` against plain ones: losses, gradients, texts, compiled blocks, fused
kernels, runs."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import _symmetric_memory

import meshtrain
from meshtrain.config import Config
from meshtrain.errors import AgreedError, InputError
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel import mixed_precision, tensor_parallel
from meshtrain.parallel import parallelize as parallelizing
from meshtrain.parallel.collectives import axis_group
from meshtrain.parallel.grad_sync import finish_reduce, set_is_last_backward, start_reduce
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, run_weight_grads
from meshtrain.parallel.mixed_precision import ComputeCopies
from meshtrain.parallel.sharding import local_part
from meshtrain.parallel.torch_private import to_local
from tests.comparing import (
    S,
    compare,
    compare_step,
    gradients,
    llama,
    same,
    same_gradients,
    small_llama,
    token_losses,
    tokens,
    train,
)
from tests.parity.experiments import QUICKSTART, SMALL

DOCUMENT = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"
pytestmark = pytest.mark.ranks(2, 4)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_reductions_over_data_ranks(job: Job, axis: str) -> None:
    mesh = build_mesh(Layout({axis: 2, "tp": 2}))
    model, plain = compare(small_llama, mesh, steps=2, microbatches=2)
    if axis == "dp_replicate":
        compare_step(model, plain, mesh, microbatches=2, as_in_a_pipeline=True)


@pytest.mark.parametrize("vocabulary", [11, 5])  # of 5 words, the last of 4 ranks has none
def test_whole_logits_and_gradients_through_them(tp: Mesh, vocabulary: int) -> None:
    def squares(model: nn.Module, data_rank: int, microbatch: int) -> Tensor:
        logits = model(tokens(vocabulary=vocabulary))
        whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        return whole.square()

    compare(partial(small_llama, vocab_size=vocabulary), tp, squares)


def test_cross_entropy_of_torch_mistakes_no_split_logits_for_whole_ones(tp: Mesh) -> None:
    logits = meshtrain.parallelize(small_llama(), tp)(tokens())
    with pytest.raises(RuntimeError):
        F.cross_entropy(logits.flatten(0, 1), tokens().flatten())
    with pytest.raises(RuntimeError):
        F.cross_entropy(logits.transpose(1, 2), tokens())


def test_layers_of_the_documents_snippet_have_its_shapes(tp: Mesh) -> None:
    (snippet,) = re.findall(
        r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
    )
    names = {"nn": nn, "mesh": tp, **vars(tensor_parallel)}
    exec(snippet, names)
    t = tp.size("tp")
    inside = names["up"](torch.randn(2, S // t, 256))
    assert inside.shape == (2, S, 1024 // t)
    assert names["down"](inside).shape == (2, S // t, 256)


@pytest.mark.ranks(2)
def test_symmetric_memory_is_refused_on_cpus(tp: Mesh) -> None:
    with pytest.raises(InputError, match="symmetric_memory"):
        meshtrain.parallelize(small_llama(), tp, symmetric_memory=True)


OF_21_TOKENS = """
import torch

def dataset(config, split):
    tokens = torch.arange(22) % 11
    return [(tokens[:-1], tokens[1:])] * 40
"""


@pytest.mark.ranks(2)
def test_samples_of_ones_own_that_tp_does_not_divide_are_refused_before_the_start(
    job: Job, shared_path: Path
) -> None:
    file = shared_path / "own.py"
    if job.rank == 0:
        file.write_text(OF_21_TOKENS)
    dist.barrier()
    keys = (
        "layout={tp: 2}",
        f"data.source={file}",
        "data.seq_len=21",
        "train.steps=1",
        "batch.micro_size=7",
    )
    with pytest.raises(
        AgreedError,
        match=r"first sample, 21, does not divide over layout\.tp 2, .*: use 20 or 22, or",
    ):
        train(job, shared_path / "run", *keys)
    assert len(train(job, shared_path / "whole", *keys, "parallel.sequence_parallel=false")) == 1


# 16 bits ------------------------------------------------------------------------------------------


def test_microbatches_share_cast_copies_of_parts(tp: Mesh) -> None:
    """Each step casts those that the previous one has changed (which a DTensor's version does not
    show): the same bits as if each forward cast its own."""
    keys = Config.load(QUICKSTART, list(SMALL)).optimizer
    losses: dict[bool, list[list[float]]] = {True: [], False: []}
    for shared, losses_of_model in losses.items():
        model: Any = meshtrain.parallelize(small_llama(), tp, precision="bfloat16")
        if not shared:
            model.gradient_syncs = [
                sync for sync in model.gradient_syncs if not isinstance(sync, ComputeCopies)
            ]
        optimizer = Optimizer(model, keys, tp, 9)
        for step in (1, 2, 3):
            optimizer.zero_grad()
            for last in (False, False, True):
                set_is_last_backward(model, last)
                of_samples = token_losses(model, 0, 0)
                of_samples.sum().backward()
                losses_of_model.append(of_samples.tolist())
            optimizer.squared_norm()
            optimizer.update(step, None, torch.tensor(False))
    assert losses[True] == losses[False]
    assert len({first for first, _ in losses[True]}) == 3, "each step changes the losses"


def test_backward_is_refused_whose_weights_have_changed_and_are_gone(tp: Mesh) -> None:
    model = meshtrain.parallelize(small_llama(), tp, precision="bfloat16")
    early = token_losses(model, 0, 0).sum()
    with torch.no_grad():
        for parameter in model.parameters():
            to_local(parameter).mul_(1.1)
    token_losses(model, 0, 0)
    with pytest.raises(RuntimeError):
        early.backward()


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_runs_in_each_precision(
    job: Job, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FSDP over cp and tp. Rotary angles must reach every block in float32."""
    types = set()
    rotate = llama.rotate

    def record(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        types.add((x.dtype, cos.dtype, sin.dtype))
        return rotate(x, cos, sin)

    monkeypatch.setattr(llama, "rotate", record)
    keys = ("layout={cp: 2, tp: 2}", "train.steps=6")
    precisions = ("float32", "bfloat16", "float16")
    rows = {
        name: train(job, shared_path / name, *keys, f"train.precision={name}")
        for name in precisions
    }
    assert types == {
        (x, torch.float32, torch.float32) for x in (torch.float32, torch.bfloat16, torch.float16)
    }
    # One rounding of a type of 8 or 11 bits is the most by which the mean of many rounded losses
    # may be off.
    for precision, rounding in (("bfloat16", 2**-8), ("float16", 2**-11)):
        assert len(rows[precision]) == 6
        for row, expected in zip(rows[precision], rows["float32"], strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=rounding)
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=4 * rounding)
            assert row["loss"] != expected["loss"], f"{precision} does compute in 16 bits"


# Compiled -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "full", "regather": True},
    ],
)
def test_compiled_blocks(
    tp: Mesh, options: dict[str, Any], fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute and send the same as eager ones, with one graph for all layers and one for
    evaluation. Kernels, which take long to build, are generated for one option on one rank only."""
    generates = options.get("recompute") == "selective" and tp.rank == 0
    backend = "inductor" if generates else "aot_eager_decomp_partition"
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    compare(small_llama, tp, **options)
    expected_bytes = tp.comm_bytes.by_axis()["tp"]
    assert counters["stats"]["unique_graphs"] == 0
    # the compiler sees that the last reduction is not needed again
    if options.get("recompute") == "full":
        expected_bytes -= 2 * 8 * 2 * S * 24 // 2
    model, plain = compare(small_llama, tp, compile=True, **options)
    assert tp.comm_bytes.by_axis()["tp"] == expected_bytes
    assert counters["stats"]["unique_graphs"] == 1
    with torch.no_grad():
        same(token_losses(model, 0, 0), token_losses(plain, 0, 0))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"recompute": "selective", "regather": True}])
def test_merged_weights(
    tp: Mesh,
    options: dict[str, Any],
    fresh_compiler: None,
    products: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiled block in 16 bits, as on GPUs: a rank's rows of q, k and v form one weight, as do
    those of gate and up. Here computed in float64 and accumulated in float32."""
    monkeypatch.setattr(parallelizing, "MERGED_ON", ("cpu",))
    for module in (parallelizing, mixed_precision):
        monkeypatch.setattr(module, "master_dtype", lambda precision: torch.float32)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = meshtrain.parallelize(
        small_llama(), tp, precision="float64", compile=True, verify=False, **options
    )
    plain = small_llama().double()
    losses, expected = (token_losses(one, 0, 0) for one in (model, plain))
    losses.sum().backward()
    expected.sum().backward()
    same(losses, expected)
    assert len(products) == 2 * 4 + 1
    for (name, parameter), grad in zip(
        model.named_parameters(), gradients(plain).values(), strict=True
    ):
        part = grad[local_part(parameter)[1]]
        scale = part.abs().max()
        same(to_local(parameter.grad) / scale, part / scale, name, tolerance=1e-6)


# Fused kernels of symmetric memory ----------------------------------------------------------------


@pytest.fixture
def kernel_calls() -> Iterator[Counter[str]]:
    """How often the fused kernels run, through torch's reference implementations."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        reference = getattr(_symmetric_memory, f"_fused_{name}_fallback")

        def run(*args: Any, **named: Any) -> Any:
            calls[name] += 1
            return reference(*args, **named)

        return run

    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        for name in ("all_gather_matmul", "matmul_reduce_scatter"):
            library.impl(f"fused_{name}", counted(name), "CPU")
        yield calls


@pytest.mark.parametrize("regather", [False, True])
# Two layers with two gathers and two scatters each, and the head; input gradients of row-parallel
# layers gather too. Those of column-parallel layers are reduced during the weight gradients, or
# fused if weights are frozen.
@pytest.mark.parametrize(("frozen", "scatters"), [((), 4), (("q_proj", "k_proj", "v_proj"), 6)])
def test_fused_kernels_compute_and_send_the_same(
    tp: Mesh,
    frozen: tuple[str, ...],
    scatters: int,
    regather: bool,
    kernel_calls: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> nn.Module:
        model = small_llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(layer in name for layer in frozen))
        return model

    bytes_sent = []
    for fused in (False, True):
        monkeypatch.setattr(axis_group(tp, "tp"), "fused", fused)
        assert not kernel_calls
        compare(make, tp, regather=regather, verify=False)
        bytes_sent.append(tp.comm_bytes.by_kind("tp"))
    assert kernel_calls == {"all_gather_matmul": 9, "matmul_reduce_scatter": scatters}
    assert bytes_sent[0] == bytes_sent[1]


def test_fused_kernels_with_deferred_weight_gradients(
    tp: Mesh, kernel_calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a schedule that splits backwards."""
    queue = WeightGradQueue()
    model = meshtrain.parallelize(small_llama(), tp, precision="float64")
    use_products(model, queue=queue)
    monkeypatch.setattr(axis_group(tp, "tp"), "fused", True)
    set_is_last_backward(model, False)
    loss = token_losses(model, 0, 0).sum()
    with queue.record() as deferred:
        loss.backward()
    run_weight_grads(deferred)
    start_reduce(model)
    finish_reduce(model)
    assert kernel_calls["matmul_reduce_scatter"] == 4 + 2 * 2 + 1
    plain = small_llama().double()
    token_losses(plain, 0, 0).sum().backward()
    same_gradients(model, gradients(plain))
