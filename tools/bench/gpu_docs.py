"""Writes what GPUs have shown into the documentation.

    python tools/bench/gpu_docs.py          writes docs/performance.md and docs/design.md anew
    python tools/bench/gpu_docs.py OUT      first puts the results of gpu_check.sh into
                                            tools/bench/gpu/, a file for each card: the newest run

docs/performance.md gets a section for each card. docs/design.md lists what gpu_claims.yaml has and
no card has shown.
"""

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
PERFORMANCE, DESIGN = DOCS / "performance.md", DOCS / "design.md"
CARDS = HERE / "gpu"
CLAIMS = HERE / "gpu_claims.yaml"
STAGES = ("tests", "layouts", "memory", "pair", "kernels")

Row = dict[str, Any]


# What the rows say --------------------------------------------------------------------------------


def is_bad(row: Mapping[str, Any]) -> bool:
    """Whether a row says that something is not as it must be, or that a stage crashed."""
    return row.get("result") == "bad" or row.get("ended") == "failed"


def label(row: Mapping[str, Any]) -> str:
    """What patterns of gpu_claims.yaml are compared with."""
    by = f" by {row['by']}" if "by" in row else ""
    return f"{row['stage']}: {row['name']}{by}"


def facts_of(rows: Sequence[Row]) -> Row:
    """The row about the machine."""
    return next(row for row in rows if row["stage"] == "machine" and "gpu" in row)


def machine_line(facts: Mapping[str, Any]) -> str:
    nccl = ".".join(map(str, facts.get("nccl") or ("none",)))
    return (
        f"{facts['gpu']}, {facts['memory_gib']:.0f} GiB, torch {facts['torch']}, "
        f"NCCL {nccl}, {facts['time'][:10]}"
    )


