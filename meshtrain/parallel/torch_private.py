"""Private torch API: everything that torch does not promise to keep, as read in torch 2.11 to 2.13."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["DefaultAllGather", "DefaultReduceScatter"]  # the rest is defined here


def to_local(tensor: Tensor) -> Tensor:
    """The tensor that this rank's part of a parameter or gradient lies in, with a way for gradients."""
    if not isinstance(tensor, DTensor):
        return tensor
    if torch.compiler.is_compiling():  # it knows DTensor.to_local, and leaves nothing of it in its graph
        return tensor.to_local()
    return _FastToLocal.apply(tensor) if tensor.requires_grad else tensor._local_tensor


class _FastToLocal(torch.autograd.Function):
    """`DTensor.to_local` of a parameter, whose gradient lies where the parameter does: a third of the CPU time."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        ctx.set_materialize_grads(False)
        local = parameter._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        # None from a layer that leaves its weight gradient for later.
        return None if grad is None else DTensor(grad, ctx.spec, requires_grad=False)


def from_local(local: Tensor, like: Tensor) -> Tensor:
    """The other way, without gradients: a tensor that is sharded as `like` is, whose part on this rank is `local`."""
    if not isinstance(like, DTensor):
        return local
    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def allocate(module: nn.Module, device: torch.device) -> None:
    """`to_empty` of what is on the meta device. By `_apply` of the whole, in which FSDP learns of the new tensors: else
    it would pad shards at the first forward, and the optimizer would have those without padding."""
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Called within a backward: runs `callback` at its end."""
    Variable._execution_engine.queue_callback(callback)


def after_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` behind everything that is queued for the end of this backward, as DDP and FSDP do."""
    at_end_of_backward(lambda: at_end_of_backward(callback))


def current_backward() -> int:
    """A number of the backward that runs now; -1 outside of any."""
    return torch._C._current_graph_task_id()


def accumulates(parameter: Tensor) -> bool:
    """Whether the backward that runs now adds to a parameter's gradient; one of `torch.autograd.grad` does not."""
    try:
        return torch._C._will_engine_execute_node(_get_grad_fn_or_grad_acc(parameter))
    except RuntimeError:  # this very gradient is what `torch.autograd.grad` was asked for
        return False


never_compiled = _disable_dynamo  # of a function that compiled code may call; loads the compiler at its first call
without_dispatch_modes = _disable_current_modes  # hides what runs inside from whoever watches operators


def end_fsdp_backward(model: FSDPModule) -> None:
    """What FSDP does at the end of its own backwards: sums gradients in the reduced type, sends them after the last."""
    model._get_fsdp_state()._root_post_backward_final_callback()


def send_unused_as_zeros(module: FSDPModule) -> None:
    """From now on a unit of FSDP sends a gradient for every parameter: zeros where the model did not use it.

    FSDP sends those that are there, one after the other in one tensor: of ranks, or in HSDP of microbatches, that have
    used different parameters it would add one's gradient to another's. In 16 bits all are of one type then.
    """
    unit = module._get_fsdp_state()._fsdp_param_group
    if unit is not None:  # all parameters may be in units inside
        unit.post_backward = partial(_send_all, unit, unit.post_backward)  # type: ignore[method-assign]


def _send_all(unit: FSDPParamGroup, post_backward: Callable[[], None], *unused: Any) -> None:
    gathered = [p for p in unit.fsdp_params if hasattr(p, "_unsharded_param")]
    if not gathered:
        return  # no forward has run of it
    trained = [p for p in gathered if unit.reduce_grads and p._unsharded_param.requires_grad]
    widened = any(p.unsharded_accumulated_grad is not None for p in trained)
    for p in trained:
        if p.unsharded_accumulated_grad is None:
            if p._unsharded_param.grad is None:
                p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
            if widened:
                p.to_accumulated_grad_if_needed()
    post_backward()


@contextmanager
def replace_parameters(modules: Iterable[nn.Module], replacement: Callable[[nn.Parameter], Tensor]) -> Iterator[None]:
    """Inside, other tensors stand in the places of these modules' parameters."""
    places = [(module, name, p) for module in modules for name, p in module._parameters.items() if p is not None]
    try:
        for module, name, parameter in places:
            module._parameters[name] = replacement(parameter)  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Lets a group's ranks reach each other's memory, and brings the operators that use it."""
    from torch.distributed import _symmetric_memory

    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None:  # torch 2.13 no longer asks for it, and later ones may lack it
        enable(group.group_name)


def backward_is_running() -> bool:
    """Whether this thread runs a backward; of a block that is computed again the forward runs in one."""
    return current_backward() >= 0


def allow_side_effects_in_recomputation() -> AbstractContextManager[object]:
    """The compiler may recompute a forward that changes Python objects, and leaves those changes out."""
    return torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
