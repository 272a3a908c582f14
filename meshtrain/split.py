"""What each layer of a model becomes under tensor parallelism: its `tp_plan` against its sizes, before it is done.

Pure: it looks at the names and sizes of a model's modules and says what follows, or why it cannot be and what could.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Style(NamedTuple):
    """A way to split a layer: the kind that it is for, the kind that it becomes, and which dim of its weight is cut."""

    of: str
    becomes: str
    dim: int


# No way to split: each rank holds all of these parameters and uses them with its part of the heads or features, as a
# norm of q and k; their gradients are summed. A pattern names a module, or a parameter.
REPLICATED = "replicated_with_grad_allreduce"
STYLES = {  # by Hugging Face's words
    "colwise": Style("linear", "ColumnParallelLinear", 0),
    "rowwise": Style("linear", "RowParallelLinear", 1),
    "colwise_gather_output": Style("linear", "ColumnParallelLinear", 0),
    "embedding_rowwise": Style("embedding", "VocabParallelEmbedding", 0),
}


class SplitError(ValueError):
    """A model that cannot be split as asked. `problems` has a sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Heads:
    """The key/value heads that one rank computes, where there are too few for each rank to have its own.

    Attributes:
        count: heads of the whole layer, all of which every rank holds.
        width: of a head, in rows of the weight.
        rows: of the weight, those that this rank computes with: the heads that its queries look at.
        repeated: which of these heads each of its queries looks at, where they do not share them evenly; else None.
    """

    count: int
    width: int
    rows: slice
    repeated: tuple[int, ...] | None


