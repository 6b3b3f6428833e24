"""CPU ranks of one host, through memory that all of them map.

Nothing is sent but notes about what is ready (flights.py): each rank reads what it needs straight
out of the others' buffers.

    reduce-scatter   all ready ─▶ sum the own interval ─▶ done
    all-reduce       all ready ─▶ sum the own interval ─▶ all halfway ─▶ copy the rest ─▶ done
    all-gather       all ready ─▶ copy the others' intervals ─▶ done

A result may be read when this rank is done, a buffer written again when all are. Memory that was
not allocated here is copied to a place that was; what is small travels in the note itself.
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

from shardwise.collectives.arena import Arena
from shardwise.collectives.base import (
    Collectives,
    Counts,
    Cuts,
    Handle,
    Solo,
    check_groups,
    column,
    slice_of,
)
from shardwise.collectives.ordered_sums import PLAIN, Sum, sum_in_rank_order
from shardwise.collectives.roster import Roster
from shardwise.collectives.shared_work import (
    DONE,
    ENDED,
    HALFWAY,
    READY,
    Fleet,
    Flight,
    Flights,
    Plan,
    first_message,
)
from shardwise.collectives.socket_mesh import INLINE, Mesh, Message, Watch, connect, listen
from shardwise.collectives.torch_backend import gathered_rows, interval, wire
from shardwise.errors import CollectiveError
from shardwise.layout import even_cuts

POOLED = 1 << 25
"""Bytes up to which a place for private memory is kept for later calls."""


class Mapped(Collectives):
    """Ranks that map the memory of those on their host."""

    sums_onto = True
    looks = True

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        buffer, cuts = real(buffer, cuts)
        own = interval(buffer, cuts, self.rank)
        return self._scatter(own, buffer, cuts, own if into is None else wire(into), how)

    def reduce_scatter_onto(
        self, own: Tensor, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN
    ) -> Handle:
        own, (buffer, cuts) = wire(own), real(buffer, cuts)
        return self._scatter(own, buffer, cuts, own, how)

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        return self._gather("all-gather", buffer, cuts)

    def gather_rows(self, row: Tensor) -> Tensor:
        return gathered_rows(self, row, partial(self._gather, "exchange of rows"))

    @abstractmethod
    def _scatter(self, own: Tensor, buffer: Tensor, cuts: Cuts, target: Tensor, how: Sum) -> Handle:
        """A reduce-scatter into `target`, this rank's values of its interval being in `own`."""

    @abstractmethod
    def _gather(self, kind: str, buffer: Tensor, cuts: Cuts) -> Handle:
        """An all-gather that says it is a call of this `kind`."""


