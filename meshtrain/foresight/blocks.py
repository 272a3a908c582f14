"""The work of each block of a model on a rank, counted in a traced step of one microbatch.

Of blocks that are alike only one is traced. All counts are affine in the number of samples of a
microbatch, so traces with one and two samples determine them for any number. Blocks are traced
uncompiled.
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

# axes over which blocks send; FSDP and DDP are counted apart
SENT_OVER = (
    "tp",
    "cp",
    "cp_heads",
    "cp_ring",
    "ep",
)
# operators that launch no kernel
FREE = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "detach",
)
# phase that zero-bubble schedules defer; see parallel/linear/weight_grad.py
WEIGHT_GRAD = "weight gradient"
Pairs = dict[int, tuple[Work, Work]]  # block -> its work for one sample and for two
# Cache: `_key` -> the pairs or the error that tracing raised, and samples - 1 -> works of all
# blocks.
_known: dict[tuple[Any, ...], tuple[Pairs | InputError, dict[int, tuple[Work, ...]]]] = {}


def works_of(config: Config, layout: Layout) -> tuple[Work, ...]:
    """Work of each block, in model order, for one microbatch; blocks that are alike share one
    object. Raises InputError: the model refuses the layout, or cannot be traced."""
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
    """Fills the cache of `works_of` for many configs, in the processes of a pool."""
    placed = [(config, config.resolved) for config in configs if config.resolved is not None]
    unknown = [
        (key, case)
        for key, case in {_key(*case): case for case in placed}.items()
        if key not in _known
    ]
    for key, case in unknown[:1]:  # in this process, so that forked ones have its imports
        _known[key] = _counted(*case), {}
    if pool is not None and unknown[1:]:
        counted = pool.map(_counted, *zip(*(case for _, case in unknown[1:]), strict=True))
        _known.update(
            {key: (pairs, {}) for (key, _), pairs in zip(unknown[1:], counted, strict=True)}
        )


def _splits(config: Config, layout: Layout) -> bool:
    """Whether the schedule computes weight gradients apart from input gradients."""
    section, ranks = config.pipeline, layout.size("pp")
    return (
        ranks > 1
        and short_schedule(section.schedule, ranks, section.stages_per_rank).splits_backward
    )


def _key(config: Config, layout: Layout) -> tuple[Any, ...]:
    """All that the works depend on, except for the number of samples."""
    parallel, train = config.parallel, config.train
    key: tuple[Any, ...] = (
        config.model.name,
        repr(config.model.keys),
        config.data.seq_len,
        config.data.mask_documents,
    )
    key += (layout.size("cp"), layout.size("tp"), layout.experts, layout.context_heads)
    key += (parallel.context, parallel.recompute, parallel.regather, parallel.sequence_parallel)
    key += (train.precision, train.linear_precision, train.freeze, train.lora)
    # A queue of weight gradients needs our linear layers, where torch's may do otherwise.
    return *key, _splits(config, layout) and (layout.experts > 1 or parallel.recompute == "full")


def _counted(config: Config, layout: Layout) -> Pairs | InputError:
    """Work of each block that is not like an earlier one, traced on as few ranks as possible."""
    skipped, splits, cp, tp = (
        repeated(alike(config)),
        _splits(config, layout),
        layout.size("cp"),
        layout.size("tp"),
    )
    layout = layout.resized({"dp_shard": max(1, layout.experts // (cp * tp)), "cp": cp, "tp": tp})
    config = replace(config, layout=layout.sizes, resolved=layout)
    config = replace(config, parallel=replace(config.parallel, compile=False))
    of_samples = [
        replace(
            config,
            batch=replace(config.batch, micro_size=n, global_size=n * layout.size("dp_shard")),
        )
        for n in (1, 2)
    ]
    try:
        # Without FSDP, whose gathers and copies are no work of the blocks.
        with (
            untraced_errors(),
            fake_world(layout, 0, "cuda") as mesh,
            patch.object(Mesh, "uses_fsdp", False),
        ):
            step = CountedStep(of_samples[0], mesh, META, skipped)
            if splits:
                use_products(step.model, queue=WeightGradQueue())  # as the pipeline does
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
    """Extrapolates from the values for one sample and for two to `1 + samples` samples."""
    if isinstance(first, Work | Pass | Product | Send):
        fields = {
            name: _extended(value, getattr(two, name), samples)
            for name, value in vars(first).items()
        }
        return type(first)(**fields)
    # the loss has one product per chunk of tokens
    if isinstance(first, tuple) and len(first) != len(two):
        first, second = (_times(products) for products in (first, two))
        times = {
            product: _extended(first.get(product, 0), second.get(product, 0), samples)
            for product in first | second
        }
        return tuple(replace(product, times=n) for product, n in times.items())
    if isinstance(first, tuple):
        return tuple(_extended(*pair, samples) for pair in zip(first, two, strict=True))
    return first if isinstance(first, str) or first == two else first + samples * (two - first)


@dataclass
class Tally:
    """Counts of one pass through a block."""

    products: list[Product] = field(default_factory=list)
    attention_flops: float = 0
    moved: float = 0
    operators: int = 0
    sends: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def as_pass(self) -> Pass:
        sends = tuple(Send(axis, kind, sent) for (axis, kind), sent in self.sends.items())
        return Pass(tuple(self.products), self.attention_flops, self.moved, self.operators, sends)


class CountedStep(TracedStep):
    """A step whose operators are counted by block and by pass."""

    def works(self, configs: Sequence[Config]) -> list[tuple[Work, ...]]:
        """Works of all blocks, for one microbatch of each config. What runs outside of blocks
        counts with the last."""
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
            # the first step creates lasting state and is not counted
            for config in (
                configs[0],
                *configs,
            ):
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
            # A view is a tensor of its own: the next block hooks its input's gradient.
            return output if name == self.last else output.view_as(output)

        return run

    def _tally(self) -> Tally:
        return self.tallies[self.live.block or self.last, self._pass()]

    def _pass(self) -> str:
        return self.live.phase if self.live.phase in ("backward", WEIGHT_GRAD) else "forward"

    def _count(self, func: Any, args: Any, out: Any) -> None:
        name, block = func.name().split(".")[0], self.live.block
        if name in implementations and name not in WITHOUT_SHAPES:
            return  # its inner operators were counted
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
                sizes["backward"] = max(
                    sizes.get("backward", 0.0), total - sizes.setdefault("start", total)
                )
            else:
                sizes["peak"] = max(sizes["peak"], total)


def _before_fsdp(parameter: nn.Parameter) -> tuple[str, int, int, bool]:
    """A row of `Work.rows` for a parameter."""
    local, mesh = to_local(parameter.detach()), getattr(parameter, "device_mesh", None)
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) if mesh is not None else {}
    # experts: sharded along the dim that divides best, so not padded
    if "ep" in sizes or "efsdp" in sizes:
        return "efsdp", local.numel() * sizes.get("efsdp", 1), 1, parameter.requires_grad
    rows = len(local) if local.ndim else 1
    shards = sizes.get("dp_shard", 1) * sizes.get("fsdp", 1)
    return "fsdp", rows * shards, local.numel() // max(rows, 1), parameter.requires_grad


def _nbytes(tree: Any) -> float:
    return sum(x.numel() * x.itemsize for x in tree_leaves(tree) if isinstance(x, Tensor))


def _attention_flops(name: str, args: Any) -> float:
    """FLOPs over all pairs of tokens, without causality, by convention; a backward has five
    products for the forward's two, as it computes the scores again."""
    backward = "backward" in name
    q, k, v = args[backward : 3 + backward]
    keys = k.shape[2 if "dot_product" in name else 1]
    return (
        2 * q.numel() // q.shape[-1] * keys * (q.shape[-1] + v.shape[-1]) * (2.5 if backward else 1)
    )


