"""Opens the data sets of a run from the `data` section of its config: one function for each kind of
source."""

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshtrain.data import images
from meshtrain.data.batch import Samples
from meshtrain.data.cache import Say
from meshtrain.data.custom import open_custom
from meshtrain.data.fingerprint import Files, data_path, sampled_digest
from meshtrain.data.megatron import open_megatron
from meshtrain.data.mixture import MixedSamples
from meshtrain.data.packing import Stream, TokenSamples
from meshtrain.data.prepare import TEXT, preparations
from meshtrain.data.split import (
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
    from meshtrain.config import Data

Task = Literal["language", "classification"]


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
        return {name: sampled_digest(files, self.fingerprint) for name, files in self.files.items()}


def prepare_data(config: "Data", *, say: Say) -> None:
    """The preparation step of `open_data`: one process per host runs it, while the others wait off
    the file system."""
    for preparation in preparations(config) if config.sources or config.source in TEXT else ():
        preparation.run(say)


def open_data(
    config: "Data", *, n_outputs: int | None, seed: int, say: Say, vocab_size: int | None = None
) -> OpenData:
    """Opens what `data.source` names, preparing it first where that has not been done on this host.

    Args:
        n_outputs: the size of the model's vocabulary, or its number of classes; None: do not check.
        seed: seed of the image augmentation; `train_batches` has the seed of the sample order.
        say: called with progress lines while this waits or prepares.
        vocab_size: upper bound of the token ids that a user's own data set gives; None: do not
            check.

    Raises InputError: the section or the data is invalid.
    """
    if config.sources:
        return _open_mixture(config, n_outputs, say)
    if config.source.endswith(".py"):
        return _open_custom(config, n_outputs, vocab_size)
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


def _open_mixture(config: "Data", n_outputs: int | None, say: Say) -> OpenData:
    """The data of several sources; their held-out parts form one validation set."""
    parts = [_open_language(own, n_outputs, say) for own in config.each_source()]
    named = list(zip([own.name for own in config.sources], parts, strict=True))
    tokenizers = {part.tokenizer.identity for part in parts if part.tokenizer is not None}
    if len(tokenizers) > 1:
        raise InputError(
            f"data.sources have different tokenizers, {any_of(sorted(tokenizers), 'and')}: prepare "
            "anew"
        )
    train = {name: part.train for name, part in named if isinstance(part.train, TokenSamples)}
    held_out = {
        name: part.validation for name, part in named if isinstance(part.validation, TokenSamples)
    }
    return OpenData(
        train=MixedSamples("training", list(train), list(train.values())),
        validation=MixedSamples("validation", list(held_out), list(held_out.values()))
        if held_out
        else None,
        task="language",
        tokenizer=next((part.tokenizer for part in parts if part.tokenizer is not None), None),
        bytes_per_target=_bytes_per_target([part for part in parts if part.validation is not None]),
        about=[f"{name}: {line}" for name, part in named for line in part.about],
        fingerprint=hashlib.sha256(
            " ".join(part.fingerprint for part in parts).encode()
        ).hexdigest(),
        files={f"{name}: {file}": of for name, part in named for file, of in part.files.items()},
    )


def _bytes_per_target(parts: Sequence[OpenData]) -> float | None:
    """Bytes of text per target over the validation parts of several sources together."""
    targets = [
        p.validation.stream.targets() for p in parts if isinstance(p.validation, TokenSamples)
    ]
    known = [part.bytes_per_target for part in parts if part.bytes_per_target is not None]
    if not targets or len(known) < len(parts) or sum(targets) == 0:
        return None
    return sum(n * of for n, of in zip(targets, known, strict=True)) / sum(targets)


def _open_language(config: "Data", n_outputs: int | None, say: Say) -> OpenData:
    """The data of one corpus, or of two if `data.validation` is a path."""
    if config.source in TEXT:
        tokenizer: Tokenizer | None = open_tokenizer(
            config.tokenizer, config.begin_token, config.end_token
        )
        assert tokenizer is not None
        if (
            n_outputs is not None
            and tokenizer.vocab_size > n_outputs
            and config.tokenizer == "bytes"
        ):
            raise InputError(
                f"model.vocab_size is {n_outputs}: the tokenizer `bytes` needs at least 256"
            )
        corpora = []
        for preparation in preparations(config):
            preparation.run(say)
            corpora.append(open_tokens(preparation.folder, cached=True))
    else:
        megatron = config.source == "megatron"
        path = data_path(config, "the prefix of .bin and .idx" if megatron else "a prepared folder")
        paths = [path, Path(config.validation)] if isinstance(config.validation, str) else [path]
        corpora = [
            open_megatron(str(path)) if megatron else open_tokens(path.expanduser())
            for path in paths
        ]
        tokenizer = _file_tokenizer(config, corpora)
    for corpus in corpora:
        corpus.check_ids(n_outputs)
    corpus, other = corpora[0], corpora[-1]
    if isinstance(config.validation, str):
        held_out = np.ones(other.documents, bool)
        split = Split(
            all_documents(corpus), all_documents(other), held_out, f"from {config.validation}"
        )
    else:
        split = (split_by_hash if config.source in TEXT else split_at_end)(
            corpus, config.validation
        )
    return _language_data(config, corpus, other, split, n_outputs, tokenizer)


def _file_tokenizer(config: "Data", corpora: Sequence[Corpus]) -> Tokenizer | None:
    """The tokenizer of the files, None if unknown. `bytes`, the key's default, counts only if the
    files agree."""
    tokenizer = open_tokenizer(config.tokenizer, end_token=config.end_token)
    for corpus in corpora:
        if config.tokenizer != "bytes" and corpus.tokenizer not in (None, tokenizer.identity):
            raise InputError(
                f"{corpus.name} was prepared with the tokenizer {corpus.tokenizer}, and "
                "data.tokenizer is "
                f"{tokenizer.identity}"
            )
    return (
        tokenizer
        if config.tokenizer != "bytes" or corpora[0].tokenizer == tokenizer.identity
        else None
    )


def _language_data(
    config: "Data",
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
            raise InputError(
                f"the {name} split of {stream.corpus.name} is empty: it has {len(stream):,} "
                "tokens, and one sample of "
                f"data.seq_len {config.seq_len} takes {config.seq_len + 1:,}; use more text, a "
                "smaller data.seq_len or "
                + (
                    "another data.validation (0: none)"
                    if split.validation is not None
                    else "another source"
                )
            )
        return packed

    train = samples("training", split.train)
    validation = samples("validation", split.validation) if split.validation is not None else None
    held_out = (
        "no validation"
        if validation is None
        else f"{_split_line('validation', validation)}, {split.selection}"
    )
    return OpenData(
        train=train,
        validation=validation,
        task="language",
        tokenizer=tokenizer,
        bytes_per_target=bytes_per_target(other, split.held_out)
        if validation is not None
        else None,
        about=[
            _corpus_line(config, corpus),
            *_tokenizer_lines(config, tokenizer),
            _split_line("training", train),
            held_out,
        ],
        fingerprint=corpus.fingerprint
        if other is corpus
        else f"{corpus.fingerprint} {other.fingerprint}",
        files={file.names[0]: file for file in corpus.files}
        | {f"{file.names[0]} (validation)": file for file in other.files if other is not corpus},
    )


def _corpus_line(config: "Data", corpus: Corpus) -> str:
    size = (
        ""
        if corpus.text_bytes is None
        else f"{int(corpus.text_bytes.array.sum()):,} bytes of text -> "
    )
    tokens = sum(int(piece.lengths.sum()) for piece in corpus.pieces())
    masked = ", attention within documents" if config.mask_documents else ""
    source = config.source if config.path is None else f"{config.source} {config.path}"
    return f"{source}: {plural(corpus.documents, 'document')}, {size}{tokens:,} tokens{masked}"


def _tokenizer_lines(config: "Data", tokenizer: Tokenizer | None) -> list[str]:
    """Which tokens begin and end a document; files of tokens have their own."""
    if config.source not in TEXT or tokenizer is None or tokenizer.about is None:
        return []
    return [tokenizer.about]


def _split_line(name: str, samples: TokenSamples) -> str:
    documents, size = plural(samples.stream.documents, "document"), plural(len(samples), "sample")
    return f"{name} {documents}, {size} of {samples.seq_len} tokens"


def _open_images(config: "Data", n_outputs: int | None, seed: int) -> OpenData:
    train, validation, classes, fingerprint, files = images.SOURCES[config.source](config)
    if n_outputs is not None and classes > n_outputs:
        raise InputError(
            f"data.source {config.source} has {classes} classes (labels 0 to {classes - 1}), but "
            "model.num_classes is "
            f"{n_outputs}: set it to {classes}"
        )
    augmented = replace(train, augment_seed=seed if config.augment else None)
    split: tuple[Samples, Samples | None, str] = augmented, validation, f"from {config.validation}"
    if not isinstance(config.validation, str):
        split = split_samples(augmented, validation, config.validation)
    size = f"{train.channels} x {train.image_size} x {train.image_size}"
    about = f"images of {size}, {classes} classes{', augmented' if config.augment else ''}"
    return replace(_sample_data(config, "classification", split, about, fingerprint), files=files)


def _open_custom(config: "Data", n_outputs: int | None, vocab_size: int | None) -> OpenData:
    samples, validation = open_custom(config, n_outputs, vocab_size)
    split: tuple[Samples, Samples | None, str] = samples, validation, f"as {config.source} gives it"
    if validation is None and not isinstance(config.validation, str):
        split = split_samples(samples, samples, config.validation)
    language = samples.item(0, 0)[1].ndim == 1
    content = f"{Path(config.source).expanduser().read_text('utf-8')} {len(samples)}"
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    about = plural(len(samples), "sample")
    data = _sample_data(
        config, "language" if language else "classification", split, about, fingerprint
    )
    return replace(
        data,
        tokenizer=open_tokenizer(config.tokenizer, end_token=config.end_token)
        if language
        else None,
    )


def _sample_data(
    config: "Data",
    task: Task,
    split: tuple[Samples, Samples | None, str],
    about: str,
    fingerprint: str,
) -> OpenData:
    """`split`: the training samples, the validation samples, and how those were chosen."""
    train, validation, selection = split
    required = isinstance(config.validation, str) or config.validation > 0
    held_out = 0 if validation is None else len(validation)
    if len(train) == 0 or (required and held_out == 0):
        raise InputError(
            f"data.source {config.source} gives {len(train)} samples to train on and {held_out} "
            "for validation, with "
            f"data.validation {config.validation}: both need at least one; use more data, or "
            "data.validation 0"
        )
    line = (
        "no validation"
        if validation is None
        else f"validation {plural(held_out, 'sample')}, {selection}"
    )
    lines = [f"{config.source}: {about}", f"training {plural(len(train), 'sample')}", line]
    return OpenData(train, validation, task, lines, fingerprint)
