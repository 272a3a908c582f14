"""Models that were files of meshtrain once, and are classes of transformers today.

Their checkpoints are still read: the class has parameters with the same names and shapes.
"""

from collections.abc import Mapping
from typing import Any

# Former name -> what its user does now.
FORMER_MODELS: dict[str, str] = {
    "mixtral": (
        "transformers' own class computes the same on every layout, model: {name: transformers, "
        "model_type: mixtral, config: {...}}, with the keys of Hugging Face in `config`; weights "
        "and checkpoints are read by model: {name: transformers, weights: FOLDER}"
    ),
}
# Keys that the class does not have. The last three said how the model was trained, not what its
# weights are.
_NOT_OF_THE_CLASS = frozenset(
    {"name", "preset", "weights", "hidden_dropout", "router_balance", "router_z_loss_coef"}
)


def what_replaces(model: Mapping[str, Any]) -> str | None:
    """What the user of a section `model` does now; None: its model is none of the former ones."""
    name = model.get("name")  # a checkpoint is not trusted: it may be anything
    return FORMER_MODELS.get(name) if isinstance(name, str) else None


def of_today(model: Mapping[str, Any]) -> dict[str, Any]:
    """The section `model` of a checkpoint's config, with the class of transformers in the place of
    a former model. A section of any other model is unchanged."""
    if what_replaces(model) is None:
        return dict(model)
    section: dict[str, Any] = {"name": "transformers", "model_type": model["name"]}
    if "weights" in model:
        section["weights"] = model["weights"]
    keys: dict[str, Any] = {
        name: value
        for name, value in model.items()
        if name not in _NOT_OF_THE_CLASS and value is not None
    }
    # null meant as many as query heads; the class would take 8.
    if model.get("num_key_value_heads") is None and "num_attention_heads" in keys:
        keys["num_key_value_heads"] = keys["num_attention_heads"]
    # So the class has the term of balance, too, of which our models took no switch.
    balanced = model.get("router_balance") != "none" and bool(model.get("router_aux_loss_coef"))
    section["config"] = keys | {"output_router_logits": balanced}
    return section


def is_left_out(model: Mapping[str, Any], tensor: str) -> bool:
    """Whether a tensor of a checkpoint of this section `model` has no place in today's class: the
    loads of the last step, which a class without a term of balance does not have. Without them a
    run begins with even loads, as from published files."""
    return what_replaces(model) is not None and tensor.endswith(".balance.loads")
