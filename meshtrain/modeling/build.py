"""Builds the model of the YAML's model section, distributed over the mesh and initialized."""

from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshtrain.checkpoint.weights import open_weights
from meshtrain.config import spec_of
from meshtrain.config.model_spec import ModelSpec
from meshtrain.data.batch import Samples
from meshtrain.data.order import microbatches
from meshtrain.data.sequence import padded_length
from meshtrain.errors import AgreedError, InputError, join_some
from meshtrain.huggingface.adapter import check_scale
from meshtrain.huggingface.load import check_weights, load_weights
from meshtrain.huggingface.stored_names import is_weight, table_of
from meshtrain.layout import DATA_AXES, LOSS_AXES, Layout
from meshtrain.loss import seen_terms
from meshtrain.mesh import Mesh
from meshtrain.modeling.flops import block_flops
from meshtrain.modeling.init import initialise, materialise
from meshtrain.parallel.collectives import Waiting
from meshtrain.parallel.compile import CompileChoice, choose_compile
from meshtrain.parallel.expert import apply_expert_parallel
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.lora import INIT_PLAN, idle_adapters, is_adapter
from meshtrain.parallel.linear.weight_grad import WeightGradQueue
from meshtrain.parallel.linear_cross_entropy import can_fuse, gives_logits
from meshtrain.parallel.mixed_precision import (
    cast,
    compute_dtype,
    master_dtype,
    random_state,
    reseed,
    state_parameters,
)
from meshtrain.parallel.parallelize import (
    ParallelOptions,
    apply_context_parallel,
    apply_data_parallel,
    apply_tensor_parallel,
    broadcast_parameters,
    refuse_dependent_samples,
    shares_sequence,
)
from meshtrain.parallel.sync_batch_norm import apply_sync_batch_norm
from meshtrain.parallel.torch_private import has_gradient_hooks, writes_to_parameter
from meshtrain.pipeline.actions import Kind, Schedule
from meshtrain.pipeline.engine import Pipeline
from meshtrain.pipeline.partition import StageSplit, split_blocks
from meshtrain.pipeline.probe import blocks_used_outside, check_forward
from meshtrain.pipeline.schedule import load
from meshtrain.pipeline.stage import Skipped, blocks_of, keep_stage, stages_of_parameter

if TYPE_CHECKING:
    from meshtrain.config import Config
    from meshtrain.data import OpenData


def plain_model(config: "Config") -> nn.Module:
    """A config's model on the meta device, where it has shapes and no memory."""
    return spec_of(config).copy()


def outputs(config: "Config") -> int | None:
    """The number of classes or vocabulary entries of a config's model; None if its keys do not
    say."""
    keys = config.model.keys
    return keys.get("vocab_size", keys.get("num_classes"))


def build_model(
    config: "Config",
    mesh: Mesh,
    device: torch.device,
    waiting: Waiting = nullcontext,
    sample: tuple[Tensor | None, ...] | None = None,
    *,
    device_type: str | None = None,
) -> nn.Module:
    """A config's model, parallelized, on `device`, with initial values that depend on its seed and
    not on the layout. With `pp`: this rank's stages, as a `Pipeline`.

    Args:
        sample: see `ParallelOptions`.
        device_type: of the device that the meta device stands for, where a step is traced; None:
            `device` itself.
    """
    options = options_of(config, mesh.layout, device, waiting, sample, device_type=device_type)
    if mesh.size("pp") == 1:
        if mesh.uses_fsdp or compute_dtype(options.precision) != master_dtype(options.precision):
            options = replace(options, used_outside=_used_outside(config, sample, mesh.uses_fsdp))
        return build_stage(config, mesh, device, options)
    schedule, split = stages_of(config, mesh.layout)
    numbers = schedule.stages_of(mesh.index("pp"))
    splits_backward = any(
        action.kind is Kind.WEIGHT_GRAD for action in schedule.actions_of(mesh.index("pp"))
    )
    # A compiled block computes all its gradients at once, and reductions over data ranks overlap an
    # undivided backward.
    hands_on_first = numbers[-1] > 0 and not options.compile and mesh.size(*LOSS_AXES) == 1
    later = WeightGradQueue() if splits_backward or hands_on_first else None
    # Many microbatches are in flight at once: parameters freed between them would be gathered again
    # for each.
    options = replace(options, reshard_after_forward=False)
    stages: dict[int, nn.Module] = {}
    for number in numbers:
        stage = build_stage(
            config, mesh, device, options, split.bounds[number], later, verified=bool(stages)
        )
        stages[number] = stage
        # What the check of the first one has found out holds for all.
        options = replace(
            options, sequence_parallel=shares_sequence(stage, options.sequence_parallel)
        )
    holding = stages_of_parameter(spec_of(config).meta, split.bounds)
    about = describe_pipeline(schedule, split)
    pipeline = Pipeline(
        stages,
        schedule,
        mesh,
        device,
        parameter_stages=holding,
        weight_grads=later,
        waiting=waiting,
        about=about,
        schedule_of=lambda microbatches: load_schedule(config, mesh.layout, microbatches),
    )
    vars(pipeline)["shares_sequence"] = options.sequence_parallel
    return pipeline


