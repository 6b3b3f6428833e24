"""Computes the checksum of a tensor from those of its parts, which several ranks write.

It is the CRC-32 of zlib, gzip and PNG, which combines: with the length of what follows, the sum of
two neighbours comes from their own (Mark Adler's crc32_combine). So `zlib.crc32` of a tensor's
bytes tells anyone whether they are those that were written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""x^0: bits are mirrored, as the CRC is defined."""


@dataclass(frozen=True, order=True)
class ChecksumPart:
    """The CRC-32 of `nbytes` bytes of a tensor, from its byte `at` on."""

    at: int
    nbytes: int
    crc: int


def joined(parts: Iterable[ChecksumPart], nbytes: int) -> int | None:
    """The CRC-32 of the `nbytes` bytes that `parts`, in any order, make up; None unless each
    byte is in one of them."""
    crc, reached = 0, 0
    for part in sorted(part for part in parts if part.nbytes):
        if part.at != reached:
            return None
        crc = _times(_shift(part.nbytes), crc) ^ part.crc
        reached += part.nbytes
    return crc if reached == nbytes else None


@cache
def _shift(nbytes: int) -> int:
    """x^(8 nbytes) modulo the polynomial."""
    power, factor, bits = _ONE, 0, nbytes * 8
    while bits >> factor:
        if bits >> factor & 1:
            power = _times(_power_of_two(factor), power)
        factor += 1
    return power


@cache
def _power_of_two(exponent: int) -> int:
    """x^(2^exponent) modulo the polynomial."""
    if exponent == 0:
        return _ONE >> 1
    root = _power_of_two(exponent - 1)
    return _times(root, root)


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
