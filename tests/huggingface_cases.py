"""Run under torchrun: weights read and written by several ranks, layout after layout; prints what failed.

    huggingface_cases.py FOLDER: FOLDER/NAME/weights are models, whose logits for FOLDER/tokens.pt are in NAME/logits.pt

Each cell loads a model, compares its logits, writes it in several files and compares tensor by tensor.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshtrain
from meshtrain import export, huggingface
from meshtrain.config import Config
from meshtrain.errors import AgreedError
from meshtrain.init import materialise
from meshtrain.layout import Layout
from meshtrain.locate import model_file
from meshtrain.mesh import Mesh
from meshtrain.parallel.apply import Options, split_over_tp, spread_over_data
from meshtrain.parts import local_part
from meshtrain.runtime import Job

LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}],
    3: [{"dp_shard": 3}, {"tp": 3}],
    4: [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 2, "tp": 2}, {"tp": 4}],
}
folder = Path(sys.argv[1])
llama = model_file("llama")


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


def built(name: str, mesh: Mesh, job: Job) -> nn.Module:
    """A model in its layout with the weights of a folder, as a run has it."""
    start = folder / name / "weights"
    text = f"model: {{weights: {start}}}\nbatch: {{global_size: 1, micro_size: 1}}\ntrain: {{steps: 1}}\n"
    (folder / f"{name}.{job.rank}.yaml").write_text(text)
    config = Config.load(str(folder / f"{name}.{job.rank}.yaml"))
    with torch.device("meta"):
        model = llama.Model(llama.Config(**config.model.keys))
    split_over_tp(model, mesh, Options())
    spread_over_data(model, mesh, Options())
    materialise(model, job.device)
    huggingface.load_weights(model, start)
    return model


def reads_its_parts_only(model: nn.Module, name: str) -> bool:
    """Loads once more, with every file counted."""
    files: list[Counted] = []
    really = huggingface._fill

    def fill(file: Any, name: str, tensor: Tensor, *, again: bool) -> None:
        files.append(Counted(file))
        really(files[-1], name, tensor, again=again)

    huggingface._fill = fill
    try:
        huggingface.load_weights(model, folder / name / "weights")
    finally:
        huggingface._fill = really
    held = sum(local_part(tensor)[0].numel() for tensor in huggingface.named_tensors(model).values())
    return sum(file.read for file in files) == held


def logits_agree(model: nn.Module, name: str) -> bool:
    with torch.no_grad():
        logits = model(torch.load(folder / "tokens.pt"))
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return torch.allclose(logits, torch.load(folder / name / "logits.pt"), rtol=0, atol=1e-5)


def exports(model: nn.Module, name: str, layout: str, job: Job) -> bool:
    """Writes in several files, over an export of another layout, and compares all with what was loaded."""
    out = folder / name / "export"
    config = llama.to_hugging_face(model.config)
    export.export(model, out, job, dtype=torch.float32, config=config, file_bytes=20_000)
    found = {key: value for path in out.glob("*.safetensors") for key, value in load_file(path).items()}
    wanted = {k: v for path in (folder / name / "weights").glob("*.safetensors") for k, v in load_file(path).items()}
    several = len(list(out.glob("*.safetensors"))) > 1
    same = found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    job.gather("comparing", layout)  # nobody writes the next one before all have looked
    return several and same


def fails_on_all(model: nn.Module, job: Job) -> bool:
    """One writer's disk is full."""
    really = export._write_all

    def full(file: Any, data: Any) -> None:
        if job.rank == job.world_size - 1:
            raise OSError(28, "No space left on device")
        really(file, data)

    export._write_all = full
    try:
        export.export(model, folder / "full", job, dtype=torch.float32, file_bytes=20_000)
    except AgreedError as error:
        said = str(error)
    finally:
        export._write_all = really
    job.gather("comparing", None)  # rank 0 has cleared up
    left = [path.name for path in folder.glob(".full*")] + [path.name for path in folder.glob("full")]
    return f"rank {job.world_size - 1}: " in said and "No space left" in said and str(folder) in said and not left


with meshtrain.start(60) as job:
    failures: list[str] = []
    checked = 0
    for sizes in LAYOUTS[job.world_size]:
        mesh = meshtrain.build_mesh(Layout(sizes))
        for name in sorted(path.parent.name for path in folder.glob("*/weights")):
            model = built(name, mesh, job)
            cell = f"{Layout(sizes)} {name} rank {job.rank}"
            failures += [] if logits_agree(model, name) else [f"{cell}: logits"]
            failures += [] if reads_its_parts_only(model, name) else [f"{cell}: reads"]
            failures += [] if exports(model, name, str(Layout(sizes)), job) else [f"{cell}: export"]
            failures += [] if logits_agree(model, name) else [f"{cell}: logits after the export"]
            checked += 1
        failures += [] if fails_on_all(model, job) else [f"{Layout(sizes)} rank {job.rank}: failing"]
    print(json.dumps({"failures": failures, "checked": checked}) + "\n", end="", flush=True)
