"""Checks of a config against the disk: the files and folders that it names, as training finds
them."""

from pathlib import Path
from typing import Any

from meshtrain.checkpoint.directory import find_checkpoint
from meshtrain.config.checks import OF_TOKENS
from meshtrain.config.convert import INVALID
from meshtrain.config.draft import ConfigDraft
from meshtrain.config.errors import nearest
from meshtrain.config.hub_names import files_of
from meshtrain.config.schema import SOURCES, ReferenceSection
from meshtrain.errors import InputError
from meshtrain.huggingface import safetensors as weights
from meshtrain.job import locate


def check_files(draft: ConfigDraft) -> None:
    """Reports files and folders that the config names but that do not exist."""
    source = draft.values.get("data.source", INVALID)
    _check_data(draft, source)
    if source in OF_TOKENS:
        _check_tokenizer(draft)
    _check_path_or_word(draft, "checkpoint.resume", ("latest", "none"))

    start = draft.values.get("model.weights", INVALID)
    if isinstance(start, str):
        _check_weights(draft, "model.weights", start)
    reference = draft.values.get("train.reference", INVALID)
    if isinstance(reference, ReferenceSection):
        _check_weights(draft, "train.reference.weights", reference.weights)
    export = draft.values.get("train.export")
    if isinstance(export, str):
        _check_export(draft, export, start)


def _check_data(draft: ConfigDraft, source: Any) -> None:
    """`source`: the value of `data.source`, which one of several sources may override."""
    path, validation = draft.values.get("data.path"), draft.values.get("data.validation")
    sources = draft.values.get("data.sources", ())
    if sources is INVALID:
        sources, path = (), None

    if source not in SOURCES:
        _check_path(draft, "data.source", source)  # the user's own file
    elif SOURCES[source] is not None and not sources:
        _check_data_path(draft, "data.path", source, path)
    for own in sources:
        _check_data_path(draft, "data.sources", own.source or source, own.path)
    if source in SOURCES:
        # A validation set belongs to the first source.
        kind = sources[0].source if sources else None
        _check_data_path(draft, "data.validation", kind or source, validation)


def _check_data_path(draft: ConfigDraft, key: str, source: str, path: Any) -> None:
    """Reports the first missing file of a path as a kind of source names it, which may stand for
    several."""
    if not isinstance(path, str):
        return
    for file in locate.data_files(source, path):
        if not _check_path(draft, key, file):
            return


def _check_tokenizer(draft: ConfigDraft) -> None:
    name = draft.values.get("data.tokenizer")
    files = files_of(draft, name) if isinstance(name, str) else None
    if files is None:
        _check_path_or_word(draft, "data.tokenizer", ("bytes",))
    elif weights.TOKENIZER not in files:
        draft.refuse(
            "data.tokenizer",
            f"{name} has no {weights.TOKENIZER}: convert its tokenizer (in transformers: "
            "AutoTokenizer.from_pretrained, then save_pretrained), and name that file",
        )


def _check_path_or_word(draft: ConfigDraft, key: str, words: tuple[str, ...]) -> None:
    """Reports a value that is neither one of the words nor a path that exists."""
    value = draft.values.get(key)
    if value not in words:
        _check_path(draft, key, value, words)


def _check_path(draft: ConfigDraft, key: str, path: Any, words: tuple[str, ...] = ()) -> bool:
    """Whether a path exists; reports it if not. What is no text is no path, and was reported.
    `words`: one of which may have been meant."""
    if not isinstance(path, str):
        return True
    file = Path(path).expanduser().absolute()
    if file.exists():
        return True

    problem = f"there is no {file}"
    for parent in file.parents:
        if parent.is_dir():
            if parent != file.parent:
                problem += f"; the folder {parent} is there, what follows is not"
            break
    suggestion = nearest(path, words)
    advice = f"did you mean {suggestion}?" if suggestion else "mend the path or create the file"
    draft.refuse(key, f"{problem}: {advice}")
    return False


def _check_weights(draft: ConfigDraft, key: str, path: str) -> None:
    try:
        # A checkpoint's manifest is checked with the model's keys, and what the hub has before it
        # is read.
        files = files_of(draft, path)
        if files is not None:
            weights.require_safetensors(path, files)
        elif find_checkpoint(path) is None:
            weights.stored(Path(path).expanduser())
    except InputError as error:
        draft.refuse(key, error)


def _check_export(draft: ConfigDraft, export: str, start: Any) -> None:
    """Reports a folder that an export would spoil. `start`: the value of `model.weights`."""
    folder = Path(export).expanduser().absolute()
    problem = weights.export_problem(folder)
    if isinstance(start, str) and folder.resolve() == Path(start).expanduser().resolve():
        problem = (
            f"{folder} is the folder of model.weights, with which the run starts: name another one"
        )
    if problem:
        draft.refuse("train.export", problem)
