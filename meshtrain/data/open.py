"""From the `data` section of a config to the data sets of a run: every source has its function here."""

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshtrain.data import images, text
from meshtrain.data.batch import Samples
from meshtrain.data.files import Files, sampled_digest
from meshtrain.data.megatron import open_megatron
from meshtrain.data.own import open_own
from meshtrain.data.packing import Corpus, Stream, TokenSamples
from meshtrain.data.prepare import Say, cache_folder, prepared, reported
from meshtrain.data.split import Split, bytes_per_target, split_at_end, split_by_hash, whole
from meshtrain.data.tokenizer import Tokenizer, open_tokenizer
from meshtrain.data.tokens import open_tokens, write
from meshtrain.errors import InputError

if TYPE_CHECKING:
    from meshtrain.config import Data

Task = Literal["language", "classification"]


@dataclass(frozen=True)
class OpenData:
    """The data of a run."""

    train: Samples
    validation: Samples | None
    task: Task
    tokenizer: Tokenizer | None  # to read what the model writes; None where the data does not say which
    bytes_per_target: float | None  # of the validation: loss / ln 2 / this = bits per byte
    about: list[str]  # lines for people
    fingerprint: str  # of all the data, the same on every host that has the same
    image_shape: tuple[int, int, int] | None = None  # (c, height, width)
    files: Mapping[str, Files] = field(default_factory=dict)  # by a name for people

    @property
    def identity(self) -> dict[str, Any]:
        """By which it is known again: on another host, or when a run goes on later."""
        held_out = None if self.validation is None else len(self.validation)
        return {"fingerprint": self.fingerprint, "train": len(self.train), "validation": held_out}

    def sampled(self) -> dict[str, str]:
        """Name -> digest of samples of the files as they lie on this host; a fingerprint may be what a header says.

        Raises:
            OSError: a file cannot be read.
        """
        return {name: sampled_digest(files, self.fingerprint) for name, files in self.files.items()}


def prepare_data(config: "Data", *, say: Say) -> None:
    """Does what `open_data` would do first: one process of a host calls it while the others wait, away from the files.

    Raises:
        InputError: as `open_data`.
    """
    if config.source in _TEXT:
        tokenizer = open_tokenizer(config.tokenizer)
        for source in _text_sources(config):
            _prepared_corpus(source, config, tokenizer, say)


