"""Runs a rank's communication thread, which negotiates operations with rank 0 and executes them.

    any thread              this thread                               rank 0
    submit ─▶ queue, eventfd ─▶ request ──────────────────────────▶ coordinator
    wait   ◀───── done ◀── execute, on the transport ◀── responses, in one order for all ranks

The thread sleeps between operations. Every rank has one, and no other thread uses the transport.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from shardwise.comm import Collectives
from shardwise.errors import BadCall, HorovodInternalError
from shardwise.horovod.coordinator import (
    ADD_PROCESS_SET,
    JOIN,
    JOIN_KEY,
    REMOVE_PROCESS_SET,
    Coordinator,
    OperationKey,
    OperationRequest,
    Response,
)
from shardwise.horovod.execution import AgreedOperation, execute, joined_zeros
from shardwise.horovod.links import NegotiationMessage, send_up_to
from shardwise.horovod.operation_handle import OperationHandle
from shardwise.horovod.script_checks import ScriptComparison, warn_stalled, write_warning
from shardwise.horovod.streams import CommunicationStream, StreamEvent, enter
from shardwise.net.rpc import Link
from shardwise.timeline import Row, span
from shardwise.watch.status_server import forked_from

T = TypeVar("T")

DueResponse = tuple["Response | str", dict[int, int]]
"""A response to execute, or the reason why there will be no more responses.

