"""From the YAML's model section to a model that is spread over the mesh and has its first values."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshtrain.checkpoint import weights as checkpoints
from meshtrain.checkpoint.named import named
from meshtrain.data.batch import Batch, Samples
from meshtrain.data.order import microbatches
from meshtrain.flops import block_flops
from meshtrain.huggingface import check_weights, load_weights
from meshtrain.init import initialise, materialise
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.locate import model_file
from meshtrain.mesh import Mesh
from meshtrain.numerics import cast, compute_dtype, master_dtype
from meshtrain.parallel.apply import Options, split_over_tp, spread_over_data, start_equal
from meshtrain.parallel.later import Later, defer
from meshtrain.parallel.probe import check_forward
from meshtrain.parallel.stages import blocks_of, keep_blocks, stages_holding
from meshtrain.parallel.waiting import Waiting
from meshtrain.pipeline.actions import Kind, Schedule
from meshtrain.pipeline.engine import Pipeline
from meshtrain.pipeline.schedule import load
from meshtrain.pipeline.split import StageSplit, split_blocks

if TYPE_CHECKING:
    from meshtrain.config import Config
    from meshtrain.data import OpenData


def plain_model(config: "Config") -> nn.Module:
    """The model of a config on the meta device, where it has shapes and no memory."""
    module = model_file(config.model.name)
    with torch.device("meta"):
        return module.Model(module.Config(**config.model.keys))


def outputs(config: "Config") -> int | None:
    """How many different targets the model of a config can name; None if its keys do not say."""
    keys = config.model.keys
    return keys.get("vocab_size", keys.get("num_classes"))


def build_model(
    config: "Config",
    mesh: Mesh,
    device: torch.device,
    waiting: Waiting = nullcontext,
    sample: tuple[Tensor | None, ...] | None = None,
) -> nn.Module:
    """The model of a config, parallelized, on `device`, with the first values that its seed gives on every layout.

    With `pp` it is this rank's stages, as a `Pipeline`.

    Args:
        sample: inputs of the model that it is verified with; see `Options`.
    """
    how = Options(precision=config.train.precision, waiting=waiting, sample=sample, **vars(config.parallel))
    if mesh.size("pp") == 1:
        return _part(config, mesh, device, how)
    schedule, split = stages_of(config, mesh.layout)
    splits_backward = any(action.kind is Kind.WEIGHT_GRAD for action in schedule.flat(mesh.index("pp")))
    later = Later() if splits_backward else None
    # Many microbatches are under way at once: parameters that were freed between them would be gathered for each.
    how = replace(how, reshard_after_forward=False)
    stages: dict[int, nn.Module] = {}
    for stage in schedule.stages_of(mesh.index("pp")):
        stages[stage] = _part(config, mesh, device, how, split.bounds[stage], later, verified=bool(stages))
    holding = stages_holding(plain_model(config), split.bounds)
    about = describe_pipeline(schedule, split)
    return Pipeline(stages, schedule, mesh, device, holding=holding, later=later, waiting=waiting, about=about)


def stages_of(config: "Config", layout: Layout) -> tuple[Schedule, StageSplit]:
    """The schedule of a config, and which of the model's blocks are which stage."""
    size, section = config.batch, config.pipeline
    count = microbatches(size.global_size, size.micro_size, layout.size(*DATA_AXES))
    schedule = load(
        section.schedule, ranks=layout.size("pp"), microbatches=count, stages_per_rank=section.stages_per_rank
    )
    model = plain_model(config)
    tokens = torch.zeros(1, config.data.seq_len, dtype=torch.int64)
    costs, _ = block_flops(model, blocks_of(model), (tokens, torch.zeros_like(tokens), None))
    return schedule, split_blocks(costs, schedule.ranks, schedule.stages_per_rank, section.split)


