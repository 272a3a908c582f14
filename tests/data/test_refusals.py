"""What cannot be opened or read is refused with the place and the reason: the rows of
refusals.yaml."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from meshtrain.data import Document
from tests.data import files
from tests.data.conftest import Opener
from tests.refusing import check_refusals, damage

TABLE: dict[str, list[dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("refusals.yaml").read_text()
)


def text(folder: Path) -> dict[str, Any]:
    library = pytest.importorskip("tokenizers")
    files.write_texts(folder / "text", ["1234567"] * 8)
    files.write_tokenizer(folder / "words.json")
    files.write_tokenizer(folder / "endless.json", end=None)
    strict = library.Tokenizer(library.models.WordLevel({"</s>": 0, "the": 1}, "[UNK]"))
    strict.save(str(folder / "strict.json"))
    strict = library.Tokenizer(library.models.WordLevel({"</s>": 0, "[UNK]": 1}, "[UNK]"))
    strict.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    strict.save(str(folder / "blanks.json"))
    return {"source": "text", "path": folder / "text"}


def chat(folder: Path) -> dict[str, Any]:
    files.tokenizer_folder(folder)
    path = files.write_lines(folder / "x.jsonl", [{"messages": files.TALK}])
    return {"source": "jsonl", "path": path, "tokenizer": str(folder / "tokenizer.json")}


def tokens(folder: Path) -> dict[str, Any]:
    folder.rmdir()
    losses = np.array([0, 0, 1, 1])
    documents = (
        Document(np.array([5, 6, 299]), None, 11),
        Document(np.array([1, 2, 3, 4]), losses, 7),
    )
    files.write_tokens(folder, *documents, tokenizer="bytes")
    files.write_tokenizer(folder / "words.json")
    return {"source": "tokens", "path": folder}


def megatron(folder: Path) -> dict[str, Any]:
    return {"source": "megatron", "path": files.write_pair(folder / "x", [[1, 2], [3], [4]])}


def mnist(folder: Path) -> dict[str, Any]:
    files.write_mnist(folder, 30)
    files.write_mnist(folder / "one", 1)
    files.write_mnist(folder / "packed", 30, suffix=".gz")
    return {"source": "mnist", "path": folder}


def images(folder: Path) -> dict[str, Any]:
    files.write_images(folder / "other", {"a": 1, "c": 1})
    files.write_images(folder / "train", {"a": 2, "b": 1})
    return {"source": "images", "path": folder / "train", "image_size": 8, "validation": 0}


def digits(folder: Path) -> dict[str, Any]:
    pytest.importorskip("sklearn")
    return {"source": "digits"}


def own(folder: Path) -> dict[str, Any]:
    (folder / "own.py").write_text(files.OWN)
    return {"source": folder / "own.py", "validation": 0}


GOOD = {
    "sections": lambda folder: {},
    "text": text,
    "jsonl": lambda folder: {"source": "jsonl", "path": folder / "x.jsonl"},
    "chat": chat,
    "tokens": tokens,
    "megatron": megatron,
    "mnist": mnist,
    "images": images,
    "digits": digits,
    "own": own,
}


@pytest.mark.parametrize("source", TABLE)
def test_each_row_is_refused_with_its_reason(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    def read(row: dict[str, Any], folder: Path) -> None:
        section = {"seq_len": 1} | GOOD[source](folder)
        damage(folder, row)
        for key, value in row.get("open", {}).items():
            section[key] = value.replace("DIR", str(folder)) if isinstance(value, str) else value
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, row.get("hide", "nothing"), None)
            data = opened(**section)
        if items := [tuple(item) for item in row.get("read", ())]:
            data.train.read(items, len(items))

    check_refusals(TABLE[source], tmp_path, read)
