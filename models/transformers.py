"""Any causal language model of Hugging Face's transformers, by its own class.

    model: {name: transformers, path: FOLDER}                # class and sizes of a config.json
    model: {name: transformers, weights: FOLDER}             # these, and the values
    model: {name: transformers, model_type: gemma2, config: {hidden_size: 64, num_hidden_layers: 2}}

The class, its forward and the names of its parameters stay those of transformers. This file adds
what a run asks a model for: its blocks, a forward from tokens, positions and documents to logits,
and the tables that say how it splits, which follow from the class's own plans. Attention goes
through `meshtrain.attention`, which knows documents, parts of sequences and caches.
"""

import dataclasses
import difflib
import fnmatch
import inspect
import itertools
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.attention import AttentionContext, attention
from meshtrain.dropout import Dropout
from meshtrain.huggingface.conversions import FileNames, file_names
from meshtrain.huggingface.experts import adopt_experts, attach_balance, plan_without_experts

try:
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
except ImportError as error:
    raise ImportError(f"{error}: pip install 'meshtrain[transformers]'") from error

OURS = "meshtrain"  # the name of our attention among transformers' implementations
PROBABILITIES = "dropout_of_probabilities"  # the name of that module in one that attends
# Keys of older files, from which a class makes its `rope_parameters`.
LEGACY = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
# Keys of every class that have no effect on training.
PASSED_OVER = frozenset({"architectures", "dtype", "transformers_version", "use_cache"})


@dataclass(frozen=True)
class Config:
    """Which class, and its sizes. Beside `weights`, both come from the config.json there."""

    path: str | None = None  # a folder with a config.json
    model_type: str | None = None  # or the family, with `config`
    config: dict[str, Any] = field(default_factory=dict)  # keys of config.json, which override it
    vocab_size: int | None = None  # number of token ids; null: that of the class's config
    # the longest sequence that the model is designed for; null: that of the class's config
    max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        """Takes in the config.json, so that a checkpoint says all of its model."""
        model_type = self.model_type
        stored: dict[str, Any] = {}
        if self.path is not None:
            model_type, stored = _read_folder(Path(self.path).expanduser())
        if model_type is None:
            raise ValueError(
                "give `path`, a folder with a config.json, or `model_type` (llama, gemma2, ...) "
                "and its `config`"
            )
        _refuse_unknown(model_type, self.config)
        keys = stored | self.config
        for name in ("vocab_size", "max_position_embeddings"):
            if getattr(self, name) is not None:
                keys[name] = getattr(self, name)

        described = hugging_face_config(model_type, keys)
        if not hasattr(described, "vocab_size"):
            parts = ", ".join(described.sub_configs) or "parts"
            of_text = _language_models_in(described)
            advice = (
                f"take the model_type of its text model, {of_text[0]}"
                if of_text
                else "transformers has none of them as a causal language model: take another family"
            )
            raise ValueError(f"{model_type} is made of several models ({parts}): {advice}")
        _class_of(type(described))
        longest = getattr(described, "max_position_embeddings", None)
        if longest is not None and longest < 1:  # how a class says that it has no limit
            longest = None
        resolved = {
            "path": None,
            "model_type": model_type,
            "config": keys,
            "vocab_size": described.vocab_size,
            "max_position_embeddings": longest,
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)


def hugging_face_config(model_type: str, keys: Mapping[str, Any]) -> PreTrainedConfig:
    """The config object of a class. Raises ValueError: there is no such family, or the class
    refuses the keys."""
    try:
        config = AutoConfig.for_model(model_type, **keys)
    except Exception as error:  # a class may raise anything
        raise ValueError(f"transformers' {model_type} refuses them: {error}") from error
    config.use_cache = False
    return config


def _language_models_in(described: PreTrainedConfig) -> list[str]:
    """The families of a config's parts that are causal language models."""
    found = []
    for name in described.sub_configs:
        part = getattr(described, name, None)
        if isinstance(part, PreTrainedConfig):
            with suppress(ValueError):
                _class_of(type(part))
                found.append(part.model_type)
    return found


