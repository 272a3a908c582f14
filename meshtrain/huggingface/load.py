"""Loading weights into a model on any layout, from a Hugging Face directory or another source.

Mismatches are found from the headers, before any weight is read. Then each rank reads only the
parts that it holds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from meshtrain.errors import InputError, fold_names, join_some, plural
from meshtrain.huggingface.safetensors import (
    CONFIG,
    FLOATS,
    Entry,
    files_of_weights,
    read_config,
    stored,
)
from meshtrain.huggingface.stored_names import (
    StoredTensor,
    Table,
    copies_of,
    stored_copies,
    stored_tensors,
    table_of,
)
from meshtrain.job.hub import fetch, hub_name, local_path
from meshtrain.job.parsing import parse_json
from meshtrain.job.pending import advance
from meshtrain.job.storage import with_retries
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


def fetch_weights(path: str, say: Callable[[str], None]) -> None:
    """Brings the tensors of a model of the hub, `org/name@COMMIT`, into the cache; its small files
    are there. Does nothing with the path of a folder. Raises what `hub.fetch` raises."""
    name = hub_name(path)
    if name is not None:
        files = files_of_weights(local_path(path))
        with_retries(lambda: fetch(name, files, say))


@contextmanager
def open_folder(folder: str | Path) -> Iterator[WeightSource]:
    """The weights of a Hugging Face directory, or of a model of the hub that is in the cache.
    Raises InputError: it is not one, or its files are damaged."""
    folder = local_path(folder)
    entries: dict[str, Entry] = {}
    files: dict[str, Path] = {}  # name of a tensor -> its file
    for path, entries_of_file in stored(folder).items():
        with _open(path):  # fail now, and not when weights are read
            pass
        entries |= entries_of_file
        files |= dict.fromkeys(entries_of_file, path)

    def keys() -> Mapping[str, Any]:
        if not (folder / CONFIG).is_file():
            return {}
        return parse_json(read_config(folder))

    with _OneFile() as open_file:

        def read(name: str, part: Part) -> Tensor:
            advance()
            file = open_file(files[name])
            if not entries[name].shape:  # the library has no slices of scalars
                return file.get_tensor(name)
            return file.get_slice(name)[part]

        yield WeightSource(folder, entries, keys, read)


class _OneFile(AbstractContextManager["_OneFile"]):
    """Keeps the file open that was read last: entries are ordered by file."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None
        self._stack = ExitStack()

    def __call__(self, path: Path) -> Any:
        if path != self._path:
            self._path = None
            self._stack.close()
            self._file = self._stack.enter_context(_open(path))
            self._path = path
        return self._file

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _open(path: Path) -> Any:
    """With the safetensors library, which refuses headers that `read_header` takes."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise InputError(f"{path} is no safetensors file: {error}: copy it anew") from error


def named_tensors(model: nn.Module) -> dict[tuple[str, ...], Tensor]:
    """A model's parameters and persistent buffers, keyed by all their names: tied ones have
    several."""
    names_of: dict[int, list[str]] = {}  # identity of a tensor -> its names
    tensors = model.state_dict(keep_vars=True)  # under FSDP, this also frees gathered weights
    for name, tensor in tensors.items():
        names_of.setdefault(id(tensor), []).append(name)
    return {tuple(names): tensors[names[0]] for names in names_of.values()}


class _Destination(NamedTuple):
    """Where a stored tensor goes."""

    names: tuple[str, ...]  # of the model's tensor
    tensor: Tensor
    piece: StoredTensor  # the part of it that is stored


def _destinations(
    model: nn.Module, entries: Mapping[str, Entry]
) -> tuple[dict[str, _Destination], list[str]]:
    """Destinations by names of stored tensors, and the names of missing ones. One name of a tied
    tensor, or of one that files may have again, suffices."""
    table, copies = table_of(model), copies_of(model)
    destinations: dict[str, _Destination] = {}
    missing: list[str] = []
    for names, tensor in named_tensors(model).items():
        forms = []  # of each name: the stored tensors that make it up
        shape = tuple(tensor.shape)
        for name in names:
            # Checkpoints, and some newer files, store the tensor as the model has it.
            rules = {} if name in entries else table
            forms.append(stored_tensors(name, shape, rules))
        for name in names:
            forms += [[copy] for copy in stored_copies(name, shape, copies)]
        present = [form for form in forms if any(piece.name in entries for piece in form)]
        wanted = chain.from_iterable(present or forms[:1])
        missing += [piece.name for piece in wanted if piece.name not in entries]
        for piece in chain.from_iterable(present):
            if piece.name in destinations:
                raise ValueError(f"stored_as: two tensors of the model are stored as {piece.name}")
            destinations[piece.name] = _Destination(names, tensor, piece)
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
    patterns = plan_of(model, "ignored") or ()
    ignored = []
    unknown = []
    for name in source.entries:
        if name in destinations or _matches(name, HARMLESS):
            continue
        if _matches(name, patterns):
            ignored.append(name)
        else:
            unknown.append(name)
    problems = _problems(destinations, missing, unknown, source.entries)
    if problems:
        differing = _differing(keys, source.keys()) if keys else ""
        hint = ""
        if differing:
            hint = f"; its config and the run's keys differ: {differing}: take those keys away"
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


def _not_tied(name: str, copies: Table) -> str:
    """The sentence for a tensor that files have more than once, with other values."""
    own = f"{name} has values of its own in the files, and the model ties it to another tensor: "
    for original, others in copies.items():
        if name in (original, *others):
            return own + (
                "layers that predict further tokens share the model's embedding and head: leave "
                "them out by model.num_nextn_predict_layers: 0"
            )
    return own + "give model.tie_word_embeddings: false"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _problems(
    destinations: Mapping[str, _Destination],
    missing: Sequence[str],
    unknown: Sequence[str],
    entries: Mapping[str, Entry],
) -> list[str]:
    """What is wrong with stored tensors, a line for each kind of problem."""
    shapes = []
    dtypes = []
    for name, (_, tensor, piece) in destinations.items():
        if name not in entries:
            continue
        entry = entries[name]
        if entry.shape != piece.shape:
            sizes = f" (there {list(entry.shape)}, the model's {list(piece.shape)})"
            shapes.append((name, sizes))
        readable = FLOATS if tensor.is_floating_point() else (KINDS[tensor.dtype],)
        if entry.dtype not in readable:
            dtypes.append((name, f" ({entry.dtype})"))

    remedy = ""
    if missing == ["lm_head.weight"]:
        remedy = " (do they tie it? then give model.tie_word_embeddings: true)"
    problems = []
    if missing:
        problems.append(f"missing {_listed((name, '') for name in missing)}{remedy}")
    if unknown:
        problems.append(f"the model has no {_listed((name, '') for name in unknown)}")
    if shapes:
        problems.append(f"other shapes: {_listed(shapes)}")
    if dtypes:
        expected = ", ".join(FLOATS)
        problems.append(f"types that cannot be read: {_listed(dtypes)}: expected {expected}")
    return problems


def _listed(items: Iterable[tuple[str, str]]) -> str:
    """Names of tensors, each with a text, for people: those of many experts are one."""
    return join_some([name + text for name, _, text in fold_names(items)], NAMED)


def _differing(keys: Mapping[str, Any], stored_keys: Mapping[str, Any]) -> str:
    """The sizes that differ from those stored with the weights: `vocab_size (there 256, here
    300)`."""
    differing = []
    for name, value in keys.items():
        if not isinstance(value, int):
            continue
        there = stored_keys.get(name)
        if there is not None and there != value:
            differing.append(f"{name} (there {there}, here {value})")
    return join_some(differing)


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
            if local.dim() == 0:
                local = local.view(1)
            common = overlap(piece.part, own)
            start = (names, *(span.start for span in piece.part))
            if not is_empty(common):
                values = source.read(name, piece.slices(common)).reshape(shape_of(common))
                target = local[within(common, own)]
                if start not in filled:
                    target.copy_(values)
                elif not torch.equal(target, values.to(target)):
                    raise InputError(_not_tied(name, copies_of(model)))
                del values  # before the next are read
            filled.add(start)
    complete = {names for names, *_ in filled}
    return [names[0] for names in tensors if names not in complete]
