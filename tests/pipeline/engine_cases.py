"""Run under torchrun: the engine against one process, and what it sends, keeps and frees; prints what failed.

engine_cases.py FOLDER        2 or 4 processes; a user's schedule is written into FOLDER
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshtrain.config import Config
from meshtrain.config.locate import model_file
from meshtrain.data.batch import Batch
from meshtrain.evaluate import evaluate
from meshtrain.generate import generate
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import join
from meshtrain.layout import Layout
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.modeling.build import build_model, plain_model
from meshtrain.modeling.init import initialise, materialise
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel import ddp, fsdp
from meshtrain.parallel.grad_sync import finish_reduce, set_is_last_backward, start_reduce
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, run_weight_grads
from meshtrain.parallel.mixed_precision import master_dtype
from meshtrain.parallel.parallelize import ParallelOptions, apply_data_parallel, apply_tensor_parallel
from meshtrain.parallel.sharding import local_part
from meshtrain.pipeline.actions import Action, Kind, Schedule
from meshtrain.pipeline.engine import Pipeline, shapes_of
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.pipeline.simulate import simulate
from meshtrain.trainer import Trainer
from tests.parallel.tensor_parallel_cases import Cases, Created
from tests.parity.experiments import QUICKSTART
from tests.pipeline.formulas import csv_text

V, D = 24, 16  # vocabulary and width
MODEL = (
    f"model={{name: llama, hidden_size: {D}, intermediate_size: 24, num_hidden_layers: 6, num_attention_heads: 4, "
    f"num_key_value_heads: 2, vocab_size: {V}}}",
    "data.source=tokens",
    "data.path=tests",
    "train.precision=float64",
)
CPU = torch.device("cpu")
ALONE = Mesh(Layout({}), 0, "cpu", None, {})


def config(layout: dict[str, int], schedule: str, microbatches: int, *more: str) -> Config:
    """A config with `microbatches` of two samples on each data rank."""
    samples = 2 * microbatches * layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    batch = (f"batch.global_size={samples}", "batch.micro_size=2", f"pipeline.schedule={schedule}")
    return Config.load(QUICKSTART, [*MODEL, f"layout={layout}", *batch, *more])


class Step:
    """A step's microbatches of (b, s) tokens, with several s in turn if given; keeps the losses that it has seen."""

    def __init__(self, microbatches: int, b: int = 2, s: int | Sequence[int] = 12, seed: int = 0) -> None:
        draws, lengths = torch.Generator().manual_seed(seed), [s] if isinstance(s, int) else s
        self.tokens = [torch.randint(V, (b, lengths[i % len(lengths)]), generator=draws) for i in range(microbatches)]
        self.losses: dict[int, Tensor] = {}

    def shapes(self, microbatch: int) -> tuple[tuple[int, ...] | None, ...]:
        return shapes_of(self.inputs(microbatch))

    def inputs(self, microbatch: int) -> tuple[Tensor | None, ...]:
        tokens = self.tokens[microbatch]
        return tokens, torch.arange(tokens.shape[1])[None], None  # a later stage may have only a part of the tokens

    def loss(self, microbatch: int, output: Tensor) -> Tensor:
        self.losses[microbatch] = sample_losses(output, self.tokens[microbatch]).sum()
        return self.losses[microbatch]

    @contextmanager
    def around(self, stage: nn.Module, action: Action) -> Iterator[None]:
        yield


