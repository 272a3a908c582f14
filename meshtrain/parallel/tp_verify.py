"""Tensor-parallel check before the first step: whether a split model computes what the plain model does.

Two copies of the model, one of them split, take a short sample through a forward and a backward. Values are compared
wherever a block begins or ends; each block has its own backward, and so has what runs between the blocks. Weights are
random numbers and not the run's, because a norm of ones or a layer of zeros would hide an error. They exist for one
block at a time, and blocks that are alike are computed once. Neither the model nor a generator of random numbers
changes.
"""

import copy
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshtrain.errors import AgreedError
from meshtrain.mesh import Mesh
from meshtrain.parallel.mixed_precision import cast, master_dtype
from meshtrain.parallel.sharding import Part, chunk_range, local_part
from meshtrain.parallel.tensor_parallel import AXIS, TensorParallel, partial_parameters, replace_layers, shard_parameter
from meshtrain.parallel.torch_private import replace_parameters, to_local
from meshtrain.parallel.tp_plan import REPLICATED

TOLERANCE = 1e-3  # of a tensor's largest value: far above the rounding of float32, far below a missing addend

# Attributes in which blocks that are alike may differ.
OURS = ("mesh", "axis_group", "shared_gather", "shared_gathers", "forward")
Sample = Sequence[Tensor | None]
Named = list[tuple[str, Tensor]]


def verify(
    model: nn.Module, blocks: Sequence[str], tp: TensorParallel, sample: Sample | None, precision: str
) -> str | None:
    """Compares a plain model with the same model split over `tp`. All ranks call it together and come to one verdict.

    Args:
        model: plain, on any device, meta included; `blocks`: names of its blocks, each once.
        sample: what `model(*sample)` takes, two short samples are enough; None: one is made up.

    Returns:
        None, or why the model could not be checked: the plain one does not take the sample that was made up.

    Raises:
        AgreedError: they differ, or the plain model does not take the sample.
    """
    mesh = tp.mesh
    device, dtype = torch.device(mesh.device_type), master_dtype(precision)
    inputs = _made_up_sample(model, mesh.size(AXIS)) if sample is None else sample
    inputs = [x if x is None else x.to(device, dtype if x.is_floating_point() else None) for x in inputs]

    def difference(sequence: bool) -> str | None:
        try:
            plain, split = _skeleton(model, dtype), _skeleton(model, dtype)
        except Exception as error:
            raise _PlainError(f"it cannot be copied: {type(error).__name__}: {error}") from error
        replace_layers(split, replace(tp, sequence_parallel=sequence))
        kinds = {
            name: f"{_signature(plain.get_submodule(name))} {_signature(split.get_submodule(name))}" for name in blocks
        }
        places = {name: local_part(parameter)[1] for name, parameter in split.named_parameters()}
        reference = _Run(plain, mesh, device, kinds, places, sequence)
        if failure := _failure(reference, inputs):
            raise _PlainError(failure)
        compared = _Run(split, mesh, device, kinds, places, sequence, reference)
        if failure := _failure(compared, inputs):
            compared.differ(f"{compared.piece} fails where the plain model does not: {failure}")
        return _first_difference(compared, mesh)

    gpus = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.enable_grad():
        try:
            problem = difference(tp.sequence_parallel)
        except _PlainError as error:  # on all ranks: they do the same
            if sample is None:
                return str(error)
            raise AgreedError(
                f"the plain model does not take the first samples ({error}): mend it, or leave its check out by "
                "parallel.verify: false"
            ) from error
        if problem is None:
            return None
        without = tp.sequence_parallel and difference(False) is None
    remedy = "parallel.sequence_parallel: false, which passes this check" if without else "tp: 1"
    raise AgreedError(
        f"with tp {mesh.size(AXIS)} the model does not compute what it does on one device: {problem}. Use {remedy}, or "
        "mend the model or its tp_plan (docs/tensor-parallel.md says how). parallel.verify: false leaves this check out"
    )


