"""The work of each block of a model on a rank, counted in a traced step of one microbatch.

Of blocks that are alike only one is traced. All counts are affine in the number of samples of a
microbatch, so traces with one and two samples determine them for any number. Blocks are traced
uncompiled.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshtrain.config import Config
from meshtrain.errors import InputError
from meshtrain.foresight.fusion import Dataflow
from meshtrain.foresight.live import WITHOUT_SHAPES, is_view, watched
from meshtrain.foresight.memory import short_schedule
from meshtrain.foresight.model import alike, repeated, untraced_errors
from meshtrain.foresight.trace import (
    META,
    TracedStep,
    fake_world,
    prepared_batch,
    routed_rows,
)
from meshtrain.foresight.work import Parameter, Pass, Product, Send, Work
from meshtrain.layout import Layout
from meshtrain.mesh import CommBytes, Mesh
from meshtrain.parallel.collectives import axis_group, implementations
from meshtrain.parallel.linear import ProductsLayer, use_products
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, around_weight_grads
from meshtrain.parallel.mixed_precision import state_parameters
from meshtrain.parallel.torch_private import to_local
from meshtrain.pipeline.stage import blocks_of

# axes over which blocks send; FSDP and DDP are counted apart
SENT_OVER = ("tp", "cp", "cp_heads", "cp_ring", "ep")
# Begins of the names of operators that a compiler calls as they are, besides products and
# attention.
CALLED = ("embedding", "index_put", "scatter", "sort", "topk", "cumsum", "native_batch_norm")
# operators that launch no kernel
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "detach")
# Passes through a block, as phases of the step. Zero-bubble schedules defer the last one; see
# parallel/linear/weight_grad.py.
FORWARD, BACKWARD, WEIGHT_GRAD = "forward", "backward", "weight gradient"

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
    more_samples = config.batch.micro_size - 1
    if more_samples not in known:
        works = {
            i: _extrapolated(of_one, of_two, more_samples) for i, (of_one, of_two) in pairs.items()
        }
        known[more_samples] = tuple(works[i] for i in alike(config))
    return known[more_samples]


def count_works(configs: Iterable[Config], pool: Executor | None) -> None:
    """Fills the cache of `works_of` for many configs, in the processes of a pool."""
    unknown: dict[tuple[Any, ...], tuple[Config, Layout]] = {}
    for config in configs:
        if config.resolved is not None:
            key = _key(config, config.resolved)
            if key not in _known:
                unknown[key] = config, config.resolved
    if not unknown:
        return
    # The first one in this process, so that forked ones have its imports.
    first, *others = unknown
    _known[first] = _counted(*unknown[first]), {}
    if pool is not None and others:
        counted = pool.map(_counted, *zip(*(unknown[key] for key in others), strict=True))
        for key, pairs in zip(others, counted, strict=True):
            _known[key] = pairs, {}


def _splits_backward(config: Config, layout: Layout) -> bool:
    """Whether the schedule computes weight gradients apart from input gradients."""
    ranks = layout.size("pp")
    if ranks == 1:
        return False
    section = config.pipeline
    return short_schedule(section.schedule, ranks, section.stages_per_rank).splits_backward


def _key(config: Config, layout: Layout) -> tuple[Any, ...]:
    """All that the works depend on, except for the number of samples."""
    model, data, parallel, train = config.model, config.data, config.parallel, config.train
    # A queue of weight gradients needs our linear layers, where torch's may do otherwise.
    has_queue = _splits_backward(config, layout)
    has_own_layers = layout.experts > 1 or parallel.recompute == "full"
    return (
        model.name,
        repr(model.keys),
        data.seq_len,
        data.mask_documents,
        layout.size("cp"),
        layout.size("tp"),
        layout.experts,
        layout.context_heads,
        parallel.context,
        parallel.recompute,
        parallel.regather,
        parallel.sequence_parallel,
        train.precision,
        train.linear_precision,
        train.freeze,
        train.lora,
        has_queue and has_own_layers,
    )


def _counted(config: Config, layout: Layout) -> Pairs | InputError:
    """Work of each block that is not like an earlier one, traced on as few ranks as possible."""
    skipped = repeated(alike(config))
    splits_backward = _splits_backward(config, layout)
    cp, tp = layout.size("cp"), layout.size("tp")
    for_experts = max(1, layout.experts // (cp * tp))
    few = layout.resized({"dp_shard": for_experts, "cp": cp, "tp": tp})
    config = replace(
        config,
        layout=few.sizes,
        resolved=few,
        parallel=replace(config.parallel, compile=False),
    )
    of_samples = [
        replace(config, batch=replace(config.batch, micro_size=n, global_size=n * for_experts))
        for n in (1, 2)
    ]
    try:
        with untraced_errors(), fake_world(few, 0, "cuda") as mesh:
            step = CountedStep(of_samples[0], _UnshardedMesh.of(mesh), META, skipped)
            if splits_backward:
                _put_off_weight_grads(step.model)
            of_one, of_two = step.works(of_samples)
    except InputError as error:
        return error
    pairs = enumerate(zip(of_one, of_two, strict=True))
    return {i: pair for i, pair in pairs if i not in skipped}


def _put_off_weight_grads(model: nn.Module) -> None:
    """Gives linear layers a queue of weight gradients, as the pipeline does."""
    layers = [module for module in model.modules() if isinstance(module, ProductsLayer)]
    products = [layer.products for layer in layers]
    use_products(model, queue=WeightGradQueue())
    for layer, own in zip(layers, products, strict=True):
        layer.products = own  # those of float8 stay


class _SentBytes(CommBytes):
    """Bytes that this rank sent, whose listener hears of every message."""

    listener: Callable[[str, str, float], None] | None = None

    def add(self, axis: str, kind: str, sent: float) -> None:
        super().add(axis, kind, sent)
        if self.listener is not None:
            self.listener(axis, kind, sent)


class _UnshardedMesh(Mesh):
    """A mesh without FSDP, whose gathers and copies are no work of the blocks."""

    @classmethod
    def of(cls, mesh: Mesh) -> "_UnshardedMesh":
        own = {one.name: getattr(mesh, one.name) for one in fields(mesh)}
        return cls(**(own | {"comm_bytes": _SentBytes()}))

    @property
    def uses_fsdp(self) -> bool:
        return False


# From one sample and two to any number ------------------------------------------------------------


def _extrapolated(of_one: Any, of_two: Any, more: int) -> Any:
    """The value for `1 + more` samples, from the same value for one sample and for two."""
    if isinstance(of_one, Work | Pass | Product | Send):
        changed = {
            name: _extrapolated(value, getattr(of_two, name), more)
            for name, value in vars(of_one).items()
        }
        return type(of_one)(**changed)
    if isinstance(of_one, tuple) and len(of_one) != len(of_two):
        # The loss has one product per chunk of tokens: their sizes stay, their numbers change.
        return _extrapolated_products(of_one, of_two, more)
    if isinstance(of_one, tuple):
        pairs = zip(of_one, of_two, strict=True)
        return tuple(_extrapolated(first, second, more) for first, second in pairs)
    if isinstance(of_one, str | Parameter) or of_one == of_two:
        return of_one
    return of_one + more * (of_two - of_one)


def _extrapolated_products(
    of_one: Sequence[Product], of_two: Sequence[Product], more: int
) -> tuple[Product, ...]:
    once, twice = _times(of_one), _times(of_two)
    products = []
    for product in once | twice:
        times = _extrapolated(once.get(product, 0), twice.get(product, 0), more)
        products.append(replace(product, times=times))
    return tuple(products)


def _times(products: Sequence[Product]) -> dict[Product, float]:
    """A product of each size -> how many there are."""
    times: dict[Product, float] = defaultdict(float)
    for product in products:
        times[replace(product, times=1)] += product.times
    return times


# Counting -----------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts of one pass through a block."""

    products: list[Product] = field(default_factory=list)
    attention_flops: float = 0
    moved: float = 0
    operators: int = 0
    sends: list[Send] = field(default_factory=list)
    dataflow: Dataflow = field(default_factory=Dataflow)

    def as_pass(self, compiles: bool) -> Pass:
        """`compiles`: whether the block can be compiled."""
        fused = self.dataflow.traffic() if compiles else None
        return Pass(
            tuple(self.products),
            self.attention_flops,
            self.moved,
            self.operators,
            _together(self.sends),
            fused_moved=None if fused is None else fused.moved,
            fused_operators=None if fused is None else fused.kernels,
        )


