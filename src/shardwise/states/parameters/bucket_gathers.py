"""Gathers full buckets from the ranks' intervals for as long as a unit needs them.

If ranks share memory, every full bucket is already there. Otherwise a bucket is gathered into a
borrowed buffer, so that forward and backward passes allocate no memory. User code may still hold a
view of a buffer, for example if a unit returned its own weight or a hook stored a view. Such a
buffer is never borrowed again, so the user's view stays valid.
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

from shardwise.comm import Handle
from shardwise.states.parameters.saved_references import Form, view_in_form
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.states.shard_groups import ShardGroups
from shardwise.states.storage.nf4_storage import ExpandingGather, NF4Storage, pack
from shardwise.tiers.copy_stream import CopyStream
from shardwise.timeline import recorder

SAVED_VIEWS = 256
"""Maximum number of views for saved-tensor references that are cached per bucket."""


@dataclass(frozen=True, eq=False)
class WholeBucket:
    """A gathered bucket: its flat memory, of shape (numel,), and views of that memory."""

    flat: Tensor
    views: list[Tensor]
    """View of each slot's parameter."""
    addresses: list[int]
    """Address of each of these views."""
    saved_views: dict[Form, Tensor] = field(default_factory=dict)
    """Cached views for saved-tensor references."""

    def in_form(self, form: Form) -> Tensor:
        """Return the view of `flat` with the offset, shape, strides and dtype in `form`."""
        if form not in self.saved_views:
            # Limit the cache: a model that slices its weights differently in every step would add
            # views forever.
            if len(self.saved_views) == SAVED_VIEWS:
                self.saved_views.clear()
            with outside_of_inference():
                self.saved_views[form] = view_in_form(self.flat, form)
        return self.saved_views[form]


def whole_bucket(bucket: ShardedBucket, flat: Tensor) -> WholeBucket:
    """Create the views for `bucket`, whose values are in `flat`."""
    with outside_of_inference():
        views = bucket.views(flat)
    return WholeBucket(flat, views, [view.data_ptr() for view in views])


@dataclass(eq=False)
class Gather:
    """A pending gather of buckets.

    Intervals on a disk are loaded first. `send` then starts the bucket's collective.
    """

    buffers: list[_Buffer]
    wholes: list[WholeBucket]
    loads: list[Future[Handle]]
    send: Callable[[int], Handle]
    handles: list[Handle]

    def wait(self) -> list[WholeBucket]:
        """Wait until all buckets are gathered, and return them in order."""
        # Go through the buckets in order, even if loads complete in a different order: all ranks
        # must start these collectives in the same order.
        for index, load in enumerate(self.loads):
            load.result().wait()
            self.handles.append(self.send(index))
        self.loads.clear()
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
        return self.wholes


def finished_gather(wholes: list[WholeBucket]) -> Gather:
    """Return a completed gather, for buckets that are already in memory."""
    return Gather([], wholes, [], lambda index: Handle(), [])


class BucketGathers(ABC):
    """Base class of the ways to gather a unit's buckets."""

    collective: bool
    """True if all ranks must gather the same buckets in the same order."""

    @abstractmethod
    def start(self, buckets: Sequence[ShardedBucket]) -> Gather:
        """Start gathering `buckets`, the buckets of one unit."""

    @abstractmethod
    def give_back(self, gather: Gather) -> None:
        """Release the buckets of `gather`."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. No gather may follow."""


class SharedMemoryGathers(BucketGathers):
    """Provides buckets in memory that the ranks share, so that nothing needs to be sent."""

    collective = False

    def __init__(self) -> None:
        self._wholes: dict[ShardedBucket, WholeBucket] = {}

    def start(self, buckets: Sequence[ShardedBucket]) -> Gather:
        """Return a completed gather of the buckets in shared memory."""
        for bucket in buckets:
            if bucket not in self._wholes:
                assert bucket.common is not None
                self._wholes[bucket] = whole_bucket(bucket, bucket.common)
        return finished_gather([self._wholes[bucket] for bucket in buckets])

    def give_back(self, gather: Gather) -> None:
        """No-op: the shared memory is permanent."""

    def close(self) -> None:
        """No-op: nothing needs to be released."""


@dataclass(eq=False)
class _Buffer:
    """A buffer that holds one gathered bucket at a time."""

    flat: Tensor
    unseen: int
    """Reference count of the memory if no other code uses it."""
    axis: str
    """The ranks whose buckets the buffer holds."""
    wholes: dict[ShardedBucket, WholeBucket] = field(default_factory=dict)
    """The views of every bucket that has used this buffer."""
    last: Handle = field(default_factory=Handle)
    """The last gather. Other ranks may still be reading this buffer for it."""

    def is_seen(self) -> bool:
        """Return whether other code holds a tensor in this buffer's memory."""
        # If the buffer is part of a larger allocation, the reference count includes references to
        # the other parts. It proves nothing about this buffer, which is therefore reused.
        if self.flat.untyped_storage().nbytes() > self.flat.numel() * self.flat.element_size():
            return False
        ours = sum(len(whole.views) + len(whole.saved_views) for whole in self.wholes.values())
        return _references(self.flat) > self.unseen + ours


