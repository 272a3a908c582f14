"""Where the wall time of a run went: the parts add up, whatever happened to its jobs and to its ledger."""

import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshtrain.run.results
import meshtrain.run.step_logger
import meshtrain.train
from meshtrain.job import signals as stopping
from meshtrain.metrics import goodput
from meshtrain.metrics.goodput import FILE, PARTS, GoodputTracker, read
from meshtrain.metrics.logger import read as read_metrics
from tests.checkpoint.going_on import Case, alone, small_run
from tests.launching import torchrun
from tests.properties import given, st

START = 1_700_000_000.0


class World:
    """A run's folder and one clock for all of its jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, 0.0

    def monotonic(self) -> float:
        return self.clock

    def time(self) -> float:
        return START + self.clock

    def job(self, first: int, *, waited: float = 0.0, startup: float = 3.0) -> GoodputTracker:
        """The next job, after no job for so long; its first step begins."""
        self.clock += waited
        since = self.clock
        self.clock += startup / 3  # imports
        ledger = GoodputTracker(self.folder, first, since, clock=self)
        self.clock += startup / 3 * 2
        ledger.begin()
        return ledger

    def steps(self, ledger: GoodputTracker, first: int, last: int, seconds: float = 1.0, data: float = 0.25) -> None:
        """Steps that take so long each, of which so much is waiting for data."""
        for step in range(first, last + 1):
            self.clock += seconds
            ledger.finish_step(step, data)

    def save(self, ledger: GoodputTracker, seconds: float = 0.5) -> None:
        with ledger.phase("saving"):
            self.clock += seconds
        ledger.saved()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def parts(ledger: GoodputTracker) -> dict[str, float]:
    return {part: round(seconds, 6) for part, seconds in ledger.summary().seconds.items() if seconds}


def test_one_job(world: World) -> None:
    ledger = world.job(0)
    world.steps(ledger, 1, 4)
    with ledger.phase("evaluation"):
        world.clock += 2
    world.save(ledger)
    world.steps(ledger, 5, 6)
    assert parts(ledger) == {"startup": 3, "training": 4.5, "data": 1.5, "evaluation": 2, "saving": 0.5}
    assert ledger.summary().wall_s == pytest.approx(world.clock)
    assert ledger.summary().goodput == pytest.approx(4.5 / 11.5)
    assert str(ledger.summary()) == (
        "wall time 12s in 1 job: training 39.1 % (goodput), start-up 26.1 %, waiting for data 13.0 %, "
        "evaluation 17.4 %, saving 4.3 %"
    )


def test_a_job_that_was_killed_and_one_that_goes_on(world: World) -> None:
    """Killed in step 7 without a word: its steps after the checkpoint are time between jobs, if nothing was written."""
    ledger = world.job(0)
    world.steps(ledger, 1, 4)
    world.save(ledger)
    world.steps(ledger, 5, 6)
    world.clock += 0.75
    ledger = world.job(4, waited=10)
    assert parts(ledger) == {"startup": 6, "training": 3, "data": 1, "saving": 0.5, "between": 2 + 0.75 + 10}
    world.steps(ledger, 5, 8)
    ledger.end("done")
    assert parts(ledger) == {"startup": 6, "training": 6, "data": 2, "saving": 0.5, "between": 12.75}
    assert ledger.summary().wall_s == pytest.approx(world.clock)
    assert ledger.summary().jobs == 2


def test_steps_that_are_done_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed job knows what it has done: its steps after the checkpoint, and the evaluation among them, are lost."""
    ledger = world.job(0)
    world.steps(ledger, 1, 4)
    world.save(ledger)
    world.steps(ledger, 5, 6)
    with ledger.phase("evaluation"):
        world.clock += 2
    world.clock += 100  # it waits for a rank that does not come
    ledger.end("failed")
    ledger = world.job(4, waited=10)
    assert parts(ledger) == {
        **{"startup": 6, "training": 3, "data": 1, "saving": 0.5},
        **{"repeated": 2 + 2 + 100, "between": 10},
    }
    assert "lost to restarts: steps done again 83.5 %, between jobs 8.0 %" in str(ledger.summary())


def test_what_a_job_spent_on_failing_is_no_training(world: World) -> None:
    """Also if it failed in the very step after the checkpoint, so that its last line is of the same step."""
    ledger = world.job(0)
    world.steps(ledger, 1, 4)
    world.save(ledger)
    world.clock += 600
    ledger.end("failed")
    assert parts(world.job(4)) == {"startup": 6, "training": 3, "data": 1, "saving": 0.5, "repeated": 600}


