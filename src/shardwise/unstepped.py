"""Backwards that no step has followed, said once at the end of a run: they have taught nothing."""

from __future__ import annotations

import sys
from typing import Protocol


class Window(Protocol):
    """What an engine has seen since its last step; `stepping` when that step began and failed."""

    @property
    def backwards(self) -> int: ...

    @property
    def stepping(self) -> bool: ...


class Unstepped:
    """The windows of all engines of this rank, those that are gone included."""

    def __init__(self) -> None:
        self._windows: list[Window] = []

    def watch(self, window: Window) -> None:
        """From now on count what is left in `window`, which its engine keeps using."""
        self._windows.append(window)

    def words(self) -> str:
        """What there is to say; "" where every backward has had its step."""
        left = sum(window.backwards for window in self._windows if not window.stepping)
        if not left:
            return ""
        backwards = "1 backward was" if left == 1 else f"{left:,} backwards were"
        return (
            f"{backwards} never followed by a step, so that nothing was learned of "
            f"{'it' if left == 1 else 'them'}: call engine.step() after engine.backward(loss)."
        )

    def tell(self) -> None:
        """Say it on stderr, unless the script has ended by an exception."""
        words = self.words()
        if words and getattr(sys, "last_value", None) is None:
            print(f"shardwise: {words}", file=sys.stderr, flush=True)
