"""Mixed precision: computing in 16 bits from parameters that stay in 32; and torch's switches for exact numbers.

FSDP casts the parameters that it gathers. Without FSDP nobody does, so a block's forward is wrapped to do the same:
parameters and floating-point inputs are cast on entry, gradients come back in float32 and are summed there. One rule
for every layout: a block computes in the 16-bit type, and all that is kept or reduced is float32.
"""

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from meshtrain.parallel.grad_sync import GradientSync
from meshtrain.parallel.torch_private import replace_parameters, to_local, without_dispatch_modes

PRECISIONS = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


def compute_dtype(precision: str) -> torch.dtype:
    """The type in which blocks compute."""
    return PRECISIONS[precision]


def master_dtype(precision: str) -> torch.dtype:
    """The type in which parameters, gradients and optimizer states are kept and gradients are reduced."""
    return torch.float64 if precision == "float64" else torch.float32


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
    Deterministic kernels give the same layout, machine and versions the same bits each time; an operation that has none
    raises RuntimeError."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False  # picks kernels by a race, and so sometimes others
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


class ComputeCopies(GradientSync):
    """The 16-bit copies of a model's parameters, one for all microbatches of a step: kept from one that was said not to
    be the last to the backward of the last, and never between steps: whoever changes weights there tells nobody, and a
    write to a part of a DTensor shows in no version."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._copies: dict[Tensor, tuple[int, Tensor]] = {}  # parameter -> its version, this rank's part in 16 bits
        self._last = True

    def set_is_last_backward(self, last: bool) -> None:
        if self._last:
            self._copies.clear()
        self._last = last

    def reduce(self) -> None:
        self.set_is_last_backward(True)
        self._copies.clear()

    def backward_begins(self) -> None:
        if self._last:
            self._copies.clear()

    def cast(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter in 16 bits, with a way for gradients."""
        in_step = torch.is_grad_enabled()  # an evaluation is of no step, also where a step was given up
        version, copy = self._copies.get(parameter, (None, None)) if in_step else (None, None)
        if copy is None or version != parameter._version:
            copy = _copy(parameter, self.dtype)
            if in_step and not self._last:
                self._copies[parameter] = parameter._version, copy
        return Cast.apply(to_local(parameter), copy, self)


class Cast(torch.autograd.Function):
    """A forward's own view of a copy: what several forwards send back is summed in the parameter's type."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, copy: Tensor, copies: ComputeCopies) -> Tensor:
        ctx.dtype, ctx.copies = local.dtype, copies
        ctx.set_materialize_grads(False)
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        ctx.copies.backward_begins()
        # None from a layer that leaves its weight gradient for later.
        return None if grad is None else grad.to(ctx.dtype), None, None


def cast_to_compute_dtype(
    module: nn.Module,
    forward: Callable,
    copies: ComputeCopies,
    without: Sequence[nn.Module] = (),
    cast_inputs: bool = True,
) -> Callable:
    """A forward of `module` in which its parameters and floating-point inputs appear in the type of `copies`: casts, of
    split ones of this rank's parts, stand in their places, and autograd leads gradients back to the parameters
    themselves. Modules in `without` see to their own parameters."""
    excluded = {inner for outer in without for inner in outer.modules()}
    modules = [inner for inner in module.modules() if inner not in excluded]

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        state = state_parameters(module)  # now, because memory that is given to a model makes new parameters

        def replacement(parameter: Tensor) -> Tensor:
            casts = parameter.is_floating_point() and parameter.dtype != copies.dtype and parameter not in state
            return copies.cast(parameter) if casts else parameter

        if cast_inputs:
            args, kwargs = tree_map_only(Tensor, lambda x: _cast(x, copies.dtype), (args, kwargs))
        with replace_parameters(modules, replacement):
            return forward(*args, **kwargs)

    return run


def _copy(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    # Selective recomputation expects the same operators again, and a copy may be there by then.
    with without_dispatch_modes(), torch.no_grad():
        return to_local(parameter).to(dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
