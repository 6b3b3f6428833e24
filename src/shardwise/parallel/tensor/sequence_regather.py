"""Saves only this rank's tokens for the backward pass, instead of a split layer's gathered input.

The backward pass gathers the input again (Korthikanti et al., 2022).
"""

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
    """The gathered input of split layers, of which this rank saves only its own part.

    Layers that share the input gather it once per backward pass.
    """

    def __init__(self, part: Tensor, group: Collectives, sharded: ShardedDim) -> None:
        self._part: Tensor | None = part.detach()
        self._group, self._sharded = group, sharded
        self._saved: Any = None
        self._hooks: SavedTensorHooks = _NO_HOOKS
        self._uses = 0
        self._gathered: Tensor | None = None
        self._backward, self._served = -1, 0

    def run(self, layer: Callable[[Tensor], Tensor], whole: Tensor) -> Tensor:
        """Run `layer` on the gathered input `whole`.

        Where autograd would save `whole` or a view of it, it saves a _SavedView instead.
        """
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True) or _NO_HOOKS
        memory = whole.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            if type(tensor) is Tensor and tensor.untyped_storage().data_ptr() == memory:
                # Save the part only once, no matter how often the layer saves `whole`. Pass it
                # through the outer hooks, which may offload it.
                if self._part is not None:
                    self._saved, self._hooks, self._part = outer[0](self._part), outer, None
                self._uses += 1
                return _SavedView(self, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            return outer[0](tensor)

        def unpack(saved: Any) -> Tensor:
            return saved.value() if isinstance(saved, _SavedView) else outer[1](saved)

        with saved_tensors_hooks(pack, unpack):
            return layer(whole)

    def whole(self) -> Tensor:
        """Return the full input. Collective unless this backward pass has already gathered it.

        The full input is kept until its last use in the backward pass.
        """
        # A retained graph can run several backward passes. Each one gathers again.
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
    """Stands for a view of the full input in autograd's saved tensors."""

    owner: RegatheredInput
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def value(self) -> Tensor:
        return self.owner.whole().as_strided(self.size, self.stride, self.offset)


_NO_HOOKS: SavedTensorHooks = (Kept, Kept.value)
"""Hooks that behave like torch without hooks."""
