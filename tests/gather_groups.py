"""Run under torchrun: builds the mesh of each layout of argv[1], gathers the ranks over every group, prints them.

Neighbouring pipeline ranks get the groups that they have on NCCL. `experts` next to the axes: size of expert_parallel.
"""

import json
import sys

import torch.distributed as dist

import meshtrain
import meshtrain.mesh
from meshtrain.layout import EXPERT_AXES, VIEWS, Layout

meshtrain.mesh.IN_TURN = ("cpu",)
with meshtrain.start(60) as job:
    for number, sizes in enumerate(json.loads(sys.argv[1])):
        experts = sizes.pop("experts", 1)
        layout = Layout(sizes).with_experts(experts)
        mesh = meshtrain.build_mesh(layout)
        seen = []
        of_experts = [("cp", "tp"), *((axis,) for axis in EXPERT_AXES)] if experts > 1 else []
        for axes in [(axis,) for axis in layout.axes] + list(VIEWS.values()) + of_experts:
            group = mesh.group(*axes)
            if group is None:
                continue
            ranks: list = [None] * mesh.size(*axes)
            dist.all_gather_object(ranks, job.rank, group=group)
            seen.append([axes, ranks])
        if mesh.expert_mesh is not None:
            for dim in layout.expert_mesh_dims:
                assert mesh.submesh(dim).get_group() is mesh.group(dim)
        links = []
        for ends, group in mesh._links.items():
            ranks = [None, None]
            dist.all_gather_object(ranks, job.rank, group=group)
            links.append([ends, ranks])
        line = {"layout": number, "rank": job.rank, "groups": seen, "created": len(mesh._groups), "links": links}
        line["own"] = sorted(mesh._own)
        print(json.dumps(line) + "\n", end="", flush=True)