def _refuse_unknown(model_type: str, keys: Mapping[str, Any]) -> None:
    """Raises ValueError: the family does not exist, or its config has no such key."""
    if model_type not in CONFIG_MAPPING:
        advice = _did_you_mean(model_type, CONFIG_MAPPING) or "see its documentation for the names"
        raise ValueError(f"transformers has no model_type {model_type}: {advice}")
    kind = CONFIG_MAPPING[model_type]
    known = _known_keys(model_type) | LEGACY
    for key in keys:
        if key not in known:
            advice = _did_you_mean(key, known) or "take it away"
            raise ValueError(f"{kind.__name__} has no key {key}: {advice}")


@lru_cache(maxsize=8)
def _known_keys(model_type: str) -> frozenset[str]:
    """The keys that a family's config declares, and those that its model reads besides."""
    kind = CONFIG_MAPPING[model_type]
    declared = {key.name for key in dataclasses.fields(kind)}
    other_names = kind.attribute_map.keys() | {*kind.attribute_map.values()}
    source = inspect.getsource(sys.modules[_class_of(kind).__module__])
    read = re.findall(r"config\.(\w+)|getattr\(\w*config, \"(\w+)\"", source)
    return frozenset(declared | other_names | {*itertools.chain(*read)})


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {nearest[0]}?" if nearest else ""


def _read_folder(folder: Path) -> tuple[str, dict[str, Any]]:
    """The model_type of a folder's config.json, and its keys as the class has them, without those
    that have no effect. Raises ValueError: it cannot be read, or is of no model that is trained."""
    file = folder / "config.json"
    try:
        stored = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(stored, dict) or "model_type" not in stored:
        raise ValueError(f"{file} is no JSON object with a model_type")
    if stored.get("quantization_config") is not None:
        raise ValueError(
            f"the weights beside {file} are quantized (quantization_config): convert them to "
            "bfloat16, and take this key away"
        )
    model_type = stored.pop("model_type")
    _refuse_unknown(model_type, {})
    described = hugging_face_config(model_type, stored).to_diff_dict()
    kept = _known_keys(model_type) - PASSED_OVER
    return model_type, {key: value for key, value in described.items() if key in kept}


def check(config: Config) -> list[tuple[str, str]]:
    """What is wrong with the keys, and what would work."""
    try:
        refusal = _refusal_of_class(*_key(config))
        if refusal is not None:
            return [("config", refusal)]
        _attention_calls(*_key(config))
    except UnsupportedError as error:
        return [("config", str(error))]
    drops, draws = _random_in_forward(*_key(config))
    keys = [
        key
        for key, value in vars(_described(config)).items()
        if "drop" in key and isinstance(value, float) and value > 0
    ]
    if drops or (draws and keys):
        problem = (
            "the class drops elements where no module of dropout is, by masks that would depend on "
            f"the layout: set {' and '.join(keys) or 'its dropout'} to 0"
        )
        return [("config", problem)]
    if draws:
        problem = (
            f"the class draws random numbers in its forward ({draws}), which would depend on the "
            "layout, and none of its keys turns that off: it is not trained here"
        )
        return [("model_type", problem)]
    return []


def _refusal_of_class(model_type: str, keys: str) -> str | None:
    """What the class itself raises if it cannot be made with these keys."""
    try:
        _on_meta(model_type, keys)
    except Exception:
        described = hugging_face_config(model_type, json.loads(keys))
        plain = _class_of(type(described))
        try:
            with torch.device("meta"):
                plain._from_config(described)
        except Exception as error:  # a class may raise anything
            return f"{plain.__name__} cannot be made with them: {type(error).__name__}: {error}"
        raise  # the class is not the reason
    return None


def to_hugging_face(config: Config) -> dict[str, Any]:
    """A config.json, which `from_pretrained` reads. Raises InputError: the weights beside it would
    have a form that is not written."""
    _file_names(*_key(config)).require_supported()
    described = _described(config)
    described.use_cache = True
    return {**described.to_dict(), "architectures": [_class_of(type(described)).__name__]}


def _class_of(kind: type[PreTrainedConfig]) -> Any:
    """The class of a causal language model, from that of its config. Raises ValueError: the family
    has none."""
    classes: Any = AutoModelForCausalLM._model_mapping
    if kind in classes:
        return classes[kind]
    # The text model of several that are one family (Emu3, Llama 3.2 Vision): transformers has its
    # class under the config of all, beside which its own is declared.
    for whole in vars(sys.modules[kind.__module__]).values():
        if not (isinstance(whole, type) and issubclass(whole, PreTrainedConfig)):
            continue
        has_it = whole.sub_configs.get("text_config") is kind and whole in classes
        if has_it and classes[whole].config_class is kind:
            return classes[whole]
    raise ValueError(f"transformers has no causal language model of the type {kind.model_type}")


