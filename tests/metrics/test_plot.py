"""The picture of a run is drawn from whatever metrics.jsonl holds."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.metrics.plot import plot_loss, smooth
from tests.properties import given, st

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs the extra meshtrain[plot]"
)


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@given(st.lists(st.floats(-1e6, 1e6), max_size=60), st.integers(0, 9))
def test_smoothing_is_the_mean_of_a_window_that_fits(values: list[float], reach: int) -> None:
    for i, mean in enumerate(smooth(values, reach)):
        side = min(reach, i, len(values) - 1 - i)
        window = values[i - side : i + side + 1]
        assert mean == pytest.approx(sum(window) / len(window), abs=1e-6)


def test_smoothing_passes_over_what_is_not_finite() -> None:
    assert smooth([1.0, math.nan, 3.0], 1) == pytest.approx([1.0, 2.0, 3.0])
    assert math.isnan(smooth([math.inf], 3)[0])


@needs_matplotlib
def test_any_run_gives_a_picture(tmp_path: Path) -> None:
    for rows in yaml.safe_load(Path(__file__).with_name("pictures.yaml").read_text()):
        (tmp_path / "loss.png").unlink(missing_ok=True)
        write(tmp_path, rows)
        assert plot_loss(str(tmp_path), "a run") == f"loss plot: {tmp_path / 'loss.png'}"
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@needs_matplotlib
def test_the_picture_names_the_run_and_its_last_validation(tmp_path: Path) -> None:
    from meshtrain.metrics.plot import _draw

    rows = [{"step": s, "loss": 3.0, "lr": 0.1, "grad_norm": 1.0} for s in range(1, 5)]
    rows[1]["eval_loss"] = 2.5
    rows[2]["eval_loss"] = 2.25
    top = _draw(rows, "quickstart").axes[0]
    assert top.get_title("left") == "quickstart"
    assert top.get_title("right") == "validation loss 2.2500 at step 3"
    drawn = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in top.lines
    }
    assert drawn["validation loss"] == ([2, 3], [2.5, 2.25])
    assert drawn["training loss, smoothed"] == ([1, 2, 3, 4], [3.0] * 4)


def test_without_steps_there_is_a_sentence(tmp_path: Path) -> None:
    for _ in range(2):
        assert "has no steps" in plot_loss(tmp_path, "a run")
        write(tmp_path, [])


def test_without_matplotlib_there_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    write(tmp_path, [{"step": 1, "loss": 2.0}])
    assert "pip install 'meshtrain[plot]'" in plot_loss(tmp_path, "a run")
    assert not (tmp_path / "loss.png").exists()
