"""What one case showed on the simulated device of one rank."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a function returned, and what was seen meanwhile."""

    result: Any
    races: list[str] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)
    synchronisations: dict[str, int] = field(default_factory=dict)
    """By cause and line, as `event in engine/loss_accumulation.py:12`; with "aside: " before it
    where not the thread that trains has waited."""
    pinned: int = 0
    """The most bytes of pinned memory at once."""


def followed(world: Any, function: Callable[..., Any], *args: Any) -> Report:
    """Run `function(world, *args)` and tell what was seen."""
    from tests.phantom.host import Host
    from tests.phantom.streams import Device

    Device.order.begin()
    with Host():
        result = function(world, *args)
        gc.collect()
    order = Device.order
    order.nbytes()  # what is freed is seen when somebody asks
    return Report(
        result=result,
        races=list(order.races),
        kernels=dict(order.kernels),
        synchronisations=dict(order.synchronisations),
        pinned=order.most_pinned_nbytes(),
    )
