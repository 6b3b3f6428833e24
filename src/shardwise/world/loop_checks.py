"""Warns of loops that train nothing: backwards without a step, and steps without an engine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Backwards(Protocol):
    """The accumulation of an engine; `stepping` when its step has begun, and maybe failed."""

    @property
    def backwards(self) -> int: ...

    @property
    def stepping(self) -> bool: ...


class UnsteppedBackwards:
    """Warns, once at the end of a run, of backwards that no step has followed: in any engine of
    this rank, those that are gone included."""

    def __init__(self) -> None:
        self._engines: list[Backwards] = []

    def watch(self, engine: Backwards) -> None:
        """Count from now on what is left in the accumulation of an `engine`, which goes on using
        it."""
        self._engines.append(engine)

    def words(self) -> str:
        """What there is to say; "" where every backward has had its step."""
        left = sum(engine.backwards for engine in self._engines if not engine.stepping)
        if not left:
            return ""
        backwards = "1 backward was" if left == 1 else f"{left:,} backwards were"
        return (
            f"{backwards} never followed by a step, so that nothing was learned of "
            f"{'it' if left == 1 else 'them'}: call engine.step() after engine.backward(loss)."
        )

    def warn(self) -> None:
        """Say it on stderr, unless the script has ended by an exception."""
        words = self.words()
        if words and getattr(sys, "last_value", None) is None:
            print(f"shardwise: {words}", file=sys.stderr, flush=True)


class StepsWithoutEngine:
    """Warns of a script that steps by hand on several workers: at the second step of an optimizer
    before there is an engine. `say` prints a line."""

    def __init__(self, workers: int, say: Callable[[str], None]) -> None:
        self._workers = workers
        self._say = say
        self._steps: Counter[int] = Counter()
        self._said = False
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def forget(self) -> None:
        """There is one, or nothing is expected of it; twice is harmless."""
        self._handle.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._said:
            return  # torch is going through its hooks: none may leave them here
        self._steps[id(optimizer)] += 1
        if self._steps[id(optimizer)] == 2:
            self._said = True
            self._say(
                f"{type(optimizer).__name__}.step() by hand, and no sw.Engine was made: each of "
                f"the {self._workers} workers trains a model of its own. Write engine = "
                "sw.Engine(model, optimizer), engine.backward(loss) and engine.step()."
            )
