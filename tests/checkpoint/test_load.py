"""Loading onto any layout, to the bit; what does not fit is named before anything is read (damage:
test_faults.py)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshtrain.checkpoint import load
from meshtrain.checkpoint.directory import name_of
from meshtrain.checkpoint.load import differences
from meshtrain.checkpoint.manifest import file_of
from meshtrain.checkpoint.placement import Placement
from meshtrain.checkpoint.shard_file import Shard
from meshtrain.checkpoint.state import LocalShard, State
from meshtrain.checkpoint.verify import verify
from meshtrain.config.schema import OptimizerSection
from meshtrain.errors import InputError
from meshtrain.experts import Experts
from meshtrain.huggingface.safetensors import Entry
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel.expert import apply_expert_parallel
from meshtrain.parallel.fsdp import apply_fsdp
from meshtrain.parallel.parallelize import ParallelOptions
from meshtrain.parallel.sharding import shape_of
from tests.checkpoint.by_hand import write_checkpoint
from tests.checkpoint.known import OF_4, alone, check_loaded, clear, fill, on, restore, save, wrong
from tests.comparing import same


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_every_layout_loads_what_every_other_has_written(job: Job, shared_path: Path) -> None:
    """Bit for bit; and so does one process."""
    states = {kind: on(job, layout, kind=kind) for kind, layout in OF_4.items()}
    checkpoints = []
    for kind, state in states.items():
        fill(state)
        checkpoints.append(save(state, job, shared_path / kind))
    one = on(alone(), {})
    if job.rank == 0:
        fill(one)
        save(one, alone(), shared_path / "one", in_background=False)
    job.gather("saving", None)
    checkpoints.append(shared_path / "one" / name_of(4))
    for checkpoint in checkpoints:
        for state in (*states.values(), one):
            check_loaded(checkpoint, state)
        assert not verify(checkpoint)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["HSDP", "V", "pp x tp"])
def test_files_have_the_same_bytes_without_a_copy_in_host_memory(
    job: Job, shared_path: Path, kind: str
) -> None:
    state = on(job, OF_4[kind], kind=kind)
    fill(state)
    files = []
    for in_background in (True, False):
        checkpoint = save(state, job, shared_path / str(in_background), in_background=in_background)
        files.append((checkpoint / file_of(job.rank)).read_bytes())
    assert files[0] == files[1]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", OF_4)
def test_all_ranks_together_read_each_byte_once(
    job: Job, shared_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many copies the layout has."""
    written = on(job, OF_4["DDP"])
    fill(written)
    checkpoint = save(written, job, shared_path)
    read, counted = Shard.read_bytes, []

    def counting(shard: Shard, name: str, begin: int, into: memoryview) -> None:
        counted.append(len(into))
        read(shard, name, begin, into)

    monkeypatch.setattr(Shard, "read_bytes", counting)
    state = on(job, OF_4[kind], kind=kind)
    check_loaded(checkpoint, state)
    total = sum(job.gather("counting", sum(counted)))
    size = sum(
        Entry(name, tensor.dtype, tensor.shape).nbytes for name, tensor in state.placements.items()
    )
    assert total == size or ("tp" in kind and total > size), (
        "ranks read whole rows to get their columns"
    )


# Sharded over axes that the layout does not name --------------------------------------------------

DERIVED = {  # (sizes, expert_parallel)
    "dp_shard x cp": ({"dp_shard": 2, "cp": 2}, 1),
    "cp x dp_shard": ({"cp": 2, "dp_shard": 2}, 1),
    "HSDP over cp": ({"dp_replicate": 2, "cp": 2}, 1),
    "cp": ({"cp": 4}, 1),
    "FSDP": ({"dp_shard": 4}, 1),
    "DDP": ({"dp_replicate": 4}, 1),
    "experts, FSDP": ({"dp_shard": 4}, 2),
    "experts over FSDP": ({"dp_shard": 4}, 4),
    "experts, HSDP over cp": ({"dp_replicate": 2, "cp": 2}, 2),
    "experts over DDP": ({"dp_replicate": 4}, 4),
}


def with_experts(job: Job, kind: str) -> State:
    """The state of a model with experts, which holds each element as often as it should."""
    sizes, expert_parallel = DERIVED[kind]
    layout = Layout(sizes).with_experts(expert_parallel)
    mesh = build_mesh(layout, "cpu")
    torch.manual_seed(0)
    # 5 on 4 ranks are 2, 2, 1 and 0
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 11), Experts(5, 3, 2))
    squares = sum(parameter.detach().double().square().sum() for parameter in model.parameters())
    apply_expert_parallel(model, mesh, ParallelOptions(ep_plan={"2": "ep_dispatch_experts"}))
    if layout.size("fsdp") > 1:
        apply_fsdp(model, [model], mesh)
    optimizer = Optimizer(model, OptimizerSection(), mesh, 10)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    same(mesh.sum(optimizer.squared_norm()), squares, kind)
    optimizer.zero_grad()
    return State(model, optimizer, mesh, job)


@pytest.mark.ranks(4)
def test_parameters_that_are_sharded_over_a_derived_axis(job: Job, shared_path: Path) -> None:
    """Files name it, each rank writes its part once, and any other layout reads it."""
    states = {kind: with_experts(job, kind) for kind in DERIVED}
    checkpoints = []
    for kind, state in states.items():
        layout = state.layout
        cuts = {name: placement.cuts for name, placement in state.placements.items()}
        dense = {cut for name, cut in cuts.items() if "step" not in name and "_proj" not in name}
        assert dense == {((layout.mesh_dims[-1], 0),) if layout.size("fsdp") > 1 else ()}, kind
        if layout.experts > 1:
            expected = (("ep", 0), ("efsdp", 0)) if layout.size("efsdp") > 1 else (("ep", 0),)
            assert {cuts["model.2.gate_up_proj"], cuts["model.2.down_proj"]} == {expected}, kind
        fill(state)
        checkpoints.append(save(state, job, shared_path / kind))
    for checkpoint in checkpoints:
        for state in states.values():
            check_loaded(checkpoint, state)


