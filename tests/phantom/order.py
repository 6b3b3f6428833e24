"""The work of the device, its possible orders, and the errors that these allow.

Blocks are identified by their first address. Everything is numbers and names, so that tests can use
tables.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.phantom.accesses import Access, Log
from tests.phantom.clocks import HOST, Clocks, Seen


class Span(NamedTuple):
    """Bytes `first` to `end` (addresses) of the block that starts at `block`."""

    block: int
    first: int
    end: int


@dataclass
class Block:
    """Memory that was allocated while `stream` was current; HOST for pinned memory."""

    nbytes: int
    stream: str
    made: object
    log: Log = field(default_factory=Log)
    recorded: set[str] = field(default_factory=set)
    """Streams that record_stream has reported to the allocator."""


class Order:
    """Tracks kernels, events, waits and memory; `where()` returns the lines that asked."""

    def __init__(
        self,
        where: Callable[[], object] = lambda: "",
        released: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """`released()` returns the blocks that were freed since its last call."""
        self.lock = threading.RLock()
        self._where = where
        self._released = released
        self._clocks = Clocks()
        self._events: dict[int, dict[str, int]] = {}
        self._blocks: dict[int, Block] = {}
        self._nbytes = self._most_nbytes = 0
        self._held_back: list[tuple[Seen, int]] = []
        self._most_active_nbytes = 0
        self._pinned_nbytes = self._most_pinned_nbytes = 0
        self.begin()

    def begin(self) -> None:
        """Drop findings and counts; work in flight stays."""
        with self._now():
            self.races: list[str] = []
            self.kernels: Counter[str] = Counter()
            self.synchronisations: Counter[str] = Counter()
            self._most_nbytes = self._nbytes
            self._most_active_nbytes = self._active_nbytes()
            self._most_pinned_nbytes = self._pinned_nbytes

    def nbytes(self) -> int:
        """Return the bytes on the device now."""
        with self._now():
            return self._nbytes

    def most_nbytes(self) -> int:
        """Return the peak number of bytes since `begin` or `forget_most`."""
        with self._now():
            return self._most_nbytes

    def most_active_nbytes(self) -> int:
        """Return the peak of bytes since `begin`, with freed blocks that cannot be reused yet.

        torch calls it `active_bytes`.
        """
        with self._now():
            return self._most_active_nbytes

    def _active_nbytes(self) -> int:
        self._held_back = [each for each in self._held_back if not self._is_done(each[0])]
        return self._nbytes + sum(nbytes for _, nbytes in self._held_back)

    def most_pinned_nbytes(self) -> int:
        """Return the peak number of pinned bytes since `begin`."""
        with self._now():
            return self._most_pinned_nbytes

    def forget_most(self) -> None:
        """Reset the peak to the current number of bytes."""
        with self._now():
            self._most_nbytes = self._nbytes

    @contextmanager
    def _now(self) -> Iterator[None]:
        """Context manager for one thread at a time, after handling all freed blocks."""
        with self.lock:
            for address in self._released():
                self._free(address)
            yield

    # Memory

    def allocated(self, address: int, nbytes: int, stream: str) -> None:
        """Add a block of `stream`, or of HOST if it is pinned memory."""
        with self._now():
            self._blocks[address] = Block(nbytes, stream, self._where())
            if stream == HOST:
                self._pinned_nbytes += nbytes
                self._most_pinned_nbytes = max(self._most_pinned_nbytes, self._pinned_nbytes)
            else:
                self._nbytes += nbytes
                self._most_nbytes = max(self._most_nbytes, self._nbytes)
                self._most_active_nbytes = max(self._most_active_nbytes, self._active_nbytes())

    def record_stream(self, address: int, stream: str) -> None:
        """Tell the allocator that `stream` uses a block of another stream."""
        with self._now():
            block = self._blocks.get(address)
            if block is not None and stream != block.stream:  # the allocator checks that, too
                block.recorded.add(stream)

    def freed(self, address: int) -> None:
        """Free a block, which the next work on its own stream may reuse at once.

        The allocator of pinned memory waits itself for copies that use a block.
        """
        with self._now():
            self._free(address)

    def _free(self, address: int) -> None:
        block = self._blocks.pop(address, None)
        if block is None:
            return
        if block.stream == HOST:
            self._pinned_nbytes -= block.nbytes
            return
        self._nbytes -= block.nbytes
        if block.recorded:
            self._held_back.append((self._clocks.all_of(block.recorded), block.nbytes))
        for access in block.log.last:
            if access.who != HOST and not self._next(block, access):
                self.races.append(
                    f"a block of {block.stream}, made by {block.made}, was freed by "
                    f"{self._where()} before this, without record_stream: {access}"
                )
                return

    def _next(self, block: Block, access: Access) -> bool:
        """Return whether the next work on the block's own stream is ordered after `access`.

        The allocator makes it wait for the streams that record_stream has named.
        """
        known = (block.stream, HOST, *block.recorded)
        return any(self._clocks.has_seen(who, access.who, access.count) for who in known)

    def is_pinned(self, address: int) -> bool:
        """Return whether a block of pinned memory starts at `address`."""
        with self._now():
            block = self._blocks.get(address)
            return block is not None and block.stream == HOST

    def pinned(self, first: int, end: int) -> Span | None:
        """Return the bytes `first` to `end` (addresses), if they are in pinned memory."""
        with self._now():
            for address, block in self._blocks.items():
                if block.stream == HOST and address <= first < address + block.nbytes:
                    return Span(address, first, end)
            return None

    # Actions

    def kernel(
        self, stream: str, name: str, reads: Iterable[Span] = (), writes: Iterable[Span] = ()
    ) -> None:
        """Queue the kernel `name` on `stream`."""
        with self._now():
            self.kernels[name] += 1
            self._clocks.learn(stream, self._clocks.of(HOST))
            self._accessed(stream, name, reads, writes)

    def result(self, stream: str, name: str, span: Span) -> None:
        """Note that the last kernel of `stream` has made a block."""
        with self._now():
            self._accessed(stream, name, (), [span])

    def by_host(self, name: str, reads: Iterable[Span] = (), writes: Iterable[Span] = ()) -> None:
        """Run `name` on the host, now."""
        with self._now():
            self._accessed(HOST, name, reads, writes)

    def _accessed(self, who: str, name: str, reads: Iterable[Span], writes: Iterable[Span]) -> None:
        count = self._clocks.tick(who)
        where = self._where()
        for spans, wrote in ((reads, False), (writes, True)):
            for span in spans:
                block = self._blocks.get(span.block)
                if block is not None and span.first < span.end:
                    access = Access(span.first, span.end, who, count, wrote, name, where)
                    other = block.log.add(access, lambda old: self._seen(who, old))
                    if other is not None:
                        self.races.append(f"{access}, which is not in order with the {other}")

    def _seen(self, who: str, access: Access) -> bool:
        return self._clocks.has_seen(who, access.who, access.count)

    # Events and waits

    def moment(self, stream: str) -> Seen:
        """Return all work queued on `stream` so far."""
        with self._now():
            self._clocks.learn(stream, self._clocks.of(HOST))
            return dict(self._clocks.of(stream))

    def everything(self) -> Seen:
        """Return all work queued so far."""
        with self._now():
            return self._clocks.everything()

    def record(self, event: int, stream: str) -> None:
        """Record `event` after the work on `stream`."""
        with self._now():
            self._events[event] = dict(self.moment(stream))

    def event(self, event: int) -> Seen:
        """Return the work before `event`; empty if it was not recorded."""
        return self._events.get(event, {})

    def wait(self, stream: str, seen: Seen) -> None:
        """Order further work of `stream` after `seen`."""
        with self._now():
            self._clocks.learn(stream, seen)

    def synchronize(self, seen: Seen | None, why: str) -> None:
        """Make the host wait for `seen`, or for everything."""
        with self._now():
            self.synchronisations[f"{_thread()}{why} in {self._where()}"] += 1
            self._clocks.learn(HOST, self._clocks.everything() if seen is None else seen)

    def has_happened(self, seen: Seen) -> bool:
        """Return whether the host has waited for all of `seen`.

        A device may have finished it earlier.
        """
        with self._now():
            return self._is_done(seen)

    def _is_done(self, seen: Seen) -> bool:
        return all(self._clocks.has_seen(HOST, who, count) for who, count in seen.items())


OWN_THREADS = "shardwise-"
"""Prefixes of the names of threads that work in parallel with the training thread."""

ASIDE = "aside: "
"""Prefix of the causes of synchronisations in separate threads."""


def _thread() -> str:
    return ASIDE if threading.current_thread().name.startswith(OWN_THREADS) else ""
