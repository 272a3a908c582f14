"""Checkpoints as the ranks of any layout would write them, made by one process; and damage to
them."""

import dataclasses
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint.manifest import Manifest, file_of
from meshtrain.checkpoint.placement import Placement, part_to_write
from meshtrain.checkpoint.shard_file import ShardReader, write_shard
from meshtrain.checkpoint.weights import read_part
from meshtrain.huggingface.load import KINDS, named_tensors
from meshtrain.huggingface.safetensors import Entry
from meshtrain.layout import Layout

Cuts = tuple[tuple[str, int], ...]
SHARDED: dict[str, Any] = {  # how `write_checkpoint` writes what is sharded over 3 ranks
    "sizes": {"dp_shard": 3},
    "cuts": lambda name, tensor: (("dp_shard", 0),) * bool(tensor.dim()),
}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """As a checkpoint names them."""
    return {f"model.{names[0]}": tensor.detach() for names, tensor in named_tensors(model).items()}


def write_checkpoint(
    where: Path,
    tensors: Mapping[str, Tensor],
    *,
    step: int = 100,
    sizes: Mapping[str, int] | None = None,
    cuts: Callable[[str, Tensor], Cuts] = lambda name, tensor: (),
    stages: Callable[[str], tuple[int, ...]] = lambda name: (0,),
    config: Mapping[str, Any] | None = None,
    **about: Any,
) -> Path:
    """Writes a checkpoint of these tensors into the folder `where`; `about`: other fields of the
    manifest."""
    layout = Layout(sizes or {"dp_shard": 1})
    placements = {
        name: Placement(tuple(one.shape), KINDS[one.dtype], cuts(name, one), stages(name))
        for name, one in tensors.items()
    }
    unfinished = folder.begin(where, step)
    files = {}
    for rank in range(layout.world_size):
        parts = {
            name: part_to_write(placement, layout, rank) for name, placement in placements.items()
        }
        rows = []
        for name, part in parts.items():
            if part is not None:
                whole = tensors[name].detach().reshape(placements[name].dims)
                piece = whole[part].contiguous()
                data = memoryview(piece.view(-1).view(torch.uint8).numpy())
                rows.append((Entry(name, placements[name].dtype, tuple(piece.shape)), data))
        files[file_of(rank)] = write_shard(unfinished / file_of(rank), rows)
    manifest = Manifest(
        step=step,
        samples=8 * step,
        tokens=8 * 32 * step,
        layout=layout,
        tensors=placements,
        files=files,
        config=config or {},
        data={},
        versions={"meshtrain": "0.1.0"},
        rng={"seed": 0},
        counters={},
        evaluation=None,
        written="2026-01-01T00:00:00Z",
    )
    return folder.finish(where, step, dataclasses.replace(manifest, **about).to_json())


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, whatever layout wrote them."""
    manifest, _ = folder.open_manifest(checkpoint)
    tensors = {}
    with ShardReader(checkpoint, manifest) as files:
        for name, placement in manifest.tensors.items():
            whole = tuple(slice(0, size) for size in placement.dims)
            tensors[name] = read_part(files, name, whole).view(placement.shape)
    return tensors


def differing_tensors(a: Path, b: Path) -> list[str]:
    """The tensors of two checkpoints that are not bit-equal, or that only one of them has."""
    first, second = tensors_of(a), tensors_of(b)
    differing = first.keys() ^ second.keys()
    for name in first.keys() & second.keys():
        x, y = first[name], second[name]
        alike = (x.dtype, x.shape) == (y.dtype, y.shape)
        if not alike or not torch.equal(bits_of(x), bits_of(y)):
            differing.add(name)
    return sorted(differing)


def bits_of(tensor: Tensor) -> Tensor:
    """Bytes, by which NaN equals NaN, and minus zero is not zero."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def data_of(shard: Path) -> int:
    """Where the tensors' bytes begin."""
    return 8 + struct.unpack("<Q", shard.read_bytes()[:8])[0]


def flip(file: Path, bit: int = -1) -> None:
    """Flips a bit; a negative number counts from the end."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
