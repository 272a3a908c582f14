"""Run under torchrun, on 2 processes: errors that the check of a split model finds, and what it must not change."""

import gc
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshtrain
from meshtrain.config.locate import model_file
from meshtrain.dropout import Dropout, set_dropout
from meshtrain.errors import AgreedError, InputError
from meshtrain.experts import Experts, Router
from meshtrain.layout import Layout
from meshtrain.loss import attach, sample_losses, seen_terms
from meshtrain.mesh import Mesh
from meshtrain.parallel import tensor_parallel as tensor
from meshtrain.parallel import verify
from meshtrain.parallel.linear.matmul import PLAIN, PRODUCTS
from meshtrain.parallel.parallelize import ParallelOptions, refuse_dependent_samples
from meshtrain.parallel.sharding import local_part
from meshtrain.parallel.torch_private import to_local
from meshtrain.parallel.tp_plan import REPLICATED
from meshtrain.parallel.verify import comparison
from tests.parallel.tensor_parallel_cases import B, Cases, D, S, V, llama, small_llama
from tests.parity.experiments import MODELS

AROUND = {"words": "embedding_rowwise", "head": "colwise_gather_output"}
PARTS = {**AROUND, "inner.[qkv]": "colwise", "inner.o": "rowwise"}
NORMS = {"inner.[qk]_norm": REPLICATED}


class Attention(nn.Module):
    """Attention with norms of q and k: per head, over all heads together, or none."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.norm = norm
        if norm == "head":
            self.q_norm, self.k_norm = nn.RMSNorm(5), nn.RMSNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.norm == "all":
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        q, k, v = (one.unflatten(-1, (-1, 5)).transpose(1, 2) for one in (q, k, v))
        if self.norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.q(x).chunk(2, -1)
        return self.o(F.silu(gate) * up)


class Vector(nn.Module):
    """A scale per feature between the column-wise and the row-wise layer, which would have to be split."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o, self.scale = nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) * self.scale)


class Around(nn.Module):
    """A model with one block around a given part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.words, self.norm, self.inner = nn.Embedding(V, D), nn.RMSNorm(D), inner
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.head(x + self.inner(self.norm(x)))


class Blocks(Around):
    """The given part is a block; takes a second input, which may be None."""

    def blocks(self) -> list[nn.Module]:
        return [self.inner]

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(tokens)


class Borrowing(Blocks):
    """Computes with the weight of its embedding, a block, outside of it."""

    def blocks(self) -> list[nn.Module]:
        return [self.words, self.inner]

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.words(tokens) + self.words(torch.arange(tokens.shape[1], device=self.words.weight.device))
        return F.linear(self.inner(x), self.words.weight)


class Noisy(nn.Module):
    """In training, draws random numbers, or takes a mean over features of which each rank has a part."""

    def __init__(self, draws: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.up, self.down, self.draws = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), draws

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.training:
            x = x - x.mean(-1, keepdim=True) if self.draws is None else self.draws(x)
        return self.down(torch.tanh(x))


DRAWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: F.dropout(x, 0.1),
    lambda x: x * random.random(),
    lambda x: x * np.random.rand(),
)


class Cut(Around):
    """A model whose own operators make logits whole."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return torch.cat([logits[..., :1], logits[..., 1:]], -1)


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Wrapping(Around):
    """Returns an object that holds its logits."""

    def forward(self, tokens: Tensor) -> Any:
        return Output(super().forward(tokens))


class Mixture(nn.Module):
    """A layer of experts; `centred`: tokens are routed by their difference from the mean of their sample."""

    def __init__(self, centred: bool, width: int = 4) -> None:
        super().__init__()
        self.gate, self.experts, self.centred = Router(D, 5, 2), Experts(5, D, width), centred

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x - x.mean(1, keepdim=True) if self.centred else x))


class Placed(Around):
    """Takes 16 tokens at most."""

    def __init__(self) -> None:
        super().__init__(Attention("head"))
        self.places = nn.Parameter(torch.zeros(16, D))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        return self.head(x + self.inner(self.norm(x)))


