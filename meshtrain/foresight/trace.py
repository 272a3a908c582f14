"""Peak memory of one rank, traced: the trainer's own step runs on the meta device under a fake
process group.

Every operator is watched and every live storage counted, so no part of the model is described a
second time. Not seen: workspaces inside of kernels, and the allocator's fragmentation.
"""

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed._tools import fake_collectives  # noqa: F401  (collectives of meta tensors)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from meshtrain import attention
from meshtrain.config import Config
from meshtrain.config.model_spec import spec_of
from meshtrain.data.batch import Batch
from meshtrain.data.order import microbatches
from meshtrain.dropout import set_dropout
from meshtrain.foresight.compiled import compiled_by_graphs
from meshtrain.foresight.live import LiveBytes, watched
from meshtrain.foresight.model import alike, batch_of, repeated, untraced_errors, without
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.loss import Field
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.modeling import build
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel import torch_private
from meshtrain.parallel.compile import CompileChoice
from meshtrain.parallel.context import kernels
from meshtrain.parallel.fsdp import FSDPModule
from meshtrain.parallel.grad_sync import gradient_syncs
from meshtrain.parallel.linear import float8
from meshtrain.parallel.linear_cross_entropy import fuse_loss
from meshtrain.parallel.mixed_precision import ComputeCopies
from meshtrain.parallel.sharding import chunk_range
from meshtrain.parallel.torch_private import to_local
from meshtrain.pipeline.engine import Pipeline, shapes_of
from meshtrain.pipeline.p2p import TensorMeta
from meshtrain.pipeline.stage import OtherStageBlock, blocks_of
from meshtrain.run.setup import context_parallel
from meshtrain.trainer import Trainer

META = torch.device("meta")


ENDS = "embedding, logits and loss"
_sdpa = F.scaled_dot_product_attention


@dataclass(frozen=True)
class RankTrace:
    """Memory of one rank in one step, in bytes."""

    resident: dict[str, int]  # part -> alive between two steps
    parts: dict[str, int]  # part -> alive at the peak
    peak: int
    moment: str  # of the peak, for people
    sent: dict[str, int]  # axis -> sent in the traced step
    compiled: bool  # whether the blocks are compiled
    # phase of the step and place in the model -> `parts` at the peak of that moment
    moments: dict[str, dict[str, int]]


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


