"""The thread that negotiates and communicates, so that the others need not.

    any thread            this thread                                rank 0
    submit ─▶ queue, bell ─▶ ask ─────────────────────────────────▶ coordinator
    wait   ◀───── done ◀──── do, with the verbs of a transport ◀─── verdicts, in one order for all

Between operations it sleeps. Every rank has one, which is the only one to use its transport.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from shardwise.collectives import Collectives
from shardwise.errors import BadCall, HorovodInternalError
from shardwise.horovod import stall
from shardwise.horovod.coordinator import ADD, REMOVE, Coordinator, Verdict
from shardwise.horovod.habits import Comparison, warn
from shardwise.horovod.handles import Handle
from shardwise.horovod.links import Link, Message, send_up_to
from shardwise.horovod.operations import Job, perform, zeros_of
from shardwise.horovod.requests import JOIN, JOINED, Key, Request
from shardwise.horovod.streams import Moment, Side
from shardwise.timeline import Row, span

T = TypeVar("T")

Due = tuple["Verdict | str", dict[int, int]]
"""What to do, or why there is no more to come; and, by rank, how much must be sent before."""

LEAVING = 10.0
"""Seconds that the thread has to end."""


class Background:
    """The thread of one rank. `links` lead to rank 0, or from it to all others.

    `group` are all ranks, over channels that nobody else uses; `timeout` and `warn_after` in
    seconds bound how long an operation waits for ranks that do not ask for it.
    """

    def __init__(
        self,
        group: Collectives,
        links: dict[int, Link],
        device: torch.device,
        timeout: float,
        warn_after: float,
    ) -> None:
        self.timeout = timeout
        self._warn_after = min(warn_after, timeout)
        self._device = device
        self._side = Side(device)
        self._groups = {0: group}
        self._members: dict[int, tuple[int, ...]] = {0: tuple(range(group.size))}
        self._links = links
        self._coordinator = Coordinator(group.size) if group.rank == 0 else None
        self._habits = Comparison()
        self._lock = threading.Lock()
        self._handles: dict[Key, Handle] = {}
        self._calls: set[Future[Any]] = set()
        self._failure: str | None = None
        self._due: deque[Due] = deque()
        self._told: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ends = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for rank, link in links.items():
            self._selector.register(link.socket, link.events, rank)
        # A daemon, since the end of a process must not wait for ranks that never come.
        self._thread = threading.Thread(target=self._run, name="shardwise-horovod", daemon=True)
        for rank, link in links.items():
            self._told.put(partial(self._hear, rank, link))  # what has come with the hello
        self._tell(lambda: None)
        self._thread.start()

    # -- for other threads ----------------------------------------------------------------

    def submit(self, handle: Handle) -> Handle:
        """Ask for an operation. Raises BadCall for a name that is on its way, HorovodInternalError
        where there can be no more of them."""
        key = handle.request.key
        with self._lock:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            if key in self._handles:
                raise BadCall(
                    f"{handle.request.kind} {handle.request.name!r} was asked for while another "
                    "operation of this name is on its way: wait for that one first, or give "
                    "another name."
                )
            self._handles[key] = handle
        self._tell(partial(self._ask, handle.request))
        return handle

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns, called by the thread: the transport is its own. Raises
        HorovodInternalError where the thread has ended, or does before it comes to it."""
        future: Future[T] = Future()

        def answer() -> None:
            if future.done():
                return
            try:
                future.set_result(function())
            except Exception as error:  # raised again where it was asked for
                future.set_exception(error)

        with self._lock:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            self._calls.add(future)
        try:
            self._tell(answer)
            return future.result(self.timeout)
        finally:
            with self._lock:
                self._calls.discard(future)

    def members(self, number: int) -> tuple[int, ...]:
        """The ranks of a process set."""
        return self._members[number]

    def group(self, number: int) -> Collectives:
        """The transport of a process set, for `call`."""
        return self._groups[number]

    def see(self, what: list[str]) -> None:
        """Tell rank 0 of something that this rank does, to be compared with what others do."""
        if self._coordinator is not None:
            self._tell(partial(self._see, 0, what))
        else:
            self._tell(partial(self._links[0].send, {"seen": what}))

    def close(self) -> None:
        """Leave: what is on its way fails, here and where it waits for this rank."""
        self._tell(self._leave)
        self._thread.join(LEAVING)
        for link in self._links.values():
            link.close()
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._bell)
            for number in sorted(self._groups, reverse=True):
                self._groups[number].close()

    def _tell(self, what: Callable[[], None]) -> None:
        self._told.put(what)
        if not self._ends:
            os.eventfd_write(self._bell, 1)

    # -- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        with torch.no_grad(), self._groups[0].status_server.waits.beside():
            try:
                while not self._ends:
                    self._look()
                    self._mind_time()
                    self._do_all()
            except Exception as error:  # shown by every wait, here and on the other ranks
                self._break(str(error) or type(error).__name__)

    def _look(self) -> None:
        """Wait until somebody says something, here or on another rank."""
        for link in self._links.values():
            if link.is_open:
                rank = self._selector.get_key(link.socket).data
                self._selector.modify(link.socket, link.events, rank)
        for key, events in self._selector.select(self._patience()):
            if key.fd == self._bell:
                os.eventfd_read(self._bell)
                continue
            link = self._links[key.data]
            if events & selectors.EVENT_WRITE:
                link.flush()
            if events & selectors.EVENT_READ:
                self._hear(key.data, link)
        while True:
            try:
                self._told.get_nowait()()
            except Empty:
                return

    def _hear(self, rank: int, link: Link) -> None:
        if not link.is_open:
            return
        for message in link.read():
            self._mind(rank, message)
        if not link.is_open:
            self._selector.unregister(link.socket)
            self._lose(rank, f"rank {rank} is gone. The cause is there; see its own output.")

    def _mind(self, rank: int, message: Message) -> None:
        if "ask" in message:
            assert self._coordinator is not None
            request = Request.from_json(message["ask"])
            self._decide(self._coordinator.ask(rank, request, time.monotonic()))
        elif "do" in message:
            self._due.append((Verdict.from_json(message["do"]), {}))
        elif "seen" in message:
            self._see(rank, message["seen"])
        else:
            self._lose(rank, message["leave"])

    def _lose(self, rank: int, why: str) -> None:
        """A rank has left, by itself or not."""
        if self._coordinator is not None:
            self._decide(self._coordinator.leave(rank, why))
        else:
            self._due.append((why, {}))

    def _ask(self, request: Request) -> None:
        if self._coordinator is not None:
            self._decide(self._coordinator.ask(0, request, time.monotonic()))
        else:
            try:
                self._links[0].send({"ask": request.as_json()})
            except (TypeError, ValueError) as error:  # not JSON: nobody else need know of it
                with self._lock:
                    handle = self._handles.pop(request.key)
                handle.fail(f"{request.kind} {request.name!r} cannot be asked for: {error}")

    def _see(self, rank: int, what: list[str]) -> None:
        for line in self._habits.see(rank, what):
            warn(line)

    def _decide(self, verdicts: list[Verdict]) -> None:
        """Tell all whom they concern, in one order."""
        for verdict in verdicts:
            for line in self._habits.compare(verdict.notes):
                warn(line)
            others = [rank for rank in verdict.to if rank != 0 and self._links[rank].is_open]
            for rank in others:
                self._links[rank].send({"do": verdict.as_json()})
            if 0 in verdict.to:
                self._due.append((verdict, {rank: self._links[rank].given for rank in others}))

    # -- doing it -------------------------------------------------------------------------

    def _do_all(self) -> None:
        while self._due:
            what, upto = self._due.popleft()
            send_up_to(upto, self._links)
            self._do(what)

    def _do(self, verdict: Verdict | str) -> None:
        if isinstance(verdict, str):
            self._fail_all(verdict)
            return
        with self._lock:
            handle = self._handles.pop(verdict.request.key, None)
            has_joined = JOINED in self._handles
        if verdict.error:
            assert handle is not None
            handle.fail(verdict.error, BadCall if verdict.mistake else HorovodInternalError)
        elif verdict.request.kind == JOIN:
            assert handle is not None
            handle.succeed(verdict.number, Moment())
        elif verdict.request.kind in (ADD, REMOVE):
            assert handle is not None
            self._change_sets(verdict)
            handle.succeed(verdict.number, Moment())
        else:
            assert handle is not None or has_joined  # zeros are for those alone
            self._communicate(verdict, handle)

    def _communicate(self, verdict: Verdict, handle: Handle | None) -> None:
        request, number = verdict.request, verdict.request.members
        tensors = zeros_of(request, self._device) if handle is None else handle.tensors
        try:
            noted = span(f"{request.kind} {request.name}", Row.COMMUNICATION, _about(tensors))
            with noted, self._side.after(Moment() if handle is None else handle.ready):
                self._side.lend(tensors)
                job = Job(
                    request,
                    tensors,
                    self._groups[number],
                    self._members[number],
                    verdict.rows,
                    in_place=handle is None or handle.in_place,
                )
                results = perform(job)
                for sent in job.sent:  # who waits may write to what was given, or has come
                    sent.reusable()
                if handle is not None:
                    handle.succeed(results, Moment.now(results))
        except Exception as error:
            if handle is not None:
                handle.fail(f"{request.kind} {request.name!r} failed: {error}")
            raise

    def _change_sets(self, verdict: Verdict) -> None:
        number = verdict.number
        if verdict.request.kind == ADD:
            ranks = verdict.request.splits
            self._groups[number] = self._groups[0].split([list(ranks)])
            self._members[number] = ranks
        else:
            self._groups.pop(number).close()
            del self._members[number]

    # -- time and ends --------------------------------------------------------------------

    def _patience(self) -> float | None:
        """Seconds until something may have waited too long."""
        if self._told.empty() is False or self._due:
            return 0.0
        oldest = self._coordinator.oldest if self._coordinator is not None else None
        if oldest is None:
            return None
        return max(0.05, min(self._warn_after, 1.0))

    def _mind_time(self) -> None:
        """Warn of what waits for long, and end what has waited for too long."""
        if self._coordinator is None:
            return
        now = time.monotonic()
        for request, missing in self._coordinator.stalled(now, self._warn_after):
            status_server = self._groups[0].status_server
            stall.warn(request, missing, self._warn_after, self.timeout, status_server)
        self._decide(self._coordinator.overdue(now, self.timeout))

    def _leave(self) -> None:
        """Do what has been agreed on, in which the others count on this rank; then tell them that
        it takes part in nothing any more."""
        self._do_all()
        rank = self._groups[0].rank
        said = f"rank {rank} has shut down, or come to the end of its script"
        for link in self._links.values():
            if link.is_open:
                link.send({"leave": said})
        self._fail_all("hvd.shutdown() was called, or the script has come to its end")
        self._ends = True

    def _break(self, why: str) -> None:
        """The transport has failed, or we have: nothing can be done any more."""
        self._fail_all(why)
        self._ends = True
        for link in self._links.values():
            link.close()

    def _fail_all(self, why: str) -> None:
        with self._lock:
            self._failure = self._failure or why
            handles = list(self._handles.values())
            self._handles.clear()
            calls = [future for future in self._calls if not future.done()]
        for future in calls:
            future.set_exception(HorovodInternalError(why))
        for handle in handles:
            request = handle.request
            handle.fail(f"{request.kind} {request.name!r} cannot be done: {why}")


def _about(tensors: Sequence[torch.Tensor]) -> dict[str, int | str]:
    """What a timeline shows beside an operation."""
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    return {"bytes": sum(tensor.nbytes for tensor in tensors), "dtype": ", ".join(dtypes)}
