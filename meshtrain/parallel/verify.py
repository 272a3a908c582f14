"""Whether a model that is split over `tp` computes what the plain model does, found out before its first step.

Two copies of the model, one of them split, take a short sample through a forward and a backward. Values are compared
wherever a block begins or ends; each block has its own backward, and so has what runs between the blocks. Weights are
random numbers and not the run's, because a norm of ones or a layer of zeros would hide an error. They exist for one
block at a time, and blocks that are alike are computed once. Neither the model nor a generator of random numbers
changes.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshtrain.cuts import Part, cut
from meshtrain.errors import AgreedError
from meshtrain.init import generator
from meshtrain.mesh import Mesh
from meshtrain.numerics import cast, master_dtype
from meshtrain.parallel.stages import blocks_of
from meshtrain.parallel.swap import partial_parameters, swap_layers
from meshtrain.parallel.tensor import AXIS, hold
from meshtrain.parts import local_part
from meshtrain.split import REPLICATED, Split

TOLERANCE = 1e-3  # of a tensor's largest value: far above the rounding of float32, far below a missing addend

OURS = ("mesh", "channel", "family", "families", "forward")  # attributes in which blocks that are alike may differ
Sample = Sequence[Tensor | None]


def verify(
    model: nn.Module,
    mesh: Mesh,
    splits: Sequence[Split],
    sample: Sample | None,
    *,
    plan: Mapping[str, str],
    precision: str,
    sequence_parallel: bool,
    regather: bool,
) -> str | None:
    """Compares a plain model with the same model split over `tp`. All ranks call it together and come to one verdict.

    Args:
        model: plain, on any device, meta included.
        splits: of its layers, by `plan`.
        sample: what `model(*sample)` takes, two short samples are enough; None: one is made up.

    Returns:
        None, or why the model could not be checked: the plain one does not take the sample that was made up.

    Raises:
        AgreedError: they differ, or the plain model does not take the sample.
    """
    device, dtype = torch.device(mesh.device_type), master_dtype(precision)
    inputs = made_up(model, mesh.size(AXIS)) if sample is None else sample
    inputs = [x if x is None else x.to(device, dtype if x.is_floating_point() else None) for x in inputs]

    def difference(sequence: bool) -> str | None:
        try:
            plain, split = _skeleton(model, dtype), _skeleton(model, dtype)
        except Exception as error:  # whatever a user's model raises, here and below
            raise _PlainError(f"it cannot be copied: {type(error).__name__}: {error}") from error
        swap_layers(split, splits, mesh, plan=plan, sequence_parallel=sequence, regather=regather)
        kinds = {
            name: f"{_signature(one)} {_signature(other)}"
            for (name, one), other in zip(_named_blocks(plain), dict(_named_blocks(split)).values(), strict=True)
        }
        places = {name: local_part(parameter)[1] for name, parameter in split.named_parameters()}
        known = _Run(plain, mesh, device, kinds, places, sequence)
        try:
            known.run(inputs)
        except torch.OutOfMemoryError:  # maybe of this rank alone: it ends the job, and says so
            raise
        except Exception as error:
            raise _PlainError(f"{type(error).__name__}: {error}") from error
        found = _Run(split, mesh, device, kinds, places, sequence, known)
        try:
            found.run(inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            found.differ(f"{found.where} fails where the plain model does not: {type(error).__name__}: {error}")
        return _agreed(found, mesh)

    gpus = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.enable_grad():
        try:
            said = difference(sequence_parallel)
        except _PlainError as error:  # on all ranks: they do the same
            if sample is None:
                return str(error)
            raise AgreedError(
                f"the plain model does not take the first samples ({error}): mend it, or leave its check out by "
                "parallel.verify: false"
            ) from error
        if said is None:
            return None
        without = sequence_parallel and difference(False) is None
    remedy = "parallel.sequence_parallel: false, which passes this check" if without else "tp: 1"
    raise AgreedError(
        f"with tp {mesh.size(AXIS)} the model does not compute what it does on one device: {said}. Use {remedy}, or "
        "mend the model or its tp_plan (docs/tensor-parallel.md says how). parallel.verify: false leaves this check out"
    )


class _PlainError(Exception):
    """The plain model does not take the sample."""


def made_up(model: nn.Module, tp: int) -> list[Tensor]:
    """Two short samples for a model's first layer that says what it takes: token ids, or features."""
    random, length = generator("verify"), tp * max(2, math.ceil(8 / tp))
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


