"""Generates text on layouts of several ranks and compares it with one process without a cache; see test_generate.py.

torchrun ... generate_cases.py        prints a JSON object: how many texts were compared
"""

import json
import os
from pathlib import Path

import torch

import meshtrain
from meshtrain.config import Config
from meshtrain.generate import generate, generate_batch
from meshtrain.job.process import Job
from meshtrain.mesh import Mesh
from meshtrain.modeling.build import build_model
from tests.parity.experiments import EXPERT_MODELS, QUICKSTART, SMALL, overrides_of

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12]]
LENGTH, S = 9, 24
PLAIN = {
    "llama": ("model.num_key_value_heads=1",),
    "qwen3": ("model.name=qwen3", "train.lora={rank: 2}"),
    "dynamic": overrides_of("dynamic"),
}
MODELS = {**PLAIN, **EXPERT_MODELS}
LAYOUTS = {
    1: ["{}"],
    2: ["{tp: 2}", "{pp: 2}", "{cp: 2}", "{dp_shard: 2}"],
    4: ["{dp_shard: 2, tp: 2}", "{pp: 2, tp: 2}", "{cp: 2, tp: 2}"],
}
OF_LAYOUT = {  # few cells, since each costs many exchanges
    "{}": tuple(MODELS),
    "{tp: 2}": ("llama", "dynamic", "latent attention"),
    "{pp: 2}": ("llama", "qwen3"),
    "{cp: 2}": ("llama", "dynamic"),
    "{dp_shard: 2}": ("qwen3",),
    "{dp_shard: 2, tp: 2}": ("mixtral",),
    "{pp: 2, tp: 2}": ("llama",),
    "{cp: 2, tp: 2}": ("glm",),
}


def config_of(name: str, layout: str, world: int) -> Config:
    keys = [*SMALL, *MODELS[name], "train.precision=float64", f"data.seq_len={S}", f"layout={layout}"]
    keys += ["model.initializer_range=0.3", "parallel.verify=false", "model.num_hidden_layers=3"]
    return Config.load(QUICKSTART, keys, world_size=world)


def texts_of(name: str) -> list[list[int]]:
    """Texts by one process without a cache, one at a time: greedy ones, and the first again at a temperature."""
    config = config_of(name, "{}", 1)
    assert config.resolved is not None
    model = build_model(config, Mesh(config.resolved, 0, "cpu", None, {}), CPU)
    how = {"seq_len": S, "device": CPU, "seed": 3}
    greedy = [generate(model, prompt, LENGTH, temperature=0, **how) for prompt in PROMPTS]
    assert all(len(set(text)) > 4 for text in greedy), "the texts are worth comparing"
    return [*greedy, generate(model, PROMPTS[0], LENGTH, temperature=1.5, **how)]


def compare(name: str, layout: str, world: int) -> int:
    config, expected = config_of(name, layout, world), texts_of(name)
    assert config.resolved is not None
    mesh = meshtrain.build_mesh(config.resolved) if world > 1 else Mesh(config.resolved, 0, "cpu", None, {})
    model = build_model(config, mesh, CPU)
    how = {"seq_len": S, "device": CPU, "seed": 3}
    for prompts in (PROMPTS, PROMPTS[:1]):  # other prompts in a batch change nothing
        found = generate_batch(model, prompts, LENGTH, temperature=0, **how)
        assert found == expected[: len(prompts)], f"{name} on {layout}: {found} {expected}"
        drawn = generate_batch(model, prompts, LENGTH, temperature=1.5, **how)
        assert drawn[0] == expected[-1], f"{name} on {layout}, at a temperature"
    return len(expected)


def main(job: Job) -> None:
    found = [compare(name, layout, job.world_size) for layout in LAYOUTS[job.world_size] for name in OF_LAYOUT[layout]]
    if job.rank == 0:
        print(json.dumps({"compared": sum(found), "in": os.path.basename(Path.cwd())}))


if __name__ == "__main__":
    with meshtrain.start() as job:
        main(job)
