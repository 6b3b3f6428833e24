"""Registers functions that run when this process exits, but not when a forked child exits.

A forked child inherits the handlers of `atexit`. If a rank's handlers ran in the child, they would
wait for threads that do not exist there, or close the parent's connections.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

_registered: list[Callable[[], Any]] = []


def register(function: Callable[[], Any]) -> None:
    """Call `function` when this process exits. Functions run in reverse order of registration."""
    atexit.register(function)
    _registered.append(function)


def unregister(function: Callable[[], Any]) -> None:
    atexit.unregister(function)
    _registered[:] = [each for each in _registered if each != function]


def _in_forked_child() -> None:
    # atexit cannot skip handlers in a child, so unregister them right after the fork.
    for function in _registered:
        atexit.unregister(function)
    _registered.clear()


os.register_at_fork(after_in_child=_in_forked_child)
