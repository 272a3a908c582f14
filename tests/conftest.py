"""Settings for all tests."""

from pathlib import Path

import pytest

# Start the longest files first: when two files run at a time, a long one at the end would leave a core idle.
LONGEST = (
    "parity/test_parity.py",
    "checkpoint/test_matrix.py",
    "test_docs.py",
    "test_bench.py",
    "test_train.py",
    "parallel/test_context_models.py",
    "parallel/test_compile.py",
    "parallel/test_data_parallel.py",
    "test_training.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {Path(__file__).parent / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))
