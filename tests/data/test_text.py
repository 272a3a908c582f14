"""Sources of text, tokenizers, the split, and packing."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from meshtrain.data import OpenData
from meshtrain.data.batch import IGNORE
from meshtrain.data.megatron import MegatronCorpus
from meshtrain.data.packing import Stream, TokenSamples
from meshtrain.data.split import held_out_mask, split_at_end
from meshtrain.data.tokenizer import open_tokenizer
from meshtrain.data.tokens import Corpus, Document, MappedArray, write
from meshtrain.errors import InputError
from tests.properties import given, st

Opener = Callable[..., OpenData]


def read_all(samples) -> tuple[list[int], list[int]]:
    """The tokens and the targets of all samples, one after the other."""
    items = [samples.item(index, 0) for index in range(len(samples))]
    return (
        [token for (tokens, _, _), _ in items for token in tokens.tolist()],
        [target for _, targets in items for target in targets.tolist()],
    )


def write_texts(folder: Path, texts: list[str], suffix: str = ".txt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}{suffix}").write_text(text, encoding="utf-8")
    return folder


def write_lines(path: Path, objects: list) -> Path:
    path.write_text("\n".join(json.dumps(one) for one in objects) + "\n\n", encoding="utf-8")
    return path


# Sources


def test_python_stdlib_is_real_text_and_the_same_each_time(opened: Opener) -> None:
    said: list[str] = []
    first = opened(n_outputs=256, said=said)
    assert "preparing python-stdlib" in said[0]
    again = opened(n_outputs=256, said=said)
    assert len(said) == 1  # the second time it is there
    assert again.fingerprint == first.fingerprint
    assert len(first.train) * 256 > 4_000_000
    assert first.tokenizer is not None
    text = "".join(first.tokenizer.decode(first.train.item(i, 0)[0][0].tolist()) for i in range(40))
    assert "import" in text
    validation = [first.validation.item(i, 0)[1].numpy() for i in range(len(first.validation))]
    assert 0.001 < np.concatenate(validation).size / (len(first.train) * 256) < 0.1
    assert 0.99 < first.bytes_per_target <= 1
    assert "chosen by a hash" in first.about[-1]


def test_text_files_are_sorted_documents_ended_by_byte_0(opened: Opener, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text" / "b", ["zwei", "", "drei"], ".md")
    write_texts(tmp_path / "text" / "a", ["ëins"])
    (folder / "image.png").write_bytes(b"\x89PNG")
    found = opened(source="text", path=str(tmp_path / "text"), validation=0, seq_len=1)
    assert found.validation is None
    tokens, targets = read_all(found.train)
    expected = b"".join(text.encode() + b"\0" for text in ("ëins", "zwei", "drei"))
    assert tokens == list(expected[:-1])
    assert targets == list(expected[1:])


def test_one_text_file_is_split_at_its_end(opened: Opener, tmp_path: Path) -> None:
    path = tmp_path / "book"
    path.write_text("0123456789" * 10)
    found = opened(source="text", path=str(path), validation=0.2, seq_len=4)
    everything = list(b"0123456789" * 10 + b"\0")
    assert read_all(found.train)[0] == everything[:80]
    assert read_all(found.validation)[0] == everything[81:97]
    assert "only document" in found.about[-1]
    assert found.bytes_per_target == pytest.approx(1)


def test_a_changed_file_is_prepared_again(opened: Opener, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text", ["first", "second"])
    before = opened(source="text", path=str(folder), validation=0, seq_len=2)
    write_texts(folder, ["other text"])
    after = opened(source="text", path=str(folder), validation=0, seq_len=2)
    assert after.fingerprint != before.fingerprint
    assert bytes(read_all(after.train)[0]).startswith(b"other text\0sec")


def test_validation_may_be_another_folder(opened: Opener, tmp_path: Path) -> None:
    train, held = write_texts(tmp_path / "a", ["a" * 20]), write_texts(tmp_path / "b", ["b" * 20, "ü" * 20])
    found = opened(source="text", path=str(train), validation=str(held), seq_len=5)
    assert set(read_all(found.train)[0]) == set(b"a")
    assert set(read_all(found.validation)[0]) == set("bü\0".encode())
    assert found.bytes_per_target == pytest.approx(60 / 61)


def test_jsonl_prompts_carry_no_loss(opened: Opener, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "x.jsonl",
        [{"prompt": "2+2=", "completion": "4"}, {"text": "hello", "id": 7}, {"prompt": "", "completion": "x"}],
    )
    found = opened(source="jsonl", path=str(path), validation=0, seq_len=1)
    tokens, targets = read_all(found.train)
    assert bytes(tokens) == b"2+2=4\0hello\0x"
    expected = [IGNORE, IGNORE, IGNORE, *b"4\0hello\0x\0"]
    assert targets == expected


def test_bits_per_byte_count_the_text_that_is_predicted(opened: Opener, tmp_path: Path) -> None:
    rows = [{"prompt": "p" * 30, "completion": "é" * 5}] * 40
    found = opened(source="jsonl", path=str(write_lines(tmp_path / "x.jsonl", rows)), validation=0.3, seq_len=8)
    assert found.bytes_per_target == pytest.approx(10 / 11)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"txt": "a"}', "found the keys 'txt'"),
        ('{"text": "a", "prompt": "b"}', "expected an object with the key `text`"),
        ('{"prompt": "b"}', "`prompt` and `completion`"),
        ('{"text": 3}', "`text` is 3, expected a string"),
        ('{"text": "a\\u0000"}', r"U\+0000 at 1"),
        ('{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_bad_line_is_named(opened: Opener, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\n\n' + line)
    with pytest.raises(InputError, match=message) as caught:
        opened(source="jsonl", path=str(path))
    assert str(caught.value).startswith(f"{path}:3")


def test_text_that_is_none_is_named(opened: Opener, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(InputError, match=r"a\.txt is not UTF-8 text: byte 3 is 0xe9"):
        opened(source="text", path=str(path))
    path.write_bytes(b"a\0b")
    with pytest.raises(InputError, match=r"a\.txt holds the character U\+0000 at 1"):
        opened(source="text", path=str(path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "text"}, "data.source text needs data.path"),
        ({"source": "megatron"}, "needs data.path: the prefix"),
        ({"source": "text", "path": "/nowhere"}, "there is no file or folder /nowhere"),
        ({"source": "txet"}, "did you mean text?"),
        ({"tokenizer": "/nowhere.json"}, "/nowhere.json cannot be read"),
        ({"n_outputs": 255}, "needs at least 256"),
        ({"validation": 1.0}, "data.validation is 1.0"),
        ({"source": "tokens", "path": "/nowhere"}, "not a folder of prepared tokens"),
        ({"source": "/nowhere/own.py"}, "there is no file /nowhere/own.py"),
    ],
)
def test_wrong_sections_are_refused(opened: Opener, keys: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        opened(**keys)


def test_a_folder_without_text_is_refused(opened: Opener, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there are no \.txt or \.md files"):
        opened(source="text", path=str(tmp_path))
    (tmp_path / "a.txt").touch()
    with pytest.raises(InputError, match=r"holds no text"):
        opened(source="text", path=str(tmp_path))


def test_an_empty_split_is_refused_with_the_numbers(opened: Opener, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text", ["1234567"] * 8)  # 64 tokens
    with pytest.raises(InputError, match=r"training split .* has 64 tokens, .* data.seq_len 64 takes 65"):
        opened(source="text", path=str(folder), validation=0, seq_len=64)
    assert len(opened(source="text", path=str(folder), validation=0, seq_len=63).train) == 1
    with pytest.raises(InputError, match=r"validation split .* has 8 tokens, .* takes 21"):
        opened(source="text", path=str(folder), validation=0.02, seq_len=20)


# Tokenizers


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_bytes_there_and_back(text: str) -> None:
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_of_anything_can_be_shown() -> None:
    assert open_tokenizer("bytes").decode([104, 105, 0, 255, 300, 33]) == "hi\n\n\ufffd\ufffd!"


def make_tokenizer(path: Path, end: str | None = "</s>") -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[UNK]", "the", "cat", "sat"] + ([end] if end else [])
    model = tokenizers.models.WordLevel({word: i * 100 for i, word in enumerate(words)}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file(opened: Opener, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    folder = write_texts(tmp_path / "text", ["the cat", "sat the dog"])
    found = opened(source="text", path=str(folder), tokenizer=str(tokenizer), validation=0, seq_len=1, n_outputs=401)
    assert read_all(found.train)[1] == [200, 400, 300, 100, 0, 400]
    assert found.tokenizer is not None
    assert found.tokenizer.end == 400
    assert found.tokenizer.decode([100, 200, 5000]) == "the cat"
    with pytest.raises(InputError, match=r"token id 400, but model.vocab_size is 400: set it to at least 401"):
        opened(source="text", path=str(folder), tokenizer=str(tokenizer), validation=0, seq_len=1, n_outputs=400)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no token to end a document with"):
        open_tokenizer(str(make_tokenizer(tmp_path / "tokenizer.json", end=None)))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(InputError, match=r"not a Hugging Face tokenizer.json"):
        open_tokenizer(str(tmp_path / "x.json"))


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install 'meshtrain\[tokenizers\]'"):
        open_tokenizer(str(tmp_path / "x.json"))


# The split


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 400))
def test_held_out_leaves_something_on_both_sides(part: float, count: int) -> None:
    chosen = held_out_mask(part, count)
    if part > 0 and count > 1:
        assert 1 <= np.count_nonzero(chosen) < count
    elif part == 0:
        assert not chosen.any()


def test_held_out_is_near_its_share_and_moves_nothing_when_documents_come() -> None:
    few, many = held_out_mask(0.1, 10_000), held_out_mask(0.1, 20_000)
    assert abs(few.mean() - 0.1) < 0.015
    assert np.count_nonzero(few != many[:10_000]) == 0


def test_the_split_is_of_whole_documents(opened: Opener, tmp_path: Path) -> None:
    texts = [chr(ord("A") + i) * 9 for i in range(26)]
    folder = write_texts(tmp_path / "text", texts)
    found = opened(source="text", path=str(folder), validation=0.2, seq_len=1, seed=1)
    train, validation = read_all(found.train)[0], read_all(found.validation)[0]
    assert not set(train) & set(validation) - {0}
    held = np.flatnonzero(held_out_mask(0.2, 26))
    assert bytes(validation) == b"".join(texts[i].encode() + b"\0" for i in held)[:-1]
    assert bytes(train) == b"".join(texts[i].encode() + b"\0" for i in range(26) if i not in held)[:-1]


# Packing


def corpus_of(tmp_path: Path, documents: list[list[int]], empties: int = 0) -> Corpus:
    """Documents of one sequence each, which lie in the file in reverse order, with a gap of 99s before each. Before
    each there are so many `empties`, empty sequences that lie at the beginning of the file."""
    flat, starts = [], {}
    for number in reversed(range(len(documents))):
        flat += [99, 99]
        starts[number] = len(flat)
        flat += documents[number]

    def array(name: str, values: Iterable[int], dtype: str) -> MappedArray:
        data = np.fromiter(values, np.dtype(dtype).newbyteorder("<"))
        (tmp_path / name).write_bytes(data.tobytes())
        return MappedArray(tmp_path / name, dtype, len(data))

    nothing = (0,) * empties
    return MegatronCorpus(
        name=str(tmp_path / "tokens"),
        tokens=array("tokens", [*flat, 99], "uint16"),
        documents=len(documents),
        offsets=array("offsets", (n for i in range(len(documents)) for n in (*nothing, 2 * starts[i])), "int64"),
        lengths=array("lengths", (n for document in documents for n in (*nothing, len(document))), "int32"),
        # The last one is left out, as Megatron may.
        bounds=array("bounds", (number * (empties + 1) for number in range(len(documents))), "int64"),
        fingerprint="",
    )


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.integers(1, 6), st.data())
def test_samples_are_slices_of_the_concatenated_documents(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seq_len: int, data: st.DataObject
) -> None:
    numbers = iter(range(1000))
    documents = [[next(numbers) for _ in range(size)] for size in sizes]
    corpus = corpus_of(tmp_path_factory.mktemp("packing"), documents, data.draw(st.integers(0, 2)))
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))))
    stream = Stream.of(corpus, chosen)
    flat = [(d, token) for d, document in enumerate(documents) if chosen[d] for token in document]
    start = data.draw(st.integers(0, len(flat)))
    stream, flat = stream.slice(start, len(flat)), flat[start:]
    check_samples(stream, flat, seq_len)


def check_samples(stream: Stream, flat: list[tuple[int, int]], seq_len: int) -> None:
    samples = TokenSamples("x", stream, seq_len=seq_len, mask_documents=True, n_outputs=None)
    plain = TokenSamples("x", stream, seq_len=seq_len, mask_documents=False, n_outputs=None)
    assert len(samples) == len(plain) == max(len(flat) - 1, 0) // seq_len
    assert stream.targets() == max(len(flat) - 1, 0)
    for index in range(len(samples)):
        part = flat[index * seq_len : (index + 1) * seq_len + 1]
        (tokens, positions, owners), targets = samples.item(index, 0)
        assert tokens.tolist() == [token for _, token in part[:-1]]
        assert targets.tolist() == [token for _, token in part[1:]]
        expected = [document for document, _ in part[:-1]]
        order = list(dict.fromkeys(expected))
        assert owners.tolist() == [order.index(document) for document in expected]
        assert positions.tolist() == [i - expected.index(document) for i, document in enumerate(expected)]
        (same, arange, none), _ = plain.item(index, 0)
        assert same.tolist() == tokens.tolist()
        assert arange.tolist() == list(range(seq_len))
        assert none is None
        assert [n for n in samples.document_lengths([index]) if n] == [expected.count(document) for document in order]
    if len(samples):  # any samples in any order, also one twice
        chosen = [len(samples) - 1, 0, len(samples) - 1]
        lengths = [samples.document_lengths([index]) for index in chosen]
        assert np.concatenate(lengths).tolist() == samples.document_lengths(chosen).tolist()
    assert plain.document_lengths([0]) is None


def test_batches_are_contiguous_int64(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [list(range(50))])
    samples = TokenSamples("x", split_at_end(corpus, 0).train, seq_len=8, mask_documents=True, n_outputs=None)
    inputs, targets = samples.read([(0, 3), (5, 0)], 1).batch()
    for tensor in (*inputs, targets):
        assert tensor is not None
        assert tensor.dtype == torch.int64
        assert tensor.shape == (2, 8)
        assert tensor.is_contiguous()
    assert targets[1].tolist() == [IGNORE] * 8
    assert targets[0].tolist() == list(range(25, 33))


def test_a_sample_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [list(range(50))])
    samples = TokenSamples("x", split_at_end(corpus, 0).train, seq_len=8, mask_documents=False, n_outputs=None)
    for index in (-1, 6):
        with pytest.raises(IndexError, match=r"which has 6"):
            samples.item(index, 0)


# Prepared folders as a source


def test_a_prepared_folder_is_a_source_and_its_last_documents_are_held_out(opened: Opener, tmp_path: Path) -> None:
    documents = [Document(np.arange(10 * i, 10 * i + 10), text_bytes=30) for i in range(10)]
    write(tmp_path / "a", documents, vocab_size=100, tokenizer="mine", source="mine")
    found = opened(source="tokens", path=str(tmp_path / "a"), validation=0.2, seq_len=1, n_outputs=100)
    assert read_all(found.train)[0] == list(range(79))
    assert read_all(found.validation)[0] == list(range(80, 99))
    assert found.bytes_per_target == pytest.approx(60 / 19)
    assert found.tokenizer is None
    assert "the last of the file" in found.about[-1]
    with pytest.raises(InputError, match=r"token id 99, but model.vocab_size is 99"):
        opened(source="tokens", path=str(tmp_path / "a"), seq_len=1, n_outputs=99)


def test_a_prepared_folder_knows_its_tokenizer(opened: Opener, tmp_path: Path) -> None:
    write(tmp_path / "a", [Document(np.arange(50))], vocab_size=256, tokenizer="bytes", source="mine")
    found = opened(source="tokens", path=str(tmp_path / "a"), validation=0, seq_len=1)
    assert found.tokenizer is not None
    assert found.bytes_per_target is None
    other = make_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=r"was prepared with the tokenizer bytes"):
        opened(source="tokens", path=str(tmp_path / "a"), seq_len=1, tokenizer=str(other))
