"""Opens the data sets of a run from the `data` section of its config: one function for each kind of
source."""

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from meshtrain.data import images
from meshtrain.data.batch import Samples, Targets
from meshtrain.data.cache import Say, cache_folder
from meshtrain.data.custom import is_text, open_custom
from meshtrain.data.fingerprint import Files, data_path, sampled_digest
from meshtrain.data.megatron import open_megatron
from meshtrain.data.mixture import MixedSamples
from meshtrain.data.packing import Stream, TokenSamples
from meshtrain.data.prepare import TEXT, preparations
from meshtrain.data.remote import is_remote, open_remote
from meshtrain.data.split import (
    SampleSplit,
    Split,
    all_documents,
    bytes_per_target,
    split_at_end,
    split_by_hash,
    split_samples,
)
from meshtrain.data.tokenizer import Tokenizer, open_tokenizer
from meshtrain.data.tokens import Corpus, open_tokens
from meshtrain.errors import InputError, any_of, plural

if TYPE_CHECKING:
    from meshtrain.config.schema import DataSection

# what targets are: tokens, classes, or anything else, for a loss of the user's own
Task = Literal["language", "classification", "other"]


@dataclass(frozen=True)
class OpenData:
    """The data of a run."""

    train: Samples
    validation: Samples | None
    task: Task
    about: list[str]  # lines for people
    fingerprint: str  # of all data: equal on hosts that have the same data
    # decodes generated text; None where the data does not name its tokenizer
    tokenizer: Tokenizer | None = None
    # of the validation set: loss / ln 2 / this = bits per byte
    bytes_per_target: float | None = None
    files: Mapping[str, Files] = field(default_factory=dict)  # keyed by a name for people

    @property
    def identity(self) -> dict[str, Any]:
        """Identifies the data: compared between hosts, and when a run is resumed."""
        held_out = None if self.validation is None else len(self.validation)
        return {"fingerprint": self.fingerprint, "train": len(self.train), "validation": held_out}

    def sampled(self) -> dict[str, str]:
        """Name -> digest of sampled bytes of this host's files; a fingerprint may only be what a
        header claims."""
        return {name: sampled_digest(file, self.fingerprint) for name, file in self.files.items()}


def prepare_data(config: "DataSection", *, say: Say) -> None:
    """The preparation step of `open_data`: one process per host runs it, while the others wait off
    the file system."""
    if config.sources or config.source in TEXT:
        for preparation in preparations(config):
            preparation.run(say)
    for own in config.each_source():
        if own.source == "tokens":
            for path in _paths(own):
                if is_remote(path):
                    _open_tokens(own, path, say)