class Watched(Step):
    """A step that also counts the live graphs of stage forwards, and live outputs that were sent, after each action."""

    def __init__(self, microbatches: int, schedule: Schedule) -> None:
        super().__init__(microbatches)
        self.schedule = schedule
        self.graphs: list[StorageWeakRef] = []
        self.outputs: list[StorageWeakRef] = []
        self.seen: list[tuple[Action, int, int]] = []

    @contextmanager
    def around(self, stage: nn.Module, action: Action) -> Iterator[None]:
        hook = stage.register_forward_hook(self._watch)
        yield
        hook.remove()
        if action.kind is Kind.FORWARD and not self.schedule.sends(action):
            self.outputs.pop()
        graphs, outputs = (sum(not ref.expired() for ref in refs) for refs in (self.graphs, self.outputs))
        self.seen.append((action, graphs, outputs))

    def _watch(self, stage: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Adds an operation that keeps a tensor of its own alive as long as its graph."""
        mark = torch.ones(output.shape[0], *[1] * (output.dim() - 1), dtype=output.dtype)
        self.graphs.append(StorageWeakRef(mark.untyped_storage()))
        marked = output * mark
        self.outputs.append(StorageWeakRef(marked.untyped_storage()))
        return marked


class Sums(Step):
    """Logs when reductions of gradients start, when they are waited for, and when a parameter has its gradient."""

    def __init__(self, microbatches: int, group: Any) -> None:
        super().__init__(microbatches)
        self.log: list[tuple[str, Any]] = []
        self._all_reduce, self._reduce_scatter, self._group = dist.all_reduce, fsdp.reduce_scatter, group

    @contextmanager
    def around(self, stage: nn.Module, action: Action) -> Iterator[None]:
        self.log.append(("begin", action))
        yield
        self.log.append(("end", action))

    def start(self, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        work = self._all_reduce(tensor, group=group, async_op=async_op)
        if group is not self._group:
            return work
        self.log.append(("start", tensor.numel()))
        return Mock(wait=lambda: (self.log.append(("wait", tensor.numel())), work.wait()))

    def scatter(self, output: Tensor, whole: Tensor, group: Any) -> None:
        self.log.append(("start", whole.numel()))
        self._reduce_scatter(output, whole, group)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        hooks = [
            p.register_post_accumulate_grad_hook(lambda p: self.log.append(("grad", p))) for p in model.parameters()
        ]
        with patch("torch.distributed.all_reduce", self.start), patch.object(fsdp, "reduce_scatter", self.scatter):
            yield
        for hook in hooks:
            hook.remove()


class Sent:
    """Counts the bytes of tensors sent point to point, and records the groups over which they were sent."""

    def __enter__(self) -> "Sent":
        self.bytes, self._send = 0, dist.isend
        self.groups: dict[int, set[Any]] = {}  # by target rank
        dist.isend = self._count
        return self

    def __exit__(self, *error: object) -> None:
        dist.isend = self._send

    def _count(self, tensor: Tensor, *to: Any, **named: Any) -> Any:
        self.bytes += tensor.nbytes
        if to:  # between stages: (rank of the job, group)
            self.groups.setdefault(to[0], set()).add(to[1])
        return self._send(tensor, *to, **named)


class Engine(Cases):
    def pipeline(self, layout: dict[str, int], schedule: str, microbatches: int, *more: str) -> Pipeline:
        self.mesh = build_mesh(Layout(layout))
        model = build_model(config(layout, schedule, microbatches, *more), self.mesh, CPU)
        assert isinstance(model, Pipeline)
        return model

    def plain(self, *more: str) -> nn.Module:
        return build_model(config({}, "1f1b", 1, *more), ALONE, CPU)

    def expected(self, work: Step, *more: str) -> dict[str, Tensor]:
        """The gradients of a step in one process."""
        model = self.plain(*more)
        for i in range(len(work.tokens)):
            sample_losses(model(*work.inputs(i)), work.tokens[i]).sum().backward()
        return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}

    def gradients(self, model: nn.Module, expected: dict[str, Tensor], what: str) -> None:
        seen = 0
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            self.same(grad, expected[name][local_part(parameter)[1]], f"{what}: {name}")
            seen += 1
        self.equal(seen > 0, True, f"{what}: there are gradients")

    def steps(self, schedule: str, *more: str, shapes: Sequence[tuple[int, int]] = ((2, 12), (3, 7), (2, 12))) -> None:
        """Consecutive steps: the second with other shapes, the third with the first shapes again; then a forward."""
        p = dist.get_world_size()
        m = p + 1
        model = self.pipeline({"pp": p}, schedule, m, *more)
        for shape in shapes:
            model.zero_grad()
            work = Step(m, *shape, seed=sum(shape))
            model.run(work)
            self.gradients(model, self.expected(work, *more), f"{schedule} {more}, {shape}")
            self.equal(len(work.losses), m if model._rank == model._last_rank else 0, f"{schedule}: losses")
        for shape in shapes[:2]:
            inputs = Step(1, *shape).inputs(0)
            with torch.no_grad():
                found = model(*inputs)
            self.equal(found is not None, model._rank == model._last_rank, f"{schedule}: who has the logits")
            if found is not None:
                self.same(found, self.plain(*more)(*inputs).detach(), f"{schedule}: forward of {shape}")

    def ragged(self, schedule: str) -> None:
        """Microbatches of different lengths in one step, and other lengths in the same places in the next step."""
        p = dist.get_world_size()
        model = self.pipeline({"pp": p}, schedule, p + 3)
        for lengths in ((12, 7, 12, 5), (7, 12, 9)):
            model.zero_grad()
            work = Step(p + 3, s=lengths)
            model.run(work)
            self.gradients(model, self.expected(work), f"{schedule}, microbatches of {lengths} tokens")

    def evaluated(self, schedule: str) -> None:
        """An evaluation of batches of two lengths: the loss of one process; the last stage starts only after the first
        has had three batches; and inputs and targets are copied only where they are used."""
        p = dist.get_world_size()
        model, work, key = self.pipeline({"pp": p}, schedule, p), Step(4 * p + 3, s=(12, 7)), f"evaluated {schedule}"
        batches = [Batch.of(work.inputs(i), tokens) for i, tokens in enumerate(work.tokens)]
        store, to, first, last = dist.distributed_c10d._get_default_store(), Batch.to, [], []
        ends = tuple(model.schedule.rank_of(stage) == model._rank for stage in (0, model.schedule.stages - 1))

        def enter(stage: nn.Module, inputs: Any) -> None:
            last.append(stage)
            if len(last) == 1:
                store.wait([key], timedelta(seconds=120))

        def leave(stage: nn.Module, *unused: Any) -> None:
            first.append(stage)
            if len(first) == 3:
                store.set(key, "three")

        def move(batch: Batch, *place: Any) -> Batch:
            self.equal(place[2:], ends, f"{schedule}: what is copied")
            return to(batch, *place)

        if ends[0]:
            model.stage(0).register_forward_hook(leave)
        if ends[1]:
            model.stage(model.schedule.stages - 1).register_forward_pre_hook(enter)
        with patch.object(Batch, "to", move):
            found = evaluate(model, batches, self.mesh, CPU, torch.float64)
        expected = evaluate(self.plain(), batches, ALONE, CPU, torch.float64)
        self.same(torch.tensor(found.loss), torch.tensor(expected.loss), f"{schedule}: evaluation")
        count = len(batches) if any(ends) else 0
        self.equal((found.targets, len(first or last)), (expected.targets, count), f"{schedule}: batches")

    def memory(self, schedule: str) -> None:
        """Graphs live from a forward to its input gradient, outputs until they are sent, and nothing remains."""
        p = dist.get_world_size()
        m = 3 * p
        model = self.pipeline({"pp": p}, schedule, m)
        model.run(Step(m))  # allocates the gradients
        work = Watched(m, model.schedule)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        with Created(besides=(*model.parameters(), *grads, *work.tokens)) as created:
            model.run(work)
        plan = simulate(model.schedule)
        held, peak, rank = 0, 0, self.mesh.index("pp")
        for action, graphs, outputs in work.seen:
            held += action.kind is Kind.FORWARD
            held -= action.kind.gives_input_grad
            self.equal(graphs, held, f"{schedule}: graphs alive after {action}")
            self.equal(outputs <= held, True, f"{schedule}: {outputs} outputs alive after {action}, with {held} graphs")
            peak = max(peak, graphs)
        self.equal(peak <= plan.peak_activations[rank], True, f"{schedule}: {peak} graphs, {plan.peak_activations}")
        if all(action.kind is not Kind.WEIGHT_GRAD for action in model.schedule.actions_of(rank)):
            self.equal(peak, plan.peak_activations[rank], f"{schedule}: the most graphs at once")
        work.losses.clear()
        self.equal(created.held(), 0, f"{schedule}: bytes that outlive the step")

    def bytes_sent(self, layout: dict[str, int], schedule: str, *more: str) -> None:
        """Sent over pp: for each microbatch, an activation and a gradient at every boundary between ranks."""
        m = 4
        model = self.pipeline(layout, schedule, m, *more)
        work = Step(m)
        model.run(work)  # finds the shapes
        self.mesh.comm_bytes.restart()
        with Sent() as sent:
            model.run(work)
        own = self.mesh.comm_bytes.by_kind("pp").get("send", 0)
        total = torch.tensor(own)
        dist.all_reduce(total, group=self.mesh.group("pp"))
        ranks = [model.schedule.rank_of(stage) for stage in range(model.schedule.stages)]
        boundaries = sum(a != b for a, b in pairwise(ranks))
        expected = 2 * m * boundaries * (2 * 12 * D) * 8 // layout.get("tp", 1)
        self.equal(int(total), expected, f"{layout} {schedule}: bytes over pp")
        if layout.keys() == {"pp"}:
            self.equal(sent.bytes, own, f"{schedule}: bytes by torch")

    def links(self, schedule: str) -> None:
        """As on NCCL: a group per neighbour and direction; nothing is sent over another group."""
        p = dist.get_world_size()
        with patch("meshtrain.mesh.IN_TURN", ("cpu",)):
            model = self.pipeline({"pp": p}, schedule, p + 1)
        work = Step(p + 1)
        with Sent() as sent:
            model.run(work)
        self.gradients(model, self.expected(work), f"{schedule}, linked")
        rank, over_all = dist.get_rank(), self.mesh.group("pp")
        near = {(rank + 1) % p, (rank - 1) % p}
        every = [self.mesh.link(*ends) for other in near for ends in ((rank, other), (other, rank))]
        self.equal(len({*every, over_all}), 2 * len(near) + 1, f"{schedule}: groups of this rank")
        for other in set(range(p)) - near:
            self.equal(self.mesh.link(rank, other), over_all, f"{schedule}: no link to {other}")
        for target, groups in sent.groups.items():
            self.equal(groups, {self.mesh.link(rank, target)}, f"{schedule}: over which group {target} gets its own")

    def data_ranks(self, axis: str, schedule: str) -> None:
        """DDP reduces once per step, FSDP gathers and reduces each stage once per step, however many microbatches."""
        model = self.pipeline({"pp": 2, axis: 2}, schedule, 6)
        work = Step(6)
        for _ in range(2):
            model.zero_grad()
            self.mesh.comm_bytes.restart()
            model.run(work)
            size = sum(p.numel() for p in model.parameters()) * 8
            kinds = {"all_reduce": size} if axis == "dp_replicate" else {"all_gather": size // 2}
            if axis == "dp_shard":
                kinds["reduce_scatter"] = size // 2
            self.equal(self.mesh.comm_bytes.by_kind(axis), kinds, f"{axis} {schedule}: bytes by kind")
        twice = {name: 2 * grad for name, grad in self.expected(work).items()}  # both data ranks have the same samples
        self.gradients(model, twice, f"{axis} {schedule}")

    def sums(self, axis: str, schedule: str) -> None:
        """A stage's reductions start within its last backward, or right after its last weight gradients, in the same
        order on all data ranks; nothing waits for them before the last action of the rank."""
        with patch.object(ddp, "BUCKET_BYTES", 2000):
            model = self.pipeline({"pp": 2, axis: 2}, schedule, 3)
        work, what = Sums(3, self.mesh.group(axis)), f"{axis} {schedule}"
        with work.watching(model):
            model.run(work)
        self.gradients(model, {name: 2 * grad for name, grad in self.expected(work).items()}, what)
        last = {action.stage: action for action in model.schedule.actions_of(self.mesh.index("pp"))}
        starts = dict.fromkeys(last.values(), 0)
        latest, running, early = None, False, set()
        for kind, about in work.log:
            if kind in ("begin", "end"):
                latest, running = about, kind == "begin"
            elif kind == "start":
                self.equal(latest in starts, True, f"{what}: a sum starts at {latest}")
                self.equal(running, latest.kind is not Kind.WEIGHT_GRAD, f"{what}: a sum starts during {latest}")
                starts[latest] += 1
            elif kind == "grad" and starts.get(latest):
                early.add(latest)
        for action, count in starts.items():
            stage: Any = model.stage(action.stage)
            units = {m._get_fsdp_state() for m in stage.modules() if isinstance(m, FSDPModule)}
            full = [unit for unit in units if unit._fsdp_param_group is not None]
            parts = len(full) if axis == "dp_shard" else len(stage.gradient_syncs[0]._buckets)
            self.equal(count, parts, f"{what}: sums of {action}")
            if action.kind is not Kind.WEIGHT_GRAD and axis == "dp_replicate":
                self.equal(action in early, True, f"{what}: a sum of {action} starts before its last gradient")
        kinds = [kind for kind, _ in work.log]
        done = len(kinds) - kinds[::-1].index("end")
        self.equal("wait" in kinds[:done], False, f"{what}: nothing waits before the end")
        self.equal(kinds.count("wait"), kinds.count("start") * (axis == "dp_replicate"), f"{what}: all is waited for")
        orders: list = [None, None]
        dist.all_gather_object(orders, [about for kind, about in work.log if kind == "start"], self.mesh.group(axis))
        self.equal(orders[0], orders[1], f"{what}: one order on all data ranks")

    def trained(
        self, layout: dict[str, int], schedule: str, *more: str, alone: Sequence[str] = ()
    ) -> tuple[Pipeline, nn.Module]:
        """Optimizer steps: the same losses and norms as in one process, which also gets the keys of `alone`."""
        more = (*more, "optimizer.warmup_steps=0", "optimizer.lr=0.01")
        work = Step(3)
        model = self.pipeline(layout, schedule, 3, *more)
        cfg = config(layout, schedule, 3, *more)
        optimizer = Optimizer(model, cfg.optimizer, self.mesh, 10)
        trainer = Trainer(model, optimizer, cfg, self.mesh, CPU, task="language", timer=StepTimer(CPU))
        plain = self.plain(*more, *alone)
        known = Trainer(
            plain, Optimizer(plain, cfg.optimizer, ALONE, 10), cfg, ALONE, CPU, task="language", timer=StepTimer(CPU)
        )
        batches = [Batch.of(work.inputs(i), tokens) for i, tokens in enumerate(work.tokens)]
        for step in range(1, 5):
            results = []
            for one in (trainer, known):
                one.forward_backward(step, batches)
                results.append(one.optimizer_step(step)())
            for what in ("loss", "grad_norm"):
                found, expected = (torch.tensor(getattr(result, what)) for result in results)
                self.same(found, expected, f"{layout} {schedule} {more}: {what} of step {step}")
        return model, plain

    def tied(self, layout: dict[str, int], schedule: str) -> None:
        """Copies of a tied weight stay bit-equal, and it counts once in the norm."""
        model, alone = self.trained(layout, schedule, "model.tie_word_embeddings=true")
        name = "model.embed_tokens.weight"
        copies = [p for n, p in model.named_parameters() if n == name]
        first, last = model.schedule.rank_of(0), model.schedule.rank_of(model.schedule.stages - 1)
        self.equal(len(copies), [first, last].count(self.mesh.index("pp")), f"tied {schedule}: copies here")
        for copy in copies:
            part, where = local_part(copy)
            weight = dict(alone.named_parameters())[name]
            self.same(part, weight[where].detach(), f"tied {layout} {schedule}: against one process")
        if copies:
            mine = local_part(copies[0])[0].detach()
            self.equal(all(torch.equal(mine, local_part(c)[0]) for c in copies), True, f"tied {schedule}: here")
        if first != last:  # compare with the copy of the last stage's rank
            other = torch.zeros(local_shape(self.mesh, model, name), dtype=torch.float64)
            if self.mesh.index("pp") == last:
                other.copy_(mine)
            dist.broadcast(other, group_src=last, group=self.mesh.group("pp"))
            if copies:
                self.equal(torch.equal(mine, other), True, f"tied {layout} {schedule}: the same bits on both ranks")

    def tied_ahead(self, schedule: str) -> None:
        """The gradient of a tied weight from another stage is received while this rank computes, from the second step
        on; each stage sends its gradient once."""
        p = dist.get_world_size()
        model = self.pipeline({"pp": p}, schedule, p + 1, "model.tie_word_embeddings=true")
        own, log, receive = self.mesh.index("pp"), [], dist.irecv

        def irecv(tensor: Tensor, *source: Any, **named: Any) -> Any:
            log.append("receive")
            return receive(tensor, *source, **named)

        for step in (1, 2):
            work = Step(p + 1)
            work.around = lambda stage, action: nullcontext(log.append("act"))  # type: ignore[method-assign]
            log.clear()
            model.zero_grad()
            self.mesh.comm_bytes.restart()
            with patch("torch.distributed.irecv", irecv):
                model.run(work)
            what = f"tied ahead, {schedule}, step {step}"
            self.gradients(model, self.expected(work, "model.tie_word_embeddings=true"), what)
            tied = own in (model.schedule.rank_of(0), model.schedule.rank_of(model.schedule.stages - 1))
            if own == model.schedule.rank_of(0):  # its last action sends nothing
                self.equal(log[-1], "receive" if step == 1 else "act", f"{what}: what comes last")
        transfers = sum(len(model.schedule.sends(action)) for action in model._actions)
        self.equal(
            self.mesh.comm_bytes.by_kind("pp").get("send", 0),
            8 * D * (24 * transfers + V * tied),
            f"tied ahead, {schedule}: bytes",
        )

    def early_gradients(self, schedule: str, *more: str) -> None:
        """The last backward of a stage sends its input gradient before it computes weight gradients; other
        microbatches, and the first stage, keep torch's own layers and a single backward."""
        p = dist.get_world_size()
        model = self.pipeline({"pp": p}, schedule, p + 1, *more)
        log: list[Any] = []

        def run(deferred: Sequence[Any]) -> None:
            log.append("weights" if deferred else "nothing")
            run_weight_grads(deferred)

        def send(tensor: Tensor, *to: Any, **named: Any) -> Any:
            log.append("send")
            return dist_send(tensor, *to, **named)

        work, dist_send = Step(p + 1), dist.isend
        work.around = lambda stage, action: nullcontext(log.append(action))  # type: ignore[method-assign]
        with patch("meshtrain.pipeline.engine.run_weight_grads", run), patch("torch.distributed.isend", send):
            model.run(work)
        last = {action.stage: action for action in model._actions}
        for stage, action in last.items():
            rest = log[log.index(action) + 1 :][:2]
            expected = ["send", "weights"] if stage > 0 else []
            self.equal(rest[: len(expected)], expected, f"{schedule} {more}: behind {action}")
        self.equal(log.count("weights"), sum(stage > 0 for stage in last), f"{schedule} {more}: split backwards")
        self.gradients(model, self.expected(work, *more), f"{schedule} {more}: the last one split")

    def compiled(self) -> None:
        """Compiled blocks with recomputation and several microbatches in flight; without slow code generation."""
        more = ("model.hidden_dropout=0.2", "model.num_hidden_layers=2", "parallel.compile=true")
        with patch("torch.compile", partial(torch.compile, backend="aot_eager_decomp_partition")):
            for recompute in ("full", "selective"):
                how = f"parallel.recompute={recompute}"
                self.trained({"pp": 2}, "1f1b", *more, how, alone=("parallel.compile=false",))
            self.steps("1f1b", *more[1:], shapes=[(2, 12)])
        torch._dynamo.reset()

    def text(self, schedule: str) -> None:
        p = dist.get_world_size()
        models = (self.pipeline({"pp": p}, schedule, p), self.plain())
        found = [generate(model, [1, 2, 3], 20, seq_len=12, device=CPU, seed=5) for model in models]
        self.equal(found[0], found[1], f"{schedule}: text")
        self.equal(len(set(found[1])) > 3, True, "the text is worth comparing")

    def own_schedule(self, folder: Path) -> None:
        """A CSV file with a zero-bubble schedule under another name."""
        p = dist.get_world_size()
        path = folder / "mine.csv"
        if dist.get_rank() == 0:
            path.write_text(csv_text(build("zbv", ranks=p, microbatches=p + 1)))
        dist.barrier()
        self.steps(str(path))
        model = self.pipeline({"pp": p}, str(path), p + 1)
        self.equal((model.schedule.name, model.schedule.stages_per_rank), ("mine", 2), "the schedule of the file")

    def later(self, kv: int, precision: str, frozen: bool = False, **how: Any) -> None:
        """Tensor-parallel layers defer weight gradients with the same bits; nothing is deferred for frozen weights."""
        self.mesh = build_mesh(Layout({"tp": 2}))
        what, found = f"later, {kv} key/value heads, {precision}, frozen {frozen}, {how}", []
        for split in (False, True):
            later = WeightGradQueue()
            keys = [f"model.num_key_value_heads={kv}", "model.num_attention_heads=4", "model.hidden_size=16"]
            keys += ["model.name=tests/models/frozen.py"] * frozen
            model = split_and_deferred(
                self.mesh, keys, ParallelOptions(precision=precision, **how), later if split else None
            )
            set_is_last_backward(model, False)
            losses = [sample_losses(model(tokens), tokens).sum() for tokens in Step(2).tokens]
            dues = []
            for loss in losses:
                if split:
                    with later.record() as due:
                        loss.backward()
                    dues.append(due)
                else:
                    loss.backward()
            early = {name for name, p in model.named_parameters() if p.grad is not None}
            for due in dues:
                leads = [grad for one in due for grad in one.compute() if grad.requires_grad]
                self.equal(len(leads), 0, f"{what}: what is left leads back into the forward")
                run_weight_grads(due)
            start_reduce(model)
            finish_reduce(model)
            if split:
                bad = sorted(name for name in early if "proj" in name or "lm_head" in name)
                self.equal(bad, [], f"{what}: gradients before their time")
            found.append({name: local_part(p.grad)[0] for name, p in model.named_parameters() if p.grad is not None})
        self.equal(found[0].keys(), found[1].keys(), f"{what}: which have gradients")
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self.equal(found[1].keys(), trained, f"{what}: which are trained")
        for name, grad in found[0].items():
            self.equal(torch.equal(found[1][name], grad), True, f"{what}: bits of {name}")


def split_and_deferred(
    mesh: Mesh, keys: Sequence[str], how: ParallelOptions, later: WeightGradQueue | None
) -> nn.Module:
    """A model over tp, made like a stage in `build_model`."""
    cfg = config({}, "1f1b", 1, *keys)
    model = plain_model(cfg)
    model.to(master_dtype(how.precision))
    how = apply_tensor_parallel(model, mesh, how)
    if later is not None:
        use_products(model, queue=later)
    materialise(model, CPU)
    initialise(model, model_file("llama").init_plan, seed=0, std=0.2)
    return apply_data_parallel(model, mesh, how)


def local_shape(mesh: Mesh, model: Pipeline, name: str) -> tuple[int, ...]:
    """The shape of this rank's part of a tied weight, also if the rank's stages do not have it."""
    return V // mesh.size("tp") // mesh.size("dp_shard"), D


def two(cases: Engine, folder: Path) -> None:
    for kv in (2, 1):
        cases.later(kv, "float64")
        cases.later(kv, "float64", sequence_parallel=False)
        cases.later(kv, "float32", recompute="full", regather=True)
    cases.later(2, "float64", frozen=True, regather=True)
    cases.later(1, "float64", frozen=True, recompute="full", sequence_parallel=False)
    cases.later(2, "bfloat16", recompute="selective")
    cases.later(2, "bfloat16", recompute="full")
    for schedule in NAMES:
        cases.steps(schedule)
        cases.memory(schedule)
        cases.bytes_sent({"pp": 2}, schedule)
    cases.steps("zbv", "parallel.recompute=full")
    cases.steps("zb-h2", "parallel.recompute=selective", "pipeline.split=[1, 8]")
    cases.steps("interleaved-zb", "pipeline.stages_per_rank=4")
    for schedule in ("1f1b", "zbv"):
        cases.evaluated(schedule)
        cases.text(schedule)
        cases.tied({"pp": 2}, schedule)
        cases.ragged(schedule)
    for schedule in ("1f1b", "looped-bfs"):
        cases.tied_ahead(schedule)
    for schedule in ("1f1b", "interleaved-1f1b"):
        cases.early_gradients(schedule)
    cases.early_gradients("1f1b", "parallel.recompute=full")
    cases.own_schedule(folder)
    cases.links("zbv")
    cases.compiled()


def four(cases: Engine, folder: Path) -> None:
    for schedule in NAMES:
        cases.steps(schedule)
        cases.memory(schedule)
        cases.bytes_sent({"pp": 4}, schedule)
    for schedule in ("1f1b", "looped-bfs", "zbv"):
        for axis in ("dp_replicate", "dp_shard"):
            cases.data_ranks(axis, schedule)
            cases.sums(axis, schedule)
    for axis in ("dp_replicate", "dp_shard", "tp"):
        for schedule in ("1f1b", "zbv"):
            cases.tied({"pp": 2, axis: 2}, schedule)
    for schedule in ("zb-h1", "zbv"):
        cases.bytes_sent({"pp": 2, "tp": 2}, schedule)
    cases.bytes_sent({"pp": 2, "dp_shard": 2}, "v-half")
    cases.text("v-min")
    cases.evaluated("interleaved-1f1b")
    cases.ragged("interleaved-1f1b")
    for schedule in ("interleaved-1f1b", "zbv", "1f1b"):
        cases.links(schedule)
    with patch("meshtrain.mesh.IN_TURN", ("cpu",)):
        cases.tied_ahead("zb-h2")


def main() -> None:
    job = join(read_environment(os.environ))
    with job_exit(job):
        job.connect(300)
        fsdp.MIN_UNIT_SIZE = 0  # every block is gathered separately
        torch.set_num_threads(1)
        cases = Engine(build_mesh(Layout({"pp": job.world_size})))
        (two if job.world_size == 2 else four)(cases, Path(sys.argv[1]))
        cases.tell()


if __name__ == "__main__":
    main()
