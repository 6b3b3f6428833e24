"""Lists the tensors that a rank holds between steps, and detects changes that no code has made.

    step s          update ── seal: checksum every state
    step s + 1      forward ── backward ── verify the checksums ── update ── seal

A checksum is the sum of a block's words. If a bit flips in memory between two updates, the sum of
its block changes. User code may write to these tensors. torch counts such writes, and a tensor that
was written to is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.checkpoint.spec_view import SpecView, StatesView
from shardwise.guard.findings import AVERAGE, BUFFER, OPTIMIZER, PARAMETER, Finding
from shardwise.layout.bucket_layout import ALIGNMENT, Slot
from shardwise.layout.fingerprints import can_be_taken
from shardwise.states.storage.nf4_storage import NF4Storage
from shardwise.states.storage.quantised_storage import QuantisedStorage

BLOCK = 4096
"""Number of elements in a block of a large tensor. The sums of an fp32 tensor need 1/2048
of its memory."""

LARGE = 1 << 18
"""Tensors of at least this many bytes have blocks of BLOCK elements. Smaller ones have blocks of
ALIGNMENT elements, and no such block spans two parameters."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, eq=False)
class Piece:
    """Memory that holds elements of one state on this rank.

    Args:
        kind: PARAMETER, OPTIMIZER, AVERAGE or BUFFER.
        flat: The elements: (numel,).
        names: The tensors in it, each as (name, first element, end).
        is_shard: True if only the ranks with the same shard hold these elements.
    """

    kind: str
    flat: Tensor
    names: Sequence[tuple[str, int, int]]
    is_shard: bool

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the elements of each tensor."""
        for name, first, end in self.names:
            yield name, self.flat[first:end]


def pieces_of(spec: SpecView, states: StatesView) -> list[Piece]:
    """Return the memory of all states that an engine holds on this rank.

    The order is the same on all ranks. States on disk are left out, because reading them would take
    longer than a step.
    """
    is_scattered = spec.placement.is_sharded("optimizer")
    found: list[Piece] = []
    for named, slots, own, storage in states.parameters.kept():
        names = _within(slots, own[0], own[1], [each.name for each in named])
        is_shard = spec.placement.is_sharded("parameters")
        if isinstance(storage, NF4Storage):
            found += _codes_and_scales(storage, names, PARAMETER, is_shard=is_shard)
        elif storage.memory is not None:
            found.append(Piece(PARAMETER, storage.loaded(), names, is_shard))
    names_of = [each.name for each in states.parameters.named]
    for index, interval in enumerate(states.optimizer.intervals):
        by_slot = [names_of[slot.parameter] for slot in interval.bucket.slots]
        names = _within(interval.bucket.slots, *interval.own, by_slot)
        if interval.master is not interval.target and interval.master.memory is not None:
            master = [(f"{name}.master", first, end) for name, first, end in names]
            found.append(Piece(OPTIMIZER, interval.master.loaded(), master, is_scattered))
        if states.averages is not None and states.averages.storages[index].memory is not None:
            average = states.averages.storages[index].loaded()
            found.append(Piece(AVERAGE, average, names, is_scattered))
        if interval.moments:
            for key, storage in interval.moments.items():
                if isinstance(storage, QuantisedStorage):  # otherwise it is on a disk
                    of_key = [(f"{name}.{key}", first, end) for name, first, end in names]
                    found += _codes_and_scales(storage, of_key, OPTIMIZER, is_shard=is_scattered)
            continue
        for segment, state in states.optimizer.state_of(index):
            for key, value in sorted(state.items()):
                if not isinstance(value, Tensor) or not can_be_taken(value):
                    continue
                flat = flat_view(value)
                if flat.numel() == segment.end - segment.first:
                    inside = [
                        (
                            f"{names_of[p.parameter]}.{key}",
                            p.start - segment.first,
                            p.end - segment.first,
                        )
                        for p in segment.pieces
                    ]
                else:
                    first = names_of[segment.pieces[0].parameter]
                    inside = [(f"{first}.{key}", 0, flat.numel())]
                found.append(Piece(OPTIMIZER, flat, inside, is_scattered))
    return found


def _codes_and_scales(
    storage: QuantisedStorage | NF4Storage,
    names: Sequence[tuple[str, int, int]],
    kind: str,
    *,
    is_shard: bool,
) -> Iterator[Piece]:
    """Yield the codes and the scales of a quantised state that holds the tensors `names`."""
    for what, values in (("codes", storage.codes), ("scales", storage.scales)):
        # Elements with a common code byte or scale. Tensors start at multiples of a scale's.
        share = storage.numel // max(1, values.numel())
        inside = [
            (f"{name} ({what})", first // share, -(-end // share)) for name, first, end in names
        ]
        yield Piece(kind, values, inside, is_shard)


def other_pieces(spec: SpecView, states: StatesView) -> list[Piece]:
    """Return the models' buffers, and the frozen parameters that are not sharded."""
    trained = {named.parameter for named in states.parameters.named}
    trained |= {named.parameter for bucket in states.parameters.frozen for named in bucket.named}
    found, seen = [], set[int]()
    for prefix, model in zip(spec.prefixes, spec.models, strict=True):
        for path, module in model.named_modules():
            for key, value in [*module._buffers.items(), *module._parameters.items()]:
                if value is None or id(value) in seen or value in trained:
                    continue
                seen.add(id(value))
                if can_be_taken(value) and value.numel():
                    name = ".".join(part for part in (prefix, path, key) if part)
                    kind = PARAMETER if isinstance(value, nn.Parameter) else BUFFER
                    flat = flat_view(value)
                    found.append(Piece(kind, flat, [(name, 0, flat.numel())], is_shard=False))
    return found


