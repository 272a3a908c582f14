"""The weights alone of a checkpoint: for a plain model, and for a run that starts from them on any layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshtrain import weights
from meshtrain.checkpoint.folder import open_manifest
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.named import needed
from meshtrain.checkpoint.opened import Opened
from meshtrain.checkpoint.reader import read_part
from meshtrain.errors import InputError
from meshtrain.huggingface import fill, must_fit, named_tensors
from meshtrain.parts import local_part

PREFIX = "model."  # of the weights in a manifest


def stored(manifest: Manifest) -> dict[str, weights.Entry]:
    """The weights of a checkpoint by the names that they have in the model; tied ones have their first name only."""
    found = {name.removeprefix(PREFIX): one for name, one in manifest.tensors.items() if name.startswith(PREFIX)}
    return {name: weights.Entry(name, one.dtype, one.shape) for name, one in found.items()}


def check_weights(model: nn.Module, checkpoint: str | Path, keys: Mapping[str, Any] | None = None) -> None:
    """Whether the weights of a checkpoint are those of a model; reads its manifest only.

    Args:
        model: on any device, the meta device too.
        checkpoint: one, or a run's folder with some.
        keys: of the model's Config, if the message is to name those in which the checkpoint's differ.

    Raises:
        DamagedError: it is not complete, or its manifest is not what was written. InputError: names what is missing,
            too much, of another shape or of a type that cannot be read.
    """
    path = needed(checkpoint)
    _check(model, path, open_manifest(path)[0], keys or {})


def _check(model: nn.Module, path: Path, manifest: Manifest, keys: Mapping[str, Any]) -> None:
    must_fit(named_tensors(model), stored(manifest), path, keys, lambda: manifest.config.get("model", {}))


def load_weights(checkpoint: str | Path, model: nn.Module, whole: nn.Module | None = None) -> None:
    """Fills a model from a checkpoint that any layout wrote.

    The model may be plain, as on a single device, or parallelized: then each rank reads the parts that it holds. It
    needs memory (`to_empty` gives it to one on the meta device). Values are cast from the stored floating type to the
    model's.

    Args:
        checkpoint: one, or a run's folder: its newest complete one is taken.
        whole: the model, on any device, of which `model` may be a stage; by default `model` itself.

    Raises:
        DamagedError: the checkpoint is not what was written; names file and tensor. InputError: there is none, or its
            tensors are not the model's: names those that are missing, too many, or of another shape or type.
    """
    path = needed(checkpoint)
    manifest, _ = open_manifest(path)
    _check(model if whole is None else whole, path, manifest, {})
    tensors = named_tensors(model)
    without = [names[0] for names, tensor in tensors.items() if tensor.is_meta]
    if without:
        raise InputError(f"{weights.some(without)} of the model have no memory: model.to_empty(device=...) gives it")
    by_name = {name: (names, tensor) for names, tensor in tensors.items() for name in names}
    filled: set[tuple[str, ...]] = set()
    with Opened(path, manifest) as files, torch.no_grad():
        for name in sorted(stored(manifest), key=weights.by_numbers):
            if name not in by_name:
                continue  # another stage's
            names, tensor = by_name[name]
            local, part = local_part(tensor)
            if local.numel() > 0:
                found = read_part(files, PREFIX + name, part)
                fill(local, found.view(local.shape), name, again=names in filled)
            filled.add(names)
