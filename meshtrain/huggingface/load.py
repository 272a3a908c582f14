"""Loading weights into a model on any layout, from a Hugging Face directory or another source.

Mismatches are found from the headers, before any weight is read. Then each rank reads only the
parts that it holds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from meshtrain.errors import InputError, fold_names, join_some, plural
from meshtrain.huggingface.safetensors import CONFIG, FLOATS, Entry, read_config, stored
from meshtrain.huggingface.stored_names import StoredTensor, stored_tensors, table_of
from meshtrain.job.parsing import parse_json
from meshtrain.job.pending import advance
from meshtrain.parallel.sharding import Part, is_empty, local_part, overlap, shape_of, within
from meshtrain.parallel.tp_plan import plan_of

HARMLESS = ("*rotary_emb.inv_freq",)  # stored in older files, although they follow from the config
NAMED = 40  # tensors that a message names per problem
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
    """Stored weights, of a Hugging Face directory or a checkpoint, of which any part can be
    read."""

    path: Path  # the folder
    entries: Mapping[str, Entry]  # by name, in the order in which they are read best
    # returns the keys of the model's Config that are stored with the weights
    keys: Callable[[], Mapping[str, Any]]
    # returns a part of a tensor in the stored dtype; a scalar has one dim, size 1
    read: Callable[[str, Part], Tensor]
    lora: Any = None  # `train.lora` of the run that wrote the weights


@contextmanager
def open_folder(folder: str | Path) -> Iterator[WeightSource]:
    """The weights of a Hugging Face directory. Raises InputError: it is not one, or its files are
    damaged."""
    folder = Path(folder).expanduser()
    files = stored(folder)
    entries = {
        name: (path, entry) for path, of_file in files.items() for name, entry in of_file.items()
    }
    opened: dict[Path, Any] = {}  # one at a time: entries are ordered by file
    for path in files:  # fail now, and not when weights are read
        with _open(path):
            pass

    def keys() -> Mapping[str, Any]:
        return parse_json(read_config(folder)) if (folder / CONFIG).is_file() else {}

    def read(name: str, part: Part) -> Tensor:
        advance()
        path, entry = entries[name]
        if path not in opened:
            stack.close()
            opened.clear()
            opened[path] = stack.enter_context(_open(path))
        return opened[path].get_slice(name)[part] if entry.shape else opened[path].get_tensor(name)

    with ExitStack() as stack:
        yield WeightSource(
            folder, {name: entry for name, (_, entry) in entries.items()}, keys, read
        )


def _open(path: Path) -> Any:
    """With the safetensors library, which refuses headers that `read_header` takes."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise InputError(f"{path} is no safetensors file: {error}: copy it anew") from error


def named_tensors(model: nn.Module) -> dict[tuple[str, ...], Tensor]:
    """A model's parameters and persistent buffers, keyed by all their names: tied ones have
    several."""
    names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)  # under FSDP, this also frees gathered weights
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {tuple(several): tensors[several[0]] for several in names.values()}


# Where a stored tensor goes: all names of the model's tensor, the tensor, and the part of it that
# is stored.
_Destination = tuple[tuple[str, ...], Tensor, StoredTensor]


def _destinations(
    model: nn.Module, entries: Mapping[str, Entry]
) -> tuple[dict[str, _Destination], list[str]]:
    """Destinations by names of stored tensors, and the names of missing ones. One name of a tied
    tensor suffices."""
    table = table_of(type(model))
    destinations: dict[str, _Destination] = {}
    missing: list[str] = []
    for names, tensor in named_tensors(model).items():
        # Checkpoints, and some newer files, store the tensor as the model has it.
        forms = [
            stored_tensors(name, tuple(tensor.shape), {} if name in entries else table)
            for name in names
        ]
        present = [form for form in forms if any(piece.name in entries for piece in form)]
        missing += [
            piece.name
            for form in present or forms[:1]
            for piece in form
            if piece.name not in entries
        ]
        for piece in (piece for form in present for piece in form):
            if piece.name in destinations:
                raise ValueError(f"stored_as: two tensors of the model are stored as {piece.name}")
            destinations[piece.name] = names, tensor, piece
    return destinations, missing


