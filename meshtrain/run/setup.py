"""Setup of a run before its first step: its data, its model, the readers of its batches, and the
banner."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshtrain.attention import has_varlen
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.config import Config
from meshtrain.config.layout_advice import host_warnings
from meshtrain.config.locate import model_file
from meshtrain.data import (
    Batch,
    EvalBatches,
    OpenData,
    Samples,
    open_data,
    prepare_data,
    train_batches,
)
from meshtrain.data.mixture import about_mixture, sample_order
from meshtrain.data.order import describe_ramp
from meshtrain.errors import InputError
from meshtrain.evaluate import evaluation_set, require_targets, require_training_targets
from meshtrain.job.consistency import Fingerprint, flat, require_equal, untested_torch
from meshtrain.job.process import Job
from meshtrain.job.storage import with_retries
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.mesh import Mesh
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.modeling import build
from meshtrain.modeling.context import context_costs
from meshtrain.modeling.experts import expert_costs
from meshtrain.optim.lr_schedule import warmup_note
from meshtrain.parallel.context import ContextParallel
from meshtrain.parallel.linear.float8 import describe_float8
from meshtrain.parallel.mixed_precision import compute_dtype
from meshtrain.parallel.tp_plan import (
    NO_SEQUENCE,
    has_sequence_parts,
    shards_sequence,
    unequal_parts,
)
from meshtrain.pipeline.engine import Pipeline
from meshtrain.run.checkpointing import describe_saving
from meshtrain.run.rank_table import describe_hosts


def load_data(config: Config, job: Job) -> OpenData:
    """Opens the corpus. Raises InputError, on every rank: missing, different between hosts, or
    unfit for the model."""
    assert job.layout is not None
    first_of_host = job.environment.local_rank == 0
    with job.collective_check("preparing the data"):
        if first_of_host:
            prepare_data(config.data, say=job.say)
    with job.collective_check("opening the data"):
        model = {
            "n_outputs": build.outputs(config),
            "vocab_size": config.model.keys.get("vocab_size"),
        }
        data = open_data(config.data, seed=config.train.seed, say=job.say, **model)
        samples = with_retries(data.sampled) if first_of_host else None
    with job.collective_check("comparing the weights and the layout with the model"):
        build.check_start(config, job.layout, data.train, job.say)
        check_parts(config, job.layout, data)
        held_out = evaluation_set(data, config.train.eval_samples)
        if job.rank == 0:
            require_training_targets(data.train)
        if job.rank == 0 and held_out is not None and config.train.eval_every:
            require_targets(held_out)
    files = "every host must have the same files, and the same Python for python-stdlib"
    require_equal(job, Fingerprint("the data", flat(data.identity), files))
    damaged = "copy or prepare them anew where they are damaged"
    require_equal(job, Fingerprint("what the data files hold", samples, damaged))
    return data


def check_parts(config: Config, layout: Layout, data: OpenData) -> None:
    """Raises InputError: the ranks of `tp` share each sequence, and do not divide the first sample
    of a data set of one's own. With `cp` sequences are padded; later samples are looked at by the
    layer that splits them."""
    plan = getattr(model_file(config.model.name), "tp_plan", None)
    tp = layout.size("tp")
    shares = (
        tp > 1
        and layout.size("cp") == 1
        and has_sequence_parts(config.parallel.sequence_parallel, plan)
    )
    for samples in (data.train, data.validation) if shares else ():
        tokens = None if samples is None else samples.read([(0, 0)], 1).batch().inputs[0]
        if tokens is not None and not tokens.is_floating_point() and tokens.shape[-1] % tp:
            length = tokens.shape[-1]
            assert samples is not None
            raise InputError(
                unequal_parts(
                    f"{samples.name}: the length of the first sample, {length},", length, tp
                )
            )


def total_steps(config: Config, train: Samples) -> int:
    """The steps of a run: as given, or enough for its epochs; a last batch is filled from the next
    epoch's order."""
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None  # the config has exactly one of them
    return config.batch.sizes.steps(config.train.epochs * len(train))


def model_of_run(
    spec: RunSpec, mesh: Mesh, job: Job, data: OpenData, timer: StepTimer, *, from_checkpoint: bool
) -> nn.Module:
    """The parallelized model with its first values; weights that a checkpoint will replace are not
    read."""
    config = spec.config
    if from_checkpoint:
        config = replace(config, model=replace(config.model, weights=None))
    sample = None
    if build.looks_at_sample(config, mesh.layout):
        with job.collective_check("reading the first samples"):
            sample = build.short_sample(
                data, build.spec_of(config).meta, mesh.size("cp"), mesh.size("tp")
            )
    return build.build_model(config, mesh, job.device, lambda: timer.phase("communication"), sample)