def unseen(rows: Sequence[Row]) -> Iterator[str]:
    """What was not seen, and why: equal reasons of a stage in one line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.get("result") == "unseen":
            reasons.setdefault((row["stage"], row["why"]), []).append(row["name"])
        elif row.get("ended") == "limit":
            why = f"stopped at its limit of {row['limit_s']:.0f} s"
            reasons.setdefault((row["stage"], why), []).append(row["part"])
        elif row.get("ended") == "not reached":
            reasons.setdefault((row["stage"], "its stage's time was over"), []).append(row["part"])
    for (stage, why), names in reasons.items():
        first = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        yield f"- {stage}: {first}: {why}"


def seen(rows: Sequence[Row]) -> Iterator[str]:
    """What was seen, stage by stage."""
    by_stage = {stage: [row for row in rows if row["stage"] == stage] for stage in STAGES}
    passed = sum(row.get("result") == "good" for row in by_stage["tests"])
    if passed:
        yield f"- tests: {passed} passed"
    for row in by_stage["layouts"]:
        if row.get("result") == "good":
            difference = row.get("difference")
            apart = "" if difference is None else f", largest difference {difference:.1e}"
            yield f"- layout {row['layout']} ({row['name']}) over {row['by']}: as one rank{apart}"
    for row in by_stage["memory"]:
        if row.get("result") == "good":
            planned, measured = row["planned_gib"], row["measured_gib"]
            yield f"- memory of {row['name']}: planned {planned:.2f} GiB, took {measured:.2f} GiB"
    for row in by_stage["pair"]:
        if "ratio" in row:
            yield f"- {pair_line(row)}"
    for row in by_stage["kernels"]:
        if row.get("result") == "good":
            yield f"- {kernel_line(row)}"


def pair_line(row: Mapping[str, Any]) -> str:
    ratio = row["ratio"]
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in row["tokens_per_s"].items())
    return (
        f"{row['name']}: meshtrain's tokens per second are {ratio['median']:.3f} of the other "
        f"side's ({ratio['low']:.3f} to {ratio['high']:.3f} with "
        f"{100 * ratio['coverage']:.0f} %); {rates}; losses of the first steps differ by at most "
        f"{100 * row['largest_difference_of_losses']:.2f} %"
    )


def kernel_line(row: Mapping[str, Any]) -> str:
    if "gain" in row:
        return f"{row['name']}: {row['gain']:.2f} times as fast as bfloat16"
    if "ms_of_loop" in row:
        kernel = "one fused product" if row["fused"] else "no fused product"
        times = row["ms_of_loop"] / row["ms"]
        return f"{row['name']}: {kernel}, {times:.1f} times as fast"
    time = f", {row['ms']:.2f} ms" if "ms" in row else ""
    return f"{row['name']}: {', '.join(f'`{kernel}`' for kernel in row['kernels'])}{time}"


# Pages --------------------------------------------------------------------------------------------


def page(rows: Sequence[Row]) -> str:
    """The last page of a run."""
    lines = [f"# {machine_line(facts_of(rows))}", ""]
    bad = [row for row in rows if is_bad(row)]
    if bad:
        lines += ["## Not as it must be", ""]
        for row in bad:
            name = row.get("name") or f"{row['part']} crashed with status {row['status']}"
            last = (row.get("why") or row.get("said") or "").strip().splitlines()[-1:]
            lines.append(f"- {row['stage']}: {name}: {''.join(last)}")
        lines.append("")
    for title, found in (("Seen", list(seen(rows))), ("Not seen", list(unseen(rows)))):
        lines += [f"## {title}", "", *(found or ["- nothing"]), ""]
    return "\n".join(lines)


def read_cards(folder: Path = CARDS) -> list[list[Row]]:
    """The committed results, a list of rows for each card."""
    return [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    ]


def performance(text: str, cards: Sequence[Sequence[Row]]) -> str:
    """docs/performance.md with a section for each card."""
    lines = []
    for rows in cards:
        lines += [f"### {machine_line(facts_of(rows))}", "", *seen(rows)]
        lines += [f"- **not right**: {label(row)}" for row in rows if row.get("result") == "bad"]
        lines += ["", "Not seen there:", "", *(list(unseen(rows)) or ["- nothing"]), ""]
    if not cards:
        lines = ["No card's results have been put here yet."]
    return between(text, "gpu", wrapped(lines))


def design(text: str, cards: Sequence[Sequence[Row]], claims: Sequence[Row]) -> str:
    """docs/design.md with what no card has shown."""
    left = [claim for claim in claims if not any(shown(claim, rows) for rows in cards)]
    where = "The suite runs on CPUs over gloo."
    if cards:
        names = join([facts_of(rows)["gpu"] for rows in cards])
        where += (
            f" What one GPU ({names}) has shown is in "
            "[performance.md](performance.md#what-one-gpu-shows-in-eight-minutes)."
        )
    table = ["| what | where it is | how to test it |", "| --- | --- | --- |"]
    table += [f"| {claim['what']} | {claim['where']} | {claim['how']} |" for claim in left]
    about = (
        "The following is justified by reasoning or simulation only, and has not been tested on "
        "GPUs:"
    )
    return between(text, "not on GPUs", wrapped([f"{where} {about}", "", *table]))


def shown(claim: Mapping[str, Any], rows: Sequence[Row]) -> bool:
    """Whether a card's results show what a claim says: each pattern has matches, and all are
    good."""
    patterns = claim.get("seen", [])
    for pattern in patterns:
        matches = [row for row in rows if "name" in row and fnmatchcase(label(row), pattern)]
        if not matches or any(row["result"] != "good" for row in matches):
            return False
    return bool(patterns)


def between(text: str, name: str, new: str) -> str:
    """A document with the text between the comments `NAME: ...` and `end of NAME` replaced."""
    pattern = rf"(<!-- {name}:[^>]*-->\n).*?(<!-- end of {name} -->)"
    return re.sub(pattern, lambda found: f"{found[1]}\n{new}\n\n{found[2]}", text, flags=re.DOTALL)


def wrapped(lines: Sequence[str]) -> str:
    """Lines at 100 columns, tables and headings apart."""
    found = []
    for line in lines:
        if line.startswith(("|", "#")):
            found.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            found.append(textwrap.fill(line, 100, subsequent_indent=indent, break_on_hyphens=False))
    return "\n".join(found).strip()


def join(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def add(out: Path, folder: Path = CARDS) -> Path:
    """Puts the results of a run in place of the earlier ones of its card; returns their file."""
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    card = facts_of(rows)["gpu"].removeprefix("NVIDIA ").lower().replace(" ", "-")
    file = folder / f"{card}.jsonl"
    folder.mkdir(exist_ok=True)
    lines = []
    for row in rows:
        kept = {key: value for key, value in row.items() if key != "said"}
        lines.append(json.dumps(kept) + "\n")
    file.write_text("".join(lines))
    return file


def main() -> None:
    if len(sys.argv) > 1:
        print(add(Path(sys.argv[1])))
    cards, claims = read_cards(), yaml.safe_load(CLAIMS.read_text())
    PERFORMANCE.write_text(performance(PERFORMANCE.read_text(), cards))
    DESIGN.write_text(design(DESIGN.read_text(), cards, claims))


if __name__ == "__main__":
    main()
