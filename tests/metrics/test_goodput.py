"""Where the wall time of a run went: the parts add up, whatever happened to its jobs and to its
ledger."""

import json
import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from meshtrain.metrics import goodput
from meshtrain.metrics.goodput import FILE, PARTS, GoodputTracker, read
from meshtrain.metrics.logger import read as read_metrics
from tests.job.conftest import go, small  # noqa: F401  fixtures
from tests.properties import given, st

START = 1_700_000_000.0
HERE = Path(__file__).parent
RUNS = yaml.safe_load((HERE / "goodput.yaml").read_text())
DAMAGED = yaml.safe_load((HERE / "damaged_ledger.yaml").read_text())


class World:
    """A run's folder and one clock for all of its jobs. Its methods are what may happen."""

    def __init__(self, folder: Path) -> None:
        self.file, self.clock = folder / FILE, 0.0

    def monotonic(self) -> float:
        return self.clock

    def time(self) -> float:
        return START + self.clock

    def play(self, events: Sequence[Sequence[Any]]) -> None:
        for name, *arguments in events:
            getattr(self, name)(*arguments)

    def open(self, first: int) -> None:
        """A job of which nothing has happened yet."""
        self.step, self.ledger = (
            first,
            GoodputTracker(self.file.parent, first, self.clock, clock=self),
        )

    def job(self, first: int, waited: float = 0.0, startup: float = 3.0) -> None:
        self.clock += waited
        since = self.clock
        self.clock += startup / 3  # imports
        self.step, self.ledger = first, GoodputTracker(self.file.parent, first, since, clock=self)
        self.clock += startup / 3 * 2
        self.ledger.begin()

    def steps(self, last: int, seconds: float = 1.0) -> None:
        for step in range(self.step + 1, last + 1):
            self.clock += seconds
            self.ledger.finish_step(step, seconds / 4)
        self.step = last

    def evaluation(self, seconds: float) -> None:
        with self.ledger.phase("evaluation"):
            self.clock += seconds

    def save(self, seconds: float = 0.5) -> None:
        with self.ledger.phase("saving"):
            self.clock += seconds
        self.ledger.saved()

    def wait(self, seconds: float) -> None:
        self.clock += seconds

    def end(self, status: str) -> None:
        self.ledger.end(status)

    @property
    def parts(self) -> dict[str, float]:
        return {
            part: round(seconds, 6)
            for part, seconds in self.ledger.summary().seconds.items()
            if seconds
        }


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_where_the_time_of_a_run_went(world: World, run: dict[str, Any]) -> None:
    world.play(run["events"])
    account = world.ledger.summary()
    assert world.parts == run["parts"]
    assert str(account) == run.get("text", str(account))
    assert account.wall_s == pytest.approx(world.clock - run.get("not_counted", 0))
    assert account.goodput == pytest.approx(run["parts"]["training"] / account.wall_s)
    assert account.jobs == sum(name == "job" for name, *_ in run["events"])


def test_a_host_whose_clock_is_behind_gives_no_time_back(world: World) -> None:
    world.play([("job", 0), ("steps", 4), ("end", "stopped")])
    behind = SimpleNamespace(monotonic=lambda: 60.0, time=lambda: START - 1000)
    world.ledger = GoodputTracker(world.file.parent, 4, 50.0, clock=behind)
    assert world.parts == {"startup": 13, "training": 3, "data": 1}


def test_the_ledger_of_a_long_job_is_short(world: World) -> None:
    world.play([("job", 0), ("steps", 200_000, 10)])
    assert len(world.file.read_text().splitlines()) < 8000
    last = read(world.file)[0][0].marks[-1]
    assert last.elapsed > 0.998 * world.clock, (
        "what a killed job has not written is a thousandth of it"
    )
    world.job(0)
    assert len(world.file.read_text().splitlines()) == 4, "and the next job keeps what can matter"


