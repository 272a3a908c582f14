"""What a run says of itself before its first step."""

from collections.abc import Iterator

from torch import nn

from meshtrain.batch import describe_batch
from meshtrain.build import parameter_count, plain_model
from meshtrain.checkpoint.resume import Wanted
from meshtrain.data import OpenData, Samples
from meshtrain.layout import DATA_AXES
from meshtrain.locate import model_file
from meshtrain.pipeline.engine import Pipeline
from meshtrain.plan import describe_hosts
from meshtrain.runtime import Job
from meshtrain.saving import describe_saving
from meshtrain.split import NO_SEQUENCE, shards_sequence


def introduction(
    wanted: Wanted, job: Job, data: OpenData, evaluated: Samples | None, model: nn.Module
) -> Iterator[str]:
    """Lines for rank 0; `evaluated`: as `evaluation_set` has it."""
    config, layout, size = wanted.config, job.layout, wanted.config.batch
    assert layout is not None
    yield f"{config.name}: {describe_hosts(layout)}, on {job.device_name()}, {job.meeting_point()}"
    yield f"layout {layout}, {config.train.precision}"
    yield describe_batch(size.global_size, size.micro_size, layout.size(*DATA_AXES))
    yield f"model {config.model.name}: {parameter_count(plain_model(config)):,} parameters"
    plan = getattr(model_file(config.model.name), "tp_plan", {})
    if layout.size("tp") > 1 and config.parallel.sequence_parallel is None and not shards_sequence(plan):
        yield f"parallel.sequence_parallel is off: {NO_SEQUENCE}"
    if isinstance(model, Pipeline):
        yield model.about
    elif config.metrics.timeline is not None:
        yield "metrics.timeline is for a pipeline, and this layout has none (pp: 1): no timeline is written"
    yield from data.about
    if evaluated is not None and evaluated is not data.validation:
        yield f"an evaluation takes {len(evaluated):,} samples of the validation (train.eval_samples)"
    yield describe_saving(wanted)
    yield from (f"override {override}" for override in config.overrides)
    yield from (f"warning: {warning}" for warning in layout.warnings())
