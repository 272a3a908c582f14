"""Averaged weights: the formula, what uses them, checkpoints and exports. That layouts agree is in the parity table."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

from meshtrain.cli import main as cli
from meshtrain.cli.export import export
from meshtrain.config import Config, ConfigErrors
from meshtrain.config.schema import Optimizer as Keys
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.metrics.logger import read
from meshtrain.optim import Optimizer
from tests.launching import forked
from tests.parity.experiments import QUICKSTART, SMALL

MESH = build_mesh(Layout({"dp_shard": 1}))


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_the_average_follows_the_weights_and_takes_their_place(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()
    optimizer = Optimizer(model, Keys(name=name, ema_decay=0.75, schedule="constant", warmup_steps=0, lr=0.1), MESH, 9)
    expected = [p.detach().clone() for p in model.parameters()]
    for step, skipped in ((1, False), (2, True), (3, False)):
        for p in model.parameters():
            p.grad = torch.cos(step * p.detach())
        optimizer.squared_norm()
        optimizer.update(step, None, torch.tensor(skipped))
        if not skipped:
            expected = [0.75 * e + 0.25 * p.detach() for e, p in zip(expected, model.parameters(), strict=True)]
    weights = [p.detach().clone() for p in model.parameters()]
    with optimizer.averaged(model):
        for p, e in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.detach(), e, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert "ema" in optimizer.state(model[0].weight)


def test_use_ema_needs_an_average() -> None:
    with pytest.raises(ConfigErrors, match="needs an average of the weights"):
        Config.load(QUICKSTART, ["train.use_ema=true"])


@pytest.mark.timeout(400)
def test_averages_go_on_from_checkpoints_to_the_bit_and_are_exported(tmp_path: Path) -> None:
    def train(output: str, steps: int, *overrides: str) -> list[tuple[float, float]]:
        keys = [
            *SMALL,
            "train.precision=float64",
            "optimizer.ema_decay=0.8",
            "optimizer.name=muon",
            "train.use_ema=true",
        ]
        keys += ["optimizer.schedule=constant", "checkpoint.every=2", "layout={dp_shard: 2}", "train.eval_every=2"]
        keys += [f"train.steps={steps}", f"train.output={tmp_path / output}", "train.eval_samples=4", *overrides]
        forked(2, "-m", "meshtrain.train", QUICKSTART, *keys).check()
        return [(row["loss"], row.get("eval_loss")) for row in read(tmp_path / output / "metrics.jsonl")]

    straight = train("straight", 4, f"train.export={tmp_path / 'by the run'}")
    train("resumed", 2)
    assert train("resumed", 4) == straight
    for arguments, name in ((["--ema"], "averages"), ([], "weights")):
        assert cli.main(["export", str(tmp_path / "resumed"), str(tmp_path / name), *arguments]) == 0
    hashes = [
        hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest()
        for name in ("by the run", "averages", "weights")
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_checkpoint_without_averages_has_none_to_export(tmp_path: Path) -> None:
    keys = (*SMALL, "train.steps=1", f"train.output={tmp_path / 'plain'}")
    forked(1, "-m", "meshtrain.train", QUICKSTART, *keys).check()
    with pytest.raises(InputError, match="holds no averages"):
        export(tmp_path / "plain", tmp_path / "out", ema=True)
