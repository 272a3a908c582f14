"""Editors of Windows begin files with a byte order mark, which is no part of a text."""

import codecs
from pathlib import Path

import pytest

from meshtrain.data import text
from meshtrain.data.tokenizer import FileTokenizer
from meshtrain.errors import InputError
from meshtrain.huggingface.export_texts import tokenizer_files
from tests.data.conftest import Opener
from tests.data.files import tokenizer_folder
from tests.data.test_text import read_all

BOM = codecs.BOM_UTF8


def test_a_byte_order_mark_is_no_token(opened: Opener, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_bytes(BOM + "ëins".encode())
    (folder / "b.txt").write_bytes("zwei\ufeff".encode())  # elsewhere it is a character
    (folder / "c.txt").write_bytes(BOM)
    expected = "ëins\0zwei\ufeff\0".encode()
    data = opened(source="text", path=folder, validation=0, seq_len=1)
    assert read_all(data.train) == (list(expected[:-1]), list(expected[1:]))


def test_the_byte_order_mark_of_a_text_that_is_read_in_parts(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_BATCH_CHARACTERS", 3)
    file = tmp_path / "book"
    file.write_bytes(BOM + b"0123456789")
    data = opened(source="text", path=file, validation=0, seq_len=1)
    assert bytes(read_all(data.train)[0]) == b"0123456789"
    file.write_bytes(BOM + b"01234\xff")
    with pytest.raises(InputError, match="byte 8 is 0xff"):
        opened(source="text", path=file, validation=0, seq_len=1)


def test_the_byte_order_mark_of_lines(opened: Opener, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(BOM + b'{"text": "abc"}\r\n{"text": "de"}\r\n')
    data = opened(source="jsonl", path=file, validation=0, seq_len=1)
    assert bytes(read_all(data.train)[0]) == b"abc\0de"


def test_a_line_that_is_longer_than_memory(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a small compressed file may hold it."""
    monkeypatch.setattr(text, "_MOST_LINE", 100)
    file = tmp_path / "x.jsonl"
    line = '{"text": "' + 87 * "a" + '"}\n'
    assert len(line) == 100
    file.write_text(2 * line)
    assert len(read_all(opened(source="jsonl", path=file, validation=0, seq_len=1).train)[0]) == 175
    file.write_text(2 * line + "a" + line)
    with pytest.raises(
        InputError, match=r"the line after the first 2 lines .* has more than 100 bytes"
    ):
        opened(source="jsonl", path=file, validation=0, seq_len=1)


def test_the_byte_order_marks_of_a_tokenizers_files_go_and_are_not_exported(tmp_path: Path) -> None:
    file = tokenizer_folder(tmp_path, eos_token="<|eot_id|>")
    plain, files = FileTokenizer(file), tokenizer_files(file)
    for name in files:
        marked = file.with_name(name)
        marked.write_bytes(BOM + marked.read_bytes())
    ours = FileTokenizer(file)
    assert (ours.end, ours.encode("aü<|eot_id|>")) == (plain.end, plain.encode("aü<|eot_id|>"))
    assert ours.chat is not None
    assert tokenizer_files(file) == files
