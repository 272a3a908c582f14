"""Float8 and MXFP8 products of linear layers: the forward and the input gradient multiply 8-bit
numbers.

Both operands of a product are rounded to e4m3 (Micikevicius et al.,
https://arxiv.org/abs/2209.05433), after division by one scale per row along the summed dim: per
token, per output of the weight in the forward, and per input of the weight in the backward. Such a
scale factors out of the sum, and no token's result depends on the other tokens of its microbatch.
MXFP8 (https://arxiv.org/abs/2310.10537) has one scale per 32 numbers along the sum. If ranks of
`tp` have parts of a sum, a row's scale is that of its largest value over all of them.

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
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.parallel.float8_layers import BLOCKS, float8_layers, name_pattern
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.matmul import PRODUCTS, Maximum, Products
from meshtrain.parallel.torch_private import to_local

E4M3 = torch.float8_e4m3fn  # its largest value is 448 = 1.75 * 2**8


def power_of_two_scale(largest: Tensor) -> Tensor:
    """The least power of two, in float32, that scales `largest` down to at most 448; not finite if
    `largest` is not."""
    bits = largest.float().clamp(min=2.0**-100).view(torch.int32)
    # A fraction above 1.75 (its bits above 0x600000) carries into the exponent.
    return (bits + 0x1FFFFF).bitwise_and(0x7F800000).view(torch.float32) * 2.0**-8


def largest_of_blocks(x: Tensor, block: int) -> Tensor:
    """The largest absolute value of each `block` elements of rows (n, k) -> (n, k / block)."""
    return x.unflatten(1, (-1, block)).abs().amax(-1)


def quantize(x: Tensor, scales: Tensor) -> Tensor:
    """Rows (n, k) in e4m3, contiguous; scales (n, j): one per k / j elements."""
    blocks = x.unflatten(1, (scales.shape[1], -1)) * scales.reciprocal().unsqueeze(-1)
    return blocks.to(E4M3).flatten(1).contiguous()


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `quantize`'s values represent, exact in any dtype with sufficient range."""
    return (
        values.to(dtype).unflatten(1, (scales.shape[1], -1)) * scales.to(dtype).unsqueeze(-1)
    ).flatten(1)


