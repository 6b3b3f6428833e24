"""What the device was asked for, in which order it may happen, and what is wrong with that.

Blocks are told by their first address; everything is in numbers and names, so that tables test it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
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
    """Memory that was allocated while `stream` was the present one; HOST for pinned memory."""

    nbytes: int
    stream: str
    made: str
    log: Log = field(default_factory=Log)
    recorded: set[str] = field(default_factory=set)
    """Streams that the allocator was told of by record_stream."""


class Order:
    """Follows kernels, events, synchronisations and memory; `where` says who asks, in words."""

    def __init__(self, where: Callable[[], str] = lambda: "") -> None:
        self.lock = threading.RLock()
        self._where = where
        self._clocks = Clocks()
        self._events: dict[int, dict[str, int]] = {}
        self._blocks: dict[int, Block] = {}
        self.nbytes = self.most_nbytes = 0
        self.begin()

    def begin(self) -> None:
        """Forget what was found and counted; what is in flight stays so."""
        with self.lock:
            self.races: list[str] = []
            self.kernels: Counter[str] = Counter()
            self.synchronisations: Counter[str] = Counter()
            self.most_nbytes = self.nbytes

    # Memory

    def allocated(self, address: int, nbytes: int, stream: str) -> None:
        """A block is there, for `stream`, or for HOST where it is pinned memory."""
        with self.lock:
            self._blocks[address] = Block(nbytes, stream, self._where())
            if stream != HOST:
                self.nbytes += nbytes
                self.most_nbytes = max(self.most_nbytes, self.nbytes)

    def record_stream(self, address: int, stream: str) -> None:
        """The allocator is told that `stream` uses a block of another one."""
        with self.lock:
            if (block := self._blocks.get(address)) is not None:
                block.recorded.add(stream)

    def freed(self, address: int) -> None:
        """A block may be used anew, at once, by what its own stream is asked for next.

        The allocator of pinned memory waits by itself for the copies that use a block.
        """
        with self.lock:
            block = self._blocks.pop(address, None)
            if block is None or block.stream == HOST:
                return
            self.nbytes -= block.nbytes
            for access in block.log.last:
                if access.who not in (HOST, *block.recorded) and not self._next(block, access):
                    self.races.append(
                        f"a block of {block.stream}, made by {block.made}, was freed by "
                        f"{self._where()} before this, without record_stream: {access}"
                    )
                    return

    def _next(self, block: Block, access: Access) -> bool:
        """Whether what the block's own stream is asked for next comes after `access`."""
        return any(
            self._clocks.has_seen(who, access.who, access.count) for who in (block.stream, HOST)
        )

    def is_pinned(self, address: int) -> bool:
        """Whether a block of pinned memory starts there."""
        block = self._blocks.get(address)
        return block is not None and block.stream == HOST

    # What is done

    def kernel(
        self, stream: str, name: str, reads: Iterable[Span] = (), writes: Iterable[Span] = ()
    ) -> None:
        """`stream` is asked to run `name`."""
        with self.lock:
            self.kernels[name] += 1
            self._clocks.learn(stream, self._clocks.of(HOST))
            self._accessed(stream, name, reads, writes)

    def by_host(self, name: str, reads: Iterable[Span] = (), writes: Iterable[Span] = ()) -> None:
        """The host does `name`, now."""
        with self.lock:
            self._accessed(HOST, name, reads, writes)

    def _accessed(
        self, who: str, name: str, reads: Iterable[Span], writes: Iterable[Span]
    ) -> None:
        count = self._clocks.tick(who)
        what = f"{name} in {self._where()}"
        for spans, wrote in ((reads, False), (writes, True)):
            for span in spans:
                block = self._blocks.get(span.block)
                if block is not None and span.first < span.end:
                    access = Access(span.first, span.end, who, count, wrote, what)
                    other = block.log.add(access, lambda old: self._seen(who, old))
                    if other is not None:
                        self.races.append(f"{access}, which is not in order with the {other}")

    def _seen(self, who: str, access: Access) -> bool:
        return self._clocks.has_seen(who, access.who, access.count)

    # Events and waits

    def moment(self, stream: str) -> Seen:
        """All that `stream` was asked for until now."""
        with self.lock:
            self._clocks.learn(stream, self._clocks.of(HOST))
            return dict(self._clocks.of(stream))

    def record(self, event: int, stream: str) -> None:
        """`event` is behind what `stream` was asked for."""
        with self.lock:
            self._events[event] = dict(self.moment(stream))

    def event(self, event: int) -> Seen:
        """What `event` is behind; nothing where it was not recorded."""
        return self._events.get(event, {})

    def wait(self, stream: str, seen: Seen) -> None:
        """`stream` goes on when `seen` has happened."""
        with self.lock:
            self._clocks.learn(stream, seen)

    def synchronize(self, seen: Seen | None, why: str) -> None:
        """The host waits for `seen`, or for everything."""
        with self.lock:
            self.synchronisations[f"{why} in {self._where()}"] += 1
            self._clocks.learn(HOST, self._clocks.everything() if seen is None else seen)

    def has_happened(self, seen: Seen) -> bool:
        """Whether the host has waited for all of `seen`; a device may be that far sooner."""
        with self.lock:
            return all(self._clocks.has_seen(HOST, who, count) for who, count in seen.items())
