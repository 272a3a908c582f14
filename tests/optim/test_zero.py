"""ZeRO-1: what a rank keeps and sends, and checkpoints. That layouts agree is in the parity
table."""

import math
from pathlib import Path

import pytest

from meshtrain.checkpoint.directory import find_checkpoint, read_manifest
from meshtrain.config import Config
from meshtrain.config.model_spec import model_spec
from meshtrain.config.schema import OptimizerSection
from meshtrain.foresight.parameters import held_by_ranks, parameter_specs
from meshtrain.layout import Layout
from meshtrain.metrics.logger import read
from meshtrain.parallel.sharding import Cut, ParameterSpec, optimizer_shard
from tests.launching import Finished, forked
from tests.parity.experiments import QUICKSTART, SMALL

SHARED = ("layout={dp_replicate: 2}", "parallel.shard_optimizer=true")
EXACT = (
    *SMALL,
    "train.precision=float64",
    "optimizer.schedule=constant",
    "model.intermediate_size=109",
)
ROUNDED = "optimizer.state_precision=bfloat16"


def train(folder: Path, world: int, steps: int, *overrides: str) -> Finished:
    keys = [
        *EXACT,
        f"train.steps={steps}",
        f"train.output={folder}",
        "checkpoint.every=3",
        *overrides,
    ]
    return forked(world, "-m", "meshtrain.train", QUICKSTART, *keys)


def numbers(folder: Path) -> list[float]:
    return [row[name] for row in read(folder / "metrics.jsonl") for name in ("loss", "grad_norm")]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_it_goes_on_to_the_bit_and_on_other_layouts(tmp_path: Path) -> None:
    """With states in bfloat16, whose rounding is a function of an element's place in the whole; in
    the other layout both stages hold the tied weight."""
    tied = "model.tie_word_embeddings=true"
    one, straight, two, stages = (tmp_path / name for name in ("one", "straight", "two", "stages"))
    train(one, 1, 6, ROUNDED, tied).check()
    train(straight, 2, 6, *SHARED, ROUNDED, tied).check()
    train(two, 2, 3, *SHARED, ROUNDED, tied).check()
    manifest, _ = read_manifest(find_checkpoint(two))
    states = {
        name: t.cuts
        for name, t in manifest.tensors.items()
        if name.endswith(("exp_avg", "exp_avg_sq"))
    }
    assert set(states.values()) == {(("dp_replicate", 0),)}
    assert all(not t.cuts for name, t in manifest.tensors.items() if name.startswith("model."))
    train(stages, 2, 6, "layout={pp: 2}", ROUNDED, tied, f"checkpoint.resume={two}").check()
    train(two, 2, 6, *SHARED, ROUNDED, tied).check()
    assert numbers(two) == numbers(straight)
    assert numbers(straight) == pytest.approx(numbers(one), rel=1e-9, abs=0)
    assert numbers(stages)[-6:] == pytest.approx(numbers(one)[-6:], rel=1e-9, abs=0)
    refused = train(two, 2, 8, *SHARED, tied)
    assert "other types: optimizer." in refused.err
    assert "(there BF16, the model's F64)" in refused.err


def test_what_is_sent_is_a_closed_form(tmp_path: Path) -> None:
    """Of each parameter as many rows for every rank, padded: once as gradients, once as weights."""
    keys = [*SHARED, "layout={dp_replicate: 3}", "data.validation=0"]
    train(tmp_path / "run", 3, 1, *keys).check()
    row = read(tmp_path / "run" / "metrics.jsonl")[-1]
    config = Config.load(QUICKSTART, [*EXACT, *keys], world_size=3)
    specs = parameter_specs(model_spec(config.model.name, config.model.keys), config.resolved)
    padded = sum(3 * -(-spec.dims[0] // 3) * math.prod(spec.dims[1:]) for spec in specs)
    assert row["sent_bytes_dp_replicate"] == 2 * round(8 * padded * 2 / 3)


def test_each_copy_keeps_a_share_of_the_states() -> None:
    layout = Layout({"pp": 1, "dp_replicate": 4, "tp": 2})
    specs = [ParameterSpec("w", (6, 10), (Cut("tp", 1, 2),)), ParameterSpec("b", (8,))]
    whole, shared = (
        held_by_ranks(specs, layout, "float32", OptimizerSection(), shard_optimizer=s)
        for s in (False, True)
    )
    assert whole.optimizer_bytes == 2 * 4 * (30 + 8)
    assert shared.optimizer_bytes == 2 * 4 * (2 * 5 + 2), "6 rows over 4 copies are 2, 2, 2 and 0"
    assert shared.weight_bytes == whole.weight_bytes
    experts = ParameterSpec("e", (6, 4, 4), (Cut("ep", 0, 2),))
    assert optimizer_shard(experts, layout.with_experts(2)).cuts[-1] == Cut("edp_replicate", 0, 4)
    assert optimizer_shard(specs[1], Layout({"tp": 8})) == specs[1]
