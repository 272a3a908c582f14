"""Two checkpoints side by side: equal whatever layouts wrote them, and if not, by how much, where,
and in what else."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshtrain.checkpoint import diff as room
from meshtrain.checkpoint.diff import TensorDifference, diff
from meshtrain.checkpoint.directory import begin, finish
from meshtrain.checkpoint.manifest import file_of
from meshtrain.errors import DamagedError
from tests.checkpoint.by_hand import Cuts, write_checkpoint

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "rows": {"sizes": {"dp_shard": 3}, "cuts": lambda name, tensor: (("dp_shard", 0),)},
    "columns": {"sizes": {"dp_shard": 2, "tp": 3}, "cuts": lambda name, tensor: last_dim(tensor)},
    "stages": {
        "sizes": {"pp": 2, "dp_replicate": 2},
        "stages": lambda name: (int(name.endswith("b")),),
    },
}


def last_dim(tensor: Tensor) -> Cuts:
    return (("tp", max(0, tensor.dim() - 1)), ("dp_shard", 0))


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.a": torch.randn(13, 7, generator=generator),
        "model.b": torch.randn(5, 3, 4, generator=generator).bfloat16(),
        "optimizer.step": torch.tensor(7.0),
        "model.wide": torch.randn(1, 101, generator=generator).double(),
        "model.empty": torch.zeros(0, 3),
        "model.mask": torch.tensor([True, False]),
        "model.zero": torch.zeros(3),
    }


def saved(where: Path, content: dict[str, Tensor], layout: str = "one", **about: Any) -> Path:
    return write_checkpoint(where, content, **LAYOUTS[layout] | about)


@pytest.fixture(autouse=True, params=[64, 16 * 2**20])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with blocks of a few elements, too, so that rows and parts of rows are compared by
    themselves."""
    monkeypatch.setattr(room, "BLOCK", request.param)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_makes_no_difference(tmp_path: Path, layout: str) -> None:
    difference = diff(saved(tmp_path / "a", tensors()), saved(tmp_path / "b", tensors(), layout))
    assert difference.same
    assert (difference.compared, difference.tensors, difference.state) == (7, [], {})
    assert list(difference.about) == ([] if layout == "one" else ["layout"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_element_that_differs_counts_and_the_largest_is_told(
    tmp_path: Path, layout: str
) -> None:
    other = tensors()
    other["model.a"][2, 3] += 0.25
    other["model.a"][12, 6] -= 0.5
    other["model.b"][4, 2, 1] = 1.0
    other["optimizer.step"] += 1
    other["model.wide"][0, 100] = math.nan
    other["model.mask"][1] = True
    other["model.zero"] = -other["model.zero"]
    difference = diff(
        saved(tmp_path / "a", tensors(), "columns"), saved(tmp_path / "b", other, layout)
    )
    assert not difference.same
    assert {each.name: (each.elements, each.largest, each.at) for each in difference.tensors} == {
        "model.a": (2, pytest.approx(0.5), (12, 6)),
        "model.b": (1, abs(float(tensors()["model.b"][4, 2, 1]) - 1), (4, 2, 1)),
        "optimizer.step": (1, 1.0, ()),
        "model.wide": (1, math.inf, (0, 100)),
        "model.mask": (1, 1.0, (1,)),
        "model.zero": (3, 0.0, (0,)),  # minus zero has other bits
    }
    assert difference.tensors[2].what == "1 of 1 elements differ, most: 7.0 and 8.0"


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    a = saved(
        tmp_path / "a",
        {"model.a": torch.zeros(3), "model.b": torch.zeros(3), "model.c": torch.zeros(2)},
    )
    b = saved(
        tmp_path / "b",
        {"model.b": torch.zeros(3).half(), "model.c": torch.zeros(2, 1), "model.d": torch.zeros(1)},
    )
    assert diff(a, b).tensors == [
        TensorDifference("model.a", f"is only in {a}"),
        TensorDifference("model.b", "F32 [3] and F16 [3]"),
        TensorDifference("model.c", "F32 [2] and F32 [2, 1]"),
        TensorDifference("model.d", f"is only in {b}"),
    ]


def test_state_and_what_led_to_it_are_told_apart(tmp_path: Path) -> None:
    one = {
        "config": {"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}},
        "data": {"fingerprint": "a", "train": 10},
    }
    other = {
        "config": {"optimizer": {"lr": 0.2}},
        "data": {"fingerprint": "b", "train": 10},
        "versions": {"torch": "3"},
    }
    a = saved(tmp_path / "a", tensors(), **one)
    difference = diff(a, saved(tmp_path / "b", tensors(), step=200, **other))
    assert difference.state == {
        "step": (100, 200),
        "samples": (800, 1600),
        "tokens": (25600, 51200),
        "data.fingerprint": ("a", "b"),
    }
    assert difference.about == {
        "versions.meshtrain": ("0.1.0", None),
        "versions.torch": (None, "3"),
        "config.optimizer.lr": (0.1, 0.2),
        "config.optimizer.betas": ([0.9, 0.95], None),
    }
    assert not difference.same
    again = diff(a, saved(tmp_path / "c", tensors(), **one | {"config": {}}))
    assert (again.same, list(again.about)) == (
        True,
        ["config.optimizer.lr", "config.optimizer.betas"],
    )


def test_a_file_that_holds_another_shape_than_the_manifest_says(tmp_path: Path) -> None:
    """Both are whole; a reader that took the file's word would read past its part."""
    a = saved(tmp_path, {"model.a": torch.zeros(4)})
    text = (saved(tmp_path, {"model.a": torch.zeros(2, 2)}, step=200) / "manifest.json").read_text()
    unfinished = begin(tmp_path, 300)
    (unfinished / file_of(0)).write_bytes((tmp_path / "step_0000200" / file_of(0)).read_bytes())
    other = finish(
        tmp_path, 300, text.replace('"step": 200', '"step": 300').replace("[2,2]", "[4]")
    )
    with pytest.raises(
        DamagedError, match=r"model.a: is F32 \[2, 2\], and by the manifest it is F32 \[4\]"
    ):
        diff(a, other)
