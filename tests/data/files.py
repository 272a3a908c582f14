"""Small files of each kind of source."""

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtrain.data import Document, write

MEGATRON_CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}


def write_texts(folder: Path, texts: list[str], suffix: str = ".txt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}{suffix}").write_text(text, encoding="utf-8")
    return folder


def write_lines(path: Path, objects: list) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in objects) + "\n\n", encoding="utf-8")
    return path


def write_tokens(
    folder: Path,
    *documents: Any,
    vocab_size: int = 300,
    tokenizer: str = "made up",
    text_bytes: int | None = None,
) -> Path:
    """A prepared folder; a document is its ids, or a Document."""
    entries = [
        document
        if isinstance(document, Document)
        else Document(np.array(document), text_bytes=text_bytes)
        for document in documents
    ]
    write(folder, entries, vocab_size=vocab_size, tokenizer=tokenizer, source="a test")
    return folder


def write_pair(
    prefix: Path,
    sequences: list[list[int]],
    *,
    documents: list[int] | None = None,
    dtype: str = "uint16",
    modes: bool = False,
) -> str:
    """Megatron's .bin and .idx, as its `_IndexWriter` writes them."""
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    places = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    bounds = np.array(documents if documents is not None else range(len(sequences) + 1), "<i8")
    header = struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], len(sequences), len(bounds))
    arrays = lengths.tobytes() + places.astype("<i8").tobytes() + bounds.tobytes()
    prefix.with_suffix(".bin").write_bytes(
        b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences)
    )
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + header + arrays + bytes(len(sequences) * modes)
    )
    return str(prefix)


def write_mnist(
    folder: Path, n: int, *, stem: str = "train", suffix: str = "", size: int = 8
) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    pixels = np.random.default_rng(n).integers(0, 256, (n, size, size), np.uint8)
    for name, values in (
        ("images-idx3", pixels),
        ("labels-idx1", np.arange(n, dtype=np.uint8) % 10),
    ):
        raw = (
            bytes([0, 0, 8, values.ndim])
            + struct.pack(f">{values.ndim}i", *values.shape)
            + values.tobytes()
        )
        (folder / f"{stem}-{name}-ubyte{suffix}").write_bytes(gzip.compress(raw) if suffix else raw)
    return pixels


def write_images(root: Path, classes: dict[str, int], size: tuple[int, int] = (40, 24)) -> Path:
    """A folder of images for each class, brighter on the left, each with a brightness of its
    own."""
    image = pytest.importorskip("PIL.Image")
    for level, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.full((size[1], size[0], 3), 60 * level + number, np.uint8)
            pixels[:, : size[0] // 2] += 40
            image.fromarray(pixels).save(root / name / f"{count - number}.png")
    return root


def write_tokenizer(path: Path, end: str | None = "</s>") -> Path:
    """A tokenizer.json of four words and an end."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[UNK]", "the", "cat", "sat"] + ([end] if end else [])
    model = tokenizers.models.WordLevel({word: i * 100 for i, word in enumerate(words)}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' "
    "}}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Grüße! 1 + 1?"},
    {"role": "assistant", "content": "Two, 二."},
    {"role": "user", "content": "And then"},
    {"role": "assistant", "content": "three"},
]


def tokenizer_folder(folder: Path, template: str | None = CHATML, **config: Any) -> Path:
    """A byte-level tokenizer without merges, with special tokens, and its config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot_id|>", "<s>"]
    )
    folder.mkdir(exist_ok=True)
    plain.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **config}
    config |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


OWN = """
import torch

class Squares:
    def __init__(self, first, n): self.first, self.n = first, n
    def __len__(self): return self.n
    def __getitem__(self, index): return torch.tensor([float(index)]), (self.first + index) % 5

class Text(Squares):
    def item(self, index, epoch):
        ids = torch.arange(9) + index + epoch
        return ids[:-1], ids[1:]
    __getitem__ = None

KINDS = {
    "text": lambda: Text(0, 4),
    "wrong": lambda: [1, 2, 3],
    "lengths": lambda: [(torch.arange(n), torch.arange(n)) for n in (8, 8, 9)],
    "measured": lambda: [(torch.zeros(1), 1.7)],
    "list": lambda: [([1, 2, 3], [2, 3, 4])],
    "nothing": lambda: 3,
    "absent": lambda: open("no/such/file"),
    "disk": lambda: (_ for _ in ()).throw(OSError(5, "Input/output error", "somewhere")),
}

def dataset(config, split):
    if config.path in KINDS:
        return KINDS[config.path]()
    if split == "validation":
        return Squares(0, 3) if config.path == "both" else None
    return Squares(0, 50)
"""
