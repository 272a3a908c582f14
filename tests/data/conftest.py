from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshtrain.config.schema import DataSection
from meshtrain.data import OpenData, open_data
from tests.data.files import OWN

Opener = Callable[..., OpenData]


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    """Opens a data section, with its cache in the test's folder."""

    def open_section(
        *,
        n_outputs: int | None = None,
        vocab_size: int | None = None,
        seed: int = 0,
        messages: list[str] | None = None,
        **keys: Any,
    ) -> OpenData:
        paths = {key: str(value) for key, value in keys.items() if isinstance(value, Path)}
        section = DataSection(**({"cache": str(tmp_path / "cache")} | keys | paths))
        say = (messages if messages is not None else []).append
        return open_data(section, n_outputs=n_outputs, vocab_size=vocab_size, seed=seed, say=say)

    return open_section


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A user's own file, whose data are of the kind that `data.path` says."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)
