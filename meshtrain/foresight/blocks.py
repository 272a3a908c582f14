"""The work of each block of a model on a rank, counted in a traced step of one microbatch.

Of blocks that are alike only one is traced. All counts are affine in the number of samples of a
microbatch, so traces with one and two samples determine them for any number. Blocks are traced
uncompiled.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshtrain.config import Config
from meshtrain.errors import InputError
from meshtrain.foresight.fusion import Dataflow
from meshtrain.foresight.live import (
    WITHOUT_SHAPES,
    LiveBytes,
    is_view,
    makes_weight_grad,
    watched,
)
from meshtrain.foresight.memory import GRADIENTS
from meshtrain.foresight.model import alike, untraced_errors
from meshtrain.foresight.parameters import compute_size
from meshtrain.foresight.schedules import short_schedule
from meshtrain.foresight.trace import (
    META,
    TracedStep,
    fake_world,
    prepared_batch,
    routed_rows,
)
from meshtrain.foresight.work import (
    BlockMemory,
    Live,
    Parameter,
    Pass,
    Product,
    Send,
    Work,
)
from meshtrain.layout import Layout
from meshtrain.mesh import CommBytes, Mesh
from meshtrain.modeling.kinds import repeated
from meshtrain.parallel.collectives import axis_group, implementations
from meshtrain.parallel.linear import ProductsLayer, use_products
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, around_weight_grads
from meshtrain.parallel.mixed_precision import state_parameters
from meshtrain.parallel.torch_private import to_local
from meshtrain.pipeline.stage import blocks_of, first_argument, first_input

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


def _splits_backward(config: Config, layout: Layout) -> bool:
    """Whether the schedule computes weight gradients apart from input gradients."""
    ranks = layout.size("pp")
    if ranks == 1:
        return False
    section = config.pipeline
    return short_schedule(section.schedule, ranks, section.stages_per_rank).splits_backward


def _key(config: Config, layout: Layout) -> tuple[Any, ...]:
    """All that the works depend on, except for the number of samples."""
    # A queue of weight gradients needs our linear layers, where torch's may do otherwise.
    has_queue = _splits_backward(config, layout)
    has_own_layers = layout.experts > 1 or config.parallel.recompute == "full"
    return (
        *_graph_key(config, layout),
        layout.size("cp"),
        layout.experts,
        layout.context_heads,
        config.parallel.context,
        has_queue and has_own_layers,
    )


def _graph_key(config: Config, layout: Layout) -> tuple[Any, ...]:
    """What decides which graphs the compiler makes of a block, except for the sizes in them."""
    model, data, parallel, train = config.model, config.data, config.parallel, config.train
    return (
        model.name,
        repr(model.keys),
        data.seq_len,
        data.mask_documents,
        layout.size("tp"),
        parallel.recompute,
        parallel.regather,
        parallel.sequence_parallel,
        train.precision,
        train.linear_precision,
        train.freeze,
        train.lora,
    )


def _counted(config: Config, layout: Layout) -> Pairs | InputError:
    """Work of each block that is not like an earlier one, with one sample and with two."""
    try:
        of_one, of_two = _traced(config, layout, samples=(1, 2))
    except InputError as error:
        return error
    return {i: (of_one[i], of_two[i]) for i in of_one}


def _traced(
    config: Config,
    layout: Layout,
    samples: Sequence[int],
    *,
    compiles: bool = False,
    puts_off: bool = False,
) -> list[dict[int, Work]]:
    """Works of the blocks that are not like an earlier one, for each number of samples, traced on
    as few ranks as possible. `puts_off`: of a backward without weight gradients. Raises
    InputError."""
    skipped = repeated(alike(config))
    splits_backward = _splits_backward(config, layout)
    cp, tp = layout.size("cp"), layout.size("tp")
    for_experts = max(1, layout.experts // (cp * tp))
    few = layout.resized({"dp_shard": for_experts, "cp": cp, "tp": tp})
    config = replace(
        config,
        layout=few.sizes,
        resolved=few,
        parallel=replace(config.parallel, compile=compiles),
    )
    of_samples = [
        replace(config, batch=replace(config.batch, micro_size=n, global_size=n * for_experts))
        for n in samples
    ]
    with _collected_when_told(), untraced_errors(), fake_world(few, 0, "cuda") as mesh:
        step = CountedStep(of_samples[0], _UnshardedMesh.of(mesh), META, skipped)
        queue = WeightGradQueue()
        if splits_backward:
            _put_off_weight_grads(step.model, queue)
        works = step.works(of_samples, puts_off=queue if puts_off else None)
    return [{i: work for i, work in enumerate(own) if i not in skipped} for own in works]


@contextmanager
def _collected_when_told() -> Iterator[None]:
    """Context without garbage collection but by `gc.collect`: what reference cycles hold, such as
    the compiler's, would otherwise be freed in the middle of any block."""
    gc.freeze()  # collections need not visit objects that exist already
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.unfreeze()


# Weight gradients that are computed later ---------------------------------------------------------

