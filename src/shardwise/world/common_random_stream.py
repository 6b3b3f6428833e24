"""Manages the random stream that all ranks share.

    init      every rank is seeded like a single process, and draws the same models and data
    engines   creating an engine draws no random numbers
    training  from the first batch or forward pass with gradients, each rank has its own seed

During training, a separate stream remembers the position that a single process would have.
`draw` and `shared_draws` continue from that position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakMethod

import torch

from shardwise.errors import UsageError
from shardwise.world.generator_states import GeneratorStates

T = TypeVar("T")


class CommonRandomStream:
    """The random stream that all ranks share.

    Args:
        device: The device that this rank computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[WeakMethod[Callable[[], None]]] = []
        self._end: GeneratorStates | None = None
        """Position of the stream, or None while this rank's own generators are at that position."""
        self._step: object = None
        self._batch: object = None
        self._starts: list[GeneratorStates] = []
        """Positions before each draw of this step, in call order."""
        self._calls = 0
        """Number of draws so far for the current micro-batch."""
        self._inside = 0
        """Depth of open `shared_draws` blocks."""
        self._boundary: GeneratorStates | None = None
        self.is_one = False
        """True once all ranks are known to share the stream, and each draws its own numbers."""
        self.used = False
        """True once anything was drawn from the stream, or a checkpoint restored it."""

    # -- when ranks start to draw their own numbers -----------------------------------------

    def wait(self, begin: Callable[[], None]) -> None:
        """Register `begin` (a bound method, held weakly) to be called when training starts."""
        self._waiting.append(WeakMethod(begin))

    def before_batch(self, batch: object) -> None:
        """Start training if the next batch is a training batch."""
        del batch
        if torch.is_grad_enabled():
            self.begin()

    def before_forward(self, module: Any, args: Any) -> None:
        """Start training if this forward pass records gradients. Registered as a model hook."""
        del module, args
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.begin()

    def begin(self) -> None:
        """Call the methods registered with `wait`, because training starts.

        Does nothing inside a `shared_draws` block, where all ranks draw the same numbers. In this
        case, training starts with the next batch.
        """
        if self._inside:
            return
        # Clear the list first, because a method may run a forward pass, which calls `begin` again.
        waiting, self._waiting = self._waiting, []
        for reference in waiting:
            if (begin := reference()) is not None:
                begin()

    def part(self) -> None:
        """Record the stream's position, before this rank's generators are reseeded."""
        # Only at the first call: later states of this rank's generators are not the common stream.
        if self._end is None:
            self._end = GeneratorStates.now(self._device)

    # -- draws that all ranks share ---------------------------------------------------------

    def meet(self, gather: Callable[[Any], list[Any]]) -> bool:
        """Use rank 0's stream on all ranks if their streams differ. Return whether they differed.

        `gather` returns every rank's value on all ranks. The call is collective until each rank has
        its own seed: before that, a draw on one rank advances only that rank's stream.
        """
        # Once all ranks share the stream, only `draw` and `shared_draws` advance it, on every rank.
        if self.is_one:
            return False
        is_apart, mine = self._end is not None, self._now()
        # Compare digests first, with 4 bytes per rank: the states take 5 kB, and are usually equal.
        gathered = gather((is_apart, mine.digest()))
        if len({digest for _, digest in gathered}) == 1:
            self.is_one = all(each for each, _ in gathered)
            return False
        first, *_ = gather(mine.plain())
        self._end, self.is_one = GeneratorStates.of_plain(first), True
        return True

    def draw(self, make: Callable[[], T], *, step: object, batch: object, goes_on: bool) -> T:
        """Return the result of `make()`, which draws from the shared stream.

        Args:
            make: Draws from the global generators.
            step: Identifies the step. All its micro-batches draw the same numbers, because a single
                process with all of them in one batch draws only once.
            batch: Identifies the micro-batch.
            goes_on: True if more micro-batches follow.
        """
        # Compare by identity: the Loader creates one object per step.
        if step is None or step is not self._step:
            self._step, self._starts = step, []
        if batch is not self._batch:
            self._batch, self._calls = batch, 0
        number, self._calls = self._calls, self._calls + 1
        # The first micro-batch records the position before each draw, and later ones start there.
        again = number < len(self._starts)
        start = self._starts[number] if again else self._now()
        if not again and (goes_on or self._starts):
            self._starts.append(start)
        self.used = True
        with self._at(start, moves=not again):
            return make()

    @contextmanager
    def shared_draws(self) -> Iterator[None]:
        """Inside the block, draw from the shared stream, and advance it."""
        self.used = True
        self._inside += 1
        try:
            with self._at(self._now(), moves=True):
                yield
        finally:
            self._inside -= 1

    def check_outside(self, call: str) -> None:
        """Raise UsageError if `call` is made inside a `shared_draws` block.

        A step reseeds each rank's generators, so the shared stream's position would be lost.
        """
        if self._inside:
            raise UsageError(
                f"{call} was called inside world.alike(): do not train in the block. In training, "
                "each worker draws its own numbers, but inside the block all workers draw the "
                "same. Put only the code that draws the batch into it; for a DataLoader: for "
                "batch in world.alike(loader)."
            )

    def _now(self) -> GeneratorStates:
        return self._end or GeneratorStates.now(self._device)

    @contextmanager
    def _at(self, start: GeneratorStates, *, moves: bool) -> Iterator[None]:
        """Set the generators to `start` inside the block, and restore them afterwards.

        If `moves` is true, the generators' state at the end of the block becomes the stream's
        position.
        """
        before = GeneratorStates.now(self._device)
        start.restore(self._device)
        try:
            yield
        finally:
            end = GeneratorStates.now(self._device)
            apart = self._end is not None
            if moves and apart:
                self._end = end
            # Before training, this rank's generators are the stream: keep their new position.
            (before if apart or not moves else end).restore(self._device)

    # -- at a step boundary -----------------------------------------------------------------

    def mark_boundary(self) -> None:
        """Record the stream's position after a completed step."""
        self._boundary = self._end

    def go_back_to_boundary(self) -> None:
        """Rewind to the last step boundary, because the current step will not be completed."""
        self._end = self._boundary or self._end

    @contextmanager
    def at_boundary(self) -> Iterator[None]:
        """Context manager for a save: inside the block, the stream is at the last step boundary.

        This process may have drawn numbers for the next step already. A process that loads the
        checkpoint draws the same numbers again.
        """
        now = self._end
        self.go_back_to_boundary()
        try:
            yield
        finally:
            self._end = now

    # -- in a checkpoint --------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return the position as JSON values, or None if nothing has been drawn before training."""
        return self._now().plain() if self.used or self._end is not None else None

    def restore(self, end: GeneratorStates) -> None:
        """Continue from the position `end`, read from a checkpoint."""
        self._end = self._boundary = end
        self.used = True
        self._step = self._batch = None