class Pooled(Around):
    def __init__(self) -> None:
        super().__init__(Attention("none"))
        self.head = nn.Linear(D, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.head((x + self.inner(self.norm(x))).mean(1))


class Normed(nn.Module):
    """One input that three layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x * 2) + self.v(x * 3)


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.q(x) + self.k(memory) + self.v(memory)


class Changing(nn.Module):
    """A block with a buffer, keyword arguments and several outputs, which modifies tensors in place."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.norm, self.up, self.down = number, nn.LayerNorm(D), nn.Linear(D, 7), nn.Linear(7, D)
        self.register_buffer("table", torch.linspace(1, 2, number))

    def forward(self, x: Tensor, *, turns: Tensor) -> tuple[Tensor, None, dict[str, Tensor]]:
        y = self.down(F.gelu(self.up(self.norm(x))) * turns.imag.sum() * self.table.sum())
        y += x
        return y, None, {"half": y / 2}


class Unusual(nn.Module):
    """`Changing` blocks, one of them run twice, tied weights, complex numbers, and a parameter outside all blocks."""

    plan: ClassVar = {**AROUND, "layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.head.weight = self.words.weight
        self.layers = nn.ModuleList(Changing(number) for number in (2, 3))
        self.scale = nn.Parameter(torch.ones(D))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))

    def blocks(self) -> list[nn.Module]:
        return [self.words, *self.layers, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) * self.scale
        for layer in [*self.layers, self.layers[0]]:
            y, _, more = layer(x, turns=self.turns)
            x = x + y
            x += more["half"]
        return self.head(x)


class Beside(nn.Module):
    """Does something with all samples of a batch."""

    def __init__(self, action: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.action = nn.Linear(D, D), action

    def forward(self, x: Tensor) -> Tensor:
        return self.action(self, torch.tanh(self.layer(x)))


def pairs(layer: nn.Module, x: Tensor) -> Tensor:
    return x + x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


DEPENDENT: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "output 0 differs by": lambda _, x: x - x.mean((0, 1)),
    "output 0 differs ": lambda layer, x: x / len(x) if layer.training else x,
    ": spread differs by": lambda _, x: attach(x, "spread", x.var(0).sum(-1).expand(x.shape[:2])),
}
INDEPENDENT: tuple[Callable[[nn.Module, Tensor], Tensor], ...] = (
    lambda _, x: attach(x - x.mean(1, keepdim=True), "square", x.square().mean(-1)),
    lambda _, x: x if not (bright := x.mean((1, 2)) > 0).any() else x.index_put((bright,), x[bright] * 2),
    lambda _, x: F.dropout(x, 0.5) if x.requires_grad else x,
    pairs,  # takes no batch of three: it is not compared
)


def counted(layer: Any, x: Tensor) -> Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1
    return x * layer.calls


def averaged(layer: Any, x: Tensor) -> Tensor:
    layer.mean = 0.9 * getattr(layer, "mean", 0.0) + 0.1 * layer.layer.weight.detach().norm()
    return x - layer.mean


def cached(layer: Any, x: Tensor) -> Tensor:
    """Keeps a table for each length, the last input, and a counter from which nothing follows."""
    layer.tables = getattr(layer, "tables", {})
    table = layer.tables.setdefault(x.shape[1], torch.arange(x.shape[1])[:, None].to(x.dtype))
    layer.last, layer.calls = x, getattr(layer, "calls", 0) + 1
    return x * table