def open_data(config: "Data", *, n_outputs: int | None, seed: int, say: Say) -> OpenData:
    """Opens what `data.source` names, preparing it first where that has not been done on this host.

    Args:
        n_outputs: the size of the model's vocabulary, or its number of classes; None: not to be checked.
        seed: of the augmentation of images; the order of samples is `train_batches`'s.
        say: gets a line at a time while this waits or prepares.

    Raises:
        InputError: anything wrong with the section or the data.
    """
    if config.source.endswith(".py"):
        return _open_own(config, n_outputs)
    if config.source in _TEXT:
        return _open_text(config, n_outputs, say)
    if config.source in ("tokens", "megatron"):
        return _open_files(config, n_outputs)
    if config.source in _IMAGES:
        return _open_images(config, n_outputs, seed)
    known = sorted({*_TEXT, *_IMAGES, "tokens", "megatron"})
    near = difflib.get_close_matches(config.source, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InputError(
        f"data.source is {config.source!r}: expected one of {', '.join(known)}, or the path of a .py file{hint}"
    )


def _path(config: "Data", what: str) -> Path:
    if config.path is None:
        raise InputError(f"data.source {config.source} needs data.path: {what}")
    return Path(config.path)


_TEXT: dict[str, Callable[["Data"], text.TextSource]] = {
    "python-stdlib": lambda config: text.python_stdlib(),
    "text": lambda config: text.text_files(_path(config, "a text file, or a folder of .txt and .md files")),
    "jsonl": lambda config: text.jsonl_files(_path(config, "a .jsonl file, or a folder of them")),
}


def _open_text(config: "Data", n_outputs: int | None, say: Say) -> OpenData:
    tokenizer = open_tokenizer(config.tokenizer)
    if n_outputs is not None and tokenizer.vocab_size > n_outputs and config.tokenizer == "bytes":
        raise InputError(f"model.vocab_size is {n_outputs}: the tokenizer `bytes` needs at least 256")
    corpus, *others = (_prepared_corpus(source, config, tokenizer, say) for source in _text_sources(config))
    corpus.check_ids(n_outputs)
    if isinstance(config.validation, str):
        return _with_validation(config, corpus, others[0], n_outputs, tokenizer)
    return _language(config, corpus, corpus, split_by_hash(corpus, config.validation), n_outputs, tokenizer)


def _text_sources(config: "Data") -> Iterator[text.TextSource]:
    yield _TEXT[config.source](config)
    if isinstance(config.validation, str):
        yield (text.jsonl_files if config.source == "jsonl" else text.text_files)(Path(config.validation))


def _prepared_corpus(source: text.TextSource, config: "Data", tokenizer: Tokenizer, say: Say) -> Corpus:
    folder = cache_folder(config.cache) / f"{source.name.split()[0].rsplit('/', 1)[-1]}-{source.key(tokenizer)}"

    def prepare() -> None:
        say(f"preparing {source.name}: {len(source.files):,} files into {folder}")
        found = reported(text.documents(source, tokenizer), source.name, say)
        write(folder, found, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.identity, source=source.name)

    return Corpus.of_folder(open_tokens(prepared(folder, prepare, say)))


def _open_files(config: "Data", n_outputs: int | None) -> OpenData:
    path = _path(config, "the prefix of .bin and .idx" if config.source == "megatron" else "a prepared folder")
    corpus, tokenizer = _file_corpus(config, path)
    corpus.check_ids(n_outputs)
    if not isinstance(config.validation, str):
        split = split_at_end(corpus, config.validation)
        return _language(config, corpus, corpus, split, n_outputs, tokenizer)
    other, _ = _file_corpus(config, Path(config.validation))
    return _with_validation(config, corpus, other, n_outputs, tokenizer)


def _file_corpus(config: "Data", path: Path) -> tuple[Corpus, Tokenizer | None]:
    """A corpus in token files, and its tokenizer as far as it is known."""
    given = open_tokenizer(config.tokenizer)
    if config.source == "megatron":  # the files do not say; `bytes` is what a config has that says nothing
        return open_megatron(str(path)), None if config.tokenizer == "bytes" else given
    folder = open_tokens(path.expanduser())
    if folder.header.tokenizer == given.identity:
        return Corpus.of_folder(folder), given
    if config.tokenizer != "bytes":
        raise InputError(
            f"{path} was prepared with the tokenizer {folder.header.tokenizer}, and data.tokenizer is {given.identity}"
        )
    return Corpus.of_folder(folder), None


def _with_validation(
    config: "Data", corpus: Corpus, other: Corpus, n_outputs: int | None, tokenizer: Tokenizer | None
) -> OpenData:
    other.check_ids(n_outputs)
    split = Split(whole(corpus), whole(other), np.ones(other.documents, bool), f"from {config.validation}")
    return _language(config, corpus, other, split, n_outputs, tokenizer)


def _language(
    config: "Data", corpus: Corpus, other: Corpus, split: Split, n_outputs: int | None, tokenizer: Tokenizer | None
) -> OpenData:
    def samples(name: str, stream: Stream) -> TokenSamples:
        found = TokenSamples(
            name, stream, seq_len=config.seq_len, mask_documents=config.mask_documents, n_outputs=n_outputs
        )
        if len(found) == 0:
            raise InputError(
                f"the {name} split of {stream.corpus.name} is empty: it has {len(stream):,} tokens, and one sample of "
                f"data.seq_len {config.seq_len} takes {config.seq_len + 1:,}; use more text, a smaller data.seq_len or "
                + ("another data.validation (0: none)" if split.validation is not None else "another source")
            )
        return found

    train = samples("training", split.train)
    validation = samples("validation", split.validation) if split.validation is not None else None
    about = [_corpus_line(config, corpus), _split_line("training", train)]
    if validation is not None:
        about.append(f"{_split_line('validation', validation)}, {split.how}")
    else:
        about.append("no validation")
    return OpenData(
        train=train,
        validation=validation,
        task="language",
        tokenizer=tokenizer,
        bytes_per_target=bytes_per_target(other, split.held) if validation is not None else None,
        about=about,
        fingerprint=corpus.fingerprint if other is corpus else f"{corpus.fingerprint} {other.fingerprint}",
        files={one.names[0]: one for one in corpus.files}
        | {f"{one.names[0]} (validation)": one for one in other.files if other is not corpus},
    )


def _corpus_line(config: "Data", corpus: Corpus) -> str:
    size = "" if corpus.text_bytes is None else f"{int(corpus.text_bytes.sum()):,} bytes of text -> "
    tokens = int(corpus.lengths.sum())
    masked = ", attention within documents" if config.mask_documents else ""
    where = config.source if config.path is None else f"{config.source} {config.path}"
    return f"{where}: {_count(corpus.documents, 'document')}, {size}{tokens:,} tokens{masked}"


def _split_line(name: str, samples: TokenSamples) -> str:
    documents, size = _count(len(samples.stream.documents), "document"), _count(len(samples), "sample")
    return f"{name} {documents}, {size} of {samples.seq_len} tokens"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _digits(config: "Data", augment: images.Augment | None) -> images.ImageSets:
    return images.open_digits(config.image_size, config.validation, augment)


def _mnist(config: "Data", augment: images.Augment | None) -> images.ImageSets:
    path = _path(config, "the folder with MNIST's own files")
    return images.open_mnist(path, config.image_size, config.validation, augment)


def _folder(config: "Data", augment: images.Augment | None) -> images.ImageSets:
    path = _path(config, "a folder with one folder of images per class")
    return images.open_folder(path, config.image_size, config.validation, augment)


_IMAGES = {"digits": _digits, "mnist": _mnist, "images": _folder}


def _open_images(config: "Data", n_outputs: int | None, seed: int) -> OpenData:
    found = _IMAGES[config.source](config, images.Augment(seed) if config.augment else None)
    classes = len(found.classes)
    if n_outputs is not None and classes > n_outputs:
        raise InputError(
            f"data.source {config.source} has {classes} classes (labels 0 to {classes - 1}), but model.num_classes is "
            f"{n_outputs}: set it to {classes}"
        )
    _check_samples(config, found.train, found.validation)
    size = " x ".join(map(str, found.shape))
    about = [f"{config.source}: images of {size}, {classes} classes{', augmented' if config.augment else ''}"]
    about += _sample_lines(found.train, found.validation, found.how)
    return OpenData(
        train=found.train,
        validation=found.validation,
        task="classification",
        tokenizer=None,
        bytes_per_target=None,
        about=about,
        fingerprint=found.fingerprint,
        image_shape=found.shape,
        files=found.files,
    )


def _check_samples(config: "Data", train: Samples, validation: Samples | None) -> None:
    wanted = isinstance(config.validation, str) or config.validation > 0
    if len(train) == 0 or (wanted and (validation is None or len(validation) == 0)):
        kept, held = len(train), 0 if validation is None else len(validation)
        raise InputError(
            f"data.source {config.source} gives {kept} samples to train on and {held} for validation, with "
            f"data.validation {config.validation}: both need at least one; use more data, or data.validation 0"
        )


def _sample_lines(train: Samples, validation: Samples | None, how: str) -> list[str]:
    held = "no validation" if validation is None else f"validation {_count(len(validation), 'sample')}, {how}"
    return [f"training {_count(len(train), 'sample')}", held]


def _open_own(config: "Data", n_outputs: int | None) -> OpenData:
    own, own_validation = open_own(config, n_outputs)
    train: Samples = own
    validation: Samples | None = own_validation
    how = f"as {config.source} gives it"
    if validation is None and not isinstance(config.validation, str) and config.validation > 0:
        train, validation = images.split_samples(own, own, config.validation)
        how = "chosen by a hash of the sample's number"
    _check_samples(config, train, validation)
    language = own.target().ndim == 1
    return OpenData(
        train=train,
        validation=validation,
        task="language" if language else "classification",
        tokenizer=open_tokenizer(config.tokenizer) if language else None,
        bytes_per_target=None,
        about=[f"{config.source}: {_count(len(own), 'sample')}", *_sample_lines(train, validation, how)],
        fingerprint=hashlib.sha256(
            f"{Path(config.source).expanduser().read_text('utf-8')} {len(own)}".encode()
        ).hexdigest(),
    )