def options_of(
    config: "Config",
    layout: Layout,
    device: torch.device,
    waiting: Waiting = nullcontext,
    sample: tuple[Tensor | None, ...] | None = None,
    *,
    device_type: str | None = None,
) -> ParallelOptions:
    """How a config's model is parallelized. `sample`: see `ParallelOptions`; `device_type`: see
    `build_model`."""
    # used by the layout, by the trainer, and decided here
    others = (
        "expert_parallel",
        "expert_rows",
        "compile",
    )
    keys = {key: value for key, value in vars(config.parallel).items() if key not in others}
    keys |= {"precision": config.train.precision, "linear_precision": config.train.linear_precision}
    compiles = compile_choice(config, layout, device, device_type).compiles
    traced = device.type == "meta"
    return ParallelOptions(waiting=waiting, sample=sample, compile=compiles, trace=traced, **keys)


def compile_choice(
    config: "Config", layout: Layout, device: torch.device, device_type: str | None = None
) -> CompileChoice:
    """Whether the blocks of a run are compiled: the same on all ranks if their machines are of one
    kind. `device_type`: see `build_model`."""
    splits_backward = layout.size("pp") > 1 and schedule_of(config, layout).splits_backward
    setting = config.parallel.compile
    if device_type is None:
        return choose_compile(setting, device, splits_backward)
    return choose_compile(setting, torch.device(device_type), splits_backward, has_tools=True)


def schedule_of(config: "Config", layout: Layout) -> Schedule:
    """The pipeline schedule; where the batch size changes during the run, that of the largest
    batch."""
    batch = config.batch
    return load_schedule(
        config, layout, microbatches(batch.sizes.largest, batch.micro_size, layout.size(*DATA_AXES))
    )


def load_schedule(config: "Config", layout: Layout, microbatches: int) -> Schedule:
    section, ranks = config.pipeline, layout.size("pp")
    return load(
        section.schedule,
        ranks=ranks,
        microbatches=microbatches,
        stages_per_rank=section.stages_per_rank,
    )


def stages_of(config: "Config", layout: Layout) -> tuple[Schedule, StageSplit]:
    """The schedule of a config, and the split of the model's blocks into stages."""
    costs, schedule = block_costs(spec_of(config), config.data.seq_len), schedule_of(config, layout)
    return schedule, split_blocks(
        costs, schedule.ranks, schedule.stages_per_rank, config.pipeline.split
    )


@lru_cache(maxsize=8)
def block_costs(spec: ModelSpec, seq_len: int) -> tuple[float, ...]:
    """The forward FLOPs of each block of a model for one sample."""
    tokens = torch.zeros(1, seq_len, dtype=torch.int64)
    return tuple(
        block_flops(spec.meta, blocks_of(spec.meta), (tokens, torch.zeros_like(tokens), None))[0]
    )


def check_stages(
    config: "Config", split: StageSplit, inputs: Sequence[Tensor | None] | None = None
) -> None:
    """Raises InputError: the stages would compute something other than the whole model. `inputs`:
    the model's inputs for a microbatch; None: not known yet; then only a language model is checked:
    its inputs follow from the config."""
    if inputs is None and "vocab_size" in config.model.keys:
        tokens = torch.empty(
            config.batch.micro_size, config.data.seq_len, dtype=torch.int64, device="meta"
        )
        inputs = tokens, tokens, None
    if inputs is not None:
        check_forward(
            plain_model(config), split.bounds, inputs, compute_dtype(config.train.precision)
        )


