"""Predicted speeds beside those that others have published.

    python tools/bench/published.py [WORDS ...] [--parts] [--json]
    python tools/bench/published.py --write      writes the tables of docs/which-layout.md anew

Each case of published.yaml is a run of another framework, written as a config of meshtrain's on the
hardware that was measured. Nothing is fitted to them. WORDS: only cases with them in their names.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml

from gpu_docs import between, wrapped
from meshtrain.cli.plan import read_hosts
from meshtrain.config import Config
from meshtrain.errors import bytes_text
from meshtrain.foresight.hardware import Hardware, load, with_fabric
from meshtrain.foresight.prediction import Prediction

TABLE = Path(__file__).with_suffix(".yaml")
PAGE = TABLE.parents[2] / "docs" / "which-layout.md"
UNITS = {"mfu": "% MFU", "tokens_per_s": "tokens/s", "seconds": "s"}
NETWORKS = {"infiniband": "InfiniBand", "efa": "EFA", "ethernet": "100 Gb/s Ethernet"}


class Row(NamedTuple):
    """A case with its prediction. `ratio`: of speeds, predicted / published."""

    name: str
    unit: str
    predicted: float
    published: float
    ratio: float
    memory_gib: float  # at the peak of a rank, estimated
    parts: dict[str, float]  # of the step, in seconds
    kernel: str  # what meshtrain does not have


def predicted(case: Mapping[str, Any], table: Mapping[str, Any]) -> Row:
    hardware = hardware_of(case, table["hardware"])
    predictions = [Prediction(config, hardware) for config in configs_of(case, table["models"])]
    steps = [prediction.step for prediction in predictions]
    seconds = fmean(step.seconds for step in steps)
    speed = steps[0].seconds / seconds  # of the first one's
    [(name, published)] = case["measured"].items()
    values = {
        "mfu": 100 * (steps[0].mfu or 0) * speed,
        "tokens_per_s": steps[0].tokens_per_s / predictions[0].layout.world_size * speed,
        "seconds": seconds,
    }
    ratio = values[name] / published
    return Row(
        case["name"],
        UNITS[name],
        values[name],
        published,
        1 / ratio if name == "seconds" else ratio,
        fmean(prediction.memory.total for prediction in predictions) / 2**30,
        {
            name: fmean(step.parts.get(name, 0.0) for step in steps)
            for name in dict.fromkeys(name for step in steps for name in step.parts)
        },
        case.get("kernel", ""),
    )


def configs_of(case: Mapping[str, Any], models: Mapping[str, Any]) -> list[Config]:
    """The config of a case, or the two between which it is."""
    known = case.get("set", {})
    [(key, values)] = case.get("between", {"": [None]}).items()
    return [config_of(case, models, known | ({key: value} if key else {})) for value in values]


def config_of(
    case: Mapping[str, Any], models: Mapping[str, Any], keys: Mapping[str, Any]
) -> Config:
    """The config of a case with these keys, placed on its hosts."""
    hosts = read_hosts(case["hosts"])
    sections = {
        "model": models[case["model"]],
        "data": {"seq_len": case["seq_len"]},
        "batch": case["batch"],
        "layout": case["layout"],
        "train": {"steps": 1000, "precision": "bfloat16"},
    }
    overrides = [f"{key}={value}" for key, value in keys.items()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.yaml"
        file.write_text(json.dumps(sections))
        config = Config.load(str(file), overrides, world_size=sum(hosts))
    assert config.resolved is not None
    return replace(config, resolved=config.resolved.on_hosts(hosts))


def hardware_of(case: Mapping[str, Any], known: Mapping[str, Any]) -> Hardware:
    """A built-in file, with the values that a case's GPUs have in its place."""
    own = dict(known[case.get("hardware", "h100")])
    hardware = load(own.pop("file"))
    for path, value in own.items():
        hardware = changed(hardware, path.split("."), value)
    return hardware


def changed(record: Any, path: list[str], value: Any) -> Any:
    """The record, or dict, with one value changed, at a path of names."""
    if not path:
        return value
    name, *rest = path
    if isinstance(record, dict):
        return {**record, name: changed(record[name], rest, value)}
    assert is_dataclass(record)
    assert name in {field.name for field in fields(record)}
    return replace(record, **{name: changed(getattr(record, name), rest, value)})  # type: ignore[type-var]


# The tables of the page ---------------------------------------------------------------------------


def published_row(case: Mapping[str, Any], row: Row, sources: Mapping[str, Any]) -> str:
    """A run with its published and predicted speed."""
    source = sources[case["source"]]
    mark = " *" if row.kernel else ""
    return (
        f"| [{row.name}]({source['url']}) | `{flow(case['layout'])}` | "
        f"{digits(row.published)} {row.unit} | {digits(row.predicted)} | "
        f"{percent(row.ratio)} %{mark} |"
    )


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def percent(ratio: float) -> str:
    """By how much the predicted run is faster."""
    return f"{100 * (ratio - 1):+.0f}"


