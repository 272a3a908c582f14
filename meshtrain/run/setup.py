"""Setup of a run before its first step: its data, its model, the readers of its batches, and the
banner."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from meshtrain.attention import has_varlen
from meshtrain.checkpoint.config_diff import REFERENCE
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.checkpoint.weights import weights_digest
from meshtrain.config import Config, spec_of
from meshtrain.config.layout_advice import host_warnings
from meshtrain.data import (
    Batch,
    EvalBatches,
    OpenData,
    Samples,
    open_data,
    prepare_data,
    train_batches,
)
from meshtrain.data.loader import Reading
from meshtrain.data.mixture import about_mixture, sample_order
from meshtrain.data.order import describe_ramp, microbatches
from meshtrain.errors import AgreedError, InputError, join_some, plural, yaml_text
from meshtrain.evaluate import (
    evaluation_set,
    require_sum_over_tokens,
    require_targets,
    require_training_targets,
)
from meshtrain.huggingface.load import fetch_weights
from meshtrain.job.consistency import (
    Fingerprint,
    checkpoint_versions,
    flat,
    require_equal,
    untested_torch,
)
from meshtrain.job.host_limits import find_short_hosts
from meshtrain.job.locate import model_file
from meshtrain.job.process import Job
from meshtrain.job.storage import with_retries
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.mesh import Mesh
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.modeling import build
from meshtrain.modeling.context import context_costs
from meshtrain.modeling.experts import expert_costs
from meshtrain.modeling.loss_trial import check_microbatches
from meshtrain.modeling.reference import Reference, build_reference, check_reference
from meshtrain.optim.lr_schedule import warmup_note
from meshtrain.optim.optimizer import state_bytes
from meshtrain.parallel.collectives import MeasuredWait
from meshtrain.parallel.context import ContextParallel
from meshtrain.parallel.linear.float8 import describe_float8
from meshtrain.parallel.mixed_precision import compute_dtype
from meshtrain.parallel.predictions import depths_of
from meshtrain.parallel.tp_plan import (
    NO_SEQUENCE,
    has_sequence_parts,
    plan_splits_sequence,
    unequal_parts,
)
from meshtrain.pipeline.engine import Pipeline
from meshtrain.run.checkpointing import describe_saving
from meshtrain.run.rank_table import describe_hosts

OFFLOADED = {  # what `parallel.offload` does, for people
    "optimizer": "optimizer states lie in the host's memory",
    "activations": "activations that blocks save lie in the host's memory",
    "both": "optimizer states, and activations that blocks save, lie in the host's memory",
}


def load_data(config: Config, job: Job) -> OpenData:
    """Opens the corpus. Raises InputError, on every rank: missing, different between hosts, or
    unfit for the model."""
    assert job.layout is not None
    first_of_host = job.environment.local_rank == 0
    # The others wait at the store: a collective would have a time limit, and preparation may take
    # hours.
    with job.collective_check("preparing the data"):
        if first_of_host:
            prepare_data(config.data, say=job.say)
    with job.collective_check("opening the data"):
        data = open_data(
            config.data,
            seed=config.train.seed,
            say=job.say,
            n_outputs=build.outputs(config),
            vocab_size=config.model.keys.get("vocab_size"),
            own_loss=spec_of(config).loss is not None,
        )
        # One process of each host reads a part of the files' bytes.
        samples = with_retries(data.sampled) if first_of_host else None
    if config.train.reference is not None:
        bring_weights(config.train.reference.weights, job)
    with job.collective_check("comparing the layout with the model"):
        build.check_start(config, job.layout, data.train)
        check_reference(config, job.say)
        check_parts(config, job.layout, data)
        objective = build.objective_of(config, data.task)
        if job.layout.size("cp") > 1:
            require_sum_over_tokens(objective, data.train)
        held_out = evaluation_set(data, config.train.eval_samples)
        # These read many samples, which are the same on every host.
        if job.rank == 0:
            require_training_targets(data.train, objective)
            if held_out is not None and config.train.eval_every:
                require_targets(held_out, objective)

    # First what the headers claim, then what a sample of the bytes says.
    files = "every host must have the same files, and the same Python for python-stdlib"
    require_equal(job, Fingerprint("the data", flat(data.identity), files))
    damaged = "copy or prepare them anew where they are damaged"
    require_equal(job, Fingerprint("what the data files hold", samples, damaged))
    return data


def bring_weights(weights: str, job: Job) -> None:
    """Fetches weights that are a model of the hub, in one process of each host, while the others
    wait at the store. Raises on every rank: InputError: they may not be read; TrainingError: the
    network or a disk failed."""
    with job.collective_check("fetching weights from the hub"):
        if job.environment.local_rank == 0:
            fetch_weights(weights, job.say)


def check_first_values(config: Config, job: Job) -> None:
    """Raises InputError, on every rank: the weights that the run starts from are not to be had, or
    do not fit the model."""
    if config.model.weights is None:
        return
    bring_weights(config.model.weights, job)
    with job.collective_check("comparing the weights with the model"):
        build.check_first_values(config, job.say)


def require_whole_steps(config: Config, job: Job, data: OpenData) -> None:
    """Raises InputError, on every rank: the loss compares the samples of a step, and a step is not
    one microbatch."""
    assert job.layout is not None
    with job.collective_check("trying the loss"):
        check_microbatches(config, job.layout, data.train, data.task)


def reference_version(config: Config, job: Job) -> dict[str, str]:
    """The digest of the weights of `train.reference`, by the name that a checkpoint has for it;
    empty without a reference. Raises InputError, on every rank: hosts have different ones."""
    section = config.train.reference
    if section is None:
        return {}
    with job.collective_check("reading what train.reference.weights names"):
        version = {REFERENCE: weights_digest(section.weights)}
    remedy = "copy them anew where they are damaged, or name a folder that all hosts see"
    require_equal(job, Fingerprint("what train.reference.weights names", version, remedy))
    return version


def check_parts(config: Config, layout: Layout, data: OpenData) -> None:
    """Raises InputError: the ranks of `tp` share each sequence, and do not divide the first sample
    of a data set of one's own. With `cp` sequences are padded; later samples are looked at by the
    layer that splits them."""
    tp = layout.size("tp")
    plan = spec_of(config).plan("tp_plan")
    has_parts = has_sequence_parts(config.parallel.sequence_parallel, plan)
    if tp == 1 or layout.size("cp") > 1 or not has_parts:
        return
    for samples in (data.train, data.validation):
        if samples is None:
            continue
        tokens = samples.read([(0, 0)], 1).batch().inputs[0]
        if tokens is None or tokens.is_floating_point():
            continue
        length = tokens.shape[-1]
        if length % tp:
            what = f"{samples.name}: the length of the first sample, {length},"
            raise InputError(unequal_parts(what, length, tp))


def total_steps(config: Config, train: Samples) -> int:
    """The steps of a run: as given, or enough for its epochs; a last batch is filled from the next
    epoch's order."""
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None  # the config has exactly one of them
    return config.batch.sizes.steps(config.train.epochs * len(train))