class _PlainError(Exception):
    """The plain model does not take the sample."""


def _made_up_sample(model: nn.Module, tp: int) -> list[Tensor]:
    """Two short samples for a model's first layer that says what it takes: token ids, or features."""
    random, length = torch.Generator().manual_seed(0), tp * max(2, math.ceil(8 / tp))
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if tables:
        return [torch.randint(min(tables), (2, length), generator=random)]
    widths = [module.in_features for module in model.modules() if isinstance(module, nn.Linear)]
    return [torch.randn(2, length, *widths[:1], generator=random)]


def _skeleton(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model whose parameters have no memory."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return cast(copy.deepcopy(model, memo), dtype).eval()


def _signature(block: nn.Module) -> str:
    """By which blocks are alike: the same code, settings and sizes."""
    return repr(
        [
            (
                name,
                type(module),
                [(key, value) for key, value in vars(module).items() if key[0] != "_" and key not in OURS],
                [(key, p.shape, p.requires_grad) for key, p in module.named_parameters(recurse=False)],
            )
            for name, module in block.named_modules()
        ]
    )


def _failure(run: "_Run", inputs: Sample) -> str | None:
    try:
        run.run(inputs)
    except torch.OutOfMemoryError:  # maybe of this rank alone: it ends the job, and says so
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _first_difference(run: "_Run", mesh: Mesh) -> str | None:
    """The first difference on any rank of the job, told to all of them."""
    world, never = mesh.layout.world_size, 2**62
    first = torch.tensor(never if run.problem is None else run.comparisons * world + mesh.rank, device=mesh.device_type)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=mesh.world)
    if int(first) == never:
        return None
    problem = [run.problem]
    dist.broadcast_object_list(problem, src=int(first) % world, group=mesh.world, device=first.device)
    return problem[0]