def _together(sends: Iterable[Send]) -> tuple[Send, ...]:
    """One Send for all of an axis and a kind that travel beside the same products."""
    alike: dict[tuple[Any, ...], Send] = {}
    for send in sends:
        # Beside nothing, or each beside its own layer's.
        key = send.axis, send.kind, bool(send.beside)
        if key in alike:
            known = alike[key]
            send = replace(
                known,
                nbytes=known.nbytes + send.nbytes,
                times=known.times + send.times,
                beside=known.beside + send.beside,
            )
        alike[key] = send
    return tuple(alike.values())


@dataclass
class LiveSizes:
    """Live bytes around one block."""

    before: float = 0  # its forward
    input: float = 0
    peak: float = 0  # of its forward
    after: float = 0  # its forward
    output: float = 0
    backward_start: float | None = None
    backward_peak: float = 0  # beyond `backward_start`

    @property
    def saved(self) -> float:
        """What its forward leaves for its backward, its input included."""
        return self.after - self.before - self.output + self.input

    def look(self, total: float, in_forward: bool) -> None:
        """Takes the live bytes after an operator of the block."""
        if in_forward:
            self.peak = max(self.peak, total)
            return
        if self.backward_start is None:
            self.backward_start = total
        self.backward_peak = max(self.backward_peak, total - self.backward_start)


