"""How weight files name and split the tensors of a model: the table `stored_as` of a model file.
Pure.

    stored_as = {
        "model.layers.*.mlp.experts.gate_up_proj": (
            "model.layers.*.mlp.experts.{}.gate_proj.weight",
            "model.layers.*.mlp.experts.{}.up_proj.weight",
        ),
        "*.balance.loads": (),
    }

The first pattern that matches a tensor's name applies. `*` stands for the same text in the pattern
and in the stored names. `{}` is the index along the tensor's dim 0 (the experts), which stored
tensors lack. Several names are equal shares of the rows, the next dim, in order. An empty tuple:
the tensor is not stored.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

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
    pattern, names, texts = rule
    if any(stored.count("*") != pattern.count("*") for stored in names):
        raise ValueError(
            f"stored_as: {pattern!r} and its names {list(names)} differ in the number of '*'"
        )
    if {stored.count("{}") for stored in names} not in (set(), {0}, {1}):
        raise ValueError(f"stored_as: all of {list(names)} have to count with one '{{}}', or none")
    counted = any("{}" in stored for stored in names)
    dims, rows = shape or (1,), int(counted)  # rows: the dim that several names divide
    if len(dims) <= rows or (names and dims[rows] % len(names)):
        raise ValueError(
            f"stored_as: {pattern!r} does not divide a tensor of the shape {list(shape)}"
        )
    words = ["".join(chain(*zip(stored.split("*"), (*texts, ""), strict=True))) for stored in names]
    tensors = []
    for index in range(dims[0] if counted else 1):
        for place, word in enumerate(words):
            part = local_slice(dims, [(0, dims[0], index)] * counted + [(rows, len(words), place)])
            tensors.append(
                StoredTensor(
                    word.replace("{}", str(index)), shape_of(part)[rows:] if shape else (), part
                )
            )
    return tensors


def is_weight(name: str, table: Table) -> bool:
    """Whether files store a tensor of the model; one that is not stored does not count as a
    parameter either."""
    rule = _rule(name, table)
    return rule is None or bool(rule[1])


def _rule(name: str, table: Table) -> tuple[str, Sequence[str], Sequence[str]] | None:
    """The first pattern that matches, its stored names, and the texts that its '*' stand for."""
    for pattern, names in table.items():
        if match := re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name):
            return pattern, names, match.groups()
    return None


def table_of(model: type) -> Table:
    """The table of a model's class."""
    return {**ADAPTERS, **(plan_of(model, "stored_as") or {})}
