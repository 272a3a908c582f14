"""Random runs have the losses of one process, go on on another layout, and export what one process
exports.

`make fuzz SEED=1 CELLS=200` tries other runs; one that fails is made smaller there and printed as
YAML and command.
"""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from meshtrain.errors import AgreedError
from meshtrain.job.process import Job
from tests.fuzz.cells import BASE, SAVED, Cell, drawn, overrides, world_of
from tests.parity.cells import assert_same
from tests.parity.experiments import Experiment
from tests.parity.runs import train_alone, train_here
from tests.ranks import row

SEED = int(os.environ.get("FUZZ_SEED", "1"))
CELLS = int(os.environ.get("FUZZ_CELLS", "60"))
GIVEN = os.environ.get("FUZZ_CELL")  # one cell as JSON, in the place of those that are drawn
TOLERANCE = 1e-9


def parameters() -> list[Any]:
    if GIVEN is not None:
        return [row(Cell(**json.loads(GIVEN)).world, None, name="given")]
    return [row(world_of(SEED, number), number, name=f"{SEED}/{number}") for number in range(CELLS)]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "number"), parameters(), indirect=["job"])
def test_a_random_run_is_that_of_one_process(
    job: Job, number: int | None, shared_path: Path, session_path: Path
) -> None:
    cell = cell_of(job, number, shared_path)
    print(recipe(cell))  # shown if the test fails
    try:
        compare(job, cell, shared_path, session_path)
    except AgreedError as refusal:
        pytest.skip(f"refused: {refusal}")


def cell_of(job: Job, number: int | None, shared_path: Path) -> Cell:
    """Rank 0 draws, which takes a while."""
    file = shared_path / "cell.json"
    if number is None:
        return Cell(**json.loads(str(GIVEN)))
    if job.rank == 0:
        cell = drawn(SEED, number)
        file.write_text(json.dumps([cell.experiment, cell.first, cell.then]))
    dist.barrier()
    return Cell(*json.loads(file.read_text()))


def recipe(cell: Cell) -> str:
    """A config, and the commands that train it in one process and on its layouts."""
    torchrun = f"torchrun --standalone --nproc-per-node={cell.world} -m meshtrain.train cell.yaml"
    resumed = [*overrides(cell.then), f"checkpoint.resume=runs/first/checkpoints/step_{SAVED:07}"]
    return "\n".join(
        (
            f"--- cell.yaml\n{cell.to_yaml()}--- commands",
            "python -m meshtrain.train cell.yaml layout='{dp_shard: 1}' train.output=runs/alone",
            f"{torchrun} checkpoint.every={SAVED} train.output=runs/first",
            f"{torchrun} {shlex.join(key.strip() for key in resumed)} train.output=runs/then",
        )
    )


def compare(job: Job, cell: Cell, folder: Path, session_path: Path) -> None:
    keys = tuple(overrides(cell.experiment))
    experiment = Experiment("fuzz", BASE, keys, TOLERANCE)
    exported = [folder / "export_alone", folder / "export"]
    of_one_process = Experiment("fuzz", BASE, (*keys, f"train.export={exported[0]}"), TOLERANCE)
    alone = train_alone(job, of_one_process, session_path).rows

    first = train_here(
        job, experiment, [*overrides(cell.first), f"checkpoint.every={SAVED}"], folder / "first"
    ).rows
    assert_same(first, alone, TOLERANCE)

    resume = f"checkpoint.resume={folder}/first/checkpoints/step_{SAVED:07}"
    last = [*overrides(cell.then), resume, f"train.export={exported[1]}"]
    then = train_here(job, experiment, last, folder / "then").rows
    assert_same(then, alone[SAVED:], TOLERANCE)

    expected, weights = (
        {file.name: load_file(file) for file in path.glob("*.safetensors")} for path in exported
    )
    assert weights.keys() == expected.keys()
    for name, tensors in weights.items():
        assert tensors.keys() == expected[name].keys()
        for key, tensor in tensors.items():
            rounding = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
            torch.testing.assert_close(tensor, expected[name][key], rtol=rounding, atol=1e-9)

    if "train.lora" not in cell.experiment:
        # The loss of the first step is compared, before it learns anything.
        read = (*keys, f"model.weights={exported[0]}", "train.steps=1")
        from_one = train_alone(job, Experiment("fuzz", BASE, read, TOLERANCE), session_path).rows
        from_all = train_here(
            job,
            experiment,
            [*overrides(cell.first), f"model.weights={exported[1]}", "train.steps=1"],
            folder / "read",
        )
        assert from_all.rows[0]["loss"] == pytest.approx(from_one[0]["loss"], rel=1e-6)
        assert from_all.rows[0]["loss"] != first[0]["loss"], "the weights were read"
