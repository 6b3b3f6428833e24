"""Computes fingerprints of tensors that do not depend on how a tensor is sharded. Pure arithmetic.

A fingerprint is a sum over elements. The fingerprints of a tensor's parts, added in any order, give
the fingerprint of the full tensor.

Two integers (mod 2^64) show whether two tensors are bit-identical: the sum of the bit patterns, and
the sum of each pattern times a hash of its position. A count sketch (Charikar, Chen and
Farach-Colton 2002) shows how large a difference is. It is linear in the values, so the sketch of a
difference is the difference of the sketches, and its norm estimates the norm of the difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 1 << 64
BINS = 64
"""Length of a sketch. The relative error of an estimated norm is about 1 / sqrt(BINS / 2), 18 %."""

_CHUNK = 1 << 20
_SMALL = 1 << 14
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_GOLDEN, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprint of some of a tensor's elements."""

    numel: int
    bits: int
    """Sum of the bit patterns, mod 2^64."""
    placed: int
    """Sum of the bit patterns times a hash of their positions, mod 2^64."""
    sketch: Tensor
    """Count sketch of the values: (BINS,) fp64."""
    largest: float
    """Largest magnitude; NaN if any element is NaN."""

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Return the fingerprint of both sets of elements together."""
        return Fingerprint(
            self.numel + other.numel,
            (self.bits + other.bits) % WORD,
            (self.placed + other.placed) % WORD,
            self.sketch + other.sketch,
            # NaN must win on either side. The result of `max` would depend on the order.
            self.largest
            if self.largest != self.largest or self.largest > other.largest
            else other.largest,
        )

    def same_bits(self, other: Fingerprint) -> bool:
        """Return whether all bits are identical. Wrong with a probability of 2^-64."""
        return (self.numel, self.bits, self.placed) == (other.numel, other.bits, other.placed)

    def distance(self, other: Fingerprint) -> float:
        """Estimate the 2-norm of the difference. Returns 0 if all bits are identical."""
        if self.same_bits(other):
            return 0.0
        if self.numel != other.numel:
            return float("inf")
        distance = float((self.sketch - other.sketch).norm())
        # A NaN in either sketch: the tensors differ by an unknown amount.
        return distance if distance == distance else float("inf")

    @property
    def norm(self) -> float:
        """The estimated 2-norm of the elements."""
        return float(self.sketch.norm())


def can_be_taken(values: Tensor) -> bool:
    """Return whether `of` can compute a fingerprint of `values`, whose elements must be in memory.

    Returns False for sparse, nested, quantized and meta tensors, and for wrapper subclasses.
    """
    if type(values).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    odd = values.is_nested or values.is_quantized or values.is_meta
    return values.layout is torch.strided and not odd


def nothing() -> Fingerprint:
    """Return the fingerprint of an empty tensor. Adding it to a sum changes nothing."""
    return Fingerprint(0, 0, 0, torch.zeros(BINS, dtype=torch.float64), 0.0)


def of(values: Tensor, offset: int = 0) -> Fingerprint:
    """Return the fingerprint of `values`, a flat part of a tensor that starts at index `offset`."""
    # Work in chunks, because hashes and positions are 64-bit and need several times the memory of
    # the elements.
    flat = _plain(values)
    total = nothing()
    for first in range(0, flat.numel(), _CHUNK):
        total += _of_chunk(flat[first : first + _CHUNK].cpu(), offset + first)
    return total


def sums_of(values: Tensor) -> tuple[int, int]:
    """Return two checksums of a full tensor's bits. They are cheaper to compute than a fingerprint.

    The first is the sum of the tensor's words. In the second, each word is multiplied by its
    position in a row of 61 words. Both are computed on the tensor's device. Unlike fingerprints,
    they cannot be computed separately for each part and then added.
    """
    words = values.detach().contiguous().reshape(-1).view(_WORDS[values.itemsize])
    whole = words[: words.numel() // 61 * 61].view(-1, 61)
    # The words after the last full row count as one more position.
    by_place = torch.cat([whole.sum(0), words[whole.numel() :].sum().reshape(1).long()])
    weights = torch.arange(1, 63, device=words.device)
    return int(by_place.sum()), int((by_place * weights).sum())


def checksum(tensors: Sequence[Tensor]) -> float | Tensor:
    """Return a number below 2^52 that depends on the bits, shapes, dtypes and order of `tensors`.

    If any tensor is on an accelerator, the result is a 0-dim fp64 tensor on that device.
    """
    forms = repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors])
    on_host, on_device = zlib.crc32(forms.encode()), None
    for number, words in enumerate(_runs(tensors)):
        # Use a different odd factor for each run, so that swapping two tensors changes the sum.
        value = _weighted_sum(words) * (2 * number + 1)
        if words.device.type == "cpu":
            on_host = (on_host + int(value)) % WORD
        else:
            on_device = value if on_device is None else on_device + value.to(on_device.device)
    # fp64 represents 52 bits exactly. Multiply first, because the upper bits of the sum must count:
    # exponents are there. An odd factor keeps a changed bit of the upper 52 changed.
    if on_device is None:
        return float(on_host * _GOLDEN % WORD >> 12)
    return _shifted((on_device + _signed(on_host)) * _signed(_GOLDEN), 12).double()


def hash_of(values: Tensor) -> Tensor:
    """Return a number that depends on all bits of `values`: a 0-dim int64 tensor on their device.

    The number is cheaper to compute than a fingerprint. A single changed bit always changes it. If
    several elements are rounded differently, the differences do not cancel, as they could in a
    plain sum.
    """
    words = values.contiguous().view(-1).view(_WORDS[values.itemsize])
    fits = words.numel() * words.itemsize % 8 == 0 and words.data_ptr() % 8 == 0
    words = words.view(torch.int64) if fits else words.long()
    # w + w w. If bit k of w changes, it changes by an odd multiple of 2^k.
    return _weighted_sum(torch.addcmul(words, words, words))


def _runs(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the elements of `tensors` as integers.

    Small tensors of the same dtype and device are concatenated, because processing each separately
    would take several additional kernels.
    """
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.itemsize])
        if words.numel() < _SMALL:
            small.setdefault((words.device, words.dtype), []).append(words)
        else:
            # Use 64-bit integers if possible: torch adds them 20 times as fast as narrower ones,
            # which it converts first.
            fits = words.numel() * words.itemsize % 8 == 0 and words.data_ptr() % 8 == 0
            yield words.view(torch.int64) if fits else words
    for joined in small.values():
        yield torch.cat(joined)