def open_data(
    config: "DataSection",
    *,
    n_outputs: int | None,
    seed: int,
    say: Say,
    vocab_size: int | None = None,
    own_loss: bool = False,
) -> OpenData:
    """Opens what `data.source` names, preparing it first where that has not been done on this host.

    Args:
        n_outputs: the size of the model's vocabulary, or its number of classes; None: do not check.
        seed: seed of the image augmentation; `train_batches` has the seed of the sample order.
        say: called with progress lines while this waits or prepares.
        vocab_size: upper bound of the token ids that a user's own data set gives; None: do not
            check.
        own_loss: the model's file defines a loss, which takes targets of any kind.

    Raises InputError: the section or the data is invalid.
    """
    if config.sources:
        return _open_mixture(config, n_outputs, say)
    if config.source.endswith(".py"):
        return _open_custom(config, n_outputs, vocab_size, own_loss)
    if config.source in (*TEXT, "tokens", "megatron"):
        return _open_language(config, n_outputs, say)
    if config.source in images.SOURCES:
        return _open_images(config, n_outputs, seed)
    names = sorted({*TEXT, *images.SOURCES, "tokens", "megatron"})
    near = difflib.get_close_matches(config.source, names, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InputError(
        f"data.source is {config.source!r}: expected one of {', '.join(names)}, or the path of a "
        f".py file{hint}"
    )


def _open_mixture(config: "DataSection", n_outputs: int | None, say: Say) -> OpenData:
    """The data of several sources; their held-out parts form one validation set."""
    parts = [_open_language(own, n_outputs, say) for own in config.each_source()]
    named = list(zip([own.name for own in config.sources], parts, strict=True))
    tokenizers = {part.tokenizer.identity for part in parts if part.tokenizer is not None}
    if len(tokenizers) > 1:
        raise InputError(
            f"data.sources have different tokenizers, {any_of(sorted(tokenizers), 'and')}: prepare "
            "anew"
        )
    train: dict[str, TokenSamples] = {}
    held_out: dict[str, TokenSamples] = {}
    about: list[str] = []
    files: dict[str, Files] = {}
    for name, part in named:
        assert isinstance(part.train, TokenSamples)
        train[name] = part.train
        if isinstance(part.validation, TokenSamples):
            held_out[name] = part.validation
        about += [f"{name}: {line}" for line in part.about]
        files |= {f"{name}: {file}": found for file, found in part.files.items()}

    validation = None
    if held_out:
        validation = MixedSamples("validation", list(held_out), list(held_out.values()))
    with_tokenizer = [part.tokenizer for part in parts if part.tokenizer is not None]
    fingerprints = " ".join(part.fingerprint for part in parts)
    return OpenData(
        train=MixedSamples("training", list(train), list(train.values())),
        validation=validation,
        task="language",
        tokenizer=with_tokenizer[0] if with_tokenizer else None,
        bytes_per_target=_bytes_per_target(parts),
        about=about,
        fingerprint=hashlib.sha256(fingerprints.encode()).hexdigest(),
        files=files,
    )


def _bytes_per_target(parts: Sequence[OpenData]) -> float | None:
    """Bytes of text per target over the validation parts of several sources together."""
    # A mean weighted by targets, as the loss of the validation is.
    total_targets = 0
    total_bytes = 0.0
    for part in parts:
        if not isinstance(part.validation, TokenSamples):
            continue
        if part.bytes_per_target is None:
            return None
        targets = part.validation.stream.targets()
        total_targets += targets
        total_bytes += targets * part.bytes_per_target
    return total_bytes / total_targets if total_targets else None


def _open_language(config: "DataSection", n_outputs: int | None, say: Say) -> OpenData:
    """The data of one corpus, or of two if `data.validation` is a path."""
    if config.source in TEXT:
        tokenizer, corpora = _open_text(config, n_outputs, say)
    else:
        corpora = _open_token_files(config, say)
        tokenizer = _file_tokenizer(config, corpora)
    for corpus in corpora:
        corpus.check_ids(n_outputs)

    corpus, other = corpora[0], corpora[-1]  # the same one unless `data.validation` is a path
    # Documents of text lie in the order of their files: a hash takes some of each. Files of tokens
    # were made elsewhere, where it is usual to hold out their end.
    if isinstance(config.validation, str):
        held_out = np.ones(other.documents, bool)
        selection = f"from {config.validation}"
        split = Split(all_documents(corpus), all_documents(other), held_out, selection)
    elif config.source in TEXT:
        split = split_by_hash(corpus, config.validation)
    else:
        split = split_at_end(corpus, config.validation)
    return _language_data(config, corpus, other, split, n_outputs, tokenizer)


def _open_text(
    config: "DataSection", n_outputs: int | None, say: Say
) -> tuple[Tokenizer | None, list[Corpus]]:
    """The corpora of text files, which are prepared first where they have to be."""
    tokenizer = open_tokenizer(config.tokenizer, config.begin_token, config.end_token)
    # Another tokenizer may have tokens that the text does not need: its ids are looked at later.
    if config.tokenizer == "bytes" and n_outputs is not None and n_outputs < tokenizer.vocab_size:
        raise InputError(
            f"model.vocab_size is {n_outputs}: the tokenizer `bytes` needs at least 256"
        )
    corpora = []
    for preparation in preparations(config):
        preparation.run(say)
        corpora.append(open_tokens(preparation.folder, cached=True))
    return tokenizer, corpora


def _open_token_files(config: "DataSection", say: Say) -> list[Corpus]:
    """The corpora of files that hold tokens already."""
    if config.source == "megatron":
        data_path(config, "the prefix of .bin and .idx")
        return [open_megatron(path) for path in _paths(config)]
    data_path(config, "a prepared folder")
    return [_open_tokens(config, path, say) for path in _paths(config)]


def _paths(config: "DataSection") -> list[str]:
    """The path of the training data, and that of the validation set, if it has one."""
    paths = (config.path, config.validation)
    return [path for path in paths if isinstance(path, str)]


def _open_tokens(config: "DataSection", path: str, say: Say) -> Corpus:
    if is_remote(path):
        return open_remote(path, cache_folder(config.cache), config.cache_gib, say)
    return open_tokens(Path(path).expanduser())


def _file_tokenizer(config: "DataSection", corpora: Sequence[Corpus]) -> Tokenizer | None:
    """The tokenizer of the files, None if unknown. `bytes`, the key's default, counts only if the
    files agree."""
    tokenizer = open_tokenizer(config.tokenizer, end_token=config.end_token)
    for corpus in corpora:
        if config.tokenizer != "bytes" and corpus.tokenizer not in (None, tokenizer.identity):
            raise InputError(
                f"{corpus.name} was prepared with the tokenizer {corpus.tokenizer}, and "
                f"data.tokenizer is {tokenizer.identity}"
            )
    if config.tokenizer == "bytes" and corpora[0].tokenizer != tokenizer.identity:
        return None
    return tokenizer


def _language_data(
    config: "DataSection",
    corpus: Corpus,
    other: Corpus,
    split: Split,
    n_outputs: int | None,
    tokenizer: Tokenizer | None,
) -> OpenData:
    def samples(name: str, stream: Stream) -> TokenSamples:
        packed = TokenSamples(
            name,
            stream,
            seq_len=config.seq_len,
            mask_documents=config.mask_documents,
            n_outputs=n_outputs,
        )
        if len(packed) == 0:
            remedy = "another source"
            if split.validation is not None:
                remedy = "another data.validation (0: none)"
            raise InputError(
                f"the {name} split of {stream.corpus.name} is empty: it has {len(stream):,} "
                f"tokens, and one sample of data.seq_len {config.seq_len} takes "
                f"{config.seq_len + 1:,}; use more text, a smaller data.seq_len or {remedy}"
            )
        return packed

    train = samples("training", split.train)
    validation = None
    held_out = "no validation"
    text_bytes = None
    if split.validation is not None:
        validation = samples("validation", split.validation)
        held_out = f"{_split_line('validation', validation)}, {split.selection}"
        text_bytes = bytes_per_target(other, split.held_out)

    fingerprint = corpus.fingerprint
    files = {file.names[0]: file for file in corpus.files}
    if other is not corpus:
        fingerprint = f"{corpus.fingerprint} {other.fingerprint}"
        files |= {f"{file.names[0]} (validation)": file for file in other.files}
    return OpenData(
        train=train,
        validation=validation,
        task="language",
        tokenizer=tokenizer,
        bytes_per_target=text_bytes,
        about=[
            _corpus_line(config, corpus),
            *_tokenizer_lines(config, tokenizer),
            _split_line("training", train),
            held_out,
        ],
        fingerprint=fingerprint,
        files=files,
    )


def _corpus_line(config: "DataSection", corpus: Corpus) -> str:
    size = ""
    if corpus.text_bytes is not None:
        size = f"{int(corpus.text_bytes.array.sum()):,} bytes of text -> "
    tokens = sum(int(piece.lengths.sum()) for piece in corpus.pieces())
    masked = ", attention within documents" if config.mask_documents else ""
    source = config.source if config.path is None else f"{config.source} {config.path}"
    return f"{source}: {plural(corpus.documents, 'document')}, {size}{tokens:,} tokens{masked}"


def _tokenizer_lines(config: "DataSection", tokenizer: Tokenizer | None) -> list[str]:
    """Which tokens begin and end a document; files of tokens have their own."""
    if config.source not in TEXT or tokenizer is None or tokenizer.about is None:
        return []
    return [tokenizer.about]


def _split_line(name: str, samples: TokenSamples) -> str:
    documents = plural(samples.stream.documents, "document")
    return f"{name} {documents}, {plural(len(samples), 'sample')} of {samples.seq_len} tokens"


def _open_images(config: "DataSection", n_outputs: int | None, seed: int) -> OpenData:
    train, validation, classes, fingerprint, files = images.SOURCES[config.source](config)
    if n_outputs is not None and classes > n_outputs:
        raise InputError(
            f"data.source {config.source} has {classes} classes (labels 0 to {classes - 1}), but "
            f"model.num_classes is {n_outputs}: set it to {classes}"
        )
    augmented = replace(train, augment_seed=seed if config.augment else None)
    if isinstance(config.validation, str):
        split = SampleSplit(augmented, validation, f"from {config.validation}")
    else:
        split = split_samples(augmented, validation, config.validation)
    size = f"{train.channels} x {train.image_size} x {train.image_size}"
    about = f"images of {size}, {classes} classes{', augmented' if config.augment else ''}"
    data = _sample_data(config, "classification", split, about, fingerprint)
    return replace(data, files=files)


def _open_custom(
    config: "DataSection", n_outputs: int | None, vocab_size: int | None, own_loss: bool
) -> OpenData:
    samples, validation = open_custom(config, n_outputs, vocab_size, own_loss)
    split = SampleSplit(samples, validation, f"as {config.source} gives it")
    if validation is None and not isinstance(config.validation, str):
        split = split_samples(samples, samples, config.validation)
    content = f"{Path(config.source).expanduser().read_text('utf-8')} {len(samples)}"
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    about = plural(len(samples), "sample")

    task = _task_of(*samples.item(0, 0), own_loss)
    if task != "language":
        return _sample_data(config, task, split, about, fingerprint)
    data = _sample_data(config, "language", split, about, fingerprint)
    return replace(data, tokenizer=open_tokenizer(config.tokenizer, end_token=config.end_token))


def _task_of(inputs: Sequence[Tensor | None], target: Targets, own_loss: bool) -> Task:
    """What the targets of a user's own data set are."""
    if not own_loss:
        return "language" if is_text(inputs, target, own_loss) else "classification"
    if not isinstance(target, Tensor) or target.is_floating_point() or target.dtype == torch.bool:
        return "other"
    if is_text(inputs, target, own_loss):
        return "language"
    return "classification" if target.ndim == 0 else "other"


def _sample_data(
    config: "DataSection", task: Task, split: SampleSplit, about: str, fingerprint: str
) -> OpenData:
    train, validation, selection = split
    required = isinstance(config.validation, str) or config.validation > 0
    held_out = 0 if validation is None else len(validation)
    if len(train) == 0 or (required and held_out == 0):
        raise InputError(
            f"data.source {config.source} gives {len(train)} samples to train on and {held_out} "
            f"for validation, with data.validation {config.validation}: both need at least one; "
            "use more data, or data.validation 0"
        )
    line = "no validation"
    if validation is not None:
        line = f"validation {plural(held_out, 'sample')}, {selection}"
    lines = [f"{config.source}: {about}", f"training {plural(len(train), 'sample')}", line]
    return OpenData(train, validation, task, lines, fingerprint)
