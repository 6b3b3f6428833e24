"""Exchanges the messages of calls over Gloo, and finds out why a message does not arrive.

start      starts the receives, then the sends; large ones in a separate thread (the send thread)
wait       waits for the messages in the order in which they were started
compare    asks the sender of a missing message which call it is in (see watch/watchdog.py)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise.comm import gloo_messages
from shardwise.comm.base import GroupRanks
from shardwise.comm.mismatched_calls import mismatch_error
from shardwise.comm.progress_thread import PendingWork, ProgressThread
from shardwise.comm.torch_backend import explain, is_timeout, real_view, timeout_error
from shardwise.errors import CollectiveError, PeerLost
from shardwise.net import listeners
from shardwise.watch.status_server import StatusServer

PROBE = 1
"""Tag of messages that no rank receives. No call uses it."""

REMEMBERED = 64
"""Number of calls for which a rank remembers the messages it sent."""

SMALL = 1 << 14
"""Largest total size, in bytes, of messages that are started without the send thread."""


class Arrivals(Protocol):
    """A function that waits for all messages of a call.

    After each message, it calls `then` with the number of messages that have arrived. Each rank's
    first message is awaited before any second message. Hang reports do not count the time spent in
    `then` as waiting.
    """

    def __call__(self, then: Callable[[int], None] | None = None) -> None: ...


class GlooExchange:
    """Exchanges messages between the ranks of one group, over Gloo's point-to-point operations.

    `rank` is this rank, and `group` the torch process group. `timeout` is only used in error
    messages. Errors name the rank whose message is missing.
    """

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup | None,
        group_ranks: GroupRanks,
        timeout: timedelta | None,
        status_server: StatusServer,
    ) -> None:
        self._rank = rank
        self._group = group
        self._group_ranks = group_ranks
        self._timeout = timeout
        self._status_server = status_server
        self._calls = 0
        # The messages of failed calls stay here. Dropping a torch work object before its message
        # has arrived would shift the messages of later calls on that channel.
        self._unwaited: dict[int, list[tuple[int, dist.Work]]] = {}
        self.progress_thread = ProgressThread(status_server.waits)
        self._send_thread = ProgressThread(status_server.waits, name="shardwise-send")
        # Stops the threads and closes the sockets of a group that is collected without `close`.
        self._end = weakref.finalize(self, _end, group, self._send_thread, self.progress_thread)
        self._end.atexit = False
        self._sent: dict[int, dict[int, gloo_messages.Content]] = {}
        self._difference: CollectiveError | None = None
        self._channel = "all" if group is None else str(group.group_name)
        status_server.channels[self._channel] = self

    @property
    def others(self) -> list[int]:
        return [place for place in range(len(self._group_ranks.ranks)) if place != self._rank]

    def number(self) -> int:
        """Increment the call counter and return it. It is identical on all ranks."""
        self._calls += 1
        return self._calls

    def start(
        self,
        what: str,
        call: int,
        sends: gloo_messages.Messages,
        receives: gloo_messages.Messages,
        *,
        here: bool = False,
    ) -> Arrivals:
        """Start the messages to and from every other rank. Empty messages are not sent.

        Returns a function that waits for all of them. If `here` is true, even large messages are
        started in this thread. Raises CollectiveError if the group is closed.
        """
        # Check before any message is sent, because a forked child would send over its parent's
        # sockets.
        self._status_server.refuse_after_failure()
        self._send_thread.refuse_if_dismissed()
        # Another rank may ask for this if its wait takes too long (`_compare`).
        self._sent[call] = gloo_messages.contents(what, sends)
        awaited = gloo_messages.contents(what, receives)
        # Several calls may be old, because some calls send nothing and calls may start out of
        # order.
        for old in list(self._sent):
            if old <= call - REMEMBERED:
                self._sent.pop(old, None)
        works: list[tuple[int, dist.Work]] = []
        self._unwaited[call] = works
        start = partial(self._start, what, call, works, sends, receives)
        # Gloo writes to the socket in the calling thread until the socket is full, and blocks that
        # thread while data from the same rank is being received. That would stall a backward pass,
        # so the send thread starts large messages.
        if here or gloo_messages.nbytes(sends) + gloo_messages.nbytes(receives) <= SMALL:
            start()
            begun = None
        else:
            begun = self._send_thread.follow(start)
        # Do not pass the tensors: hang reports hold this function and must not keep their memory
        # alive.
        return partial(self._wait, what, call, begun, awaited)

    def follow(self, call: str, pending: PendingWork) -> None:
        """Wait for the progress thread's work. Hang reports list the ranks that it waits for."""
        with self._status_server.waits.noted(call, pending.missing):
            pending.wait()

    def forget(self) -> None:
        """Drop all pending messages and close the sockets of all groups of this process.

        Call this before `close` if a rank is lost. Otherwise pending messages would keep the
        sockets open, and a rank that waits for this one would not notice that this one no longer
        takes part.
        """
        self._unwaited.clear()
        # The script, an error's traceback or a waiting thread may still refer to a message, and
        # Gloo's own `abort` closes nothing.
        listeners.close_gloo()

    def close(self) -> None:
        """Stop the threads and leave torch's group."""
        # The send thread first, because it may hold tensors of calls that end with the group.
        self._send_thread.close()
        # Destroying torch's group ends the progress thread's waits, which would otherwise block
        # `close`.
        self._end()
        # The last reference: torch closes the sockets when it destroys the group, and other ranks
        # may wait for their end.
        self._group = None
        self.progress_thread.close()

    def _start(
        self,
        what: str,
        call: int,
        works: list[tuple[int, dist.Work]],
        sends: gloo_messages.Messages,
        receives: gloo_messages.Messages,
    ) -> None:
        rank = self._rank
        try:
            # Post receives first, on all ranks. Gloo then writes arriving data directly to its
            # destination, without a buffer.
            for peer, start, tensors in (
                ("group_src", dist.irecv, receives),
                ("group_dst", dist.isend, sends),
            ):
                for rank, tensor in gloo_messages.interleaved(tensors):
                    if tensor.numel():
                        tag, to = gloo_messages.tag(what, call, tensor), {peer: rank}
                        work = start(real_view(tensor), group=self._group, tag=tag, **to)
                        assert work is not None
                        works.append((rank, work))
        except RuntimeError as error:
            raise self._failed(error, f"{what} (call {call})", rank) from error

    def _wait(
        self,
        what: str,
        call: int,
        begun: PendingWork | None,
        awaited: dict[int, gloo_messages.Content],
        then: Callable[[int], None] | None = None,
    ) -> None:
        self._status_server.refuse_after_failure()
        if begun is not None:
            begun.wait()  # waits for the send thread, not for another rank
        works, first = self._unwaited[call], 0
        if then is not None:
            to_come = sum(len(lengths) for _, lengths, _ in awaited.values())
            while first < to_come:
                self._wait_for(works[first : first + 1], what, call, awaited)
                first += 1
                then(first)
        if first < len(works):
            self._wait_for(works[first:], what, call, awaited)
        del self._unwaited[call]

    def _wait_for(
        self,
        works: list[tuple[int, dist.Work]],
        what: str,
        call: int,
        awaited: dict[int, gloo_messages.Content],
    ) -> None:
        """Wait for some messages of a call.

        Hang reports first list all senders as missing, then only the one that is waited for.
        """
        now = sorted({place for place, _ in works})
        call_in_words, compare = f"{what} (call {call})", partial(self._compare, call, awaited, now)
        waits = self._status_server.waits
        with waits.noted(call_in_words, lambda: self._ranks(now), compare):
            for place, work in works:
                now[:] = [place]
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._failed(error, call_in_words, place) from error
                if self._difference is not None:
                    raise self._difference

    # -- errors ---------------------------------------------------------------------------

    def _failed(self, error: RuntimeError, call: str, other: int) -> CollectiveError:
        """Announce the failure to the other ranks, and return the error to raise.

        If another rank has already aborted, returns that rank's error.
        """
        speaker = self._group_ranks.speaker(self._rank)
        if (theirs := self._status_server.error_of_another(speaker)) is not None:
            return theirs
        found = explain(error, speaker, call, self._group_ranks.named([other]))
        if isinstance(found, PeerLost):
            lost = self._group_ranks.named({other, *self._unreachable()})
            found = explain(error, speaker, call, lost)
        elif is_timeout(error):
            seconds = self._timeout.total_seconds() if self._timeout else 0.0
            found = timeout_error(self._status_server, speaker, call, self._ranks([other]), seconds)
        self._status_server.announce_abort(found)
        return found

    def _unreachable(self) -> list[int]:
        """Return the group ranks to which messages can no longer be sent.

        If several ranks have exited, this includes the first, even if its exit was noticed later.
        """
        found = []
        for rank in self.others:
            probe = torch.zeros(1)
            try:
                work = dist.isend(probe, group=self._group, tag=PROBE, group_dst=rank)
            except RuntimeError:
                found.append(rank)
            else:
                assert work is not None
                self._unwaited.setdefault(-1, []).append((rank, work))
        return found

    def _ranks(self, places: Sequence[int]) -> list[int]:
        return [self._group_ranks.ranks[place] for place in places]

    # -- ranks in different calls ---------------------------------------------------------

    def _compare(
        self, call: int, contents: dict[int, gloo_messages.Content], now: list[int]
    ) -> None:
        """Stop waiting for a message if its sender is in a different collective."""
        if not now or (place := now[0]) not in contents or self._difference is not None:
            return
        server, awaited = self._status_server, gloo_messages.as_json(contents[place])
        rank = self._group_ranks.ranks[place]
        sent = server.ask_sent(rank, self._channel, call, self._rank)
        if sent is None or sent == awaited:
            return
        me = self._group_ranks.ranks[self._rank]
        here = f"{gloo_messages.in_words(awaited)} on rank {me}"
        there = f"{gloo_messages.in_words(sent)} on rank {rank}"
        theirs = server.error_of_another(self._group_ranks.speaker(self._rank))
        if theirs is not None:
            self._difference = theirs
        else:
            size = self._group_ranks.size
            self._difference = mismatch_error(server, call, here, there, size)
            server.announce_abort(self._difference)
        # This runs in the watchdog thread. The training thread is blocked inside Gloo, and only a
        # message with the expected tag and length wakes it. So ask the other rank to send one.
        server.ask_to_let_go(rank, self._channel, self._rank, [call, awaited])

    def sent(self, call: int, to: int) -> list[Any] | None:
        """Return a description of the messages that call number `call` has sent to rank `to`.

        Returns None if this rank has not reached that call.
        """
        sent = self._sent.get(call)
        return None if sent is None else gloo_messages.as_json(sent.get(to, gloo_messages.NOTHING))

    def let_go(self, to: int, awaited: list[Any]) -> None:
        """Unblock rank `to` by sending the message that it waits for, filled with zeros."""
        call, (what, lengths, dtype) = awaited
        for length in lengths:
            filler = torch.zeros(length, dtype=getattr(torch, dtype))
            tag = gloo_messages.tag(what, call, filler)
            try:
                work = dist.isend(real_view(filler), group=self._group, tag=tag, group_dst=to)
            except RuntimeError:  # that rank has exited
                return
            assert work is not None
            self._unwaited.setdefault(-1, []).append((to, work))


def _end(group: dist.ProcessGroup | None, *threads: ProgressThread) -> None:
    for thread in threads:
        thread.dismiss()
    with suppress(ValueError, AssertionError):  # already destroyed with the default group
        dist.destroy_process_group(group)
