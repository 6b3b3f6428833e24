"""Keeps the random stream that all ranks draw from alike, before and after each draws for itself.

    init      seeded as one process is: every rank draws what that draws, models and data
    engines   are made, and move no generator
    training  the first batch, or forward, to train on: each rank is seeded for its own draws

What one process would go on to draw is kept as a stream beside: `draw` takes it up, wherever the
generators of this rank are by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakMethod

import torch

from shardwise.errors import UsageError
from shardwise.world.randomness import GeneratorStates

T = TypeVar("T")


class CommonRandomStream:
    """The random stream that all ranks have in common; `device` is where this one computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[WeakMethod[Callable[[], None]]] = []
        self._end: GeneratorStates | None = None
        self._step: object = None
        self._batch: object = None
        self._starts: list[GeneratorStates] = []
        self._calls = 0
        self._inside = 0
        self._boundary: GeneratorStates | None = None
        self.is_one = False
        """Whether all ranks are known to have it from now on, whatever they draw besides."""
        self.used = False
        """Whether anything was drawn from it, or it was taken up from a checkpoint."""

    # -- when ranks go apart ----------------------------------------------------------------

    def wait(self, begin: Callable[[], None]) -> None:
        """Call `begin` (a bound method, held weakly) when training begins."""
        self._waiting.append(WeakMethod(begin))

    def before_batch(self, batch: object) -> None:
        """A batch is about to be handed out: with one to train on, training begins."""
        del batch
        if torch.is_grad_enabled():
            self.begin()

    def before_forward(self, module: Any, args: Any) -> None:
        """The same of a forward, as a hook on a model."""
        del module, args
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.begin()

    def begin(self) -> None:
        """Training begins, or goes on: let those who wait for it know.

        Not inside `alike`, whose generators are everyone's: the next batch or forward comes soon.
        """
        if self._inside:
            return
        waiting, self._waiting = self._waiting, []
        for reference in waiting:
            if (begin := reference()) is not None:
                begin()

    def part(self) -> None:
        """The generators of this process are about to be seeded for this rank alone."""
        if self._end is None:
            self._end = GeneratorStates.now(self._device)

    # -- what is drawn alike ----------------------------------------------------------------

    def meet(self, gather: Callable[[Any], list[Any]]) -> bool:
        """Take rank 0's stream where those of the ranks differ; returns whether they did.

        `gather` gives every rank's value to all. Collective until all ranks draw for themselves:
        before, whatever one of them draws alone takes it away from the others.
        """
        if self.is_one:
            return False
        apart, mine = self._end is not None, self._now()
        told = gather((apart, mine.digest()))
        if len({digest for _, digest in told}) == 1:
            self.is_one = all(each for each, _ in told)
            return False
        first, *_ = gather(mine.plain())
        self._end, self.is_one = GeneratorStates.of_plain(first), True
        return True

    def draw(self, make: Callable[[], T], *, step: object, batch: object, goes_on: bool) -> T:
        """What `make` draws from the stream, alike on all ranks.

        Each `batch` of one `step`, which `goes_on` beyond this one, draws the same: a process that
        has all of them as one batch draws once.
        """
        if step is None or step is not self._step:
            self._step, self._starts = step, []
        if batch is not self._batch:
            self._batch, self._calls = batch, 0
        number, self._calls = self._calls, self._calls + 1
        again = number < len(self._starts)
        start = self._starts[number] if again else self._now()
        if not again and (goes_on or self._starts):
            self._starts.append(start)
        self.used = True
        with self._at(start, moves=not again):
            return make()

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Inside the block the generators are those of the stream."""
        self.used = True
        self._inside += 1
        try:
            with self._at(self._now(), moves=True):
                yield
        finally:
            self._inside -= 1

    def check_outside(self, call: str) -> None:
        """Raise UsageError for a `call` inside `alike`: a step seeds each rank's generators for
        what it draws by itself, and the stream would be lost."""
        if self._inside:
            raise UsageError(
                f"{call} inside world.alike(): do not train in the block. Each worker draws for "
                "itself in training, and the block is for what all draw alike. Enter it around "
                "what draws the batch alone; for a DataLoader: for batch in world.alike(loader)."
            )

    def _now(self) -> GeneratorStates:
        return self._end or GeneratorStates.now(self._device)

    @contextmanager
    def _at(self, start: GeneratorStates, *, moves: bool) -> Iterator[None]:
        """Inside the block generators go on from `start`; where it `moves` the stream, that is
        where they have come to by the end."""
        before = GeneratorStates.now(self._device)
        start.restore(self._device)
        try:
            yield
        finally:
            end = GeneratorStates.now(self._device)
            apart = self._end is not None
            if moves and apart:
                self._end = end
            (before if apart or not moves else end).restore(self._device)

    # -- at a step boundary -----------------------------------------------------------------

    def mark_boundary(self) -> None:
        """Know where the stream is after the step that was just made."""
        self._boundary = self._end

    def go_back_to_boundary(self) -> None:
        """Undo what was drawn since, for a step that will not follow."""
        self._end = self._boundary or self._end

    @contextmanager
    def at_boundary(self) -> Iterator[None]:
        """Inside the block what was drawn since is undone, for a step that others are to make."""
        now = self._end
        self.go_back_to_boundary()
        try:
            yield
        finally:
            self._end = now

    # -- in a checkpoint --------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Where the stream is, as JSON; None before training where nobody has drawn from it."""
        return self._now().plain() if self.used or self._end is not None else None

    def restore(self, end: GeneratorStates) -> None:
        """Go on from `end`."""
        self._end = self._boundary = end
        self.used = True
        self._step = self._batch = None
