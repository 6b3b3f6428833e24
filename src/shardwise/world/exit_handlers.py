"""Registers functions that run when this process ends, but not when a forked child of it ends.

A forked child inherits the handlers of `atexit`. The handlers of a rank would wait for threads that
the child does not have, or close connections of its parent.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

_registered: list[Callable[[], Any]] = []


def register(function: Callable[[], Any]) -> None:
    """Call `function` at the end of this process, in reverse order of registration."""
    atexit.register(function)
    _registered.append(function)


def unregister(function: Callable[[], Any]) -> None:
    """Undo `register`."""
    atexit.unregister(function)
    _registered[:] = [each for each in _registered if each != function]


def _in_forked_child() -> None:
    for function in _registered:
        atexit.unregister(function)
    _registered.clear()


os.register_at_fork(after_in_child=_in_forked_child)
