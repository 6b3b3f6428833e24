"""Computes a tensor's checksum from the checksums of its parts, which different ranks write.

The checksum is the CRC-32 that zlib, gzip and PNG use. The CRCs of two adjacent parts can be
combined if the length of the second part is known (Mark Adler's crc32_combine). The result is
`zlib.crc32` of all bytes of the tensor, so any program can verify it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial x^0. Bits are reversed, as in the definition of this CRC."""


@dataclass(frozen=True, order=True)
class ChecksumPart:
    """CRC-32 of `nbytes` consecutive bytes of a tensor, starting at byte `at`."""

    at: int
    nbytes: int
    crc: int


def combine(parts: Iterable[ChecksumPart], nbytes: int) -> int | None:
    """Combine the CRCs of a tensor's parts into the CRC-32 of its `nbytes` bytes.

    The parts may be in any order. Returns None if they do not cover each byte exactly once.
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
    """Return x^(8 nbytes) modulo the CRC polynomial."""
    power, factor, bits = _ONE, 0, nbytes * 8
    while bits >> factor:
        if bits >> factor & 1:
            power = _times(_power_of_two(factor), power)
        factor += 1
    return power


@cache
def _power_of_two(exponent: int) -> int:
    """Return x^(2^exponent) modulo the CRC polynomial."""
    if exponent == 0:
        return _ONE >> 1
    root = _power_of_two(exponent - 1)
    return _times(root, root)


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the CRC polynomial."""
    product = 0
    # A loop over bits in Python is fast enough, because it runs per part, not per byte.
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
