"""Weights from a Hugging Face directory: checked by their headers, then read part by part.

A rank reads of each tensor the part that it holds and nothing else, whatever the layout: `parts.local_part` says where
in the whole that part lies, and a safetensors file can be read from there.
"""

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from meshtrain import weights
from meshtrain.errors import InputError
from meshtrain.parts import local_part

HARMLESS = ("*rotary_emb.inv_freq",)  # older files have them, though they follow from the config
NAMED = 40  # tensors that a message names of each problem
KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {word: dtype for dtype, word in KINDS.items()}


def named_tensors(model: nn.Module) -> dict[tuple[str, ...], Tensor]:
    """A model's parameters and persistent buffers, each with all its names: tied ones have several."""
    names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)  # under FSDP it also lets go of what is gathered
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {tuple(several): tensors[several[0]] for several in names.values()}


def check_weights(model: nn.Module, folder: str | Path, keys: Mapping[str, Any] | None = None) -> None:
    """Whether the tensors of a folder are those of a model; reads headers only.

    Args:
        model: on any device, the meta device too.
        folder: a Hugging Face directory.
        keys: of the model's Config, if the message is to name those in which the folder's config.json differs.

    Raises:
        InputError: names what is missing, too much, of another shape or of a type that cannot be read.
    """
    folder = Path(folder).expanduser()
    entries = {name: entry for file in weights.stored(folder).values() for name, entry in file.items()}

    def config_json() -> Mapping[str, Any]:
        return json.loads(weights.read_config(folder)) if (folder / weights.CONFIG).is_file() else {}

    must_fit(named_tensors(model), entries, folder, keys or {}, config_json)


def must_fit(
    tensors: Mapping[tuple[str, ...], Tensor],
    entries: Mapping[str, weights.Entry],
    where: Path,
    keys: Mapping[str, Any],
    keys_there: Callable[[], Mapping[str, Any]],
) -> None:
    """Refuses stored tensors that are not those of a model.

    Args:
        tensors: of the model, as `named_tensors` gives them.
        keys, keys_there: of the model's Config, and those that stand beside the weights: the message names the sizes
            in which they differ.

    Raises:
        InputError: names what is missing, too much, of another shape or of a type that cannot be read.
    """
    problems = _problems(tensors, entries)
    if not problems:
        return
    differ = _differing(keys, keys_there()) if keys else ""
    hint = f"; its config and the run's keys differ: {differ}: take those keys away" if differ else ""
    raise InputError(f"the weights in {where} do not fit the model: {'; '.join(problems)}{hint}")


def _problems(tensors: Mapping[tuple[str, ...], Tensor], entries: Mapping[str, weights.Entry]) -> list[str]:
    missing, shapes, kinds = [], [], []
    known = {name for names in tensors for name in names}
    for names, tensor in tensors.items():
        present = [name for name in names if name in entries]
        missing += [] if present else [names[0]]
        for entry in (entries[name] for name in present):
            if entry.shape != tuple(tensor.shape):
                shapes.append(f"{entry.name} (there {list(entry.shape)}, the model's {list(tensor.shape)})")
            if entry.dtype not in (weights.FLOATS if tensor.is_floating_point() else (KINDS[tensor.dtype],)):
                kinds.append(f"{entry.name} ({entry.dtype})")
    strange = [n for n in entries if n not in known and not any(fnmatchcase(n, pattern) for pattern in HARMLESS)]
    problems = []
    if missing:
        tied = " (do they tie it? then give model.tie_word_embeddings: true)" * (missing == ["lm_head.weight"])
        problems.append(f"missing {weights.some(missing, NAMED)}{tied}")
    if strange:
        problems.append(f"the model has no {weights.some(strange, NAMED)}")
    if shapes:
        problems.append(f"other shapes: {weights.some(shapes, NAMED)}")
    if kinds:
        problems.append(
            f"types that cannot be read: {weights.some(kinds, NAMED)}: expected {', '.join(weights.FLOATS)}"
        )
    return problems


def _differing(keys: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """The sizes that stand otherwise beside the weights: `vocab_size (there 256, here 300)`."""
    sizes = {name: value for name, value in keys.items() if isinstance(value, int)}
    return weights.some(
        [f"{name} (there {there[name]}, here {n})" for name, n in sizes.items() if there.get(name, n) not in (n, None)]
    )


def load_weights(model: nn.Module, folder: str | Path, whole: nn.Module | None = None) -> None:
    """Fills a model, parallelized or not, from a Hugging Face directory; each rank reads the parts that it holds.

    Values are cast from the file's floating type to the parameter's. Of tied parameters one name is enough.

    Args:
        whole: the model, on any device, of which `model` may be a stage; by default `model` itself.

    Raises:
        InputError: the files are broken or do not fit the model; tensors that the model ties differ in the files.
    """
    folder = Path(folder).expanduser()
    check_weights(model if whole is None else whole, folder)
    tensors = named_tensors(model)
    by_name = {name: (names, tensor) for names, tensor in tensors.items() for name in names}
    filled: set[tuple[str, ...]] = set()
    with torch.no_grad():
        for path, entries in weights.stored(folder).items():
            with safe_open(path, framework="pt") as file:
                for name in entries:
                    if name not in by_name:
                        continue  # a harmless one, or one of another stage's
                    names, tensor = by_name[name]
                    _fill(file, name, tensor, again=names in filled)
                    filled.add(names)


def _fill(file: Any, name: str, tensor: Tensor, *, again: bool) -> None:
    local, part = local_part(tensor)
    if local.numel() > 0:
        fill(local, file.get_slice(name)[part] if tensor.shape else file.get_tensor(name), name, again=again)


def fill(local: Tensor, found: Tensor, name: str, *, again: bool) -> None:
    """Copies values into what a rank holds of a tensor; compares if another name of the same tensor has filled it.

    Raises:
        InputError: they differ.
    """
    if not again:
        local.copy_(found)
    elif not torch.equal(local, found.to(local)):
        raise InputError(
            f"{name} has values of its own in the files, and the model ties it to another tensor: "
            "give model.tie_word_embeddings: false"
        )
