"""Shows what a config does on given hosts, without a job: `meshtrain plan configs/quickstart.yaml
--hosts 4,2`.

Where each rank lies, which groups cross hosts, how the batch is split, and what a rank holds in
memory.
"""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtrain.cli.memory import parameter_json, table
from meshtrain.config import Config, Data
from meshtrain.config.layout_advice import host_warnings
from meshtrain.config.model_spec import spec_of
from meshtrain.data.order import BatchSplit, describe_batch, describe_ramp
from meshtrain.errors import InputError, bytes_text, writing
from meshtrain.foresight.parameters import MemoryUse, held_by_ranks, parameter_specs
from meshtrain.job.signals import end_with_parent
from meshtrain.layout import DATA_AXES, Layout
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
    config = Config.load(name, list(overrides), world_size=sum(hosts) if hosts else None)
    notes = []
    if not hosts:
        fixed = Layout({axis: max(size, 1) for axis, size in config.layout.items()})
        hosts = (fixed.world_size,)
        smallest = (
            "the smallest world that this layout fits"
            if -1 in config.layout.values()
            else "all on one host"
        )
        notes.append(f"no --hosts given: {smallest}, {describe_hosts(fixed.on_hosts(hosts))}")
        # checks what depends on the world
        config = Config.load(name, list(overrides), world_size=fixed.world_size)
    assert config.resolved is not None  # it was loaded for this number of processes
    layout = config.resolved.on_hosts(hosts)
    batch = BatchSplit(config.batch.sizes.largest, config.batch.micro_size, layout.size(*DATA_AXES))
    pipeline = _pipeline(config, layout) if layout.size("pp") > 1 else None
    stages = None if pipeline is None else pipeline.holding
    spec = spec_of(config)
    parameters = tuple(parameter_specs(spec, layout, stages))
    placement = (0,) if pipeline is None else pipeline.schedule.placement
    shards, precision = config.parallel.shard_optimizer, config.train.precision
    memory = held_by_ranks(parameters, layout, precision, config.optimizer, placement, shards)
    # these import torch, as the model has
    from meshtrain.foresight.model import (
        without_sequence_parts,
    )
    from meshtrain.modeling.context import context_costs
    from meshtrain.modeling.experts import expert_costs

    title = update_rule(config.optimizer.name, config.optimizer.state_precision).title
    optimizer, costs = title, (context_costs(config, layout), expert_costs(config, layout))
    if (
        config.train.steps is not None
        and (warning := warmup_note(config.optimizer, config.train.steps)) is not None
    ):
        notes.append(warning)
    notes += _loss_shares(config.data)
    config = replace(config, resolved=layout)
    if config.model.name.endswith(".py") and without_sequence_parts(config) is not None:
        notes.append(
            "parallel.sequence_parallel is on by default: a run turns it off, and takes more "
            "memory, if the check of "
            "the model before its first step passes only without it"
        )
    return Plan(
        name, config, layout, batch, parameters, memory, optimizer, pipeline, *costs, tuple(notes)
    )


def _loss_shares(data: Data) -> list[str]:
    """Which share of the tokens has a loss, of data that may have prompts and lie prepared on this
    host."""
    from meshtrain.data.prepare import loss_share, preparations  # it imports numpy

    lines = []
    for own in data.each_source() if data.sources else [data]:
        with suppress(InputError, OSError):  # a plan needs no data
            if own.source == "tokens" and own.path is not None:
                folders = [Path(own.path).expanduser()]
            elif own.source in WITH_PROMPTS:
                folders = [preparation.folder for preparation in preparations(own)]
            else:
                folders = []
            shares = [(folder, loss_share(folder)) for folder in folders if folder.is_dir()]
            lines += [f"{folder}: {share}" for folder, share in shares if share is not None]
    return lines


def _pipeline(config: Config, layout: Layout) -> PipelinePlan:
    # these import torch
    from meshtrain.modeling.build import (
        check_stages,
        describe_pipeline,
        stages_of,
    )
    from meshtrain.pipeline.stage import stages_of_parameter

    schedule, split = stages_of(config, layout)
    check_stages(config, split)
    # of a forward; input gradients and weight gradients have as many products each
    costs = split.costs
    timeline = simulate(schedule, forward=costs, input_grad=costs, weight_grad=costs)
    holding = stages_of_parameter(spec_of(config).meta, split.bounds)
    return PipelinePlan(describe_pipeline(schedule, split), schedule, split, holding, timeline)


