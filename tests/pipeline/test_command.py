"""`meshtrain pipeline`: schedules and measured timelines through the command line."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from meshtrain.cli import main as cli
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.pipeline.simulate import Event, Timeline, simulate
from meshtrain.pipeline.timeline_io import Record, measured_costs, read_timeline, timeline_json
from tests.pipeline.formulas import csv_text, default_stages, largest_group, peak_bound

SIZES = ("--ranks", "4", "--microbatches", "8")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run of 1f1b on 4 ranks, in seconds: stage s takes s + 1 times 10 ms, and everything starts 1 ms late."""
    costs = [0.01 * (stage + 1) for stage in range(4)]
    plan = simulate(build("1f1b", ranks=4, microbatches=8), costs, costs, costs)
    late = [Event(e.rank, e.action, 100 + e.start + 0.001, 100 + e.end) for row in plan.events for e in row]
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(timeline_json(Timeline.measured(late, 4), "step 7 of a run", "s")))
    return path


def pipeline(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command prints."""
    assert cli.main(["pipeline", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_be_seen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = simulate(build(name, ranks=4, microbatches=8))
    printed = pipeline(capsys, name, *SIZES)
    assert printed.startswith(f"{name}, 4 ranks x 8 microbatches")
    assert f"makespan {timeline.makespan}, {100 * timeline.idle_share:.1f} % of it idle" in printed
    for rank in range(4):
        numbers = (timeline.idle[rank], timeline.idle_in_span[rank], timeline.peak_activations[rank])
        pattern = rf"^rank {rank} +[\d, ]+  {numbers[0]} +\d+ % +{numbers[1]} +{numbers[2]}$"
        assert re.search(pattern, printed, re.M), printed


def test_json_is_the_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = pipeline(capsys, "zbv", *SIZES, "--json")
    found = json.loads(printed)
    assert (found["title"], found["makespan"]) == ("zbv, 4 ranks x 8 microbatches, 2 stages each", 51)
    path = tmp_path / "plan.json"
    path.write_text(printed)
    assert read_timeline(path).timeline == simulate(build("zbv", ranks=4, microbatches=8))
    assert pipeline(capsys, path) == pipeline(capsys, "zbv", *SIZES)


def test_costs(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ("--forward", "1,1,1,2", "--input-grad", "1.5", "--weight-grad", "0", "--transfer", "0.25")
    found = json.loads(pipeline(capsys, "zb-h1", *SIZES, *costs, "--json"))
    timeline = simulate(build("zb-h1", ranks=4, microbatches=8), [1, 1, 1, 2], 1.5, 0, 0.25)
    assert found["makespan"] == timeline.makespan


def test_stages_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    printed = pipeline(capsys, "interleaved-1f1b", *SIZES, "--stages-per-rank", "3")
    assert printed.startswith("interleaved-1f1b, 4 ranks x 8 microbatches, 3 stages each\n")
    assert "0, 4, 8" in printed


def test_a_schedule_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(csv_text(build("v-half", ranks=4, microbatches=8)))
    from_file, named = (json.loads(pipeline(capsys, *what, "--json")) for what in ((path,), ("v-half", *SIZES)))
    assert from_file["events"] == named["events"]


def test_a_measured_timeline(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    printed = pipeline(capsys, run_file)
    assert printed.startswith("step 7 of a run\n")
    assert "\nms " in printed


def test_plan_and_run_one_above_the_other(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """The plan takes everything from the run: the sizes, and the mean cost of each stage's actions."""
    plan, measured = json.loads(pipeline(capsys, "1f1b", "--beside", run_file, "--json"))
    costs = [0.01 * (stage + 1) - 0.001 for stage in range(4)]
    backwards = [(0.02 * (stage + 1) - 0.001) / 2 for stage in range(4)]
    wanted = simulate(build("1f1b", ranks=4, microbatches=8), costs, backwards, backwards)
    assert plan["makespan"] == pytest.approx(wanted.makespan)
    assert measured["title"] == "step 7 of a run"
    assert plan["unit"] == measured["unit"] == "s"
    printed = pipeline(capsys, "1f1b", "--beside", run_file)
    assert "1f1b, 4 ranks x 8 microbatches, with the measured costs: makespan" in printed
    assert "step 7 of a run: makespan" in printed
    two = json.loads(pipeline(capsys, run_file, "--beside", run_file, "--json"))
    assert two == [measured, measured]


def test_costs_can_be_given_beside_a_run(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    plan, _ = json.loads(pipeline(capsys, "zbv", "--beside", run_file, "--forward", "0.01", "--json"))
    assert plan["title"] == "zbv, 4 ranks x 8 microbatches, 2 stages each"


def test_input_and_weight_gradients_are_measured_apart() -> None:
    timeline = simulate(build("zb-h1", ranks=4, microbatches=8), [1, 2, 3, 4], 5, [6, 7, 8, 9])
    costs = measured_costs(Record("", timeline))
    assert costs == {"forward": [1, 2, 3, 4], "input_grad": [5] * 4, "weight_grad": [6, 7, 8, 9]}


def test_a_trace_and_a_picture_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra meshtrain[plot]")
    picture, trace = tmp_path / "zbv.png", tmp_path / "zbv-trace.json"
    printed = pipeline(capsys, "zbv", *SIZES, "--png", picture, "--trace", trace)
    assert picture.read_bytes().startswith(b"\x89PNG")
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(names) == 8 * 8 * 3
    assert "F stage 2 microbatch 7" in names
    assert printed.endswith(f"\npicture: {picture}\ntrace: {trace} (open it in https://ui.perfetto.dev)\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1f1b"], "how many ranks and microbatches? For instance: meshtrain pipeline 1f1b --ranks 4 --microbatches 8"),
        (["1f1b", "--ranks", "4"], "how many ranks and microbatches?"),
        (["1f2b", *SIZES], "did you mean 1f1b?"),
        (["zbv", *SIZES, "--stages-per-rank", "3"], "schedule zbv has 2 stages per rank; found 3"),
        (["1f1b", "--ranks", "0", "--microbatches", "8"], "any number of ranks from 1 on; found 0"),
        (["missing.csv"], "cannot read the schedule missing.csv"),
        (["missing.csv", "--stages-per-rank", "2"], "leave --stages-per-rank out"),
        (["missing.json"], "cannot read missing.json"),
        (["{run}", "--ranks", "4"], "is a timeline, which is drawn as it is: leave --ranks out"),
        (["{run}", "--forward", "1"], "leave --forward out"),
        (["1f1b", *SIZES, "--forward", "1,2"], "forward: a number, or one for each of the 4 stages; found 2 numbers"),
        (["1f1b", *SIZES, "--forward", "0", "--input-grad", "0", "--weight-grad", "0"], "give costs above 0"),
        (["1f1b", *SIZES, "--beside", "missing.json"], "cannot read missing.json"),
        (["zbv", "--beside", "{run}"], "has 4 stages and zbv, 4 ranks x 8 microbatches, 2 stages each has 8"),
        (["1f1b", *SIZES, "--trace", "missing/trace.json"], "cannot write missing/trace.json"),
        (["1f1b", *SIZES, "--png", "missing/picture.png"], "cannot write a picture to missing/picture.png"),
    ],
)
def test_wrong_input(
    arguments: list[str], said: str, run_file: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    status = cli.main(["pipeline", *(str(run_file) if each == "{run}" else each for each in arguments)])
    captured = capsys.readouterr()
    assert status == 2
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("cost", ["fast", "-1", "1,,2", "nan", "inf"])
def test_a_cost_is_a_time(cost: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["pipeline", "1f1b", *SIZES, f"--forward={cost}"])
    assert ended.value.code == 2
    assert "argument --forward:" in capsys.readouterr().err


def test_a_run_without_a_backward_has_no_costs(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(run_file.read_text())
    found["events"][2] = [event for event in found["events"][2] if "F" in event["action"]]
    run_file.write_text(json.dumps(found))
    assert cli.main(["pipeline", "1f1b", "--beside", str(run_file)]) == 2
    assert "step 7 of a run: stage 2 has no input_grad: give the costs yourself" in capsys.readouterr().err


# The documentation --------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pipeline.md").read_text()


def documented() -> dict[str, list[str]]:
    """The table of schedules: name -> v, idle, share of idle for 4 x 8, for 8 x 32, peak, peak for 4 x 8 over v."""
    rows = (re.findall(r"[^|]+", line) for line in PAGE.splitlines() if re.match(r"\| `[\w-]+` \| [12]", line))
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows}


def value(formula: str, p: int, m: int, v: int) -> int:
    """`2⌈(p - 1)/3⌉ + 2`, `(v - 1)g + p`, `v·m`, ... with numbers put in."""
    g = largest_group(m, p)
    formula = re.sub(r"⌈(.*)/(\d)⌉", r"(-(-\1 // \2))", formula).replace("·", "*").replace(" mod ", " % ")
    formula = re.sub(r"(?<=[\d)])(?=[a-z(])", "*", formula)
    return eval(formula, {"p": p, "m": m, "v": v, "g": g})  # of a document of ours


def test_the_documented_schedules_are_all() -> None:
    assert tuple(documented()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_documented_costs_are_those_of_the_simulator(name: str) -> None:
    stages, idle, small, large, peak, held = documented()[name]
    more = "more" in stages
    v = default_stages(name)
    assert stages.startswith(str(v))
    for said, p, m in ((small, 4, 8), (large, 8, 32)):
        timeline = simulate(build(name, ranks=p, microbatches=m))
        assert said == f"{100 * timeline.idle_share:.1f} %"
    assert float(held) == max(simulate(build(name, ranks=4, microbatches=8)).peak_activations) / v
    for p, m, each in product(range(3, 9), (1, 5, 16, 17, 31), (v, v + 1) if more else (v,)):
        bound = min(each * m, value(peak, p, m, each))
        assert bound == peak_bound(name, p, m, each)
        timeline = simulate(build(name, ranks=p, microbatches=m, stages_per_rank=each))
        assert max(timeline.peak_activations) <= bound
        if m >= 2 * p and m % p == 0:
            assert set(timeline.idle) == {value(idle, p, m, each)}


def test_the_documented_timeline_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    printed = pipeline(capsys, "1f1b", "--ranks", 4, "--microbatches", 4)
    shown = "\n".join(line.rstrip() for line in printed.splitlines())
    assert f"meshtrain pipeline 1f1b --ranks 4 --microbatches 4\n```\n\n```\n{shown}\n```" in PAGE
