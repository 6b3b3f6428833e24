"""Gathers whole buckets out of the ranks' intervals, for as long as a unit needs them.

Where ranks share memory a bucket is there already. Elsewhere it is gathered into a buffer that is
borrowed and goes back, so that no pass allocates. A buffer that somebody still sees when its turn
comes again (a unit returned its own weight, a hook kept a view) is left to them: what they see
stays as it was.
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
from shardwise.states.parameters.saved_references import Form, shaped
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.tiers.copy_stream import CopyStream
from shardwise.timeline import recorder

SAVED_VIEWS = 256
"""Views for saved-tensor references that a bucket remembers."""


@dataclass(frozen=True, eq=False)
class WholeBucket:
    """A whole bucket in `flat`, and its parameters' views of it, by slot, with their addresses;
    `saved_views` are those that saved-tensor references asked for."""

    flat: Tensor
    views: list[Tensor]
    addresses: list[int]
    saved_views: dict[Form, Tensor] = field(default_factory=dict)

    def in_form(self, form: Form) -> Tensor:
        """What lies here in `form`, mostly made before."""
        if form not in self.saved_views:
            if len(self.saved_views) == SAVED_VIEWS:
                self.saved_views.clear()
            with outside_of_inference():
                self.saved_views[form] = shaped(self.flat, form)
        return self.saved_views[form]


def whole_of(bucket: ShardedBucket, flat: Tensor) -> WholeBucket:
    """The views of `bucket`, which is whole in `flat`."""
    with outside_of_inference():
        views = bucket.views(flat)
    return WholeBucket(flat, views, [view.data_ptr() for view in views])


@dataclass(eq=False)
class Gather:
    """A gather of buckets under way: each first into its buffer from a disk, if it rests on one."""

    buffers: list[_Buffer]
    wholes: list[WholeBucket]
    loads: list[Future[Handle]]
    send: Callable[[int], Handle]
    handles: list[Handle]

    def wait(self) -> list[WholeBucket]:
        """Return when the buckets are whole: these, in order."""
        for index, load in enumerate(self.loads):
            load.result().wait()
            self.handles.append(self.send(index))
        self.loads.clear()
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
        return self.wholes


def there(wholes: list[WholeBucket]) -> Gather:
    """Buckets that are whole already."""
    return Gather([], wholes, [], lambda index: Handle(), [])


class BucketGathers(ABC):
    """A way to make a unit's buckets whole."""

    collective: bool
    """Whether all ranks must gather the same buckets in the same order."""

    @abstractmethod
    def start(self, buckets: Sequence[ShardedBucket]) -> Gather:
        """Start to gather `buckets`."""

    @abstractmethod
    def give_back(self, gather: Gather) -> None:
        """What was gathered is needed no more."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more will be gathered."""


