"""Checkpoints that the first edition (commit 9cfe131) wrote are read and gone on from as that edition did itself.

`first_edition/` holds a small run's config and text, checkpoints of step 4 that two layouts wrote, and `expected.json`:
what 9cfe131 got when it went on from each, on the same layout and on one process. The steps' bits depend on torch's
kernels, so they are compared to the bit on the processor and with the torch that are recorded, and to 1e-6 elsewhere.
"""

import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from meshtrain.checkpoint import load_weights
from meshtrain.checkpoint.verify import verify
from meshtrain.metrics.logger import read
from models.llama import Config, Model
from tests.launching import forked

HERE = Path(__file__).parent / "first_edition"
SAVED, STEPS = 4, 8
LAYOUTS = {"dp_shard_tp": (4, "{dp_shard: 2, tp: 2}"), "pp": (2, "{pp: 2}")}
ALONE = (1, "{dp_shard: 1}")


def processor() -> str:
    """What the bits of a step depend on besides the code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {name}"


def steps_of(folder: Path) -> list[list[float]]:
    """Loss and gradient norm of the steps of a run."""
    return [[row["loss"], row["grad_norm"]] for row in read(folder / "metrics.jsonl") if row["step"] > SAVED]


def digest(checkpoint: Path) -> str:
    """Of all bytes of a checkpoint's tensors, in the order of its files and of their names; reads safetensors only."""
    summed = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in sorted(file.keys()):
                summed.update(f"{path.name} {name}\n".encode() + file.get_tensor(name).tobytes())
    return summed.hexdigest()


def record(folder: Path) -> dict[str, Any]:
    """What `expected.json` holds, from the runs `NAME-same` and `NAME-one` in a folder."""
    recorded: dict[str, Any] = {"processor": processor()}
    for name in (f"{name}-{where}" for name in LAYOUTS for where in ("same", "one")):
        recorded[name] = {
            "steps": steps_of(folder / name),
            "digest": digest(folder / name / "checkpoints" / f"step_{STEPS:07d}"),
        }
    return recorded


@pytest.mark.parametrize("where", ["same", "one"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_goes_on_as_the_first_edition_did(name: str, where: str, tmp_path: Path) -> None:
    expected = json.loads((HERE / "expected.json").read_text())
    world, layout = LAYOUTS[name] if where == "same" else ALONE
    options = (f"data.path={HERE}/text.txt", f"data.cache={tmp_path}/cache", f"train.output={tmp_path}/run")
    checkpoint = f"checkpoint.resume={HERE}/{name}/step_{SAVED:07d}"
    train = ("-m", "meshtrain.train", f"{HERE}/small.yaml", *options, f"layout={layout}", checkpoint)
    forked(world, *train).check()
    steps, cell = steps_of(tmp_path / "run"), expected[f"{name}-{where}"]
    assert len(steps) == STEPS - SAVED
    if expected["processor"] == processor():
        assert steps == cell["steps"]
        assert digest(tmp_path / "run" / "checkpoints" / f"step_{STEPS:07d}") == cell["digest"]
    for numbers, wanted in zip(steps, cell["steps"], strict=True):
        assert numbers == pytest.approx(wanted, rel=1e-6, abs=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_intact_and_its_weights_load(name: str) -> None:
    checkpoint = HERE / name / f"step_{SAVED:07d}"
    assert verify(checkpoint) == []
    keys = yaml.safe_load((HERE / "small.yaml").read_text())["model"]
    model = Model(Config(**{key: value for key, value in keys.items() if key != "name"}))
    first = [weight.detach().clone() for weight in model.parameters()]
    load_weights(checkpoint, model)
    assert not any(torch.equal(weight, other) for weight, other in zip(model.parameters(), first, strict=True))


if __name__ == "__main__":  # as the numbers were recorded, beside runs of 9cfe131
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record(Path(sys.argv[1])).items())
    print("{\n" + ",\n".join(lines) + "\n}")
