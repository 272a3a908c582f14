"""Checkpoints that the first edition (commit 9cfe131) wrote are read and gone on from as that
edition did itself.

`first_edition/` holds a small run's config and text, checkpoints of step 4 that two layouts wrote,
and `expected.json`: what a run gets that goes on from each, on the same layout and on one process.
What is loaded has the same bits. The numbers were 9cfe131's own, to 1e-6 (its steps have since been
computed in another order: the loss a chunk at a time, clipping in AdamW's kernel), until the
learning rates of steps 5 to 8 changed: the schedule no longer ends at 0.
"""

import json
from pathlib import Path

import pytest
import torch
import yaml

from meshtrain.checkpoint import load_weights
from meshtrain.checkpoint.verify import verify
from meshtrain.metrics.logger import read
from models.llama import Config, Model
from tests.checkpoint.by_hand import differing_tensors, tensors_of
from tests.launching import forked

HERE = Path(__file__).parent / "first_edition"
SAVED, STEPS = 4, 8
LAYOUTS = {"dp_shard_tp": (4, "{dp_shard: 2, tp: 2}"), "pp": (2, "{pp: 2}")}
ALONE = (1, "{dp_shard: 1}")


def steps_of(folder: Path) -> list[list[float]]:
    """Loss and gradient norm of the steps of a run."""
    return [
        [row["loss"], row["grad_norm"]]
        for row in read(folder / "metrics.jsonl")
        if row["step"] > SAVED
    ]


def go_on(name: str, where: str, folder: Path, *options: str) -> Path:
    """The folder of a run that goes on from the checkpoint."""
    world, layout = LAYOUTS[name] if where == "same" else ALONE
    paths = (
        f"data.path={HERE}/text.txt",
        f"data.cache={folder}/cache",
        f"train.output={folder}/run",
    )
    checkpoint = f"checkpoint.resume={HERE}/{name}/step_{SAVED:07d}"
    train = (
        "-m",
        "meshtrain.train",
        f"{HERE}/small.yaml",
        *paths,
        f"layout={layout}",
        checkpoint,
        *options,
    )
    forked(world, *train).check()
    return folder / "run"


@pytest.mark.parametrize("where", ["same", pytest.param("one", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_goes_on_as_the_first_edition_did(name: str, where: str, tmp_path: Path) -> None:
    expected = json.loads((HERE / "expected.json").read_text())
    steps, cell = steps_of(go_on(name, where, tmp_path)), expected[f"{name}-{where}"]
    assert len(steps) == STEPS - SAVED
    for numbers, wanted in zip(steps, cell["steps"], strict=True):
        assert numbers == pytest.approx(wanted, rel=1e-6, abs=0)


@pytest.mark.parametrize("where", ["same", pytest.param("one", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_its_state_is_loaded_to_the_bit(name: str, where: str, tmp_path: Path) -> None:
    """A run that ends where the checkpoint stands saves what it has loaded."""
    folder = go_on(name, where, tmp_path, f"train.steps={SAVED}")
    number = f"step_{SAVED:07d}"
    written, saved = HERE / name / number, folder / "checkpoints" / number
    assert len(tensors_of(written)) > 50
    assert differing_tensors(written, saved) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_intact_and_its_weights_load(name: str) -> None:
    checkpoint = HERE / name / f"step_{SAVED:07d}"
    assert verify(checkpoint) == []
    keys = yaml.safe_load((HERE / "small.yaml").read_text())["model"]
    model = Model(Config(**{key: value for key, value in keys.items() if key != "name"}))
    first = [weight.detach().clone() for weight in model.parameters()]
    load_weights(checkpoint, model)
    assert not any(
        torch.equal(weight, other) for weight, other in zip(model.parameters(), first, strict=True)
    )
