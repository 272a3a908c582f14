"""The report as a page: one file, without scripts, to be read anywhere and kept beside a run."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshtrain.verify.kinds import KINDS
from meshtrain.verify.report import largest, name_of, summary, where
from meshtrain.verify.session import Outcome

STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2e8540; --bad: #c0392b; --no: #b7791f; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
code, td.layout { font-family: ui-monospace, monospace; font-size: .92em; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; }
tr + tr, tbody tr { border-top: 1px solid var(--line); }
.equal { color: var(--good); } .different { color: var(--bad); font-weight: 600; }
.refused { color: var(--no); }
.reason { max-width: 30rem; }
svg { width: 11rem; height: 2.6rem; } svg text { font-size: 9px; fill: currentColor; }
"""
# A picture of the differences by step.
WIDTH = 176
HEIGHT = 42
LOW = -18  # the power of ten at its bottom
HIGH = 1  # and at its top


def page(reference: Mapping[str, Any], outcomes: Sequence[Outcome], command: str) -> str:
    """The report in HTML."""
    rows = "\n".join(_row(outcome, reference["tolerance"]) for outcome in outcomes)
    kinds = sorted({outcome.kind for outcome in outcomes if outcome.kind})
    meanings = "".join(
        f"<dt>{_text(kind)}</dt><dd>{_text(KINDS[kind])}</dd>" for kind in kinds if kind in KINDS
    )
    legend = f"<h2>Kinds</h2><dl>{meanings}</dl>" if meanings else ""
    small = reference["small"]
    copy = f"<p>A small copy: <code>{_text(' '.join(small))}</code></p>" if small else ""
    loss = reference["loss"]
    ends = "" if loss is None else f", whose last loss is {loss:.6g}"
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(reference["target"])}: {_text(summary(outcomes))}</title>
<style>{STYLE}</style>
<h1>{_text(reference["target"])}</h1>
<p><strong>{_text(summary(outcomes))}</strong>, beside one process that trains
{reference["steps"]} steps in {_text(reference["precision"])}{ends}. Losses and norms count as equal
up to a relative difference of {reference["tolerance"]:.1g}.</p>
{copy}
<table>
<thead><tr><th>layout</th><th></th><th>loss and norm, by step</th><th>first difference</th>
<th>what it is</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
{legend}
<p>By <code>{_text(command)}</code></p>
</html>
"""


def _row(outcome: Outcome, tolerance: float) -> str:
    kind = f"<strong>{_text(outcome.kind)}</strong>: " if outcome.kind else ""
    picture = _picture(outcome, tolerance)
    return (
        f'<tr><td class="layout">{_text(name_of(outcome.layout))}</td>'
        f'<td class="{outcome.status}">{outcome.status}</td>'
        f"<td>{picture}</td><td>{_text(where(outcome))}</td>"
        f'<td class="reason">{kind}{_text(outcome.reason or "")}</td></tr>'
    )


def _picture(outcome: Outcome, tolerance: float) -> str:
    """The relative difference of the loss (line) and of the norm (dots) in each step, on a log
    scale, and the tolerance."""
    if not outcome.apart:
        return ""
    right = WIDTH - 40  # behind it the largest difference is written
    between_steps = right / max(len(outcome.apart) - 1, 1)
    line: list[str] = []
    dots: list[str] = []
    for n, (loss, norm) in enumerate(outcome.apart):
        x = f"{2 + n * between_steps:.1f}"
        line.append(f"{x},{_height(loss):.1f}")
        dots.append(f'<circle cx="{x}" cy="{_height(norm):.1f}" r="1.4" fill="currentColor"/>')
    limit = f"{_height(tolerance):.1f}"
    beside_last = f"{_height(max(outcome.apart[-1])) + 3:.1f}"
    name = f"the largest is {largest(outcome)}"
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" class="{outcome.status}" role="img" '
        f'aria-label="{name}">',
        f"<title>{name}</title>",
        f'<line x1="0" x2="{right + 4}" y1="{limit}" y2="{limit}" stroke="currentColor" '
        f'stroke-dasharray="3 3" opacity=".5"/>',
        f'<polyline points="{" ".join(line)}" fill="none" stroke="currentColor" '
        f'stroke-width="1.2"/>',
        *dots,
        f'<text x="{right + 8}" y="{beside_last}">{largest(outcome)}</text>',
        "</svg>",
    ]
    return "".join(parts)


def _height(size: float) -> float:
    """Where a relative difference is drawn; 0 is at the bottom."""
    if size == 0:
        power: float = LOW
    elif not math.isfinite(size):
        power = HIGH
    else:
        power = min(max(math.log10(size), LOW), HIGH)
    share = (power - LOW) / (HIGH - LOW)
    return HEIGHT - 3 - share * (HEIGHT - 8)


def _text(value: object) -> str:
    return html.escape(str(value))
