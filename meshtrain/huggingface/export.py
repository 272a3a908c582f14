"""Writing a Hugging Face directory: written under a temporary name, and renamed when it is complete
and on disk."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch

from meshtrain.data.prepare import TEXT
from meshtrain.data.tokenizer import end_name
from meshtrain.errors import InputError
from meshtrain.huggingface import safetensors as weights
from meshtrain.huggingface.load import KINDS
from meshtrain.huggingface.safetensors import Entry
from meshtrain.huggingface.stored_names import StoredTensor, Table, stored_tensors
from meshtrain.job.storage import DISK_ERRORS, fsync_file, fsync_folder, write_all, write_whole

# Exported in float32, as transformers does: a bias moves in steps smaller than 16 bits can resolve.
FLOAT32 = ("*.e_score_correction_bias",)


@contextmanager
def as_input_errors(path: Path) -> Iterator[None]:
    """Turns an OSError into an InputError, if another path or other rights would help. A disk or a
    server that fails, or is full, is no wrong input: the same command may finish the export later.
    Its error names the export."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_ERRORS:
            error.filename = error.filename or str(path)  # a failed write does not name its file
            raise
        raise InputError(
            f"the export to {error.filename or path} failed: {error.strerror or error}"
        ) from error


def plan_export(
    tensors: Iterable[Entry],
    dtype: torch.dtype,
    file_bytes: int = weights.FILE_BYTES,
    stored_as: Table | None = None,
) -> tuple[dict[str, list[Entry]], dict[str, tuple[str, StoredTensor]]]:
    """The files of an export of a model's tensors, and for each entry the model's tensor of which
    it is a part.

    Floating-point tensors become `dtype`. `stored_as`: see `stored_names`.

    Raises ValueError: the table does not fit, or maps two tensors to one name.
    """
    entries: list[Entry] = []
    parts: dict[str, tuple[str, StoredTensor]] = {}
    for tensor in tensors:
        for piece in stored_tensors(tensor.name, tensor.shape, stored_as or {}):
            if piece.name in parts:
                raise ValueError(f"stored_as: two tensors of the model are stored as {piece.name}")
            entries.append(Entry(piece.name, _kind(tensor, dtype), piece.shape))
            parts[piece.name] = tensor.name, piece
    return weights.planned_files(entries, file_bytes), parts


def _kind(tensor: Entry, dtype: torch.dtype) -> str:
    if tensor.dtype not in weights.FLOATS:
        return tensor.dtype
    wide = any(fnmatchcase(tensor.name, pattern) for pattern in FLOAT32) and dtype.itemsize < 4
    return "F32" if wide else KINDS[dtype]


def small_files(
    config: Mapping[str, Any] | None,
    dtype: torch.dtype,
    tokenizer: Mapping[str, str],
    data: Mapping[str, Any],
    source: Mapping[str, str],
) -> dict[str, str]:
    """The texts of what an export has beside weights: config.json, generation_config.json, the
    tokenizer's files.

    A text that the model writes has to end: its ends are those of the folder that the run started
    from, what ended documents in training, and what tokenizer_config.json names. transformers 5
    reads `dtype`, older versions `torch_dtype`.

    Args:
        config: the contents of config.json, except for the dtype and the special tokens; None
            writes none.
        tokenizer: of `tokenizer_files`, if the run has a tokenizer.json.
        data: the run's section `data`.
        source: of `source_files`, if the run started from a Hugging Face directory.
    """
    texts = _tokenizer_of(tokenizer, source, config)
    if config is None:
        return texts
    before, generation = (
        _json_object(source.get(name)) for name in (weights.CONFIG, weights.GENERATION_CONFIG)
    )
    named = special_tokens(texts)
    begin = token_ids(texts.get(weights.TOKENIZER)).get(data.get("begin_token", ""))
    if begin is not None:
        named.setdefault("bos_token_id", begin)

    def first(key: str) -> int | None:
        candidates = [of.get(key) for of in (config, before, generation, named)]
        return next((token for value in candidates for token in _known_ids(value, config)), None)

    ended = document_end(data, tokenizer)
    values = [of.get("eos_token_id") for of in (config, before, generation)]
    values += [ended if tokenizer else None, named.get("eos_token_id")]
    ends = [token for value in values for token in _known_ids(value, config)]
    if not ends:
        # of `bytes`, unless the weights have a vocabulary, and so ends, of their own
        ends = _known_ids(ended, config)
    special: dict[str, Any] = {
        "bos_token_id": first("bos_token_id"),
        "eos_token_id": _one_or_all(ends),
    }
    if (pad := first("pad_token_id")) is not None:
        special["pad_token_id"] = pad

    word = str(dtype).removeprefix("torch.")
    texts[weights.CONFIG] = _json_text({**config, **special, "dtype": word, "torch_dtype": word})
    if ends:
        texts[weights.GENERATION_CONFIG] = _generation_config(source, generation, special, ends)
    return texts


