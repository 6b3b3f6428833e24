"""Gathers of whole buckets from the ranks' intervals, for as long as a unit needs them.

If ranks share memory, every bucket is already whole there. Otherwise a bucket is gathered into a
borrowed buffer, so that no pass allocates. User code may still hold a view of a buffer (a unit
returned its own weight, a hook kept a view). Such a buffer is not borrowed again, so its content
stays valid for the user.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shardwise.comm import Collectives, Handle
from shardwise.states.parameters.saved_references import Form, view_in_form
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.tiers.copy_stream import CopyStream
from shardwise.timeline import recorder

SAVED_VIEWS = 256
"""Number of views for saved-tensor references that a bucket caches."""


@dataclass(frozen=True, eq=False)
class WholeBucket:
    """A whole bucket, (numel,), and views of it."""

    flat: Tensor
    views: list[Tensor]
    """By slot, the value of its parameter."""
    addresses: list[int]
    """By slot, the address of that view."""
    saved_views: dict[Form, Tensor] = field(default_factory=dict)
    """Views that saved-tensor references have asked for."""

    def in_form(self, form: Form) -> Tensor:
        """Return the view of `flat` with offset, shape, strides and dtype `form`."""
        if form not in self.saved_views:
            # A model that slices its weights differently in every step would add views forever.
            if len(self.saved_views) == SAVED_VIEWS:
                self.saved_views.clear()
            with outside_of_inference():
                self.saved_views[form] = view_in_form(self.flat, form)
        return self.saved_views[form]


def whole_bucket(bucket: ShardedBucket, flat: Tensor) -> WholeBucket:
    """Make the views of `bucket`, whose values are in `flat`."""
    with outside_of_inference():
        views = bucket.views(flat)
    return WholeBucket(flat, views, [view.data_ptr() for view in views])


@dataclass(eq=False)
class Gather:
    """A pending gather of buckets.

    A bucket that is on a disk is loaded into its buffer first; `send` then starts its collective.
    """

    buffers: list[_Buffer]
    wholes: list[WholeBucket]
    loads: list[Future[Handle]]
    send: Callable[[int], Handle]
    handles: list[Handle]

    def wait(self) -> list[WholeBucket]:
        """Wait until all buckets are whole, and return them in order."""
        # In the order of the buckets, not of the loads' completion: all ranks must start these
        # collectives in the same order.
        for index, load in enumerate(self.loads):
            load.result().wait()
            self.handles.append(self.send(index))
        self.loads.clear()
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
        return self.wholes


def finished_gather(wholes: list[WholeBucket]) -> Gather:
    """Return the gather of buckets that are already whole."""
    return Gather([], wholes, [], lambda index: Handle(), [])


class BucketGathers(ABC):
    """Makes the buckets of a unit whole."""

    collective: bool
    """Whether all ranks must gather the same buckets in the same order."""

    @abstractmethod
    def start(self, buckets: Sequence[ShardedBucket]) -> Gather:
        """Start to gather `buckets`."""

    @abstractmethod
    def give_back(self, gather: Gather) -> None:
        """Release the buckets of `gather`."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; no gather may follow."""


class SharedMemoryGathers(BucketGathers):
    """Uses buckets in memory that the ranks share: nothing is sent."""

    collective = False

    def __init__(self) -> None:
        self._wholes: dict[ShardedBucket, WholeBucket] = {}

    def start(self, buckets: Sequence[ShardedBucket]) -> Gather:
        """Return the buckets in shared memory; nothing has to be gathered."""
        for bucket in buckets:
            if bucket not in self._wholes:
                assert bucket.common is not None
                self._wholes[bucket] = whole_bucket(bucket, bucket.common)
        return finished_gather([self._wholes[bucket] for bucket in buckets])

    def give_back(self, gather: Gather) -> None:
        """No-op: the shared memory stays."""

    def close(self) -> None:
        """No-op: there are no threads or buffers."""


@dataclass(eq=False)
class _Buffer:
    """Memory for one bucket at a time."""

    flat: Tensor
    unseen: int
    """Number of references to the memory while only this object uses it."""
    wholes: dict[ShardedBucket, WholeBucket] = field(default_factory=dict)
    """The views of every bucket that has been in this buffer."""
    last: Handle = field(default_factory=Handle)
    """The last gather: other ranks may still read this buffer for it."""

    def is_seen(self) -> bool:
        """Return whether other code holds a tensor in this memory."""
        # The count of a larger allocation includes references to its other parts, so it proves
        # nothing about this buffer, which is reused.
        if self.flat.untyped_storage().nbytes() > self.flat.numel() * self.flat.element_size():
            return False
        ours = sum(len(whole.views) + len(whole.saved_views) for whole in self.wholes.values())
        return _references(self.flat) > self.unseen + ours


