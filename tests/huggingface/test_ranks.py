"""Weights in and out on several ranks: each reads the parts that it holds, and together they write
what was read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshtrain
from meshtrain.checkpoint import weights as checkpoint_weights
from meshtrain.config import Config
from meshtrain.errors import DiskError
from meshtrain.huggingface import export as export_folder
from meshtrain.huggingface import load as huggingface
from meshtrain.huggingface.load import named_tensors
from meshtrain.job.locate import model_file
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.modeling.build import build_model
from meshtrain.parallel.sharding import local_part
from meshtrain.pipeline.engine import Pipeline
from meshtrain.run.weights_export import export
from tests.checkpoint.by_hand import write_checkpoint
from tests.huggingface.models import (
    TOKENS,
    assert_loads,
    logits,
    run_config,
    stored,
    transformers_model,
)
from tests.ranks import made_once, row

DENSE = (  # (layout, schedule)
    ({"dp_shard": 2}, ""),
    ({"dp_replicate": 2}, ""),
    ({"tp": 2}, ""),
    ({"pp": 2}, "1f1b"),
    ({"pp": 2}, "zbv"),
    ({"dp_shard": 3}, ""),
    ({"tp": 3}, ""),
    ({"dp_shard": 2, "tp": 2}, ""),
    ({"dp_replicate": 2, "dp_shard": 2}, ""),
    ({"dp_replicate": 2, "tp": 2}, ""),
    ({"tp": 4}, ""),
    ({"pp": 4}, "1f1b"),
    ({"pp": 2, "tp": 2}, "zbv"),
    ({"pp": 2, "dp_shard": 2}, "1f1b"),
    ({"dp_replicate": 2, "pp": 2}, "1f1b"),
)
OF_EXPERTS = (  # (layout, schedule, expert_parallel)
    ({"dp_shard": 2}, "", 1),
    ({"dp_replicate": 2}, "", 2),
    ({"tp": 2}, "", 2),
    ({"pp": 2}, "zbv", 1),
    ({"dp_shard": 4}, "", 2),
    ({"dp_shard": 4}, "", 4),
    ({"dp_replicate": 2, "dp_shard": 2}, "", 2),
    ({"dp_shard": 2, "tp": 2}, "", 2),
    ({"pp": 2, "dp_shard": 2}, "1f1b", 2),
)


def parameter(layout: Layout, schedule: str, name: str) -> Any:
    identity = f"{layout} ep {layout.experts} {schedule} {name}"
    # the sizes of the third model divide least
    slow = layout.world_size == 4 and name in (
        "llama3",
        "gqa",
    )
    return row(layout.world_size, layout, schedule, name, name=identity, slow=slow)


def dense(layout: Layout) -> tuple[str, ...]:
    """Models without experts that a layout can split."""
    return ("six",) if layout.world_size == 3 else ("llama3", "gqa", "uneven")


CELLS = [
    *(
        parameter(Layout(sizes), schedule, name)
        for sizes, schedule in DENSE
        for name in dense(Layout(sizes))
    ),
    *(
        parameter(Layout(sizes).with_experts(ranks), schedule, "qwen3_moe")
        for sizes, schedule, ranks in OF_EXPERTS
    ),
]


def folder_of(name: str, job: Job, session_path: Path) -> Path:
    """A model of transformers in `weights`, its logits, and a checkpoint of the same weights."""

    def write(folder: Path) -> None:
        theirs = transformers_model(name)
        theirs.save_pretrained(folder / "weights", max_shard_size="50KB")
        torch.save(logits(theirs), folder / "logits.pt")
        config = run_config(folder / "weights")
        write_checkpoint(
            folder / "checkpoints",
            {f"model.{names[0]}": tensor for names, tensor in named_tensors(theirs).items()},
            sizes={"dp_shard": 2, "tp": 5},
            cuts=lambda name, tensor: (("tp", tensor.dim() - 1), ("dp_shard", 0)),
            config={"model": {"name": config.model.name, **config.model.keys}},
        )

    folder = session_path / "of transformers" / name
    if job.rank == 0:
        made_once(folder, write)
    dist.barrier()
    return folder


def config_of(folder: Path, schedule: str, origin: str = "weights") -> Config:
    """A run that starts from the weights of a folder."""
    keys = ["batch.global_size=8", "batch.micro_size=1", f"pipeline.schedule={schedule or '1f1b'}"]
    return Config.load(str(folder / "mine.yaml"), [*keys, f"model.weights={folder / origin}"])


def stages(model: nn.Module, mesh: Mesh) -> list[nn.Module]:
    """Of this rank; without a pipeline the model itself."""
    if not isinstance(model, Pipeline):
        return [model]
    return [model.stage(number) for number in model.schedule.stages_of(mesh.index("pp"))]


def values_to_read(model: nn.Module, mesh: Mesh) -> int:
    """The number of values in this rank's parts of all stored tensors."""
    tensors = [item for stage in stages(model, mesh) for item in named_tensors(stage).items()]
    return sum(
        local_part(tensor)[0].numel()
        for (name, *_), tensor in tensors
        if not name.endswith(".loads")
    )


