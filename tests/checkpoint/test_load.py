"""Loading onto any layout, to the bit; what does not fit is named before anything is read, and damage where it is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshtrain.checkpoint import load
from meshtrain.checkpoint.directory import complete_steps, open_manifest
from meshtrain.checkpoint.load import differences
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.placement import Placement
from meshtrain.checkpoint.save import Saver
from meshtrain.checkpoint.shard_file import Shard
from meshtrain.checkpoint.state import LocalShard
from meshtrain.checkpoint.verify import verify
from meshtrain.errors import DamagedError, InputError
from meshtrain.layout import Layout
from meshtrain.parallel.sharding import shape_of
from tests.checkpoint.by_hand import write_checkpoint
from tests.checkpoint.known import ABOUT, OF_4, alone, clear, fill, on, restore, wrong
from tests.launching import forked
from tests.parallel.test_tensor_parallel import assert_none_failed


def manifest_of(checkpoint: Path) -> Manifest:
    return open_manifest(checkpoint)[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_layout_loads_what_every_other_has_written(tmp_path: Path) -> None:
    """4 ranks in one job, and one process before and after."""
    job = alone()
    state = on(job, {})
    fill(state)
    saver = Saver(state, tmp_path / "one", job, in_background=False)
    saver.save(4, ABOUT)
    saver.close()
    done = forked(4, "-m", "tests.checkpoint.ranks", str(tmp_path), "load", timeout=500)
    assert_none_failed(done, 4, len(OF_4) * (len(OF_4) + 2))
    for where in (*OF_4, "one"):
        checkpoint = tmp_path / where / "step_0000004"
        clear(state)
        restore(checkpoint, manifest_of(checkpoint), state)
        assert wrong(state) == [], where
        assert not verify(checkpoint), where


def part_of(tensors: dict[str, torch.Tensor], wanted: dict[str, tuple[slice, ...]]) -> Any:
    """A state that wants these parts of these tensors."""
    placements = {name: Placement(tuple(one.shape), "F32") for name, one in tensors.items()}
    shards = []
    for name, part in wanted.items():
        target = torch.zeros(shape_of(part))
        shards.append(LocalShard(name, placements[name], part, True, lambda target=target: target))
    return SimpleNamespace(
        placements=placements, shards=shards, loaded=lambda: None, layout=Layout({}), mesh=SimpleNamespace(rank=0)
    )


@pytest.mark.parametrize("chunk", [1, 700, 2**25])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, dim: int) -> None:
    """Rows, columns and both, of pieces that were cut otherwise, read in one go or row by row."""
    monkeypatch.setattr(load, "CHUNK", chunk)
    x = torch.randn(50, 30)
    checkpoint = write_checkpoint(
        tmp_path, {"x": x}, sizes={"dp_replicate": 2, "tp": 3}, cuts=lambda name, tensor: (("tp", dim),)
    )
    for part in ((slice(0, 50), slice(0, 30)), (slice(7, 31), slice(0, 30)), (slice(3, 49), slice(4, 21))):
        state = part_of({"x": x}, {"x": part})
        restore(checkpoint, manifest_of(checkpoint), state)
        assert torch.equal(state.shards[0].local, x[part]), part


def test_a_part_is_read_without_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 MiB a quarter of the rows: no more bytes are read than these and the rest of the blocks at their ends."""
    x = torch.randn(2**13, 2**10)
    checkpoint = write_checkpoint(tmp_path, {"x": x})
    read, counted = Shard._read, []
    monkeypatch.setattr(Shard, "_read", lambda *given: (counted.append(len(given[2])), read(*given))[1])
    state = part_of({"x": x}, {"x": (slice(1000, 1000 + 2**11), slice(0, 2**10))})
    restore(checkpoint, manifest_of(checkpoint), state)
    assert torch.equal(state.shards[0].local, x[1000 : 1000 + 2**11])
    assert 2**23 < sum(counted) <= 2**23 + 2 * 2**22 + 10_000


