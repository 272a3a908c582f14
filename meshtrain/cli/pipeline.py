"""`meshtrain pipeline`: draws a schedule before anything is started, or the timeline that a run has
measured.

    meshtrain pipeline zbv --ranks 4 --microbatches 8
    meshtrain pipeline my_schedule.csv --png my_schedule.png
    meshtrain pipeline runs/x/timeline.json
    meshtrain pipeline 1f1b --beside runs/x/timeline.json

The last one draws the plan above the run, with the costs that the run has measured.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from meshtrain.errors import InputError, writing
from meshtrain.metrics.picture import write_picture
from meshtrain.pipeline.actions import Schedule, ScheduleError
from meshtrain.pipeline.schedule import NAMES, build, read_csv
from meshtrain.pipeline.simulate import Cost, simulate
from meshtrain.pipeline.timeline_io import (
    Record,
    measured_costs,
    read_timeline,
    timeline_json,
    trace_json,
)

COSTS = ("forward", "input_grad", "weight_grad")
SIZES = ("ranks", "microbatches", "stages_per_rank")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "schedule",
        help=(
            f"one of {', '.join(NAMES)}; a CSV file; or the JSON of a timeline, as --json or a run "
            "writes it"
        ),
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, metavar="N", help="microbatches of a step")
    parser.add_argument(
        "--stages-per-rank", type=int, metavar="N", help="default: what the schedule needs"
    )
    for cost in COSTS:
        meaning = f"time of a stage's {cost.replace('grad', 'gradient').replace('_', ' ')}"
        parser.add_argument(
            _option(cost), type=_cost, metavar="T", help=f"{meaning} (1), or one per stage: 1,1,2,1"
        )
    parser.add_argument(
        "--transfer", type=_time, metavar="T", help="time to send a tensor to another rank (0)"
    )
    parser.add_argument(
        "--beside",
        metavar="FILE",
        help="JSON of a second timeline to draw below, on the same scale",
    )
    parser.add_argument("--png", metavar="FILE", help="draw into a file (.png, .svg or .pdf)")
    parser.add_argument(
        "--trace", metavar="FILE", help="write a trace for ui.perfetto.dev or chrome://tracing"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the whole timeline as JSON instead of drawing it"
    )


def run(arguments: argparse.Namespace) -> None:
    below = [] if arguments.beside is None else [read_timeline(arguments.beside)]
    records = [_first_record(arguments, below), *below]
    if not all(record.timeline.makespan for record in records):
        raise InputError(
            "all actions take no time, so there is nothing to draw: give costs above 0"
        )
    if arguments.png is not None:
        from meshtrain.cli.pipeline_picture import picture

        write_picture(arguments.png, lambda: picture(records), "schedule.png")
    if arguments.trace is not None:
        with writing(arguments.trace):
            Path(arguments.trace).write_text(json.dumps(trace_json(records)))
    if arguments.json:
        timelines = [
            timeline_json(record.timeline, record.title, record.unit) for record in records
        ]
        print(json.dumps(timelines if below else timelines[0]))
        return
    from rich.console import Console

    from meshtrain.cli.pipeline_terminal import print_timelines

    print_timelines(records, Console(highlight=False))
    if arguments.png is not None or arguments.trace is not None:
        print()
    if arguments.png is not None:
        print(f"picture: {arguments.png}")
    if arguments.trace is not None:
        print(f"trace: {arguments.trace} (open it in https://ui.perfetto.dev)")


def _first_record(arguments: argparse.Namespace, below: Sequence[Record]) -> Record:
    """The timeline of a file, or that of a simulated schedule."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if arguments.schedule.endswith(".json"):
        for name in (*SIZES, *COSTS, "transfer"):
            if name in given:
                raise InputError(
                    f"{arguments.schedule} is a timeline, which is drawn as it is: leave "
                    f"{_option(name)} out"
                )
        return read_timeline(arguments.schedule)

    costs = {name: given[name] for name in (*COSTS, "transfer") if name in given}
    try:
        schedule = _schedule(arguments, below)
        title = schedule.title
        if below and not costs.keys() & set(COSTS):
            if below[0].stages != schedule.stages:
                raise InputError(
                    f"{arguments.beside} has {below[0].stages} stages and {title} has "
                    f"{schedule.stages}, so its costs cannot be used: give --forward, --input-grad "
                    "and --weight-grad, or another --stages-per-rank"
                )
            costs = measured_costs(below[0]) | costs
            title += ", with the measured costs"
        return Record(title, simulate(schedule, **costs), below[0].unit if below else "")
    except ScheduleError as error:
        raise InputError(str(error)) from None


def _schedule(arguments: argparse.Namespace, below: Sequence[Record]) -> Schedule:
    name, ranks, microbatches = arguments.schedule, arguments.ranks, arguments.microbatches
    if name not in NAMES and (name.endswith(".csv") or Path(name).is_file()):
        if arguments.stages_per_rank is not None:
            raise InputError(
                f"{name} says itself which rank has which stages: leave --stages-per-rank out"
            )
        return read_csv(name, ranks=ranks, microbatches=microbatches)
    if below:
        ranks = below[0].timeline.ranks if ranks is None else ranks
        microbatches = below[0].microbatches if microbatches is None else microbatches
    if ranks is None or microbatches is None:
        example = f"meshtrain pipeline {name} --ranks 4 --microbatches 8"
        raise InputError(f"how many ranks and microbatches? For instance: {example}")
    return build(
        name, ranks=ranks, microbatches=microbatches, stages_per_rank=arguments.stages_per_rank
    )


def _cost(text: str) -> Cost:
    costs = [_time(part) for part in text.split(",")]
    return costs[0] if len(costs) == 1 else costs


def _time(text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 <= time < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time: use 0 or more")
    return int(time) if time.is_integer() else time


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
