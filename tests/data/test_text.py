"""Sources of text, tokenizers, and what is kept from one run to the next."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtrain.data.batch import IGNORE
from meshtrain.data.split import held_out_mask
from meshtrain.data.tokenizer import FileTokenizer, open_tokenizer
from tests.data.conftest import Opener
from tests.data.files import (
    tokenizer_folder,
    write_lines,
    write_texts,
    write_tokenizer,
    write_tokens,
)
from tests.properties import given, st


def read_all(samples) -> tuple[list[int], list[int]]:
    """The tokens and the targets of all samples, one after the other."""
    items = [samples.item(index, 0) for index in range(len(samples))]
    return (
        [token for (tokens, _, _), _ in items for token in tokens.tolist()],
        [target for _, targets in items for target in targets.tolist()],
    )


# Sources


def test_python_stdlib_is_real_text_and_the_same_each_time(opened: Opener) -> None:
    messages: list[str] = []
    first = opened(n_outputs=256, messages=messages)
    again = opened(n_outputs=256, messages=messages)
    assert len(messages) == 1, "the second time it is there"
    assert "preparing python-stdlib" in messages[0]
    assert again.fingerprint == first.fingerprint
    assert len(first.train) * 256 > 4_000_000
    text = "".join(first.tokenizer.decode(first.train.item(i, 0)[0][0].tolist()) for i in range(40))
    assert "import" in text
    assert 0.001 < len(first.validation) / len(first.train) < 0.1
    assert 0.99 < first.bytes_per_target <= 1
    assert "chosen by a hash" in first.about[-1]


def test_text_files_are_sorted_documents_ended_by_byte_0(opened: Opener, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text" / "b", ["zwei", "", "drei"], ".md")
    write_texts(tmp_path / "text" / "a", ["ëins"])
    (folder / "image.png").write_bytes(b"\x89PNG")
    data = opened(source="text", path=tmp_path / "text", validation=0, seq_len=1)
    assert data.validation is None
    expected = b"".join(text.encode() + b"\0" for text in ("ëins", "zwei", "drei"))
    assert read_all(data.train) == (list(expected[:-1]), list(expected[1:]))


def test_one_text_file_is_split_at_its_end(opened: Opener, tmp_path: Path) -> None:
    (tmp_path / "book").write_text("0123456789" * 10)
    data = opened(source="text", path=tmp_path / "book", validation=0.2, seq_len=4)
    text = list(b"0123456789" * 10 + b"\0")
    assert read_all(data.train)[0] == text[:80]
    assert read_all(data.validation)[0] == text[81:97]
    assert "only document" in data.about[-1]
    assert data.bytes_per_target == pytest.approx(1)


def test_a_changed_file_is_prepared_again(opened: Opener, tmp_path: Path) -> None:
    keys = {
        "source": "text",
        "path": write_texts(tmp_path / "text", ["first", "second"]),
        "validation": 0,
    }
    before = opened(**keys, seq_len=2)
    write_texts(tmp_path / "text", ["other text"])
    after = opened(**keys, seq_len=2)
    assert after.fingerprint != before.fingerprint
    assert bytes(read_all(after.train)[0]).startswith(b"other text\0sec")


def test_validation_may_be_another_folder(opened: Opener, tmp_path: Path) -> None:
    train, held_out = (
        write_texts(tmp_path / "a", ["a" * 20]),
        write_texts(tmp_path / "b", ["b" * 20, "ü" * 20]),
    )
    data = opened(source="text", path=train, validation=str(held_out), seq_len=5)
    assert set(read_all(data.train)[0]) == set(b"a")
    assert set(read_all(data.validation)[0]) == set("bü\0".encode())
    assert data.bytes_per_target == pytest.approx(60 / 61)


def test_jsonl_prompts_carry_no_loss(opened: Opener, tmp_path: Path) -> None:
    rows = [
        {"prompt": "2+2=", "completion": "4"},
        {"text": "hello", "id": 7},
        {"prompt": "", "completion": "x"},
    ]
    data = opened(
        source="jsonl", path=write_lines(tmp_path / "x.jsonl", rows), validation=0, seq_len=1
    )
    tokens, targets = read_all(data.train)
    assert bytes(tokens) == b"2+2=4\0hello\0x"
    assert targets == [IGNORE, IGNORE, IGNORE, *b"4\0hello\0x\0"]


def test_bits_per_byte_count_the_text_that_is_predicted(opened: Opener, tmp_path: Path) -> None:
    rows = [{"prompt": "p" * 30, "completion": "é" * 5}] * 40
    data = opened(
        source="jsonl", path=write_lines(tmp_path / "x.jsonl", rows), validation=0.3, seq_len=8
    )
    assert data.bytes_per_target == pytest.approx(10 / 11)


def test_the_last_documents_of_a_prepared_folder_are_held_out(
    opened: Opener, tmp_path: Path
) -> None:
    documents = np.arange(100).reshape(10, 10)
    folder = write_tokens(tmp_path / "a", *documents, tokenizer="mine", text_bytes=30)
    data = opened(source="tokens", path=folder, validation=0.2, seq_len=1, n_outputs=100)
    assert read_all(data.train)[0] == list(range(79))
    assert read_all(data.validation)[0] == list(range(80, 99))
    assert data.bytes_per_target == pytest.approx(60 / 19)
    assert data.tokenizer is None, "it is not known here"
    assert "the last of the file" in data.about[-1]
    folder = write_tokens(tmp_path / "b", np.arange(50), tokenizer="bytes")
    data = opened(source="tokens", path=folder, validation=0, seq_len=1)
    assert data.tokenizer is not None
    assert data.bytes_per_target is None


# Tokenizers


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_bytes_there_and_back(text: str) -> None:
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_of_anything_can_be_shown() -> None:
    assert open_tokenizer("bytes").decode([104, 105, 0, 255, 300, 33]) == "hi\n\n\ufffd\ufffd!"


def test_a_tokenizer_file(opened: Opener, tmp_path: Path) -> None:
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json"))
    folder = write_texts(tmp_path / "text", ["the cat", "sat the dog"])
    data = opened(
        source="text", path=folder, tokenizer=tokenizer, validation=0, seq_len=1, n_outputs=401
    )
    assert read_all(data.train)[1] == [200, 400, 300, 100, 0, 400]
    assert data.tokenizer.end == 400
    assert data.tokenizer.decode([100, 200, 5000]) == "the cat"


def test_the_token_that_ends_documents(tmp_path: Path) -> None:
    """`data.end_token`, else the `eos_token` of tokenizer_config.json, else the first of a list."""
    file = tokenizer_folder(tmp_path)
    ids = FileTokenizer(file)._tokenizer.token_to_id

    def ended(end_token: str | None = None, **config: Any) -> tuple[int, set[int]]:
        tokenizer = FileTokenizer(tokenizer_folder(tmp_path, **config), end_token=end_token)
        assert (
            f"end with {tokenizer.decode([tokenizer.end])} (id {tokenizer.end})" in tokenizer.about
        )
        return tokenizer.end, set(tokenizer.stops)

    listed, eos, own = ids("<|endoftext|>"), ids("<|im_end|>"), ids("<|eot_id|>")
    assert ended() == (listed, {listed})
    assert ended(eos_token="<|im_end|>") == (eos, {eos})
    assert ended(eos_token={"content": "<|im_end|>", "lstrip": False}) == (eos, {eos})
    assert ended(eos_token="no such token") == (listed, {listed})
    assert ended("<|eot_id|>", eos_token="<|im_end|>") == (own, {own, eos})


def test_a_token_begins_documents(opened: Opener, tmp_path: Path) -> None:
    """Also those of several parts. It is no target with a loss, and counts in the length."""
    file = str(tokenizer_folder(tmp_path / "tokenizer"))
    rows = [{"text": "ab"}, {"prompt": "c", "completion": "d"}, {"prompt": "", "completion": "e"}]
    keys = {
        "source": "jsonl",
        "path": write_lines(tmp_path / "x.jsonl", rows),
        "tokenizer": file,
        "validation": 0,
    }
    data = opened(**keys, seq_len=1, begin_token="auto")
    begin, end = data.tokenizer.begin, data.tokenizer.end
    assert begin == FileTokenizer(Path(file), "<s>").begin
    a, b, c, d, e = data.tokenizer.encode("abcde")
    tokens, targets = read_all(data.train)
    assert tokens == [begin, a, b, end, begin, c, d, end, begin, e]
    assert targets == [a, b, end, IGNORE, IGNORE, d, end, IGNORE, e, end]
    assert any("begin with <s>" in line for line in data.about)
    assert read_all(opened(**keys, seq_len=1).train)[0][:4] == [a, b, end, c]


def test_a_long_document_begins_once(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshtrain.data.text._BATCH_CHARACTERS", 1000)
    file = str(tokenizer_folder(tmp_path / "tokenizer"))
    path = write_texts(tmp_path / "text", ["some words " * 500])
    data = opened(
        source="text", path=path, tokenizer=file, begin_token="auto", validation=0, seq_len=1
    )
    tokens, targets = read_all(data.train)
    assert tokens.count(data.tokenizer.begin) == 1
    assert len(tokens) == len(targets) == 5501
    assert data.train.stream.corpus.loss.array.sum() == 5501


def test_control_tokens_that_a_document_spells_are_text(opened: Opener, tmp_path: Path) -> None:
    file = str(tokenizer_folder(tmp_path / "tokenizer"))
    texts = ["a<|endoftext|>b", "<s>c"]
    said: list[str] = []
    path = write_texts(tmp_path / "text", texts)
    data = opened(source="text", path=path, tokenizer=file, validation=0, seq_len=1, messages=said)
    assert sum("spells control tokens, such as <|endoftext|>" in line for line in said) == 1
    tokens = data.train.stream.corpus.tokens.array.tolist()
    assert tokens.count(data.tokenizer.end) == 2
    assert data.tokenizer.decode(tokens) == "".join(text + "<|endoftext|>" for text in texts)
    assert data.tokenizer.encode("<s>") == [data.tokenizer.encode("<s>")[0]], (
        "in a prompt it is the token"
    )
    assert len(data.tokenizer.encode("<s>", plain=True)) == 3


# The split


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 400))
def test_held_out_leaves_something_on_both_sides(part: float, count: int) -> None:
    held_out = np.count_nonzero(held_out_mask(part, count))
    if part > 0 and count > 1:
        assert 1 <= held_out < count
    elif part == 0:
        assert held_out == 0


def test_held_out_is_near_its_share_and_moves_nothing_when_documents_come() -> None:
    few, many = held_out_mask(0.1, 10_000), held_out_mask(0.1, 20_000)
    assert abs(few.mean() - 0.1) < 0.015
    assert (few == many[:10_000]).all()


def test_the_split_is_of_whole_documents(opened: Opener, tmp_path: Path) -> None:
    texts = [chr(ord("A") + i) * 9 for i in range(26)]
    data = opened(
        source="text", path=write_texts(tmp_path / "text", texts), validation=0.2, seq_len=1, seed=1
    )
    held_out = held_out_mask(0.2, 26)
    for samples, chosen in ((data.validation, held_out), (data.train, ~held_out)):
        expected = b"".join(texts[i].encode() + b"\0" for i in np.flatnonzero(chosen))
        assert bytes(read_all(samples)[0]) == expected[:-1]