@dataclass
class _UnderWay:
    """A message that has been sent and not waited for, and what is multiplied meanwhile."""

    axis: str
    sends: list[Send]
    index: int  # among `sends`
    beside: list[Product] = field(default_factory=list)


class CountedStep(TracedStep):
    """A step whose operators are counted by block and by pass."""

    last: str  # name of the last block
    recomputes: bool  # whether blocks are recomputed, in part or whole
    # Of the current microbatch:
    tallies: dict[tuple[str, str], Tally]  # (block, pass) -> its counts
    under_way: list["_UnderWay"]  # messages that nobody has waited for, the oldest first
    sizes: dict[str, LiveSizes]  # block -> live bytes around it

    def works(self, configs: Sequence[Config]) -> list[tuple[Work, ...]]:
        """Works of all blocks, for one microbatch of each config. What runs outside of blocks
        counts with the last."""
        blocks = list(blocks_of(self.model))
        names = {block: name for name, block in self.model.named_modules() if block in set(blocks)}
        self.last = names[blocks[-1]]
        self.recomputes = configs[0].parallel.recompute != "none"
        for block in blocks:
            block.forward = self._sized(names[block], block.forward)
        assert isinstance(self.mesh.comm_bytes, _SentBytes)
        self.mesh.comm_bytes.listener = self._send
        for axis in SENT_OVER:
            if self.mesh.size(axis) > 1:
                group = axis_group(self.mesh, axis)
                group.measured_wait = partial(self._waiting, group.axis)

        works: list[tuple[Work, ...]] = []
        with watched(self.live), around_weight_grads(self._in_weight_grad):
            for parameter in self.model.parameters():
                self.live.see(to_local(parameter.detach()))
            self._run_microbatch(configs[0])  # creates lasting state, and is not counted
            for config in configs:
                self._run_microbatch(config)
                works.append(tuple(self._work(block, names[block]) for block in blocks))
        return works

    def _run_microbatch(self, config: Config) -> None:
        batch = prepared_batch(config, self.mesh)
        self.live.rows = routed_rows(config, batch, self.mesh)
        self.tallies = defaultdict(Tally)
        self.under_way = []
        self.sizes = defaultdict(LiveSizes)
        self.live.watch = self._count
        self.live.block = ""
        self.trainer.forward_backward(1, [batch])

    def _work(self, block: nn.Module, name: str) -> Work:
        sizes = self.sizes[name]
        whole = state_parameters(block)
        named = block.named_parameters(prefix=name)
        forward, input_grad, weight_grad = (
            self.tallies[name, one].as_pass(self._compiles(block))
            for one in (FORWARD, BACKWARD, WEIGHT_GRAD)
        )
        return Work(
            name,
            parameters=tuple(
                _before_fsdp(own, parameter, parameter in whole) for own, parameter in named
            ),
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            saved=sizes.saved,
            peak_forward=sizes.peak - sizes.before,
            peak_backward=sizes.backward_peak,
        )

    def _sized(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward that notes the live bytes around it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            sizes, live = self.sizes[name], self.live
            sizes.before = sizes.peak = live.total
            sizes.input = _nbytes((args, kwargs))
            output = forward(*args, **kwargs)
            sizes.after = live.total
            sizes.output = _nbytes(output)
            # A view is a tensor of its own: the next block hooks its input's gradient.
            return output if name == self.last else output.view_as(output)

        return run

    @contextmanager
    def _in_weight_grad(self) -> Iterator[None]:
        before = self.live.phase
        self.live.phase = WEIGHT_GRAD
        try:
            yield
        finally:
            self.live.phase = before

    def _compiles(self, block: nn.Module) -> bool:
        """Whether the block can be compiled: experts run between graphs, which cannot be recomputed
        (parallel/parallelize.py)."""
        has_experts = any(hasattr(module, "dispatch") for module in block.modules())
        return not (has_experts and self.recomputes)

    def _send(self, axis: str, kind: str, sent: float) -> None:
        if axis in SENT_OVER:
            sends = self._tally().sends
            sends.append(Send(axis, kind, sent))
            self.under_way.append(_UnderWay(axis, sends, len(sends) - 1))

    @contextmanager
    def _waiting(self, axis: str) -> Iterator[None]:
        """What a rank enters to wait for the oldest of its messages over an axis."""
        for message in self.under_way:
            if message.axis == axis:
                self.under_way.remove(message)
                beside = tuple(message.beside)
                message.sends[message.index] = replace(message.sends[message.index], beside=beside)
                break
        yield

    def _tally(self) -> Tally:
        return self.tallies[self.live.block or self.last, self._pass()]

    def _pass(self) -> str:
        return self.live.phase if self.live.phase in (BACKWARD, WEIGHT_GRAD) else FORWARD

    def _count(self, func: Any, args: Any, out: Any) -> None:
        """Called with every operator."""
        name = func.name().split(".")[0]
        if name in implementations and name not in WITHOUT_SHAPES:
            return  # its inner operators were counted
        on_device = any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, out)))
        namespace, _, short = name.partition("::")
        if not on_device or short in FREE or (is_view(func) and _has_memory_of(out, args)):
            return
        tally = self._tally()
        product = _product(name, args, out)
        tally.operators += 1
        moved = 0.0
        if product is not None:
            tally.products.append(product)
            for message in self.under_way:
                message.beside.append(product)
        elif "attention" in name:
            tally.attention_flops += _attention_flops(func, args)
        elif namespace != "c10d":  # a message's bytes are counted as sent
            moved = _nbytes(args) + _nbytes(out)
        tally.moved += moved
        is_called = product is not None or "attention" in name or short.startswith(CALLED)
        is_fused = namespace == "aten" and not is_called
        tally.dataflow.add(func, args, out, is_fused, moved)
        if self.live.block:
            sizes = self.sizes[self.live.block]
            sizes.look(self.live.total, in_forward=self._pass() == FORWARD)