def plan_text(plan: Plan, each_parameter: bool = False) -> str:
    """The plan for people, short for any number of ranks. `each_parameter`: a table of parameters
    instead of ranks."""
    shape, layout = plan.batch, plan.layout
    if each_parameter:
        below = [
            f"layout {layout} on {describe_hosts(layout)}",
            "",
            *columns(table(plan.parameters, layout)),
            "",
        ]
    else:
        below = [layout_text(layout, MOST_LINES)]
    lines = [
        f"plan of {plan.name}",
        *describe_ramp(plan.config.batch.sizes, shape.micro_size, shape.data_ranks),
        *(() if plan.context is None else (plan.context.describe(),)),
        *_memory_lines(plan),
        *(() if plan.experts is None else (plan.experts.line,)),
        *(
            (plan.experts.describe_sent(),)
            if plan.experts is not None and plan.layout.experts > 1
            else ()
        ),
        *(
            (plan.context.describe_memory(),)
            if plan.context is not None and plan.context.sent
            else ()
        ),
        *(() if plan.pipeline is None else _pipeline_lines(plan.pipeline, plan.memory)),
        "",
        *below,
        *(f"note: {note}" for note in plan.notes),
        *(f"warning: {warning}" for warning in host_warnings(plan.layout)),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def plan_json(plan: Plan) -> dict[str, Any]:
    """The whole plan for a program: every rank and every group."""
    layout, batch = plan.layout, plan.batch
    return {
        "config": plan.name,
        "world_size": layout.world_size,
        "layout": layout.sizes,
        "expert_parallel": layout.experts,
        "hosts": layout.host_counts(),
        "ranks": [
            {
                "rank": r,
                "host": layout.host(r),
                "local_rank": layout.local_rank(r),
                "coordinate": layout.coordinate(r, *layout.axes, *expert_axes(layout)),
            }
            for r in range(layout.world_size)
        ],
        "groups": [
            {
                "axes": list(axes),
                "groups": [
                    {"ranks": ranks, "crosses_hosts": layout.crosses_hosts(ranks)}
                    for ranks in layout.groups(*axes)
                ],
            }
            for axes in grouped_axes(layout)
        ],
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
        "pipeline": None if plan.pipeline is None else _pipeline_json(plan.pipeline, plan.memory),
        "context": None
        if plan.context is None
        else {**asdict(plan.context), "line": plan.context.describe()},
        "experts": None if plan.experts is None else asdict(plan.experts),
        "warnings": host_warnings(layout),
        "notes": list(plan.notes),
    }


def _pipeline_json(pipeline: PipelinePlan, memory: MemoryUse) -> dict[str, Any]:
    schedule, timeline = pipeline.schedule, pipeline.timeline
    return {
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "line": pipeline.about,
        "stages": [
            {"pp": schedule.rank_of(stage), "blocks": list(bounds), "cost": cost}
            for stage, (bounds, cost) in enumerate(
                zip(pipeline.split.bounds, pipeline.split.costs, strict=True)
            )
        ],
        "idle_share": timeline.idle_share,
        "ranks": [
            {
                "pp": rank,
                "stages": list(schedule.stages_of(rank)),
                "fewest_parameters": memory.by_pp[rank][0],
                "most_parameters": memory.by_pp[rank][1],
                "idle_share": timeline.idle[rank] / timeline.makespan,
                "peak_activations": timeline.peak_activations[rank],
            }
            for rank in range(schedule.ranks)
        ],
    }


def _memory_lines(plan: Plan) -> list[str]:
    memory, precision = plan.memory, plan.config.train.precision
    nbytes = memory.weight_bytes, memory.gradient_bytes, memory.optimizer_bytes
    weights, gradients, optimizer, together = map(bytes_text, (*nbytes, sum(nbytes)))
    dtype = "float64" if precision == "float64" else "float32"
    active = "" if plan.experts is None else f"{plan.experts.active:,} active a token, "
    copy = ""
    if precision != dtype and plan.layout.size("fsdp") == 1:
        copy = f" and a copy of the weights in {precision}, {bytes_text(memory.weight_bytes // 2)},"
    return [
        f"{memory.total:,} parameters, {active}{_from_to(memory.fewest, memory.most)} per rank",
        f"a rank keeps {together} in {dtype}: weights {weights}, gradients {gradients}, "
        f"{plan.optimizer} {optimizer}; "
        f"activations{copy} come on top",
    ]


def _pipeline_lines(pipeline: PipelinePlan, memory: MemoryUse) -> list[str]:
    schedule, timeline = pipeline.schedule, pipeline.timeline
    rows: list[list[str]] = [
        ["pp", "stages", "blocks", "parameters of a rank", "idle", "stage forwards held"]
    ]
    for rank in without_middle(range(schedule.ranks), MOST_LINES):
        if isinstance(rank, range):
            rows.append([f"... {len(rank)} more ..."])
            continue
        stages = schedule.stages_of(rank)
        bounds = [pipeline.split.bounds[stage] for stage in stages]
        blocks = ", ".join(
            str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in bounds
        )
        idle = f"{100 * timeline.idle[rank] / timeline.makespan:.1f} %"
        forwards = timeline.peak_activations[rank]
        row = (
            rank,
            ", ".join(map(str, stages)),
            blocks,
            _from_to(*memory.by_pp[rank]),
            idle,
            forwards,
        )
        rows.append([*map(str, row)])
    assumed = (
        "a stage's input gradients and its weight gradients take as long as its forward each, "
        "transfers nothing"
    )
    return [
        "",
        f"{pipeline.about}; {100 * timeline.idle_share:.1f} % idle",
        *columns(rows),
        f"(simulated: {assumed})",
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
        return
    if arguments.schedule:
        _schedule(arguments)
        return
    hosts = None if arguments.hosts is None else read_hosts(arguments.hosts)
    plan = make_plan(arguments.config, arguments.overrides, hosts)
    prediction, lines = (None, []) if arguments.parameters else _foreseen(plan, arguments.gpu)
    if arguments.png is not None and prediction is not None:
        from meshtrain.foresight.draw import picture

        title = f"{plan.name}: {plan.layout} on {describe_hosts(plan.layout)}"
        step, room = (
            (prediction.step, prediction.hardware.device.room)
            if prediction.hardware
            else (None, None)
        )
        parts = prediction.memory.parts
        write_picture(arguments.png, lambda: picture(title, parts, room, step), "plan.png")
        lines.append(f"picture: {arguments.png}")
    if arguments.json:
        print(
            json.dumps(
                plan_json(plan)
                | {"foresight": prediction.json() if prediction else {"unknown": lines}}
            )
        )
        return
    print("\n".join([plan_text(plan, arguments.parameters), *lines]), end="\n" * bool(lines))


def _foreseen(plan: Plan, gpu: str | None) -> "tuple[Prediction | None, list[str]]":
    """The prediction and lines for people; None and the reason for a model that cannot be
    traced."""
    from meshtrain.foresight.draw import memory_of_ranks, step_lines
    from meshtrain.foresight.hardware import load
    from meshtrain.foresight.model import UntracedError, without_sequence_parts
    from meshtrain.foresight.prediction import Prediction

    hardware = None if gpu is None else load(gpu)

    def predicted(config: Config) -> "tuple[Prediction, list[str]]":
        with processes() as pool:
            prediction = Prediction(config, hardware, True, pool)
            return prediction, memory_of_ranks(prediction)

    try:
        prediction, lines = predicted(plan.config)
    except UntracedError as error:
        unknown = [f"memory and time are not known: {error}"]
        if (other := without_sequence_parts(plan.config)) is None:
            return None, unknown
        try:
            prediction, lines = predicted(other)
        except UntracedError:
            return None, unknown
        lines.append(
            "  for parallel.sequence_parallel: false, as the run will turn it off: with it on, "
            f"{error}"
        )
    if (known := prediction.hardware) is not None:
        unit = "tokens" if "vocab_size" in plan.config.model.keys else "samples"
        lines += [
            "",
            *step_lines(prediction.step, unit),
            f"  rates: {known.source} of {known.device.name}",
        ]
    return prediction, lines


@contextmanager
def processes() -> Iterator[ProcessPoolExecutor | None]:
    """A pool of processes for traces; None if torch could not compute gradients in forked
    processes, as once a GPU was seen. Raises InputError: a process was killed."""
    import torch

    count = (
        1
        if sys.platform != "linux" or torch.cuda.device_count()
        else min(8, len(os.sched_getaffinity(0)))
    )
    if count == 1:
        yield None
        return
    pool = ProcessPoolExecutor(count, get_context("fork"), _begin_process)
    try:
        yield pool
    except BrokenProcessPool:
        raise InputError(
            "a process that traces was killed, as the kernel does where memory is short"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_process() -> None:
    import torch

    # the parent's thread pool does not exist in a forked process, which would wait for it
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    end_with_parent()


def _schedule(arguments: argparse.Namespace) -> None:
    from meshtrain.cli.schedule import courses_of, picture, schedule_json, schedule_text

    config = Config.load(arguments.config, arguments.overrides)
    courses = courses_of(config)
    if arguments.png is not None:
        write_picture(arguments.png, lambda: picture(config, courses), "schedule.png")
    print(
        json.dumps(schedule_json(config, courses))
        if arguments.json
        else schedule_text(config, courses)
    )


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
    prediction = Prediction(run.config, start, traced=True)
    lines = calibrate.against(run, start, prediction.memory.total / 2**30, prediction.sent)
    print(
        f"{arguments.against} beside what is foreseen of it",
        *(line.describe() for line in lines),
        sep="\n",
    )


def read_hosts(text: str) -> tuple[int, ...]:
    """`4,2`: two hosts with 4 and 2 processes; `4x8,2`: four with 8 and one with 2. Raises
    InputError: neither."""
    counts: list[int] = []
    for part in text.split(","):
        count = re.fullmatch(r"(?:([1-9]\d*)\s*x\s*)?([1-9]\d*)", part.strip())
        if count is None:
            raise InputError(
                f"--hosts {text}: {part.strip()!r} is no number of processes; give one per host, "
                "such as 4,2, "
                "or 4x8 for four hosts of 8"
            )
        counts += [int(count[2])] * int(count[1] or 1)
    return tuple(counts)
