"""Matrices of parameters: which there are, which rank of a stage computes which, and who has what of them. Pure."""

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshtrain.huggingface.stored_names import Table, stored_tensors
from meshtrain.layout import Layout
from meshtrain.parallel.sharding import ParameterSpec, Part, Shape, is_empty, overlap, shape_of


class Matrix(NamedTuple):
    """A matrix, which is all or a part of a parameter."""

    number: int  # among all
    parameter: int  # its number
    part: Part  # of the whole parameter
    owner: int  # the rank that computes it, by its place in the stage

    @property
    def shape(self) -> Shape:
        return shape_of(self.part)[-2:]


class Piece(NamedTuple):
    """What some ranks hold of a matrix."""

    matrix: Matrix
    part: Part  # of the whole parameter
    holders: Sequence[int]  # the ranks that hold it, ascending
    source: int  # the one of them that sends it to the owner

    @property
    def shape(self) -> Shape:
        return shape_of(self.part)


def matrices_of(spec: ParameterSpec, table: Table) -> list[Part]:
    """The matrices of a parameter (m, n) or (E, m, n): as its model's files have them (`stored_as`), so that each
    expert's gate and up are two, and one of each index of dim 0, where files have them in one. All are of one shape.
    What no file has, as adapters of LoRA, is taken as it is."""
    matrices = []
    for stored in stored_tensors(spec.name, spec.shape, table) or stored_tensors(spec.name, spec.shape, {}):
        first, *rest = stored.part
        stacked = len(rest) == 2
        firsts = [slice(i, i + 1) for i in range(first.start, first.stop)] if stacked else [first]
        matrices += [(rows, *rest) for rows in firsts]
    return matrices


def deal_out(shapes: Iterable[Shape], ranks: int) -> list[int]:
    """Which rank computes each matrix: the costliest that is left to the rank with the least so far (LPT; Graham,
    https://doi.org/10.1137/0117039)."""
    costs = [min(shape) ** 2 * max(shape) for shape in shapes]  # of products of m x n with n x m and m x m
    load, owners = [(0, rank) for rank in range(ranks)], [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least, owners[i] = load[0]
        heapq.heapreplace(load, (least + costs[i], owners[i]))
    return owners


def holders_of(spec: ParameterSpec, layout: Layout, ranks: Sequence[int]) -> list[tuple[Part, list[int]]]:
    """Every part of a parameter that some of the ranks hold, and their places among them; an empty one is none."""
    holders: dict[tuple[tuple[int, int], ...], tuple[Part, list[int]]] = {}
    for place, rank in enumerate(ranks):
        part = spec.part({cut.axis: layout.index(rank, cut.axis) for cut in spec.cuts})
        if not is_empty(part):
            holders.setdefault(tuple((rows.start, rows.stop) for rows in part), (part, []))[1].append(place)
    return list(holders.values())


def piece_of(matrix: Matrix, part: Part, holders: Sequence[int], ranks: int) -> Piece | None:
    """What those who hold a part of a parameter have of one of its matrices; None: nothing."""
    common = overlap(part, matrix.part)
    if is_empty(common):
        return None
    # The owner itself, or else one near to it: in a copy of the model as far inside as the owner is among all.
    source = matrix.owner if matrix.owner in holders else holders[matrix.owner * len(holders) // ranks]
    return Piece(matrix, common, holders, source)
