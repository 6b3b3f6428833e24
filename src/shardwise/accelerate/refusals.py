"""Rejects Accelerate options that Shardwise does not support. Errors name an alternative."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import wraps
from typing import Any

from accelerate.local_sgd import LocalSGD
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs

from shardwise.errors import UsageError

_PLUGINS = {
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "torch's tensor parallelism",
    "parallelism_config": "Accelerate's own parallelism",
}

_VARIABLES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "Accelerate's own parallelism",
}

_INSTEAD = (
    "Leave it out. To shard, use --zero 0 to 3 of shardwise run, SHARDWISE_ZERO, or "
    "Accelerator(zero=3)."
)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise UsageError if the Accelerator arguments `given` request another engine.

    Variables that `accelerate launch` sets may request one too.
    """
    for name, what in _PLUGINS.items():
        if given.get(name) is not None:
            raise UsageError(f"Accelerator({name}=...) asks for {what}. {_INSTEAD}")
    for name, what in _VARIABLES.items():
        if os.environ.get(name, "false").lower() == "true":
            raise UsageError(
                f"{name} asks for {what}. `accelerate launch` sets it from its configuration. "
                f"{_INSTEAD} Start with `accelerate launch --multi_gpu script.py`, or with "
                "shardwise run."
            )
    if str(given.get("mixed_precision")) == "fp8":
        raise UsageError('mixed_precision="fp8" is not supported: write "bf16" or "no".')


def settings_of(handlers: list[Any] | None) -> dict[str, Any]:
    """Return the engine's settings for `kwargs_handlers`.

    Raises UsageError for options that Shardwise does not support.
    """
    settings: dict[str, Any] = {}
    for handler in handlers or []:
        if isinstance(handler, DistributedDataParallelKwargs):
            hook = getattr(handler.comm_hook, "value", handler.comm_hook)
            if hook != "no":
                raise UsageError(
                    f"DistributedDataParallelKwargs(comm_hook={hook!r}) is not supported: engines "
                    "do not compress gradients. Leave it out; 16-bit models can sum in their own "
                    "dtype with --reduce-dtype param."
                )
            if handler.bucket_cap_mb != 25:
                settings["bucket_mb"] = float(handler.bucket_cap_mb)
        if isinstance(handler, AutocastKwargs) and not handler.enabled:
            raise UsageError(
                "AutocastKwargs(enabled=False) would turn off autocast for the whole Accelerator: "
                'write mixed_precision="no" instead.'
            )
    return settings


def check_compiler(plugin: Any) -> None:
    """Raise UsageError for a compiler or mode that `--compile` does not support."""
    backend = getattr(plugin.backend, "value", plugin.backend)
    mode = getattr(plugin, "mode", None)
    if str(backend).upper() not in ("NO", "INDUCTOR") or mode not in (None, "default"):
        raise UsageError(
            f"dynamo_backend={str(backend).lower()!r}, mode={mode!r} is not supported: --compile "
            "calls torch.compile with its default options. Write "
            'dynamo_backend="inductor", or leave it out.'
        )


def refuse_local_steps(kind: type[Any]) -> None:
    """Make Accelerate's LocalSGD raise UsageError if its accelerator is of class `kind`."""
    # Otherwise LocalSGD would fail on a method that only DistributedDataParallel's wrapper has.
    stock: Any = LocalSGD.__init__
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def init(
        self: Any, accelerator: Any, model: Any, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if enabled and isinstance(accelerator, kind) and accelerator.use_distributed:
            raise UsageError(
                f"LocalSGD(local_sgd_steps={local_sgd_steps}) is not supported: the workers of "
                "this Accelerator step together, and each may hold only a part of the model. "
                "Leave it out, or write enabled=False. For local steps, write the loop with "
                f"sw.Engine and start it with --islands {accelerator.num_processes} --equal-every "
                f"{local_sgd_steps}."
            )
        stock(self, accelerator, model, local_sgd_steps, enabled)

    LocalSGD.__init__ = init