def _product(name: str, args: Any, out: Any) -> Product | None:
    """The matrix product that an operator computes, if any; a convolution multiplies a vector at
    each position."""
    name = name.removesuffix("_")
    if name in ("aten::convolution", "aten::convolution_backward"):
        backward = name.endswith("backward")
        x, weight, transposed = args[backward], args[1 + backward], args[6 + backward]
        places = x if transposed else args[0] if backward else out
        # for the gradients of the input and of the weight
        times = sum(args[-1][:2]) if backward else 1
        return Product(places.numel() // places.shape[1], weight.shape[0], weight[0].numel(), times)
    a, b = args[1:3] if name in ("aten::addmm", "aten::baddbmm") else (*args, None, None)[:2]
    if name in ("aten::mm", "aten::addmm", "aten::_scaled_mm"):
        return Product(a.shape[0], b.shape[1], a.shape[1])
    if name in ("aten::bmm", "aten::baddbmm"):
        return Product(a.shape[1], b.shape[2], a.shape[2], a.shape[0])
    if name in ("aten::linear", "aten::matmul"):
        return Product(a.numel() // a.shape[-1], b.numel() // a.shape[-1], a.shape[-1])
    # weight gradient: each expert sums over its rows
    if name.startswith("meshtrain::grouped") and b.dim() == 2:
        return Product(a.shape[1], b.shape[1], a.shape[0])
    if name.startswith("meshtrain::grouped"):
        width = b.shape[-1] if b.shape[-2] == a.shape[1] else b.shape[-2]
        return Product(max(1, a.shape[0] // b.shape[0]), width, a.shape[1], b.shape[0])
    return None
