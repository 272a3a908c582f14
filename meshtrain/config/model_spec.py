"""`ModelSpec`: the model of a config as its module and keys, and the model on the meta device,
built once."""

import copy
import pickle
from collections.abc import Mapping
from functools import cached_property, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshtrain.config.convert import INVALID
from meshtrain.config.draft import ConfigDraft
from meshtrain.config.own_loss import LossFunctions, loss_functions
from meshtrain.config.schema import OWN_MODEL_KEYS
from meshtrain.job import locate
from meshtrain.parallel.tp_plan import OWN_PLANS, PLANS

if TYPE_CHECKING:
    from torch import nn

    from meshtrain.config.schema import LoraSection


class ModelSpec:
    """A model: the module of its file, and the keys of its `Config`."""

    def __init__(
        self,
        module: ModuleType,
        keys: Mapping[str, Any],
        freeze: tuple[str, ...] = (),
        lora: "LoraSection | None" = None,
    ) -> None:
        self.module = module
        self.keys = dict(keys)
        self.freeze = freeze
        self.lora = lora
        self._plans: dict[str, Any] = {}

    @property
    def config(self) -> Any:
        """A new instance of the model's `Config`, since a model may modify it."""
        return self.module.Config(**self.keys)

    def plan(self, key: str) -> Any:
        """What the model's file says under a name (`tp_plan`, `stored_as`, ...): for this config,
        if it says it by a function of the config. None: nothing."""
        if key not in self._plans:
            found = getattr(self.module, key, None)
            self._plans[key] = found(self.config) if callable(found) else found
        return self._plans[key]

    @cached_property
    def loss(self) -> LossFunctions | None:
        """The loss that the model's file defines in the place of the cross entropy. Raises
        InputError: what it defines is none."""
        return loss_functions(self.module)

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
        # The model's file has imported torch; a config whose model is not built does without.
        import torch

        from meshtrain.parallel.deferred_init import NotDeferredError, construct

        def make() -> "nn.Module":
            return self.module.Model(self.config)

        try:
            with torch.device("meta"):
                return self.tuned(make())
        except RuntimeError:
            # It may read a tensor's values (`torch.linspace(...).tolist()`), which meta has not.
            try:
                model, _ = construct(make, seed=0)
            except NotDeferredError:  # values of parameters too
                model = make()
            return self.tuned(_without_memory(model))

    def tuned(self, model: "nn.Module") -> "nn.Module":
        """A plain model with its plans, and with `train.freeze` and `train.lora` applied. Patterns
        were checked with the config."""
        functions = {key: getattr(self.module, key, None) for key in PLANS}
        vars(model)[OWN_PLANS] = {
            key: partial(function, self.config)
            for key, function in functions.items()
            if callable(function)
        }
        if not self.freeze and self.lora is None:
            return model
        from meshtrain.parallel.linear.lora import add_adapters, freeze  # brings torch

        freeze(model, self.freeze)
        if self.lora is not None:
            lora = self.lora
            alpha = lora.alpha or lora.rank  # null: a factor of 1
            add_adapters(model, lora.match, lora.rank, alpha, lora.dropout)
        return model


def _without_memory(model: "nn.Module") -> "nn.Module":
    """A copy on the meta device; tied parameters stay tied."""
    from torch import nn

    # `copy.deepcopy` takes what its memo has for an object: here, its tensor on meta.
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        on_meta = parameter.detach().to("meta")
        memo[id(parameter)] = nn.Parameter(on_meta, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)


MOST_SPECS = 8  # that are kept: a search and its checks ask for the same few again and again
_latest: list[ModelSpec] = []  # the last one asked for comes first


def model_spec(
    name: str,
    keys: Mapping[str, Any],
    freeze: tuple[str, ...] = (),
    lora: "LoraSection | None" = None,
) -> ModelSpec:
    """The spec of a model; equal arguments share one object. Raises what `locate.model_file`
    raises."""
    module = locate.model_file(name)
    wanted = (module, dict(keys), freeze, lora)
    for spec in _latest:
        if (spec.module, spec.keys, spec.freeze, spec.lora) == wanted:
            break
    else:
        spec = ModelSpec(module, keys, freeze, lora)
    others = [other for other in _latest if other is not spec]
    _latest[:] = [spec, *others][:MOST_SPECS]
    return spec


def draft_model(draft: ConfigDraft) -> ModelSpec | None:
    """The model of a config that is being checked; None, with an error reported, if its keys are
    wrong."""
    keys = draft.section("model")
    name = keys.get("name", INVALID)
    for own in OWN_MODEL_KEYS:
        keys.pop(own, None)
    if name is INVALID or INVALID in keys.values():
        return None

    freeze, lora = draft.values.get("train.freeze"), draft.values.get("train.lora")
    if freeze is INVALID or freeze is None:
        freeze = ()
    if lora is INVALID:
        lora = None
    try:
        spec = model_spec(name, keys, freeze, lora)
        _ = spec.meta
    except Exception as error:
        # A user's file may raise anything, and torch raises several types for invalid sizes.
        draft.report(
            draft.place("model"),
            f"the model {name} refuses these keys: {type(error).__name__}: {error}",
        )
        draft.values["model.name"] = INVALID
        return None
    return spec