def _named_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks that are apart from the model around them, each once."""
    names = {module: name for name, module in model.named_modules()}
    return [(names[block], block) for block in dict.fromkeys(blocks_of(model)) if block is not model]


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


def _agreed(found: "_Run", mesh: Mesh) -> str | None:
    """The first difference that any rank of the job has found, on all ranks."""
    world, never = mesh.layout.world_size, 2**62
    told = torch.tensor(never if found.problem is None else found.compared * world + mesh.rank, device=mesh.device_type)
    dist.all_reduce(told, dist.ReduceOp.MIN, group=mesh.world)
    if int(told) == never:
        return None
    said = [found.problem]
    dist.broadcast_object_list(said, src=int(told) % world, group=mesh.world, device=told.device)
    return said[0]


class _Run:
    """A forward of a model and the backward of each of its pieces, noted, or compared with those of a known run.

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
        known: "_Run | None" = None,
    ) -> None:
        """
        Args:
            kinds: block -> what is the same for blocks that are alike.
            places: parameter -> where this rank's part of it lies.
            known: the run of the plain model; None: this is it.
        """
        self.model, self.mesh, self.device, self.known = model, mesh, device, known
        self.problem: str | None = None  # the first one: others follow from it
        self.compared = 0  # tensors, until then
        self.where = "the model"
        self.found: dict[str, Tensor] = {}
        self.first: dict[str, str] = {}  # a call of a block -> the first call of one that is alike
        self._alike: dict[str, str] = {}  # block and inputs -> that call
        self._kinds, self._places, self._sequence = kinds, places, sequence
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._partial = {module._parameters[name] for module, name in partial_parameters(model, sequence)}
        self._calls: dict[str, int] = {}
        self._outputs: dict[str, tuple[list[Any], Any]] = {}  # of each first call
        self._starts: list[tuple[str, Tensor]] = []  # leaves that what runs between the blocks begins with
        self._ends: list[tuple[str, Tensor]] = []  # and the tensors that it ends with

    def run(self, inputs: Sample) -> None:
        torch.manual_seed(0)
        blocks = _named_blocks(self.model)
        inside = {module for _, block in blocks for module in block.modules()}
        forwards = [(block, block.forward) for _, block in blocks]
        for name, block in blocks:
            block.forward = self._apart(name, block)
        try:
            with self._filled(module for module in self.model.modules() if module not in inside) as parameters:
                ends = self._note("the model's output", tree_flatten(self.model(*inputs))[0])
                self._backward("the model", self._starts, self._ends, ends, parameters)
        finally:
            for block, forward in forwards:  # nothing refers to this run any more: its memory is free when it is done
                block.forward = forward
        if self.known is not None and self._calls != self.known._calls:
            self.differ("it calls its blocks another number of times")

    def differ(self, what: str) -> None:
        self.problem = self.problem or what

    def _apart(self, name: str, block: nn.Module) -> Callable:
        """A forward of a block that hands on what autograd does not lead through."""
        forward = block.forward

        def run(*args: Any, **named: Any) -> Any:
            count = self._calls[name] = self._calls.get(name, 0) + 1
            where = self.where = name if count == 1 else f"{name} (call {count})"
            inputs, structure = tree_flatten((args, named))
            self._ends += self._note(f"{where}: input", inputs)
            first = self._first(where, name, inputs)
            if first not in self._outputs:
                leaves = [_leaf(x) if isinstance(x, Tensor) else x for x in inputs]
                with self._filled(block.modules()) as parameters:
                    args, named = tree_unflatten([_fresh(x) for x in leaves], structure)
                    outputs, form = tree_flatten(forward(*args, **named))
                    ends = self._note(f"{where}: output", outputs)
                    starts = [(f"{where}: input {i}", x) for i, x in enumerate(leaves) if isinstance(x, Tensor)]
                    self._backward(where, starts, ends, [], parameters)
                self._outputs[first] = [_leaf(y) if isinstance(y, Tensor) else y for y in outputs], form
            outputs, form = self._outputs[first]
            leaves = [_leaf(y) if isinstance(y, Tensor) else y for y in outputs]
            self._starts += [(f"{where}: output {i}", y) for i, y in enumerate(leaves) if isinstance(y, Tensor)]
            self.where = f"what comes behind {name}"
            return tree_unflatten([_fresh(y) for y in leaves], form)

        return run

    def _first(self, where: str, name: str, inputs: list[Any]) -> str:
        if self.known is not None:
            return self.known.first.get(where, where)
        sizes = [(x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
        self.first[where] = self._alike.setdefault(f"{self._kinds[name]} {sizes}", where)
        return self.first[where]

    @contextmanager
    def _filled(self, modules: Iterable[nn.Module]) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """Gives parameters of these modules values inside, by their names: parameter -> the one with values."""
        filled: dict[nn.Parameter, nn.Parameter] = {}
        held = [(module, name, p) for module in modules for name, p in module._parameters.items() if p is not None]
        for module, name, p in held:
            if p not in filled:
                whole = nn.Parameter(self._values(self._names[p], p.shape, p.dtype), requires_grad=p.requires_grad)
                filled[p] = hold(whole, self.mesh, p.placements[0]) if isinstance(p, DTensor) else whole
            module._parameters[name] = filled[p]
        yield filled
        for module, name, p in held:
            module._parameters[name] = p

    def _values(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        random = torch.Generator(self.device).manual_seed(generator("verify", name).initial_seed())
        how: dict[str, Any] = {"generator": random, "device": self.device, "dtype": dtype}
        if len(shape) < 2:
            return torch.rand(shape, **how) + 0.5
        return torch.randn(shape, **how) / math.sqrt(math.prod(shape[1:]))

    def _note(self, what: str, values: list[Any]) -> list[tuple[str, Tensor]]:
        """Notes or compares the tensors of these; gives back those that a backward can start from, by their names."""
        named = [(f"{what} {i}", _local(x).clone()) for i, x in enumerate(values) if isinstance(x, Tensor)]
        for name, x in named:  # copies, because the model may go on to change its own
            self._compare(name, x)
        return [(name, x) for name, x in named if x.requires_grad]

    def _backward(
        self,
        where: str,
        starts: list[tuple[str, Tensor]],
        inner: list[tuple[str, Tensor]],
        outer: list[tuple[str, Tensor]],
        parameters: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        """The gradients of a piece's inputs and parameters.

        Args:
            inner: what it hands on to other pieces. outer: what it gives for the loss, which every rank computes.
            parameters: those of `_filled`.
        """
        ends = [(x, self._cotangent(name, x, shared=True)) for name, x in inner]
        ends += [(x, self._cotangent(name, x, shared=False)) for name, x in outer]
        ends = [(x, grad) for x, grad in ends if grad is not None and x.requires_grad]
        if ends:
            torch.autograd.backward([x for x, _ in ends], [grad for _, grad in ends])
        for name, x in starts:
            if x.requires_grad:
                local = _local(x)
                grad = torch.zeros_like(local) if x.grad is None else _local(x.grad)
                summed = self._sequence and self._is_whole(name, local)
                self._compare(f"{name}: gradient", self._sum(grad) if summed else grad)
        for p, filled in parameters.items():
            if p.requires_grad:
                name, local = self._names[p], _local(filled)
                grad = torch.zeros_like(local) if filled.grad is None else _local(filled.grad)
                if self.known is None and grad.dim() > 0:
                    grad = grad[self._places[name]].clone()
                total = grad if isinstance(p, DTensor) and p not in self._partial else self._sum(grad)
                self._compare(f"{where}: gradient of {name}", total if p in self._partial else grad, total)

    def _sum(self, x: Tensor) -> Tensor:
        if self.known is not None:
            x = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(x, group=self.mesh.group(AXIS))
        return x

    def _cotangent(self, name: str, x: Tensor, *, shared: bool) -> Tensor | None:
        """This rank's part of the gradient that a tensor gets."""
        if self.known is None:
            return self._values(name, x.shape, x.dtype)
        whole = self.known.found.get(name)
        place = None if whole is None else self._place(whole.shape, x.shape)
        if whole is None or place is None:
            return None
        grad = self._values(name, whole.shape, x.dtype)[place]
        return grad / self.mesh.size(AXIS) if shared and self._sequence and whole.shape == x.shape else grad

    def _is_whole(self, name: str, x: Tensor) -> bool:
        return self.known is not None and name in self.known.found and self.known.found[name].shape == x.shape

    def _place(self, whole: Sequence[int], part: Sequence[int]) -> Part | None:
        """Where in a whole tensor this rank's part lies, by their shapes; None: it is no part of it."""
        tp, index = self.mesh.size(AXIS), self.mesh.index(AXIS)
        if len(whole) != len(part):
            return None
        place = tuple(slice(0, n) if n == m else cut(n, tp, index) for n, m in zip(whole, part, strict=True))
        fits = all(one.stop - one.start == m for one, m in zip(place, part, strict=True))
        return place if fits and sum(n != m for n, m in zip(whole, part, strict=True)) <= 1 else None

    def _compare(self, what: str, x: Tensor, total: Tensor | None = None) -> None:
        """`total`: what x would be if it were summed over the ranks."""
        x = x.detach()
        if self.known is None:
            self.found[what] = x
        elif self.problem is None:
            self.compared += 1
            whole = self.known.found.get(what)
            if whole is None:
                self.differ(f"{what} is none of the plain model's")
                return
            place = self._place(whole.shape, x.shape)
            if place is None:
                self.differ(f"{what} has the shape {tuple(x.shape)}, and {tuple(whole.shape)} on one device")
                return
            off = self._off(x, whole[place])
            if off is not None:
                sums = total is not None and self._off(total, whole[place]) is None
                hint = f", but not its sum over tp: the tp_plan has to give it the style {REPLICATED}" if sums else ""
                self.differ(f"{what} differs by {off:.2g} of its largest value{hint}")

    def _off(self, x: Tensor, expected: Tensor) -> float | None:
        """The largest difference, relative to the largest value; None within the tolerance."""
        if not (x.is_floating_point() or x.is_complex()):
            x, expected = x.double(), expected.double()
        same = (x == expected) | (x.isnan() & expected.isnan())
        off = torch.where(same, 0, (x - expected).abs())
        largest = torch.where(expected.isfinite(), expected.abs(), 0).max().clamp(min=1e-30) if x.numel() else x.sum()
        worst = float((off / largest).max()) if x.numel() else 0.0
        return None if worst <= TOLERANCE else worst


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def _fresh(x: Any) -> Any:
    """What may be changed in place."""
    return x.clone() if isinstance(x, Tensor) else x
