"""Float8 products: against arithmetic written plainly, against torch's kernels, and token
by token."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch.aot_autograd import make_boxed_func

from meshtrain.errors import InputError
from meshtrain.loss import sample_losses
from meshtrain.parallel.float8_layers import float8_layers, float8_problems
from meshtrain.parallel.linear import float8
from meshtrain.parallel.linear.float8 import (
    COMPILED,
    EMULATED,
    KERNELS,
    has_kernel,
    power_of_two_scale,
)
from meshtrain.parallel.parallelize import ParallelOptions, apply_data_parallel, parallelize
from meshtrain.parallel.tp_plan import split_layers
from tests.comparing import ALONE, llama, small_llama

needs_scales_of_rows = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 multiplies float8 on a CPU with one scale a tensor only",
)

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 4, "vocab_size": 160}
TOKENS = torch.arange(48).view(2, 24) * 7 % 160


def model(**keys: Any) -> nn.Module:
    return small_llama(**(SIZES | keys))


def e4m3(x: float) -> float:
    """The nearest number with one sign, four exponent and three fraction bits; of two the even
    one."""
    if x == 0:
        return 0.0
    step = 2.0 ** (max(math.floor(math.log2(abs(x))), -6) - 3)
    return round(x / step) * step  # Python's round takes the even one


def rounded(x: Tensor, dim: int) -> Tensor:
    """What a matrix stands for in 8 bits, with scales along `dim`, number by number."""
    rows = []
    for row in x.movedim(dim, 1):
        scale = 2.0 ** math.ceil(math.log2(float(row.abs().max()) / 448))
        rows.append([e4m3(value / scale) * scale for value in row.tolist()])
    return torch.tensor(rows, dtype=x.dtype).movedim(1, dim)


def operands(n: int = 24, d: int = 128, f: int = 192) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and the gradient of the output, in float64; sizes of tokens and features lie far
    apart."""
    torch.manual_seed(1)

    def matrix(rows: int, columns: int) -> Tensor:
        spread = torch.exp2(torch.randint(-20, 20, (rows, 1))) * torch.exp2(
            torch.randint(-3, 3, (1, columns))
        )
        return (torch.randn(rows, columns) * spread).double()

    return matrix(n, d), matrix(f, d), matrix(n, f)


def test_a_scale_is_the_least_power_of_two_that_fits() -> None:
    largest = [
        448.0,
        448.0001,
        449.0,
        1.0,
        0.875,
        0.8750001,
        3e-20,
        1.7e30,
        *torch.rand(200).exp().tolist(),
    ]
    scales = power_of_two_scale(torch.tensor(largest)).tolist()
    for value, scale in zip(torch.tensor(largest).tolist(), scales, strict=True):
        assert math.frexp(scale)[0] == 0.5, scale
        assert 224 < value / scale <= 448, (value, scale)
    assert 0 < power_of_two_scale(torch.tensor(0.0)) < 1e-30, "a row of zeros stays one"
    assert not power_of_two_scale(torch.tensor([math.inf, math.nan])).isfinite().any()


def test_products_are_those_of_rounded_operands() -> None:
    """A scale of another dim, or of a whole tensor, would round other numbers away."""
    products = EMULATED
    x, weight, grad = operands()
    y = products.forward(x, weight)
    torch.testing.assert_close(y, rounded(x, 1) @ rounded(weight, 1).t(), rtol=0, atol=0)
    assert products.forward(x.view(2, 12, -1), weight).equal(y.view(2, 12, -1))
    _, *other = operands(d=128, f=160)
    pairs = [(grad, weight), (other[1], other[0])]
    for count in (1, 2):
        expected = sum(rounded(g, 1) @ rounded(w, 0) for g, w in pairs[:count])
        dx = products.input_grad_sum([g for g, _ in pairs[:count]], [w for _, w in pairs[:count]])
        torch.testing.assert_close(dx, expected, rtol=1e-12, atol=0)


