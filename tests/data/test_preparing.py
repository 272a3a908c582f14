"""Preparing text: in little memory, without leaning on the file server, and with sentences for what
cannot be read."""

import fcntl
import json
import os
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtrain.config.schema import DataSection
from meshtrain.data import cache, prepare_data, text, tokens
from meshtrain.data.prepare import preparations
from meshtrain.data.text import TextSource, jsonl_files, text_files
from meshtrain.data.tokenizer import Tokenizer, open_tokenizer
from meshtrain.data.tokens import Document, open_tokens, verify, write
from meshtrain.errors import InputError
from tests.data.conftest import Opener
from tests.data.files import tokenizer_folder, write_lines, write_tokens
from tests.launching import forked
from tests.parity.experiments import QUICKSTART, SMALL

MIB = 1 << 20
LINE = "Some words of a text, with a comma; and then 3 more of them.\n"
EMOJI = "\U0001f600"

# Memory


def peak(tmp_path: Path, path: Path) -> int:
    """The bytes that preparing a file takes at most."""
    section = DataSection(source="jsonl", path=str(path), cache=str(tmp_path / "cache"))
    tracemalloc.start()
    try:
        prepare_data(section, say=lambda line: None)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("end", ["", EMOJI])
def test_a_long_line_is_in_memory_no_more_than_three_times(tmp_path: Path, end: str) -> None:
    text = LINE * (8 * MIB // len(LINE)) + end
    assert peak(tmp_path, write_lines(tmp_path / "x.jsonl", [{"text": text}])) < 3 * sys.getsizeof(
        text
    )


def test_long_prompts_of_short_completions_do_not_pile_up(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": LINE * 300, "completion": "yes"}] * 600)
    assert peak(tmp_path, path) < path.stat().st_size / 2


def test_documents_are_not_counted_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_PART", 1000)
    monkeypatch.setattr(tokens, "BLOCK", 10_000)
    n, ids = 20_000, np.array([1, 2], np.uint8)
    entries = (Document(ids, text_bytes=1000 + i) for i in range(n))
    tracemalloc.start()
    write(tmp_path / "a", entries, vocab_size=9, tokenizer="x", source="x")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 * n, "an offset takes 8 bytes on the disk"


# Parts


def documents(source: TextSource, tokenizer: Tokenizer) -> Iterator[Document]:
    return chain.from_iterable(
        text.documents(source, shard, tokenizer) for shard in source.shards()
    )


def joined(parts: Iterable[Document]) -> list[tuple[list[int], list[int], int]]:
    """The ids, losses and bytes of whole documents."""
    whole: list[tuple[list[int], list[int], int]] = [([], [], 0)]
    for ids, loss, size, ends in parts:
        before = whole.pop()
        losses = [1] * len(ids) if loss is None else loss.tolist()
        whole.append((before[0] + ids.tolist(), before[1] + losses, before[2] + size))
        whole += [([], [], 0)] * ends
    return whole


def tokenizers_of(folder: Path) -> dict[str, Path]:
    """A tokenizer.json of each kind: where words end is found by a pattern, by spaces, or not at
    all."""
    library = pytest.importorskip("tokenizers")
    before, models, trainers = library.pre_tokenizers, library.models, library.trainers
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
        r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    split = before.Split(library.Regex(llama3), "isolated")
    kinds = {
        "gpt2": before.ByteLevel(add_prefix_space=False),
        "llama3": before.Sequence(
            [split, before.ByteLevel(add_prefix_space=False, use_regex=False)]
        ),
        "metaspace": before.Metaspace(),
        "prefix": before.ByteLevel(add_prefix_space=True),
        "words": before.BertPreTokenizer(),
        "none": None,
    }
    paths = {}
    for name, splitting in kinds.items():
        tokenizer = library.Tokenizer(models.BPE(unk_token="<unk>"))
        if splitting is not None:
            tokenizer.pre_tokenizer = splitting
        alphabet = before.ByteLevel.alphabet() if name in ("gpt2", "llama3", "prefix") else []
        trainer = trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["</s>", "<unk>"],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        tokenizer.train_from_iterator([TEXT[:3000]], trainer)
        if name == "gpt2":
            tokenizer.post_processor = library.processors.ByteLevel(trim_offsets=True)
        paths[name] = folder / f"{name}.json"
        tokenizer.save(str(paths[name]))
    return paths


TEXT = (
    Path(text.__file__).read_text("utf-8")
    + (LINE + "\n\n  Größe: 1234567, 漢字の文。\t" + EMOJI + "x\r\n") * 60
)


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "llama3", "metaspace", "prefix", "words"])
def test_parts_of_a_document_have_the_ids_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tokenizer = open_tokenizer("bytes" if kind == "bytes" else str(tokenizers_of(tmp_path)[kind]))
    (tmp_path / "x.txt").write_bytes(TEXT.encode())
    pairs = (TEXT[:4000], TEXT[4000:]), ("", ""), ("only", "")
    lines = [
        {"text": "short"},
        *[{"prompt": prompt, "completion": completion} for prompt, completion in pairs],
    ]
    for source in (
        text_files(tmp_path / "x.txt"),
        jsonl_files(write_lines(tmp_path / "x.jsonl", lines)),
    ):
        cuts, headers = [], []
        for size in (text._BATCH_CHARACTERS, 1000):
            monkeypatch.setattr(text, "_BATCH_CHARACTERS", size)
            cuts.append(list(documents(source, tokenizer)))
            folder = tmp_path / f"{source.read} {size}"
            headers.append(
                write(folder, cuts[-1], vocab_size=tokenizer.vocab_size, tokenizer="x", source="x")
            )
        monkeypatch.undo()
        whole, parts = cuts
        assert joined(parts) == joined(whole)
        assert len(parts) > 10 + len(whole), "it was cut"
        assert max(len(part.ids) for part in parts) <= 2200, (
            "below 2000 characters, a few of them of several bytes"
        )
        assert headers[0] == headers[1], "and the fingerprint is the same"


