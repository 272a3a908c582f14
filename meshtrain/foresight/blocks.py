"""The work of each block of a model on a rank, counted in a traced step of one microbatch.

Of blocks that are alike one is traced. Everything is affine in the samples of a microbatch: one and two are traced.
Blocks are traced as they are when they are not compiled.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshtrain.config import Config
from meshtrain.errors import InputError
from meshtrain.foresight.live import WITHOUT_SHAPES, is_view, watched
from meshtrain.foresight.memory import short_schedule
from meshtrain.foresight.model import alike, repeated, untraced_errors
from meshtrain.foresight.trace import META, TracedStep, fake_world, prepared_batch
from meshtrain.foresight.work import Pass, Product, Send, Work
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import implementations
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear import weight_grad as weight_grads
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, add_or_compute
from meshtrain.parallel.torch_private import to_local
from meshtrain.pipeline.stage import blocks_of

SENT_OVER = ("tp", "cp", "cp_heads", "cp_ring", "ep")  # by blocks; what FSDP and DDP send is not theirs
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "detach")  # operators that start no kernel
WEIGHT_GRAD = "weight gradient"  # the phase of what a schedule may put off; see parallel/linear/weight_grad.py
Pairs = dict[int, tuple[Work, Work]]  # block -> its work for one sample and for two
# What works depend on, but for the samples -> pairs, or why there are none, and samples -> works of all blocks.
_known: dict[tuple[Any, ...], tuple[Pairs | InputError, dict[int, tuple[Work, ...]]]] = {}


def works_of(config: Config, layout: Layout) -> tuple[Work, ...]:
    """Of each block, in order, for one microbatch; blocks of a kind have the same. Raises InputError: the model refuses
    the layout, or cannot be traced."""
    key = _key(config, layout)
    if key not in _known:
        _known[key] = _counted(config, layout), {}
    pairs, known = _known[key]
    if isinstance(pairs, InputError):
        raise pairs
    more = config.batch.micro_size - 1
    if more not in known:
        works = {i: _extended(*pair, more) for i, pair in pairs.items()}
        known[more] = tuple(works[i] for i in alike(config))
    return known[more]


def count_works(configs: Iterable[Config], pool: Executor | None) -> None:
    """Counts what `works_of` will be asked for, in processes at once."""
    placed = [(config, config.resolved) for config in configs if config.resolved is not None]
    unknown = [(key, case) for key, case in {_key(*case): case for case in placed}.items() if key not in _known]
    for key, case in unknown[:1]:  # here, so that what it imports is there in every process
        _known[key] = _counted(*case), {}
    if pool is not None and unknown[1:]:
        counted = pool.map(_counted, *zip(*(case for _, case in unknown[1:]), strict=True))
        _known.update({key: (pairs, {}) for (key, _), pairs in zip(unknown[1:], counted, strict=True)})


def _splits(config: Config, layout: Layout) -> bool:
    """Whether weight gradients are put off."""
    section, ranks = config.pipeline, layout.size("pp")
    return ranks > 1 and short_schedule(section.schedule, ranks, section.stages_per_rank).splits_backward


def _key(config: Config, layout: Layout) -> tuple[Any, ...]:
    """What works depend on, but for the samples."""
    parallel, train = config.parallel, config.train
    key: tuple[Any, ...] = (config.model.name, repr(config.model.keys), config.data.seq_len, config.data.mask_documents)
    key += (layout.size("cp"), layout.size("tp"), layout.experts, layout.context_heads)
    key += (parallel.context, parallel.recompute, parallel.regather, parallel.sequence_parallel)
    key += (train.precision, train.linear_precision, train.freeze, train.lora)
    # Without a queue of weight gradients torch's own layers may be in the place of ours.
    return *key, _splits(config, layout) and (layout.experts > 1 or parallel.recompute == "full")


def _counted(config: Config, layout: Layout) -> Pairs | InputError:
    """Of each block but for those that are like one before; on as few ranks as can be."""
    skipped, splits, cp, tp = repeated(alike(config)), _splits(config, layout), layout.size("cp"), layout.size("tp")
    small = Layout({"dp_shard": max(1, layout.experts // (cp * tp)), "cp": cp, "tp": tp})
    layout = small.with_context_heads(layout.context_heads).with_experts(layout.experts)
    config = replace(config, layout=layout.sizes, resolved=layout)
    config = replace(config, parallel=replace(config.parallel, compile=False))
    of_samples = [
        replace(config, batch=replace(config.batch, micro_size=n, global_size=n * layout.size("dp_shard")))
        for n in (1, 2)
    ]
    try:
        # What FSDP gathers and copies is not the blocks'.
        with untraced_errors(), fake_world(layout, 0, "cuda") as mesh, patch.object(Mesh, "uses_fsdp", False):
            step = CountedStep(of_samples[0], mesh, META, skipped)
            if splits:
                use_products(step.model, queue=WeightGradQueue())  # as the pipeline has
            pairs = zip(*step.works(of_samples), strict=True)
            return {i: pair for i, pair in enumerate(pairs) if i not in skipped}
    except InputError as error:
        return error


def _times(products: Sequence[Product]) -> dict[Product, float]:
    times: dict[Product, float] = defaultdict(float)
    for product in products:
        times[replace(product, times=1)] += product.times
    return times


def _extended(first: Any, two: Any, samples: int) -> Any:
    """What is of one sample and of two, for so many samples more than one."""
    if isinstance(first, Work | Pass | Product | Send):
        fields = {name: _extended(value, getattr(two, name), samples) for name, value in vars(first).items()}
        return type(first)(**fields)
    if isinstance(first, tuple) and len(first) != len(two):  # the loss goes in chunks of tokens, more of them for more
        first, second = (_times(products) for products in (first, two))
        times = {
            product: _extended(first.get(product, 0), second.get(product, 0), samples) for product in first | second
        }
        return tuple(replace(product, times=n) for product, n in times.items())
    if isinstance(first, tuple):
        return tuple(_extended(*pair, samples) for pair in zip(first, two, strict=True))
    return first if isinstance(first, str) or first == two else first + samples * (two - first)


@dataclass
class Tally:
    """What one pass through a block does."""

    products: list[Product] = field(default_factory=list)
    attention_flops: float = 0
    moved: float = 0
    operators: int = 0
    sends: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def as_pass(self) -> Pass:
        sends = tuple(Send(axis, kind, sent) for (axis, kind), sent in self.sends.items())
        return Pass(tuple(self.products), self.attention_flops, self.moved, self.operators, sends)


class CountedStep(TracedStep):
    """A step whose operators are counted by block, forward and backward apart."""

    def works(self, configs: Sequence[Config]) -> list[tuple[Work, ...]]:
        """Of each block, for microbatches of these configs; what runs outside of blocks counts as the last one's."""
        blocks = list(blocks_of(self.model))
        names = {block: name for name, block in self.model.named_modules() if block in set(blocks)}
        self.last = names[blocks[-1]]
        for block in blocks:
            block.forward = self._weighed(names[block], block.forward)
        add, comm_bytes = self.mesh.comm_bytes.add, self.mesh.comm_bytes

        def send(axis: str, kind: str, sent: float) -> None:
            add(axis, kind, sent)
            if axis in SENT_OVER:
                self._tally().sends[axis, kind] += sent

        comm_bytes.add = send  # type: ignore[method-assign]
        works = []
        with watched(self.live), patch.object(weight_grads, "add_or_compute", self._add_or_compute):
            for parameter in self.model.parameters():
                self.live.see(to_local(parameter.detach()))
            for config in (configs[0], *configs):  # the first step makes what stays
                batch = prepared_batch(config, self.mesh)
                routed = batch.targets.numel() * config.model.keys.get("num_experts_per_tok", 1)
                self.live.rows = routed // self.mesh.size("tp")
                self.tallies: dict[tuple[str, str], Tally] = defaultdict(Tally)
                self.bytes: dict[str, dict[str, float]] = defaultdict(dict)
                self.live.watch, self.live.block = self._count, ""
                self.trainer.forward_backward(1, [batch])
                works.append(tuple(self._work(block, names[block]) for block in blocks))
        return works[1:]

    def _add_or_compute(self, *layer: Any) -> Any:
        before, self.live.phase = self.live.phase, WEIGHT_GRAD
        try:
            return add_or_compute(*layer)
        finally:
            self.live.phase = before

    def _work(self, block: nn.Module, name: str) -> Work:
        rows = tuple(map(_before_fsdp, block.parameters()))
        parameters = sum(n * width for _, n, width, _ in rows)
        forward, input_grad, weight_grad = (
            self.tallies[name, phase].as_pass() for phase in ("forward", "backward", WEIGHT_GRAD)
        )
        sizes = self.bytes[name]
        saved = sizes["after"] - sizes["before"] - sizes["output"] + sizes["input"]
        peaks = sizes["peak"] - sizes["before"], sizes.get("backward", 0.0)
        return Work(name, parameters, forward, input_grad, weight_grad, saved, *peaks, rows)

    def _weighed(self, name: str, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            sizes, live = self.bytes[name], self.live
            sizes |= {"before": live.total, "input": _nbytes((args, kwargs)), "peak": live.total}
            output = forward(*args, **kwargs)
            sizes |= {"after": live.total, "output": _nbytes(output)}
            # A tensor of its own: its gradient's hooks are not those of the next block's input.
            return output if name == self.last else output.view_as(output)

        return run

    def _tally(self) -> Tally:
        return self.tallies[self.live.block or self.last, self._pass()]

    def _pass(self) -> str:
        return self.live.phase if self.live.phase in ("backward", WEIGHT_GRAD) else "forward"

    def _count(self, func: Any, args: Any, out: Any) -> None:
        name, block = func.name().split(".")[0], self.live.block
        if name in implementations and name not in WITHOUT_SHAPES:
            return  # what it does was counted
        on_device = any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, out)))
        if is_view(func) or not on_device or name.partition("::")[2] in FREE:
            return
        product, tally = _product(name, args, out), self._tally()
        tally.operators += 1
        if product is not None:
            tally.products.append(product)
        elif "attention" in name:
            tally.attention_flops += _attention_flops(name, args)
        else:
            tally.moved += _nbytes(args) + _nbytes(out)
        if block:
            sizes, total = self.bytes[block], self.live.total
            if self._pass() != "forward":
                sizes["backward"] = max(sizes.get("backward", 0.0), total - sizes.setdefault("start", total))
            else:
                sizes["peak"] = max(sizes["peak"], total)