def test_damage_is_named_by_file_and_tensor(tmp_path: Path) -> None:
    tensors = {"model.a": torch.randn(4, 8), "model.b": torch.randn(40, 8)}
    checkpoint = write_checkpoint(
        tmp_path, tensors, sizes={"dp_shard": 4}, cuts=lambda name, tensor: (("dp_shard", 0),)
    )
    state = part_of(tensors, {name: (slice(0, one.shape[0]), slice(0, 8)) for name, one in tensors.items()})
    file = checkpoint / "rank_00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match=r"rank_00002.safetensors: model.b: its bytes") as refused:
        restore(checkpoint, manifest_of(checkpoint), state)
    assert (refused.value.file, refused.value.tensor) == (file, "model.b")


def test_what_does_not_fit_is_named_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = alone()
    state = on(job, {})
    fill(state)
    saver = Saver(state, tmp_path, job)
    saver.save(4, ABOUT, wait=True)
    saver.close()
    checkpoint = tmp_path / "step_0000004"
    other = on(job, {}, "model.vocab_size=44", "model.num_hidden_layers=5", "train.precision=float64")
    monkeypatch.setattr(Shard, "__init__", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(InputError) as refused:
        restore(checkpoint, manifest_of(checkpoint), other)
    problem = str(refused.value)
    assert problem.startswith(
        f"{checkpoint} does not fit the model: the model has no model.model.layers.5.input_layernorm"
    )
    assert "other shapes: model.model.embed_tokens.weight (there [42, 24], the model's [44, 24])" in problem
    assert "other types: model.model.embed_tokens.weight (there F32, the model's F64)" in problem


def test_differences_are_told_in_lists() -> None:
    f32, f64 = Placement((2, 3), "F32"), Placement((2, 3), "F64")
    assert differences({"a": f32}, {"a": Placement((2, 3), "F32", (("tp", 0),), (1,))}) == [], "layouts may differ"
    assert differences({"a": f32}, {"a": f64}) == ["other types: a (there F32, the model's F64)"]
    assert differences({"a": f32}, {}) == ["the model has no a"]
    adam, sgd = {"model.a": f32, "optimizer.a.exp_avg": f32}, {"model.a": f32, "optimizer.a.momentum_buffer": f32}
    optimizer = (
        "it was written with another optimizer (optimizer.name, state_precision or groups): take those of its config"
    )
    assert differences(adam, sgd)[-1].startswith(optimizer)
    assert differences(adam, adam | {"optimizer.a.exp_avg": Placement((2, 3), "BF16")})[-1].startswith(optimizer)
    assert not differences(adam, sgd | {"model.b": f32})[-1].startswith("it was")
    many = {f"t{i}": f32 for i in range(6)}
    assert differences({}, many) == ["missing t0, t1, t2, t3 and 2 more"]
    scale = {"loss_scale.value": Placement((), "F32"), "loss_scale.good": Placement((), "I64")}
    assert differences({}, scale) == differences(scale, {}) == [], "a run may go on in another precision"


def test_a_run_goes_on_in_float16_and_back(tmp_path: Path) -> None:
    """The loss scale begins anew where the checkpoint has none, and is passed over where the run needs none."""
    job = alone()
    half, single = on(job, {}, "train.precision=float16"), on(job, {})
    for step, state in ((1, half), (2, single)):
        fill(state)
        saver = Saver(state, tmp_path, job)
        saver.save(step, ABOUT, wait=True)
        saver.close()
    assert complete_steps(tmp_path) == [1, 2]
    clear(single)
    restore(tmp_path / "step_0000001", manifest_of(tmp_path / "step_0000001"), single)
    assert wrong(single) == []
    clear(half)
    restore(tmp_path / "step_0000002", manifest_of(tmp_path / "step_0000002"), half)
    assert wrong(half) == ["loss_scale.value", "loss_scale.good"]
