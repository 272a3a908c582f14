"""Predicted speeds beside those that others have published.

    python tools/bench/published.py [WORDS ...] [--json]

Each case of published.yaml is a run of another framework, written as a config of meshtrain's on the
hardware that was measured. Nothing is fitted to them. WORDS: only cases with them in their names.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml

from meshtrain.cli.plan import read_hosts
from meshtrain.config import Config
from meshtrain.foresight.hardware import Hardware, load
from meshtrain.foresight.prediction import Prediction

TABLE = Path(__file__).with_suffix(".yaml")
UNITS = {"mfu": "% MFU", "tokens_per_s": "tokens/s", "seconds": "s"}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--parts", action="store_true", help="the parts of each step, in seconds")
    options = parser.parse_args()
    table = yaml.safe_load(TABLE.read_text())
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
