"""The way of a batch to the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def to_device(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """`batch` with its tensors on `device`; others stay as they are.

    Goes through tuples, lists, dicts, named tuples and dataclasses registered with torch's
    pytree. What has a `to` method of its own (a PackedSequence, Hugging Face's BatchEncoding) is
    moved by it.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if _moves(leaf) else leaf

    return pytree.tree_map(move, batch, is_leaf=_moves)


def copied(batch: Any) -> Any:
    """`batch` with tensors of its own, so that changing one in place harms no other use."""
    return pytree.tree_map_only(Tensor, Tensor.clone, batch)


def _moves(value: Any) -> bool:
    return callable(getattr(value, "to", None))