def _before_fsdp(name: str, parameter: nn.Parameter, is_state: bool) -> Parameter:
    """A parameter as tp and ep have left it. `is_state`: of a module, which is never sharded."""
    local = to_local(parameter.detach())
    mesh = getattr(parameter, "device_mesh", None)  # of a DTensor
    if is_state:
        axis = ""
    elif mesh is not None and "ep" in mesh.mesh_dim_names:
        axis = "efsdp"
    else:
        axis = "fsdp"
    return Parameter(
        name,
        tuple(local.shape),
        trained=parameter.requires_grad,
        axis=axis,
        whole=tuple(parameter.shape),
    )


def _nbytes(tree: Any) -> float:
    return sum(x.numel() * x.itemsize for x in tree_leaves(tree) if isinstance(x, Tensor))


def _has_memory_of(out: Any, args: Any) -> bool:
    """Whether a result is a part of an argument: `to` and `reshape` copy where they must."""
    storages = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
    return any(
        x.untyped_storage()._cdata in storages for x in tree_leaves(out) if isinstance(x, Tensor)
    )


def _attention_flops(func: Any, args: Any) -> float:
    """FLOPs on the pairs of a query and a key that it sees: causal kernels skip all others."""
    name = func.name()
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    is_backward = "backward" in name
    if is_backward:
        args = args[1:]  # without the gradient of the output
    q, k, v = args[:3]
    key_dim = 2 if "dot_product" in name else 1
    # (h, s, e) or, with sequences laid end to end, (s, h, e): of which a query sees its own.
    own = k.shape[key_dim] if k.dim() == 4 else given["max_k"]
    queries_of_row = q.shape[key_dim] if q.dim() == 4 else given["max_q"]
    keys = own
    if given.get("is_causal"):
        # The last query sees all keys, and each one before it one less.
        keys = own - (queries_of_row - 1) / 2
    queries = q.numel() // q.shape[-1]
    forward = 2 * queries * keys * (q.shape[-1] + v.shape[-1])
    # The backward has five products for the forward's two, as it computes the scores again.
    return 2.5 * forward if is_backward else forward


