"""Text of data sets on the Hugging Face hub, read by `datasets`.

A data set is taken at one commit, which names the prepared tokens: they are there, or not, without
a look at the hub. Only then is it fetched, into the caches of `datasets`. Its scripts are never
run, nor does `datasets` have them any more since version 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshtrain.data.cache import Say
from meshtrain.data.text import (
    LEAST_SHARD,
    ROWS,
    SHARDS,
    Piece,
    Text,
    TextSource,
    text_of_record,
)
from meshtrain.errors import InputError, shorten
from meshtrain.job.hub import INSTALL, HubName, ask, explained, hub_name, watched


@dataclass(frozen=True)
class HubSource(TextSource):
    """A split of a data set on the hub; a row is a document."""

    name: str
    kind: str
    field: str  # the column of a document's text
    repo: HubName  # with its commit
    subset: str | None  # of the configurations that some data sets have
    split: str

    @property
    def about(self) -> str:
        return f"split {self.split}"

    def state(self) -> object:
        return str(self.repo), self.subset, self.split

    def fetch(self, say: Say) -> None:
        from_cache = _package().config.HF_DATASETS_CACHE
        with watched(self.repo, [from_cache], say):
            self._rows()

    def shards(self) -> list[list[Piece]]:
        rows = self._rows()
        count = len(rows)
        most = max(LEAST_SHARD, rows.data.nbytes // SHARDS)  # bytes of a shard
        step = max(1, count * most // max(rows.data.nbytes, 1))
        begins = range(0, max(count, 1), step)
        return [[Piece(Path(self.name), begin, min(begin + step, count))] for begin in begins]

    def read(self, piece: Piece) -> Iterator[Text]:
        rows = self._rows()
        columns = self._columns(rows.column_names)
        chosen = rows.select_columns(columns)
        for first in range(piece.begin, piece.end, ROWS):
            batch = chosen[first : min(first + ROWS, piece.end)]
            for number, values in enumerate(zip(*batch.values(), strict=True), first + 1):
                record = dict(zip(batch, values, strict=True))
                if "messages" in record:
                    record = _without_gaps(record)
                yield from text_of_record(record, f"{self.name}, row {number:,}", self.field)

    def _rows(self) -> Any:
        return _open(self.repo, self.subset, self.split)

    def _columns(self, names: list[str]) -> list[str]:
        """The columns that are read, as of an object in JSONL."""
        if self.field in names:
            return [self.field]
        if "messages" in names:
            return [name for name in ("messages", "tools") if name in names]
        if {"prompt", "completion"} <= set(names):
            return ["prompt", "completion"]
        raise InputError(
            f"{self.name}: expected the column `{self.field}`, `messages`, or `prompt` and "
            f"`completion`; found {', '.join(names)} (data.text_field)"
        )


def hub_text(path: str, field: str, subset: str | None, split: str) -> HubSource:
    """A split of a data set. Raises InputError: the path is none of the hub, or the hub does not
    have it."""
    name = hub_name(path, "dataset")
    if name is None:
        raise InputError(
            f"data.source hub: {path} is a path here, and expected is the name of a data set on "
            "the hub (org/name, or org/name@main where there is a folder org); files are read by "
            "data.source jsonl, parquet or text"
        )
    if not name.is_commit:
        answer = ask(name)
        if answer.problem:
            raise InputError(f"data.source hub: {answer.problem}")
        name = name.at(answer.commit)
    assert name.revision is not None
    of_subset = "" if subset is None else f" {subset}"
    return HubSource(
        name=f"{name.repo}@{name.revision[:12]}{of_subset} {split}",
        kind=f"hub {field}",
        field=field,
        repo=name,
        subset=subset,
        split=split,
    )


def _package() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"data.source hub needs the package datasets ({error}): {INSTALL}"
        ) from None
    return datasets


@lru_cache(maxsize=8)
def _open(repo: HubName, subset: str | None, split: str) -> Any:
    """The rows of a split, in files that are mapped."""
    datasets = _package()
    datasets.disable_progress_bars()  # they would be drawn over the lines of a run
    with explained(repo):
        try:
            rows = datasets.load_dataset(
                repo.repo,
                name=subset,
                split=split,
                revision=repo.revision,
                keep_in_memory=False,
            )
        except (ValueError, RuntimeError, FileNotFoundError) as error:
            # It has no such split or configuration, or no files that are read, or damaged ones.
            raise InputError(
                f"data.source hub: {repo.repo}: {shorten(str(error))} (data.path, data.subset, "
                "data.split)"
            ) from error

    # Where the hub does not answer `datasets` takes what it has cached last, of any commit.
    for file in rows.cache_files:
        if repo.revision not in Path(file["filename"]).parts:
            raise InputError(
                f"data.source hub: the cache of datasets has another version of {repo.repo} than "
                f"{repo.revision}, and the hub does not give it: {file['filename']}"
            )
    return rows


def _without_gaps(record: dict[str, Any]) -> dict[str, Any]:
    """The messages without keys that only others of the data set have: there a table has None."""
    messages = []
    for message in record["messages"] or ():
        kept = {key: value for key, value in message.items() if value is not None}
        kept.setdefault("content", message.get("content"))
        messages.append(kept)
    kept_record = {**record, "messages": messages}
    if kept_record.get("tools") is None:
        kept_record.pop("tools", None)
    return kept_record
