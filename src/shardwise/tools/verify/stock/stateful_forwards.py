"""Finds buffers that change in forward passes that should not count: evaluation, recomputation.

A mixture of experts, for example, balances its experts by counting tokens in a buffer. If it also
counts in an evaluation, the evaluation changes the training. A single process has the same
mistake, so a comparison with it does not show this. `verify` therefore runs the single process
again and restores these buffers after each such forward pass. If it then trains differently, the
mistake is proved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardwise.model.module_records import joined
from shardwise.tools.verify.stock import readers

EVALUATION, RECOMPUTATION = "evaluation", "recomputation"


class StatefulForwards:
    """Records which buffers change in a forward pass of a certain kind, and may restore them.

    Args:
        is_in_backward: Returns whether a backward pass is running.
        restores: Kind of forward pass whose changes are undone, or None.
    """

    def __init__(self, is_in_backward: Callable[[], bool], restores: str | None) -> None:
        self._is_in_backward = is_in_backward
        self._restores = restores
        self._known: set[nn.Module] = set()
        self._before: dict[nn.Module, dict[str, tuple[Tensor, Tensor]]] = {}
        self._changed: dict[str, dict[str, None]] = {EVALUATION: {}, RECOMPUTATION: {}}

    def know(self, models: Sequence[tuple[str, nn.Module]]) -> None:
        """Follow the modules of `models` that have buffers. Compiled modules are left out."""
        compiled = readers.compiled_modules([model for _, model in models])
        for prefix, model in models:
            for path, module in model.named_modules():
                if module in self._known or module in compiled or not module._buffers:
                    continue
                self._known.add(module)
                module.register_forward_pre_hook(lambda each, _: self._begin(each))
                name = readers.plain_name(joined(prefix, path))
                # always_call, because checkpointing stops a recomputation early by an exception.
                module.register_forward_hook(
                    lambda each, *_, name=name: self._end(each, name), always_call=True
                )

    def plain(self) -> dict[str, list[str]]:
        """Return the names of the buffers that have changed, by kind of forward pass."""
        return {kind: list(names) for kind, names in self._changed.items()}

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
