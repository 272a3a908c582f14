"""What a config would do on given hosts, computed without a job, a process group or an accelerator.

`meshtrain plan configs/quickstart.yaml --hosts 4,2` answers before anything is started: which rank lies where, which
groups cross hosts, how the global batch is shared, and what parameters, gradients and optimizer state a rank holds.
The rank table also becomes `layout.txt` of a run's folder.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshtrain.batch import BatchShape, describe_batch
from meshtrain.config import Config
from meshtrain.errors import InputError
from meshtrain.layout import DATA_AXES, Layout, short
from meshtrain.parameters import Held, Parameter, held_by_ranks, parameter_json, parameters_of, table
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.simulate import Timeline, simulate
from meshtrain.pipeline.split import StageSplit

MOST_LINES = 16  # of the table in a terminal, and half of it per axis; `--json` and layout.txt hold everything


@dataclass(frozen=True)
class PipelinePlan:
    """What runs over `pp`. `timeline` is simulated; `about` is a line for people."""

    about: str
    schedule: Schedule
    split: StageSplit
    holding: dict[str, tuple[int, ...]]  # parameter -> the stages that hold it
    timeline: Timeline


@dataclass(frozen=True)
class Plan:
    """A config on hosts. `layout` is placed; `pipeline` is None without one; `notes` say what was assumed."""

    config: str
    layout: Layout
    batch: BatchShape
    precision: str
    parameters: tuple[Parameter, ...]
    held: Held
    pipeline: PipelinePlan | None = None
    notes: tuple[str, ...] = ()


def make_plan(name: str, overrides: Sequence[str] = (), hosts: Sequence[int] | None = None) -> Plan:
    """The plan of a config on hosts with these numbers of processes.

    Without hosts everything is put on one, with as many processes as the layout needs at least.

    Raises:
        InputError, LayoutError: the config is wrong, or its layout does not fit the hosts.
    """
    config = Config.load(name, list(overrides), world_size=sum(hosts) if hosts else None)
    notes = []
    if not hosts:
        fixed = Layout({axis: max(size, 1) for axis, size in config.layout.items()})
        hosts = (fixed.world_size,)
        smallest = "the smallest world that this layout fits" if -1 in config.layout.values() else "all on one host"
        notes.append(f"no --hosts given: {smallest}, {describe_hosts(fixed.on_hosts(hosts))}")
        config = Config.load(name, list(overrides), world_size=fixed.world_size)  # what was left open is checked now
    layout = Layout.resolve(config.layout, sum(hosts)).on_hosts(hosts)
    batch = BatchShape(config.batch.global_size, config.batch.micro_size, layout.size(*DATA_AXES))
    parameters = tuple(parameters_of(config.model.name, config.model.keys, layout.size("tp")))
    pipeline: PipelinePlan | None = None
    placement: tuple[int, ...] = (0,)
    if layout.size("pp") > 1:
        pipeline = _pipeline(config, layout)
        parameters = tuple(replace(one, stages=pipeline.holding[one.name]) for one in parameters)
        placement = pipeline.schedule.placement
    held = held_by_ranks(parameters, layout, config.train.precision, placement)
    return Plan(name, layout, batch, config.train.precision, parameters, held, pipeline, tuple(notes))


def _pipeline(config: Config, layout: Layout) -> PipelinePlan:
    from meshtrain.build import check_stages, describe_pipeline, plain_model, stages_of  # here: they bring torch
    from meshtrain.parallel.stages import stages_holding

    schedule, split = stages_of(config, layout)
    check_stages(config, split)
    costs = split.costs  # of a forward: the gradients of inputs and those of weights are as many products each
    timeline = simulate(schedule, forward=costs, input_grad=costs, weight_grad=costs)
    holding = stages_holding(plain_model(config), split.bounds)
    return PipelinePlan(describe_pipeline(schedule, split), schedule, split, holding, timeline)


# Text ---------------------------------------------------------------------------------------------------------------


def describe_hosts(layout: Layout) -> str:
    """`32 processes = 4 hosts x 8`, or `6 processes = 4 on host 0 + 2 on host 1`. The layout is placed on hosts."""
    counts = layout.host_counts()
    world = f"{layout.world_size} process{'es' * (layout.world_size != 1)}"
    kinds = Counter(counts.values())
    if len(kinds) > 1 and len(counts) <= 8:
        return f"{world} = " + " + ".join(f"{count} on {host}" for host, count in counts.items())
    return f"{world} = " + " + ".join(f"{n} host{'s' * (n != 1)} x {count}" for count, n in kinds.items())


def layout_text(layout: Layout, most_lines: int | None = None) -> str:
    """The table of a placed layout: rank -> host, local rank, coordinate; and every group of every axis.

    A table longer than `most_lines`, or a list of groups longer than half of it, loses its middle.
    """
    rows = [["rank", "host", "local", *layout.axes]]
    rows += [
        [f"... {len(rank)} more ranks ..."]
        if isinstance(rank, range)
        else [str(rank), layout.host(rank), str(layout.local_rank(rank)), *map(str, layout.coordinate(rank).values())]
        for rank in _without_middle(range(layout.world_size), most_lines)
    ]
    lines = [f"layout {layout} on {describe_hosts(layout)}", "", *_columns(rows)]
    for axes in _grouped_axes(layout):
        lines += ["", *_group_lines(layout, axes, most_lines)]
    return "\n".join(lines) + "\n"


def plan_text(plan: Plan, each_parameter: bool = False) -> str:
    """The plan for a person: short, whatever the number of ranks; with parameters instead of ranks if asked."""
    shape, layout = plan.batch, plan.layout
    if each_parameter:
        below = [f"layout {layout} on {describe_hosts(layout)}", "", *_columns(table(plan.parameters, layout)), ""]
    else:
        below = [layout_text(layout, MOST_LINES)]
    lines = [
        f"plan of {plan.config}",
        describe_batch(shape.global_size, shape.micro_size, shape.data_ranks),
        *_held_lines(plan.held, plan.precision, layout.size("dp_shard")),
        *(() if plan.pipeline is None else _pipeline_lines(plan.pipeline, plan.held)),
        "",
        *below,
        *(f"note: {note}" for note in plan.notes),
        *(f"warning: {warning}" for warning in plan.layout.warnings()),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def plan_json(plan: Plan) -> dict[str, Any]:
    """The whole plan for a program: every rank and every group."""
    layout, batch = plan.layout, plan.batch
    return {
        "config": plan.config,
        "world_size": layout.world_size,
        "layout": layout.sizes,
        "hosts": layout.host_counts(),
        "ranks": [
            {
                "rank": rank,
                "host": layout.host(rank),
                "local_rank": layout.local_rank(rank),
                "coordinate": layout.coordinate(rank),
            }
            for rank in range(layout.world_size)
        ],
        "groups": [
            {
                "axes": list(axes),
                "groups": [
                    {"ranks": ranks, "crosses_hosts": layout.crosses_hosts(ranks)} for ranks in layout.groups(*axes)
                ],
            }
            for axes in _grouped_axes(layout)
        ],
        "batch": {
            **asdict(batch),
            "accumulation": batch.accumulation,
            "samples_per_rank": list(batch.shares),
            "idle": batch.idle,
            "line": describe_batch(batch.global_size, batch.micro_size, batch.data_ranks),
        },
        "precision": plan.precision,
        "parameters": {
            **asdict(plan.held),
            "each": [parameter_json(parameter, layout) for parameter in plan.parameters],
        },
        "pipeline": None if plan.pipeline is None else _pipeline_json(plan.pipeline, plan.held),
        "warnings": layout.warnings(),
        "notes": list(plan.notes),
    }


def _pipeline_json(pipeline: PipelinePlan, held: Held) -> dict[str, Any]:
    schedule, timeline = pipeline.schedule, pipeline.timeline
    return {
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "line": pipeline.about,
        "stages": [
            {"pp": schedule.rank_of(stage), "blocks": list(bounds), "cost": cost}
            for stage, (bounds, cost) in enumerate(zip(pipeline.split.bounds, pipeline.split.costs, strict=True))
        ],
        "idle_share": timeline.idle_share,
        "ranks": [
            {
                "pp": rank,
                "stages": list(schedule.stages_of(rank)),
                "fewest_parameters": held.by_pp[rank][0],
                "most_parameters": held.by_pp[rank][1],
                "idle_share": timeline.idle[rank] / timeline.makespan,
                "peak_activations": timeline.peak_activations[rank],
            }
            for rank in range(schedule.ranks)
        ],
    }


def _grouped_axes(layout: Layout) -> list[tuple[str, ...]]:
    """The axes with groups of more than one rank, and the data axes together where both have."""
    large = [axis for axis in layout.axes if layout.size(axis) > 1]
    both = [tuple(DATA_AXES)] if set(DATA_AXES) <= set(large) else []
    return [*((axis,) for axis in large), *both]


def _group_lines(layout: Layout, axes: tuple[str, ...], most_lines: int | None) -> list[str]:
    groups = layout.groups(*axes)
    crossing = sum(layout.crosses_hosts(ranks) for ranks in groups)
    some = f"{crossing} cross{'es' * (crossing == 1)} hosts"
    cross = {0: "none crosses hosts", len(groups): "each crosses hosts"}.get(crossing, some)
    title = f"data ({' x '.join(axes)})" if len(axes) > 1 else axes[0]
    count = f"{len(groups)} group{'s' * (len(groups) != 1)} of {len(groups[0])} ranks"
    rows = [
        [f"... {len(found)} more groups ..."]
        if isinstance(found, range)
        else [short(groups[found]) if most_lines else str(groups[found]), _hosts_of(layout, groups[found])]
        for found in _without_middle(range(len(groups)), most_lines and most_lines // 2)
    ]
    return [f"{title}: {count}, {cross}", *("  " + line for line in _columns(rows))]


def _hosts_of(layout: Layout, ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(layout.host(rank) for rank in ranks))
    if len(hosts) == 1:
        return hosts[0]
    return f"crosses hosts: {', '.join(hosts)}" if len(hosts) <= 3 else f"crosses {len(hosts)} hosts"


def _held_lines(held: Held, precision: str, dp_shard: int) -> list[str]:
    bytes_ = held.weight_bytes, held.gradient_bytes, held.optimizer_bytes
    weights, gradients, optimizer, together = map(_size, (*bytes_, sum(bytes_)))
    kept = "float64" if precision == "float64" else "float32"
    copy = (
        ""
        if precision == kept or dp_shard > 1
        else f" and a copy of the weights in {precision}, {_size(held.weight_bytes // 2)},"
    )
    return [
        f"{held.total:,} parameters, {_from_to(held.fewest, held.most)} per rank",
        f"a rank keeps {together} in {kept}: weights {weights}, gradients {gradients}, AdamW {optimizer}; "
        f"activations{copy} come on top",
    ]


def _pipeline_lines(pipeline: PipelinePlan, held: Held) -> list[str]:
    """The schedule, and what it means for the ranks of each index on `pp`."""
    schedule, timeline = pipeline.schedule, pipeline.timeline
    rows: list[list[str]] = [["pp", "stages", "blocks", "parameters of a rank", "idle", "stage forwards held"]]
    for found in _without_middle(range(schedule.ranks), MOST_LINES):
        if isinstance(found, range):
            rows.append([f"... {len(found)} more ..."])
            continue
        stages = schedule.stages_of(found)
        blocks = [pipeline.split.bounds[stage] for stage in stages]
        rows.append(
            [
                str(found),
                ", ".join(map(str, stages)),
                ", ".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in blocks),
                _from_to(*held.by_pp[found]),
                f"{100 * timeline.idle[found] / timeline.makespan:.1f} %",
                str(timeline.peak_activations[found]),
            ]
        )
    return [
        "",
        f"{pipeline.about}; {100 * timeline.idle_share:.1f} % idle",
        *_columns(rows),
        "(simulated: a stage's input gradients and its weight gradients take as long as its forward each, transfers "
        "nothing)",
    ]


def _from_to(fewest: int, most: int) -> str:
    return f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"


def _size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"


def _without_middle(items: range, most: int | None) -> list[int | range]:
    """The items of a range; of a long one the first and last, with the range of the others between them."""
    if most is None or len(items) <= most:
        return list(items)
    head, tail = items[: most // 2], items[-(most // 2) :]
    return [*head, items[len(head) : -len(tail)], *tail]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines; a row with a single cell is a remark and sets no width."""
    width: dict[int, int] = {}
    for row in rows:
        for i, cell in enumerate(row if len(row) > 1 else ()):
            width[i] = max(width.get(i, 0), len(cell))
    return ["  ".join(cell.ljust(width.get(i, 0)) for i, cell in enumerate(row)).rstrip() for row in rows]


