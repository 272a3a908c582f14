"""Finds the best layouts of a config on given hosts, without a job: `meshtrain search CONFIG
--hosts 8x8 --gpu h100`.

Varies only keys that do not change what is computed. docs/foresight.md says how far predictions can
be trusted.
"""

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtrain.cli.plan import processes, read_hosts
from meshtrain.config import Config
from meshtrain.errors import InputError, any_of, bytes_text, writing
from meshtrain.run.rank_table import columns, describe_hosts

if TYPE_CHECKING:
    from meshtrain.foresight.search import Search
    from meshtrain.foresight.space import Candidate

# columns; other keys stand below a row
TITLES = (
    "batch.micro_size",
    "parallel.recompute",
    "pipeline.schedule",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, or the name of a built-in config")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override a key")
    parser.add_argument(
        "--hosts", metavar="COUNTS", required=True, help="processes on each host: 4,2, or 8x8"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        required=True,
        help="a built-in GPU (h100, ...), or a hardware file",
    )
    parser.add_argument(
        "--vary", metavar="KEYS", help="vary only these keys: layout,micro_size,recompute"
    )
    parser.add_argument(
        "--keep",
        metavar="KEYS",
        default="",
        help="keep or set these: layout.tp=8,recompute=full,schedule",
    )
    parser.add_argument(
        "--max-memory", metavar="GIB", type=float, help="GiB of a rank (default: what the GPU has)"
    )
    parser.add_argument(
        "--for", dest="goal", choices=("time", "memory"), default="time", help="what to minimize"
    )
    parser.add_argument(
        "--show", type=int, default=5, metavar="N", help="how many layouts to show (5)"
    )
    parser.add_argument(
        "--write",
        metavar="PATH",
        help="write the best as a YAML file; a folder: all that are shown",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(arguments: argparse.Namespace) -> None:
    from meshtrain.foresight import search as searching  # brings torch, as the model does
    from meshtrain.foresight import space
    from meshtrain.foresight.hardware import load as load_hardware

    begin, hosts, hardware = (
        time.monotonic(),
        read_hosts(arguments.hosts),
        load_hardware(arguments.gpu),
    )
    settings, fixed, vary = read_keys(arguments.vary, arguments.keep, space.KEYS, space.USUAL)

    def load(changes: Sequence[str]) -> Config:
        return Config.load(
            arguments.config, [*arguments.overrides, *settings, *changes], world_size=sum(hosts)
        )

    config = load(["layout={dp_shard: -1}"] if "layout" in vary else [])
    assert config.resolved is not None  # it was loaded for its hosts
    config = replace(config, resolved=config.resolved.on_hosts(hosts))
    error = searching.NEAR if hardware.source == "data sheet" else hardware.error  # as calibrated
    with processes() as pool:
        forecast = searching.forecast(hardware, arguments.max_memory, pool)
        search = searching.Search(space.Space(config, vary, fixed), forecast, arguments.goal)
        results = search.run(load, arguments.show, error)
    if not results:
        raise InputError("\n".join(["no layout of these hosts is found", *_rejected(search)]))
    if arguments.write:
        _write(arguments.write, [load(candidate.overrides(config)) for candidate in results])
    if arguments.json:
        print(json.dumps(search_json(search, results)))
        return
    count = f"{search.space.count:,} candidates for {describe_hosts(search.space.placed)}"
    print(f"{count}, {search.predicted:,} predicted in full ({time.monotonic() - begin:.1f} s)")
    print(*columns(_rows(search, results)), *_rejected(search), sep="\n")
    print(f"run 1: {' '.join(map(shlex.quote, [*settings, *results[0].overrides(config)]))}")


def read_keys(
    vary: str | None, keep: str, keys: Sequence[str], usual: Sequence[str]
) -> tuple[list[str], dict[str, int], list[str]]:
    """Parses --vary and --keep: overrides, sizes of axes, and the keys that vary. Raises
    InputError: no such key."""
    names = {key.rpartition(".")[2]: key for key in keys} | {key: key for key in keys}

    def known(name: str, option: str) -> str:
        if name not in names:
            raise InputError(f"{option} {name}: search does not vary it; use {any_of(list(keys))}")
        return names[name]

    varied = [known(name.strip(), "--vary") for name in vary.split(",")] if vary else list(usual)
    overrides, fixed = [], {}
    for item in filter(None, keep.split(",")):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name.startswith("layout.") and value.isdecimal() and int(value):
            fixed[name.removeprefix("layout.")] = int(value)
            continue
        key = known(name, "--keep")
        varied = [other for other in varied if other != key]
        overrides += [f"{key}={value}"] * bool(equals)
    return overrides, fixed, varied


def _rows(search: "Search", results: Sequence["Candidate"]) -> list[list[str]]:
    rows = [["", "layout", "micro", "recompute", "schedule", "step", "MFU", "memory"]]
    for i, candidate in enumerate(results):
        step, sizes = candidate.prediction.step, candidate.layout.sizes
        micro, recompute, schedule = (str(candidate.settings[key]) for key in TITLES)
        first = [
            f"{i + 1}{' =' * (candidate.near and i > 0)}",
            ", ".join(f"{a} {n}" for a, n in sizes.items() if n > 1),
        ]
        first += [
            micro,
            recompute,
            schedule if candidate.layout.size("pp") > 1 else "-",
            f"{step.seconds:.3g} s",
        ]
        mfu = f"{100 * step.mfu:.0f} %" if step.mfu else "-"
        rows.append([*first, mfu, bytes_text(candidate.memory.total)])
        others = [
            change
            for change in candidate.overrides(search.config)[1:]
            if not change.startswith(TITLES)
        ]
        rows += [
            [f"     {line}"]
            for line in (" ".join(others), candidate.reason, f"limit: {step.limit}")
            if line
        ]
    return rows


def _rejected(search: "Search") -> list[str]:
    return [
        f"not shown: {count:,} {reason} ({example})"
        for reason, (count, example) in search.space.rejected.items()
    ]


def search_json(search: "Search", results: Sequence["Candidate"]) -> dict[str, Any]:
    """The whole result for a program."""
    keys, room = ("reason", "candidates", "example"), search.forecast.memory
    return {
        "candidates": search.space.count,
        "predicted": search.predicted,
        "layouts": [
            {
                "overrides": c.overrides(search.config),
                "near": c.near,
                "reason": c.reason,
                **c.prediction.json(),
                "memory": {
                    **asdict(c.memory),
                    "total": c.memory.total,
                    "verdict": c.memory.verdict(room),
                },
            }
            for c in results
        ],
        "rejected": [
            dict(zip(keys, (reason, *row), strict=True))
            for reason, row in search.space.rejected.items()
        ],
    }


def _write(path: str, configs: Sequence[Config]) -> None:
    """Writes the first config into a file, or all of them into a folder: `1.yaml`, ..."""
    folder = path.endswith("/") or Path(path).is_dir()
    files = [Path(path) / f"{i + 1}.yaml" for i in range(len(configs))] if folder else [Path(path)]
    with writing(path):
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for file, config in zip(files, configs, strict=False):
            file.write_text(config.to_yaml())
