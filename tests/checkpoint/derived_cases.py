"""A job of 4 ranks: parameters that FSDP shards over `fsdp`, which is no axis of the layout; prints what failed.

... -m tests.checkpoint.derived_cases FOLDER
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from meshtrain.checkpoint.state import State
from meshtrain.config.schema import Optimizer as Keys
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import join
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.optim import Optimizer
from tests.checkpoint.known import ABOUT, fill
from tests.checkpoint.ranks import Ranks

LAYOUTS = {
    "dp_shard x cp": {"dp_shard": 2, "cp": 2},
    "cp x dp_shard": {"cp": 2, "dp_shard": 2},
    "HSDP over cp": {"dp_replicate": 2, "cp": 2},
    "cp": {"cp": 4},
    "FSDP": {"dp_shard": 4},
    "DDP": {"dp_replicate": 4},
}


class Derived(Ranks):
    def state_on(self, kind: str) -> State:
        layout = Layout(LAYOUTS[kind])
        mesh = build_mesh(layout, "cpu")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 11))  # 5 rows on 4 ranks are 2, 2, 1 and 0
        plain = [p.detach().clone() for p in model.parameters()]
        dims = mesh.submesh("dp_replicate", "fsdp")
        if layout.size("fsdp") > 1:
            fully_shard(model, mesh=dims)
        optimizer = Optimizer(model, Keys(), mesh, 10)
        state = State(model, optimizer, mesh, self.job)
        cut = ((layout.mesh_dims[-1], 0),) if layout.size("fsdp") > 1 else ()
        self.equal({one.cuts for name, one in state.placements.items() if "step" not in name}, {cut}, f"{kind}: cuts")
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        norm = mesh.sum(optimizer.squared_norm())
        self.same(norm, sum(p.double().square().sum() for p in plain), f"{kind}: each element counts once")
        optimizer.zero_grad()
        return state

    def matrix(self) -> None:
        """Each layout loads what each has written, to the bit."""
        states = {kind: self.state_on(kind) for kind in LAYOUTS}
        for kind, state in states.items():
            fill(state)
            saver = self.saver(state, kind)
            saver.save(4, ABOUT, wait=True)
            self.equal(saver.problem, None, kind)
            saver.close()
        for state in states.values():
            for kind in states:
                self.load(state, kind, 4)


if __name__ == "__main__":
    job = join(read_environment(os.environ))
    with job_exit(job):
        job.connect(120)
        cases = Derived(job, Path(sys.argv[1]))
        cases.matrix()
        cases.tell()