# The model ----------------------------------------------------------------------------------------


class CausalLM:
    """Mixed into a class of transformers: how meshtrain calls it."""

    def blocks(self: Any) -> list[nn.Module]:
        """Embedding, layers and head. What lies between them belongs to the following one."""
        ends = self.get_input_embeddings(), self.get_output_embeddings()
        return [block for block in (ends[0], *layers_of(self), ends[1]) if block is not None]

    def forward(
        self: Any,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: AttentionContext | Tensor | None = None,
    ) -> Tensor:
        """Tokens (b, s) -> logits (b, s, v). positions: (b, s), from 0 in each document."""
        if self.attends:
            mask = Attended(AttentionContext.of(documents), tokens.shape)
            return self.logits(tokens, positions, mask)
        # The class finds the documents itself, where positions begin anew.
        return self.logits(tokens, None if documents is None else positions)

    def logits(
        self: Any, tokens: Tensor, positions: Tensor | None, mask: "Attended | None" = None
    ) -> Tensor:
        """The class's own forward."""
        given: dict[str, Any] = {"position_ids": positions, "attention_mask": mask}
        given["output_router_logits"] = False  # `attach_balance` has them
        given = {key: value for key, value in given.items() if key in self.takes}
        plain: Any = super()
        return plain.forward(input_ids=tokens, use_cache=False, **given).logits


def Model(config: Config) -> nn.Module:  # noqa: N802  (a model file's `Model` takes a Config)
    """The class of a config, with values of its own initialization."""
    return _build(*_key(config))


def _key(config: Config) -> tuple[str, str]:
    """The model_type of a config and its keys as JSON, by which its model is built once."""
    assert config.model_type is not None  # its __post_init__ has one, or raises
    return config.model_type, json.dumps(config.config, sort_keys=True)


def _described(config: Config) -> PreTrainedConfig:
    model_type, keys = _key(config)
    return hugging_face_config(model_type, json.loads(keys))


def _build(model_type: str, keys: str, *, attends: bool | None = None) -> Any:
    """attends: whether its attention is ours; None: if the class can take it."""
    described = hugging_face_config(model_type, json.loads(keys))
    plain = _class_of(type(described))
    calls = () if attends else _attention_calls(model_type, keys)
    if attends is None:
        attends = bool(calls)
    kind: Any = type(plain.__name__, (CausalLM, plain), {"__module__": __name__})
    options = {"attn_implementation": OURS} if attends else {}
    model = kind._from_config(described, dtype=torch.float32, **options)
    model.attends = attends
    model.experts = adopt_experts(model)
    attach_balance(model)
    _use_our_dropout(model, calls)
    model.takes = frozenset(inspect.signature(plain.forward).parameters)
    return model


def _use_our_dropout(model: nn.Module, calls: Iterable["AttentionCall"]) -> None:
    """Dropout whose masks are the same on every layout, in the places where the class has it."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p))
    for call in calls:
        if call.dropout > 0:
            dropout = Dropout(call.dropout, heads=call.heads)
            model.get_submodule(call.module).add_module(PROBABILITIES, dropout)


def layers_of(model: Any) -> list[nn.Module]:
    """The layers of a class: the list of as many modules as its config has layers, or else its
    longest list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    count = getattr(model.config, "num_hidden_layers", None)
    return list(max(lists, key=lambda found: (len(found) == count, len(found)), default=[]))


# How it splits ------------------------------------------------------------------------------------


def tp_plan(config: Config) -> dict[str, str] | None:
    """The class's own plan, for the layers that this config has."""
    model = _on_meta(*_key(config))
    names = {name for name, _ in model.named_modules()}
    names |= {name for name, _ in model.named_parameters()}
    own = plan_without_experts(model, model.experts, model.tp_plan or {})
    plan = {key: word for key, word in own.items() if fnmatch.filter(names, key)}
    for activation in _patterns(model, _split_activations(model, plan)):
        plan[activation] = "replicated_with_grad_allreduce"
    return plan or None


