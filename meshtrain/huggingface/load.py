"""Loading weights into a model on any layout, from a Hugging Face directory or another source.

What does not fit is known from headers, before a weight is read. Then a rank reads only the part that it holds.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from meshtrain.errors import InputError
from meshtrain.formatting import join_some
from meshtrain.huggingface.safetensors import CONFIG, FLOATS, Entry, read_config, stored
from meshtrain.parallel.sharding import Part, local_part

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


@dataclass(frozen=True)
class WeightSource:
    """Stored weights of which any part can be read: of a Hugging Face directory, or of a checkpoint."""

    path: Path  # of their folder
    entries: Mapping[str, Entry]  # by name, in the order in which they are best read
    keys: Callable[[], Mapping[str, Any]]  # those of the model's Config that stand beside the weights
    read: Callable[[str, Part], Tensor]  # a part of a tensor in the stored type; a scalar is one dim of size 1


@contextmanager
def open_folder(folder: str | Path) -> Iterator[WeightSource]:
    """The weights of a Hugging Face directory; InputError if it is none, or its files are broken."""
    folder = Path(folder).expanduser()
    files = stored(folder)
    entries = {name: (path, entry) for path, of_file in files.items() for name, entry in of_file.items()}
    opened: dict[Path, Any] = {}  # one at a time: the entries come file by file

    def keys() -> Mapping[str, Any]:
        return json.loads(read_config(folder)) if (folder / CONFIG).is_file() else {}

    def read(name: str, part: Part) -> Tensor:
        path, entry = entries[name]
        if path not in opened:
            stack.close()
            opened.clear()
            opened[path] = stack.enter_context(safe_open(path, framework="pt"))
        return opened[path].get_slice(name)[part] if entry.shape else opened[path].get_tensor(name)

    with ExitStack() as stack:
        yield WeightSource(folder, {name: entry for name, (_, entry) in entries.items()}, keys, read)


def named_tensors(model: nn.Module) -> dict[tuple[str, ...], Tensor]:
    """A model's parameters and persistent buffers, each with all its names: tied ones have several."""
    names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)  # under FSDP it also lets go of what is gathered
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {tuple(several): tensors[several[0]] for several in names.values()}


def check_weights(model: nn.Module, source: WeightSource, keys: Mapping[str, Any] | None = None) -> None:
    """Raises InputError, which names all that differs, unless stored tensors are those of a model; none is read.

    `keys`: of the model's Config, if the message is to name the sizes in which those beside the weights differ.
    """
    problems = _problems(named_tensors(model), source.entries)
    if not problems:
        return
    differ = _differing(keys, source.keys()) if keys else ""
    hint = f"; its config and the run's keys differ: {differ}: take those keys away" if differ else ""
    raise InputError(f"the weights in {source.path} do not fit the model: {'; '.join(problems)}{hint}")


def _problems(tensors: Mapping[tuple[str, ...], Tensor], entries: Mapping[str, Entry]) -> list[str]:
    missing, shapes, kinds = [], [], []
    known = {name for names in tensors for name in names}
    for names, tensor in tensors.items():
        present = [name for name in names if name in entries]
        missing += [] if present else [names[0]]
        for entry in (entries[name] for name in present):
            if entry.shape != tuple(tensor.shape):
                shapes.append(f"{entry.name} (there {list(entry.shape)}, the model's {list(tensor.shape)})")
            if entry.dtype not in (FLOATS if tensor.is_floating_point() else (KINDS[tensor.dtype],)):
                kinds.append(f"{entry.name} ({entry.dtype})")
    unknown = [n for n in entries if n not in known and not any(fnmatchcase(n, pattern) for pattern in HARMLESS)]
    problems = []
    if missing:
        tied = " (do they tie it? then give model.tie_word_embeddings: true)" * (missing == ["lm_head.weight"])
        problems.append(f"missing {join_some(missing, NAMED)}{tied}")
    if unknown:
        problems.append(f"the model has no {join_some(unknown, NAMED)}")
    if shapes:
        problems.append(f"other shapes: {join_some(shapes, NAMED)}")
    if kinds:
        problems.append(f"types that cannot be read: {join_some(kinds, NAMED)}: expected {', '.join(FLOATS)}")
    return problems


def _differing(keys: Mapping[str, Any], stored_keys: Mapping[str, Any]) -> str:
    """The sizes that stand otherwise beside the weights: `vocab_size (there 256, here 300)`."""
    sizes = {name: value for name, value in keys.items() if isinstance(value, int)}
    differ = {name: n for name, n in sizes.items() if stored_keys.get(name, n) not in (n, None)}
    return join_some([f"{name} (there {stored_keys[name]}, here {n})" for name, n in differ.items()])


def load_weights(model: nn.Module, source: WeightSource, whole: nn.Module | None = None) -> None:
    """Fills a model, plain or parallelized, and casts to the parameters' types. Of tied names one is enough.

    Args:
        model: with memory; `to_empty` gives it to one on the meta device.
        whole: the model, on any device, of which `model` may be a stage; by default `model` itself.

    Raises:
        InputError: the weights do not fit the model; tensors that the model ties differ where they are stored.
    """
    check_weights(model if whole is None else whole, source)
    tensors = named_tensors(model)
    without = [names[0] for names, tensor in tensors.items() if tensor.is_meta]
    if without:
        raise InputError(f"{join_some(without)} of the model have no memory: model.to_empty(device=...) gives it")
    by_name = {name: (names, tensor) for names, tensor in tensors.items() for name in names}
    filled: set[tuple[str, ...]] = set()
    with torch.no_grad():
        for name in source.entries:
            if name not in by_name:
                continue  # a harmless one, or another stage's
            names, tensor = by_name[name]
            local, part = local_part(tensor)
            if local.numel() > 0:
                values = source.read(name, part).reshape(local.shape)
                if names not in filled:
                    local.copy_(values)
                elif not torch.equal(local, values.to(local)):
                    raise InputError(
                        f"{name} has values of its own in the files, and the model ties it to another tensor: "
                        "give model.tie_word_embeddings: false"
                    )
            filled.add(names)
