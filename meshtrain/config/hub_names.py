"""Names on the Hugging Face hub in a config: which keys take one, and what the hub says of each.

They are looked up once, before any section is read. In a job rank 0 asks, and all ranks get its
answers (run/setup.py). A run's folder keeps the commits in `hub.json`, so that a run that goes on
takes the same files when a branch has moved.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshtrain.config.convert import INVALID
from meshtrain.config.draft import ConfigDraft
from meshtrain.config.schema import ReferenceSection, SourceSection
from meshtrain.config.yaml_reader import Node
from meshtrain.errors import InputError
from meshtrain.huggingface.safetensors import TEXTS, TOKENIZER_FILES
from meshtrain.job.hub import HubAnswer, HubName, Kind, ask, fetch, hub_name
from meshtrain.job.parsing import parse_json
from meshtrain.job.storage import read_guarded

HUB = "hub.json"  # in a run's folder: names -> their commits
# Keys that take a name, and the files that a config is checked by. The other keys are for training.
_OF_MODELS = (
    ("model.weights", TEXTS),
    ("model.path", TEXTS),
)
_OF_TRAINING = (
    ("train.reference.weights", TEXTS),
    ("data.tokenizer", TOKENIZER_FILES),
)


def ask_hub(root: Node, folder: Path, *, for_training: bool) -> dict[str, HubAnswer]:
    """What the hub says of the names in a config, by the names as they are written.

    Args:
        root: the config.
        folder: that of the run, whose commits stand.
        for_training: names of data and tokenizers too, which other commands do without.
    """
    kept: Mapping[str, str] | None = None
    answers: dict[str, HubAnswer] = {}
    for name, texts in _names(root, for_training):
        if kept is None:
            kept = _kept(folder)
        asked = name.at(kept[str(name)]) if str(name) in kept else name
        answers[str(name)] = ask(asked, texts)
    return answers


def _names(root: Node, for_training: bool) -> Iterator[tuple[HubName, tuple[str, ...]]]:
    """The names, and which small files of each the config is checked by."""
    keys = _OF_MODELS + (_OF_TRAINING if for_training else ())
    for key, texts in keys:
        name = hub_name(_text(root, key))
        is_own_file = key == "model.path" and _text(root, "model.name").endswith(".py")
        if name is not None and not is_own_file:
            yield name, texts
    if for_training:
        for path in _paths_of_data(root):
            name = hub_name(path, "dataset")
            if name is not None:
                yield name, ()


def _paths_of_data(root: Node) -> Iterator[str]:
    """The paths of sources that are data sets on the hub."""
    kind = _text(root, "data.source")
    if kind == "hub":
        yield _text(root, "data.path")
    sources = root.get("data", "sources")
    if sources is not None and isinstance(sources.value, list):
        for source in sources.value:
            if isinstance(source.value, dict) and (_text(source, "source") or kind) == "hub":
                yield _text(source, "path")


def _text(root: Node, key: str) -> str:
    """The value of a key, if it is a text, else an empty one."""
    node = root.get(*key.split("."))
    return node.value if node is not None and isinstance(node.value, str) else ""


def _kept(folder: Path) -> dict[str, str]:
    """The commits that a run's folder keeps."""
    with suppress(OSError, InputError, RuntimeError):  # RuntimeError: no home folder
        found = parse_json(read_guarded(folder.expanduser() / HUB))
        if isinstance(found, dict):
            return {name: commit for name, commit in found.items() if isinstance(commit, str)}
    return {}


def fetch_texts(answers: Mapping[str, HubAnswer]) -> None:
    """Brings the small files by which a config is checked into this host's cache. Raises what
    `fetch` raises."""
    for text, answer in answers.items():
        if answer.commit:
            name = HubName.parsed(text).at(answer.commit)
            fetch(name, [file for file in TEXTS if file in answer.files])


def kept_text(answers: Mapping[str, HubAnswer]) -> str:
    """The text of `hub.json`."""
    commits = {name: answer.commit for name, answer in answers.items()}
    return json.dumps(commits, indent=1) + "\n"


def with_commit(draft: ConfigDraft, key: str, text: Any, kind: Kind = "model") -> Any:
    """The value of a key with the commit of the name that it is; another value as it is. INVALID,
    with the problem reported: the hub has no such name, or does not say."""
    if not isinstance(text, str):
        return text
    name = hub_name(text, kind)
    if name is None or str(name) not in draft.hub:
        return text
    answer = draft.hub[str(name)]
    if answer.problem:
        where = "" if kind == "dataset" else f"there is no {text} on this disk, and "
        draft.refuse(key, f"{where}{answer.problem}")
        return INVALID
    return f"{name.repo}@{answer.commit}"


def set_commits(draft: ConfigDraft) -> None:
    """Gives names among the keys for training their commits; those of models have them already."""
    tokenizer = draft.values["data.tokenizer"]
    draft.values["data.tokenizer"] = with_commit(draft, "data.tokenizer", tokenizer)
    kind = draft.values["data.source"]
    if kind == "hub":
        path = with_commit(draft, "data.path", draft.values["data.path"], "dataset")
        draft.values["data.path"] = path
    sources = draft.values["data.sources"]
    if sources is not INVALID:
        draft.values["data.sources"] = _sources_with_commits(draft, sources, kind)
    reference = draft.values["train.reference"]
    if isinstance(reference, ReferenceSection):
        weights = with_commit(draft, "train.reference.weights", reference.weights)
        known = replace(reference, weights=weights)
        draft.values["train.reference"] = INVALID if weights is INVALID else known


def _sources_with_commits(draft: ConfigDraft, sources: tuple[SourceSection, ...], kind: Any) -> Any:
    """The sources of a mixture, of which `kind` is `data.source`; INVALID as of `with_commit`."""
    known = []
    for source in sources:
        path: Any = source.path
        if (source.source or kind) == "hub":
            path = with_commit(draft, "data.sources", path, "dataset")
        if path is INVALID:
            return INVALID
        known.append(replace(source, path=path))
    return tuple(known)


def files_of(draft: ConfigDraft, text: str) -> tuple[str, ...] | None:
    """The files of a name that `with_commit` has returned; None: it is a path."""
    name = hub_name(text)
    if name is None:
        return None
    for given, answer in draft.hub.items():
        if given.partition("@")[0] == name.repo and answer.commit == name.revision:
            return answer.files
    return None
