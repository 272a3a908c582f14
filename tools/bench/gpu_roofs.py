"""How fast the parts of a step can be on this GPU: its roofline.

    python tools/bench/gpu_roofs.py [--preset NAME ...] [--tokens 16384] [--only PATTERN] [--json
    FILE]

Each line is one part in isolation, on random numbers, the median of a few measurements by GPU
events: matrix products at 8192^3 and at a model's shapes (forward, input gradient, weight gradient,
plain and accumulated in float32; float8 with row-wise and tensor-wise scales), copies, attention
with each backend and with documents, and the head with its loss in every available implementation.
The model of docs/performance.md is fitted to these. A part that this GPU or this torch does not
support says why. Exits with 2 without a GPU.
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_pair import Sizes, card, sizes_of, versions
from harness import model_of, positive
from meshtrain.modeling.flops import table_flops
from meshtrain.parallel.linear_cross_entropy import LossRequest, fuse_loss, request_loss

PRESETS = ("llama-3.2-1b", "llama-3.1-8b")
# Bytes per second of a card's memory, from NVIDIA's data sheets; the first name that matches wins.
MEMORY = (
    (r"H200", 4.8e12),
    (r"H100 PCIe", 2.0e12),
    (r"H100 NVL", 3.9e12),
    (r"H100", 3.35e12),
    (r"A100", 2.0e12),
)
ROUNDS = 5
ROUND_S = 0.05
DOCUMENT = 1500  # average tokens per document
FLOAT8 = torch.float8_e4m3fn
Timed = Callable[[], object]


class Roof(NamedTuple):
    """One part: its FLOPs and bytes, and a function that prepares it and returns the call to
    time."""

    name: str
    flops: float
    nbytes: float
    make: Callable[[], Timed]


class Shape(NamedTuple):
    """The tokens, device and dtype with which all parts are measured."""

    tokens: int
    seq_len: int
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    def random(self, *dims: int) -> Tensor:
        return torch.randn(dims, device=self.device, dtype=self.dtype)


# Products -----------------------------------------------------------------------------------------


def products(name: str, n: int, i: int, o: int, shape: Shape) -> Iterator[Roof]:
    """A linear layer with i features in and o out, on n tokens."""
    flops, nbytes = 2.0 * n * i * o, 2.0 * (n * i + i * o + n * o)

    def forward() -> Timed:
        x, w = shape.random(n, i), shape.random(o, i)
        return lambda: x @ w.t()

    def input_grad() -> Timed:
        g, w = shape.random(n, o), shape.random(o, i)
        return lambda: g @ w

    def weight_grad() -> Timed:
        g, x = shape.random(n, o), shape.random(n, i)
        return lambda: g.t() @ x

    def summed() -> Timed:
        g, x = shape.random(n, o), shape.random(n, i)
        into = torch.zeros(o, i, device=shape.device)
        return lambda: torch.addmm(into, g.t(), x, out_dtype=torch.float32, out=into)

    def float8(rows: bool) -> Timed:
        x, w = (shape.random(*dims).to(FLOAT8) for dims in ((n, i), (o, i)))
        dims = ((n, 1), (1, o)) if rows else ((), ())
        scales = [torch.ones(d, device=shape.device) for d in dims]
        return lambda: torch._scaled_mm(
            x, w.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16
        )

    yield Roof(f"{name} forward", flops, nbytes, forward)
    yield Roof(f"{name} input gradient", flops, nbytes, input_grad)
    yield Roof(f"{name} weight gradient", flops, nbytes, weight_grad)
    yield Roof(f"{name} weight gradient into float32", flops, nbytes + 6 * i * o, summed)
    yield Roof(f"{name} float8 by rows", flops, nbytes, partial(float8, True))
    yield Roof(f"{name} float8 by tensors", flops, nbytes, partial(float8, False))


def layers(name: str, sizes: Sizes, shape: Shape) -> Iterator[Roof]:
    """The linear layers of a block, and a chunk of the head."""
    d, f, q, kv = sizes.width, sizes.hidden, sizes.heads, sizes.kv
    for layer, i, o in (
        ("q", d, q),
        ("k, v", d, kv),
        ("qkv", d, q + 2 * kv),
        ("o", q, d),
        ("gate|up", d, 2 * f),
    ):
        yield from products(f"{name} {layer}", shape.tokens, i, o, shape)
    yield from products(f"{name} down", shape.tokens, f, d, shape)
    yield from products(
        f"{name} head of 2048 tokens", min(2048, shape.tokens), d, sizes.vocabulary, shape
    )


def copies(shape: Shape, size: int = 2**28) -> Iterator[Roof]:
    def make(dtype: torch.dtype) -> Timed:
        source, target = (
            torch.empty(size, device=shape.device),
            torch.empty(size, device=shape.device, dtype=dtype),
        )
        return lambda: target.copy_(source)

    yield Roof("copy float32", 0.0, 8.0 * size, partial(make, torch.float32))
    yield Roof("copy float32 to 16 bits", 0.0, 6.0 * size, partial(make, shape.dtype))


# Attention ----------------------------------------------------------------------------------------


def backward(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Timed:
    """The backward alone, on a retained graph."""
    for tensor in inputs:
        tensor.requires_grad_()
    output = function(*inputs)
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def attention(name: str, heads: int, kv_heads: int, width: int, shape: Shape) -> Iterator[Roof]:
    """Causal attention with each backend of torch's SDPA, and with documents; FLOPs are those that
    the masks leave."""
    b, s = max(1, shape.tokens // shape.seq_len), shape.seq_len
    flops = 2.0 * b * heads * s * s * width  # two products, of which a causal mask leaves half

    def inputs(*dims: int) -> list[Tensor]:
        return [shape.random(*dims[:1], h, *dims[1:], width) for h in (heads, kv_heads, kv_heads)]

    def call(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(backend: SDPBackend) -> Timed:
        return partial(call, backend, *inputs(b, s))

    def gradient(backend: SDPBackend) -> Timed:
        return backward(partial(call, backend), inputs(b, s))

    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        title = f"{name} {backend.name.split('_')[0].lower()}"
        yield Roof(f"{title} forward", flops, 0.0, partial(forward, backend))
        yield Roof(f"{title} backward", 2.5 * flops, 0.0, partial(gradient, backend))
    ends = document_ends(b * s, s)
    lengths = np.diff(ends, prepend=0).astype(float)
    flops = 2.0 * heads * width * float(lengths @ lengths)
    by_documents = partial(varlen, ends=ends, longest=int(lengths.max()), device=shape.device)

    def tokens_first() -> list[Tensor]:
        return [shape.random(b * s, h, width) for h in (heads, kv_heads, kv_heads)]

    yield Roof(
        f"{name} varlen forward", flops, 0.0, lambda: partial(by_documents(), *tokens_first())
    )
    yield Roof(
        f"{name} varlen backward",
        2.5 * flops,
        0.0,
        lambda: backward(by_documents(), tokens_first()),
    )


def document_ends(tokens: int, seq_len: int) -> list[int]:
    """Ends of documents of about 1500 tokens that fill rows of this length; none crosses the end of
    a row."""
    draw = np.random.default_rng(0)
    ends, end = [], 0
    while end < tokens:
        row = (end // seq_len + 1) * seq_len
        end = min(end + 1 + int(draw.exponential(DOCUMENT)), row, tokens)
        ends.append(end)
    return ends


def varlen(ends: Sequence[int], longest: int, device: str) -> Callable[..., Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    bounds = torch.tensor([0, *ends], device=device, dtype=torch.int32)
    gqa: dict[str, Any] = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0), **gqa)
        assert isinstance(output, Tensor)  # a single tensor unless more outputs are requested
        return output

    return call


# The loss -----------------------------------------------------------------------------------------


def losses(name: str, d: int, vocabulary: int, shape: Shape) -> Iterator[Roof]:
    """The head and its loss, forward and backward, on one sequence."""
    n = min(shape.tokens, shape.seq_len)

    def plain(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), targets)

    def chunked() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        head = torch.nn.Linear(d, vocabulary, bias=False, device="meta")
        fuse_loss(head, shape.device == "cuda")

        def call(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
            head.weight = w
            with request_loss(LossRequest(lambda: targets[None], lambda: x.new_tensor(1 / n))):
                return head(x[None])

        return call

    def make(way: Callable[[], Callable[..., Tensor]]) -> Timed:
        x, w = (
            shape.random(n, d).requires_grad_(),
            torch.nn.Parameter(shape.random(vocabulary, d) * 0.02),
        )
        targets, function = torch.randint(vocabulary, (n,), device=shape.device), way()
        return lambda: torch.autograd.grad(function(x, w, targets), (x, w))

    ways: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "plain": lambda: plain,
        "compiled": lambda: torch.compile(plain, dynamic=False),
        "linear_cross_entropy of torch": lambda: F.linear_cross_entropy,
        "without logits": chunked,
    }
    for way, function in ways.items():
        yield Roof(f"{name} loss {way}", 6.0 * n * d * vocabulary, 0.0, partial(make, function))


# Measuring ----------------------------------------------------------------------------------------


def all_roofs(presets: Sequence[str], shape: Shape) -> Iterator[Roof]:
    yield from products("8192^3", 8192, 8192, 8192, shape)
    yield from copies(shape)
    for preset in presets:
        values = {"model": {"name": "llama", "preset": preset}}
        sizes, config = sizes_of(values), model_of(values)[1]
        yield from layers(preset, sizes, shape)
        heads = config.num_attention_heads, config.kv_heads, config.head_width
        yield from attention(f"{preset} attention", *heads, shape)
        yield from losses(preset, sizes.width, sizes.vocabulary, shape)


def gpu_seconds(function: Timed, times: int) -> float:
    """Seconds of `times` consecutive calls, by GPU events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def measure(function: Timed, seconds: Callable[[Timed, int], float]) -> float:
    """Seconds of one call, the median of a few rounds, each long enough for the clock."""
    seconds(function, 1)  # loads, compiles, and selects kernels
    times = max(1, min(1000, int(ROUND_S / max(seconds(function, 2) / 2, 1e-9))))
    return float(np.median([seconds(function, times) / times for _ in range(ROUNDS)]))


