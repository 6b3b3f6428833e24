"""Defines what every transport does: collectives over flat buffers, and their handles.

Solo is the group of one rank. GroupRanks says which ranks of the run a group has.
"""

from __future__ import annotations

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.comm.ordered_sums import PLAIN, Sum
from shardwise.errors import CollectiveError, UsageError
from shardwise.net import authentication
from shardwise.timeline.recorder import Launched
from shardwise.watch.status_server import StatusServer
from shardwise.watch.wait_graph import named

T = TypeVar("T")

Cuts = Sequence[int]
Counts = Sequence[Sequence[int]]

_PICKLE = "object {} of rank {}"
"""What a pickle is sealed for, so that nobody can send an earlier one again."""


class Handle:
    """A collective in flight.

    `wait()` returns when its result may be read, `reusable()` when the buffer may be written again:
    until then other ranks may still read it. Once is enough.
    """

    def __init__(
        self, finish: Callable[[], None] | None = None, advance: Callable[[], None] | None = None
    ) -> None:
        self._finish = finish
        self._advance = advance
        self._noted: Launched | None = None

    def noted(self, launched: Launched | None) -> Handle:
        """Note in the timeline when the result is there, if it is still to come; returns itself."""
        if self._finish is not None or self._advance is not None:
            self._noted = launched
        return self

    def advance(self) -> None:
        """Go on with what has come: sum it, or start the second half of the collective.

        Waits for messages where the transport cannot look without waiting.
        """
        advance, self._advance = self._advance, None
        if advance is not None:
            advance()

    def is_there(self) -> bool:
        """Whether `wait` would return at once, as far as can be told without waiting."""
        return self._finish is None and self._advance is None

    def wait(self) -> None:
        """Return when the result is in the buffer. Raises PeerLost when another rank is gone."""
        self.advance()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        if self._noted is not None:
            self._noted.done()

    def reusable(self) -> None:
        """Return when no other rank reads this rank's buffer any more."""
        self.wait()


