"""Mixed precision: computing in 16 bits from parameters that stay in 32; and torch's switches for exact numbers.

FSDP casts the parameters that it gathers. Without FSDP nobody does, so a block's forward is wrapped to do the same:
copies stand for parameters, floating-point inputs are cast on entry, gradients come back in float32 and are summed. One
rule for every layout: a block computes in the 16-bit type, and all that is kept or reduced is float32.
"""

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from meshtrain.errors import InputError
from meshtrain.parallel.grad_sync import GradientSync, gradient_syncs
from meshtrain.parallel.linear.shared_input import SharedInput, stack
from meshtrain.parallel.linear.weight_grad import add_or_compute, write_grad
from meshtrain.parallel.torch_private import (
    backward_is_running,
    device_type_of,
    keep_versions,
    replace_parameters,
    to_local,
    without_dispatch_modes,
)

ADDED_ON = ("cuda",)  # where 16-bit gradients are added without a cast of their own, which takes time on the host
PRECISIONS = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


def compute_dtype(precision: str) -> torch.dtype:
    """The type in which blocks compute."""
    return PRECISIONS[precision]


def master_dtype(precision: str) -> torch.dtype:
    """The type in which parameters, gradients and optimizer states are kept and gradients are reduced."""
    return torch.float64 if precision == "float64" else torch.float32


def message_dtype(precision: str, reduce_precision: str | None) -> torch.dtype | None:
    """The type in which gradients travel between data ranks; None: as they are. Raises InputError: not in float64."""
    if precision == "float64" and reduce_precision is not None:
        raise InputError(
            "reduce_precision rounds, and float64 is there to check a layout without rounding: leave it out"
        )
    return None if reduce_precision is None else PRECISIONS[reduce_precision]


def sum_dtype(device: torch.device) -> torch.dtype:
    """The type in which the squares of float32 gradients are summed for a norm, on a device."""
    if device.type != "cuda" or torch.version.hip:
        return torch.float64
    return sum_dtype_of(torch.cuda.get_device_capability(device))


