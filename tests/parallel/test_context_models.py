"""Models on parts of sequences, in a loop of one's own and as a run makes them; and what is refused."""

from pathlib import Path

import pytest

from tests.launching import forked
from tests.parallel.test_tensor_parallel import assert_none_failed


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "least"), [(2, 32), (4, 30)])
def test_models_on_parts_of_sequences(world: int, least: int, tmp_path: Path) -> None:
    script = Path(__file__).parent / "context_model_cases.py"
    assert_none_failed(forked(world, script, str(tmp_path), timeout=500), world, least)
