"""Random runs: model x data x layout x options, as keys of a config.

A cell is a function of a seed and its number. What the config's own check refuses is drawn again:
the check says which combinations make sense, so that a new key needs a line here and nothing else.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import yaml

from meshtrain.config import Config
from meshtrain.config.errors import ConfigErrors
from meshtrain.errors import InputError
from meshtrain.layout import LayoutError
from meshtrain.pipeline.schedule import NAMES
from tests.fuzz.answers import LENGTH

BASE = "tests/fuzz/base.yaml"
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
WORLDS = (2, 2, 2, 3, 4, 4, 6)
STEPS, SAVED = 4, 2  # steps of a run, and the step after which it goes on on another layout
Keys = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A run: what it trains, and the layouts on which it begins and goes on."""

    experiment: Keys
    first: Keys
    then: Keys

    @property
    def world(self) -> int:
        return prod(self.first["layout"].values())

    def to_yaml(self) -> str:
        """A config that trains it, on its first layout."""
        sections: Keys = {}
        for name, value in (self.experiment | self.first).items():
            section, _, key = name.partition(".")
            if key:
                sections.setdefault(section, {})[key] = value
            else:
                sections[section] = value
        return yaml.safe_dump(sections, sort_keys=False, default_flow_style=None, width=100)


def overrides(keys: Keys) -> list[str]:
    return [
        f"{name}={yaml.safe_dump(value, default_flow_style=True, width=10**6)}"
        for name, value in keys.items()
    ]


ALONE: Keys = {"layout": {"dp_shard": 1}}


def world_of(seed: int, number: int) -> int:
    return random.Random(f"{seed}/{number}/world").choice(WORLDS)


def drawn(seed: int, number: int) -> Cell:
    """The cell of this number."""
    rng = random.Random(f"{seed}/{number}")
    world = world_of(seed, number)
    while True:
        experiment = draw_experiment(rng)
        if not is_accepted(experiment | ALONE, 1):
            continue
        layouts: list[Keys] = []
        for _ in range(20):
            layout = draw_layout(rng, world)
            if is_accepted(experiment | layout, world) and not any(
                is_known(experiment, layout) for is_known in KNOWN
            ):
                layouts.append(layout)
            if len(layouts) == 2:
                return Cell(experiment, *layouts)


def is_accepted(keys: Keys, world: int) -> bool:
    """Whether the config's check accepts a run."""
    try:
        Config.load(BASE, overrides(keys), world_size=world, for_training=True)
    except (ConfigErrors, LayoutError, InputError):
        return False
    return True


def draw_experiment(rng: random.Random) -> Keys:
    """Everything that decides what is computed."""
    keys: Keys = {
        **rng.choice(MODELS)(rng),
        "data.workers": 0,
        "batch.global_size": rng.randint(3, 14),
        "optimizer.lr": rng.choice([1e-3, 1e-2]),
        "optimizer.warmup_steps": rng.randint(0, 2),
        "train.precision": "float64",
        "train.steps": STEPS,
        "train.sample_tokens": 0,
        "train.eval_every": rng.choice([0, 3]),
        "train.seed": rng.randint(0, 99),
    }
    options: list[Keys] = [
        {"optimizer.name": "muon"},
        {"optimizer.name": "sgd"},
        {"optimizer.ema_decay": 0.8, "train.use_ema": True},
        {"optimizer.clip_norm": rng.choice([None, 0.1])},
        {"optimizer.schedule": rng.choice(["linear", "constant", "wsd"])},
        {"model.hidden_dropout": 0.1},
        {"model.tie_word_embeddings": True},
        {"data.mask_documents": True},
        {"train.lora": {"rank": 3, "alpha": 8}, "optimizer.eps": 1e-3},
        {"train.freeze": ["*embed*"]},
        {
            "train.linear_precision": "float8",
            "model.hidden_size": 128,
            "model.num_attention_heads": 4,
        },
        {"batch.global_size": [[0, 3], [2, 7]]},
        {"data.seq_len_warmup": [[0, 8], [2, 12]]},
    ]
    for option in rng.sample(options, rng.randint(0, 2)):
        keys |= option
    return keys


def decoder(rng: random.Random, name: str) -> Keys:
    key_value_heads = rng.choice([1, 2, 3])
    heads = key_value_heads * rng.choice([1, 2, 4])
    return text(rng) | {
        "model.name": name,
        "model.hidden_size": heads * rng.choice([4, 8]),
        "model.intermediate_size": rng.randint(20, 60),
        "model.num_hidden_layers": rng.randint(1, 4),
        "model.num_attention_heads": heads,
        "model.num_key_value_heads": key_value_heads,
        "model.vocab_size": rng.choice([256, 259, 300]),
    }


