"""Spreading a script's model: it exists, with values, on every rank, and each rank keeps its
part."""

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from meshtrain.errors import InputError
from meshtrain.mesh import Mesh
from meshtrain.modeling.build import Cut, assemble_pipeline, split_stage
from meshtrain.modeling.flops import block_flops
from meshtrain.parallel.linear.weight_grad import WeightGradQueue
from meshtrain.parallel.mixed_precision import compute_dtype
from meshtrain.parallel.options import ParallelOptions
from meshtrain.parallel.parallelize import apply_data_parallel, parallelize, prepare
from meshtrain.parallel.predictions import depths_of
from meshtrain.parallel.verify import Moment, Subject, check_model
from meshtrain.pipeline.engine import Pipeline
from meshtrain.pipeline.partition import StageSplit, StageSplitError, blocks_of, split_blocks
from meshtrain.pipeline.probe import check_forward, outline_of
from meshtrain.pipeline.schedule import Schedule, ScheduleError, load
from meshtrain.pipeline.stage import Outline

Sample = Sequence[Tensor | None]


def spread(
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    options: ParallelOptions,
    *,
    schedule: str,
    microbatches: int,
    global_size: int,
    micro_size: int,
) -> nn.Module:
    """A plain model on any layout without `cp`: the same object, or with `pp` this rank's stages as
    a `Pipeline`. All ranks get the values of rank 0.

    Args:
        options: `sample` tells the inputs of a model with `pp`.
        schedule, microbatches: of a pipeline, and how many a step has.
        micro_size: the most samples of a forward.

    Raises InputError: the layout would change what the model computes.
    """
    subject = Subject(
        model=model,
        layout=mesh.layout,
        options=options,
        micro_size=micro_size,
        global_sizes=(global_size,),
    )
    check_model(Moment.START, subject)
    if depths_of(model) > 0:
        raise InputError(
            f"{type(model).__name__} has layers that predict further tokens, and a script's loss "
            "does not ask for their losses, so that they would learn nothing: build it without "
            "them (num_nextn_predict_layers: 0), or train it by a YAML"
        )
    model.to(device)
    if mesh.size("pp") == 1:
        return parallelize(model, mesh, **vars(options))
    return _in_stages(model, mesh, device, options, schedule, microbatches)


def _in_stages(
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    options: ParallelOptions,
    schedule: str,
    microbatches: int,
) -> Pipeline:
    def schedule_of(microbatches: int) -> Schedule:
        return load(schedule, ranks=mesh.size("pp"), microbatches=microbatches)

    try:
        plan = schedule_of(microbatches)
    except ScheduleError as error:
        raise InputError(
            f"schedule {schedule} of meshtrain.Run: {error}; micro_size decides the microbatches, "
            f"here {microbatches}"
        ) from error

    prepare(model, mesh, options)
    on_meta = meta_copy(model)
    split = _split(on_meta, plan, options.sample)
    outline = _outline(on_meta, options.sample)
    if options.sample is not None:
        dtype = compute_dtype(options.precision)
        check_forward(meta_copy(model), split.bounds, options.sample, dtype)
    subject = Subject(
        model=model,
        layout=mesh.layout,
        mesh=mesh,
        options=options,
        copy=partial(meta_copy, model),
        inputs=options.sample,
    )
    options = check_model(Moment.PLAIN, subject)

    # Each stage is cut from a whole model: the first from the model itself, in place.
    numbers = plan.stages_of(mesh.index("pp"))
    whole = [model, *(copy.deepcopy(model) for _ in numbers[1:])]

    def make_stage(cut: Cut, options: ParallelOptions, later: WeightGradQueue | None) -> nn.Module:
        stage = whole.pop(0)
        options = split_stage(stage, mesh, device, options, cut, later)
        return apply_data_parallel(stage, mesh, options)

    return assemble_pipeline(
        make_stage,
        on_meta,
        mesh,
        device,
        options,
        schedule=plan,
        split=split,
        outline=outline,
        schedule_of=schedule_of,
    )


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a model whose tensors have shapes and no memory."""
    on_meta: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        shape = torch.empty_like(tensor, device="meta", requires_grad=False)
        is_parameter = isinstance(tensor, nn.Parameter)
        on_meta[id(tensor)] = (
            nn.Parameter(shape, requires_grad=tensor.requires_grad) if is_parameter else shape
        )
    return copy.deepcopy(model, on_meta)


def _split(on_meta: nn.Module, plan: Schedule, sample: Sample | None) -> StageSplit:
    """The blocks of each stage, balanced by FLOPs, or without a sample by weights."""
    blocks = blocks_of(on_meta)
    if sample is None:
        costs = [float(sum(p.numel() for p in block.parameters())) for block in blocks]
    else:
        costs, _ = block_flops(on_meta, blocks, tuple(sample))
    try:
        return split_blocks(costs, plan.ranks, plan.stages_per_rank)
    except StageSplitError as error:
        remedy = ""
        if blocks == [on_meta]:
            remedy = (
                f". {type(on_meta).__name__} has no function blocks(), which returns its layers in "
                "the order in which they run, and is no nn.Sequential"
            )
        raise InputError(f"pp: {error}{remedy}") from error


def _outline(on_meta: nn.Module, sample: Sample | None) -> Outline:
    if sample is not None:
        return outline_of(meta_copy(on_meta), sample)
    inside = {p for block in blocks_of(on_meta) for p in block.parameters()}
    for name, parameter in on_meta.named_parameters():
        if parameter not in inside:
            raise InputError(
                f"pp: the parameter {name} is in none of the model's blocks(), so a forward has to "
                "show which stage uses it: give run.prepare a sample=(...), the arguments of "
                "model(*sample), or put it into a block"
            )
    return outline_of(meta_copy(on_meta), None)
