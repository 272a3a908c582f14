"""The CRC-32 of bytes that were summed up in pieces, without reading them again.

A CRC is a remainder of polynomials over two elements, so appending n bytes multiplies what was before by x^(8n): the
CRC of a file follows from those of its blocks. Numbers are as zlib has them: bit 31 is the coefficient of x^0.
(M. Adler's `crc32_combine` in zlib, which Python does not offer.)
"""

from collections.abc import Iterable
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30


def combine(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of pieces one after the other: (CRC-32, bytes) of each."""
    whole = 0
    for crc, size in pieces:
        whole = _times(_power(size), whole) ^ crc
    return whole


@lru_cache(maxsize=4096)  # a checkpoint has few lengths of blocks
def _power(size: int) -> int:
    """x^(8 * size)."""
    power, square = _ONE, _X
    exponent = 8 * size
    while exponent:
        if exponent & 1:
            power = _times(square, power)
        square = _times(square, square)
        exponent >>= 1
    return power


def _times(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
