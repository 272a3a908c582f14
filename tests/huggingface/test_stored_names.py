"""Stored names and parts: together what files have of a tensor covers it once, whatever its shape
and the table."""

from typing import Any

import pytest
import torch

from meshtrain.huggingface.stored_names import stored_tensors
from tests.properties import given, st

EXPERTS = {
    "model.layers.*.mlp.experts.gate_up_proj": (
        "model.layers.*.mlp.experts.{}.gate_proj.weight",
        "model.layers.*.mlp.experts.{}.up_proj.weight",
    ),
    "*.balance.loads": (),
}


@given(
    st.integers(0, 5), st.integers(0, 4), st.lists(st.integers(0, 3), max_size=2), st.integers(1, 3)
)
@pytest.mark.parametrize("counted", [False, True])
def test_the_parts_cover_a_tensor_once_and_have_the_shapes_of_what_is_stored(
    counted: bool, experts: int, rows: int, rest: list[int], several: int
) -> None:
    shape = (experts, rows * several, *rest) if counted else (rows * several, *rest)
    names = tuple(f"b.*.{'{}.' * counted}{n}" for n in range(several))
    stored = stored_tensors("a.17.x.w", shape, {"other": (), "a.*.w": names, "*": ()})
    numbers = [f"{i}." for i in range(experts)] if counted else [""]
    assert [tensor.name for tensor in stored] == [
        f"b.17.x.{i}{n}" for i in numbers for n in range(several)
    ]
    count = torch.zeros(shape)
    for tensor in stored:
        count[tensor.part] += 1
        assert count[tensor.part].view(tensor.shape).shape == torch.Size(tensor.shape)
        assert tensor.slices(tensor.part) == tuple(slice(0, size) for size in tensor.shape)
    assert torch.all(count == 1)


def test_the_names_of_experts() -> None:
    gate, up = stored_tensors("model.layers.12.mlp.experts.gate_up_proj", (64, 6, 5), EXPERTS)[
        14:16
    ]
    assert gate == (
        "model.layers.12.mlp.experts.7.gate_proj.weight",
        (3, 5),
        (slice(7, 8), slice(0, 3), slice(0, 5)),
    )
    assert up == (
        "model.layers.12.mlp.experts.7.up_proj.weight",
        (3, 5),
        (slice(7, 8), slice(3, 6), slice(0, 5)),
    )
    assert up.slices((slice(7, 8), slice(4, 6), slice(1, 2))) == (slice(1, 3), slice(1, 2))
    assert stored_tensors("model.layers.12.mlp.gate.balance.loads", (64,), EXPERTS) == []
    assert stored_tensors("model.norm.weight", (5,), EXPERTS) == [
        ("model.norm.weight", (5,), (slice(0, 5),))
    ]
    assert stored_tensors("scale", (), {"scale": ("other",)}) == [("other", (), (slice(0, 1),))]


@pytest.mark.parametrize(
    ("table", "shape", "says"),
    [
        ({"w": ("a", "b")}, (3,), r"does not divide a tensor of the shape \[3\]"),
        ({"w": ("{}.a",)}, (), r"does not divide a tensor of the shape \[\]"),
        ({"w": ("{}.a", "b")}, (2, 2), "all of .* have to count"),
        ({"w": ("{}.{}",)}, (2, 2), "all of .* have to count"),
        ({"*": ("a",)}, (2, 2), r"differ in the number of '\*'"),
    ],
)
def test_tables_that_do_not_fit(table: dict[str, Any], shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        stored_tensors("w", shape, table)
