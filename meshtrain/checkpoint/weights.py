"""The weights of a checkpoint alone: for a plain model, and for a run that starts from them on any
layout."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from meshtrain.checkpoint.directory import (
    find_checkpoint,
    open_manifest,
    read_manifest,
    require_checkpoint,
)
from meshtrain.checkpoint.placement import pieces
from meshtrain.checkpoint.shard_file import ShardReader
from meshtrain.data.fingerprint import Files, sampled_digest
from meshtrain.errors import InputError
from meshtrain.huggingface import load
from meshtrain.huggingface.former_models import is_left_out, of_today
from meshtrain.huggingface.load import DTYPES, WeightSource, open_folder
from meshtrain.huggingface.safetensors import Entry, by_numbers, stored
from meshtrain.job.hub import local_path
from meshtrain.parallel.sharding import Part, overlap, shape_of, within


class HasBytes(Protocol):
    """A file with a contiguous piece of a tensor."""

    def read_bytes(self, name: str, begin: int, into: memoryview) -> None:
        """Fills `into` with the bytes of the piece from `begin` on."""


PREFIX = "model."  # prefix of the weights' names in a manifest
AVERAGE = "optimizer.{}.ema"  # name of a weight's moving average


@contextmanager
def open_checkpoint(checkpoint: str | Path, *, ema: bool = False) -> Iterator[WeightSource]:
    """The weights of a checkpoint, or of the newest in a run's folder, by their names in the model.

    Tied weights have their first name only. `ema`: moving averages instead of trained weights.
    Raises InputError: no checkpoint, or one without averages; DamagedError: it or its manifest is
    not intact.
    """
    path = require_checkpoint(checkpoint)
    manifest, _ = open_manifest(path)
    model = of_today(manifest.section("model"))
    names = [
        name.removeprefix(PREFIX)
        for name in manifest.tensors
        if name.startswith(PREFIX) and not is_left_out(manifest.section("model"), name)
    ]
    stored_as: dict[str, str] = {}  # name in the model -> name in the checkpoint
    entries: dict[str, Entry] = {}
    has_averages = False
    for name in sorted(names, key=by_numbers):
        stored_as[name] = PREFIX + name
        average = AVERAGE.format(name)
        if ema and average in manifest.tensors:  # buffers, and frozen weights, have none
            stored_as[name] = average
            has_averages = True
        tensor = manifest.tensors[stored_as[name]]
        entries[name] = Entry(name, tensor.dtype, tensor.shape)
    if ema and not has_averages:
        raise InputError(
            f"{path} holds no averages of weights: they are kept with optimizer.ema_decay"
        )
    with ShardReader(path, manifest) as files:
        yield WeightSource(
            path,
            entries,
            keys=lambda: model,
            read=lambda name, part: read_part(files, stored_as[name], part),
            lora=manifest.section("train").get("lora"),
        )


def open_weights(path: str | Path) -> AbstractContextManager[WeightSource]:
    """Opens a path of `model.weights`: a checkpoint, a run's folder, or a Hugging Face directory,
    which may be that of a model of the hub."""
    return open_folder(path) if find_checkpoint(path) is None else open_checkpoint(path)


def weights_digest(path: str | Path) -> str:
    """16 hex digits that tell stored weights from others: of a checkpoint its manifest's, which has
    those of all its files, and of a Hugging Face directory a `sampled_digest`. Raises InputError as
    `open_weights` does."""
    checkpoint = find_checkpoint(path)
    if checkpoint is not None:
        _, digest = read_manifest(checkpoint)
        return digest[:16]
    folder = local_path(path)
    names = sorted(file.name for file in stored(folder))
    sizes = [(folder / name).stat().st_size for name in names]
    return sampled_digest(Files(folder, names, sizes))


def load_weights(checkpoint: str | Path, model: nn.Module, whole: nn.Module | None = None) -> None:
    """Fills a model, plain or parallelized, from a checkpoint that any layout wrote; each rank
    reads its parts.

    Args:
        checkpoint: a checkpoint, or a run's folder, whose newest complete one is taken.
        model: with memory (see `to_empty` for one on the meta device). Floating dtypes may differ
            from the stored ones.
        whole: the whole model, on any device, if `model` is a stage of it; by default `model`
            itself.

    Raises:
        DamagedError: the checkpoint is not what was written; names file and tensor. InputError:
            there is none, or its tensors are not the model's: names those that are missing,
            unknown, or of another shape or dtype.
    """
    with open_checkpoint(checkpoint) as source:
        load.load_weights(model, source, whole)


def read_part(files: ShardReader, name: str, part: Part) -> Tensor:
    """A part of a tensor in its stored dtype; a scalar has one dim of size 1. Raises DamagedError:
    a damaged file."""
    placement = files.manifest.tensors[name]
    result = torch.empty(shape_of(part), dtype=DTYPES[placement.dtype])
    for rank, piece in pieces(placement, files.manifest.layout, part):
        file = files.shard_with(name, rank, piece)
        read_piece(file, name, piece, overlap(piece, part), result, part)
    return result


@torch.no_grad()
def read_piece(
    file: HasBytes, name: str, piece: Part, part: Part, target: Tensor, target_part: Part
) -> None:
    """Reads a part of a tensor, from the file that holds `piece`, into `target`, which has the
    stored dtype and holds `target_part`. All three are parts of the whole tensor; `part` lies
    within both others."""
    into = target[within(part, target_part)]
    inner, shape = within(part, piece), shape_of(piece)

    # What is read is contiguous in the file: one index of each of the first dims (an expert), a
    # range of the next one (its rows), and all of the others (columns). Columns that are not wanted
    # are left out afterwards.
    dim = _first_range(inner)
    rows = inner[dim]
    columns, widths = inner[dim + 1 :], shape[dim + 1 :]
    first_row = 0
    for size, span in zip(shape[: dim + 1], inner, strict=False):
        first_row = first_row * size + span.start

    # A slice of a tensor, or one on a device, is filled from a buffer.
    in_place = (
        into.device.type == "cpu"
        and into.is_contiguous()
        and tuple(into.shape[dim + 1 :]) == widths
    )
    values = into
    if not in_place:
        values = torch.empty((rows.stop - rows.start, *widths), dtype=into.dtype, device="cpu")
    begin = first_row * math.prod(widths) * values.element_size()
    file.read_bytes(name, begin, values.view(-1).view(torch.uint8).numpy().data)
    if not in_place:
        into.copy_(values[(slice(None), *columns)])


def _first_range(part: Part) -> int:
    """The first dim of which a part has several indices; the last dim if there is none."""
    for dim, span in enumerate(part):
        if span.stop - span.start > 1:
            return dim
    return len(part) - 1
