"""Frees the parameters of other stages on this rank, gathers whole models, and restores them.

A parameter of another stage is NaN here, in the same shape, and takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """The parameters, buffers and optimizer state that are divided among the ranks of
    `pipeline`."""

    def __init__(self, pipeline: Stages, tied_weights: TiedWeights) -> None:
        self._pipeline = pipeline
        self._tied_weights = tied_weights

    def free_others(self) -> None:
        """Free the memory of parameters that other ranks train: they become NaN in the same
        shape."""
        for parameter in self._pipeline.partition.owners:
            if not self._pipeline.owns(parameter):
                parameter.data = self._placeholder(parameter)

    def replace_meta(self) -> None:
        """Free those parameters of other ranks that were built on the meta device."""
        for parameter in self._pipeline.partition.owners:
            if parameter.is_meta and not self._pipeline.owns(parameter):
                meta.make_real(parameter, self._placeholder(parameter))

    def _placeholder(self, parameter: nn.Parameter) -> Tensor:
        fill = torch.nan if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
        one = torch.full((), fill, dtype=parameter.dtype, device=self._pipeline.device)
        return one.expand(parameter.shape)

    def _fetch(self, parameter: nn.Parameter, shape: torch.Size | tuple[int, ...]) -> None:
        """Broadcast a parameter from its owner. Collective."""
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
        """Give this rank all of `chosen` inside the block, and run the modules' own forwards.
        Collective.

        `shapes` are those of parameters that layers split further, which are whole at present.
        """
        several = [p for p in dict.fromkeys(chosen) if p in self._pipeline.partition.owners]
        held = {p: p.data for p in several if not self._pipeline.owns(p)}
        with torch.no_grad():
            for parameter in several:
                self._fetch(parameter, shapes.get(parameter, tuple(parameter.shape)))
            self.broadcast_buffers(model)
        self._pipeline.is_whole, self._pipeline.writes = True, write
        try:
            yield
        finally:
            self._pipeline.is_whole = self._pipeline.writes = False
            for parameter, value in held.items():
                parameter.data = value
            if write:
                self._tied_weights.invalidate()

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Broadcast the buffers of every module from the rank that runs it. Collective."""
        for module in model.modules():
            source = self._pipeline.rank_of(self._pipeline.stage_of_module(module))
            for buffer in module._buffers.values():
                if buffer is not None and buffer.numel():
                    self._broadcast_buffer(buffer, source)

    def _broadcast_buffer(self, buffer: Tensor, source: int) -> None:
        # In memory of its own: a buffer may be a view that lies in another order than it is read.
        near = torch.empty(
            buffer.numel() * buffer.itemsize,
            dtype=torch.uint8,
            device=self._pipeline.group.small_device,
        )
        flat = near.view(buffer.dtype).view(buffer.shape)
        if self._pipeline.group.rank == source:
            flat.copy_(buffer.detach())
        self._pipeline.group.broadcast(near, source).wait()
        if self._pipeline.group.rank != source:
            write(buffer.detach(), flat)

    def states_of_others(
        self, held: Mapping[nn.Parameter, Any], optimizers: Sequence[optim.Optimizer]
    ) -> dict[nn.Parameter, Any]:
        """The optimizers' state of parameters that other ranks train. Collective."""
        places = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        # On the CPU: a pickle of a GPU's tensor would be opened on the sender's device number.
        mine = {
            number: {
                key: value.detach().cpu() if isinstance(value, Tensor) else value
                for key, value in held[p].items()
            }
            for number, p in enumerate(places)
            if p in held and self._pipeline.owns(p)
        }
        found: dict[nn.Parameter, Any] = {}
        for rank, states in enumerate(self._pipeline.group.gather_objects(mine)):
            if rank != self._pipeline.group.rank:
                for number, state in states.items():
                    found[places[number]] = {
                        key: value.to(self._pipeline.device)
                        if isinstance(value, Tensor) and value.ndim
                        else value
                        for key, value in state.items()
                    }
        return found

    def undo(
        self,
        model: nn.Module,
        optimizers: Sequence[optim.Optimizer],
        shapes: Mapping[nn.Parameter, tuple[int, ...]],
    ) -> None:
        """Give every rank the whole model, and all of the optimizers' state. Collective."""
        with torch.no_grad():
            for parameter in self._pipeline.partition.owners:
                self._fetch(parameter, shapes.get(parameter, tuple(parameter.shape)))
            self.broadcast_buffers(model)
        held: dict[Any, Any] = {p: state for o in optimizers for p, state in o.state.items()}
        elsewhere = self.states_of_others(held, optimizers)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in elsewhere:
                        optimizer.state[parameter] = elsewhere[parameter]


class CopyGuard:
    """Hooks that refuse state_dict() and load_state_dict() of modules with parameters elsewhere."""

    def __init__(self, model: nn.Module) -> None:
        # Each hook checks again: the parameters are whole inside engine.full_parameters().
        self._handles = [
            handle
            for module in model.modules()
            if _is_elsewhere(module)
            for handle in (
                attach(module.register_state_dict_pre_hook, _refuse_state_dict),
                attach(module.register_load_state_dict_pre_hook, _refuse_load),
            )
        ]

    def undo(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _is_elsewhere(module: nn.Module) -> bool:
    """Whether another rank has the values of a parameter of `module` itself."""
    held = [p for p in module._parameters.values() if p is not None]
    return any(p.numel() > 1 and p.untyped_storage().nbytes() == p.itemsize for p in held)


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    del prefix, keep_vars
    if _is_elsewhere(module):
        raise copy_error("state_dict()", "to read or copy it")


def _refuse_load(module: nn.Module, state: Any, *_: Any) -> None:
    del state
    if _is_elsewhere(module):
        raise copy_error("load_state_dict()", "with write=True")


def copy_error(what: str, how: str) -> UsageError:
    """The error for a call that would need layers of other ranks."""
    return UsageError(
        f"{what} of a model of which this worker has some layers only (--pipeline). Inside with "
        f"engine.full_parameters(), {how}; engine.save and engine.export write whole models."
    )
