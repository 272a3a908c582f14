"""Tests that run on several ranks at once.

    @pytest.mark.ranks(2, 4)
    def test_sums_are_global(job: Job) -> None:
        mesh = build_mesh(Layout({"tp": job.world_size}))

is a test of 2 and one of 4 ranks. It is an ordinary test, with parameters and fixtures, that each
rank of a job runs, and it passes if it passes on each of them. `job` is what meshtrain's `join`
returns, with the default process group connected; `shared_path` is a folder that all ranks of a
test see (`tmp_path` is a rank's own).

All tests of one number of ranks run one after the other in one job, since starting ranks takes
longer than most tests. A test that fails is reported, and the job goes on. Ranks that wait for one
that has failed, or do not end in time, are stopped, and new ones go on with the next test. If a
rank crashes, the test is repeated alone: the report says whether it crashes by itself or only after
others.
"""

import faulthandler
import fcntl
import gc
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from meshtrain.job.environment import read_environment
from meshtrain.job.process import Job, join
from tests.launching import forked, free_port

GRACE_S = 20.0  # how long ranks may take to come back once another rank has failed
# tests: then new ranks go on, since threads of destroyed groups and compiled code stay in a process
FRESH_AFTER = 40
LIMIT_S = 300.0  # of a test without a mark `timeout`
JOB_LIMIT_S = 3000.0
# What many tests of ranks import late. It is imported before the first fork, and before
# conftest.py freezes what is there: each rank would import it again, and look for garbage in it.
IMPORTED_LATE = (
    "sklearn.datasets",
    "transformers.modeling_layers",
    "transformers.processing_utils",
)
INNER = "the ranks of a job"  # the plugin's name in the process that forks the ranks
SESSION = "MESHTRAIN_TEST_SESSION"  # names the session's folder in the environment
WORLD = re.compile(r"[\[-](\d+)-ranks[\]-]")  # in the name of a test


@dataclass(frozen=True)
class Outcome:
    """How a test ended: `passed`, `failed` or `skipped`, with what is to be printed about it."""

    outcome: str
    text: str
    seconds: float


def world_of(nodeid: str) -> int | None:
    """The number of ranks that a test runs on; None: it is no test of ranks."""
    found = WORLD.search(nodeid)
    return int(found[1]) if found else None


# ------------------------------------------------------------------------- in the process that runs
# all kinds of tests


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None:
        metafunc.parametrize(
            "job", mark.args, indirect=True, ids=[f"{world}-ranks" for world in mark.args]
        )


def row(world: int, *values: Any, name: str, slow: bool = False) -> Any:
    """Parameters of a test of `world` ranks: `job`, which is indirect, and these values."""
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(world, *values, id=f"{world}-ranks-{name}", marks=marks)


def leave_limits_to_the_job(items: Sequence[pytest.Item]) -> None:
    """The first test of a job waits for the whole job; the job limits each test."""
    for item in items:
        if world_of(item.nodeid) and not item.config.pluginmanager.has_plugin(INNER):
            item.add_marker(pytest.mark.timeout(0), append=False)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    world = world_of(item.nodeid)
    if world is None or item.config.pluginmanager.has_plugin(INNER):
        return None
    outcomes = item.config.stash.setdefault(OUTCOMES, {})
    if item.nodeid not in outcomes:
        waiting = [other.nodeid for other in item.session.items if world_of(other.nodeid) == world]
        waiting = [nodeid for nodeid in waiting if nodeid not in outcomes]
        outcomes.update(run_job(world, waiting, item.config.getvalue("maxfail")))
    outcome = outcomes[item.nodeid]
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for when in ("setup", "call", "teardown"):
        item.ihook.pytest_runtest_logreport(report=report_of(item, outcome, when))
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The test before may have left the set-up of its module, where this one is too.
    item.session._setupstate.teardown_exact(nextitem)
    return True


OUTCOMES = pytest.StashKey[dict[str, Outcome]]()


def report_of(item: pytest.Item, outcome: Outcome, when: Any) -> pytest.TestReport:
    ended: Any = outcome.outcome if when == "call" else "passed"
    longrepr: Any = None
    if ended == "failed":
        longrepr = outcome.text
    elif ended == "skipped":
        longrepr = (str(item.path), item.location[1], outcome.text)
    keywords: Any = dict.fromkeys(item.keywords, 1)
    seconds = outcome.seconds if when == "call" else 0.0
    return pytest.TestReport(
        item.nodeid, item.location, keywords, ended, longrepr, when, duration=seconds
    )


