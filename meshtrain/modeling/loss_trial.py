"""A trial of the loss that a model file defines, before a run starts: whether it gathers samples.

Model and loss run once on two samples, on the meta device, or a loss that reads values on zeros.
What does not run so is asked nothing: the first step tells then.
"""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from meshtrain.config import spec_of
from meshtrain.data.batch import Batch, Samples
from meshtrain.dropout import set_dropout
from meshtrain.errors import InputError
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.modeling.build import objective_of
from meshtrain.parallel.gather_samples import several_microbatches, watched_gathers
from meshtrain.parallel.mixed_precision import compute_dtype

if TYPE_CHECKING:
    from meshtrain.config import Config

SAMPLES = 2
META = torch.device("meta")
MOST_ELEMENTS = 2**26  # of outputs that are made on the host


def check_microbatches(config: "Config", layout: Layout, train: Samples, task: str) -> None:
    """Raises InputError: the loss gathers samples, and a step has several microbatches. `task`: of
    `OpenData`."""
    if spec_of(config).loss is None:
        return
    batch = config.batch
    problem = several_microbatches(batch.sizes, batch.micro_size, layout.size(*DATA_AXES))
    if problem is not None and gathers_samples(config, train, task):
        raise InputError(problem)


def gathers_samples(config: "Config", train: Samples, task: str) -> bool:
    """Whether the loss of a config calls `gather_samples`; False if it cannot be tried."""
    spec = spec_of(config)
    batch = train.read([(0, 0)] * SAMPLES, SAMPLES).batch()
    if spec.plan("cp_plan") is not None:
        batch = batch.with_context()
    dtype = compute_dtype(config.train.precision)
    # The user's code may raise anything.
    with watched_gathers(SAMPLES) as gathered, suppress(Exception):
        model = spec.copy().to(dtype)
        set_dropout(model, seed=0, step=0, samples=range(SAMPLES))
        on_meta = batch.to(META, dtype)
        outputs = model(*on_meta.inputs)
        if not _runs(config, task, outputs, on_meta):
            _runs(config, task, tree_map_only(Tensor, _zeros, outputs), batch)
    return bool(gathered)


def _runs(config: "Config", task: str, outputs: Any, batch: Batch) -> bool:
    """Whether the loss can be computed of these outputs."""
    reference = None if config.train.reference is None else outputs
    with suppress(Exception):
        objective_of(config, task).losses(outputs, batch, reference=reference)
        return True
    return False


def _zeros(x: Tensor) -> Tensor:
    """Raises ValueError: too large to be made."""
    if x.numel() > MOST_ELEMENTS:
        raise ValueError(f"{x.numel()} elements")
    return torch.zeros(x.shape, dtype=x.dtype, requires_grad=x.is_floating_point())
