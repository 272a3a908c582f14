"""A job of 4 ranks with parameters sharded over `fsdp`, `efsdp` or `ep`, which are not axes of the layout; prints what
failed.

... -m tests.checkpoint.derived_cases FOLDER
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

from meshtrain.checkpoint.state import State
from meshtrain.config.schema import Optimizer as Keys
from meshtrain.experts import Experts
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import join
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.optim import Optimizer
from meshtrain.parallel.expert import apply_expert_parallel
from meshtrain.parallel.fsdp import apply_fsdp
from meshtrain.parallel.parallelize import ParallelOptions
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
EXPERTS = {  # (sizes, expert_parallel)
    "experts, FSDP": ({"dp_shard": 4}, 2),
    "experts over FSDP": ({"dp_shard": 4}, 4),
    "experts, HSDP over cp": ({"dp_replicate": 2, "cp": 2}, 2),
    "experts over DDP": ({"dp_replicate": 4}, 4),
}


class Derived(Ranks):
    def state_on(self, kind: str) -> State:
        sizes, ranks = (LAYOUTS[kind], 1) if kind in LAYOUTS else EXPERTS[kind]
        layout = Layout(sizes).with_experts(ranks)
        mesh = build_mesh(layout, "cpu")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 11), Experts(5, 3, 2))  # 5 on 4 ranks are 2, 2, 1 and 0
        plain = [p.detach().clone() for p in model.parameters()]
        apply_expert_parallel(model, mesh, ParallelOptions(ep_plan={"2": "ep_dispatch_experts"}))
        if layout.size("fsdp") > 1:
            apply_fsdp(model, [model], mesh)
        optimizer = Optimizer(model, Keys(), mesh, 10)
        state = State(model, optimizer, mesh, self.job)
        cut = ((layout.mesh_dims[-1], 0),) if layout.size("fsdp") > 1 else ()
        if ranks > 1:
            for name in ("gate_up_proj", "down_proj"):
                over = (("ep", 0), ("efsdp", 0)) if layout.size("efsdp") > 1 else (("ep", 0),)
                self.equal(state.placements[f"model.2.{name}"].cuts, over, f"{kind}: {name}")
        dense = {one.cuts for name, one in state.placements.items() if "step" not in name and "_proj" not in name}
        self.equal(dense, {cut}, f"{kind}: cuts")
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        norm = mesh.sum(optimizer.squared_norm())
        self.same(norm, sum(p.double().square().sum() for p in plain), f"{kind}: each element counts once")
        optimizer.zero_grad()
        return state

    def matrix(self) -> None:
        """Each layout loads what each layout has written, bit for bit."""
        states = {kind: self.state_on(kind) for kind in (*LAYOUTS, *EXPERTS)}
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
