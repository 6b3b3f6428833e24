"""Refuses options of Accelerate that this engine does in another way, and says what to write."""

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
    "torch_tp_plugin": "tensor parallelism of torch",
    "parallelism_config": "a parallelism of its own",
}

_VARIABLES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism of its own",
}

_INSTEAD = (
    "Leave it out: shardwise.accelerate shards by itself, by --zero 0 to 3 of shardwise run, "
    "SHARDWISE_ZERO, or Accelerator(zero=3)."
)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise UsageError for another engine among the arguments of an Accelerator, or in what
    `accelerate launch` has set."""
    for name, what in _PLUGINS.items():
        if given.get(name) is not None:
            raise UsageError(f"Accelerator({name}=...) asks for {what}. {_INSTEAD}")
    for name, what in _VARIABLES.items():
        if os.environ.get(name, "false").lower() == "true":
            raise UsageError(
                f"{name} asks for {what}, as `accelerate launch` sets it from its configuration. "
                f"{_INSTEAD} Start with `accelerate launch --multi_gpu script.py`, or with "
                "shardwise run."
            )
    if str(given.get("mixed_precision")) == "fp8":
        raise UsageError('mixed_precision="fp8" is not there: write "bf16", or "no".')


def settings_of(handlers: list[Any] | None) -> dict[str, Any]:
    """Return the settings of an engine that `kwargs_handlers` ask for. Raises UsageError for
    options that an engine lacks."""
    found: dict[str, Any] = {}
    for handler in handlers or []:
        if isinstance(handler, DistributedDataParallelKwargs):
            hook = getattr(handler.comm_hook, "value", handler.comm_hook)
            if hook != "no":
                raise UsageError(
                    f"DistributedDataParallelKwargs(comm_hook={hook!r}): gradients are summed as "
                    "they are. 16-bit models may sum in their own dtype: --reduce-dtype param."
                )
            if handler.bucket_cap_mb != 25:
                found["bucket_mb"] = float(handler.bucket_cap_mb)
        if isinstance(handler, AutocastKwargs) and not handler.enabled:
            raise UsageError(
                'AutocastKwargs(enabled=False) for a whole Accelerator: write mixed_precision="no".'
            )
    return found


def check_compiler(plugin: Any) -> None:
    """Raise UsageError for another compiler than the one of units."""
    backend = getattr(plugin.backend, "value", plugin.backend)
    mode = getattr(plugin, "mode", None)
    if str(backend).upper() not in ("NO", "INDUCTOR") or mode not in (None, "default"):
        raise UsageError(
            f"dynamo_backend={str(backend).lower()!r}, mode={mode!r}: units are compiled by "
            'torch.compile as it is (--compile). Write dynamo_backend="inductor", or leave it out.'
        )


def refuse_local_steps(kind: type[Any]) -> None:
    """Make Accelerate's LocalSGD raise UsageError for an accelerator of `kind`. It would look for a
    method of DistributedDataParallel on a model that is not wrapped."""
    stock: Any = LocalSGD.__init__
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def made(
        self: Any, accelerator: Any, model: Any, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if enabled and isinstance(accelerator, kind) and accelerator.use_distributed:
            raise UsageError(
                f"LocalSGD(local_sgd_steps={local_sgd_steps}): the workers of this Accelerator "
                "step together, and each has a part of the model. Leave it out, or write "
                "enabled=False. For steps that workers make apart, write the loop with sw.Engine "
                f"and start it with --islands {accelerator.num_processes} --equal-every "
                f"{local_sgd_steps}."
            )
        stock(self, accelerator, model, local_sgd_steps, enabled)

    LocalSGD.__init__ = made
