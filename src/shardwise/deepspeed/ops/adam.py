"""Implements deepspeed.ops.adam: torch's Adam and AdamW under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import optim

from shardwise.errors import ConfigError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class _TorchAdamCheck(type):
    """Metaclass that makes `isinstance(optimizer, FusedAdam)` true for torch's Adam and AdamW."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) in (optim.Adam, optim.AdamW)


class FusedAdam(metaclass=_TorchAdamCheck):
    """torch's AdamW, or torch's Adam if `adam_w_mode` is False. Weight decay is off by default.

    The engine uses torch's fused kernels if the device supports them.

    Raises:
        ConfigError: If an option is not available in torch's optimizers.

    Example:
        ```python
        optimizer = FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        ```
    """

    def __new__(  # type: ignore[misc]
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> optim.Optimizer:
        """Return the optimizer for `params`."""
        del set_grad_none  # the engine clears gradients
        return _adam(params, lr, betas, eps, weight_decay, amsgrad, bias_correction, adam_w_mode)


class DeepSpeedCPUAdam(metaclass=_TorchAdamCheck):
    """torch's AdamW, or torch's Adam if `adamw_mode` is False. Weight decay is off by default.

    `--offload-optimizer` determines where its state is stored.

    Raises:
        ConfigError: If an option is not available in torch's optimizers.
    """

    def __new__(  # type: ignore[misc]
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> optim.Optimizer:
        """Return the optimizer for `model_params`."""
        if not fp32_optimizer_states:
            raise ConfigError(
                "fp32_optimizer_states=false is not supported, because optimizer state is fp32: "
                "leave it out."
            )
        return _adam(
            model_params, lr, betas, eps, weight_decay, amsgrad, bias_correction, adamw_mode
        )


def _adam(
    params: Any,
    lr: float,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    bias_correction: bool,
    decoupled: bool,
) -> optim.Optimizer:
    if not bias_correction:
        raise ConfigError(
            "bias_correction=false is not supported, because torch's Adam always corrects: leave "
            "it out."
        )
    kind = optim.AdamW if decoupled else optim.Adam
    first, second = betas
    return kind(
        params, lr=lr, betas=(first, second), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad
    )
