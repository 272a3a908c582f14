"""Tensor-parallel plans: what each layer of a model becomes over `tp`, checked against its sizes before it is done.

Pure: it looks at the names and sizes of a model's modules and says what follows, or why it cannot be and what could.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from meshtrain.errors import InputError

if TYPE_CHECKING:
    from meshtrain.parallel.tensor_parallel import TensorParallel

ATTENTION = "attention"  # the one word of a `cp_plan`
EXPERTS = "ep_dispatch_experts"  # the one word of an `ep_plan`, Hugging Face's
REPLICATED = "replicated_with_grad_allreduce"
LORA_A, LORA_B = "lora_A", "lora_B"  # the layers of an adapter, inside of that beside it (`linear/lora.py`)
NO_SEQUENCE = "the tp_plan has no embedding_rowwise layer, which is what splits the sequence over tp"


class SplitError(InputError):
    """A model that cannot be split as asked. `problems` has a sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Heads:
    """The key/value heads that one rank computes, where there are too few for each rank to have its own."""

    count: int  # of the whole layer, all of which every rank holds
    width: int  # of a head, in rows of the weight
    rows: slice  # of the weight, that this rank computes with: the heads that its queries look at
    repeated: tuple[int, ...] | None  # which of these each of its queries looks at, if they do not share them evenly


