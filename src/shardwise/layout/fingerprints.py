"""Fingerprints of tensors that do not depend on how a tensor is cut over ranks: pure arithmetic.

A fingerprint is a sum over elements, so the fingerprints of the parts of a tensor add up to that of
the whole, in any order. Two integers (mod 2^64) tell whether all bits are equal: the sum of the bit
patterns, and the sum of each pattern times a hash of its position. A count sketch (Charikar, Chen
and Farach-Colton 2002) beside them is linear in the values: the sketch of a difference is the
difference of the sketches, and its norm estimates the norm of the difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 1 << 64
BINS = 64
"""Length of a sketch: a norm is estimated to within about 1 / sqrt(BINS / 2), 18 %."""

_CHUNK = 1 << 20
_SMALL = 1 << 14
_EXACT = 1 << 52
"""Whole numbers below it are exact in fp64."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_GOLDEN, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Fingerprint:
    """Of some elements of a tensor: `bits` and `placed` are the two sums, `largest` the largest
    magnitude (NaN where an element is)."""

    numel: int
    bits: int
    placed: int
    sketch: Tensor
    largest: float

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Of the elements of both."""
        return Fingerprint(
            self.numel + other.numel,
            (self.bits + other.bits) % WORD,
            (self.placed + other.placed) % WORD,
            self.sketch + other.sketch,
            _larger(self.largest, other.largest),
        )

    def same_bits(self, other: Fingerprint) -> bool:
        """Whether the elements of both are equal to the last bit (but for a chance of 2^-64)."""
        return (self.numel, self.bits, self.placed) == (other.numel, other.bits, other.placed)

    def distance(self, other: Fingerprint) -> float:
        """The 2-norm of the difference: 0 for the same bits, else estimated."""
        if self.same_bits(other):
            return 0.0
        if self.numel != other.numel:
            return float("inf")
        apart = float((self.sketch - other.sketch).norm())
        return apart if apart == apart else float("inf")

    @property
    def norm(self) -> float:
        """The 2-norm, estimated."""
        return float(self.sketch.norm())


def can_be_taken(values: Tensor) -> bool:
    """Whether `values` have elements in memory to look at: not so sparse, nested or quantized
    tensors, those on meta, nor those of a class that holds others inside."""
    if type(values).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    odd = values.is_nested or values.is_quantized or values.is_meta
    return values.layout is torch.strided and not odd


def nothing() -> Fingerprint:
    """Of no element: what sums begin with."""
    return Fingerprint(0, 0, 0, torch.zeros(BINS, dtype=torch.float64), 0.0)


def of(values: Tensor, offset: int = 0) -> Fingerprint:
    """Of `values`, which are the elements from `offset` on of a flattened tensor."""
    flat = _plain(values)
    found = nothing()
    for first in range(0, flat.numel(), _CHUNK):
        found += _of_chunk(flat[first : first + _CHUNK].cpu(), offset + first)
    return found


def sums_of(values: Tensor) -> tuple[int, int]:
    """Two sums over the bits of a tensor, computed on its device and cheaper than `of`: of its
    words, and of them weighted by their place in rows of 61. Of a whole tensor alone."""
    words = values.detach().contiguous().reshape(-1).view(_WORDS[values.itemsize])
    whole = words[: words.numel() // 61 * 61].view(-1, 61)
    by_place = torch.cat([whole.sum(0), words[whole.numel() :].sum().reshape(1).long()])
    weights = torch.arange(1, 63, device=words.device)
    return int(by_place.sum()), int((by_place * weights).sum())


def checksum(tensors: Sequence[Tensor]) -> float | Tensor:
    """A number below 2^52 that is another one if a bit of any of `tensors`, their order or a shape
    is. On an accelerator it stays there, as a 0-dim fp64 tensor.

    Small tensors of one dtype are joined, since each by itself would be several kernels.
    """
    forms = repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors])
    here, there = zlib.crc32(forms.encode()), None
    for number, words in enumerate(_runs(tensors)):
        value = _placed(words) * (2 * number + 1)
        if words.device.type == "cpu":
            here = (here + int(value)) % WORD
        else:
            there = value if there is None else there + value.to(there.device)
    if there is None:
        return float(here % _EXACT)
    return ((there + _signed(here)) & (_EXACT - 1)).double()


def _runs(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The elements of `tensors` as integers: of large ones by themselves, of small ones joined."""
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.itemsize])
        if words.numel() < _SMALL:
            small.setdefault((words.device, words.dtype), []).append(words)
        else:
            yield _wide(words)
    for joined in small.values():
        yield torch.cat(joined)


def _wide(words: Tensor) -> Tensor:
    """The same bits as 64-bit integers if they are a whole number of them: torch adds those up 20
    times as fast as narrow ones, which it widens first."""
    fits = words.numel() * words.itemsize % 8 == 0 and words.data_ptr() % 8 == 0
    return words.view(torch.int64) if fits else words


def _placed(words: Tensor) -> Tensor:
    """The sum of integers, weighted by their place in rows of 61, mod 2^64."""
    rows = words[: words.numel() // 61 * 61].view(-1, 61).sum(0)
    rest = words[words.numel() // 61 * 61 :].long()
    odd = torch.arange(1, 2 * 61, 2, device=words.device)
    return (rows * odd).sum() + (rest * (odd[: rest.numel()] + 122)).sum()


def unordered(values: Tensor) -> int:
    """A sum (mod 2^64) over hashes of the elements of `values`, whatever their order: that of a
    batch is the sum over the ranks that have its rows."""
    patterns = _patterns(_plain(values).cpu())
    return int(_mixed(patterns ^ _signed(_GOLDEN)).sum()) % WORD


def _of_chunk(flat: Tensor, offset: int) -> Fingerprint:
    patterns = _patterns(flat)
    positions = torch.arange(offset, offset + flat.numel())
    hashes = _mixed(positions)
    numbers = flat.to(torch.float64)
    # Bin and sign come from bits that the sum of placed patterns does not use alone.
    other = _mixed(hashes)
    signs = 1.0 - 2.0 * ((other >> 8) & 1).to(torch.float64)
    return Fingerprint(
        flat.numel(),
        int(patterns.sum()) % WORD,
        int((patterns * (hashes | 1)).sum()) % WORD,
        torch.bincount(other & (BINS - 1), weights=numbers * signs, minlength=BINS),
        float(numbers.abs().max()),
    )


def _plain(values: Tensor) -> Tensor:
    """Flat, in the order of its elements, without complex numbers."""
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.contiguous().view(-1)


def _patterns(flat: Tensor) -> Tensor:
    """The bits of each element as an integer."""
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    return flat.view(_INTEGERS[flat.dtype.itemsize]).to(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    """splitmix64 (Steele, Lea and Flood 2014) of each word; torch's int64 wraps around."""
    words = words + _signed(_GOLDEN)
    words = (words ^ _shifted(words, 30)) * _signed(_MIX_A)
    words = (words ^ _shifted(words, 27)) * _signed(_MIX_B)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, by: int) -> Tensor:
    """A shift that brings in zeros; that of signed integers repeats the sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - WORD if word >= WORD // 2 else word


def _larger(one: float, other: float) -> float:
    return one if one != one or one > other else other
