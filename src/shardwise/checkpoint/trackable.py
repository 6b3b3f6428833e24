"""Gives generators and plain containers a state_dict, so that `engine.track` takes them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UsageError


@dataclass(frozen=True)
class _StateAdapter:
    """Gives an object a `state_dict` and a `load_state_dict`."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]

    def state_dict(self) -> Any:
        return self.get()

    def load_state_dict(self, state: Any) -> None:
        self.set(state)


def trackable(name: str, each: Any) -> Any:
    """`each` with `state_dict` and `load_state_dict`: as it is, or for it, where it is a generator
    (torch's, numpy's, random.Random), or a dict, list, deque or tensor, which is filled in place.

    Raises UsageError for anything else: a number, say, cannot be given its value back.
    """
    if all(callable(getattr(each, m, None)) for m in ("state_dict", "load_state_dict")):
        return each
    if isinstance(each, torch.Generator):
        return _StateAdapter(each.get_state, each.set_state)
    if isinstance(each, random.Random):
        return _StateAdapter(
            lambda: list(each.getstate()), lambda state: each.setstate(_tuple(state))
        )
    if hasattr(each, "bit_generator"):  # numpy's, which may not be loaded
        bits = each.bit_generator
        return _StateAdapter(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(each, dict):
        return _StateAdapter(lambda: dict(each), partial(_refill, each, each.update))
    if isinstance(each, list | deque):
        return _StateAdapter(lambda: list(each), partial(_refill, each, each.extend))
    if isinstance(each, Tensor):
        return _StateAdapter(each.detach, each.detach().copy_)
    raise UsageError(
        f"engine.track({name}=...) takes an object with state_dict() and load_state_dict(), a "
        f"generator, a dict, a list or a tensor, not {type(each).__name__}, which nothing can be "
        f"given back to. Keep it in a dict: {name}s = {{...}}; engine.track({name}s={name}s)."
    )


def _refill(each: Any, fill: Callable[[Any], None], state: Any) -> None:
    each.clear()
    fill(state)


def _tuple(state: Any) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(words), gauss
