"""Experts, their router and its balance, against loops over experts in plain PyTorch."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.experts import Experts, Router, choose, load_metrics
from meshtrain.job.locate import model_file
from meshtrain.loss import Field, GlobalCount, StepTerms, sample_losses
from meshtrain.modeling.flops import sample_flops
from meshtrain.parallel.linear import grouped, use_products
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, run_weight_grads
from meshtrain.parallel.parallelize import parallelize
from meshtrain.parallel.torch_private import backward_is_running, never_compiled
from tests.comparing import ALONE, CPU, V

SAMPLES, S, E, J = 7, 5, 6, 2
moe = model_file("tests/models/moe.py")


def config(**keys: object) -> object:
    small = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "vocab_size": V}
    return moe.Config(**small, moe_intermediate_size=4, num_hidden_layers=3, **keys)


def fresh(**keys: object) -> nn.Module:
    torch.manual_seed(0)
    model = moe.Model(config(**keys)).double()
    for layer in model.model.layers[1:]:
        layer.mlp.gate.weight.data *= 5  # routes by more than a hair
    return model


def loop(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Expert by expert, those tokens that have chosen it."""
    y = torch.zeros_like(x)
    for e in range(experts.num_experts):
        tokens, slots = (chosen == e).nonzero(as_tuple=True)
        gate, up = (x[tokens] @ experts.gate_up_proj[e].t()).chunk(2, dim=-1)
        out = (F.silu(gate) * up) @ experts.down_proj[e].t()
        y = y.index_add(0, tokens, out * weights[tokens, slots, None])
    return y


# Products and gathers -----------------------------------------------------------------------------

ROUTES: dict[str, Callable[[int], Tensor]] = {
    "drawn": lambda n: torch.rand(n, E).argsort(dim=-1)[:, :J],
    "two for all": lambda n: torch.tensor([4, 2]).expand(n, J),
    "one twice": lambda n: torch.full((n, J), 3),
}


def layer_inputs(route: str, *shape: int) -> tuple[Experts, Tensor, Tensor, Tensor]:
    """A layer of experts, its inputs, the experts that they choose, and their weights."""
    torch.manual_seed(0)
    experts, chosen = Experts(E, 8, 4).double(), ROUTES[route](math.prod(shape)).view(*shape, J)
    x, weights = (torch.randn(*shape, k, dtype=torch.float64, requires_grad=True) for k in (8, J))
    return experts, x, chosen, weights


@pytest.mark.parametrize("n", [0, 1, 20])
@pytest.mark.parametrize("route", ROUTES)
def test_experts_are_a_loop_over_experts(route: str, n: int) -> None:
    """Also where the gradients of their weights wait."""
    experts, x, chosen, weights = layer_inputs(route, n)
    inputs = (x, weights, *experts.parameters())
    y, expected = experts(x, chosen, weights), loop(experts, x, chosen, weights)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(output.square().sum(), inputs) for output in (y, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)
    queue = WeightGradQueue()
    use_products(nn.Sequential(experts), queue=queue)
    y = experts(x, chosen, weights)
    with queue.record() as deferred:
        y.square().sum().backward()
    assert all(p.grad is None for p in experts.parameters())
    run_weight_grads(deferred)
    torch.testing.assert_close(
        tuple(tensor.grad for tensor in inputs), gradients[0], rtol=0, atol=0
    )


def test_padding_gets_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 samples one is padding, and of their 5 positions one: both get zeros."""
    experts, x, chosen, weights = layer_inputs("drawn", 3, S)
    rows, products = [], experts._products
    monkeypatch.setattr(
        experts,
        "_products",
        lambda x, counts: rows.append(int(counts.sum())) or products(x, counts),
    )
    real = torch.ones(3, S, dtype=torch.bool)
    real[2], real[:, 3] = False, False
    with StepTerms(GlobalCount(1, ALONE, CPU)).of_microbatch(3, 2, real[0]):
        y = experts(x, chosen, weights)
    assert rows == [int(real.sum()) * J]
    assert (y[~real] == 0).all()
    torch.testing.assert_close(
        y[real], loop(experts, x[real], chosen[real], weights[real]), rtol=1e-12, atol=1e-14
    )


def test_first_values_are_those_of_linear_layers() -> None:
    experts = Experts(50, 16, 4)
    assert experts.gate_up_proj.abs().max().item() == pytest.approx(1 / 4, rel=0.01)
    assert experts.down_proj.abs().max().item() == pytest.approx(1 / 2, rel=0.01)


def test_the_kernel_does_as_the_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel for CPUs; of three experts one has no rows, and the last five rows are
    nobody's."""
    torch.manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, dtype=torch.bfloat16) for shape in ((12, 8), (3, 16, 8), (12, 16))
    )
    counts = torch.tensor([4, 0, 3])

    def products() -> list[Tensor]:
        ops = torch.ops.meshtrain
        return [
            ops.grouped(x, weight, counts),
            ops.grouped_input_grad(grad, weight, counts),
            ops.grouped_weight_grad(grad, x, counts),
        ]

    by_loop = products()
    monkeypatch.setattr(grouped, "_has_kernel", lambda *tensors: True)
    torch.testing.assert_close(products(), by_loop)
    *of_rows, of_weights = by_loop
    for rows in of_rows:
        assert rows[:7].abs().min() > 0
        assert (rows[7:] == 0).all()
    assert (of_weights[1] == 0).all()


