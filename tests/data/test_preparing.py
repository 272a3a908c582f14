"""Preparing text: in little memory, without leaning on the file server, and with sentences for what cannot be read."""

import fcntl
import json
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtrain.config import Data
from meshtrain.data import OpenData, cache, prepare_data, text, tokens
from meshtrain.data.text import TextSource, jsonl_files, text_files
from meshtrain.data.tokenizer import Tokenizer, open_tokenizer
from meshtrain.data.tokens import Document, write
from meshtrain.errors import InputError
from tests.data.test_text import write_lines
from tests.launching import forked
from tests.parity.experiments import QUICKSTART, SMALL

Opener = Callable[..., OpenData]
MIB = 1 << 20
LINE = "Some words of a text, with a comma; and then 3 more of them.\n"
EMOJI = "\U0001f600"

# Memory


def most(tmp_path: Path, path: Path, tokenizer: str = "bytes") -> int:
    """The bytes that preparing a file takes at most."""
    section = Data(source=path.suffix[1:].replace("txt", "text"), path=str(path), tokenizer=tokenizer)
    tracemalloc.start()
    try:
        prepare_data(Data(**(vars(section) | {"cache": str(tmp_path / "cache")})), say=lambda line: None)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_large_text_file_is_never_in_memory(tmp_path: Path) -> None:
    for name, end in (("plain.txt", ""), ("emoji.txt", EMOJI)):
        (tmp_path / name).write_text(LINE * (16 * MIB // len(LINE)) + end)
        assert most(tmp_path, tmp_path / name) < 16 * MIB, "less than the file: it was 18 to 20 times as much"


def test_a_long_line_of_jsonl_takes_no_more_than_three_times_its_text(tmp_path: Path) -> None:
    for name, end in (("plain.jsonl", ""), ("emoji.jsonl", EMOJI)):
        body = LINE * (8 * MIB // len(LINE)) + end
        path = write_lines(tmp_path / name, [{"text": body}])
        assert most(tmp_path, path) < 3 * sys.getsizeof(body)


def test_long_prompts_of_short_completions_do_not_pile_up(tmp_path: Path) -> None:
    rows = [{"prompt": LINE * 300, "completion": "yes"}] * 600
    path = write_lines(tmp_path / "x.jsonl", rows)
    assert most(tmp_path, path) < path.stat().st_size / 2


def test_documents_are_not_counted_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_PART", 1000)
    monkeypatch.setattr(tokens, "BLOCK", 10_000)
    n, ids = 20_000, np.array([1, 2], np.uint8)
    tracemalloc.start()
    write(
        tmp_path / "a", (Document(ids, text_bytes=1000 + i) for i in range(n)), vocab_size=9, tokenizer="x", source="x"
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * n, "an offset takes 8 bytes on the disk"


# Parts


def documents(source: TextSource, tokenizer: Tokenizer) -> Iterator[Document]:
    return chain.from_iterable(text.documents(source, shard, tokenizer) for shard in source.shards())


def joined(found: Any) -> list[tuple[list[int], list[int], int]]:
    """The ids, losses and bytes of whole documents."""
    every: list[tuple[list[int], list[int], int]] = []
    going_on = False
    for ids, loss, size, ends in found:
        if not going_on:
            every.append(([], [], 0))
        before = every.pop()
        carried = [1] * len(ids) if loss is None else loss.tolist()
        every.append((before[0] + ids.tolist(), before[1] + carried, before[2] + size))
        going_on = not ends
    return every


def tokenizers_of(folder: Path) -> dict[str, Path]:
    """A tokenizer.json of each kind: where words end is found by a pattern, by spaces, or not at all."""
    library = pytest.importorskip("tokenizers")
    before, models, trainers = library.pre_tokenizers, library.models, library.trainers
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    split = before.Split(library.Regex(llama3), "isolated")
    kinds = {
        "gpt2": before.ByteLevel(add_prefix_space=False),
        "llama3": before.Sequence([split, before.ByteLevel(add_prefix_space=False, use_regex=False)]),
        "metaspace": before.Metaspace(),
        "prefix": before.ByteLevel(add_prefix_space=True),
        "words": before.BertPreTokenizer(),
        "none": None,
    }
    found = {}
    for name, splitting in kinds.items():
        tokenizer = library.Tokenizer(models.BPE(unk_token="<unk>"))
        if splitting is not None:
            tokenizer.pre_tokenizer = splitting
        alphabet = before.ByteLevel.alphabet() if name in ("gpt2", "llama3", "prefix") else []
        special = ["</s>", "<unk>"]
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator([TEXT[:3000]], trainer)
        if name == "gpt2":
            tokenizer.post_processor = library.processors.ByteLevel(trim_offsets=True)
        found[name] = folder / f"{name}.json"
        tokenizer.save(str(found[name]))
    return found


TEXT = Path(text.__file__).read_text("utf-8") + (LINE + "\n\n  Größe: 1234567, 漢字の文。\t" + EMOJI + "x\r\n") * 60


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "llama3", "metaspace", "prefix", "words"])
def test_parts_of_a_document_have_the_ids_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    name = "bytes" if kind == "bytes" else str(tokenizers_of(tmp_path)[kind])
    path = tmp_path / "text" / "x.txt"
    path.parent.mkdir()
    path.write_bytes(TEXT.encode())
    lines = [{"prompt": TEXT[:4000], "completion": TEXT[4000:]}, {"text": "short"}, {"prompt": "", "completion": ""}]
    lines += [{"prompt": "only", "completion": ""}]
    rows = write_lines(tmp_path / "x.jsonl", lines)
    tokenizer = open_tokenizer(name)
    for source in (text_files(path), jsonl_files(rows)):
        whole = list(documents(source, tokenizer))
        write(tmp_path / f"whole {source.read}", whole, vocab_size=tokenizer.vocab_size, tokenizer="x", source="x")
        with monkeypatch.context() as patch:
            patch.setattr(text, "_BATCH_CHARACTERS", 1000)
            parts = list(documents(source, tokenizer))
            write(tmp_path / f"parts {source.read}", parts, vocab_size=tokenizer.vocab_size, tokenizer="x", source="x")
        assert joined(parts) == joined(whole)
        assert len(parts) > 10 + len(whole), "it was cut"
        assert max(len(part.ids) for part in parts) <= 2200, "below 2000 characters, a few of them of several bytes"
        one, other = (
            json.loads((tmp_path / f"{how} {source.read}" / "header.json").read_text()) for how in ("whole", "parts")
        )
        assert one == other, "and the fingerprint is the same"


def test_what_cannot_be_cut_is_read_whole_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = open_tokenizer(str(tokenizers_of(tmp_path)["none"]))
    path = tmp_path / "x.txt"
    path.write_text(TEXT)
    whole = list(documents(text_files(path), tokenizer))
    monkeypatch.setattr(text, "_BATCH_CHARACTERS", 1000)
    assert joined(documents(text_files(path), tokenizer)) == joined(whole)
    monkeypatch.setattr(text, "_MOST_WHOLE", 5000)
    with pytest.raises(InputError, match=r"x\.txt has 6,000 characters and more .* finds no place to cut"):
        list(documents(text_files(path), tokenizer))


def test_what_is_wrong_in_a_later_part_has_its_place_in_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_BATCH_CHARACTERS", 100)
    tokenizer: Tokenizer = open_tokenizer("bytes")
    for raw, message in (
        (b"a" * 1234 + b"\0", r"U\+0000 at 1,234"),
        ("ü".encode() * 617 + b"\xe9 ", "byte 1,234 is 0xe9"),
        ("ü".encode() * 617 + b"\xc3", "byte 1,234 is 0xc3"),  # the end of a file is cut off in a character
    ):
        (tmp_path / "x.txt").write_bytes(raw)
        with pytest.raises(InputError, match=message):
            list(documents(text_files(tmp_path / "x.txt"), tokenizer))


def test_a_last_document_that_does_not_end_is_no_token_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not end"):
        write(tmp_path / "a", [Document(np.array([1]), ends=False)], vocab_size=9, tokenizer="x", source="x")
    assert list(tmp_path.iterdir()) == []


# What cannot be read


def test_what_libraries_raise_is_said_in_a_sentence(opened: Opener, tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"text": "good"}\n{"text": ' + "[" * 100_000 + "\n")
    with pytest.raises(InputError, match=r"x\.jsonl:2: not JSON .*recursion"):
        opened(source="jsonl", path=str(lines))
    tokenizer = library.Tokenizer(library.models.WordLevel({"</s>": 0, "the": 1}, "[UNK]"))
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "x.txt").write_text("the cat")
    with pytest.raises(InputError, match=r"t\.json cannot encode the text: .*UNK"):
        opened(source="text", path=str(tmp_path / "x.txt"), tokenizer=str(tmp_path / "t.json"))
    write(tmp_path / "a", [Document(np.arange(9))], vocab_size=9, tokenizer="x", source="x")
    (tmp_path / "a" / "header.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"header\.json is not JSON .*recursion"):
        opened(source="tokens", path=str(tmp_path / "a"))


def test_a_file_of_ones_own_that_raises_is_named_with_the_line(opened: Opener, tmp_path: Path) -> None:
    for name, body in (("raises", "\nraise ValueError('no')\n"), ("exits", "\nraise SystemExit(0)\n")):
        (tmp_path / f"{name}.py").write_text(body)
        with pytest.raises(InputError, match=rf"cannot be used: it raises \w+: (no|0) \(.*{name}\.py:2\)"):
            opened(source=str(tmp_path / f"{name}.py"))


# Links


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    for folder in (corpus / "own", elsewhere / "deep"):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("a")
    (elsewhere / "b.txt").write_text("b")
    (corpus / "linked").symlink_to(elsewhere)
    (corpus / "aaa").symlink_to(corpus / "own")  # leads to what is there anyway
    (corpus / "own" / "up").symlink_to(corpus)
    (elsewhere / "back").symlink_to(corpus / "own")
    (corpus / "gone").symlink_to(tmp_path / "nowhere")
    (corpus / "c.txt").symlink_to(elsewhere / "b.txt")
    found = [str(path.relative_to(corpus)) for path in text_files(corpus).files]
    assert found == ["c.txt", "linked/b.txt", "linked/deep/a.txt", "own/a.txt"]


# Waiting


def test_a_waiting_process_looks_ever_more_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ten minutes of a preparation it asks the file server some 130 times, and not 6,000 times."""
    folder, now, looks = tmp_path / "x", [0.0], [0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= 600:
            folder.mkdir()

    def look(self: Path) -> bool:
        looks[0] += self == folder
        return os.path.isdir(self)

    monkeypatch.setattr(cache.time, "sleep", sleep)
    monkeypatch.setattr(cache.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Path, "is_dir", look)
    said: list[str] = []
    with open(tmp_path / ".x.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        json.dump({"host": "a", "pid": 7, "since": 0}, lock)
        lock.flush()
        cache.prepare_once(folder, lambda: pytest.fail("prepared twice"), said.append)
    assert 600 <= now[0] <= 605
    assert looks[0] < 140
    assert 30 < len(said) <= 60


LOOKING = """
import os, sys
from meshtrain.data import cache
from meshtrain.train import main

plain = cache._lock_unless_there

def counted(*arguments):
    print("rank", os.environ["RANK"], "waits for the lock", flush=True)
    return plain(*arguments)

cache._lock_unless_there = counted
sys.exit(main(sys.argv[1:]))
"""


def test_one_process_of_a_host_prepares_and_the_others_do_not_touch_the_files(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(LINE * 400)
    (tmp_path / "looking.py").write_text(LOOKING)
    data = ("data.source=text", f"data.path={tmp_path}/x.txt", f"data.cache={tmp_path}/cache", "data.validation=0")
    own = (*SMALL, *data, "train.steps=1", "checkpoint.every=0", f"train.output={tmp_path}/run")
    done = forked(3, tmp_path / "looking.py", QUICKSTART, *own).check()
    assert [line for line in done.out.splitlines() if "waits" in line] == ["rank 0 waits for the lock"]
