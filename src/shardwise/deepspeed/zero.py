"""Implements deepspeed.zero: builds models without allocating memory, and gathers parameters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.deepspeed.engine import ZeroParamStatus, engine_of, marked_whole
from shardwise.errors import UsageError
from shardwise.model import meta

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]


class Init:
    """Context manager inside which models are created without allocating memory.

    Memory is allocated when the model's engine is created. Parameters then have the values that
    they would have if they had been created outside the block.

    Args:
        module: Ignored. An existing module is not changed.
        enabled: If False, the context manager does nothing.
        **options: Ignored.

    Example:
        ```python
        with deepspeed.zero.Init():
            model = LargeModel()
        ```
    """

    def __init__(self, module: nn.Module | None = None, *, enabled: bool = True, **options: Any):
        del module, options
        self._enabled = enabled
        self._blocks = ExitStack()

    def __enter__(self) -> Init:
        if self._enabled:
            self._blocks.enter_context(sw.on_meta())
        return self

    def __exit__(self, *error: Any) -> None:
        self._blocks.__exit__(*error)


class GatheredParameters:
    """Context manager that gathers full parameters on every rank. Collective.

    If the parameters are unallocated and their engine does not exist yet, they are allocated.

    Args:
        params: One or several parameters.
        modifier_rank: The rank whose changes are sent to all ranks. If None, changes are discarded.
        fwd_module: Ignored.
        enabled: If False, the context manager does nothing.

    Raises:
        UsageError: If the parameters belong to more than one engine.

    Example:
        ```python
        with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=0):
            if engine.global_rank == 0:
                model.head.weight.data.zero_()
        ```
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        del fwd_module
        several = [params] if isinstance(params, Tensor) else list(params)
        self._parameters = several if enabled else []
        self._modifier_rank = modifier_rank
        self._blocks = ExitStack()

    def __enter__(self) -> None:
        if not self._parameters:
            return
        found = {id(engine): engine for engine in map(engine_of, self._parameters)}
        if len(found) > 1:
            raise UsageError(
                "GatheredParameters has parameters of several engines, or some without an engine: "
                "write a separate block for each engine."
            )
        engine = next(iter(found.values()))
        if engine is None:
            # Created inside `Init`: allocate them now, so that values written in the block persist.
            for parameter in self._parameters:
                if parameter.is_meta and isinstance(parameter, nn.Parameter):
                    meta.make_real(parameter, meta.materialise(parameter))
            return
        inner, writes = engine._engine("GatheredParameters"), self._modifier_rank is not None
        # Gather only the smallest module that contains the parameters, to save memory.
        part = _smallest(engine.module, self._parameters)
        self._blocks.enter_context(inner.full_parameters(part, write=writes))
        self._blocks.enter_context(marked_whole(self._parameters))

    def __exit__(self, *error: Any) -> None:
        # If the block raised on this rank, do not enter a collective that others may not reach.
        if error[0] is None and self._modifier_rank is not None and dist.is_initialized():
            with torch.no_grad():
                for parameter in self._parameters:
                    # Send it from this rank's device, because NCCL only sends GPU tensors.
                    value = parameter.data.to(sw.world().device)
                    dist.broadcast(value, self._modifier_rank)
                    parameter.data.copy_(value)
        self._blocks.__exit__(*error)


def _smallest(model: nn.Module, parameters: list[Tensor]) -> nn.Module:
    """Return the smallest module in `model` that contains all of `parameters`."""
    wanted = {id(parameter) for parameter in parameters}
    holders = []
    for number, module in enumerate(model.modules()):
        held = {id(parameter) for parameter in module.parameters()}
        if wanted <= held:
            holders.append((len(held), number, module))
    return min(holders)[2]


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """No-op, because the engine detects which parameters a forward pass uses."""
    del module, parameter
