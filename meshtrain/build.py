"""From the YAML's model section to a model that is spread over the mesh and has its first values."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshtrain.huggingface import check_weights, load_weights
from meshtrain.init import initialise, materialise
from meshtrain.locate import model_file
from meshtrain.mesh import Mesh
from meshtrain.numerics import master_dtype
from meshtrain.parallel.apply import Options, parallelize, split_over_tp, spread_over_data
from meshtrain.parallel.waiting import Waiting

if TYPE_CHECKING:
    from meshtrain.config import Config


def plain_model(config: "Config") -> nn.Module:
    """The model of a config on the meta device, where it has shapes and no memory."""
    module = model_file(config.model.name)
    with torch.device("meta"):
        return module.Model(module.Config(**config.model.keys))


def outputs(config: "Config") -> int | None:
    """How many different targets the model of a config can name; None if its keys do not say."""
    keys = config.model.keys
    return keys.get("vocab_size", keys.get("num_classes"))


def build_model(config: "Config", mesh: Mesh, device: torch.device, waiting: Waiting = nullcontext) -> nn.Module:
    """The model of a config, parallelized, on `device`, with the first values that its seed gives on every layout.

    A model file with an `init_plan` is built on the meta device: no rank ever holds more than its part. Any other
    model, and one with buffers (whose values only its constructor knows), is built whole on every rank from the seed.
    """
    module = model_file(config.model.name)
    model_config = module.Config(**config.model.keys)
    plan = getattr(module, "init_plan", None)
    model = plain_model(config)
    how = Options(precision=config.train.precision, waiting=waiting, **vars(config.parallel))
    if plan is None or any(True for _ in model.buffers()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.train.seed)
            model = module.Model(model_config).to(device)
        parallelize(model, mesh, **vars(how))
        if config.model.weights is not None:
            load_weights(model, config.model.weights)
        return model

    def give_values() -> None:
        materialise(model, device)
        if config.model.weights is not None:
            load_weights(model, config.model.weights)
        else:
            initialise(model, plan, seed=config.train.seed, std=getattr(model_config, "initializer_range", 0.02))

    model.to(master_dtype(how.precision))
    split_over_tp(model, mesh, how)
    if mesh.size("dp_shard") == 1:
        give_values()
    spread_over_data(model, mesh, how)
    if mesh.size("dp_shard") > 1:  # FSDP splits a model that has no memory yet
        give_values()
    return model


def check_start(config: "Config") -> None:
    """Whether the weights that a run is to start from are those of its model; reads headers only.

    Raises:
        InputError: they are not.
    """
    if config.model.weights is not None:
        check_weights(plain_model(config), config.model.weights, config.model.keys)


def parameter_count(model: nn.Module) -> int:
    """The number of the whole model's parameters, tied ones counted once."""
    return sum(p.numel() for p in model.parameters())
