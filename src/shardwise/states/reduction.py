"""Gradients on the way: from a rank's flat buffer to the sum over all ranks.

A buffer that is not a bucket's own for good is borrowed from a pool, and goes back when its sum
has been added to where the bucket's sums rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.collectives import Collectives, Handle
from shardwise.layout import Bucket
from shardwise.model.precision import NARROW
from shardwise.placement import Placement

IN_FLIGHT = 2
"""Borrowed buffers that may be on their way at once; the oldest is waited for beyond that."""

LAG = 1
"""How many buckets later what has come in is summed (and an all-reduce's second half starts): by
then it has most likely come from all ranks, so that nobody waits."""


@dataclass(eq=False)
class Rest:
    """Where a bucket's gradient rests on this rank.

    `own` are the elements whose sum this rank needs: its interval, or all of them. `kept` is the
    whole buffer where gradients are replicated. `reduced` has the elements `own`: a sum of this
    step is `awaited` once launched, and there once `settled`.
    """

    index: int
    bucket: Bucket
    own: tuple[int, int]
    kept: Tensor | None
    reduced: Tensor
    dtype: torch.dtype
    awaited: bool = False
    settled: bool = False


@dataclass(frozen=True, eq=False)
class _Flying:
    """A buffer on its way; `arrived` when its sum goes to where it rests without a copy."""

    rest: Rest
    buffer: Tensor
    handle: Handle
    arrived: bool


class Reduction:
    """The collectives of a step's gradients: all-reduce, or reduce-scatter where the optimizer
    state is sharded. Every rank launches the same buckets in the same order."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        flats: Sequence[Tensor],
        placement: Placement,
        group: Collectives,
        *,
        exact_sum: bool,
    ) -> None:
        self._group = group
        self._exact_sum = exact_sum
        self._scatter = placement.is_sharded("optimizer")
        self._flight: deque[_Flying] = deque()
        self._pool: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        sharded = placement.is_sharded("gradients")
        self.rests = [
            self._rest(index, bucket, flat, sharded)
            for index, (bucket, flat) in enumerate(zip(buckets, flats, strict=True))
        ]

    def _rest(self, index: int, bucket: Bucket, flat: Tensor, sharded: bool) -> Rest:
        own = bucket.interval(self._group.rank) if self._scatter else (0, bucket.numel)
        length = own[1] - own[0] if sharded else bucket.numel
        memory = self._group.allocate(length, flat.dtype, flat.device)
        if sharded:
            return Rest(index, bucket, own, None, memory, flat.dtype)
        return Rest(index, bucket, own, memory, memory[own[0] : own[1]], flat.dtype)

    def launch(self, rest: Rest, buffer: Tensor) -> None:
        """Start to reduce `buffer`, a bucket's gradients of this rank."""
        # The first sum of a step goes straight to where it rests.
        into = rest.reduced if buffer is not rest.kept and not rest.awaited else None
        if self._scatter:
            handle = self._group.reduce_scatter(
                buffer, rest.bucket.cuts, into=into, exact_sum=self._exact_sum
            )
        else:
            handle = self._group.all_reduce(buffer, exact_sum=self._exact_sum)
        rest.awaited = True
        self._flight.append(_Flying(rest, buffer, handle, into is not None and self._scatter))
        if len(self._flight) > LAG:
            self._flight[-1 - LAG].handle.advance()

    def drain(self) -> Iterator[Rest]:
        """Wait for everything that was launched; yields each bucket when its sum has come."""
        for flying in self._flight:
            flying.handle.advance()
        while self._flight:
            yield self._settle_oldest()

    def _settle_oldest(self) -> Rest:
        flying = self._flight.popleft()
        flying.handle.wait()
        rest, buffer = flying.rest, flying.buffer
        if buffer is not rest.kept:
            part = buffer[rest.own[0] : rest.own[1]]
            if rest.settled:
                rest.reduced.add_(part)
            elif not flying.arrived:
                rest.reduced.copy_(part)
            self.give_back(buffer)
        rest.settled = True
        return rest

    def widen(self) -> None:
        """Let 16-bit gradients rest in fp32 from the next step on, all ranks alike.

        Done once steps turn out to have several micro-batches: their sum would soon be too large
        for 16 bits to add another one to.
        """
        for rest in self.rests:
            if rest.reduced.dtype not in NARROW:
                continue
            if rest.kept is None:
                rest.reduced = rest.reduced.float()
            else:
                rest.kept = rest.kept.float()
                rest.reduced = rest.kept[rest.own[0] : rest.own[1]]

    def clear(self) -> None:
        """Forget the sums of this step."""
        for rest in self.rests:
            rest.awaited = rest.settled = False

    def borrow(self, rest: Rest) -> Tensor:
        """A buffer of the bucket's length, with anything in it."""
        while sum(f.buffer is not f.rest.kept for f in self._flight) >= IN_FLIGHT:
            self._settle_oldest()
        kind = (rest.dtype, rest.reduced.device)
        spare = self._pool.setdefault(kind, [])
        if not spare:
            alike = [r for r in self.rests if (r.dtype, r.reduced.device) == kind]
            spare.append(self._group.allocate(max(r.bucket.numel for r in alike), *kind))
        return spare.pop()[: rest.bucket.numel]

    def give_back(self, buffer: Tensor) -> None:
        """Return what `borrow` gave."""
        whole = buffer if buffer._base is None else buffer._base
        self._pool[(buffer.dtype, buffer.device)].append(whole)

    @property
    def state_bytes(self) -> int:
        """Bytes of gradient that this rank keeps between steps."""
        kept = (rest.kept if rest.kept is not None else rest.reduced for rest in self.rests)
        return sum(memory.numel() * memory.element_size() for memory in kept)
