"""One model's forward and backward, piece by piece, compared with those of another."""

import copy
import math
import random
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from meshtrain.dropout import Dropout
from meshtrain.mesh import Mesh
from meshtrain.parallel.grad_sync import tensors_of
from meshtrain.parallel.mixed_precision import cast, reseed
from meshtrain.parallel.sharding import Part
from meshtrain.parallel.sync_batch_norm import SyncBatchNorm
from meshtrain.parallel.tensor_parallel import AXIS, shard_parameter
from meshtrain.parallel.torch_private import replace_parameters, to_local
from meshtrain.parallel.tp_plan import REPLICATED

# relative to a tensor's largest value: far above float32 rounding, far below a missing addend
TOLERANCE = 1e-3
SAME_CODE = 1e-4  # where the plain model is compared with itself, which rounds alike or nearly so
# where a model itself computes in 16 bits, which kernels of other sizes round in another way
NARROW = 1e-2

# may differ between identical blocks
OURS = (
    "mesh",
    "axis_group",
    "shared_input",
    "shared_inputs",
    "forward",
)
Sample = Sequence[Tensor | None]
Named = list[tuple[str, Tensor]]
# Inside, a function gets the name and values of each term that a forward attaches to the loss.
Terms = Callable[[Callable[[str, Tensor], None]], AbstractContextManager[None]]


def no_terms(see: Callable[[str, Tensor], None]) -> AbstractContextManager[None]:
    return nullcontext()


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
        if isinstance(module, nn.modules.dropout._DropoutNd | Dropout):
            module.p = 0.0
        if isinstance(module, SyncBatchNorm):
            module.eval()  # its statistics are those of all data ranks by intent
    return skeleton


def signature(block: nn.Module) -> str:
    """Equal for blocks with the same code, settings and sizes."""

    def describe(module: nn.Module) -> tuple[Any, ...]:
        settings = [
            (key, value) for key, value in vars(module).items() if key[0] != "_" and key not in OURS
        ]
        parameters = [
            (key, p.shape, p.requires_grad) for key, p in module.named_parameters("", False)
        ]
        return type(module), settings, parameters

    return repr([(name, *describe(module)) for name, module in block.named_modules()])


