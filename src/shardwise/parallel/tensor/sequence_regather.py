"""What a split layer is given whole, kept for backward in parts: each rank keeps its tokens, and
the ranks tell them again when backward asks (Korthikanti et al., 2022)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise.collectives import Collectives
from shardwise.model.saved_tensors import Kept
from shardwise.parallel.tensor.regions import Parts, joined

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Retold:
    """A whole of which this rank keeps its `part`; layers that share it are told it once in a
    backward."""

    def __init__(self, part: Tensor, group: Collectives, parts: Parts) -> None:
        self._part: Tensor | None = part.detach()
        self._group, self._parts = group, parts
        self._saved: Any = None
        self._hooks: Hooks = _PLAIN
        self._keepers = 0
        self._again: Tensor | None = None
        self._backward, self._asked = -1, 0

    def given(self, layer: Callable[[Tensor], Tensor], whole: Tensor) -> Tensor:
        """What `layer` makes of `whole`, of which it keeps nothing."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True) or _PLAIN
        memory = whole.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            if type(tensor) is Tensor and tensor.untyped_storage().data_ptr() == memory:
                self._keep(outer)
                return _Note(self, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            return outer[0](tensor)

        def unpack(saved: Any) -> Tensor:
            return saved.value() if isinstance(saved, _Note) else outer[1](saved)

        with saved_tensors_hooks(pack, unpack):
            return layer(whole)

    def _keep(self, hooks: Hooks) -> None:
        """Once, keep the part, as hooks further out say."""
        if self._part is not None:
            self._saved, self._hooks, self._part = hooks[0](self._part), hooks, None
        self._keepers += 1

    def whole(self) -> Tensor:
        """All of it; held until everyone who keeps it has asked. Collective."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self._asked, self._again = backward, 0, None
        whole = self._again
        if whole is None:
            whole = joined(self._hooks[1](self._saved), self._group, self._parts)
        self._asked += 1
        self._again = whole if self._asked < self._keepers else None
        return whole


@dataclass(frozen=True)
class _Note:
    """Saved instead of a view of the whole."""

    retold: Retold
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def value(self) -> Tensor:
        return self.retold.whole().as_strided(self.size, self.stride, self.offset)


_PLAIN: Hooks = (Kept, Kept.value)
"""What torch does where there are no hooks."""
