"""The parity table over NCCL, on machines with GPUs. Several ranks share a single GPU if NCCL
allows that: NCCL_MULTI_RANK_GPU_ENABLE=1, from NCCL 2.30."""

import os
from pathlib import Path

import pytest
import torch

from meshtrain.metrics.logger import read
from tests.parity.cells import assert_same, train
from tests.parity.experiments import Experiment, experiments

SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a GPU")]

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS)))),
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
NAMES = ("float32", "float64", "ragged", "tied, masked, recomputed", "selective", "digits")
# experiments whose model has a tp_plan and a cp_plan
SPLIT = tuple(name for name in NAMES if name != "digits")
LAYOUTS = {
    2: {
        "{dp_replicate: 2}": NAMES,
        "{dp_shard: 2}": NAMES,
        "{tp: 2}": SPLIT,
        "{cp: 2}": SPLIT,
        "{pp: 2}": NAMES,
    },
    4: {
        "{dp_replicate: 4}": NAMES,
        "{dp_shard: 4}": NAMES,
        "{dp_replicate: 2, dp_shard: 2}": NAMES,
        "{dp_shard: 2, tp: 2}": SPLIT,
        "{cp: 4}": SPLIT,
        "{cp: 2, tp: 2}": SPLIT,
        "{pp: 2, dp_shard: 2}": SPLIT,
        "{pp: 2, tp: 2}": SPLIT,
    },
}
CELLS = [
    (world, layout, name)
    for world, layouts in LAYOUTS.items()
    for layout, names in layouts.items()
    for name in names
]
# In 16 bits each product is rounded: layouts then also differ by the order of sums in 16 bits, not
# only in float32.
SIXTEEN_BITS = 2e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity_gpu")


@pytest.fixture(scope="module")
def known(folder: Path) -> dict[str, Experiment]:
    return experiments(folder)


@pytest.fixture(scope="module")
def references(folder: Path, known: dict[str, Experiment]) -> dict[str, list[dict]]:
    """Each experiment on one GPU."""
    train(
        folder,
        1,
        [(known[name], f"one/{name}", "{dp_shard: -1}", ()) for name in NAMES],
        ENVIRONMENT,
    )
    return {name: read(folder / f"one/{name}/metrics.jsonl") for name in NAMES}


@pytest.fixture(scope="module")
def trained(folder: Path, known: dict[str, Experiment]) -> dict[tuple, list[dict]]:
    found = {}
    for world in LAYOUTS:
        if world > GPUS and not SHARED:
            continue
        cells = [cell for cell in CELLS if cell[0] == world]
        runs = [
            (known[name], f"{world}/{i}", layout, ()) for i, (_, layout, name) in enumerate(cells)
        ]
        train(folder, world, runs, ENVIRONMENT)
        found |= {cell: read(folder / f"{world}/{i}/metrics.jsonl") for i, cell in enumerate(cells)}
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c[0]} {c[1]} {c[2]}")
def test_same_curve_as_one_gpu(
    cell: tuple,
    trained: dict[tuple, list[dict]],
    references: dict[str, list[dict]],
    known: dict[str, Experiment],
) -> None:
    if cell not in trained:
        pytest.skip(
            f"needs {cell[0]} GPUs, or one GPU and NCCL_MULTI_RANK_GPU_ENABLE=1; there are {GPUS}"
        )
    assert_same(trained[cell], references[cell[2]], known[cell[2]].tolerance)


@pytest.mark.timeout(1800)
def test_the_gpu_follows_the_cpu(
    folder: Path, known: dict[str, Experiment], references: dict[str, list[dict]]
) -> None:
    """The initial weights do not depend on the kind of device, and in float64 rounding hides no
    error."""
    train(
        folder, 1, [(known["float64"], "cpu", "{dp_shard: -1}", ())], {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert_same(references["float64"], read(folder / "cpu/metrics.jsonl"), 1e-9)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "keys",
    [
        ("train.precision=bfloat16",),
        ("train.precision=float16",),
        ("train.precision=bfloat16", "parallel.compile=true", "parallel.recompute=selective"),
        ("train.precision=bfloat16", "parallel.recompute=full", "train.deterministic=true"),
    ],
    ids=" ".join,
)
def test_sixteen_bits_stay_near(
    keys: tuple[str, ...],
    folder: Path,
    known: dict[str, Experiment],
    references: dict[str, list[dict]],
) -> None:
    where = "16/" + "-".join(keys).replace(".", "_")
    train(folder, 1, [(known["float32"], where, "{dp_shard: -1}", keys)], ENVIRONMENT)
    for row, expected in zip(
        read(folder / where / "metrics.jsonl"), references["float32"], strict=True
    ):
        assert row["loss"] == pytest.approx(expected["loss"], rel=SIXTEEN_BITS)


@pytest.mark.timeout(1800)
def test_deterministic_runs_have_the_same_bits(folder: Path, known: dict[str, Experiment]) -> None:
    keys = ("train.deterministic=true", "train.precision=bfloat16")
    runs = [(known["float32"], f"bits/{i}", "{dp_shard: -1}", keys) for i in range(2)]
    train(folder, 1, runs, ENVIRONMENT)
    first, second = (
        [(row["loss"], row["grad_norm"]) for row in read(folder / f"bits/{i}/metrics.jsonl")]
        for i in range(2)
    )
    assert first == second