def specify(config: Config, job: Job, data: OpenData, folder: Path, checkpoints: Path) -> RunSpec:
    """What a checkpoint of the run is compared with. Raises InputError: a source has not enough
    samples for the run."""
    versions = checkpoint_versions(model_file(config.model.name)) | reference_version(config, job)
    steps = total_steps(config, data.train)
    with job.collective_check("counting the samples of each source"):
        sample_order(config, data.train, steps)
    return RunSpec(config, folder, checkpoints, data.identity, versions, steps)


def model_of_run(
    spec: RunSpec, mesh: Mesh, job: Job, data: OpenData, timer: StepTimer, *, from_checkpoint: bool
) -> nn.Module:
    """The parallelized model with its first values; weights that a checkpoint will replace are not
    read."""
    config = spec.config
    if from_checkpoint:
        config = replace(config, model=replace(config.model, weights=None))
    sample = _compared_sample(config, mesh, job, data)
    return build.build_model(config, mesh, job.device, lambda: timer.phase("communication"), sample)


def require_host_memory(config: Config, model: nn.Module, mesh: Mesh, job: Job) -> None:
    """Raises AgreedError: a host has no room for the optimizer states of its ranks, which
    `parallel.offload` puts there."""
    if not config.parallel.offloads_optimizer:
        return
    nbytes = state_bytes(model, config.optimizer, mesh)
    short = find_short_hosts(job, nbytes, "looking at the memory for optimizer states")
    if short:
        raise AgreedError(
            f"parallel.offload {config.parallel.offload} keeps optimizer states in the memory of "
            f"hosts, and {join_some(short)}: use more hosts, shard the states further (dp_shard, "
            "parallel.shard_optimizer), or use offload: activations"
        )


