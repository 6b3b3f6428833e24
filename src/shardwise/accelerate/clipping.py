"""Implements Accelerate's methods that clip gradients by norm or value, on engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.bridging.trained_models import TrainedModels
from shardwise.errors import UsageError


class Clipping:
    """Mixin with the Accelerator methods that use gradients between backward and step."""

    _trained: TrainedModels
    _json: Any
    sync_gradients: bool
    device: torch.device

    @property
    def _trains_by_hand(self) -> bool:
        """True if the script has prepared no optimizer, so that it updates parameters itself."""
        return not self._trained.has_optimizers and self._json is None

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """No-op, because the engine divides gradients by the loss scale."""

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the next step by the gradient norm across all ranks. Collective.

        The 2-norm of all parameters of an engine requires one small collective. For other norms, or
        for a subset of an engine's parameters, the full gradients are gathered.

        Args:
            parameters: Prepared parameters.
            max_norm: Maximum norm, above 0.
            norm_type: Order of the norm.

        Returns:
            The norm before clipping: a scalar tensor on the device, in fp32 or wider.

        Raises:
            UsageError: If called between micro-batches, when gradients are incomplete; if a
                parameter has no optimizer; or if `max_norm` is 0 or less.

        Example:
            ```python
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ```
        """
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._trains_by_hand:
            return nn.utils.clip_grad_norm_(several, max_norm, norm_type=norm_type)
        self._check_clipping("clip_grad_norm_", several)
        if not max_norm > 0:
            raise UsageError(
                f"accelerator.clip_grad_norm_(..., {max_norm}) needs a norm above 0. To step "
                "without clipping, leave the call out. To skip the update, do not call step()."
            )
        norm = self._trained.clip(several, float(max_norm)) if norm_type == 2 else None
        if norm is None:
            with self._trained.full_gradients(several):
                return nn.utils.clip_grad_norm_(several, max_norm, norm_type=norm_type)
        dtype = torch.promote_types(several[0].dtype, torch.float32)
        return torch.tensor(norm, device=self.device, dtype=dtype)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip every gradient element to [-clip_value, clip_value]. Collective.

        The full gradients are gathered first. Raises UsageError in the same cases as
        `clip_grad_norm_`.
        """
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
                f"accelerator.{call} between micro-batches of a step would clip an incomplete "
                "gradient, which differs between workers. Call it only if "
                "accelerator.sync_gradients."
            )
        self._trained.check_trained(parameters, f"accelerator.{call}")