def _generation_config(
    source: Mapping[str, str],
    generation: Mapping[str, Any],
    special: Mapping[str, Any],
    ends: Sequence[int],
) -> str:
    """The source's generation_config.json, whose ends, if any are missing there, are all of
    `ends`."""
    if not generation:
        return _json_text({key: token for key, token in special.items() if token is not None})
    if set(ends) <= set(_known_ids(generation.get("eos_token_id"), {})):
        return source[weights.GENERATION_CONFIG]
    return _json_text({**generation, "eos_token_id": _one_or_all(ends)})


def _one_or_all(ids: Sequence[int]) -> int | list[int] | None:
    """As config.json has it: one id, or a list of several."""
    each = list(dict.fromkeys(ids))
    return each if len(each) > 1 else next(iter(each), None)


def _known_ids(value: Any, config: Mapping[str, Any]) -> list[int]:
    """The ids of a key such as `eos_token_id`, without those that the model's vocabulary does not
    have."""
    most = config.get("vocab_size")
    ids = [
        token
        for token in (value if isinstance(value, list) else [value])
        if type(token) is int and token >= 0
    ]
    return [token for token in ids if not isinstance(most, int) or token < most]


def _tokenizer_of(
    tokenizer: Mapping[str, str], source: Mapping[str, str], config: Mapping[str, Any] | None
) -> dict[str, str]:
    """The run's tokenizer files; what it does not have comes from the source, if that is the same
    tokenizer, or if the run has no tokenizer.json and the vocabulary is the source's."""
    theirs = {name: text for name, text in source.items() if name in weights.TOKENIZER_FILES}
    if tokenizer:
        is_theirs = theirs.get(weights.TOKENIZER) == tokenizer[weights.TOKENIZER]
    else:
        sizes = [
            of.get("vocab_size") for of in (_json_object(source.get(weights.CONFIG)), config or {})
        ]
        is_theirs = sizes[0] is not None and sizes[0] == sizes[1]
    return {**theirs, **tokenizer} if is_theirs else dict(tokenizer)


def document_end(data: Mapping[str, Any], tokenizer: Mapping[str, str]) -> int | None:
    """The id that ended documents in training, as the tokenizer's files or the section `data` say;
    None: unknown."""
    if tokenizer:
        ids, named = token_ids(tokenizer.get(weights.TOKENIZER)), _named_tokens(tokenizer)
        name = end_name(ids, named.get("eos_token"), data.get("end_token"))
        return None if name is None else ids[name]
    sources = data.get("sources") or [data]
    kinds = {own.get("source") or data.get("source") for own in sources if isinstance(own, Mapping)}
    return 0 if data.get("tokenizer") == "bytes" and kinds <= TEXT.keys() else None


def special_tokens(tokenizer: Mapping[str, str]) -> dict[str, int]:
    """`bos_token_id` and `eos_token_id`, if tokenizer_config.json names these tokens and
    tokenizer.json has them."""
    ids, named = token_ids(tokenizer.get(weights.TOKENIZER)), _named_tokens(tokenizer)
    return {
        f"{kind}_id": ids[named[kind]]
        for kind in ("bos_token", "eos_token")
        if named.get(kind) in ids
    }