def _before_fsdp(parameter: nn.Parameter) -> tuple[str, int, int, bool]:
    """By what FSDP shards what a rank has, its rows, the elements of one, and whether it is trained."""
    local, mesh = to_local(parameter.detach()), getattr(parameter, "device_mesh", None)
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) if mesh is not None else {}
    if "ep" in sizes or "efsdp" in sizes:  # experts, which are sharded along the dim that divides best
        return "efsdp", local.numel() * sizes.get("efsdp", 1), 1, parameter.requires_grad
    rows = len(local) if local.ndim else 1
    shards = sizes.get("dp_shard", 1) * sizes.get("fsdp", 1)
    return "fsdp", rows * shards, local.numel() // max(rows, 1), parameter.requires_grad


def _nbytes(tree: Any) -> float:
    return sum(x.numel() * x.itemsize for x in tree_leaves(tree) if isinstance(x, Tensor))


def _attention_flops(name: str, args: Any) -> float:
    """Of all pairs of tokens, as everyone counts them; a backward computes the scores again, and four products."""
    backward = "backward" in name
    q, k, v = args[backward : 3 + backward]
    keys = k.shape[2 if "dot_product" in name else 1]
    return 2 * q.numel() // q.shape[-1] * keys * (q.shape[-1] + v.shape[-1]) * (2.5 if backward else 1)