def _product(name: str, args: Any, out: Any) -> Product | None:
    """The matrix product that an operator computes, if any."""
    name = name.removesuffix("_")
    if name == "aten::convolution":
        return _convolution(args, out, is_backward=False)
    if name == "aten::convolution_backward":
        return _convolution(args, out, is_backward=True)
    if name in ("aten::addmm", "aten::baddbmm"):
        args = args[1:]  # without the sum that the product is added to
    if len(args) < 2:
        return None
    a, b = args[0], args[1]
    if name in ("aten::mm", "aten::addmm", "aten::_scaled_mm"):
        precision = "float8" if a.dtype.itemsize == 1 else None
        return Product(a.shape[0], b.shape[1], a.shape[1], precision=precision)
    if name in ("aten::bmm", "aten::baddbmm"):
        return Product(a.shape[1], b.shape[2], a.shape[2], times=a.shape[0])
    if name in ("aten::linear", "aten::matmul"):
        width = a.shape[-1]
        return Product(a.numel() // width, b.numel() // width, width)
    if name.startswith("meshtrain::grouped"):
        return _grouped(a, b)
    return None


def _convolution(args: Any, out: Any, is_backward: bool) -> Product:
    """A convolution multiplies a vector at each position."""
    if is_backward:
        output, x, weight = args[:3]
        transposed = args[7]
        with_input, with_weight, _ = args[-1]  # which gradients it computes
        times = with_input + with_weight
    else:
        output, x, weight = out, args[0], args[1]
        transposed = args[6]
        times = 1
    positions = x if transposed else output
    return Product(
        positions.numel() // positions.shape[1], weight.shape[0], weight[0].numel(), times
    )


def _grouped(a: Tensor, b: Tensor) -> Product:
    """The products of experts with their rows, taken to be equally many."""
    if b.dim() == 2:  # weight gradient: each expert sums over its rows
        return Product(a.shape[1], b.shape[1], a.shape[0])
    experts = b.shape[0]
    width = b.shape[-1] if b.shape[-2] == a.shape[1] else b.shape[-2]
    return Product(max(1, a.shape[0] // experts), width, a.shape[1], times=experts)
