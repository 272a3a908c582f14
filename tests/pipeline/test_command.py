"""`meshtrain pipeline`: schedules and measured timelines; and what a run measures."""

import json
from pathlib import Path

import pytest

from meshtrain.cli import main as cli
from meshtrain.config import Config, ConfigErrors
from meshtrain.errors import InputError
from meshtrain.pipeline.actions import Kind
from meshtrain.pipeline.schedule import build
from meshtrain.pipeline.simulate import Event, Timeline, simulate
from meshtrain.pipeline.timeline_io import Record, measured_costs, read_timeline, timeline_json
from meshtrain.run.pipeline_trace import measured
from tests.launching import forked
from tests.pipeline.formulas import PAGE, csv_text, table

SIZES = ("--ranks", "4", "--microbatches", "8")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run of 1f1b on 4 ranks, in seconds: stage s takes s + 1 times 10 ms, and everything starts
    1 ms late."""
    costs = [0.01 * (stage + 1) for stage in range(4)]
    plan = simulate(build("1f1b", ranks=4, microbatches=8), costs, costs, costs)
    late = [
        Event(e.rank, e.action, 100 + e.start + 0.001, 100 + e.end)
        for row in plan.events
        for e in row
    ]
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(timeline_json(Timeline.measured(late, 4), "step 7 of a run", "s")))
    return path


def pipeline(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command prints."""
    assert cli.main(["pipeline", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_documented_timeline_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    printed = pipeline(capsys, "1f1b", "--ranks", 4, "--microbatches", 4)
    lines = "\n".join(line.rstrip() for line in printed.splitlines())
    assert f"meshtrain pipeline 1f1b --ranks 4 --microbatches 4\n```\n\n```\n{lines}\n```" in PAGE


def test_json_is_the_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = pipeline(capsys, "zbv", *SIZES, "--json")
    path = tmp_path / "plan.json"
    path.write_text(printed)
    record = read_timeline(path)
    assert record.title == "zbv, 4 ranks x 8 microbatches, 2 stages each"
    assert record.timeline == simulate(build("zbv", ranks=4, microbatches=8))
    assert pipeline(capsys, path) == pipeline(capsys, "zbv", *SIZES)


def test_costs_and_stages(capsys: pytest.CaptureFixture[str]) -> None:
    costs = (
        "--forward",
        "1,1,1,2",
        "--input-grad",
        "1.5",
        "--weight-grad",
        "0",
        "--transfer",
        "0.25",
    )
    plan = json.loads(pipeline(capsys, "zb-h1", *SIZES, *costs, "--json"))
    timeline = simulate(build("zb-h1", ranks=4, microbatches=8), [1, 1, 1, 2], 1.5, 0, 0.25)
    assert plan["makespan"] == timeline.makespan
    printed = pipeline(capsys, "interleaved-1f1b", *SIZES, "--stages-per-rank", "3")
    assert printed.startswith("interleaved-1f1b, 4 ranks x 8 microbatches, 3 stages each\n")
    assert "0, 4, 8" in printed


def test_a_schedule_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(csv_text(build("v-half", ranks=4, microbatches=8)))
    plan = json.loads(pipeline(capsys, path, "--json"))
    assert plan["events"] == json.loads(pipeline(capsys, "v-half", *SIZES, "--json"))["events"]


def test_plan_and_run_one_above_the_other(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    """The plan takes everything from the run: the sizes, and the mean cost of each stage's
    actions."""
    plan, measured = json.loads(pipeline(capsys, "1f1b", "--beside", run_file, "--json"))
    costs = [0.01 * (stage + 1) - 0.001 for stage in range(4)]
    backwards = [(0.02 * (stage + 1) - 0.001) / 2 for stage in range(4)]
    expected = simulate(build("1f1b", ranks=4, microbatches=8), costs, backwards, backwards)
    assert plan["makespan"] == pytest.approx(expected.makespan)
    assert plan["unit"] == measured["unit"] == "s"
    printed = pipeline(capsys, "1f1b", "--beside", run_file)
    assert "1f1b, 4 ranks x 8 microbatches, with the measured costs: makespan" in printed
    assert "step 7 of a run: makespan" in printed
    assert "\nms " in printed
    assert json.loads(pipeline(capsys, run_file, "--beside", run_file, "--json")) == [
        measured,
        measured,
    ]
    other, _ = json.loads(
        pipeline(capsys, "zbv", "--beside", run_file, "--forward", "0.01", "--json")
    )
    assert other["title"] == "zbv, 4 ranks x 8 microbatches, 2 stages each"


def test_input_and_weight_gradients_are_measured_apart() -> None:
    timeline = simulate(build("zb-h1", ranks=4, microbatches=8), [1, 2, 3, 4], 5, [6, 7, 8, 9])
    costs = measured_costs(Record("", timeline))
    assert costs == {"forward": [1, 2, 3, 4], "input_grad": [5] * 4, "weight_grad": [6, 7, 8, 9]}
    only_forwards = Timeline(tuple(row[:1] for row in timeline.events))
    with pytest.raises(
        InputError, match="a run: stage 0 has no input_grad: give the costs yourself"
    ):
        measured_costs(Record("a run", only_forwards))


def test_a_trace_and_a_picture_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra meshtrain[plot]")
    picture, trace = tmp_path / "zbv.png", tmp_path / "zbv-trace.json"
    printed = pipeline(capsys, "zbv", *SIZES, "--png", picture, "--trace", trace)
    assert picture.read_bytes().startswith(b"\x89PNG")
    names = [
        event["name"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["ph"] == "X"
    ]
    assert len(names) == 8 * 8 * 3
    assert printed.endswith(
        f"\npicture: {picture}\ntrace: {trace} (open it in https://ui.perfetto.dev)\n"
    )


def test_wrong_input(
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    problems = []
    for arguments, message in table("wrong_commands").items():
        try:
            status = cli.main(["pipeline", *arguments.replace("RUN", str(run_file)).split()])
        except SystemExit as ended:  # of argparse
            status = ended.code
        printed = capsys.readouterr()
        if status != 2 or message not in printed.err or printed.out:
            problems.append((arguments, status, printed))
    assert not problems


# The timeline of a run ----------------------------------------------------------------------------


SLEEP_S = 0.1

MODEL = f"""
import time
from dataclasses import dataclass
from torch import nn

@dataclass(frozen=True)
class Config:
    num_classes: int = 10

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep({SLEEP_S} if x.device.type == "cpu" else 0)
        return super().forward(x.flatten(1))

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first = Slow(64, 8)
        self.last = nn.Linear(8, config.num_classes)

    def blocks(self):
        return [self.first, self.last]

    def forward(self, images):
        return self.last(self.first(images))
"""
REST = (
    "batch: {global_size: 16, micro_size: 2}\ntrain: {steps: 2, eval_every: 0}\nmetrics: "
    "{timeline: 2}\n"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    data = "data: {source: digits, workers: 0}\n"
    (tmp_path / "slow.yaml").write_text(f"model: {{name: {tmp_path / 'model.py'}}}\n{data}{REST}")
    return tmp_path / "slow.yaml"


@pytest.mark.slow
def test_the_timeline_of_a_run(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    layout = "layout={pp: 2, dp_replicate: 2}"
    job = forked(4, "-m", "meshtrain.train", str(config), layout, f"train.output={folder}").check()
    path = folder / "timeline.json"
    command = f"meshtrain pipeline 1f1b --beside {path}"
    assert f"timeline of step 2 in {path}; this draws it below the plan: {command}\n" in job.out
    record = read_timeline(path)
    assert record.title == "1f1b, 2 ranks x 4 microbatches, step 2 of slow"
    assert record.unit == "s"
    rows = record.timeline.events
    schedule = build("1f1b", ranks=2, microbatches=4)
    assert [tuple(event.action for event in row) for row in rows] == [
        schedule.actions_of(rank) for rank in range(2)
    ]
    events = {event.action: event for row in rows for event in row}
    for action, event in events.items():
        # A tensor leaves before the action that makes it has ended, but not before it has slept.
        for needed in schedule.needs(action):
            slept = SLEEP_S if (needed.kind, needed.stage) == (Kind.FORWARD, 0) else 0
            assert event.start >= events[needed].start + slept
    assert cli.main(command.split()[1:]) == 0
    assert "with the measured costs" in capsys.readouterr().out


def test_without_a_pipeline_there_is_no_timeline(config: Path, tmp_path: Path) -> None:
    job = forked(
        1, "-m", "meshtrain.train", str(config), f"train.output={tmp_path / 'run'}"
    ).check()
    assert (
        "metrics.timeline is for a pipeline, and this layout has none (pp: 1): no timeline is "
        "written" in job.out
    )
    assert not (tmp_path / "run" / "timeline.json").exists()


def test_the_step_is_one_of_the_run(config: Path) -> None:
    for step, message in (
        ("3", "metrics.timeline is step 3 and the run ends at step 2"),
        ("0", "metrics.timeline: "),
    ):
        with pytest.raises(ConfigErrors, match=message):
            Config.load(str(config), [f"metrics.timeline={step}"])


def test_times_of_ranks_become_events_on_one_clock() -> None:
    schedule = build("gpipe", ranks=2, microbatches=1)
    timeline = measured(
        schedule, [[(100.0, 101.0), (105.0, 108.0)], [(101.5, 102.5), (102.5, 104.5)]]
    )
    times = [
        (str(event.action), event.start, event.end) for row in timeline.events for event in row
    ]
    assert times == [("0F0", 0, 1), ("0B0", 5, 8), ("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5)]