def _product(name: str, args: Any, out: Any) -> Product | None:
    """The product of matrices that an operator is; of a convolution at each position one of a vector."""
    name = name.removesuffix("_")
    if name in ("aten::convolution", "aten::convolution_backward"):
        backward = name.endswith("backward")
        x, weight, transposed = args[backward], args[1 + backward], args[6 + backward]
        places = x if transposed else args[0] if backward else out
        times = sum(args[-1][:2]) if backward else 1  # for the gradients of the input and of the weight
        return Product(places.numel() // places.shape[1], weight.shape[0], weight[0].numel(), times)
    a, b = args[1:3] if name in ("aten::addmm", "aten::baddbmm") else (*args, None, None)[:2]
    if name in ("aten::mm", "aten::addmm", "aten::_scaled_mm"):
        return Product(a.shape[0], b.shape[1], a.shape[1])
    if name in ("aten::bmm", "aten::baddbmm"):
        return Product(a.shape[1], b.shape[2], a.shape[2], a.shape[0])
    if name in ("aten::linear", "aten::matmul"):
        return Product(a.numel() // a.shape[-1], b.numel() // a.shape[-1], a.shape[-1])
    if name.startswith("meshtrain::grouped") and b.dim() == 2:  # of weights: each expert sums over its rows
        return Product(a.shape[1], b.shape[1], a.shape[0])
    if name.startswith("meshtrain::grouped"):
        width = b.shape[-1] if b.shape[-2] == a.shape[1] else b.shape[-2]
        return Product(max(1, a.shape[0] // b.shape[0]), width, a.shape[1], b.shape[0])
    return None