class Counted:
    """Stands in for a safetensors file, and adds the number of values that are read from it to
    `read`."""

    def __init__(self, file: Any, read: list[int]) -> None:
        self.file, self.read = file, read

    def get_slice(self, name: str) -> "Counted":
        return Counted(self.file.get_slice(name), self.read)

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        values = self.file[part]
        self.read.append(values.numel())
        return values


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of values that this rank reads from files of weights and from checkpoints."""
    counts: list[int] = []
    safe_open, read_part = huggingface.safe_open, checkpoint_weights.read_part

    @contextmanager
    def counted_open(*arguments: Any, **options: Any) -> Iterator[Counted]:
        with safe_open(*arguments, **options) as file:
            yield Counted(file, counts)

    def counted_part(*arguments: Any) -> Tensor:
        values = read_part(*arguments)
        counts.append(values.numel())
        return values

    monkeypatch.setattr(huggingface, "safe_open", counted_open)
    monkeypatch.setattr(checkpoint_weights, "read_part", counted_part)
    return counts


def assert_logits(model: nn.Module, expected: Tensor) -> None:
    # a later stage cannot tell them from its input
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        computed = model(TOKENS, positions)
    if computed is not None:  # otherwise another rank has the last stage
        computed = computed.full_tensor() if isinstance(computed, DTensor) else computed
        torch.testing.assert_close(computed, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("job", "layout", "schedule", "name"), CELLS, indirect=["job"])
def test_ranks_read_and_write_their_parts(
    job: Job,
    layout: Layout,
    schedule: str,
    name: str,
    read: list[int],
    shared_path: Path,
    session_path: Path,
) -> None:
    folder, mesh = folder_of(name, job, session_path), meshtrain.build_mesh(layout)
    expected = torch.load(folder / "logits.pt")
    config = config_of(folder, schedule)
    model = build_model(config, mesh, job.device)
    assert sum(read) == values_to_read(model, mesh)
    assert_logits(model, expected)
    for stage in stages(model, mesh):
        for key, tensor in stage.named_parameters():
            assert ".experts." not in key or len(local_part(tensor)[0]) <= -(
                -len(tensor) // layout.experts
            )

    out, module = shared_path / "export", model_file(config.model.name)
    described = module.to_hugging_face(module.Config(**config.model.keys))
    for file_bytes in (50_000, 20_000):  # the second takes the place of the first
        export(model, out, job, mesh, dtype=torch.float32, config=described, file_bytes=file_bytes)
    assert len(list(out.glob("*.safetensors"))) > 1
    written, given = stored(out), stored(folder / "weights")
    assert written.keys() == given.keys()
    assert all(torch.equal(written[key], given[key]) for key in given)
    assert_logits(model, expected)
    if job.rank == 0:
        assert_loads(out, expected)

    read.clear()
    model = build_model(config_of(folder, schedule, "checkpoints"), mesh, job.device)
    assert sum(read) == values_to_read(model, mesh)
    assert_logits(model, expected)


@pytest.mark.parametrize(
    ("job", "layout", "schedule", "name"),
    [parameter(Layout(sizes), schedule, dense(Layout(sizes))[0]) for sizes, schedule in DENSE],
    indirect=["job"],
)
def test_an_export_fails_on_all_ranks_if_the_disk_of_one_is_full(
    job: Job,
    layout: Layout,
    schedule: str,
    name: str,
    shared_path: Path,
    session_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh, last = meshtrain.build_mesh(layout), job.world_size - 1
    model = build_model(config_of(folder_of(name, job, session_path), schedule), mesh, job.device)

    def full(file: Any, data: Any) -> None:
        raise OSError(28, "No space left on device")

    if job.rank == last:
        monkeypatch.setattr(export_folder, "write_all", full)
    with pytest.raises(DiskError, match=r"^writing the export: host .*No space left") as error:
        export(model, shared_path / "full", job, mesh, dtype=torch.float32, file_bytes=20_000)
    assert str(shared_path) in str(error.value)
    dist.barrier()  # rank 0 has cleared up
    assert list(shared_path.iterdir()) == []
