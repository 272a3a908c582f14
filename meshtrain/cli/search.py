"""Finds the best layouts of a config on given hosts, without a job: `meshtrain search CONFIG
--hosts 8x8 --gpu h100`.

Varies only keys that do not change what is computed. docs/foresight.md says how far predictions can
be trusted.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshtrain.cli.plan import network_lines, read_hardware, read_hosts
from meshtrain.config import Config
from meshtrain.errors import InputError, any_of, bytes_text, nearest, plural, writing
from meshtrain.run.rank_table import columns, describe_hosts

if TYPE_CHECKING:
    from meshtrain.foresight.hardware import Hardware
    from meshtrain.foresight.search import Search
    from meshtrain.foresight.space import Candidate

LIMIT = 32  # predictions in full
FIRST_TABLE_S = 3.0  # a search that takes longer shows what it has estimated
LATE_S = 8.0  # until then all candidates should have been estimated
FEWEST = 20  # that may fit: of fewer a table says nothing
PROGRESS_S = 0.5, 10.0  # between two lines of progress: on a terminal, and else
# columns; other keys stand below a row
TITLES = ("batch.micro_size", "parallel.recompute", "pipeline.schedule")


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
        "--fabric",
        metavar="NAME",
        help="in another network: efa, infiniband, ethernet, a file, or doctor's --json",
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
    parser.add_argument(
        "--limit",
        type=int,
        default=LIMIT,
        metavar="N",
        help=f"predict at most so many candidates in full ({LIMIT})",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(arguments: argparse.Namespace) -> None:
    # these bring torch, as the model does
    from meshtrain.foresight.search import Search, forecast
    from meshtrain.foresight.space import KEYS, OFFLOAD, USUAL, Space

    begin = time.monotonic()
    hosts = read_hosts(arguments.hosts)
    hardware, *other = read_hardware(arguments.gpu, arguments.fabric)
    usual = [key for key in USUAL if key != OFFLOAD or hardware.has_host_memory]
    keys = read_keys(arguments.vary, arguments.keep, KEYS, usual)

    def load(changes: Sequence[str]) -> Config:
        overrides = [*arguments.overrides, *keys.overrides, *changes]
        return Config.load(arguments.config, overrides, world_size=sum(hosts))

    config = load(["layout={dp_shard: -1}"] if "layout" in keys.varied else [])
    assert config.resolved is not None  # it was loaded for its hosts
    config = replace(config, resolved=config.resolved.on_hosts(hosts))
    progress = Progress(begin)

    def searched(varied: Sequence[str]) -> "tuple[Search, list[Candidate]]":
        space = Space(config, varied, keys.sizes)
        search = Search(space, forecast(config, hardware, arguments.max_memory), arguments.goal)
        results = search.run(load, arguments.show, hardware.error, arguments.limit, progress)
        return search, results

    # Offloading is for what does not fit otherwise, unless it is asked for.
    first = keys.varied
    if not arguments.vary:
        first = [key for key in keys.varied if key != OFFLOAD]
    search, results = searched(first)
    needs_offload = not results and first != keys.varied
    if needs_offload:
        search, results = searched(keys.varied)
    progress.end()
    if not results:
        raise InputError("\n".join(["no layout of these hosts is found", *_rejected(search)]))
    if arguments.write:
        _write(arguments.write, [load(candidate.overrides(config)) for candidate in results])
    if arguments.json:
        print(json.dumps(search_json(search, results)))
        return
    took = time.monotonic() - begin
    count = f"{search.space.count:,} candidates for {describe_hosts(search.space.placed)}"
    print(f"{count}, {search.predicted:,} predicted in full ({took:.1f} s)")
    if needs_offload:
        print("without parallel.offload nothing fits")
    print(f"seconds{hardware.band}; = as fast as the fastest, within that")
    print(*columns(_rows(search, results, other)), *_rejected(search), sep="\n")
    best = [*keys.overrides, *results[0].overrides(config)]
    print(f"run 1: {' '.join(map(shlex.quote, best))}")


class Progress:
    """A line on stderr that says how far the search is, and tables of what it has estimated: of the
    first candidates if it is late, and of all."""

    def __init__(self, begin: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.begin = begin
        self.clock = clock
        self.is_terminal = sys.stderr.isatty()
        self.every = PROGRESS_S[0] if self.is_terminal else PROGRESS_S[1]
        self.said = 0.0  # when the last line was printed, in seconds of the search
        self.tabled = 0  # how many candidates the last table was of

    def __call__(self, search: "Search") -> None:
        now = self.clock() - self.begin
        if self._is_worth_a_table(search, now):
            self._print_table(search, now)
        if now - self.said >= self.every:
            self.said = now
            self._print_line(search, now)

    def end(self) -> None:
        """Clears the line."""
        if self.is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _is_worth_a_table(self, search: "Search", now: float) -> bool:
        count = len(search.firsts)
        if search.is_ranked:
            # Once, unless the results are nearly there.
            is_new = self.tabled < count
            self.tabled = count
            return is_new and now > FIRST_TABLE_S
        is_late = now > LATE_S and not self.tabled
        if is_late and len(search.heap) >= FEWEST:
            self.tabled = count
            return True
        return False

    def _print_table(self, search: "Search", now: float) -> None:
        rows = [["", "layout", "micro", "step", "memory"]]
        for candidate in search.first_results():
            estimate = candidate.estimate
            # Of a pipeline without a schedule the least with any.
            about = "from" if candidate.layout.size("pp") > 1 else "~"
            rows.append(
                [
                    "",
                    _sizes(candidate),
                    str(candidate.settings["batch.micro_size"]),
                    f"{about} {estimate.seconds:.3g} s",
                    f"from {bytes_text(estimate.least_memory)}",
                ]
            )
        looked_at = plural(len(search.firsts), "candidate")
        if not search.is_ranked:
            looked_at = f"the first {looked_at}"
        self.end()
        print(
            f"a first look at {looked_at}, by estimates ({now:.1f} s)",
            *columns(rows),
            sep="\n",
            file=sys.stderr,
            flush=True,
        )

    def _print_line(self, search: "Search", now: float) -> None:
        line = plural(len(search.firsts), "candidate")
        if search.is_ranked:
            line = f"{search.looked:,} of {line} looked at, {search.predicted:,} predicted"
        if search.places:
            line += f", the best so far {search.best:.3g} s"
        line += f" ({now:.0f} s)"
        if self.is_terminal:
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


class Keys(NamedTuple):
    """What --vary and --keep say."""

    varied: list[str]  # the keys that vary
    sizes: dict[str, int]  # axis -> its size in every layout
    overrides: list[str]  # values of keys that do not vary


def read_keys(vary: str | None, keep: str, keys: Sequence[str], usual: Sequence[str]) -> Keys:
    """Parses --vary and --keep. Raises InputError: no such key."""
    names = {key: key for key in keys} | {key.rpartition(".")[2]: key for key in keys}

    def known(name: str, option: str) -> str:
        if name not in names:
            near = nearest(name, names)
            hint = f"did you mean {near}? " if near else ""
            raise InputError(
                f"{option} {name}: search does not vary it; {hint}use {any_of(list(keys))}"
            )
        return names[name]

    varied = list(usual)
    if vary:
        varied = [known(name.strip(), "--vary") for name in vary.split(",")]
    sizes, overrides = {}, []
    for item in filter(None, keep.split(",")):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name.startswith("layout.") and value.isdecimal() and int(value):
            sizes[name.removeprefix("layout.")] = int(value)
            continue
        key = known(name, "--keep")
        varied = [other for other in varied if other != key]
        if equals:
            overrides.append(f"{key}={value}")
    return Keys(varied, sizes, overrides)


def _rows(
    search: "Search", results: Sequence["Candidate"], networks: "Sequence[Hardware]" = ()
) -> list[list[str]]:
    """A row for each result, and lines below it. `networks`: in which its seconds are told, too."""
    rows = [["", "layout", "micro", "recompute", "schedule", "step", "MFU", "memory"]]
    for place, candidate in enumerate(results, 1):
        step = candidate.prediction.step
        micro, recompute, schedule = (str(candidate.settings[key]) for key in TITLES)
        is_near = candidate.near and place > 1
        rows.append(
            [
                f"{place} =" if is_near else f"{place}",
                _sizes(candidate),
                micro,
                recompute,
                schedule if candidate.layout.size("pp") > 1 else "-",
                f"{step.seconds:.3g} s",
                f"{100 * step.mfu:.0f} %" if step.mfu else "-",
                bytes_text(candidate.prediction.memory.total),
            ]
        )
        _, *changes = candidate.overrides(search.config)  # the layout stands above
        others = [change for change in changes if not change.startswith(TITLES)]
        below = (
            " ".join(others),
            candidate.reason,
            f"limit: {step.limit}",
            *network_lines(candidate.prediction, networks),
        )
        rows += [[f"     {line}"] for line in below if line]
    return rows


def _sizes(candidate: "Candidate") -> str:
    """`dp_shard 8, tp 2`"""
    return ", ".join(f"{axis} {n}" for axis, n in candidate.layout.sizes.items() if n > 1)


def _rejected(search: "Search") -> list[str]:
    return [
        f"not shown: {count:,} {reason} ({example})"
        for reason, (count, example) in search.space.rejected.items()
    ]


def search_json(search: "Search", results: Sequence["Candidate"]) -> dict[str, Any]:
    """The whole result for a program."""
    return {
        "candidates": search.space.count,
        "predicted": search.predicted,
        "layouts": [_candidate_json(search, candidate) for candidate in results],
        "rejected": [
            {"reason": reason, "candidates": count, "example": example}
            for reason, (count, example) in search.space.rejected.items()
        ],
    }


def _candidate_json(search: "Search", candidate: "Candidate") -> dict[str, Any]:
    memory = candidate.prediction.memory
    return {
        "overrides": candidate.overrides(search.config),
        "near": candidate.near,
        "reason": candidate.reason,
        **candidate.prediction.json(),
        "memory": {
            **asdict(memory),
            "total": memory.total,
            "verdict": memory.verdict(search.forecast.memory),
        },
    }


def _write(path: str, configs: Sequence[Config]) -> None:
    """Writes the first config into a file, or all of them into a folder: `1.yaml`, ..."""
    is_folder = path.endswith("/") or Path(path).is_dir()
    files = {Path(path): configs[0]}
    if is_folder:
        files = {Path(path) / f"{place}.yaml": config for place, config in enumerate(configs, 1)}
    folder = Path(path) if is_folder else Path(path).parent
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        for file, config in files.items():
            file.write_text(config.to_yaml())
