"""Private torch API: every use of torch without a stability promise, as of torch 2.11 to 2.14."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
from torch.multiprocessing.reductions import StorageWeakRef as StorageReference
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import _CachingTorchDispatchMode, _is_compiling, _VersionWrapper

from meshtrain.errors import InputError

# names of nodes of autograd that change a type only
CASTS = ("ToCopyBackward0",)
# of a loss, as its node of autograd saves it (at::Reduction)
REDUCTION_MEAN = 1

# As they are in torch 2.13; the rest is defined here.
__all__ = [
    "StorageReference",  # while one exists, no other storage gets the id of its storage
    "TorchDispatchMode",
    "fsdp_collectives",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]


# Parts of a DTensor -------------------------------------------------------------------------------
#
# Read in torch 2.13: `_local_tensor` is this rank's part, `_spec` says how the whole is sharded,
# and the constructor takes both without a check.


def to_local(tensor: Tensor) -> Tensor:
    """This rank's local part of a parameter or gradient, as a plain tensor; differentiable."""
    if not isinstance(tensor, DTensor):
        return tensor
    # the compiler knows DTensor.to_local, and leaves no trace of it in its graph
    if torch.compiler.is_compiling():
        return tensor.to_local()
    return _FastToLocal.apply(tensor) if tensor.requires_grad else tensor._local_tensor


class _FastToLocal(torch.autograd.Function):
    """`DTensor.to_local` for a parameter, whose gradient is sharded like it: takes a third of the
    CPU time."""

    elementwise = True  # see `accumulator_of`

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        ctx.set_materialize_grads(False)
        local = parameter._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        # None from a layer that defers its weight gradient.
        return None if grad is None else DTensor(grad, ctx.spec, requires_grad=False)


def from_local(local: Tensor, like: Tensor) -> Tensor:
    """The inverse of `to_local`, without gradients: a tensor sharded like `like`, with `local` as
    this rank's part."""
    if not isinstance(like, DTensor):
        return local
    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def as_gradient(local: Tensor, parameter: Tensor) -> Tensor:
    """A gradient of `parameter` whose part on this rank is `local`: a faster `from_local`."""
    return (
        DTensor(local, parameter._spec, requires_grad=False)
        if isinstance(parameter, DTensor)
        else local
    )


def is_plain_gradient(grad: Tensor, parameter: Tensor) -> bool:
    """Whether a gradient is dense, has no autograd history and is sharded like its parameter."""
    dense = (
        grad.layout == torch.strided and grad.dtype == parameter.dtype and not grad.requires_grad
    )
    return dense and getattr(grad, "_spec", None) == getattr(parameter, "_spec", None)


# Parameters and buffers of modules ----------------------------------------------------------------
#
# Read in torch 2.13: `_parameters` and `_buffers` are the dicts behind `register_parameter` and
# `register_buffer`, and `_apply` is what `Module.to` calls for each tensor.


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters, tied ones too, by their names in it; None where one is left
    out."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers, by their names in it."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules that a module has, by their names in it."""
    return module._modules


def persistent_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers that are part of its state."""
    return {
        name: x
        for name, x in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }


