"""Run under torchrun: tensor-parallel layers against plain ones, and the bytes a step sends; prints what failed."""

import gc
import itertools
import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshtrain
from meshtrain.config.locate import model_file
from meshtrain.data.batch import IGNORE
from meshtrain.layout import Layout
from meshtrain.loss import correct_predictions, sample_losses
from meshtrain.mesh import Mesh
from meshtrain.parallel import linear_cross_entropy
from meshtrain.parallel.cross_entropy import gather_logits
from meshtrain.parallel.grad_sync import set_is_last_backward
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.float8 import EMULATED
from meshtrain.parallel.linear_cross_entropy import LossRequest, fuse_loss, request_loss
from meshtrain.parallel.sharding import local_part
from meshtrain.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from meshtrain.rotary import Rotary

B, S, D, V = 2, 12, 10, 11  # samples, tokens, width, vocabulary
llama, deepseek = model_file("llama"), model_file("deepseek_v3")


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

    def tell(self) -> None:
        """Prints one line for the test that started this job."""
        print(json.dumps({"checked": self.checked, "failures": self.failures}) + "\n", end="", flush=True)

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
        """Embedding, two column-parallel layers with the same input, a row-parallel one, and logits with their loss."""
        how = f"sequence_parallel={sequence}, regather={regather}: "
        torch.manual_seed(0)
        words, gate, up = nn.Embedding(V, D), nn.Linear(D, 7), nn.Linear(D, 7)
        down, head = nn.Linear(7, D), nn.Linear(D, V, bias=False)
        tokens, targets = torch.randint(V, (B, S)), torch.randint(V, (B, S))
        targets[0, :5] = -100
        e = VocabParallelEmbedding(words, self.mesh, sequence_parallel=sequence)
        g, u = (ColumnParallelLinear(x, self.mesh, sequence_parallel=sequence, regather=regather) for x in (gate, up))
        d = RowParallelLinear(down, self.mesh, sequence_parallel=sequence)
        h = ColumnParallelLinear(head, self.mesh, sequence_parallel=sequence, use_local_output=False)

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
        self.same(gather_logits(logits), logits0.detach(), how + "logits")
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

    def ids_outside(self, token: int) -> None:
        """One rank's lookup fails, as that of a plain embedding does: no row of zeros stands for such an id."""
        layer, failed = VocabParallelEmbedding(nn.Embedding(V, D), self.mesh), 0
        try:
            layer(torch.full((B, S), token))
        except IndexError:
            failed = 1
            layer(torch.zeros(B, S, dtype=torch.int64))  # the others wait for its addend
        count = torch.tensor(failed)
        dist.all_reduce(count, group=self.mesh.group("tp"))
        self.equal(int(count), 1, f"ranks whose lookup of {token} in {V} words failed")

    def targets_outside(self, token: int) -> None:
        """A target that the vocabulary lacks has no loss, on any rank, with and without logits."""
        targets = torch.zeros(B, S, dtype=torch.int64)
        targets[0, 0], targets[0, 1] = IGNORE, token
        head, x = nn.Linear(D, V, bias=False), torch.randn(B, S, D)
        layer = ColumnParallelLinear(head, self.mesh, sequence_parallel=False, use_local_output=False)
        logits = layer(x)
        fuse_loss(layer, compiled=False)
        with torch.no_grad(), request_loss(LossRequest(lambda: targets)):
            for what, loss in (("logits", lambda: sample_losses(logits, targets)), ("no logits", lambda: layer(x))):
                said = ""
                try:
                    loss()
                except RuntimeError as error:
                    said = str(error)
                self.equal(f"0 to {V - 1}" in said, True, f"the target {token} with {what} is refused: {said!r}")

    def loss_without_logits(self, sequence: bool, vocabulary: int, factor: float | None) -> None:
        """In chunks of a size that divides nothing; of a vocabulary of 5, the last of 4 ranks has no part."""
        how = f"loss without logits, sequence_parallel={sequence}, {vocabulary} words, factor {factor}: "
        torch.manual_seed(0)
        head, x0 = nn.Linear(D, vocabulary, bias=False), torch.randn(B, S, D, requires_grad=True)
        targets = torch.randint(vocabulary, (B, S))
        targets[0, :5] = IGNORE
        losses0 = F.cross_entropy(head(x0).flatten(0, 1), targets.flatten(), reduction="none").view(B, S).sum(1)
        layer = ColumnParallelLinear(head, self.mesh, sequence_parallel=sequence, use_local_output=False)
        fuse_loss(layer, compiled=False)
        x = (self.part(x0, 1) if sequence else x0).detach().requires_grad_()
        self.mesh.comm_bytes.restart()
        scale = None if factor is None else lambda: torch.tensor(factor)
        with torch.set_grad_enabled(factor is not None), request_loss(LossRequest(lambda: targets, scale)) as request:
            output = layer(x)
        assert request.losses is not None
        self.same(request.losses, losses0.detach(), how + "losses")
        t, n = self.mesh.size("tp"), B * S
        sent = 3 * n * (t - 1) + (n * D * (t - 1) / t if sequence else 0)
        if factor is not None:
            (losses0.sum() * factor).backward()
            output.backward()
            assert x.grad is not None
            assert x0.grad is not None
            self.same(x.grad, self.part(x0.grad, 1) if sequence else x0.grad, how + "gradient of x")
            self.gradient(layer.weight, head.weight, how + "weight")
            sent += n * D * (1 if sequence else 2) * (t - 1) / t
        self.equal(sum(self.mesh.comm_bytes.by_kind("tp").values()), round(8 * sent), how + "bytes")

    def float8(self, sequence: bool) -> None:
        """Features of very different magnitudes, on different ranks: a rank's own scale would keep what a common scale
        rounds away."""
        torch.manual_seed(0)
        gate, down = nn.Linear(D, 7, bias=False), nn.Linear(7, D, bias=False)
        sizes = torch.logspace(0, -14, 7, base=2)
        gate.weight.data *= sizes[:, None]
        down.weight.data *= sizes
        whole, weights = torch.randn(B, S, D, requires_grad=True), torch.randn(B, S, D)
        g = ColumnParallelLinear(gate, self.mesh, sequence_parallel=sequence)
        d = RowParallelLinear(down, self.mesh, sequence_parallel=sequence)
        for layer in (gate, down, g, d):
            use_products(layer, EMULATED["float8"])
        x = (self.part(whole, 1) if sequence else whole).detach().requires_grad_()
        y0, y = down(gate(whole)), d(g(x))
        (y0 * weights).sum().backward()
        (y * (self.part(weights, 1) if sequence else weights)).sum().backward()
        self.same(y, self.part(y0, 1) if sequence else y0, f"float8, sequence_parallel={sequence}: row")
        self.gradient(g.weight, gate.weight, "float8: column's weight")
        self.gradient(d.weight, down.weight, "float8: row's weight")
        assert x.grad is not None
        assert whole.grad is not None
        self.same(x.grad, self.part(whole.grad, 1) if sequence else whole.grad, "float8: input of a column")

    def losses_of_large_logits(self) -> None:
        """Logits whose exponentials overflow."""
        torch.manual_seed(0)
        head, x, targets = nn.Linear(D, V, bias=False), torch.randn(B, S, D), torch.randint(V, (B, S))
        head.weight.data *= 10_000
        expected = F.cross_entropy(head(x).flatten(0, 1), targets.flatten(), reduction="none").view(B, S).sum(1)
        logits = ColumnParallelLinear(head, self.mesh, sequence_parallel=False, use_local_output=False)(x)
        self.same(sample_losses(logits, targets), expected, "losses of large logits")

    def bytes_of_a_step(self, **options: Any) -> None:
        """Bytes that two microbatches of a small Llama send: by the counter, by torch, and by the docs' formulas."""
        model = meshtrain.parallelize(small_llama(num_hidden_layers=3), self.mesh, precision="float64", **options)
        self.mesh.comm_bytes.restart()
        tokens = torch.randint(V, (B, S))
        with Sent() as sent:
            for i in range(2):
                set_is_last_backward(model, i == 1)
                sample_losses(model(tokens), tokens).sum().backward()
        t = self.mesh.size("tp")
        found = self.mesh.comm_bytes.by_kind("tp")
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
        # A tensor that does not divide is sent in parts that differ by an element: the counter uses their mean.
        self.equal(abs(sent.bytes - total) <= 64, True, f"{options}: bytes by torch {sent.bytes}, counted {total}")

    def bytes_of_latent_attention(self, sequence: bool) -> None:
        """Latents and the rotary key are sent, once each, instead of the block's input."""
        d, r = 24, 8 + 10 + 2
        options = {"sequence_parallel": sequence, "precision": "float64", "verify": False}
        model = meshtrain.parallelize(latent_attention(), self.mesh, **options)
        self.mesh.comm_bytes.restart()
        tokens = torch.randint(V, (B, S))
        with Sent() as sent:
            sample_losses(model(tokens), tokens).sum().backward()
        t, n = self.mesh.size("tp"), B * S
        share = (t - 1) / t
        sums = 2 * (3 * d + 8 * d + 8 + 12 * d + 10) * sequence
        expected = round(8 * share * (n * (6 * d + 2 * r) + 4 * n * d + 3 * n * t + sums))
        total = sum(self.mesh.comm_bytes.by_kind("tp").values())
        self.equal(abs(total - expected) <= 8, True, f"latent attention: bytes {total}, by the formula {expected}")
        self.equal(abs(sent.bytes - total) <= 64, True, f"latent attention: bytes by torch {sent.bytes}, not {total}")

    def saved_tensors(self, recompute: str, regather: bool, k: int) -> None:
        """The number of float32 elements that the forward of a block of a small Llama keeps for its backward."""
        plain = small_llama(num_hidden_layers=1, num_key_value_heads=k)
        model = meshtrain.parallelize(plain, self.mesh, recompute=recompute, regather=regather)
        t, n, d, f, h, e = self.mesh.size("tp"), B * S, 24, 40, 4, 6
        x = torch.randn(S // t, B, d, dtype=torch.float32).transpose(0, 1).requires_grad_()
        angles = torch.rand(1, S, 1, e // 2, dtype=torch.float32)
        with Created(besides=model.parameters()) as created:
            inputs = [x * 1, Rotary(angles.cos(), angles.sin())]
            y = model.model.layers[0](*inputs, None)
            del inputs
        of_next = y.untyped_storage().nbytes()  # the output, which the next block keeps as its input
        found = (created.held() - of_next) / 4

        block_input = n * d // t
        norms = 2 * (2 * n * d + n) // t  # of each norm: input, normalised input, and a number per token
        products = n * ((h + 2 * max(k, t)) * e + 2 * f) // t  # q, k, v, gate and up; at least one head per rank
        attended = n * (h * e + h) // t  # the output, and a number per query
        gathered = 2 * n * d if t > 1 and not regather else 0  # two gathered inputs
        scaled = 2 * n * d // t  # the norms' outputs
        expected = (
            2 * S * e // 2
            + {
                "none": norms + products + attended + 2 * n * f // t + (gathered or scaled),
                "selective": block_input + products + attended + gathered + 2 * n * d // t,
                "full": block_input,
            }[recompute]
        )
        self.equal(found, expected, f"saved tensors with recompute={recompute}, regather={regather}")


def small_llama(**keys: Any) -> nn.Module:
    """A small plain Llama, with the same weights at each call."""
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": V,
    }
    torch.manual_seed(0)
    return llama.Model(llama.Config(**(sizes | keys)))


def latent_attention() -> nn.Module:
    """A plain DeepSeek-V3 of one layer, without experts."""
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": V, "v_head_dim": 6}
    sizes |= {"q_lora_rank": 8, "kv_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2}
    torch.manual_seed(0)
    return deepseek.Model(deepseek.Config(**sizes, num_hidden_layers=1))


class Created(TorchDispatchMode):
    """Tracks the memory of all tensors made while active, whoever holds it in the end."""

    def __init__(self, besides: Iterable[Tensor]) -> None:
        """`besides`: tensors whose memory, also through views, does not count."""
        super().__init__()
        self._known = {local_part(tensor)[0].untyped_storage()._cdata for tensor in besides}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return made

    def held(self) -> int:
        """The bytes that are still held."""
        gc.collect()
        return sum(size for storage, size in self._made.values() if not storage.expired())


class Sent(TorchDispatchMode):
    """Bytes that this rank really sends to others; any other communication is an error."""

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
        if str(func).startswith("c10d."):  # calls inside our own operators are not seen here, but counted
            raise RuntimeError(f"a stray collective: {func}")
        return func(*args, **(kwargs or {}))


def main() -> None:
    torch.set_default_dtype(torch.float64)
    with meshtrain.start() as job:
        mesh = meshtrain.build_mesh(Layout({"tp": job.world_size}))
        cases = Cases(mesh)
        if job.world_size > 1:
            layers_and_bytes(cases)
        for recompute, regather in itertools.product(("none", "selective", "full"), (False, True)):
            for kv in (4, 2):
                cases.saved_tensors(recompute, regather, kv)
        cases.tell()


def layers_and_bytes(cases: Cases) -> None:
    for sequence in (True, False):
        cases.layers(sequence, regather=False)
        cases.float8(sequence)
        cases.bytes_of_latent_attention(sequence)
    cases.layers(True, regather=True)
    for token in (-1, V, V + 40):
        cases.ids_outside(token)
        cases.targets_outside(token)
    cases.losses_of_large_logits()
    linear_cross_entropy.CHUNK_TOKENS, linear_cross_entropy.CHUNK_LOGITS = 7, 0
    for sequence, vocabulary, factor in itertools.product((True, False), (V, 5), (None, 3.0)):
        cases.loss_without_logits(sequence, vocabulary, factor)
    for options in (
        {},
        {"sequence_parallel": False},
        {"regather": True},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "selective", "regather": True},
    ):
        cases.bytes_of_a_step(**options)


if __name__ == "__main__":
    main()
