"""Gives a module's outputs the dtypes that it computed them in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class OutputTypes:
    """Remembers in which dtypes a module computed its outputs, which the engine widens to fp32:
    scripts for DeepSpeed compute losses in them."""

    def __init__(self, module: nn.Module, *, restores: bool) -> None:
        self._restores = restores
        self._dtypes: list[torch.dtype | None] = []
        # Before the engine's own hook, which is registered later and widens.
        self._handle = module.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        leaves = pytree.tree_leaves(output)
        self._dtypes = [each.dtype if isinstance(each, Tensor) else None for each in leaves]

    def restored(self, output: Any) -> Any:
        """`output` in the dtypes that it was computed in."""
        if not self._restores:
            return output
        leaves, shape = pytree.tree_flatten(output)
        if len(leaves) != len(self._dtypes):
            return output
        found = [
            each.to(dtype) if dtype in (torch.bfloat16, torch.float16) else each
            for each, dtype in zip(leaves, self._dtypes, strict=True)
        ]
        return pytree.tree_unflatten(found, shape)

    def remove(self) -> None:
        """Look no more."""
        self._handle.remove()
