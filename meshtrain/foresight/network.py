"""The link that a predicted step rests on, and what the step takes in another network or with its
axes in another order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshtrain.foresight.collective import Group, bandwidth
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.prediction import Prediction
from meshtrain.layout import AXES, Layout

OTHERS = {"ep": "all_to_all", "cp_heads": "all_to_all"}  # axis -> its messages, if not rings
NEIGHBOURS = ("tp", "cp_heads")  # axes that communicate in every layer


@dataclass(frozen=True)
class Link:
    """The link between hosts that carries most of a step's messages."""

    axis: str
    hosts: int  # that a group of the axis spans
    bandwidth: float  # GB/s of a rank

    def __str__(self) -> str:
        return f"{self.axis} over {self.hosts} hosts at {self.bandwidth:.3g} GB/s"


def link_of(prediction: Prediction) -> Link | None:
    """The link between hosts on which most seconds of messages are spent, those that are hidden
    included; None: there are none."""
    assert prediction.hardware is not None
    step, layout = prediction.step, prediction.layout
    took: dict[str, float] = {}
    for axis in {**step.parts, **step.hidden}:
        group = _group(layout, axis)
        if group is not None and group.crosses_hosts:
            took[axis] = step.parts.get(axis, 0.0) + step.hidden.get(axis, 0.0)
    if not took:
        return None
    axis = max(took, key=took.__getitem__)
    return _link(layout, axis, prediction.hardware)


def _group(layout: Layout, axis: str) -> Group | None:
    """The group of an axis; None: it is another part of a step."""
    if axis == "dp_shard":
        axis = "fsdp"
    known = (*AXES, "fsdp", "ep", "cp_heads", "cp_ring")
    return Group.of(layout, axis) if axis in known and layout.size(axis) > 1 else None


def _link(layout: Layout, axis: str, hardware: Hardware) -> Link:
    group = _group(layout, axis)
    assert group is not None
    kind = OTHERS.get(axis, "all_gather")
    return Link(axis, group.hosts, bandwidth(kind, group, hardware))


def in_network_of(prediction: Prediction, hardware: Hardware) -> str:
    """`with 33 GB/s between hosts instead of 360 this layout takes 59.8 s`: the same on this
    hardware; empty where no link between hosts counts."""
    link = link_of(prediction)
    if link is None:
        return ""
    other = Prediction(prediction.config, hardware)
    instead = _link(prediction.layout, link.axis, hardware)
    return (
        f"with {instead.bandwidth:.3g} GB/s between hosts instead of {link.bandwidth:.3g} this "
        f"layout takes {other.step.seconds:.3g} s"
    )


def in_usual_order(prediction: Prediction) -> str:
    """A sentence on axes that cross hosts only because of the order in which axes are written, and
    on what the usual order would take; empty if there are none."""
    layout = prediction.layout
    if len(layout.hosts) <= 1:
        return ""
    sizes = {axis: layout.sizes[axis] for axis in AXES if axis in layout.sizes}
    spans = layout.host_spans
    counts, hosts = [span.count for span in spans], [layout.hosts[span.host] for span in spans]
    usual = layout.resized(sizes).on_hosts(counts, hosts)
    axes = [axis for axis in NEIGHBOURS if _crosses(layout, axis) and not _crosses(usual, axis)]
    if not axes:
        return ""
    config = replace(prediction.config, layout=sizes, resolved=usual)
    seconds = Prediction(config, prediction.hardware).step.seconds
    verb = "crosses" if len(axes) == 1 else "cross"
    return (
        f"{_names(axes)} {verb} hosts only because of the order in which axes are written: layout "
        f"{usual} takes {seconds:.3g} s"
    )


def _crosses(layout: Layout, axis: str) -> bool:
    group = _group(layout, axis)
    return group is not None and group.crosses_hosts


def _names(axes: Sequence[str]) -> str:
    return " and ".join("context heads" if axis == "cp_heads" else axis for axis in axes)