class Shared(Mapped):
    """CPU ranks of one host, over shared memory.

    `under` is the group that they agreed on it over, which is left with this one; `roster` says
    which ranks of the run these are, where they are not all.
    """

    name = "shared memory"

    def __init__(
        self,
        sockets: dict[int, socket.socket],
        fleet: Fleet,
        arena: Arena,
        rank: int,
        size: int,
        timeout: float,
        under: Collectives | None = None,
        roster: Roster | None = None,
    ) -> None:
        super().__init__(rank, size, fleet.lookout)
        self._roster = roster or Roster.whole(size)
        self._arena = arena
        self._timeout = timeout
        self._under = under
        self._fleet = fleet
        mesh = Mesh(sockets, fleet.watch)
        self._flights = Flights(mesh, fleet, rank, size, timeout, self._roster)
        self._told: set[int] = set()
        self._spare: list[Tensor] = []
        self._children: list[Shared] = []
        self._parent: ref[Shared] | None = None
        self._calls = 0

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device.type == "cpu", device
        return self._arena.allocate(numel, dtype)

    def common(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device.type == "cpu", device
        made: list[Tensor] = []
        like = torch.empty(numel, dtype=dtype, device="meta")
        begin = self.opening("common memory", like)
        self._flights.start(begin, self._common(begin, like, made)).wait()
        return made[0]

    @property
    def under(self) -> Collectives | None:
        """The group that these ranks agreed on this one over; None where it was split off."""
        return self._under

    # -- the verbs ------------------------------------------------------------------------

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        buffer = wire(buffer)
        begin = self.opening("all-reduce", buffer)
        plan = self._exchange if buffer.nbytes <= INLINE else self._all_reduce
        return self._flights.start(begin, plan(begin, buffer, how))

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        buffer = wire(buffer)
        begin = self.opening("broadcast", buffer, source)
        return self._flights.start(begin, self._broadcast(begin, buffer, source))

    def all_to_all(self, sent: Tensor, counts: Counts, received: Tensor) -> Handle:
        begin = self.opening("all-to-all", sent.new_empty(0), hash(tuple(map(tuple, counts))))
        return self._flights.start(begin, self._all_to_all(begin, sent, counts, received))

    def barrier(self) -> None:
        begin = self.opening("barrier", torch.empty(0))
        self._flights.start(begin, self._barrier(begin)).wait()

    def _scatter(self, own: Tensor, buffer: Tensor, cuts: Cuts, target: Tensor, how: Sum) -> Flight:
        begin = self.opening("reduce-scatter", buffer, hash(tuple(cuts)))
        plan = self._reduce_scatter(begin, own, buffer, cuts, target, how)
        return self._flights.start(begin, plan)

    def _gather(self, kind: str, buffer: Tensor, cuts: Cuts) -> Flight:
        buffer, cuts = real(buffer, cuts)
        begin = self.opening(kind, buffer, hash(tuple(cuts)))
        return self._flights.start(begin, self._all_gather(begin, buffer, cuts))

    # -- how they go ----------------------------------------------------------------------

    def _barrier(self, begin: Message) -> Plan:
        self._flights.post(begin)
        yield READY

    def _exchange(self, begin: Message, buffer: Tensor, how: Sum) -> Plan:
        """A small all-reduce: everyone tells everything, and sums all."""
        self._flights.post(begin._replace(payload=as_bytes(buffer)))
        came = yield READY
        rows = self.rows(came, buffer, 0)
        sum_in_rank_order(rows, buffer, how)

    def _all_reduce(self, begin: Message, buffer: Tensor, how: Sum) -> Plan:
        cuts = even_cuts(buffer.numel(), self.size)
        public = self.publish(begin, buffer)
        came = yield READY
        own = interval(public, cuts, self.rank)
        rows = self.rows(came, own, cuts[self.rank])
        sum_in_rank_order(rows, own, how)
        self._flights.say(begin, HALFWAY)
        # A rank that is halfway has read what it sums of this buffer, and summed what is read of
        # its own: both ends of the copies below are free.
        yield HALFWAY
        for rank, message in came.items():
            part = interval(buffer, cuts, rank)
            part.copy_(self.read(rank, message, cuts[rank], part))
        if public is not buffer:
            interval(buffer, cuts, self.rank).copy_(own)
        self._flights.say(begin, DONE)
        yield DONE
        self.take_back(public, buffer)

    def _reduce_scatter(
        self, begin: Message, own: Tensor, buffer: Tensor, cuts: Cuts, target: Tensor, how: Sum
    ) -> Plan:
        public = self.publish(begin, buffer)
        came = yield READY
        # Nobody else reads this rank's interval, so the sum may go over it.
        rows = self.rows(came, own, cuts[self.rank])
        sum_in_rank_order(rows, target, how)
        self._flights.say(begin, DONE)
        yield DONE
        self.take_back(public, buffer)

    def _all_gather(self, begin: Message, buffer: Tensor, cuts: Cuts) -> Plan:
        own = interval(buffer, cuts, self.rank)
        small = max(b - a for a, b in pairwise(cuts)) * buffer.itemsize <= INLINE
        public = self.publish(begin, own, small=small)
        came = yield READY
        for rank, message in came.items():
            part = interval(buffer, cuts, rank)
            part.copy_(self.read(rank, message, 0, part))
        if not small:
            self._flights.say(begin, DONE)
            yield DONE
            self.take_back(public, own)

    def _all_to_all(self, begin: Message, sent: Tensor, counts: Counts, received: Tensor) -> Plan:
        public = self.publish(begin, sent)
        came = yield READY
        mine = column(counts, self.rank)
        received[slice_of(mine, self.rank)] = sent[slice_of(counts[self.rank], self.rank)]
        for rank, message in came.items():
            part = received[slice_of(mine, rank)]
            part.copy_(self.read(rank, message, slice_of(counts[rank], self.rank).start, part))
        self._flights.say(begin, DONE)
        yield DONE
        self.take_back(public, sent)

    def _broadcast(self, begin: Message, buffer: Tensor, source: int) -> Plan:
        """The source is done when all have read: its buffer is mostly the user's own."""
        small = buffer.nbytes <= INLINE
        if self.rank == source:
            public = self.publish(begin, buffer, small=small)
            yield READY
            if not small:
                yield HALFWAY
                self.take_back(public, buffer)
            return
        self._flights.post(begin)
        came = yield READY
        buffer.copy_(self.read(source, came[source], 0, buffer))
        if not small:
            self._flights.say(begin, HALFWAY, only=source)

    def _common(self, begin: Message, like: Tensor, made: list[Tensor]) -> Plan:
        if self.rank == 0:
            made.append(self._arena.alone(like.numel(), like.dtype))
            self.publish(begin, made[0])
        else:
            self._flights.post(begin)
        came = yield READY
        if self.rank != 0:
            made.append(self.read(0, came[0], 0, like))

    # -- for plans of a larger group ------------------------------------------------------

    @property
    def watch(self) -> Watch:
        """Where this process looks for messages."""
        return self._fleet.watch

    def start(self, begin: Message, plan: Plan) -> Handle:
        """Begin a call that was opened with `begin`."""
        return self._flights.start(begin, plan)

    def post(self, message: Message) -> None:
        """Tell all others."""
        self._flights.post(message)

    def say(self, begin: Message, stage: int, only: int | None = None) -> None:
        """Tell all others, or one, that this rank has come to `stage` in a call."""
        self._flights.say(begin, stage, only)

    def place_for(self, tensor: Tensor) -> Tensor:
        """`tensor` where all can read it, or memory of its length where they can."""
        if not tensor.numel() or self._arena.locate(tensor) is not None:
            return tensor
        return self._borrow(tensor.nbytes)[: tensor.nbytes].view(tensor.dtype)

    # -- memory ---------------------------------------------------------------------------

    def opening(self, kind: str, buffer: Tensor, check: int = 0) -> Message:
        """The first message of this rank's next call; `check` is any number that all must share."""
        assert buffer.is_contiguous()
        self._calls += 1
        for number in [n for n in self._told if not self._arena.holds(n)]:
            self._told.remove(number)
            self._flights.post(Message(0, ENDED, segment=number))
        return first_message(self._calls, kind, buffer, check)

    def publish(self, begin: Message, tensor: Tensor, *, small: bool = False) -> Tensor:
        """Tell all that they may read `tensor`, or the copy of it that is returned."""
        if small or not tensor.numel():
            self._flights.post(begin._replace(payload=as_bytes(tensor)))
            return tensor
        public = self.place_for(tensor)
        if public is not tensor:
            public.copy_(tensor)
        place = self._arena.locate(public)
        assert place is not None
        segment, offset = place
        fd = -1 if segment.number in self._told else segment.fd
        self._told.add(segment.number)
        self._flights.post(begin._replace(segment=segment.number, offset=offset, fd=fd))
        return public

    def read(self, rank: int, message: Message, first: int, like: Tensor) -> Tensor:
        """What `rank` told of in `message`, from element `first` on, as long as `like`."""
        if not like.numel():
            return torch.empty(0, dtype=like.dtype)
        if message.payload:
            told = torch.frombuffer(bytearray(message.payload), dtype=like.dtype)
            return told[first : first + like.numel()]
        offset = message.offset + first * like.itemsize
        return self._flights.windows.view(rank, message.segment, offset, like.numel(), like.dtype)

    def rows(self, came: dict[int, Message], own: Tensor, first: int) -> list[Tensor]:
        """The ranks' values of this rank's interval, which starts at element `first`."""
        return [
            own if rank == self.rank else self.read(rank, came[rank], first, own)
            for rank in range(self.size)
        ]

    def _borrow(self, size: int) -> Tensor:
        """`size` bytes or more of shared memory, kept between calls so that none pays for pages."""
        for index, spare in enumerate(self._spare):
            if spare.numel() >= size:
                return self._spare.pop(index)
        if size > POOLED:
            return self._arena.alone(size, torch.uint8)
        return self._arena.allocate(1 << (size - 1).bit_length(), torch.uint8)

    def take_back(self, public: Tensor, tensor: Tensor) -> None:
        """All have read `public`, which stood for `tensor`."""
        whole = public._base
        if public is not tensor and whole is not None and whole.numel() <= POOLED:
            self._spare.append(whole)
            self._spare.sort(key=Tensor.numel)

    # -- other groups ---------------------------------------------------------------------

    def second_group(self) -> Collectives:
        return self.split([range(self.size)])

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        check_groups(groups, self.size)
        name = self.gather_plain(secrets.token_hex(8))[0]
        mine = sorted(next((group for group in groups if self.rank in group), [self.rank]))
        place, size = mine.index(self.rank), len(mine)
        if size == 1:
            self.barrier()
            return Solo()
        try:
            listener = listen(f"{name}-{mine[0]}", place, size, self._timeout)
            with listener:
                self.barrier()
                known = self.lookout.secret
                sockets = connect(listener, f"{name}-{mine[0]}", known, place, size, self._timeout)
        except OSError as error:
            raise CollectiveError(
                f"{self._roster.speaker(self.rank)} cannot open sockets to "
                f"{self._roster.named(mine)}: {error.strerror or error}. "
                "--transport gloo does without."
            ) from error
        made = (sockets, self._fleet, self._arena, place, size, self._timeout)
        child = Shared(*made, roster=self._roster.part(mine))
        child._parent = ref(self)
        self._children.append(child)
        return child

    def close(self) -> None:
        for child in list(self._children):
            child.close()
        parent = self._parent() if self._parent is not None else None
        if parent is not None and self in parent._children:
            parent._children.remove(self)
        if not self._flights.is_over():
            self._arena.leave_to_others()
        self._flights.close()
        self._spare.clear()
        if self._under is not None:
            self._arena.close()
            self._under.close()


def real(buffer: Tensor, cuts: Cuts) -> tuple[Tensor, Cuts]:
    """Complex numbers as pairs of reals, and their cuts."""
    return wire(buffer), [2 * cut for cut in cuts] if buffer.is_complex() else cuts


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
