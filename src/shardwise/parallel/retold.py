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
from shardwise.parallel.regions import Parts, joined

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Retold:
    """A whole of which this rank keeps its `part`; layers that share it are told it once."""

    def __init__(self, part: Tensor, group: Collectives, parts: Parts) -> None:
        self._part: Tensor | None = part.detach()
        self._group, self._parts = group, parts
        self._saved: Any = None
        self._outer: Hooks | None = None
        self._waiting = 0
        self._again: Tensor | None = None

    def given(self, layer: Callable[[Tensor], Tensor], whole: Tensor) -> Tensor:
        """What `layer` makes of `whole`, of which it keeps nothing."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        memory = whole.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            if type(tensor) is Tensor and tensor.untyped_storage().data_ptr() == memory:
                self._keep(outer)
                return _Note(self, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            return tensor if outer is None else outer[0](tensor)

        def unpack(saved: Any) -> Any:
            if isinstance(saved, _Note):
                return saved.value()
            return saved if outer is None else outer[1](saved)

        with saved_tensors_hooks(pack, unpack):
            return layer(whole)

    def _keep(self, outer: Hooks | None) -> None:
        """Once, keep the part, as hooks further `outer` say."""
        if self._part is not None:
            self._saved = self._part if outer is None else outer[0](self._part)
            self._part, self._outer = None, outer
        self._waiting += 1

    def whole(self) -> Tensor:
        """All of it; held until everyone who keeps it has asked. Collective."""
        whole = self._again
        if whole is None:
            part = self._saved if self._outer is None else self._outer[1](self._saved)
            whole = joined(part, self._group, self._parts)
        self._waiting -= 1
        self._again = whole if self._waiting > 0 else None
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
