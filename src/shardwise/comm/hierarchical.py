"""Transport for CPU ranks on several hosts: shared memory within a host, Gloo between hosts.

A rank's *peers* are the ranks with the same index on the other hosts. Each rank sums its host's
values, in its own interval and in those of its peers. Only these sums are sent to the peers:

    host 0     rank 0 | rank 1         reduce-scatter   sum inside ─▶ peers ─▶ sum of hosts
                  ▲        ▲           all-gather       peers ─▶ copy inside
                  ▼        ▼           all-reduce       both, one after the other
    host 1     rank 2 | rank 3

So each of H hosts sends (H - 1) / H of a buffer in a reduce-scatter or an all-gather, and twice
that in an all-reduce, regardless of the number of ranks per host. 16-bit floats that are summed in
fp32 are also sent as fp32, so that they are rounded only once. Values are always summed in the same
order: by rank within a host, then by host.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from weakref import ref

import torch
from torch import Tensor

from shardwise.comm.arena import Arena
from shardwise.comm.base import Collectives, Cuts, Handle, check_groups, interval
from shardwise.comm.gloo import Gloo
from shardwise.comm.ordered_sums import PLAIN, Sum, sum_in_rank_order
from shardwise.comm.progress_thread import PendingWork, ProgressThread
from shardwise.comm.shared_buffers import as_bytes, real_buffer
from shardwise.comm.shared_memory import MappedMemory, SharedMemory
from shardwise.comm.shared_work import DONE, HALFWAY, READY, Messages, Steps
from shardwise.comm.socket_mesh import INLINE, MeshMessage
from shardwise.layout.bucket_layout import even_cuts
from shardwise.layout.sum_tree import node_sizes

Hosts = Sequence[Sequence[int]]
"""The ranks of each host, in ascending order. Every host has the same number of ranks."""

PartialSteps = Generator[int | PendingWork, Messages, Messages]
"""Some steps of a call. The generator returns the messages of the call's first stage."""


def know_tree(hosts: Hosts) -> bool:
    """Return whether the ranks of each of `hosts` form one node of the reduction tree."""
    each = len(hosts[0])
    in_a_row = all(ranks[-1] - ranks[0] == each - 1 for ranks in hosts)
    return in_a_row and each in node_sizes(sum(map(len, hosts)))


