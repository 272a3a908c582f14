"""Packed JSONL and Parquet give the tokens of plain JSONL; what is damaged is named."""

import gzip
import json
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from meshtrain.data import text
from meshtrain.data.text import TextSource, jsonl_files, parquet_files, text_files
from meshtrain.data.tokenizer import open_tokenizer
from meshtrain.errors import InputError
from tests.data.files import write_lines

ROWS = [{"text": f"line {i} ü\U0001f600 " + "word " * (i % 37)} for i in range(400)]
PAIRS = [{"prompt": f"{i} + {i} = ", "completion": str(2 * i)} for i in range(300)]


def ids_of(source: TextSource) -> list[int]:
    tokenizer = open_tokenizer("bytes")
    documents = (
        document
        for shard in source.shards()
        for document in text.documents(source, shard, tokenizer)
    )
    return list(chain.from_iterable(document.ids.tolist() for document in documents))


@pytest.mark.parametrize("size", [1, 7, 50, 64, 1000, 4096])
def test_pieces_of_a_file_have_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = tmp_path / "x.jsonl"
    plain = "".join(json.dumps(row) + "\n" for row in ROWS[:60]).encode()
    for raw in (
        plain,
        b'{"text": "a"}\n\n  \n{"text": "b"}',
        b"",
        b'{"text": "' + b"x" * 3000 + b'"}',
    ):
        path.write_bytes(raw)
        whole = ids_of(jsonl_files(path))
        with monkeypatch.context() as patch:
            patch.setattr(text, "LEAST_SHARD", size)
            patch.setattr(text, "SHARDS", 10**9)
            source = jsonl_files(path)
            assert len(source.shards()) == max(1, -(-len(raw) // size))
            assert ids_of(source) == whole


def test_shards_have_every_file_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text("x" * (i * 7 % 50))
    source = text_files(tmp_path)
    monkeypatch.setattr(text, "LEAST_SHARD", 100)
    shards = source.shards()
    assert [piece.path for piece in chain(*shards)] == source.files, (
        "a text is a document: it is not cut"
    )
    assert all(100 <= sum(piece.end for piece in shard) < 150 for shard in shards[:-1])


def test_a_line_is_named_by_its_number_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*ROWS[:200], {"body": "no text"}, *ROWS[200:]]
    path = write_lines(tmp_path / "x.jsonl", rows)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.setattr(text, "LEAST_SHARD", 2000)
    monkeypatch.setattr(text, "_BATCH_CHARACTERS", 700)
    for file in (path, tmp_path / "x.jsonl.gz"):
        with pytest.raises(
            InputError, match=rf"{file.name}:201: expected .* `text`.* found the keys 'body'"
        ):
            ids_of(jsonl_files(file))


def test_a_field_of_another_name(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "x.jsonl", [{"content": row["text"], "text": "not read"} for row in ROWS]
    )
    plain = write_lines(tmp_path / "y.jsonl", ROWS)
    assert ids_of(jsonl_files(path, "content")) == ids_of(jsonl_files(plain))
    sources = jsonl_files(path, "content"), jsonl_files(path), text_files(path)
    assert len({source.key(open_tokenizer("bytes")) for source in sources}) == 3, (
        "the same file, another meaning"
    )


def zst(content: bytes) -> bytes:
    return pytest.importorskip("pyarrow").compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize("pack", [gzip.compress, pytest.param(zst, marks=pytest.mark.integrations)])
def test_packed_lines_are_read_as_what_is_in_them(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    plain = write_lines(tmp_path / "x.jsonl", ROWS)
    raw = plain.read_bytes()
    packed = tmp_path / "packed" / ("x.jsonl.zst" if pack is zst else "x.jsonl.gz")
    packed.parent.mkdir()
    packed.write_bytes(pack(raw[:5000]) + pack(raw[5000:]))  # two members, the cut within a line
    assert (
        ids_of(jsonl_files(packed))
        == ids_of(jsonl_files(packed.parent))
        == ids_of(jsonl_files(plain))
    )


def test_what_stands_beside_plain_files_is_not_read_twice(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", ROWS)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "other.gz").write_bytes(b"not lines")
    (tmp_path / ".jsonl").write_text("no name before the ending: never was one")
    assert [file.name for file in jsonl_files(tmp_path).files] == ["x.jsonl"]
    path.unlink()
    assert [file.name for file in jsonl_files(tmp_path).files] == ["x.jsonl.gz"]
    (tmp_path / "y.jsonl.zst").touch()
    with pytest.raises(
        InputError, match=r"has \.jsonl\.gz and \.jsonl\.zst files, which may be the same lines"
    ):
        jsonl_files(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "rot", "none of it"])
def test_a_broken_gz_is_named(tmp_path: Path, damage: str) -> None:
    packed = bytearray(
        gzip.compress(json.dumps({"text": os.urandom(20000).hex()}).encode() + b"\n")
    )
    if damage == "cut":
        del packed[-3000:]
    packed[0 if damage == "none of it" else 5000] ^= 255
    (tmp_path / "x.jsonl.gz").write_bytes(packed)
    with pytest.raises(
        InputError, match=r"x\.jsonl\.gz(:1: not JSON| is truncated or damaged after line [01] \()"
    ):
        ids_of(jsonl_files(tmp_path / "x.jsonl.gz"))


@pytest.mark.integrations
def test_a_broken_zst_is_named(tmp_path: Path) -> None:
    raw, path = "".join(json.dumps(row) + "\n" for row in ROWS).encode(), tmp_path / "x.jsonl.zst"
    first, second = zst(raw[:5000]), zst(raw[5000:])
    # Without checksums, only some changes within a frame are no valid frame any more.
    for broken in (first + second[:-30], b"x" + first, first[:200] + b"????" + first[204:]):
        path.write_bytes(broken)
        with pytest.raises(
            InputError, match=r"x\.jsonl\.zst is truncated or damaged after line \d+ \("
        ):
            ids_of(jsonl_files(path))


@pytest.mark.integrations
def test_parquet_is_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for rows, field in (
        (ROWS, "text"),
        (PAIRS, "text"),
        ([{"content": row["text"]} for row in ROWS], "content"),
    ):
        path = tmp_path / "x.parquet"
        table = pyarrow.Table.from_pylist([{"id": i, **row} for i, row in enumerate(rows)])
        parquet.write_table(table, path, row_group_size=23)
        whole = ids_of(jsonl_files(write_lines(tmp_path / "x.jsonl", rows), field))
        assert ids_of(parquet_files(path, field)) == whole
        with monkeypatch.context() as patch:
            patch.setattr(text, "LEAST_SHARD", 700)
            assert len(parquet_files(path, field).shards()) > 5
            assert ids_of(parquet_files(path, field)) == whole, "each group of rows once"


@pytest.mark.integrations
def test_what_is_wrong_with_a_parquet_file_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "x.parquet"
    for column, message in (
        ({"text": ["a"] * 8 + [None]}, r"x\.parquet, row 9: `text` is None"),
        (
            {"body": ["a"]},
            r"x\.parquet: expected the column `text`, or `prompt` and `completion`; found body",
        ),
        ({"text": ["a", None, "b"]}, r"x\.parquet, row 2: `text` is None, expected a string"),
        ({"text": [1]}, r"x\.parquet, row 1: `text` is 1, expected a string"),
    ):
        parquet.write_table(pyarrow.table(column), path, row_group_size=2)
        with pytest.raises(InputError, match=message):
            ids_of(parquet_files(path))
    parquet.write_table(
        pyarrow.table({"text": [os.urandom(2000).hex() for _ in range(50)]}),
        path,
        compression="zstd",
    )
    raw = path.read_bytes()
    for broken in (raw[:-100], raw[:20000] + bytes(5000) + raw[25000:], b""):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=r"x\.parquet is no Parquet file, or damaged \("):
            ids_of(parquet_files(path))