# The choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_of_equal_scores_the_lower_index_is_chosen(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for scores in (
        torch.randint(-2, 3, (200, 9)),
        torch.randn(200, 128),
        torch.tensor([[0.0, -0.0, torch.inf, -torch.inf, 0.0, -1.0, 1e-7, -1e-7, torch.inf]]),
    ):
        best = scores.to(dtype).double().sort(dim=-1, descending=True, stable=True).indices
        assert choose(scores.to(dtype), 8).equal(best[:, :8])
    with torch.device("meta"):
        assert choose(torch.zeros(2, 3, 9), 8).shape == (2, 3, 8)


def test_groups_without_a_bias_go_by_their_best_expert() -> None:
    router = Router(4, E, J, groups=3, groups_per_token=1)
    with torch.no_grad():
        router.weight.copy_(
            torch.tensor([[5, 5], [5, 4], [5.5, 0], [0, 1], [3, 1], [3, 1]]).repeat(1, 2)
        )
    chosen, _ = router(torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]]))
    assert chosen.tolist() == [[2, 3], [0, 1]]


# A step -------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A layer whose terms of the loss are written as papers have them, for a whole batch at once,
    into a list."""

    def __init__(self, layer: nn.Module, config: object, terms: list[Tensor]) -> None:
        super().__init__()
        self.gate, self.experts, self.config, self.terms = layer.gate, layer.experts, config, terms
        self.gate.balance = None
        self.loads, self.counted = (
            torch.zeros(E, dtype=torch.float64),
            torch.zeros(E, dtype=torch.float64),
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen, weights = self.gate(x)
        logits = x @ self.gate.weight.t()
        scores = logits.softmax(-1) if self.config.score == "softmax" else logits.sigmoid()
        probabilities = scores / scores.sum(-1, keepdim=True)
        hits = F.one_hot(chosen, E).sum(-2).double()  # (b, s, E)
        self.counted = hits.sum((0, 1))
        if self.config.router_balance == "batch":
            shares = (
                self.loads / self.loads.sum() if self.loads.any() else torch.ones(E).double() / E
            )
        else:
            shares = hits.sum(1, keepdim=True) / hits.sum((1, 2))[:, None, None]
        if self.config.router_balance != "none":
            self.terms.append(0.1 / 2 * E * J * (shares * probabilities).sum())
        self.terms.append(0.01 / 2 * logits.logsumexp(-1).square().sum())
        return loop(
            self.experts, x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1)
        ).view_as(x)

    def end_step(self) -> None:
        self.loads = self.counted
        if self.config.score == "sigmoid":
            self.gate.e_score_correction_bias.data += 0.05 * torch.sign(
                self.loads.mean() - self.loads
            )


TOKENS = torch.randint(V, (4, SAMPLES, S), generator=torch.Generator().manual_seed(7))


def microbatches(model: nn.Module, tokens: Tensor, size: int) -> StepTerms:
    """Forward and backward of all samples, `size` at a time; the last microbatch is filled with
    padding."""
    terms = StepTerms(GlobalCount(tokens.numel(), ALONE, CPU))
    for i in range(0, SAMPLES, size):
        rows = F.pad(tokens[i : i + size], (0, 0, 0, max(i + size - SAMPLES, 0)))
        real = min(size, SAMPLES - i)
        with terms.of_microbatch(size, real):
            (sample_losses(model(rows), rows)[:real].sum() / tokens.numel()).backward()
    return terms


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize(
    ("score", "balance"),
    [("softmax", "batch"), ("sigmoid", "batch"), ("sigmoid", "sequence"), ("softmax", "none")],
)
def test_a_step_is_that_of_the_whole_batch(score: str, balance: str, size: int) -> None:
    """Three steps in microbatches of any size, of which the last has padding: gradients, loads,
    terms, biases."""
    model = fresh(score=score, router_balance=balance)
    reference, added = copy.deepcopy(model), []
    for layer in reference.model.layers[1:]:
        layer.mlp = Plain(layer.mlp, model.config, added)
    trained = [
        (p, reference.get_parameter(name))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    for tokens in TOKENS[:3]:
        terms = microbatches(model, tokens, size)
        added.clear()
        loss = sample_losses(reference(tokens), tokens).sum() + sum(added)
        (loss / tokens.numel()).backward()
        attached = sum(
            terms.sums.get(Field("loss", name), torch.zeros(1)) for name in ("balance", "router_z")
        )
        assert attached.item() == pytest.approx(sum(added).item(), rel=1e-12)
        terms.receive(terms.sums, torch.tensor(False))
        for layer, known in zip(model.model.layers[1:], reference.model.layers[1:], strict=True):
            known.mlp.end_step()
            assert layer.mlp.gate.balance.loads.equal(known.mlp.loads)
            if score == "sigmoid":
                biases = [of.mlp.gate.e_score_correction_bias for of in (layer, known)]
                assert biases[0].any()
                torch.testing.assert_close(*biases, rtol=0, atol=1e-6)
        for pair in trained:
            torch.testing.assert_close(pair[0].grad, pair[1].grad, rtol=1e-12, atol=1e-13)
            for p in pair:
                p.data -= 2 * p.grad
                p.grad = None


def test_a_step_without_an_update_moves_nothing() -> None:
    model = fresh(score="sigmoid")
    terms = microbatches(model, TOKENS[0], 2)
    state = [p for p in model.parameters() if not p.requires_grad]
    before = [p.clone() for p in state]
    for bad in (True, False):
        terms.receive(terms.sums, torch.tensor(bad))
        assert [p.equal(old) for p, old in zip(state, before, strict=True)] == 4 * [bad]


def test_two_layers_with_one_number_are_refused() -> None:
    model = fresh()
    first, second = (layer.mlp.gate for layer in model.model.layers[1:])
    second.balance = first.balance  # one module twice counts both
    microbatches(model, TOKENS[0], 2)
    second.balance = copy.deepcopy(first.balance)
    with pytest.raises(
        ValueError, match="two modules tally expert_loads/1: the number of each layer"
    ):
        microbatches(model, TOKENS[0], 2)


def test_metrics_of_loads() -> None:
    metrics = load_metrics([torch.tensor([3.0, 0, 0]), torch.tensor([2.0, 0, 2])])
    assert metrics == {"expert_load_max": 3.0, "experts_idle": 3.0}


# Beside the rest ----------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.RMSNorm(8), Router(8, 6, 2), Experts(6, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x, *self.gate(disturbed(self.norm(x))))


@never_compiled
def disturbed(x: Tensor) -> Tensor:
    """As if the arithmetic of a block that runs again came out otherwise."""
    return x * (-1.0 if backward_is_running() else 1.0)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_block_that_runs_again_routes_as_it_did(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not compiled then: a GPU's backward compiled a piece anew, and torch found another
    number of tensors."""
    routes, forward = [], Experts.forward

    def spied(self: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        routes.append(chosen)
        return forward(self, x, chosen, weights)

    monkeypatch.setattr(Experts, "forward", spied)
    monkeypatch.setattr(torch, "compile", None)
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(0)
        warns = pytest.warns(UserWarning, match="Layer is not compiled: its experts run")
        with warns if compiled else nullcontext():
            model = parallelize(
                nn.Sequential(Layer()), ALONE, recompute=recompute, compile=compiled
            )
        model(torch.randn(3, 5, 8)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert len(routes) == 4
    assert all(route.equal(routes[0]) for route in routes)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_active_parameters_are_what_is_counted() -> None:
    """6 operations for each parameter that a token uses, and attention's, as for models without
    experts."""
    with torch.device("meta"):
        model = fresh()
    flops, _ = sample_flops(model, (torch.zeros(2, 40, dtype=torch.int64),))
    dense = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
    )
    active = dense + 2 * (E * 8 + J * 3 * 4 * 8)
    assert flops == 40 * (6 * active + 12 * 3 * 8 * 40)


def test_in_16_bits_what_is_counted_stays_in_32() -> None:
    model = parallelize(fresh(score="sigmoid"), ALONE, precision="bfloat16")
    types = []

    def record(gate: Router, inputs: tuple[Tensor], outputs: tuple[Tensor, Tensor]) -> None:
        tensors = (
            *inputs,
            gate.weight,
            gate.e_score_correction_bias,
            gate.balance.loads,
            outputs[1],
        )
        types.append([x.dtype for x in tensors])

    model.model.layers[1].mlp.gate.register_forward_hook(record)
    microbatches(model, TOKENS[0], 7)
    assert types == [2 * [torch.bfloat16] + 3 * [torch.float32]]
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all()
        for p in model.parameters()
        if p.requires_grad
    )
