"""Whole buckets out of intervals, for as long as a unit needs them.

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

from shardwise.collectives import Collectives, Handle
from shardwise.states.saved_references import Form, shaped
from shardwise.states.sharded_bucket import Slab
from shardwise.timeline import recorder

NOTED = 256
"""Forms of what autograd's notes asked for that a bucket remembers."""


@dataclass(frozen=True, eq=False)
class Whole:
    """A whole bucket in `flat`, and its parameters' views of it, by slot, with their addresses;
    `noted` are what autograd's notes asked for."""

    flat: Tensor
    views: list[Tensor]
    addresses: list[int]
    noted: dict[Form, Tensor] = field(default_factory=dict)

    def in_form(self, form: Form) -> Tensor:
        """What lies here in `form`, mostly made before."""
        if form not in self.noted:
            if len(self.noted) == NOTED:
                self.noted.clear()
            with outside_of_inference():
                self.noted[form] = shaped(self.flat, form)
        return self.noted[form]


def whole_of(slab: Slab, flat: Tensor) -> Whole:
    """The bucket of `slab`, which is in `flat`."""
    with outside_of_inference():
        views = slab.views(flat)
    return Whole(flat, views, [view.data_ptr() for view in views])


@dataclass(eq=False)
class Gather:
    """Buckets on their way: each first into its buffer from a disk, if it rests on one."""

    buffers: list[_Buffer]
    wholes: list[Whole]
    loads: list[Future[None]]
    send: Callable[[int], Handle]
    handles: list[Handle]

    def wait(self) -> list[Whole]:
        """The whole buckets, by slab."""
        for index, load in enumerate(self.loads):
            load.result()
            self.handles.append(self.send(index))
        self.loads.clear()
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
        return self.wholes


def there(wholes: list[Whole]) -> Gather:
    """Buckets that are whole already."""
    return Gather([], wholes, [], lambda index: Handle(), [])


class Gathers(ABC):
    """Where a unit's whole buckets come from."""

    collective: bool
    """Whether all ranks must gather the same slabs in the same order."""

    @abstractmethod
    def start(self, slabs: Sequence[Slab]) -> Gather:
        """Start to gather `slabs`."""

    @abstractmethod
    def give_back(self, gather: Gather) -> None:
        """What was gathered is needed no more."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more will be gathered."""


class InPlace(Gathers):
    """Every bucket lies whole in memory that the ranks share."""

    collective = False

    def __init__(self) -> None:
        self._wholes: dict[Slab, Whole] = {}

    def start(self, slabs: Sequence[Slab]) -> Gather:
        """The buckets as they lie."""
        return there([self._whole(slab) for slab in slabs])

    def _whole(self, slab: Slab) -> Whole:
        if slab not in self._wholes:
            assert slab.common is not None
            self._wholes[slab] = whole_of(slab, slab.common)
        return self._wholes[slab]

    def give_back(self, gather: Gather) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to end."""


@dataclass(eq=False)
class _Buffer:
    """Memory for one bucket at a time; `wholes` by the slabs that it has held."""

    flat: Tensor
    unseen: int
    """References to the memory when nobody but this object sees it."""
    wholes: dict[Slab, Whole] = field(default_factory=dict)
    last: Handle = field(default_factory=Handle)
    """The gather for which other ranks may still read it."""

    def is_seen(self) -> bool:
        """Whether anybody else still sees this memory, where it is not a part of other memory."""
        if self.flat.untyped_storage().nbytes() > self.flat.numel() * self.flat.element_size():
            return False
        ours = sum(len(whole.views) + len(whole.noted) for whole in self.wholes.values())
        return _references(self.flat) > self.unseen + ours


class ByAllGather(Gathers):
    """Buckets are gathered over the group, each into a borrowed buffer."""

    collective = True

    def __init__(self, group: Collectives) -> None:
        self._group = group
        # First in, first out: what was just let go is written again as late as can be.
        self._spare: dict[tuple[int, torch.dtype, torch.device], deque[_Buffer]] = {}
        self.made = 0
        """Buffers allocated so far."""
        self._reader: ThreadPoolExecutor | None = None

    def start(self, slabs: Sequence[Slab]) -> Gather:
        """Start an all-gather for each slab, or what must come before it."""
        buffers = [self._borrow(slab) for slab in slabs]
        for slab, buffer in zip(slabs, buffers, strict=True):
            if slab not in buffer.wholes:
                buffer.wholes[slab] = whole_of(slab, buffer.flat)
        wholes = [buffer.wholes[slab] for slab, buffer in zip(slabs, buffers, strict=True)]

        def send(index: int) -> Handle:
            flat = wholes[index].flat
            launched = recorder.launched("all-gather", flat)
            buffers[index].last = self._group.all_gather(flat, slabs[index].bucket.cuts)
            return buffers[index].last.noted(launched)

        if all(slab.held.memory is not None for slab in slabs):
            return Gather(buffers, wholes, [], send, self._load_and_send(slabs, wholes, send))
        loads = [self._read(slab, whole.flat) for slab, whole in zip(slabs, wholes, strict=True)]
        return Gather(buffers, wholes, loads, send, [])

    def _load_and_send(
        self, slabs: Sequence[Slab], wholes: Sequence[Whole], send: Callable[[int], Handle]
    ) -> list[Handle]:
        """Load intervals that are in memory and start their gathers; beside the work, where the
        memory is the host's and the work is an accelerator's."""
        beside = slabs[0].held.beside if slabs else None  # one tier, so one for all
        with nullcontext() if beside is None else beside.from_here():
            for slab, whole in zip(slabs, wholes, strict=True):
                slab.load(whole.flat)
            handles = [send(i) for i in range(len(slabs))]
            if beside is not None:
                handles.append(Handle(partial(beside.await_, beside.here())))
        return handles

    def _read(self, slab: Slab, flat: Tensor) -> Future[None]:
        """Read an interval from the disk beside what else is done; a store has one user only."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="shardwise-gather")
        beside = slab.held.beside
        return self._reader.submit(
            _load, slab, flat, nullcontext() if beside is None else beside.from_here()
        )

    def _borrow(self, slab: Slab) -> _Buffer:
        spare = self._spare.setdefault(slab.kind, deque())
        while spare:
            buffer = spare.popleft()
            buffer.last.reusable()  # until then the transport may see it too
            if not buffer.is_seen():
                return buffer
        self.made += 1
        with outside_of_inference():
            flat = self._group.allocate(*slab.kind)
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


def _load(slab: Slab, flat: Tensor, scope: AbstractContextManager[None]) -> None:
    """Load from a disk, with the copies to an accelerator in `scope`; they end with it."""
    with scope:
        slab.load(flat)


@contextmanager
def outside_of_inference() -> Iterator[None]:
    """What is made inside lasts, so it must not be an inference tensor."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _references(tensor: Tensor) -> int:
    """How many tensors and storages see the memory of `tensor`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