# Parts of tensors ---------------------------------------------------------------------------------


def part_of(tensors: dict[str, torch.Tensor], wanted: dict[str, tuple[slice, ...]]) -> Any:
    """A state that wants these parts of these tensors."""
    placements = {name: Placement(tuple(one.shape), "F32") for name, one in tensors.items()}
    shards = []
    for name, part in wanted.items():
        target = torch.zeros(shape_of(part))
        shards.append(LocalShard(name, placements[name], part, True, lambda target=target: target))
    return SimpleNamespace(
        placements=placements,
        shards=shards,
        loaded=lambda: None,
        layout=Layout({}),
        mesh=SimpleNamespace(rank=0),
    )


@pytest.mark.parametrize("chunk", [1, 700, 2**25])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, dim: int
) -> None:
    """Rows, columns and both, of pieces that were cut otherwise, read in one go or row by row."""
    monkeypatch.setattr(load, "CHUNK", chunk)
    x = torch.randn(50, 30)
    checkpoint = write_checkpoint(
        tmp_path,
        {"x": x},
        sizes={"dp_replicate": 2, "tp": 3},
        cuts=lambda name, tensor: (("tp", dim),),
    )
    for part in (
        (slice(0, 50), slice(0, 30)),
        (slice(7, 31), slice(0, 30)),
        (slice(3, 49), slice(4, 21)),
    ):
        state = part_of({"x": x}, {"x": part})
        restore(checkpoint, state)
        assert torch.equal(state.shards[0].local, x[part]), part


def test_a_part_is_read_without_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 MiB a quarter of the rows: no more bytes are read than these and the rest of the blocks
    at their ends."""
    x = torch.randn(2**13, 2**10)
    checkpoint = write_checkpoint(tmp_path, {"x": x})
    read, counted = Shard._read, []
    monkeypatch.setattr(
        Shard, "_read", lambda *given: (counted.append(len(given[2])), read(*given))[1]
    )
    state = part_of({"x": x}, {"x": (slice(1000, 1000 + 2**11), slice(0, 2**10))})
    restore(checkpoint, state)
    assert torch.equal(state.shards[0].local, x[1000 : 1000 + 2**11])
    assert 2**23 < sum(counted) <= 2**23 + 2 * 2**22 + 10_000


def test_what_does_not_fit_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = alone()
    state = on(job, {})
    fill(state)
    checkpoint = save(state, job, tmp_path)
    other = on(
        job, {}, "model.vocab_size=44", "model.num_hidden_layers=5", "train.precision=float64"
    )
    monkeypatch.setattr(Shard, "__init__", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(InputError) as refused:
        restore(checkpoint, other)
    problem = str(refused.value)
    assert problem.startswith(
        f"{checkpoint} does not fit the model: the model has no "
        "model.model.layers.5.input_layernorm"
    )
    assert (
        "other shapes: model.model.embed_tokens.weight (there [42, 24], the model's [44, 24])"
        in problem
    )
    assert "other types: model.model.embed_tokens.weight (there F32, the model's F64)" in problem


def test_differences_are_told_in_lists() -> None:
    f32, f64 = Placement((2, 3), "F32"), Placement((2, 3), "F64")
    assert differences({"a": f32}, {"a": Placement((2, 3), "F32", (("tp", 0),), (1,))}) == [], (
        "layouts may differ"
    )
    assert differences({"a": f32}, {"a": f64}) == ["other types: a (there F32, the model's F64)"]
    assert differences({"a": f32}, {}) == ["the model has no a"]
    adam, sgd = (
        {"model.a": f32, "optimizer.a.exp_avg": f32},
        {"model.a": f32, "optimizer.a.momentum_buffer": f32},
    )
    optimizer = (
        "it was written with another optimizer (optimizer.name, state_precision or groups): take "
        "those of its config"
    )
    assert differences(adam, sgd)[-1].startswith(optimizer)
    assert differences(adam, adam | {"optimizer.a.exp_avg": Placement((2, 3), "BF16")})[
        -1
    ].startswith(optimizer)
    assert not differences(adam, sgd | {"model.b": f32})[-1].startswith("it was")
    many = {f"t{i}": f32 for i in range(6)}
    assert differences({}, many) == ["missing t0, t1, t2, t3 and 2 more"]
    scale = {"loss_scale.value": Placement((), "F32"), "loss_scale.good": Placement((), "I64")}
    assert differences({}, scale) == differences(scale, {}) == [], (
        "a run may go on in another precision"
    )


def test_a_run_goes_on_in_float16_and_back(tmp_path: Path) -> None:
    """The loss scale begins anew where the checkpoint has none, and is passed over where the run
    needs none."""
    job = alone()
    half, single = on(job, {}, "train.precision=float16"), on(job, {})
    fill(half)
    fill(single)
    of_half, of_single = save(half, job, tmp_path, 1), save(single, job, tmp_path, 2)
    check_loaded(of_half, single)
    clear(half)
    restore(of_single, half)
    assert wrong(half) == ["loss_scale.value", "loss_scale.good"]
