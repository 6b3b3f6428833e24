"""Records modules' inputs, order and non-parameter tensors for `shardwise verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.layout.fingerprints import can_be_taken
from shardwise.model.module_hooks import Hooked, attach
from shardwise.world.current_batch import Batch
from shardwise.world.tensor_log import FeedTotals, Part

BUFFER, ATTRIBUTE = "buffer", "attribute"

Named = Sequence[tuple[str, nn.Module]]
"""Models, each with the prefix of its modules' names."""


def joined(*parts: str) -> str:
    """Join the non-empty `parts` of a module name with dots."""
    return ".".join(part for part in parts if part).replace("_orig_mod.", "")


class ForwardInputs:
    """Records training inputs and sample indices of `models`, and the order of their modules.

    Args:
        models: The models, with their name prefixes.
        current: Returns the most recently delivered batch.
        hooked: Returns whether a module may have hooks. Default: all may.
        recorded: Returns whether this rank records a tensor of the inputs. Default: it records all.
    """

    def __init__(
        self,
        models: Named,
        current: Callable[[], Batch | None],
        hooked: Callable[[nn.Module], bool] = lambda module: True,
        recorded: Callable[[Tensor], bool] = lambda tensor: True,
    ) -> None:
        self._current = current
        self._recorded = recorded
        self._depth = 0
        self._fed, self._samples = FeedTotals(), list[int]()
        self._batch: Batch | None = None
        self._names: dict[nn.Module, str] = {}
        self._hooks: list[Hooked] = []
        self.order: list[str] = []
        """Names of the modules, ordered by when they first ran."""
        for prefix, model in models:
            for path, module in model.named_modules():
                self._names[module] = joined(prefix, path)
                # Hooks would break the graph of a compiled module.
                if module._compiled_call_impl is None and hooked(module):
                    before, after = module.register_forward_pre_hook, module.register_forward_hook
                    self._hooks += [
                        attach(before, self._before_forward, with_kwargs=True, prepend=True),
                        attach(after, self._after_forward, always_call=True),
                    ]

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if (name := self._names.get(module)) is not None and name not in self.order:
            self.order.append(name)
        # Count only the outermost forward pass, because inputs of inner modules are results, not
        # data.
        self._depth += 1
        # A recomputation runs inside the backward pass, on inputs that were already counted.
        again = torch._C._current_graph_task_id() != -1
        if self._depth > 1 or again or not torch.is_grad_enabled():
            return
        batch = self._current()
        if batch is not None and batch.samples == 0:
            return  # a stand-in does not count
        self._fed.add((args, kwargs), self._recorded)
        if batch is not None and batch is not self._batch:
            self._batch = batch
            self._samples += batch.indices

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

    def taken(self) -> tuple[FeedTotals, list[int]]:
        """Return the inputs and sample indices recorded since the previous call."""
        fed, samples = self._fed, self._samples
        self._fed, self._samples = FeedTotals(), []
        return fed, samples

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def other_tensors(
    models: Named, copy: int, runs: Callable[[nn.Module], bool] = lambda module: True
) -> Iterator[Part]:
    """Yield the full buffers of `models`, and the tensors in plain attributes of their modules.

    Includes non-persistent buffers. Excludes tensors that have no fingerprint, such as sparse ones.

    Args:
        models: The models, with their name prefixes.
        copy: Index of this rank among the ranks that hold the tensors.
        runs: Returns whether this rank runs a module.
    """
    seen: set[int] = set()
    for prefix, model in models:
        for path, module in model.named_modules():
            if not runs(module):
                continue
            candidates = [(BUFFER, key, value) for key, value in module._buffers.items()]
            candidates += [(ATTRIBUTE, key, value) for key, value in vars(module).items()]
            for kind, key, value in candidates:
                if not isinstance(value, Tensor) or id(value) in seen:
                    continue
                seen.add(id(value))
                if can_be_taken(value):
                    yield Part(kind, joined(prefix, path, key), value, copy=copy)
