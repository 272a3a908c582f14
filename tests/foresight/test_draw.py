"""What is foreseen, as people see it: bars of a step, a picture; the table of memory is in the
docs' plan."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshtrain.foresight.draw import memory_lines, picture, step_lines
from meshtrain.foresight.hardware import load
from meshtrain.metrics.picture import write_picture

GIB = 2**30
PARTS = {"weights, float32": 1.5 * GIB, "gradients, float32": 2.5 * GIB, "activations": 20 * GIB}
SECONDS = {"forward": 0.1, "backward": 0.3, "update": 0.0005, "tp": 0.0}
STEP = SimpleNamespace(seconds=0.4, parts=SECONDS, tokens_per_s=81920.0, mfu=0.41, limit="products")
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs the extra meshtrain[plot]"
)


def test_the_bars_of_a_step() -> None:
    """As long as the parts; what is there has a bar, however short, and what takes nothing has
    none."""
    head, *bars, limit = step_lines(STEP, error=load("h100").band)
    assert head == "step 0.4 s +- 15 %, data sheet: 81,920 tokens/s, 41 % MFU"
    assert [line.split() for line in bars] == [
        ["forward", "#" * 11, "0.1", "s"],
        ["backward", "#" * 32, "0.3", "s"],
        ["update", "#", "0.0005", "s"],
    ]
    assert limit == "  limit: products"


def test_what_is_a_thousandth_of_the_peak_is_not_shown() -> None:
    kept, at_the_peak = {"activations": 16, "states": 8}, {**PARTS, "loss": 1e5}
    _, *rows = memory_lines(kept, at_the_peak, "memory")
    assert [row.split() for row in rows] == [
        ["activations", "20.0", "GiB"],
        ["weights,", "float32", "1.5", "GiB"],
        ["gradients,", "float32", "2.5", "GiB"],
    ]


@needs_matplotlib
def test_a_picture(tmp_path: Path) -> None:
    pixels = []
    for name, room, step in (("both.png", 80 * GIB, STEP), ("memory.png", None, None)):
        figure = picture("plan of x", PARTS, room, step)
        write_picture(tmp_path / name, lambda figure=figure: figure, "plan.png")
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        pixels.append((tmp_path / name).stat().st_size)
    assert pixels[0] > pixels[1] > 10_000