def check_weights(
    model: nn.Module,
    source: WeightSource,
    keys: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Raises InputError, naming all differences, unless the stored tensors fit the model. Reads
    none of them.

    Args:
        keys: keys of the model's Config; if given, the message names sizes that differ from those
            with the weights.
        say: called with a line about stored tensors that the model's file declares as `ignored`
            (patterns).
    """
    destinations, missing = _destinations(model, source.entries)
    unknown = [
        name for name in source.entries if name not in destinations and not _matches(name, HARMLESS)
    ]
    patterns = plan_of(type(model), "ignored") or ()
    ignored = [name for name in unknown if _matches(name, patterns)]
    unknown = [name for name in unknown if not _matches(name, patterns)]
    problems = _problems(destinations, missing, unknown, source.entries)
    if problems:
        differ = _differing(keys, source.keys()) if keys else ""
        hint = (
            f"; its config and the run's keys differ: {differ}: take those keys away"
            if differ
            else ""
        )
        raise InputError(
            f"the weights in {source.path} do not fit the model: {'; '.join(problems)}{hint}"
        )
    if ignored:
        used = [
            pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in ignored)
        ]
        say(
            f"{source.path}: {plural(len(ignored), 'tensor')} of {join_some(used)} not read: the "
            "model has none of it"
        )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _problems(
    destinations: Mapping[str, _Destination],
    missing: Sequence[str],
    unknown: Sequence[str],
    entries: Mapping[str, Entry],
) -> list[str]:
    both = [
        (entries[name], tensor, piece)
        for name, (_, tensor, piece) in destinations.items()
        if name in entries
    ]
    tied = " (do they tie it? then give model.tie_word_embeddings: true)" * (
        missing == ["lm_head.weight"]
    )
    shapes = [
        (entry.name, f" (there {list(entry.shape)}, the model's {list(piece.shape)})")
        for entry, _, piece in both
        if entry.shape != piece.shape
    ]
    kinds = [
        (entry.name, f" ({entry.dtype})")
        for entry, tensor, _ in both
        if entry.dtype not in (FLOATS if tensor.is_floating_point() else (KINDS[tensor.dtype],))
    ]
    lists = (
        ("missing", [(name, "") for name in missing], tied),
        ("the model has no", [(name, "") for name in unknown], ""),
        ("other shapes:", shapes, ""),
        ("types that cannot be read:", kinds, f": expected {', '.join(FLOATS)}"),
    )
    folded = (
        (problem, [name + text for name, _, text in fold_names(items)], remedy)
        for problem, items, remedy in lists
    )
    return [
        f"{problem} {join_some(names, NAMED)}{remedy}" for problem, names, remedy in folded if names
    ]


def _differing(keys: Mapping[str, Any], stored_keys: Mapping[str, Any]) -> str:
    """The sizes that differ from those stored with the weights: `vocab_size (there 256, here
    300)`."""
    sizes = {name: value for name, value in keys.items() if isinstance(value, int)}
    differ = {name: n for name, n in sizes.items() if stored_keys.get(name, n) not in (n, None)}
    return join_some(
        [f"{name} (there {stored_keys[name]}, here {n})" for name, n in differ.items()]
    )


def load_weights(
    model: nn.Module, source: WeightSource, whole: nn.Module | None = None
) -> list[str]:
    """Fills a model, plain or parallelized, casting to the parameters' dtypes. One name of a tied
    tensor suffices.

    Args:
        model: with memory (see `to_empty` for one on the meta device).
        whole: the whole model, on any device, if `model` is a stage of it; by default `model`
            itself.

    Returns the names of the tensors that are left unchanged, because files do not store them: see
    `stored_names`. Raises InputError: the weights do not fit the model, or tensors that the model
    ties are stored with other values.
    """
    check_weights(model if whole is None else whole, source)
    tensors = named_tensors(model)
    without = [names[0] for names, tensor in tensors.items() if tensor.is_meta]
    if without:
        raise InputError(
            f"{join_some(without)} of the model have no memory: model.to_empty(device=...) gives it"
        )
    destinations, _ = _destinations(model, source.entries)
    filled: set[tuple[Any, ...]] = set()  # parts that were filled: tied tensors may be stored twice
    with torch.no_grad():
        for name in source.entries:
            if name not in destinations:
                continue  # a HARMLESS tensor, or one of another stage
            names, tensor, piece = destinations[name]
            local, own = local_part(tensor)
            common = overlap(piece.part, own)
            start = (names, *(span.start for span in piece.part))
            if not is_empty(common):
                values = source.read(name, piece.slices(common)).reshape(shape_of(common))
                target = (
                    local.view(1)[within(common, own)]
                    if local.dim() == 0
                    else local[within(common, own)]
                )
                if start not in filled:
                    target.copy_(values)
                elif not torch.equal(target, values.to(target)):
                    raise InputError(
                        f"{name} has values of its own in the files, and the model ties it to "
                        "another tensor: "
                        "give model.tie_word_embeddings: false"
                    )
            filled.add(start)
    complete = {names for names, *_ in filled}
    return [names[0] for names in tensors if names not in complete]
