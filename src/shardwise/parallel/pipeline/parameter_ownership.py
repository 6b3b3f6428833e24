"""Frees other stages' parameters on this rank, gathers full models, and restores them.

On this rank, each parameter of another stage is replaced with a placeholder, a NaN. The placeholder
has the full shape, but the memory of a single element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.errors import UsageError
from shardwise.model import meta
from shardwise.model.buffers import write
from shardwise.model.module_hooks import attach
from shardwise.parallel.pipeline.stages import Stages
from shardwise.parallel.pipeline.tied_weights import TiedWeights


class ParameterOwnership:
    """Divides parameters, buffers and optimizer state among the ranks of `pipeline`."""

    def __init__(self, pipeline: Stages, tied_weights: TiedWeights) -> None:
        self._pipeline = pipeline
        self._tied_weights = tied_weights

    def free_other_parameters(self) -> None:
        """Replace the parameters that other ranks train with placeholders, to free their memory."""
        for parameter in self._pipeline.partition.owners:
            if not self._pipeline.owns(parameter):
                parameter.data = self._placeholder(parameter)

    def replace_meta(self) -> None:
        """Replace other ranks' parameters with placeholders if they are on the meta device."""
        for parameter in self._pipeline.partition.owners:
            if parameter.is_meta and not self._pipeline.owns(parameter):
                meta.make_real(parameter, self._placeholder(parameter))

    def _placeholder(self, parameter: nn.Parameter) -> Tensor:
        # Use NaN, so that code that reads a placeholder by mistake produces NaN.
        fill = torch.nan if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
        one = torch.full((), fill, dtype=parameter.dtype, device=self._pipeline.device)
        return one.expand(parameter.shape)

    def _fetch(self, parameter: nn.Parameter, shape: torch.Size | tuple[int, ...]) -> None:
        """Broadcast a parameter of full shape `shape` from its owner. Collective."""
        owner = self._pipeline.rank_of(self._pipeline.partition.owners[parameter])
        if owner == self._pipeline.group.rank:
            value = parameter.data.contiguous()
        else:
            value = torch.empty(shape, dtype=parameter.dtype, device=self._pipeline.device)
        if value.numel():
            self._pipeline.group.broadcast(value.view(-1), owner).wait()
        if owner != self._pipeline.group.rank:
            parameter.data = value

    @contextmanager
    def wholes(
        self,
        model: nn.Module,
        chosen: Sequence[nn.Parameter],
        shapes: Mapping[nn.Parameter, tuple[int, ...]],
        *,
        write: bool,
    ) -> Iterator[None]:
        """Context manager that gathers all of `chosen` on every rank. Collective.

        Inside the block, modules run their own `forward`.

        Args:
            model: The model, whose buffers are broadcast too.
            chosen: The parameters to gather.
            shapes: Full shapes of tensor-parallel parameters, which the caller has already
                gathered.
            write: True if the owners keep changes made inside the block.
        """
        parameters = [p for p in dict.fromkeys(chosen) if p in self._pipeline.partition.owners]
        placeholders = {p: p.data for p in parameters if not self._pipeline.owns(p)}
        with torch.no_grad():
            for parameter in parameters:
                self._fetch(parameter, shapes.get(parameter, tuple(parameter.shape)))
            self.broadcast_buffers(model)
        self._pipeline.is_whole, self._pipeline.writes = True, write
        try:
            yield
        finally:
            self._pipeline.is_whole = self._pipeline.writes = False
            for parameter, value in placeholders.items():
                parameter.data = value
            if write:
                self._tied_weights.invalidate()

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Broadcast every module's buffers from the rank that runs the module. Collective."""
        for module in model.modules():
            source = self._pipeline.rank_of(self._pipeline.stage_of_module(module))
            for buffer in module._buffers.values():
                if buffer is not None and buffer.numel():
                    self._broadcast_buffer(buffer, source)

    def _broadcast_buffer(self, buffer: Tensor, source: int) -> None:
        # Use a contiguous staging buffer, because a module's buffer may be a view with arbitrary
        # strides. Send bytes, because transports do not support every dtype (bool).
        staging = torch.empty(
            buffer.numel() * buffer.itemsize,
            dtype=torch.uint8,
            device=self._pipeline.group.small_device,
        )
        flat = staging.view(buffer.dtype).view(buffer.shape)
        if self._pipeline.group.rank == source:
            flat.copy_(buffer.detach())
        self._pipeline.group.broadcast(staging, source).wait()
        if self._pipeline.group.rank != source:
            write(buffer.detach(), flat)

    def gather_other_states(
        self, states: Mapping[nn.Parameter, Any], optimizers: Sequence[optim.Optimizer]
    ) -> dict[nn.Parameter, Any]:
        """Gather the optimizer state of parameters trained by other ranks. Collective."""
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        # Move tensors to the CPU, because unpickling a GPU tensor would place it on the sender's
        # device index. Parameters are identified by their index in `parameters`, which is the same
        # on all ranks.
        own_states = {
            number: {
                key: value.detach().cpu() if isinstance(value, Tensor) else value
                for key, value in states[p].items()
            }
            for number, p in enumerate(parameters)
            if p in states and self._pipeline.owns(p)
        }
        other_states: dict[nn.Parameter, Any] = {}
        for rank, received in enumerate(self._pipeline.group.gather_objects(own_states)):
            if rank != self._pipeline.group.rank:
                for number, state in received.items():
                    other_states[parameters[number]] = {
                        key: value.to(self._pipeline.device)
                        if isinstance(value, Tensor) and value.ndim
                        else value
                        for key, value in state.items()
                    }
        return other_states

    def undo(
        self,
        model: nn.Module,
        optimizers: Sequence[optim.Optimizer],
        shapes: Mapping[nn.Parameter, tuple[int, ...]],
    ) -> None:
        """Give every rank the full model and the full optimizer state. Collective."""
        with torch.no_grad():
            for parameter in self._pipeline.partition.owners:
                self._fetch(parameter, shapes.get(parameter, tuple(parameter.shape)))
            self.broadcast_buffers(model)
        states: dict[Any, Any] = {p: state for o in optimizers for p, state in o.state.items()}
        other_states = self.gather_other_states(states, optimizers)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # The states of parameters that this rank trains are already in the optimizer.
                    if parameter in other_states:
                        optimizer.state[parameter] = other_states[parameter]


