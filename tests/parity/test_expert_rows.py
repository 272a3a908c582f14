"""Fixed-size messages to experts change nothing: a run with them equals one without, even if rows overflow."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.config import Config
from meshtrain.data.batch import Batch
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.optim.optimizer import Optimizer
from meshtrain.trainer import Trainer
from tests.parity.cells import assert_same, train
from tests.parity.experiments import EP, experiments

FEW = ("train.steps=3", "train.eval_every=2")
CELLS = {
    2: [
        ("{dp_shard: 2}", "experts", (EP(2), "batch.micro_size=2")),
        ("{dp_replicate: 2}", "experts", (EP(2), "train.precision=float16", "model.hidden_dropout=0.1")),
    ],
    4: [
        ("{pp: 2, dp_shard: 2}", "experts", (EP(2), "pipeline.schedule=zbv")),
        ("{cp: 2, tp: 2}", "experts, sigmoid", (EP(4), "batch.micro_size=4")),
    ],
}


@pytest.mark.parametrize("world", CELLS)
def test_expert_rows_change_nothing(tmp_path: Path, world: int) -> None:
    """Room for an even share, which overflows in every step, and room for all rows. A step that runs again draws random
    numbers, scales and counts as in its first run."""
    known = experiments(tmp_path)
    cells = [(layout, known[name], [*more, *FEW]) for layout, name, more in CELLS[world]]
    rooms = {"null": None, "1.0": True, f"{world}": False}  # whether rows overflow
    runs = [
        (e, f"{i}_{room}", layout, (*more, f"parallel.expert_rows={room}"))
        for i, (layout, e, more) in enumerate(cells)
        for room in rooms
    ]
    train(tmp_path, world, runs)
    for i, (layout, _, _) in enumerate(cells):
        rows = {
            room: [json.loads(line) for line in (tmp_path / f"{i}_{room}" / "metrics.jsonl").open()] for room in rooms
        }
        for room, overflows in rooms.items():
            assert_same(rows[room], rows["null"], 1e-12)
            found = [row.get("expert_rows_overflow") for row in rows[room]]
            assert all((n is None) if overflows is None else (n > 0) == overflows for n in found), (layout, room, found)


class _Drawing(nn.Module):
    """Draws from torch's generator, and keeps a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.trainer: list[Trainer] = []

    def forward(self, x: Tensor) -> Tensor:
        for trainer in self.trainer:
            if trainer._limit is not None:
                trainer._limit.overflow += 1
                x = x * 2  # as if rows had been left out
        return self.head(F.dropout(self.norm(x)))


def test_a_step_runs_again_from_the_same_state() -> None:
    overrides = ("data.workers=0", "optimizer.warmup_steps=0", "train.precision=float32")
    config = Config.load("configs/quickstart.yaml", overrides, world_size=1)
    mesh, device = Mesh(Layout({"dp_shard": 1}), 0, "cpu", None, {}), torch.device("cpu")
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        model = _Drawing()
        optimizer = Optimizer(model, config.optimizer, mesh, 10)
        trainer = Trainer(model, optimizer, config, mesh, device, task="classification", timer=StepTimer(device))
        if again:
            trainer._expert_rows, model.trainer = 1.0, [trainer]
        for step in (1, 2):
            trainer.forward_backward(step, [Batch.of([torch.randn(5, 6)], torch.arange(5) % 4) for _ in range(2)])
            result = trainer.optimizer_step(step)()
        assert result.terms == ({"expert_rows_overflow": 2.0} if again else {})
        results.append((result.loss, result.grad_norm, model.state_dict()))
    assert results[0][:2] == results[1][:2]
    assert all(torch.equal(value, results[1][2][name]) for name, value in results[0][2].items())