def run_job(world: int, nodeids: Sequence[str], maxfail: int) -> dict[str, Outcome]:
    """Runs tests of `world` ranks in one job."""
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        request, results = Path(folder, "request.json"), Path(folder, "results.jsonl")
        request.write_text(json.dumps({"world": world, "nodeids": nodeids, "maxfail": maxfail}))
        results.touch()
        try:
            job = forked(1, "-m", "tests.ranks", request, results, timeout=JOB_LIMIT_S)
            printed = f"exit status {job.status}\n{job.out}\n{job.err}"
        except AssertionError as error:
            printed = str(error)
        outcomes = dict.fromkeys(
            nodeids, Outcome("failed", f"the job ended before this test:\n{printed}", 0.0)
        )
        for line in results.read_text().splitlines():
            nodeid, outcome = json.loads(line)
            outcomes[nodeid] = Outcome(**outcome)
    return outcomes


@pytest.fixture
def job() -> Iterator[Job]:
    """This rank's job."""
    assert current is not None, "a test that uses `job` has the mark `ranks`"
    yield current.job
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def shared_path() -> Path:
    """A folder of this test that all of its ranks see."""
    assert current is not None, "a test that uses `shared_path` has the mark `ranks`"
    return current.folder


@pytest.fixture(scope="session")
def session_path() -> Path:
    """A folder that all processes of a session of tests see, with what they compute once."""
    return Path(os.environ[SESSION])


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, in which `make` has written files: whoever comes first calls it, and others
    wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder.with_suffix(".done")
        if not done.exists():
            make(folder)
            done.touch()
    return folder


@contextmanager
def session_folder() -> Iterator[None]:
    """Makes the folder of `session_path`, unless the process that has started this one did."""
    if SESSION in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="meshtrain_tests") as folder:
        os.environ[SESSION] = folder
        yield
        del os.environ[SESSION]


# ---------------------------------------------------------------------------------------- in the
# process of one rank


@dataclass
class Current:
    job: Job
    folder: Path


current: Current | None = None


class RankReports:
    """Collects what pytest reports about a test on this rank."""

    def __init__(self) -> None:
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def outcome(self, seconds: float) -> Outcome:
        failed = [report for report in self.reports if report.failed]
        skipped = [report for report in self.reports if report.skipped]
        self.reports = []
        if failed:
            sections = [f"--- {title}\n{text}" for title, text in failed[-1].sections]
            texts = [f"{report.when}: {report.longreprtext}" for report in failed]
            return Outcome("failed", "\n".join(texts + sections), seconds)
        if skipped:
            reason: Any = skipped[0].longrepr
            return Outcome("skipped", reason[2], seconds)
        return Outcome("passed", "", seconds)


def serve_as_rank(requests: Connection, items: Sequence[pytest.Item], folder: Path) -> None:
    """Joins the job, and runs the tests that are asked for: (position, position of the next one or
    None)."""
    global current  # noqa: PLW0603  the fixtures of this process read it
    rank = os.environ["RANK"]
    stacks = (folder / f"stack_{rank}").open("w")
    faulthandler.register(signal.SIGUSR2, file=stacks)
    job = join(read_environment(os.environ))
    job.connect(600)
    config = items[0].config
    config._tmp_path_factory._basetemp = folder / f"rank_{rank}"  # type: ignore[attr-defined]
    (folder / f"rank_{rank}").mkdir()
    reports = RankReports()
    config.pluginmanager.register(reports)
    while True:
        position, following = requests.recv()
        destroy_groups()
        current = Current(job, folder / str(position))
        current.folder.mkdir(exist_ok=True)
        started = time.monotonic()
        nextitem = None if following is None else items[following]
        config.hook.pytest_runtest_protocol(item=items[position], nextitem=nextitem)
        requests.send(reports.outcome(time.monotonic() - started))


def destroy_groups() -> None:
    """Destroys the process groups that the test before has made, which each have threads and
    sockets. By now no rank uses them: all have ended that test. torch would find them again in what
    it has cached for an equal mesh."""
    _clear_sharding_prop_cache()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


# --------------------------------------------------------------------------- in the process that
# forks a job's ranks


@dataclass(frozen=True)
class Ended:
    """How a test ended on the ranks, by rank: `crashed` and `stuck` say what became of those
    without an outcome."""

    outcomes: dict[int, Outcome]
    crashed: dict[int, str]
    stuck: dict[int, str]

    @property
    def failed(self) -> bool:
        return bool(self.crashed or self.stuck) or any(
            x.outcome == "failed" for x in self.outcomes.values()
        )

    def __str__(self) -> str:
        """What has failed, by rank; the same text of several ranks once."""
        texts = {
            rank: outcome.text
            for rank, outcome in self.outcomes.items()
            if outcome.outcome == "failed"
        }
        ranks_of: dict[str, list[int]] = {}
        for rank, text in sorted((texts | self.crashed | self.stuck).items()):
            ranks_of.setdefault(text, []).append(rank)
        return "\n".join(
            f"=== rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()
        )

    def merged(self) -> Outcome:
        seconds = max((outcome.seconds for outcome in self.outcomes.values()), default=0.0)
        if self.failed:
            return Outcome("failed", str(self), seconds)
        skipped = [outcome for outcome in self.outcomes.values() if outcome.outcome == "skipped"]
        return skipped[0] if skipped else Outcome("passed", "", seconds)


