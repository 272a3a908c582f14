"""Preparation of text: processes of one or several hosts tokenize shards, which are merged into a
run's token files.

Every process takes one unlocked shard after the other, then waits for those of the other processes;
the first to find all shards done merges them. A killed process loses at most the shard it was
working on, which another process redoes. The token files depend on the texts and the tokenizer
alone, not on who tokenized what. Imports no torch.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshtrain.data import text
from meshtrain.data.cache import Progress, Say, cache_folder, prepare_once
from meshtrain.data.chat import LossOn
from meshtrain.data.fingerprint import data_path
from meshtrain.data.hub_text import hub_text
from meshtrain.data.tokenizer import Tokenizer, open_tokenizer
from meshtrain.data.tokens import Document, open_tokens, read_documents, temporary_folder, write
from meshtrain.errors import InputError, any_of, plural
from meshtrain.job.storage import fsync_folder

if TYPE_CHECKING:
    from meshtrain.config.schema import DataSection

_PART = 1 << 22  # tokens looked at once

# data.source -> function of the section `data`, with one path, that finds the text.
TEXT: dict[str, Callable[["DataSection"], text.TextSource]] = {
    "python-stdlib": lambda data: text.python_stdlib(),
    "text": lambda data: text.text_files(_path(data)),
    "jsonl": lambda data: text.jsonl_files(_path(data), data.text_field),
    "parquet": lambda data: text.parquet_files(_path(data), data.text_field),
    "hub": lambda data: hub_text(str(data.path), data.text_field, data.subset, data.split),
}


def _path(data: "DataSection") -> Path:
    return data_path(data, "a file, or a folder of files")


@dataclass(frozen=True)
class Preparation:
    """One corpus to be prepared into a folder of token files."""

    source: text.TextSource
    tokenizer: Tokenizer
    folder: Path
    loss_on: LossOn = "all"
    # where an older version of meshtrain would have put a corpus of these files
    earlier: Path | None = None

    @cached_property
    def shards(self) -> list[list[text.Piece]]:
        return self.source.shards()

    @property
    def parts(self) -> Path:
        """The folder of the shards' own token files."""
        return self.folder.parent / f".{self.folder.name}.shards"

    def missing(self) -> list[int]:
        """The shards that nobody has finished."""
        shards = range(len(self.shards))
        absent = [shard for shard in shards if not self._shard_folder(shard).is_dir()]
        # Looked at last: once the folder exists, the shards are removed.
        if self.folder.is_dir():
            return []
        return absent

    def run(self, say: Say, host: int = 0, hosts: int = 1) -> bool:
        """Prepares the corpus in this process, or host `host`'s share of it, and waits for this
        host's other processes.

        Returns whether the token files exist: the last of several hosts makes them. Finished shards
        stay if this fails. Raises InputError: a text is malformed; OSError: writing to the disk
        failed.
        """
        self.take_earlier(say)
        self.fetch(say)
        if self.missing():
            say(f"preparing {self.source.name}: {self.source.about} into {self.folder}")
            # First what nobody works on, then what others have not finished, or have died over.
            self.take_shards(say, host, hosts, wait=False)
            self.take_shards(say, host, hosts, wait=True)
            if self.missing():
                return False
        prepare_once(self.folder, partial(self._merge, say), say)
        shutil.rmtree(self.parts, ignore_errors=True)
        return True

    def fetch(self, say: Say) -> None:
        """Brings the text to this host, if it has to be prepared."""
        if not self.folder.is_dir():
            self.source.fetch(say)

    def take_earlier(self, say: Say) -> None:
        """Takes the folder of an older version of meshtrain, if it holds what would be made
        today."""
        earlier = self.earlier
        if earlier is None or self.folder.is_dir() or not earlier.is_dir():
            return
        if _is_of_today(earlier, self.tokenizer):
            say(f"taking {earlier}, which an older meshtrain prepared, as {self.folder}")
            prepare_once(self.folder, partial(_link, earlier, self.folder), say)

    def take_shards(
        self, say: Say, host: int, hosts: int, *, wait: bool, note: Say | None = None
    ) -> None:
        """Tokenizes the shards of a host's share one by one.

        Args:
            say: prints the progress.
            wait: whether to wait for a shard that another process is tokenizing, or to skip it.
            note: prints what is worth knowing of the text; None: `say` does.
        """
        before = self.tokenizer.spelled
        progress = Progress(self.source.name, say)
        for shard in range(host, len(self.shards), hosts):
            tokenize = partial(self._tokenize, shard, progress)
            prepare_once(self._shard_folder(shard), tokenize, say, wait=wait)
        spelled = self.tokenizer.spelled
        if spelled is not None and before is None:
            tell = note or say
            tell(
                f"text of {self.source.name} spells control tokens, such as {spelled}: it is "
                "tokenized as characters; a conversation whose turns shall have these tokens is "
                "given as `messages`"
            )

    def _shard_folder(self, shard: int) -> Path:
        return self.folder if len(self.shards) == 1 else self.parts / f"{shard:05d}"

    def _tokenize(self, shard: int, progress: Progress) -> None:
        # while this process waited for the lock, another may have merged the shards
        if not self.folder.is_dir():
            documents = text.documents(
                self.source, self.shards[shard], self.tokenizer, self.loss_on
            )
            self._write(self._shard_folder(shard), progress.count(documents))

    def _merge(self, say: Say) -> None:
        say(f"merging {plural(len(self.shards), 'shard')} into {self.folder}")
        shards = map(self._shard_folder, range(len(self.shards)))
        documents = chain.from_iterable(map(read_documents, shards))
        self._write(self.folder, Progress(self.source.name, say).count(documents))

    def _write(self, folder: Path, documents: Iterable[Document]) -> None:
        write(
            folder,
            documents,
            vocab_size=self.tokenizer.vocab_size,
            tokenizer=self.tokenizer.identity,
            source=self.source.name,
            empty=folder != self.folder,  # a shard may hold no text, the corpus may not
        )


