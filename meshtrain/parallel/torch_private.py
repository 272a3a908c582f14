"""Private torch API: everything that torch does not promise to keep, as read in torch 2.11 to 2.13."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from meshtrain.errors import InputError

__all__ = ["fsdp_collectives"]  # the rest is defined here


def to_local(tensor: Tensor) -> Tensor:
    """The tensor that this rank's part of a parameter or gradient lies in, with a way for gradients."""
    if not isinstance(tensor, DTensor):
        return tensor
    if torch.compiler.is_compiling():  # it knows DTensor.to_local, and leaves nothing of it in its graph
        return tensor.to_local()
    return _FastToLocal.apply(tensor) if tensor.requires_grad else tensor._local_tensor


class _FastToLocal(torch.autograd.Function):
    """`DTensor.to_local` of a parameter, whose gradient lies where the parameter does: a third of the CPU time."""

    elementwise = True  # see `accumulator_of`

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


def as_gradient(local: Tensor, parameter: Tensor) -> Tensor:
    """A gradient of `parameter` whose part on this rank is `local`: `from_local` in less time."""
    return DTensor(local, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else local


def is_plain_gradient(grad: Tensor, parameter: Tensor) -> bool:
    """Whether a gradient is dense, has no history and lies over the ranks as its parameter does."""
    dense = grad.layout == torch.strided and grad.dtype == parameter.dtype and not grad.requires_grad
    return dense and getattr(grad, "_spec", None) == getattr(parameter, "_spec", None)


def allocate(module: nn.Module, device: torch.device) -> None:
    """`to_empty` of what is on the meta device. By `_apply` of the whole, in which FSDP learns of the new tensors: else
    it would pad shards at the first forward, and the optimizer would have those without padding."""
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


_meta = torch.library.Library("aten", "IMPL", "Meta")  # registrations last as long as it does


def persistent_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers that are part of its state."""
    return {name: x for name, x in module._buffers.items() if name not in module._non_persistent_buffers_set}


@cache
def mend_attention_shapes() -> None:
    """Before 2.13 torch takes the logsumexp that attention on a CPU keeps of float64 for one of float32, with which a
    compiled backward fails."""
    operator, key = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch._C.DispatchKey.Meta
    q = torch.empty(1, 1, 1, 1, dtype=torch.float64, device="meta")
    if operator(q, q, q)[1].dtype == q.dtype:
        return
    shapes_of = operator.py_kernels.pop(key)

    def shapes(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, logsumexp = shapes_of(query, *args, **kwargs)
        return out, logsumexp.double() if query.dtype == torch.float64 else logsumexp

    _meta.impl(operator, shapes, allow_override=True)  # of tensors on the meta device, and of the compiler's own
    operator.py_impl(key)(shapes)
    operator._dispatch_cache.clear()


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
    return runs_in_backward(_get_grad_fn_or_grad_acc(parameter))


def runs_in_backward(node: Any) -> bool:
    """Whether the backward that runs now comes to a node of its graph."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # this very gradient is what `torch.autograd.grad` was asked for
        return False


def accumulator_of(node: Any) -> Any:
    """Where autograd adds what comes to `node` to the gradient of a parameter, its `variable`: element by element,
    perhaps in another type. None: it adds it to a part, to several, or to nothing."""
    while node is not None and not hasattr(node, "variable"):
        if not getattr(getattr(node, "_forward_cls", None), "elementwise", False) or len(node.next_functions) > 1:
            return None
        node = node.next_functions[0][0]
    return node


def parameter_of(weight: Tensor) -> Tensor | None:
    """The parameter all of which a tensor is, perhaps in another type."""
    node = _get_grad_fn_or_grad_acc(weight) if weight.requires_grad else None
    return getattr(accumulator_of(node), "variable", None)


def has_gradient_hooks(parameter: Tensor | None) -> bool:
    """Whether somebody wants to see, or to change, what is added to a parameter's gradient."""
    return parameter is not None and bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def when_accumulated(parameter: Tensor, callback: Callable[[], None]) -> Any:
    """Calls back when all gradients of a backward have come to a parameter, and also where products have added them. It
    does so while what is returned lives: a parameter does not hold this end of its graph."""
    node = _get_grad_fn_or_grad_acc(parameter)
    node.register_hook(lambda *unused: callback())
    return node


traced_for: str | None = None  # the type of device that the meta device stands for, where a step is traced


def device_type_of(tensor: Tensor) -> str:
    """The type of device by which kernels are chosen for a tensor."""
    return traced_for if tensor.is_meta and traced_for is not None else tensor.device.type


def is_traced() -> bool:
    """Whether this code is compiled now, or transformed by `torch.func`, rather than run."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


never_compiled = _disable_dynamo  # of a function that compiled code may call; loads the compiler at its first call
without_dispatch_modes = _disable_current_modes  # hides what runs inside from whoever watches operators


def raise_unless(condition: Tensor, message: str) -> None:
    """Of a boolean scalar; on a GPU its kernel fails, and the host waits for nothing."""
    torch._assert_async(condition, message)


def keep_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Autograd does not notice what is written to these tensors inside."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def end_fsdp_backward(model: FSDPModule) -> None:
    """What FSDP does at the end of its own backwards: sums gradients in the reduced type, sends them after the last."""
    model._get_fsdp_state()._root_post_backward_final_callback()


def send_unused_as_zeros(module: FSDPModule) -> None:
    """From now on a unit of FSDP sends a gradient for every parameter: zeros where the model did not use it. A backward
    raises InputError where a forward has written to a parameter.

    FSDP sends those that are there, one after the other in one tensor: of ranks, or in HSDP of microbatches, that have
    used different parameters it would add one's gradient to another's. In 16 bits all are of one type then.
    """
    unit = module._get_fsdp_state()._fsdp_param_group
    if unit is not None:  # all parameters may be in units inside
        unit.post_backward = partial(_send_all, unit, unit.post_backward)  # type: ignore[method-assign]


def writes_to_parameter(name: str | None) -> str:
    return (
        f"the model's forward writes to the parameter {name}, and with dp_shard or cp that is a copy which is gathered "
        "anew: compute with a tensor that is made of the parameter, or use dp_replicate"
    )


def _send_all(unit: FSDPParamGroup, post_backward: Callable[[], None], *unused: Any) -> None:
    gathered = [p for p in unit.fsdp_params if hasattr(p, "_unsharded_param")]
    if not gathered:
        return  # no forward has run of it
    for p in gathered:
        if any(tensor._version for tensor in p.all_gather_outputs):  # of which FSDP's own writes say nothing
            raise InputError(writes_to_parameter(p._param_fqn))
    trained = [p for p in gathered if unit.reduce_grads and p._unsharded_param.requires_grad]
    widened = any(p.unsharded_accumulated_grad is not None for p in trained)
    for p in trained:
        if p.unsharded_accumulated_grad is None:
            if p._unsharded_param.grad is None:
                p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
            if widened:
                p.to_accumulated_grad_if_needed()
    post_backward()
    partial_sum = unit._partial_reduce_output  # HSDP's over microbatches, begun in the type of a message
    if partial_sum is not None and partial_sum.dtype != unit._orig_dtype:
        with unit.device_handle.stream(unit.comm_ctx.reduce_scatter_stream):  # where the next ones are added
            unit._partial_reduce_output = partial_sum.to(unit._orig_dtype)


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


def try_symmetric_memory(group: dist.ProcessGroup, together: bool) -> str | None:
    """Why memory cannot be shared after all (a container that forbids it); None: it can. `together`: the half in which
    ranks wait for each other, after all have come through the other one."""
    from torch.distributed import _symmetric_memory

    try:
        if together:
            _symmetric_memory.get_symm_mem_workspace(group.group_name, 2**20)
        else:
            enable_symmetric_memory(group)
            device = torch.device("cuda", torch.cuda.current_device())
            _symmetric_memory.empty(2**20, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def nvlink_neighbours(device: torch.device) -> tuple[str, frozenset[str]]:
    """The number of a GPU, and of the visible ones that it reaches over NVLink; none where the driver does not tell."""
    from torch._C import _distributed_c10d
    from torch._C._autograd import DeviceType

    numbers = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        links = _distributed_c10d._detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix  # type: ignore[attr-defined]
    except RuntimeError:
        return numbers[index], frozenset()
    return numbers[index], frozenset(number for number, n in zip(numbers, links[index], strict=True) if n > 0)


def backward_is_running() -> bool:
    """Whether this thread runs a backward; of a block that is computed again the forward runs in one."""
    return current_backward() >= 0


@contextmanager
def compile_callbacks(begins: Callable[[object], None], ends: Callable[[object], None]) -> Iterator[None]:
    """Inside, these are called around whatever the compiler does, in the thread that waits for it: around the outermost
    of what is nested, a cached graph included, and around a backward that is compiled when it first runs."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begins)
        callback_handler.remove_end_callback(ends)


def compiled_graphs() -> int:
    """The graphs that this process has compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def allow_side_effects_in_recomputation() -> AbstractContextManager[object]:
    """The compiler may recompute a forward that changes Python objects, and leaves those changes out."""
    return torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)


def breaks_graph() -> tuple[type[Exception], ...]:
    """What the compiler raises, before anything has run, where a function is not one graph or has too many versions."""
    from torch._dynamo import exc
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as DependsOnData

    return exc.Unsupported, exc.UncapturedHigherOrderOpError, exc.FailOnRecompileLimitHit, DependsOnData
