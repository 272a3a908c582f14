"""The frozen second model of a run: its outputs on a mesh are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshtrain.config import Config
from meshtrain.data.batch import Batch
from meshtrain.errors import InputError
from meshtrain.job.process import Job
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.modeling.build import build_model
from meshtrain.modeling.reference import build_reference, check_reference, reference_config
from meshtrain.pipeline.engine import Pipeline
from meshtrain.run.setup import context_parallel
from tests.comparing import ALONE, CPU, same
from tests.parity.experiments import MODELS, QUICKSTART, SMALL
from tests.ranks import row

KEYS = (*SMALL, "train.precision=float64", "model.tie_word_embeddings=true", "data.seq_len=16")


def config_with(folder: Path, world_size: int, *keys: str) -> Config:
    own = f"model.name={MODELS / 'with_reference.py'}"  # a Llama whose loss takes a reference
    every = (*KEYS, own, f"train.reference={{weights: {folder}}}", *keys)
    return Config.load(QUICKSTART, every, world_size=world_size)


def write_weights(folder: Path) -> None:
    """Those of another seed."""
    config = Config.load(QUICKSTART, (*KEYS, "train.seed=7"), world_size=1)
    model = build_model(config, ALONE, CPU)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")


def batches(vocabulary: int = 256) -> list[Batch]:
    """Two microbatches of two samples."""
    found = []
    for seed in (1, 2):
        draws = torch.Generator().manual_seed(seed)
        tokens = torch.randint(vocabulary, (2, 16), generator=draws)
        positions = torch.arange(16).expand(2, -1).contiguous()
        batch = Batch.of((tokens, positions, None), tokens)
        found.append(batch)
    return found


def whole(output: Any) -> Tensor:
    return output.full_tensor() if isinstance(output, DTensor) else output


@pytest.mark.parametrize(
    ("job", "keys"),
    [
        row(2, ["layout={dp_replicate: 2}"], name="replicas"),
        row(2, ["layout={dp_shard: 2}", "train.lora={rank: 2}"], name="shards-beside-adapters"),
        row(2, ["layout={tp: 2}"], name="tp"),
        row(2, ["layout={pp: 2}", "train.freeze=['*mlp*']"], name="pp"),
        row(4, ["layout={pp: 2, dp_shard: 2}", "pipeline.schedule=zbv"], name="pp-and-shards"),
    ],
    indirect=["job"],
)
def test_outputs_are_those_of_one_process(job: Job, keys: list[str], shared_path: Path) -> None:
    if job.rank == 0:
        write_weights(shared_path)
    dist.barrier()
    config = config_with(shared_path, job.world_size, *keys)
    assert config.resolved is not None
    mesh = build_mesh(config.resolved)
    reference = build_reference(config, mesh, CPU)
    assert reference is not None

    alone = build_reference(config_with(shared_path, 1), ALONE, CPU)
    assert alone is not None
    inputs = [batch.with_context() for batch in batches()]
    expected = alone.outputs(inputs)
    for _ in range(2):
        outputs = reference.outputs(inputs)
        has_outputs = not isinstance(reference.model, Pipeline) or reference.model.ends[1]
        assert len(outputs) == (2 if has_outputs else 0)
        for output, other in zip(outputs, expected, strict=False):
            assert not output.requires_grad
            same(whole(output), other)


@pytest.mark.ranks(2)
def test_each_rank_of_cp_gets_its_part(job: Job, shared_path: Path) -> None:
    if job.rank == 0:
        write_weights(shared_path)
    dist.barrier()
    config = config_with(shared_path, 2, "layout={cp: 2}")
    assert config.resolved is not None
    mesh = build_mesh(config.resolved)
    reference = build_reference(config, mesh, CPU)
    alone = build_reference(config_with(shared_path, 1), ALONE, CPU)
    assert reference is not None
    assert alone is not None

    split = context_parallel(config, mesh)
    [part] = reference.outputs([split.shard(batches()[0])])
    [expected] = alone.outputs([batches()[0].with_context()])
    own = split.shard(batches()[0]).tensors["positions"]
    assert isinstance(own, Tensor)
    same(part, expected[:, own[0]])


def test_it_is_frozen_drops_nothing_and_keeps_the_weights_of_its_files(tmp_path: Path) -> None:
    write_weights(tmp_path)
    config = config_with(tmp_path, 1, "train.lora={rank: 2, dropout: 0.5}")
    reference = build_reference(config, ALONE, CPU)
    assert reference is not None
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())
    assert not any(module.training for module in reference.model.modules())

    own = Config.load(QUICKSTART, (*KEYS, "train.seed=7"), world_size=1)
    expected = dict(build_model(own, ALONE, CPU).named_parameters())
    found = dict(reference.model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name])


@pytest.mark.ranks(2)
def test_nothing_stays_gathered(job: Job, shared_path: Path) -> None:
    """Between its forwards a rank holds its shards only."""
    if job.rank == 0:
        write_weights(shared_path)
    dist.barrier()
    mesh: Mesh = build_mesh(config_with(shared_path, 2, "layout={dp_shard: 2}").resolved)  # type: ignore[arg-type]
    reference = build_reference(config_with(shared_path, 2, "layout={dp_shard: 2}"), mesh, CPU)
    assert reference is not None
    reference.outputs([batch.with_context() for batch in batches()])
    assert all(isinstance(parameter, DTensor) for parameter in reference.model.parameters())


def test_a_run_without_one(tmp_path: Path) -> None:
    config = Config.load(QUICKSTART, KEYS, world_size=1)
    assert reference_config(config) is None
    assert build_reference(config, ALONE, CPU) is None
    check_reference(config)


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    write_weights(tmp_path)
    check_reference(config_with(tmp_path, 1))
    other = config_with(tmp_path, 1, "model.intermediate_size=120")
    with pytest.raises(InputError, match="other shapes"):
        check_reference(other)


def test_adapters_are_refused(tmp_path: Path) -> None:
    config = Config.load(QUICKSTART, (*KEYS, "train.lora={rank: 2}"), world_size=1)
    model = build_model(config, ALONE, CPU)
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"train\.reference\.weights: .* holds adapters"):
        check_reference(config_with(tmp_path, 1))