@dataclass(frozen=True)
class Split:
    """What becomes of one layer.

    Attributes:
        layer: its name in the model.
        style: one of STYLES.
        queries, heads, width: of a layer of an attention: the query heads, its own heads, and a head's width; else 0.
        everywhere: the layer has too few heads to be cut, so every rank holds it.
    """

    layer: str
    style: str
    queries: int = 0
    heads: int = 0
    width: int = 0
    everywhere: bool = False

    def dim_of(self, parameter: str) -> int | None:
        """Which dim of the layer's "weight" or "bias" is cut over `tp`; None: every rank holds all of it.

        The bias of a row-wise layer is added to the sum, so it is not cut.
        """
        dim = STYLES[self.style].dim
        return None if self.everywhere or (parameter == "bias" and dim == 1) else dim

    def heads_of(self, tp: int, index: int) -> Heads | None:
        """What rank `index` of `tp` computes of a layer that every rank holds; None of any other."""
        if not self.everywhere:
            return None
        mine = range(index * self.queries // tp, (index + 1) * self.queries // tp)
        seen = [query * self.heads // self.queries for query in mine]
        first, different = seen[0], seen[-1] - seen[0] + 1
        each = len(seen) // different
        even = seen == [first + i // each for i in range(len(seen))]
        rows = slice(first * self.width, (seen[-1] + 1) * self.width)
        return Heads(self.heads, self.width, rows, None if even else tuple(head - first for head in seen))


def split_layers(model: Any, plan: Mapping[str, str], tp: int) -> list[Split]:
    """What each layer that the plan names becomes on `tp` ranks, in the model's order.

    A column-wise layer of a module that has a `head_dim` (as Hugging Face's attentions do) is cut between heads. The
    most heads of such a module are its queries'; a layer with fewer is cut if `tp` divides them, and held by every
    rank if not.

    Args:
        model: a torch module; only names and sizes are looked at, so it may be on the meta device.
        plan: pattern of layers' names -> one of STYLES; the first that matches counts.

    Raises:
        SplitError: a pattern that matches nothing, a word that is no style, a layer of another kind, or heads that
            do not divide.
    """
    modules = dict(model.named_modules())
    names = [*modules, *(f"{name}.{own}".lstrip(".") for name in modules for own in _parameters(modules[name]))]
    problems = [f"the tp_plan's {pattern!r} matches no layer: mend the pattern" for pattern in _idle(plan, names)]
    problems += [
        f"the tp_plan's {pattern!r} is {style!r}: use one of {', '.join((*STYLES, REPLICATED))}"
        for pattern, style in plan.items()
        if style not in (*STYLES, REPLICATED)
    ]
    found: list[Split] = []
    for name, module in modules.items():
        style = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)
        if style not in STYLES:
            continue
        wanted = STYLES[style].of
        if _kind(module) != wanted:
            problems.append(
                f"the tp_plan wants {name} {style}, which is for a {wanted} layer, and it is a {_kind(module)}"
            )
            continue
        parent = modules[name.rpartition(".")[0]]
        if style == "colwise" and hasattr(parent, "head_dim"):
            found.append(_by_heads(name, parent, modules, plan, tp, problems))
        else:
            found.append(Split(name, style))
    problems += _torn(found, modules)
    if problems:
        raise SplitError(list(dict.fromkeys(problems)))
    return found


def replicated(model: Any, plan: Mapping[str, str]) -> Iterator[tuple[Any, str]]:
    """(module, name in it) of the parameters to which a plan gives the style REPLICATED."""
    for name, module in model.named_modules():
        above = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]
        for own in _parameters(module):
            places = [f"{name}.{own}".lstrip("."), *above]
            style = next((plan[pattern] for pattern in plan if any(fnmatchcase(at, pattern) for at in places)), None)
            if style == REPLICATED:
                yield module, own


def undecided(model: Any, plan: Mapping[str, str], found: Sequence[Split]) -> list[str]:
    """Parameters of which a plan does not say whether each rank uses them with a part of the features or with all:
    not split, and in a module, or of one, beside both a column-wise and a row-wise layer."""
    modules = dict(model.named_modules())
    dims: dict[str, set[int]] = {}
    for split in found:
        dims.setdefault(split.layer.rpartition(".")[0], set()).add(STYLES[split.style].dim)
    covered = {(id(module), own) for module, own in replicated(model, plan)}
    split_ones = {split.layer for split in found}
    return [
        f"{name}.{own}".lstrip(".")
        for name, module in modules.items()
        for own in _parameters(module)
        if {0, 1} in (dims.get(name), dims.get(name.rpartition(".")[0]))
        and name not in split_ones
        and (id(module), own) not in covered
    ]


def _parameters(module: Any) -> list[str]:
    return [name for name, parameter in getattr(module, "_parameters", {}).items() if parameter is not None]


NO_SEQUENCE = "the tp_plan has no embedding_rowwise layer, which is what splits the sequence over tp"


def shards_sequence(plan: Mapping[str, str]) -> bool:
    """Whether a plan has the layer whose output is a part of the sequence on each rank."""
    return "embedding_rowwise" in plan.values()


def _idle(plan: Mapping[str, str], names: Sequence[str]) -> Iterator[str]:
    return (pattern for pattern in plan if not any(fnmatchcase(name, pattern) for name in names))


def _kind(module: Any) -> str:
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return "linear"
    return "embedding" if hasattr(module, "num_embeddings") else type(module).__name__


def _by_heads(
    name: str, parent: Any, modules: Mapping[str, Any], plan: Mapping[str, str], tp: int, problems: list[str]
) -> Split:
    width, above = parent.head_dim, name.rpartition(".")[0]
    columns = [
        modules[other].out_features
        for other in modules
        if other.rpartition(".")[0] == above
        and any(fnmatchcase(other, pattern) and style == "colwise" for pattern, style in plan.items())
    ]
    own, most = modules[name].out_features, max(columns)
    if own % width or most % width:
        problems.append(f"{name} has {own} outputs, which are no whole heads of {width}")
    queries, heads = most // width, own // width
    if queries % tp:
        near = ", ".join(str(n) for n in range(1, queries + 1) if queries % n == 0)
        problems.append(f"{queries} query heads do not divide over tp {tp}: use a tp of {near}")
    return Split(name, "colwise", queries, heads, width, everywhere=heads % tp != 0)


def _torn(found: list[Split], modules: Mapping[str, Any]) -> list[str]:
    """Layers that share a weight which only one of them splits, or which they split in two ways."""
    cut_by = {split.layer: (STYLES[split.style].dim, split.everywhere) for split in found}
    sharing: dict[int, list[str]] = {}
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        if weight is not None:
            sharing.setdefault(id(weight), []).append(name)
    return [
        f"{' and '.join(names)} share one weight: the tp_plan has to split all of them in the same way"
        for names in sharing.values()
        if len({cut_by.get(name) for name in names}) > 1
    ]