def describe_pipeline(schedule: Schedule, split: StageSplit) -> str:
    """`pipeline 1f1b, 8 microbatches; 9 blocks in 4 stages: 3 + 2 + 2 + 2, the largest stage 8 %
    above the mean`."""
    many = f"{schedule.microbatches} microbatch{'es' * (schedule.microbatches != 1)}"
    return f"pipeline {schedule.name}, {many}; {split.describe()}"


def build_stage(
    config: "Config",
    mesh: Mesh,
    device: torch.device,
    options: ParallelOptions,
    blocks: tuple[int, int] | None = None,
    later: WeightGradQueue | None = None,
    verified: bool = False,
) -> nn.Module:
    """The whole model or a stage of it, parallelized and initialized. A model file with an
    `init_plan` is built on the meta device, so that no rank holds more than its part; any other,
    and one with buffers and the like (`_only_made`), is built whole on every rank from the seed.
    `blocks`: the stage's first block and the one after its last; None: all blocks. `verified`:
    another stage has already verified the model."""
    spec = spec_of(config)
    plan = getattr(spec.module, "init_plan", None)
    traced = device.type == "meta"  # tensors have no values
    whole = not traced and (plan is None or _only_made(spec.meta))

    def give_values() -> None:
        if traced:
            return
        if not whole:
            materialise(model, device)
        names: Container[str] | None = None
        if config.model.weights is not None:
            with open_weights(config.model.weights) as source:
                names = load_weights(model, source, spec.meta)
        if whole:  # the constructor has initialized the others
            adapters = [name for name, _ in model.named_parameters() if is_adapter(name)]
            names = adapters if names is None else [name for name in adapters if name in names]
        std = getattr(spec.config, "initializer_range", 0.02)
        initialise(
            model, {**INIT_PLAN, **(plan or {})}, seed=config.train.seed, std=std, names=names
        )

    if whole:
        restore = random_state()
        reseed(config.train.seed, 0, 0)  # also numpy and Python
        torch.manual_seed(config.train.seed)
        model = spec.tuned(spec.module.Model(spec.config).to(device))
        restore()
    else:
        model = spec.copy()
    broadcast_parameters(model, mesh)
    cast(model, master_dtype(options.precision))
    if options.sync_batch_norm:
        apply_sync_batch_norm(model, mesh)
    if not verified:
        refuse_dependent_samples(model, mesh, options, seen_terms)
    apply_context_parallel(model, mesh, options, verified=verified)
    options = apply_tensor_parallel(model, mesh, options, verified=verified)
    apply_expert_parallel(model, mesh, options)
    if blocks is not None:
        keep_stage(model, *blocks)
    if later is not None:
        use_products(model, queue=later)
    if not mesh.uses_fsdp:
        give_values()
    apply_data_parallel(model, mesh, replace(options, fuse_loss=has_loss_head(model, config)))
    if mesh.uses_fsdp:  # FSDP shards a model that has no memory yet
        give_values()
    return model


def _used_outside(
    config: "Config", sample: tuple[Tensor | None, ...] | None, fsdp: bool
) -> list[str]:
    """See `ParallelOptions`. Raises AgreedError: a forward writes to a parameter, of which FSDP
    gathers only a copy."""
    if sample is None and "vocab_size" in config.model.keys:
        tokens = torch.empty(1, config.data.seq_len, dtype=torch.int64, device="meta")
        sample = tokens, tokens, None
    if sample is None:
        return []
    model = plain_model(config)
    blocks, written = blocks_used_outside(model, sample)
    written = [name for name in written if model.get_parameter(name) not in state_parameters(model)]
    if fsdp and written:
        raise AgreedError(writes_to_parameter(written[0]))
    return blocks


def _only_made(model: nn.Module) -> bool:
    """Whether a model has parts that only its constructor creates: buffers, tensors in attributes,
    parameter hooks."""
    attributes = [
        value for module in model.modules() for key, value in vars(module).items() if key[0] != "_"
    ]
    tensors = any(isinstance(value, Tensor) for value in tree_leaves(attributes))
    return (
        tensors
        or any(True for _ in model.buffers())
        or any(map(has_gradient_hooks, model.parameters()))
    )


