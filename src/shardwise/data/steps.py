"""Iterates over a Loader in passes, steps and micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise import timeline
from shardwise.data.source import Item, MicroBatch
from shardwise.errors import UsageError
from shardwise.world import sequence_parts
from shardwise.world.current_batch import Batch, StreamShape
from shardwise.world.sequence_parts import SequenceDim
from shardwise.world.survival import Survival
from shardwise.world.world import World


class LoaderPass:
    """Yields the micro-batches of one pass, and sets the world's current batch to each of them.

    It calls `stepped(micro)` when it yields the last micro-batch of a step. A checkpoint that is
    saved after this call continues with the next step.

    With `--survive`, `shared_again(repeats)` divides the rows among the remaining ranks. If
    `repeats` is true, it returns the micro-batches from the latest step onwards. Otherwise it
    returns those from the next step onwards, or None if the shares have not changed.
    """

    def __init__(
        self,
        items: Iterator[Item],
        *,
        world: World,
        name: str,
        plan: StreamShape,
        pinned: bool,
        stepped: Callable[[MicroBatch], None],
        shared_again: Callable[[bool], Iterator[Item] | None],
        sequence_dim: SequenceDim | None,
    ) -> None:
        self._items, self._sequence_dim = items, sequence_dim
        self._shared_again = shared_again
        self._world = world
        self._pinned = pinned
        self._stepped = stepped
        self.stream = world.current_batch.open(name, plan)
        self.open = True
        self._in_hand = False  # True if the current step has yielded samples to train on
        self._step: object = None
        self.tokens = self.positions = 0  # of the training batches of all ranks so far
        self._began = time.perf_counter()

    def steps(self, first: int) -> Iterator[LoaderStep]:
        """Yield the steps of this pass, numbered from `first`.

        Raises UsageError if the caller requests a step after using only some of the previous one's
        micro-batches.
        """
        try:
            self._log_step_request(self._world.step_log.began)
            for number, item in enumerate(iter(self._fetch_first, None), first):
                step = LoaderStep(self, item, number)
                yield step
                # A `break` does not get here. Leaving the loop in the middle of a step is allowed,
                # but continuing it is not.
                step._finish()
                self._log_step_request(self._world.step_log.asked)
        finally:
            self.close()

    def announce_tokens(self, epoch: int) -> None:
        """Print the tokens, the padding fraction and the speed of a training pass, if known."""
        if self.tokens:
            seconds = time.perf_counter() - self._began
            self._world.print(
                f"shardwise: epoch {epoch}: {self.tokens:,} tokens, "
                f"{1 - self.tokens / self.positions:.1%} padding, "
                f"{self.tokens / seconds:,.0f} tokens/s"
            )

    def report_collate_draws(self, micro: MicroBatch) -> None:
        """Tell the user once if a `collate_fn` makes batches depend on the number of workers."""
        # In the exact mode, micro-batches do not depend on the number of workers.
        if self._world.settings.exact is None and (self._world.data_size > 1 or micro.parts > 1):
            self._world.say_once(
                f"{self.stream.name}: collate_fn draws random numbers once per micro-batch, so its "
                "batches depend on the number of workers. Draw them in the dataset's __getitem__, "
                "which is seeded per sample"
            )

    def close(self) -> None:
        """Close the stream and drop the iterator over the data. Idempotent."""
        self.open = False
        self._world.current_batch.close(self.stream)
        self._world.step_log.closed(in_hand=self._in_hand)
        if self._in_hand and self._world.survival is not None:
            # After a `break`. A later forward pass is not repeated, so it must not be cut off.
            self._world.survival.in_step = False
        self._in_hand = False
        self._items = iter(())

    def hand_out(self, item: Item) -> Any:
        """Move the data of `item` to the device, make it the current batch, and return it."""
        self._check_open()
        micro, data = item
        with timeline.span("to the device", timeline.Row.DATA):
            data = to_device(data, self._world.device, non_blocking=self._pinned)
        sequence, world = None, self._world
        if world.context_size > 1:
            data, sequence = sequence_parts.cut(
                data,
                world.context_rank,
                world.context_size,
                call=self.stream.name,
                dim=self._sequence_dim,
            )
        elif self._sequence_dim is not None:  # find typos also on one worker
            sequence_parts.cut(data, 0, 1, call=self.stream.name, dim=self._sequence_dim)
        # A new object per step: batches that share it are micro-batches of the same step.
        if micro.part == 0:
            self._step = object()
        batch = Batch(
            samples=micro.samples,
            whole=micro.whole,
            last=micro.last,
            indices=micro.indices if micro.samples else (),  # a stand-in has no samples
            rows=micro.place,
            total=micro.total,
            sequence=sequence,
            step=self._step,
            tokens=micro.tokens,
            positions=micro.positions,
        )
        self._world.current_batch.give(self.stream, batch, training=torch.is_grad_enabled())
        if torch.is_grad_enabled():
            if micro.collate_draws:
                self.report_collate_draws(micro)
            self._world.step_log.given(micro.samples, micro.epoch)
            self._in_hand = True
            self.tokens += micro.tokens
            self.positions += micro.positions
        elif self._world.survival is not None:
            self._world.survival.has_counted = True
        if micro.last:
            self._stepped(micro)
        return data

    def sit_out(self, item: Item) -> None:
        """Skip an evaluation batch in which this rank has no samples."""
        self._check_open()
        self._world.current_batch.skipped_batches += 1
        if item[0].last:
            self._stepped(item[0])

    def some_ranks_skip(self) -> AbstractContextManager[None]:
        """Return a context manager in which ranks may run different numbers of forward passes."""
        return self._world.current_batch.some_ranks_skip()

    def next_item(self) -> Item:
        """Return the next micro-batch of the current step."""
        self._check_open()
        item = self._fetch()
        assert item is not None, "a step is whole"
        return item

    def again(self) -> Item:
        """Divide the latest step's rows again, and return this rank's first micro-batch."""
        self._check_open()
        self._items.close()  # type: ignore[attr-defined]
        items = self._shared_again(True)
        assert items is not None
        self._items = items
        self._world.step_log.given_again()
        item = self._fetch_first()
        assert item is not None, "the step had rows before"
        return item

    @property
    def survival(self) -> Survival | None:
        """Repeats steps after a loss. None during evaluation or without `--survive`."""
        return self._world.survival if torch.is_grad_enabled() else None

    def _fetch_first(self) -> Item | None:
        """Wait for the first micro-batch of the next step. Return None at the end of the pass."""
        if self._world.survival is None:
            return self._fetch()
        while True:
            # A rank that could finish its step after a loss still has the shares of all ranks.
            if (items := self._shared_again(False)) is not None:
                self._items = items
            generation, item = self._world.generation, self._fetch()
            if item is not None and (survival := self.survival) is not None:
                survival.before_step(self.stream)
            # An epoch begins with a collective, in which ranks may be lost too.
            if generation == self._world.generation:
                return item

    def _fetch(self) -> Item | None:
        """Wait for the next micro-batch and return it. Return None at the end of the pass."""
        with timeline.span("next batch", timeline.Row.DATA):
            return next(self._items, None)

    def skip_step(self, micro: MicroBatch, left: int) -> None:
        """Skip a full step. `left` of its micro-batches have not been read yet."""
        for _ in range(left):
            self.next_item()
        self._stepped(micro)

    def _log_step_request(self, log: Callable[[], None]) -> None:
        """Call `log` if the next step is requested by a training loop."""
        self._in_hand = False
        if torch.is_grad_enabled():
            log()

    def _check_open(self) -> None:
        if not self.open:
            raise UsageError(
                "This step belongs to a loop over the Loader that has ended. "
                "Take its micro-batches inside the loop."
            )


class LoaderStep:
    """The micro-batches of one step of the Loader. A step can be iterated over once.

    Attributes:
        number: Index of the step in its epoch, starting at 0.

    Example:
        ```python
        for step in loader.steps():
            for x, y in step:
                engine.backward(loss_fn(model(x), y))
            engine.step()
        ```
    """

    def __init__(self, whole: LoaderPass, first: Item, number: int) -> None:
        self.number = number
        self.plain = False  # True in a loop over the Loader itself, which calls engine.step()
        self._pass = whole
        self._first = first
        self._taken = 0

    def __len__(self) -> int:
        return self._first[0].parts

    def __iter__(self) -> Iterator[Any]:
        if self._taken:
            raise UsageError(
                f"Step {self.number} was already iterated over, and its batches are not kept. To "
                "use them twice, store them with list(step)."
            )
        yield from self._micro_batches()
        # A `break` does not get here. In a plain loop, engine.step() has run by now.
        if (survival := self._pass.survival) is not None:
            while survival.must_repeat():
                self._first, self._taken = self._pass.again(), 0
                yield from self._micro_batches()

    def _micro_batches(self) -> Iterator[Any]:
        if (survival := self._pass.survival) is not None:
            survival.begins(plain=self.plain)
        for part in range(len(self)):
            item = self._pass.next_item() if part else self._first
            self._taken += 1
            if item[0].all_have or torch.is_grad_enabled():
                yield self._pass.hand_out(item)
            else:
                yield from self._uneven(item)

    def _uneven(self, item: Item) -> Iterator[Any]:
        """Yield an evaluation batch that other ranks may skip, if this rank has rows in it."""
        # No stand-in here, unlike in training, because the loop's own sums (hits, losses) would
        # include it.
        with self._pass.some_ranks_skip():
            if item[0].samples:
                yield self._pass.hand_out(item)
            else:
                self._pass.sit_out(item)

    def _finish(self) -> None:
        # A loop may skip a complete step with `continue`. But if it took only part of a step, other
        # ranks would wait for this rank's gradients.
        if self._taken == 0:
            self._pass.skip_step(self._first[0], len(self) - 1)
        elif self._taken < len(self):
            raise UsageError(
                f"Step {self.number} has {len(self)} micro-batches, but the loop took only "
                f"{self._taken} of them. Take all of them, because the other ranks wait for the "
                "gradients of each. To end an epoch early, break out of the loop over the steps."
            )


def to_device(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """Return `batch` with its tensors on `device` and everything else unchanged.

    Visits tuples, lists, dicts, named tuples and dataclasses registered with torch's pytree. For an
    object with a `to` method (a PackedSequence, Hugging Face's BatchEncoding), calls that method.
    """

    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=non_blocking)
    # For the usual containers, this is faster than pytree.
    move = partial(to_device, device=device, non_blocking=non_blocking)
    if type(batch) in (list, tuple):
        return type(batch)(map(move, batch))
    if type(batch) is dict:
        return {key: move(value) for key, value in batch.items()}
    if _moves(batch):
        return batch.to(device)
    leaves, structure = pytree.tree_flatten(batch, is_leaf=_moves)
    is_leaf = len(leaves) == 1 and leaves[0] is batch
    return batch if is_leaf else pytree.tree_unflatten(map(move, leaves), structure)


def _moves(value: Any) -> bool:
    return callable(getattr(value, "to", None))
