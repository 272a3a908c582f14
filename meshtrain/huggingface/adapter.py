"""LoRA adapters in files: merged into the weights, or alone in peft's format
(https://huggingface.co/docs/peft): `adapter_config.json`, and `adapter_model.safetensors` with
prefixed names."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from meshtrain.errors import InputError
from meshtrain.huggingface.keys import PREDICTIONS
from meshtrain.huggingface.load import WeightSource
from meshtrain.job.hub import hub_name
from meshtrain.parallel.linear.lora import is_adapter, merged
from meshtrain.parallel.sharding import Part
from meshtrain.parallel.tp_plan import LORA_A, LORA_B

if TYPE_CHECKING:
    from meshtrain.config.schema import LoraSection

PREFIX = "base_model.model."  # prefix of names in peft's files


def merged_source(source: WeightSource, lora: Any) -> WeightSource:
    """The source with its adapters merged into the weights and removed. `lora`: the run's
    `train.lora`."""
    entries = {name: entry for name, entry in source.entries.items() if not is_adapter(name)}
    if len(entries) == len(source.entries):
        return source
    rank, alpha = rank_and_alpha(lora)

    def read(name: str, part: Part) -> Tensor:
        values = source.read(name, part)
        layer = name.removesuffix("weight")
        lora_a, lora_b = f"{layer}{LORA_A}.weight", f"{layer}{LORA_B}.weight"
        if lora_a not in source.entries:
            return values
        # W + alpha / rank * B A, of which a part needs the rows of B and the columns of A.
        rows, columns = part
        whole_rank = slice(0, source.entries[lora_a].shape[0])
        a = source.read(lora_a, (whole_rank, columns))
        b = source.read(lora_b, (rows, whole_rank))
        return merged(values, a, b, alpha / rank)

    return replace(source, entries=entries, read=read)


def adapter_source(source: WeightSource) -> WeightSource:
    """The adapters alone, by their names in peft's files, without those of layers that predict
    further tokens, which transformers' classes do not have. Raises InputError: the source has no
    adapters."""
    entries = {}
    for name, entry in source.entries.items():
        if is_adapter(name) and not name.startswith(f"{PREDICTIONS}."):
            entries[PREFIX + name] = replace(entry, name=PREFIX + name)
    if not entries:
        raise InputError(
            f"{source.path} has no adapter, as its run had no train.lora: export it without "
            "--adapter"
        )
    return replace(
        source,
        entries=entries,
        read=lambda name, part: source.read(name.removeprefix(PREFIX), part),
    )


def adapter_config(source: WeightSource, lora: Any, base: str | None) -> str:
    """The text of adapter_config.json. `source`: the adapters. `base`: the weights that the run
    started from; of a model of the hub peft wants the commit by itself."""
    on_hub = None if base is None else hub_name(base)
    rank, alpha = rank_and_alpha(lora)
    layers = [
        name.removesuffix(f".{LORA_A}.weight").removeprefix(PREFIX)
        for name in source.entries
        if LORA_A in name
    ]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if on_hub is None else on_hub.repo,
        "revision": None if on_hub is None else on_hub.revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.get("dropout", 0.0),
        "target_modules": layers,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return json.dumps(config, indent=2) + "\n"


def check_scale(source: WeightSource, lora: "LoraSection | None") -> None:
    """Raises InputError: the adapters a run starts from were trained with another scale, alpha /
    rank."""
    if lora is None or not any(map(is_adapter, source.entries)):
        return
    rank, alpha = rank_and_alpha(source.lora)
    own_alpha = lora.alpha or lora.rank
    if alpha / rank != own_alpha / lora.rank:
        raise InputError(
            f"the adapters in {source.path} were trained with train.lora.alpha {alpha:g} and rank "
            f"{rank}, and here alpha is {own_alpha:g}: give alpha: {alpha:g}, or start from an "
            "export of them"
        )


def rank_and_alpha(lora: Any) -> tuple[int, float]:
    """The rank and alpha of a checkpoint's `train.lora`. Raises InputError: it is not a valid
    one."""
    rank = alpha = None
    if isinstance(lora, Mapping):
        rank, alpha = lora.get("rank"), lora.get("alpha")
    if alpha is None:
        alpha = rank
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise InputError(
            f"the checkpoint has adapters, and its config no train.lora that they are of ({lora!r})"
        )
    return rank, alpha