@needs_scales_of_rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_multiplies_the_same_numbers(dtype: torch.dtype) -> None:
    x, weight, grad = (tensor.to(dtype) for tensor in operands())
    results = [
        (
            products.forward(x, weight).double(),
            products.input_grad_sum([grad], [weight]).double(),
        )
        for products in (KERNELS, EMULATED)
    ]
    for kernel, emulated in zip(*results, strict=True):
        error = (kernel - emulated).norm(dim=1) / emulated.norm(dim=1)
        assert (error < 4 * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("n", [24, 200])
def test_the_kernel_on_gpus_takes_these_shapes_and_strides(n: int) -> None:
    """What torch refuses on a GPU it refuses of tensors without values."""
    sizes = (n, 192), (160, 192), (n, 160)
    x, weight, grad = (torch.empty(size, device="meta", dtype=torch.bfloat16) for size in sizes)
    assert KERNELS.forward(x.view(2, -1, 192), weight).shape == (2, n // 2, 160)
    assert KERNELS.input_grad_sum([grad], [weight]).shape == (n, 192)
    with pytest.raises(RuntimeError, match="divisible by 16"):
        KERNELS.forward(x, weight[:8])


def test_a_token_does_not_depend_on_the_others() -> None:
    """To the bit, also where another is an outlier, or not finite."""
    x, weight, _ = operands()
    alone = torch.cat([EMULATED.forward(row[None], weight) for row in x])
    wild = x.clone()
    wild[3, 5], wild[7, 0], wild[8, 1] = 1e30, math.nan, math.inf
    y = EMULATED.forward(wild, weight)
    calm = [i for i in range(len(x)) if i not in (3, 7, 8)]
    torch.testing.assert_close(y[calm], alone[calm], rtol=1e-14, atol=0)
    assert not y[[7, 8]].isfinite().any(), "what is not finite stays visible"


def test_a_gpu_has_a_kernel_or_emulates() -> None:
    chosen = {(8, 0): False, (8, 9): True, (9, 0): True, (10, 0): True, (12, 0): True}
    for capability, kernel in chosen.items():
        assert has_kernel(capability) == kernel
    assert not has_kernel(None)


def test_which_layers() -> None:
    """Not the head, which is a block by itself, and none that is small or odd."""
    layers, others = float8_layers(model(num_key_value_heads=2))
    assert len(layers) == 2 * 5
    assert others == [
        *(f"model.layers.{i}.self_attn.{kind}_proj" for i in (0, 1) for kind in "kv"),
        "lm_head",
    ]
    for width, count in ((200, 4), (208, 7)):
        assert len(float8_layers(model(intermediate_size=width))[0]) == 2 * count
    routed = model()
    routed.model.layers[1].mlp.gate = nn.Linear(128, 128)
    assert float8_layers(routed)[1] == ["model.layers.1.mlp.gate", "lm_head"]
    line = float8.describe_float8(model(num_key_value_heads=2), torch.float32, "cpu")
    assert "float8: 10 of 15 linear layers, emulated" in line
    assert (
        "not model.layers.*.self_attn.k_proj, model.layers.*.self_attn.v_proj, lm_head, embeddings"
        in line
    )


def test_what_cannot_be_exact_is_refused() -> None:
    few, blocks = model(num_key_value_heads=1, head_dim=128), model()

    def problems(plain: nn.Module, tp: int) -> str:
        return "\n".join(float8_problems(plain, split_layers(plain, llama.tp_plan, tp), tp))

    heads = (
        "model.layers.*.self_attn.k_proj, model.layers.*.self_attn.v_proj, of 1 heads, cannot be "
        "split"
    )
    assert heads in problems(few, 4)
    assert not problems(blocks, 4)
    with pytest.raises(InputError, match="no linear layer inside of its blocks"):
        parallelize(nn.Sequential(nn.Linear(256, 256)), ALONE, linear_precision="float8")


class StraightThrough(torch.autograd.Function):
    """A linear layer in float8 as the documentation has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.flatten(0, -2)
        return (rounded(rows, 1) @ rounded(weight, 1).t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        dx = (rounded(rows, 1) @ rounded(weight, 0)).view(x.shape)
        return dx, rows.t() @ x.flatten(0, -2)


def losses_and_gradients(trained: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    losses = sample_losses(trained(TOKENS), TOKENS.roll(-1, 1))
    losses.sum().backward()
    return losses.detach(), {
        name: p.grad for name, p in trained.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_model_has_the_gradients_of_its_layers(recompute: str) -> None:
    keys = {"num_hidden_layers": 1, "intermediate_size": 128, "num_key_value_heads": 2}
    reference = model(**keys).double()
    for name in float8_layers(reference)[0]:
        layer: Any = reference.get_submodule(name)
        layer.forward = lambda x, weight=layer.weight: StraightThrough.apply(x, weight)
    options = ParallelOptions(precision="float64", linear_precision="float8", recompute=recompute)
    losses, gradients = losses_and_gradients(
        apply_data_parallel(model(**keys).double(), ALONE, options)
    )
    expected, expected_gradients = losses_and_gradients(reference)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    for name, gradient in expected_gradients.items():
        error = (gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-12, name


@needs_scales_of_rows
def test_it_is_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for the alike blocks and one for their backward, which sees each product, and keeps
    those of the forward; the numbers are those of eager blocks."""
    monkeypatch.setattr(float8, "kernel_of", lambda *_: True)
    products: list[int] = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: object) -> Any:
        products.append(
            sum(node.target is torch.ops.aten._scaled_mm.default for node in graph.graph.nodes)
        )
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(
        torch,
        "compile",
        partial(torch.compile, backend=aot_autograd(fw_compiler=compile_graph), fullgraph=True),
    )
    options = ParallelOptions(linear_precision="float8")
    eager = apply_data_parallel(model(), ALONE, options)
    compiled = apply_data_parallel(
        model(), ALONE, replace(options, compile=True, recompute="selective")
    )
    torch.testing.assert_close(losses_and_gradients(compiled), losses_and_gradients(eager))
    assert products == [7, 7]


@needs_scales_of_rows
def test_rounding_alone_is_compiled_once_for_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of operators, where a compiled block does not see it."""
    graphs = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    float8._compiled.cache_clear()
    counts = []
    for d, f in ((128, 192), (192, 128), (256, 128), (128, 320), (144, 160)):
        x, weight, grad = (tensor.float() for tensor in operands(d=d, f=f))
        assert COMPILED.forward(x, weight).equal(KERNELS.forward(x, weight))
        grads = [products.input_grad_sum([grad], [weight]) for products in (COMPILED, KERNELS)]
        assert grads[0].equal(grads[1])
        counts.append(graphs.frame_count)
    float8._compiled.cache_clear()
    assert 2 <= counts[0] == counts[-1] < 8, (
        "more for each shape, of which the compiler would take eight"
    )
