"""Transport for CPU ranks on one host, through memory that all of them map.

The messages between ranks are small: they announce the stages of a call (shared_work.py). Each rank
reads directly from the other ranks' buffers (shared_buffers.py).

    reduce-scatter   all ready ─▶ sum the own interval ─▶ done
    all-reduce
      small          all ready with their values ─▶ sum everything
      medium         all ready with a copy ─▶ sum everything ─▶ done
      large          all ready ─▶ sum the own interval ─▶ all halfway ─▶ copy the rest ─▶ done
    all-gather       all ready ─▶ copy the others' intervals ─▶ done

A rank may read the result as soon as it is done. It may overwrite its buffer only when all ranks
are done.
"""

from __future__ import annotations

import secrets
import socket
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from weakref import ref

import torch
from torch import Tensor

from shardwise.comm.arena import Arena
from shardwise.comm.base import (
    Collectives,
    Counts,
    Cuts,
    GroupRanks,
    Handle,
    Solo,
    check_groups,
    column,
    gathered_rows,
    interval,
    slice_of,
)
from shardwise.comm.ordered_sums import PLAIN, Sum, sum_in_rank_order
from shardwise.comm.shared_buffers import SharedBuffers, real_buffer
from shardwise.comm.shared_work import (
    DONE,
    HALFWAY,
    READY,
    GroupWork,
    ProcessWork,
    SharedWork,
    Steps,
    first_message,
)
from shardwise.comm.socket_mesh import INLINE, MeshMessage, MeshPoll, SocketMesh, connect, listen
from shardwise.comm.torch_backend import real_view
from shardwise.errors import CollectiveError, PeerLost
from shardwise.layout.bucket_layout import even_cuts

SUMMED_EVERYWHERE = 1 << 20
"""An all-reduce in which all ranks' buffers together have at most this many bytes is computed by
every rank, in one exchange. Larger ones are split among the ranks, which takes two."""


class MappedMemory(Collectives):
    """Base class of transports whose ranks map the memory of the other ranks on their host."""

    sums_onto = True
    looks = True

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        buffer, cuts = real_buffer(buffer, cuts)
        own = interval(buffer, cuts, self.rank)
        return self._scatter(own, buffer, cuts, own if into is None else real_view(into), how)

    def reduce_scatter_onto(
        self, own: Tensor, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN
    ) -> Handle:
        own, (buffer, cuts) = real_view(own), real_buffer(buffer, cuts)
        return self._scatter(own, buffer, cuts, own, how)

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        return self._gather("all-gather", buffer, cuts)

    def gather_rows(self, row: Tensor) -> Tensor:
        return gathered_rows(self, row, partial(self._gather, "exchange of rows"))

    @abstractmethod
    def _scatter(self, own: Tensor, buffer: Tensor, cuts: Cuts, target: Tensor, how: Sum) -> Handle:
        """Launch a reduce-scatter into `target`. `own` is this rank's values for its interval."""

    @abstractmethod
    def _gather(self, kind: str, buffer: Tensor, cuts: Cuts) -> Handle:
        """Launch an all-gather. `kind` names the collective in error messages."""


