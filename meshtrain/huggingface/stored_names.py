"""How weight files name and split the tensors of a model: the table `stored_as` of a model file.
Pure.

    stored_as = {
        "model.layers.*.mlp.experts.gate_up_proj": (
            "model.layers.*.mlp.experts.{}.gate_proj.weight",
            "model.layers.*.mlp.experts.{}.up_proj.weight",
        ),
        "*.balance.loads": (),
    }

    stored_again = {"lm_head.weight": ("model.layers.61.shared_head.head.weight",)}

The first pattern that matches a tensor's name applies. `*` stands for the same text in the pattern
and in the stored names. `{}` is the index along the tensor's dim 0 (the experts), which stored
tensors lack. Several names are equal shares of the rows, the next dim, in order. An empty tuple:
the tensor is not stored. `stored_again` has the names of tensors that files have more than once,
and those of the copies.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshtrain.parallel.sharding import Part, Shape, local_slice, shape_of, within
from meshtrain.parallel.tp_plan import LORA_A, LORA_B, plan_of

# LoRA's adapters
ADAPTERS: Mapping[str, Sequence[str]] = {f"*.{own}.weight": () for own in (LORA_A, LORA_B)}
Table = Mapping[str, Sequence[str]]


class StoredTensor(NamedTuple):
    """A tensor of a file, and the part of a model's tensor that it holds."""

    name: str
    shape: Shape
    part: Part  # of the model's tensor; a scalar counts as one dim of size 1

    def slices(self, part: Part) -> Part:
        """Where `part`, which lies within `self.part`, is in the stored tensor."""
        return within(part, self.part)[len(part) - max(1, len(self.shape)) :]


def stored_tensors(name: str, shape: Shape, table: Table) -> list[StoredTensor]:
    """The stored tensors that make up a model's tensor; together their parts cover each of its
    elements once.

    Raises ValueError: the table does not fit the tensor.
    """
    rule = _rule(name, table)
    if rule is None:
        return [StoredTensor(name, shape, local_slice(shape or (1,), []))]
    if not rule.names:
        return []
    _check_rule(rule)
    dims = shape or (1,)
    rows = 1 if rule.counts else 0  # the dim that several names divide
    if len(dims) <= rows or dims[rows] % len(rule.names):
        raise ValueError(
            f"stored_as: {rule.pattern!r} does not divide a tensor of the shape {list(shape)}"
        )
    names = [_fill_in(stored, rule.texts) for stored in rule.names]
    tensors = []
    for index in range(dims[0] if rule.counts else 1):
        for place, stored in enumerate(names):
            cuts = [(rows, len(names), place)]
            if rule.counts:
                cuts.insert(0, (0, dims[0], index))
            part = local_slice(dims, cuts)
            stored_shape = shape_of(part)[rows:] if shape else ()
            tensors.append(StoredTensor(stored.replace("{}", str(index)), stored_shape, part))
    return tensors


def stored_copies(name: str, shape: Shape, copies: Table) -> list[StoredTensor]:
    """The further stored tensors that hold a whole tensor of the model.

    `copies`: a table `stored_again`.
    """
    whole = local_slice(shape or (1,), [])
    return [StoredTensor(copy, shape, whole) for copy in copies.get(name, ())]


def _check_rule(rule: "_Rule") -> None:
    names = list(rule.names)
    if any(stored.count("*") != rule.pattern.count("*") for stored in names):
        raise ValueError(
            f"stored_as: {rule.pattern!r} and its names {names} differ in the number of '*'"
        )
    if {stored.count("{}") for stored in names} not in ({0}, {1}):
        raise ValueError(f"stored_as: all of {names} have to count with one '{{}}', or none")


def is_weight(name: str, table: Table) -> bool:
    """Whether files store a tensor of the model; one that is not stored does not count as a
    parameter either."""
    rule = _rule(name, table)
    return rule is None or len(rule.names) > 0


class _Rule(NamedTuple):
    """The row of a table that applies to a tensor."""

    pattern: str
    names: Sequence[str]  # under which it is stored
    texts: Sequence[str]  # for which the '*' of the pattern stand

    @property
    def counts(self) -> bool:
        """Whether the stored tensors are numbered along dim 0."""
        return any("{}" in stored for stored in self.names)


def _rule(name: str, table: Table) -> _Rule | None:
    """The first row whose pattern matches."""
    for pattern, names in table.items():
        match = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name)
        if match is not None:
            return _Rule(pattern, names, match.groups())
    return None


def _fill_in(stored: str, texts: Sequence[str]) -> str:
    """A stored name with these texts in the places of its '*'."""
    first, *others = stored.split("*")
    filled = first
    for text, following in zip(texts, others, strict=True):
        filled += text + following
    return filled


def copies_of(model: Any) -> Table:
    """The table `stored_again` of a model."""
    return plan_of(model, "stored_again") or {}


def table_of(model: Any) -> Table:
    """The table of a model."""
    return whole_table(plan_of(model, "stored_as"))


def whole_table(stored_as: Table | None) -> Table:
    """The table of a model file, with the rows of every model."""
    return {**ADAPTERS, **(stored_as or {})}
