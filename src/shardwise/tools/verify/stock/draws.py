"""Logs which operations of a script draw random numbers, to name the one without a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.tools.verify import watching
from shardwise.tools.verify.stock import readers

MOST = 2000
"""Maximum number of entries. The first operation without a seed is usually among them."""


class DrawLog(TorchFunctionMode):
    """Logs random draws by comparing the states of all generators after each torch call.

    An entry is (operation, line of the script, library, hashes of the state before and after).
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, str, str, int, int | None]] = []
        self._states = readers.hash_random_states()

    def follow(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._compare("random or numpy.random")
        operation = getattr(func, "__name__", str(func))
        passed: Any = (kwargs or {}).get("generator")
        # `_compare` logs the default generator.
        is_own = isinstance(passed, torch.Generator) and passed is not torch.default_generator
        before = readers.hash_generator(passed) if is_own else None
        result = func(*args, **(kwargs or {}))
        self._compare(operation)
        if before is not None and len(self.entries) < MOST:
            line = watching.user_line() or "a library"
            self.entries.append((operation, line, "torch", before, readers.hash_generator(passed)))
        return result

    def _compare(self, operation: str) -> None:
        """Add an entry for each generator whose state has changed."""
        if len(self.entries) >= MOST:
            return
        states = readers.hash_random_states()
        for library, before in self._states.items():
            if (after := states.get(library)) != before:
                line = watching.user_line() or "a library"
                self.entries.append((operation, line, library, before, after))
        self._states = states


def first_without_seed(one: list[Any], other: list[Any]) -> str | None:
    """Return the first operation that drew from different states in the two runs, or None."""
    # Libraries use `random` to draw file names, so check torch's generators first.
    for wanted in ("torch", "cuda", "numpy", "random"):
        pairs = ([entry for entry in each if entry[2] == wanted] for each in (one, other))
        for (operation, line, _, *states), (*_, before, after) in zip(*pairs, strict=False):
            # A seed gives both runs the same state after it.
            if states[0] != before and states[1] != after:
                return f"{operation} in {line} draws random numbers ({wanted}) without a seed"
    return None
