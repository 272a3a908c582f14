"""Fixed-size messages to experts change nothing: a run with them equals one without, even if rows
overflow."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.config import Config
from meshtrain.data.batch import Batch
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.optim.optimizer import Optimizer
from meshtrain.trainer import Trainer
from tests.parity.cells import assert_same
from tests.parity.experiments import experiments
from tests.parity.runs import train_here
from tests.ranks import row

EP = "parallel.expert_parallel={}".format
FEW = ("train.steps=3", "train.eval_every=2")
CELLS = (
    (2, "{dp_shard: 2}", "experts", (EP(2), "batch.micro_size=2")),
    (
        2,
        "{dp_replicate: 2}",
        "experts",
        (EP(2), "train.precision=float16", "model.hidden_dropout=0.1"),
    ),
    (4, "{pp: 2, dp_shard: 2}", "experts", (EP(2), "pipeline.schedule=zbv")),
    (4, "{cp: 2, tp: 2}", "experts, sigmoid", (EP(4), "batch.micro_size=4")),
)


ROWS = [row(*cell, name=cell[1], slow=cell[0] > 2) for cell in CELLS]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "layout", "name", "more"), ROWS, indirect=["job"])
def test_expert_rows_change_nothing(
    job: Job, layout: str, name: str, more: tuple[str, ...], shared_path: Path, session_path: Path
) -> None:
    """Room for an even share, which overflows in every step, and room for all rows. A step that
    runs again draws random numbers, scales and counts as in its first run."""
    experiment = experiments(session_path)[name]
    rows = {}
    for room in ("null", "1.0", str(job.world_size)):
        keys = [*more, *FEW, f"layout={layout}", f"parallel.expert_rows={room}"]
        rows[room] = train_here(job, experiment, keys, shared_path / room).rows
    even, all_rows = rows["1.0"], rows[str(job.world_size)]
    assert_same(even, rows["null"], 1e-12)
    assert_same(all_rows, rows["null"], 1e-12)
    assert all("expert_rows_overflow" not in step for step in rows["null"])
    assert all(step["expert_rows_overflow"] > 0 for step in even)
    assert all(step["expert_rows_overflow"] == 0 for step in all_rows)


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
        trainer = Trainer(
            model, optimizer, config, mesh, device, task="classification", timer=StepTimer(device)
        )
        if again:
            trainer._expert_rows, model.trainer = 1.0, [trainer]
        for step in (1, 2):
            trainer.forward_backward(
                step, [Batch.of([torch.randn(5, 6)], torch.arange(5) % 4) for _ in range(2)]
            )
            result = trainer.optimizer_step(step)()
        assert result.terms == ({"expert_rows_overflow": 2.0} if again else {})
        results.append((result.loss, result.grad_norm, model.state_dict()))
    assert results[0][:2] == results[1][:2]
    assert all(torch.equal(value, results[1][2][name]) for name, value in results[0][2].items())
