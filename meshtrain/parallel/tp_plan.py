"""Tensor-parallel plans: how each layer of a model is split over `tp`, checked against its sizes
beforehand.

Pure: from the names and sizes of a model's modules it derives the splits, or says why one is
impossible and what works.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from meshtrain.errors import InputError, any_of, names_near, without_numbers
from meshtrain.parallel.sharding import chunk_range

if TYPE_CHECKING:
    from meshtrain.parallel.tensor_parallel import TensorParallel

ATTENTION = "attention"  # the only word of a `cp_plan`
EXPERTS = "ep_dispatch_experts"  # the only word of an `ep_plan`, from Hugging Face
REPLICATED = "replicated_with_grad_allreduce"
# the layers of an adapter, children of the layer that it adapts (`linear/lora.py`)
LORA_A, LORA_B = "lora_A", "lora_B"
NO_SEQUENCE = (
    "the tp_plan has no embedding_rowwise_sequence layer, which is what splits the sequence over tp"
)


class SplitError(InputError):
    """A model that cannot be split as requested. `problems` has a sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:  # pickled when a worker process raises it
        return type(self), (self.problems,)


@dataclass(frozen=True)
class Heads:
    """The key/value heads that one rank computes, if there are too few for each rank to have its
    own. 3 key/value heads for 12 query heads, on 2 ranks:

        query heads of rank 0    0 1 2 3 4 5      key/value heads that they use    0 0 0 0 1 1
        query heads of rank 1    6 7 8 9 10 11                                     1 1 2 2 2 2

    Both need head 1, so each rank holds the whole weight and uses the rows of two heads.
    """

    count: int  # heads of the whole layer, which every rank holds
    queries: int  # query heads of this rank
    width: int  # rows of the weight per head
    rows: slice  # the rows of the weight that this rank uses: the heads that its queries attend to
    # index among these heads for each query head, if they are not shared evenly
    repeated: tuple[int, ...] | None

    @property
    def shared_by(self) -> int:
        """How many of this rank's queries share one of these heads, as attention sees them."""
        if self.repeated is not None:
            return 1
        return self.queries // ((self.rows.stop - self.rows.start) // self.width)

    def used(self) -> list[slice]:
        """The rows in the order of use: a head that is repeated more than once."""
        if self.repeated is None:
            return [self.rows]
        starts = [self.rows.start + head * self.width for head in self.repeated]
        return [slice(start, start + self.width) for start in starts]


