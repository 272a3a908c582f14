"""The work of each block of a model on a rank, counted in a traced step of one microbatch.

Of blocks that are alike only one is traced. All counts f are affine in the number n of samples of
a microbatch, so traces with one and two samples determine them for any number:

    f(n) = f(1) + (n - 1) (f(2) - f(1))

Operators are counted in uncompiled blocks. The memory of compiled ones is that of the compiler's
graphs, in traces of their own.
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
from torch.utils._pytree import tree_leaves, tree_map_only

from meshtrain.config import Config, spec_of
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
    of_each,
)
from meshtrain.layout import Layout
from meshtrain.mesh import CommBytes, Mesh
from meshtrain.modeling.kinds import repeated
from meshtrain.parallel.collectives import axis_group, implementations
from meshtrain.parallel.host_link import LIMIT, HostLink
from meshtrain.parallel.linear import ProductsLayer, use_products
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, around_weight_grads
from meshtrain.parallel.mixed_precision import state_parameters
from meshtrain.parallel.parallelize import is_single_layer
from meshtrain.parallel.torch_private import to_local
from meshtrain.pipeline.stage import blocks_of, first_argument, first_input

# Axes over which blocks send. What FSDP and DDP send follows from the parameters, and is no work of
# a block.
SENT_OVER = ("tp", "cp", "cp_heads", "cp_ring", "ep")
# What the names of operators begin with that a compiler does not fuse with others, besides matrix
# products and attention.
CALLED = ("embedding", "index_put", "scatter", "sort", "topk", "cumsum", "native_batch_norm")
# operators that launch no kernel
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "detach")
# The passes through a block, by the names that `live.phase` has in them. A backward alone computes
# input gradients; weight gradients are a pass of their own, which zero-bubble schedules run later
# (parallel/linear/weight_grad.py).
FORWARD, BACKWARD, WEIGHT_GRAD = "forward", "backward", "weight gradient"

Pairs = dict[int, tuple[Work, Work]]  # index of a block -> its work for one sample and for two
# Cache: `_key` -> the pairs, or the error that tracing raised; and samples - 1 -> works of all
# blocks.
_known: dict[tuple[Any, ...], tuple[Pairs | InputError, dict[int, tuple[Work, ...]]]] = {}


def works_of(config: Config, layout: Layout) -> tuple[Work, ...]:
    """Work of each block, in model order, for one microbatch; blocks that are alike share one
    object. Raises InputError: the model refuses the layout, or cannot be traced."""
    key = _key(config, layout)
    if key not in _known:
        _known[key] = _counted(config, layout), {}
    pairs, works_by_samples = _known[key]
    if isinstance(pairs, InputError):
        raise pairs
    more_samples = config.batch.micro_size - 1
    if more_samples not in works_by_samples:
        works = {}
        for i, (of_one, of_two) in pairs.items():
            works[i] = _extrapolated(of_one, of_two, more_samples)
        # Each block has the work of the first one that is like it.
        works_by_samples[more_samples] = tuple(works[first] for first in alike(config))
    return works_by_samples[more_samples]


def _splits_backward(config: Config, layout: Layout) -> bool:
    """Whether the schedule computes weight gradients apart from input gradients."""
    ranks = layout.size("pp")
    if ranks == 1:
        return False
    section = config.pipeline
    return short_schedule(section.schedule, ranks, section.stages_per_rank).splits_backward


def _key(config: Config, layout: Layout) -> tuple[Any, ...]:
    """All that the works depend on, except for the number of samples."""
    # For a schedule that splits backwards, layers have a queue of weight gradients, and linear ones
    # are of our class. What is counted differs by that only with distributed experts, or where
    # linear layers would be torch's own: with full recomputation.
    has_queue = _splits_backward(config, layout)
    depends_on_queue = layout.experts > 1 or config.parallel.recompute == "full"
    return (
        *_graph_key(config, layout),
        layout.size("cp"),
        layout.experts,
        layout.context_heads,
        config.parallel.context,
        has_queue and depends_on_queue,
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
    offloads: bool = False,
) -> list[dict[int, Work]]:
    """Works of the blocks that are not like an earlier one, for each number of samples, traced on
    as few ranks as possible.

    Args:
        samples: numbers of samples of a microbatch.
        compiles: whether blocks are compiled; then their memory is that of the compiler's graphs.
        puts_off: whether the backward leaves all weight gradients for later, and none is computed.
        offloads: whether blocks offload what they save; then they are those that stand for all in
            `_with_neighbours`, and their neighbours.

    Raises:
        InputError: the model cannot be traced.
    """
    first = alike(config)
    skipped = _without_neighbours(first) if offloads else repeated(first)
    splits_backward = _splits_backward(config, layout)
    # A block's work depends on data ranks only if its experts are distributed over them as well.
    cp, tp = layout.size("cp"), layout.size("tp")
    data_ranks = max(1, layout.experts // (cp * tp))
    few = layout.resized({"dp_shard": data_ranks, "cp": cp, "tp": tp})
    config = replace(
        config,
        layout=few.sizes,
        resolved=few,
        parallel=replace(
            config.parallel, compile=compiles, offload="activations" if offloads else "none"
        ),
    )
    of_samples = [
        replace(config, batch=replace(config.batch, micro_size=n, global_size=n * data_ranks))
        for n in samples
    ]
    with _collected_when_told(), untraced_errors(), fake_world(few, 0, "cuda") as mesh:
        # The first block of each kind is in the model, and the identity in the place of the others.
        step = CountedStep(of_samples[0], _UnshardedMesh.of(mesh), META, skipped)
        queue = WeightGradQueue()
        if splits_backward or puts_off:
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

# Cache: `_graph_key` -> first block of a kind -> bytes that it leaves, for a sample on one rank of
# `cp`.
_left: dict[tuple[Any, ...], dict[int, float]] = {}


def deferring_works_of(config: Config, layout: Layout) -> tuple[Work, ...]:
    """`works_of` for a schedule that computes weight gradients later: each work has in
    `memory.left` what its backward leaves for its weight gradients."""
    works = works_of(config, layout)
    key = _graph_key(config, layout)
    if key not in _left:
        [traced] = _traced(config, layout, [1], puts_off=True)
        # These are inputs and gradients of products: each rank of `cp` has its share of the tokens.
        parts = layout.size("cp")
        _left[key] = {i: work.memory.left * parts for i, work in traced.items()}
    share = config.batch.micro_size / layout.size("cp")
    deferring = {}
    for i, left in _left[key].items():
        memory = replace(works[i].memory, left=share * left)
        deferring[i] = replace(works[i], memory=memory)
    return tuple(deferring[first] for first in alike(config))


# Compiled blocks ----------------------------------------------------------------------------------


# Cache: (`_key`, samples of a microbatch) -> first block of a kind -> its memory, compiled.
_compiled: dict[tuple[Any, ...], dict[int, BlockMemory]] = {}


def compiled_works_of(config: Config, layout: Layout, exact: bool = True) -> tuple[Work, ...]:
    """`works_of` with the memory of compiled blocks, which the compiler's graphs decide.

    To make the graphs takes seconds. With `exact` they are made for this layout and number of
    samples. Without, for one rank and one sample, and known from then on: the ratio of a compiled
    block's memory to that of the same block uncompiled hardly depends on these.
    """
    works = works_of(config, layout)
    if exact:
        memory = _compiled_memory(config, layout)
    else:
        few = _few_ranks(layout)
        single = _of_one_sample(config, few)
        uncompiled = works_of(single, few)
        element = compute_size(config.train.precision)
        memory = {}
        for i, compiled in _compiled_memory(single, few).items():
            memory[i] = _in_proportion(works[i].memory, uncompiled[i].memory, compiled, element)
    changed = {i: replace(works[i], memory=memory[i]) for i in memory}
    return tuple(changed[first] for first in alike(config))


def _compiled_memory(config: Config, layout: Layout) -> dict[int, BlockMemory]:
    key = _key(config, layout), config.batch.micro_size
    if key not in _compiled:
        [traced] = _traced(config, layout, [config.batch.micro_size], compiles=True)
        _compiled[key] = {i: work.memory for i, work in traced.items()}
    return _compiled[key]


def _few_ranks(layout: Layout) -> Layout:
    """One rank; or two, if the layout distributes experts."""
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


def _in_proportion(
    memory: BlockMemory, uncompiled: BlockMemory, compiled: BlockMemory, element: int
) -> BlockMemory:
    """A block's memory if compiling changes it by the same ratios as a smaller one: `memory` times
    `compiled` / `uncompiled`, part by part. `element`: bytes of an element of a weight gradient."""

    def scaled(part: Callable[[BlockMemory], float]) -> float:
        before = part(uncompiled)
        if not before:
            return part(memory)
        return part(memory) * part(compiled) / before

    def backward(of: BlockMemory) -> float:
        # A graph returns all weight gradients together, so its backward has no parts.
        return max(live.activations + element * live.made for live in of.backward)

    return replace(
        memory,
        saved=scaled(lambda of: of.saved),
        forward=scaled(lambda of: of.forward),
        backward=(Live(scaled(backward)),),
    )


# Offloading ---------------------------------------------------------------------------------------

# How many of the last blocks are traced by themselves: what these have sent is still under way when
# the backward begins.
LAST = 4

# Cache: `_key`, samples, and whether blocks are compiled -> works of blocks that offload.
_offloading: dict[tuple[Any, ...], dict[int, Work]] = {}


def offloading_works_of(
    config: Config, layout: Layout, works: Sequence[Work], *, compiled: bool, exact: bool
) -> tuple[Work, ...]:
    """Works of blocks that offload what they save. `works`: of the same blocks without that, which
    are `compiled` or not, with or without `exact` graphs (`compiled_works_of`).

    While a block computes, copies of its neighbours are under way. So it is traced between blocks
    like these, and with as many samples as a microbatch has: the limit of bytes under way does not
    grow with them.
    """
    if compiled and not exact:
        return _offloading_at_once(config, works)
    key = _key(config, layout), config.batch.micro_size, compiled
    if key not in _offloading:
        [traced] = _traced(
            config, layout, [config.batch.micro_size], compiles=compiled, offloads=True
        )
        _offloading[key] = traced
    first = alike(config)
    places = _with_neighbours(first)
    # What comes back ahead of a graph may alternate from block to block: it is the most.
    backward: dict[int, tuple[Live, ...]] = {}
    for i in set(places):
        of_block = _offloading[key][i].memory.backward
        most = backward.get(first[i], of_block)
        backward[first[i]] = max(most, of_block, key=_most_alive)
    offloading = {}
    for i in set(places):
        own = _offloading[key][i]
        memory = replace(own.memory, backward=backward[first[i]], left=works[i].memory.left)
        offloading[i] = replace(works[i], memory=memory, offloaded=own.offloaded)
    return tuple(offloading[i] for i in places)


def _most_alive(backward: tuple[Live, ...]) -> float:
    return max(live.activations for live in backward)


def _offloading_at_once(config: Config, works: Sequence[Work]) -> tuple[Work, ...]:
    """Compiled blocks that offload, by arithmetic. A graph returns all that it saves at its end,
    and another one takes all of it at its begin: of the neighbours there is what is under way."""

    def of_block(work: Work) -> Work:
        memory = work.memory
        under_way = min(memory.saved, LIMIT)
        backward = tuple(
            replace(live, activations=live.activations + under_way) for live in memory.backward
        )
        memory = replace(memory, saved=0.0, forward=memory.forward + under_way, backward=backward)
        return replace(work, memory=memory, offloaded=work.memory.saved)

    offloading = []
    blocks = blocks_of(spec_of(config).meta)
    for block, own, other in zip(blocks, works, of_each(works, of_block), strict=True):
        offloading.append(own if is_single_layer(block) else other)
    return tuple(offloading)


def _with_neighbours(first: Sequence[int]) -> list[int]:
    """For each block the last one that is like it and has neighbours like its own, and so is
    furthest from the first blocks, which send what all of them share. `first`: the result of
    `alike`."""
    keys = []
    for i in range(len(first)):
        neighbours = tuple(first[max(i - 1, 0) : i + 2])
        before_end = min(len(first) - i, LAST + 1)
        keys.append((neighbours, before_end))
    last = {key: i for i, key in enumerate(keys)}
    return [last[key] for key in keys]


def _without_neighbours(first: Sequence[int]) -> tuple[int, ...]:
    """Indices of the blocks that neither stand for others in `_with_neighbours` nor are next to one
    that does."""
    kept = set()
    for i in _with_neighbours(first):
        kept |= {i - 1, i, i + 1}
    return tuple(i for i in range(len(first)) if i not in kept)


def _put_off_weight_grads(model: nn.Module, queue: WeightGradQueue) -> None:
    """Gives linear layers a queue of weight gradients, as the pipeline does, and leaves the kind of
    their products as it is."""
    layers = [module for module in model.modules() if isinstance(module, ProductsLayer)]
    products = [layer.products for layer in layers]
    use_products(model, queue=queue)
    for layer, own in zip(layers, products, strict=True):
        layer.products = own  # for instance float8


class _SentBytes(CommBytes):
    """Bytes that this rank sent, whose listener hears of every message."""

    listener: Callable[[str, str, float], None] | None = None  # (axis, kind, bytes)

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
    """The value for `1 + more` samples, from the same value for one sample and for two. Records and
    tuples are taken apart, down to their numbers."""
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
    """Products of each size, as many as there are with `1 + more` samples."""
    times_of_one = _times(of_one)
    times_of_two = _times(of_two)
    products = []
    for product in times_of_one | times_of_two:
        times = _extrapolated(times_of_one.get(product, 0), times_of_two.get(product, 0), more)
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
    """Counts of one pass through a block, as the fields of `Pass`."""

    products: list[Product] = field(default_factory=list)
    attention_flops: float = 0
    moved: float = 0  # bytes
    operators: int = 0
    sends: list[Send] = field(default_factory=list)
    dataflow: Dataflow = field(default_factory=Dataflow)

    def as_pass(self, compiles: bool) -> Pass:
        """`compiles`: whether the block can be compiled."""
        counted = Pass(
            products=tuple(self.products),
            attention_flops=self.attention_flops,
            moved=self.moved,
            operators=self.operators,
            sends=_together(self.sends),
        )
        if not compiles:
            return counted
        fused = self.dataflow.traffic()
        return replace(counted, fused_moved=fused.moved, fused_operators=fused.kernels)


def _together(sends: Iterable[Send]) -> tuple[Send, ...]:
    """Joins messages of the same axis and kind: those that the rank waits for at once, and apart
    from them those during which it multiplies."""
    joined: dict[tuple[Any, ...], Send] = {}
    for send in sends:
        is_hidden = bool(send.beside)
        key = send.axis, send.kind, is_hidden
        if key in joined:
            earlier = joined[key]
            send = replace(
                earlier,
                nbytes=earlier.nbytes + send.nbytes,
                times=earlier.times + send.times,
                beside=earlier.beside + send.beside,
            )
        joined[key] = send
    return tuple(joined.values())


@dataclass
class LiveSizes:
    """Live bytes around one block, for its `BlockMemory`. Weight gradients are counted apart: what
    becomes of them, FSDP and DDP decide."""

    # What was alive before its forward, and is not the block's: activations without its input, and
    # weight gradients.
    level: float = 0
    gradients: float = 0
    # Fields of `BlockMemory`. The last part of `backward` is the one that runs.
    forward: float = 0
    saved: float = 0
    sums: float = 0
    sent: float = 0  # to the host in its forward
    backward: list[Live] = field(default_factory=lambda: [Live(0)])
    left: float = 0  # without its input's gradient

    def enter(self, live: LiveBytes, input_bytes: float, link: HostLink) -> None:
        self.gradients = live.sizes[GRADIENTS]
        # What is on its way to the host does not stay.
        self.level = live.total - self.gradients - input_bytes - link.leaving_bytes
        self.forward = input_bytes
        self.sent = -link.sent

    def leave(self, live: LiveBytes, output_bytes: float, link: HostLink) -> None:
        self.sums = live.sizes[GRADIENTS] - self.gradients
        self.saved = self._activations(live) - output_bytes - link.leaving_bytes
        self.sent += link.sent

    def look(self, live: LiveBytes, in_forward: bool) -> None:
        """Takes the live bytes after an operator of the block."""
        activations = self._activations(live)
        new_gradients = live.sizes[GRADIENTS] - self.gradients
        if in_forward:
            # A head that computes the loss makes its weight gradient here.
            self.forward = max(self.forward, activations + new_gradients)
            return
        now = self.backward[-1]
        self.backward[-1] = replace(
            now,
            activations=max(now.activations, activations),
            temporary=max(now.temporary, new_gradients),
        )

    def made(self, elements: int) -> None:
        """Notes a weight gradient that the backward has just made: it ends a part of the backward,
        and counts in all parts from there on."""
        ended = self.backward[-1]
        made = ended.made + elements
        self.backward[-1] = replace(ended, made=made)
        self.backward.append(Live(0, made=made))

    def leave_backward(self, live: LiveBytes, grad: Tensor) -> None:
        self.left = self._activations(live) - _nbytes(grad)

    def _activations(self, live: LiveBytes) -> float:
        return live.total - live.sizes[GRADIENTS] - self.level

    def memory(self) -> BlockMemory:
        return BlockMemory(self.saved, self.forward, tuple(self.backward), self.sums)


class _CountedError(Exception):
    """Ends a step when all of its microbatches that count have been counted."""


@dataclass
class _UnderWay:
    """A message that has been sent and not waited for, and what is multiplied meanwhile."""

    axis: str
    sends: list[Send]  # of the tally that has counted it
    index: int  # of it among these
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

        # One step runs a microbatch of each config, between two that do not count. The first one
        # creates lasting state, such as gradients. The last one would also sum them over ranks,
        # which is no work of the blocks: the step ends before it.
        configs = [configs[0], *configs, configs[0]]
        batches = [prepared_batch(config, self.mesh) for config in configs]
        works: list[tuple[Work, ...]] = []  # of the microbatches that are done
        begun = 0  # number of microbatches

        def begin(*unused: Any) -> None:
            nonlocal begun
            if begun > 0:
                works.append(self._works(names))
                # From the second microbatch on operators are counted.
                self.live.watch = self._count
            if begun == len(batches) - 1:
                raise _CountedError
            gc.collect()
            self._begin_microbatch(routed_rows(configs[0], batches[begun], self.mesh))
            begun += 1

        # The forward of a microbatch begins where the backward of the one before it has ended.
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
        return works[1:]  # without the first microbatch

    def _begin_microbatch(self, rows: int) -> None:
        self.live.rows = rows
        self.tallies = defaultdict(Tally)
        self.under_way = []
        self.sizes = defaultdict(LiveSizes)
        self.live.block = ""

    def _works(self, names: Mapping[nn.Module, str]) -> tuple[Work, ...]:
        """Works of all blocks in the microbatch that has just ended."""
        sizes = [self.sizes[name] for name in names.values()]
        if self.link is not None:
            # The caller of a block may hold an input that has left, until the block returns.
            for one, next_one in pairwise(sizes):
                one.saved = next_one.level - one.level
        # When the backward of a block is done, what it and the blocks behind it have left is there:
        # the difference to the next block is its own.
        left = [of_block.left for of_block in sizes]
        own_left = [max(here - behind, 0.0) for here, behind in pairwise([*left, 0.0])]
        works = []
        for (block, name), own in zip(names.items(), own_left, strict=True):
            works.append(self._work(block, name, left=own))
        return tuple(works)

    def _work(self, block: nn.Module, name: str, left: float) -> Work:
        states = state_parameters(block)
        parameters = []
        for full_name, parameter in block.named_parameters(prefix=name):
            parameters.append(_before_fsdp(full_name, parameter, parameter in states))
        compiles = self._compiles(block)
        return Work(
            name,
            parameters=tuple(parameters),
            forward=self.tallies[name, FORWARD].as_pass(compiles),
            input_grad=self.tallies[name, BACKWARD].as_pass(compiles),
            weight_grad=self.tallies[name, WEIGHT_GRAD].as_pass(compiles),
            memory=replace(self.sizes[name].memory(), left=left),
            offloaded=self.sizes[name].sent,
        )

    def _sized(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward that notes the live bytes around it."""
        first = first_argument(forward)
        link = self.link or HostLink()

        def run(*args: Any, **kwargs: Any) -> Any:
            sizes = self.sizes[name]
            inputs = first_input(first, args, kwargs)
            sizes.enter(self.live, _nbytes(inputs), link)
            # The gradient of the input is the last thing that the block's backward makes.
            for tensor in tree_leaves(inputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(sizes.leave_backward, self.live))
            output = forward(*args, **kwargs)
            sizes.leave(self.live, _nbytes(output), link)
            if name == self.last:
                return output
            # The next block puts hooks on these tensors: a view is one of its own, also where a
            # block returns its input.
            return tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor), output)

        return run

    @contextmanager
    def _in_weight_grad(self) -> Iterator[None]:
        """What encloses the computation of a weight gradient."""
        live = self.live
        phase, part = live.phase, live.part
        live.part = GRADIENTS
        # A head that computes the loss makes its own in the forward, to which that counts.
        if phase == BACKWARD:
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
        """Called with every message, of `sent` bytes."""
        if axis in SENT_OVER:
            sends = self._tally().sends
            sends.append(Send(axis, kind, sent))
            self.under_way.append(_UnderWay(axis, sends, index=len(sends) - 1))

    @contextmanager
    def _waiting(self, axis: str) -> Iterator[None]:
        """What a rank enters to wait for the oldest of its messages over an axis."""
        for message in self.under_way:
            if message.axis == axis:
                self.under_way.remove(message)
                # Only now it is known what was multiplied meanwhile.
                send = message.sends[message.index]
                message.sends[message.index] = replace(send, beside=tuple(message.beside))
                break
        yield

    def _tally(self) -> Tally:
        """That of the current block and pass; outside of all blocks that of the last block."""
        return self.tallies[self.live.block or self.last, self._pass()]

    def _pass(self) -> str:
        return self.live.phase if self.live.phase in (BACKWARD, WEIGHT_GRAD) else FORWARD

    def _count(self, func: Any, args: Any, out: Any) -> None:
        """Called with every operator that has run: its function, arguments and results."""
        name = func.name().split(".")[0]
        if name in implementations and name not in WITHOUT_SHAPES:
            return  # one of ours, whose inner operators were counted
        if not _launches_kernel(func, args, out):
            return
        tally = self._tally()
        tally.operators += 1

        # An operator costs one thing: products and attention are bound by arithmetic, messages by
        # the network, and all others by memory.
        namespace, _, short = name.partition("::")
        product = _product(name, args, out)
        is_attention = "attention" in name
        moved = 0.0
        if product is not None:
            tally.products.append(product)
            for message in self.under_way:
                message.beside.append(product)
        elif is_attention:
            tally.attention_flops += _attention_flops(func, args)
        elif namespace != "c10d":  # of a message `_send` has counted the bytes
            moved = _nbytes(args) + _nbytes(out)
        tally.moved += moved

        # The same in compiled blocks, where the compiler fuses what it can.
        is_called = product is not None or is_attention or short.startswith(CALLED)
        is_fused = namespace == "aten" and not is_called
        tally.dataflow.add(func, args, out, is_fused, moved)

        if self.live.block:
            sizes = self.sizes[self.live.block]
            sizes.look(self.live, in_forward=self._pass() == FORWARD)
            if makes_weight_grad(func) or (self._pass() == WEIGHT_GRAD and product is not None):
                sizes.made(out.numel())