EVENTS = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 5), st.floats(0.0, 20.0)),
    st.tuples(st.sampled_from(["evaluation", "save"]), st.just(0), st.floats(0.0, 100.0)),
    st.tuples(
        st.sampled_from(["killed", "failed", "stopped"]), st.integers(0, 3), st.floats(0.0, 1000.0)
    ),
)


@given(st.lists(EVENTS, max_size=40))
def test_the_parts_add_up_and_no_step_counts_twice(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int, float]]
) -> None:
    """Whatever happens, also where a job goes back by several checkpoints or has none to go on
    from."""
    world, saved = World(tmp_path_factory.mktemp("run")), [0]
    world.job(0)
    for name, count, seconds in events:
        if name == "steps":
            world.steps(world.step + count, seconds)
        elif name in ("evaluation", "save"):
            getattr(world, name)(seconds)
            saved += [world.step] * (name == "save")
        else:
            world.wait(seconds / 10)
            if name != "killed":
                world.end(name)
            world.job(sorted(saved)[-1 - min(count, len(saved) - 1)], seconds, 1.0 + count)
    account = world.ledger.summary()
    assert set(account.seconds) == set(PARTS)
    assert account.wall_s == pytest.approx(world.clock, abs=1e-6)
    assert all(seconds >= -1e-6 for seconds in account.seconds.values())
    assert read(world.file)[1] is None, "the ledger has no line that it does not take"


# Ledgers that are torn, or that somebody has edited -----------------------------------------------

GOOD = (
    '{"started": 1700000000.0, "step": 0}\n'
    '{"step": 4, "startup_s": 3.0, "compile_s": 0.0, "training_s": 3.0, "data_s": 1.0, "evaluation_s": 0.0, '
    '"saving_s": 0.5, "saved": true}\n'
)
MARK = json.loads(GOOD.splitlines()[1])
OF_GOOD = {"startup": 3, "training": 3, "data": 1, "saving": 0.5}


def test_a_line_that_was_cut_off_is_left_out_without_a_word(world: World) -> None:
    """At every byte."""
    last = json.dumps(MARK | {"step": 6}).encode()
    world.clock = 100
    for cut in range(len(last)):
        world.file.write_bytes(GOOD.encode() + last[:cut])
        world.open(4)
        assert world.ledger.note is None
        assert world.parts == OF_GOOD | {"between": 92.5}
        assert world.file.read_text() == GOOD + '{"started": 1700000100.0, "step": 4}\n'


def test_a_ledger_from_before_compiling_was_counted_is_read(world: World) -> None:
    world.file.write_text(GOOD.replace('"compile_s": 0.0, ', ""))
    jobs, problem = read(world.file)
    assert problem is None
    assert (jobs[0].last.seconds["compile"], jobs[0].last.elapsed) == (0, 7.5)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


def test_a_line_that_is_none_of_a_ledger_is_left_out_and_said(world: World) -> None:
    lines = [line.encode() for line in DAMAGED["lines"]]
    lines += [
        json.dumps(MARK | {"step": 6, "saved": False} | change).encode()
        for change in DAMAGED["marks"]
    ]
    lines += [pickle.dumps(Payload(), protocol=0).replace(b"\n", b" "), bytes(range(11, 256))]
    lines += [b"[" * 100_000, b'{"a":' * 800, b'{"step": ' + b"9" * 4000 + b"}"]
    lines += [b'{"step": 6, "x": "' + b"x" * 1_000_000 + b'"}']
    for line in lines:
        world.file.write_bytes(GOOD.encode() + line + b"\n")
        world.clock = 7.5
        world.open(4)
        assert "lines that are none of a ledger" in str(world.ledger.note), line[:80]
        assert next(world.ledger.about()) == world.ledger.note
        assert world.parts == OF_GOOD, line[:80]
        assert read(world.file)[1] is None, "the next job does not meet it again"
    world.file.write_bytes(GOOD.splitlines(keepends=True)[1].encode())
    world.clock = 0.0
    world.open(0)
    assert world.parts == {}, "marks without a job count for nothing"


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_no_contents_stop_a_job(tmp_path_factory: pytest.TempPathFactory, contents: bytes) -> None:
    world = World(tmp_path_factory.mktemp("run"))
    world.file.write_bytes(contents)
    world.play([("job", 0), ("steps", 4), ("end", "done")])
    assert world.parts == {"startup": 3, "training": 3, "data": 1}


