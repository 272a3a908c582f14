"""Saving a checkpoint as a DCP folder, by torch's own writer, in one process.

`torch.distributed.checkpoint.load` reads it into a model and an AdamW of any processes. The writer
asks for one tensor, or part of one, after the other, which is read only then.
"""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from meshtrain.checkpoint.dcp.load import MOMENTS, STEPS
from meshtrain.checkpoint.dcp.names import Heads, Naming, Place
from meshtrain.checkpoint.dcp.options import Options
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.shard_file import ShardReader
from meshtrain.checkpoint.state import MODEL, OPTIMIZER, UPDATES
from meshtrain.checkpoint.weights import read_part
from meshtrain.errors import InputError, join_some
from meshtrain.huggingface.load import DTYPES
from meshtrain.parallel.sharding import Part, shape_of

# Of one file. torch's writer keeps what it has written to a file in memory until the next one.
FILE_BYTES = 2**30
# Options of torch's AdamW that follow from no config.
_FIXED = {
    "amsgrad": False,
    "maximize": False,
    "foreach": False,
    "capturable": False,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}


@dataclass(frozen=True)
class Target:
    """A tensor of the folder, and the checkpoint's tensors of which it consists."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[tuple[str, Place], ...]

    def chunks(self, most: int) -> Iterator[Part]:
        """The parts that are written by themselves, of at most `most` bytes where rows allow."""
        rows, *others = self.shape or (1,)
        row_bytes = math.prod(others) * self.dtype.itemsize
        rows_of_chunk = most // max(1, row_bytes)
        _, place = self.sources[0]
        if place.heads:
            # The rows of each of its sources lie apart from each other in it.
            rows_of_chunk = rows
        rows_of_chunk = max(1, rows_of_chunk)

        whole = [slice(0, size) for size in others]
        for first in range(0, rows, rows_of_chunk):
            end = min(first + rows_of_chunk, rows)
            yield slice(first, end), *whole

    def read(self, files: ShardReader, part: Part) -> Tensor:
        """A chunk, from the files of the checkpoint."""
        first, place = self.sources[0]
        if not place.heads:
            return read_part(files, first, part)
        values = torch.empty(shape_of(part), dtype=self.dtype)
        for name, place in self.sources:
            own = files.manifest.tensors[name].shape
            whole = tuple(slice(0, size) for size in own)
            tensor = read_part(files, name, whole)
            for run in place.runs(whole[0]):
                values[run.there] = tensor[run.own]
        return values


@dataclass(frozen=True)
class DcpState:
    """What a folder has: tensors, numbers that stand for tensors, and plain values."""

    tensors: Sequence[Target]
    scalars: Mapping[str, float]
    values: Mapping[str, Any]


def state_of(
    manifest: Manifest,
    names: Mapping[str, Sequence[str]],
    options: Callable[[str, tuple[int, ...]], Options],
    *,
    lr_share: float,
    updates: float,
    naming: Naming | None = None,
    heads: Heads | None = None,
) -> DcpState:
    """What the folder of a checkpoint has.

    Args:
        names: first name of a tied tensor in the model -> all of them.
        options: of AdamW, for a parameter by its name and shape.
        lr_share: the learning rate of the next update, as a share of the highest one.
        updates: the number of updates.
        naming, heads: another framework's names, and the model's heads; None: the model's own, with
            the prefix `model.`.

    Raises InputError: the naming is another model's; the optimizer is not AdamW.
    """

    def places(name: str, of_state: bool = False) -> list[Place]:
        if naming is None:
            return [Place(name)]
        assert heads is not None
        return naming.places(name, heads, of_state=of_state)[:1]

    weights = [name.removeprefix(f"{MODEL}.") for name in manifest.tensors if _is_weight(name)]
    _require_names(weights, places, naming)
    _require_adamw(manifest)
    prefix = f"{MODEL}." if naming is None else ""  # torchtitan's have none
    targets: dict[str, Target] = {}
    scalars: dict[str, float] = {}
    values: dict[str, Any] = {}

    for name in weights:
        for own in names.get(name, (name,)):
            for place in places(own):
                _add(targets, manifest, f"{MODEL}.{name}", f"{prefix}{place.name}", place)
        if f"{OPTIMIZER}.{name}.{MOMENTS[0]}" not in manifest.tensors:
            continue  # no update changes it
        shape = manifest.tensors[f"{MODEL}.{name}"].shape
        for place in places(name, of_state=True):
            state = f"{OPTIMIZER}.state.{place.name}"
            for kind in MOMENTS:
                _add(targets, manifest, f"{OPTIMIZER}.{name}.{kind}", f"{state}.{kind}", place)
            scalars[f"{state}.step"] = updates
            group = _options_of_torch(options(name, shape), lr_share)
            for key, value in group.items():
                option = f"{OPTIMIZER}.param_groups.{place.name}.{key}"
                if values.setdefault(option, value) != value:
                    raise InputError(
                        f"{name} has another {key} than what {place.name} also consists of: give "
                        "optimizer.groups that have all of it"
                    )
    _require_whole(targets.values(), manifest)
    values |= {
        STEPS: manifest.step,
        "train_state.ntokens_seen": manifest.tokens,
        "lr_scheduler.last_epoch": manifest.step,
    }
    return DcpState(list(targets.values()), scalars, values)


def left_out(manifest: Manifest) -> list[str]:
    """The tensors of a checkpoint that a folder does not have: averages and a loss scale."""
    kinds = tuple(f".{kind}" for kind in MOMENTS)
    names = [name for name in manifest.tensors if not _is_weight(name) and name != UPDATES]
    return [name for name in names if not name.endswith(kinds)]


def _is_weight(name: str) -> bool:
    return name.startswith(f"{MODEL}.")


def _require_names(
    weights: Sequence[str], places: Callable[[str], list[Place]], naming: Naming | None
) -> None:
    unnamed = [name for name in weights if not places(name)]
    if naming is not None and unnamed:
        raise InputError(
            f"{naming.title} has no {join_some(unnamed)}: --as has to name the checkpoint's model"
        )


def _require_adamw(manifest: Manifest) -> None:
    others = [name for name in manifest.tensors if name.endswith(".momentum_buffer")]
    if others:
        raise InputError(
            f"the checkpoint has {others[0]}, and --format dcp writes AdamW's state alone: without "
            "it the weights are exported"
        )


def _require_whole(targets: Iterable[Target], manifest: Manifest) -> None:
    """Raises InputError: heads of a tensor are missing, or are others than the model's keys say."""
    for target in targets:
        for name, place in target.sources:
            own = manifest.tensors[name].shape
            rows = own[0] if own else 1
            if place.heads and rows != len(place.heads) * place.width:
                raise InputError(
                    f"{name} has {rows} rows, and by the model's keys {len(place.heads)} heads of "
                    f"{place.width}"
                )
        found = sum(len(place.heads) for _, place in target.sources)
        if found != target.sources[0][1].all_heads:
            raise InputError(f"the checkpoint has not all of which {target.name} consists")


