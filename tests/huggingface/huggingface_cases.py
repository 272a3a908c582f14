"""Run under torchrun: several ranks read and write weights, layout after layout; prints what failed.

    huggingface_cases.py FOLDER, which holds models in NAME/weights, their logits for tokens.pt in NAME/logits.pt, and
    checkpoints of the same weights in NAME/checkpoints

Each cell loads a model, compares its logits, writes it in several files and compares tensor by tensor; then it loads
the checkpoint and compares again.
"""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshtrain
from meshtrain.checkpoint import weights as checkpoint_weights
from meshtrain.config import Config
from meshtrain.config.locate import model_file
from meshtrain.errors import AgreedError
from meshtrain.huggingface import export as export_folder
from meshtrain.huggingface import load as huggingface
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.modeling.build import build_model, plain_model
from meshtrain.parallel.sharding import local_part
from meshtrain.pipeline.engine import Pipeline
from meshtrain.run import weights_export as export

LAYOUTS: dict[int, list[tuple[dict[str, int], str]]] = {  # (sizes, pipeline schedule)
    2: [({"dp_shard": 2}, ""), ({"dp_replicate": 2}, ""), ({"tp": 2}, ""), ({"pp": 2}, "1f1b"), ({"pp": 2}, "zbv")],
    3: [({"dp_shard": 3}, ""), ({"tp": 3}, "")],
    4: [
        ({"dp_shard": 2, "tp": 2}, ""),
        ({"dp_replicate": 2, "dp_shard": 2}, ""),
        ({"dp_replicate": 2, "tp": 2}, ""),
        ({"tp": 4}, ""),
        ({"pp": 4}, "1f1b"),
        ({"pp": 2, "tp": 2}, "zbv"),
        ({"pp": 2, "dp_shard": 2}, "1f1b"),
        ({"dp_replicate": 2, "pp": 2}, "1f1b"),
    ],
}
OF_EXPERTS: dict[int, list[tuple[dict[str, int], str, int]]] = {  # (sizes, schedule, expert_parallel)
    2: [({"dp_shard": 2}, "", 1), ({"dp_replicate": 2}, "", 2), ({"tp": 2}, "", 2), ({"pp": 2}, "zbv", 1)],
    3: [],
    4: [
        ({"dp_shard": 4}, "", 2),
        ({"dp_shard": 4}, "", 4),
        ({"dp_replicate": 2, "dp_shard": 2}, "", 2),
        ({"dp_shard": 2, "tp": 2}, "", 2),
        ({"pp": 2, "dp_shard": 2}, "1f1b", 2),
    ],
}
folder = Path(sys.argv[1])


class Counted:
    """Stands in for a safetensors file and counts the values that are read from it."""

    def __init__(self, file: Any) -> None:
        self.file, self.read = file, 0

    def get_slice(self, name: str) -> "Counted":
        one = Counted(self.file.get_slice(name))
        one.parent = self  # type: ignore[attr-defined]
        return one

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        self.parent.read += math.prod(each.stop - each.start for each in part)  # type: ignore[attr-defined]
        return self.file[part]


def read(name: str, schedule: str, job: Job, origin: str = "weights") -> Config:
    """The config of a run that starts from the weights of a folder."""
    kind = json.loads((folder / name / "weights" / "config.json").read_text())["model_type"]
    text = f"model: {{name: {kind}, weights: {folder / name / origin}}}\nbatch: {{global_size: 8, micro_size: 1}}\n"
    text += f"train: {{steps: 1}}\ndata: {{seq_len: 32}}\npipeline: {{schedule: {schedule or '1f1b'}}}\n"
    (folder / f"{name}.{job.rank}.yaml").write_text(text)
    return Config.load(str(folder / f"{name}.{job.rank}.yaml"))


def parts(model: nn.Module, mesh: Mesh) -> list[nn.Module]:
    """The stages of this rank; without a pipeline the model itself."""
    if not isinstance(model, Pipeline):
        return [model]
    return [model.stage(number) for number in model.schedule.stages_of(mesh.index("pp"))]


def read_their_parts_only(models: list[nn.Module], whole: nn.Module, name: str) -> bool:
    """Loads again, counting the values read from every file."""
    files: list[Counted] = []
    really = huggingface.safe_open

    @contextmanager
    def counted(*arguments: Any, **options: Any) -> Iterator[Counted]:
        with really(*arguments, **options) as file:
            files.append(Counted(file))
            yield files[-1]

    huggingface.safe_open = counted
    try:
        for model in models:
            with huggingface.open_folder(folder / name / "weights") as source:
                huggingface.load_weights(model, source, whole)
    finally:
        huggingface.safe_open = really
    return sum(file.read for file in files) == values_to_read(models)


def values_to_read(models: list[nn.Module]) -> int:
    """The number of values in this rank's parts of all stored tensors."""
    tensors = [item for model in models for item in huggingface.named_tensors(model).items()]
    return sum(local_part(tensor)[0].numel() for (name, *_), tensor in tensors if not name.endswith(".loads"))