@dataclass(eq=False)
class Run:
    """A forward of a model and the backwards of its pieces, recorded, or compared with those of a
    reference."""

    model: nn.Module
    mesh: Mesh
    kinds: dict[str, str]  # block -> signature, equal for identical blocks
    reference: "Run | None" = None  # the run of the plain model; None if this is the reference
    axis: str = AXIS  # the axis over which ranks share the work
    # this rank's indices in a split dim of size n
    rows: Callable[[int], list[int]] = lambda n: list(range(n))
    # Whether gradients of tensors that each rank holds whole are summed over ranks: with sequence
    # parallelism and `cp`.
    sums_shared: bool = False
    partial: Collection[
        nn.Parameter | None
    ] = ()  # parameters whose gradients are summed (`sum_partial_gradients`)
    # split parameter -> this rank's part; only it is recorded
    places: dict[str, Part] = field(default_factory=dict)
    # given: compares only what has a row per sample, these terms, and no backward
    terms: Terms | None = None
    tolerance: float = TOLERANCE
    seed: int = 0  # of the weights
    narrow: bool = False  # whether anything was computed in 16 bits
    piece: str = "the model"  # the piece that currently runs
    problem: str | None = None  # the first problem: others may follow from it
    comparisons: int = 0  # tensors compared up to the first problem
    draws: bool = False  # whether a forward has drawn random numbers

    def __post_init__(self) -> None:
        plain = self.reference
        # the plain model's, by name
        self.tensors: dict[str, Tensor] = {} if plain is None else plain.tensors
        # call of a block -> the first call of an identical block
        self.first: dict[str, str] = {} if plain is None else plain.first
        self._alike: dict[str, str] = {}  # block signature and input shapes -> that call
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}
        experts = (module for module in self.model.modules() if hasattr(module, "dispatch"))
        # (E, out, in)
        self._of_experts = {parameter for module in experts for parameter in module.parameters()}
        self._calls: dict[str, int] = {}
        self._outputs: dict[str, tuple[list[Any], Any]] = {}  # outputs of each first call
        self._starts: Named = []  # leaf tensors at which the code between blocks begins
        self._ends: Named = []  # and the tensors at which it ends

    def compare(self, whole: Sample, inputs: Sample, others: Sequence[str] = ()) -> str | None:
        """Runs the reference with `whole`, and this run with `inputs`, which may append further
        problems to `others`. Returns the first problem of any rank, the same on all ranks. Raises
        PlainError: the reference fails."""
        assert self.reference is not None
        for run, arguments in ((self.reference, whole), (self, inputs)):
            try:
                run.run(arguments)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
                if self.terms is not None:
                    self.problem = None
                    break  # to the other ranks, which may have other samples, or more memory
                # may be on this rank alone: it ends the job, and says so
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                if run is self.reference:
                    raise PlainError(failure) from error
                self.differ(f"{self.piece} fails where the plain model does not: {failure}")
        for problem in others:
            self.differ(problem)
        if self.mesh.world is None:
            return self.problem
        world, never = self.mesh.layout.world_size, 2**62
        order = never if self.problem is None else self.comparisons * world + self.mesh.rank
        first = torch.tensor(order, device=self.mesh.device_type)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self.mesh.world)
        if int(first) == never:
            return None
        problems = [self.problem]
        dist.broadcast_object_list(
            problems, src=int(first) % world, group=self.mesh.world, device=first.device
        )
        return problems[0]

    def run(self, inputs: Sample) -> None:
        reseed(0, 0, 0)
        states = _generator_states()
        blocks = [(name, self.model.get_submodule(name)) for name in self.kinds]
        inside = {module for _, block in blocks for module in block.modules()}
        forwards = [(block, block.forward) for _, block in blocks]
        for name, block in blocks:
            block.forward = self._isolate(name, block)
        try:
            outside = self._fill(module for module in self.model.modules() if module not in inside)
            with (
                outside as parameters,
                nullcontext() if self.terms is None else self.terms(self._term),
            ):
                ends = self._record("the model's output", tensors_of(self.model(*inputs)))
                self._backward("the model", self._starts, self._ends, ends, parameters)
        finally:
            self.draws = states != _generator_states()
            # drops all references to this run, so that its memory is freed at its end
            for (
                block,
                forward,
            ) in forwards:
                block.forward = forward
        if self.reference is not None and self._calls != self.reference._calls:
            self.differ("it calls its blocks another number of times")

    def differ(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _isolate(self, name: str, block: nn.Module) -> Callable:
        """A block's forward with detached inputs and outputs, so that autograd graphs end at the
        block."""
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            count = self._calls[name] = self._calls.get(name, 0) + 1
            piece = self.piece = name if count == 1 else f"{name} (call {count})"
            inputs, structure = tree_flatten((args, kwargs))
            self._ends += self._record(f"{piece}: input", inputs)
            if self.reference is None:
                sizes = [
                    (x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else x
                    for x in inputs
                ]
                self.first[piece] = self._alike.setdefault(f"{self.kinds[name]} {sizes}", piece)
            first = self.first.get(piece, piece)
            if first not in self._outputs:
                leaves = [_leaf(x) for x in inputs]
                with self._fill(block.modules()) as parameters:
                    # the block may change them in place
                    clones = tree_map_only(Tensor, torch.clone, leaves)
                    args, kwargs = tree_unflatten(clones, structure)
                    outputs, form = tree_flatten(forward(*args, **kwargs))
                    ends = self._record(f"{piece}: output", outputs)
                    self._backward(
                        piece, _with_names(f"{piece}: input", leaves), ends, [], parameters
                    )
                self._outputs[first] = [_leaf(y) for y in outputs], form
            outputs, form = self._outputs[first]
            leaves = [_leaf(y) for y in outputs]
            self._starts += _with_names(f"{piece}: output", leaves)
            self.piece = f"what comes behind {name}"
            return tree_unflatten(tree_map_only(Tensor, torch.clone, leaves), form)

        return run

    @contextmanager
    def _fill(self, modules: Iterable[nn.Module]) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """Inside, parameters of these modules have values by their names. Yields parameter -> the
        one with values."""
        filled: dict[nn.Parameter, nn.Parameter] = {}

        def with_values(p: nn.Parameter) -> nn.Parameter:
            if p not in filled:
                values = self._values(
                    self._names[p], p.shape, p.dtype, 2 if p in self._of_experts else 1
                )
                whole = nn.Parameter(values, requires_grad=p.requires_grad)
                filled[p] = (
                    shard_parameter(whole, self.mesh, p.placements[0])
                    if isinstance(p, DTensor)
                    else whole
                )
            return filled[p]

        with replace_parameters(modules, with_values), _Borrowed(self, with_values):
            yield filled

    def _values(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, first: int = 1
    ) -> Tensor:
        """Values that keep a product's output about as large as its input. `first`: the first dim
        that it sums over."""
        draw = torch.Generator(self.mesh.device_type).manual_seed(
            zlib.crc32(name.encode()) + self.seed
        )
        options: dict[str, Any] = {
            "generator": draw,
            "device": self.mesh.device_type,
            "dtype": dtype,
        }
        if len(shape) < 2:
            return torch.rand(shape, **options).add_(0.5)
        return torch.randn(shape, **options).div_(math.sqrt(math.prod(shape[first:])))

    def _record(self, prefix: str, values: list[Any]) -> Named:
        """Records or compares the tensors in `values`; returns those that a backward can start
        from, with names."""
        # Clones, because the model may change its tensors in place.
        copies = [(name, to_local(x).clone()) for name, x in _with_names(prefix, values)]
        for name, x in copies:
            self._compare(name, x)
        return [(name, x) for name, x in copies if x.requires_grad]

    def _backward(
        self,
        piece: str,
        starts: Named,
        inner: Named,
        outer: Named,
        parameters: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        """Compares the gradients of a piece's inputs and parameters. `inner`: its outputs to other
        pieces; `outer`: its outputs to the loss, which every rank computes; `parameters`: those of
        `_fill`."""
        if self.terms is not None:
            return
        ends = [(x, self._cotangent(name, x, self.sums_shared)) for name, x in inner]
        ends += [(x, self._cotangent(name, x, False)) for name, x in outer]
        ends = [(x, grad) for x, grad in ends if grad is not None]
        if ends:
            torch.autograd.backward([x for x, _ in ends], [grad for _, grad in ends])
        for name, x in starts:
            if x.requires_grad:
                name, grad = f"{name}: gradient", _grad_of(x)
                whole = self.tensors.get(name)
                summed = self.sums_shared and whole is not None and whole.shape == grad.shape
                self._compare(name, self._sum(grad) if summed else grad)
        grads = [self.tensors.get(f"{piece}: gradient of {self._names[p]}") for p in parameters]
        least = 1e-3 * max(
            (float(g.abs().max()) for g in grads if g is not None and g.numel()), default=0.0
        )
        for p, filled in parameters.items():
            if p.requires_grad:
                name, grad = self._names[p], _grad_of(filled)
                if self.reference is None:
                    grad = grad[self.places.get(name, ...)].clone()
                total = (
                    grad if isinstance(p, DTensor) and p not in self.partial else self._sum(grad)
                )
                self._compare(
                    f"{piece}: gradient of {name}",
                    total if p in self.partial else grad,
                    total,
                    least,
                )

    def _term(self, name: str, values: Tensor) -> None:
        """Compares a term of the loss, or what a module tallies."""
        number = self._calls[name] = self._calls.get(name, 0) + 1
        self._compare(f"{self.piece}: {name}" + f" (call {number})" * (number > 1), values)

    def _sum(self, x: Tensor) -> Tensor:
        if self.reference is not None:
            x = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(x, group=self.mesh.group(self.axis))
        return x

    def _cotangent(self, name: str, x: Tensor, shared: bool) -> Tensor | None:
        """This rank's part of the gradient of a tensor; if `shared` and whole, its share of a sum
        over the ranks."""
        if (place := self._place(name, x.shape)) is None:
            return None
        whole = self.tensors[name].shape
        grad = self._values(name, whole, x.dtype)[place]
        return grad / self.mesh.size(self.axis) if shared and whole == x.shape else grad

    def _place(self, name: str, part: Sequence[int]) -> Any:
        """The index of this rank's part in the whole tensor, from their shapes; None: it is not a
        part of it."""
        whole = self.tensors.get(name)
        if whole is None or whole.ndim != len(part):
            return None
        dims = [dim for dim, n in enumerate(part) if n != whole.shape[dim]]
        if not dims:
            return ...
        rows = self.rows(whole.shape[dims[0]])
        return (
            (*[slice(None)] * dims[0], rows)
            if len(dims) == 1 and len(rows) == part[dims[0]]
            else None
        )

    def _compare(
        self, name: str, x: Tensor, total: Tensor | None = None, least: float = 0.0
    ) -> None:
        """`total`: x summed over the ranks."""
        x = x.detach()
        if self.reference is None:
            self.tensors[name] = x
        elif self.problem is None:
            tolerance = max(self.tolerance, NARROW) if self.narrow else self.tolerance
            self.comparisons += 1
            whole, place = self.tensors.get(name), self._place(name, x.shape)
            if self.terms is not None and (
                place is None or (place is ... and len(self.rows(2)) != 2)
            ):
                return
            if whole is None:
                self.differ(f"{name} is none of the plain model's")
            elif place is None:
                self.differ(
                    f"{name} has the shape {tuple(x.shape)}, and {tuple(whole.shape)} on one device"
                )
            elif (off := _off(x, whole[place], tolerance, least)) is not None:
                sums = total is not None and _off(total, whole[place], tolerance, least) is None
                hint = (
                    f", but not its sum over tp: the tp_plan has to give it the style {REPLICATED}"
                    if sums
                    else ""
                )
                self.differ(f"{name} differs by {off:.2g} of its largest value{hint}")


class _Borrowed(TorchFunctionMode):
    """Gives values to parameters of a block that code outside of it computes with: for them alone
    they are on meta, and operators on a CPU would read them as if they were not. Tells the run of
    results in 16 bits."""

    def __init__(self, run: Run, values: Callable[[nn.Parameter], nn.Parameter]) -> None:
        super().__init__()
        self.run, self.values, self.device = (
            run,
            values,
            torch.empty(0, device=run.mesh.device_type).device,
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, names = kwargs or {}, self.run._names
        if any(isinstance(x, nn.Parameter) and x in names for x in tree_leaves((args, kwargs))):
            if getattr(func, "__name__", "") == "__get__" and not isinstance(
                value := func(*args, **kwargs), Tensor
            ):
                # nothing is computed
                return self.device if isinstance(value, torch.device) else value
            args, kwargs = tree_map_only(
                nn.Parameter, lambda x: self.values(x) if x in names else x, (args, kwargs)
            )
        result = func(*args, **kwargs)
        self.run.narrow |= (
            isinstance(result, Tensor) and result.dtype.itemsize < 4 and result.is_floating_point()
        )
        return result


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


def _off(x: Tensor, expected: Tensor, tolerance: float, least: float = 0.0) -> float | None:
    """The largest difference relative to the largest value; None if within the tolerance."""
    if x.numel() == 0:
        return None
    if not (x.is_floating_point() or x.is_complex()):
        x, expected = x.double(), expected.double()
    same = (x == expected) | (x.isnan() & expected.isnan())
    largest = torch.where(expected.isfinite(), expected.abs(), 0).max().clamp(min=max(least, 1e-30))
    worst = float((torch.where(same, 0, (x - expected).abs()) / largest).max())
    return None if worst <= tolerance else worst


def _with_names(prefix: str, values: Sequence[Any]) -> Named:
    return [(f"{prefix} {i}", x) for i, x in enumerate(values) if isinstance(x, Tensor)]


def _grad_of(x: Tensor) -> Tensor:
    return torch.zeros_like(to_local(x.detach())) if x.grad is None else to_local(x.grad)


def _leaf(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
