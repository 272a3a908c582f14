"""Shows what a config does on given hosts, without a job: `meshtrain plan configs/quickstart.yaml
--hosts 4,2`.

Where each rank lies, which groups cross hosts, how the batch is split, and what a rank holds in
memory.
"""

import argparse
import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtrain.cli.memory import parameter_json, table
from meshtrain.config import Config, spec_of
from meshtrain.config.layout_advice import host_warnings
from meshtrain.config.schema import DataSection
from meshtrain.data.order import BatchSplit, describe_batch, describe_ramp
from meshtrain.errors import InputError, bytes_text, plural, writing
from meshtrain.foresight.parameters import (
    MemoryUse,
    compute_size,
    held_by_ranks,
    parameter_specs,
)
from meshtrain.layout import DATA_AXES, Layout, LayoutError
from meshtrain.metrics.picture import write_picture
from meshtrain.optim.lr_schedule import warmup_note
from meshtrain.optim.registry import update_rule
from meshtrain.parallel.sharding import ParameterSpec
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.partition import StageSplit
from meshtrain.pipeline.simulate import Timeline, simulate
from meshtrain.run.rank_table import (
    columns,
    describe_hosts,
    expert_axes,
    grouped_axes,
    layout_text,
    without_middle,
)

if TYPE_CHECKING:
    from meshtrain.foresight.hardware import Hardware
    from meshtrain.foresight.prediction import Prediction
    from meshtrain.modeling.context import ContextCosts
    from meshtrain.modeling.experts import ExpertCosts

WITH_PROMPTS = ("jsonl", "parquet")  # sources whose tokens need not all have a loss
# of the rank table in a terminal, and half as many per axis; `--json` and layout.txt have all
MOST_LINES = 16


@dataclass(frozen=True)
class PipelinePlan:
    """The pipeline over `pp`. `timeline` is simulated; `about` is a line for people."""

    about: str
    schedule: Schedule
    split: StageSplit
    holding: dict[str, tuple[int, ...]]  # parameter -> the stages that hold it
    timeline: Timeline


@dataclass(frozen=True)
class Plan:
    """A config with its layout placed on hosts; `notes` say what was assumed."""

    name: str
    config: Config
    layout: Layout
    batch: BatchSplit  # of the largest global batch, if a ramp changes it
    parameters: tuple[ParameterSpec, ...]
    memory: MemoryUse
    optimizer: str  # title of its update rule
    pipeline: PipelinePlan | None = None
    context: "ContextCosts | None" = None
    experts: "ExpertCosts | None" = None
    notes: tuple[str, ...] = ()


def make_plan(name: str, overrides: Sequence[str] = (), hosts: Sequence[int] | None = None) -> Plan:
    """The plan of a config on hosts with these numbers of processes; without hosts, on one that is
    as small as the layout allows.

    Raises InputError, LayoutError: the config is wrong, or its layout does not fit the hosts.
    """
    # these import torch, as the model does
    from meshtrain.modeling.context import context_costs
    from meshtrain.modeling.experts import expert_costs

    config, notes = _placed(name, list(overrides), hosts)
    layout = config.resolved
    assert layout is not None
    spec = spec_of(config)
    pipeline = _pipeline(config, layout) if layout.size("pp") > 1 else None
    parameters = parameter_specs(spec, layout, None if pipeline is None else pipeline.holding)
    memory = held_by_ranks(
        parameters,
        layout,
        config.train.precision,
        config.optimizer,
        placement=(0,) if pipeline is None else pipeline.schedule.placement,
        shard_optimizer=config.parallel.shard_optimizer,
    )
    if config.train.reference is not None:
        memory = replace(memory, reference_bytes=_reference_bytes(config, layout, pipeline))
    rule = update_rule(config.optimizer.name, config.optimizer.state_precision)
    return Plan(
        name=name,
        config=config,
        layout=layout,
        batch=BatchSplit(
            config.batch.sizes.largest, config.batch.micro_size, layout.size(*DATA_AXES)
        ),
        parameters=tuple(parameters),
        memory=memory,
        optimizer=rule.title,
        pipeline=pipeline,
        context=context_costs(config, layout),
        experts=expert_costs(config, layout),
        notes=(*notes, *_notes(config)),
    )


