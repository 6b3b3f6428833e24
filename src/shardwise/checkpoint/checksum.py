"""Checksum of a tensor, computed from the checksums of its parts, which several ranks write.

The checksum is the CRC-32 of zlib, gzip and PNG. Two neighbouring CRCs can be combined if the
length of the second part is known (Mark Adler's crc32_combine). So anyone can check a tensor with
`zlib.crc32` of its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""x^0: the bits are mirrored, as in the definition of the CRC."""


@dataclass(frozen=True, order=True)
class ChecksumPart:
    """CRC-32 of `nbytes` bytes of a tensor, starting at byte `at`."""

    at: int
    nbytes: int
    crc: int


def combine(parts: Iterable[ChecksumPart], nbytes: int) -> int | None:
    """Return the CRC-32 of the `nbytes` bytes that `parts` (in any order) cover.

    Returns None if they do not cover each byte exactly once.
    """
    crc, reached = 0, 0
    for part in sorted(part for part in parts if part.nbytes):
        if part.at != reached:
            return None
        # CRC(AB) = CRC(A) * x^(8 |B|) + CRC(B), over GF(2).
        crc = _times(_shift(part.nbytes), crc) ^ part.crc
        reached += part.nbytes
    return crc if reached == nbytes else None


@cache
def _shift(nbytes: int) -> int:
    """Return x^(8 nbytes) modulo the polynomial."""
    power, factor, bits = _ONE, 0, nbytes * 8
    while bits >> factor:
        if bits >> factor & 1:
            power = _times(_power_of_two(factor), power)
        factor += 1
    return power


@cache
def _power_of_two(exponent: int) -> int:
    """Return x^(2^exponent) modulo the polynomial."""
    if exponent == 0:
        return _ONE >> 1
    root = _power_of_two(exponent - 1)
    return _times(root, root)


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the CRC polynomial."""
    product = 0
    # Bit by bit in Python is fast enough: it runs once per part, not once per byte.
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
