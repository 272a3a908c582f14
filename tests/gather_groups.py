"""Run under torchrun: builds the mesh of each layout of argv[1], gathers the ranks over every group, prints them."""

import json
import sys

import torch.distributed as dist

import meshtrain
from meshtrain.layout import Layout
from meshtrain.mesh import COMBINED

with meshtrain.start(60) as job:
    for number, sizes in enumerate(json.loads(sys.argv[1])):
        layout = Layout(sizes)
        mesh = meshtrain.build_mesh(layout)
        seen = []
        for axes in [(axis,) for axis in layout.axes] + list(COMBINED):
            group = mesh.group(*axes)
            if group is None:
                continue
            ranks: list = [None] * mesh.size(*axes)
            dist.all_gather_object(ranks, job.rank, group=group)
            seen.append([axes, ranks])
        line = {"layout": number, "rank": job.rank, "groups": seen, "created": len(mesh._groups)}
        print(json.dumps(line) + "\n", end="", flush=True)
