"""Run under torchrun with configs and one layout for each: prints which part of each parameter every rank holds.

Each parameter has a list of parts, since two stages of a rank may both hold a tied parameter.
"""

import json
import sys

from torch import nn

import meshtrain
from meshtrain.config import Config
from meshtrain.mesh import Mesh
from meshtrain.modeling.build import build_model
from meshtrain.parallel.sharding import local_part
from meshtrain.pipeline.engine import Pipeline


def stages(model: nn.Module, mesh: Mesh) -> list[nn.Module]:
    if not isinstance(model, Pipeline):
        return [model]
    return [model.stage(number) for number in model.schedule.stages_of(mesh.index("pp"))]


def main() -> None:
    with meshtrain.start() as job:
        for name, layout in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
            config = Config.load(name, [f"layout={layout}"], world_size=job.world_size, for_training=True)
            assert config.resolved is not None
            mesh = meshtrain.build_mesh(config.resolved)
            model = build_model(config, mesh, job.device)
            row: dict[str, list] = {}
            for part in stages(model, mesh):
                for each, parameter in part.named_parameters():
                    local, found = local_part(parameter)
                    layer = type(part.get_submodule(each.rpartition(".")[0])).__name__.removeprefix("FSDP")
                    row.setdefault(each, []).append([layer, list(local.shape), [one.stop - one.start for one in found]])
            print(json.dumps({"case": f"{name} {layout}", "held": row}) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
