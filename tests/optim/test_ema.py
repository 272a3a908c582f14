"""Averaged weights: the formula, what uses them, checkpoints and exports. That layouts agree is in
the parity table."""

from pathlib import Path

import pytest
import torch

from meshtrain.cli import main as cli
from meshtrain.cli.export import export
from meshtrain.errors import InputError
from meshtrain.metrics.logger import read
from tests.launching import forked
from tests.optim.steps import linear_and_norm, optimizer_of, set_gradients, update
from tests.parity.experiments import QUICKSTART, SMALL


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_the_average_follows_the_weights_and_takes_their_place(name: str) -> None:
    model = linear_and_norm()
    optimizer = optimizer_of(model, name=name, ema_decay=0.75, lr=0.1)
    expected = [p.detach().clone() for p in model.parameters()]
    for step, skip in ((1, False), (2, True), (3, False)):
        set_gradients(model, step)
        update(optimizer, step, skip=skip)
        if not skip:
            expected = [
                0.75 * e + 0.25 * p.detach()
                for e, p in zip(expected, model.parameters(), strict=True)
            ]
    weights = [p.detach().clone() for p in model.parameters()]
    with optimizer.averaged(model):
        for p, e in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.detach(), e, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert "ema" in optimizer.state(model[0].weight)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_averages_go_on_from_checkpoints_to_the_bit_and_are_exported(tmp_path: Path) -> None:
    def train(output: str, steps: int, *overrides: str) -> list[tuple[float, float]]:
        keys = [*SMALL, "train.precision=float64", "optimizer.ema_decay=0.8", "optimizer.name=muon"]
        keys += [
            "train.use_ema=true",
            "optimizer.schedule=constant",
            "checkpoint.every=2",
            "train.eval_every=2",
        ]
        keys += ["layout={dp_shard: 2}", "train.eval_samples=4", f"train.steps={steps}", *overrides]
        forked(
            2, "-m", "meshtrain.train", QUICKSTART, *keys, f"train.output={tmp_path / output}"
        ).check()
        return [
            (row["loss"], row.get("eval_loss")) for row in read(tmp_path / output / "metrics.jsonl")
        ]

    straight = train("straight", 4, f"train.export={tmp_path / 'by the run'}")
    train("resumed", 2)
    assert train("resumed", 4) == straight
    for name, arguments in (("averages", ["--ema"]), ("weights", [])):
        assert (
            cli.main(["export", str(tmp_path / "resumed"), str(tmp_path / name), *arguments]) == 0
        )
    by_the_run, averages, weights = (
        (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("by the run", "averages", "weights")
    )
    assert by_the_run == averages != weights


def test_a_checkpoint_without_averages_has_none_to_export(tmp_path: Path) -> None:
    keys = (*SMALL, "train.steps=1", f"train.output={tmp_path / 'plain'}")
    forked(1, "-m", "meshtrain.train", QUICKSTART, *keys).check()
    with pytest.raises(InputError, match="holds no averages"):
        export(tmp_path / "plain", tmp_path / "out", ema=True)
