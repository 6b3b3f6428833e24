"""Allocates modules that were created by `init_module(empty_init=True)` or on the meta device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

import shardwise as sw
from shardwise.engine.initial_values import fill_unrecorded
from shardwise.model import meta


def give_memory(module: nn.Module) -> None:
    """Allocate `module`'s parameters, and give them the values that they get without `empty_init`.

    Parameters that were created on the meta device outside `init_module` are initialised by
    `reset_parameters`, as in FSDPStrategy. Raises ModelError if that method leaves any unset.
    """
    fill_unrecorded([module], sw.world().print)
    for name, parameter in module.named_parameters():
        if meta.is_deferred(parameter):
            meta.make_real(parameter, meta.materialise(parameter, name))


def casting(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager inside which `module` may be cast and moved."""
    # Meta-device parameters that `init_module` did not create are allocated first, because casting
    # or moving them would fail. Parameters from `init_module` remain unallocated: they record casts
    # and moves, and repeat them when they are allocated.
    fill_unrecorded([module], sw.world().print)
    return sw.on_meta() if any(map(meta.is_deferred, module.parameters())) else nullcontext()
