"""The section `layout`: its keys are the axes of the mesh, outermost first, in the order in which
they are written."""

from meshtrain.config.convert import INVALID, convert
from meshtrain.config.draft import ConfigDraft
from meshtrain.config.layout_advice import resolve, world_sizes_text
from meshtrain.config.yaml_reader import Node, describe
from meshtrain.layout import AXES, Layout, LayoutError, unknown_axis


def read_layout(draft: ConfigDraft) -> dict[str, int] | None:
    """The layout as written, outermost axis first; None, with the errors reported, if it is
    wrong."""
    node = draft.root.get("layout")
    if node is None:
        return {"dp_shard": -1}
    if node.broken:
        return None
    if node.value is None:
        return {"dp_shard": -1}
    if not isinstance(node.value, dict):
        message = (
            f"expected axes and their sizes, such as {{dp_shard: 4}}, found {describe(node.value)}"
        )
        draft.report(node.at, f"layout: {message}")
        return None

    sizes: dict[str, int] = {}
    for axis, child in node.value.items():
        size = _read_size(draft, axis, child)
        if size is None:
            continue
        open_axes = [other for other, other_size in sizes.items() if other_size == -1]
        if size == -1 and open_axes:
            draft.report(
                child.at,
                f"layout.{axis}: only one axis can be -1, and {open_axes[0]} is: give one of them "
                "a size",
            )
            continue
        sizes[axis] = size
    return sizes if len(sizes) == len(node.value) else None


def _read_size(draft: ConfigDraft, axis: str, node: Node) -> int | None:
    """The size of an axis; None, with the error reported, if there is no such axis or size."""
    if axis not in AXES:
        hint = "; a colon needs a space after it" if ":" in axis else ""
        draft.report(node.key_at, f"layout: {unknown_axis(axis)}{hint}")
        return None
    size = convert(node, int, f"layout.{axis}", draft.errors)
    if size is INVALID:
        return None
    if size < 1 and size != -1:
        message = f"expected an integer of at least 1, or -1 for whatever is left, found {size}"
        draft.report(node.at, f"layout.{axis}: {message}")
        return None
    return size


def resolve_layout(
    draft: ConfigDraft, sizes: dict[str, int], world_size: int | None, again: bool
) -> Layout | None:
    """The layout of the processes; None if a size is still open, or, reported as an error, if it
    does not fit them. `again`: the job was started again, perhaps with fewer processes."""
    if world_size is None:
        return None if -1 in sizes.values() else Layout(sizes)

    experts = draft.values["parallel.expert_parallel"]
    if experts is INVALID or experts is None:
        experts = 1
    try:
        return resolve(sizes, world_size, experts)
    except LayoutError as error:
        problem = str(error)
        if again:
            worlds = world_sizes_text(sizes, experts)
            problem += f". This job was started again with {world_size}: {worlds}"
        paths = ["layout", *(f"layout.{axis}" for axis in sizes)]
        draft.report(draft.place_of_any(paths), problem)
        return None