class Ranks:
    """The processes of a job, which run tests in step."""

    def __init__(self, world: int, items: Sequence[pytest.Item]) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="of_ranks")
        self.folder = Path(self._temporary.name)
        self.pids: list[int] = []
        self.pipes: list[Connection] = []
        job = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world),
        }
        for rank in range(world):
            here, there = Pipe()
            pid = os.fork()
            if pid == 0:
                for pipe in (here, *self.pipes):
                    pipe.close()  # so that a rank that ends closes its pipe
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
                os.environ.update(job | own)
                try:
                    serve_as_rank(there, items, self.folder)
                except EOFError:  # no more tests
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            there.close()
            self.pids.append(pid)
            self.pipes.append(here)

    def run(self, position: int, following: int | None, limit_s: float) -> "Ended":
        """Runs a test on all ranks."""
        for pipe in self.pipes:
            try:
                pipe.send((position, following))
            except OSError:  # it has ended
                continue
        ended = Ended({}, {}, {})
        deadline = time.monotonic() + limit_s
        missing = dict(enumerate(self.pipes))
        while missing:
            ready = wait(missing.values(), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, pipe in missing.items() if pipe in ready]:
                try:
                    ended.outcomes[rank] = missing.pop(rank).recv()
                except (EOFError, OSError):
                    ended.crashed[rank] = f"it ended with {exit_of(self.pids[rank])}"
            if ended.failed:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in missing:
            ended.stuck[rank] = f"it did not end; it was at\n{self._stack(rank)}"
        return ended

    def _stack(self, rank: int) -> str:
        os.kill(self.pids[rank], signal.SIGUSR2)
        time.sleep(0.5)
        file = self.folder / f"stack_{rank}"
        text = file.read_text() if file.exists() else ""
        return text.partition("_pytest/python.py")[0].rpartition("\n")[0]  # from the test on

    def stop(self) -> None:
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):  # it has ended
                continue
        for pipe in self.pipes:
            pipe.close()
        self._temporary.cleanup()


def exit_of(pid: int) -> str:
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # asked before
        return "its pipe closed"
    return signal.Signals(-status).name if status < 0 else f"status {status}"


class InnerSession:
    """In the place of pytest's loop over tests: forks ranks and has them run the tests."""

    def __init__(self, world: int, nodeids: Sequence[str], maxfail: int, results: Path) -> None:
        self.world, self.nodeids, self.maxfail, self.results = world, nodeids, maxfail, results

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for name in IMPORTED_LATE:
            with suppress(ModuleNotFoundError):  # the tests that need it say so
                importlib.import_module(name)
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[nodeid] for nodeid in self.nodeids if nodeid in by_name]

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None  # pytest says that the collection has failed
        items = session.items
        ranks: Ranks | None = None
        failures = 0
        for i, item in enumerate(items):
            if ranks is None:
                ranks = Ranks(self.world, items)
            following = i + 1 if i + 1 < len(items) else None
            ended = ranks.run(i, following, limit_of(item))
            outcome = ended.merged()
            if ended.crashed or ended.stuck or (i + 1) % FRESH_AFTER == 0:
                ranks.stop()
                ranks = None
            if ended.crashed:
                alone = Ranks(self.world, items)
                again = alone.run(i, None, limit_of(item))
                alone.stop()
                text = f"fails as well:\n{again}" if again.failed else "passes"
                outcome = replace(outcome, text=f"{outcome.text}\n--- repeated alone, it {text}")
            with self.results.open("a") as file:
                file.write(json.dumps([item.nodeid, asdict(outcome)]) + "\n")
            failures += outcome.outcome == "failed"
            if self.maxfail and failures >= self.maxfail:
                break
        if ranks is not None:
            ranks.stop()
        return True


def limit_of(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark is not None else LIMIT_S


def main(request: str, results: str) -> int:
    job = json.loads(Path(request).read_text())
    plugin = InnerSession(job["world"], job["nodeids"], job["maxfail"], Path(results))
    files = dict.fromkeys(nodeid.partition("::")[0] for nodeid in job["nodeids"])
    options = [
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:logging",
        "--capture=sys",
    ]
    return pytest.main([*options, *files], plugins=[Named(plugin)])


class Named:
    """Registers a plugin under the name by which the hooks of the outer process know that they are
    not asked."""

    def __init__(self, plugin: InnerSession) -> None:
        self.plugin = plugin

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self.plugin, INNER)


if __name__ == "__main__":
    # this file runs as `__main__`; conftest.py imports it by its name
    by_name = importlib.import_module("tests.ranks")
    sys.exit(by_name.main(*sys.argv[1:]))