def test_a_run_that_goes_back_to_an_older_checkpoint(world: World) -> None:
    """What all jobs did behind it is lost, and known exactly though the ledger is written anew by every job."""
    ledger = world.job(0)
    for last in (2, 4, 6):
        world.steps(ledger, last - 1, last)
        world.save(ledger)
    ledger.end("stopped")
    ledger = world.job(6, waited=1)
    world.steps(ledger, 7, 8)
    world.save(ledger)
    ledger.end("stopped")
    ledger = world.job(2, waited=1)
    assert parts(ledger) == {
        **{"startup": 9, "training": 1.5, "data": 0.5, "saving": 0.5},
        **{"repeated": 4 + 2 * 0.5 + 2 + 0.5, "between": 2},
    }
    assert ledger.summary().wall_s == pytest.approx(world.clock)


def test_a_run_that_was_done_has_not_waited_for_the_job_that_takes_it_further(world: World) -> None:
    ledger = world.job(0)
    world.steps(ledger, 1, 4)
    ledger.end("done")
    ledger = world.job(4, waited=1_000_000)
    assert parts(ledger) == {"startup": 6, "training": 3, "data": 1}


def test_a_host_whose_clock_is_behind_gives_no_time_back(world: World) -> None:
    ledger = world.job(0)
    world.steps(ledger, 1, 4)
    ledger.end("stopped")
    behind = SimpleNamespace(monotonic=lambda: 60.0, time=lambda: START - 1000)
    later = GoodputTracker(world.folder, 4, 50.0, clock=behind)
    assert parts(later) == {"startup": 13, "training": 3, "data": 1}


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    ledger = GoodputTracker(None, 0, time.monotonic())
    ledger.begin()
    ledger.finish_step(1, 0.0)
    ledger.saved()
    ledger.end("done")
    assert ledger.summary().wall_s >= 0
    assert list(tmp_path.iterdir()) == []


def test_the_ledger_of_a_long_job_is_short(world: World) -> None:
    ledger = world.job(0)
    for step in range(1, 200_001):
        world.clock += 10
        ledger.finish_step(step, 0.0)
    assert len((world.folder / FILE).read_text().splitlines()) < 8000
    written = read(world.folder / FILE)[0][0].marks[-1]
    assert written.elapsed > 0.998 * world.clock, "what a killed job has not written is a thousandth of it"
    world.job(0)
    assert len((world.folder / FILE).read_text().splitlines()) == 4, "and the next job keeps what can matter"


EVENTS = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 5), st.floats(0.0, 20.0)),
    st.tuples(st.just("evaluation"), st.just(0), st.floats(0.0, 100.0)),
    st.tuples(st.just("save"), st.just(0), st.floats(0.0, 100.0)),
    st.tuples(st.sampled_from(["killed", "failed", "stopped"]), st.integers(0, 3), st.floats(0.0, 1000.0)),
)


@given(st.lists(EVENTS, max_size=40))
def test_the_parts_add_up_and_no_step_counts_twice(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int, float]]
) -> None:
    """Whatever happens, also where a job goes back by several checkpoints or has none to go on from."""
    world = World(tmp_path_factory.mktemp("run"))
    ledger, step, saved = world.job(0), 0, [0]
    for what, count, seconds in events:
        if what == "steps":
            world.steps(ledger, step + 1, step + count, seconds, data=seconds / 4)
            step += count
        elif what == "save":
            world.save(ledger, seconds)
            saved.append(step)
        elif what == "evaluation":
            with ledger.phase("evaluation"):
                world.clock += seconds
        else:
            world.clock += seconds / 10
            if what != "killed":
                ledger.end(what)
            step = sorted(saved)[-1 - min(count, len(saved) - 1)]
            ledger = world.job(step, waited=seconds, startup=1.0 + count)
    account = ledger.summary()
    assert set(account.seconds) == set(PARTS)
    assert account.wall_s == pytest.approx(world.clock, abs=1e-6)
    assert all(seconds >= -1e-6 for seconds in account.seconds.values())
    assert read(world.folder / FILE)[1] is None, "the ledger has no line that it does not take"


# Ledgers that are torn, or that somebody has edited ------------------------------------------------------------------

GOOD = (
    '{"started": 1700000000.0, "step": 0}\n'
    '{"step": 4, "startup_s": 3.0, "compile_s": 0.0, "training_s": 3.0, "data_s": 1.0, "evaluation_s": 0.0, '
    '"saving_s": 0.5, "saved": true}\n'
)