@contextmanager
def fake_world(layout: Layout, rank: int, device_type: str) -> Iterator[Mesh]:
    """A mesh of fake process groups, whose collectives do nothing, and torch patched so that FSDP,
    optimizers, fused kernels and the compiler treat the meta device as `device_type`."""
    torch_private.mend_attention_shapes()
    repeated = attention.wants_repeated
    fused: dict[str, Any] = {"scaled_dot_product_attention": _attention}
    if device_type == "cuda":
        fused["rms_norm"] = _rms_norm
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # torch warns of its own calls, and of views that are never written to
        warnings.simplefilter("ignore")
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)  # the compiler's
        for module in (_fsdp_collectives, _fsdp_state, _fsdp_param_group):
            stack.enter_context(patch.object(module, "_get_device_handle", lambda _: torch.cpu))
        stack.enter_context(
            patch.object(
                torch.cpu.Stream, "record_event", lambda *_: torch.cpu.Event(), create=True
            )
        )
        stack.enter_context(patch.object(_fully_shard, "_get_device_from_mesh", lambda _: META))
        stack.enter_context(patch.object(_fsdp_param, "_chunk_with_empty", Chunks))
        stack.enter_context(
            patch.object(Layout, "groups", lambda layout, *axes: [layout.group(rank, *axes)])
        )
        validate = patch.object(
            _fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None
        )
        stack.enter_context(validate)
        stack.enter_context(
            patch("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["meta"])
        )
        stack.enter_context(patch.object(torch_private, "traced_for", device_type))
        stack.enter_context(
            patch("meshtrain.modeling.build.choose_compile", partial(_choose_compile, device_type))
        )
        multiplies = patch.object(
            float8, "kernel_of", lambda _, dtype, kind: kind == "cuda" and dtype.itemsize == 2
        )
        stack.enter_context(multiplies)
        # Rounding to float8 is traced operator by operator: torch does not compile inside of a
        # dispatch mode.
        stack.enter_context(patch.object(float8, "_compiled", lambda function: function))
        stack.enter_context(compiled_by_graphs())
        # On an H100 (torch 2.11) the compiled loss took as much memory as its operators run one by
        # one.
        stack.enter_context(
            patch(
                "meshtrain.parallel.parallelize.fuse_loss", lambda layer, _: fuse_loss(layer, False)
            )
        )
        # a run's start checks it
        stack.enter_context(patch("meshtrain.parallel.parallelize.undecided", lambda *_: []))
        # stay on meta
        stack.enter_context(patch("meshtrain.parallel.parallelize.allocate", lambda *_: None))
        wants = patch.object(
            attention, "wants_repeated", lambda _, *kind: repeated(device_type, *kind)
        )
        stack.enter_context(wants)
        stack.enter_context(
            patch(
                "meshtrain.parallel.context.kernels.choose_kernel",
                partial(_block_kernel, device_type),
            )
        )
        for name, kernel in fused.items():
            stack.enter_context(patch.object(F, name, kernel))
        # torch would create every group of the world, and a joined mesh per parameter, each by
        # visiting every rank.
        new_group, joined = device_mesh.new_group, dict[tuple[int, ...], DeviceMesh]()
        concatenate = DeviceMesh._concatenate

        def join_once(meshes: list[DeviceMesh]) -> DeviceMesh:
            key = tuple(map(id, meshes))  # `build_mesh`'s result keeps them alive
            if key not in joined:
                joined[key] = concatenate(meshes)
            return joined[key]

        stack.enter_context(
            patch.object(
                device_mesh,
                "new_group",
                lambda ranks, **keys: rank in ranks and new_group(ranks, **keys),
            )
        )
        stack.enter_context(patch.object(DeviceMesh, "_concatenate", join_once))
        # torch would compare the ranks one by one with those of equal meshes of the trace before.
        stack.enter_context(
            patch.object(DeviceMesh, "__eq__", lambda mesh, other: hash(mesh) == hash(other))
        )
        if layout.world_size > 1:
            dist.init_process_group(
                "fake", rank=rank, world_size=layout.world_size, store=FakeStore()
            )
            stack.callback(dist.destroy_process_group)
        yield build_mesh(layout, device_type)


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
    """Calls the fused kernel that the traced device would run; for meta tensors torch chooses none.
    GPUs have none for float64."""
    if not q.is_meta or (torch_private.traced_for == "cuda" and q.dtype == torch.float64):
        return _sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    aten = torch.ops.aten
    if torch_private.traced_for == "cpu":
        mask = (
            attn_mask.to(q.dtype)
            if attn_mask is not None and attn_mask.dtype == torch.bool
            else attn_mask
        )
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
    if attn_mask is None and q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )[0]
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def _choose_compile(
    device_type: str, setting: bool | str, _: torch.device, splits_backward: bool
) -> CompileChoice:
    """The choice on a GPU where the compiler's requirements are installed."""
    return CompileChoice(
        setting is True or (setting == "auto" and device_type == "cuda" and not splits_backward)
    )


def _block_kernel(
    device_type: str, q: Tensor, v: Tensor, soft_cap: float | None, visible: str
) -> kernels.Kernel:
    if soft_cap is not None or (device_type == "cuda" and q.dtype == torch.float64):
        return kernels.PRODUCTS
    if device_type == "cpu":
        return kernels.CPU_FLASH
    return kernels.FLASH if q.dtype.itemsize == 2 and visible != "mask" else kernels.EFFICIENT


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
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], False]
        backward = torch.ops.aten.native_layer_norm_backward
        dx, dweight, _ = backward(grad, x, ctx.shape, scale, scale, weight, None, mask)
        return dx, None, dweight


def _rms_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    is_apart = weight is not None and weight.dtype != x.dtype  # decomposed on a GPU, too
    if is_apart or torch.compiler.is_compiling():
        return torch.ops.aten._fused_rms_norm(x, list(shape), weight, eps)[0]
    return _RMSNorm.apply(x, list(shape), weight)


class _Phases(StepTimer):
    """Tells `live` the phase of the step; measures nothing."""

    def __init__(self, live: LiveBytes) -> None:
        self.live, self.stack = live, [""]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.stack.append(name if name != "communication" else self.stack[-1])
        self.live.phase, before = self.stack[-1], self.live.phase
        try:
            yield
        finally:
            self.stack.pop()
            self.live.phase = before

    def end_step(self) -> None:
        pass


