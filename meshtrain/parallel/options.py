"""How a model is parallelized: the options of `parallelize`, and what they and the model's file
together say about its splits."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from meshtrain.errors import InputError, any_of
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import MeasuredWait
from meshtrain.parallel.context import ContextParallel
from meshtrain.parallel.host_link import HostLink
from meshtrain.parallel.tensor_parallel import TensorParallel
from meshtrain.parallel.tp_plan import (
    NO_SEQUENCE,
    has_sequence_parts,
    plan_of,
    plan_splits_sequence,
    split_layers,
)
from meshtrain.pipeline.partition import blocks_of

OFFLOADS = ("none", "optimizer", "activations", "both")


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How a model is parallelized over a mesh; only `precision` and `linear_precision` affect the
    results."""

    # Compute dtype of blocks: "float32", "float64", "bfloat16" or "float16".
    precision: str = "float32"
    # That of linear layers inside blocks: "float8"; see `linear/float8.py`.
    linear_precision: str | None = None
    # Dtype of gradient sums over data ranks; None: the dtype of gradients.
    reduce_precision: str | None = None

    # How layers are split over `tp`; None: the plan in the model's file.
    tp_plan: Mapping[str, str] | None = None
    # Ranks of `tp` have parts of the sequence between these layers; None: if an
    # `embedding_rowwise_sequence` layer is in the plan.
    sequence_parallel: bool | None = None
    # Tensor-parallel layers save their part of an input and gather it again in backward.
    regather: bool = False
    # Fuses products with their gather or scatter; "auto": if the GPUs of `tp` are linked by NVLink.
    # True: also puts FSDP's messages in registered memory.
    symmetric_memory: bool | Literal["auto"] = False

    # Modules that mix tokens; None: the plan in the model's file.
    cp_plan: Mapping[str, str] | None = None
    # How keys and values are exchanged over `cp`: "gather" or "ring".
    context: str = "gather"
    # Neighbours on `cp` that split heads instead; None: the layout's.
    context_heads: int | None = None

    # Modules that hold experts; None: the plan in the model's file.
    ep_plan: Mapping[str, str] | None = None

    # What waits in the host's memory: "none"; "activations": what blocks save for their backward;
    # "optimizer": the states of `meshtrain.optim.Optimizer`; "both".
    offload: str = "none"
    # What blocks recompute in backward, from the first trained block on (`checkpoint_block`).
    recompute: str = "none"
    # Compiles each block with torch.compile.
    compile: bool = False
    # The last block returns the loss if it is requested and the block can
    # (`linear_cross_entropy.py`). It has to return the logits as the model's output.
    fuse_loss: bool = False

    # See `fsdp.apply_fsdp`.
    reshard_after_forward: bool = True
    # Blocks whose parameters are used outside of them: gathered and cast with the model.
    used_outside: Collection[str] = ()
    # Batch norms compute with the samples of all data ranks (`sync_batch_norm.py`).
    sync_batch_norm: bool = False
    # ZeRO-1 (`ddp.py`); only for `meshtrain.optim.Optimizer`.
    shard_optimizer: bool = False

    # Compares the parallelized model with the plain one before its first step (`verify/`), and
    # refuses a first forward with side effects. "auto": a model that is not one of meshtrain's own.
    verify: bool | Literal["auto"] = "auto"
    # For that: the arguments of `model(*sample)`, a few short samples, equal on all ranks of `tp`;
    # None: made up.
    sample: Sequence[Tensor | None] | None = None

    # A context manager entered wherever this rank waits for others, to measure it.
    measured_wait: MeasuredWait = nullcontext
    # The copies of `offload`; all stages of a rank share them.
    host_link: HostLink = field(default_factory=HostLink, compare=False)
    # The model is traced on the meta device: no memory is allocated, no values are compared, and
    # the loss head is fused without compiling.
    trace: bool = False

    def __post_init__(self) -> None:
        if self.offload not in OFFLOADS:
            raise InputError(f"offload is {self.offload!r}: expected {any_of(OFFLOADS)}")

    @property
    def offloads_activations(self) -> bool:
        return self.offload in ("activations", "both")

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload in ("optimizer", "both")


def block_names(model: nn.Module) -> list[str]:
    """Names of the modules in `blocks()`, each once; none for a model that is one block."""
    name_of = {module: name for name, module in model.named_modules()}
    return [name_of[block] for block in dict.fromkeys(blocks_of(model)) if block is not model]


def tensor_parallel_of(
    model: nn.Module, mesh: Mesh, options: ParallelOptions
) -> TensorParallel | None:
    """How a plain model is split over `tp`; None: `tp` has one rank.

    Raises InputError: the model has no plan, the plan does not fit it, or does not split the
    sequence as the options want it.
    """
    if mesh.size("tp") == 1:
        return None
    plan = plan_of(model, "tp_plan", options.tp_plan)
    if plan is None:
        raise InputError(
            f"{type(model).__name__} has no tp_plan, which says how its layers split: use tp: 1, "
            "or give one"
        )
    splits = split_layers(model, plan, mesh.size("tp"))
    sequence_parallel = has_sequence_parts(options.sequence_parallel, plan)
    if sequence_parallel and not plan_splits_sequence(plan):
        raise InputError(
            f"sequence_parallel: {NO_SEQUENCE}: leave it out, or use sequence_parallel: false"
        )
    return TensorParallel(mesh, plan, splits, sequence_parallel, options.regather)


def context_parallel_of(mesh: Mesh, options: ParallelOptions) -> ContextParallel:
    """How sequences are split over `cp`."""
    heads = options.context_heads
    if heads is None:
        heads = mesh.layout.context_heads
    return ContextParallel(mesh, method=options.context, heads=heads, sequence_parallel=False)
