"""How one sequence is split over the `cp` ranks: which positions each rank has, and which of them
other ranks need.

A sequence is cut into 2c chunks of equal length, and rank i of c has chunks i and 2c - 1 - i
("zigzag": Megatron's dual chunk swap), so that under a causal mask every rank has the same number
of query-key pairs. If groups of u neighbours in a zigzag over r u ranks join their parts, the
result is a zigzag over r ranks. Sequences need not divide: they are padded at the end, where
causality keeps the padding out of every real token.
"""

import math
from collections.abc import Sequence


def padded_length(length: int, parts: int, tp: int = 1) -> int:
    """The smallest length >= `length` that divides evenly over `parts` ranks of `cp`, in two chunks
    each.

    `tp`: ranks over which `sequence_parallel` splits each rank's part further; 1 without it.
    """
    unit = parts * math.lcm(2, tp)
    return -(-length // unit) * unit


def chunks_of(length: int, parts: int, index: int, tp: int = 1) -> tuple[range, range]:
    """The positions of rank `index` in the padded sequence: its two chunks, ascending."""
    size = padded_length(length, parts, tp) // (2 * parts)  # of a chunk
    first = index * size
    second = (2 * parts - 1 - index) * size
    return range(first, first + size), range(second, second + size)


def owner(position: int, length: int, parts: int, tp: int = 1) -> tuple[int, int]:
    """The owner of a position: (index of the `cp` rank, the position's place among those of that
    rank)."""
    size = padded_length(length, parts, tp) // (2 * parts)  # of a chunk
    chunk, place = divmod(position, size)
    if chunk < parts:
        return chunk, place
    return 2 * parts - 1 - chunk, size + place


def sees_chunk(first: Sequence[int], chunk: int, reader: int, x: int) -> bool:
    """Whether some query of rank `reader` attends to a position of chunk `x`.

    `first`: for each chunk, the first position that any of its queries attends to, in any row.
    `chunk`: chunk length.
    """
    end = (x + 1) * chunk
    early, late = reader, len(first) - 1 - reader
    return (x <= early and first[early] < end) or (x <= late and first[late] < end)


def head_ranges(heads: int, kv_heads: int, parts: int, index: int) -> tuple[range, range]:
    """The query heads of rank `index` out of `parts` ranks, and the key/value heads that these
    use."""
    own = range(index * heads // parts, (index + 1) * heads // parts)
    first = own[0] * kv_heads // heads
    last = own[-1] * kv_heads // heads
    return own, range(first, last + 1)


def kv_heads_of(heads: int, kv_heads: int, parts: int, index: int) -> tuple[int, ...]:
    """The rank's key/value head that each of its query heads uses; () if equal runs of query heads
    share one each."""
    own, kv = head_ranges(heads, kv_heads, parts, index)
    used = tuple(head * kv_heads // heads - kv.start for head in own)
    # Equal runs share one each: 0 0 0 1 1 1.
    equal_runs = tuple(n * len(kv) // len(own) for n in range(len(own)))
    if len(own) % len(kv) == 0 and used == equal_runs:
        return ()
    return used