def has_loss_head(model: nn.Module, config: "Config") -> bool:
    """Whether the last block of a model or stage is the linear layer whose output is, unchanged,
    the logits of a language model. False for a model that does not run on the meta device, or that
    changes its logits."""
    if not can_fuse(blocks_of(model)[-1]) or "vocab_size" not in config.model.keys:
        return False
    plain = cast(plain_model(config), compute_dtype(config.train.precision))
    *others, layer = blocks_of(plain)
    for block in others[1:]:  # their outputs do not matter, and computing them takes seconds
        block.forward = Skipped(block)
    tokens = torch.zeros(1, config.data.seq_len, dtype=torch.int64, device="meta")
    return can_fuse(layer) and gives_logits(plain, layer, (tokens, torch.zeros_like(tokens), None))


def check_start(
    config: "Config",
    layout: Layout | None = None,
    data: Samples | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Reads headers or a manifest, and the first sample; reports weights that are not read. Raises
    InputError: the initial weights do not fit the model, `pp` cannot split the model, or an adapter
    would have no effect."""
    if layout is not None:
        check_gradient_hooks(config, layout)
    if layout is not None and data is not None and layout.size("pp") > 1:
        samples = data.read([(0, 0)] * config.batch.micro_size, config.batch.micro_size)
        check_stages(config, stages_of(config, layout)[1], samples.batch().inputs)
    inputs = (
        () if config.train.lora is None or data is None else data.read([(0, 0)], 1).batch().inputs
    )
    if inputs and (idle := idle_adapters(spec_of(config).meta, inputs)):
        raise InputError(
            f"train.lora: the model's forward does not call {join_some(idle)}, so adapters there "
            "would do nothing: "
            "call the layer in the place of using its weight, or give train.lora.match patterns of "
            "the others"
        )
    start = config.model.weights
    if start is not None:
        with open_weights(start) as source:
            check_weights(spec_of(config).meta, source, config.model.keys, say)
            check_scale(source, config.train.lora)


def check_gradient_hooks(config: "Config", layout: Layout) -> None:
    """A hook on a parameter's gradient acts on that of one microbatch, which are the same samples
    on every layout whose ranks have whole microbatches. Raises InputError: these would be
    others."""
    names = [name for name, p in spec_of(config).meta.named_parameters() if has_gradient_hooks(p)]
    ranks = layout.size("dp_replicate")  # the others refuse every hook
    whole = config.batch.micro_size * ranks
    if names and ranks > 1 and any(size % whole for size in config.batch.sizes.sizes):
        raise InputError(
            f"the parameter {names[0]} has a hook on its gradient, which acts on that of one "
            "microbatch, and "
            f"batch.global_size {config.batch.global_size} is no multiple of batch.micro_size "
            "times the "
            f"{ranks} data ranks, {whole}: microbatches would have other samples than on one "
            f"process. Use a multiple of {whole}, one data rank, or optimizer.clip_norm in the "
            "place of the hook"
        )


def short_sample(
    data: "OpenData", model: nn.Module, cp: int, tp: int
) -> tuple[Tensor | None, ...] | None:
    """Two samples to verify a model with, text truncated to a length that splits evenly; with `cp`
    None if too short.

    What a model computes between distant tokens, or of rare ones, shows only in a long sample. In
    that of a model with experts, some token's scores would be so close that rounding chooses other
    experts."""
    batch = data.train.read([(0, 0), (0, len(data.train) - 1)], 2).batch()
    routes = any(hasattr(module, "dispatch") for module in model.modules())
    parts, least = padded_length(1, cp, tp) if cp > 1 else tp, 32 if routes else 128
    length = parts * max(2, -(-least // parts))
    if cp > 1 or length > batch.targets.shape[-1] >= parts:
        length = min(length, batch.targets.shape[-1] // parts * parts)
    inputs = batch.along_sequence(lambda x, dim: x.narrow(dim, 0, min(length, x.shape[dim]))).inputs
    return inputs if length > 0 else None


def parameter_count(model: nn.Module) -> int:
    """The number of a model's parameters that are weights stored in files, tied ones counted
    once."""
    table = table_of(type(model))
    return sum(p.numel() for name, p in model.named_parameters() if is_weight(name, table))
