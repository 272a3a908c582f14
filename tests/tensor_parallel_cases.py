"""Run under torchrun: tensor-parallel layers against plain ones, and what a step sends; prints what failed."""

import json
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshtrain
from meshtrain.layout import Layout
from meshtrain.locate import model_file
from meshtrain.loss import correct_predictions, sample_losses
from meshtrain.mesh import Mesh
from meshtrain.parallel.data import last_microbatch
from meshtrain.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, siblings
from meshtrain.parallel.vocabulary import whole
from meshtrain.parts import local_part

B, S, D, V = 2, 12, 10, 11  # samples, tokens, width, vocabulary
llama = model_file("llama")


class Cases:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.checked = 0
        self.failures: list[str] = []

    def same(self, found: Tensor, expected: Tensor, what: str) -> None:
        self.checked += 1
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-12, atol=1e-12):
            self.failures.append(f"rank {self.mesh.rank}: {what}")

    def equal(self, found: Any, expected: Any, what: str) -> None:
        self.checked += 1
        if found != expected:
            self.failures.append(f"rank {self.mesh.rank}: {what}: {found} and not {expected}")

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor, uneven where it does not divide."""
        each = -(-x.shape[dim] // self.mesh.size("tp"))
        i = self.mesh.index("tp")
        return x.narrow(dim, min(i * each, x.shape[dim]), max(0, min(each, x.shape[dim] - i * each)))

    def gradient(self, parameter: Tensor, plain: Tensor, what: str) -> None:
        assert parameter.grad is not None
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        self.same(grad, plain.grad[local_part(parameter)[1]], what)  # type: ignore[index]

    def layers(self, sequence: bool, regather: bool) -> None:
        """Embedding, two columns that read the same input, a row, and logits with their loss."""
        how = f"sequence_parallel={sequence}, regather={regather}: "
        torch.manual_seed(0)
        words, gate, up = nn.Embedding(V, D), nn.Linear(D, 7), nn.Linear(D, 7)
        down, head = nn.Linear(7, D), nn.Linear(D, V, bias=False)
        tokens, targets = torch.randint(V, (B, S)), torch.randint(V, (B, S))
        targets[0, :5] = -100
        e = VocabParallelEmbedding(words, self.mesh, sequence_parallel=sequence)
        g, u = (ColumnParallelLinear(x, self.mesh, sequence_parallel=sequence, regather=regather) for x in (gate, up))
        siblings([g, u])
        d = RowParallelLinear(down, self.mesh, sequence_parallel=sequence)
        h = ColumnParallelLinear(head, self.mesh, sequence_parallel=sequence, whole=True)

        x0 = words(tokens)
        y0 = x0 + down(F.silu(gate(x0)) * up(x0))
        logits0 = head(y0)
        losses0 = F.cross_entropy(logits0.flatten(0, 1), targets.flatten(), reduction="none").view(B, S).sum(1)
        (losses0 * torch.tensor([1.0, 3.0])).sum().backward()

        x = e(tokens)
        y = x + d(F.silu(g(x)) * u(x))
        logits = h(y)
        losses = sample_losses(logits, targets)
        (losses * torch.tensor([1.0, 3.0])).sum().backward()

        self.same(x, self.part(x0, 1) if sequence else x0, how + "embedding")
        self.same(y, self.part(y0, 1) if sequence else y0, how + "row")
        self.equal(tuple(logits.shape), (B, S, V), how + "shape of the logits")
        self.same(whole(logits), logits0.detach(), how + "logits")
        self.same(losses, losses0, how + "losses")
        self.equal(int(correct_predictions(logits, targets)), int(correct_predictions(logits0, targets)), how + "hits")
        for name, layer, plain in (
            ("words", e, words),
            ("gate", g, gate),
            ("up", u, up),
            ("down", d, down),
            ("head", h, head),
        ):
            self.gradient(layer.weight, plain.weight, how + name)
        self.gradient(g.bias, gate.bias, how + "bias of a column")
        if sequence:  # each rank saw its part of the sequence
            assert d.bias is not None
            dist.all_reduce(d.bias.grad.to_local(), group=self.mesh.group("tp"))  # type: ignore[union-attr]
        self.gradient(d.bias, down.bias, how + "bias of a row")

    def bytes_of_a_step(self, **options: Any) -> None:
        """What two microbatches of a small Llama send, by the counter, by torch, and by the formulas of the docs."""
        config = llama.Config(
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=V,
        )
        torch.manual_seed(0)
        model = meshtrain.parallelize(llama.Model(config).double(), self.mesh, precision="float64", **options)
        self.mesh.traffic.restart()
        tokens = torch.randint(V, (B, S))
        with Sent() as sent:
            for i in range(2):
                last_microbatch(model, i == 1)
                sample_losses(model(tokens), tokens).sum().backward()
        t = self.mesh.size("tp")
        found = self.mesh.traffic.by_kind("tp")
        norms = 7 * 24
        few = 3 * 2 * 12 * 24 if t > 2 else 0  # key/value weights that all ranks hold
        n = B * S * 24
        activations = 3 * 8 + 4
        if options.get("regather"):
            activations += 3 * 2 + 1
        if options.get("recompute") == "full":
            activations += 3 * 4
        share = (t - 1) / t
        loss = 2 * 3 * B * S * t * share
        sums = 2 * (few + (norms if options.get("sequence_parallel", True) else 0)) * share
        expected = round(8 * (2 * activations * n * share + loss + sums))
        total = sum(found.values())
        self.equal(
            abs(total - expected) <= 8, True, f"{options}: bytes by the counter {total}, by the formula {expected}"
        )
        # A tensor that does not divide is sent in parts that differ by an element: the counter takes their mean.
        self.equal(abs(sent.bytes - total) <= 64, True, f"{options}: bytes by torch {sent.bytes}, counted {total}")

    def saved_tensors(self, regather: bool) -> None:
        """What the forward of a block of a small Llama keeps for its backward, in elements."""
        config = llama.Config(
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=V,
        )
        model = meshtrain.parallelize(llama.Model(config), self.mesh, precision="float64", regather=regather)
        weights = {local_part(p)[0].untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor) and tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its place in memory
            return tensor

        t, n, d, f, h, e = self.mesh.size("tp"), B * S, 24, 40, 4, 6
        x = torch.randn(B, S // t, d, requires_grad=True).transpose(0, 1).contiguous().transpose(0, 1)
        angles = torch.rand(1, S, 1, e // 2)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model.layers[0](x, angles.cos(), angles.sin(), None)
        found = sum(tensor.untyped_storage().nbytes() // tensor.itemsize for tensor in kept.values())
        norms = 2 * (2 * n * d + n) // t  # of each: its input, the same normalised, and a number per token
        gathered = 2 * n * d // (t if regather else 1)
        heads = n * (4 * h * e + h) // t  # q, k, v, the output, and a number per query
        expected = norms + gathered + heads + 4 * n * f // t + 2 * S * e // 2
        self.equal(found, expected, f"saved tensors with regather={regather}")


class Sent(TorchDispatchMode):
    """Bytes that this rank really sends to others; any other communication is stray."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._send = dist.isend

    def __enter__(self) -> "Sent":
        dist.isend = self._count
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        dist.isend = self._send

    def _count(self, tensor: Tensor, **to: Any) -> Any:
        self.bytes += tensor.nbytes
        return self._send(tensor, **to)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d."):  # what is inside of an operator of ours is not seen here, but counted
            raise RuntimeError(f"a stray collective: {func}")
        return func(*args, **(kwargs or {}))


def main() -> None:
    torch.set_default_dtype(torch.float64)
    with meshtrain.start() as job:
        mesh = meshtrain.build_mesh(Layout({"tp": job.world_size}))
        cases = Cases(mesh)
        for sequence in (True, False):
            cases.layers(sequence, regather=False)
        cases.layers(True, regather=True)
        for options in (
            {},
            {"sequence_parallel": False},
            {"regather": True},
            {"recompute": "full"},
            {"recompute": "selective"},
            {"recompute": "selective", "regather": True},
        ):
            cases.bytes_of_a_step(**options)
        for regather in (False, True):
            cases.saved_tensors(regather)
        print(json.dumps({"checked": cases.checked, "failures": cases.failures}) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