class _Trainer(Trainer):
    def _agreed_fields(self) -> tuple[Field, ...]:
        # In a run the ranks agree on them by communicating values, of which there are none here.
        return tuple(sorted(self._step.terms.sums))


class TracedStep:
    """One rank's model and trainer on a mesh, watched by `live`. `skipped`: blocks replaced by the
    identity."""

    def __init__(
        self, config: Config, mesh: Mesh, device: torch.device, skipped: Sequence[int] = ()
    ) -> None:
        self.mesh, self.live = mesh, LiveBytes(device.type)
        config = replace(
            config, parallel=replace(config.parallel, verify=False, symmetric_memory=False)
        )
        self.compiled = build.compile_choice(config, mesh.layout, device).compiles
        with _few_blocks(skipped):
            self.model = build.build_model(config, mesh, device)
        self.optimizer = Optimizer(self.model, config.optimizer, mesh, 1000)
        task = "language" if "vocab_size" in config.model.keys else "classification"
        timer = _Phases(self.live)
        self.trainer = _Trainer(
            self.model, self.optimizer, config, mesh, device, task=task, timer=timer
        )
        count = microbatches(
            config.batch.sizes.largest, config.batch.micro_size, mesh.size(*DATA_AXES)
        )
        self.microbatches = [prepared_batch(config, mesh)] * count
        self.first_microbatches = (
            self.microbatches
            if config.pipeline.schedule.endswith(".csv")
            else self.microbatches[:2]
        )
        routed = self.microbatches[0].targets.numel() * config.model.keys.get(
            "num_experts_per_tok", 1
        )
        self.live.rows = routed // mesh.size("tp")
        self._mark_blocks(alike(config))
        if isinstance(self.model, Pipeline) and device.type == "meta":
            self._tell_shapes(config)

    def trace(self) -> RankTrace:
        """Traces three steps: the first, of few microbatches, creates lasting state (optimizer
        states, copies), the second finds the peaks, and the third looks at the parts of memory at
        each peak."""
        live, moments = self.live, dict[str, dict[str, int]]()

        def look(moment: str) -> None:
            with torch_private.without_dispatch_modes():
                moments[moment] = live.parts(self.owners())

        with watched(live):
            for parameter in self.model.parameters():
                live.see(to_local(parameter.detach()))
            for step, microbatches in enumerate(
                (self.first_microbatches, self.microbatches, self.microbatches)
            ):
                # reference cycles, the compiler's too, would hold memory until some later
                # collection
                gc.collect()
                if step == 2:
                    live.actions = {
                        count: partial(look, moment) for moment, (_, count, _) in live.peaks.items()
                    }
                peaks, live.peaks, live.count = live.peaks, {}, 0
                self.trainer.forward_backward(1, microbatches)
                self.trainer.optimizer_step(1)
            for counted in (live.peaks, peaks) if len(peaks) > 1 else ():
                counted.pop(" ", None)  # between phases the host computes with tensors of its own
            assert live.peaks == peaks  # every step allocates alike
        gc.collect()
        moment = max(peaks, key=lambda moment: peaks[moment][0])
        peak, _, words = peaks[moment]
        resident, sent = live.parts(self.owners()), self.mesh.comm_bytes.by_axis()
        moments = {moment: parts for moment, parts in moments.items() if moment in peaks}
        return RankTrace(resident, moments[moment], peak, words, sent, self.compiled, moments)

    def owners(self) -> dict[int, str]:
        """Storage -> its part of memory, for the long-lived tensors of this rank's model and
        optimizer."""
        owners: dict[int, str] = {}

        def own(part: str, *tensors: Tensor | None) -> None:
            parts = (getattr(x, "_local_tensor", x) for x in tensors if x is not None)
            owners.update({x.untyped_storage()._cdata: part for x in parts})

        own("weights", *self.model.parameters())
        for module in self.model.modules():
            for sync in gradient_syncs(module):
                if isinstance(sync, ComputeCopies):
                    own("16-bit copies", *(copy.values for copy in sync._copies.values()))
            unit = (
                module._get_fsdp_state()._fsdp_param_group
                if isinstance(module, FSDPModule)
                else None
            )
            for p in unit.fsdp_params if unit is not None else ():
                own("gathered weights", *p.all_gather_outputs, getattr(p, "_unsharded_param", None))
                own(
                    "gradients",
                    p.unsharded_accumulated_grad,
                    getattr(getattr(p, "_unsharded_param", None), "grad", None),
                )
                own("weights", p._sharded_param_data, p.sharded_param)
        for own_part in self.optimizer._parameters:
            own("optimizer state", *own_part.state.values())
            own("gradients", own_part.parameter.grad)
            own("weights", own_part.local)
        return owners

    def _mark_blocks(self, first: Sequence[int]) -> None:
        """Attributes new storages to activations inside of a block's forward and backward, and to
        the model's ends (embedding, logits, loss) outside."""
        for i, stage in enumerate(
            self.model.stages() if isinstance(self.model, Pipeline) else [self.model]
        ):
            names = {module: name for name, module in stage.named_modules()}
            own = [
                (block, n)
                for block, n in zip(blocks_of(stage), first, strict=True)
                if _is_own(block)
            ]
            for (block, _), place in zip(own, _places([n for _, n in own]), strict=True):
                block.forward = self.marks(names[block], block.forward, f"{i}: {place}")

    def marks(self, name: str, forward: Callable[..., Any], place: str) -> Callable[..., Any]:
        def enter(block: str) -> None:
            self.live.part, self.live.block, self.live.place = (
                ("activations", block, place) if block else (ENDS, "", "")
            )

        def run(*args: Any, **kwargs: Any) -> Any:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: enter(""))
            enter(name)
            output = forward(*args, **kwargs)
            enter("")
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: enter(name))
            return output

        return run

    def _tell_shapes(self, config: Config) -> None:
        """Gives the pipeline the shapes between stages, which a run exchanges before its first
        messages; found by a forward with one block of each kind."""
        options = replace(
            build.options_of(config, self.mesh.layout, META), recompute="none", compile=False
        )
        first, made = alike(config), list[TensorMeta]()
        with _few_blocks(repeated(first)):
            model = build.build_stage(config, self.mesh, META, options)
        for block in blocks_of(model):
            block.register_forward_hook(
                lambda block, inputs, output: made.append(TensorMeta.of(output))
            )
        batch = self.microbatches[0].to(META, self.trainer.dtype)
        set_dropout(model, seed=0, step=0, samples=range(len(batch.targets)))
        with torch.no_grad():
            model(*batch.inputs)
        key = shapes_of(self.microbatches[0].inputs)
        for stage, (_, end) in enumerate(
            build.stages_of(config, self.mesh.layout)[1].bounds[:-1], 1
        ):
            self.model._transfers._metas[key, stage] = made[first[end - 1]]  # type: ignore[union-attr,operator,assignment]