class AllGathers(BucketGathers):
    """Gathers each bucket across its group, into a borrowed buffer.

    `collective` is False if every group consists of this rank alone, so that ranks may gather in
    different orders.
    """

    def __init__(self, groups: ShardGroups, *, collective: bool = True) -> None:
        self.collective = collective
        self._groups = groups
        # First in, first out: a buffer that was just returned is overwritten as late as possible.
        self._spare: dict[tuple[int, torch.dtype, torch.device, str], deque[_Buffer]] = {}
        self.allocated = 0
        """Number of buffers allocated so far."""
        self._reader: ThreadPoolExecutor | None = None

    def start(self, buckets: Sequence[ShardedBucket]) -> Gather:
        """Start an all-gather of each bucket. Intervals on a disk are read first."""
        buffers = [self._borrow(bucket) for bucket in buckets]
        for bucket, buffer in zip(buckets, buffers, strict=True):
            if bucket not in buffer.wholes:
                buffer.wholes[bucket] = whole_bucket(bucket, buffer.flat)
        wholes = [buffer.wholes[bucket] for bucket, buffer in zip(buckets, buffers, strict=True)]

        def send(index: int) -> Handle:
            flat, layout = wholes[index].flat, buckets[index].layout
            group, narrow = self._groups.of(layout), self._narrow(buckets[index])
            sent, cuts = flat, list(layout.cuts)
            if narrow is not None:
                sent, cuts = pack(narrow, layout.cuts, group.rank)
            launched = recorder.launched("all-gather", sent)
            handle = group.all_gather(sent, cuts)
            if narrow is not None:
                handle = ExpandingGather(handle, sent, cuts, layout.cuts, flat)
            # Remember the handle: other ranks may read this buffer after this rank's own wait has
            # returned.
            buffers[index].last = handle
            return handle.noted(launched)

        # If intervals are in memory, this thread can start the copies and collectives at once. A
        # disk must be read first, in a separate thread; `Gather.wait` then starts the collectives.
        if not any(bucket.storage.is_on_disk for bucket in buckets):
            return Gather(buffers, wholes, [], send, self._load_and_send(buckets, wholes, send))
        if self._reader is None:
            # A single thread, because only one thread at a time may use a disk store.
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="shardwise-gather")
        loads = []
        for bucket, whole in zip(buckets, wholes, strict=True):
            copy_stream = bucket.storage.copy_stream
            scope = nullcontext() if copy_stream is None else copy_stream.from_here()
            loads.append(self._reader.submit(_load, bucket, whole.flat, copy_stream, scope))
        return Gather(buffers, wholes, loads, send, [])

    def _narrow(self, bucket: ShardedBucket) -> NF4Storage | None:
        """Return the storage of `bucket` if it is gathered in 4 bits and expanded afterwards."""
        alone = self._groups.of(bucket.layout).size == 1
        return bucket.storage if isinstance(bucket.storage, NF4Storage) and not alone else None

    def _load_and_send(
        self,
        buckets: Sequence[ShardedBucket],
        wholes: Sequence[WholeBucket],
        send: Callable[[int], Handle],
    ) -> list[Handle]:
        """Load this rank's intervals, which are in memory, and start the gathers.

        Intervals in host memory are copied to the accelerator while it computes.
        """
        # All buckets are on the same tier, so they share a copy stream.
        copy_stream = buckets[0].storage.copy_stream if buckets else None
        # Use the copy stream, because the gather of the next unit must not wait for this unit's
        # compute.
        with nullcontext() if copy_stream is None else copy_stream.from_here():
            for bucket, whole in zip(buckets, wholes, strict=True):
                if self._narrow(bucket) is None:
                    bucket.load(whole.flat)
                _hold(copy_stream, whole.flat)
            handles = [send(i) for i in range(len(buckets))]
            if copy_stream is not None:
                handles.append(_pending_copies(copy_stream))
        return handles

    def _borrow(self, bucket: ShardedBucket) -> _Buffer:
        # A transport sends only memory of its own group without a copy, so don't mix them.
        spare = self._spare.setdefault((*bucket.kind, bucket.layout.axis), deque())
        while spare:
            buffer = spare.popleft()
            buffer.last.reusable()  # first: the transport's own reference would count as a user's
            if not buffer.is_seen():
                return buffer
        self.allocated += 1
        with outside_of_inference():
            flat = self._groups.of(bucket.layout).allocate(*bucket.kind)
        return _Buffer(flat, _references(flat), bucket.layout.axis)

    def give_back(self, gather: Gather) -> None:
        """Return the buffers, so that later gathers can borrow them."""
        for buffer in gather.buffers:
            flat = buffer.flat
            self._spare[(flat.numel(), flat.dtype, flat.device, buffer.axis)].append(buffer)

    def close(self) -> None:
        """Stop the thread that reads from the disk."""
        if self._reader is not None:
            self._reader.shutdown()


def _load(
    bucket: ShardedBucket,
    flat: Tensor,
    copy_stream: CopyStream | None,
    scope: AbstractContextManager[None],
) -> Handle:
    """Load this rank's interval of `bucket` from a disk. Copies to an accelerator run in `scope`.

    Returns a handle for the copies. Waiting for it blocks the current stream, not the host.
    """
    with scope:
        bucket.load(flat)
        _hold(copy_stream, flat)
        return Handle() if copy_stream is None else _pending_copies(copy_stream)


def _hold(copy_stream: CopyStream | None, flat: Tensor) -> None:
    """Prevent reuse of the memory of `flat` before the copies into it have completed.

    Needed because a gather may be discarded without waiting for it.
    """
    if copy_stream is not None:
        copy_stream.used_here(flat)


def _pending_copies(copy_stream: CopyStream) -> Handle:
    """Return a handle that waits for all work queued on the current stream so far."""
    return Handle(partial(copy_stream.await_, copy_stream.here()))


@contextmanager
def outside_of_inference() -> Iterator[None]:
    """Context manager inside which new tensors are normal, even in torch.inference_mode.

    Tensors that outlive a pass must not be inference tensors, which autograd rejects.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def _references(tensor: Tensor) -> int:
    """Return the number of tensors and storages that use the memory of `tensor`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
