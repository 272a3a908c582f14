"""What the parity tests train: an experiment is a whole config except its layout (layouts.yaml)."""

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.parity.covering import AXES, size
from tests.ranks import made_once

QUICKSTART = "configs/quickstart.yaml"
MODELS = Path(__file__).parents[1] / "models"  # users' models
STEPS = 4  # of an experiment in float64
TABLE = yaml.safe_load(Path(__file__).with_name("experiments.yaml").read_text())


def overrides_of(name: str, section: str = "parts") -> tuple[str, ...]:
    """The overrides of a list of experiments.yaml; names in it are first of parts."""
    overrides: list[str] = []
    for entry in TABLE[section][name]:
        if "=" in entry:
            overrides.append(entry)
        else:
            overrides += overrides_of(entry, "parts" if entry in TABLE["parts"] else "on text")
    return tuple(overrides)


SMALL = overrides_of("small")
EXPERT_MODELS = {name: overrides_of(name) for name in ("qwen3_moe", "glm", "latent attention")}


@dataclass(frozen=True)
class Experiment:
    """A run except its layout.

    Attributes:
        tolerance: the largest relative difference from one process that the precision allows.
        falls_to: the share of the first loss that the last one is below.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    tolerance: float
    falls_to: float = 1.0


def experiments(folder: Path) -> dict[str, Experiment]:
    """All experiments; writes the data that they need into `folder`."""
    made_once(folder / "held_out", write_held_out)
    write_ragged(folder / "ragged.jsonl")

    def experiment(name: str, section: str, config: str, first: tuple[str, ...]) -> Experiment:
        keys = (*first, *overrides_of(name, section))
        return Experiment(
            name,
            config,
            tuple(key.replace("DIR", str(folder)) for key in keys),
            1e-9,
            falls_to(name),
        )

    text, images = TABLE["on text"], TABLE["on images"]
    every = {
        name: experiment(name, "on text", QUICKSTART, (*SMALL, *overrides_of("exact")))
        for name in text
    }
    every |= {name: experiment(name, "on images", "configs/digits.yaml", ()) for name in images}
    every["float32"] = Experiment(
        "float32", QUICKSTART, (*SMALL, f"data.cache={folder / 'cache'}"), 1e-5, falls_to=0.8
    )
    return every


def falls_to(name: str) -> float:
    """Of the first loss, in float64: the head, or everything before the stop, may keep its initial
    values."""
    if name in ("a frozen tied embedding", "gradients that stop") or name.startswith("lora"):
        return 0.985
    return 0.95 if "learns slowly" in TABLE["on text"].get(name, ()) else 0.97


def write_held_out(folder: Path) -> None:
    """A small text: a longer evaluation would cost more than the training."""
    (folder / "held_out.txt").write_text("A text that no sample of the training has in it. " * 50)


def write_ragged(path: Path) -> Path:
    """Prompts without and completions with a loss, of very different lengths: many samples have no
    valid target."""
    rng = random.Random(0)
    words = ["mesh", "rank", "loss", "shard", "step", "group", "axis", "host", "norm", "batch"]

    def text(least: int, most: int) -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(least, most))) + " "

    lines = [{"prompt": text(1, 60), "completion": text(1, 8)} for _ in range(160)]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines))
    unfinished.rename(path)  # several ranks may write the same at once
    return path


# -------------------------------------------------------------------------------------------- the
# cells of covering.py

SHARED = "parallel.shard_optimizer=true"
CELL_STEPS = 3
_EVALUATED = f"train.eval_every={CELL_STEPS}"
_OPTIMIZERS = {
    "adamw": (),
    "muon": ("optimizer.name=muon",),
    "sgd": ("optimizer.name=sgd", "optimizer.lr=0.1"),
    "adamw, sharded": (),
    "adamw, averaged": (
        "optimizer.ema_decay=0.8",
        "train.use_ema=true",
        "train.eval_every=2",
        "train.eval_samples=9",
    ),
}
_AXES = {
    "2, ring": ("parallel.context=ring",),
    "2, heads": ("parallel.context_heads=2",),
    "2, whole sequence": ("parallel.sequence_parallel=false",),
}
_SIZES = {"convnet": 21, **dict.fromkeys(EXPERT_MODELS, 7)}  # samples per step; others have 14


def experiment_of(cell: Mapping[str, str], folder: Path) -> Experiment:
    """What a cell trains, but for what the layout may not change: its layout, schedule,
    recomputation."""
    keys: tuple[str, ...] = (
        f"data.cache={folder / 'cache'}",
        "optimizer.warmup_steps=2",
        f"train.steps={CELL_STEPS}",
    )
    model, precision = cell["model"], cell["precision"]
    keys += (f"train.precision={'float32' if precision == 'float32' else 'float64'}",)
    if model == "convnet":
        config = "configs/digits.yaml"
        keys += ("train.epochs=null", "data.workers=0", _EVALUATED)
    else:
        config = QUICKSTART
        ragged = write_ragged(folder / "ragged.jsonl")
        data = (
            "data.source=jsonl",
            f"data.path={ragged}",
            "data.validation=0.03",
            "data.mask_documents=true",
        )
        keys = (*SMALL, *data, *keys)
    keys += {
        "llama": ("model.tie_word_embeddings=true",),
        "qwen3": ("model.name=qwen3", _EVALUATED, "train.eval_samples=9"),
        "with terms": overrides_of("attached"),
        "lora": overrides_of("adapters"),
        "convnet": (),
        **{name: ("model.num_hidden_layers=3", *keys) for name, keys in EXPERT_MODELS.items()},
    }[{"glm4_moe": "glm", "deepseek_v3": "latent attention"}.get(model, model)]
    if precision == "float8":
        wide: tuple[str, ...] = ("model.hidden_size=128",)
        if model in ("llama", "qwen3", "with terms"):
            wide = overrides_of("wide float8")
        if model == "deepseek_v3":
            wide += ("model.q_lora_rank=128",)
        keys += (f"train.linear_precision={precision}", *wide)
    keys += (
        *_OPTIMIZERS[cell["optimizer"]],
        f"batch.global_size={_SIZES.get(model, 14)}",
        "parallel.recompute=none",
        "parallel.offload=none",
    )
    tolerance = 1e-5 if precision == "float32" else 1e-9
    name = f"{model}, {cell['optimizer']}, {precision}"
    return Experiment(name, config, keys, tolerance)


def layout_of(cell: Mapping[str, str]) -> list[str]:
    """The overrides that split the experiment of a cell over its ranks."""
    sizes = {axis: size(cell, axis) for axis in AXES}
    layout = ", ".join(f"{axis}: {ranks}" for axis, ranks in sizes.items() if ranks > 1)
    microbatches = 3 if sizes["pp"] > 1 else 2
    data_ranks = sizes["dp_replicate"] * sizes["dp_shard"]
    micro_size = -(-_SIZES.get(cell["model"], 14) // (data_ranks * microbatches))
    keys = [
        f"layout={{{layout}}}",
        f"batch.micro_size={micro_size}",
        f"parallel.recompute={cell['recompute']}",
        f"parallel.offload={cell['offload']}",
    ]
    keys.append(f"parallel.verify={cell['verify']}")
    for axis in AXES:
        keys += _AXES.get(cell[axis], ())
    if sizes["pp"] > 1:
        keys.append(f"pipeline.schedule={cell['schedule']}")
    if cell["optimizer"] == "adamw, sharded":
        keys.append(SHARED)
    return keys