def flow(layout: Mapping[str, int]) -> str:
    return "{" + ", ".join(f"{axis}: {size}" for axis, size in layout.items()) + "}"


def summary(cases: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> list[str]:
    """How many are how close, what is known of those that are not, and how far off the others are,
    by kind."""
    counts = [
        f"{sum(abs(row.ratio - 1) <= most / 100 for row in rows)} within {most} %"
        for most in (5, 10, 20, 30)
    ]
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.kernel:
            names.setdefault(row.kernel, []).append(row.name)
    lines = [
        f"Of {len(rows)}: {', '.join(counts)}. `*`: meshtrain does not have what was measured:"
    ]
    lines += ["", *(f"- {'; '.join(who)}: {kernel}." for kernel, who in names.items())]
    ratios: dict[str, list[float]] = {}
    for case, row in zip(cases, rows, strict=True):
        if not row.kernel:
            ratios.setdefault(kind(case), []).append(row.ratio)
    ranges = [
        f"{percent(min(found))} to {percent(max(found))} % {name}" for name, found in ratios.items()
    ]
    return [*lines, "", f"The others by kind: {'; '.join(ranges)}."]


def kind(case: Mapping[str, Any]) -> str:
    if case.get("set", {}).get("train.linear_precision") == "float8":
        return "in float8"
    return (
        f"in 16 bits on {'more than' if sum(read_hosts(case['hosts'])) > 100 else 'up to'} 100 GPUs"
    )


def walked(stage: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[str]:
    """The table of a step of the page: layouts of a model on its hosts, in each network."""
    hosts = read_hosts(stage["hosts"])
    columns = NETWORKS if len(hosts) > 1 else {"": "a step"}
    yield "| " + " | ".join(("layout", "with", "memory", *columns.values())) + " |"
    yield "| --- " * (3 + len(columns)) + "|"
    for choice in stage["layouts"]:
        settings = choice.get("set", {})
        config = config_of({**stage, **choice}, models, settings)
        cells = [f"`{flow(choice['layout'])}`", ", ".join(map(short, settings.items()))]
        hardware = load("h100")
        memory = Prediction(config, hardware).memory
        verdict = memory.verdict(hardware.device.room)
        cells.append(f"{bytes_text(memory.total)}, {verdict}")
        for network in columns:
            there = with_fabric(hardware, network) if network else hardware
            took = Prediction(config, there).step.seconds
            cells.append("" if verdict == "does not fit" else f"{took:.3g} s")
        yield "| " + " | ".join(cells) + " |"


def short(setting: tuple[str, Any]) -> str:
    key, value = setting
    text = str(value).lower() if isinstance(value, bool) else value
    return f"`{key.split('.')[-1]}: {text}`"


def page(text: str, table: Mapping[str, Any]) -> str:
    """The page with its tables computed anew."""
    for name, stage in table["walk"].items():
        text = between(text, name, "\n".join(walked(stage, table["models"])))
    rows = [predicted(case, table) for case in table["cases"]]
    lines = [
        "| run | layout | published | predicted | faster by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case, row in zip(table["cases"], rows, strict=True):
        lines.append(published_row(case, row, table["sources"]))
    return between(text, "published", wrapped([*lines, "", *summary(table["cases"], rows)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--parts", action="store_true", help="the parts of each step, in seconds")
    parser.add_argument("--write", action="store_true", help="the tables of the page")
    options = parser.parse_args()
    table = yaml.safe_load(TABLE.read_text())
    if options.write:
        PAGE.write_text(page(PAGE.read_text(), table))
        return
    rows = []
    for case in table["cases"]:
        if not all(word in case["name"] for word in options.words):
            continue
        row = predicted(case, table)
        rows.append(row)
        if not options.json:
            print(
                f"{row.name:46} {row.predicted:8.4g} {row.published:8.4g} {row.unit:9} "
                f"{100 * (row.ratio - 1):+5.0f} %  {row.memory_gib:4.0f} GiB",
                flush=True,
            )
        if options.parts:
            print("   ", *(f"{name} {took:.3g}" for name, took in row.parts.items()), flush=True)
    if options.json:
        print(json.dumps([row._asdict() for row in rows]))
        return
    for within in (0.05, 0.1, 0.2, 0.3):
        count = sum(abs(row.ratio - 1) <= within for row in rows)
        print(f"within {within:.0%}: {count} of {len(rows)}")


if __name__ == "__main__":
    main()
