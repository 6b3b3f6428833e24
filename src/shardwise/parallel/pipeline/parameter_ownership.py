"""Which rank has the values of a parameter; on the others it is NaN in the same shape, and takes no
memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.errors import UsageError
from shardwise.model import meta
from shardwise.model.buffers import write
from shardwise.model.module_hooks import Hooked, attach
from shardwise.parallel.pipeline.stages import Stages
from shardwise.parallel.pipeline.tied_weights import Loans


class Custody:
    """The parameters, buffers and optimizer state that the ranks of `line` have between them."""

    def __init__(self, line: Stages, loans: Loans) -> None:
        self._line = line
        self._loans = loans

    def let_go(self) -> None:
        """Free the memory of what other ranks train: it is NaN here, in the same shape."""
        for parameter in self._line.cut.owners:
            if not self._line.has(parameter):
                self._rest(parameter)

    def leave_unbuilt(self) -> None:
        """The same of what was built without memory and is another rank's."""
        for parameter in self._line.cut.owners:
            if parameter.is_meta and not self._line.has(parameter):
                meta.make_real(parameter, self._nothing(parameter))

    def _rest(self, parameter: nn.Parameter) -> None:
        parameter.data = self._nothing(parameter)

    def _nothing(self, parameter: nn.Parameter) -> Tensor:
        fill = torch.nan if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
        one = torch.full((), fill, dtype=parameter.dtype, device=self._line.device)
        return one.expand(parameter.shape)

    def _bring(self, parameter: nn.Parameter, shape: torch.Size | tuple[int, ...]) -> None:
        """Have the values of its owner. Collective."""
        owner = self._line.rank_of(self._line.cut.owners[parameter])
        if owner == self._line.group.rank:
            value = parameter.data.contiguous()
        else:
            value = torch.empty(shape, dtype=parameter.dtype, device=self._line.device)
        if value.numel():
            self._line.group.broadcast(value.view(-1), owner).wait()
        if owner != self._line.group.rank:
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
        """Inside the block this rank has all of `chosen`, and forwards are plain. Collective.

        `shapes` are those of what layers split further, where that is whole now.
        """
        several = [p for p in dict.fromkeys(chosen) if p in self._line.cut.owners]
        held = {p: p.data for p in several if not self._line.has(p)}
        with torch.no_grad():
            for parameter in several:
                self._bring(parameter, shapes.get(parameter, tuple(parameter.shape)))
            self.bring_buffers(model)
        self._line.is_whole, self._line.writes = True, write
        try:
            yield
        finally:
            self._line.is_whole = self._line.writes = False
            for parameter, value in held.items():
                parameter.data = value
            if write:
                self._loans.changed()

    def bring_buffers(self, model: nn.Module) -> None:
        """Have the buffers of every module as the rank has them that runs it. Collective."""
        for module in model.modules():
            source = self._line.rank_of(self._line.stage_of_module(module))
            for buffer in module._buffers.values():
                if buffer is not None and buffer.numel():
                    self._bring_buffer(buffer, source)

    def _bring_buffer(self, buffer: Tensor, source: int) -> None:
        # In memory of its own: a buffer may be a view that lies in another order than it is read.
        near = torch.empty(
            buffer.numel() * buffer.itemsize,
            dtype=torch.uint8,
            device=self._line.group.small_device,
        )
        flat = near.view(buffer.dtype).view(buffer.shape)
        if self._line.group.rank == source:
            flat.copy_(buffer.detach())
        self._line.group.broadcast(near, source).wait()
        if self._line.group.rank != source:
            write(buffer.detach(), flat)

    def states_elsewhere(
        self, held: Mapping[nn.Parameter, Any], optimizers: Sequence[optim.Optimizer]
    ) -> dict[nn.Parameter, Any]:
        """The optimizers' state of what other ranks train. Collective."""
        places = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        mine = {
            number: _on_cpu(held[p])
            for number, p in enumerate(places)
            if p in held and self._line.has(p)
        }
        found: dict[nn.Parameter, Any] = {}
        for rank, told in enumerate(self._line.group.gather_objects(mine)):
            if rank != self._line.group.rank:
                for number, state in told.items():
                    found[places[number]] = {
                        key: value.to(self._line.device)
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
            for parameter in self._line.cut.owners:
                self._bring(parameter, shapes.get(parameter, tuple(parameter.shape)))
            self.bring_buffers(model)
        held: dict[Any, Any] = {p: state for o in optimizers for p, state in o.state.items()}
        elsewhere = self.states_elsewhere(held, optimizers)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in elsewhere:
                        optimizer.state[parameter] = elsewhere[parameter]


class NoCopies:
    """Hooks that refuse to tell or to load the state of modules whose values are elsewhere."""

    def __init__(self, model: nn.Module) -> None:
        self._handles = _refuse_copies(model)

    def undo(self) -> None:
        """Refuse no longer."""
        for handle in self._handles:
            handle.remove()


def _refuse_copies(model: nn.Module) -> list[Hooked]:
    return [
        handle
        for module in model.modules()
        if _is_elsewhere(module)
        for handle in (
            attach(module.register_state_dict_pre_hook, _refuse_to_tell),
            attach(module.register_load_state_dict_pre_hook, _refuse_to_load),
        )
    ]


def _is_elsewhere(module: nn.Module) -> bool:
    """Whether another rank has the values of a parameter of `module` itself."""
    held = [p for p in module._parameters.values() if p is not None]
    return any(p.numel() > 1 and p.untyped_storage().nbytes() == p.itemsize for p in held)


def _refuse_to_tell(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    del prefix, keep_vars
    if _is_elsewhere(module):
        raise refused("state_dict()", "to read or copy it")


def _refuse_to_load(module: nn.Module, state: Any, *_: Any) -> None:
    del state
    if _is_elsewhere(module):
        raise refused("load_state_dict()", "with write=True")


def refused(what: str, how: str) -> UsageError:
    """The error for a call that would need layers of other ranks."""
    return UsageError(
        f"{what} of a model of which this worker has some layers only (--pipeline). Inside with "
        f"engine.full_parameters(), {how}; engine.save and engine.export write whole models."
    )


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
