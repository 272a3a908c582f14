"""Mixed precision: computing in 16 bits from float32 parameters; and torch's switches for exact
numbers.

FSDP casts the parameters that it gathers. Without FSDP, a block's forward is wrapped to do the
same: 16-bit copies replace parameters, floating-point inputs are cast on entry, gradients are
returned and summed in float32. One rule for every layout: a block computes in the 16-bit type, and
everything kept or reduced is float32.
"""

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from meshtrain.errors import InputError
from meshtrain.parallel.grad_sync import GradientSync, gradient_syncs
from meshtrain.parallel.linear.shared_input import SharedInput, stack
from meshtrain.parallel.linear.weight_grad import add_or_compute, write_grad
from meshtrain.parallel.torch_private import (
    apply_to_tensors,
    backward_is_running,
    copy_all,
    device_type_of,
    keep_versions,
    own_parameters,
    replace_parameters,
    to_local,
    tree_map_only,
    version_of,
    without_dispatch_modes,
)

# devices where 16-bit gradients are added without a separate cast, which takes host time
ADDED_ON = ("cuda",)
PRECISIONS = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


def compute_dtype(precision: str) -> torch.dtype:
    """The type in which blocks compute."""
    return PRECISIONS[precision]


def master_dtype(precision: str) -> torch.dtype:
    """The type in which parameters, gradients and optimizer states are kept and gradients are
    reduced."""
    return torch.float64 if precision == "float64" else torch.float32


def is_mixed(precision: str) -> bool:
    """Whether blocks compute in another dtype than parameters are kept in."""
    return compute_dtype(precision) != master_dtype(precision)


def message_dtype(precision: str, reduce_precision: str | None) -> torch.dtype | None:
    """The dtype of gradient messages between data ranks; None: not cast. Raises InputError: set in
    float64."""
    if precision == "float64" and reduce_precision is not None:
        raise InputError(
            "reduce_precision rounds, and float64 is there to check a layout without rounding: "
            "leave it out"
        )
    return None if reduce_precision is None else PRECISIONS[reduce_precision]


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which the squares of float32 gradients are summed for a norm, on a device."""
    if device.type != "cuda" or torch.version.hip:
        return torch.float64
    return sum_dtype_of(torch.cuda.get_device_capability(device))


def sum_dtype_of(capability: tuple[int, int]) -> torch.dtype:
    """float64 on NVIDIA GPUs with float64 at half the rate of float32; float32 on others, with 1/32
    or 1/64 the rate: torch sums blocks of 2**16 elements, and then those sums, which keeps about 6
    digits of a norm."""
    fast_in_float64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
    return torch.float64 if capability in fast_in_float64 else torch.float32


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Casts a model's real parameters and buffers in place: `Module.to` would drop the imaginary
    part of others."""
    return apply_to_tensors(model, lambda x: _cast(x, dtype))