# The command --------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, or the name of one of meshtrain's own")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="as for training: layout.tp=2")
    parser.add_argument(
        "--hosts",
        metavar="COUNTS",
        help="processes on each host: 4,2 (two hosts), 4x8 (four hosts of 8), 4x8,2",
    )
    parser.add_argument("--parameters", action="store_true", help="tell what each parameter becomes")
    parser.add_argument("--json", action="store_true", help="print all of it as one JSON object")


def run(arguments: argparse.Namespace) -> None:
    hosts = None if arguments.hosts is None else read_hosts(arguments.hosts)
    plan = make_plan(arguments.config, arguments.overrides, hosts)
    text = json.dumps(plan_json(plan)) + "\n" if arguments.json else plan_text(plan, arguments.parameters)
    print(text, end="")


def read_hosts(text: str) -> tuple[int, ...]:
    """`4,2` is two hosts with 4 and 2 processes; `4x8` is four hosts with 8 each; both can be mixed.

    Raises:
        InputError: anything else.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(?:([1-9]\d*)\s*x\s*)?([1-9]\d*)", part.strip())
        if found is None:
            raise InputError(
                f"--hosts {text}: {part.strip()!r} is no number of processes; give one per host, such as 4,2, "
                "or 4x8 for four hosts of 8"
            )
        counts += [int(found[2])] * int(found[1] or 1)
    return tuple(counts)
