"""Planted mistakes are found, and called by their names (mistakes.yaml)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import forked
from tests.verify.planted import MISTAKES, PLANTS

# The others are played by `make test-all`. These need what judges need most: ranks that disagree,
# and a run by samples. With the first parameter that differs.
FEW = {
    "norms under sequence parallelism": "model.layers.0.input_layernorm.weight",
    "a skipped microbatch": "model.embed_tokens.weight",
}
LEAST_RIGHT = 16  # of 20


def said(folder: Path, *names: str) -> dict[str, dict[str, Any]]:
    result = folder / "said.json"
    forked(1, "-m", "tests.verify.planted", result, *names, timeout=600).check()
    return json.loads(result.read_text())


def test_every_mistake_can_be_planted() -> None:
    assert list(PLANTS) == list(MISTAKES)


def test_a_few_mistakes(tmp_path: Path) -> None:
    for name, outcome in said(tmp_path, *FEW).items():
        assert outcome["status"] == "different", name
        assert outcome["kind"] == MISTAKES[name]["kind"], name
        assert outcome["step"] == 1, name
        # the first one in the order of the model
        assert outcome["parameter"] == FEW[name], name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_mistakes(tmp_path: Path) -> None:
    outcomes = said(tmp_path)
    found = [name for name, outcome in outcomes.items() if outcome["status"] == "different"]
    right = [name for name in found if outcomes[name]["kind"] == MISTAKES[name]["kind"]]
    assert found == list(outcomes)
    assert len(found) == len(MISTAKES) == 20
    assert len(right) >= LEAST_RIGHT, {name: outcomes[name]["kind"] for name in found}