def _split_activations(model: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """Activations with parameters of their own behind a layer that is split by columns (Apertus):
    each rank applies them to its features, and the plans of transformers do not name them."""
    columns = [key for key, word in plan.items() if word == "colwise"]
    found = []
    for name, module in model.named_modules():
        parent, _, child = name.rpartition(".")
        has_parameters = any(True for _ in module.parameters())
        if child != "act_fn" or not has_parameters:
            continue
        siblings = model.get_submodule(parent).named_children()
        beside = [f"{parent}.{sibling}" for sibling, _ in siblings]
        if any(fnmatch.filter(beside, key) for key in columns):
            found.append(name)
    return found


def ep_plan(config: Config) -> dict[str, str] | None:
    """The layers of experts that can be distributed."""
    model = _on_meta(*_key(config))
    return dict.fromkeys(_patterns(model, model.experts), "ep_dispatch_experts") or None


def cp_plan(config: Config) -> dict[str, str] | None:
    """The modules in which tokens attend to each other."""
    names = [call.module for call in _attention_calls(*_key(config))]
    model = _on_meta(*_key(config))
    return dict.fromkeys(_patterns(model, names), "attention") or None


def _patterns(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Patterns that match these modules and no other: with `*` for the number of a layer, so that
    they fit a model of fewer layers, too."""
    wanted = set(names)
    patterns = []
    for name in names:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        matched = fnmatch.filter((other for other, _ in model.named_modules()), pattern)
        patterns.append(pattern if wanted.issuperset(matched) else name)
    return list(dict.fromkeys(patterns))


def stored_as(config: Config) -> dict[str, tuple[str, ...]]:
    """The names in files, by transformers' own conversion tables."""
    return _file_names(*_key(config)).stored_as


@lru_cache(maxsize=8)
def _file_names(model_type: str, keys: str) -> FileNames:
    return file_names(_on_meta(model_type, keys))


@lru_cache(maxsize=8)
def _on_meta(model_type: str, keys: str) -> Any:
    with torch.device("meta"):
        return _build(model_type, keys)


class AttentionCall(NamedTuple):
    """A call of attention in a forward."""

    module: str  # the name of the module that calls
    heads: int  # of its queries
    dropout: float  # of its probabilities, in training


@lru_cache(maxsize=8)
def _attention_calls(model_type: str, keys: str) -> tuple[AttentionCall, ...]:
    """The calls of a forward on the meta device. None: the class computes its attention itself, or
    looks into its mask for more than attention.

    Raises UnsupportedError: its attention is not causal.
    """
    described = hugging_face_config(model_type, json.loads(keys))
    if not _class_of(type(described))._supports_attention_backend:
        return ()
    with torch.device("meta"):
        model = _build(model_type, keys, attends=True)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
    calls: dict[nn.Module, tuple[int, float]] = {}
    mask = Attended(AttentionContext(), tokens.shape, calls=calls)
    try:
        model.train().logits(tokens, torch.zeros_like(tokens), mask)
    except UnsupportedError:
        raise
    except Exception:  # whatever a class raises that cannot run so
        return ()
    names = {module: name for name, module in model.named_modules()}
    return tuple(AttentionCall(names[module], *call) for module, call in calls.items())


class _Drops(TorchFunctionMode):
    """Sees the functions that drop elements."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        probability = 0.0
        if func is nn.functional.dropout:
            given = _by_name(("input", "p", "training"), args, kwargs)
            if given.get("training", True):
                probability = given.get("p", 0.5)
        if func is nn.functional.scaled_dot_product_attention:
            given = _by_name(("query", "key", "value", "attn_mask", "dropout_p"), args, kwargs)
            probability = given.get("dropout_p", 0.0)
        if probability > 0:
            self.found = True
        return func(*args, **kwargs)


def _by_name(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call. `names`: of those that may be given by position."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


class _Draws(TorchDispatchMode):
    """Sees the operators that draw random numbers. A single one does not count: classes draw it for
    each layer that they could leave out (LayerDrop), also where none is left out.

    A forward on the meta device that asks for a value gets 0, and goes on."""

    found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks_for_value = func is torch.ops.aten._local_scalar_dense.default
        if asks_for_value and args[0].is_meta:
            zero = torch.zeros((), dtype=args[0].dtype)
            return zero.item()

        out = func(*args, **kwargs or {})
        name = func.name()  # such as aten::bernoulli.p
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        # Attention has the tag for its dropout, which `_Drops` sees.
        is_attention = "attention" in name
        if is_random and not is_attention and out.numel() > 1:
            operator, _, _ = name.removeprefix("aten::").partition(".")
            self.found = operator
        return out


@lru_cache(maxsize=8)
def _random_in_forward(model_type: str, keys: str) -> tuple[bool, str]:
    """What a forward on the meta device does at random, but for modules whose masks are the same on
    every layout (`_use_our_dropout`): whether it drops elements, and the name of an operator that
    draws numbers, or nothing."""
    with torch.device("meta"):
        model = _build(model_type, keys)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
    for module in model.modules():
        # Attention that is the class's own drops by heads, which a module does not know.
        if isinstance(module, Dropout) and model.attends:
            module.p = 0.0
    with suppress(Exception), _Drops() as drops, _Draws() as draws:
        model.train()(tokens, torch.zeros_like(tokens))  # a class may raise that it cannot run so
    return drops.found, draws.found


# Attention ----------------------------------------------------------------------------------------


class UnsupportedError(NotImplementedError):
    """A class computes what `meshtrain.attention` does not."""


NOT_CAUSAL = (
    "the class attends to tokens that are neither before a token nor within a sliding window: a "
    "class that is an encoder by default is a language model with is_decoder: true"
)


class Attended:
    """What a class gets as its `attention_mask`, and hands to each of its layers: the context of
    attention, with the window of the layer's kind. A class takes it for a mask of all pairs of
    tokens, (b, 1, s, s), with which it does nothing but hand it on."""

    ndim = 4

    def __init__(
        self,
        context: AttentionContext,
        shape: torch.Size,
        *,
        window: int | None = None,
        calls: dict[nn.Module, tuple[int, float]] | None = None,
    ) -> None:
        """
        Args:
            shape: (b, s), of the tokens. window: see `attention`.
            calls: gets the heads and the dropout of each module that calls attention.
        """
        self.context = context
        self.tokens = shape
        self.shape = (shape[0], 1, shape[1], shape[1])
        self.window = window
        self.calls = calls

    def to(self, *args: Any, **kwargs: Any) -> "Attended":
        """A class moves its mask to its device, where the context is already."""
        return self


def make_mask(*, mask_function: Any, attention_mask: Attended, **others: Any) -> Attended:
    """transformers' interface of masks."""
    return Attended(
        attention_mask.context,
        attention_mask.tokens,
        window=_window_of(mask_function),
        calls=attention_mask.calls,
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Attended,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of attention: (b, h, s, e) -> (b, s, h, e).

    s_aux: (h,), a logit of each head that takes probability from its keys. dropout: is that of
    `_use_our_dropout`.
    """
    if attention_mask is None or not getattr(module, "is_causal", True) or is_causal is False:
        raise UnsupportedError(NOT_CAUSAL)
    if attention_mask.calls is not None:
        attention_mask.calls[module] = query.shape[1], dropout
    context = attention_mask.context
    layer = getattr(module, "layer_idx", None)
    if layer is not None:
        context = context.at(layer)
    y = attention(
        query,
        key,
        value,
        context,
        scale=scaling,
        window=attention_mask.window,
        soft_cap=softcap,
        sinks=s_aux,
        dropout=getattr(module, PROBABILITIES, 0.0),
    )
    return y.transpose(1, 2).contiguous(), None


def _window_of(mask_function: Any) -> int | None:
    """The sliding window of a function that transformers has made for a mask; None: there is none.
    Raises UnsupportedError: it is another kind of mask."""
    if mask_function is causal_mask_function:
        return None
    parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    windows = []
    for part in parts:
        inside = inspect.getclosurevars(part).nonlocals
        if part is not causal_mask_function:
            windows.append(inside.get("sliding_window"))
    if len(windows) != 1 or windows[0] is None:
        raise UnsupportedError(NOT_CAUSAL)
    return windows[0]


ALL_ATTENTION_FUNCTIONS.register(OURS, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(OURS, make_mask)
