"""Run under torchrun with configs and one layout for each: prints what every rank holds of each parameter."""

import json
import sys

import torch

import meshtrain
from meshtrain.config import Config
from meshtrain.layout import Layout
from meshtrain.locate import model_file
from meshtrain.parts import local_part


def main() -> None:
    with meshtrain.start() as job:
        for name, layout in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
            config = Config.load(name, [f"layout={layout}"], world_size=job.world_size, for_training=True)
            mesh = meshtrain.build_mesh(Layout.resolve(config.layout, job.world_size))
            module = model_file(config.model.name)
            with torch.device("meta"):
                model = module.Model(module.Config(**config.model.keys))
            meshtrain.parallelize(model, mesh)
            row: dict[str, list] = {}
            for each, parameter in model.named_parameters():
                local, part = local_part(parameter)
                layer = type(model.get_submodule(each.rpartition(".")[0])).__name__.removeprefix("FSDP")
                row[each] = [layer, list(local.shape), [one.stop - one.start for one in part]]
            print(json.dumps({"case": f"{name} {layout}", "held": row}) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