def sum_dtype_of(capability: tuple[int, int]) -> torch.dtype:
    """float64 on NVIDIA GPUs that compute in it at half the rate of float32; on others, at a 32nd or 64th, float32:
    torch sums in blocks of 2**16 elements, and those sums once more, which keeps about 6 digits of a norm."""
    return torch.float64 if capability in {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)} else torch.float32


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Casts a model's real parameters and buffers in place: `Module.to` would take the imaginary part from others."""
    return model._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def state_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that no gradient changes and that their modules name in an attribute `state_parameters`: what a step
    counted, or a correction. They are kept whole in float32 at least, on every rank."""
    return {getattr(module, name) for module in model.modules() for name in getattr(module, "state_parameters", ())}


def set_numerics(precision: str, deterministic: bool) -> None:
    """Sets torch's switches for this process: float32 means float32, without TF32, which keeps 10 bits of the fraction.
    Deterministic kernels give one layout, machine and versions the same bits; where there is none: RuntimeError."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = not deterministic  # picks convolutions by a race, and so sometimes others
    if deterministic:
        # cuBLAS reads this when its first handle is made: two buffers of fixed size and no others.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def reseed(seed: int, step: int, index: int) -> None:
    """Seeds the random numbers of torch, numpy and Python for a step, by no history: a resume draws the same without
    the state of a generator. `index`: of the rank among those that have different samples."""
    number = int.from_bytes(hashlib.blake2b(f"{seed} {step} {index}".encode(), digest_size=8).digest())
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def random_state() -> Callable[[], None]:
    """A function that brings torch's, numpy's and Python's random numbers back to where they are now."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def restore() -> None:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)

    return restore


@dataclass
class _Copy:
    values: Tensor  # this rank's part in 16 bits
    version: int = -1  # of the float32 part when they were written: that of a DTensor knows nothing of its part
    period: int = -1


class ComputeCopies(GradientSync):
    """The 16-bit copies of a model's parameters, which stay: those of a block are views of one flat tensor, in order.

    They are written by the first forward of a period in which nobody changes weights: from a microbatch that was said
    not to be the last to the backward of the last, an evaluation (`weights_stay`), or else one forward of the model.
    Never for longer: whoever changes weights then tells nobody, and a write to `.data` shows in no version.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._copies: MutableMapping[Tensor, _Copy] = WeakTensorKeyDictionary()  # a tied parameter has one
        self._period, self._depth = 0, 0  # the number of the period; forwards that run, one inside of another
        self._last = True
        self._stays, self.in_evaluation = False, False  # whether the period is longer than one forward

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
        """Also where a step was given up."""
        self._period += 1
        self._stays, self.in_evaluation = False, begins

    @contextmanager
    def forward(self, parameters: Iterable[Tensor]) -> Iterator[Mapping[Tensor, Tensor]]:
        """Around a forward: the copy of each of these parameters."""
        if not (self._depth or self._stays or self.in_evaluation):
            self._period += 1
        keeps = torch.is_grad_enabled() or self.in_evaluation
        self._depth += 1
        try:
            # Selective recomputation expects the same operators again, and the copies may be there by then.
            with without_dispatch_modes(), torch.no_grad():
                parts = {parameter: to_local(parameter) for parameter in parameters}
                # A forward without gradients in between leaves alone what a backward may still need.
                copies = self._current(parts) if keeps else {p: part.to(self.dtype) for p, part in parts.items()}
            yield copies
        finally:
            self._depth -= 1

    def _current(self, parts: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        missing = [p for p, part in parts.items() if not self._fits(p, part)]
        for parameter, values in zip(missing, _allocate([parts[p] for p in missing], self.dtype), strict=True):
            self._copies[parameter] = _Copy(values)
        copies = {parameter: self._copies[parameter] for parameter in parts}
        again = backward_is_running()  # a block that is computed again, with the weights that it had
        current = zip(copies.items(), parts.values(), strict=True)
        stale = [p for (p, c), x in current if c.version != x._version or not (again or c.period == self._period)]
        # Autograd refuses a backward whose weights have changed since its forward. To write the same values once more,
        # as the second of two forwards before their backwards does, is no change.
        same = all(copies[parameter].version == parts[parameter]._version for parameter in stale)
        if stale:
            _write([copies[p].values for p in stale], [parts[p] for p in stale], same)
        for parameter in stale:
            copies[parameter].version, copies[parameter].period = parts[parameter]._version, self._period
        return {parameter: copy.values for parameter, copy in copies.items()}

    def _fits(self, parameter: Tensor, part: Tensor) -> bool:
        copy = self._copies.get(parameter)
        return copy is not None and copy.values.shape == part.shape and copy.values.device == part.device


def _allocate(parts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Memory for copies, each from a multiple of 16 bytes on, as fast products of matrices want it."""
    starts = [0, *accumulate(-(-part.numel() // 8) * 8 for part in parts)]
    flat = torch.empty(starts[-1], dtype=dtype, device=parts[0].device if parts else None)
    strides = [torch.empty_like(part, device="meta").stride() for part in parts]
    return [flat.as_strided(p.shape, stride, start) for p, stride, start in zip(parts, strides, starts, strict=False)]


def _write(copies: list[Tensor], parts: list[Tensor], same: bool) -> None:
    with keep_versions(copies) if same else nullcontext():
        torch._foreach_copy_(copies, parts)


class Cast(torch.autograd.Function):
    """A forward's own view of the copy of some parts, whose rows lie one behind the other in it: what several forwards
    send back is summed in the parameters' type."""

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
        if grad is None:  # from a layer that leaves its weight gradient for later
            return None, None, *(None for _ in ctx.next_functions)
        grads = [grad] if ctx.rows is None else grad.split(ctx.rows)
        if device_type_of(grad) not in ADDED_ON or grad.layout != torch.strided:
            return None, None, *(part.to(ctx.dtype) for part in grads)
        pairs = zip(ctx.next_functions, grads, strict=True)
        return None, None, *(add_or_compute(n[0], partial(g.to, ctx.dtype), partial(write_grad, g)) for n, g in pairs)


def cast_to_compute_dtype(
    module: nn.Module,
    forward: Callable,
    copies: ComputeCopies,
    without: Sequence[nn.Module] = (),
    cast_inputs: bool = True,
) -> Callable:
    """A forward of `module` in which its parameters and floating-point inputs appear in the type of `copies`: casts, of
    split ones of this rank's parts, through which gradients go back. Modules in `without` see to their own."""
    excluded = {inner for outer in without for inner in outer.modules()}
    modules = [inner for inner in module.modules() if inner not in excluded]
    groups = [shared for inner in modules for shared in getattr(inner, "shared_inputs", ()) if shared.merges]

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        state = state_parameters(module)  # now, because memory that is given to a model makes new parameters
        own: Iterable[Tensor] = [p for inner in modules for p in inner._parameters.values() if p is not None]
        if groups:  # whose weights lie beside each other
            own = dict.fromkeys([*(layer.weight for group in groups for layer in group.layers), *own])
        wide = [p for p in own if p.is_floating_point() and p.dtype != copies.dtype and p not in state]
        if cast_inputs:
            args, kwargs = tree_map_only(Tensor, lambda x: _cast(x, copies.dtype), (args, kwargs))
        with (
            copies.forward(wide) as values,
            _casts(groups, values, copies) as cast_of,
            replace_parameters(modules, cast_of),
        ):
            return forward(*args, **kwargs)

    return run


@contextmanager
def _casts(
    groups: Sequence[SharedInput], values: Mapping[Tensor, Tensor], copies: ComputeCopies
) -> Iterator[Callable[[Tensor], Tensor]]:
    """What stands for a parameter inside. Layers that read the same input have one weight, if their copies lie so."""
    parts: dict[Tensor, Tensor] = {}
    for shared in groups:
        weights = [layer.weight for layer in shared.layers]
        whole = stack([values[p] for p in weights]) if all(p in values for p in weights) else None
        if whole is not None:
            shared.weight = Cast.apply(copies, [whole], *map(to_local, weights))
            parts |= dict(zip(weights, shared.weight.split([len(values[p]) for p in weights]), strict=True))
    alone = values if not parts else {p: copy for p, copy in values.items() if p not in parts}
    try:
        yield lambda p: Cast.apply(copies, [alone[p]], to_local(p)) if p in alone else parts.get(p, p)
    finally:
        for shared in groups:
            shared.weight = None


@contextmanager
def weights_stay(model: nn.Module) -> Iterator[None]:
    """Inside, nobody changes the weights of a parallelized model, so that all forwards share their 16-bit copies."""
    syncs = [sync for module in model.modules() for sync in gradient_syncs(module) if isinstance(sync, ComputeCopies)]
    for copies in syncs:
        copies.set_evaluation(True)
    try:
        yield
    finally:
        for copies in syncs:
            copies.set_evaluation(False)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
