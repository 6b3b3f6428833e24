"""Finds buffers that change when they should not: in evaluation, recomputation, per micro-batch.

A mixture of experts, for example, balances its experts by counting tokens in a buffer. If it also
counts in an evaluation, the evaluation changes the training. A single process has the same
mistake, so a comparison with it does not show this. `verify` therefore runs the single process
again and restores these buffers after each such forward pass. If it then trains differently, the
mistake is proved.

The same layer may update the bias of its experts after each micro-batch, instead of once per step.
Such a change is made between two forward passes, without an optimizer step in between. It is undone
when the next forward pass begins, so that only the last one of a step has an effect. Changes within
a forward pass remain, because a layer must count there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardwise.model.module_records import joined
from shardwise.tools.verify.stock import readers

EVALUATION, RECOMPUTATION, MICRO_BATCH = "evaluation", "recomputation", "micro-batch"


class StatefulForwards:
    """Records which buffers change at a time of a certain kind, and may restore them.

    Args:
        is_in_backward: Returns whether a backward pass is running.
        restores: Kind of time whose changes are undone, or None.
    """

    def __init__(self, is_in_backward: Callable[[], bool], restores: str | None) -> None:
        self._is_in_backward = is_in_backward
        self._restores = restores
        self._known: set[nn.Module] = set()
        self._before: dict[nn.Module, dict[str, tuple[Tensor, Tensor]]] = {}
        self._roots: set[nn.Module] = set()
        self._kept: dict[nn.Module, dict[nn.Module, dict[str, Tensor]]] = {}
        """For each model, its buffers after the step's last training pass, by module and key."""
        self._names: dict[nn.Module, str] = {}
        self._changed: dict[str, dict[str, None]] = {
            kind: {} for kind in (EVALUATION, RECOMPUTATION, MICRO_BATCH)
        }

    def know(self, models: Sequence[tuple[str, nn.Module]]) -> None:
        """Follow the modules of `models` that have buffers. Compiled modules are left out."""
        compiled = readers.compiled_modules([model for _, model in models])
        for prefix, model in models:
            if model not in self._roots and model not in compiled:
                self._roots.add(model)
                model.register_forward_pre_hook(lambda each, _: self._begin_micro_batch(each))
                model.register_forward_hook(lambda each, *_: self._end_micro_batch(each))
            for path, module in model.named_modules():
                if module in self._known or module in compiled or not module._buffers:
                    continue
                self._known.add(module)
                module.register_forward_pre_hook(lambda each, _: self._begin(each))
                name = self._names[module] = readers.plain_name(joined(prefix, path))
                # always_call, because checkpointing stops a recomputation early by an exception.
                module.register_forward_hook(
                    lambda each, *_, name=name: self._end(each, name), always_call=True
                )

    def plain(self) -> dict[str, list[str]]:
        """Return the names of the buffers that have changed, by kind of time."""
        return {kind: list(names) for kind, names in self._changed.items()}

    def stepped(self) -> None:
        """Note that an optimizer has made a step: buffers may change now."""
        self._kept.clear()

    def _trains(self, model: nn.Module) -> bool:
        return model.training and torch.is_grad_enabled() and not self._is_in_backward()

    def _begin_micro_batch(self, model: nn.Module) -> None:
        """Note, and perhaps undo, what has changed since the last forward pass of this step."""
        for module, kept in (self._kept.pop(model, {}) if self._trains(model) else {}).items():
            changed = {
                key: (now, values)
                for key, values in kept.items()
                if (now := module._buffers.get(key)) is not None
                and now.shape == values.shape
                and not torch.equal(now, values)
            }
            # One number per expert. Not a state with rows, which belongs to the samples of a
            # micro-batch, and not a reset to a constant.
            names = [
                joined(self._names[module], key)
                for key, (now, _) in changed.items()
                if now.ndim == 1 and bool((now != now[0]).any())
            ]
            self._changed[MICRO_BATCH] |= dict.fromkeys(names)
            if names and self._restores == MICRO_BATCH:
                with torch.no_grad():
                    for now, values in changed.values():
                        now.copy_(values)

    def _end_micro_batch(self, model: nn.Module) -> None:
        if self._trains(model):
            self._kept[model] = {
                module: {key: b.detach().clone() for key, b in buffers.items()}
                for module in model.modules()
                if module in self._names
                and (buffers := {k: b for k, b in module._buffers.items() if b is not None})
                and any(b.ndim == 1 for b in buffers.values())
            }

    def _kind_of(self, module: nn.Module) -> str | None:
        """Return the kind of the current forward pass of `module`, or None if it should count."""
        if not module.training and not torch.is_grad_enabled():
            return EVALUATION
        return RECOMPUTATION if module.training and self._is_in_backward() else None

    def _begin(self, module: nn.Module) -> None:
        if self._kind_of(module) is not None:
            self._before[module] = {
                key: (buffer, buffer.detach().clone())
                for key, buffer in module._buffers.items()
                if buffer is not None
            }

    def _end(self, module: nn.Module, name: str) -> None:
        before, kind = self._before.pop(module, {}), self._kind_of(module)
        for key, (buffer, values) in before.items():
            now = module._buffers.get(key)
            if kind is None or (now is not None and torch.equal(now, values)):
                continue
            self._changed[kind][joined(name, key)] = None
            if kind == self._restores:
                with torch.no_grad():
                    module._buffers[key] = buffer.copy_(values)
