"""How one sequence lies over the ranks of `cp`: which positions each has, and which of them others must get to see.

A sequence is cut into 2c chunks of the same length, and rank i of c has chunks i and 2c - 1 - i ("zigzag": Megatron's
dual chunk swap). Under a causal mask each rank so has as many pairs of a query and a key as any other. A zigzag over
r u parts, of which u neighbours put theirs together, is one over r parts. Sequences need not divide: they are padded at
the end, where causality keeps the padding out of every real token.
"""

import math
from collections.abc import Sequence


def padded_length(length: int, parts: int, tp: int = 1) -> int:
    """The least length from `length` on that `parts` ranks of `cp` share evenly, in two chunks each.

    `tp`: ranks over which `sequence_parallel` splits the part of each once more; 1 without it.
    """
    unit = parts * math.lcm(2, tp)
    return -(-length // unit) * unit


def chunks_of(length: int, parts: int, index: int, tp: int = 1) -> tuple[range, range]:
    """The positions of rank `index` in the padded sequence: its two chunks, ascending."""
    m = padded_length(length, parts, tp) // (2 * parts)
    first, second = index, 2 * parts - 1 - index
    return range(first * m, (first + 1) * m), range(second * m, (second + 1) * m)


def owner(position: int, length: int, parts: int, tp: int = 1) -> tuple[int, int]:
    """Who has a position: (its index on `cp`, the place among its own positions)."""
    m = padded_length(length, parts, tp) // (2 * parts)
    chunk, place = divmod(position, m)
    return (chunk, place) if chunk < parts else (2 * parts - 1 - chunk, m + place)


def sees_chunk(first: Sequence[int], chunk: int, reader: int, x: int) -> bool:
    """Whether some query of rank `reader` sees a position of chunk `x`.

    `first`: of each chunk, the first position that any of its queries sees, in any row. `chunk`: the length of one.
    """
    return any(x <= y and first[y] < (x + 1) * chunk for y in (reader, len(first) - 1 - reader))


def head_ranges(heads: int, kv_heads: int, parts: int, index: int) -> tuple[range, range]:
    """The query heads of rank `index` of `parts` that split them, and the key/value heads that these look at."""
    own = range(index * heads // parts, (index + 1) * heads // parts)
    return own, range(own[0] * kv_heads // heads, own[-1] * kv_heads // heads + 1)


def kv_heads_of(heads: int, kv_heads: int, parts: int, index: int) -> tuple[int, ...]:
    """Which of its key/value heads each query head of a rank looks at; () where they share them evenly, in order."""
    own, kv = head_ranges(heads, kv_heads, parts, index)
    looks = [head * kv_heads // heads - kv.start for head in own]
    even = len(own) % len(kv) == 0 and looks == [n * len(kv) // len(own) for n in range(len(own))]
    return () if even else tuple(looks)