def state_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that gradients do not change, named in their modules' attribute
    `state_parameters`: counts of a step, or a correction. They are kept whole, in float32 or wider,
    on every rank."""
    parameters = set()
    for module in model.modules():
        for name in getattr(module, "state_parameters", ()):
            parameters.add(getattr(module, name))
    return parameters


def set_numerics(deterministic: bool) -> None:
    """Sets torch's switches for this process: float32 without TF32, which has only 10 bits of
    fraction. With `deterministic`, results are bitwise reproducible; an operator without such a
    kernel raises RuntimeError."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    # picks convolution kernels by timing, so the choice can vary
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        # cuBLAS reads this when it creates its first handle: only workspace buffers of fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def reseed(seed: int, step: int, index: int) -> None:
    """Seeds torch, numpy and Python for a step independently of earlier steps: a resumed run draws
    the same numbers without a saved generator state. `index`: the rank's position among those with
    different samples."""
    digest = hashlib.blake2b(f"{seed} {step} {index}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest)
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def random_state() -> Callable[[], None]:
    """Returns a function that restores the present random state of torch, numpy and Python."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    of_torch = torch.get_rng_state()
    of_numpy = np.random.get_state()
    of_python = random.getstate()

    def restore() -> None:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)

    return restore


@dataclass
class _Copy:
    values: Tensor  # this rank's part in 16 bits
    # of the local float32 part at the time of the copy (a DTensor's version does not track its
    # part)
    version: int = -1
    period: int = -1


class ComputeCopies(GradientSync):
    """Persistent 16-bit copies of a model's parameters: those of a block are views of one flat
    tensor, in order.

    They are written by the first forward of a period in which weights do not change: from a
    microbatch marked as not the last to the backward of the last, an evaluation (`weights_stay`),
    or otherwise one forward of the model. Not longer, because later changes of weights are not
    announced, and a write to `.data` does not change a version.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # one for a tied parameter
        self._copies: MutableMapping[Tensor, _Copy] = WeakTensorKeyDictionary()
        self._period = 0
        self._depth = 0  # of running forwards, which contain each other
        self._last = True
        self._stays = False  # whether the period is longer than one forward
        self.in_evaluation = False

    def set_is_last_backward(self, last: bool) -> None:
        if self._last:  # a step begins
            self._period += 1
            self._stays = not last
        self._last = last

    def start_reduce(self) -> None:
        self._last, self._stays = True, False

    def backward_begins(self) -> None:
        if self._last:
            self._stays = False

    def set_evaluation(self, begins: bool) -> None:
        """Starts a new period, also after an abandoned step."""
        self._period += 1
        self._stays, self.in_evaluation = False, begins

    @contextmanager
    def forward(self, parameters: Iterable[Tensor]) -> Iterator[Mapping[Tensor, Tensor]]:
        """Encloses a forward; yields the copy of each of these parameters."""
        if not (self._depth or self._stays or self.in_evaluation):
            self._period += 1
        keeps = torch.is_grad_enabled() or self.in_evaluation
        self._depth += 1
        try:
            # Selective recomputation expects the same operators again, but by then the copies may
            # exist already.
            with without_dispatch_modes(), torch.no_grad():
                parts = {parameter: to_local(parameter) for parameter in parameters}
                if keeps:
                    copies = self._current(parts)
                else:
                    # A forward without gradients must not overwrite copies that a pending backward
                    # needs.
                    copies = {p: part.to(self.dtype) for p, part in parts.items()}
            yield copies
        finally:
            self._depth -= 1

    def _current(self, parts: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The copies, written where weights may have changed since."""
        missing = [p for p, part in parts.items() if not self._fits(p, part)]
        allocated = _allocate([parts[p] for p in missing], self.dtype)
        for parameter, values in zip(missing, allocated, strict=True):
            self._copies[parameter] = _Copy(values)
        copies = {parameter: self._copies[parameter] for parameter in parts}

        # A recomputed block uses the weights of its forward.
        runs_again = backward_is_running()
        stale = []
        same_values = True
        for parameter, copy in copies.items():
            changed = copy.version != version_of(parts[parameter])
            if changed or not (runs_again or copy.period == self._period):
                stale.append(parameter)
                same_values = same_values and not changed
        if stale:
            # Autograd rejects a backward whose weights have changed since its forward. Writing the
            # same values again, as the second of two forwards before their backwards does, must
            # not count as a change.
            written = [copies[p].values for p in stale]
            with keep_versions(written) if same_values else nullcontext():
                copy_all(written, [parts[p] for p in stale])
        for parameter in stale:
            copies[parameter].version = version_of(parts[parameter])
            copies[parameter].period = self._period
        return {parameter: copy.values for parameter, copy in copies.items()}

    def _fits(self, parameter: Tensor, part: Tensor) -> bool:
        """Whether a parameter has a copy that can hold its part."""
        copy = self._copies.get(parameter)
        if copy is None:
            return False
        return copy.values.shape == part.shape and copy.values.device == part.device


def _allocate(parts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Memory for copies: views of one tensor, each aligned to 16 bytes, as fast matrix products
    require."""
    if not parts:
        return []
    starts = []
    end = 0
    for part in parts:
        starts.append(end)
        end += -(-part.numel() // 8) * 8  # 8 numbers of 16 bits
    flat = torch.empty(end, dtype=dtype, device=parts[0].device)
    copies = []
    for part, start in zip(parts, starts, strict=True):
        stride = torch.empty_like(part, device="meta").stride()
        copies.append(flat.as_strided(part.shape, stride, start))
    return copies


class Cast(torch.autograd.Function):
    """A forward's own view of the copy of some parts, which holds their rows contiguously: the
    gradients of several forwards are summed in the parameters' dtype."""

    elementwise = True  # see `torch_private.accumulator_of`

    @staticmethod
    def forward(ctx: Any, copies: ComputeCopies, copy: Sequence[Tensor], *parts: Tensor) -> Tensor:
        ctx.copies, ctx.dtype = copies, parts[0].dtype
        ctx.rows = [len(part) for part in parts] if len(parts) > 1 else None
        ctx.set_materialize_grads(False)
        return copy[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.copies.backward_begins()
        if grad is None:  # from a layer that defers its weight gradient
            return None, None, *(None for _ in ctx.next_functions)
        of_parts = [grad] if ctx.rows is None else grad.split(ctx.rows)
        if device_type_of(grad) not in ADDED_ON or grad.layout != torch.strided:
            return None, None, *(part.to(ctx.dtype) for part in of_parts)
        grads: list[Tensor | None] = []
        for (node, _), part in zip(ctx.next_functions, of_parts, strict=True):
            # Adds the 16-bit gradient to the parameter's where that is, else casts it: which, says
            # `linear/weight_grad.py`.
            cast = partial(part.to, ctx.dtype)
            add = partial(write_grad, part)
            grads.append(add_or_compute(node, cast, add))
        return None, None, *grads


def cast_to_compute_dtype(
    module: nn.Module,
    forward: Callable,
    copies: ComputeCopies,
    without: Sequence[nn.Module] = (),
    cast_inputs: bool = True,
) -> Callable:
    """The forward of `module` with its parameters and floating-point inputs cast to the dtype of
    `copies`; DTensors are replaced by casts of this rank's parts. Gradients pass through the casts.
    Modules in `without` cast their own."""
    excluded = {inner for outer in without for inner in outer.modules()}
    modules = [inner for inner in module.modules() if inner not in excluded]
    groups: list[SharedInput] = []
    for inner in modules:
        groups += [shared for shared in getattr(inner, "shared_inputs", ()) if shared.merges]

    def wide_parameters() -> list[Tensor]:
        # Looked up in each forward, because materializing a meta model creates new parameters.
        kept_wide = state_parameters(module)
        # Weights of a group come first, so that their copies are adjacent.
        own: dict[Tensor, None] = {}
        for group in groups:
            own |= dict.fromkeys(layer.weight for layer in group.layers)
        for inner in modules:
            own |= dict.fromkeys(p for p in own_parameters(inner).values() if p is not None)
        return [
            p
            for p in own
            if p.is_floating_point() and p.dtype != copies.dtype and p not in kept_wide
        ]

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if cast_inputs:
            args, kwargs = tree_map_only(Tensor, lambda x: _cast(x, copies.dtype), (args, kwargs))
        with (
            copies.forward(wide_parameters()) as values,
            _casts(groups, values, copies) as cast_of,
            replace_parameters(modules, cast_of),
        ):
            return forward(*args, **kwargs)

    return run


@contextmanager
def _casts(
    groups: Sequence[SharedInput], values: Mapping[Tensor, Tensor], copies: ComputeCopies
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yields the function from a parameter to its cast. Layers of one input share one weight if
    copies are adjacent."""
    parts: dict[Tensor, Tensor] = {}  # weight -> its rows of a shared one
    for shared in groups:
        weights = [layer.weight for layer in shared.layers]
        if not all(weight in values for weight in weights):
            continue
        whole = stack([values[weight] for weight in weights])
        if whole is None:
            continue
        shared.weight = Cast.apply(copies, [whole], *map(to_local, weights))
        rows = [len(values[weight]) for weight in weights]
        parts |= dict(zip(weights, shared.weight.split(rows), strict=True))

    def cast_of(parameter: Tensor) -> Tensor:
        if parameter in parts:
            return parts[parameter]
        if parameter in values:
            return Cast.apply(copies, [values[parameter]], to_local(parameter))
        return parameter

    try:
        yield cast_of
    finally:
        for shared in groups:
            shared.weight = None


@contextmanager
def weights_stay(model: nn.Module) -> Iterator[None]:
    """Inside, the weights of a parallelized model must not change, so that all forwards share the
    16-bit copies."""
    all_copies: list[ComputeCopies] = []
    for module in model.modules():
        all_copies += [s for s in gradient_syncs(module) if isinstance(s, ComputeCopies)]
    for copies in all_copies:
        copies.set_evaluation(True)
    try:
        yield
    finally:
        for copies in all_copies:
            copies.set_evaluation(False)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