def _reference_bytes(config: Config, layout: Layout, pipeline: PipelinePlan | None) -> int:
    """What the rank that holds the most of the reference's weights holds of them."""
    from meshtrain.modeling.reference import reference_config

    own = reference_config(config)
    assert own is not None
    holding = None if pipeline is None else pipeline.holding
    memory = held_by_ranks(
        parameter_specs(spec_of(own), layout, holding),
        layout,
        own.train.precision,
        own.optimizer,
        placement=(0,) if pipeline is None else pipeline.schedule.placement,
    )
    return memory.weight_bytes


def _placed(
    name: str, overrides: list[str], hosts: Sequence[int] | None
) -> tuple[Config, list[str]]:
    """A config whose layout is placed on hosts, and notes on which hosts are assumed."""
    notes = []
    config = Config.load(name, overrides, world_size=sum(hosts) if hosts else None)
    if not hosts:
        smallest = Layout({axis: max(size, 1) for axis, size in config.layout.items()})
        hosts = (smallest.world_size,)
        # Loaded again, to check what depends on the world.
        config = Config.load(name, overrides, world_size=smallest.world_size)
        is_free = -1 in config.layout.values()
        why = "the smallest world that this layout fits" if is_free else "all on one host"
        notes.append(f"no --hosts given: {why}, {describe_hosts(smallest.on_hosts(hosts))}")
    assert config.resolved is not None  # it was loaded for this number of processes
    return replace(config, resolved=config.resolved.on_hosts(hosts)), notes


def _notes(config: Config) -> list[str]:
    """What a user should know of a run with this config."""
    from meshtrain.foresight.model import without_sequence_parts  # brings torch, as the model does

    notes = []
    if config.train.steps is not None:
        warning = warmup_note(config.optimizer, config.train.steps)
        if warning is not None:
            notes.append(warning)
    notes += _loss_shares(config.data)
    is_users_model = config.model.name.endswith(".py")
    if is_users_model and without_sequence_parts(config) is not None:
        notes.append(
            "parallel.sequence_parallel is on by default: a run turns it off, and takes more "
            "memory, if the check of the model before its first step passes only without it"
        )
    return notes


def _loss_shares(data: DataSection) -> list[str]:
    """Which share of the tokens has a loss, of data that may have prompts and lie prepared on this
    host."""
    from meshtrain.data.prepare import loss_share, preparations  # it imports numpy

    lines = []
    for own in data.each_source() if data.sources else [data]:
        with suppress(InputError, OSError):  # a plan needs no data
            folders: list[Path] = []
            if own.source == "tokens" and own.path is not None:
                folders = [Path(own.path).expanduser()]
            elif own.source in WITH_PROMPTS:
                folders = [preparation.folder for preparation in preparations(own)]
            for folder in folders:
                share = loss_share(folder) if folder.is_dir() else None
                if share is not None:
                    lines.append(f"{folder}: {share}")
    return lines


def _pipeline(config: Config, layout: Layout) -> PipelinePlan:
    # these import torch
    from meshtrain.modeling.build import (
        check_stages,
        describe_pipeline,
        outline_of_model,
        stages_of,
    )
    from meshtrain.pipeline.stage import stages_of_parameter

    schedule, split = stages_of(config, layout)
    check_stages(config, split)
    # of a forward; input gradients and weight gradients have as many products each
    costs = split.costs
    timeline = simulate(schedule, forward=costs, input_grad=costs, weight_grad=costs)
    holding = stages_of_parameter(spec_of(config).meta, split.bounds, outline_of_model(config))
    return PipelinePlan(describe_pipeline(schedule, split), schedule, split, holding, timeline)