def _few_blocks(skipped: Sequence[int]) -> AbstractContextManager[Any]:
    """Context in which models are built without these blocks. Block costs are dummies, as the split
    is given."""
    if not skipped:
        return nullcontext()
    of_few: dict[str, Any] = {
        "spec_of": lambda config: without(spec_of(config), skipped),
        "block_costs": lambda spec, seq_len: [1.0] * len(blocks_of(spec.meta)),
    }
    return patch.multiple(build, **of_few)


def _is_own(block: nn.Module) -> bool:
    return not isinstance(block, OtherStageBlock)


def _places(kinds: Sequence[int]) -> Iterator[str]:
    """Yields each block's place in its stage: the first of its kind, the last, or in the middle.
    The words stay the same when a stage has one more block of a kind, so that traces of both can be
    compared."""
    names = list(dict.fromkeys(kinds))
    for i, kind in enumerate(kinds):
        place = "first" if kind not in kinds[:i] else "middle" if kind in kinds[i + 1 :] else "last"
        yield f"{place} of kind {names.index(kind)}"


def prepared_batch(config: Config, mesh: Mesh) -> Batch:
    """A microbatch of one rank as the run's data loaders yield it."""
    batch = batch_of(config)
    return context_parallel(config, mesh).shard(batch) if mesh.size("cp") > 1 else batch


def trace_rank(
    config: Config,
    layout: Layout,
    rank: int,
    skipped: Sequence[int] = (),
    *,
    device_type: str = "cuda",
) -> RankTrace:
    """Traces a rank. `skipped`: blocks replaced by the identity. Raises UntracedError."""
    gc.freeze()  # the trace's collections need not visit objects that exist already
    try:
        with untraced_errors(), fake_world(layout, rank, device_type) as mesh:
            return TracedStep(config, mesh, META, skipped).trace()
    finally:
        gc.unfreeze()
