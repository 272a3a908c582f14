"""Run under torchrun: builds the mesh of each layout of argv[1], gathers the ranks over every group, prints them.

Neighbours of a pipeline have the groups that they have on NCCL.
"""

import json
import sys

import torch.distributed as dist

import meshtrain
import meshtrain.mesh
from meshtrain.layout import VIEWS, Layout

meshtrain.mesh.IN_TURN = ("cpu",)
with meshtrain.start(60) as job:
    for number, sizes in enumerate(json.loads(sys.argv[1])):
        layout = Layout(sizes)
        mesh = meshtrain.build_mesh(layout)
        seen = []
        for axes in [(axis,) for axis in layout.axes] + list(VIEWS.values()):
            group = mesh.group(*axes)
            if group is None:
                continue
            ranks: list = [None] * mesh.size(*axes)
            dist.all_gather_object(ranks, job.rank, group=group)
            seen.append([axes, ranks])
        links = []
        for ends, group in mesh._links.items():
            ranks = [None, None]
            dist.all_gather_object(ranks, job.rank, group=group)
            links.append([ends, ranks])
        line = {"layout": number, "rank": job.rank, "groups": seen, "created": len(mesh._groups), "links": links}
        print(json.dumps(line) + "\n", end="", flush=True)
