"""Warns about loops that do not train: backward passes without a step, steps without an engine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Backwards(Protocol):
    """The backward passes of an engine since its last step.

    `stepping` is True once a step has started or failed.
    """

    @property
    def backwards(self) -> int: ...

    @property
    def stepping(self) -> bool: ...


class UnsteppedBackwards:
    """Warns at the end of a run if an engine ran backward passes with no step after them."""

    def __init__(self) -> None:
        self._engines: list[Backwards] = []

    def watch(self, engine: Backwards) -> None:
        """Include an engine's backward passes, even after the engine has been freed."""
        self._engines.append(engine)

    def words(self) -> str:
        """Return the warning, or "" if every backward pass was followed by a step."""
        # Skip engines whose step failed, because it raised its own error.
        left = sum(engine.backwards for engine in self._engines if not engine.stepping)
        if not left:
            return ""
        backwards = "1 backward was" if left == 1 else f"{left:,} backwards were"
        return (
            f"{backwards} never followed by a step, so the model did not learn from "
            f"{'it' if left == 1 else 'them'}: call engine.step() after engine.backward(loss)."
        )

    def warn(self) -> None:
        """Print the warning to stderr, unless the script ended with an exception."""
        words = self.words()
        # After an exception, a missing step is no surprise.
        if words and getattr(sys, "last_value", None) is None:
            print(f"shardwise: {words}", file=sys.stderr, flush=True)


class StepsWithoutEngine:
    """Warns once if a script with several workers steps its optimizers without an engine.

    It warns at an optimizer's second step rather than its first. `say` prints the warning.
    """

    def __init__(self, workers: int, say: Callable[[str], None]) -> None:
        self._workers = workers
        self._say = say
        self._steps: Counter[int] = Counter()
        self._has_warned = False
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def forget(self) -> None:
        """Stop watching, because there is an engine or the script needs none. Idempotent."""
        self._handle.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._has_warned:
            return  # don't remove the hook here: torch is iterating over its hooks

        self._steps[id(optimizer)] += 1
        if self._steps[id(optimizer)] == 2:
            self._has_warned = True
            self._say(
                f"{type(optimizer).__name__}.step() without an sw.Engine: each of the "
                f"{self._workers} workers trains its own separate model. Write engine = "
                "sw.Engine(model, optimizer), engine.backward(loss) and engine.step()."
            )
