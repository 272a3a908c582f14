"""What one layout has saved, others load: the same bits, and the same losses from there on. Each goes on from two
others, and two go on from each; that every one loads what every other has written is in test_load.py."""

from pathlib import Path

import pytest

from meshtrain.checkpoint.diff import diff
from meshtrain.checkpoint.directory import name_of, open_manifest
from meshtrain.metrics.logger import read
from tests.checkpoint.going_on import Case, run_cases
from tests.parity.experiments import QUICKSTART, SMALL

SAVED, STEPS = 2, 4  # the step that is loaded, and that of the end
LAYOUTS = {
    "one process": "{dp_shard: 1}",
    "DDP": "{dp_replicate: 4}",
    "FSDP": "{dp_shard: 4}",
    "HSDP": "{dp_replicate: 2, dp_shard: 2}",
    "tp": "{tp: 4}",
    "pp": "{pp: 4}",
    "dp_shard x tp": "{dp_shard: 2, tp: 2}",
    "pp x tp x dp_shard": "{pp: 2, tp: 2, dp_shard: 2}",
    "cp": "{cp: 4}",
}
WORLDS = {1: ["one process"], 8: ["pp x tp x dp_shard"]}
WORLDS[4] = [name for name in LAYOUTS if name not in (*WORLDS[1], *WORLDS[8])]
NAMES = list(LAYOUTS)
CELLS = [(saved, NAMES[(i + apart) % len(NAMES)]) for i, saved in enumerate(NAMES) for apart in (1, 4)]
MICRO = {"tp": 8, "dp_shard x tp": 4, "cp": 8}  # one microbatch where each costs many exchanges
# Nothing divides, the learning rate does not depend on how long the run is, and AdamW's moments are large.
MODEL = (
    *SMALL,
    "model.vocab_size=259",
    "model.intermediate_size=109",
    "data.seq_len=16",
    "data.validation=0",
    "batch.global_size=8",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=2",
    f"checkpoint.every={SAVED}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on every layout, each with a checkpoint in the middle, and then from each of these on two others: a run that
    ends where the checkpoint stands, which saves what it has loaded, and one that goes on."""
    folder = tmp_path_factory.mktemp("matrix")

    def case(layout: str, where: str, steps: int, *more: str) -> Case:
        own = (f"layout={LAYOUTS[layout]}", f"batch.micro_size={MICRO.get(layout, 2)}", f"train.steps={steps}")
        paths = (f"data.cache={folder / 'cache'}", f"train.output={folder / where}")
        return Case(QUICKSTART, (*MODEL, *own, *paths, *more))

    first = {name: [case(name, name, STEPS)] for name in LAYOUTS}
    then: dict[str, list[Case]] = {name: [] for name in LAYOUTS}
    for saved, loaded in CELLS:
        resume = f"checkpoint.resume={checkpoint(folder, saved)}"
        then[loaded].append(case(loaded, f"{saved} to {loaded}", SAVED, resume))
        then[loaded].append(case(loaded, f"{saved} on {loaded}", STEPS, resume))
    for cases in (first, then):
        for world, layouts in WORLDS.items():
            results, printed = run_cases(world, [case for name in layouts for case in cases[name]], folder)
            assert all(result == {"status": 0} for result in results), printed
    return folder


def checkpoint(folder: Path, run: str, step: int = SAVED) -> Path:
    return folder / run / "checkpoints" / name_of(step)


@pytest.mark.slow
@pytest.mark.timeout(2000)  # the first waits for all jobs
@pytest.mark.parametrize(("saved", "loaded"), CELLS, ids=lambda name: name)
def test_another_layout_goes_on(saved: str, loaded: str, folder: Path) -> None:
    there, here = checkpoint(folder, saved), checkpoint(folder, f"{saved} to {loaded}")
    manifest, _ = open_manifest(here)
    assert str(manifest.layout) == LAYOUTS[loaded]
    assert any(name.startswith("optimizer.") and name.endswith(".exp_avg_sq") for name in manifest.tensors)
    difference = diff(there, here)
    assert difference.same, difference
    assert difference.compared == len(manifest.tensors)
    expected, rows = (read(folder / name / "metrics.jsonl") for name in (saved, f"{saved} on {loaded}"))
    assert [row["step"] for row in rows] == list(range(SAVED + 1, STEPS + 1))
    for row, wanted in zip(rows, expected[SAVED:], strict=True):
        assert row["samples_digest"] == wanted["samples_digest"]
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-5, abs=0), f"step {row['step']}: {name}"


@pytest.mark.slow
def test_the_steps_move_the_model(folder: Path) -> None:
    """States that hardly change would be the same wherever they come from."""
    for layout in LAYOUTS:
        first, last = (checkpoint(folder, layout, step) for step in (SAVED, STEPS))
        assert len(diff(first, last).tensors) == len(open_manifest(first)[0].tensors)
    rows = read(folder / "one process" / "metrics.jsonl")
    assert rows[-1]["loss"] < 0.95 * rows[0]["loss"]
