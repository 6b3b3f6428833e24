"""Modules without memory, from `init_module(empty_init=True)` or from the meta device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

import shardwise as sw
from shardwise.engine.initial_values import fill_unrecorded
from shardwise.model import meta


def give_memory(module: nn.Module) -> None:
    """Give `module` memory, and the values that it would have without `empty_init`.

    Parameters that were built on the meta device outside of `init_module` are set by
    `reset_parameters`, as in FSDPStrategy. Raises ModelError if a module does not set them.
    """
    fill_unrecorded([module], sw.world().print)
    for name, parameter in module.named_parameters():
        if meta.is_deferred(parameter):
            meta.make_real(parameter, meta.materialise(parameter, name))


def casting(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager inside which `module` may be cast and moved."""
    # Parameters on the meta device that `init_module` has not made get memory first, because a
    # plain cast or move of them would fail. Those of `init_module` stay without memory: they
    # record casts and moves, to repeat them when they get memory.
    fill_unrecorded([module], sw.world().print)
    return sw.on_meta() if any(map(meta.is_deferred, module.parameters())) else nullcontext()
