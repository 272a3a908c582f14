"""How transformers' files name and split the tensors of its classes: `stored_as` of a model file,
from transformers' own conversion tables.

Experts are fused in memory, and most files have a tensor for each; other tensors have other names
in files. transformers converts back when it saves. Here it does so with tensors on the meta device,
and what comes out are views, which say of which tensor, and of which part of it, a stored tensor
consists.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshtrain.errors import InputError, join_some
from meshtrain.experts import Balance
from meshtrain.huggingface.stored_names import StoredTensor, Table, stored_tensors
from meshtrain.parallel.sharding import Part

LOADS = "*.balance.loads"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer, or of an expert


@dataclass(frozen=True)
class FileNames:
    """The names that files have for a model's tensors, where they are not the model's own.

    Attributes:
        stored_as: as in a model file (`stored_names`).
        unsupported: tensors of files that `stored_as` cannot describe, because they are not parts
            of one tensor of the model: files have them transposed, interleaved or joined.
    """

    stored_as: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()

    def require_supported(self) -> None:
        """Raises InputError: some tensors are unsupported."""
        if self.unsupported:
            raise InputError(
                f"transformers stores {join_some(list(self.unsupported))} in another form than a "
                "part of one tensor of the model (transposed, interleaved or joined), which "
                "meshtrain neither reads nor writes: save the model by "
                "save_pretrained(folder, save_original_format=False) and start from that folder, "
                "without train.export"
            )


def file_names(model: nn.Module) -> FileNames:
    """The names in files of a model of transformers, which may be on the meta device.

    Args:
        model: of a class of transformers, or of one that is derived from it elsewhere.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # What a router's `Balance` counts is in no file.
    counting = [name for name, module in model.named_modules() if isinstance(module, Balance)]
    loads = [f"{name}.loads" for name in counting]
    state = {name: x for name, x in model.state_dict().items() if name not in loads}
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    name_of = {_storage(tensor): name for name, tensor in tensors.items()}
    own = type(model)
    model.__class__ = _class_in_transformers(own)
    try:
        with _KeepViews():
            stored = revert_weight_conversion(model, dict(tensors))  # type: ignore[arg-type]
    finally:
        model.__class__ = own

    pieces: dict[str, list[StoredTensor]] = {name: [] for name in tensors}
    unsupported = []
    for stored_name, view in stored.items():
        name = name_of.get(_storage(view))
        part = None if name is None else _part_of(view, tensors[name])
        if name is None or part is None:
            unsupported.append(stored_name)
        else:
            pieces[name].append(StoredTensor(stored_name, tuple(view.shape), part))

    rows: dict[str, tuple[str, ...]] = {}
    for name, of_tensor in pieces.items():
        if not of_tensor:
            continue  # part of one that is unsupported
        of_tensor.sort(key=lambda piece: [span.start for span in piece.part])
        row = _row(of_tensor, shapes[name])
        if stored_tensors(name, shapes[name], {name: row}) != of_tensor:
            unsupported += [piece.name for piece in of_tensor]
        elif row != (name,):
            rows[name] = row
    rows = _fold(rows, shapes)
    if loads:
        rows[LOADS] = ()
    return FileNames(rows, tuple(unsupported))


def _class_in_transformers(model: type) -> type:
    """The class that the tables know: they leave classes of other packages alone."""
    bases = (base for base in model.__mro__ if base.__module__.startswith("transformers.models."))
    return next(bases, model)


class _KeepViews(TorchFunctionMode):
    """Inside, `contiguous` does not copy."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.contiguous:
            return args[0]
        return function(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _part_of(view: Tensor, whole: Tensor) -> Part | None:
    """The part of a contiguous tensor that a view shows; None: its dims are in another order."""
    if whole.dim() == 0:
        return (slice(0, 1),)
    remaining = list(zip(view.shape, view.stride(), strict=True))
    offset = view.storage_offset()
    spans = []
    for size, stride in zip(whole.shape, whole.stride(), strict=True):
        start = offset // stride % max(size, 1)
        length = 1
        if remaining and remaining[0][1] == stride:
            length, _ = remaining.pop(0)
        spans.append(slice(start, start + length))
    return None if remaining else tuple(spans)


def _row(pieces: list[StoredTensor], shape: tuple[int, ...]) -> tuple[str, ...]:
    """The names of a row of `stored_as` that may describe these pieces, in their order."""
    if len(pieces[0].shape) == len(shape):
        return tuple(piece.name for piece in pieces)
    # Numbered along dim 0: those of number 0, with a place for the number.
    first = [piece.name for piece in pieces if piece.part[0].start == 0]
    second = pieces[len(first)].name if len(first) < len(pieces) else None
    return tuple(_numbered(name, first[0] if second is None else second) for name in first)


def _numbered(name: str, other: str) -> str:
    """A name with `{}` for the first number that is another one in `other`; for the last number if
    there is only one tensor."""
    numbers = list(NUMBER.finditer(name))
    differing = [
        one for one, two in zip(numbers, NUMBER.finditer(other), strict=False) if one[0] != two[0]
    ]
    if not numbers:
        return name
    at = (differing or numbers[-1:])[0]
    return f"{name[: at.start()]}{{}}{name[at.end() :]}"


def _fold(
    rows: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, ...]]:
    """The same table with one row for all layers, where that names each tensor as before."""
    folded = {_any_number(name): tuple(map(_any_number, row)) for name, row in rows.items()}
    if _says_the_same(folded, rows, shapes):
        return folded
    return dict(rows)


def _any_number(name: str) -> str:
    return NUMBER.sub("*", name)


def _says_the_same(folded: Table, rows: Table, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    def named(table: Table) -> Iterable[list[StoredTensor]]:
        return [stored_tensors(name, shape, table) for name, shape in shapes.items()]

    try:
        return named(folded) == named(rows)
    except ValueError:  # a pattern and its names have not as many numbers
        return False