# Cache: `_graph_key` -> kind of blocks -> bytes for a sample on one rank of `cp`.
_left: dict[tuple[Any, ...], dict[int, float]] = {}


def deferring_works_of(config: Config, layout: Layout) -> tuple[Work, ...]:
    """`works_of` of a schedule that computes weight gradients later, with what blocks leave for
    these when their backward is done."""
    works = works_of(config, layout)
    first = alike(config)
    key = _graph_key(config, layout)
    if key not in _left:
        [traced] = _traced(config, layout, [1], puts_off=True)
        parts = layout.size("cp")
        _left[key] = {i: work.memory.left * parts for i, work in traced.items()}
    share = config.batch.micro_size / layout.size("cp")
    deferring = {}
    for i, left in _left[key].items():
        memory = replace(works[i].memory, left=share * left)
        deferring[i] = replace(works[i], memory=memory)
    return tuple(deferring[i] for i in first)


# Compiled blocks ----------------------------------------------------------------------------------


# Cache: `_key` and samples -> memory of each kind of blocks, compiled.
_compiled: dict[tuple[Any, ...], dict[int, BlockMemory]] = {}


def compiled_works_of(config: Config, layout: Layout, exact: bool = True) -> tuple[Work, ...]:
    """`works_of` with the memory of compiled blocks, which the compiler's graphs decide.

    Graphs take seconds. Without `exact` they are those of one rank and one sample, on which the
    share that compiled blocks take of the memory of uncompiled ones hardly depends.
    """
    works = works_of(config, layout)
    first = alike(config)
    if exact:
        memory = _compiled_memory(config, layout)
    else:
        element = compute_size(config.train.precision)
        few = _few_ranks(layout)
        single = _of_one_sample(config, few)
        known, compiled = works_of(single, few), _compiled_memory(single, few)
        memory = {
            i: _shared(works[i].memory, known[i].memory, compiled[i], element) for i in compiled
        }
    changed = {i: replace(works[i], memory=memory[i]) for i in memory}
    return tuple(changed[i] for i in first)


def _compiled_memory(config: Config, layout: Layout) -> dict[int, BlockMemory]:
    key = _key(config, layout), config.batch.micro_size
    if key not in _compiled:
        [traced] = _traced(config, layout, [config.batch.micro_size], compiles=True)
        _compiled[key] = {i: work.memory for i, work in traced.items()}
    return _compiled[key]


def _few_ranks(layout: Layout) -> Layout:
    """One rank, or two over which experts are dealt out."""
    ranks = min(layout.experts, 2)
    return Layout({"dp_shard": ranks}).with_experts(ranks)


def _of_one_sample(config: Config, layout: Layout) -> Config:
    return replace(
        config,
        layout=layout.sizes,
        resolved=layout,
        batch=replace(config.batch, micro_size=1),
        parallel=replace(config.parallel, regather=False),
    )


def _shared(
    memory: BlockMemory, known: BlockMemory, compiled: BlockMemory, element: int
) -> BlockMemory:
    """Memory of a block that changes by compiling like a known one. `element`: bytes of an element
    of a weight gradient."""

    def share(part: Callable[[BlockMemory], float]) -> float:
        return part(memory) * part(compiled) / part(known) if part(known) else part(memory)

    def backward(of: BlockMemory) -> float:
        # A graph returns all gradients of weights together.
        return max(live.activations + element * live.made for live in of.backward)

    return replace(
        memory,
        saved=share(lambda of: of.saved),
        forward=share(lambda of: of.forward),
        backward=(Live(share(backward)),),
    )


def _put_off_weight_grads(model: nn.Module, queue: WeightGradQueue) -> None:
    """Gives linear layers a queue of weight gradients, as the pipeline does."""
    layers = [module for module in model.modules() if isinstance(module, ProductsLayer)]
    products = [layer.products for layer in layers]
    use_products(model, queue=queue)
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
    if isinstance(of_one, Work | Pass | Product | Send | BlockMemory | Live):
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
    """Live bytes around one block. Weight gradients are counted apart: what becomes of them, FSDP
    and DDP decide."""

    level: float = 0  # of activations before its forward, without its input
    gradients: float = 0  # alive before its forward
    forward: float = 0
    saved: float = 0
    sums: float = 0
    backward: list[Live] = field(default_factory=lambda: [Live(0)])
    left: float = 0  # of activations when its backward is done, its input's gradient not counted

    def enter(self, live: LiveBytes, input_bytes: float) -> None:
        self.gradients = live.sizes[GRADIENTS]
        self.level = live.total - self.gradients - input_bytes
        self.forward = input_bytes

    def leave(self, live: LiveBytes, output_bytes: float) -> None:
        self.sums = live.sizes[GRADIENTS] - self.gradients
        self.saved = self._activations(live) - output_bytes

    def look(self, live: LiveBytes, in_forward: bool) -> None:
        """Takes the live bytes after an operator of the block."""
        if in_forward:
            beside = live.sizes[GRADIENTS] - self.gradients
            self.forward = max(self.forward, self._activations(live) + beside)
            return
        activations = self._activations(live)
        temporary = live.sizes[GRADIENTS] - self.gradients
        now = self.backward[-1]
        self.backward[-1] = replace(
            now,
            activations=max(now.activations, activations),
            temporary=max(now.temporary, temporary),
        )

    def made(self, elements: int) -> None:
        """Notes a weight gradient that the backward has just made."""
        now = replace(self.backward[-1], made=self.backward[-1].made + elements)
        self.backward[-1] = now
        self.backward.append(Live(0, made=now.made))

    def leave_backward(self, live: LiveBytes, grad: Tensor) -> None:
        self.left = self._activations(live) - _nbytes(grad)

    def _activations(self, live: LiveBytes) -> float:
        return live.total - live.sizes[GRADIENTS] - self.level

    def memory(self) -> BlockMemory:
        return BlockMemory(self.saved, self.forward, tuple(self.backward), self.sums)