def readers(
    config: Config,
    mesh: Mesh,
    data: OpenData,
    held_out: Samples | None,
    *,
    first_step: int,
    steps: int,
) -> tuple[Iterator[list[Batch]], EvalBatches | None]:
    """This rank's microbatches of each step, and those of an evaluation."""
    common: dict[str, Any] = {
        "micro_size": config.batch.micro_size,
        "rank": mesh.index(*DATA_AXES),
        "ranks": mesh.size(*DATA_AXES),
        "workers": config.data.workers,
    }
    if hasattr(model_file(config.model.name), "cp_plan"):
        split = mesh.size("cp") > 1
        common["prepare"] = context_parallel(config, mesh).shard if split else Batch.with_context
    mixture = sample_order(config, data.train).mixture
    order: dict[str, Any] = {
        "seed": config.train.seed,
        "global_size": config.batch.sizes.changes,
        "mixture": mixture,
    }
    order["lengths"] = config.data.seq_len_warmup
    batches = train_batches(data.train, first_step=first_step, steps=steps, **order, **common)
    return batches, None if held_out is None else EvalBatches(held_out, **common)


def context_parallel(config: Config, mesh: Mesh) -> ContextParallel:
    """How the run's sequences are split over `cp`."""
    keys, plan = config.parallel, getattr(model_file(config.model.name), "tp_plan", None)
    sequence = has_sequence_parts(keys.sequence_parallel, plan)
    return ContextParallel(
        mesh, method=keys.context, heads=keys.context_heads, sequence_parallel=sequence
    )


def loss_lines(data: OpenData) -> Iterator[str]:
    """Which share of the training targets has a loss, by source; nothing where all of them have
    one."""
    by_source = data.train.loss_targets()
    for name, targets in by_source.items():
        if targets.with_loss < targets.all:
            source = f"{name}: " if len(by_source) > 1 else "training: "
            yield f"{source}{targets.line}"


def banner_lines(
    spec: RunSpec, job: Job, data: OpenData, evaluated: Samples | None, model: nn.Module
) -> Iterator[str]:
    """Lines that rank 0 prints before the first step; `evaluated`: the samples from
    `evaluation_set`."""
    config, layout, size = spec.config, job.layout, spec.config.batch
    assert layout is not None
    yield f"{config.name}: {describe_hosts(layout)}, on {job.device_name()}, {job.meeting_point()}"
    yield f"layout {layout}, {config.train.precision}"
    yield from describe_ramp(size.sizes, size.micro_size, layout.size(*DATA_AXES))
    if (note := warmup_note(config.optimizer, spec.steps)) is not None:
        yield note
    if (costs := context_costs(config, layout)) is not None:
        yield costs.describe()
    experts = expert_costs(config, layout)
    active = "" if experts is None else f", {experts.active:,} active a token"
    plain = build.spec_of(config).meta
    trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    tuned = f", {trained:,} trained" * bool(config.train.freeze or config.train.lora)
    yield f"model {config.model.name}: {build.parameter_count(plain):,} parameters{active}{tuned}"
    if experts is not None:
        yield experts.line
    if config.train.linear_precision is not None:
        yield describe_float8(plain, compute_dtype(config.train.precision), job.device.type)
    module = model_file(config.model.name)
    plan = getattr(module, "tp_plan", {})
    if (
        layout.size("tp") > 1
        and config.parallel.sequence_parallel is None
        and not shards_sequence(plan)
    ):
        yield f"parallel.sequence_parallel is off: {NO_SEQUENCE}"
    choice = build.compile_choice(config, layout, job.device)
    if job.device.type == "cuda" and config.parallel.compile == "auto":
        yield f"parallel.compile: auto: {choice}"
    groups = (
        vars(layer)["axis_group"].choice for layer in model.modules() if "axis_group" in vars(layer)
    )
    if fused := next(filter(None, groups), None):
        yield f"parallel.symmetric_memory: auto: {fused}"
    if isinstance(model, Pipeline):
        yield model.about
    elif config.metrics.timeline is not None:
        yield (
            "metrics.timeline is for a pipeline, and this layout has none (pp: 1): no timeline is "
            "written"
        )
    yield from data.about
    yield from loss_lines(data)
    if config.data.sources:
        yield from about_mixture(config, data.train, spec.steps)
    if config.data.mask_documents and layout.size("cp") == 1 and job.device.type == "cuda":
        lengths = has_varlen(job.device, compute_dtype(config.train.precision)) and hasattr(
            module, "cp_plan"
        )
        yield (
            "attention within documents by "
            f"{'their lengths' if lengths else 'a mask of all pairs of tokens'}"
        )
    if evaluated is not None and evaluated is not data.validation:
        yield (
            f"an evaluation takes {len(evaluated):,} samples of the validation (train.eval_samples)"
        )
    yield describe_saving(spec)
    yield from (f"override {override}" for override in config.overrides)
    if (untested := untested_torch(torch.__version__)) is not None:
        yield f"warning: {untested}"
    yield from (f"warning: {warning}" for warning in host_warnings(layout))