class Hierarchical(MappedMemory):
    """CPU ranks on several hosts, with the same number of ranks (at least two) on each.

    `inside` is the group of this host's ranks, `between` the group of this rank and its peers, and
    `under` a group of all ranks that communicates over Gloo.
    """

    def __init__(
        self,
        inside: SharedMemory,
        between: Gloo,
        hosts: Hosts,
        rank: int,
        under: Collectives,
    ) -> None:
        super().__init__(rank, sum(map(len, hosts)), between.status_server)
        self.name = f"{inside.name} in each of {len(hosts)} hosts, {between.name} between"
        self._inside = inside
        self._between = between
        self._hosts = hosts
        self._under = under
        # It wakes this rank through the poll object of shared memory, so that a single wait
        # receives both the messages within the host and those between hosts.
        self._progress_thread = ProgressThread(between.status_server.waits, inside.poll)
        self._children: list[Hierarchical] = []
        self._parent: ref[Hierarchical] | None = None
        # For each index on a host, the ranks with that index, in the order of `between`.
        self._columns = [sorted(column) for column in zip(*hosts, strict=True)]
        self._peers = self._columns[inside.rank]

    @property
    def knows_tree(self) -> bool:
        """True if the ranks of each host form one node of the reduction tree."""
        return know_tree(self._hosts)

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, forkable: bool = False
    ) -> Tensor:
        return self._inside.allocate(numel, dtype, device, forkable=forkable)

    @property
    def under(self) -> Collectives:
        """The Gloo group that contains the same ranks."""
        return self._under

    # -- collectives ----------------------------------------------------------------------

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        buffer, cuts = real_buffer(buffer, even_cuts(buffer.numel(), self.size))
        begin = self._inside.opening("all-reduce", buffer)
        # Take the numbers here and not in the steps, because steps run when messages arrive, in an
        # order that may differ between hosts.
        calls = self._between.messages.number(), self._between.messages.number()
        return self._inside.start(begin, self._all_reduce(begin, calls, buffer, cuts, how))

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        buffer, _ = real_buffer(buffer, ())
        begin = self._inside.opening("broadcast", buffer, source)
        steps = self._broadcast(begin, self._between.messages.number(), buffer, source)
        return self._inside.start(begin, steps)

    def barrier(self) -> None:
        begin = self._inside.opening("barrier", torch.empty(0))
        call = self._between.messages.number()

        def steps() -> Steps:
            # First wait for the ranks of this host, then for the peers. Each peer has waited for
            # the ranks of its host.
            self._inside.post(begin)
            yield READY
            messages = {peer: torch.empty(1) for peer in self._others}
            yield self._send_between(
                "barrier", call, dict.fromkeys(messages, torch.zeros(1)), messages
            )

        self._inside.start(begin, steps()).wait()

    def settle(self) -> None:
        self._inside.settle()

    def _scatter(self, own: Tensor, buffer: Tensor, cuts: Cuts, target: Tensor, how: Sum) -> Handle:
        begin = self._inside.opening("reduce-scatter", buffer, hash(tuple(cuts)))
        steps = self._reduce_scatter(
            begin, self._between.messages.number(), own, buffer, cuts, target, how
        )
        return self._inside.start(begin, steps)

    def _gather(self, kind: str, buffer: Tensor, cuts: Cuts) -> Handle:
        buffer, cuts = real_buffer(buffer, cuts)
        begin = self._inside.opening(kind, buffer, hash(tuple(cuts)))
        call = self._between.messages.number()
        return self._inside.start(begin, self._all_gather(begin, call, buffer, cuts))

    # -- steps of the calls ---------------------------------------------------------------

    def _reduce_scatter(
        self,
        begin: MeshMessage,
        call: int,
        own: Tensor,
        buffer: Tensor,
        cuts: Cuts,
        target: Tensor,
        how: Sum,
    ) -> Steps:
        public = self._inside.buffers.publish(begin, buffer)
        yield from self._sum(begin, call, own, buffer, cuts, target, how, last=True)
        yield DONE
        self._inside.buffers.take_back(public, buffer)

    def _all_reduce(
        self,
        begin: MeshMessage,
        calls: tuple[int, int],
        buffer: Tensor,
        cuts: Cuts,
        how: Sum,
    ) -> Steps:
        public = self._inside.buffers.publish(begin, buffer, written=True)
        own = interval(buffer, cuts, self.rank)
        messages = yield from self._sum(begin, calls[0], own, buffer, cuts, own, how)
        # The peers' intervals may be overwritten now, because no rank of this host reads them
        # before HALFWAY.
        yield self._fetch(calls[1], buffer, cuts)
        self._copy_peers(buffer, public, cuts)
        self._inside.announce(begin, HALFWAY)
        yield HALFWAY
        for place, message in messages.items():
            for rank in self._columns[place]:
                part = interval(buffer, cuts, rank)
                part.copy_(self._inside.buffers.read(place, message, cuts[rank], part))
        self._inside.announce(begin, DONE)
        yield DONE
        self._inside.buffers.take_back(public, buffer)

    def _sum(
        self,
        begin: MeshMessage,
        call: int,
        own: Tensor,
        buffer: Tensor,
        cuts: Cuts,
        target: Tensor,
        how: Sum,
        *,
        last: bool = False,
    ) -> PartialSteps:
        """Sum this rank's interval across all ranks. `own` holds this rank's values for it.

        `last` is True if the call does not read other ranks' buffers on this host after this sum.
        """
        messages = yield READY
        dtype = how.wide(buffer.dtype)
        # Send 16-bit floats as fp32 between hosts too, so that the result is rounded only once.
        sums = []
        for rank in self._peers:
            part = own if rank == self.rank else interval(buffer, cuts, rank)
            sums.append(self._between.borrow(part.numel(), dtype))
            rows = self._inside.buffers.rows(messages, part, cuts[rank])
            sum_in_rank_order(rows, sums[-1], how.partial)
        if last:
            # Announce it before the messages between hosts, so that the ranks of this host can
            # reuse their buffers while those messages are sent.
            self._inside.announce(begin, DONE)
        me = self._between.rank
        rows = [
            sums[me] if place == me else self._between.borrow(target.numel(), dtype)
            for place in range(len(self._peers))
        ]
        sends = {place: sums[place] for place in self._others}
        yield self._send_between("reduce-scatter", call, sends, {p: rows[p] for p in self._others})
        sum_in_rank_order(rows, target, how)
        for scratch in [*sums, *(rows[place] for place in self._others)]:
            self._between.give_back(scratch)
        return messages

    def _all_gather(self, begin: MeshMessage, call: int, buffer: Tensor, cuts: Cuts) -> Steps:
        # Gather between hosts first, then within the host. Each interval then crosses the network
        # once per host instead of once per rank.
        yield self._fetch(call, buffer, cuts)
        columns = [sum(cuts[rank + 1] - cuts[rank] for rank in column) for column in self._columns]
        if max(columns) * buffer.itemsize <= INLINE:
            yield from self._gather_small(begin, buffer, cuts)
            return
        public = self._inside.buffers.place_for(buffer)
        self._copy_peers(buffer, public, cuts)
        public = self._inside.buffers.publish(begin, public)
        messages = yield READY
        for place, message in messages.items():
            for rank in self._columns[place]:
                part = interval(buffer, cuts, rank)
                part.copy_(self._inside.buffers.read(place, message, cuts[rank], part))
        self._inside.announce(begin, DONE)
        yield DONE
        self._inside.buffers.take_back(public, buffer)

    def _gather_small(self, begin: MeshMessage, buffer: Tensor, cuts: Cuts) -> Steps:
        """Complete a small all-gather. Messages within the host contain the peers' intervals."""
        parts = [interval(buffer, cuts, rank) for rank in self._peers]
        self._inside.post(begin._replace(payload=b"".join(map(as_bytes, parts))))
        messages = yield READY
        for place, message in messages.items():
            first = 0
            for rank in self._columns[place]:
                part = interval(buffer, cuts, rank)
                part.copy_(self._inside.buffers.read(place, message, first, part))
                first += part.numel()

    def _broadcast(self, begin: MeshMessage, call: int, buffer: Tensor, source: int) -> Steps:
        """Send `buffer` from `source` to its peers, and from each peer to the ranks on its host."""
        column = next(place for place, ranks in enumerate(self._columns) if source in ranks)
        small = buffer.nbytes <= INLINE
        if self._inside.rank != column:
            self._inside.post(begin)
            messages = yield READY
            buffer.copy_(self._inside.buffers.read(column, messages[column], 0, buffer))
            if not small:
                self._inside.announce(begin, HALFWAY, only=column)
            return
        from_place = self._peers.index(source)
        if self.rank == source:
            pending = self._send_between("broadcast", call, dict.fromkeys(self._others, buffer), {})
        else:
            pending = self._send_between("broadcast", call, {}, {from_place: buffer})
            yield pending
        public = self._inside.buffers.publish(begin, buffer, small=small)
        yield READY
        yield pending
        if not small:
            yield HALFWAY
            self._inside.buffers.take_back(public, buffer)

    # -- messages between hosts -----------------------------------------------------------

    @property
    def _others(self) -> list[int]:
        """This rank's peers, by their ranks in `between`."""
        return [place for place in range(len(self._peers)) if place != self._between.rank]

    def _send_between(
        self, what: str, call: int, sends: dict[int, Tensor], receives: dict[int, Tensor]
    ) -> PendingWork:
        several = ({place: [each] for place, each in one.items()} for one in (sends, receives))
        return self._progress_thread.follow(self._between.messages.start(what, call, *several))

    def _fetch(self, call: int, buffer: Tensor, cuts: Cuts) -> PendingWork:
        """Send this rank's interval to its peers, and receive their intervals."""
        own = interval(buffer, cuts, self.rank)
        receives = {place: interval(buffer, cuts, self._peers[place]) for place in self._others}
        return self._send_between("all-gather", call, dict.fromkeys(receives, own), receives)

    def _copy_peers(self, buffer: Tensor, public: Tensor, cuts: Cuts) -> None:
        """Copy the peers' intervals to the memory that this host's ranks read."""
        if public is not buffer:
            for rank in self._peers:
                interval(public, cuts, rank).copy_(interval(buffer, cuts, rank))

    # -- subgroups ------------------------------------------------------------------------

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        check_groups(groups, self.size)
        mine = sorted(next((group for group in groups if self.rank in group), [self.rank]))
        spread = self._spread(mine)
        host = next(ranks for ranks in self._hosts if self.rank in ranks)
        by_place = [[p for p, rank in enumerate(host) if rank in group] for group in groups]
        here = self._inside.split([places for places in by_place if places])
        # torch creates groups collectively. All ranks create all Gloo groups in this order, even
        # groups that they are not in. Each rank is in at most one of them.
        spanning = [group for group in groups if _is_even(self._spread(group))]
        apart = [
            group for group in groups if len(self._spread(group)) > 1 and group not in spanning
        ]
        columns = [list(column) for g in spanning for column in zip(*self._spread(g), strict=True)]
        part = self._under.split(columns + apart)
        under = self._under.split(spanning)
        if len(spread) == 1:
            return here
        if not _is_even(spread):
            return part
        assert isinstance(here, SharedMemory)
        assert isinstance(part, Gloo)
        hosts = [[mine.index(rank) for rank in ranks] for ranks in spread]
        child = Hierarchical(here, part, hosts, mine.index(self.rank), under)
        child._parent = ref(self)
        self._children.append(child)
        return child

    def _spread(self, group: Sequence[int]) -> list[list[int]]:
        """Group the ranks in `group` by host. Hosts that have none of these ranks are omitted."""
        found = ([rank for rank in host if rank in group] for host in self._hosts)
        return [ranks for ranks in found if ranks]

    def forget(self) -> None:
        """Close the sockets of Gloo, because a rank is lost. See GlooExchange.forget."""
        assert isinstance(self._under, Gloo)
        self._between.messages.forget()
        self._under.messages.forget()

    def retire(self) -> Arena:
        """Close the group after ranks are lost. See SharedMemory.retire."""
        self.forget()
        for child in list(self._children):
            child.forget()
            child.close()
        self._between.close()
        arena = self._inside.retire()
        self._progress_thread.close()
        return arena

    def close(self) -> None:
        # Close children first, because they use this process's arena and sockets.
        for child in list(self._children):
            child.close()
        self._between.close()
        parent = self._parent() if self._parent is not None else None
        if parent is not None and self in parent._children:
            parent._children.remove(self)
            self._under.close()  # `inside` of the first group closes its own
        self._inside.close()
        self._progress_thread.close()


def _is_even(hosts: Hosts) -> bool:
    """Return whether ranks on these hosts can form a `Hierarchical` group."""
    counts = {len(ranks) for ranks in hosts}
    return len(hosts) > 1 and len(counts) == 1 and counts != {1}
