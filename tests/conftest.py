"""Settings for all tests."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.float64_inside import round_again
from tests.ranks import (
    job,
    pytest_generate_tests,
    pytest_runtest_protocol,
    session_path,
    shared_path,
)

__all__ = ["job", "pytest_generate_tests", "pytest_runtest_protocol", "session_path", "shared_path"]

# Start the longest files first: when several run at a time, a long one at the end would leave a core
# idle.
LONGEST = (
    "parity/test_parity.py",
    "test_docs.py",
    "test_bench.py",
    "test_train.py",
    "parallel/test_compile.py",
    "test_training.py",
)


def pytest_configure(config: pytest.Config) -> None:
    folder = ranks.session_folder()
    folder.__enter__()
    config.add_cleanup(lambda: folder.__exit__(None, None, None))
    # Nearly all that a collection of tests makes stays: looking for garbage in it takes a third of
    # its time.
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks.leave_limits_to_the_job(items)
    first = {Path(__file__).parent / name: i for i, name in enumerate(LONGEST)}

    def order(item: pytest.Item) -> tuple[int, int]:
        world = ranks.world_of(item.nodeid)
        return (-1, -world) if world else (0, first.get(item.path, len(first)))

    items.sort(key=order)


def pytest_collection_finish() -> None:
    # What is there now stays to the end. A collection passes over it, and ranks that are forked
    # share its pages. What a test freezes would never be collected, a run's groups among it.
    gc.collect()
    gc.enable()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs all tests of a file, and one runs all tests of a number of ranks, in one
    job."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            world = ranks.world_of(nodeid)
            return f"{world}-ranks" if world else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _rounding_as_torch_does() -> Iterator[None]:
    yield
    round_again()