def _weighted_sum(words: Tensor) -> Tensor:
    """Return the sum of `words` mod 2^64, weighted by their position in rows of 61 words.

    The weights are odd numbers.
    """
    # torch adds long rows several times faster than short ones.
    width = 61 * 32 if words.numel() >= _SMALL else 61
    end = words.numel() // width * width
    rows = words[:end].view(-1, width).sum(0).view(-1, 61).sum(0)
    odd = torch.arange(1, 2 * (61 + width), 2, device=words.device)
    rest = words[end:].long()
    return (rows * odd[:61]).sum() + (rest * odd[61 : 61 + rest.numel()]).sum()


def unordered(values: Tensor) -> int:
    """Return a checksum of `values` that does not depend on the order of the elements.

    It is the sum of the elements' hashes mod 2^64. If ranks hold different rows of a batch, their
    checksums add up to the full batch's checksum.
    """
    patterns = _patterns(_plain(values).cpu())
    return int(_mixed(patterns ^ _signed(_GOLDEN)).sum()) % WORD


def _of_chunk(flat: Tensor, offset: int) -> Fingerprint:
    patterns = _patterns(flat)
    positions = torch.arange(offset, offset + flat.numel())
    hashes = _mixed(positions)
    numbers = flat.to(torch.float64)
    # Hash again, because bins and signs must be independent of the factors in `placed`.
    other = _mixed(hashes)
    signs = 1.0 - 2.0 * ((other >> 8) & 1).to(torch.float64)
    return Fingerprint(
        flat.numel(),
        int(patterns.sum()) % WORD,
        # An odd factor is invertible mod 2^64, so it loses no bit of the pattern.
        int((patterns * (hashes | 1)).sum()) % WORD,
        torch.bincount(other & (BINS - 1), weights=numbers * signs, minlength=BINS),
        float(numbers.abs().max()),
    )


def _plain(values: Tensor) -> Tensor:
    """Return `values` flattened to 1-D. A complex number becomes two real ones."""
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.contiguous().view(-1)


def _patterns(flat: Tensor) -> Tensor:
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    return flat.view(_INTEGERS[flat.dtype.itemsize]).to(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    """Hash each word with splitmix64 (Steele, Lea and Flood 2014). Relies on int64 wrap-around."""
    words = words + _signed(_GOLDEN)
    words = (words ^ _shifted(words, 30)) * _signed(_MIX_A)
    words = (words ^ _shifted(words, 27)) * _signed(_MIX_B)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros. torch's own shift repeats the sign bit."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - WORD if word >= WORD // 2 else word