def plan_text(plan: Plan, each_parameter: bool = False) -> str:
    """The plan for people, short for any number of ranks. `each_parameter`: a table of parameters
    instead of ranks."""
    layout, batch, context, experts = plan.layout, plan.batch, plan.context, plan.experts
    lines = [f"plan of {plan.name}"]
    lines += describe_ramp(plan.config.batch.sizes, batch.micro_size, batch.data_ranks)
    if context is not None:
        lines.append(context.describe())
    lines += _memory_lines(plan)
    if experts is not None:
        lines.append(experts.line)
    if experts is not None and layout.experts > 1:
        lines.append(experts.describe_sent())
    if context is not None and context.sent:
        lines.append(context.describe_memory())
    if plan.pipeline is not None:
        lines += _pipeline_lines(plan.pipeline, plan.memory)
    lines.append("")
    if each_parameter:
        rows = columns(table(plan.parameters, layout))
        lines += [f"layout {layout} on {describe_hosts(layout)}", "", *rows, ""]
    else:
        lines.append(layout_text(layout, MOST_LINES))
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"warning: {warning}" for warning in host_warnings(layout)]
    return "\n".join(lines).rstrip("\n") + "\n"


def plan_json(plan: Plan) -> dict[str, Any]:
    """The whole plan for a program: every rank and every group."""
    layout, batch = plan.layout, plan.batch
    context = experts = pipeline = None
    if plan.context is not None:
        context = {**asdict(plan.context), "line": plan.context.describe()}
    if plan.experts is not None:
        experts = asdict(plan.experts)
    if plan.pipeline is not None:
        pipeline = _pipeline_json(plan.pipeline, plan.memory)
    return {
        "config": plan.name,
        "world_size": layout.world_size,
        "layout": layout.sizes,
        "expert_parallel": layout.experts,
        "hosts": layout.host_counts(),
        "ranks": [_rank_json(layout, rank) for rank in range(layout.world_size)],
        "groups": [_groups_json(layout, axes) for axes in grouped_axes(layout)],
        "batch": {
            **asdict(batch),
            "changes": [list(change) for change in plan.config.batch.sizes.changes],
            "accumulation": batch.accumulation,
            "samples_per_rank": list(batch.shares),
            "idle": batch.idle,
            "line": describe_batch(batch.global_size, batch.micro_size, batch.data_ranks),
        },
        "precision": plan.config.train.precision,
        "parameters": {
            **asdict(plan.memory),
            "each": [parameter_json(parameter) for parameter in plan.parameters],
        },
        "pipeline": pipeline,
        "context": context,
        "experts": experts,
        "warnings": host_warnings(layout),
        "notes": list(plan.notes),
    }


def _rank_json(layout: Layout, rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": layout.host(rank),
        "local_rank": layout.local_rank(rank),
        "coordinate": layout.coordinate(rank, *layout.axes, *expert_axes(layout)),
    }


def _groups_json(layout: Layout, axes: Sequence[str]) -> dict[str, Any]:
    groups = [
        {"ranks": ranks, "crosses_hosts": layout.crosses_hosts(ranks)}
        for ranks in layout.groups(*axes)
    ]
    return {"axes": list(axes), "groups": groups}


def _pipeline_json(pipeline: PipelinePlan, memory: MemoryUse) -> dict[str, Any]:
    schedule, timeline, split = pipeline.schedule, pipeline.timeline, pipeline.split
    stages = [
        {"pp": schedule.rank_of(stage), "blocks": list(bounds), "cost": cost}
        for stage, (bounds, cost) in enumerate(zip(split.bounds, split.costs, strict=True))
    ]
    ranks = []
    for rank in range(schedule.ranks):
        fewest, most = memory.by_pp[rank]
        ranks.append(
            {
                "pp": rank,
                "stages": list(schedule.stages_of(rank)),
                "fewest_parameters": fewest,
                "most_parameters": most,
                "idle_share": timeline.idle[rank] / timeline.makespan,
                "peak_activations": timeline.peak_activations[rank],
            }
        )
    return {
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "line": pipeline.about,
        "stages": stages,
        "idle_share": timeline.idle_share,
        "ranks": ranks,
    }