def test_a_line_that_was_cut_off_is_left_out_without_a_word(world: World) -> None:
    """At every byte."""
    last = GOOD.splitlines(keepends=True)[1].replace('"step": 4', '"step": 6').encode()
    world.clock = 100
    for cut in range(len(last)):
        (world.folder / FILE).write_bytes(GOOD.encode() + last[:cut])
        ledger = GoodputTracker(world.folder, 4, 100.0, clock=world)
        assert ledger.note is None
        assert parts(ledger) == {"startup": 3, "training": 3, "data": 1, "saving": 0.5, "between": 92.5}
        assert (world.folder / FILE).read_text() == GOOD + '{"started": 1700000100.0, "step": 4}\n'


def test_a_ledger_from_before_compiling_was_counted_is_read(world: World) -> None:
    (world.folder / FILE).write_text(GOOD.replace('"compile_s": 0.0, ', ""))
    jobs, problem = read(world.folder / FILE)
    assert problem is None
    assert jobs[0].last.seconds["compile"] == 0
    assert jobs[0].last.elapsed == 7.5


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


def mark(**values: Any) -> bytes:
    return json.dumps(json.loads(GOOD.splitlines()[1]) | {"step": 6, "saved": False} | values).encode()


HOSTILE = {
    "text": b"hello",
    "empty": b"",
    "python": b"__import__('os').abort()",
    "pickle": pickle.dumps(Payload(), protocol=0).replace(b"\n", b" "),
    "binary": bytes(range(11, 256)),
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 800,
    "long": b'{"step": 6, "x": "' + b"x" * 1_000_000 + b'"}',
    "list": b"[1, 2]",
    "number": b"6",
    "null": b"null",
    "no step": mark(step=None),
    "a step that is true": b'{"started": 1700000000.0, "step": true}',
    "a step that is a text": mark(step="6"),
    "a step with a fraction": mark(step=6.5),
    "a step before the first": mark(step=-1),
    "a huge step": mark(step=10**30),
    "a number of many digits": b'{"step": ' + b"9" * 4000 + b"}",
    "back": mark(step=3),
    "less time": mark(training_s=1.0),
    "negative time": mark(data_s=-1.0),
    "infinite time": mark(data_s=float("inf")),
    "no number": mark(data_s=float("nan")),
    "huge time": mark(training_s=1e300),
    "time in words": mark(data_s="1"),
    "times missing": b'{"step": 6}',
    "saved by word": mark(saved="yes"),
    "ended by number": mark(end=1),
    "a start that is none": b'{"started": "now", "step": 4}',
    "a start in infinity": b'{"started": Infinity, "step": 4}',
    "a start without a step": b'{"started": 1700000000.0}',
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_a_line_that_is_none_of_a_ledger_is_left_out_and_said(world: World, line: bytes) -> None:
    (world.folder / FILE).write_bytes(GOOD.encode() + line + b"\n")
    world.clock = 7.5
    ledger = GoodputTracker(world.folder, 4, 7.5, clock=world)
    assert "lines that are none of a ledger" in str(ledger.note)
    assert next(ledger.about()) == ledger.note
    assert parts(ledger) == {"startup": 3, "training": 3, "data": 1, "saving": 0.5}
    assert read(world.folder / FILE)[1] is None, "the next job does not meet it again"


def test_marks_without_a_job_count_for_nothing(world: World) -> None:
    (world.folder / FILE).write_bytes(mark() + b"\n")
    assert parts(GoodputTracker(world.folder, 0, 0.0, clock=world)) == {}


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_no_contents_stop_a_job(tmp_path_factory: pytest.TempPathFactory, contents: bytes) -> None:
    world = World(tmp_path_factory.mktemp("run"))
    (world.folder / FILE).write_bytes(contents)
    ledger = world.job(0)
    world.steps(ledger, 1, 4)
    ledger.end("done")
    assert parts(ledger) == {"startup": 3, "training": 3, "data": 1}


def test_a_ledger_without_end_is_not_read_to_its_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "MOST_LINES", 100)
    (world.folder / FILE).write_bytes(GOOD.encode() + b"{}\n" * 1000)
    assert "has 98 lines" in str(read(world.folder / FILE)[1])


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_what_is_no_file_stops_no_job(world: World, make: Callable[[Path], None]) -> None:
    make(world.folder / FILE)
    ledger = world.job(0)
    world.steps(ledger, 1, 20)
    ledger.end("done")
    assert "counts this job alone" in str(ledger.note)
    assert parts(ledger) == {"startup": 3, "training": 15, "data": 5}


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_run(tmp_path_factory.mktemp("small")))


