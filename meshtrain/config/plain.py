"""The model that a config describes, without its memory: what checks ask how it can be split."""

from typing import Any

from meshtrain import locate
from meshtrain.config.rules import Draft
from meshtrain.config.values import INVALID


def plain_model(draft: Draft, keys: list[str]) -> tuple[Any, Any] | None:
    """The module of the model's file and the model on the meta device; None where its keys are wrong, as reported.

    Args:
        keys: the names of the model's own keys.
    """
    name = draft.values.get("model.name", INVALID)
    values = {key: draft.values.get(f"model.{key}", INVALID) for key in keys}
    if name is INVALID or any(value is INVALID for value in values.values()):
        return None
    module = locate.model_file(name)
    import torch  # a model's file has brought it; a config whose model is not split does without

    try:
        with torch.device("meta"):
            return module, module.Model(module.Config(**values))
    except Exception as error:  # the file may be the user's; torch has several for sizes that no tensor has
        draft.report(draft.place("model"), f"the model {name} refuses these keys: {type(error).__name__}: {error}")
        draft.values["model.name"] = INVALID
        return None