def reference_of_run(
    config: Config,
    mesh: Mesh,
    job: Job,
    data: OpenData,
    measured_wait: MeasuredWait = nullcontext,
) -> Reference | None:
    """The parallelized second model of `train.reference`, with its weights; None: there is none."""
    if config.train.reference is None:
        return None
    sample = _compared_sample(config, mesh, job, data)
    return build_reference(config, mesh, job.device, measured_wait, sample)


def _compared_sample(
    config: Config, mesh: Mesh, job: Job, data: OpenData
) -> tuple[torch.Tensor | None, ...] | None:
    """A few samples on which a parallelized model is compared with the plain one; None: it is
    not."""
    if not build.looks_at_sample(config, mesh.layout):
        return None
    with job.collective_check("reading the first samples"):
        plain = spec_of(config).meta
        return build.short_sample(data, plain, mesh.size("cp"), mesh.size("tp"))


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
    reading: Reading = {
        "workers": config.data.workers,
        "prepare": preparation(config, mesh),
    }
    rank = mesh.index(*DATA_AXES)
    ranks = mesh.size(*DATA_AXES)
    micro_size = config.batch.micro_size
    batches = train_batches(
        data.train,
        seed=config.train.seed,
        first_step=first_step,
        steps=steps,
        global_size=config.batch.sizes.changes,
        micro_size=micro_size,
        rank=rank,
        ranks=ranks,
        mixture=sample_order(config, data.train).mixture,
        lengths=config.data.seq_len_warmup,
        **reading,
    )
    if held_out is None:
        return batches, None
    # A loss of one's own may compare the samples of a step with each other. So that its evaluation
    # depends on no layout, samples meet there as they do in a step, where that is one microbatch.
    together = None
    largest = config.batch.sizes.largest
    if spec_of(config).loss is not None and microbatches(largest, micro_size, ranks) == 1:
        together = largest
    evaluation = EvalBatches(
        held_out, micro_size=micro_size, rank=rank, ranks=ranks, together=together, **reading
    )
    return batches, evaluation


def preparation(config: Config, mesh: Mesh) -> Callable[[Batch], Batch]:
    """Turns a batch of whole sequences into what this rank's model takes."""
    depths = depths_of(spec_of(config).meta)
    # A model without a cp_plan takes the plain tensor of documents.
    of_model: Callable[[Batch], Batch] = Batch.batch
    if spec_of(config).plan("cp_plan") is not None:
        split = mesh.size("cp") > 1
        of_model = context_parallel(config, mesh).shard if split else Batch.with_context
    # Tokens ahead are those of whole sequences.
    return lambda batch: of_model(batch.looking_ahead(depths))