def test_a_ledger_without_end_is_not_read_to_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput, "MOST_LINES", 100)
    world.file.write_bytes(GOOD.encode() + b"{}\n" * 1000)
    assert "has 98 lines" in str(read(world.file)[1])


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_what_is_no_file_stops_no_job(world: World, make: Callable[[Path], None]) -> None:
    make(world.file)
    world.play([("job", 0), ("steps", 20), ("end", "done")])
    assert "counts this job alone" in str(world.ledger.note)
    assert world.parts == {"startup": 3, "training": 15, "data": 5}


# Runs ---------------------------------------------------------------------------------------------


def check_sum(folder: Path, jobs: int) -> dict[str, float]:
    """The parts in exit.json add up to a time between the last step and now."""
    spent = json.loads((folder / "exit.json").read_text())["goodput"]
    assert spent["jobs"] == jobs
    assert sum(spent[f"wall_{part}_s"] for part in PARTS) == pytest.approx(spent["wall_s"])
    assert spent["goodput"] == pytest.approx(spent["wall_training_s"] / spent["wall_s"])
    begun = json.loads((folder / FILE).read_text().splitlines()[0])["started"]
    last_row = read_metrics(folder / "metrics.jsonl")[-1]
    assert last_row["wall_s"] <= spent["wall_s"] < time.time() - begun + 0.1
    return spent


def test_a_run_of_four_jobs(
    go: Callable[..., dict[str, Any]],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It fails, is stopped, ends, and is taken further; the log, each row and exit.json say where
    the time went."""
    run = tmp_path / "run"
    evaluates = ("data.validation=0.2", "train.eval_every=3")
    assert go(*evaluates, "checkpoint.every=2", interrupt="crash", at=6)["status"] == 1
    first = check_sum(run, 1)
    assert first["wall_repeated_s"] == first["wall_between_s"] == 0
    assert (
        min(
            first[f"wall_{part}_s"]
            for part in ("startup", "training", "data", "evaluation", "saving")
        )
        > 0
    )
    saved, failed = read(run / FILE)[0][0].marks[-2:]
    assert (saved.step, saved.saved, failed.step, failed.end) == (4, True, 5, "failed")
    printed = capsys.readouterr().out
    assert "  goodput " in printed
    assert printed.splitlines()[-1].startswith("wall time ")

    time.sleep(0.3)
    assert go(*evaluates, "checkpoint.every=2", interrupt="SIGUSR1", at=6) == {"status": 75}
    second = check_sum(run, 2)
    lost = failed.elapsed - saved.elapsed
    assert second["wall_repeated_s"] == pytest.approx(lost), (
        "what the first job did after its checkpoint of step 4"
    )
    assert 0.3 <= second["wall_between_s"] < second["wall_s"]
    printed = capsys.readouterr().out
    assert "until now: wall time " in printed
    assert "lost to restarts: steps done again " in printed.splitlines()[-1]

    assert go(*evaluates, "checkpoint.every=2") == {"status": 0}
    third = check_sum(run, 3)
    assert third["wall_repeated_s"] == second["wall_repeated_s"], (
        "who stops with everything saved repeats nothing"
    )
    assert go(*evaluates) == {"status": 0}
    check_sum(run, 3)  # done: nothing is counted, because nothing was done

    assert go(*evaluates, "train.steps=10") == {"status": 0}
    check_sum(run, 4)
    rows = read_metrics(run / "metrics.jsonl")
    for row in rows:
        assert sum(row[f"wall_{part}_s"] for part in PARTS) == pytest.approx(row["wall_s"])
    walls = [row["wall_s"] for row in rows]
    assert walls == sorted(walls)
