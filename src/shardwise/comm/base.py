"""Interface of all transports: collectives over flat buffers, and their handles.

To add a transport, subclass `Collectives` and add an entry to `TRANSPORTS` in connect.py, which
chooses a process's transport.

    must define     all_reduce  reduce_scatter  all_gather  broadcast    launch, return a Handle
                    split                                                creates smaller groups
                    close
    has a default   all_to_all  gather_rows  barrier  second_group       override for speed
                    allocate  common                                     the transport's own memory
                    *_pieces  reduce_scatter_onto                        save a pass over memory
    flags           sends_pieces  sums_onto  looks  in_one_order         what callers should know

Rules that callers rely on:

- Every rank makes the same calls in the same order, from one thread, and buffers are contiguous.
- A call may return before its result has arrived; `Handle.wait` blocks until it has arrived.
  Callers may wait for handles in any order, so waiting must not block the rank's other calls.
- Sums do not depend on the order of arrival. Use `sum_in_rank_order`, which also implements the
  reduction tree of the exact mode.
- Waiting for a rank that has exited raises PeerLost, and waiting beyond the timeout raises
  CollectiveError. Both errors name the ranks.

`Solo`, the group of one rank, is the shortest example; host_staged.py wraps another transport.
`tests/distributed/test_collectives.py` tests every collective: add the new transport's name to its
`TRANSPORTS`.
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
"""Purpose string that authenticates a pickle: the number of the call, and the rank."""


class Handle:
    """Handle of a pending collective. A handle created without arguments is already complete.

    `wait()` returns once the result may be read. `reusable()` returns once the buffer may be
    overwritten, because no other rank reads it any more. Both may be called repeatedly.

    Args:
        finish: Blocks until the result has arrived. Called once.
        advance: Starts the second half of a collective that has two halves. Called once, before
            `finish`.
    """

    def __init__(
        self, finish: Callable[[], None] | None = None, advance: Callable[[], None] | None = None
    ) -> None:
        self._finish = finish
        self._advance = advance
        self._noted: Launched | None = None

    def noted(self, launched: Launched | None) -> Handle:
        """Record when this call completes in the timeline, unless it already has. Return self."""
        if self._finish is not None or self._advance is not None:
            self._noted = launched
        return self

    def advance(self) -> None:
        """Sum the messages that have arrived, or start the second half of the collective.

        If the transport cannot poll (see `Collectives.looks`), blocks until the messages have
        arrived.
        """
        # Clear it first, so that after an error in `advance` the next wait does not send everything
        # again.
        advance, self._advance = self._advance, None
        if advance is not None:
            advance()

    def is_there(self) -> bool:
        """Return True if `wait` would return immediately, or False if it might block."""
        return self._finish is None and self._advance is None

    def wait(self) -> None:
        """Block until the result is in the buffer. Raises PeerLost if another rank has exited."""
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
    """Number of groups that hold the same intervals.

    With `--shard-within host`, the number of hosts.
    """

    sends_pieces = False
    """True if the `*_pieces` methods send the tensors directly, without a copy into the buffer."""

    sums_onto = False
    """True if `reduce_scatter_onto` avoids copying this rank's own values."""

    looks = False
    """True if `Handle.advance` polls. If False, it blocks until the other ranks have sent."""

    has_changing_ranks = False
    """True if ranks may leave the group and return."""

    in_one_order = False
    """True if ranks must also call `Handle.advance` in the same order.

    This is the case if `advance` makes further calls that the transport matches by their order, as
    NCCL does.
    """

    spoils_buffers = False
    """True if a collective that is interrupted may leave any values in its buffers.

    Otherwise, each element has its old value, or the new one.
    """

    _gathered = 0
    """Number of calls to `gather_objects`."""

    @property
    def places(self) -> Sequence[int]:
        """Each rank's number in messages, which does not change when other ranks leave."""
        return range(self.size)

    @property
    def knows_tree(self) -> bool:
        """True if this group can sum in the reduction tree of the exact mode."""
        return True

    def __init__(self, rank: int, size: int, status_server: StatusServer | None = None) -> None:
        """Initialise a group of `size` ranks. All groups in a process share `status_server`."""
        self.rank = rank
        self.size = size
        self.status_server = status_server or StatusServer(rank, size)

    @property
    def is_outside(self) -> bool:
        """True if the other ranks currently train without this one."""
        return False

    def watch_members(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever ranks leave or rejoin the group.

        No-op for a group whose ranks are fixed.
        """
        return

    @property
    def leads(self) -> bool:
        """True if this rank prints messages for the group."""
        return self.rank == 0

    def steadily(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs several collectives on the same ranks.

        If ranks leave during `work`, all remaining ranks run it again.
        """
        return work()

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, forkable: bool = False
    ) -> Tensor:
        """Allocate a zeroed flat buffer in memory that this transport sends without a copy.

        If `forkable` is true, user code sees the tensor, so a forked child must find a copy of its
        values.
        """
        del forkable  # a forked child always sees a copy of torch's own memory
        return torch.zeros(numel, dtype=dtype, device=device)

    def common(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Allocate one zeroed flat buffer that all ranks of the group map. Collective.

        Every rank sees the writes of all other ranks. Returns None if the ranks share no memory.
        """
        del numel, dtype, device
        return None

    @abstractmethod
    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        """Sum `buffer` across ranks in place. The result is bit-identical on every rank.

        Args:
            buffer: Flat and contiguous, of the same length and dtype on every rank.
            how: Accumulation dtype, order and scale of the sum.
        """

    @abstractmethod
    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        """Sum `buffer` across ranks and store this rank's interval of the sum.

        Args:
            buffer: Flat and contiguous. Only this rank's interval may change, and only if `into` is
                None.
            cuts: size + 1 ascending offsets; rank r owns `buffer[cuts[r] : cuts[r + 1]]`, which may
                be empty.
            how: Accumulation dtype, order and scale of the sum.
            into: Tensor of the interval's length that receives the sum. Default: the interval
                itself.
        """

    def all_reduce_pieces(
        self, pieces: Sequence[Tensor], buffer: Tensor, how: Sum = PLAIN
    ) -> Handle:
        """Run `all_reduce` on the concatenation of flat `pieces`, with the same cuts on all ranks.

        The sum is written to `buffer`, whose length is the total length of `pieces`. Pieces may be
        views of `buffer`. The caller must not change them before it has waited for the handle.
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
        """Run `reduce_scatter` into `own`, which already holds this rank's values for its interval.

        The contents of that interval in `buffer` are ignored.
        """
        interval(buffer, cuts, self.rank).copy_(own)
        return self.reduce_scatter(buffer, cuts, how, into=own)

    @abstractmethod
    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        """Copy each rank's interval of `buffer` to the same interval on all ranks."""

    def all_gather_others(self, buffer: Tensor, cuts: Cuts, held: int) -> Handle:
        """Run `all_gather` on ranks that already hold the interval of rank `held`.

        `held` may differ between ranks. Transports that read from single ranks skip this interval.
        """
        return self.all_gather(buffer, cuts)

    @abstractmethod
    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        """Copy `buffer` from rank `source` to every rank."""

    def all_to_all(self, sent: Tensor, counts: Counts, received: Tensor) -> Handle:
        """Send each rank its part of `sent`, and receive this rank's parts into `received`.

        Args:
            sent: Flat, (sum(counts[rank]),). The parts are in the order of the receiving ranks.
            counts: (size, size), identical on all ranks. Rank a sends `counts[a][b]` elements to
                rank b.
            received: Flat, (sum over a of counts[a][rank],), in the order of the sending ranks.
        """
        # Implemented with broadcasts, so every rank receives everything. This works on any
        # transport, but it is slow. Transports that can send to single ranks override it.
        for source in range(self.size):
            whole = sent if source == self.rank else sent.new_empty(sum(counts[source]))
            self.broadcast(whole, source).reusable()
            theirs = slice_of(counts[source], self.rank)
            received[slice_of(column(counts, self.rank), source)] = whole[theirs]
        return Handle()

    def gather_rows(self, row: Tensor) -> Tensor:
        """Stack a small vector from every rank: (k,) on each rank becomes (size, k). Blocks."""
        return gathered_rows(self, row, self.all_gather)

    def barrier(self) -> None:
        """Block until every rank has called this."""
        # Use `read`, because on an accelerator the collective does not block the host.
        self.read(self.gather_rows(torch.zeros(1, device=self.small_device)))

    def settle(self) -> None:  # noqa: B027 (nothing to do where calls advance by themselves)
        """Advance all launched calls until no other rank needs this one to complete them.

        Call it before a collective of another library, such as torch.distributed. A rank that waits
        there does not advance its calls, for which another rank may wait in a backward pass.
        """

    def second_group(self) -> Collectives:
        """Return a group of the same ranks with separate channels. Collective.

        Each rank may interleave calls on the two groups differently. The second group is used for
        collectives in forward and backward passes.
        """
        return self.split([range(self.size)])

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """Return the group in `groups` that contains this rank, or `Solo` if none does. Collective.

        `groups` are disjoint lists of ranks, identical on all ranks. If they are not valid,
        `check_groups` raises UsageError. Ranks in the new group are numbered from 0, in ascending
        order.
        """

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value` (picklable), in rank order. Blocks.

        Raises CollectiveError if a value comes from a rank of a different run, because unpickling
        it could run code.
        """
        # The number of the call is part of the purpose, so an earlier message cannot be replayed.
        self._gathered += 1
        purpose = _PICKLE.format(self._gathered, self.rank)
        data = authentication.sealed(self.status_server.secret, purpose, pickle.dumps(value))
        return [pickle.loads(self._unsealed(r, d)) for r, d in enumerate(self._gather_bytes(data))]

    def gather_plain(self, value: Any) -> list[Any]:
        """Return every rank's JSON `value`. Needs no secret, because JSON cannot run code."""
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
        # Exchange the lengths first, because receivers must allocate. They are float64, because
        # every transport can gather rows of floats, and exact up to 2**53 bytes.
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

        Hang reports show this wait. On an accelerator the collective itself does not block the
        host, so `read` waits for all work that is queued on the current stream. That stream must
        have computed `rows`, or must already wait for it.
        """
        return rows.cpu()

    def wait_for(self, event: Any) -> None:
        """Wait for an `event` of this rank's device. Blocks. Hang reports show this wait."""
        event.synchronize()

    @property
    def small_device(self) -> torch.device:
        """Device of the small vectors that are passed to `gather_rows`."""
        return torch.device("cpu")

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""


def column(counts: Counts, rank: int) -> list[int]:
    """Return the number of elements that `rank` receives from each rank."""
    return [row[rank] for row in counts]


def slice_of(lengths: Sequence[int], place: int) -> slice:
    """Return the slice of part `place` in a buffer of consecutive parts with these `lengths`."""
    start = sum(lengths[:place])
    return slice(start, start + lengths[place])


class Solo(Collectives):
    """A group of one rank, in which every collective completes immediately."""

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
        # The only rank owns the full buffer. The scale still applies, because the engine scales in
        # the sum.
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
    """Return the interval of `buffer` that `rank` owns, as a view."""
    return buffer[cuts[rank] : cuts[rank + 1]]


def gathered_rows(
    group: Collectives, row: Tensor, gather: Callable[[Tensor, Cuts], Handle]
) -> Tensor:
    """Stack every rank's vector `row` with the all-gather `gather`: (k,) becomes (size, k)."""
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
                f"Rank {rank} appears twice in {groups}: list each rank in at most one group."
            )
        seen.add(rank)


@dataclass(frozen=True)
class GroupRanks:
    """The ranks of the run that form a group, in the order of their group ranks.

    `size` is the number of ranks in the run. If torch's default process group contains only some of
    the run's ranks, `default` are these ranks, in the order of that group.
    """

    ranks: tuple[int, ...]
    size: int
    default: tuple[int, ...] = ()

    @classmethod
    def whole(cls, size: int) -> GroupRanks:
        """Return the group that contains all ranks of a run."""
        return cls(tuple(range(size)), size)

    def part(self, places: Sequence[int]) -> GroupRanks:
        """Return the subgroup that contains the group ranks `places`."""
        return GroupRanks(tuple(self.ranks[place] for place in places), self.size, self.default)

    @property
    def of_torch(self) -> list[int]:
        """These ranks' numbers in torch's default process group."""
        return [self.default.index(rank) if self.default else rank for rank in self.ranks]

    def speaker(self, place: int) -> str:
        """Return the beginning of a message about group rank `place`, such as "Rank 3 of 4"."""
        return f"Rank {self.ranks[place]} of {self.size}"

    def named(self, places: Iterable[int]) -> str:
        """Format the group ranks `places` by their numbers in the run, as "ranks 0, 2"."""
        return named(self.ranks[place] for place in places)


def join_pieces(pieces: Sequence[Tensor], buffer: Tensor) -> None:
    """Concatenate `pieces` into `buffer`. Pieces that are already stored there are not copied."""
    start = 0
    for piece in pieces:
        place = buffer[start : start + piece.numel()]
        # Compare addresses, because small gradients are accumulated in the buffer itself.
        if piece.data_ptr() != place.data_ptr():
            place.copy_(piece)
        start += piece.numel()
