"""Modules without memory: built by `init_module(empty_init=True)`, or on the meta device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

import shardwise as sw
from shardwise.engine.initial_values import fill_unrecorded
from shardwise.model import meta


def give_memory(module: nn.Module) -> None:
    """Give `module` memory, and the values that it has without `empty_init`.

    Parameters that were built on the meta device outside of `init_module` get the values of
    `reset_parameters`, as FSDPStrategy gives them. Raises ModelError if a module does not set them.
    """
    fill_unrecorded([module], sw.world().print)
    for name, parameter in module.named_parameters():
        if meta.is_deferred(parameter):
            meta.make_real(parameter, meta.materialise(parameter, name))


def casting(module: nn.Module) -> AbstractContextManager[None]:
    """Return a block in which `module` may be cast and moved.

    Parameters of `init_module` stay without memory. Others on the meta device get memory first,
    because a plain cast or move of them would fail.
    """
    fill_unrecorded([module], sw.world().print)
    # A deferred parameter must record casts and moves, to repeat them when it gets memory.
    return sw.on_meta() if any(map(meta.is_deferred, module.parameters())) else nullcontext()