class Collectives(ABC):
    """A group of ranks and its collectives, over flat contiguous buffers."""

    name: str
    copies: int = 1
    """How many groups hold the same intervals: hosts, where each shards by itself."""

    sends_pieces = False
    """Whether pieces of a buffer are sent from where they lie, rather than moved into it first."""

    sums_onto = False
    """Whether `reduce_scatter_onto` saves moving this rank's own values."""

    looks = False
    """Whether a handle's `advance` only looks at what has come, without waiting for the rest."""

    comes_and_goes = False
    """Whether ranks may leave the group, and come back: elastic islands."""

    _gathered = 0
    """How often the group has called `gather_objects`."""

    in_one_order = False
    """Whether all calls have to be made in one order on all ranks, those that a handle's `advance`
    makes included."""

    @property
    def places(self) -> Sequence[int]:
        """By rank the number that users know it by, which stays where others leave the group."""
        return range(self.size)

    @property
    def knows_tree(self) -> bool:
        """Whether this group can sum in the tree of the exact mode."""
        return True

    def __init__(self, rank: int, size: int, status_server: StatusServer | None = None) -> None:
        """`status_server` is the one of this process, alike in all of its groups."""
        self.rank = rank
        self.size = size
        self.status_server = status_server or StatusServer(rank, size)

    @property
    def is_outside(self) -> bool:
        """Whether the others go on without this rank, for now."""
        return False

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the group."""
        return self.rank == 0

    def steadily(self, work: Callable[[], T]) -> T:
        """What `work` returns, which makes several collectives over the same ranks: begun again
        where ranks have left meanwhile. All ranks do it alike."""
        return work()

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, forkable: bool = False
    ) -> Tensor:
        """Allocate a zeroed flat buffer in memory that this transport moves well.

        `forkable`: user code sees it, so a forked child must find a copy of its values.
        """
        del forkable  # memory of torch's always is
        return torch.zeros(numel, dtype=dtype, device=device)

    def common(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Allocate one zeroed flat buffer that all ranks of the group map. Collective.

        What one rank writes the others see. None where ranks share no memory.
        """
        del numel, dtype, device
        return None

    @abstractmethod
    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        """Sum `buffer` over the ranks, in place and alike on all."""

    @abstractmethod
    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        """Sum `buffer` over the ranks; each rank gets its own interval's sum.

        It goes `into` a tensor of the interval's length, or over the interval itself; the rest of
        `buffer` is left.
        """

    def all_reduce_pieces(
        self, pieces: Sequence[Tensor], buffer: Tensor, how: Sum = PLAIN
    ) -> Handle:
        """`all_reduce` of what flat `pieces`, cut alike on all ranks, hold one after the other.

        The sum comes to `buffer`, which has their length in all; some may be its own parts. They
        must stay as they are until the handle has been waited for.
        """
        join_pieces(pieces, buffer)
        return self.all_reduce(buffer, how)

    def reduce_scatter_pieces(
        self,
        pieces: Sequence[Tensor],
        buffer: Tensor,
        cuts: Cuts,
        how: Sum = PLAIN,
        *,
        into: Tensor | None = None,
    ) -> Handle:
        """`reduce_scatter` of `pieces`, which are as those of `all_reduce_pieces`."""
        join_pieces(pieces, buffer)
        return self.reduce_scatter(buffer, cuts, how, into=into)

    def reduce_scatter_onto(
        self, own: Tensor, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN
    ) -> Handle:
        """`reduce_scatter` into `own`, which holds this rank's values of its own interval before.

        `buffer` may have anything in that interval.
        """
        buffer[cuts[self.rank] : cuts[self.rank + 1]] = own
        return self.reduce_scatter(buffer, cuts, how, into=own)

    @abstractmethod
    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        """Send each rank's own interval of `buffer` into the same place on all ranks."""

    @abstractmethod
    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        """Copy `buffer` of rank `source` over that of every rank."""

    def all_to_all(self, sent: Tensor, counts: Counts, received: Tensor) -> Handle:
        """Send each rank its part of `sent`, and get this rank's part of theirs.

        `counts[a][b]` elements go from rank a to rank b, alike on all ranks; both buffers are in
        the order of the ranks. Here all get everything: transports that know better say so.
        """
        for source in range(self.size):
            whole = sent if source == self.rank else sent.new_empty(sum(counts[source]))
            self.broadcast(whole, source).reusable()
            theirs = slice_of(counts[source], self.rank)
            received[slice_of(column(counts, self.rank), source)] = whole[theirs]
        return Handle()

    @abstractmethod
    def gather_rows(self, row: Tensor) -> Tensor:
        """Stack one small vector of each rank: (k,) on every rank becomes (size, k). Blocks."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has come."""

    @abstractmethod
    def second_group(self) -> Collectives:
        """The same ranks over channels of their own, for calls whose order against the others
        may differ from rank to rank (collectives inside forward and backward)."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """The group of `groups` that this rank is in; a rank in none stands alone.

        `groups` are disjoint lists of ranks, alike on all ranks. Raises UsageError otherwise.
        """

    def gather_objects(self, value: Any) -> list[Any]:
        """A list of every rank's `value` (picklable), in rank order, on all ranks. Blocks.

        Raises CollectiveError for what was not sent by a rank of this run: a pickle can run code.
        """
        self._gathered += 1
        purpose = _PICKLE.format(self._gathered, self.rank)
        data = authentication.sealed(self.status_server.secret, purpose, pickle.dumps(value))
        return [pickle.loads(self._unsealed(r, d)) for r, d in enumerate(self._gather_bytes(data))]

    def gather_plain(self, value: Any) -> list[Any]:
        """`gather_objects` for JSON values, which can run no code, whoever sends them."""
        return [json.loads(data) for data in self._gather_bytes(json.dumps(value).encode())]

    def _unsealed(self, rank: int, data: bytes) -> bytes:
        purpose = _PICKLE.format(self._gathered, rank)
        try:
            return authentication.unsealed(self.status_server.secret, purpose, data)
        except authentication.Forged as error:
            raise CollectiveError(
                f"What came for rank {rank} of {self.size} is not of this run ({error}) Somebody "
                "else has reached the ports of its ranks: see docs/security.md."
            ) from None

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        device = self.small_device
        lengths = self.gather_rows(torch.tensor([data.numel()], dtype=torch.float64, device=device))
        counts = [int(length) for length in self.read(lengths).flatten().tolist()]
        cuts = [sum(counts[:rank]) for rank in range(self.size + 1)]
        buffer = torch.zeros(cuts[-1], dtype=torch.uint8, device=device)
        buffer[cuts[self.rank] : cuts[self.rank + 1]] = data.to(device)
        self.all_gather(buffer, cuts).wait()
        whole = self.read(buffer).numpy().tobytes()
        return [whole[a:b] for a, b in pairwise(cuts)]

    def read(self, rows: Tensor) -> Tensor:
        """`rows`, which a collective fills, on the CPU. Blocks.

        A hang report tells of that wait. On an accelerator, where the collective itself does not
        block, it is the wait for all that the present stream was given before, too. `rows` must
        be what that stream has made, or has waited for.
        """
        return rows.cpu()

    @property
    def small_device(self) -> torch.device:
        """Where a small vector for `gather_rows` lives."""
        return torch.device("cpu")

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""


def column(counts: Counts, rank: int) -> list[int]:
    """By source, the number of elements that `rank` receives."""
    return [row[rank] for row in counts]


def slice_of(lengths: Sequence[int], place: int) -> slice:
    """Where the part number `place` lies of parts of these `lengths`."""
    start = sum(lengths[:place])
    return slice(start, start + lengths[place])


class Solo(Collectives):
    """A group of one rank: every collective is already done."""

    name = "none"
    sums_onto = True

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def common(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.allocate(numel, dtype, device)

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        how.scaled(buffer)
        return Handle()

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        how.scaled(buffer if into is None else into.copy_(buffer))
        return Handle()

    def reduce_scatter_onto(
        self, own: Tensor, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN
    ) -> Handle:
        how.scaled(own)
        return Handle()

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        return Handle()

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        return Handle()

    def gather_rows(self, row: Tensor) -> Tensor:
        return row.unsqueeze(0)

    def barrier(self) -> None:
        return

    def second_group(self) -> Collectives:
        return self

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        check_groups(groups, self.size)
        return self

    def close(self) -> None:
        return


def check_groups(groups: Sequence[Sequence[int]], size: int) -> None:
    """Raise UsageError for a rank that does not exist, or is in two groups."""
    seen: set[int] = set()
    for rank in (rank for group in groups for rank in group):
        if not 0 <= rank < size:
            raise UsageError(f"Rank {rank} in {groups} does not exist: there are {size} ranks.")
        if rank in seen:
            raise UsageError(f"Rank {rank} is twice in {groups}: each rank belongs to one group.")
        seen.add(rank)


@dataclass(frozen=True)
class GroupRanks:
    """Which ranks of the run a group has, by their place in it, for messages.

    `size` is the number of ranks of the run. `first` is the rank that torch knows as 0, where those
    that torch knows are a part of the run: an elastic island.
    """

    ranks: tuple[int, ...]
    size: int
    first: int = 0

    @classmethod
    def whole(cls, size: int) -> GroupRanks:
        """All ranks of a run."""
        return cls(tuple(range(size)), size)

    def part(self, places: Sequence[int]) -> GroupRanks:
        """The ranks of a group of some of these places."""
        return GroupRanks(tuple(self.ranks[place] for place in places), self.size, self.first)

    @property
    def of_torch(self) -> list[int]:
        """The same ranks, as torch numbers them."""
        return [rank - self.first for rank in self.ranks]

    def speaker(self, place: int) -> str:
        """How a message about the rank at a place begins: "Rank 3 of 4"."""
        return f"Rank {self.ranks[place]} of {self.size}"

    def named(self, places: Iterable[int]) -> str:
        """List places in words: "rank 2", or "ranks 0, 2"."""
        return named(self.ranks[place] for place in places)


def join_pieces(pieces: Sequence[Tensor], buffer: Tensor) -> None:
    """Move `pieces` into `buffer`, but for those that lie there."""
    start = 0
    for piece in pieces:
        place = buffer[start : start + piece.numel()]
        if piece.data_ptr() != place.data_ptr():
            place.copy_(piece)
        start += piece.numel()