@pytest.fixture
def go(small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Trains in this process."""
    monkeypatch.setattr(meshtrain.run.step_logger, "sample_flops", lambda *_: (None, "FLOPs are not counted"))
    monkeypatch.setattr(meshtrain.run.step_logger, "peak_flops", lambda *_: (1.0, "a peak of 1 FLOP/s"))
    monkeypatch.setattr(meshtrain.run.results, "plot_loss", lambda *_: "no picture is drawn")
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.0)
    options = (f"train.output={tmp_path}/run", "data.workers=0", "data.validation=0.2", "train.eval_every=3")

    def go(*overrides: str, **case: Any) -> dict[str, Any]:
        return alone(Case(small, (*options, *overrides), **case))

    return go


def check_sum(folder: Path, jobs: int) -> dict[str, float]:
    """The parts in exit.json add up to the time from the first start to the moment at which it was written."""
    spent = json.loads((folder / "exit.json").read_text())["goodput"]
    assert spent["jobs"] == jobs
    assert sum(spent[f"wall_{part}_s"] for part in PARTS) == pytest.approx(spent["wall_s"])
    assert spent["goodput"] == pytest.approx(spent["wall_training_s"] / spent["wall_s"])
    begun = json.loads((folder / FILE).read_text().splitlines()[0])["started"]
    assert spent["wall_s"] == pytest.approx((folder / "exit.json").stat().st_mtime - begun, abs=1.0)
    return spent


def test_a_run_of_four_jobs(
    go: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fails, is stopped, ends, and is taken further; the log, each row and exit.json say where the time went."""
    run = tmp_path / "run"
    before = time.time()
    assert go("checkpoint.every=2", interrupt="crash", at=6)["status"] == 1
    first = check_sum(run, 1)
    assert first["wall_repeated_s"] == first["wall_between_s"] == 0
    assert min(first[f"wall_{part}_s"] for part in ("startup", "training", "data", "evaluation", "saving")) > 0
    saved, failed = read(run / FILE)[0][0].marks[-2:]
    assert (saved.step, saved.saved, failed.step, failed.end) == (4, True, 5, "failed")
    said = capsys.readouterr().out
    assert "  goodput " in said
    assert said.splitlines()[-1].startswith("wall time ")

    time.sleep(1.0)
    assert go("checkpoint.every=2", interrupt="SIGUSR1", at=6) == {"status": 75}
    second = check_sum(run, 2)
    lost = failed.elapsed - saved.elapsed
    assert second["wall_repeated_s"] == pytest.approx(lost), "what the first job did after its checkpoint of step 4"
    assert 1.0 <= second["wall_between_s"] < second["wall_s"]
    said = capsys.readouterr().out
    assert "until now: wall time " in said
    assert "lost to restarts: steps done again " in said.splitlines()[-1]

    assert go("checkpoint.every=2") == {"status": 0}
    third = check_sum(run, 3)
    assert third["wall_repeated_s"] == second["wall_repeated_s"], "who stops with everything saved repeats nothing"
    assert third["wall_s"] == pytest.approx(time.time() - before, abs=1.0)
    assert go() == {"status": 0}
    check_sum(run, 3)  # done: nothing is counted, because nothing was done

    assert go("train.steps=10") == {"status": 0}
    assert json.loads((run / "exit.json").read_text())["goodput"]["jobs"] == 4
    rows = read_metrics(run / "metrics.jsonl")
    for row in rows:
        assert sum(row[f"wall_{part}_s"] for part in PARTS) == pytest.approx(row["wall_s"])
    walls = [row["wall_s"] for row in rows]
    assert walls == sorted(walls)


@pytest.mark.cluster
def test_a_killed_job_that_its_launcher_starts_again(small: str, tmp_path: Path) -> None:
    """Rank 0, which keeps the ledger, is killed in step 7 and has no last word; the checkpoint is of step 4."""
    options = ["data.workers=0", "checkpoint.in_background=false", "train.chaos=[{fault: kill, rank: 0, step: 7}]"]
    before = time.time()
    agent = ["--max-restarts=1", "-m", "meshtrain.train", small, f"train.output={tmp_path}/run"]
    done = torchrun(2, *agent, *options).check()
    after = time.time()
    spent = check_sum(tmp_path / "run", 2)
    assert spent["wall_s"] < after - before
    assert spent["wall_between_s"] > 0, "the steps since the last line of the killed job, and the new start"
    assert "until now: wall time " in done.out
    assert "lost to restarts: " in done.out
    first, second = read(tmp_path / "run" / FILE)[0]
    assert (first.first, second.first) == (0, 4)
    assert [mark.step for mark in first.marks] == [4], "of the killed one its checkpoint stands there"
    assert spent["wall_saving_s"] >= first.marks[0].seconds["saving"] > 0