def _launches_kernel(func: Any, args: Any, out: Any) -> bool:
    """Whether an operator runs something on the device."""
    on_device = any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, out)))
    if not on_device:
        return False
    _, _, short = func.name().split(".")[0].partition("::")
    return short not in FREE and not (is_view(func) and _has_memory_of(out, args))


def _before_fsdp(name: str, parameter: nn.Parameter, is_state: bool) -> Parameter:
    """A parameter as tp and ep have left it, on the traced mesh, which has no FSDP. `is_state`: it
    is the state of a module (`state_parameters`), which FSDP never shards."""
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
    argument_names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(argument_names, args, strict=False))
    is_backward = "backward" in name
    if is_backward:
        args = args[1:]  # without the gradient of the output
    q, k, v = args[:3]
    # (b, h, s, e) for torch's scaled_dot_product_* operators, and (b, s, h, e) for those of the
    # kernels themselves. Or (tokens, h, e): sequences laid end to end, of which a query sees its
    # own, taken to be of the greatest length.
    token_dim = 2 if "dot_product" in name else 1
    keys_of_row = k.shape[token_dim] if k.dim() == 4 else given["max_k"]
    queries_of_row = q.shape[token_dim] if q.dim() == 4 else given["max_q"]
    keys = keys_of_row  # that a query sees, on average
    if given.get("is_causal"):
        # The last query sees all keys, and each one before it one less.
        keys = keys_of_row - (queries_of_row - 1) / 2
    queries = q.numel() // q.shape[-1]  # over all rows and heads
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
    """A convolution as a product: at each position of its output (or, if it is transposed, of its
    input) a vector is multiplied by the weight as a matrix."""
    if is_backward:
        output, x, weight = args[:3]
        transposed = args[7]
        with_input, with_weight, _ = args[-1]  # which gradients it computes
        times = with_input + with_weight  # each as large as the forward's
    else:
        output, x, weight = out, args[0], args[1]
        transposed = args[6]
        times = 1
    at = x if transposed else output
    positions = at.numel() // at.shape[1]  # without the dim of channels
    return Product(m=positions, n=weight.shape[0], k=weight[0].numel(), times=times)


def _grouped(a: Tensor, b: Tensor) -> Product:
    """The products of experts with their rows a (rows, k), taken to be equally many for each."""
    rows, k = a.shape
    if b.dim() == 2:
        # The weight gradient, of a and the output's gradient b (rows, n). Each expert sums over its
        # own rows, which together are all of them.
        return Product(m=k, n=b.shape[1], k=rows)
    # The weights b: (experts, k, n), or transposed.
    experts = b.shape[0]
    n = b.shape[-1] if b.shape[-2] == k else b.shape[-2]
    return Product(m=max(1, rows // experts), n=n, k=k, times=experts)
