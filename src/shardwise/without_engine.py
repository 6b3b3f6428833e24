"""A script that steps by hand on several workers, without any engine: said at its second step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class WithoutEngine:
    """Watches all optimizers of this process until there is an engine; `say` prints a line."""

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