class _CountedError(Exception):
    """All microbatches have been counted."""


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

    def works(
        self, configs: Sequence[Config], puts_off: WeightGradQueue | None = None
    ) -> list[tuple[Work, ...]]:
        """Works of all blocks, for one microbatch of each config. What runs outside of blocks
        counts with the last. `puts_off`: where layers leave all weight gradients, and what these
        need stays."""
        blocks = list(blocks_of(self.model))
        name_of = {module: name for name, module in self.model.named_modules()}
        names = {block: name_of[block] for block in blocks}
        self.last = names[blocks[-1]]
        self.recomputes = configs[0].parallel.recompute != "none"
        for block, name in names.items():
            block.forward = self._sized(name, block.forward)
        assert isinstance(self.mesh.comm_bytes, _SentBytes)
        self.mesh.comm_bytes.listener = self._send
        for axis in SENT_OVER:
            if self.mesh.size(axis) > 1:
                group = axis_group(self.mesh, axis)
                group.measured_wait = partial(self._waiting, group.axis)

        # The first microbatch creates lasting state, such as gradients. The last would also sum
        # them over ranks, which is no work of the blocks: the step ends before it.
        configs = [configs[0], *configs, configs[0]]
        batches = [prepared_batch(config, self.mesh) for config in configs]
        works: list[tuple[Work, ...]] = []
        begun = 0

        def begin(*unused: Any) -> None:
            nonlocal begun
            if begun > 0:
                works.append(self._works(names))
                self.live.watch = self._count
            if begun == len(batches) - 1:
                raise _CountedError
            gc.collect()
            self._begin_microbatch(routed_rows(configs[0], batches[begun], self.mesh))
            begun += 1

        self.model.register_forward_pre_hook(begin)
        with (
            watched(self.live),
            around_weight_grads(self._in_weight_grad),
            nullcontext() if puts_off is None else puts_off.record(),
        ):
            for parameter in self.model.parameters():
                self.live.see(to_local(parameter.detach()))
            with suppress(_CountedError):
                self.trainer.forward_backward(1, batches)
        return works[1:]

    def _begin_microbatch(self, rows: int) -> None:
        self.live.rows = rows
        self.tallies = defaultdict(Tally)
        self.under_way = []
        self.sizes = defaultdict(LiveSizes)
        self.live.block = ""

    def _works(self, names: Mapping[nn.Module, str]) -> tuple[Work, ...]:
        left = [self.sizes[name].left for name in names.values()]
        works = []
        # When the backward of a block is done, there is what it and those behind it have left.
        for (block, name), (here, behind) in zip(
            names.items(), pairwise([*left, 0.0]), strict=True
        ):
            works.append(self._work(block, name, left=max(here - behind, 0.0)))
        return tuple(works)

    def _work(self, block: nn.Module, name: str, left: float) -> Work:
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
            memory=replace(sizes.memory(), left=left),
        )

    def _sized(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward that notes the live bytes around it."""
        first = first_argument(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            sizes = self.sizes[name]
            inputs = first_input(first, args, kwargs)
            sizes.enter(self.live, _nbytes(inputs))
            for tensor in tree_leaves(inputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(sizes.leave_backward, self.live))
            output = forward(*args, **kwargs)
            sizes.leave(self.live, _nbytes(output))
            # A view is a tensor of its own: the next block hooks its input's gradient.
            return output if name == self.last else output.view_as(output)

        return run

    @contextmanager
    def _in_weight_grad(self) -> Iterator[None]:
        live = self.live
        phase, part = live.phase, live.part
        live.part = GRADIENTS
        if phase == BACKWARD:  # a head that computes the loss makes its own in the forward
            live.phase = WEIGHT_GRAD
        try:
            yield
        finally:
            live.phase, live.part = phase, part

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
            sizes.look(self.live, in_forward=self._pass() == FORWARD)
            if makes_weight_grad(func) or (self._pass() == WEIGHT_GRAD and product is not None):
                sizes.made(out.numel())


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