@dataclass(frozen=True)
class Split:
    """What becomes of one layer."""

    layer: str  # its name in the model
    style: str  # a word of STYLES
    queries: int = 0  # of a layer of an attention: the query heads, its own heads, and a head's width
    heads: int = 0
    width: int = 0
    everywhere: bool = False  # the layer has too few heads to be cut, so every rank holds it
    parameters: tuple[str, ...] = ()  # of a style for parameters: their names in the layer

    def dim_of(self, parameter: str) -> int | None:
        return None if self.everywhere else STYLES[self.style].dim_of(parameter)

    def heads_of(self, tp: int, index: int) -> Heads | None:
        """What rank `index` of `tp` computes of a layer that every rank holds; None of any other."""
        if not self.everywhere:
            return None
        queries = range(index * self.queries // tp, (index + 1) * self.queries // tp)
        head_of = [query * self.heads // self.queries for query in queries]
        first, different = head_of[0], head_of[-1] - head_of[0] + 1
        queries_per_head = len(head_of) // different
        even = head_of == [first + i // queries_per_head for i in range(len(head_of))]
        rows = slice(first * self.width, (head_of[-1] + 1) * self.width)
        return Heads(self.heads, self.width, rows, None if even else tuple(head - first for head in head_of))


class Style:
    """What a word of a plan does to the layers of its pattern. A new style is a subclass and an entry in STYLES."""

    word: ClassVar[str]
    becomes: ClassVar[str] = ""  # the class of the layer that takes the place of the plain one, for people
    dim: ClassVar[int | None] = None  # of the weight, that is cut: 0 for outputs (or the vocabulary), 1 for inputs
    kind: ClassVar[str] = "a linear layer"  # that it is for, for people
    sizes: ClassVar[tuple[str, ...]] = ("in_features", "out_features")  # attributes by which that kind is known
    for_parameters: ClassVar[bool] = False  # patterns name parameters, or modules around them; no layer is replaced

    def check(self, name: str, module: Any) -> list[str]:
        """Why a layer cannot take this style, with a way out; nothing if it can. Only sizes are looked at."""
        if not all(hasattr(module, size) for size in self.sizes):
            return [self.refusal(name, module)]
        if _weight(module) is not None or not hasattr(module, "weight"):
            return []
        computed = f"{name} has no parameter weight, but computes it from others (weight_norm, spectral_norm, pruning)"
        return [f"{computed}, which tp cannot split: take {name} out of the tp_plan, or use tp: 1"]

    def refusal(self, name: str, module: Any) -> str:
        return f"the tp_plan wants {name} {self.word}, which is for {self.kind}, and it is a {type(module).__name__}"

    def split(self, name: str, modules: Mapping[str, Any], plan: Mapping[str, str], tp: int) -> tuple[Split, list[str]]:
        """What becomes of a layer of a model, which `check` has passed, and what is wrong with that on `tp` ranks."""
        return Split(name, self.word), []

    def dim_of(self, parameter: str) -> int | None:
        """Which dim of the layer's "weight" or "bias" is cut; None: every rank holds all of it."""
        return self.dim

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        """What takes the plain layer's place, with this rank's part of its parameters; by default the layer itself."""
        return plain


class Colwise(Style):
    """A linear layer whose outputs are split: between heads, in a module with a `head_dim` (as Hugging Face's
    attentions have). The most heads among its column-wise layers are those of the queries; a layer with fewer, of keys
    or values, is cut if `tp` divides them, and held by every rank if not. In a module with `num_heads` and no
    `head_dim` (latent attention) each layer has so many heads, of a width of its own."""

    word, becomes, dim = "colwise", "ColumnParallelLinear", 0

    def split(self, name: str, modules: Mapping[str, Any], plan: Mapping[str, str], tp: int) -> tuple[Split, list[str]]:
        parent = base_of(name).rpartition(".")[0]
        width: Any = getattr(modules[parent], "head_dim", None)
        count: Any = getattr(modules[parent], "num_heads", None)
        outputs = modules[name].out_features
        if width is None and (not isinstance(count, int) or outputs % count):  # nothing is known of heads
            return Split(name, self.word), []
        if width is None:
            return Split(name, self.word, count, count, outputs // count), _undivided_heads(count, tp)
        columns = [
            modules[other].out_features
            for other in modules
            if other.rpartition(".")[0] == parent
            and any(fnmatchcase(other, pattern) and word == self.word for pattern, word in plan.items())
        ]
        problems, most = [], max(columns)
        if outputs % width or most % width:
            problems.append(f"{name} has {outputs} outputs, which are no whole heads of {width}")
        queries, heads = most // width, outputs // width
        problems += _undivided_heads(queries, tp)
        return Split(name, self.word, queries, heads, width, everywhere=heads % tp != 0), problems

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        mesh = layers.mesh
        return layers.column_parallel(plain, heads=split.heads_of(mesh.size("tp"), mesh.index("tp")))


class ColwiseGatherOutput(Style):
    """A linear layer whose outputs, the logits, are split, and stand as a DTensor for all of them."""

    word, becomes, dim = "colwise_gather_output", "ColumnParallelLinear", 0

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        return layers.column_parallel(plain, use_local_output=False)


class Rowwise(Style):
    """A linear layer whose inputs are split. Its bias is added to the sum over the ranks, so it is not cut."""

    word, becomes, dim = "rowwise", "RowParallelLinear", 1

    def dim_of(self, parameter: str) -> int | None:
        return None if parameter == "bias" else self.dim

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        return layers.row_parallel(plain)


class EmbeddingRowwise(Style):
    """An embedding whose rows, one per token of the vocabulary, are split; the sequence is split behind it."""

    word, becomes, dim = "embedding_rowwise", "VocabParallelEmbedding", 0
    kind, sizes = "an embedding", ("num_embeddings",)

    def check(self, name: str, module: Any) -> list[str]:
        return super().check(name, module) or unsupported_options(module)

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        return layers.vocab_parallel(plain)


class ReplicatedWithGradAllReduce(Style):
    """Parameters that all ranks hold and use with their features each (a norm of q and k): gradients are summed."""

    word, for_parameters = REPLICATED, True

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        layers.sum_gradients(plain, split.parameters)
        return plain


class Replicate(Style):
    """Parameters beside column- and row-wise layers that all ranks hold and use with all features, as they do those
    outside: the first halves of latent attention's projections. Only says that they lie outside."""

    word, for_parameters = "replicate", True


class GatherSequence(Style):
    """An nn.Identity whose input every rank needs whole for its own heads, and that no column-wise layer gathers: the
    one rotary key of latent attention. Its gradient is summed over the ranks."""

    word, becomes, kind = "gather_sequence", "SequenceGather", "an nn.Identity"

    def check(self, name: str, module: Any) -> list[str]:
        return [] if type(module).__name__ == "Identity" else [self.refusal(name, module)]

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        return layers.sequence_gather()


STYLES: dict[str, Style] = {  # by Hugging Face's words; `gather_sequence` is ours
    style.word: style
    for style in (
        *(Colwise(), Rowwise(), ColwiseGatherOutput(), EmbeddingRowwise(), ReplicatedWithGradAllReduce()),
        *(Replicate(), GatherSequence()),
    )
}


def plan_of(model: type, key: str, plan: Any = None) -> Any:
    """A plan as an option gives it, else what the file of a model's class has, or of its base: FSDP derives classes."""
    modules = (sys.modules.get(base.__module__) for base in model.__mro__)
    return next((getattr(module, key) for module in modules if hasattr(module, key)), None) if plan is None else plan


def split_layers(model: Any, plan: Mapping[str, str], tp: int) -> list[Split]:
    """What each layer that the plan names becomes on `tp` ranks, in the model's order.

    Args:
        model: a torch module; only names and sizes are looked at, so it may be on the meta device.
        plan: pattern of layers' names -> a word of STYLES; the first that matches counts.

    Raises:
        SplitError: a pattern that matches nothing, a word that is no style, or a layer that cannot take its style.
    """
    modules = dict(model.named_modules())
    names = [*modules, *(f"{name}.{own}".lstrip(".") for name in modules for own in _parameters(modules[name]))]
    problems = _unmatched("tp_plan", plan, names, "layer")
    problems += [
        f"the tp_plan's {pattern!r} is {word!r}: use one of {', '.join(STYLES)}"
        for pattern, word in plan.items()
        if word not in STYLES
    ]
    splits: list[Split] = []
    for name, module in modules.items():
        style = style_of_layer(plan, name)
        if style is None or style.for_parameters:
            continue
        refused = style.check(name, module)
        if not refused:
            split, refused = style.split(name, modules, plan, tp)
            splits.append(split)
        problems += refused
    problems += _inconsistent_ties(splits, modules)
    if problems:
        raise SplitError(list(dict.fromkeys(problems)))
    return splits


def context_modules(model: Any, plan: Mapping[str, str]) -> list[str]:
    """The modules in which, by a `cp_plan`, tokens see each other. Raises SplitError: a wrong pattern or word."""
    return _planned_modules(model, "cp_plan", plan, ATTENTION)


def expert_modules(model: Any, plan: Mapping[str, str]) -> dict[str, int]:
    """The modules that, by an `ep_plan`, hold experts, and how many. SplitError: a wrong pattern, word or module."""
    counts: dict[str, int] = {}
    problems = []
    for name in _planned_modules(model, "ep_plan", plan, EXPERTS):
        module = model.get_submodule(name)
        sizes = {p.shape[0] if "." not in own and p.dim() > 1 else None for own, p in module.named_parameters()}
        counts[name] = next(iter(sizes), None) or 0
        if len(sizes) != 1 or None in sizes or not hasattr(module, "dispatch"):
            problems.append(
                f"the ep_plan names {name}, which is no layer of experts: it has to compute by its `dispatch`, as "
                "meshtrain.experts.Experts does, and its parameters have to be its own, with the experts as dim 0"
            )
    if problems:
        raise SplitError(problems)
    return counts


def _planned_modules(model: Any, kind: str, plan: Mapping[str, str], word: str) -> list[str]:
    names = [name for name, _ in model.named_modules()]
    problems = _unmatched(kind, plan, names, "module")
    problems += [f"the {kind}'s {key!r} is {other!r}: use {word}" for key, other in plan.items() if other != word]
    if problems:
        raise SplitError(problems)
    return [name for name in names if style_of(plan, [name])]


def no_context_plan(model: str) -> str:
    return f"{model} has no cp_plan, which says where it mixes tokens: use cp: 1, or give the model's file one"


def styled_parameters(model: Any, plan: Mapping[str, str]) -> Iterator[Split]:
    """Modules with parameters to which a plan gives a style for parameters, by their name or a module's around them."""
    for name, module in model.named_modules():
        around = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]
        words = {own: style_of(plan, [f"{name}.{own}".lstrip("."), *around]) for own in _parameters(module)}
        for word, style in STYLES.items():
            parameters = tuple(own for own in words if words[own] == word)
            if style.for_parameters and parameters:
                yield Split(name, word, parameters=parameters)


def undecided(model: Any, plan: Mapping[str, str], splits: Sequence[Split]) -> list[str]:
    """Parameters of which a plan does not say whether each rank uses them with a part of the features or with all:
    not split, and in a module, or of one, beside both a column-wise and a row-wise layer."""
    dims: dict[str, set[int | None]] = {}
    for split in splits:
        dims.setdefault(split.layer.rpartition(".")[0], set()).add(STYLES[split.style].dim)
    between = [name for name, split_dims in dims.items() if {0, 1} <= split_dims]
    decided = {(split.layer, own) for split in styled_parameters(model, plan) for own in split.parameters}
    layers = {split.layer for split in splits}
    return [
        f"{name}.{own}".lstrip(".")
        for name, module in model.named_modules()
        for own in _parameters(module)
        if (name in between or name.rpartition(".")[0] in between) and name not in layers and (name, own) not in decided
    ]


def shards_sequence(plan: Mapping[str, str]) -> bool:
    """Whether a plan has the layer whose output is a part of the sequence on each rank."""
    return EmbeddingRowwise.word in plan.values()


def has_sequence_parts(option: bool | None, plan: Mapping[str, str] | None) -> bool:
    """Whether each rank of `tp` has a part of the sequence between the layers: by the option, else by the plan."""
    return shards_sequence(plan or {}) if option is None else option


def unsupported_options(embedding: Any) -> list[str]:
    """What an embedding has that one split over the vocabulary does not do."""
    options = ("max_norm", "scale_grad_by_freq", "sparse", "padding_idx")
    values = {option: getattr(embedding, option, None) for option in options}
    return [
        f"an embedding with {option} cannot be split over tp: leave {option} out"
        for option, value in values.items()
        if value is not None and value is not False  # a padding_idx may be 0
    ]


def _undivided_heads(queries: int, tp: int) -> list[str]:
    near = ", ".join(str(n) for n in range(1, queries + 1) if queries % n == 0)
    return [f"{queries} query heads do not divide over tp {tp}: use a tp of {near}"] if queries % tp else []


def _unmatched(key: str, plan: Mapping[str, str], names: Sequence[str], kind: str) -> list[str]:
    return [
        f"the {key}'s {pattern!r} matches no {kind}: mend the pattern"
        for pattern in plan
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def style_of(plan: Mapping[str, str], names: Sequence[str]) -> str | None:
    """That of the first pattern which matches one of these names."""
    return next((plan[pattern] for pattern in plan if any(fnmatchcase(name, pattern) for name in names)), None)


def base_of(name: str) -> str:
    """The layer that one of an adapter is beside, or the layer itself."""
    base, _, own = name.rpartition(".")
    return base if own in (LORA_A, LORA_B, "lora_dropout") else name


def style_of_layer(plan: Mapping[str, str], name: str) -> Style | None:
    """That of a layer; of an adapter's that of the layer beside it, for the one whose outputs or inputs it is that are
    cut there. The other works on features that every rank has."""
    style = STYLES.get(style_of(plan, [base_of(name)]) or "")
    if style is None or base_of(name) == name:
        return style
    return style if style.dim == {LORA_A: 1, LORA_B: 0}.get(name.rpartition(".")[2], -1) else None


def _parameters(module: Any) -> list[str]:
    return [name for name, parameter in getattr(module, "_parameters", {}).items() if parameter is not None]


def _weight(module: Any) -> Any:
    """A layer's weight; None: it has none, or computes it from other parameters."""
    return getattr(module, "_parameters", vars(module)).get("weight")


def _inconsistent_ties(splits: list[Split], modules: Mapping[str, Any]) -> list[str]:
    """Layers that share a weight which only one of them splits, or which they split in two ways."""
    cut_by = {split.layer: (STYLES[split.style].dim, split.everywhere) for split in splits}
    sharing: dict[int, list[str]] = {}
    for name, module in modules.items():
        if (weight := _weight(module)) is not None:
            sharing.setdefault(id(weight), []).append(name)
    return [
        f"{' and '.join(names)} share one weight: the tp_plan has to split all of them in the same way"
        for names in sharing.values()
        if len({cut_by.get(name) for name in names}) > 1
    ]