@lru_cache(2)  # it takes a second for a large vocabulary
def token_ids(tokenizer: str | None) -> dict[str, int]:
    """Token -> id, of the text of a tokenizer.json; empty if it is none."""
    content = _json_object(tokenizer)
    ids: dict[str, int] = {}
    try:
        vocabulary = content.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):  # of a Unigram model: pairs of token and score
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        ids |= vocabulary
        ids |= {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}
    return {token: number for token, number in ids.items() if type(number) is int}


def _named_tokens(tokenizer: Mapping[str, str]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names: `eos_token` -> `</s>`."""
    config = _json_object(tokenizer.get(weights.TOKENIZER_CONFIG))
    values = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in config.items()
    }
    return {key: value for key, value in values.items() if isinstance(value, str)}


def _json_object(text: str | None) -> dict[str, Any]:
    """The object that a text is; empty for any other text."""
    try:
        content = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _json_text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def tokenizer_files(path: Path) -> dict[str, str]:
    """A tokenizer.json, and what says its special tokens and how it writes conversations: texts by
    their names."""
    beside = (path.with_name(name) for name in (weights.TOKENIZER_CONFIG, weights.CHAT_TEMPLATE))
    # Without byte order marks, with which transformers reads none of them.
    texts = {file.name: file.read_bytes().decode("utf-8-sig") for file in beside if file.is_file()}
    return {weights.TOKENIZER: path.read_bytes().decode("utf-8-sig"), **texts}


class ExportFolder:
    """The target folder of an export. One process calls its methods; several may write files in
    `making`."""

    def __init__(self, folder: str | Path) -> None:
        self.target = Path(folder).expanduser().absolute()
        self.making = self.target.with_name(f".{self.target.name}.tmp")

    def make(self) -> None:
        """Makes the folder to write in. Raises InputError: the target holds something that no
        export has written."""
        self._refuse()
        self.drop()  # left by a job that was ended while it wrote
        self.making.mkdir(parents=True)

    def drop(self) -> None:
        if self.making.exists():
            shutil.rmtree(self.making)

    def finish(
        self,
        files: Mapping[str, Sequence[Entry]],
        texts: Mapping[str, str],
    ) -> None:
        """Writes small files of these texts by name, and the index; then renames the folder into
        place. An earlier export is deleted last. Surrogates in a text are bytes that are no
        characters (PEP 383)."""
        index = {weights.INDEX: weights.index(files)} if len(files) > 1 else {}
        for name, text in {**texts, **index}.items():
            write_whole(self.making / name, text.encode(errors="surrogateescape"))
        fsync_folder(self.making)
        # the target may have been changed meanwhile: do not delete what is not an export
        self._refuse()
        before = self.target.with_name(f".{self.target.name}.old")
        if before.exists():
            shutil.rmtree(before)
        if self.target.exists():
            self.target.rename(before)
        self.making.rename(self.target)
        fsync_folder(self.target.parent)
        if before.exists():
            shutil.rmtree(before)

    def _refuse(self) -> None:
        problem = weights.export_problem(self.target)
        if problem:
            raise InputError(f"the export cannot be written: {problem}")


class WeightFiles(AbstractContextManager["WeightFiles"]):
    """Writes weight files tensor by tensor, in the order of a plan (`plan_export`)."""

    def __init__(self, folder: Path, plan: Mapping[str, Sequence[Entry]]) -> None:
        self.folder = folder
        self.plan = plan
        self._remaining = {name: list(entries) for name, entries in plan.items()}
        self._files: dict[str, BinaryIO] = {}

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def write(self, name: str, entry: Entry, data: Iterable[memoryview]) -> None:
        """Appends a tensor, in any number of pieces, to its file, which is synced after its last.
        Raises OSError."""
        try:
            if name not in self._files:
                self._files[name] = (self.folder / name).open("xb", buffering=0)
                metadata = {"format": "pt", "writer": weights.WRITER}
                write_all(self._files[name], weights.pack_header(self.plan[name], metadata))
            file, remaining = self._files[name], self._remaining[name]
            assert remaining.pop(0) == entry
            for piece in data:
                write_all(file, piece)
            if not remaining:
                fsync_file(file)
                file.close()
        except OSError as error:
            error.filename = error.filename or str(self.folder / name)
            raise