The dict maps each rank to the number of bytes that must be sent to it before the execution.
"""

_living: WeakSet[BackgroundThread] = WeakSet()

SHUTDOWN_SECONDS = 10.0
"""Seconds that `close` waits for the thread to stop."""


class BackgroundThread:
    """Runs the communication thread of one rank.

    Args:
        group: The group of all ranks, with channels that nothing else uses.
        links: The link to rank 0 or, on rank 0, the links to all other ranks.
        device: The device on which this rank computes.
        timeout: Seconds after which an operation fails if some ranks have not requested it.
        warn_after: Seconds after which a warning names the ranks that have not requested it.
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
        self._stream = CommunicationStream(device)
        self._groups = {0: group}
        self._members: dict[int, tuple[int, ...]] = {0: tuple(range(group.size))}
        self._links = links
        self._coordinator = Coordinator(group.size) if group.rank == 0 else None
        self._script_comparison = ScriptComparison()
        # Guards the handles, the calls and the failure, which any thread reads and writes. The
        # other attributes belong to the communication thread and need no lock.
        self._lock = threading.Lock()
        self._handles: dict[OperationKey, OperationHandle] = {}
        self._executing: OperationHandle | None = None
        self._calls: set[Future[Any]] = set()
        self._failure: str | None = None
        self._responses: deque[DueResponse] = deque()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ended = False
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        for rank, link in links.items():
            self._selector.register(link.socket, link.events, rank)
        # A daemon thread, so that the process can exit even if other ranks never answer.
        self._thread = threading.Thread(target=self._run, name="shardwise-horovod", daemon=True)
        # A link may hold requests that were read together with its greeting, which the selector
        # does not report.
        for rank, link in links.items():
            self._post(partial(self._receive, rank, link))
        self._thread.start()
        _living.add(self)

    # -- called from other threads --------------------------------------------------------

    def submit(self, handle: OperationHandle) -> OperationHandle:
        """Queue an operation for the thread.

        Raises BadCall if an operation with the same name is in flight, and HorovodInternalError if
        the thread has stopped.
        """
        key = handle.request.key
        with self._lock:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            if key in self._handles:
                raise BadCall(
                    f"{handle.request.kind} {handle.request.name!r} was requested while another "
                    "operation of this name is in flight. Wait for that one first, or use another "
                    "name."
                )
            self._handles[key] = handle
        self._post(partial(self._request, handle.request))
        return handle

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread, because only it may use the transport. Return the result.

        Raises HorovodInternalError if the thread stops first.
        """
        future: Future[T] = Future()

        def answer() -> None:
            if future.done():  # `_fail_all` has already set an error
                return
            try:
                future.set_result(function())
            except Exception as error:  # re-raised in the caller
                future.set_exception(error)

        # Register the future, so that `_fail_all` can fail it if the thread stops.
        with self._lock:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            self._calls.add(future)
        try:
            self._post(answer)
            return future.result(self.timeout)
        finally:
            with self._lock:
                self._calls.discard(future)

    def group(self, number: int) -> Collectives:
        """Return the transport of a process set. Use it only inside a function passed to `call`."""
        return self._groups[number]

    def report_save(self, what: list[str]) -> None:
        """Report to rank 0, which compares all ranks' paths, that this rank saves a file."""
        if self._coordinator is not None:
            self._post(partial(self._compare_save, 0, what))
        else:
            self._post(partial(self._links[0].send, {"saved": what}))

    def close(self) -> None:
        """Stop the thread.

        In-flight operations fail, both on this rank and on ranks that wait for it.
        """
        self._post(self._leave)
        self._thread.join(SHUTDOWN_SECONDS)
        for link in self._links.values():
            link.close()
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._wakeup)
            # Close process sets first, because their transports were split from the transport of
            # all ranks.
            for number in sorted(self._groups, reverse=True):
                self._groups[number].close()

    def _post(self, what: Callable[[], None]) -> None:
        self._inbox.put(what)
        # After the end no thread reads the eventfd and, in a forked child, the parent would.
        if not self._ended:
            os.eventfd_write(self._wakeup, 1)

    # -- communication thread -------------------------------------------------------------

    def _run(self) -> None:
        enter(self._device)
        with torch.no_grad(), self._groups[0].status_server.waits.beside():
            try:
                while not self._ended:
                    self._wait_for_events()
                    self._check_stalls()
                    self._execute_all()
            except Exception as error:  # every wait raises it, here and on the other ranks
                self._fail_all(str(error) or type(error).__name__)
                self._ended = True
                for link in self._links.values():
                    link.close()

    def _wait_for_events(self) -> None:
        """Wait for messages from other ranks or calls from other threads, and handle them."""
        # Select must also return when a socket has room again for unsent bytes.
        for link in self._links.values():
            if link.is_open:
                rank = self._selector.get_key(link.socket).data
                self._selector.modify(link.socket, link.events, rank)
        seconds: float | None = None  # no limit
        if not self._inbox.empty() or self._responses:
            seconds = 0.0
        elif self._coordinator is not None and self._coordinator.waiting_since is not None:
            seconds = max(0.05, min(self._warn_after, 1.0))  # wake up to check for stalls
        for key, events in self._selector.select(seconds):
            if key.fd == self._wakeup:
                os.eventfd_read(self._wakeup)
                continue
            link = self._links[key.data]
            if events & selectors.EVENT_WRITE:
                link.flush()
            if events & selectors.EVENT_READ:
                self._receive(key.data, link)
        while True:
            try:
                self._inbox.get_nowait()()
            except Empty:
                return

    def _receive(self, rank: int, link: Link) -> None:
        if not link.is_open:
            return
        for message in link.read():
            self._handle_message(rank, message)
        if not link.is_open:
            self._selector.unregister(link.socket)
            self._remove_rank(rank, f"rank {rank} has ended. The cause is there: see its output.")

    def _handle_message(self, rank: int, message: NegotiationMessage) -> None:
        if "request" in message:
            assert self._coordinator is not None
            request = OperationRequest.from_json(message["request"])
            self._send_responses(self._coordinator.add_request(rank, request, time.monotonic()))
        elif "response" in message:
            self._responses.append((Response.from_json(message["response"]), {}))
        elif "saved" in message:
            self._compare_save(rank, message["saved"])
        else:
            self._remove_rank(rank, message["leave"])

    def _remove_rank(self, rank: int, why: str) -> None:
        """Handle the exit of a rank that has shut down or died."""
        if self._coordinator is not None:
            self._send_responses(self._coordinator.remove_rank(rank, why))
        else:
            # Rank 0 has exited, so no further operation can be agreed on. Queue this after the
            # responses that rank 0 sent before, because the other ranks execute those too.
            self._responses.append((why, {}))

    def _request(self, request: OperationRequest) -> None:
        if self._coordinator is not None:
            self._send_responses(self._coordinator.add_request(0, request, time.monotonic()))
        else:
            try:
                self._links[0].send({"request": request.as_json()})
            except (TypeError, ValueError) as error:  # not JSON: fails on this rank only
                with self._lock:
                    handle = self._handles.pop(request.key)
                handle.fail(f"{request.kind} {request.name!r} cannot be requested: {error}")

    def _compare_save(self, rank: int, what: list[str]) -> None:
        for line in self._script_comparison.compare_save(rank, what):
            write_warning(line)

    def _send_responses(self, responses: list[Response]) -> None:
        # Every rank, including rank 0, gets and executes them in this order. If two ranks entered
        # two collectives in different orders, they would wait for each other forever.
        for response in responses:
            for line in self._script_comparison.compare(response.notes):
                write_warning(line)
            others = [rank for rank in response.ranks if rank != 0 and self._links[rank].is_open]
            message = {"response": response.as_json()} if others else {}
            for rank in others:
                self._links[rank].send(message)
            if 0 in response.ranks:
                self._responses.append(
                    (response, {rank: self._links[rank].queued_bytes for rank in others})
                )

    # -- execution ------------------------------------------------------------------------

    def _execute_all(self) -> None:
        while self._responses:
            what, upto = self._responses.popleft()
            # The other members must have this response before rank 0 enters the collective. Inside
            # the collective this thread sends nothing, so they would never enter it.
            send_up_to(upto, self._links)
            self._execute(what)

    def _execute(self, response: Response | str) -> None:
        if isinstance(response, str):
            self._fail_all(response)
            return
        with self._lock:
            handle = self._executing = self._handles.pop(response.request.key, None)
            has_joined = JOIN_KEY in self._handles
        if response.error:
            assert handle is not None
            handle.fail(response.error, BadCall if response.is_bad_call else HorovodInternalError)
        elif response.request.kind == JOIN:
            assert handle is not None
            handle.succeed(response.number, StreamEvent())
        elif response.request.kind in (ADD_PROCESS_SET, REMOVE_PROCESS_SET):
            assert handle is not None
            self._change_process_sets(response)
            handle.succeed(response.number, StreamEvent())
        else:
            assert handle is not None or has_joined  # only joined ranks take part without a request
            self._communicate(response, handle)

    def _communicate(self, response: Response, handle: OperationHandle | None) -> None:
        request, number = response.request, response.request.process_set
        tensors = joined_zeros(request, self._device) if handle is None else handle.tensors
        try:
            dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
            details: dict[str, int | str] = {
                "bytes": sum(tensor.nbytes for tensor in tensors),
                "dtype": ", ".join(dtypes),
            }
            noted = span(f"{request.kind} {request.name}", Row.COMMUNICATION, details)
            with noted, self._stream.after(StreamEvent() if handle is None else handle.ready):
                self._stream.record_use(tensors)
                operation = AgreedOperation(
                    request,
                    tensors,
                    self._groups[number],
                    self._members[number],
                    response.rows,
                    in_place=handle is None or handle.in_place,
                )
                results = execute(operation)
                # After its wait, the caller may write to inputs and results. So wait until the
                # other ranks have read them.
                for sent in operation.sent:
                    sent.reusable()
                if handle is not None:
                    handle.succeed(results, StreamEvent.record(results))
        except Exception as error:
            if handle is not None:
                handle.fail(f"{request.kind} {request.name!r} failed: {error}")
            raise  # stops the thread, because other ranks may be at any point of this collective

    def _change_process_sets(self, response: Response) -> None:
        number = response.number
        if response.request.kind == ADD_PROCESS_SET:
            ranks = response.request.splits
            self._groups[number] = self._groups[0].split([list(ranks)])
            self._members[number] = ranks
        else:
            self._groups.pop(number).close()
            del self._members[number]

    # -- timeouts and shutdown ------------------------------------------------------------

    def _check_stalls(self) -> None:
        """Warn about operations that have waited too long. Fail those that exceed the timeout."""
        if self._coordinator is None:
            return
        now = time.monotonic()
        for request, missing in self._coordinator.stalled(now, self._warn_after):
            status_server = self._groups[0].status_server
            warn_stalled(request, missing, self._warn_after, self.timeout, status_server)
        self._send_responses(self._coordinator.time_out(now, self.timeout))

    def _leave(self) -> None:
        """Notify the other ranks that this rank is leaving, and stop the thread."""
        # First execute all agreed operations, because the other ranks have started them and wait
        # for this rank.
        self._execute_all()
        rank = self._groups[0].rank
        reason = f"rank {rank} has shut down, or has reached the end of its script"
        for link in self._links.values():
            if link.is_open:
                link.send({"leave": reason})
        self._fail_all("hvd.shutdown() was called, or the script has ended")
        self._ended = True

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

    def _leave_in_child(self) -> None:
        """In a forked child, which has no communication thread, make all operations fail."""
        # Another thread may have held any of these locks during the fork, so create new ones. The
        # parent reads the same eventfd, so do not write to it any more.
        self._lock = threading.Lock()
        self._inbox = SimpleQueue()
        self._calls.clear()
        self._ended = True
        self._failure = forked_from(self._groups[0].rank)
        for handle in [*self._handles.values(), self._executing]:
            if handle is not None and not handle.is_done:
                handle.fail_in_child(self._failure)
        self._handles.clear()


def _fail_all_in_child() -> None:
    for background in list(_living):
        background._leave_in_child()


os.register_at_fork(after_in_child=_fail_all_in_child)
