"""Sequences over the ranks of `cp`: every position has one owner, work is even, and a rank gets
what it sees."""

import itertools
import math

from meshtrain.data.sequence import chunks_of, owner, padded_length, sees_chunk
from tests.properties import given, st

lengths, parts, tps = st.integers(1, 300), st.integers(1, 12), st.sampled_from([1, 2, 3, 4, 8])


@given(lengths, parts, tps)
def test_each_position_has_one_owner_and_a_place(length: int, parts: int, tp: int) -> None:
    padded = padded_length(length, parts, tp)
    step = math.lcm(2 * parts, parts * tp)
    assert padded == math.ceil(length / step) * step
    ranks = [[p for chunk in chunks_of(length, parts, i, tp) for p in chunk] for i in range(parts)]
    assert sorted(p for own in ranks for p in own) == list(range(padded))
    for i, own in enumerate(ranks):
        assert own == sorted(own)
        assert len(own) == padded // parts
        assert [owner(p, length, parts, tp) for p in own] == [
            (i, place) for place in range(len(own))
        ]


@given(lengths, st.integers(1, 5), st.integers(1, 5), tps)
def test_neighbours_together_have_a_part_of_a_coarser_zigzag(
    length: int, rings: int, heads: int, tp: int
) -> None:
    parts = rings * heads
    padded = padded_length(length, parts, tp)
    for ring in range(rings):
        fine = [
            p
            for i in range(heads)
            for chunk in chunks_of(length, parts, ring * heads + i, tp)
            for p in chunk
        ]
        assert sorted(fine) == [p for chunk in chunks_of(padded, rings, ring) for p in chunk]


@given(lengths, parts)
def test_each_rank_has_as_many_pairs_of_a_query_and_a_key(length: int, parts: int) -> None:
    pairs = {
        sum(p + 1 for chunk in chunks_of(length, parts, i) for p in chunk) for i in range(parts)
    }
    assert len(pairs) == 1


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 6),
)
def test_exactly_the_chunks_that_some_query_sees_are_needed(
    documents: list[list[int]], parts: int
) -> None:
    rows = [
        [number for number, size in enumerate(sizes) for _ in range(size)] for sizes in documents
    ]
    length = padded_length(min(120, max(map(len, rows))), parts)
    rows = [(row + [-1] * length)[:length] for row in rows]
    m = length // (2 * parts)
    chunks = [range(y * m, (y + 1) * m) for y in range(2 * parts)]
    first = [
        min(k for row in rows for q in chunk for k in range(q + 1) if row[k] == row[q])
        for chunk in chunks
    ]
    for reader, x in itertools.product(range(parts), range(2 * parts)):
        queries = [q for chunk in chunks_of(length, parts, reader) for q in chunk]
        expected = any(
            row[k] == row[q] for row in rows for q in queries for k in chunks[x] if k <= q
        )
        assert sees_chunk(first, m, reader, x) == expected


@given(parts, st.integers(1, 9))
def test_with_one_document_a_rank_sends_a_quarter_less_than_everything(parts: int, m: int) -> None:
    for j in range(parts):
        readers = [
            i
            for i in range(parts)
            for x in (j, 2 * parts - 1 - j)
            if sees_chunk([0] * 2 * parts, m, i, x)
        ]
        assert len([i for i in readers if i != j]) == parts - 1 + j
