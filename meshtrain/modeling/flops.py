"""The FLOPs that a model needs and the peak FLOP/s of the hardware: the two sides of MFU.

Model FLOPs utilization (Chowdhery et al. 2022, "PaLM", appendix B) divides the FLOPs that the model
needs by what the hardware could have done in that time. Recomputed activations and padding are not
work that the model needs, so they lower it; attention counts in full, even where a causal mask lets
kernels skip half of it, as is the convention. `causal_flops` counts only the visible pairs of
tokens instead.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from meshtrain.attention import AttentionContext, attention
from meshtrain.errors import plural
from meshtrain.parallel import sinks
from meshtrain.parallel.mixed_precision import compute_dtype
from meshtrain.parallel.predictions import predicting
from meshtrain.parallel.torch_private import tree_leaves, varlen_attention

# TFLOP/s without sparsity, from NVIDIA's data sheets: the half column is for bfloat16 and float16
# on tensor cores with float32 accumulation; float32 is without TF32, which meshtrain leaves off;
# float64 is on tensor cores where they have it. None: not in the data sheet, so it is measured. The
# first name that matches wins.
_TABLE: tuple[tuple[str, float, float | None, float | None], ...] = (
    # name                   half    float32  float64
    (r"GB200\b", 2500, 80, 40),
    (r"B200\b", 2250, 75, 37),
    (r"GH200\b", 989, 67, 67),
    (r"H200 NVL\b", 835, 60, 60),
    (r"H200\b", 989, 67, 67),
    (r"H100 NVL\b", 835, 60, 60),
    (r"H100 PCIe\b", 756, 51, 51),
    (r"H100\b", 989, 67, 67),
    (r"H20\b", 148, 44, None),
    (r"A100\b", 312, 19.5, 19.5),
    (r"A800\b", 312, 19.5, 19.5),
    (r"A40\b", 149.7, 37.4, None),
    (r"A30\b", 165, 10.3, 10.3),
    (r"A10G\b", 70, 35, None),
    (r"A10\b", 125, 31.2, None),
    (r"L40S\b", 362, 91.6, None),
    (r"L40\b", 181, 90.5, None),
    (r"L4\b", 121, 30.3, None),
    (r"V100-PCIE\b", 112, 14, 7),
    (r"V100-SXM\d", 125, 15.7, 7.8),
    (r"T4\b", 65, 8.1, None),
    (r"RTX 4090$", 165, 82.6, None),
    (r"RTX 3090$", 71, 35.6, None),
)
_BEFORE_BFLOAT16 = re.compile(r"\b(V100|T4)\b")  # no bfloat16 tensor cores: torch emulates it
_MEASURE_S = 0.15
Inputs = tuple[Tensor | None, ...]
# operations of the loss per logit: maximum, difference, exponential, sum, and the difference of its
# gradient
_LOSS = 5


class Causal(NamedTuple):
    """Causal attention of s tokens."""

    s: int
    window: int | None  # see `meshtrain.attention.attention`
    packed: bool  # whether rows hold several documents, with no attention across them


class CausalCalls(TorchFunctionMode):
    """Intercepts causal attention in a model's forward: calls of `attention()`, and torch's own
    with `is_causal`.

    Attributes:
        flops: call -> FLOPs per pair of tokens in forward and backward, over all heads and samples
            of the run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[Causal] = Counter()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        # Of torch's function; `attention()` has its context in the place of the mask.
        positional = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        options = dict(zip(positional, args, strict=False)) | (kwargs or {})
        if func is attention:
            context = options["attn_mask"]
            documents = context.documents if isinstance(context, AttentionContext) else context
            self._add(options, window=options["window"], packed=documents is not None)
        elif func is F.scaled_dot_product_attention and options.get("is_causal"):
            self._add(options, window=None, packed=False)
        return func(*args, **(kwargs or {}))

    def _add(self, call: dict[str, Any], *, window: int | None, packed: bool) -> None:
        """Scores and outputs take one matrix product each, and in backward one more per operand
        with a gradient."""
        q, k, v = call["query"], call["key"], call["value"]
        b, h, s, e = q.shape
        f = v.shape[-1]
        if s != k.shape[2]:  # not all tokens attend to all before them
            return
        is_scored = q.requires_grad or k.requires_grad
        products_of_scores = 1 + q.requires_grad + k.requires_grad
        products_of_values = 1 + is_scored + v.requires_grad
        if window is not None and window >= s:
            window = None
        per_pair = e * products_of_scores + f * products_of_values
        self.flops[Causal(s, window, packed)] += 2 * b * h * per_pair


def causal_flops(
    flops: int, attention_flops: Mapping[Causal, int], samples: int, documents: np.ndarray | None
) -> int:
    """FLOPs of `samples` samples, in which causal attention counts only the visible (query, key)
    pairs.

    Args:
        flops, attention_flops: of one sample, as `sample_flops` returns them.
        documents: the lengths of all document pieces in these samples; None: each sample is one
            document.
    """
    total = flops * samples
    for call, pair in attention_flops.items():
        lengths = documents if call.packed and documents is not None else np.full(samples, call.s)
        total -= pair * (samples * call.s**2 - visible_pairs(lengths, call.window))
    return total


