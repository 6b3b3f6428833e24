"""Compares tensors that several ranks hold, and finds the rank that differs.

In one small collective, each rank sends one number per group of copies. The ranks send a checksum
of each tensor only if these numbers differ. A rank that differs from the majority is wrong.
If there is no majority, as with two ranks, the guard reports the tensor without naming a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from shardwise.guard.findings import Finding
from shardwise.guard.memory import Piece
from shardwise.layout import fingerprints

Checksums = Mapping[str, list[int]]
"""Kind and name of a tensor, joined by a tab -> number of elements, and two checksums."""


def digest(pieces: Sequence[Piece], *, is_shard: bool) -> float | Tensor:
    """Return a number below 2^52 that depends on every bit of the selected pieces.

    The selected pieces are those whose attribute `is_shard` equals the argument `is_shard`.
    """
    flats = [piece.flat for piece in pieces if piece.is_shard == is_shard]
    return fingerprints.checksum(flats) if flats else 0.0


def checksums(pieces: Sequence[Piece], *, is_shard: bool) -> dict[str, list[int]]:
    """Return the checksums of each tensor in those pieces whose `is_shard` has the given value."""
    found: dict[str, list[int]] = {}
    for piece in pieces:
        if piece.is_shard == is_shard:
            for name, values in piece.parts():
                # A tensor may be in several pieces, if an optimizer holds parts of it.
                numel, total, placed = found.get(f"{piece.kind}\t{name}", [0, 0, 0])
                first, second = fingerprints.sums_of(values)
                found[f"{piece.kind}\t{name}"] = [
                    numel + values.numel(),
                    (total + first) % fingerprints.WORD,
                    (placed + second) % fingerprints.WORD,
                ]
    return found


def differences(
    step: int, by_rank: Mapping[int, Checksums], suspects: Sequence[int] = ()
) -> list[Finding]:
    """Return a finding for each tensor and rank that differs from the majority.

    Args:
        step: Number of the step.
        by_rank: The checksums of each rank.
        suspects: Ranks that are known to be wrong. If there is no majority, they are reported.
    """
    found: dict[tuple[str, int | None, str], list[str]] = {}
    ranks = sorted(by_rank)
    for key in by_rank[ranks[0]]:
        values = [by_rank[rank].get(key) for rank in ranks]
        # Tensors of different lengths are not copies (a cache that grows with the rank's batches).
        if any(value is None or value[0] != values[0][0] for value in values):  # type: ignore[index]
            continue
        counted = Counter(tuple(value) for value in values if value is not None)
        if len(counted) == 1:
            continue
        kind, name = key.split("\t")
        common, votes = counted.most_common(1)[0]
        wrong: list[int | None] = [
            rank for rank, value in zip(ranks, values, strict=True) if tuple(value or ()) != common
        ]
        evidence = f"it differs from the copies on {votes} of {len(ranks)} ranks"
        if votes * 2 <= len(ranks):
            wrong = [rank for rank in ranks if rank in suspects] or [None]
            evidence = f"its copies differ ({len(counted)} values on {len(ranks)} ranks)"
        for rank in wrong:
            found.setdefault((kind, rank, evidence), []).append(name)
    return [
        Finding(step, kind, tuple(names), rank, evidence)
        for (kind, rank, evidence), names in found.items()
    ]
