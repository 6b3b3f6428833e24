"""Clipping as Accelerate offers it, by norms and values of gradients that engines have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.bridging.trained_models import TrainedModels
from shardwise.errors import UsageError


class Clipping:
    """The calls of an Accelerator that look at gradients between backward and step."""

    _trained: TrainedModels
    _json: Any
    sync_gradients: bool
    device: torch.device

    @property
    def _trains_by_hand(self) -> bool:
        """Whether the script uses gradients itself: it has prepared no optimizer."""
        return not self._trained.has_optimizers and self._json is None

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing to do: the engine has the loss scale, and gives gradients without it."""

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip in the step to come by the norm of `parameters` over all workers; the norm before.

        The 2-norm of all that an engine trains takes one small collective. Other norms, and parts
        of the parameters, take the whole gradients for a moment. Collective. Raises UsageError
        between micro-batches, where a rank has a part of the gradient only; for parameters that
        need a gradient and have no optimizer; and for a `max_norm` that is not above 0.
        """
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._trains_by_hand:
            return nn.utils.clip_grad_norm_(several, max_norm, norm_type=norm_type)
        self._check_clipping("clip_grad_norm_", several)
        if not max_norm > 0:
            raise UsageError(
                f"accelerator.clip_grad_norm_(..., {max_norm}) takes a norm above 0. To step "
                "without clipping leave the call out; to update nothing leave the step out."
            )
        norm = self._trained.clip(several, float(max_norm)) if norm_type == 2 else None
        if norm is None:
            with self._trained.full_gradients(several):
                return nn.utils.clip_grad_norm_(several, max_norm, norm_type=norm_type)
        dtype = torch.promote_types(several[0].dtype, torch.float32)
        return torch.tensor(norm, device=self.device, dtype=dtype)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip every element of the gradients, which are whole for that moment. Collective."""
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._trains_by_hand:
            nn.utils.clip_grad_value_(several, clip_value)
            return
        self._check_clipping("clip_grad_value_", several)
        with self._trained.full_gradients(several):
            nn.utils.clip_grad_value_(several, clip_value)

    def _check_clipping(self, call: str, parameters: list[Tensor]) -> None:
        if not self.sync_gradients:
            raise UsageError(
                f"accelerator.{call} between micro-batches of a step would clip a part of the "
                "gradient, another one on each worker. Write before it: "
                "if accelerator.sync_gradients:"
            )
        self._trained.check_trained(parameters, f"accelerator.{call}")