def loss_share(folder: Path) -> str | None:
    """Which share of the tokens of a prepared folder has a loss, as a line; None: all of them.
    Raises InputError: it is none, or damaged."""
    corpus = open_tokens(folder, cached=True)
    if corpus.loss is None:
        return None
    of_all = corpus.tokens.count
    with_loss = int(np.count_nonzero(corpus.loss.array))
    line = f"{with_loss:,} of {of_all:,} tokens have a loss ({100 * with_loss / of_all:.3g} %)"
    if with_loss == 0:
        return f"{line}: a run refuses such training data, of which nothing would be learned"
    return line


def preparations(config: "DataSection") -> Iterator[Preparation]:
    """Preparations of the training data, and of the validation set if it is a path. Raises
    InputError: invalid data."""
    if config.sources:
        for own in config.each_source():
            if own.source in TEXT:
                yield from preparations(own)
        return
    if config.source not in TEXT:
        raise InputError(
            f"data.source {config.source} is read as it is: {any_of(list(TEXT))} are prepared"
        )
    tokenizer = open_tokenizer(config.tokenizer, config.begin_token, config.end_token)
    sets = [config]
    if isinstance(config.validation, str):
        sets.append(_validation_set(config, config.validation))

    cache = cache_folder(config.cache)
    for each in sets:
        source = TEXT[each.source](each)
        stem = source.name.split()[0].rsplit("/", 1)[-1]
        folder = cache / f"{stem}-{source.key(tokenizer, config.loss_on)}"
        earlier = None
        # Older versions had neither a token that begins documents nor a choice of answers.
        if tokenizer.begin is None and config.loss_on == "all":
            earlier = cache / f"{stem}-{source.earlier_key(tokenizer)}"
        yield Preparation(source, tokenizer, folder, config.loss_on, earlier)


def _validation_set(config: "DataSection", name: str) -> "DataSection":
    """The section as if `data.validation`, which is no share, were all of its data."""
    if config.source == "hub":
        return replace(config, split=name)
    kind = "text" if config.source == "python-stdlib" else config.source
    return replace(config, source=kind, path=name)


def _is_of_today(folder: Path, tokenizer: Tokenizer) -> bool:
    """Whether a corpus that an older version of meshtrain prepared has the ids and losses that this
    one would make: the ends of its documents are today's, and no other control token is in it, as
    its text would have spelled them."""
    try:
        corpus = open_tokens(folder, cached=True)
    except (InputError, OSError):
        return False
    if corpus.loss is not None and tokenizer.chat is not None:  # it may hold conversations
        return False
    tokens = corpus.tokens.array
    assert isinstance(tokens, np.ndarray)  # in a folder of this host
    if (tokens[corpus.offsets.array[1:] - 1] != tokenizer.end).any():
        return False
    controls = 0
    for first in range(0, len(tokens), _PART):
        controls += int(np.count_nonzero(tokenizer.controls(tokens[first : first + _PART])))
    return controls == corpus.documents


def _link(earlier: Path, folder: Path) -> None:
    """Makes `folder` of the files of another one, which keeps them, without taking more of the disk
    where it can."""
    temporary = temporary_folder(folder)
    temporary.mkdir()
    try:
        for file in earlier.iterdir():
            try:
                os.link(file, temporary / file.name)
            except OSError:  # a file system without links
                shutil.copyfile(file, temporary / file.name)
        fsync_folder(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
