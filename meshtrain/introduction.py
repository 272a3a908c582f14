"""What a run says of itself before its first step."""

from collections.abc import Iterator

from torch import nn

from meshtrain.batch import describe_batch
from meshtrain.build import parameter_count, plain_model
from meshtrain.checkpoint.resume import Wanted
from meshtrain.data import OpenData
from meshtrain.layout import DATA_AXES
from meshtrain.pipeline.engine import Pipeline
from meshtrain.plan import describe_hosts
from meshtrain.runtime import Job
from meshtrain.saving import describe_saving


def introduction(wanted: Wanted, job: Job, data: OpenData, model: nn.Module) -> Iterator[str]:
    """Lines for rank 0."""
    config, layout, size = wanted.config, job.layout, wanted.config.batch
    assert layout is not None
    yield f"{config.name}: {describe_hosts(layout)}, on {job.device_name()}, {job.meeting_point()}"
    yield f"layout {layout}, {config.train.precision}"
    yield describe_batch(size.global_size, size.micro_size, layout.size(*DATA_AXES))
    yield f"model {config.model.name}: {parameter_count(plain_model(config)):,} parameters"
    if isinstance(model, Pipeline):
        yield model.about
    elif config.metrics.timeline is not None:
        yield "metrics.timeline is for a pipeline, and this layout has none (pp: 1): no timeline is written"
    yield from data.about
    yield describe_saving(wanted)
    yield from (f"override {override}" for override in config.overrides)
    yield from (f"warning: {warning}" for warning in layout.warnings())
