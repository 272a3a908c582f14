"""Builds the model of the YAML's model section, distributed over the mesh and initialized."""

import math
import warnings
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from meshtrain.checkpoint.weights import open_weights
from meshtrain.config import spec_of
from meshtrain.config.model_spec import ModelSpec
from meshtrain.data.batch import Samples
from meshtrain.data.order import microbatches
from meshtrain.data.sequence import padded_length
from meshtrain.errors import InputError, bytes_text
from meshtrain.huggingface.adapter import check_scale
from meshtrain.huggingface.load import check_weights, load_weights
from meshtrain.huggingface.stored_names import is_weight, table_of
from meshtrain.layout import DATA_AXES, LOSS_AXES, Layout
from meshtrain.loss import seen_terms
from meshtrain.mesh import Mesh
from meshtrain.modeling.flops import block_flops
from meshtrain.modeling.init import fill, initialise, materialise
from meshtrain.modeling.kinds import known_blocks, repeated, without
from meshtrain.objective import CrossEntropy, Objective, OwnLoss
from meshtrain.parallel.collectives import MeasuredWait
from meshtrain.parallel.compile import CompileChoice, choose_compile
from meshtrain.parallel.deferred_init import FirstValues, NotDeferredError, construct
from meshtrain.parallel.expert import apply_expert_parallel
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.lora import INIT_PLAN, is_adapter
from meshtrain.parallel.linear.weight_grad import WeightGradQueue
from meshtrain.parallel.mixed_precision import compute_dtype, random_state, reseed
from meshtrain.parallel.options import ParallelOptions
from meshtrain.parallel.parallelize import (
    apply_data_parallel,
    apply_tensor_parallel,
    has_sequence_part,
    prepare,
)
from meshtrain.parallel.predictions import depths_of
from meshtrain.parallel.torch_private import apply_to_tensors, has_gradient_hooks, tree_leaves
from meshtrain.parallel.verify import Moment, Subject, check_model, needs_sample
from meshtrain.pipeline.actions import Kind, Schedule
from meshtrain.pipeline.engine import Pipeline
from meshtrain.pipeline.partition import StageSplit, split_blocks
from meshtrain.pipeline.probe import Whole, outline_of, run_whole
from meshtrain.pipeline.schedule import load
from meshtrain.pipeline.stage import Outline, blocks_of, keep_stage, stages_of_parameter

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


def objective_of(config: "Config", task: str, mesh: Mesh | None = None) -> Objective:
    """What a run minimizes: the loss that its model's file defines, or the cross entropy. `task`:
    of `OpenData`; `mesh`: on which sequences are split."""
    own = spec_of(config).loss
    counts_correct = task == "classification"
    if own is None:
        return CrossEntropy(counts_correct)
    is_double = compute_dtype(config.train.precision) == torch.float64
    return OwnLoss(
        own.loss,
        own.weight,
        dtype=torch.float64 if is_double else torch.float32,
        first_part=mesh is None or mesh.index("cp") == 0,
        counts_correct=counts_correct,
        over_whole_samples=own.over_whole_samples,
    )