def row_of(roof: Roof, seconds: Callable[[Timed, int], float]) -> dict[str, Any]:
    """The measurement of one part, or why it does not run here."""
    row: dict[str, Any] = {"name": roof.name}
    try:
        took = measure(roof.make(), seconds)
    except (RuntimeError, TypeError, ValueError, ImportError, AttributeError) as error:
        return row | {
            "not_here": (
                f"{type(error).__name__}: "
                f"{str(error).strip().splitlines()[0] if str(error) else ''}"
            )
        }
    return row | {
        "ms": 1000 * took,
        "tflops": roof.flops / took / 1e12,
        "gb_per_s": roof.nbytes / took / 1e9,
    }


def line(row: dict[str, Any], peak: float | None, memory: float | None) -> str:
    """A row as text. `peak`: FLOP/s of 16-bit products; `memory`: bytes per second."""
    if "not_here" in row:
        return f"{row['name']:<52} not here: {row['not_here'][:90]}"
    is_copy = row["tflops"] == 0
    value, unit, most = (
        (row["gb_per_s"], "GB/s", memory) if is_copy else (row["tflops"], "TF/s", peak)
    )
    share = "" if most is None else f"{100 * value * (1e9 if is_copy else 1e12) / most:5.1f} %"
    return f"{row['name']:<52} {row['ms']:9.3f} ms {value:8.0f} {unit} {share}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast the parts of a step can be on this GPU.")
    parser.add_argument("--preset", action="append", choices=PRESETS, help="whose shapes (both)")
    parser.add_argument(
        "--tokens", type=positive, default=16384, help="of a microbatch (%(default)s)"
    )
    parser.add_argument(
        "--seq-len", type=positive, default=8192, help="tokens of a row (%(default)s)"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="parts whose names have this regular expression",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_roofs.py needs an NVIDIA GPU: torch finds none here", file=sys.stderr)
        return 2
    gpu, shape = card(), Shape(options.tokens, options.seq_len)
    peak = table_flops(gpu["name"], "bfloat16")
    memory = next((rate for pattern, rate in MEMORY if re.search(pattern, gpu["name"])), None)
    print(
        f"{gpu['name']}, torch {torch.__version__}, shares of the data sheet's 16-bit products and "
        "memory"
    )
    rows = []
    for roof in all_roofs(options.preset or PRESETS, shape):
        if re.search(options.only, roof.name):
            rows.append(row_of(roof, gpu_seconds))
            print(line(rows[-1], peak, memory), flush=True)
            torch.cuda.empty_cache()
    result = {
        "card": gpu,
        "versions": versions(),
        "peak_flops": peak,
        "memory_rate": memory,
        "shape": shape[:2],
        "roofs": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