class _Run:
    """A forward of a model and the backward of each of its pieces, recorded, or compared with those of a reference run.

    With sequence parallelism the gradient of what every rank holds whole is a sum over the ranks, as it is for
    parameters (`sum_partial_gradients`); without it each rank has all of it.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        device: torch.device,
        kinds: dict[str, str],
        places: dict[str, Part],
        sequence: bool,
        reference: "_Run | None" = None,
    ) -> None:
        """`kinds`: block -> what is the same for blocks that are alike; `places`: parameter -> this rank's part of it;
        `reference`: the run of the plain model; None: this is it."""
        self.model, self.mesh, self.device, self.reference = model, mesh, device, reference
        self.problem: str | None = None  # the first one: others follow from it
        self.comparisons = 0  # tensors, until then
        self.piece = "the model"  # that runs now
        self.tensors: dict[str, Tensor] = {}  # by their names
        self.first: dict[str, str] = {}  # a call of a block -> the first call of one that is alike
        self._alike: dict[str, str] = {}  # block and inputs -> that call
        self._kinds, self._places, self._sequence = kinds, places, sequence
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._partial = {module._parameters[name] for module, name in partial_parameters(model, sequence)}
        self._calls: dict[str, int] = {}
        self._outputs: dict[str, tuple[list[Any], Any]] = {}  # of each first call
        self._starts: Named = []  # leaves that what runs between the blocks begins with
        self._ends: Named = []  # and the tensors that it ends with

    def run(self, inputs: Sample) -> None:
        torch.manual_seed(0)
        blocks = [(name, self.model.get_submodule(name)) for name in self._kinds]
        inside = {module for _, block in blocks for module in block.modules()}
        forwards = [(block, block.forward) for _, block in blocks]
        for name, block in blocks:
            block.forward = self._isolate(name, block)
        try:
            with self._fill(module for module in self.model.modules() if module not in inside) as parameters:
                ends = self._record("the model's output", tree_flatten(self.model(*inputs))[0])
                self._backward("the model", self._starts, self._ends, ends, parameters)
        finally:
            for block, forward in forwards:  # nothing refers to this run any more: its memory is free when it is done
                block.forward = forward
        if self.reference is not None and self._calls != self.reference._calls:
            self.differ("it calls its blocks another number of times")

    def differ(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _isolate(self, name: str, block: nn.Module) -> Callable:
        """A forward of a block that hands on what autograd does not lead through."""
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            count = self._calls[name] = self._calls.get(name, 0) + 1
            piece = self.piece = name if count == 1 else f"{name} (call {count})"
            inputs, structure = tree_flatten((args, kwargs))
            self._ends += self._record(f"{piece}: input", inputs)
            first = self._first(piece, name, inputs)
            if first not in self._outputs:
                leaves = [_leaf(x) for x in inputs]
                with self._fill(block.modules()) as parameters:
                    args, kwargs = tree_unflatten([_fresh(x) for x in leaves], structure)
                    outputs, form = tree_flatten(forward(*args, **kwargs))
                    ends = self._record(f"{piece}: output", outputs)
                    self._backward(piece, _with_names(f"{piece}: input", leaves), ends, [], parameters)
                self._outputs[first] = [_leaf(y) for y in outputs], form
            outputs, form = self._outputs[first]
            leaves = [_leaf(y) for y in outputs]
            self._starts += _with_names(f"{piece}: output", leaves)
            self.piece = f"what comes behind {name}"
            return tree_unflatten([_fresh(y) for y in leaves], form)

        return run

    def _first(self, call: str, name: str, inputs: list[Any]) -> str:
        if self.reference is not None:
            return self.reference.first.get(call, call)
        sizes = [(x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
        self.first[call] = self._alike.setdefault(f"{self._kinds[name]} {sizes}", call)
        return self.first[call]

    @contextmanager
    def _fill(self, modules: Iterable[nn.Module]) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """Gives parameters of these modules values inside, by their names: parameter -> the one with values."""
        filled: dict[nn.Parameter, nn.Parameter] = {}

        def with_values(p: nn.Parameter) -> nn.Parameter:
            if p not in filled:
                whole = nn.Parameter(self._values(self._names[p], p.shape, p.dtype), requires_grad=p.requires_grad)
                filled[p] = shard_parameter(whole, self.mesh, p.placements[0]) if isinstance(p, DTensor) else whole
            return filled[p]

        with replace_parameters(modules, with_values):
            yield filled

    def _values(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        random = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        options: dict[str, Any] = {"generator": random, "device": self.device, "dtype": dtype}
        if len(shape) < 2:
            return torch.rand(shape, **options) + 0.5
        return torch.randn(shape, **options) / math.sqrt(math.prod(shape[1:]))

    def _record(self, prefix: str, values: list[Any]) -> Named:
        """Records or compares the tensors of these; gives back those that a backward can start from, by their names."""
        # Clones, because the model may change its own.
        copies = [(name, to_local(x).clone()) for name, x in _with_names(prefix, values)]
        for name, x in copies:
            self._compare(name, x)
        return [(name, x) for name, x in copies if x.requires_grad]

    def _backward(
        self, piece: str, starts: Named, inner: Named, outer: Named, parameters: dict[nn.Parameter, nn.Parameter]
    ) -> None:
        """The gradients of a piece's inputs and parameters. `inner`: what it hands on to other pieces; `outer`: what it
        gives for the loss, which every rank computes; `parameters`: those of `_fill`."""
        ends = [(x, self._cotangent(name, x, shared=True)) for name, x in inner]
        ends += [(x, self._cotangent(name, x, shared=False)) for name, x in outer]
        ends = [(x, grad) for x, grad in ends if grad is not None and x.requires_grad]
        if ends:
            torch.autograd.backward([x for x, _ in ends], [grad for _, grad in ends])
        for name, x in starts:
            if x.requires_grad:
                grad = _grad_of(x)
                summed = self._sequence and self._is_whole(name, grad)
                self._compare(f"{name}: gradient", self._sum(grad) if summed else grad)
        for p, filled in parameters.items():
            if p.requires_grad:
                name, grad = self._names[p], _grad_of(filled)
                if self.reference is None and grad.dim() > 0:
                    grad = grad[self._places[name]].clone()
                total = grad if isinstance(p, DTensor) and p not in self._partial else self._sum(grad)
                self._compare(f"{piece}: gradient of {name}", total if p in self._partial else grad, total)

    def _sum(self, x: Tensor) -> Tensor:
        if self.reference is not None:
            x = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(x, group=self.mesh.group(AXIS))
        return x

    def _cotangent(self, name: str, x: Tensor, *, shared: bool) -> Tensor | None:
        """This rank's part of the gradient that a tensor gets."""
        if self.reference is None:
            return self._values(name, x.shape, x.dtype)
        whole = self.reference.tensors.get(name)
        place = None if whole is None else self._place(whole.shape, x.shape)
        if whole is None or place is None:
            return None
        grad = self._values(name, whole.shape, x.dtype)[place]
        return grad / self.mesh.size(AXIS) if shared and self._sequence and whole.shape == x.shape else grad

    def _is_whole(self, name: str, x: Tensor) -> bool:
        whole = None if self.reference is None else self.reference.tensors.get(name)
        return whole is not None and whole.shape == x.shape

    def _place(self, whole: Sequence[int], part: Sequence[int]) -> Part | None:
        """Where in a whole tensor this rank's part lies, by their shapes; None: it is no part of it."""
        tp, index = self.mesh.size(AXIS), self.mesh.index(AXIS)
        if len(whole) != len(part):
            return None
        place = tuple(slice(0, n) if n == m else chunk_range(n, tp, index) for n, m in zip(whole, part, strict=True))
        fits = all(rows.stop - rows.start == m for rows, m in zip(place, part, strict=True))
        return place if fits and sum(n != m for n, m in zip(whole, part, strict=True)) <= 1 else None

    def _compare(self, name: str, x: Tensor, total: Tensor | None = None) -> None:
        """`total`: what x would be if it were summed over the ranks."""
        x = x.detach()
        if self.reference is None:
            self.tensors[name] = x
        elif self.problem is None:
            self.comparisons += 1
            whole = self.reference.tensors.get(name)
            if whole is None:
                self.differ(f"{name} is none of the plain model's")
                return
            place = self._place(whole.shape, x.shape)
            if place is None:
                self.differ(f"{name} has the shape {tuple(x.shape)}, and {tuple(whole.shape)} on one device")
                return
            off = self._off(x, whole[place])
            if off is not None:
                sums = total is not None and self._off(total, whole[place]) is None
                hint = f", but not its sum over tp: the tp_plan has to give it the style {REPLICATED}" if sums else ""
                self.differ(f"{name} differs by {off:.2g} of its largest value{hint}")

    def _off(self, x: Tensor, expected: Tensor) -> float | None:
        """The largest difference, relative to the largest value; None within the tolerance."""
        if not (x.is_floating_point() or x.is_complex()):
            x, expected = x.double(), expected.double()
        same = (x == expected) | (x.isnan() & expected.isnan())
        off = torch.where(same, 0, (x - expected).abs())
        largest = torch.where(expected.isfinite(), expected.abs(), 0).max().clamp(min=1e-30) if x.numel() else x.sum()
        worst = float((off / largest).max()) if x.numel() else 0.0
        return None if worst <= TOLERANCE else worst


def _with_names(prefix: str, values: Sequence[Any]) -> Named:
    return [(f"{prefix} {i}", x) for i, x in enumerate(values) if isinstance(x, Tensor)]


def _grad_of(x: Tensor) -> Tensor:
    return torch.zeros_like(to_local(x.detach())) if x.grad is None else to_local(x.grad)


def _leaf(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _fresh(x: Any) -> Any:
    """What may be changed in place."""
    return x.clone() if isinstance(x, Tensor) else x