def build_model(
    config: "Config",
    mesh: Mesh,
    device: torch.device,
    measured_wait: MeasuredWait = nullcontext,
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
    options = options_of(
        config, mesh.layout, device, measured_wait, sample, device_type=device_type
    )
    plain = unsplit_model(config, mesh, device, options)
    options = judge(config, mesh, options, plain.model)
    if mesh.size("pp") == 1:
        return build_stage(config, mesh, device, options, plain=plain)
    return _build_pipeline(config, mesh, device, options, plain)


def judge(
    config: "Config", mesh: Mesh, options: ParallelOptions, model: nn.Module
) -> ParallelOptions:
    """The options of a run, with what the checks of its plain model have found out. Raises
    InputError: the layout would change what it computes."""
    subject = Subject(
        model=model,
        layout=mesh.layout,
        mesh=mesh,
        options=options,
        copy=partial(plain_model, config),
        inputs=_token_inputs(config, samples=1),
        # A loss of the user's own takes logits, which a head that computes the loss does not make.
        is_language_model=_is_language_model(config) and spec_of(config).loss is None,
        packs_documents=config.data.mask_documents,
        terms=seen_terms,
    )
    return check_model(Moment.PLAIN, subject)


def _build_pipeline(
    config: "Config",
    mesh: Mesh,
    device: torch.device,
    options: ParallelOptions,
    plain: "PlainModel",
) -> Pipeline:
    """This rank's stages. `plain`: the whole model, of which the first is made."""
    schedule, split = stages_of(config, mesh.layout)
    whole: PlainModel | None = plain

    def make_stage(cut: Cut, options: ParallelOptions, later: WeightGradQueue | None) -> nn.Module:
        nonlocal whole
        plain, whole = whole, None  # each further stage is cut from a model of its own
        return build_stage(config, mesh, device, options, cut, later, plain=plain)

    return assemble_pipeline(
        make_stage,
        spec_of(config).meta,
        mesh,
        device,
        options,
        schedule=schedule,
        split=split,
        outline=outline_of_model(config, options.sample),
        schedule_of=partial(load_schedule, config, mesh.layout),
    )


def assemble_pipeline(
    make_stage: "Callable[[Cut, ParallelOptions, WeightGradQueue | None], nn.Module]",
    whole: nn.Module,
    mesh: Mesh,
    device: torch.device,
    options: ParallelOptions,
    *,
    schedule: Schedule,
    split: StageSplit,
    outline: Outline,
    schedule_of: Callable[[int], Schedule],
) -> Pipeline:
    """This rank's stages as a `Pipeline`.

    Args:
        make_stage: makes a parallelized stage, with a queue where weight gradients wait that a
            schedule computes later.
        whole: the whole model, which is only looked at.
        schedule_of: number of microbatches -> the same schedule for as many.
    """
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
    parameter_stages = stages_of_parameter(whole, split.bounds, outline)
    stages = {
        number: make_stage(Cut(*split.bounds[number], outline), options, later)
        for number in numbers
    }
    pipeline = Pipeline(
        stages,
        schedule,
        mesh,
        device,
        parameter_stages=parameter_stages,
        weight_grads=later,
        measured_wait=options.measured_wait,
        about=describe_pipeline(schedule, split),
        schedule_of=schedule_of,
    )
    vars(pipeline)["has_sequence_part"] = has_sequence_part(
        stages[numbers[0]], options.sequence_parallel
    )
    return pipeline


def options_of(
    config: "Config",
    layout: Layout,
    device: torch.device,
    measured_wait: MeasuredWait = nullcontext,
    sample: tuple[Tensor | None, ...] | None = None,
    *,
    device_type: str | None = None,
) -> ParallelOptions:
    """How a config's model is parallelized. `sample`: see `ParallelOptions`; `device_type`: see
    `build_model`."""
    keys = dict(vars(config.parallel))
    del keys["expert_parallel"]  # the layout has it
    del keys["expert_rows"]  # the trainer has it
    keys["compile"] = compile_choice(config, layout, device, device_type).compiles
    return ParallelOptions(
        **keys,
        precision=config.train.precision,
        linear_precision=config.train.linear_precision,
        measured_wait=measured_wait,
        sample=sample,
        trace=device.type == "meta",
    )


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
    data_ranks = layout.size(*DATA_AXES)
    largest = microbatches(batch.sizes.largest, batch.micro_size, data_ranks)
    return load_schedule(config, layout, largest)


def load_schedule(config: "Config", layout: Layout, microbatches: int) -> Schedule:
    return load(
        config.pipeline.schedule,
        ranks=layout.size("pp"),
        microbatches=microbatches,
        stages_per_rank=config.pipeline.stages_per_rank,
    )


def stages_of(config: "Config", layout: Layout) -> tuple[Schedule, StageSplit]:
    """The schedule of a config, and the split of the model's blocks into stages."""
    schedule = schedule_of(config, layout)
    costs = block_costs(spec_of(config), config.data.seq_len)
    split = split_blocks(costs, schedule.ranks, schedule.stages_per_rank, config.pipeline.split)
    return schedule, split


@lru_cache(maxsize=8)
def block_costs(spec: ModelSpec, seq_len: int) -> tuple[float, ...]:
    """The forward FLOPs of each block of a model for one sample. Of blocks that are alike one is
    counted."""
    # For each block, the first one that is like it.
    first: Sequence[int] = range(len(blocks_of(spec.meta)))
    if "vocab_size" in spec.keys:
        first = known_blocks(spec, seq_len, mask_documents=False).first
        spec = without(spec, repeated(first))

    tokens = torch.zeros(1, seq_len, dtype=torch.int64)
    positions = torch.zeros_like(tokens)
    costs, _ = block_flops(spec.meta, blocks_of(spec.meta), (tokens, positions, None))
    return tuple(costs[block] for block in first)


def outline_of_model(config: "Config", sample: Sequence[Tensor | None] | None = None) -> Outline:
    """Where the forward of a config's model uses what. `sample`: inputs of a model whose config
    does not tell them; None: not known. Raises InputError: stages cannot be made of it."""
    spec = spec_of(config)
    inputs = _stage_inputs(config) or sample
    if inputs is None:
        return outline_of(spec.copy(), None)
    return _whole_forward(spec, inputs).outline


def _stage_inputs(config: "Config") -> tuple[Tensor | None, ...] | None:
    # Two samples or more: batch norm in training refuses a single value per channel.
    return _inputs_of(config, samples=max(2, config.batch.micro_size))


def _whole_forward(spec: ModelSpec, inputs: Sequence[Tensor | None]) -> Whole:
    """What a forward of a model shows; it is run once for inputs of these shapes."""
    shapes = tuple(None if x is None else (tuple(x.shape), x.dtype) for x in inputs)
    return _known_forward(spec, shapes)


@lru_cache(maxsize=8)
def _known_forward(
    spec: ModelSpec, inputs: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
) -> Whole:
    return run_whole(
        spec.copy(),
        [None if x is None else torch.empty(x[0], dtype=x[1], device="meta") for x in inputs],
    )


def check_stages(config: "Config", split: StageSplit) -> None:
    """Raises InputError: the stages of a model whose inputs follow from the config would compute
    something other than the whole model. Others are looked at by `check_start`."""
    inputs = _stage_inputs(config)
    check_model(Moment.START, _before_start(config, config.resolved, split, inputs))


def _before_start(
    config: "Config",
    layout: Layout | None,
    split: StageSplit | None,
    inputs: Sequence[Tensor | None] | None,
) -> Subject:
    """What is known of a run before its processes have met. Without a layout, and so without a
    split, only the model itself is judged."""
    return Subject(
        model=spec_of(config).meta,
        layout=layout or Layout({}),
        options=ParallelOptions(precision=config.train.precision),
        copy=partial(plain_model, config),
        inputs=inputs,
        bounds=() if split is None else split.bounds,
        micro_size=config.batch.micro_size,
        global_sizes=config.batch.sizes.sizes,
        whole=partial(_whole_forward, spec_of(config)),
    )


def _token_inputs(config: "Config", *, samples: int) -> tuple[Tensor | None, ...] | None:
    """The shapes of a language model's inputs (tokens, positions, documents), on the meta device;
    None: the inputs of another model are known from its data alone."""
    if not _is_language_model(config):
        return None
    tokens = torch.empty(samples, config.data.seq_len, dtype=torch.int64, device="meta")
    return tokens, torch.empty_like(tokens), None


def _inputs_of(config: "Config", *, samples: int) -> tuple[Tensor | None, ...] | None:
    """The shapes of a model's inputs, as far as its config tells them."""
    settings = spec_of(config).config
    channels, size = (getattr(settings, name, None) for name in ("in_channels", "image_size"))
    if _is_language_model(config) or not isinstance(channels, int) or not isinstance(size, int):
        return _token_inputs(config, samples=samples)
    return (torch.empty(samples, channels, size, size, device="meta"),)


def _is_language_model(config: "Config") -> bool:
    return "vocab_size" in config.model.keys


def describe_pipeline(schedule: Schedule, split: StageSplit) -> str:
    """`pipeline 1f1b, 8 microbatches; 9 blocks in 4 stages: 3 + 2 + 2 + 2, the largest stage 8 %
    above the mean`."""
    count = schedule.microbatches
    microbatches = "1 microbatch" if count == 1 else f"{count} microbatches"
    return f"pipeline {schedule.name}, {microbatches}; {split.describe()}"


class PlainModel(NamedTuple):
    """The whole plain model of a run, equal on all ranks."""

    model: nn.Module  # parameters on the meta device, unless it is built whole
    # What its constructor does to parameters; None: its `init_plan` says what they are, or it is
    # built whole.
    values: FirstValues | None = None
    is_whole: bool = False  # whether its parameters have the values of its constructor already


def unsplit_model(
    config: "Config", mesh: Mesh, device: torch.device, options: ParallelOptions
) -> PlainModel:
    """The whole plain model of a run, whose parameters get memory when they are split, so that no
    rank holds more than its part. Only a constructor that needs their values makes them at
    once."""
    spec = spec_of(config)
    has_plan = spec.plan("init_plan") is not None
    drawn_by_plan = has_plan and not _has_made_parts(spec.meta)
    if drawn_by_plan or device.type == "meta":  # a trace has no values
        plain = PlainModel(spec.copy())
    else:
        plain = _construct(config, mesh, device)
        if has_plan and plain.values is not None and not plain.values.others_depend:
            plain = plain._replace(values=None)
    prepare(plain.model, mesh, options)
    return plain


def _construct(config: "Config", mesh: Mesh, device: torch.device) -> PlainModel:
    """The model by its constructor, with the same random numbers on all ranks."""
    spec = spec_of(config)
    restore = random_state()
    try:
        reseed(config.train.seed, 0, 0)  # also numpy and Python
        model, values = construct(lambda: spec.module.Model(spec.config), config.train.seed)
        plain = PlainModel(spec.tuned(model), values)
    except NotDeferredError as error:
        if mesh.rank == 0 and mesh.layout.world_size > 1:
            size = sum(tensor.nbytes for tensor in (*spec.meta.parameters(), *spec.meta.buffers()))
            warnings.warn(
                f"each rank builds the whole model, {bytes_text(size)}, before it keeps its part, "
                f"because {error}",
                stacklevel=2,
            )
        reseed(config.train.seed, 0, 0)
        torch.manual_seed(config.train.seed)
        plain = PlainModel(spec.tuned(spec.module.Model(spec.config)), is_whole=True)
    finally:
        restore()
    apply_to_tensors(plain.model, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return plain


class Cut(NamedTuple):
    """A stage of a model: its first block and the one after its last."""

    first: int
    end: int
    outline: Outline


def build_stage(
    config: "Config",
    mesh: Mesh,
    device: torch.device,
    options: ParallelOptions,
    cut: Cut | None = None,
    later: WeightGradQueue | None = None,
    *,
    plain: PlainModel | None = None,
) -> nn.Module:
    """The whole model or a stage of it, parallelized and initialized.

    Args:
        cut: of a stage; None: all blocks.
        later: where weight gradients wait that a schedule computes later.
        plain: the whole model, which is split in place; None: it is built.
    """
    if plain is None:
        plain = unsplit_model(config, mesh, device, options)
    model = plain.model
    options = split_stage(model, mesh, device, options, cut, later)
    if not mesh.uses_fsdp:
        _give_values(plain, config, device)
    apply_data_parallel(model, mesh, options)
    if mesh.uses_fsdp:  # FSDP shards a model that has no memory yet
        _give_values(plain, config, device)
    return model


def split_stage(
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    options: ParallelOptions,
    cut: Cut | None,
    later: WeightGradQueue | None,
) -> ParallelOptions:
    """Splits the layers of a plain model, and keeps a stage of it; see `build_stage`. Returns the
    options for `apply_data_parallel`."""
    # Splitting replaces layers.
    unsplit = dict(model.named_modules())
    options = apply_tensor_parallel(model, mesh, options)
    apply_expert_parallel(model, mesh, options)
    if cut is not None:
        keep_stage(
            model,
            cut.first,
            cut.end,
            cut.outline,
            device=device,
            dtype=compute_dtype(options.precision),
            plain=unsplit,
        )
    if later is not None:
        use_products(model, queue=later)
    return options


def _has_made_parts(model: nn.Module) -> bool:
    """Whether a model has parts that only its constructor creates: buffers, tensors in attributes,
    hooks of parameters."""
    if any(True for _ in model.buffers()) or any(map(has_gradient_hooks, model.parameters())):
        return True
    for module in model.modules():
        attributes = [value for name, value in vars(module).items() if not name.startswith("_")]
        if any(isinstance(value, Tensor) for value in tree_leaves(attributes)):
            return True
    return False


def _give_values(plain: PlainModel, config: "Config", device: torch.device) -> None:
    """Fills the parameters of a model or stage that is split: from the weights to start from, and
    else from the seed."""
    if device.type == "meta":
        return
    model, spec = plain.model, spec_of(config)
    if not plain.is_whole:
        materialise(model, device)
    names: Container[str] | None = None  # the parameters that get first values; None: all
    if config.model.weights is not None:
        with open_weights(config.model.weights) as source:
            names = load_weights(model, source, spec.meta)
    if plain.values is not None:
        fill(model, plain.values, names)
    if plain.values is not None or plain.is_whole:
        # The constructor has said what the others are.
        adapters = [name for name, _ in model.named_parameters() if is_adapter(name)]
        names = [name for name in adapters if names is None or name in names]
    plan = {**INIT_PLAN, **(spec.plan("init_plan") or {})}
    std = getattr(spec.config, "initializer_range", 0.02)
    initialise(model, plan, seed=config.train.seed, std=std, names=names)


def check_start(
    config: "Config", layout: Layout | None = None, data: Samples | None = None
) -> None:
    """Judges the model, and reads the first sample. Raises InputError: its export could not be
    written, `pp` cannot split the model, or an adapter would have no effect."""
    split: StageSplit | None = None
    if layout is not None and layout.size("pp") > 1:
        _, split = stages_of(config, layout)
    inputs: tuple[Tensor | None, ...] | None = None
    if data is not None and (split is not None or config.train.lora is not None):
        size = config.batch.micro_size
        inputs = data.read([(0, 0)] * size, size).batch().inputs
    check_model(Moment.START, _before_start(config, layout, split, inputs))
    spec = spec_of(config)
    if spec.loss is not None and depths_of(spec.meta) > 0:
        raise InputError(
            f"the model {config.model.name} predicts further tokens, which it learns by the cross "
            "entropy, and its file has a loss of its own: leave those layers out "
            "(model.num_nextn_predict_layers: 0)"
        )
    if config.train.export is not None and hasattr(spec.module, "to_hugging_face"):
        spec.module.to_hugging_face(spec.config)  # raises for what could not be written in the end


def check_first_values(config: "Config", say: Callable[[str], None] = lambda line: None) -> None:
    """Reads headers or a manifest of the weights that a run starts from; reports weights that are
    not read. Raises InputError: they do not fit the model."""
    start = config.model.weights
    if start is not None:
        with open_weights(start) as source:
            check_weights(spec_of(config).meta, source, config.model.keys, say)
            check_scale(source, config.train.lora)


def looks_at_sample(config: "Config", layout: Layout) -> bool:
    """Whether a run's model is judged by a sample of its data (`short_sample`)."""
    if layout.size("pp") > 1 and _inputs_of(config, samples=1) is None:
        return True  # to cut it into stages
    parallel = config.parallel
    options = ParallelOptions(verify=parallel.verify, recompute=parallel.recompute)
    subject = Subject(
        model=spec_of(config).meta,
        layout=layout,
        options=options,
        packs_documents=config.data.mask_documents,
    )
    return needs_sample(subject)


def short_sample(
    data: "OpenData", model: nn.Module, cp: int, tp: int
) -> tuple[Tensor | None, ...] | None:
    """Two samples to verify a model with, text truncated to a length that splits evenly; with `cp`
    None if too short.

    What a model computes between distant tokens, or of rare ones, shows only in a long sample. In
    that of a model with experts, some token's scores would be so close that rounding chooses other
    experts."""
    batch = data.train.read([(0, 0), (0, len(data.train) - 1)], 2).batch()
    has_experts = any(hasattr(module, "dispatch") for module in model.modules())
    wanted = 32 if has_experts else 128
    parts = tp
    if cp > 1:
        # `cp` may pad a sequence: the parts are those of the padded length.
        parts = padded_length(1, cp, tp)
    length = parts * max(2, math.ceil(wanted / parts))
    shape = batch.sequence_shape()
    if shape is None:
        return batch.inputs
    available = shape[1]
    if cp > 1 or length > available >= parts:
        length = min(length, available // parts * parts)
    if length == 0:
        return None
    shortened = batch.along_sequence(lambda x, dim: x.narrow(dim, 0, min(length, x.shape[dim])))
    return shortened.inputs


def parameter_count(model: nn.Module) -> int:
    """The number of a model's parameters that are weights stored in files, tied ones counted
    once."""
    table = table_of(model)
    return sum(p.numel() for name, p in model.named_parameters() if is_weight(name, table))
