"""Patches of torch in a trace: FSDP, fused kernels and process groups on the meta device, for one
rank of a world without other processes.

All of them reach into torch where it makes no promise. They were read in torch 2.11 to 2.13.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshtrain import attention
from meshtrain.attention import wants_repeated
from meshtrain.parallel import torch_private
from meshtrain.parallel.sharding import chunk_range

META = torch.device("meta")
_sdpa = F.scaled_dot_product_attention


@contextmanager
def meta_stands_for(device_type: str) -> Iterator[None]:
    """Context in which FSDP and fused kernels treat the meta device as `device_type`:
    "cpu" or "cuda"."""
    torch_private.mend_attention_shapes()
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any, **options: Any) -> None:
            stack.enter_context(patch.object(owner, name, value, **options))

        # torch warns of its own calls, and of views that are never written to.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch_private.traced_as(device_type))

        # FSDP: the CPU's streams and events, which do nothing, and parameters without values.
        for module in (_fsdp_collectives, _fsdp_state, _fsdp_param_group):
            replace(module, "_get_device_handle", lambda _: torch.cpu)
        replace(torch.cpu.Stream, "record_event", lambda *_: torch.cpu.Event(), create=True)
        replace(torch.accelerator, "current_stream", lambda *_: torch.cpu.current_stream())
        replace(_fully_shard, "_get_device_from_mesh", lambda _: META)
        replace(_fsdp_param, "_chunk_with_empty", Chunks)
        replace(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None)

        # Fused kernels: for meta tensors torch chooses none.
        replace(F, "scaled_dot_product_attention", _attention)
        if device_type == "cuda":
            replace(F, "rms_norm", _rms_norm)
            replace(attention, "varlen_kernel", _varlen_kernel)
        yield


@contextmanager
def fake_process_groups(rank: int, world_size: int) -> Iterator[None]:
    """Context with process groups whose collectives do nothing. torch would make every group of the
    world, and look at every rank of each mesh; here it makes this rank's groups alone."""
    new_group = device_mesh.new_group
    concatenate = DeviceMesh._concatenate
    joined: dict[tuple[int, ...], DeviceMesh] = {}

    def own_group(ranks: list[int], **keys: Any) -> Any:
        return rank in ranks and new_group(ranks, **keys)

    def join_once(meshes: list[DeviceMesh]) -> DeviceMesh:
        """FSDP joins the same meshes for every parameter."""
        key = tuple(map(id, meshes))  # `build_mesh`'s result keeps them alive
        if key not in joined:
            joined[key] = concatenate(meshes)
        return joined[key]

    def has_same_hash(mesh: DeviceMesh, other: object) -> bool:
        """Without a comparison of all ranks with those of equal meshes of an earlier trace."""
        return hash(mesh) == hash(other)

    with (
        patch.object(device_mesh, "new_group", own_group),
        patch.object(DeviceMesh, "_concatenate", join_once),
        patch.object(DeviceMesh, "__eq__", has_same_hash),
        ExitStack() as stack,
    ):
        if world_size > 1:
            dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        yield


@contextmanager
def resizes_seen(seen: Callable[[Any], None]) -> Iterator[None]:
    """Context in which `seen` is called with every storage that is resized, which no dispatch mode
    sees."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        seen(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


@contextmanager
def compiled_by(backend: Callable[..., Any]) -> Iterator[None]:
    """Context in which `torch.compile` uses this backend."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    # torch caches this list: fill it before functions are patched.
    torch.overrides.get_overridable_functions()
    compile_ = torch.compile

    def with_backend(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        return compile_(function, backend=backend, **settings)

    with (
        patch.object(torch, "compile", with_backend),
        # A graph for each shape, however many blocks.
        torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=256),
        torch._functorch.config.patch(enable_autograd_cache=False),
        # It would fold a graph on the meta device into constants.
        torch._inductor.config.patch(joint_graph_constant_folding=False),
    ):
        yield


@dataclass(frozen=True)
class Chunks:
    """The chunks of a tensor, made lazily: FSDP reads two of its thousands of shards."""

    tensor: Tensor
    num_chunks: int
    dim: int

    def __getitem__(self, index: int) -> Tensor:
        part = chunk_range(self.tensor.shape[self.dim], self.num_chunks, index)
        size = part.stop - part.start
        return self.tensor.narrow(self.dim, part.start, size) if size else self.tensor.new_empty(0)


# Fused kernels ------------------------------------------------------------------------------------


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Calls the fused kernel that the traced device would run. GPUs have none for float64."""
    device_type = torch_private.device_type_of(q)
    if q.is_meta and enable_gqa:
        # `meshtrain.attention` has decided for the meta device.
        sizes = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]
        if wants_repeated(device_type, q.dtype, attn_mask is not None, *sizes):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            enable_gqa = False
    if not q.is_meta or (device_type == "cuda" and q.dtype == torch.float64):
        return _sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    aten = torch.ops.aten
    if device_type == "cpu":
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.to(q.dtype)
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]
    # Flash attention takes no values of another width than keys (latent attention).
    if attn_mask is None and q.dtype.itemsize == 2 and q.shape[-1] == v.shape[-1]:
        return aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )[0]
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def _varlen_kernel(device: torch.device, dtype: torch.dtype | None) -> Callable[..., Tensor] | None:
    """Attention over packed documents, as a GPU from Ampere on has it in 16 bits."""
    return _varlen_attention if dtype in attention.VARLEN_TYPES else None


def _varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_of_queries: Tensor,
    ends_of_keys: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    before, behind = window_size
    return torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        ends_of_queries,
        ends_of_keys,
        most_queries,
        most_keys,
        0.0,  # dropout
        True,  # causal
        False,  # return_debug_mask
        scale=scale,
        window_size_left=None if before < 0 else before,
        window_size_right=behind,
    )[0]


def _rms_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    has_other_dtype = weight is not None and weight.dtype != x.dtype  # decomposed on a GPU, too
    if has_other_dtype or torch.compiler.is_compiling():
        return torch.ops.aten._fused_rms_norm(x, list(shape), weight, eps)[0]
    return _RMSNorm.apply(x, list(shape), weight)


class _RMSNorm(torch.autograd.Function):
    """The fused GPU kernel, which saves x and one number per row; on the meta device torch
    decomposes the norm and saves two float32 tensors. LayerNorm's operators stand in for it: they
    read and write as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None) -> Tensor:
        out, _, scale = torch.ops.aten.native_layer_norm(x, shape, weight, None, 1e-5)
        ctx.save_for_backward(x, scale, weight)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
        x, scale, weight = ctx.saved_tensors
        needs_x, _, needs_weight = ctx.needs_input_grad
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, ctx.shape, scale, scale, weight, None, [needs_x, needs_weight, False]
        )
        return dx, None, dweight
