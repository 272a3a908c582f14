"""`ModelSpec`: the model of a config as its module and keys, and the model on the meta device,
built once."""

import copy
import pickle
from collections.abc import Mapping
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshtrain.config import locate
from meshtrain.config.checks import ConfigDraft
from meshtrain.config.convert import INVALID
from meshtrain.config.schema import OWN_MODEL_KEYS

if TYPE_CHECKING:
    from torch import nn

    from meshtrain.config import Config
    from meshtrain.config.schema import Lora


class ModelSpec:
    """A model: the module of its file, and the keys of its `Config`."""

    def __init__(
        self,
        module: ModuleType,
        keys: Mapping[str, Any],
        freeze: tuple[str, ...] = (),
        lora: "Lora | None" = None,
    ) -> None:
        self.module, self.keys, self.freeze, self.lora = module, dict(keys), freeze, lora

    @property
    def config(self) -> Any:
        """A new instance of the model's `Config`, since a model may modify it."""
        return self.module.Config(**self.keys)

    @cached_property
    def meta(self) -> "nn.Module":
        """The model on the meta device. Shared by all callers: do not modify it."""
        return self._construct()

    def copy(self) -> "nn.Module":
        """A copy of `meta` to modify. Pickled: closures of hooks in a `copy.deepcopy` still refer
        to the original."""
        try:
            return pickle.loads(pickle.dumps(self.meta))
        except Exception:  # pickling may raise many types, some of them the model's own
            return self._construct()

    def _construct(self) -> "nn.Module":
        # imported by the model's file anyway; a config whose model is not built does without torch
        import torch

        try:
            with torch.device("meta"):
                return self.tuned(self.module.Model(self.config))
        except RuntimeError:  # it may read a tensor's values (`torch.linspace(...).tolist()`)
            return self.tuned(_without_memory(self.module.Model(self.config)))

    def tuned(self, model: "nn.Module") -> "nn.Module":
        """A plain model with `train.freeze` and `train.lora` applied. Patterns were checked with
        the config."""
        if not self.freeze and self.lora is None:
            return model
        from meshtrain.parallel.linear.lora import add_adapters, freeze  # brings torch

        freeze(model, self.freeze)
        if (lora := self.lora) is not None:
            add_adapters(model, lora.match, lora.rank, lora.alpha or lora.rank, lora.dropout)
        return model


def _without_memory(model: "nn.Module") -> "nn.Module":
    """A copy on the meta device; tied parameters stay tied."""
    from torch import nn

    tensors: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    tensors |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, tensors)


_latest: list[ModelSpec] = []


def model_spec(
    name: str, keys: Mapping[str, Any], freeze: tuple[str, ...] = (), lora: "Lora | None" = None
) -> ModelSpec:
    """The spec of a model; equal arguments share one object. Raises what `locate.model_file`
    raises."""
    module = locate.model_file(name)
    about = (module, dict(keys), freeze, lora)
    alike = (spec for spec in _latest if (spec.module, spec.keys, spec.freeze, spec.lora) == about)
    spec = next(alike, None) or ModelSpec(module, keys, freeze, lora)
    _latest[:] = [spec, *(other for other in _latest if other is not spec)][:8]
    return spec


def spec_of(config: "Config") -> ModelSpec:
    if config.spec is not None:
        return config.spec
    return model_spec(config.model.name, config.model.keys, config.train.freeze, config.train.lora)


def draft_model(draft: ConfigDraft) -> ModelSpec | None:
    """The model of a config that is being checked; None, with an error reported, if its keys are
    wrong."""
    values = draft.section("model")
    name, *_ = (values.pop(key, INVALID) for key in OWN_MODEL_KEYS)
    if name is INVALID or INVALID in values.values():
        return None
    freeze, lora = draft.values.get("train.freeze"), draft.values.get("train.lora")
    try:
        spec = model_spec(
            name,
            values,
            () if freeze is INVALID else freeze or (),
            None if lora is INVALID else lora,
        )
        _ = spec.meta
        return spec
    except (
        Exception
    ) as error:  # a user's file may raise anything; torch raises several types for invalid sizes
        draft.report(
            draft.place("model"),
            f"the model {name} refuses these keys: {type(error).__name__}: {error}",
        )
        draft.values["model.name"] = INVALID
        return None
