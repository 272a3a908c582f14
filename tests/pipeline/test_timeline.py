"""The measured timeline of a real run: what stands in it, and that waiting is no part of an action."""

from pathlib import Path

import pytest

from meshtrain.cli import main as cli
from meshtrain.config import Config, ConfigErrors
from meshtrain.pipeline.actions import Kind
from meshtrain.pipeline.schedule import build
from meshtrain.pipeline.timeline_io import read_timeline
from meshtrain.run.pipeline_trace import measured
from tests.launching import forked

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
REST = "batch: {global_size: 16, micro_size: 2}\ntrain: {steps: 2, eval_every: 0}\nmetrics: {timeline: 2}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    data = "data: {source: digits, workers: 0}\n"
    (tmp_path / "slow.yaml").write_text(f"model: {{name: {tmp_path / 'model.py'}}}\n{data}{REST}")
    return tmp_path / "slow.yaml"


def test_the_timeline_of_a_run(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert [tuple(event.action for event in row) for row in rows] == [schedule.actions_of(rank) for rank in range(2)]
    events = {event.action: event for row in rows for event in row}
    for action, event in events.items():
        # A tensor leaves before the action that makes it has ended, but not before it has slept.
        for needed in schedule.needs(action):
            slept = SLEEP_S if (needed.kind, needed.stage) == (Kind.FORWARD, 0) else 0
            assert event.start >= events[needed].start + slept
    assert cli.main(command.split()[1:]) == 0
    assert "with the measured costs" in capsys.readouterr().out


def test_without_a_pipeline_there_is_no_timeline(config: Path, tmp_path: Path) -> None:
    job = forked(1, "-m", "meshtrain.train", str(config), f"train.output={tmp_path / 'run'}").check()
    assert "metrics.timeline is for a pipeline, and this layout has none (pp: 1): no timeline is written" in job.out
    assert not (tmp_path / "run" / "timeline.json").exists()


def test_the_step_is_one_of_the_run(config: Path) -> None:
    for step, message in (("3", "metrics.timeline is step 3 and the run ends at step 2"), ("0", "metrics.timeline: ")):
        with pytest.raises(ConfigErrors, match=message):
            Config.load(str(config), [f"metrics.timeline={step}"])


def test_times_of_ranks_become_events_on_one_clock() -> None:
    schedule = build("gpipe", ranks=2, microbatches=1)
    timeline = measured(schedule, [[(100.0, 101.0), (105.0, 108.0)], [(101.5, 102.5), (102.5, 104.5)]])
    times = [(str(event.action), event.start, event.end) for row in timeline.events for event in row]
    assert times == [("0F0", 0, 1), ("0B0", 5, 8), ("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5)]