def check_stages(config: "Config", split: StageSplit, inputs: Sequence[Tensor | None] | None = None) -> None:
    """Whether stages of the model compute what the model does.

    Args:
        inputs: what the data gives the model for a microbatch; None: not known here, and only a language model's are.

    Raises:
        InputError: they do not; it says where.
    """
    if inputs is None and "vocab_size" in config.model.keys:
        tokens = torch.empty(config.batch.micro_size, config.data.seq_len, dtype=torch.int64, device="meta")
        inputs = tokens, tokens, None
    if inputs is not None:
        check_forward(plain_model(config), split.bounds, inputs, compute_dtype(config.train.precision))


def describe_pipeline(schedule: Schedule, split: StageSplit) -> str:
    """`pipeline 1f1b, 8 microbatches; 9 blocks in 4 stages: 3 + 2 + 2 + 2, the largest stage 8 % above the mean`."""
    many = f"{schedule.microbatches} microbatch{'es' * (schedule.microbatches != 1)}"
    return f"pipeline {schedule.name}, {many}; {split.describe()}"


def _part(
    config: "Config",
    mesh: Mesh,
    device: torch.device,
    how: Options,
    blocks: tuple[int, int] | None = None,
    later: Later | None = None,
    verified: bool = False,
) -> nn.Module:
    """The whole model or a stage of it, parallelized, with its first values.

    A model file with an `init_plan` is built on the meta device: no rank ever holds more than its part. Any other
    model, and one with buffers (whose values only its constructor knows), is built whole on every rank from the seed.

    Args:
        blocks: the first block of the stage and the one after its last; None: all.
        later: where the stage's layers leave weight gradients; None: they compute them at once.
        verified: the model was, for another stage.
    """
    module = model_file(config.model.name)
    model_config = module.Config(**config.model.keys)
    plan = getattr(module, "init_plan", None)
    model = plain_model(config)
    whole = plan is None or any(True for _ in model.buffers())

    def give_values() -> None:
        if not whole:
            materialise(model, device)
        if config.model.weights is not None:
            if named(config.model.weights) is None:
                load_weights(model, config.model.weights, plain_model(config))
            else:
                checkpoints.load_weights(config.model.weights, model, plain_model(config))
        elif not whole:
            assert plan is not None
            initialise(model, plan, seed=config.train.seed, std=getattr(model_config, "initializer_range", 0.02))

    if whole:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.train.seed)
            model = module.Model(model_config).to(device)
    start_equal(model, mesh)
    cast(model, master_dtype(how.precision))
    how = split_over_tp(model, mesh, how, verified=verified)
    if blocks is not None:
        keep_blocks(model, *blocks)
    if later is not None:
        defer(model, later)
    if mesh.size("dp_shard") == 1:
        give_values()
    spread_over_data(model, mesh, how)
    if mesh.size("dp_shard") > 1:  # FSDP splits a model that has no memory yet
        give_values()
    return model


def check_start(config: "Config", layout: Layout | None = None, data: Samples | None = None) -> None:
    """Whether the weights that a run is to start from are those of its model, and `pp` can cut it into stages.

    It reads headers or a manifest, and the first sample of the data.

    Raises:
        InputError: they are not, or it cannot.
    """
    if layout is not None and data is not None and layout.size("pp") > 1:
        read = data.read([(0, 0)] * config.batch.micro_size, config.batch.micro_size)
        inputs = (read if isinstance(read, Batch) else read.batch()).inputs
        check_stages(config, stages_of(config, layout)[1], inputs)
    start = config.model.weights
    if start is not None:
        check = check_weights if named(start) is None else checkpoints.check_weights
        check(plain_model(config), start, config.model.keys)


def short_sample(data: "OpenData", tp: int) -> tuple[Tensor | None, ...]:
    """Inputs of a model to verify it with: two samples of a run's data, text cut short."""
    read = data.train.read([(0, 0), (0, len(data.train) - 1)], 2)
    batch = read if isinstance(read, tuple) else read.batch()
    length = tp * max(2, -(-8 // tp))
    text = all(x is None or x.shape == batch.targets.shape for x in batch.inputs)
    return tuple(x[:, :length] if x is not None and text else x for x in batch.inputs)


def parameter_count(model: nn.Module) -> int:
    """The number of the whole model's parameters, tied ones counted once."""
    return sum(p.numel() for p in model.parameters())
