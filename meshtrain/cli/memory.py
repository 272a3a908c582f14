"""Memory in words: a table of how a layout shards each parameter of a model."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from meshtrain.errors import fold_names
from meshtrain.foresight.parameters import fsdp_cuts
from meshtrain.layout import Layout
from meshtrain.parallel.sharding import ParameterSpec, Shape

HELD_BY_ALL = "held by all"
CUT = {0: "rows", 1: "columns"}  # by the dim that `tp` cuts


def parameter_json(parameter: ParameterSpec) -> dict[str, Any]:
    """A parameter as JSON; where ranks differ, with the largest and the smallest size of each
    dim."""
    return {
        "name": parameter.name,
        "tied": list(parameter.tied),
        "shape": list(parameter.dims),
        "layer": parameter.layer,
        "stages": list(parameter.stages),
        "over_tp": _cut_over(parameter, "tp") or HELD_BY_ALL,
        "after_tp": _largest_and_smallest(parameter.shapes("tp")),
        "over_ep": _cut_over(parameter, "ep") or HELD_BY_ALL,
        "on_a_rank": _largest_and_smallest(parameter.shapes()),
    }


def table(parameters: Iterable[ParameterSpec], layout: Layout) -> list[list[str]]:
    """The rows of a table, titles first. Identical repeated layers share one row."""
    folded = fold_names((spec.name, replace(spec, name="")) for spec in parameters)
    rows = [_row(name, count, parameter, layout) for name, count, parameter in folded]
    titles = list(rows[0])
    titles.remove("tied")  # the last column needs none
    cells = [list(row.values()) for row in rows]
    return [titles, *cells]


def _row(name: str, count: int, parameter: ParameterSpec, layout: Layout) -> dict[str, str]:
    """Title -> cell."""
    row = {"parameter": name}
    row[""] = f"x{count}" if count > 1 else ""
    if layout.size("pp") > 1:
        row["stage"] = " and ".join(map(str, parameter.stages))
    row["whole"] = _shape_text([parameter.dims])
    row["layer"] = parameter.layer

    # A parameter is cut over tp or, if it holds experts, over ep: both share two columns.
    axes = [axis for axis in ("tp", "ep") if layout.size(axis) > 1]
    if axes:
        inner = " or ".join(axes)
        what_is_cut = HELD_BY_ALL
        for axis in axes:
            word = _cut_over(parameter, axis)
            if word is not None:
                what_is_cut = f"{word} / {axis}"
                break
        row[f"over {inner}"] = what_is_cut
        row[f"after {inner}"] = _shape_text(parameter.shapes("tp", "ep"))

    shards_experts = layout.experts > 1 and layout.size("efsdp") > 1
    for cut in fsdp_cuts(layout):
        axis = f"{cut.axis} or efsdp" if shards_experts else cut.axis
        row[f"after {axis}"] = _shape_text(parameter.shapes())

    row["tied"] = ""
    if parameter.tied:
        first, *others = parameter.tied
        row["tied"] = f"also {first}"
        if others:
            row["tied"] += f" and {len(others)} more"
    return row


def _cut_over(parameter: ParameterSpec, axis: str) -> str | None:
    """What an axis cuts of a parameter; None if it does not cut it."""
    for cut in parameter.cuts:
        if cut.axis == axis:
            return "experts" if axis == "ep" else CUT[cut.dim]
    return None


def _largest_and_smallest(shapes: Iterable[Shape]) -> dict[str, list[int]]:
    sizes_of_dims = list(zip(*shapes, strict=True))
    return {
        "largest": [max(sizes) for sizes in sizes_of_dims],
        "smallest": [min(sizes) for sizes in sizes_of_dims],
    }


def _shape_text(shapes: Iterable[Shape]) -> str:
    """`65 to 64 x 24`: 65 x 24 on some ranks, 64 x 24 on the rank with the least."""
    sizes = _largest_and_smallest(shapes)
    dims = []
    for largest, smallest in zip(sizes["largest"], sizes["smallest"], strict=True):
        dims.append(f"{largest}" if largest == smallest else f"{largest} to {smallest}")
    return " x ".join(dims)
