"""Guards `param.grad` between backward and step: any use of it raises.

Between the last backward pass of a step and `engine.step()`, a gradient is a weighted sum whose
collective may still be running. Reading it would give a meaningless value, and changing it
(clip_grad_norm_) would have no effect. Until the step, `param.grad` is therefore a tensor without
storage that raises on any use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.errors import BrokenView, GradientAccess


class GradientGuard(Tensor):
    """A tensor with a parameter's shape, dtype and device, but no storage. Any use raises."""

    @staticmethod
    def __new__(cls, like: Tensor) -> GradientGuard:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        if "_to_copy" in name:
            raise BrokenView(
                "The model was cast or moved between engine.backward and engine.step. "
                "Do it before sw.Engine(...); for lower precision use --precision."
            )
        raise GradientAccess(
            f"A gradient was accessed ({name}) between engine.backward and engine.step, while it "
            "belongs to the engine. Write engine.backward(loss) instead of loss.backward(), and "
            "engine.step(max_norm=1.0) instead of clip_grad_norm_ and optimizer.step(); the norm "
            "is in stats.grad_norm. To read or change gradients: with engine.full_gradients()."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the engine's until engine.step(), shape {tuple(self.shape)}>"
