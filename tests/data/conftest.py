from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshtrain.config import Data
from meshtrain.data import OpenData, open_data

Opener = Callable[..., OpenData]


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    """Opens a data section, with its cache in the test's folder."""

    def open_section(
        *,
        n_outputs: int | None = None,
        vocab_size: int | None = None,
        seed: int = 0,
        said: list[str] | None = None,
        **keys: Any,
    ) -> OpenData:
        section = Data(**({"cache": str(tmp_path / "cache")} | keys))
        say = (said if said is not None else []).append
        return open_data(section, n_outputs=n_outputs, vocab_size=vocab_size, seed=seed, say=say)

    return open_section
