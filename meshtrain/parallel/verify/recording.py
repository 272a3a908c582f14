"""One model's forward and backward, piece by piece, compared with those of another.

A piece is a block, or the code between blocks. Each has an autograd graph of its own, which begins
and ends at detached tensors, so a difference is found in the piece that makes it. A piece's
backward starts from random gradients of its outputs.

Weights are random, because a norm of ones or a layer of zeros would hide an error. They follow from
the parameters' names, and exist for one piece at a time. Identical blocks are computed once.
"""

import copy
import math
import random
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshtrain.dropout import Dropout
from meshtrain.mesh import Mesh
from meshtrain.parallel.grad_sync import tensors_of
from meshtrain.parallel.mixed_precision import cast, reseed
from meshtrain.parallel.predictions import predicting
from meshtrain.parallel.sharding import Part
from meshtrain.parallel.sync_batch_norm import SyncBatchNorm
from meshtrain.parallel.tensor_parallel import AXIS, shard_parameter
from meshtrain.parallel.torch_private import (
    AnyDropout,
    replace_parameters,
    to_local,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from meshtrain.parallel.tp_plan import REPLICATED

# Attributes that may differ between identical blocks.
OURS = ("mesh", "axis_group", "shared_input", "shared_inputs", "forward")
Sample = Sequence[Tensor | None]
Named = list[tuple[str, Tensor]]
Values = dict[nn.Parameter, nn.Parameter]  # parameter without memory -> the one with values
# Inside, a function gets the name and values of each term that a forward, of so many samples,
# attaches to the loss.
Terms = Callable[[Callable[[str, Tensor], None], int], AbstractContextManager[None]]


def no_terms(see: Callable[[str, Tensor], None], size: int) -> AbstractContextManager[None]:
    return nullcontext()


def tolerance(*, same_code: bool, in_16_bits: bool) -> float:
    """The largest difference that all comparisons take for rounding, relative to the largest value
    of a tensor.

    Args:
        same_code: the plain model is compared with itself, which rounds alike or nearly so.
            Otherwise sums are computed in another order: 1e-3 is far above the rounding of float32
            and far below a missing addend.
        in_16_bits: the model itself computes in 16 bits, which kernels of other sizes round in
            another way.
    """
    if in_16_bits:
        return 1e-2
    return 1e-4 if same_code else 1e-3


class PlainError(Exception):
    """The plain model fails on the sample."""


def skeleton(model: nn.Module, dtype: torch.dtype, training: bool) -> nn.Module:
    """A copy of a model with meta parameters and dropout probability 0."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    try:
        skeleton = cast(copy.deepcopy(model, memo), dtype)
    except Exception as error:
        raise PlainError(f"it cannot be copied: {type(error).__name__}: {error}") from error
    if not training:
        skeleton.eval()
    for module in skeleton.modules():
        if isinstance(module, AnyDropout | Dropout):
            module.p = 0.0
        if isinstance(module, SyncBatchNorm):
            module.eval()  # its statistics are those of all data ranks by intent
    return skeleton


def signature(block: nn.Module) -> str:
    """Equal for blocks with the same code, settings and sizes."""
    described = []
    for name, module in block.named_modules():
        settings = [
            (key, value) for key, value in vars(module).items() if key[0] != "_" and key not in OURS
        ]
        parameters = [
            (key, p.shape, p.requires_grad) for key, p in module.named_parameters("", False)
        ]
        described.append((name, type(module), settings, parameters))
    return repr(described)


@dataclass(eq=False)
class Recording:
    """A forward of a model and the backwards of its pieces, recorded, or compared with those of a
    reference."""

    model: nn.Module
    mesh: Mesh
    kinds: dict[str, str]  # block -> signature, equal for identical blocks
    # That of the plain model; None: this is the reference.
    reference: "Recording | None" = None

    # How the ranks share the work of the compared model ---------------------------------------

    # The axis over which they do.
    axis: str = AXIS
    # This rank's indices in a split dim of size n.
    rows: Callable[[int], list[int]] = lambda n: list(range(n))
    # Whether gradients of tensors that each rank holds whole are summed over ranks: with sequence
    # parallelism and `cp`.
    sums_shared: bool = False
    # Parameters whose gradients are summed (`sum_partial_gradients`).
    partial: Collection[nn.Parameter | None] = ()
    # Split parameter -> this rank's part. The reference records only that.
    places: dict[str, Part] = field(default_factory=dict)

    # Rows -------------------------------------------------------------------------------------

    # Given: the plain model is compared with itself for other samples or tokens. Only what has a
    # row for each of them is compared, these terms too, and there is no backward.
    terms: Terms | None = None
    # Whether what goes into a block and has no gradient, such as an index or a table, may differ:
    # it counts in what the block computes with it.
    constants_differ: bool = False
    seed: int = 0  # of the weights
    ahead: Tensor | None = None  # of parts of sequences: see `predicting`
    # The blocks whose forward runs a second time with what it was given, as the recomputation of a
    # block does: the second one counts.
    recomputed: Collection[str] = ()

    # Findings ---------------------------------------------------------------------------------

    narrow: bool = False  # whether anything was computed in 16 bits
    piece: str = "the model"  # the piece that currently runs
    problem: str | None = None  # the first problem: others may follow from it
    comparisons: int = 0  # tensors compared up to the first problem
    draws: bool = False  # whether a forward has drawn random numbers

    def __post_init__(self) -> None:
        plain = self.reference
        # The plain model's tensors, by name.
        self.tensors: dict[str, Tensor] = {} if plain is None else plain.tensors
        # Call of a block -> the first call of an identical block.
        self.first: dict[str, str] = {} if plain is None else plain.first
        self._alike: dict[str, str] = {}  # block signature and input shapes -> that call
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}
        # Of shape (experts, out, in).
        self._of_experts: set[nn.Parameter] = set()
        for module in self.model.modules():
            if hasattr(module, "dispatch"):
                self._of_experts.update(module.parameters())
        self._sees_terms = True
        self._calls: dict[str, int] = {}
        self._outputs: dict[str, tuple[list[Any], Any]] = {}  # outputs of each first call
        self._starts: Named = []  # leaf tensors at which the code between blocks begins
        self._ends: Named = []  # and the tensors at which it ends

    def compare(self, whole: Sample, inputs: Sample, others: Sequence[str] = ()) -> str | None:
        """Runs the reference with `whole`, and this model with `inputs`, which may append further
        problems to `others`. Returns the first problem of any rank, the same on all ranks. Raises
        PlainError: the reference fails."""
        self._run_both(whole, inputs)
        for problem in others:
            self.differ(problem)
        if self.mesh.world is None:
            return self.problem
        return self._first_of_all_ranks(self.mesh.world)

    def _run_both(self, whole: Sample, inputs: Sample) -> None:
        assert self.reference is not None
        for recording, arguments in ((self.reference, whole), (self, inputs)):
            try:
                recording.run(arguments)
            except Exception as error:
                if self.terms is not None:
                    # This rank has nothing to say. The others, which may have other samples or
                    # more memory, wait for it where they agree on the first problem.
                    self.problem = None
                    return
                # It may be on this rank alone: it ends the job, and says so.
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                failure = f"{type(error).__name__}: {error}"
                if recording is self.reference:
                    raise PlainError(failure) from error
                self.differ(f"{self.piece} fails where the plain model does not: {failure}")

    def _first_of_all_ranks(self, world: dist.ProcessGroup) -> str | None:
        """The problem of the rank that has compared the fewest tensors before it."""
        ranks = self.mesh.layout.world_size
        never = 2**62
        order = never
        if self.problem is not None:
            order = self.comparisons * ranks + self.mesh.rank
        first = torch.tensor(order, device=self.mesh.device_type)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=world)
        if int(first) == never:
            return None
        problems = [self.problem]
        source = int(first) % ranks
        dist.broadcast_object_list(problems, src=source, group=world, device=first.device)
        return problems[0]

    def run(self, inputs: Sample) -> None:
        reseed(0, 0, 0)
        states = _generator_states()
        blocks = {name: self.model.get_submodule(name) for name in self.kinds}
        inside = {module for block in blocks.values() for module in block.modules()}
        outside = [module for module in self.model.modules() if module not in inside]

        forwards = {name: block.forward for name, block in blocks.items()}
        for name, block in blocks.items():
            block.forward = self._isolate(name, block)
        terms: AbstractContextManager[object] = nullcontext()
        if self.terms is not None:
            samples = next((len(x) for x in inputs if x is not None), 0)
            terms = self.terms(self._term, samples)
        try:
            with (
                self._fill(outside) as parameters,
                terms,
                predicting(self.model, inputs, self.ahead),
            ):
                output = self.model(*inputs)
                ends = self._record("the model's output", tensors_of(output))
                self._backward("the model", self._starts, self._ends, ends, parameters)
        finally:
            self.draws = states != _generator_states()
            # Also drops the references to this recording, so that its memory is freed at its end.
            for name, block in blocks.items():
                block.forward = forwards[name]
        if self.reference is not None and self._calls != self.reference._calls:
            self.differ("it calls its blocks another number of times")

    def differ(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _isolate(self, name: str, block: nn.Module) -> Callable:
        """A block's forward with detached inputs and outputs, so that autograd graphs end at the
        block."""
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            piece = self.piece = self._next_call(name)
            inputs, structure = tree_flatten((args, kwargs))
            self._ends += self._record(f"{piece}: input", self._compared(inputs))
            if self.reference is None:
                call = f"{self.kinds[name]} {_sizes(inputs)}"
                self.first[piece] = self._alike.setdefault(call, piece)
            first = self.first.get(piece, piece)
            if first not in self._outputs:
                compute = partial(self._call, forward, structure)
                if name in self.recomputed:
                    compute = partial(self._call_again, compute)
                self._outputs[first] = self._run_block(piece, block, compute, inputs)
            outputs, form = self._outputs[first]
            leaves = [_leaf(y) for y in outputs]
            self._starts += _with_names(f"{piece}: output", leaves)
            self.piece = f"what comes behind {name}"
            # Clones, because the code between blocks may change them in place.
            return tree_unflatten(tree_map_only(Tensor, torch.clone, leaves), form)

        return run

    def _compared(self, inputs: list[Any]) -> list[Any]:
        """The inputs of a block that count."""
        if not self.constants_differ:
            return inputs
        return [x if isinstance(x, Tensor) and x.requires_grad else None for x in inputs]

    def _next_call(self, name: str) -> str:
        """A name for this call of a block, or term."""
        count = self._calls.get(name, 0) + 1
        self._calls[name] = count
        return name if count == 1 else f"{name} (call {count})"

    def _run_block(
        self,
        piece: str,
        block: nn.Module,
        compute: Callable[[list[Any]], Any],
        inputs: list[Any],
    ) -> tuple[list[Any], Any]:
        """A block's forward and backward with weights of its own; its outputs, detached, and their
        structure."""
        leaves = [_leaf(x) for x in inputs]
        with self._fill(block.modules()) as parameters:
            outputs, form = tree_flatten(compute(leaves))
            ends = self._record(f"{piece}: output", outputs)
            starts = _with_names(f"{piece}: input", leaves)
            self._backward(piece, starts, ends, [], parameters)
        return [_leaf(y) for y in outputs], form

    def _call(self, forward: Callable, structure: Any, leaves: list[Any]) -> Any:
        # Clones, because the block may change them in place.
        clones = tree_map_only(Tensor, torch.clone, leaves)
        args, kwargs = tree_unflatten(clones, structure)
        return forward(*args, **kwargs)

    def _call_again(self, compute: Callable[[list[Any]], Any], leaves: list[Any]) -> Any:
        self._sees_terms = False
        first = compute(leaves)
        self._sees_terms = True
        try:
            return compute(leaves)
        except Exception as error:  # any error of the model's code
            self.differ(
                f"{self.piece} fails where its first forward does not: {type(error).__name__}: "
                f"{error}"
            )
            return first

    @contextmanager
    def _fill(self, modules: Iterable[nn.Module]) -> Iterator[Values]:
        """Inside, parameters of these modules have values by their names. Yields parameter -> the
        one with values."""
        filled: Values = {}

        def with_values(p: nn.Parameter) -> nn.Parameter:
            if p not in filled:
                first_summed = 2 if p in self._of_experts else 1
                values = self._values(self._names[p], p.shape, p.dtype, first_summed)
                whole = nn.Parameter(values, requires_grad=p.requires_grad)
                if isinstance(p, DTensor):
                    filled[p] = shard_parameter(whole, self.mesh, p.placements[0])
                else:
                    filled[p] = whole
            return filled[p]

        with replace_parameters(modules, with_values), _Borrowed(self, with_values):
            yield filled

    def _values(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, first_summed: int = 1
    ) -> Tensor:
        """Values that keep a product's output about as large as its input. `first_summed`: the
        first dim that the product sums over."""
        device = self.mesh.device_type
        draw = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) + self.seed)
        if len(shape) < 2:
            # Scales and biases: around 1, and no sign that would let addends cancel.
            return torch.rand(shape, generator=draw, device=device, dtype=dtype).add_(0.5)
        normal = torch.randn(shape, generator=draw, device=device, dtype=dtype)
        return normal.div_(math.sqrt(math.prod(shape[first_summed:])))

    def _record(self, prefix: str, values: list[Any]) -> Named:
        """Records or compares the tensors in `values`; returns those that a backward can start
        from, with names."""
        ends: Named = []
        for name, x in _with_names(prefix, values):
            # A clone, because the model may change its tensors in place.
            x = to_local(x).clone()
            self._compare(name, x)
            if x.requires_grad:
                ends.append((name, x))
        return ends

    def _backward(
        self, piece: str, starts: Named, inner: Named, outer: Named, parameters: Values
    ) -> None:
        """Compares the gradients of a piece's inputs and parameters. `inner`: its outputs to other
        pieces; `outer`: its outputs to the loss, which every rank computes; `parameters`: those of
        `_fill`."""
        if self.terms is not None:
            return
        outputs: list[Tensor] = []
        grads: list[Tensor] = []
        for named, shared in ((inner, self.sums_shared), (outer, False)):
            for name, x in named:
                grad = self._cotangent(name, x, shared)
                if grad is not None:
                    outputs.append(x)
                    grads.append(grad)
        if outputs:
            torch.autograd.backward(outputs, grads)
        self._compare_input_grads(starts)
        self._compare_parameter_grads(piece, parameters)

    def _compare_input_grads(self, starts: Named) -> None:
        for name, x in starts:
            if not x.requires_grad:
                continue
            name = f"{name}: gradient"
            grad = _grad_of(x)
            whole = self.tensors.get(name)
            if self.sums_shared and whole is not None and whole.shape == grad.shape:
                # Each rank has a part of the sum.
                grad = self._sum(grad)
            self._compare(name, grad)

    def _compare_parameter_grads(self, piece: str, parameters: Values) -> None:
        # A gradient that is zero but for rounding has no digits to compare: differences count
        # beside the largest gradient of the piece.
        largest = 0.0
        for p in parameters:
            whole = self.tensors.get(f"{piece}: gradient of {self._names[p]}")
            if whole is not None and whole.numel():
                largest = max(largest, float(whole.abs().max()))
        for p, filled in parameters.items():
            if not p.requires_grad:
                continue
            name, grad = self._names[p], _grad_of(filled)
            if self.reference is None:
                grad = grad[self.places.get(name, ...)].clone()
            is_split = isinstance(p, DTensor) and p not in self.partial
            total = grad if is_split else self._sum(grad)
            self._compare(
                f"{piece}: gradient of {name}",
                total if p in self.partial else grad,
                total=total,
                least=1e-3 * largest,
            )

    def _term(self, name: str, values: Tensor) -> None:
        """Compares a term of the loss, or what a module tallies."""
        if self._sees_terms:
            self._compare(f"{self.piece}: {self._next_call(name)}", values)

    def _sum(self, x: Tensor) -> Tensor:
        if self.reference is not None:
            x = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(x, group=self.mesh.group(self.axis))
        return x

    def _cotangent(self, name: str, x: Tensor, shared: bool) -> Tensor | None:
        """This rank's part of the gradient of a tensor; if `shared` and whole, its share of a sum
        over the ranks."""
        place = self._place(name, x.shape)
        if place is None:
            return None
        whole = self.tensors[name].shape
        grad = self._values(name, whole, x.dtype)[place]
        if shared and whole == x.shape:
            grad = grad / self.mesh.size(self.axis)
        return grad

    def _place(self, name: str, part: Sequence[int]) -> Any:
        """The index of this rank's part in the whole tensor, from their shapes: `...` for all of
        it; None: it is not a part of it."""
        whole = self.tensors.get(name)
        if whole is None or whole.ndim != len(part):
            return None
        cut_dims = [dim for dim, n in enumerate(part) if n != whole.shape[dim]]
        if not cut_dims:
            return ...
        dim = cut_dims[0]
        rows = self.rows(whole.shape[dim])
        if len(cut_dims) > 1 or len(rows) != part[dim]:
            return None
        return (*[slice(None)] * dim, rows)

    def _compare(
        self, name: str, x: Tensor, total: Tensor | None = None, least: float = 0.0
    ) -> None:
        """Records a tensor of the reference, or compares this rank's part with it.

        Args:
            total: x summed over the ranks.
            least: differences count beside a value of at least this size.
        """
        x = x.detach()
        if self.reference is None:
            self.tensors[name] = x
            return
        if self.problem is not None:
            return
        self.comparisons += 1
        whole, place = self.tensors.get(name), self._place(name, x.shape)
        if self.terms is not None and not self._has_other_rows(place):
            return
        if whole is None:
            self.differ(f"{name} is none of the plain model's")
            return
        if place is None:
            self.differ(
                f"{name} has the shape {tuple(x.shape)}, and {tuple(whole.shape)} on one device"
            )
            return
        allowed = tolerance(same_code=self.terms is not None, in_16_bits=self.narrow)
        difference = _difference(x, whole[place], least)
        if difference <= allowed:
            return
        problem = f"{name} differs by {difference:.2g} of its largest value"
        if total is not None and _difference(total, whole[place], least) <= allowed:
            problem += (
                f", but not its sum over tp: the tp_plan has to give it the style {REPLICATED}"
            )
        self.differ(problem)

    def _has_other_rows(self, place: Any) -> bool:
        """Whether a tensor of this batch has other rows, of samples or tokens, than that of the
        reference's batch; where both batches are the same, every tensor counts."""
        same_batch = len(self.rows(2)) == 2
        return place is not None and (place is not ... or same_batch)


class _Borrowed(TorchFunctionMode):
    """Gives values to parameters of a block that code outside of it computes with: for them alone
    they are on meta, and operators on a CPU would read them as if they were not. Tells the
    recording of results in 16 bits."""

    def __init__(
        self, recording: Recording, values: Callable[[nn.Parameter], nn.Parameter]
    ) -> None:
        super().__init__()
        self.recording, self.values = recording, values
        self.device = torch.empty(0, device=recording.mesh.device_type).device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(self._is_empty(leaf) for leaf in tree_leaves((args, kwargs))):
            is_attribute = getattr(func, "__name__", "") == "__get__"  # such as `shape`
            if is_attribute:
                value = func(*args, **kwargs)
                if isinstance(value, torch.device):
                    return self.device
                if not isinstance(value, Tensor):
                    return value
            args, kwargs = tree_map_only(nn.Parameter, self._with_values, (args, kwargs))
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point() and result.dtype.itemsize < 4:
            self.recording.narrow = True
        return result

    def _is_empty(self, x: Any) -> bool:
        """Whether x is a parameter of the model, which has no values."""
        return isinstance(x, nn.Parameter) and x in self.recording._names

    def _with_values(self, x: nn.Parameter) -> Tensor:
        return self.values(x) if self._is_empty(x) else x


def _generator_states() -> list[Any]:
    gpu = [torch.cuda.get_rng_state().tolist()] if torch.cuda.is_initialized() else []
    _, keys, *others = np.random.get_state()
    return [
        torch.get_rng_state().tolist(),
        *gpu,
        np.asarray(keys).tolist(),
        others,
        random.getstate(),
    ]


def _difference(x: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """The largest difference relative to the largest value, or to `least` if that is larger."""
    if x.numel() == 0:
        return 0.0
    if not (x.is_floating_point() or x.is_complex()):
        x = x.double()
        expected = expected.double()
    # Infinities, and NaN in the same places, are equal, and say nothing of the size of values.
    is_same = (x == expected) | (x.isnan() & expected.isnan())
    differences = torch.where(is_same, 0, (x - expected).abs())
    largest = torch.where(expected.isfinite(), expected.abs(), 0).max()
    size = largest.clamp(min=max(least, 1e-30))
    return float((differences / size).max())


def _sizes(values: Sequence[Any]) -> list[Any]:
    """What tells calls of a block apart: shapes and dtypes of its tensors, and its other
    arguments."""
    return [(x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in values]


def _with_names(prefix: str, values: Sequence[Any]) -> Named:
    return [(f"{prefix} {i}", x) for i, x in enumerate(values) if isinstance(x, Tensor)]


def _grad_of(x: Tensor) -> Tensor:
    return torch.zeros_like(to_local(x.detach())) if x.grad is None else to_local(x.grad)


def _leaf(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