@pytest.mark.slow
def test_what_cannot_be_cut_is_read_whole_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(str(tokenizers_of(tmp_path)["none"]))
    path = tmp_path / "x.txt"
    path.write_text(TEXT)
    whole = list(documents(text_files(path), tokenizer))
    monkeypatch.setattr(text, "_BATCH_CHARACTERS", 1000)
    assert joined(documents(text_files(path), tokenizer)) == joined(whole)
    monkeypatch.setattr(text, "_MOST_WHOLE", 5000)
    with pytest.raises(
        InputError, match=r"x\.txt has 6,000 characters and more .* finds no place to cut"
    ):
        list(documents(text_files(path), tokenizer))


def test_what_is_wrong_in_a_later_part_has_its_place_in_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_BATCH_CHARACTERS", 100)
    tokenizer: Tokenizer = open_tokenizer("bytes")
    for raw, message in (
        (b"a" * 1234 + b"\0", r"U\+0000 at 1,234"),
        ("ü".encode() * 617 + b"\xe9 ", "byte 1,234 is 0xe9"),
        (
            "ü".encode() * 617 + b"\xc3",
            "byte 1,234 is 0xc3",
        ),  # the end of a file is cut off in a character
    ):
        (tmp_path / "x.txt").write_bytes(raw)
        with pytest.raises(InputError, match=message):
            list(documents(text_files(tmp_path / "x.txt"), tokenizer))


def test_recursion_without_end_is_bad_json(opened: Opener, tmp_path: Path) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"text": "good"}\n{"text": ' + "[" * 100_000 + "\n")
    with pytest.raises(InputError, match=r"x\.jsonl:2: not JSON .*too deeply"):
        opened(source="jsonl", path=lines)
    (write_tokens(tmp_path / "a", range(9)) / "header.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"header\.json is not JSON .*too deeply"):
        opened(source="tokens", path=tmp_path / "a")


# Folders that an older meshtrain prepared


@pytest.mark.parametrize(
    ("line", "config", "keys", "is_taken"),
    [
        ("ab", {}, {}, True),
        ("a<|endoftext|>b", {}, {}, False),
        ("ab", {"eos_token": "<|im_end|>"}, {}, False),
        ("ab", {"eos_token": "<|im_end|>"}, {"end_token": "<|endoftext|>"}, True),
        ("ab", {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}, {}, True),
        ("ab", {}, {"begin_token": "<s>"}, False),
    ],
)
def test_a_folder_of_an_older_version_is_taken_if_it_is_as_today(
    line: str, config: dict[str, Any], keys: dict[str, Any], is_taken: bool, tmp_path: Path
) -> None:
    """Whose documents end with <|endoftext|>, which a text could spell."""
    path = write_lines(tmp_path / "x.jsonl", [{"text": line}, {"prompt": "c", "completion": "d"}])
    file = tokenizer_folder(tmp_path / "tokenizer", None, **config)
    before = open_tokenizer(str(file), end_token="<|endoftext|>")
    data = DataSection(
        source="jsonl",
        path=str(path),
        tokenizer=str(file),
        validation=0,
        cache=str(tmp_path / "cache"),
        **keys,
    )
    (preparation,) = preparations(data)
    earlier = preparation.folder.with_name(f"x.jsonl-{preparation.source.earlier_key(before)}")
    own = Document(
        np.array([*before.encode("c"), *before.encode("d"), before.end]), np.array([0, 1, 1]), 1
    )
    write_tokens(earlier, [*before.encode(line), before.end], own, vocab_size=before.vocab_size)
    said: list[str] = []
    assert preparation.run(said.append)
    assert any("which an older meshtrain prepared" in line for line in said) == is_taken
    assert (
        open_tokens(preparation.folder).fingerprint == open_tokens(earlier).fingerprint
    ) == is_taken
    assert verify(preparation.folder) == ([], True)
    said.clear()
    assert preparation.run(said.append)
    assert said == []


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
    (corpus / "nowhere").symlink_to(tmp_path / "nowhere")
    (corpus / "c.txt").symlink_to(elsewhere / "b.txt")
    paths = [str(path.relative_to(corpus)) for path in text_files(corpus).files]
    assert paths == ["c.txt", "linked/b.txt", "linked/deep/a.txt", "own/a.txt"]


# Waiting


def test_a_waiting_process_looks_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ten minutes of a preparation it asks the file server some 130 times, and not 6,000
    times."""
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
    messages: list[str] = []
    with open(tmp_path / ".x.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        json.dump({"host": "a", "pid": 7, "since": 0}, lock)
        lock.flush()
        cache.prepare_once(folder, lambda: pytest.fail("prepared twice"), messages.append)
    assert 600 <= now[0] <= 605
    assert looks[0] < 140
    assert 30 < len(messages) <= 60


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


def test_one_process_of_a_host_prepares_and_the_others_do_not_touch_the_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.txt").write_text(LINE * 400)
    (tmp_path / "looking.py").write_text(LOOKING)
    data = (
        "data.source=text",
        f"data.path={tmp_path}/x.txt",
        f"data.cache={tmp_path}/cache",
        "data.validation=0",
    )
    own = (*SMALL, *data, "train.steps=1", "checkpoint.every=0", f"train.output={tmp_path}/run")
    done = forked(3, tmp_path / "looking.py", QUICKSTART, *own).check()
    assert [line for line in done.out.splitlines() if "waits" in line] == [
        "rank 0 waits for the lock"
    ]