def _add(
    targets: dict[str, Target], manifest: Manifest, source: str, name: str, place: Place
) -> None:
    """Adds a checkpoint's tensor to the tensor of the folder of which it is the whole or some
    heads."""
    placement = manifest.tensors[source]
    shape = place.shape(placement.shape)
    target = targets.get(name) or Target(name, DTYPES[placement.dtype], shape, ())
    targets[name] = replace(target, sources=(*target.sources, (source, place)))


def _options_of_torch(options: Options, lr_share: float) -> dict[str, Any]:
    """The options of a parameter, by the names of torch's AdamW and its schedules."""
    return {
        **vars(options),
        "initial_lr": options.lr,
        "lr": options.lr * lr_share,
        **_FIXED,
    }


# Writing ------------------------------------------------------------------------------------------


def write_folder(folder: Path, state: DcpState, files: ShardReader, file_bytes: int) -> None:
    """Writes a new folder as if processes had that hold `file_bytes` each. Raises DamagedError: the
    checkpoint is damaged; OSError."""
    targets = {target.name: target for target in state.tensors}

    def resolve(item: WriteItem) -> Tensor | io.BytesIO:
        name = item.index.fqn
        if name in state.values:
            buffer = io.BytesIO()
            torch.save(state.values[name], buffer)
            return buffer
        if name in state.scalars:
            return torch.tensor(state.scalars[name], dtype=torch.float32)
        chunk = _chunk_of(item)
        part = tuple(
            slice(start, start + size)
            for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        target = targets[name]
        return target.read(files, part or (slice(0, 1),)).view(tuple(chunk.sizes))

    planner = _Planner(resolve)
    writer = _Writer(folder, overwrite=False, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = [writer.prepare_local_plan(plan) for plan in _plans(state, file_bytes)]
    plans, metadata = create_default_global_save_plan(plans)
    # What torch's converters make of names: {"model": {name: ...}, ...}
    paths = {}
    for name in metadata.state_dict_metadata:
        section, _, rest = name.partition(".")
        paths[name] = (section, rest) if section in _SECTIONS else (name,)
    metadata = replace(metadata, planner_data=paths)
    plans = writer.prepare_global_plan(plans)
    results = [writer.write_data(plan, planner).wait() for plan in plans]
    writer.finish(metadata, results)


_SECTIONS = (MODEL, OPTIMIZER, "train_state", "lr_scheduler")


def _plans(state: DcpState, file_bytes: int) -> list[SavePlan]:
    """What each of the processes would write."""
    plans: list[list[WriteItem]] = [[]]
    nbytes = 0  # of the last plan
    for name in state.values:
        plans[-1].append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
    for name in state.scalars:
        plans[-1].append(_item(name, torch.float32, (), ()))
    for target in state.tensors:
        for part in target.chunks(file_bytes):
            size = math.prod(shape_of(part)) * target.dtype.itemsize
            if nbytes and nbytes + size > file_bytes:
                plans.append([])
                nbytes = 0
            plans[-1].append(_item(target.name, target.dtype, target.shape, part))
            nbytes += size
    return [SavePlan(items) for items in plans]


def _item(name: str, dtype: torch.dtype, shape: tuple[int, ...], part: Part) -> WriteItem:
    if not shape:
        part = ()  # of a scalar, which torch writes without dims
    offsets = torch.Size([span.start for span in part])
    sizes = torch.Size(shape_of(part))
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, sizes),
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(shape),
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _chunk_of(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


class _Planner(DefaultSavePlanner):
    """Gives the writer what it asks for."""

    def __init__(self, resolve: Callable[[WriteItem], Tensor | io.BytesIO]) -> None:
        super().__init__()
        self._resolve = resolve

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._resolve(write_item)


class _Writer(FileSystemWriter):
    """torch's writer, which keeps in the folder no path of this machine."""

    def storage_meta(self) -> StorageMeta | None:
        return None
