"""Texts beside exported weights: config.json, generation_config.json and the tokenizer's files.

A text that the model writes has to end. Its ends are those of the folder that the run started from,
what ended documents in training, and what tokenizer_config.json names.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from meshtrain.data.prepare import TEXT
from meshtrain.data.tokenizer import end_name
from meshtrain.errors import InputError
from meshtrain.huggingface.safetensors import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
)
from meshtrain.job.parsing import parse_json


def small_files(
    config: Mapping[str, Any] | None,
    dtype: torch.dtype,
    tokenizer: Mapping[str, str],
    data: Mapping[str, Any],
    source: Mapping[str, str],
) -> dict[str, str]:
    """The texts by the names of their files.

    Args:
        config: the contents of config.json, except for the dtype and the special tokens; None
            writes none.
        tokenizer: of `tokenizer_files`, if the run has a tokenizer.json.
        data: the run's section `data`.
        source: the texts of the Hugging Face directory that the run started from, if it did.
    """
    texts = _merged_tokenizer(tokenizer, source, config)
    if config is None:
        return texts
    before = _json_object(source.get(CONFIG))
    generation = _json_object(source.get(GENERATION_CONFIG))
    named = special_tokens(texts)
    begin = token_ids(texts.get(TOKENIZER)).get(data.get("begin_token", ""))
    if begin is not None:
        named.setdefault("bos_token_id", begin)

    # What the model's config says comes first, then the folder that the run started from.
    said = (config, before, generation)
    ends = _ends(said, document_end(data, tokenizer), named, bool(tokenizer), config)
    special: dict[str, Any] = {
        "bos_token_id": _first_known("bos_token_id", (*said, named), config),
        "eos_token_id": _one_or_all(ends),
    }
    pad = _first_known("pad_token_id", (*said, named), config)
    if pad is not None:
        special["pad_token_id"] = pad

    # transformers 5 reads `dtype`, older versions `torch_dtype`.
    word = str(dtype).removeprefix("torch.")
    texts[CONFIG] = _json_text({**config, **special, "dtype": word, "torch_dtype": word})
    if ends:
        texts[GENERATION_CONFIG] = _generation_config(source, generation, special, ends)
    return texts


def tokenizer_files(path: Path) -> dict[str, str]:
    """A tokenizer.json, and what says its special tokens and how it writes conversations: texts by
    their names."""
    texts = {TOKENIZER: _text_of(path)}
    for name in (TOKENIZER_CONFIG, CHAT_TEMPLATE):
        beside = path.with_name(name)
        if beside.is_file():
            texts[name] = _text_of(beside)
    return texts


def _text_of(path: Path) -> str:
    """Without a byte order mark, with which transformers does not read it."""
    return path.read_bytes().decode("utf-8-sig")


def _merged_tokenizer(
    tokenizer: Mapping[str, str], source: Mapping[str, str], config: Mapping[str, Any] | None
) -> dict[str, str]:
    """The run's tokenizer files; what it does not have comes from the source, if that is the same
    tokenizer, or if the run has no tokenizer.json and the vocabulary is the source's."""
    theirs = {name: text for name, text in source.items() if name in TOKENIZER_FILES}
    if tokenizer:
        is_theirs = theirs.get(TOKENIZER) == tokenizer[TOKENIZER]
    else:
        size_there = _json_object(source.get(CONFIG)).get("vocab_size")
        is_theirs = size_there is not None and size_there == (config or {}).get("vocab_size")
    if not is_theirs:
        return dict(tokenizer)
    return {**theirs, **tokenizer}


# Special tokens -----------------------------------------------------------------------------------


def document_end(data: Mapping[str, Any], tokenizer: Mapping[str, str]) -> int | None:
    """The id that ended documents in training, as the tokenizer's files or the section `data` say;
    None: unknown."""
    if tokenizer:
        ids = token_ids(tokenizer.get(TOKENIZER))
        named = _named_tokens(tokenizer)
        name = end_name(ids, named.get("eos_token"), data.get("end_token"))
        return None if name is None else ids[name]
    # Byte 0 ends documents of text; ids from other files were made elsewhere.
    kinds = set()
    for own in data.get("sources") or [data]:
        if isinstance(own, Mapping):
            kinds.add(own.get("source") or data.get("source"))
    is_bytes = data.get("tokenizer") == "bytes" and kinds <= TEXT.keys()
    return 0 if is_bytes else None


def special_tokens(tokenizer: Mapping[str, str]) -> dict[str, int]:
    """`bos_token_id` and `eos_token_id`, if tokenizer_config.json names these tokens and
    tokenizer.json has them."""
    ids = token_ids(tokenizer.get(TOKENIZER))
    named = _named_tokens(tokenizer)
    special = {}
    for kind in ("bos_token", "eos_token"):
        token = named.get(kind)
        if token in ids:
            special[f"{kind}_id"] = ids[token]
    return special


@lru_cache(2)  # it takes a second for a large vocabulary
def token_ids(tokenizer: str | None) -> dict[str, int]:
    """Token -> id, of the text of a tokenizer.json; empty if it is none."""
    content = _json_object(tokenizer)
    ids: dict[str, int] = {}
    try:
        vocabulary = content.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):  # of a Unigram model: pairs of token and score
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        ids |= vocabulary
        for token in content.get("added_tokens", ()):
            ids[token["content"]] = token["id"]
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}
    return {token: number for token, number in ids.items() if type(number) is int}


def _named_tokens(tokenizer: Mapping[str, str]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names: `eos_token` -> `</s>`."""
    named = {}
    for key, value in _json_object(tokenizer.get(TOKENIZER_CONFIG)).items():
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[key] = content
    return named


def _ends(
    said: Sequence[Mapping[str, Any]],
    ended: int | None,
    named: Mapping[str, int],
    has_tokenizer: bool,
    config: Mapping[str, Any],
) -> list[int]:
    """All ids that end a text. `ended`: what ended documents in training."""
    values = [of.get("eos_token_id") for of in said]
    if has_tokenizer:
        values.append(ended)
    values.append(named.get("eos_token_id"))
    ends = []
    for value in values:
        ends += _known_ids(value, config)
    if not ends:
        # of `bytes`, unless the weights have a vocabulary, and so ends, of their own
        ends = _known_ids(ended, config)
    return ends


def _first_known(
    key: str, said: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> int | None:
    for of in said:
        ids = _known_ids(of.get(key), config)
        if ids:
            return ids[0]
    return None


def _known_ids(value: Any, config: Mapping[str, Any]) -> list[int]:
    """The ids of a key such as `eos_token_id`, without those that the model's vocabulary does not
    have."""
    size = config.get("vocab_size")
    values = value if isinstance(value, list) else [value]
    ids = [token for token in values if type(token) is int and token >= 0]
    if isinstance(size, int):
        ids = [token for token in ids if token < size]
    return ids


def _one_or_all(ids: Sequence[int]) -> int | list[int] | None:
    """As config.json has it: one id, or a list of several."""
    each = list(dict.fromkeys(ids))
    if not each:
        return None
    return each[0] if len(each) == 1 else each


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
    ends_there = _known_ids(generation.get("eos_token_id"), {})
    if set(ends) <= set(ends_there):
        return source[GENERATION_CONFIG]
    return _json_text({**generation, "eos_token_id": _one_or_all(ends)})


def _json_object(text: str | None) -> dict[str, Any]:
    """The object that a text is; empty for any other text."""
    if not text:
        return {}
    try:
        content = parse_json(text, most=len(text))  # whoever has read the file has a limit
    except InputError:
        return {}
    return content if isinstance(content, dict) else {}


def _json_text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