def mixture(rng: random.Random, name: str, experts: str, chosen: str) -> Keys:
    return decoder(rng, name) | {
        "model.num_hidden_layers": rng.randint(2, 4),  # the first one may have no experts
        experts: rng.choice([3, 4, 6]),
        chosen: rng.choice([1, 2]),
        "model.router_aux_loss_coef": 0.1,
    }


def starter(rng: random.Random) -> Keys:
    """The model that `meshtrain new` writes."""
    heads = rng.choice([2, 3, 4])
    return text(rng) | {
        "model.name": "tools/starter/model.py",
        "model.vocab_size": rng.choice([256, 259]),
        "model.width": heads * 8,
        "model.heads": heads,
        "model.layers": rng.randint(1, 3),
    }


def convnet(rng: random.Random) -> Keys:
    sizes = {
        "model.image_size": 8,
        "model.in_channels": 1,
        "model.channels": [6, 10],
        "model.num_classes": 10,
    }
    return {"model.name": "convnet", "data.source": "digits"} | sizes


def text(rng: random.Random) -> Keys:
    """The data of a language model."""
    standard = {
        "data.source": "python-stdlib",
        "data.seq_len": rng.randint(8, 30),
        "train.eval_samples": 5,
    }
    return rng.choice([standard, {"data.source": "tests/fuzz/answers.py", "data.seq_len": LENGTH}])


MODELS: list[Callable[[random.Random], Keys]] = [
    lambda rng: decoder(rng, "llama"),
    lambda rng: decoder(rng, "qwen3"),
    lambda rng: decoder(rng, "tests/models/attached.py"),
    lambda rng: mixture(rng, "qwen3_moe", "model.num_experts", "model.num_experts_per_tok"),
    lambda rng: mixture(
        rng, "tests/models/moe.py", "model.num_experts", "model.num_experts_per_tok"
    ),
    starter,
    convnet,
]


def draw_layout(rng: random.Random, world: int) -> Keys:
    """Everything that must not change what is computed."""
    sizes = {}
    left = world
    for axis in rng.sample(AXES, len(AXES)):
        sizes[axis] = rng.choice([n for n in range(1, left + 1) if left % n == 0])
        left //= sizes[axis]
    last = rng.choice(AXES)
    sizes[last] *= left
    keys: Keys = {
        "layout": {axis: sizes[axis] for axis in AXES if sizes[axis] > 1},
        "batch.micro_size": rng.randint(1, 4),
        "parallel.recompute": rng.choice(["none", "selective", "full"]),
    }
    if sizes["pp"] > 1:
        keys["pipeline.schedule"] = rng.choice(NAMES)
    if sizes["cp"] > 1:
        keys |= rng.choice([{}, {"parallel.context": "ring"}, {"parallel.context_heads": 2}])
    if sizes["tp"] > 1:
        keys |= rng.choice([{}, {"parallel.sequence_parallel": False}, {"parallel.regather": True}])
    if sizes["dp_replicate"] > 1:
        keys |= rng.choice([{}, {"parallel.shard_optimizer": True}])
    if sizes["dp_shard"] > 1:
        keys |= rng.choice([{}, {"parallel.reshard_after_forward": False}])
    return keys


def smaller(cell: Cell) -> Iterator[Cell]:
    """Cells with one thing less, the largest steps first."""
    plain = {"layout": cell.first["layout"]}
    yield replace(cell, then=cell.first)
    yield replace(cell, first=cell.first | plain, then=plain)
    for name, value in cell.experiment.items():
        if name not in ("model.name", "data.source", "train.precision", "train.steps"):
            yield replace(
                cell,
                experiment={key: other for key, other in cell.experiment.items() if key != name},
            )
        if isinstance(value, int) and value > 2:
            yield replace(cell, experiment=cell.experiment | {name: value // 2})
    for name in cell.first:
        if name != "layout":
            yield replace(
                cell, first={key: value for key, value in cell.first.items() if key != name}
            )
    for axis, size in cell.first["layout"].items():
        for part in range(1, size):
            if size % part == 0:
                layout = {"layout": cell.first["layout"] | {axis: part}}
                yield replace(cell, first=cell.first | layout, then=cell.first | layout)


# What is known to be wrong: such cells are drawn again.
KNOWN: list[Callable[[Keys, Keys], bool]] = []
