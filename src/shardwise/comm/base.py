"""The interface of all transports: collectives over flat buffers, and their handles.

A new transport is a subclass of `Collectives` and a row of `TRANSPORTS` in connect.py, which
chooses the transport of a process.

    must define     all_reduce  reduce_scatter  all_gather  broadcast    start, return a Handle
                    split                                                makes smaller groups
                    close
    has a default   all_to_all  gather_rows  barrier  second_group       slower than your own
                    allocate  common                                     the transport's own memory
                    *_pieces  reduce_scatter_onto                        save a pass over memory
    flags           sends_pieces  sums_onto  looks  in_one_order         what callers should know

Rules that callers rely on:

- Every rank makes the same calls in the same order, from one thread, and buffers are contiguous.
- A call may return before its result has arrived; `Handle.wait` blocks until it has. Callers may
  wait for handles in any order, so a wait must not stop the rank's other calls.
- Sums do not depend on the order of arrival: use `sum_in_rank_order`, which also knows the tree of
  the exact mode.
- A wait for a rank that has ended raises PeerLost, and a wait beyond the timeout CollectiveError.
  Both name the ranks.

`Solo`, the group of one rank, is the shortest example; host_staged.py wraps another transport.
`tests/distributed/test_collectives.py` tests every verb: add the new name to its `TRANSPORTS`.
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
"""Purpose that seals a pickle: the number of the call and the rank."""


class Handle:
    """A collective in flight. Without arguments, a collective that is already done.

    `wait()` returns when the result may be read. `reusable()` returns when the buffer may be
    written again, because no other rank reads it any more. Calling either twice is harmless.

    Args:
        finish: Blocks until the result has arrived. Called once.
        advance: Starts the second half of a collective that has two. Called once, before `finish`.
    """

    def __init__(
        self, finish: Callable[[], None] | None = None, advance: Callable[[], None] | None = None
    ) -> None:
        self._finish = finish
        self._advance = advance
        self._noted: Launched | None = None

    def noted(self, launched: Launched | None) -> Handle:
        """Record the end of this call in the timeline, unless it is already done. Returns self."""
        if self._finish is not None or self._advance is not None:
            self._noted = launched
        return self

    def advance(self) -> None:
        """Sum the messages that have arrived, or start the second half of the collective.

        Blocks until the messages have arrived if the transport cannot poll (see `looks`).
        """
        # Cleared first: an error in `advance` must not make the next wait send everything again.
        advance, self._advance = self._advance, None
        if advance is not None:
            advance()

    def is_there(self) -> bool:
        """Return True if `wait` is known to return at once; False if it might block."""
        return self._finish is None and self._advance is None

    def wait(self) -> None:
        """Block until the result is in the buffer. Raises PeerLost if another rank is gone."""
        self.advance()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        if self._noted is not None:
            self._noted.done()

    def reusable(self) -> None:
        """Block until no other rank reads this rank's buffer any more."""
        self.wait()


