"""The engine in jobs of 2 and 4 processes, and its refusals."""

from pathlib import Path

import pytest

from tests.launching import forked
from tests.parallel.test_tensor_parallel import assert_none_failed

HERE = Path(__file__).parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "least"), [(2, 900), (4, 900)])
def test_the_engine_does_what_one_process_does(world: int, least: int, tmp_path: Path) -> None:
    """Gradients, forwards, text, memory, and bytes sent, of every schedule."""
    assert_none_failed(forked(world, HERE / "engine_cases.py", str(tmp_path), timeout=500), world, least)


@pytest.mark.timeout(300)
def test_shards_have_the_bits_of_copies_in_16_bits() -> None:
    """FSDP adds up in float32, too, what weight gradients that were put off bring."""
    assert_none_failed(forked(4, HERE / "sharded_cases.py", timeout=280), 4, 230)