@dataclass(frozen=True)
class Split:
    """The split of one layer."""

    layer: str  # its name in the model
    style: str  # a word of STYLES
    # for a layer of attention: the number of query heads, its own heads, and a head's width
    queries: int = 0
    heads: int = 0
    width: int = 0
    everywhere: bool = False  # the layer has too few heads to be split, so every rank holds it
    # for a fused layer: the number of outputs of each of its parts
    packed: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()  # for a style of parameters: their names in the layer

    def dim_of(self, parameter: str) -> int | None:
        return None if self.everywhere else STYLES[self.style].dim_of(parameter)

    def heads_of(self, tp: int, index: int) -> Heads | None:
        """The heads that rank `index` of `tp` computes of a layer that every rank holds; None for
        any other layer."""
        return self._heads(tp, index) if self.everywhere else None

    def rows_of(self, tp: int, index: int) -> tuple[slice, ...]:
        """The rows that rank `index` of `tp` uses of a fused layer: of each part those that it
        would have of a layer of its own. The outputs of one rank are in the order of the parts."""
        rows = []
        start = 0
        for size in self.packed:
            own = [chunk_range(size, tp, index)]
            # Of queries, keys and values: several ranks may need the same head, as `_heads` says.
            if self.width and size // self.width % tp:
                own = replace(self, heads=size // self.width)._heads(tp, index).used()
            rows += [slice(start + part.start, start + part.stop) for part in own]
            start += size
        return tuple(rows)

    def _heads(self, tp: int, index: int) -> Heads:
        queries = range(index * self.queries // tp, (index + 1) * self.queries // tp)
        head_of_query = [query * self.heads // self.queries for query in queries]
        first, last = head_of_query[0], head_of_query[-1]
        among_own = [head - first for head in head_of_query]

        # Attention takes heads that equal runs of queries share as they are; others it repeats.
        run = len(queries) // (last - first + 1)
        is_even = among_own == [i // run for i in range(len(queries))]
        return Heads(
            count=self.heads,
            queries=len(queries),
            width=self.width,
            rows=slice(first * self.width, (last + 1) * self.width),
            repeated=None if is_even else tuple(among_own),
        )


class Style:
    """The effect of a word of a plan on the layers of its pattern. A new style is a subclass and an
    entry in STYLES."""

    word: ClassVar[str]
    becomes: ClassVar[str] = ""  # the class of the layer that replaces the plain one, for messages
    # the dim of the weight that is cut: 0: outputs (or vocabulary), 1: inputs
    dim: ClassVar[int | None] = None
    kind: ClassVar[str] = "a linear layer"  # the kind of layer that it applies to, for messages
    # attributes that identify that kind
    sizes: ClassVar[tuple[str, ...]] = ("in_features", "out_features")
    # patterns match parameters, or modules around them; no layer is replaced
    for_parameters: ClassVar[bool] = False
    # Its output, or its input, is a part of the features on each rank.
    gives_part: ClassVar[bool] = False
    takes_part: ClassVar[bool] = False
    # It works on whole sequences only, so that a plan with it cannot split them.
    whole_sequences: ClassVar[bool] = False

    def check(self, name: str, module: Any) -> list[str]:
        """Why a layer cannot have this style, and what works instead; empty if it can. Only sizes
        are read."""
        if not all(hasattr(module, size) for size in self.sizes):
            return [self.refusal(name, module)]
        if _weight(module) is not None or not hasattr(module, "weight"):
            return []
        return [
            f"{name} has no parameter weight, but computes it from others (weight_norm, "
            f"spectral_norm, pruning), which tp cannot split: take {name} out of the tp_plan, or "
            "use tp: 1"
        ]

    def refusal(self, name: str, module: Any) -> str:
        return (
            f"the tp_plan wants {name} {self.word}, which is for {self.kind}, and it is a "
            f"{type(module).__name__}"
        )

    def split(
        self, name: str, modules: Mapping[str, Any], plan: Mapping[str, str], tp: int
    ) -> tuple[Split, list[str]]:
        """The split of a layer that has passed `check`, and the problems of that split on `tp`
        ranks."""
        return Split(name, self.word), []

    def dim_of(self, parameter: str) -> int | None:
        """The dim of the layer's "weight" or "bias" that is cut; None: every rank holds it
        whole."""
        return self.dim

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        """The layer that replaces the plain one, with this rank's part of its parameters; by
        default the plain one."""
        return plain


class Colwise(Style):
    """A linear layer whose outputs are split: between heads, if its module has a `head_dim` (as
    attention modules of Hugging Face have) and it is one of the layers of attention
    (`_layers_of_attention`). The column-wise layer with the most heads holds the queries; one with
    fewer, of keys or values, is split if `tp` divides its heads, and otherwise held by every rank.
    In a module with `num_heads` and no `head_dim` (latent attention) each layer has that many
    heads, with its own head width."""

    word = "colwise"
    becomes = "ColumnParallelLinear"
    dim = 0
    gives_part = True

    def split(
        self, name: str, modules: Mapping[str, Any], plan: Mapping[str, str], tp: int
    ) -> tuple[Split, list[str]]:
        unknown_heads = Split(name, self.word)
        layer = base_of(name)
        parent = modules[layer.rpartition(".")[0]]
        width: Any = getattr(parent, "head_dim", None)
        count: Any = getattr(parent, "num_heads", None)
        outputs = modules[name].out_features

        if width is None:  # latent attention: as many heads in each layer
            if not isinstance(count, int) or outputs % count:
                return unknown_heads, []
            split = Split(name, self.word, queries=count, heads=count, width=outputs // count)
            return split, _undivided_heads(count, tp)

        attention = _layers_of_attention(layer, modules, plan)
        if not attention:
            return unknown_heads, []
        most = max(modules[other].out_features for other in attention)  # those of the queries
        problems = []
        if outputs % width or most % width:
            problems.append(f"{name} has {outputs} outputs, which are no whole heads of {width}")
        queries = most // width
        heads = outputs // width
        problems += _undivided_heads(queries, tp)
        everywhere = heads % tp != 0
        return Split(name, self.word, queries, heads, width, everywhere), problems

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        heads = split.heads_of(layers.mesh.size("tp"), layers.mesh.index("tp"))
        return layers.column_parallel(plain, heads=heads)


class ColwiseGatherOutput(Style):
    """A linear layer whose outputs are split, and then gathered: each rank has all of them."""

    word = "colwise_gather_output"
    becomes = "ColumnParallelLinear"
    dim = 0

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        return layers.column_parallel(plain, gather_output=True)


class ColwiseLogits(Style):
    """A linear layer whose outputs, the logits, are split, and returned as a DTensor, of which the
    loss needs no rank to have them all."""

    word = "colwise_logits"
    becomes = "ColumnParallelLinear"
    dim = 0

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        return layers.column_parallel(plain, use_local_output=False)


class PackedColwise(Style):
    """A linear layer that computes several ones in a row, whose outputs are split one by one.

    Of attention, whose module has a `head_dim`, these are the queries, as many as the inputs of its
    row-wise layer, and keys and values of the heads that are left. Elsewhere they are as many as
    fit: 2 of gate and up, whose row-wise layer has half as many inputs; 2 without a row-wise layer.
    """

    word = "packed_colwise"
    becomes = "ColumnParallelLinear"
    dim = 0
    gives_part = True

    def split(
        self, name: str, modules: Mapping[str, Any], plan: Mapping[str, str], tp: int
    ) -> tuple[Split, list[str]]:
        outputs = modules[name].out_features
        parent = _parent(base_of(name))
        width: Any = getattr(modules[parent], "head_dim", None)
        inputs = [
            module.in_features
            for row, module in modules.items()
            if _parent(row) == parent and style_of(plan, [row]) == Rowwise.word
            if hasattr(module, "in_features")
        ]
        if len(inputs) > 1:
            problem = f"{parent} has several rowwise layers, so that {self.word} of {name} is open"
            return Split(name, self.word), [problem]

        if width is not None and inputs:
            of_queries = inputs[0]
            of_keys = (outputs - of_queries) // 2
            whole_heads = of_queries % width == 0 and of_keys % width == 0 and of_keys > 0
            if not whole_heads or of_queries + 2 * of_keys != outputs:
                problem = (
                    f"{name} has {outputs} outputs, which are no {of_queries} of queries and "
                    f"equally many of keys and values, in heads of {width}"
                )
                return Split(name, self.word), [problem]
            queries = of_queries // width
            packed = (of_queries, of_keys, of_keys)
            split = Split(name, self.word, queries=queries, width=width, packed=packed)
            return split, _undivided_heads(queries, tp)

        each = inputs[0] if inputs else outputs // 2
        if outputs % each:
            problem = f"{name} has {outputs} outputs, which are no parts of {each} each"
            return Split(name, self.word), [problem]
        return Split(name, self.word, packed=(each,) * (outputs // each)), []

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        size = layers.mesh.size("tp")
        used = [split.rows_of(size, index) for index in range(size)]
        return layers.column_parallel(plain, used=used)


class Rowwise(Style):
    """A linear layer whose inputs are split. Its bias is added to the sum over the ranks, so it is
    not split."""

    word = "rowwise"
    becomes = "RowParallelLinear"
    dim = 1
    takes_part = True

    def dim_of(self, parameter: str) -> int | None:
        return None if parameter == "bias" else self.dim

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        return layers.row_parallel(plain, splits_input=not self.takes_part)


class RowwiseSplitInput(Rowwise):
    """The same for inputs of which each rank has all, and takes its part."""

    word = "rowwise_split_input"
    takes_part = False
    whole_sequences = True


class EmbeddingRowwise(Style):
    """An embedding whose rows, one per token of the vocabulary, are split; each rank has the whole
    output."""

    word = "embedding_rowwise"
    becomes = "VocabParallelEmbedding"
    dim = 0
    kind = "an embedding"
    sizes = ("num_embeddings",)
    whole_sequences = True

    def check(self, name: str, module: Any) -> list[str]:
        return super().check(name, module) or unsupported_options(module)

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        return layers.vocab_parallel(plain, splits_sequence=not self.whole_sequences)


class EmbeddingRowwiseSequence(EmbeddingRowwise):
    """The same, with an output that is split along the sequence: from there on each rank has a part
    of it."""

    word = "embedding_rowwise_sequence"
    whole_sequences = False


class EmbeddingColwise(EmbeddingRowwise):
    """An embedding of which each rank has a part of every row, and gathers the others."""

    word = "embedding_colwise"
    becomes = "FeatureParallelEmbedding"
    dim = 1

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        return layers.feature_parallel(plain)


class MlaKvAProj(Style):
    """A linear layer of latent attention whose last outputs are the one rotary key, which each rank
    uses for its own heads: their gradient is summed. Its module says by `qk_rope_head_dim` how many
    they are."""

    word = "mla_kv_a_proj"
    whole_sequences = True

    def split(
        self, name: str, modules: Mapping[str, Any], plan: Mapping[str, str], tp: int
    ) -> tuple[Split, list[str]]:
        parent = _parent(base_of(name))
        width: Any = getattr(modules[parent], "qk_rope_head_dim", None)
        if isinstance(width, int):
            return Split(name, self.word, width=width), []
        problem = (
            f"{name} is {self.word}, and {parent} has no qk_rope_head_dim, the rotary key's width"
        )
        return Split(name, self.word), [problem]

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        layers.sum_gradient_of_last(plain, split.width)
        return plain


class ReplicatedWithGradAllReduce(Style):
    """Parameters that all ranks hold and each uses with its own features (a norm of q and k):
    gradients are summed."""

    word = REPLICATED
    for_parameters = True

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        layers.sum_gradients(plain, split.parameters)
        return plain


class Replicate(Style):
    """Parameters next to column- and row-wise layers that all ranks hold and use with all features,
    like parameters outside: the down-projections of latent attention. Only states that they are not
    between the split layers."""

    word = "replicate"
    for_parameters = True


class ColwiseParameter(Style):
    """Vectors of which each rank has those numbers that belong to its own features, such as one for
    each head: what `colwise` is for a parameter that is no layer's."""

    word = "colwise_parameter"
    dim = 0
    for_parameters = True

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        layers.split_parameters(plain, split.parameters)
        return plain


class GatherSequence(Style):
    """An nn.Identity whose input every rank needs whole for its own heads, and which no column-wise
    layer gathers: the shared rotary key of latent attention. Its gradient is summed over the
    ranks."""

    word = "gather_sequence"
    becomes = "SequenceGather"
    kind = "an nn.Identity"

    def check(self, name: str, module: Any) -> list[str]:
        return [] if type(module).__name__ == "Identity" else [self.refusal(name, module)]

    def apply(self, plain: Any, split: Split, layers: "TensorParallel") -> Any:
        return layers.sequence_gather()


# with Hugging Face's words, and their meaning; `colwise_logits`, `colwise_parameter`,
# `embedding_rowwise_sequence` and `gather_sequence` are meshtrain's
STYLES: dict[str, Style] = {
    style.word: style
    for style in (
        Colwise(),
        ColwiseGatherOutput(),
        ColwiseLogits(),
        PackedColwise(),
        Rowwise(),
        RowwiseSplitInput(),
        EmbeddingRowwise(),
        EmbeddingRowwiseSequence(),
        EmbeddingColwise(),
        MlaKvAProj(),
        ReplicatedWithGradAllReduce(),
        Replicate(),
        ColwiseParameter(),
        GatherSequence(),
    )
}
# Other words of Hugging Face for the same.
STYLES |= {
    "colwise_rep": STYLES["colwise_gather_output"],
    "rowwise_rep": STYLES["rowwise_split_input"],
    # Experts that no `ep_plan` distributes are whole on every rank, and so are their outputs.
    "moe_tp_experts": STYLES["replicate"],
    "moe_identity_expert": STYLES["replicate"],
    "packed_rowwise": STYLES["replicate"],
    "all_reduce": STYLES["replicate"],
    # Where ranks have parts of the sequence, gradients of parameters that each holds whole are
    # summed without a word.
    "sequence_parallel": STYLES["replicate"],
    # A module whose own parameters are split computes with its rank's part in any case.
    "local_params": STYLES["replicate"],
}


# What a model's file may say by a function of the config.
PLANS = ("tp_plan", "cp_plan", "ep_plan", "stored_as", "stored_again", "init_plan")
# The attribute of a model that holds those functions of its file, with its config.
OWN_PLANS = "_plans"


def plan_of(model: Any, key: str, plan: Any = None) -> Any:
    """An option's plan, or else that in the file of the model's class or of a base class: FSDP
    derives classes.

    One that is a function of the config is called: with the config that the model was built from
    (`ModelSpec`), or with the model's attribute `config`. Raises InputError: there is none.
    """
    if plan is not None:
        return plan
    made = vars(model).get(OWN_PLANS, {})
    if key in made:
        return made[key]()
    for base in type(model).__mro__:
        module = sys.modules.get(base.__module__)
        if not hasattr(module, key):
            continue
        found = getattr(module, key)
        if not callable(found):
            return found
        if not hasattr(model, "config"):
            raise InputError(
                f"{key} is a function of the config, which {type(model).__name__} does not keep: "
                f"set `self.config`, or give {key} itself"
            )
        return found(model.config)
    return None


def split_layers(model: Any, plan: Mapping[str, str], tp: int) -> list[Split]:
    """The splits of the layers that the plan names on `tp` ranks, in the model's order.

    Args:
        model: a torch module; only names and sizes are read, so it may be on the meta device.
        plan: pattern of layer names -> a word of STYLES; the first match counts.

    Raises:
        SplitError: a pattern matches nothing, a word is not a style, or a layer cannot have its
            style.
    """
    modules = dict(model.named_modules())
    names = list(modules)
    for name, module in modules.items():
        names += [f"{name}.{own}".lstrip(".") for own in _parameters(module)]
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
    splits, untied = _with_ties(splits, modules)
    problems += untied
    problems += _not_of_parts(splits)
    if problems:
        raise SplitError(list(dict.fromkeys(problems)))
    return splits


def context_modules(model: Any, plan: Mapping[str, str]) -> list[str]:
    """The modules in which, by a `cp_plan`, tokens attend to each other. Raises SplitError: a wrong
    pattern or word."""
    return _planned_modules(model, "cp_plan", plan, ATTENTION)


def expert_modules(model: Any, plan: Mapping[str, str]) -> dict[str, int]:
    """The modules that hold experts by an `ep_plan`, and how many. SplitError: a wrong pattern,
    word or module."""
    counts: dict[str, int] = {}
    problems = []
    for name in _planned_modules(model, "ep_plan", plan, EXPERTS):
        module = model.get_submodule(name)
        sizes = set[int]()  # of dim 0 of its parameters: one number, that of the experts
        are_own = True
        for own, parameter in module.named_parameters():
            if "." in own or parameter.dim() < 2:
                are_own = False
            else:
                sizes.add(parameter.shape[0])
        counts[name] = next(iter(sizes), 0)
        if not are_own or len(sizes) != 1 or not hasattr(module, "dispatch"):
            problems.append(
                f"the ep_plan names {name}, which is no layer of experts: it has to compute by its "
                "`dispatch`, as meshtrain.experts.Experts does, and its parameters have to be its "
                "own, with the experts as dim 0"
            )
    if problems:
        raise SplitError(problems)
    return counts


def _planned_modules(model: Any, kind: str, plan: Mapping[str, str], word: str) -> list[str]:
    names = [name for name, _ in model.named_modules()]
    problems = _unmatched(kind, plan, names, "module")
    problems += [
        f"the {kind}'s {key!r} is {other!r}: use {word}"
        for key, other in plan.items()
        if other != word
    ]
    if problems:
        raise SplitError(problems)
    return [name for name in names if style_of(plan, [name])]


def no_context_plan(model: str) -> str:
    return (
        f"{model} has no cp_plan, which says where it mixes tokens: use cp: 1, or give the model's "
        "file one"
    )


def styled_parameters(model: Any, plan: Mapping[str, str]) -> Iterator[Split]:
    """Modules with parameters that a plan gives a parameter style, by their own name or that of an
    enclosing module."""
    for name, module in model.named_modules():
        # a.b.c, and the modules around it: a.b, a
        around = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]
        words: dict[str, str | None] = {}
        for own in _parameters(module):
            full_name = f"{name}.{own}".lstrip(".")
            words[own] = style_of(plan, [full_name, *around])
            # A matrix of each expert stays whole, as experts do that no `ep_plan` distributes.
            is_vector = module._parameters[own].dim() == 1
            is_layers = style_of(plan, [name]) == Colwise.word
            if is_vector and not is_layers and style_of(plan, [full_name]) == Colwise.word:
                words[own] = ColwiseParameter.word
        for word, style in STYLES.items():
            parameters = tuple(own for own in words if words[own] == word)
            if style.for_parameters and parameters:
                yield Split(name, word, parameters=parameters)


def undecided(model: Any, plan: Mapping[str, str], splits: Sequence[Split]) -> list[str]:
    """Parameters for which a plan does not say whether each rank uses them with a part of the
    features or with all: unsplit ones of a module that has both a column-wise and a row-wise layer,
    or of its children."""
    giving = {_parent(split.layer) for split in splits if STYLES[split.style].gives_part}
    taking = {_parent(split.layer) for split in splits if STYLES[split.style].takes_part}
    between = giving & taking
    layers = {split.layer for split in splits}
    decided = set[tuple[str, str]]()
    for split in styled_parameters(model, plan):
        decided.update((split.layer, own) for own in split.parameters)

    found = []
    for name, module in model.named_modules():
        if name in layers or not (name in between or _parent(name) in between):
            continue
        undecided_here = [own for own in _parameters(module) if (name, own) not in decided]
        found += [f"{name}.{own}".lstrip(".") for own in undecided_here]
    return found


def plan_splits_sequence(plan: Mapping[str, str]) -> bool:
    """Whether a plan has an `embedding_rowwise_sequence` layer, whose output is a part of the
    sequence on each rank."""
    return EmbeddingRowwiseSequence.word in plan.values()


def has_sequence_parts(option: bool | None, plan: Mapping[str, str] | None) -> bool:
    """Whether each rank of `tp` has a part of the sequence between layers: by the option, or else
    by the plan."""
    return plan_splits_sequence(plan or {}) if option is None else option


def unequal_parts(what: str, length: int, tp: int) -> str:
    """The problem of `what`, a sequence of a `length` that `tp` does not divide, if its ranks share
    each sequence."""
    below = length // tp * tp
    near = any_of([str(n) for n in (below, below + tp) if n])
    return (
        f"{what} does not divide over layout.tp {tp}, which shares the sequence: use {near}, or "
        "parallel.sequence_parallel: false"
    )


def unsupported_options(embedding: Any) -> list[str]:
    """Problems of options that a split embedding does not support."""
    problems = []
    if len(_parameters(embedding)) > 1 or getattr(embedding, "_modules", {}):
        problems.append(
            "an embedding with parameters besides its weight cannot be split over tp: take it out "
            "of the tp_plan"
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        value = getattr(embedding, option, None)
        if value is not None and value is not False:
            problems.append(
                f"an embedding with {option} cannot be split over tp: leave {option} out"
            )
    return problems


def _layers_of_attention(
    layer: str, modules: Mapping[str, Any], plan: Mapping[str, str]
) -> list[str]:
    """The column-wise layers that have heads together with `layer`, itself included: queries, keys
    and values of one attention. Empty if it has none.

    Directly in a module with a `head_dim` all column-wise layers have heads, unless it has several
    row-wise layers, because attention and a feed-forward net share it. Then each column-wise layer
    leads to a row-wise one. Those of attention are the most (of equally many, those that are
    defined first), or differ in width, as queries and fewer keys do.
    """
    columns: list[str] = []
    rows: list[str] = []
    parent = _parent(layer)
    for name, module in modules.items():
        # A model has thousands of modules, most of which the first question leaves out at once.
        if name.startswith(parent) and _parent(name) == parent:
            word = style_of(plan, [name])
            if word == Colwise.word and hasattr(module, "out_features"):
                columns.append(name)
            elif word == Rowwise.word and hasattr(module, "in_features"):
                rows.append(name)
    if len(rows) < 2:
        return columns

    groups: dict[str, list[str]] = {name: [] for name in rows}
    row = ""
    for name in columns:
        row = _leads_to(name, rows, modules, row)
        groups[row].append(name)
    own = next(group for group in groups.values() if layer in group)
    differ = len({modules[name].out_features for name in own}) > 1
    is_most = own is max(groups.values(), key=len)
    return own if differ or is_most else []


def _leads_to(column: str, rows: Sequence[str], modules: Mapping[str, Any], before: str) -> str:
    """The row-wise layer to which the outputs of a column-wise one lead: one that has as many
    inputs, or for keys and values of few heads one that has a multiple. Of several it is that of
    the column-wise layer `before` this one, or else the first that is defined behind it."""
    outputs = modules[column].out_features
    equal = [row for row in rows if modules[row].in_features == outputs]
    multiple = [row for row in rows if modules[row].in_features % outputs == 0]
    fitting = equal or multiple or list(rows)
    order = list(modules)
    behind = [row for row in fitting if order.index(row) > order.index(column)]
    if before in behind:
        return before
    return behind[0] if behind else fitting[0]


def cut_through_heads(splits: Sequence[Split], modules: Mapping[str, Any]) -> str | None:
    """A module with column-wise layers of several widths, as queries and fewer keys have, that does
    not say how wide a head is: its name."""
    widths: dict[str, set[int]] = {}  # module -> the widths of its column-wise layers
    for split in splits:
        is_adapter = base_of(split.layer) != split.layer
        if split.style == Colwise.word and not split.width and not is_adapter:
            outputs = modules[split.layer].out_features
            widths.setdefault(_parent(split.layer), set()).add(outputs)
    return next((name for name, of in widths.items() if len(of) > 1), None)


def _undivided_heads(queries: int, tp: int) -> list[str]:
    if queries % tp == 0:
        return []
    fits = ", ".join(str(n) for n in range(1, queries + 1) if queries % n == 0)
    return [f"{queries} query heads do not divide over tp {tp}: use a tp of {fits}"]


def _unmatched(key: str, plan: Mapping[str, str], names: Sequence[str], kind: str) -> list[str]:
    """A problem for each pattern that matches no name. Patterns that differ in a number only, as
    those of a plan written layer by layer do, share theirs."""
    alike: dict[str, list[str]] = {}
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in names):
            alike.setdefault(without_numbers(pattern), []).append(pattern)
    problems = []
    for first, *others in alike.values():
        more = f" (and {len(others)} more like it)" if others else ""
        near = names_near(first, names)
        problems.append(f"the {key}'s {first!r}{more} matches no {kind}: {near}: mend the pattern")
    return problems


def _not_of_parts(splits: Sequence[Split]) -> list[str]:
    """Problems of layers that work on whole sequences beside one that splits them."""
    sequence = EmbeddingRowwiseSequence.word
    if not any(split.style == sequence for split in splits):
        return []
    other = next((split for split in splits if STYLES[split.style].whole_sequences), None)
    if other is None:
        return []
    return [
        f"the tp_plan splits the sequence ({sequence}), and {other.layer} is {other.style}, which "
        f"works on whole ones: use {EmbeddingRowwise.word} in place of {sequence}"
    ]


def style_of(plan: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The style of the first pattern that matches one of these names."""
    for pattern, style in plan.items():
        if any(fnmatchcase(name, pattern) for name in names):
            return style
    return None


def _parent(name: str) -> str:
    """The module that contains a module, by their names; "" for the model."""
    return name.rpartition(".")[0]


def base_of(name: str) -> str:
    """The layer that an adapter's layer adapts, or `name` itself."""
    base, _, own = name.rpartition(".")
    return base if own in (LORA_A, LORA_B, "lora_dropout") else name


def style_of_layer(plan: Mapping[str, str], name: str) -> Style | None:
    """The style of a layer. Of an adapter, the layer whose inputs or outputs are split in the
    adapted layer has its style; the other works on features that every rank has."""
    base = base_of(name)
    style = STYLES.get(style_of(plan, [base]) or "")
    if style is None or base == name:
        return style
    own = name.rpartition(".")[2]
    # A takes the layer's inputs, and B makes its outputs.
    has_style = (own == LORA_A and style.dim == 1) or (own == LORA_B and style.dim == 0)
    return style if has_style else None


def _parameters(module: Any) -> list[str]:
    return [
        name
        for name, parameter in getattr(module, "_parameters", {}).items()
        if parameter is not None
    ]


def _weight(module: Any) -> Any:
    """A layer's weight; None: it has none, or computes it from other parameters."""
    return getattr(module, "_parameters", vars(module)).get("weight")


def _with_ties(splits: list[Split], modules: Mapping[str, Any]) -> tuple[list[Split], list[str]]:
    """The splits of layers, in which those that share a weight split it alike, and the problems of
    those that cannot.

    A plan often names only one of an embedding and the head that has its weight. The other one is
    then split over the vocabulary too, in the style that changes nothing outside of the layer; and
    if it cannot be, the first one is not.
    """
    of_layer = {split.layer: split for split in splits}
    sharing: dict[int, list[str]] = {}
    for name, module in modules.items():
        weight = _weight(module)
        if weight is not None:
            sharing.setdefault(id(weight), []).append(name)

    problems = []
    for names in sharing.values():
        cuts = {_cut_of(of_layer.get(name)) for name in names}
        if len(cuts) == 1:
            continue
        others = [_unchanged_outside(name, modules[name]) for name in names if name not in of_layer]
        is_by_rows = cuts == {_cut_of(None), (0, False)}
        if is_by_rows and None not in others:
            of_layer |= {split.layer: split for split in others if split is not None}
        elif is_by_rows and all(
            of_layer[name].style in _UNCHANGED_OUTSIDE for name in names if name in of_layer
        ):
            for name in names:
                of_layer.pop(name, None)
        else:
            problems.append(
                f"{' and '.join(names)} share one weight: the tp_plan has to split all of them in "
                "the same way"
            )
    return [of_layer[name] for name in modules if name in of_layer], problems


# Styles of layers that take and return what the plain ones do.
_UNCHANGED_OUTSIDE = (EmbeddingRowwise.word, ColwiseGatherOutput.word, ColwiseLogits.word)


def _cut_of(split: Split | None) -> tuple[int | None, bool]:
    """By which dim a weight is cut, and whether every rank holds it all the same."""
    return (None, False) if split is None else (STYLES[split.style].dim, split.everywhere)


def _unchanged_outside(name: str, module: Any) -> Split | None:
    """A split of a layer's rows after which it takes and returns what it did; None: there is
    none."""
    for style in (EmbeddingRowwise, ColwiseGatherOutput):
        if not STYLES[style.word].check(name, module):
            return Split(name, style.word)
    return None