class SharedMemoryGathers(BucketGathers):
    """Finds every bucket whole in memory that the ranks share: nothing is sent."""

    collective = False

    def __init__(self) -> None:
        self._wholes: dict[ShardedBucket, WholeBucket] = {}

    def start(self, buckets: Sequence[ShardedBucket]) -> Gather:
        """The buckets as they lie."""
        return there([self._whole(bucket) for bucket in buckets])

    def _whole(self, bucket: ShardedBucket) -> WholeBucket:
        if bucket not in self._wholes:
            assert bucket.common is not None
            self._wholes[bucket] = whole_of(bucket, bucket.common)
        return self._wholes[bucket]

    def give_back(self, gather: Gather) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to end."""


@dataclass(eq=False)
class _Buffer:
    """Memory for one bucket at a time; `wholes` by the buckets that were in it."""

    flat: Tensor
    unseen: int
    """References to the memory when nobody but this object sees it."""
    wholes: dict[ShardedBucket, WholeBucket] = field(default_factory=dict)
    last: Handle = field(default_factory=Handle)
    """The gather for which other ranks may still read it."""

    def is_seen(self) -> bool:
        """Whether anybody else still sees this memory, where it is not a part of other memory."""
        if self.flat.untyped_storage().nbytes() > self.flat.numel() * self.flat.element_size():
            return False
        ours = sum(len(whole.views) + len(whole.saved_views) for whole in self.wholes.values())
        return _references(self.flat) > self.unseen + ours


class AllGathers(BucketGathers):
    """Gathers buckets over the group, each into a borrowed buffer."""

    collective = True

    def __init__(self, group: Collectives) -> None:
        self._group = group
        # First in, first out: what was just let go is written again as late as can be.
        self._spare: dict[tuple[int, torch.dtype, torch.device], deque[_Buffer]] = {}
        self.made = 0
        """Buffers allocated so far."""
        self._reader: ThreadPoolExecutor | None = None

    def start(self, buckets: Sequence[ShardedBucket]) -> Gather:
        """Start an all-gather for each bucket, or what must come before it."""
        buffers = [self._borrow(bucket) for bucket in buckets]
        for bucket, buffer in zip(buckets, buffers, strict=True):
            if bucket not in buffer.wholes:
                buffer.wholes[bucket] = whole_of(bucket, buffer.flat)
        wholes = [buffer.wholes[bucket] for bucket, buffer in zip(buckets, buffers, strict=True)]

        def send(index: int) -> Handle:
            flat = wholes[index].flat
            launched = recorder.launched("all-gather", flat)
            # Remembered: other ranks may read this buffer after our own wait has ended.
            buffers[index].last = self._group.all_gather(flat, buckets[index].layout.cuts)
            return buffers[index].last.noted(launched)

        if all(bucket.storage.memory is not None for bucket in buckets):
            return Gather(buffers, wholes, [], send, self._load_and_send(buckets, wholes, send))
        loads = [
            self._read(bucket, whole.flat) for bucket, whole in zip(buckets, wholes, strict=True)
        ]
        return Gather(buffers, wholes, loads, send, [])

    def _load_and_send(
        self,
        buckets: Sequence[ShardedBucket],
        wholes: Sequence[WholeBucket],
        send: Callable[[int], Handle],
    ) -> list[Handle]:
        """Load intervals that are in memory and start their gathers; beside the work, where the
        memory is the host's and the work is an accelerator's."""
        copy_stream = (
            buckets[0].storage.copy_stream if buckets else None
        )  # one tier, so one for all
        # On the copy stream: the gather of the next unit must not wait for this one's compute.
        with nullcontext() if copy_stream is None else copy_stream.from_here():
            for bucket, whole in zip(buckets, wholes, strict=True):
                bucket.load(whole.flat)
                _hold(copy_stream, whole.flat)
            handles = [send(i) for i in range(len(buckets))]
            if copy_stream is not None:
                handles.append(_until(copy_stream))
        return handles

    def _read(self, bucket: ShardedBucket, flat: Tensor) -> Future[Handle]:
        """Read an interval from the disk beside what else is done; a store has one user only."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="shardwise-gather")
        copy_stream = bucket.storage.copy_stream
        scope = nullcontext() if copy_stream is None else copy_stream.from_here()
        return self._reader.submit(_load, bucket, flat, copy_stream, scope)

    def _borrow(self, bucket: ShardedBucket) -> _Buffer:
        spare = self._spare.setdefault(bucket.kind, deque())
        while spare:
            buffer = spare.popleft()
            buffer.last.reusable()  # until then the transport may see it too
            if not buffer.is_seen():
                return buffer
        self.made += 1
        with outside_of_inference():
            flat = self._group.allocate(*bucket.kind)
        return _Buffer(flat, _references(flat))

    def give_back(self, gather: Gather) -> None:
        """Let the buffers be borrowed again."""
        for buffer in gather.buffers:
            flat = buffer.flat
            self._spare[(flat.numel(), flat.dtype, flat.device)].append(buffer)

    def close(self) -> None:
        """End the thread that reads from a disk."""
        if self._reader is not None:
            self._reader.shutdown()


def _load(
    bucket: ShardedBucket,
    flat: Tensor,
    copy_stream: CopyStream | None,
    scope: AbstractContextManager[None],
) -> Handle:
    """Load from a disk, with the copies to an accelerator in `scope`; the handle is of their end,
    for which the present stream waits and not the host."""
    with scope:
        bucket.load(flat)
        _hold(copy_stream, flat)
        return Handle() if copy_stream is None else _until(copy_stream)


def _hold(copy_stream: CopyStream | None, flat: Tensor) -> None:
    """Keep the memory of `flat` from others until what goes there has come, also of a gather that
    nobody waits for."""
    if copy_stream is not None:
        copy_stream.used_here(flat)


def _until(copy_stream: CopyStream) -> Handle:
    """A handle of what the present stream has until now."""
    return Handle(partial(copy_stream.await_, copy_stream.here()))


@contextmanager
def outside_of_inference() -> Iterator[None]:
    """What is made inside lasts, so it must not be an inference tensor."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _references(tensor: Tensor) -> int:
    """How many tensors and storages see the memory of `tensor`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
