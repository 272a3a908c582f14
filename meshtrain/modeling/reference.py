"""The reference of a run (`train.reference`): a frozen second model of the config's class, whose
outputs the model file's `loss` gets beside those of the trained one.

It lies on the mesh as the trained model does, so that its outputs come where theirs come, in the
same parts. It has no gradients and no optimizer states, drops nothing, and no checkpoint holds it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshtrain.checkpoint.weights import open_weights
from meshtrain.config import spec_of
from meshtrain.data.batch import Batch
from meshtrain.errors import InputError
from meshtrain.huggingface.load import check_weights
from meshtrain.mesh import Mesh
from meshtrain.modeling.build import build_model
from meshtrain.parallel.collectives import MeasuredWait
from meshtrain.parallel.linear.lora import is_adapter
from meshtrain.parallel.mixed_precision import compute_dtype, weights_stay
from meshtrain.parallel.step_context import StepContext, use_context
from meshtrain.pipeline.engine import Pipeline, shapes_of
from meshtrain.pipeline.forms import Activation
from meshtrain.pipeline.stage import call_stage

if TYPE_CHECKING:
    from meshtrain.config import Config


def reference_config(config: "Config") -> "Config | None":
    """The config of the reference alone: the same model with other weights, all of them frozen and
    none adapted. None: the run has no reference."""
    section = config.train.reference
    if section is None:
        return None
    return replace(
        config,
        model=replace(config.model, weights=section.weights),
        train=replace(config.train, freeze=("*",), lora=None),
        spec=None,
    )


class Reference:
    """A frozen model, parallelized: computes outputs for a loss."""

    def __init__(self, model: nn.Module, device: torch.device, precision: str) -> None:
        """`model`: as `build_model` returns it for a `reference_config`."""
        self.model = model.eval()
        self._device = device
        self._dtype = compute_dtype(precision)
        # Its weights never change, so 16-bit copies of them are made once.
        self._stays = ExitStack()
        self._stays.enter_context(weights_stay(model))

    @torch.no_grad()
    def outputs(self, batches: Sequence[Batch]) -> list[Any]:
        """The outputs for some microbatches, in their order; empty on ranks without the model's
        last stage. All ranks call it together, with as many microbatches."""
        with use_context(StepContext()):
            if isinstance(self.model, Pipeline):
                keys = [shapes_of(batch.inputs) for batch in batches]
                outputs = self.model.run_forwards(batches, keys, self._run_stage)
            else:
                outputs = [self.model(*self._inputs(batch)) for batch in batches]
        self._free_gathered()
        return outputs

    def _run_stage(
        self, stage: nn.Module, batch: Batch, received: Activation | None, last: bool
    ) -> Any:
        return call_stage(stage, self._inputs(batch), received)

    def _inputs(self, batch: Batch) -> tuple[Any, ...]:
        return batch.to(self._device, self._dtype, with_targets=False).inputs

    def _free_gathered(self) -> None:
        """FSDP keeps what it gathers last for a backward, and here none follows."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def build_reference(
    config: "Config",
    mesh: Mesh,
    device: torch.device,
    measured_wait: MeasuredWait = nullcontext,
    sample: tuple[Tensor | None, ...] | None = None,
    *,
    device_type: str | None = None,
) -> Reference | None:
    """The reference of a config with its weights, on the mesh; None: it has none. Arguments as of
    `build_model`."""
    own = reference_config(config)
    if own is None:
        return None
    model = build_model(own, mesh, device, measured_wait, sample, device_type=device_type)
    return Reference(model, device, config.train.precision)


def check_reference(config: "Config", say: Callable[[str], None] = lambda line: None) -> None:
    """Raises InputError: the weights of the reference do not fit the model. Reads headers only.
    `say`: see `check_weights`."""
    own = reference_config(config)
    if own is None:
        return
    assert own.model.weights is not None
    with open_weights(own.model.weights) as source:
        if any(map(is_adapter, source.entries)):
            raise InputError(
                f"train.reference.weights: {source.path} holds adapters beside the weights, and "
                "the reference has none: merge them with meshtrain export, and name that folder"
            )
        check_weights(spec_of(own).meta, source, own.model.keys, say)