def apply_to_tensors(model: nn.Module, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Replaces each parameter and buffer of a model in place, as `Module.to` does. Read in torch
    2.13."""
    return model._apply(function)


def allocate(module: nn.Module, device: torch.device) -> None:
    """`to_empty` for tensors on the meta device. Through `_apply` of the whole module, by which
    FSDP learns of the new tensors: otherwise it would pad shards at the first forward, and the
    optimizer would hold the unpadded ones."""
    module._apply(
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
    )


@contextmanager
def replace_parameters(
    modules: Iterable[nn.Module], replacement: Callable[[nn.Parameter], Tensor]
) -> Iterator[None]:
    """Inside, the parameters of these modules are replaced by other tensors."""
    places = [
        (module, name, p)
        for module in modules
        for name, p in module._parameters.items()
        if p is not None
    ]
    try:
        for module, name, parameter in places:
            module._parameters[name] = replacement(parameter)  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


# Kinds of layers ----------------------------------------------------------------------------------
#
# Read in torch 2.13, which has no public classes for these: every batch norm, of any number of
# dims; every batch or instance norm; every dropout, of single values or whole channels.

AnyBatchNorm = nn.modules.batchnorm._BatchNorm
AnyNormWithStatistics = nn.modules.batchnorm._NormBase
AnyDropout = nn.modules.dropout._DropoutNd


# Memory, and what is written to it ----------------------------------------------------------------
#
# Read in torch 2.13: `_cdata` is the address of a storage's C++ object, `_version` counts the
# writes to a tensor and its views, and an operator's `_schema` says which arguments it writes to.


def memory_of(tensor: Tensor) -> int:
    """An id of the memory that a tensor and its views share, on the meta device too, where all
    addresses are 0. Read in torch 2.13: the address of the storage's C++ object."""
    return tensor.untyped_storage()._cdata


def version_of(tensor: Tensor) -> int:
    """How often a tensor, or a view of it, was written to in place."""
    return tensor._version


def keep_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Inside, autograd does not notice writes to these tensors."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def version_witness(tensor: Tensor) -> Tensor:
    """A tensor without memory, whose version changes whenever this one or a view of it is written
    to. Read in torch 2.13: `detach` shares the counter of versions, and setting `data` keeps it."""
    with without_dispatch_modes(), torch.no_grad():
        witness = tensor.detach()
        witness.data = tensor.new_empty(0)
    return witness


def share_version(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one counter of versions, so that a write to either is noticed in
    both: of equal versions alone that does not follow. Read in torch 2.13."""
    version = a._version
    if b._version != version:
        return False
    set_version = torch._C._autograd._unsafe_set_version_counter
    set_version((a,), (version + 1,))
    shared = b._version != version
    set_version((a,), (version,))
    return shared


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operator writes to in place. Read in torch 2.13: an `OpOverload` says
    so in its schema, and what is none writes to nothing."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    values = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    written = [
        values.get(argument.name)
        for argument in schema.arguments
        if argument.alias_info and argument.alias_info.is_write
    ]
    return [x for x in tree_leaves(written) if isinstance(x, Tensor)]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies tensors of one device into others, possibly of another dtype, in few kernels. Read in
    torch 2.13."""
    torch._foreach_copy_(targets, sources)


def raise_unless(condition: Tensor, message: str) -> None:
    """Asserts a boolean scalar. On a GPU the kernel fails, and the host does not wait."""
    torch._assert_async(condition, message)


# Hooks --------------------------------------------------------------------------------------------
#
# Read in torch 2.13: where tensors and modules keep the hooks that were registered.


# The `__torch_function__` of a class whose functions are torch's own. Read in torch 2.13.
without_torch_function: Any = torch._C._disabled_torch_function_impl


def wrapper_without_memory(kind: type, like: Tensor, device: torch.device) -> Any:
    """A tensor of a class with a `__torch_dispatch__` of its own, which looks like another and has
    no memory. Read in torch 2.13."""
    return Tensor._make_wrapper_subclass(
        kind,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
        storage_size=0,
    )


def in_autograd_function() -> bool:
    """Whether the forward of a torch.autograd.Function runs, or inference mode: these two turn
    forward derivatives off, too. Read in torch 2.13."""
    return not torch._C._is_fwd_grad_enabled()


def has_hooks(tensor: Tensor) -> bool:
    """Whether a hook may change the gradient of a tensor in a backward."""
    return bool(tensor._backward_hooks)


def has_gradient_hooks(parameter: Tensor | None) -> bool:
    """Whether a hook observes, or may change, what is added to a parameter's gradient."""
    return parameter is not None and bool(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    )


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Whether a hook runs after each accumulation of a parameter's gradient, and may change the sum
    so far."""
    return bool(parameter._post_accumulate_grad_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


# The autograd engine ------------------------------------------------------------------------------
#
# Read in torch 2.13: a parameter's gradient is added by a node of the graph, which exists as long
# as something holds it; the engine calls what was queued, in this order, when a backward has ended.


def current_backward() -> int:
    """The id of the current backward; -1 outside a backward."""
    return torch._C._current_graph_task_id()


def backward_is_running() -> bool:
    """Whether this thread runs a backward; the recomputation of a block's forward also runs in
    one."""
    return current_backward() >= 0


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` at the end of the current backward, in which it must be called."""
    Variable._execution_engine.queue_callback(callback)


def after_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` after the callbacks that DDP and FSDP queue for the end of this backward."""
    at_end_of_backward(lambda: at_end_of_backward(callback))


def accumulates(parameter: Tensor) -> bool:
    """Whether the current backward adds to a parameter's gradient; one of `torch.autograd.grad`
    does not."""
    return runs_in_backward(_get_grad_fn_or_grad_acc(parameter))


def runs_in_backward(node: Any) -> bool:
    """Whether the current backward executes a node of the graph."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `torch.autograd.grad` was called for this very gradient
        return False


def ends_in_mean(scalar: Tensor, least: int) -> bool:
    """Whether a scalar with a graph was made, but for casts, by a mean over at least `least`
    numbers: by `mean()`, or by one of torch's losses with `reduction="mean"`."""
    node: Any = scalar.grad_fn
    while node is not None and node.name() in CASTS:
        node = node.next_functions[0][0]
    if node is None:
        return False
    # What a node has saved it shows as `_saved_NAME`, an enumeration as its number.
    if node.name().startswith("MeanBackward"):
        return math.prod(node._saved_self_sym_sizes) >= least
    return getattr(node, "_saved_reduction", None) == REDUCTION_MEAN


def accumulator_of(node: Any) -> Any:
    """The autograd node that adds the gradient arriving at `node` to that of a parameter, its
    `variable`, elementwise, possibly in another dtype. None: it is added to a part of a parameter,
    to several parameters, or to none."""
    while node is not None and not hasattr(node, "variable"):
        if (
            not getattr(getattr(node, "_forward_cls", None), "elementwise", False)
            or len(node.next_functions) > 1
        ):
            return None
        node = node.next_functions[0][0]
    return node


def parameter_of(weight: Tensor) -> Tensor | None:
    """The parameter that a tensor is the whole of, possibly in another dtype; None if there is
    none."""
    node = _get_grad_fn_or_grad_acc(weight) if weight.requires_grad else None
    return getattr(accumulator_of(node), "variable", None)


def when_accumulated(parameter: Tensor, callback: Callable[[], None]) -> Any:
    """Calls `callback` once a backward has accumulated all gradients of a parameter, also if
    products have added them. The caller has to keep the returned node alive: a parameter does not
    hold a reference to it."""
    node = _get_grad_fn_or_grad_acc(parameter)
    node.register_hook(lambda *unused: callback())
    return node


# How code runs: traced, compiled, below dispatch modes --------------------------------------------

_traced_as: list[str] = []  # types of the devices that the meta device stands for; the last counts


@contextmanager
def traced_as(device_type: str) -> Iterator[None]:
    """Inside, kernels for tensors on the meta device are chosen as for this type of device."""
    _traced_as.append(device_type)
    try:
        yield
    finally:
        _traced_as.pop()


def device_type_of(tensor: Tensor) -> str:
    """The device type by which kernels are chosen for a tensor."""
    return _traced_as[-1] if tensor.is_meta and _traced_as else tensor.device.type


def is_traced() -> bool:
    """Whether this code is being compiled, or transformed by `torch.func`, rather than run."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


# Decorates functions that compiled code may call; loads the compiler on first call. Read in torch
# 2.13: the public `torch.compiler.disable` loads it when the decorator is applied.
never_compiled = _disable_dynamo

# Hides the operators inside from dispatch modes. Read in torch 2.13.
without_dispatch_modes = _disable_current_modes
_nothing_hidden: list[None] = []  # one entry for each open `nothing_hidden`


def hidden_from_dispatch_modes() -> AbstractContextManager[object]:
    """Hides the operators inside from dispatch modes, such as selective checkpointing, but not from
    one that counts everything."""
    return nullcontext() if _nothing_hidden else without_dispatch_modes()


@contextmanager
def nothing_hidden() -> Iterator[None]:
    """Inside, dispatch modes see all operators."""
    _nothing_hidden.append(None)
    try:
        yield
    finally:
        _nothing_hidden.pop()


# Recomputation ------------------------------------------------------------------------------------


class KeepsBeforeWrites(_CachingTorchDispatchMode):
    """The forward's half of selective checkpointing: what it keeps is copied before the forward
    writes to it in place. torch would refuse it in backward or, where the write goes through
    `unsafe_chunk` (nn.GRU), take what was written. The compiler makes of a write a tensor of its
    own.

    `keep`: a function that is called at the end of the forward with each tensor that is kept, and
    returns a function that gives it back in its place. torch hands what it keeps here to no hook of
    saved tensors.
    """

    keep: Callable[[Tensor], Callable[[], Tensor]] | None = None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.keep is None:
            return
        for entry in tree_leaves(list(self.storage.values())):
            # A compiler's tensors have no values yet.
            if isinstance(entry, _VersionWrapper) and type(entry.val) is Tensor:
                give_back = self.keep(entry.val)
                entry.get_val = lambda *unused, give_back=give_back: give_back()  # type: ignore[method-assign]
                entry.val = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = written_tensors(func, args, kwargs or {})
        if written and not _is_compiling(func, args, kwargs):
            self._copy_what_shares_memory_with(written)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy_what_shares_memory_with(self, written: Sequence[Tensor]) -> None:
        memory = {memory_of(x) for x in written}
        for kept in tree_leaves(list(self.storage.values())):
            is_tensor = isinstance(kept, _VersionWrapper) and isinstance(kept.val, Tensor)
            if is_tensor and memory_of(kept.val) in memory:
                kept.val = kept.val.clone()
                kept.version = kept.val._version


# FSDP ---------------------------------------------------------------------------------------------
#
# Read in torch 2.13: a module's `_get_fsdp_state()` has the state of a unit, whose parameters
# (`_fsdp_param_group`) are gathered and reduced together.


def end_fsdp_backward(model: FSDPModule) -> None:
    """Runs FSDP's end of a backward: accumulates gradients in the reduce dtype, and sends them
    after the last one."""
    model._get_fsdp_state()._root_post_backward_final_callback()


def send_unused_as_zeros(module: FSDPModule) -> None:
    """Makes an FSDP unit send a gradient for every parameter: zeros if the model did not use it. A
    backward raises InputError if a forward has written to a parameter.

    FSDP concatenates only the gradients that exist: if ranks, or in HSDP microbatches, use
    different parameters, it would add the gradient of one parameter to that of another. With 16
    bits this also gives all gradients one dtype.
    """
    unit = module._get_fsdp_state()._fsdp_param_group
    if unit is not None:  # None if all parameters are in inner units
        unit.post_backward = partial(_send_all, unit, unit.post_backward)  # type: ignore[method-assign]


def _send_all(unit: FSDPParamGroup, post_backward: Callable[[], None], *unused: Any) -> None:
    gathered = [p for p in unit.fsdp_params if hasattr(p, "_unsharded_param")]
    if not gathered:
        return  # its forward has not run
    for p in gathered:
        # not increased by FSDP's own writes
        if any(tensor._version for tensor in p.all_gather_outputs):
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
    # HSDP's sum over microbatches, in the dtype of a message
    partial_sum = unit._partial_reduce_output
    if partial_sum is not None and partial_sum.dtype != unit._orig_dtype:
        # the stream that adds the next ones
        with unit.device_handle.stream(unit.comm_ctx.reduce_scatter_stream):
            unit._partial_reduce_output = partial_sum.to(unit._orig_dtype)


def writes_to_parameter(name: str | None) -> str:
    return (
        f"the model's forward writes to the parameter {name}, and with dp_shard or cp that is a "
        "copy which is gathered anew: compute with a tensor that is made of the parameter, or use "
        "dp_replicate"
    )


# The compiler -------------------------------------------------------------------------------------

_meta = torch.library.Library("aten", "IMPL", "Meta")  # registrations last as long as it does


@cache
def mend_attention_shapes() -> None:
    """Corrects a meta function: before 2.13 torch assumes that CPU attention in float64 saves a
    float32 logsumexp, so that a compiled backward fails."""
    operator, key = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch._C.DispatchKey.Meta,
    )
    q = torch.empty(1, 1, 1, 1, dtype=torch.float64, device="meta")
    if operator(q, q, q)[1].dtype == q.dtype:
        return
    shapes_of = operator.py_kernels.pop(key)

    def shapes(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, logsumexp = shapes_of(query, *args, **kwargs)
        return out, logsumexp.double() if query.dtype == torch.float64 else logsumexp

    # for meta tensors, and next for the compiler's
    _meta.impl(operator, shapes, allow_override=True)
    operator.py_impl(key)(shapes)
    operator._dispatch_cache.clear()


@contextmanager
def compile_callbacks(
    begins: Callable[[object], None], ends: Callable[[object], None]
) -> Iterator[None]:
    """Inside, these are called at the begin and end of compilation, in the thread that waits for
    it: only for the outermost of nested compilations, also for a cached graph, and for a backward
    that is compiled on its first run."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begins)
        callback_handler.remove_end_callback(ends)


def compiled_graphs() -> int:
    """The number of graphs that this process has compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def allow_side_effects_in_recomputation() -> AbstractContextManager[object]:
    """Lets the compiler recompute a forward that changes Python objects; the recomputation omits
    those changes."""
    return torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)


def breaks_graph() -> tuple[type[Exception], ...]:
    """The compiler's exceptions, before anything runs, if a function is not one graph or has too
    many variants."""
    from torch._dynamo import exc
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as DependsOnData

    return (
        exc.Unsupported,
        exc.UncapturedHigherOrderOpError,
        exc.FailOnRecompileLimitHit,
        DependsOnData,
    )


# Memory shared by GPUs, and pinned memory of hosts ------------------------------------------------


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Lets a group's ranks access each other's memory, and registers the operators that use it."""
    from torch.distributed import _symmetric_memory

    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None:  # torch 2.13 no longer needs it, and later versions may lack it
        enable(group.group_name)


def try_symmetric_memory(group: dist.ProcessGroup, together: bool) -> str | None:
    """Why memory cannot be shared after all (a container may forbid it); None if it can.
    `together`: the collective half of the test, which ranks may enter only after all of them have
    passed the other half."""
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
    """The UUID of a GPU, and those of the visible GPUs linked to it by NVLink; empty if the driver
    does not tell."""
    from torch._C import _distributed_c10d
    from torch._C._autograd import DeviceType

    numbers = [
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    ]
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        links = _distributed_c10d._detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix  # type: ignore[attr-defined]
    except RuntimeError:
        return numbers[index], frozenset()
    return numbers[index], frozenset(
        number for number, n in zip(numbers, links[index], strict=True) if n > 0
    )


def pin_in_place(memory: Tensor) -> None:
    """Pins host memory where it lies. `Tensor.pin_memory` would copy it, and round its size up to a
    power of two. Read in torch 2.13: a wrapper of cudaHostRegister that raises on an error."""
    from torch.cuda._pin_memory_utils import pin_memory

    pin_memory(memory.data_ptr(), memory.nbytes)


def unpin_in_place(memory: Tensor) -> None:
    """Undoes `pin_in_place`; to be called before the memory is freed. Read in torch 2.13."""
    from torch.cuda._pin_memory_utils import unpin_memory

    unpin_memory(memory.data_ptr())


# Operators by name --------------------------------------------------------------------------------

aten = torch.ops.aten


def _matrix_products() -> frozenset[Any]:
    """Of plain matrices, of matrices with scales and of groups of matrices, the latter under the
    names that versions of torch from 2.11 to 2.14 give them."""
    products: set[Any] = {aten.linear.default}
    for name in ("mm", "addmm", "bmm", "baddbmm"):
        operator = getattr(aten, name)
        products |= {operator.default, operator.dtype}  # the latter with another output dtype
    for name in (
        "_scaled_mm",
        "_scaled_mm_v2",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "_scaled_grouped_mm_v2",
    ):
        if hasattr(aten, name):
            products.add(getattr(aten, name).default)
    return frozenset(products)


MATRIX_PRODUCTS = _matrix_products()


# The operators of `scaled_dot_product_attention` -> the position of their dropout probability.
# Read in torch 2.13; a test compares the names of these arguments.
ATTENTION_DROPOUT = {
    aten._scaled_dot_product_flash_attention.default: 3,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    aten._scaled_dot_product_efficient_attention.default: 5,
    aten._scaled_dot_product_cudnn_attention.default: 5,
    aten._scaled_dot_product_attention_math.default: 4,
}

# Attention of packed documents on GPUs. By name, because torch registers it lazily.
VARLEN_ATTENTION = "torch_attn._varlen_attn.default"


def multiply_float8(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Rows (n, k) and (m, k) in e4m3 with a scale each, (n, 1) and (m, 1) -> (n, m). Read in torch
    2.13. `use_fast_accum`: sums have fewer bits inside the tensor cores, because rounding the
    operands has lost more than that."""
    return torch._scaled_mm(a, b.t(), a_scales, b_scales.t(), out_dtype=dtype, use_fast_accum=True)


def varlen_attention() -> tuple[Any, Any] | None:
    """The operators of torch's variable-length attention, forward and backward; None: no model has
    used it yet. Read in torch 2.13."""
    ops = torch.ops.torch_attn
    if not hasattr(ops, "_varlen_attn"):
        return None
    return ops._varlen_attn, ops._varlen_attn_backward


# Attention that returns its log-sum-exp, forward and backward -------------------------------------
#
# Read in torch 2.13. All of them take the state of a generator, and without dropout none uses it.
# Shapes, where nothing else is said: q (b, h, m, e), k (b, k, n, e), v (b, k, n, f), out (b, h, m,
# f), lse (b, h, m).

AttentionGradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p=0.0, is_causal=causal, attn_mask=bias, scale=scale
    )


def cpu_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> AttentionGradients:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, dropout_p=0.0, is_causal=causal, attn_mask=bias, scale=scale
    )


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp (b, h, 32 ceil(m / 32)) has rows after those of the queries: inf."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal, scale=scale
    )
    return out, lse


def efficient_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> AttentionGradients:
    """Assumes that the heads of `out` are adjacent in memory, and `lse` as the forward returned
    it."""
    state = q.new_empty((), dtype=torch.int64)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad,
        q,
        k,
        v,
        bias,
        out,
        lse,
        philox_seed=state,
        philox_offset=state,
        dropout_p=0.0,
        grad_input_mask=[True, True, True, False],
        is_causal=causal,
        scale=scale,
    )
    return dq, dk, dv


def cudnn_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp (b, h, m, 1)."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal, scale=scale
    )
    return out, lse


def cudnn_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> AttentionGradients:
    state = q.new_empty((), dtype=torch.int64)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        philox_seed=state,
        philox_offset=state,
        attn_bias=None,
        cum_seq_q=None,
        cum_seq_k=None,
        max_q=q.shape[2],
        max_k=k.shape[2],
        dropout_p=0.0,
        is_causal=causal,
        scale=scale,
    )


@dataclass(frozen=True)
class FlashOptions:
    """How flash attention sees (b, m, h, e); or (tokens, h, e) that are packed, of sequences whose
    ends are given."""

    causal: bool
    scale: float
    longest_queries: int  # queries of the longest sequence
    longest_keys: int
    query_ends: Tensor | None = None  # int32, of packed sequences: 0 and the end of each
    key_ends: Tensor | None = None
    window_left: int | None = None  # keys that a query sees before its own; None: all
    window_right: int | None = None


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, options: FlashOptions
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp (b, h, m), of packed sequences (h, tokens)."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cum_seq_q=options.query_ends,
        cum_seq_k=options.key_ends,
        max_q=options.longest_queries,
        max_k=options.longest_keys,
        dropout_p=0.0,
        is_causal=options.causal,
        return_debug_mask=False,
        scale=options.scale,
        window_size_left=options.window_left,
        window_size_right=options.window_right,
    )
    return out, lse


def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: FlashOptions,
) -> AttentionGradients:
    state = torch.empty(2, dtype=torch.uint64, device=grad.device)
    return torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        cum_seq_q=options.query_ends,
        cum_seq_k=options.key_ends,
        max_q=options.longest_queries,
        max_k=options.longest_keys,
        dropout_p=0.0,
        is_causal=options.causal,
        rng_state=state,
        unused=state,
        scale=options.scale,
        window_size_left=options.window_left,
        window_size_right=options.window_right,
    )