def checkpoint_read(config: Config, mesh: Mesh, job: Job) -> tuple[nn.Module, bool]:
    """The model of a checkpoint's weights, and whether this rank read exactly the parts that it holds."""
    values = 0
    really = checkpoint_weights.read_part

    def counted(*arguments: Any) -> Tensor:
        nonlocal values
        found = really(*arguments)
        values += found.numel()
        return found

    checkpoint_weights.read_part = counted
    try:
        model = build_model(config, mesh, job.device)
    finally:
        checkpoint_weights.read_part = really
    return model, values == values_to_read(parts(model, mesh))


def logits_agree(model: nn.Module, name: str) -> bool:
    tokens = torch.load(folder / "tokens.pt")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)  # a later stage cannot tell them from its input
    with torch.no_grad():
        logits = model(tokens, positions)
    if logits is None:  # another rank has the last stage
        return True
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return torch.allclose(logits, torch.load(folder / name / "logits.pt"), rtol=0, atol=1e-5)


def exports(model: nn.Module, config: Config, name: str, mesh: Mesh, job: Job) -> bool:
    """Exports to several files, replacing an export of another layout, and compares with what was loaded."""
    out = folder / name / "export"
    module = model_file(config.model.name)
    described = module.to_hugging_face(module.Config(**config.model.keys))
    export.export(model, out, job, mesh, dtype=torch.float32, config=described, file_bytes=20_000)
    found = {key: value for path in out.glob("*.safetensors") for key, value in load_file(path).items()}
    wanted = {k: v for path in (folder / name / "weights").glob("*.safetensors") for k, v in load_file(path).items()}
    several = len(list(out.glob("*.safetensors"))) > 1
    same = found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    job.gather("comparing", str(mesh.layout))  # no rank writes the next export before all have compared
    return several and same


def fails_on_all(model: nn.Module, mesh: Mesh, job: Job) -> bool:
    """Whether an export fails on all ranks, and leaves nothing, if one writer's disk is full."""
    really = export_folder.write_all

    def full(file: Any, data: Any) -> None:
        if job.rank == job.world_size - 1:
            raise OSError(28, "No space left on device")
        really(file, data)

    export_folder.write_all = full
    try:
        export.export(model, folder / "full", job, mesh, dtype=torch.float32, file_bytes=20_000)
    except AgreedError as error:
        said = str(error)
    finally:
        export_folder.write_all = really
    job.gather("comparing", None)  # rank 0 has cleared up
    left = [path.name for path in folder.glob(".full*")] + [path.name for path in folder.glob("full")]
    return f"rank {job.world_size - 1}: " in said and "No space left" in said and str(folder) in said and not left


def holds_its_experts(models: list[nn.Module], layout: Layout) -> bool:
    tensors = [tensor for model in models for name, tensor in model.named_parameters() if ".experts." in name]
    return all(len(local_part(tensor)[0]) <= -(-len(tensor) // layout.experts) for tensor in tensors)


def cells(world: int) -> Iterator[tuple[Layout, str, list[str]]]:
    """Layout, schedule, and names of models."""
    names = sorted(path.parent.name for path in folder.glob("*/weights"))
    experts = [name for name in names if name.startswith("experts")]
    for sizes, schedule in LAYOUTS[world]:
        yield Layout(sizes), schedule, [name for name in names if name not in experts]
    for sizes, schedule, ranks in OF_EXPERTS[world]:
        yield Layout(sizes).with_experts(ranks), schedule, experts


with meshtrain.start(60) as job:
    failures: list[str] = []
    checked = 0
    for layout, schedule, names in cells(job.world_size):
        mesh = meshtrain.build_mesh(layout)
        for name in names:
            config = read(name, schedule, job)
            model = build_model(config, mesh, job.device)
            cell = f"{layout} ep {layout.experts} {schedule} {name} rank {job.rank}"
            failures += [] if logits_agree(model, name) else [f"{cell}: logits"]
            once_more = read_their_parts_only(parts(model, mesh), plain_model(config), name)
            failures += [] if once_more else [f"{cell}: reads"]
            failures += [] if holds_its_experts(parts(model, mesh), layout) else [f"{cell}: experts"]
            failures += [] if exports(model, config, name, mesh, job) else [f"{cell}: export"]
            failures += [] if logits_agree(model, name) else [f"{cell}: logits after the export"]
            model, once = checkpoint_read(read(name, schedule, job, "checkpoints"), mesh, job)
            failures += [] if once else [f"{cell}: reads of the checkpoint"]
            failures += [] if logits_agree(model, name) else [f"{cell}: logits from the checkpoint"]
            checked += 1
        failures += [] if fails_on_all(model, mesh, job) else [f"{layout} rank {job.rank}: failing"]
    print(json.dumps({"failures": failures, "checked": checked}) + "\n", end="", flush=True)