def context_parallel(config: Config, mesh: Mesh) -> ContextParallel:
    """How the run's sequences are split over `cp`."""
    keys = config.parallel
    plan = spec_of(config).plan("tp_plan")
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
    config = spec.config
    layout = job.layout
    assert layout is not None
    yield f"{config.name}: {describe_hosts(layout)}, on {job.device_name()}, {job.meeting_point()}"
    yield f"layout {layout}, {config.train.precision}"
    yield from describe_ramp(config.batch.sizes, config.batch.micro_size, layout.size(*DATA_AXES))
    note = warmup_note(config.optimizer, spec.steps)
    if note is not None:
        yield note
    yield from _model_lines(config, layout, job, model)
    yield from data.about
    yield from loss_lines(data)
    if config.data.sources:
        yield from about_mixture(config, data.train, spec.steps)
    yield from _document_lines(config, layout, job)
    if evaluated is not None and evaluated is not data.validation:
        yield (
            f"an evaluation takes {len(evaluated):,} samples of the validation (train.eval_samples)"
        )
    yield describe_saving(spec)
    for override in config.overrides:
        yield f"override {override}"
    untested = untested_torch(torch.__version__)
    if untested is not None:
        yield f"warning: {untested}"
    for warning in host_warnings(layout):
        yield f"warning: {warning}"


def _model_lines(config: Config, layout: Layout, job: Job, model: nn.Module) -> Iterator[str]:
    """The model, and how it is split and computed."""
    costs = context_costs(config, layout)
    if costs is not None:
        yield costs.describe()

    plain = spec_of(config).meta
    experts = expert_costs(config, layout)
    size = f"model {config.model.name}: {build.parameter_count(plain):,} parameters"
    if experts is not None:
        size += f", {experts.active:,} active a token"
    if config.train.freeze or config.train.lora:
        trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)
        size += f", {trained:,} trained"
    yield size
    if config.parallel.offload != "none":
        yield OFFLOADED[config.parallel.offload]
    if experts is not None:
        yield experts.line
    depths = depths_of(plain)
    if depths > 0:
        weight = yaml_text(config.train.mtp_loss_scaling_factor)
        yield (
            f"multi-token prediction: {plural(depths, 'further token')}, whose mean loss counts "
            f"{weight} beside the loss (train.mtp_loss_scaling_factor)"
        )

    if config.train.linear_precision is not None:
        dtype = compute_dtype(config.train.precision)
        yield describe_float8(plain, dtype, job.device.type)
    plan = spec_of(config).plan("tp_plan") or {}
    is_auto = config.parallel.sequence_parallel is None
    if layout.size("tp") > 1 and is_auto and not plan_splits_sequence(plan):
        yield f"parallel.sequence_parallel is off: {NO_SEQUENCE}"
    if job.device.type == "cuda" and config.parallel.compile == "auto":
        choice = build.compile_choice(config, layout, job.device)
        yield f"parallel.compile: auto: {choice}"
    fused = _fused_choice(model)
    if fused:
        yield f"parallel.symmetric_memory: auto: {fused}"
    if isinstance(model, Pipeline):
        yield model.about
    elif config.metrics.timeline is not None:
        yield (
            "metrics.timeline is for a pipeline, and this layout has none (pp: 1): no timeline is "
            "written"
        )


def _fused_choice(model: nn.Module) -> str | None:
    """What the first tensor-parallel layer that could fuse its communication has chosen."""
    for layer in model.modules():
        group = vars(layer).get("axis_group")
        if group is not None and group.choice:
            return group.choice
    return None


def _document_lines(config: Config, layout: Layout, job: Job) -> Iterator[str]:
    """How a GPU's attention is kept within documents."""
    if not config.data.mask_documents or layout.size("cp") > 1 or job.device.type != "cuda":
        return
    dtype = compute_dtype(config.train.precision)
    takes_lengths = spec_of(config).plan("cp_plan") is not None
    by_lengths = takes_lengths and has_varlen(job.device, dtype)
    how = "their lengths" if by_lengths else "a mask of all pairs of tokens"
    yield f"attention within documents by {how}"
