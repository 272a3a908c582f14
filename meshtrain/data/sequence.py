"""How one sequence lies over the ranks of `cp`: which positions each has, which of them others must get to see, and,
in closed forms that the tests compare with what it does, what attention sends and keeps.

A sequence is cut into 2c chunks of the same length, and rank i of c has chunks i and 2c - 1 - i ("zigzag": Megatron's
dual chunk swap). Under a causal mask each rank so has as many pairs of a query and a key as any other. A zigzag over
r u parts, of which u neighbours put theirs together, is one over r parts. Sequences need not divide: they are padded at
the end, where causality keeps the padding out of every real token.
"""

import math
from collections.abc import Sequence
from functools import partial


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


def needed_chunks(first: Sequence[int], chunk: int) -> list[list[tuple[int, int]]]:
    """For each rank: the chunks of others that its queries see, in order, as (rank, which of its two chunks)."""
    parts = len(first) // 2
    return [
        [
            (source, half)
            for source in range(parts)
            for half, x in enumerate((source, 2 * parts - 1 - source))
            if source != reader and sees_chunk(first, chunk, reader, x)
        ]
        for reader in range(parts)
    ]


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


def context_bytes(
    method: str,
    ranks: int,
    heads: int,
    *,
    query_heads: int,
    kv_heads: int,
    tokens: int,
    width: int,
    value_width: int,
    itemsize: int,
    index: int | None = None,
    needed: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> tuple[int, int]:
    """What a rank of `cp` sends in the forward and in the backward of one attention.

    With H and K query and key/value heads of widths e and f, n tokens a rank, u = `heads`, r = ranks / u, and κ the
    key/value heads of a rank among its neighbours (K / u where that divides, and at least 1), in numbers of `itemsize`:

        swapping heads   (u - 1) n (H / u + κ) (e + f) in either direction (where ranks have as many heads)
        fetching         κ (e + f) u n / 2 for each chunk that another rank sees: r - 1 + i of them, with one document
        the way back     as much for each chunk of another rank that this one sees: 2 (r - 1) - i of them

    The forward swaps and fetches, the backward does so again and sends gradients back. `recompute: full` adds the
    forward once more.

    `query_heads`, `kv_heads`: on this rank of `tp`. `tokens`: of a microbatch on a rank, padding included. `width`: of
    keys. `index`: of the rank on `cp`; None: that which sends most. `needed`: `needed_chunks` of the documents over
    `ranks / heads` parts; None: there is one document. Both methods send the same, "ring" in r - 1 stages.
    """
    if index is None:
        of = partial(context_bytes, method, ranks, heads, query_heads=query_heads, kv_heads=kv_heads, tokens=tokens)
        of = partial(of, width=width, value_width=value_width, itemsize=itemsize, needed=needed)
        return max((of(index=i) for i in range(ranks)), key=sum)
    widths = width + value_width
    own, kv = head_ranges(query_heads, kv_heads, heads, index % heads)
    others = [head_ranges(query_heads, kv_heads, heads, j) for j in range(heads) if j != index % heads]
    queries_there, kv_there = (sum(len(pair[n]) for pair in others) for n in (0, 1))
    queries_back, kv_back = len(others) * len(own), len(others) * len(kv)
    forward = tokens * (queries_there * width + kv_there * widths + queries_back * value_width)
    backward = tokens * (queries_there * value_width + kv_back * widths + queries_back * width)
    ring, i = ranks // heads, index // heads
    if needed is None:
        sends, sees = ring - 1 + i, 2 * (ring - 1) - i
    else:
        sends, sees = sum(rank == i for chunks in needed for rank, _ in chunks), len(needed[i])
    chunk = len(kv) * widths * tokens * heads // 2
    return itemsize * (forward + sends * chunk), itemsize * (backward + (sends + sees) * chunk)


def context_elements(
    method: str,
    ranks: int,
    heads: int,
    *,
    query_heads: int,
    kv_heads: int,
    tokens: int,
    width: int,
    value_width: int,
    index: int = 0,
) -> tuple[int, int]:
    """Numbers that one attention keeps for its backward, and how many more its backward holds at once, at most.

    Kept: u n ((H / u + κ) (e + f) + H / u): q, k, v, the output and its log-sum-exp, after heads are swapped. On top:
    the keys and values that a rank sees (with gather those of all ranks, with ring two ranks' and its own), those of a
    block in one piece, their gradients and the sums of these; three and a half times the gradient of q; and where heads
    are not shared evenly, keys and values for each query head. Not counted is what a kernel takes inside, and a mask.
    In 16 bits sums take twice the bytes of the rest.

    `index`: of the rank on `cp`; the first sees most, if there is one document. The rest as in `context_bytes`.
    """
    own, kv = head_ranges(query_heads, kv_heads, heads, index % heads)
    widths, n, ring = width + value_width, heads * tokens, ranks // heads
    saved = n * ((len(own) + len(kv)) * widths + len(own))
    sees = 2 * ring - index // heads
    at_once, block = (2 * sees + 4 * ring, sees) if method == "gather" else (12, 2)
    chunk = widths * n // 2
    repeated = 2 * block * len(own) * chunk if kv_heads_of(query_heads, kv_heads, heads, index % heads) else 0
    return saved, at_once * len(kv) * chunk + 7 * n * len(own) * width // 2 + repeated
