"""Models on any layout whose state has known values, which depend on each tensor's name alone."""

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshtrain.checkpoint.directory import name_of, open_manifest
from meshtrain.checkpoint.load import exchange, read_shares
from meshtrain.checkpoint.placement import Placement
from meshtrain.checkpoint.save import Saver
from meshtrain.checkpoint.state import UPDATES, State
from meshtrain.config import Config
from meshtrain.huggingface.load import DTYPES
from meshtrain.job.environment import Environment
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.modeling.build import build_model
from meshtrain.optim.optimizer import Optimizer
from meshtrain.trainer import LossScale
from tests.parity.experiments import QUICKSTART

CPU = torch.device("cpu")
# Sizes not divisible by 4, an embedding that several stages hold, and blocks for 8 stages.
MODEL = (
    "model={name: llama, hidden_size: 24, intermediate_size: 30, num_hidden_layers: 6, "
    "num_attention_heads: 4, "
    "num_key_value_heads: 2, vocab_size: 42, tie_word_embeddings: true}",
    "data.source=tokens",
    "data.path=tests",
    "batch={global_size: 16, micro_size: 2}",
)
OF_4 = {
    "DDP": {"dp_replicate": 4},
    "FSDP": {"dp_shard": 4},
    "HSDP": {"dp_replicate": 2, "dp_shard": 2},
    "tp": {"tp": 4},
    "pp": {"pp": 4},
    "V": {"pp": 4},
    "FSDP x tp": {"dp_shard": 2, "tp": 2},
    "pp x FSDP": {"pp": 2, "dp_shard": 2},
    "pp x tp": {"pp": 2, "tp": 2},
    "pp x DDP": {"dp_replicate": 2, "pp": 2},
}
ABOUT: dict[str, Any] = {
    "samples": 800,
    "tokens": 9600,
    "config": {},
    "data": {},
    "versions": {},
    "rng": {},
    "counters": {},
    "evaluation": None,
}


def save(state: State, job: Job, folder: Path, step: int = 4, **options: Any) -> Path:
    """Saves the state as a checkpoint, whose path is returned. All ranks call it."""
    saver = Saver(state, folder, job, say=lambda _: None, **options)
    saver.save(step, ABOUT, wait=True)
    saver.close()
    assert saver.problem is None
    return folder / name_of(step)


def restore(checkpoint: Path, state: State) -> None:
    """Loads a checkpoint as a run does. All ranks call it."""
    read_shares(checkpoint, open_manifest(checkpoint)[0], state)
    exchange(state)


def check_loaded(checkpoint: Path, state: State) -> None:
    """Loads a checkpoint, whose tensors must have their known values. All ranks call it."""
    clear(state)
    restore(checkpoint, state)
    assert wrong(state) == [], f"{checkpoint} -> {state.layout}"


def alone() -> Job:
    """A job of one process, without a store."""
    return Job(Environment("none", 0, 1, 0, "here", None), CPU, None)


def on(job: Job, layout: dict[str, int], *overrides: str, kind: str = "") -> State:
    """The state of a run on this layout. All ranks call it."""
    schedule = ("pipeline.schedule=zbv",) if kind == "V" else ()
    config = Config.load(
        QUICKSTART, [*MODEL, f"layout={layout}", *schedule, *overrides], world_size=job.world_size
    )
    mesh = (
        build_mesh(Layout(layout), "cpu")
        if job.world_size > 1
        else Mesh(Layout(layout), 0, "cpu", None, {})
    )
    model = build_model(config, mesh, CPU)
    scale = LossScale(CPU) if config.train.precision == "float16" else None
    return State(model, Optimizer(model, config.optimizer, mesh, 10), mesh, job, scale)


def whole(name: str, tensor: Placement) -> Tensor:
    """The known value of a tensor."""
    draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(tensor.dims, generator=draws, dtype=torch.float64)
    return (1000 * values).to(DTYPES[tensor.dtype])


def fill(state: State) -> None:
    """Sets all tensors to their known values."""
    for held in state.shards:
        held.local.copy_(whole(held.name, held.placement)[held.part])
    state.loaded()


def clear(state: State) -> None:
    for held in state.shards:
        held.local.zero_()
    state.loaded()


def wrong(state: State) -> list[str]:
    """This rank's tensors that are not bit-equal to their known values."""
    names = [
        held.name
        for held in state.shards
        if not torch.equal(held.local.detach(), whole(held.name, held.placement)[held.part])
    ]
    counted = state._optimizer.rules["adamw"]._updates.item()
    return (
        names
        if counted == whole(UPDATES, state.placements[UPDATES]).item()
        else [*names, f"AdamW is at {counted}"]
    )
