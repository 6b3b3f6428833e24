"""Saves a rank's tokens for backward in place of the gathered input of a split layer, and gathers
them again when backward asks (Korthikanti et al., 2022)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise.comm import Collectives
from shardwise.model.activation_offload import Kept
from shardwise.parallel.tensor.region_collectives import ShardedDim, all_gathered

SavedTensorHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class RegatheredInput:
    """The gathered input of split layers, of which this rank saves its `part`; layers that share it
    gather it once in a backward."""

    def __init__(self, part: Tensor, group: Collectives, sharded: ShardedDim) -> None:
        self._part: Tensor | None = part.detach()
        self._group, self._sharded = group, sharded
        self._saved: Any = None
        self._hooks: SavedTensorHooks = _NO_HOOKS
        self._uses = 0
        self._gathered: Tensor | None = None
        self._backward, self._served = -1, 0

    def run(self, layer: Callable[[Tensor], Tensor], whole: Tensor) -> Tensor:
        """Run `layer` on `whole`, and save a reference where it would save `whole`."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True) or _NO_HOOKS
        memory = whole.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            if type(tensor) is Tensor and tensor.untyped_storage().data_ptr() == memory:
                self._save_shard(outer)
                return _SavedView(self, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            return outer[0](tensor)

        def unpack(saved: Any) -> Tensor:
            return saved.value() if isinstance(saved, _SavedView) else outer[1](saved)

        with saved_tensors_hooks(pack, unpack):
            return layer(whole)

    def _save_shard(self, hooks: SavedTensorHooks) -> None:
        """Save the part once, through the saved-tensor hooks that are outside of these."""
        if self._part is not None:
            self._saved, self._hooks, self._part = hooks[0](self._part), hooks, None
        self._uses += 1

    def whole(self) -> Tensor:
        """Gather the whole; it is held until all that saved it have asked. Collective."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self._served, self._gathered = backward, 0, None
        whole = self._gathered
        if whole is None:  # ranks run the same graph, so they gather in the same order
            whole = all_gathered(self._hooks[1](self._saved), self._group, self._sharded)
        self._served += 1
        self._gathered = whole if self._served < self._uses else None
        return whole


@dataclass(frozen=True)
class _SavedView:
    """Saved instead of a view of the whole."""

    owner: RegatheredInput
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def value(self) -> Tensor:
        return self.owner.whole().as_strided(self.size, self.stride, self.offset)


_NO_HOOKS: SavedTensorHooks = (Kept, Kept.value)
"""What torch does where there are no hooks."""
