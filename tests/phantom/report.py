"""The report of one case on the simulated device of one rank."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a function, and the observations of the device."""

    result: Any
    races: list[str] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)
    synchronisations: dict[str, int] = field(default_factory=dict)
    """By cause and line, as `event in engine/loss_accumulation.py:12`.

    Starts with "aside: " if a thread other than the training thread waited.
    """
    pinned: int = 0
    """Peak of pinned bytes."""


def followed(world: Any, function: Callable[..., Any], *args: Any) -> Report:
    """Run `function(world, *args)` and return its report."""
    from tests.phantom.host import Host
    from tests.phantom.streams import Device

    Device.order.begin()
    with Host():
        result = function(world, *args)
        gc.collect()
    order = Device.order
    order.nbytes()  # freed blocks are noticed only when they are looked up
    return Report(
        result=result,
        races=list(order.races),
        kernels=dict(order.kernels),
        synchronisations=dict(order.synchronisations),
        pinned=order.most_pinned_nbytes(),
    )
