"""LoaderPass is one pass over a Loader: it hands out steps, and the micro-batches of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise import timeline
from shardwise.data.source import Item, MicroBatch
from shardwise.errors import UsageError
from shardwise.world.current_batch import Batch, StreamShape
from shardwise.world.world import World


class LoaderPass:
    """Hands out the items of one pass, noting in the world's current batch what each holds.

    `stepped(total)` is called when the last micro-batch of a step is handed out: from then on
    the position lies behind that step.
    """

    def __init__(
        self,
        items: Iterator[Item],
        *,
        world: World,
        name: str,
        plan: StreamShape,
        pinned: bool,
        stepped: Callable[[int], None],
    ) -> None:
        self._items = items
        self._world = world
        self._pinned = pinned
        self._stepped = stepped
        self.stream = world.current_batch.open(name, plan)
        self.open = True
        self._in_hand = False  # samples to train on, since the last step was asked for
        self._step: object = None

    def steps(self, first: int) -> Iterator[LoaderStep]:
        """The steps of this pass, numbered from `first`; each is finished before the next."""
        try:
            self._tell_asked(self._world.step_log.began)
            for number, item in enumerate(iter(self._fetched, None), first):
                step = LoaderStep(self, item, number)
                yield step
                step._finish()
                self._tell_asked(self._world.step_log.asked)
        finally:
            self.close()

    def close(self) -> None:
        """Forget the stream and let go of what reads the data; closing twice is harmless."""
        self.open = False
        self._world.current_batch.close(self.stream)
        self._world.step_log.closed(in_hand=self._in_hand)
        self._in_hand = False
        self._items = iter(())

    def hand_out(self, item: Item) -> Any:
        """The data of `item` on the device; the current batch is this one when this returns."""
        self._check_open()
        micro, data = item
        with timeline.span("to the device", timeline.Row.DATA):
            data = to_device(data, self._world.device, non_blocking=self._pinned)
        if micro.part == 0:
            self._step = object()
        batch = Batch(
            samples=micro.samples,
            whole=micro.whole,
            last=micro.last,
            indices=_numbers(micro) if micro.samples else (),
            rows=micro.place,
            total=micro.total,
            step=self._step,
        )
        self._world.current_batch.give(self.stream, batch, training=torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self._world.step_log.given(micro.samples, micro.epoch)
            self._in_hand = True
        if micro.last:
            self._stepped(micro.total)
        return data

    def sit_out(self, item: Item) -> None:
        """Leave out the batch of an evaluation of which this rank has no sample."""
        self._check_open()
        self._world.current_batch.sat_out += 1
        if item[0].last:
            self._stepped(item[0].total)

    def some_sit_out(self) -> AbstractContextManager[None]:
        """Inside the block ranks run different numbers of forwards."""
        return self._world.current_batch.some_sit_out()

    def next_item(self) -> Item:
        """The next micro-batch of a step that has begun."""
        self._check_open()
        item = self._fetched()
        assert item is not None, "a step is whole"
        return item

    def _fetched(self) -> Item | None:
        """Wait for the next micro-batch; None at the end."""
        with timeline.span("next batch", timeline.Row.DATA):
            return next(self._items, None)

    def pass_over(self, micro: MicroBatch, left: int) -> None:
        """Leave a whole step out."""
        for _ in range(left):
            self.next_item()
        self._stepped(micro.total)

    def _tell_asked(self, tell: Callable[[], None]) -> None:
        """The next step is asked for now; of those to train on the log wants to know."""
        self._in_hand = False
        if torch.is_grad_enabled():
            tell()

    def _check_open(self) -> None:
        if not self.open:
            raise UsageError(
                "This step belongs to a loop over the Loader that has ended; "
                "take its micro-batches inside the loop."
            )


class LoaderStep:
    """The micro-batches of one step: iterate over it once. `number` counts from 0 in its epoch."""

    def __init__(self, whole: LoaderPass, first: Item, number: int) -> None:
        self.number = number
        self._pass = whole
        self._first = first
        self._taken = 0

    def __len__(self) -> int:
        return self._first[0].parts

    def __iter__(self) -> Iterator[Any]:
        if self._taken:
            raise UsageError(
                f"Step {self.number} was iterated before; keep its batches with list(step)."
            )
        for part in range(len(self)):
            item = self._pass.next_item() if part else self._first
            self._taken += 1
            if item[0].all_have or torch.is_grad_enabled():
                yield self._pass.hand_out(item)
            else:
                yield from self._uneven(item)

    def _uneven(self, item: Item) -> Iterator[Any]:
        """A batch of an evaluation that not all ranks have: who has no sample gets none, so that
        what a loop adds up is right by itself."""
        with self._pass.some_sit_out():
            if item[0].samples:
                yield self._pass.hand_out(item)
            else:
                self._pass.sit_out(item)

    def _finish(self) -> None:
        if self._taken == 0:
            self._pass.pass_over(self._first[0], len(self) - 1)
        elif self._taken < len(self):
            raise UsageError(
                f"Step {self.number} has {len(self)} micro-batches and {self._taken} were taken. "
                "Take all of them, so that every rank joins in every gradient and no sample is "
                "lost; to leave the epoch, break out of the loop over the steps."
            )


def _numbers(micro: MicroBatch) -> tuple[int, ...]:
    return tuple(index for index in micro.indices if isinstance(index, int))


def to_device(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """`batch` with its tensors on `device`; others stay as they are.

    Goes through tuples, lists, dicts, named tuples and dataclasses registered with torch's
    pytree. What has a `to` method of its own (a PackedSequence, Hugging Face's BatchEncoding) is
    moved by it.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if _moves(leaf) else leaf

    return pytree.tree_map(move, batch, is_leaf=_moves)


def _moves(value: Any) -> bool:
    return callable(getattr(value, "to", None))
