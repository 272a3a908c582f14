"""Run under torchrun on 4 processes: pipelines with split backwards in 16 bits give the same bits with sharded stages
as with replicated ones. Prints what failed."""

import os

import torch

from meshtrain.data.batch import Batch
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import join
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel import fsdp
from meshtrain.parallel.sharding import local_part
from meshtrain.pipeline.actions import Kind
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.trainer import Trainer
from tests.pipeline.engine_cases import CPU, Engine, Step, config

SCHEDULES = {name: build(name, ranks=2, microbatches=2) for name in NAMES}
SPLIT = [name for name, one in SCHEDULES.items() if any(a.kind is Kind.WEIGHT_GRAD for a in one.actions_of(0))]
# All weight gradients follow the last input gradient of their stage, or several in a row come between two of them.
CASES = (("float16", 2), ("bfloat16", 5))
LAYERS = "model.num_hidden_layers=3"


class Sharded(Engine):
    def trained(self, axis: str, schedule: str, m: int, precision: str) -> tuple[dict, list[float]]:
        """The gradients of this rank's parameters in the first of three steps, and the loss of each step."""
        more = (f"train.precision={precision}", "optimizer.clip_norm=null", "optimizer.warmup_steps=0", LAYERS)
        layout = {"pp": 2, axis: 2}
        model = self.pipeline(layout, schedule, m, *more)
        cfg = config(layout, schedule, m, *more)
        optimizer = Optimizer(model, cfg.optimizer, self.mesh, 10)
        trainer = Trainer(model, optimizer, cfg, self.mesh, CPU, task="language", timer=StepTimer(CPU))
        losses, gradients = [], {}
        for step in (1, 2, 3):
            work = Step(m, seed=10 * step + self.mesh.index(axis))
            trainer.forward_backward(step, [Batch.of(work.inputs(i), tokens) for i, tokens in enumerate(work.tokens)])
            if step == 1:
                for name, p in model.named_parameters():
                    assert p.grad is not None
                    part, where = local_part(p.grad)
                    gradients[name] = part.clone(), where
            losses.append(trainer.optimizer_step(step)().loss)
        return gradients, losses

    def compare(self, schedule: str, m: int, precision: str) -> None:
        whole, losses = self.trained("dp_replicate", schedule, m, precision)
        parts, found = self.trained("dp_shard", schedule, m, precision)
        what = f"{schedule}, {m} microbatches, {precision}"
        self.equal(found, losses, f"{what}: losses")
        self.equal(parts.keys(), whole.keys(), f"{what}: which have gradients")
        for name, (part, where) in parts.items():
            self.equal(torch.equal(part, whole[name][0][where]), True, f"{what}: bits of {name}")


def main() -> None:
    job = join(read_environment(os.environ))
    with job_exit(job):
        job.connect(300)
        fsdp.MIN_UNIT_SIZE = 0  # every block is gathered separately
        torch.set_num_threads(1)
        cases = Sharded(build_mesh(Layout({"pp": job.world_size})))
        for schedule in SPLIT:
            for precision, m in CASES:
                cases.compare(schedule, m, precision)
        cases.tell()


if __name__ == "__main__":
    main()
