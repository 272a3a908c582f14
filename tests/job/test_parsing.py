"""JSON of somebody else's: whatever it is, a value or one kind of error."""

import os
from pathlib import Path
from typing import Any

import pytest

from meshtrain.errors import InputError
from meshtrain.job.parsing import parse_json, read_limited

WRONG: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "Expecting value"),
    "half of it": ('{"step": 3, "lo', "Unterminated string"),
    "deep": (100_000 * "[", "nests values too deeply"),
    "a long integer": (5_000 * "1", "4300 digits"),
    "no UTF-8": (b'"\xff"', "invalid start byte"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "invalid start byte"),
    "too long": ('"' + 100 * "a" + '"', "it has 102 bytes, and at most 50 are read"),
    "a key twice": ('{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' stands twice in one object"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_json_is_one_kind_of_error(case: str) -> None:
    text, says = WRONG[case]
    most = 50 if case == "too long" else 1 << 20
    with pytest.raises(InputError, match=says):
        parse_json(text, most=most, unique=True)


def test_what_is_json_is_read() -> None:
    values: dict[str | bytes, Any] = {
        '{"a": [1, 2.5, null, "ü"]}': {"a": [1, 2.5, None, "ü"]},
        b"\xef\xbb\xbf[1]": [1],  # a byte order mark
        "\ufeff[1]": [1],
        '{"a": 1, "a": 2}': {"a": 2},  # unless keys have to be unique
    }
    for text, value in values.items():
        assert parse_json(text) == value
    assert parse_json("[NaN, Infinity, 1e999, 1.5]", finite=True) == [None, None, None, 1.5]


def test_only_files_within_the_limit_are_read(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_bytes(b"12345")
    link.symlink_to(file)
    os.mkfifo(pipe)
    assert read_limited(file, 5) == read_limited(link, 5) == b"12345"
    with pytest.raises(InputError, match="more than 4 bytes"):
        read_limited(file, 4)
    with pytest.raises(InputError, match="it is no file"):  # and nobody waits for a writer
        read_limited(pipe)
    with pytest.raises(FileNotFoundError):
        read_limited(tmp_path / "none")