class Rows(nn.Sequential):
    """A model of features without a sequence dim."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2
        return super().forward(x)


class Verified(Cases):
    def split(self, make: Callable[[], nn.Module], plan: dict[str, str], **options: Any) -> nn.Module:
        torch.manual_seed(0)
        return meshtrain.parallelize(make(), self.mesh, precision="float64", tp_plan=plan, **options)

    def refused(self, what: str, words: list[str], make: Callable[[], nn.Module], plan: Any, **options: Any) -> None:
        """Asserts that a split is refused with these words, by the check on all ranks unless `verify` is off."""
        said = ""
        try:
            self.split(make, plan, **options)
        except InputError as error:
            said = str(error)
            self.equal(isinstance(error, AgreedError), options.get("verify", True), f"{what}: agreed")
        self.equal([word for word in words if word not in said], [], f"{what}: said {said!r}, which lacks")

    def exact(self, what: str, make: Callable[[], nn.Module], plan: dict[str, str], **options: Any) -> None:
        model = self.split(make, plan, **options)
        torch.manual_seed(0)
        plain, tokens = make().double(), torch.randint(V, (B, S))
        targets = tokens if make is not Pooled else tokens[:, 0] % 3
        logits = [getattr(y, "logits", y) for y in (model(tokens), plain(tokens))]
        losses = [sample_losses(y, targets) for y in logits]
        for loss in losses:
            loss.sum().backward()
        self.same(losses[0], losses[1], f"{what}: losses")
        for (name, parameter), known in zip(model.named_parameters(), plain.parameters(), strict=True):
            self.gradient(parameter, known, f"{what}: gradient of {name}")

    def parameters_between(self) -> None:
        for sequence in (True, False):
            how = {"sequence_parallel": sequence}
            self.exact(f"norms of heads, {how}", lambda: Around(Attention("head")), PARTS | NORMS, **how)
            for plan in (PARTS, PARTS | {"inner": REPLICATED}):
                self.refused(
                    f"a norm over all heads, {how}", ["differs by"], lambda: Around(Attention("all")), plan, **how
                )
            vector = {**AROUND, "inner.q": "colwise", "inner.o": "rowwise"}
            self.refused(f"a vector, {how}", ["the model", "RuntimeError"], lambda: Around(Vector()), vector, **how)
        self.exact("norms of heads that are summed anyway", lambda: Around(Attention("head")), PARTS)
        make, whole = lambda: Around(Attention("head")), {"sequence_parallel": False}
        words = ["gradient of inner.q_norm.weight", f"give it the style {REPLICATED}"]
        self.refused("norms of heads that nobody sums", words, make, PARTS, **whole)
        words = ["inner.q_norm.weight, inner.k_norm.weight", f"give it the style {REPLICATED}"]
        self.refused("the same, unverified", words, make, PARTS, verify=False, **whole)
        self.exact("the same, with the style, unverified", make, PARTS | NORMS, verify=False, **whole)
        self.refused(
            "a norm that is no part", ["gradient of norm.weight"], make, PARTS | NORMS | {"norm": REPLICATED}, **whole
        )

    def other_models(self) -> None:
        plan = {**AROUND, "inner.q": "colwise", "inner.o": "rowwise"}
        for sequence in (True, False):
            self.refused("fused", ["differs by"], lambda: Around(Fused()), plan, sequence_parallel=sequence)
        pooled = {name: style for name, style in PARTS.items() if name != "head"}
        self.refused("pooled", ["the model's output", "sequence_parallel: false, which passes"], Pooled, pooled)
        self.exact("pooled, whole samples", Pooled, pooled, sequence_parallel=False)
        mixing = model_file(str(MODELS / "mixing.py"))
        for learned, words in ((0, ["blocks_.0: input 0 differs by"]), (16, ["what comes behind words fails"])):
            config = mixing.Config(vocab_size=V, hidden_size=D, learned_positions=learned)
            sample = (torch.randint(V, (2, 8)), torch.arange(8).expand(2, 8))
            words = [*words, "sequence_parallel: false, which passes"]
            make: Callable[[], nn.Module] = lambda config=config: mixing.Model(config)  # noqa: E731
            self.refused(f"mixing, {learned}", words, make, mixing.tp_plan, sample=sample)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.exact("16 tokens at most", Placed, PARTS | NORMS, sequence_parallel=False)
        sharded = {"0": "embedding_rowwise", "2": "colwise_gather_output"}
        self.refused(
            "a batch norm",
            ["1 is a BatchNorm1d", "or sequence_parallel"],
            lambda: nn.Sequential(nn.Embedding(V, D), nn.BatchNorm1d(D), nn.Linear(D, V)),
            sharded,
        )
        for sequence in (True, False):
            self.exact(f"unusual, {sequence}", Unusual, Unusual.plan, sequence_parallel=sequence)
        noisy = {**AROUND, "inner.up": "colwise", "inner.down": "rowwise"}
        self.refused("a mean in training", ["the model's output 0 differs by"], lambda: Around(Noisy(None)), noisy)
        for draws in DRAWS:
            before = random.getstate()
            self.split(lambda draws=draws: Around(Noisy(draws)), noisy)
            self.equal(random.getstate() == before, True, "the state of Python's generator")
        whole = {"sequence_parallel": False}
        self.exact("logits that are cut", lambda: Cut(Attention("head")), PARTS | NORMS, **whole)
        self.exact("an object around logits", lambda: Wrapping(Attention("head")), PARTS | NORMS)
        frozen = small_llama()
        frozen.model.layers.requires_grad_(False)
        self.split(lambda: frozen, llama.tp_plan)

    def mixture_of_experts(self) -> None:
        whole = {"sequence_parallel": False}
        self.exact("experts, held by all", lambda: Around(Mixture(False)), AROUND)
        self.exact("experts, held by all, whole samples", lambda: Around(Mixture(False)), AROUND, **whole)
        for mixture in (Mixture(True), Mixture(True, 4096)):  # also with the sums of wide experts
            self.refused("a sum over a part of a sample", ["output 0 differs by"], partial(Around, mixture), AROUND)
        dealt_out = Verified(meshtrain.build_mesh(self.mesh.layout.with_experts(self.mesh.size("tp"))))
        ep_plan = {"inner.experts": "ep_dispatch_experts"}
        dealt_out.exact("experts", lambda: Around(Mixture(False)), AROUND, ep_plan=ep_plan)
        for reason, options in (("leave it true", {**whole, "ep_plan": ep_plan}), ("has no ep_plan", {})):
            said = raised(lambda options=options: dealt_out.split(lambda: Around(Mixture(False)), AROUND, **options))
            self.equal(reason in said, True, f"{reason}: {said}")
        self.failures += dealt_out.failures

    def nothing_to_split_the_sequence(self) -> None:
        def make() -> nn.Module:
            return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

        plan = {"0": "colwise", "2": "rowwise"}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.split(make, plan)
            told = [str(one.message) for one in caught if "sequence_parallel is off" in str(one.message)]
        self.equal(len(told), int(self.mesh.rank == 0), "lines about sequence_parallel")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.split(make, plan, sequence_parallel=False, sample=(torch.randn(2, D),))
            self.equal([str(one.message) for one in caught], [], "warnings")
            self.split(lambda: Rows(*make()), plan, sequence_parallel=False)
            told = [str(one.message) for one in caught if "was not compared" in str(one.message)]
        self.equal(len(told), int(self.mesh.rank == 0), "lines about a sample that the model does not take")
        said = raised(lambda: self.split(make, plan, sequence_parallel=True))
        self.equal("no embedding_rowwise layer" in said, True, f"sequence_parallel=True is refused: {said}")
        said = raised(lambda: self.split(make, plan, sequence_parallel=False, sample=(torch.randn(2, D + 1),)))
        self.equal("the plain model does not take" in said, True, f"a given sample is taken: {said}")

    def dropout_of_single_tokens(self) -> None:
        def make() -> nn.Module:
            return nn.Sequential(nn.Embedding(V, D), Dropout(0.5), nn.Linear(D, V))

        model = self.split(make, {"0": "embedding_rowwise", "2": "colwise_gather_output"})
        for length, refused in ((self.mesh.size("tp"), True), (2 * self.mesh.size("tp"), False)):
            set_dropout(model, seed=0, step=1, samples=range(B))
            said = raised(lambda n=length: model(torch.zeros(B, n, dtype=torch.int64)))
            self.equal("each rank has one" in said, refused, f"dropout of {length} tokens: {said}")
        self.equal(
            raised(lambda: model.eval()(torch.zeros(B, self.mesh.size("tp"), dtype=torch.int64))), "nothing", "eval"
        )

    def samples_beside_others(self) -> None:
        """Over data ranks a sample may not depend on the others of its microbatch."""
        ranks = meshtrain.build_mesh(Layout({"dp_replicate": self.mesh.layout.world_size}))

        def said(
            inner: nn.Module, samples: int = 2, make: type[nn.Module] = Blocks, mesh: Mesh = ranks, **options: Any
        ) -> str:
            sample = (torch.randint(V, (samples, 8)), None)
            chosen, model = ParallelOptions(precision="float64", sample=sample, **options), make(inner)
            before = torch.get_rng_state()
            found = raised(lambda: refuse_dependent_samples(model, mesh, chosen, seen_terms))
            self.equal(torch.equal(torch.get_rng_state(), before), True, "the generator's state")
            return found

        for words, action in DEPENDENT.items():
            found = said(Beside(action))
            self.equal([part for part in ("inner", words, "use one data rank") if part not in found], [], found)
        centred = Beside(DEPENDENT["output 0 differs by"])
        self.equal(
            [said(Beside(action)) for action in INDEPENDENT], ["nothing"] * 4, "what depends on its sample alone"
        )
        rounded = Beside(lambda _, x: (x * (1 + 2**-8 * (len(x) - 2))).bfloat16().double())
        self.equal(said(rounded), "nothing", "16 bits that another size rounds in another way")
        exact = Beside(lambda _, x: x * (1 + 2**-8 * (len(x) - 2)))
        self.equal("output 0 differs by 0.0039" in said(exact), True, "the same difference of what is not rounded")
        for sign in (1, -1):  # the weight is positive in one of two draws: as if rounding had changed a router's choice
            chosen = Beside(lambda layer, x, sign=sign: x + (len(x) - 2) * (sign * layer.layer.weight[0, 0] > 0))
            self.equal(said(chosen), "nothing", f"a difference with one draw of weights alone, sign {sign}")
        self.equal(said(Mixture(True)), "nothing", "experts")
        self.equal(said(Beside(INDEPENDENT[0]), make=Borrowing), "nothing", "a borrowed weight")
        self.equal("output 0 differs" in said(centred, make=Borrowing), True, "a mean, and a borrowed weight")
        self.equal(said(centred, verify=False), "nothing", "verify is off")
        self.equal(said(centred, samples=1), "nothing", "one sample")
        alone, again = Mesh(Layout({}), 0, "cpu", None, {}), "in a second forward of the same samples: inner: output 0"
        for where, how in ((ranks, {}), (alone, {"recompute": "full"})):
            for action in (counted, averaged):
                found = said(Beside(action), mesh=where, **how)
                self.equal([part for part in (again, "recompute: none") if part not in found], [], found)
            self.equal(said(Beside(cached), mesh=where, **how), "nothing", "caches")
        self.equal(said(Beside(counted), mesh=alone), "nothing", "one process may count")
        self.equal(said(centred, mesh=alone, recompute="full"), "nothing", "one process may mix")
        model, sample = Around(centred), (torch.randint(V, (2, 8)),)
        found = raised(lambda: meshtrain.parallelize(model, ranks, precision="float64", sample=sample))
        self.equal("inner" in found or "the model's output" in found, True, f"in a loop of one's own: {found}")

    def faults(self) -> None:
        """One rank that computes something else suffices, and the others are told; so does a missing sum."""
        row, rank = tensor.RowParallelLinear.forward, self.mesh.rank
        tensor.RowParallelLinear.forward = lambda layer, x: row(layer, x) * (1 + 0.01 * rank)  # type: ignore[method-assign]
        said = raised(lambda: self.split(small_llama, llama.tp_plan))
        self.equal("model.layers.0: output 0 differs by 0.0" in said, True, f"a wrong rank: {said}")
        tensor.RowParallelLinear.forward = row  # type: ignore[method-assign]
        known = tensor.partial_parameters
        verify.partial_parameters = lambda model, sequence: known(model, False)
        said = raised(lambda: self.split(small_llama, llama.tp_plan))
        self.equal("norm.weight differs by" in said, True, f"norms that are not summed: {said}")
        verify.partial_parameters = known

    def leaves_all_alone(self) -> None:
        """The check changes no generator and no weight; identical blocks run once in each of the two models."""
        calls: list[int] = []
        torch.manual_seed(7)
        gc.collect()  # objects held by earlier refusals
        gc.disable()
        forward, before = llama.Layer.forward, torch.get_rng_state()
        llama.Layer.forward = lambda *args: (calls.append(1), forward(*args))[1]
        plain = small_llama(num_hidden_layers=6).double()
        weights = {name: value.clone() for name, value in plain.state_dict().items()}
        torch.set_rng_state(before)
        model = meshtrain.parallelize(plain, self.mesh, precision="float64")
        llama.Layer.forward = forward
        self.equal(
            sum(isinstance(one, comparison.Run) for one in gc.get_objects()), 0, "runs of the check that are held"
        )
        gc.enable()
        self.equal(len(calls), 2, "forwards of alike blocks")
        self.equal(torch.equal(torch.get_rng_state(), before), True, "the generator's state")
        for name, value in model.named_parameters():
            self.same(to_local(value.detach()), weights[name][local_part(value)[1]], f"weight {name}")
            self.equal(value.grad, None, f"gradient of {name}")

    def shared_inputs(self) -> None:
        """Layers that read two tensors: one product each, nothing cached; nor by a forward without gradients."""
        made: list[int] = []
        counted = replace(PLAIN, forward=lambda *of: made.append(1) or PLAIN.forward(*of))
        PRODUCTS[PLAIN.name] = counted
        how: dict[str, Any] = {"verify": False, "sequence_parallel": False}
        x, memory = (torch.randn(1, 4, D, dtype=torch.float64) for _ in range(2))
        cross = self.split(Cross, {"[qkv]": "colwise"}, **how)
        torch.manual_seed(0)
        plain = Cross().double()
        cross(x, memory).sum().backward()
        plain(x, memory).sum().backward()
        self.equal(len(made), 3, "products of a cross attention")
        for name, parameter in cross.named_parameters():
            self.gradient(parameter, plain.get_parameter(name), name)
        made.clear()
        self.split(Normed, {"[qkv]": "colwise"}, **how)(x)
        self.equal(len(made), 5, "products of layers that read what a forward makes of one tensor")
        made.clear()
        cross(x, x)
        self.equal(len(made), 3, "products of layers that read one tensor")
        with torch.no_grad():
            cross.q.shared_input.begin([x])
            cross.q(x)
            cross.q.shared_input.end()
        self.equal(cross.k(x).requires_grad, True, "what is computed anew after no_grad")
        gc.collect()
        kept = [
            one
            for one in gc.get_objects()
            if isinstance(one, tensor.SharedInput) and (one._outputs or one._input is not None)
        ]
        self.equal(kept, [], "inputs that keep something")
        PRODUCTS[PLAIN.name] = PLAIN

    def uneven_heads(self) -> None:
        """A forward makes no tensor from host data, which would synchronize."""
        few = {"num_attention_heads": 12, "num_key_value_heads": 3}
        model = meshtrain.parallelize(small_llama(**few), self.mesh, precision="float64")
        attention: Any = model.model.layers[0].self_attn
        self.equal(attention.k_proj.heads.repeated is not None, True, "heads are uneven")
        made, make = [], torch.tensor
        torch.tensor = lambda *args, **named: (made.append(args), make(*args, **named))[1]
        attention.k_proj(torch.randn(1, 4, 24, dtype=torch.float64))
        torch.tensor = make
        self.equal(made, [], "tensors made from numbers")


def raised(action: Callable[[], Any]) -> str:
    try:
        action()
    except InputError as error:
        return str(error)
    return "nothing"


def main() -> None:
    torch.set_default_dtype(torch.float64)
    with meshtrain.start() as job:
        cases = Verified(meshtrain.build_mesh(Layout({"tp": job.world_size})))
        cases.parameters_between()
        cases.other_models()
        cases.mixture_of_experts()
        cases.nothing_to_split_the_sequence()
        cases.dropout_of_single_tokens()
        cases.samples_beside_others()
        cases.faults()
        cases.leaves_all_alone()
        cases.shared_inputs()
        cases.uneven_heads()
        cases.tell()


if __name__ == "__main__":
    main()