class SharedMemory(MappedMemory):
    """CPU ranks of one host that communicate through shared memory.

    `under` is the group that agreed on this transport; `close` closes it too. `group_ranks` maps
    this group's ranks to ranks in the run, if the run also has other ranks. `buffers` are the
    tensors that these ranks publish to each other.
    """

    name = "shared memory"

    def __init__(
        self,
        sockets: dict[int, socket.socket],
        process_work: ProcessWork,
        arena: Arena,
        rank: int,
        size: int,
        timeout: float,
        under: Collectives | None = None,
        group_ranks: GroupRanks | None = None,
    ) -> None:
        super().__init__(rank, size, process_work.status_server)
        self._group_ranks = group_ranks or GroupRanks.whole(size)
        self._timeout = timeout
        self._under = under
        self._process_work = process_work
        mesh = SocketMesh(sockets, process_work.poll)
        self._work = GroupWork(mesh, process_work, rank, size, timeout, self._group_ranks)
        self.buffers = SharedBuffers(arena, self._work, rank, size)
        self._children: list[SharedMemory] = []
        self._parent: ref[SharedMemory] | None = None
        self._calls = 0

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, forkable: bool = False
    ) -> Tensor:
        assert device.type == "cpu", device
        return self.buffers.arena.allocate(numel, dtype, forkable=forkable)

    def common(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device.type == "cpu", device
        # The steps append the tensor to a list, because a call's generator cannot return a value.
        made: list[Tensor] = []
        like = torch.empty(numel, dtype=dtype, device="meta")
        begin = self.opening("common memory", like)
        self._work.start(begin, self._common(begin, like, made)).wait()
        return made[0]

    @property
    def under(self) -> Collectives | None:
        """The group that agreed on this transport, or None if `split` created this group."""
        return self._under

    # -- collectives ----------------------------------------------------------------------

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        buffer = real_view(buffer)
        begin = self.opening("all-reduce", buffer)
        # A small buffer is sent inside the message. A medium one is summed on every rank. Both save
        # a round of messages, which takes longer than the additional reads.
        small = buffer.nbytes <= INLINE
        if not small and buffer.nbytes * self.size > SUMMED_EVERYWHERE:
            return self._work.start(begin, self._all_reduce(begin, buffer, how))
        work = self._work.start(begin, self._exchange(begin, buffer, how, small=small))
        work.reads_copy = not small
        return work

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        buffer = real_view(buffer)
        begin = self.opening("broadcast", buffer, source)
        return self._work.start(begin, self._broadcast(begin, buffer, source))

    def all_to_all(self, sent: Tensor, counts: Counts, received: Tensor) -> Handle:
        begin = self.opening("all-to-all", sent.new_empty(0), hash(tuple(map(tuple, counts))))
        # Memory of autograd is private. Waiting for its readers would cost one more round of
        # messages per exchange, in which every rank waits for the slowest one.
        is_private = self.buffers.arena.locate(sent) is None
        work = self._work.start(begin, self._all_to_all(begin, sent, counts, received))
        work.reads_copy = is_private
        return work

    def barrier(self) -> None:
        begin = self.opening("barrier", torch.empty(0))

        def steps() -> Steps:
            self._work.post(begin)
            yield READY

        self._work.start(begin, steps()).wait()

    def _scatter(
        self, own: Tensor, buffer: Tensor, cuts: Cuts, target: Tensor, how: Sum
    ) -> SharedWork:
        begin = self.opening("reduce-scatter", buffer, hash(tuple(cuts)))
        steps = self._reduce_scatter(begin, own, buffer, cuts, target, how)
        return self._work.start(begin, steps)

    def all_gather_others(self, buffer: Tensor, cuts: Cuts, held: int) -> Handle:
        return self._gather("all-gather", buffer, cuts, held)

    def _gather(self, kind: str, buffer: Tensor, cuts: Cuts, held: int | None = None) -> SharedWork:
        buffer, cuts = real_buffer(buffer, cuts)
        begin = self.opening(kind, buffer, hash(tuple(cuts)))
        return self._work.start(begin, self._all_gather(begin, buffer, cuts, held))

    # -- steps of the calls ---------------------------------------------------------------

    def _exchange(self, begin: MeshMessage, buffer: Tensor, how: Sum, *, small: bool) -> Steps:
        """All-reduce in one exchange: every rank sums the values of all ranks."""
        # The sum overwrites `buffer`, so the other ranks must read a copy.
        public = self.buffers.publish(begin, buffer, small=small, copy=True)
        messages = yield READY
        rows = self.buffers.rows(messages, buffer, 0)
        sum_in_rank_order(rows, buffer, how)
        if not small:
            self._work.announce(begin, DONE)
            yield DONE
            self.buffers.take_back(public, buffer)

    def _all_reduce(self, begin: MeshMessage, buffer: Tensor, how: Sum) -> Steps:
        cuts = even_cuts(buffer.numel(), self.size)
        public = self.buffers.publish(begin, buffer, written=True)
        messages = yield READY
        own = interval(public, cuts, self.rank)
        rows = self.buffers.rows(messages, own, cuts[self.rank])
        sum_in_rank_order(rows, own, how)
        self._work.announce(begin, HALFWAY)
        # A rank that is halfway has read its interval of this buffer, and its own interval contains
        # the sum. So the copies below read finished sums and overwrite values that no rank needs.
        yield HALFWAY
        for rank, message in messages.items():
            part = interval(buffer, cuts, rank)
            part.copy_(self.buffers.read(rank, message, cuts[rank], part))
        if public is not buffer:
            interval(buffer, cuts, self.rank).copy_(own)
        self._work.announce(begin, DONE)
        yield DONE
        self.buffers.take_back(public, buffer)

    def _reduce_scatter(
        self, begin: MeshMessage, own: Tensor, buffer: Tensor, cuts: Cuts, target: Tensor, how: Sum
    ) -> Steps:
        public = self.buffers.publish(begin, buffer)
        messages = yield READY
        # No other rank reads this rank's interval of its buffer, so the sum may overwrite it.
        rows = self.buffers.rows(messages, own, cuts[self.rank])
        sum_in_rank_order(rows, target, how)
        self._work.announce(begin, DONE)
        yield DONE
        self.buffers.take_back(public, buffer)

    def _all_gather(
        self, begin: MeshMessage, buffer: Tensor, cuts: Cuts, held: int | None
    ) -> Steps:
        own = interval(buffer, cuts, self.rank)
        # Use the largest interval, because all ranks know its size and must make the same decision.
        small = max(b - a for a, b in pairwise(cuts)) * buffer.itemsize <= INLINE
        public = self.buffers.publish(begin, own, small=small)
        messages = yield READY
        for rank, message in messages.items():
            if rank == held:
                continue
            part = interval(buffer, cuts, rank)
            part.copy_(self.buffers.read(rank, message, 0, part))
        if not small:
            self._work.announce(begin, DONE)
            yield DONE
            self.buffers.take_back(public, own)

    def _all_to_all(
        self, begin: MeshMessage, sent: Tensor, counts: Counts, received: Tensor
    ) -> Steps:
        public = self.buffers.publish(begin, sent)
        messages = yield READY
        mine = column(counts, self.rank)
        received[slice_of(mine, self.rank)] = sent[slice_of(counts[self.rank], self.rank)]
        for rank, message in messages.items():
            part = received[slice_of(mine, rank)]
            part.copy_(
                self.buffers.read(rank, message, slice_of(counts[rank], self.rank).start, part)
            )
        self._work.announce(begin, DONE)
        yield DONE
        self.buffers.take_back(public, sent)

    def _broadcast(self, begin: MeshMessage, buffer: Tensor, source: int) -> Steps:
        """Copy `buffer` from `source`, which must not change it until all ranks have read it."""
        small = buffer.nbytes <= INLINE
        if self.rank == source:
            public = self.buffers.publish(begin, buffer, small=small)
            yield READY
            if not small:
                yield HALFWAY
                self.buffers.take_back(public, buffer)
            return
        self._work.post(begin)
        messages = yield READY
        buffer.copy_(self.buffers.read(source, messages[source], 0, buffer))
        if not small:
            self._work.announce(begin, HALFWAY, only=source)

    def _common(self, begin: MeshMessage, like: Tensor, made: list[Tensor]) -> Steps:
        if self.rank == 0:
            made.append(self.buffers.arena.allocate_alone(like.numel(), like.dtype))
            self.buffers.publish(begin, made[0])
        else:
            self._work.post(begin)
        messages = yield READY
        if self.rank != 0:
            made.append(self.buffers.read(0, messages[0], 0, like))

    def settle(self) -> None:
        self._process_work.settle()

    # -- used by calls of a larger group --------------------------------------------------

    @property
    def poll(self) -> MeshPoll:
        """The poll object that receives messages for all groups of this process."""
        return self._process_work.poll

    def start(self, begin: MeshMessage, steps: Steps) -> Handle:
        """Start the call that the message `begin` opens."""
        return self._work.start(begin, steps)

    def post(self, message: MeshMessage) -> None:
        """Send a message to all other ranks."""
        self._work.post(message)

    def announce(self, begin: MeshMessage, stage: int, only: int | None = None) -> None:
        """Tell all other ranks (or only rank `only`) that this one has reached a call's `stage`."""
        self._work.announce(begin, stage, only)

    def opening(self, kind: str, buffer: Tensor, check: int = 0) -> MeshMessage:
        """Return the message that opens the next call. All ranks must pass the same `check`."""
        assert buffer.is_contiguous()
        self.status_server.refuse_after_failure()
        self._calls += 1
        self.buffers.announce_freed()
        return first_message(self._calls, kind, buffer, check)

    # -- subgroups ------------------------------------------------------------------------

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        check_groups(groups, self.size)
        # Use a new random name for the sockets of every split. Abstract names are visible on the
        # entire host, so other runs and other splits must use different names.
        name = self.gather_plain(secrets.token_hex(8))[0]
        mine = sorted(next((group for group in groups if self.rank in group), [self.rank]))
        place, size = mine.index(self.rank), len(mine)
        if size == 1:
            self.barrier()  # matches the barrier that the other ranks enter below
            return Solo()
        try:
            listener = listen(f"{name}-{mine[0]}", place, size, self._timeout)
            with listener:
                self.barrier()  # all ranks listen after this
                server = self.status_server
                words = listener, f"{name}-{mine[0]}", server.secret, place, size, self._timeout
                numbers = self._group_ranks.part(mine).ranks
                sockets = connect(*words, lambda: any(map(server.has_ended, numbers)))
        except ConnectionError as error:
            raise PeerLost(
                f"{self._group_ranks.speaker(self.rank)} lost one of "
                f"{self._group_ranks.named(mine)} while it connected to them: "
                f"{error.strerror or error}. The cause is on the rank that ended: see its output."
            ) from error
        except OSError as error:
            raise CollectiveError(
                f"{self._group_ranks.speaker(self.rank)} cannot open sockets to "
                f"{self._group_ranks.named(mine)}: {error.strerror or error}. Write --transport "
                "gloo, which does not need them."
            ) from error
        made = (sockets, self._process_work, self.buffers.arena, place, size, self._timeout)
        child = SharedMemory(*made, group_ranks=self._group_ranks.part(mine))
        child._parent = ref(self)
        self._children.append(child)
        return child

    def retire(self) -> Arena:
        """Close the group after ranks are lost, and return its memory for a new group.

        Once a rank has retired, it no longer reads other ranks' buffers.
        """
        for child in list(self._children):
            child.close()
        self._work.close()
        self.buffers.close()
        assert self._under is not None
        self._under.close()
        return self.buffers.arena

    def close(self) -> None:
        for child in list(self._children):
            child.close()
        parent = self._parent() if self._parent is not None else None
        if parent is not None and self in parent._children:
            parent._children.remove(self)
        # Other ranks may still read this rank's buffers. Leave the memory to them instead of
        # waiting: they may have failed, and the wait would hang.
        if not self._work.is_over():
            self.buffers.arena.leave_to_others()
        self._work.close()
        self.buffers.close()
        if self._under is not None:
            self.buffers.arena.close()
            self._under.close()