def _memory_lines(plan: Plan) -> list[str]:
    memory, precision = plan.memory, plan.config.train.precision
    dtype = "float64" if precision == "float64" else "float32"
    active = "" if plan.experts is None else f"{plan.experts.active:,} active a token, "
    weights = memory.weight_bytes + memory.reference_bytes
    together = weights + memory.gradient_bytes
    states = f"{plan.optimizer} {bytes_text(memory.optimizer_bytes)}"
    if plan.config.parallel.offloads_optimizer:
        states += " in the host's memory"
    else:
        together += memory.optimizer_bytes
    reference = ""
    if memory.reference_bytes:
        reference = f"weights of the reference {bytes_text(memory.reference_bytes)}, "
    on_top = "activations"
    # Without FSDP, which gathers the weights in 16 bits, a rank has a copy of its own.
    if precision != dtype and plan.layout.size("fsdp") == 1:
        copy = bytes_text(weights // 2)
        on_top += f" and a copy of the weights in {precision}, {copy},"
    return [
        f"{memory.total:,} parameters, {active}{_from_to(memory.fewest, memory.most)} per rank",
        f"a rank keeps {bytes_text(together)} in {dtype}: "
        f"weights {bytes_text(memory.weight_bytes)}, {reference}"
        f"gradients {bytes_text(memory.gradient_bytes)}, "
        f"{states}; {on_top} come on top",
    ]


def _pipeline_lines(pipeline: PipelinePlan, memory: MemoryUse) -> list[str]:
    titles = ["pp", "stages", "blocks", "parameters of a rank", "idle", "stage forwards held"]
    rows = [titles]
    for rank in without_middle(range(pipeline.schedule.ranks), MOST_LINES):
        if isinstance(rank, range):
            rows.append([f"... {len(rank)} more ..."])
        else:
            rows.append(_pipeline_row(pipeline, memory, rank))
    assumed = (
        "a stage's input gradients and its weight gradients take as long as its forward each, "
        "transfers nothing"
    )
    return [
        "",
        f"{pipeline.about}; {100 * pipeline.timeline.idle_share:.1f} % idle",
        *columns(rows),
        f"(simulated: {assumed})",
    ]


def _pipeline_row(pipeline: PipelinePlan, memory: MemoryUse, rank: int) -> list[str]:
    timeline = pipeline.timeline
    stages = pipeline.schedule.stages_of(rank)
    blocks = []
    for stage in stages:
        first, end = pipeline.split.bounds[stage]
        blocks.append(str(first) if end == first + 1 else f"{first}-{end - 1}")
    return [
        str(rank),
        ", ".join(map(str, stages)),
        ", ".join(blocks),
        _from_to(*memory.by_pp[rank]),
        f"{100 * timeline.idle[rank] / timeline.makespan:.1f} %",
        str(timeline.peak_activations[rank]),
    ]


def _from_to(fewest: int, most: int) -> str:
    return f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, or the name of a built-in config")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="override a key: layout.tp=2"
    )
    parser.add_argument(
        "--hosts",
        metavar="COUNTS",
        help="processes on each host: 4,2 (two hosts), 4x8 (four hosts of 8), 4x8,2",
    )
    parser.add_argument(
        "--parameters", action="store_true", help="show how each parameter is sharded"
    )
    about = "draw the learning rate, batch size and data mixture over the steps instead"
    parser.add_argument("--schedule", action="store_true", help=about)
    parser.add_argument(
        "--gpu", metavar="NAME", help="predict fit and step time on h100, ..., or a hardware file"
    )
    parser.add_argument(
        "--fabric",
        metavar="NAME",
        help="in another network: efa, infiniband, ethernet, a file, or doctor's --json",
    )
    parser.add_argument(
        "--png", metavar="FILE", help="draw memory and step time into a file (.png, .svg or .pdf)"
    )
    parser.add_argument(
        "--against", metavar="RUN", help="compare the measurements of a run with its prediction"
    )
    parser.add_argument(
        "--calibrate", metavar="RUN", nargs="+", help="fit a hardware file to runs, and print it"
    )
    parser.add_argument(
        "--write", metavar="FILE", help="write the hardware file of --calibrate here, too"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(arguments: argparse.Namespace) -> None:
    if arguments.calibrate or arguments.against:
        _measured(arguments)
    elif arguments.schedule:
        _schedule(arguments)
    else:
        _plan(arguments)


def _plan(arguments: argparse.Namespace) -> None:
    hosts = None if arguments.hosts is None else read_hosts(arguments.hosts)
    networks = read_hardware(arguments.gpu, arguments.fabric)
    try:
        plan = make_plan(arguments.config, arguments.overrides, hosts)
    except InputError:
        if arguments.parameters and not arguments.json:
            _print_unsplit(arguments)
        raise
    prediction: Prediction | None = None
    lines: list[str] = []
    if not arguments.parameters:
        if networks and hosts is None:
            _check_fits(plan, networks[0])
        prediction, lines = _predicted(plan, networks)
    if arguments.png is not None and prediction is not None:
        _draw(plan, prediction, arguments.png)
        lines.append(f"picture: {arguments.png}")
    if arguments.json:
        foresight = {"unknown": lines} if prediction is None else prediction.json()
        print(json.dumps(plan_json(plan) | {"foresight": foresight}))
        return
    print(plan_text(plan, arguments.parameters), end="")
    if lines:
        print("", *lines, sep="\n")


def _print_unsplit(arguments: argparse.Namespace) -> None:
    """Prints the parameters of a model that the layout does not split, if nothing else is wrong:
    whoever mends the tp_plan needs their names."""
    with suppress(InputError, LayoutError):
        whole = make_plan(arguments.config, [*arguments.overrides, "layout={dp_shard: 1}"], (1,))
        rows = columns(table(whole.parameters, whole.layout))
        print("parameters of the whole model", "", *rows, "", sep="\n", flush=True)


def read_hardware(gpu: str | None, fabric: str | None) -> "list[Hardware]":
    """The hardware that --gpu and --fabric name, and the same with its own links, if these are not
    taken; empty without --gpu. Raises InputError: no such file."""
    from meshtrain.foresight.calibrate import with_links
    from meshtrain.foresight.hardware import load, with_fabric

    if gpu is None:
        if fabric is not None:
            raise InputError("--fabric needs --gpu: the GPUs that the network connects")
        return []
    hardware = load(gpu)
    if fabric is None:
        return [hardware]
    if not fabric.endswith(".json"):
        return [with_fabric(hardware, fabric), hardware]
    measured = with_links(hardware, Path(fabric))
    return [replace(measured, source=f"{hardware.source}, links of {fabric}"), hardware]


def _check_fits(plan: Plan, hardware: "Hardware") -> None:
    """Raises InputError: no hosts were given, and what a rank keeps does not fit on the fewest."""
    memory, room = plan.memory, hardware.device.room
    kept = memory.weight_bytes + memory.reference_bytes + memory.gradient_bytes
    if not plan.config.parallel.offloads_optimizer:
        kept += memory.optimizer_bytes
    if kept <= room:
        return
    whole = kept * plan.layout.world_size
    # Half of the memory for activations, and hosts of 8.
    hosts = 2 ** math.ceil(math.log2(max(1.0, whole / (room / 2) / 8)))
    raise InputError(
        f"no --hosts given, so this would be a plan for {plural(plan.layout.world_size, 'process')}"
        f", of which one keeps {bytes_text(kept)} of the {bytes_text(room)} that "
        f"{hardware.device.name} has for tensors: give --hosts, such as --hosts {hosts}x8"
    )


def _predicted(plan: Plan, networks: "list[Hardware]") -> "tuple[Prediction | None, list[str]]":
    """The prediction and lines for people; None and the reason for a model that cannot be traced.
    `networks`: of `read_hardware`."""
    from meshtrain.foresight.draw import memory_of_ranks, step_lines
    from meshtrain.foresight.model import without_sequence_parts
    from meshtrain.foresight.prediction import Prediction
    from meshtrain.modeling.kinds import UntracedError

    hardware = networks[0] if networks else None

    def predicted(config: Config) -> "tuple[Prediction, list[str]]":
        prediction = Prediction(config, hardware, exact=True)
        return prediction, memory_of_ranks(prediction)

    try:
        prediction, lines = predicted(plan.config)
    except UntracedError as error:
        unknown = [f"memory and time are not known: {error}"]
        # The model may run without sequence parallelism, which a run then turns off.
        without_parts = without_sequence_parts(plan.config)
        if without_parts is None:
            return None, unknown
        try:
            prediction, lines = predicted(without_parts)
        except UntracedError:
            return None, unknown
        lines.append(
            "  for parallel.sequence_parallel: false, as the run will turn it off: with it on, "
            f"{error}"
        )
    if hardware is not None:
        unit = "tokens" if prediction.is_text else "samples"
        lines += ["", *step_lines(prediction.step, unit, hardware.band)]
        lines += [f"  {line}" for line in network_lines(prediction, networks[1:])]
        in_16_bits = compute_size(plan.config.train.precision) == 2
        if plan.config.data.mask_documents and in_16_bits:
            lines.append("  of documents that fill a sample each: shorter ones take less attention")
    return prediction, lines


def network_lines(prediction: "Prediction", others: "Sequence[Hardware]") -> list[str]:
    """What the seconds rest on, and what they are in other networks."""
    from meshtrain.foresight.network import in_network_of, in_usual_order, link_of

    lines = []
    link = link_of(prediction)
    if link is not None:
        lines.append(f"rests on: {link}")
    lines += [in_network_of(prediction, other) for other in others]
    lines.append(in_usual_order(prediction))
    return [line for line in lines if line]


def _draw(plan: Plan, prediction: "Prediction", path: str) -> None:
    from meshtrain.foresight.draw import picture

    title = f"{plan.name}: {plan.layout} on {describe_hosts(plan.layout)}"
    room = step = None
    if prediction.hardware is not None:
        room = prediction.hardware.device.room
        step = prediction.step
    parts = prediction.memory.parts
    write_picture(path, lambda: picture(title, parts, room, step), "plan.png")


def _schedule(arguments: argparse.Namespace) -> None:
    """Draws what changes over the steps of a run."""
    from meshtrain.cli.schedule import courses_of, picture, schedule_json, schedule_text

    config = Config.load(arguments.config, arguments.overrides)
    courses = courses_of(config)
    if arguments.png is not None:
        write_picture(arguments.png, lambda: picture(config, courses), "schedule.png")
    if arguments.json:
        print(json.dumps(schedule_json(config, courses)))
    else:
        print(schedule_text(config, courses))


def _measured(arguments: argparse.Namespace) -> None:
    """Prints a run's measurements beside its prediction, or the hardware file that fits runs."""
    from meshtrain.foresight import calibrate, hardware
    from meshtrain.foresight.prediction import Prediction

    if arguments.gpu is None:
        raise InputError(
            "--against and --calibrate need --gpu: the hardware from which they start, such as "
            "--gpu h100"
        )
    start = hardware.load(arguments.gpu)
    if arguments.calibrate:
        text = calibrate.as_yaml(calibrate.calibrate(arguments.calibrate, start))
        if arguments.write is not None:
            with writing(arguments.write):
                Path(arguments.write).write_text(text)
        print(text, end="")
        return
    run = calibrate.MeasuredRun.load(Path(arguments.against))
    prediction = Prediction(run.config, start, exact=True)
    gib = prediction.memory.total / 2**30
    print(f"{arguments.against} beside what is foreseen of it")
    for line in calibrate.against(run, start, gib, prediction.sent):
        print(line.describe())


def read_hosts(text: str) -> tuple[int, ...]:
    """`4,2`: two hosts with 4 and 2 processes; `4x8,2`: four with 8 and one with 2. Raises
    InputError: neither."""
    counts: list[int] = []
    for part in text.split(","):
        count = re.fullmatch(r"(?:([1-9]\d*)\s*x\s*)?([1-9]\d*)", part.strip())
        if count is None:
            raise InputError(
                f"--hosts {text}: {part.strip()!r} is no number of processes; give one per host, "
                "such as 4,2, or 4x8 for four hosts of 8"
            )
        counts += [int(count[2])] * int(count[1] or 1)
    return tuple(counts)
