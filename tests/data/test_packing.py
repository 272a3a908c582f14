"""Packing: samples are slices of documents that lie one behind the other, wherever they lie in the
files."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from meshtrain.data.batch import IGNORE
from meshtrain.data.megatron import MegatronCorpus
from meshtrain.data.packing import Stream, TokenSamples
from meshtrain.data.split import split_at_end
from meshtrain.data.tokens import MappedArray
from tests.properties import given, st


def corpus_of(tmp_path: Path, documents: list[list[int]], empties: int = 0) -> MegatronCorpus:
    """Documents of one sequence each, which lie in the file in reverse order, with a gap of 99s
    before each. Before each there are so many `empties`, empty sequences that lie at the beginning
    of the file."""
    tokens, starts = [], {}
    for number in reversed(range(len(documents))):
        tokens += [99, 99]
        starts[number] = len(tokens)
        tokens += documents[number]

    def array(name: str, values: Iterable[int], dtype: str) -> MappedArray:
        data = np.fromiter(values, np.dtype(dtype).newbyteorder("<"))
        (tmp_path / name).write_bytes(data.tobytes())
        return MappedArray(tmp_path / name, dtype, len(data))

    nothing = (0,) * empties
    return MegatronCorpus(
        name=str(tmp_path / "tokens"),
        tokens=array("tokens", [*tokens, 99], "uint16"),
        documents=len(documents),
        offsets=array(
            "offsets",
            (n for i in range(len(documents)) for n in (*nothing, 2 * starts[i])),
            "int64",
        ),
        lengths=array(
            "lengths", (n for document in documents for n in (*nothing, len(document))), "int32"
        ),
        bounds=array(
            "bounds", (number * (empties + 1) for number in range(len(documents) + 1)), "int64"
        ),
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
    tokens = [(d, token) for d, document in enumerate(documents) if chosen[d] for token in document]
    start = data.draw(st.integers(0, len(tokens)))
    stream = Stream.of(corpus, chosen).slice(start, len(tokens))
    check_samples(stream, tokens[start:], seq_len)


def check_samples(stream: Stream, flat: list[tuple[int, int]], seq_len: int) -> None:
    samples, plain = (
        TokenSamples("x", stream, seq_len=seq_len, mask_documents=masked, n_outputs=None)
        for masked in (True, False)
    )
    assert stream.targets() == max(len(flat) - 1, 0)
    assert len(samples) == len(plain) == stream.targets() // seq_len
    for index in range(len(samples)):
        documents, tokens = zip(*flat[index * seq_len : (index + 1) * seq_len + 1], strict=True)
        inputs, targets = samples.item(index, 0)
        documents, order = documents[:-1], list(dict.fromkeys(documents[:-1]))
        assert (inputs[0].tolist(), targets.tolist()) == (list(tokens[:-1]), list(tokens[1:]))
        assert inputs[1].tolist() == [
            i - documents.index(document) for i, document in enumerate(documents)
        ]
        assert inputs[2].tolist() == [order.index(document) for document in documents]
        (same, arange, none), _ = plain.item(index, 0)
        assert same.tolist() == inputs[0].tolist()
        assert arange.tolist() == list(range(seq_len))
        assert none is None
        assert [n for n in samples.document_lengths([index]) if n] == [
            documents.count(document) for document in order
        ]
    if len(samples):  # any samples in any order, also one twice
        chosen = [len(samples) - 1, 0, len(samples) - 1]
        lengths = [samples.document_lengths([index]) for index in chosen]
        assert np.concatenate(lengths).tolist() == samples.document_lengths(chosen).tolist()
    assert plain.document_lengths([0]) is None


def test_batches_are_contiguous_int64_and_no_sample_is_outside(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [list(range(50))])
    samples = TokenSamples(
        "x", split_at_end(corpus, 0).train, seq_len=8, mask_documents=True, n_outputs=None
    )
    inputs, targets = samples.read([(0, 3), (5, 0)], 1).batch()
    for tensor in (*inputs, targets):
        assert (tensor.dtype, tensor.shape) == (torch.int64, (2, 8))
        assert tensor.is_contiguous()
    assert targets.tolist() == [list(range(25, 33)), [IGNORE] * 8]
    for index in (-1, 6):
        with pytest.raises(IndexError, match=r"which has 6"):
            samples.item(index, 0)