class AllGathers(BucketGathers):
    """Gathers buckets over the group, each into a borrowed buffer."""

    collective = True

    def __init__(self, group: Collectives) -> None:
        self._group = group
        # First in, first out: a buffer that was just returned is overwritten as late as possible.
        self._spare: dict[tuple[int, torch.dtype, torch.device], deque[_Buffer]] = {}
        self.allocated = 0
        """Number of buffers allocated so far."""
        self._reader: ThreadPoolExecutor | None = None

    def start(self, buckets: Sequence[ShardedBucket]) -> Gather:
        """Start an all-gather of each bucket; a bucket on a disk is read first."""
        buffers = [self._borrow(bucket) for bucket in buckets]
        for bucket, buffer in zip(buckets, buffers, strict=True):
            if bucket not in buffer.wholes:
                buffer.wholes[bucket] = whole_bucket(bucket, buffer.flat)
        wholes = [buffer.wholes[bucket] for bucket, buffer in zip(buckets, buffers, strict=True)]

        def send(index: int) -> Handle:
            flat = wholes[index].flat
            launched = recorder.launched("all-gather", flat)
            # Remembered: other ranks may read this buffer after our own wait has ended.
            buffers[index].last = self._group.all_gather(flat, buckets[index].layout.cuts)
            return buffers[index].last.noted(launched)

        # In memory, this thread can start the copies and collectives at once. A disk must be read
        # first, in another thread, and `Gather.wait` starts the collectives.
        if all(bucket.storage.memory is not None for bucket in buckets):
            return Gather(buffers, wholes, [], send, self._load_and_send(buckets, wholes, send))
        if self._reader is None:
            # One thread: the store of a disk serves one user at a time.
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="shardwise-gather")
        loads = []
        for bucket, whole in zip(buckets, wholes, strict=True):
            copy_stream = bucket.storage.copy_stream
            scope = nullcontext() if copy_stream is None else copy_stream.from_here()
            loads.append(self._reader.submit(_load, bucket, whole.flat, copy_stream, scope))
        return Gather(buffers, wholes, loads, send, [])

    def _load_and_send(
        self,
        buckets: Sequence[ShardedBucket],
        wholes: Sequence[WholeBucket],
        send: Callable[[int], Handle],
    ) -> list[Handle]:
        """Load intervals that are in memory, and start their gathers.

        Intervals in host memory are copied to the accelerator while it computes.
        """
        # All buckets are on the same tier, so they share one copy stream.
        copy_stream = buckets[0].storage.copy_stream if buckets else None
        # On the copy stream: the gather of the next unit must not wait for this unit's compute.
        with nullcontext() if copy_stream is None else copy_stream.from_here():
            for bucket, whole in zip(buckets, wholes, strict=True):
                bucket.load(whole.flat)
                _hold(copy_stream, whole.flat)
            handles = [send(i) for i in range(len(buckets))]
            if copy_stream is not None:
                handles.append(_pending_copies(copy_stream))
        return handles

    def _borrow(self, bucket: ShardedBucket) -> _Buffer:
        spare = self._spare.setdefault(bucket.kind, deque())
        while spare:
            buffer = spare.popleft()
            buffer.last.reusable()  # first: the transport's own reference would count as a user's
            if not buffer.is_seen():
                return buffer
        self.allocated += 1
        with outside_of_inference():
            flat = self._group.allocate(*bucket.kind)
        return _Buffer(flat, _references(flat))

    def give_back(self, gather: Gather) -> None:
        """Return the buffers, so that later gathers can borrow them."""
        for buffer in gather.buffers:
            flat = buffer.flat
            self._spare[(flat.numel(), flat.dtype, flat.device)].append(buffer)

    def close(self) -> None:
        """Stop the thread that reads from a disk."""
        if self._reader is not None:
            self._reader.shutdown()


def _load(
    bucket: ShardedBucket,
    flat: Tensor,
    copy_stream: CopyStream | None,
    scope: AbstractContextManager[None],
) -> Handle:
    """Load an interval from a disk, with the copies to an accelerator in `scope`.

    Returns a handle of the copies. Waiting for it blocks the current stream, not the host.
    """
    with scope:
        bucket.load(flat)
        _hold(copy_stream, flat)
        return Handle() if copy_stream is None else _pending_copies(copy_stream)


def _hold(copy_stream: CopyStream | None, flat: Tensor) -> None:
    """Keep the allocator from reusing the memory of `flat` before the copies into it have ended.

    Otherwise it could, after a gather that no rank waited for.
    """
    if copy_stream is not None:
        copy_stream.used_here(flat)


def _pending_copies(copy_stream: CopyStream) -> Handle:
    """Return a handle that waits for all work queued on the current stream so far."""
    return Handle(partial(copy_stream.await_, copy_stream.here()))


@contextmanager
def outside_of_inference() -> Iterator[None]:
    """Context manager that makes normal tensors, even inside torch.inference_mode.

    Tensors that outlive a pass must not be inference tensors, which autograd rejects.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def _references(tensor: Tensor) -> int:
    """Count the tensors and storages that use the memory of `tensor`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
