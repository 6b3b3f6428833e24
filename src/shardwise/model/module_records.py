"""What `shardwise verify` records of the user's modules: what they are fed, in which order they
run, and the tensors that they have beside parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.layout.fingerprints import can_be_taken
from shardwise.model.module_hooks import Hooked, attach
from shardwise.world.current_batch import Batch
from shardwise.world.tensor_log import Fed, Part

BUFFER, ATTRIBUTE = "buffer", "attribute"

Named = Sequence[tuple[str, nn.Module]]
"""Models, and what stands before the names of their parts."""


def joined(*parts: str) -> str:
    """A name from its parts, the empty ones left out, as the plain model has it."""
    return ".".join(part for part in parts if part).replace("_orig_mod.", "")


class ForwardInputs:
    """Follows the forwards of `models`: what they are fed to train on, which samples of the dataset
    those are by `current` (the batch given last), and in which order modules run."""

    def __init__(self, models: Named, current: Callable[[], Batch | None]) -> None:
        self._current = current
        self._depth = 0
        self._fed, self._samples = Fed(), list[int]()
        self._batch: Batch | None = None
        self._names: dict[nn.Module, str] = {}
        self._hooks: list[Hooked] = []
        self.order: list[str] = []
        """The names of modules, as they first ran."""
        for prefix, model in models:
            for path, module in model.named_modules():
                self._names[module] = joined(prefix, path)
                if module._compiled_call_impl is None:
                    self._follow(module)

    def _follow(self, module: nn.Module) -> None:
        before, after = module.register_forward_pre_hook, module.register_forward_hook
        self._hooks.append(attach(before, self._begins, with_kwargs=True, prepend=True))
        self._hooks.append(attach(after, self._ends, always_call=True))

    def _begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if (name := self._names.get(module)) is not None and name not in self.order:
            self.order.append(name)
        self._depth += 1
        # A recomputation runs inside of backward, on what was counted before.
        again = torch._C._current_graph_task_id() != -1
        if self._depth > 1 or again or not torch.is_grad_enabled():
            return
        batch = self._current()
        if batch is not None and batch.samples == 0:
            return  # a stand-in counts nothing
        self._fed.add((args, kwargs))
        if batch is not None and batch is not self._batch:
            self._batch = batch
            self._samples += batch.indices

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

    def taken(self) -> tuple[Fed, list[int]]:
        """What was fed since the last call."""
        fed, samples = self._fed, self._samples
        self._fed, self._samples = Fed(), []
        return fed, samples

    def close(self) -> None:
        """Follow no longer."""
        while self._hooks:
            self._hooks.pop().remove()


def tensors_beside(
    models: Named, copy: int, runs: Callable[[nn.Module], bool] = lambda module: True
) -> Iterator[Part]:
    """Buffers of `models`, those too that no checkpoint has, and tensors that are plain attributes
    of a module, but for sparse ones and their like; whole, as this rank, number `copy` of those
    that have them, has them."""
    seen: set[int] = set()
    for prefix, model in models:
        for path, module in model.named_modules():
            if not runs(module):
                continue
            several = [(BUFFER, key, value) for key, value in module._buffers.items()]
            several += [(ATTRIBUTE, key, value) for key, value in vars(module).items()]
            for kind, key, value in several:
                if not isinstance(value, Tensor) or id(value) in seen:
                    continue
                seen.add(id(value))
                if can_be_taken(value):
                    yield Part(kind, joined(prefix, path, key), value, copy=copy)
