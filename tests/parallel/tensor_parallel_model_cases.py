"""Run under torchrun: whole models split over `tp` against plain ones; prints what failed.

tensor_parallel_model_cases.py FOLDER: also trains a small run in each precision into FOLDER/PRECISION
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import _symmetric_memory

import meshtrain
from meshtrain.config import Config
from meshtrain.config.locate import model_file
from meshtrain.errors import InputError
from meshtrain.generate import generate
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import Job, join
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel import parallelize as parallelizing
from meshtrain.parallel import tensor_parallel as tensor
from meshtrain.parallel.collectives import axis_group
from meshtrain.parallel.grad_sync import defer_waits, finish_reduce, set_is_last_backward, start_reduce
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.matmul import PLAIN, PRODUCTS
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, run_weight_grads
from meshtrain.parallel.mixed_precision import ComputeCopies
from meshtrain.parallel.sharding import local_part
from meshtrain.parallel.torch_private import to_local
from meshtrain.train import run
from tests.parallel.tensor_parallel_cases import Cases, D, S, V, latent_attention, small_llama
from tests.parity.experiments import QUICKSTART, SMALL

DOCUMENT = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"
COMPILED: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "full", "regather": True},
)


class Biased(nn.Module):
    """A user's model, with a bias in every layer that can have one."""

    plan: ClassVar = {
        "words": "embedding_rowwise",
        "up": "colwise",
        "down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(V, D)
        self.up, self.down, self.head = nn.Linear(D, 7), nn.Linear(7, D), nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.head(x + self.down(F.silu(self.up(x))))


class Models(Cases):
    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        super().__init__(mesh)
        self.device = device

    def tokens(self, vocabulary: int = V) -> Tensor:
        return torch.randint(vocabulary, (2, S), generator=torch.Generator().manual_seed(1))

    def split(self, plain: nn.Module, **options: Any) -> nn.Module:
        return meshtrain.parallelize(plain, self.mesh, precision="float64", **options)

    def gradients(self, model: nn.Module, plain: nn.Module, what: str) -> None:
        for (name, parameter), known in zip(model.named_parameters(), plain.parameters(), strict=True):
            self.gradient(parameter, known, f"{what}: {name}")

    def losses(self, model: nn.Module, plain: nn.Module, what: str) -> None:
        """Compares the losses of the same tokens, and runs their backward."""
        tokens = self.tokens()
        found, expected = (sample_losses(one(tokens), tokens) for one in (model, plain))
        found.sum().backward()
        expected.sum().backward()
        self.same(found, expected, f"{what}: losses")

    def steps(self, make: Callable[..., nn.Module], keys: dict[str, Any], **options: Any) -> None:
        """Two steps of two microbatches: the first must leave nothing behind that affects the second. All data ranks
        have the same samples, so gradients are those of one times their number."""
        model, plain = self.split(make(**keys), **options), make(**keys).double()
        what = f"{self.mesh.layout}, {type(plain).__name__}, {keys}, {options}"
        copies = self.mesh.size("dp_replicate") > 1 and not self.mesh.uses_fsdp
        for step in (1, 2, 3) if copies else (1, 2):
            model.zero_grad()
            plain.zero_grad()
            if step == 3:  # as in a pipeline: reductions over tp follow those over the data ranks
                defer_waits(model)
            for last in (False, True):
                set_is_last_backward(model, last)
                self.losses(model, plain, f"{what}, step {step}")
            if step == 3:
                start_reduce(model)
                finish_reduce(model)
            for parameter in plain.parameters():
                assert parameter.grad is not None  # both models use all of theirs
                parameter.grad *= self.mesh.size(*DATA_AXES)
            self.gradients(model, plain, f"{what}, step {step}")

    def compiled(self) -> None:
        """A compiled block computes and sends the same as an eager one, with one graph for all layers and one for
        evaluation. Kernels, which take long to build, are generated for one option on one rank only."""
        for options in COMPILED:
            sent, generates = [], options.get("recompute") == "selective" and self.mesh.rank == 0
            backend = "inductor" if generates else "aot_eager_decomp_partition"
            for compiled in (False, True):
                torch._dynamo.reset()
                counters.clear()
                with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
                    model = self.split(small_llama(), compile=compiled, **options)
                plain, what = small_llama().double(), f"compile={compiled}, {options}"
                self.mesh.comm_bytes.restart()
                self.losses(model, plain, what)
                sent.append(self.mesh.comm_bytes.by_axis()["tp"])
                self.gradients(model, plain, what)
                self.equal(counters["stats"]["unique_graphs"], int(compiled), f"{what}: graphs")
                with torch.no_grad():
                    self.same(*(sample_losses(one(self.tokens()), self.tokens()) for one in (model, plain)), what)
                self.equal(counters["stats"]["unique_graphs"], 2 * compiled, f"{what}: graphs with an evaluation")
            # The compiler sees that the last reduction of a recomputed block is not needed.
            spared = 2 * 8 * 2 * S * 24 // 2 if options.get("recompute") == "full" else 0
            self.equal(sent[1], sent[0] - spared, f"{options}: bytes that a compiled model sends")

    def merged(self) -> None:
        """A compiled block in 16 bits, as on GPUs: a rank's rows of q, k and v form one weight, as do those of gate and
        up. Here computed in float64 and accumulated in float32."""
        for options in ({}, {"recompute": "selective", "regather": True}):
            torch._dynamo.reset()
            products: list[int] = []
            counted = replace(PLAIN, forward=lambda *of, made=products: made.append(1) or PLAIN.forward(*of))
            with (
                patch.object(parallelizing, "MERGED_ON", ("cpu",)),
                patch.object(parallelizing, "master_dtype", lambda precision: torch.float32),
                patch.dict(PRODUCTS, {PLAIN.name: counted}),
                patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")),
            ):
                model = self.split(small_llama(), compile=True, verify=False, **options)
                plain, what = small_llama().double(), f"merged, {options}"
                self.losses(model, plain, what)
            self.equal(len(products), 2 * 4 + 1, f"{what}: products")
            for parameter, known in zip(model.parameters(), plain.parameters(), strict=True):
                grad = known.grad[local_part(parameter)[1]]
                close = torch.allclose(to_local(parameter.grad).double(), grad, rtol=1e-6, atol=1e-6 * grad.abs().max())
                self.equal(close, True, f"{what}: gradients")

    def logits(self, vocabulary: int) -> None:
        """The result of `full_tensor`, and the gradients through it."""
        model, plain = self.split(small_llama(vocab_size=vocabulary)), small_llama(vocab_size=vocabulary).double()
        tokens = self.tokens(vocabulary)
        logits, expected = model(tokens), plain(tokens)
        full = logits.full_tensor()
        what = f"logits over {vocabulary} tokens"
        self.same(full, expected, what)
        full.square().sum().backward()
        expected.square().sum().backward()
        self.gradients(model, plain, what)

    def cross_entropy_of_torch(self) -> None:
        """torch's cross entropy must not mistake split logits for whole ones."""
        model, tokens = self.split(small_llama()), self.tokens()
        for how, loss in {
            "flat": lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()),
            "turned": lambda: F.cross_entropy(model(tokens).transpose(1, 2), tokens),
        }.items():
            self.equal(raises(RuntimeError, loss), True, f"cross entropy of split logits, {how}, raises")

    def text(self, make: Callable[[], nn.Module], temperature: float, sequence: bool) -> None:
        """Every rank generates the same text as one process, longer than the model's window."""
        prompt, found = [1, 2, 3], []
        for model in (self.split(make(), sequence_parallel=sequence), make().double()):
            settings: dict[str, Any] = {"seq_len": S, "device": self.device, "seed": 5, "temperature": temperature}
            found.append(generate(model, prompt, 20, **settings))
        self.equal(found[0], found[1], f"text of {make} at {temperature}, sequence_parallel={sequence}")
        self.equal(len(set(found[1])) > 3, True, "the text is worth comparing")

    def copies(self) -> None:
        """In 16 bits, microbatches share cast copies of the parts, and each step casts those that the previous one has
        changed (which a DTensor's version does not show): the same bits as if each forward cast its own. A backward
        after a forward whose weights have changed since, and are gone, is refused."""
        keys, tokens, found = Config.load(QUICKSTART, list(SMALL)).optimizer, self.tokens(), []
        for shared in (True, False):
            model = meshtrain.parallelize(small_llama(), self.mesh, precision="bfloat16")
            if not shared:
                model.gradient_syncs = [one for one in model.gradient_syncs if not isinstance(one, ComputeCopies)]
            optimizer = Optimizer(model, keys, self.mesh, 9)
            for step in (1, 2, 3):
                optimizer.zero_grad()
                for last in (False, False, True):
                    set_is_last_backward(model, last)
                    losses = sample_losses(model(tokens), tokens)
                    losses.sum().backward()
                    found.append(losses.tolist())
                optimizer.squared_norm()
                optimizer.update(step, None, torch.tensor(False))
        self.equal(found[:9], found[9:], "losses of shared copies")
        self.equal(len({losses[0] for losses in found}), 3, "steps with losses of their own")
        early = sample_losses(model(tokens), tokens).sum()
        with torch.no_grad():
            for parameter in model.parameters():
                to_local(parameter).mul_(1.1)
        sample_losses(model(tokens), tokens)
        self.equal(raises(RuntimeError, early.backward), True, "weights that changed before their backward")

    def snippet(self) -> None:
        """The layers in the docs' snippet, with the shapes stated there."""
        (text,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
        names = {"nn": nn, "mesh": self.mesh, **vars(tensor)}
        exec(text, names)
        t = self.mesh.size("tp")
        inside = names["up"](torch.randn(2, S // t, 256))
        self.equal(tuple(inside.shape), (2, S, 1024 // t), "shape behind the docs' column")
        self.equal(tuple(names["down"](inside).shape), (2, S // t, 256), "shape behind the docs' row")

    def symmetric_memory(self) -> None:
        refused = raises(InputError, lambda: self.split(small_llama(), symmetric_memory=True))
        self.equal(refused, True, "symmetric memory is refused on CPUs")

    def fused(self) -> None:
        """The fused kernels, through torch's reference implementations: how often they run, results, and bytes."""
        counts: Counter[str] = Counter()

        def counted(name: str, reference: Callable) -> Callable:
            return lambda *args, **named: counts.update([name]) or reference(*args, **named)

        library, group = torch.library.Library("symm_mem", "IMPL"), axis_group(self.mesh, "tp")
        for name in ("all_gather_matmul", "matmul_reduce_scatter"):
            reference = getattr(_symmetric_memory, f"_fused_{name}_fallback")
            library.impl(f"fused_{name}", counted(name, reference), "CPU")
        # Two layers with two gathers and two scatters each, and the head; input gradients of row-parallel layers gather
        # too. Those of column-parallel layers are reduced during the weight gradients, or fused if weights are frozen.
        for frozen, expected in (([], (9, 4)), (["q_proj", "k_proj", "v_proj"], (9, 6))):
            for options in ({}, {"regather": True}):
                what, sent = f"fused, {frozen} frozen, {options}", []
                for fused in (False, True):
                    plain = small_llama().double()
                    for name, parameter in plain.named_parameters():
                        parameter.requires_grad_(not any(layer in name for layer in frozen))
                    model = self.split(deepcopy(plain), **options)
                    self.mesh.comm_bytes.restart()
                    counts.clear()
                    with patch.object(group, "fused", fused):
                        self.losses(model, plain, what)
                    trained = [p for p in plain.parameters() if p.requires_grad]
                    for parameter, known in zip(
                        (p for p in model.parameters() if p.requires_grad), trained, strict=True
                    ):
                        self.gradient(parameter, known, what)
                    sent.append(self.mesh.comm_bytes.by_kind("tp"))
                found = counts["all_gather_matmul"], counts["matmul_reduce_scatter"]
                self.equal(found, expected, f"{what}: products with their gather, and with their scatter")
                self.equal(sent[1], sent[0], f"{what}: bytes")
        # With deferred weight gradients, as in a schedule that splits backwards: while its queue records.
        queue, found = WeightGradQueue(), []
        for fused in (False, True):
            model = self.split(small_llama())
            use_products(model, queue=queue)
            counts.clear()
            with patch.object(group, "fused", fused):
                loss = sample_losses(model(self.tokens()), self.tokens()).sum()
                with queue.record() as deferred:
                    loss.backward()
                run_weight_grads(deferred)
            found.append([parameter.grad for parameter in model.parameters()])
        self.equal(
            counts["matmul_reduce_scatter"], 4 + 2 * 2 + 1, "products with their scatter, weight gradients put off"
        )
        for ours, known in zip(*found, strict=True):
            self.same(to_local(ours), to_local(known), "fused, weight gradients put off")


def raises(kind: type[Exception], action: Callable[[], Any]) -> bool:
    try:
        action()
    except kind:
        return True
    return False


def train(job: Job, folder: str, layout: str) -> None:
    """A few steps in each precision, as the command trains; rotary angles must reach every block in float32."""
    llama, types = model_file("llama"), set()
    rotate = llama.rotate
    llama.rotate = lambda x, cos, sin: types.add((x.dtype, cos.dtype, sin.dtype)) or rotate(x, cos, sin)
    for precision in ("float32", "bfloat16", "float16"):
        keys = (f"train.precision={precision}", f"train.output={folder}/{precision}", f"data.cache={folder}/cache")
        overrides = [*SMALL, *keys, f"layout={layout}", "train.steps=6"]
        run(Config.load(QUICKSTART, overrides, world_size=job.world_size, for_training=True), job)
    assert types == {(x, torch.float32, torch.float32) for x in (torch.float32, torch.bfloat16, torch.float16)}


def main() -> None:
    job = join(read_environment(os.environ))
    with job_exit(job):
        job.connect(300)
        cases = Models(meshtrain.build_mesh(Layout({"tp": job.world_size})), job.device)
        for vocabulary in (V, 5):  # of 5 tokens, the last of 4 ranks has none
            cases.logits(vocabulary)
        cases.cross_entropy_of_torch()
        for sequence in (True, False):
            cases.steps(small_llama, {"tie_word_embeddings": True}, sequence_parallel=sequence)
            few = {"num_attention_heads": 12, "num_key_value_heads": 3}  # 3 is not a multiple of 2 or 4 ranks
            cases.steps(small_llama, few, sequence_parallel=sequence)
            cases.steps(Biased, {}, tp_plan=Biased.plan, sequence_parallel=sequence)
            for temperature in (0.8, 0.0):
                cases.text(small_llama, temperature, sequence)
            cases.text(latent_attention, 0.8, sequence)
        cases.snippet()
        cases.copies()
        cases.symmetric_memory()
        cases.fused()
        if job.world_size == 2:
            cases.compiled()
            cases.merged()
        else:  # reductions over tensor ranks follow those over data ranks
            for axis in DATA_AXES:
                cases.mesh = meshtrain.build_mesh(Layout({axis: 2, "tp": 2}))
                cases.steps(small_llama, {})
        cases.tell()
        train(job, sys.argv[1], "{tp: 2}" if job.world_size == 2 else "{dp_shard: 2, tp: 2}")


if __name__ == "__main__":
    main()