def swizzle(scales: Tensor) -> Tensor:
    """Powers of two (n, j) as e8m0, padded to tiles of 128 rows by 4 (cuBLAS, "1D block scaling
    factors layout")."""
    rows, columns = (-(-n // size) for n, size in zip(scales.shape, (128, 4), strict=True))
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    tiles = F.pad(exponents, (0, 4 * columns - scales.shape[1], 0, 128 * rows - scales.shape[0]))
    tiles = tiles.view(rows, 4, 32, columns, 4).permute(0, 3, 2, 1, 4)
    return tiles.flatten().view(torch.float8_e8m0fnu)


@dataclass(frozen=True)
class ScaledProducts:
    """Products of 8-bit rows.

    Attributes:
        block: number of elements per scale; None: a whole row.
        emulated: whether the same rounded numbers are multiplied in the dtype of the operands.
        compiled: whether rounding is compiled even where a layer is not: inside the operators of
            `tp`.
    """

    block: int | None
    emulated: bool
    compiled: bool = False

    def sum(self, pairs: Sequence[tuple[Tensor, Tensor]], maximum: Maximum | None = None) -> Tensor:
        """Rows (n, k_i) times (m, k_i), summed over k and pairs -> (n, m), same dtype. `maximum`:
        if k is split."""
        fuse = (
            _compiled
            if self.compiled and not torch.compiler.is_compiling()
            else (lambda function: function)
        )
        operands = [operand for pair in pairs for operand in pair]
        largest = [fuse(largest_of_blocks)(x, self.block or x.shape[1]) for x in operands]
        if maximum is not None and self.block is None:  # in one message
            largest = list(maximum(torch.cat(largest)).split([len(x) for x in largest]))
        scales = [power_of_two_scale(x) for x in largest]
        rounded = list(zip(map(fuse(quantize), operands, scales), scales, strict=True))
        y = self._multiply(*rounded[0], *rounded[1], operands[0].dtype)
        for a, b in zip(rounded[2::2], rounded[3::2], strict=True):
            y.add_(self._multiply(*a, *b, y.dtype))
        return y

    def _multiply(
        self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        if self.emulated:
            return dequantize(a, a_scales, dtype) @ dequantize(b, b_scales, dtype).t()
        if self.block is None:
            return torch._scaled_mm(
                a, b.t(), a_scales, b_scales.t(), out_dtype=dtype, use_fast_accum=True
            )
        return torch._scaled_mm(a, b.t(), swizzle(a_scales), swizzle(b_scales), out_dtype=dtype)

    def record(self, name: str) -> Products:
        """The record of products that linear layers use."""

        def forward(x: Tensor, weight: Tensor, maximum: Maximum | None = None) -> Tensor:
            return self.sum([(x.reshape(-1, x.shape[-1]), weight)], maximum).view(
                *x.shape[:-1], len(weight)
            )

        def input_grad_sum(
            grads: Sequence[Tensor], weights: Sequence[Tensor], maximum: Maximum | None = None
        ) -> Tensor:
            return self.sum([(g, w.t()) for g, w in zip(grads, weights, strict=True)], maximum)

        return Products(name, forward, input_grad_sum)


@cache
def _compiled(function: Callable) -> Callable:
    # a model has more shapes of layers than the recompile limit
    return torch.compile(function, dynamic=True)


EMULATED = {
    name: ScaledProducts(block, True).record(f"{name}, emulated") for name, block in BLOCKS.items()
}
KERNELS = {name: ScaledProducts(block, False).record(name) for name, block in BLOCKS.items()}
COMPILED = {
    name: ScaledProducts(block, False, True).record(f"{name}, compiled")
    for name, block in BLOCKS.items()
}
PRODUCTS |= {
    record.name: record for records in (EMULATED, KERNELS, COMPILED) for record in records.values()
}


def has_kernel(precision: str, capability: tuple[int, int] | None) -> bool:
    """Whether GPUs of a compute capability support this precision in `torch._scaled_mm`: row scales
    from Ada and Hopper on, block scales from Blackwell on. None: no NVIDIA GPU."""
    return capability is not None and capability >= {"float8": (8, 9), "mxfp8": (10, 0)}[precision]


def kernel_of(precision: str, dtype: torch.dtype, device_type: str) -> bool:
    """Whether layers that compute in `dtype` use the 8-bit kernel on this machine, or emulate
    it."""
    nvidia = device_type == "cuda" and torch.version.hip is None
    return (
        has_kernel(precision, torch.cuda.get_device_capability() if nvidia else None)
        and dtype == torch.bfloat16
    )


def apply_float8(
    model: nn.Module,
    precision: str,
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
        kernel = kernel_of(precision, dtype, device_type)
    # In a trace rounding runs operator by operator: torch does not compile inside of a dispatch
    # mode.
    kernels = COMPILED if compiled and not traced else KERNELS
    for name in float8_layers(model, precision)[0]:
        layer: Any = model.get_submodule(name)
        # of this rank's part, as the kernel needs
        even = all(n % 16 == 0 for n in to_local(layer.weight).shape)
        use_products(layer, (kernels if kernel and even else EMULATED)[precision])


def describe_float8(model: nn.Module, precision: str, dtype: torch.dtype, device_type: str) -> str:
    """A line about a plain model: `linear_precision float8: 14 of 15 linear layers, emulated; not
    lm_head`."""
    layers, others = float8_layers(model, precision)
    by = (
        "by torch._scaled_mm"
        if kernel_of(precision, dtype, device_type)
        else "emulated, slower than without"
    )
    rest = ", ".join(dict.fromkeys(map(name_pattern, others)))
    return (
        f"linear_precision {precision}: {len(layers)} of {len(layers) + len(others)} linear "
        f"layers, {by}; not " + (f"{rest}, " * bool(rest)) + "embeddings, routers and experts"
    )
