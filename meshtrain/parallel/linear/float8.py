"""Float8 products of linear layers: the forward and the input gradient multiply 8-bit numbers.

Both operands of a product are rounded to e4m3 (Micikevicius et al.,
https://arxiv.org/abs/2209.05433), after division by one scale per row along the summed dim: per
token, per output of the weight in the forward, and per input of the weight in the backward. Such a
scale factors out of the sum, and no token's result depends on the other tokens of its microbatch:

    y[n, m] = s_a[n] · s_b[m] · sum over k of e4m3(a[n, k] / s_a[n]) · e4m3(b[m, k] / s_b[m])

If ranks of `tp` have parts of the sum, a row's scale is that of its largest value over all of them.

Scales are powers of two: multiplying by them is exact (except for underflow), so forward and
backward see the same weight. Gradients are e4m3 too: with a scale per token they need the bits of
the fraction more than the range of e5m2. Weight gradients, which are sums over tokens, stay in the
dtype of the layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.parallel.float8_layers import float8_layers, name_pattern
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.matmul import PRODUCTS, Maximum, Products
from meshtrain.parallel.torch_private import multiply_float8, to_local

E4M3 = torch.float8_e4m3fn  # its largest value is 448 = 1.75 * 2**8


def power_of_two_scale(largest: Tensor) -> Tensor:
    """The least power of two, in float32, that scales `largest` down to at most 448; not finite if
    `largest` is not."""
    bits = largest.float().clamp(min=2.0**-100).view(torch.int32)
    # A fraction above 1.75 (its bits above 0x600000) carries into the exponent.
    return (bits + 0x1FFFFF).bitwise_and(0x7F800000).view(torch.float32) * 2.0**-8


def largest_of_rows(x: Tensor) -> Tensor:
    """The largest absolute value of each row (n, k) -> (n, 1)."""
    return x.abs().amax(1, keepdim=True)


def quantize(x: Tensor, scales: Tensor) -> Tensor:
    """Rows (n, k) in e4m3, contiguous; scales (n, 1)."""
    return (x * scales.reciprocal()).to(E4M3).contiguous()


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `quantize`'s values represent, exact in any dtype with sufficient range."""
    return values.to(dtype) * scales.to(dtype)


@dataclass(frozen=True)
class ScaledProducts:
    """Products of 8-bit rows.

    Attributes:
        emulated: whether the same rounded numbers are multiplied in the dtype of the operands.
        compiled: whether rounding is compiled even where a layer is not: inside the operators of
            `tp`.
    """

    emulated: bool
    compiled: bool = False

    def sum(self, pairs: Sequence[tuple[Tensor, Tensor]], maximum: Maximum | None = None) -> Tensor:
        """Rows (n, k_i) times (m, k_i), summed over k and pairs -> (n, m), same dtype. `maximum`:
        if k is split."""
        largest_of, round_to_8_bits = largest_of_rows, quantize
        if self.compiled and not torch.compiler.is_compiling():
            largest_of, round_to_8_bits = _compiled(largest_of_rows), _compiled(quantize)
        operands = [operand for pair in pairs for operand in pair]
        largest = [largest_of(operand) for operand in operands]
        if maximum is not None:
            # One message for all operands.
            rows = [len(of_operand) for of_operand in largest]
            largest = list(maximum(torch.cat(largest)).split(rows))
        scales = [power_of_two_scale(of_operand) for of_operand in largest]
        rounded = [round_to_8_bits(x, scale) for x, scale in zip(operands, scales, strict=True)]

        dtype = operands[0].dtype
        y: Tensor | None = None
        for i in range(0, len(operands), 2):
            product = self._multiply(
                rounded[i], scales[i], rounded[i + 1], scales[i + 1], dtype=dtype
            )
            y = product if y is None else y.add_(product)
        assert y is not None  # there is a pair
        return y

    def _multiply(
        self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, *, dtype: torch.dtype
    ) -> Tensor:
        if self.emulated:
            return dequantize(a, a_scales, dtype) @ dequantize(b, b_scales, dtype).t()
        return multiply_float8(a, b, a_scales, b_scales, dtype)

    def record(self, name: str) -> Products:
        """The record of products that linear layers use."""

        def forward(x: Tensor, weight: Tensor, maximum: Maximum | None = None) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            return self.sum([(rows, weight)], maximum).view(*x.shape[:-1], len(weight))

        def input_grad_sum(
            grads: Sequence[Tensor], weights: Sequence[Tensor], maximum: Maximum | None = None
        ) -> Tensor:
            pairs = [(grad, weight.t()) for grad, weight in zip(grads, weights, strict=True)]
            return self.sum(pairs, maximum)

        return Products(name, forward, input_grad_sum)


@cache
def _compiled(function: Callable) -> Callable:
    # a model has more shapes of layers than the recompile limit
    return torch.compile(function, dynamic=True)


EMULATED = ScaledProducts(emulated=True).record("float8, emulated")
KERNELS = ScaledProducts(emulated=False).record("float8")
COMPILED = ScaledProducts(emulated=False, compiled=True).record("float8, compiled")
PRODUCTS |= {record.name: record for record in (EMULATED, KERNELS, COMPILED)}


def has_kernel(capability: tuple[int, int] | None) -> bool:
    """Whether GPUs of a compute capability have row scales in `torch._scaled_mm`: from Ada and
    Hopper on. None: no NVIDIA GPU."""
    return capability is not None and capability >= (8, 9)


def kernel_of(dtype: torch.dtype, device_type: str) -> bool:
    """Whether layers that compute in `dtype` use the 8-bit kernel on this machine, or emulate
    it."""
    is_nvidia = device_type == "cuda" and torch.version.hip is None
    capability = torch.cuda.get_device_capability() if is_nvidia else None
    return has_kernel(capability) and dtype == torch.bfloat16


def apply_float8(
    model: nn.Module,
    dtype: torch.dtype,
    device_type: str,
    *,
    compiled: bool = False,
    traced: bool = False,
) -> None:
    """Makes a model's linear layers, plain or split over `tp`, multiply in float8 where
    `float8_layers` says so. `traced`: without values, for a GPU that this machine may not have."""
    if traced:
        kernel = device_type == "cuda" and dtype == torch.bfloat16
    else:
        kernel = kernel_of(dtype, device_type)
    # In a trace rounding runs operator by operator: torch does not compile inside of a dispatch
    # mode.
    kernels = COMPILED if compiled and not traced else KERNELS
    names, _ = float8_layers(model)
    for name in names:
        layer: Any = model.get_submodule(name)
        # of this rank's part, as the kernel needs
        even = all(size % 16 == 0 for size in to_local(layer.weight).shape)
        use_products(layer, kernels if kernel and even else EMULATED)


def describe_float8(model: nn.Module, dtype: torch.dtype, device_type: str) -> str:
    """A line about a plain model: `linear_precision float8: 14 of 15 linear layers, emulated; not
    lm_head`."""
    layers, others = float8_layers(model)
    by = "emulated, slower than without"
    if kernel_of(dtype, device_type):
        by = "by torch._scaled_mm"
    left_out = [*dict.fromkeys(map(name_pattern, others)), "embeddings, routers and experts"]
    return (
        f"linear_precision float8: {len(layers)} of {len(layers) + len(others)} linear layers, "
        f"{by}; not {', '.join(left_out)}"
    )