def visible_pairs(lengths: np.ndarray, window: int | None) -> int:
    """The number of visible (query, key) pairs in documents of these lengths: n (n + 1) / 2 each
    without a window."""
    n = lengths.astype(np.int64)
    near = n if window is None else np.minimum(n, window)
    return int((near * (near + 1) // 2 + (n - near) * near).sum())


def sample_flops(
    model: nn.Module, inputs: Inputs, calls: CausalCalls | None = None
) -> tuple[int | None, str]:
    """FLOPs of the forward and backward of one sample, and a sentence about them.

    The model runs once on the meta device, where tensors have shapes and no values, so this takes
    no memory and works for a model of any size on any device; neither the model nor its gradients
    change. A multiplication and an addition are two operations; matrix products, convolutions and
    attention count, as in torch's FlopCounterMode.

    Returns None and the reason if the model cannot run without values (its forward reads a value).

    Args:
        model: a plain model, before it is parallelized or compiled.
        inputs: the arguments of `model(*inputs)`, with the batch as first dim. All samples are
            taken to cost the same.
        calls: receives the FLOPs of causal attention, for one sample.
    """
    state, on_meta = _on_meta(model, inputs)
    trained = [tensor for tensor in state.values() if tensor.requires_grad]
    with _counting() as counter, torch.enable_grad():
        try:
            with calls or nullcontext(), predicting(model, on_meta):
                output = functional_call(model, state, on_meta)
            ends = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
            ones = [torch.ones_like(x) for x in ends]
            torch.autograd.grad(ends, trained, ones, allow_unused=True)
        except Exception as error:  # any error of a model that reads values of a tensor
            return None, f"model FLOPs not known, so no MFU: {why_not(error)}"
    size = _batch_size(inputs)
    if calls is not None:
        calls.flops = Counter({call: flops // size for call, flops in calls.flops.items()})
    flops = counter.get_total_flops() // size
    return (
        flops,
        f"model {readable(flops)}FLOP per sample, forward and backward, counted on the meta device",
    )


def block_flops(
    model: nn.Module, blocks: Sequence[nn.Module], inputs: Inputs
) -> tuple[list[float], str]:
    """FLOPs of the forward of each block for one sample, and a sentence about them.

    Counted as in `sample_flops`, plus one per element that a block returns, so that an embedding
    costs a little. What the forward computes before a block counts with that block, and what it
    computes behind the last with the last, as in a pipeline; so does the loss.

    If the model cannot run without values, the estimate is two operations per weight of each block,
    and the sentence says so. That omits the products of attention, and the positions at which a
    convolution is applied.

    `blocks`: in execution order.
    """
    state, on_meta = _on_meta(model, inputs)
    costs = dict.fromkeys(blocks, 0.0)
    counted = 0  # until the end of the block before

    def elements(output: object) -> int:
        return sum(tensor.numel() for tensor in tree_leaves(output) if isinstance(tensor, Tensor))

    def leave(block: nn.Module, _: object, output: object) -> None:
        nonlocal counted
        total = counter.get_total_flops()
        costs[block] += total - counted + elements(output)
        counted = total

    with ExitStack() as stack:
        for block in costs:
            stack.callback(block.register_forward_hook(leave).remove)
        counter = stack.enter_context(_counting())
        stack.enter_context(torch.no_grad())
        stack.enter_context(predicting(model, on_meta))
        try:
            output = functional_call(model, state, on_meta)
        except Exception as error:  # any error of a model that reads values of a tensor
            by_weights = [_of_weights(block) for block in blocks]
            return by_weights, f"costs of blocks by their weights: {why_not(error)}"
    costs[blocks[-1]] += counter.get_total_flops() - counted + _LOSS * elements(output)
    size = _batch_size(inputs)
    of_sample = [costs[block] / size for block in blocks]
    return of_sample, "costs of blocks: FLOPs counted on the meta device"


@contextmanager
def _counting() -> Iterator[FlopCounterMode]:
    # The math backend, because the fused backward kernels recompute the scores, which would be
    # counted.
    with (
        FlopCounterMode(
            display=False, custom_mapping=_varlen_counts() | _sinks_counts()
        ) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield counter


def _varlen_counts() -> dict[Any, Callable[..., int]]:
    """Counters for torch's variable-length attention: also in full, as if all documents were as
    long as the longest.

    torch 2.11 does not count it, and later versions, without values, count the padding of the
    lengths.
    """

    def forward(q: Sequence[int], k: object, v: Sequence[int], *others: Any, **unused: Any) -> int:
        return 2 * q[0] * q[1] * others[3] * (q[2] + v[2])

    def backward(
        grad: object,
        q: Any,
        k: object,
        v: Any,
        out: object,
        lse: object,
        *others: Any,
        **unused: Any,
    ) -> int:
        return 2 * forward(q, k, v, *others)

    operators = varlen_attention()
    return {} if operators is None else dict(zip(operators, (forward, backward), strict=True))


def _sinks_counts() -> dict[Any, Callable[..., int]]:
    """Counters for attention with sinks, an operator of meshtrain's: in full, too."""

    def forward(q: Any, k: Any, v: Any, *others: Any, **unused: Any) -> int:
        b, h, s, e = q
        return 2 * b * h * s * k[2] * (e + v[3])

    def backward(grad: object, *others: Any, **unused: Any) -> int:
        return 2 * forward(*others)

    return {sinks.ATTENTION: forward, sinks.BACKWARD: backward}


def why_not(error: Exception) -> str:
    first, *others = (str(error).strip() or type(error).__name__).split("\n")
    reason = f"{first} {others[0]}" if others and first.endswith(":") else first
    return f"the model does not run on the meta device ({reason})"


def _batch_size(inputs: Inputs) -> int:
    return next(len(value) for value in inputs if value is not None)


def _of_weights(block: nn.Module) -> float:
    """Two operations per element of each weight matrix, and one per element of a looked-up
    embedding row."""
    tables = {
        module.weight: module.embedding_dim
        for module in block.modules()
        if isinstance(module, nn.Embedding)
    }
    operations = 1 + sum(tables.values())
    for weight in block.parameters():
        if weight.dim() > 1 and weight not in tables:
            operations += 2 * weight.numel()
    return float(operations)


def _on_meta(model: nn.Module, inputs: Inputs) -> tuple[dict[str, Tensor], Inputs]:
    """The model's parameters and buffers, and its inputs, as meta tensors."""
    state = {
        name: tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
    trained = [tensor.dtype for tensor in state.values() if tensor.requires_grad]
    compute = trained[0] if trained else torch.float32
    on_meta: list[Tensor | None] = []
    for value in inputs:
        if value is None:
            on_meta.append(None)
        else:
            on_meta.append(value.to("meta", compute if value.is_floating_point() else value.dtype))
    return state, tuple(on_meta)


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """The peak FLOP/s of one process on `device`, and a sentence about where that figure is from.

    NVIDIA's data-center GPUs are in a table by name. A CPU, and a GPU that is not in the table or
    is a MIG slice of one, is measured with matrix products in the run's precision for about 0.15 s,
    on this process's threads.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = table_flops(name, precision)
    if peak is not None:
        return peak, f"peak {readable(peak)}FLOP/s, table, {name} {precision}"
    peak, size = _measured_flops(device, compute_dtype(precision))
    measured_on = f"{name} (not in the table)" if name else f"this {device.type.upper()}"
    by = f"measured on {measured_on} by a {size}x{size} {precision} matmul"
    if device.type == "cpu":
        by += f", {plural(torch.get_num_threads(), 'thread')}"
    return peak, f"peak {readable(peak)}FLOP/s, {by}"


def table_flops(name: str, precision: str) -> float | None:
    """The peak FLOP/s of the GPU called `name` (as in torch.cuda.get_device_name); None if not in
    the table."""
    if "MIG" in name or (precision == "bfloat16" and _BEFORE_BFLOAT16.search(name)):
        return None
    for pattern, half, float32, float64 in _TABLE:
        if re.search(rf"\b{pattern}", name):
            peak = {"float32": float32, "float64": float64}.get(precision, half)
            return None if peak is None else peak * 1e12
    return None


def mfu(flops: float | None, seconds: float, peak: float, processes: int) -> float | None:
    """Model FLOPs utilization: the job's `flops` in `seconds` over what its `processes` could do;
    None if not known."""
    return None if flops is None else flops / seconds / (peak * processes)


def readable(number: float) -> str:
    """`number` with three digits and a unit's prefix: 6.1e10 is "61 G", to be followed by the
    unit."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            # From 1000 P on there is no larger prefix; below, three digits need no exponent.
            digits = number / size
            return f"{digits:.0f} {prefix}" if digits >= 99.95 else f"{digits:.3g} {prefix}"
    return f"{number:.3g} "


def _measured_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """FLOP/s of the fastest square matmul that fits in the time, and its size."""
    _matmul_seconds(64, device, dtype)  # loads the library and starts the threads
    deadline = time.perf_counter() + _MEASURE_S
    fastest, size = (0.0, 0), 128
    while True:
        seconds = _matmul_seconds(size, device, dtype)
        fastest = max(fastest, (2 * size**3 / seconds, size))
        remaining = deadline - time.perf_counter()
        if remaining < 1.5 * seconds:
            return fastest
        if 16 * seconds < remaining:  # twice the size takes 8 times as long; leave time for two
            size *= 2


def _matmul_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    # A generator separate from the run's. Random, because a GPU multiplies zeros and ones faster
    # than typical values.
    generator = torch.Generator(device).manual_seed(0)
    a = torch.rand(size, size, device=device, dtype=dtype, generator=generator)
    b = torch.rand(size, size, device=device, dtype=dtype, generator=generator)
    _settle(device)
    start = time.perf_counter()
    torch.mm(a, b)
    _settle(device)
    return time.perf_counter() - start


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