def _within(
    slots: Sequence[Slot], first: int, end: int, names: Sequence[str]
) -> list[tuple[str, int, int]]:
    """Return the parts of `slots` in elements [first, end), with offsets relative to `first`."""
    parts = []
    for slot, name in zip(slots, names, strict=True):
        low, high = max(slot.start, first), min(slot.end, end)
        if low < high:
            parts.append((name, low - first, high - first))
    return parts


def flat_view(value: Tensor) -> Tensor:
    """Return `value` flattened to (numel,): a view, unless its elements overlap in memory."""
    value = value.detach()
    if value.is_contiguous():
        return value.view(-1)
    try:
        # Dense in another order, such as channels_last.
        order = sorted(range(value.ndim), key=value.stride, reverse=True)
        return value.permute(order).view(-1)
    except RuntimeError:
        return value.reshape(-1)


def block_sums(flat: Tensor) -> Tensor:
    """Return the sum of the words in each block of `flat`: (blocks,) int64.

    A single flipped bit always changes the sum of its block.
    """
    integers = flat.view(_INTEGERS[flat.itemsize])
    length = block_length(flat)
    whole = integers.numel() // length * length
    rows = integers[:whole].view(-1, length)
    if flat.itemsize < 8 and length * flat.itemsize % 8 == 0 and flat.data_ptr() % 8 == 0:
        rows = rows.view(torch.int64)  # torch adds 64-bit integers several times faster
    sums = rows.sum(1, dtype=torch.int64)
    if whole == integers.numel():
        return sums
    return torch.cat([sums, integers[whole:].sum(dtype=torch.int64).reshape(1)])


def block_length(flat: Tensor) -> int:
    """Return the number of elements per block of `flat`."""
    return ALIGNMENT if flat.numel() * flat.itemsize < LARGE else BLOCK


@dataclass(frozen=True)
class _Seal:
    address: int
    version: int
    sums: Tensor


class MemorySeals:
    """Checksums of all states after an update. They are verified before the next update."""

    def __init__(self) -> None:
        self._seals: list[_Seal] = []
        self._changed: list[Tensor] = []

    def seal(self, pieces: Sequence[Piece]) -> None:
        """Store the checksums of `pieces`."""
        self._seals = [
            _Seal(piece.flat.data_ptr(), piece.flat._version, block_sums(piece.flat))
            for piece in pieces
        ]

    def open(self) -> None:
        """Discard the checksums, because code is about to change the states."""
        self._seals = []

    def check(self, step: int, rank: int, pieces: Sequence[Piece]) -> list[Finding]:
        """Return a finding for each piece that has changed since `seal`.

        Skips pieces that were moved, and pieces that were written to according to torch's counters.
        Waits for the device just once.
        """
        if len(self._seals) != len(pieces):
            return []
        compared, bad = [], []
        for piece, sealed in zip(pieces, self._seals, strict=True):
            if (piece.flat.data_ptr(), piece.flat._version) == (sealed.address, sealed.version):
                compared.append((piece, sealed.sums))
                bad.append((block_sums(piece.flat) != sealed.sums).any())
        if not bad or not any(torch.stack([flag.cpu() for flag in bad]).tolist()):
            return []
        found = []
        for piece, sums in compared:
            places = (block_sums(piece.flat) != sums).nonzero().flatten().tolist()
            if not places:
                continue
            length = block_length(piece.flat)
            spans = [(place * length, (place + 1) * length) for place in places]
            names = [
                name
                for name, first, end in piece.names
                if any(first < high and low < end for low, high in spans)
            ]
            # Padding between parameters is never read, so a change there changes no result.
            if names:
                evidence = "its memory changed between two updates, and no code has written to it"
                found.append(Finding(step, piece.kind, tuple(names), rank, evidence))
        return found
