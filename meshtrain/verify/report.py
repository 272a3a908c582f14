"""What a verification says: a table for a terminal, JSON for programs."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshtrain.errors import INPUT_STATUS, yaml_text
from meshtrain.verify.session import DIFFERENT, EQUAL, REFUSED, Outcome, Sizes

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {EQUAL: "green", DIFFERENT: "bold red", REFUSED: "yellow"}


def status_of(outcomes: Sequence[Outcome]) -> int:
    """1: a layout differs; else 2: one was refused; else 0."""
    statuses = {outcome.status for outcome in outcomes}
    if DIFFERENT in statuses:
        return 1
    return INPUT_STATUS if REFUSED in statuses else 0


def name_of(sizes: Sizes) -> str:
    return yaml_text(dict(sizes))


def where(outcome: Outcome) -> str:
    """The first step and parameter that differ, and by how much."""
    if outcome.status != DIFFERENT:
        return ""
    parts = [] if outcome.step is None else [f"step {outcome.step}"]
    if outcome.parameter is not None:
        parts.append(outcome.parameter)
    if outcome.difference is not None and math.isfinite(outcome.difference):
        parts.append(f"{outcome.difference:.1e}")
    return ", ".join(parts)


def largest(outcome: Outcome) -> str:
    """The largest difference of the loss and of the norm in any step; `inf` where one of them is no
    number."""
    sizes: list[float] = []
    for of_loss, of_norm in outcome.apart:
        sizes += [of_loss, of_norm]
    if not sizes:
        return ""
    return f"{max(sizes):.0e}" if max(sizes) > 0 else "0"


def summary(outcomes: Sequence[Outcome]) -> str:
    statuses = [outcome.status for outcome in outcomes]
    return ", ".join(f"{statuses.count(name)} {name}" for name in (EQUAL, DIFFERENT, REFUSED))


def print_table(console: "Console", outcomes: Sequence[Outcome]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("layout", "", "loss, norm", "first difference", "kind"):
        table.add_column(title, overflow="fold")
    for outcome in outcomes:
        status = Text(outcome.status, style=STYLES[outcome.status])
        kind = outcome.kind or ""
        table.add_row(name_of(outcome.layout), status, largest(outcome), where(outcome), kind)
    console.print(table)
    for outcome in outcomes:
        if outcome.reason:
            # not as markup: a refusal may have brackets
            console.print(Text(f"{name_of(outcome.layout)}: {outcome.reason}"))
    console.print(Text(summary(outcomes)))


def as_json(reference: Mapping[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The whole report for a program: numbers that are no numbers are null."""
    layouts = []
    for outcome in outcomes:
        difference = outcome.difference
        if difference is not None and not math.isfinite(difference):
            difference = None
        layouts.append(
            {
                "layout": dict(outcome.layout),
                "status": outcome.status,
                "reason": outcome.reason,
                "step": outcome.step,
                "parameter": outcome.parameter,
                "difference": difference,
                "kind": outcome.kind,
            }
        )
    return {"reference": dict(reference), "layouts": layouts}