class Collectives(ABC):
    """A group of ranks and its collectives, over flat contiguous buffers."""

    name: str
    copies: int = 1
    """Number of groups that hold the same intervals: the hosts, with `--shard-within host`."""

    sends_pieces = False
    """Whether `*_pieces` send the tensors directly, without a copy into the buffer."""

    sums_onto = False
    """Whether `reduce_scatter_onto` avoids a copy of this rank's own values."""

    looks = False
    """Whether `Handle.advance` polls. If False, it blocks until the other ranks have sent."""

    has_changing_ranks = False
    """Whether ranks may leave the group and return."""

    in_one_order = False
    """Whether ranks must also call `Handle.advance` in one order, because it makes further calls
    that the transport matches by their order (as NCCL does)."""

    _gathered = 0
    """Number of calls of `gather_objects`."""

    @property
    def places(self) -> Sequence[int]:
        """The number of each rank in messages. It does not change when other ranks leave."""
        return range(self.size)

    @property
    def knows_tree(self) -> bool:
        """Whether this group can sum in the tree of the exact mode."""
        return True

    def __init__(self, rank: int, size: int, status_server: StatusServer | None = None) -> None:
        """Make a group of `size` ranks; `status_server` is shared by all groups of a process."""
        self.rank = rank
        self.size = size
        self.status_server = status_server or StatusServer(rank, size)

    @property
    def is_outside(self) -> bool:
        """Whether the other ranks currently train without this one."""
        return False

    def watch_members(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever ranks have left or rejoined the group. A fixed one never does."""
        return

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the group."""
        return self.rank == 0

    def steadily(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which makes several collectives of the same ranks.

        If ranks leave meanwhile, all others run `work` again.
        """
        return work()

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, forkable: bool = False
    ) -> Tensor:
        """Allocate a zeroed flat buffer in memory that this transport sends without a copy.

        `forkable`: user code sees the tensor, so a forked child must find a copy of its values.
        """
        del forkable  # a forked child always sees a copy of torch's own memory
        return torch.zeros(numel, dtype=dtype, device=device)

    def common(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Allocate one zeroed flat buffer that all ranks of the group map. Collective.

        All ranks see what one rank writes. Returns None if the ranks share no memory.
        """
        del numel, dtype, device
        return None

    @abstractmethod
    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        """Sum `buffer` over the ranks in place, to the same bits on every rank.

        Args:
            buffer: Flat and contiguous, of the same length and dtype on every rank.
            how: Accumulation dtype, order and scale of the sum.
        """

    @abstractmethod
    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        """Sum `buffer` over the ranks and keep this rank's interval of the sum.

        Args:
            buffer: Flat and contiguous. Only this rank's interval may change, and only if there is
                no `into`.
            cuts: size + 1 ascending offsets; rank r owns `buffer[cuts[r] : cuts[r + 1]]`, which may
                be empty.
            how: Accumulation dtype, order and scale of the sum.
            into: Tensor of the interval's length that receives the sum. Default: the interval.
        """

    def all_reduce_pieces(
        self, pieces: Sequence[Tensor], buffer: Tensor, how: Sum = PLAIN
    ) -> Handle:
        """Run `all_reduce` on the concatenation of flat `pieces`, with the same cuts on all ranks.

        The sum goes to `buffer`, which has the total length. Pieces may be views of `buffer`. The
        caller must not change them before it has waited for the handle.
        """
        # Transports with `sends_pieces` override this and save the pass over memory.
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
        """Run `reduce_scatter` on the concatenation of `pieces`; see `all_reduce_pieces`."""
        join_pieces(pieces, buffer)
        return self.reduce_scatter(buffer, cuts, how, into=into)

    def reduce_scatter_onto(
        self, own: Tensor, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN
    ) -> Handle:
        """Run `reduce_scatter` into `own`, which holds this rank's values of the interval it owns.

        The content of that interval in `buffer` is ignored.
        """
        interval(buffer, cuts, self.rank).copy_(own)
        return self.reduce_scatter(buffer, cuts, how, into=own)

    @abstractmethod
    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        """Copy each rank's own interval of `buffer` to the same interval on all ranks."""

    @abstractmethod
    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        """Copy `buffer` of rank `source` to every rank."""

    def all_to_all(self, sent: Tensor, counts: Counts, received: Tensor) -> Handle:
        """Send each rank its part of `sent`, and receive this rank's parts into `received`.

        Args:
            sent: Flat, (sum(counts[rank]),): the parts in order of the receiving ranks.
            counts: (size, size), equal on all ranks: `counts[a][b]` elements go from rank a to b.
            received: Flat, (sum over a of counts[a][rank],), in order of the sending ranks.
        """
        # By broadcasts, so every rank receives everything: correct on any transport, but slow.
        # Transports that can send to single ranks override this.
        for source in range(self.size):
            whole = sent if source == self.rank else sent.new_empty(sum(counts[source]))
            self.broadcast(whole, source).reusable()
            theirs = slice_of(counts[source], self.rank)
            received[slice_of(column(counts, self.rank), source)] = whole[theirs]
        return Handle()

    def gather_rows(self, row: Tensor) -> Tensor:
        """Stack one small vector of each rank: (k,) on every rank becomes (size, k). Blocks."""
        return gathered_rows(self, row, self.all_gather)

    def barrier(self) -> None:
        """Block until every rank has called this."""
        # With `read`, because on an accelerator the call alone does not block the host.
        self.read(self.gather_rows(torch.zeros(1, device=self.small_device)))

    def second_group(self) -> Collectives:
        """Return a group of the same ranks with separate channels. Collective.

        The order of its calls relative to the calls of this group may differ between ranks
        (collectives inside forward and backward).
        """
        return self.split([range(self.size)])

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """Return the group among `groups` that contains this rank, `Solo` if none does. Collective.

        `groups` are disjoint lists of ranks, the same on all ranks. Raises UsageError otherwise
        (`check_groups`). The new group counts its ranks from 0, in ascending order.
        """

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the list of every rank's `value` (picklable), in rank order. Blocks.

        Raises CollectiveError if a rank of another run sent one: a pickle can run code.
        """
        # The number of the call is part of the purpose, so nobody can replay an earlier message.
        self._gathered += 1
        purpose = _PICKLE.format(self._gathered, self.rank)
        data = authentication.sealed(self.status_server.secret, purpose, pickle.dumps(value))
        return [pickle.loads(self._unsealed(r, d)) for r, d in enumerate(self._gather_bytes(data))]

    def gather_plain(self, value: Any) -> list[Any]:
        """Return every rank's JSON `value`. Needs no secret: JSON can run no code."""
        return [json.loads(data) for data in self._gather_bytes(json.dumps(value).encode())]

    def _unsealed(self, rank: int, data: bytes) -> bytes:
        purpose = _PICKLE.format(self._gathered, rank)
        try:
            return authentication.unsealed(self.status_server.secret, purpose, data)
        except authentication.Forged as error:
            raise CollectiveError(
                f"A message for rank {rank} of {self.size} is not from this run ({error}) Another "
                "process has reached the ports of its ranks: see docs/security.md."
            ) from None

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        # Lengths first, because receivers must allocate. They are float64 because every transport
        # gathers rows of floats. They are exact up to 2**53 bytes.
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
        """Copy `rows`, the result of a collective, to the CPU. Blocks.

        A hang report names this wait. On an accelerator the collective itself does not block the
        host, so this waits for everything that was queued on the current stream before. That
        stream must have made `rows`, or have waited for it.
        """
        return rows.cpu()

    @property
    def small_device(self) -> torch.device:
        """Device of the small vectors that `gather_rows` takes."""
        return torch.device("cpu")

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""


def column(counts: Counts, rank: int) -> list[int]:
    """Return the number of elements that `rank` receives from each rank."""
    return [row[rank] for row in counts]


def slice_of(lengths: Sequence[int], place: int) -> slice:
    """Return the slice of part number `place` in a buffer of consecutive parts."""
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
        # One rank owns the whole buffer. Its scale still counts: the engine scales in the sum.
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


def interval(buffer: Tensor, cuts: Cuts, rank: int) -> Tensor:
    """Return the view of `buffer` that `rank` owns."""
    return buffer[cuts[rank] : cuts[rank + 1]]


def gathered_rows(
    group: Collectives, row: Tensor, gather: Callable[[Tensor, Cuts], Handle]
) -> Tensor:
    """Gather one vector of each rank with the all-gather `gather`: (k,) becomes (size, k)."""
    rows = row.new_empty((group.size, row.numel()))
    rows[group.rank] = row
    gather(rows.view(-1), [rank * row.numel() for rank in range(group.size + 1)]).wait()
    return rows


def check_groups(groups: Sequence[Sequence[int]], size: int) -> None:
    """Raise UsageError if a rank does not exist or is in two groups."""
    seen: set[int] = set()
    for rank in (rank for group in groups for rank in group):
        if not 0 <= rank < size:
            raise UsageError(f"Rank {rank} in {groups} does not exist: there are {size} ranks.")
        if rank in seen:
            raise UsageError(
                f"Rank {rank} is twice in {groups}: list each rank in at most one group."
            )
        seen.add(rank)


@dataclass(frozen=True)
class GroupRanks:
    """The ranks of the run that form a group, in the order of their places in it.

    `size` is the number of ranks of the run. `first` is the rank that torch knows as 0, if torch
    knows a part of the run only.
    """

    ranks: tuple[int, ...]
    size: int
    first: int = 0

    @classmethod
    def whole(cls, size: int) -> GroupRanks:
        """Return the group of all ranks of a run."""
        return cls(tuple(range(size)), size)

    def part(self, places: Sequence[int]) -> GroupRanks:
        """Return the group of the ranks at some of these places."""
        return GroupRanks(tuple(self.ranks[place] for place in places), self.size, self.first)

    @property
    def of_torch(self) -> list[int]:
        """The numbers by which torch knows these ranks."""
        return [rank - self.first for rank in self.ranks]

    def speaker(self, place: int) -> str:
        """Return the beginning of a message about the rank at a place: "Rank 3 of 4"."""
        return f"Rank {self.ranks[place]} of {self.size}"

    def named(self, places: Iterable[int]) -> str:
        """List places in words: "rank 2", or "ranks 0, 2"."""
        return named(self.ranks[place] for place in places)


def join_pieces(pieces: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy `pieces` into `buffer`, except those that are already there."""
    start = 0
    for piece in pieces:
        place = buffer[start : start + piece.numel()]
        # Compare addresses: small gradients are accumulated in the buffer itself.
        if piece.data_ptr() != place.data_ptr():
            place.copy_(piece)
        start += piece.numel()