class CopyGuard:
    """Rejects state_dict() and load_state_dict() on modules whose parameters are on other ranks."""

    def __init__(self, model: nn.Module) -> None:
        # Each hook checks again, because inside engine.full_parameters() this rank has all values.
        self._handles = [
            handle
            for module in model.modules()
            if _is_elsewhere(module)
            for handle in (
                attach(
                    module.register_state_dict_pre_hook,
                    partial(_refuse, "state_dict()", "to read or copy it"),
                ),
                attach(
                    module.register_load_state_dict_pre_hook,
                    partial(_refuse, "load_state_dict()", "with write=True"),
                ),
            )
        ]

    def undo(self) -> None:
        for handle in self._handles:
            handle.remove()


def _is_elsewhere(module: nn.Module) -> bool:
    """Return whether `module` itself registers a parameter whose values are on another rank."""
    parameters = [p for p in module._parameters.values() if p is not None]
    # A placeholder is a single element, expanded to the parameter's shape.
    return any(p.numel() > 1 and p.untyped_storage().nbytes() == p.itemsize for p in parameters)


def _refuse(what: str, how: str, module: nn.Module, *_: Any) -> None:
    """Raise UsageError if some parameters of `module` are on other ranks. A hook on `module`."""
    if _is_elsewhere(module):
        raise copy_error(what, how)


def copy_error(what: str, how: str) -> UsageError:
    """Return the error for a call that needs layers of other ranks."""
    return UsageError(
        f"{what} of a model is not possible when this worker has only some of its layers "
        f"(--pipeline). Inside with engine.full_parameters(), {how}; engine.save and "
        "engine.export write whole models."
    )
